#include "kernel_cases.h"

#ifdef SHARDD_CUDA
#include <math.h>
#include <string.h>

#include "ref/ref.h"

/* So many buffers are there; input j is the j / INPUTS-th stretch of one of them. */
#define INPUTS  17
#define STRETCH 8 /* elements: whole vectors of every type */

static const unsigned ks[] = { 1, 2, 3, 8, 16, 17, 64, 1024 };
#define N_KS (sizeof(ks) / sizeof(ks[0]))

/* What fits into the bed and into a minute. */
static bool fits(unsigned k, size_t n)
{
	return n <= (k <= 3 ? SIZE_MAX : k <= 17 ? 65537 : 4097);
}

struct inputs {
	const void *host[CUDA_MANY_INPUTS];
	uint64_t device[CUDA_MANY_INPUTS];
};

static void add_inputs(struct tester *t, struct inputs *in, unsigned k, enum dtype type, size_t n,
		       unsigned shift)
{
	struct bed *b = &t->bed;
	unsigned first = b->n_bufs, bufs = k < INPUTS ? k : INPUTS;

	for (unsigned j = 0; j < bufs; j++)
		bed_add(b, type, n + (size_t)(k / INPUTS) * STRETCH, shift, BED_ANY);
	for (unsigned j = 0; j < k; j++) {
		size_t bytes = (size_t)(j / INPUTS) * STRETCH * dtype_size(type);

		in->host[j] = (char *)bed_host(b, first + j % INPUTS) + bytes;
		in->device[j] = bed_device(b, first + j % INPUTS) + bytes;
	}
}

static const struct factors {
	float pre, post;
	bool accumulate;
} factor_sets[] = {
	{ 1, 1, false }, { 2, 4, true },     { 3, 0.7f, false }, { 1, 3, true },
	{ 8, 1, false }, { 1536, -2, true }, { 1, 1, true },     { 0x1p-127f, 0x1p127f, false },
};
#define N_FACTORS (sizeof(factor_sets) / sizeof(factor_sets[0]))

static struct cuda_factor factor(const struct k_factor *f)
{
	return (struct cuda_factor){ f->how, f->dtype, f->value };
}

/* All but the inputs. */
static struct cuda_reduce to_device(const struct k_reduce *a, uint64_t out, uint64_t n)
{
	return (struct cuda_reduce){ .out = out,
				     .n = n,
				     .k = a->k,
				     .in_dtype = a->in_dtype,
				     .out_dtype = a->out_dtype,
				     .sum_dtype = a->sum_dtype,
				     .pre = factor(&a->pre),
				     .post = factor(&a->post),
				     .accumulate = a->accumulate };
}

static void reduce_case(struct tester *t, enum dtype type, unsigned k, size_t n,
			const struct case_shift *s, const struct factors *f, bool many)
{
	static struct inputs in;
	static struct cuda_reduce_many c;
	struct bed *b = &t->bed;
	struct k_reduce a = { .in = in.host,
			      .k = k,
			      .in_dtype = type,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = k_divide_by(f->pre, DTYPE_FP32),
			      .post = k_divide_by(f->post, DTYPE_FP32),
			      .accumulate = f->accumulate };
	unsigned out;

	bed_begin(b);
	out = bed_add(b, DTYPE_FP32, n, s->out, BED_ANY);
	add_inputs(t, &in, k, type, n, s->in);
	bed_upload(b);
	a.out = bed_host(b, out);
	kernels_ref()->reduce(&a, 0, n);
	c.a = to_device(&a, bed_device(b, out), n);
	memcpy(many ? c.in : c.a.in, in.device, k * sizeof(uint64_t));
	device_launch(&t->device, many ? CUDA_FN_REDUCE_MANY : CUDA_FN_REDUCE, &c, n);
	tester_same(t, false, "%s, %u inputs, %zu elements, shifts %u %u, %a %a %d%s",
		    dtype_name(type), k, n, s->out, s->in, (double)f->pre, (double)f->post,
		    f->accumulate, many ? ", many" : "");
}

static void reduce_type(struct tester *t, enum dtype type, bool many)
{
	unsigned turn = 0;

	for (unsigned j = 0; j < N_KS; j++)
		for (unsigned i = 0; i < n_case_sizes; i++)
			for (unsigned s = 0; s < n_case_shifts; s++, turn++)
				if (fits(ks[j], case_sizes[i]) &&
				    (many || ks[j] <= CUDA_FEW_INPUTS))
					reduce_case(t, type, ks[j], case_sizes[i], &case_shifts[s],
						    &factor_sets[turn % N_FACTORS], many);
}

static void run_reduce(struct tester *t)
{
	for (unsigned type = DTYPE_FP32; type < _DTYPE_N; type++)
		reduce_type(t, type, false);
}

static void run_reduce_many(struct tester *t)
{
	for (unsigned type = DTYPE_FP32; type < _DTYPE_N; type++)
		reduce_type(t, type, true);
}

/* The forms of reduce for few inputs with every set of factors. */
static void run_reduce_factors(struct tester *t)
{
	for (unsigned type = DTYPE_FP32; type < _DTYPE_N; type++)
		for (unsigned k = 1; k <= 9; k++)
			for (unsigned f = 0; f < N_FACTORS; f++)
				for (unsigned s = 0; s < n_case_shifts; s++)
					reduce_case(t, type, k, 9001, &case_shifts[s],
						    &factor_sets[f], false);
}

static const struct k_factor rounding_factors[] = {
	{ K_FACTOR_NONE, DTYPE_NONE, 0 },   { K_FACTOR_DIV, DTYPE_BF16, 3 },
	{ K_FACTOR_MUL, DTYPE_FP32, 0.1f }, { K_FACTOR_DIV, DTYPE_FP16, 4 },
	{ K_FACTOR_MUL, DTYPE_FP16, 0.3f }, { K_FACTOR_DIV, DTYPE_FP32, 1.5f },
	{ K_FACTOR_MUL, DTYPE_BF16, 2 },
};
#define N_ROUNDING (sizeof(rounding_factors) / sizeof(rounding_factors[0]))

/* All of these types and factors may happen to be fp32. */
static enum cuda_fn round_fn(const struct k_reduce *a, bool many)
{
	if (k_reduce_rounds(a))
		return many ? CUDA_FN_REDUCE_ROUND_MANY : CUDA_FN_REDUCE_ROUND;
	return many ? CUDA_FN_REDUCE_MANY : CUDA_FN_REDUCE;
}

/* In place into the last input where the types allow it and @in_place. */
static void round_case(struct tester *t, struct k_reduce a, size_t n, const struct case_shift *s,
		       bool many, bool in_place)
{
	static struct inputs in;
	static struct cuda_reduce_many c;
	enum cuda_fn fn = round_fn(&a, many);
	struct bed *b = &t->bed;
	unsigned out;

	bed_begin(b);
	out = bed_add(b, a.out_dtype, n, s->out, BED_ANY);
	add_inputs(t, &in, a.k, a.in_dtype, n, s->in);
	if (in_place && a.in_dtype == a.out_dtype) {
		in.host[a.k - 1] = bed_host(b, out);
		in.device[a.k - 1] = bed_device(b, out);
	}
	bed_upload(b);
	a.in = in.host;
	a.out = bed_host(b, out);
	kernels_ref()->reduce(&a, 0, n);
	c.a = to_device(&a, bed_device(b, out), n);
	memcpy(many ? c.in : c.a.in, in.device, a.k * sizeof(uint64_t));
	device_launch(&t->device, fn, &c, n);
	tester_same(
		t, false,
		"%s in %s to %s, %u inputs, %zu elements, shifts %u %u, %d %d %a, %d %d %a, %d%s",
		dtype_name(a.in_dtype), dtype_name(a.sum_dtype), dtype_name(a.out_dtype), a.k, n,
		s->out, s->in, a.pre.how, a.pre.dtype, (double)a.pre.value, a.post.how,
		a.post.dtype, (double)a.post.value, a.accumulate, many ? ", many" : "");
}

/* All types of input, sum and output, with factors in turn. */
static void round_types(struct tester *t, unsigned k, size_t n, const struct case_shift *s,
			bool many)
{
	static unsigned turn;

	for (unsigned types = 0; types < 27; types++, turn++)
		round_case(t,
			   (struct k_reduce){ .k = k,
					      .in_dtype = 1 + types % 3,
					      .sum_dtype = 1 + types / 3 % 3,
					      .out_dtype = 1 + types / 9,
					      .pre = rounding_factors[turn % N_ROUNDING],
					      .post = rounding_factors[turn / 2 % N_ROUNDING],
					      .accumulate = turn / 3 % 2 },
			   n, s, many, turn % 2);
}

static void run_round(struct tester *t)
{
	static const size_t sizes[] = { 0, 1, 17, 4097 };

	for (unsigned i = 0; i < 4; i++)
		for (unsigned s = 0; s < n_case_shifts; s++)
			for (unsigned k = 1; k <= 16; k = k * 2 + 1)
				round_types(t, k, sizes[i], &case_shifts[s], false);
}

static void run_round_many(struct tester *t)
{
	for (unsigned s = 0; s < n_case_shifts; s++) {
		round_types(t, 17, 1001, &case_shifts[s], true);
		round_types(t, 100, 255, &case_shifts[s], true);
	}
}

/* @place: which input is the output; k: none. */
static void all_reduce_case(struct tester *t, enum dtype type, enum reduce_op op, unsigned k,
			    size_t n, const struct case_shift *s, unsigned place)
{
	static struct inputs in;
	static struct cuda_all_reduce_many c;
	struct bed *b = &t->bed;
	struct k_all_reduce a = { .in = in.host, .k = k, .dtype = type, .op = op };
	bool many = k > CUDA_FEW_INPUTS;
	unsigned out;

	bed_begin(b);
	out = bed_add(b, type, n, s->out, BED_ANY);
	add_inputs(t, &in, k, type, n, s->in);
	if (place < k) {
		in.host[place] = bed_host(b, out);
		in.device[place] = bed_device(b, out);
	}
	bed_upload(b);
	a.out = bed_host(b, out);
	kernels_ref()->all_reduce(&a, 0, n);
	c.a = (struct cuda_all_reduce){
		.out = bed_device(b, out), .n = n, .k = k, .dtype = type, .op = op
	};
	memcpy(many ? c.in : c.a.in, in.device, k * sizeof(uint64_t));
	device_launch(&t->device, many ? CUDA_FN_ALL_REDUCE_MANY : CUDA_FN_ALL_REDUCE, &c, n);
	tester_same(t, false, "op %d, %s, %u inputs, %zu elements, shifts %u %u, into %u", op,
		    dtype_name(type), k, n, s->out, s->in, place);
}

static void all_reduce_op(struct tester *t, enum reduce_op op)
{
	for (unsigned type = DTYPE_FP32; type < _DTYPE_N; type++)
		for (unsigned j = 0; j < N_KS; j++)
			for (unsigned i = 0; i < n_case_sizes; i++)
				for (unsigned s = 0; s < n_case_shifts; s++)
					if (fits(ks[j], case_sizes[i]))
						all_reduce_case(t, type, op, ks[j], case_sizes[i],
								&case_shifts[s],
								(i + s) % (ks[j] + 1));
}

static void run_sum(struct tester *t)
{
	all_reduce_op(t, REDUCE_SUM);
}

static void run_avg(struct tester *t)
{
	all_reduce_op(t, REDUCE_AVG);
}

static void run_max(struct tester *t)
{
	all_reduce_op(t, REDUCE_MAX);
}

static void run_min(struct tester *t)
{
	all_reduce_op(t, REDUCE_MIN);
}

/* p, g, m, v, vmax: one after the other; g has a shift of its own. */
static void add_state(struct tester *t, size_t n, const struct case_shift *s)
{
	bed_begin(&t->bed);
	bed_add(&t->bed, DTYPE_FP32, n, s->out, BED_ANY);
	bed_add(&t->bed, DTYPE_FP32, n, s->in, BED_ANY);
	bed_add(&t->bed, DTYPE_FP32, n, s->out, BED_ANY);
	bed_add(&t->bed, DTYPE_FP32, n, s->out, BED_NOT_NEG);
	bed_add(&t->bed, DTYPE_FP32, n, s->out, BED_NOT_NEG);
	bed_upload(&t->bed);
}

static const float w1s[] = { 0.1f, 0.7f, 0.5f, 0.001f };

static void adamw_case(struct tester *t, size_t n, const struct case_shift *s, float w1, float eps)
{
	struct bed *b = &t->bed;
	struct k_adamw a = { .decay = 0.9999f,
			     .w1 = w1,
			     .b2 = 0.999f,
			     .w2 = 0.001f,
			     .step_size = 0.01f,
			     .sq = 0.0316f,
			     .eps = eps };
	struct cuda_adamw c = { .n = n,
				.decay = a.decay,
				.w1 = a.w1,
				.b2 = a.b2,
				.w2 = a.w2,
				.step_size = a.step_size,
				.sq = a.sq,
				.eps = a.eps };

	add_state(t, n, s);
	a.p = bed_host(b, 0), a.g = bed_host(b, 1), a.m = bed_host(b, 2), a.v = bed_host(b, 3);
	c.p = bed_device(b, 0), c.g = bed_device(b, 1), c.m = bed_device(b, 2);
	c.v = bed_device(b, 3);
	kernels_ref()->adamw(&a, 0, n);
	device_launch(&t->device, CUDA_FN_ADAMW, &c, n);
	tester_same(t, false, "%zu elements, shifts %u %u, w1 %g", n, s->out, s->in, (double)w1);
}

static void run_adamw(struct tester *t)
{
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned s = 0; s < n_case_shifts; s++)
			for (unsigned w = 0; w < 4; w++)
				adamw_case(t, case_sizes[i], &case_shifts[s], w1s[w],
					   w % 2 ? 0 : 1e-8f);
}

static void adam_case(struct tester *t, size_t n, const struct case_shift *s, float w1, float wd)
{
	struct bed *b = &t->bed;
	struct k_adam a = { .wd = wd,
			    .w1 = w1,
			    .b2 = 0.95f,
			    .w2 = 0.05f,
			    .step_size = 0.01f,
			    .sq = 0.25f,
			    .eps = 1e-8f };
	struct cuda_adam c = { .n = n,
			       .wd = a.wd,
			       .w1 = a.w1,
			       .b2 = a.b2,
			       .w2 = a.w2,
			       .step_size = a.step_size,
			       .sq = a.sq,
			       .eps = a.eps };

	add_state(t, n, s);
	a.p = bed_host(b, 0), a.g = bed_host(b, 1), a.m = bed_host(b, 2), a.v = bed_host(b, 3);
	c.p = bed_device(b, 0), c.g = bed_device(b, 1), c.m = bed_device(b, 2);
	c.v = bed_device(b, 3);
	kernels_ref()->adam(&a, 0, n);
	device_launch(&t->device, CUDA_FN_ADAM, &c, n);
	tester_same(t, false, "%zu elements, shifts %u %u, w1 %g, wd %g", n, s->out, s->in,
		    (double)w1, (double)wd);
}

static void run_adam(struct tester *t)
{
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned s = 0; s < n_case_shifts; s++)
			for (unsigned w = 0; w < 4; w++)
				adam_case(t, case_sizes[i], &case_shifts[s], w1s[w],
					  w % 2 ? 0 : 0.01f);
}

/* Bits of @set: amsgrad, AdamW, maximize, a tail. */
/* ------------------------------------------ kernels that keep what they change */

/* Memory for them, of a group of cases. */
static struct cuda_undo undo;

static void undo_begin(struct tester *t)
{
	unsigned per_sm = 0, threads = cuda_fn_threads(CUDA_FN_ADAM_UNDO);
	unsigned char *zero;

	for (unsigned fn = CUDA_FN_ADAM_UNDO; fn <= CUDA_FN_SCALE_UNDO; fn++)
		if (t->device.per_sm[fn] > per_sm)
			per_sm = t->device.per_sm[fn];
	undo.room = t->device.sms * per_sm * threads;
	undo.launch = 0;
	undo.words = device_alloc(&t->device, (size_t)undo.room * CUDA_UNDO_BYTES);
	undo.old = undo.words + (uint64_t)undo.room * CUDA_UNDO_WORD;
	zero = calloc(undo.room, CUDA_UNDO_BYTES);
	if (!zero)
		abort();
	device_put(&t->device, undo.words, zero, (size_t)undo.room * CUDA_UNDO_BYTES);
	free(zero);
}

static void undo_end(struct tester *t)
{
	device_free(&t->device, undo.words);
}

/* The same on the same bytes, with a kernel that keeps what it changes; and once more with the number
 * of that launch, which then completes what is complete: nothing changes. */
static void undo_case(struct tester *t, enum cuda_fn fn, const void *args, size_t n, size_t given,
		      unsigned set)
{
	for (unsigned i = 0; i < 2; i++) {
		if (!i)
			device_put(&t->device, t->bed.device, t->bed.before, t->bed.used);
		device_launch(&t->device, fn, args, n);
		tester_same(t, false, "%zu elements, kept, launch %u, case %zu, set %u", n, i + 1,
			    given, set);
	}
}

static void adam_any_case(struct tester *t, size_t n, const struct case_shift *s, unsigned set)
{
	struct bed *b = &t->bed;
	struct cuda_adam_any c = { .n = n,
				   .tail_from = set & 8 ? n - n % 8 : UINT64_MAX,
				   .decay = 0.999f,
				   .wd = n % 2 ? 0.01f : 0,
				   .w1 = w1s[n % 4],
				   .b2 = 0.95f,
				   .w2 = 0.05f,
				   .step_size = 0.01f,
				   .sq = 0.25f,
				   .eps = 1e-8f,
				   .decoupled = (set & 2) != 0,
				   .maximize = (set & 4) != 0 };
	struct adam_step h = { .decoupled = set & 2,
			       .maximize = set & 4,
			       .decay = c.decay,
			       .wd = c.wd,
			       .w1 = c.w1,
			       .b2 = c.b2,
			       .w2 = c.w2,
			       .step_size = c.step_size,
			       .sq = c.sq,
			       .eps = c.eps,
			       .tail_from = c.tail_from };

	add_state(t, n, s);
	h.p = bed_host(b, 0), h.g = bed_host(b, 1), h.m = bed_host(b, 2), h.v = bed_host(b, 3);
	c.p = bed_device(b, 0), c.g = bed_device(b, 1), c.m = bed_device(b, 2);
	c.v = bed_device(b, 3);
	if (set & 1) {
		h.vmax = bed_host(b, 4);
		c.vmax = bed_device(b, 4);
	}
	ref_adam_step(&h, 0, n);
	device_launch(&t->device, CUDA_FN_ADAM_ANY, &c, n);
	tester_same(t, false, "%zu elements, shifts %u %u, set %u", n, s->out, s->in, set);
	undo.launch++;
	undo_case(t, CUDA_FN_ADAM_UNDO, &(struct cuda_adam_undo){ c, undo }, n, s->out, set);
}

static void adam_f64_case(struct tester *t, size_t n, const struct case_shift *s, unsigned set)
{
	struct bed *b = &t->bed;
	struct cuda_adam_f64 c = { .n = n,
				   .decay = 0.999,
				   .wd = n % 2 ? 0.01 : 0,
				   .w1 = set & 4 ? 0.7 : 1 - 0.9,
				   .b2 = 0.95,
				   .w2 = 1 - 0.95,
				   .step_size = 0.01,
				   .sq = 0.3,
				   .eps = 1e-8,
				   .decoupled = (set & 2) != 0,
				   .maximize = (set & 4) != 0 };
	const struct k_adam_f64 d = {
		c.decay, c.wd, 0.9, c.w1, c.b2, c.w2, c.step_size, c.sq, c.eps
	};
	struct adam_step h = { .decoupled = set & 2, .maximize = set & 4, .f64 = true, .d = &d };

	add_state(t, n, s);
	h.p = bed_host(b, 0), h.g = bed_host(b, 1), h.m = bed_host(b, 2), h.v = bed_host(b, 3);
	c.p = bed_device(b, 0), c.g = bed_device(b, 1), c.m = bed_device(b, 2);
	c.v = bed_device(b, 3);
	if (set & 1) {
		h.vmax = bed_host(b, 4);
		c.vmax = bed_device(b, 4);
	}
	ref_adam_step(&h, 0, n);
	device_launch(&t->device, CUDA_FN_ADAM_F64, &c, n);
	tester_same(t, false, "%zu elements, shifts %u %u, set %u", n, s->out, s->in, set);
	undo.launch++;
	undo_case(t, CUDA_FN_ADAM_F64_UNDO, &(struct cuda_adam_f64_undo){ c, undo }, n, s->out,
		  set);
}

static void run_adam_any(struct tester *t)
{
	undo_begin(t);
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned s = 0; s < n_case_shifts; s++)
			for (unsigned set = 0; set < 16; set++)
				if (case_sizes[i] <= 4097 || set % 5 == 0)
					adam_any_case(t, case_sizes[i], &case_shifts[s], set);
	undo_end(t);
}

static void run_adam_f64(struct tester *t)
{
	undo_begin(t);
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned s = 0; s < n_case_shifts; s++)
			for (unsigned set = 0; set < 8; set++)
				if (case_sizes[i] <= 4097 || set % 3 == 0)
					adam_f64_case(t, case_sizes[i], &case_shifts[s], set);
	undo_end(t);
}

/* All combinations of the five switches, by the bits of @set. */
static void sgd_case(struct tester *t, size_t n, const struct case_shift *s, unsigned set)
{
	struct bed *b = &t->bed;
	struct k_sgd a = { .lr = 0.1f,
			   .wd = set & 1 ? 0.01f : 0,
			   .mu = set & 2 ? 0.9f : 0,
			   .nesterov = set & 4,
			   .first = set & 8,
			   .maximize = n % 2,
			   .dampening = s->in ? 0.25 : 0,
			   .profile = s->out ? K_FUSED : K_EAGER_SINGLE,
			   .tail_from = n - n % 8 };
	struct cuda_sgd c = { .n = n,
			      .tail_from = s->out ? a.tail_from : UINT64_MAX,
			      .lr = a.lr,
			      .wd = a.wd,
			      .mu = a.mu,
			      .w = s->in ? 0.75f : 1,
			      .nesterov = a.nesterov,
			      .first = a.first,
			      .maximize = a.maximize };

	add_state(t, n, s);
	a.p = bed_host(b, 0), a.g = bed_host(b, 1);
	c.p = bed_device(b, 0), c.g = bed_device(b, 1);
	if (a.mu != 0) {
		a.buf = bed_host(b, 2);
		c.buf = bed_device(b, 2);
	}
	kernels_ref()->sgd(&a, 0, n);
	device_launch(&t->device, CUDA_FN_SGD, &c, n);
	tester_same(t, false, "%zu elements, shifts %u %u, set %u", n, s->out, s->in, set);
	undo.launch++;
	undo_case(t, CUDA_FN_SGD_UNDO, &(struct cuda_sgd_undo){ c, undo }, n, s->out, set);
}

static void run_sgd(struct tester *t)
{
	undo_begin(t);
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned s = 0; s < n_case_shifts; s++)
			for (unsigned set = 0; set < 16; set++)
				if (case_sizes[i] <= 4097 || set % 5 == 0)
					sgd_case(t, case_sizes[i], &case_shifts[s], set);
	undo_end(t);
}

static void run_scale(struct tester *t)
{
	static const float factors[] = { 0.37f, -2, 0x1p-140f, NAN };
	struct bed *b = &t->bed;
	struct cuda_scale c;

	undo_begin(t);
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned j = 0; j < 4; j++) {
			size_t n = case_sizes[i];

			bed_begin(b);
			bed_add(b, DTYPE_FP32, n, j, BED_ANY);
			bed_upload(b);
			kernels_ref()->scale(&(struct k_scale){ bed_host(b, 0), factors[j], NULL },
					     0, n);
			c = (struct cuda_scale){ .x = bed_device(b, 0),
						 .n = n,
						 .factor = factors[j] };
			device_launch(&t->device, CUDA_FN_SCALE, &c, n);
			tester_same(t, false, "%zu elements, shift %u", n, j);
			undo.launch++;
			undo_case(t, CUDA_FN_SCALE_UNDO, &(struct cuda_scale_undo){ c, undo }, n, j,
				  0);
		}
	undo_end(t);
}

/* What the host makes of partials, in their order. */
static double fold_norm(const double *partial, size_t n, bool inf)
{
	double t = 0;

	for (size_t i = 0; i < n; i++)
		t = !inf                                         ? t + partial[i]
		    : partial[i] > t || partial[i] != partial[i] ? partial[i]
								 : t;
	return t;
}

/* See norm.cu: additions that a term goes through on either side. */
static double norm_bound(size_t n, size_t blocks)
{
	return ((double)n / (1024.0 * (double)blocks) + 17 + (double)blocks + 8200 +
		(double)n / KERNEL_NORM_BLOCK) *
	       0x1p-53;
}

static double norm_of_ref(struct tester *t, size_t n, double p)
{
	double partial[32] = { 0 };
	struct k_norm a = { bed_host(&t->bed, 0), partial, p };

	kernels_ref()->norm(&a, 0, n);
	return fold_norm(partial, (n + KERNEL_NORM_BLOCK - 1) / KERNEL_NORM_BLOCK, isinf(p));
}

static enum cuda_fn norm_fn(double p)
{
	return p == 2 || isinf(p) ? CUDA_FN_NORM : CUDA_FN_NORM_POWER;
}

static double device_norm(struct tester *t, size_t n, double p, unsigned blocks)
{
	struct bed *b = &t->bed;
	struct cuda_norm a = { bed_device(b, 0), n, bed_device(b, 1), isinf(p) != 0, 0 };
	struct cuda_norm_power power = { a.x, n, a.partial, p };
	enum cuda_fn fn = norm_fn(p);

	device_launch(&t->device, fn, fn == CUDA_FN_NORM ? (void *)&a : &power, n);
	bed_fetch(b);
	return fold_norm((const double *)(const void *)(b->got + b->bufs[1].at), blocks, isinf(p));
}

/* Nothing but the partials may have changed. */
static bool only_partials(const struct tester *t, unsigned blocks)
{
	const struct bed *b = &t->bed;
	size_t end = b->bufs[1].at + blocks * sizeof(double);

	return memcmp(b->got, b->before, b->bufs[1].at) == 0 &&
	       memcmp(b->got + end, b->before + end, b->used - end) == 0;
}

static void norm_case(struct tester *t, size_t n, unsigned shift, double p, enum bed_data data)
{
	unsigned blocks = device_blocks(&t->device, norm_fn(p), n);
	double want, got, again;
	bool ok;

	bed_begin(&t->bed);
	bed_add(&t->bed, DTYPE_FP32, n, shift, data);
	bed_add(&t->bed, DTYPE_FP32, 2 * CUDA_NORM_PARTIALS, 0, BED_FINITE);
	bed_upload(&t->bed);
	want = norm_of_ref(t, n, p);
	got = device_norm(t, n, p, blocks);
	ok = only_partials(t, blocks);
	again = device_norm(t, n, p, blocks);
	ok = ok && (memcmp(&got, &again, sizeof(got)) == 0 || got != got);
	if (want != want || isinf(want) || isinf(p))
		ok = ok && (got == want || (got != got && want != want));
	else
		ok = ok && fabs(got - want) <= (norm_bound(n, blocks) + 0x1p-50) * want;
	tester_case(t, ok, "%zu elements, shift %u, p %g, data %d: %a and again %a, not %a", n,
		    shift, p, data, got, again, want);
}

static void run_norm(struct tester *t)
{
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned shift = 0; shift < 4; shift++) {
			norm_case(t, case_sizes[i], shift, 2, BED_FINITE);
			norm_case(t, case_sizes[i], shift, 2, BED_ANY);
		}
}

static void run_norm_inf(struct tester *t)
{
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned shift = 0; shift < 4; shift++) {
			norm_case(t, case_sizes[i], shift, INFINITY, BED_FINITE);
			norm_case(t, case_sizes[i], shift, INFINITY, BED_ANY);
		}
}

static void run_norm_power(struct tester *t)
{
	static const double powers[] = { 1, 3, 0.5, 1.7 };

	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned shift = 0; shift < 4; shift++) {
			norm_case(t, case_sizes[i], shift, powers[(i + shift) % 4], BED_FINITE);
			norm_case(t, case_sizes[i], shift, powers[(i + shift) % 4], BED_ANY);
		}
}

static void clamp_case(struct tester *t, size_t n, unsigned shift, float lo, float hi)
{
	struct bed *b = &t->bed;
	struct k_clamp a = { .lo = lo, .hi = hi };
	struct cuda_clamp c = { .n = n, .lo = lo, .hi = hi };

	bed_begin(b);
	bed_add(b, DTYPE_FP32, n, shift, BED_ANY);
	bed_upload(b);
	a.x = bed_host(b, 0);
	c.x = bed_device(b, 0);
	kernels_ref()->clamp(&a, 0, n);
	device_launch(&t->device, CUDA_FN_CLAMP, &c, n);
	tester_same(t, false, "%zu elements, shift %u, %a to %a", n, shift, (double)lo, (double)hi);
}

static void run_clamp(struct tester *t)
{
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned shift = 0; shift < 4; shift++) {
			clamp_case(t, case_sizes[i], shift, -0.5f, 0.5f);
			clamp_case(t, case_sizes[i], shift, 0, INFINITY);
			clamp_case(t, case_sizes[i], shift, 1, -1);
		}
}

static void unscale_case(struct tester *t, size_t n, unsigned shift, float inv, enum bed_data data)
{
	struct bed *b = &t->bed;
	struct k_unscale a = { .inv = inv };
	struct cuda_unscale c = { .n = n, .inv = inv };

	bed_begin(b);
	bed_add(b, DTYPE_FP32, n, shift, data);
	bed_add(b, DTYPE_FP32, 1, 0, BED_FINITE);
	bed_upload(b);
	a.x = bed_host(b, 0), a.found = bed_host(b, 1);
	c.x = bed_device(b, 0), c.found = bed_device(b, 1);
	kernels_ref()->unscale(&a, 0, n);
	device_launch(&t->device, CUDA_FN_UNSCALE, &c, n);
	tester_same(t, false, "%zu elements, shift %u, by %a", n, shift, (double)inv);
}

static void run_unscale(struct tester *t)
{
	for (unsigned i = 0; i < n_case_sizes; i++)
		for (unsigned shift = 0; shift < 4; shift++) {
			unscale_case(t, case_sizes[i], shift, 0x1p-16f, BED_ANY);
			unscale_case(t, case_sizes[i], shift, 0.3f, BED_FINITE);
			unscale_case(t, case_sizes[i], shift, 1, BED_ANY);
		}
}

/* Row numbers of a table of 10 in a buffer of fp32: rows 2 to 6 are here; twice, out of
 * order, of other parts, negative. */
static void put_rows(void *at, size_t n)
{
	for (size_t e = 0; e < n; e++) {
		int64_t row = e % 5 == 4 ? -(int64_t)e : (int64_t)(e * 7 % 10);

		memcpy((char *)at + e * 8, &row, 8);
	}
}

static void add_rows_case(struct tester *t, size_t columns, size_t entries, enum dtype type,
			  const struct k_factor *pre)
{
	struct bed *b = &t->bed;
	struct k_add_rows a = { .row_elements = columns,
				.n_rows = entries,
				.dtype = type,
				.pre = *pre,
				.first_row = 2,
				.row_limit = 7 };
	struct cuda_add_rows c = { .n = columns,
				   .n_rows = entries,
				   .first_row = 2,
				   .row_limit = 7,
				   .pre = factor(pre),
				   .dtype = type };

	bed_begin(b);
	bed_add(b, DTYPE_FP32, 5 * columns, 1, BED_ANY);
	bed_add(b, type, entries * columns, 1, BED_ANY);
	bed_add(b, DTYPE_FP32, 2 * entries, 0, BED_ANY);
	put_rows(bed_host(b, 2), entries);
	bed_upload(b);
	a.out = bed_host(b, 0), a.values = bed_host(b, 1), a.rows = bed_host(b, 2);
	c.out = bed_device(b, 0), c.values = bed_device(b, 1), c.rows = bed_device(b, 2);
	kernels_ref()->add_rows(&a, 0, columns);
	device_launch(&t->device, CUDA_FN_ADD_ROWS, &c, columns);
	tester_same(t, false, "%zu columns, %zu entries, %s, factor %d", columns, entries,
		    dtype_name(type), pre->how);
}

static void run_add_rows(struct tester *t)
{
	static const size_t columns[] = { 1, 17, 256, 1001 }, entries[] = { 0, 1, 8, 29 };

	for (unsigned i = 0; i < 4; i++)
		for (unsigned j = 0; j < 4; j++)
			for (unsigned type = DTYPE_FP32; type < _DTYPE_N; type++)
				for (unsigned f = 0; f < N_ROUNDING; f++)
					add_rows_case(t, columns[i], entries[j], type,
						      &rounding_factors[f]);
}

/* At least as long as asked for; not at all where it need not say. */
static void run_spin(struct tester *t)
{
	static const uint64_t times[] = { 0, 1000, 2000000 };
	struct bed *b = &t->bed;
	uint64_t ran;

	for (unsigned i = 0; i < 3; i++) {
		bed_begin(b);
		bed_add(b, DTYPE_FP32, 2, 0, BED_FINITE);
		bed_upload(b);
		device_launch(&t->device, CUDA_FN_SPIN,
			      &(struct cuda_spin){ times[i], bed_device(b, 0) }, 1);
		bed_fetch(b);
		memcpy(&ran, b->got + b->bufs[0].at, sizeof(ran));
		tester_case(t, ran >= times[i] && ran < times[i] + 1000000000, "%llu ns, not %llu",
			    (unsigned long long)ran, (unsigned long long)times[i]);
		device_launch(&t->device, CUDA_FN_SPIN, &(struct cuda_spin){ times[i], 0 }, 1);
		device_wait(&t->device);
	}
}

const struct group groups_math[] = {
	{ "reduce", run_reduce },
	{ "reduce, factors", run_reduce_factors },
	{ "reduce_many", run_reduce_many },
	{ "reduce_round", run_round },
	{ "reduce_round_many", run_round_many },
	{ "all_reduce, sum", run_sum },
	{ "all_reduce, average", run_avg },
	{ "all_reduce, maximum", run_max },
	{ "all_reduce, minimum", run_min },
	{ "adamw", run_adamw },
	{ "adam", run_adam },
	{ "adam_any", run_adam_any },
	{ "adam_f64", run_adam_f64 },
	{ "sgd", run_sgd },
	{ "scale", run_scale },
	{ "norm", run_norm },
	{ "norm, maximum", run_norm_inf },
	{ "norm_power", run_norm_power },
	{ "clamp", run_clamp },
	{ "unscale", run_unscale },
	{ "add_rows", run_add_rows },
	{ "spin", run_spin },
};
const unsigned n_groups_math = sizeof(groups_math) / sizeof(groups_math[0]);
#else
typedef int kernel_cases_math_not_empty;
#endif
