/*
 * Every variant of kernels/host that runs here against kernels/ref, bit for bit,
 * on odd ranges of unaligned buffers with special values in them.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "convert.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "kernels.h"

#define N_BUFS 7

/* Buffers 0 to N_BUFS-1, of @n elements of at most four bytes, at addresses that
 * are multiples of four and no more. */
struct bed {
	char *memory;
	size_t n;
	double partial[8];
};

struct op_case {
	const char *name;
	void (*run)(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		    size_t end);
	enum dtype in, out;
	unsigned k;
	int op; /* enum reduce_op or fill_kind */
	float x, y, z;
	bool flag, flag2;
};

/* ref is the first: the loops that compare with it leave it out. */
static const char *const variants[] = { "ref", "portable", "avx2", "avx512" };

static const uint32_t specials[] = {
	0x00000000, 0x80000000, 0x7f800000, 0xff800000, /* zeros, infinities */
	0x7fc00000, 0xffc00001, 0x7f800001, 0x7fbfffff, /* NaN, quiet and signalling */
	0x00000001, 0x80000001, 0x007fffff, 0x00400000, /* subnormal in fp32 and bf16 */
	0x00800000, 0x7f7fffff, 0xff7fffff, 0x7f7f8000, /* smallest, largest, bf16's tie */
	0x477fefff, 0x477ff000, 0xc77ff000, 0x477fe000, /* around fp16's largest */
	0x33000000, 0x33000001, 0x33800000, 0xb3c00000, /* around fp16's smallest */
	0x387fffff, 0x38800000, 0x387fe000, 0x387ff000, /* fp16: last subnormal, first normal */
	0x3f808000, 0x3f818000, 0x3f801000, 0x3f803000, /* ties of bf16 and of fp16 */
};

static uint64_t random_next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state >> 16;
}

/* Mostly plain numbers in (-4, 4); some special, some of any bits. */
static uint32_t random_f32(uint64_t *state)
{
	uint64_t r = random_next(state);

	if (r % 16 == 0)
		return specials[(r >> 4) % ARRAY_SIZE(specials)];
	if (r % 16 == 1)
		return (uint32_t)(r >> 8);
	return f32_bits((float)((double)(r >> 8 & 0xffffff) * 0x1p-21 - 4));
}

static size_t buf_bytes(const struct bed *b)
{
	return b->n * 4 + 4; /* the addition keeps the next one unaligned */
}

static void *buf(const struct bed *b, unsigned i)
{
	return b->memory + 4 + i * buf_bytes(b);
}

static size_t bed_bytes(const struct bed *b)
{
	return 4 + N_BUFS * buf_bytes(b);
}

/* Buffer 3 has no negative numbers: it is AdamW's v. */
static void fill_buf(const struct bed *b, unsigned i, enum dtype t, uint64_t *state)
{
	for (size_t e = 0; e < b->n; e++) {
		uint32_t u = random_f32(state) & (i == 3 ? FP32_ABS : UINT32_MAX);

		if (t == DTYPE_FP32)
			((uint32_t *)buf(b, i))[e] = u;
		else if (t == DTYPE_BF16)
			((uint16_t *)buf(b, i))[e] = (uint16_t)(u >> 16);
		else
			((uint16_t *)buf(b, i))[e] =
				u % 8 ? fp16_from_f32(f32_from_bits(u)) : (uint16_t)(u >> 3);
	}
}

/* Buffer 0 is of the output's type, the others of the inputs'. */
static void bed_init(struct bed *b, const struct op_case *c, size_t n)
{
	uint64_t state = 88172645463325252u + n;

	*b = (struct bed){ .n = n };
	b->memory = calloc(1, bed_bytes(b));
	cr_assert_not_null(b->memory);
	fill_buf(b, 0, c->out, &state);
	for (unsigned i = 1; i < N_BUFS; i++)
		fill_buf(b, i, c->in, &state);
}

static void bed_copy(struct bed *to, const struct bed *from)
{
	*to = *from;
	to->memory = malloc(bed_bytes(from));
	cr_assert_not_null(to->memory);
	memcpy(to->memory, from->memory, bed_bytes(from));
}

static void bed_deinit(struct bed *b)
{
	free(b->memory);
	b->memory = NULL;
}

static bool same_element(const struct bed *x, const struct bed *y, unsigned i, enum dtype t,
			 size_t e)
{
	uint16_t hx, hy;
	float fx, fy;

	if (t == DTYPE_FP32) {
		fx = ((float *)buf(x, i))[e];
		fy = ((float *)buf(y, i))[e];
		return f32_bits(fx) == f32_bits(fy) || (fx != fx && fy != fy);
	}
	hx = ((uint16_t *)buf(x, i))[e];
	hy = ((uint16_t *)buf(y, i))[e];
	fx = t == DTYPE_BF16 ? bf16_to_f32(hx) : fp16_to_f32(hx);
	fy = t == DTYPE_BF16 ? bf16_to_f32(hy) : fp16_to_f32(hy);
	return hx == hy || (fx != fx && fy != fy);
}

static void expect_same(const struct bed *x, const struct bed *y, const struct op_case *c,
			const char *what)
{
	for (unsigned i = 0; i < N_BUFS; i++)
		for (size_t e = 0; e < x->n; e++)
			cr_assert(same_element(x, y, i, i ? c->in : c->out, e),
				  "%s, %s: buffer %u differs at %zu of %zu", what, c->name, i, e,
				  x->n);
	for (size_t i = 0; i < ARRAY_SIZE(x->partial); i++)
		cr_assert(memcmp(&x->partial[i], &y->partial[i], 8) == 0 ||
				  (x->partial[i] != x->partial[i] &&
				   y->partial[i] != y->partial[i]),
			  "%s, %s: partial %zu differs", what, c->name, i);
}

/* z: past the caches. */
static void run_cast(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		     size_t end)
{
	struct k_cast a = { buf(b, 0), buf(b, 1), c->out, c->in, c->z != 0 };

	k->cast(&a, begin, end);
}

#define F32  DTYPE_FP32
#define BF16 DTYPE_BF16
#define FP16 DTYPE_FP16
#define NONE K_FACTOR_NONE
#define DIV  K_FACTOR_DIV
#define MUL  K_FACTOR_MUL

/* How a reduction rounds, by the case's op. */
static const struct rounding {
	enum dtype sum;
	enum k_factor_how pre_how;
	enum dtype pre;
	enum k_factor_how post_how;
	enum dtype post;
} roundings[] = {
	{ F32, DIV, F32, DIV, F32 },    { BF16, DIV, BF16, DIV, BF16 },
	{ FP16, DIV, FP16, DIV, FP16 }, { F32, DIV, BF16, NONE, F32 },
	{ FP16, MUL, F32, NONE, F32 },  { BF16, NONE, F32, MUL, F32 },
	{ BF16, MUL, FP16, DIV, F32 },  { F32, MUL, F32, MUL, FP16 },
	{ F32, NONE, F32, NONE, F32 },  { FP16, NONE, BF16, MUL, BF16 },
};

/* flag2: in place into the second input; z: past the caches. */
static void run_reduce(const struct kernels *k, const struct op_case *c, struct bed *b,
		       size_t begin, size_t end)
{
	const struct rounding *r = &roundings[c->op];
	const void *in[N_BUFS - 1];
	struct k_reduce a = { .out = buf(b, c->flag2 ? 2 : 0),
			      .in = in,
			      .k = c->k,
			      .in_dtype = c->in,
			      .out_dtype = c->out,
			      .sum_dtype = r->sum,
			      .pre = { r->pre_how, r->pre, c->x },
			      .post = { r->post_how, r->post, c->y },
			      .accumulate = c->flag,
			      .stream = c->z != 0 };

	for (unsigned i = 0; i < N_BUFS - 1; i++)
		in[i] = buf(b, i + 1);
	k->reduce(&a, begin, end);
}

/* In place into the second input if flag. */
static void run_all_reduce(const struct kernels *k, const struct op_case *c, struct bed *b,
			   size_t begin, size_t end)
{
	const void *in[N_BUFS - 1];
	struct k_all_reduce a = { .out = buf(b, c->flag ? 2 : 0),
				  .in = in,
				  .k = c->k,
				  .dtype = c->in,
				  .op = (enum reduce_op)c->op };

	for (unsigned i = 0; i < N_BUFS - 1; i++)
		in[i] = buf(b, i + 1);
	k->all_reduce(&a, begin, end);
}

static const struct k_adam_f64 adam_f64 = { 0.999,     0.01, 0.9,    1 - 0.9, 0.999,
					    1 - 0.999, 0.01, 0.0316, 1e-8 };

/* op: the profile. flag: amsgrad; flag2: maximize. A tail of three elements. */
static void run_adamw(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		      size_t end)
{
	struct k_adamw a = { .p = buf(b, 0),
			     .g = buf(b, 1),
			     .m = buf(b, 2),
			     .v = buf(b, 3),
			     .vmax = c->flag ? buf(b, 4) : NULL,
			     .decay = c->y,
			     .w1 = c->x,
			     .b1 = 1 - c->x,
			     .b2 = 0.999f,
			     .w2 = 0.001f,
			     .step_size = 0.01f,
			     .sq = 0.0316f,
			     .eps = c->z,
			     .profile = (enum k_profile)c->op,
			     .maximize = c->flag2,
			     .tail_from = b->n < 3 ? 0 : b->n - 3,
			     .f64 = adam_f64 };

	k->adamw(&a, begin, end);
}

static void run_adam(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		     size_t end)
{
	struct k_adam a = { .p = buf(b, 0),
			    .g = buf(b, 1),
			    .m = buf(b, 2),
			    .v = buf(b, 3),
			    .vmax = c->flag ? buf(b, 4) : NULL,
			    .wd = c->y,
			    .w1 = c->x,
			    .b2 = 0.999f,
			    .w2 = 0.001f,
			    .step_size = 0.01f,
			    .sq = 0.0316f,
			    .eps = c->z,
			    .profile = (enum k_profile)c->op,
			    .maximize = c->flag2,
			    .tail_from = b->n / 2,
			    .f64 = adam_f64 };

	a.f64.wd = (double)c->y;
	k->adam(&a, begin, end);
}

static void run_sgd(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		    size_t end)
{
	struct k_sgd a = { .p = buf(b, 0),
			   .g = buf(b, 1),
			   .buf = c->y != 0 ? buf(b, 2) : NULL,
			   .lr = 0.1f,
			   .wd = c->x,
			   .mu = c->y,
			   .nesterov = c->flag,
			   .first = c->flag2,
			   .maximize = c->z != 0,
			   .dampening = (double)c->z,
			   .profile = (enum k_profile)c->op,
			   .tail_from = b->n / 2 };

	k->sgd(&a, begin, end);
}

/* Numbers of many sizes, so that the order of a sum shows in its last bits. */
static void spread(uint32_t *x, size_t n)
{
	for (size_t e = 0; e < n; e++)
		x[e] = (x[e] & 0x807fffff) | (uint32_t)(110 + e * 37 % 29) << 23;
}

/* Ranges of whole blocks: the begin goes down to one. flag2: only numbers. x: the power. */
static void run_norm(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		     size_t end)
{
	struct k_norm a = { buf(b, 1), b->partial, (double)c->x };

	if (c->flag2)
		spread(buf(b, 1), b->n);
	k->norm(&a, begin / KERNEL_NORM_BLOCK * KERNEL_NORM_BLOCK, end);
}

static void run_scale(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		      size_t end)
{
	struct k_scale a = { buf(b, 0), c->x, NULL };

	k->scale(&a, begin, end);
}

static void run_clamp(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		      size_t end)
{
	struct k_clamp a = { buf(b, 0), c->x, c->y };

	k->clamp(&a, begin, end);
}

/* The answer in partial[0]. flag: only numbers. */
static void run_unscale(const struct kernels *k, const struct op_case *c, struct bed *b,
			size_t begin, size_t end)
{
	struct k_unscale a = { buf(b, 0), c->x, (float *)(void *)b->partial };

	for (size_t e = begin; c->flag && e < end; e++)
		((uint32_t *)buf(b, 0))[e] &= 0xbfffffff;
	k->unscale(&a, begin, end);
}

/* Rows of a fifth of the elements; one is of another part, one comes twice. */
static void run_add_rows(const struct kernels *k, const struct op_case *c, struct bed *b,
			 size_t begin, size_t end)
{
	static const int64_t rows[5] = { 12, 10, 7, 12, -1 };
	static const enum dtype types[] = { F32, BF16, FP16 };
	size_t columns = b->n / 5;
	struct k_add_rows a = { .out = buf(b, 0),
				.row_elements = columns,
				.rows = rows,
				.n_rows = 5,
				.values = buf(b, 1),
				.dtype = c->in,
				.pre = { c->x != 0 ? DIV : NONE, types[c->op], c->x },
				.first_row = 9,
				.row_limit = 14 };

	k->add_rows(&a, begin < columns ? begin : columns, end < columns ? end : columns);
}

/* The answer in partial[0]. flag: the range's last element is the only one that is not
 * finite; flag2: none is. */
static void run_found_inf(const struct kernels *k, const struct op_case *c, struct bed *b,
			  size_t begin, size_t end)
{
	bool wide = c->in == DTYPE_FP32;
	uint32_t inf = wide ? 0xff800000u : c->in == DTYPE_BF16 ? 0x7f80 : 0xfc00;
	struct k_found_inf a = { buf(b, 1), (float *)(void *)b->partial, c->in };

	for (size_t e = 0; (c->flag || c->flag2) && e < b->n; e++) {
		bool last = c->flag && e + 1 == end;

		if (wide)
			((uint32_t *)buf(b, 1))[e] = last ? inf : 0x7f7fffff;
		else
			((uint16_t *)buf(b, 1))[e] = (uint16_t)(last ? inf : inf - 1);
	}
	k->found_inf(&a, begin, end);
}

/* Rows of k elements, 3 elements apart in the output (flag), the input (flag2). */
static void run_pack(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		     size_t end)
{
	uint64_t apart = c->k + 3;
	struct k_pack a = { .dst = buf(b, 0),
			    .src = buf(b, 1),
			    .row_elements = c->k,
			    .dst_stride = c->flag ? apart : c->k,
			    .src_stride = c->flag2 ? apart : c->k,
			    .dst_dtype = c->out,
			    .src_dtype = c->in };
	size_t n = b->n / apart * c->k;

	k->pack(&a, begin < n ? begin : n, end < n ? end : n);
}

static void run_fill(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		     size_t end)
{
	struct k_fill a = { .dst = buf(b, 0),
			    .seed = 1234567890123456789u,
			    .stream = c->k,
			    .first = c->flag ? 0x3fffffffdu : 0,
			    .kind = (enum fill_kind)c->op,
			    .a = (double)c->x,
			    .b = (double)c->y };

	k->fill(&a, begin, end);
}

static void run_copy(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		     size_t end)
{
	struct k_copy a = { buf(b, 0), buf(b, 1) };

	(void)c;
	k->copy(&a, begin, end);
}

/* Elements of the reduction before the step's first. */
#define FIRST 5u

enum { STEP_SGD, STEP_ADAMW, STEP_ADAM };

/* The optimizer that x says; its tail is the second half. Its arrays are the buffers 0, 2 and
 * 3, and with flag2 1. */
static struct k_step step_of(const struct op_case *c, const struct bed *b)
{
	struct k_step s = { .kind = K_STEP_SGD };
	float *p = buf(b, 0), *m = buf(b, 2), *v = buf(b, 3), *vmax = c->flag2 ? buf(b, 1) : NULL;
	uint64_t tail = b->n / 2;

	if (c->x == STEP_SGD) {
		s.sgd = (struct k_sgd){
			.p = p, .buf = m, .lr = 0.1f, .wd = 0.01f, .mu = 0.9f, .tail_from = tail
		};
		s.sgd.dampening = 0.3;
		s.sgd.profile = K_FUSED;
	} else if (c->x == STEP_ADAMW) {
		s.kind = K_STEP_ADAMW;
		s.adamw = (struct k_adamw){ .p = p,
					    .m = m,
					    .v = v,
					    .vmax = vmax,
					    .decay = 0.999f,
					    .w1 = 0.1f,
					    .b1 = 0.9f,
					    .b2 = 0.999f,
					    .w2 = 0.001f,
					    .step_size = 0.01f,
					    .sq = 0.0316f,
					    .eps = 1e-8f,
					    .profile = c->flag2 ? K_FOREACH : K_FUSED,
					    .tail_from = tail };
	} else {
		s.kind = K_STEP_ADAM;
		s.adam = (struct k_adam){ .p = p,
					  .m = m,
					  .v = v,
					  .vmax = vmax,
					  .wd = 0.1f,
					  .maximize = true,
					  .profile = K_REFERENCE_F64,
					  .tail_from = UINT64_MAX,
					  .f64 = adam_f64 };
	}
	return s;
}

/* The buffers 4, 5 and 6 in turn, as type y; rounded as op says; flag: added to buffer 1. */
static struct k_reduce reduce_of(const struct op_case *c, const struct bed *b, const void **in)
{
	const struct rounding *r = &roundings[c->op];

	for (unsigned i = 0; i < c->k; i++)
		in[i] = buf(b, 4 + i % 3);
	return (struct k_reduce){ .out = c->flag ? buf(b, 1) : NULL,
				  .out_dtype = F32,
				  .in = in,
				  .k = c->k,
				  .in_dtype = (enum dtype)c->y,
				  .sum_dtype = r->sum,
				  .pre = { r->pre_how, r->pre, 3 },
				  .post = { r->post_how, r->post, 0.7f },
				  .accumulate = c->flag };
}

static void clip(const struct bed *b, size_t *begin, size_t *end)
{
	size_t n = b->n > FIRST ? b->n - FIRST : 0;

	*begin = *begin < n ? *begin : n;
	*end = *end < n ? *end : n;
}

static void run_reduce_step(const struct kernels *k, const struct op_case *c, struct bed *b,
			    size_t begin, size_t end)
{
	const void *in[8];
	struct k_reduce_step a = { reduce_of(c, b, in), FIRST, step_of(c, b) };

	clip(b, &begin, &end);
	k->reduce_step(&a, begin, end);
}

/* What it is defined by. */
static void run_apart(const struct kernels *k, const struct op_case *c, struct bed *b, size_t begin,
		      size_t end)
{
	const void *in[8];
	struct k_reduce r = reduce_of(c, b, in);
	struct k_step s = step_of(c, b);
	_cleanup_(freep) float *g = calloc(b->n, sizeof(*g));

	cr_assert_not_null(g);
	clip(b, &begin, &end);
	if (c->flag)
		memcpy(g, buf(b, 1), b->n * sizeof(*g));
	r.out = g;
	k->reduce(&r, begin + FIRST, end + FIRST);
	s.sgd.g = s.kind == K_STEP_SGD ? g + FIRST : s.sgd.g;
	if (s.kind == K_STEP_ADAMW)
		s.adamw.g = g + FIRST;
	else if (s.kind == K_STEP_ADAM)
		s.adam.g = g + FIRST;
	if (s.kind == K_STEP_SGD)
		k->sgd(&s.sgd, begin, end);
	else if (s.kind == K_STEP_ADAMW)
		k->adamw(&s.adamw, begin, end);
	else
		k->adam(&s.adam, begin, end);
}

static const struct op_case cases[] = {
	{ "cast fp32 fp32", run_cast, F32, F32, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast fp32 bf16", run_cast, F32, BF16, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast fp32 bf16, past the caches", run_cast, F32, BF16, 0, 0, 0, 0, 1, 0, 0 },
	{ "cast fp32 fp16", run_cast, F32, FP16, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast fp32 fp16, past the caches", run_cast, F32, FP16, 0, 0, 0, 0, 1, 0, 0 },
	{ "cast bf16 fp32", run_cast, BF16, F32, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast bf16 bf16", run_cast, BF16, BF16, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast bf16 fp16", run_cast, BF16, FP16, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast fp16 fp32", run_cast, FP16, F32, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast fp16 bf16", run_cast, FP16, BF16, 0, 0, 0, 0, 0, 0, 0 },
	{ "cast fp16 fp16", run_cast, FP16, FP16, 0, 0, 0, 0, 0, 0, 0 },
	{ "reduce 1", run_reduce, F32, F32, 1, 0, 1, 1, 0, 0, 0 },
	{ "reduce 2, 2 1", run_reduce, F32, F32, 2, 0, 2, 1, 0, 0, 0 },
	{ "reduce 6, 4 1.5, accumulate", run_reduce, F32, F32, 6, 0, 4, 1.5f, 0, 1, 0 },
	{ "reduce 5, 3 0.7", run_reduce, F32, F32, 5, 0, 3, 0.7f, 0, 0, 0 },
	{ "reduce 3, 2^126 1", run_reduce, F32, F32, 3, 0, 0x1p126f, 1, 0, 0, 0 },
	{ "reduce 3, 2^-127 2^127", run_reduce, F32, F32, 3, 0, 0x1p-127f, 0x1p127f, 0, 0, 0 },
	{ "reduce 3, 2^-130 1", run_reduce, F32, F32, 3, 0, 0x1p-130f, 1, 0, 1, 0 },
	{ "reduce 3, -4 0", run_reduce, F32, F32, 3, 0, -4, 0, 0, 0, 0 },
	{ "reduce 3, inf 1", run_reduce, F32, F32, 3, 0, __builtin_inff(), 1, 0, 0, 0 },
	{ "reduce bf16 6, 4 1.5", run_reduce, BF16, F32, 6, 0, 4, 1.5f, 0, 0, 0 },
	{ "reduce bf16 3, 1 3, accumulate", run_reduce, BF16, F32, 3, 0, 1, 3, 0, 1, 0 },
	{ "reduce fp16 4, 2 2", run_reduce, FP16, F32, 4, 0, 2, 2, 0, 0, 0 },
	{ "reduce fp16 5, 5 1, accumulate", run_reduce, FP16, F32, 5, 0, 5, 1, 0, 1, 0 },
	{ "reduce all bf16", run_reduce, BF16, BF16, 6, 1, 4, 1.5f, 0, 0, 0 },
	{ "reduce all bf16, accumulate", run_reduce, BF16, BF16, 3, 1, 2, 3, 0, 1, 0 },
	{ "reduce fp16 to bf16, accumulate", run_reduce, FP16, BF16, 1, 0, 1, 1, 0, 1, 0 },
	{ "reduce bf16 to fp16, accumulate", run_reduce, BF16, FP16, 1, 0, 1, 1, 0, 1, 0 },
	{ "reduce fp32 to bf16, accumulate", run_reduce, F32, BF16, 1, 0, 1, 1, 0, 1, 0 },
	{ "reduce all fp16", run_reduce, FP16, FP16, 6, 2, 4, 1.5f, 0, 0, 0 },
	{ "reduce all fp16, accumulate in place", run_reduce, FP16, FP16, 4, 2, 3, 5, 0, 1, 1 },
	{ "reduce bf16 in bf16 to fp32", run_reduce, BF16, F32, 5, 1, 2, 2.5f, 0, 1, 0 },
	{ "reduce fp16 in fp16 to fp32", run_reduce, FP16, F32, 5, 2, 7, 1, 0, 0, 0 },
	{ "reduce bf16, divided in bf16", run_reduce, BF16, F32, 3, 3, 3, 0, 0, 0, 0 },
	{ "reduce fp32 in fp16, multiplied", run_reduce, F32, F32, 4, 4, 0.3f, 0, 0, 1, 0 },
	{ "reduce fp32 in bf16 to bf16", run_reduce, F32, BF16, 4, 5, 0, 0.2f, 0, 0, 0 },
	{ "reduce fp32 to bf16, mixed", run_reduce, F32, BF16, 6, 6, 0.1f, 3, 0, 1, 0 },
	{ "reduce bf16 to fp16, mixed", run_reduce, BF16, FP16, 2, 7, 0.1f, 7, 0, 1, 0 },
	{ "reduce fp32 by factors", run_reduce, F32, F32, 3, 0, 3, 0.7f, 0, 1, 1 },
	{ "reduce bf16 to bf16 through fp32", run_reduce, BF16, BF16, 4, 8, 0, 0, 0, 0, 1 },
	{ "reduce fp16 of one", run_reduce, FP16, FP16, 1, 8, 0, 0, 0, 0, 1 },
	{ "reduce fp16, infinite factor", run_reduce, FP16, F32, 2, 9, 0, __builtin_inff(), 0, 0,
	  0 },
	{ "reduce 1 fp32 past the caches", run_reduce, F32, F32, 1, 0, 2, 0.5f, 1, 0, 0 },
	{ "reduce 3 fp32 past the caches", run_reduce, F32, F32, 3, 0, 2, 0.5f, 1, 1, 0 },
	{ "reduce 6 fp32 past the caches", run_reduce, F32, F32, 6, 0, 2, 0.5f, 1, 0, 0 },
	{ "reduce 1 bf16 past the caches", run_reduce, BF16, F32, 1, 0, 2, 0.5f, 1, 0, 0 },
	{ "reduce 3 bf16 past the caches", run_reduce, BF16, F32, 3, 0, 2, 0.5f, 1, 1, 0 },
	{ "reduce 6 bf16 past the caches", run_reduce, BF16, F32, 6, 0, 2, 0.5f, 1, 0, 0 },
	{ "reduce 1 fp16 past the caches", run_reduce, FP16, F32, 1, 0, 2, 0.5f, 1, 0, 0 },
	{ "reduce 3 fp16 past the caches", run_reduce, FP16, F32, 3, 0, 2, 0.5f, 1, 1, 0 },
	{ "reduce 6 fp16 past the caches", run_reduce, FP16, F32, 6, 0, 2, 0.5f, 1, 0, 0 },
	{ "sum fp32", run_all_reduce, F32, F32, 3, REDUCE_SUM, 0, 0, 0, 0, 0 },
	{ "avg fp32 in place", run_all_reduce, F32, F32, 3, REDUCE_AVG, 0, 0, 0, 1, 0 },
	{ "max fp32", run_all_reduce, F32, F32, 4, REDUCE_MAX, 0, 0, 0, 0, 0 },
	{ "min fp32 in place", run_all_reduce, F32, F32, 4, REDUCE_MIN, 0, 0, 0, 1, 0 },
	{ "sum bf16 in place", run_all_reduce, BF16, BF16, 5, REDUCE_SUM, 0, 0, 0, 1, 0 },
	{ "avg bf16", run_all_reduce, BF16, BF16, 6, REDUCE_AVG, 0, 0, 0, 0, 0 },
	{ "max bf16", run_all_reduce, BF16, BF16, 2, REDUCE_MAX, 0, 0, 0, 0, 0 },
	{ "sum fp16", run_all_reduce, FP16, FP16, 6, REDUCE_SUM, 0, 0, 0, 0, 0 },
	{ "avg fp16 of one", run_all_reduce, FP16, FP16, 1, REDUCE_AVG, 0, 0, 0, 0, 0 },
	{ "min fp16 in place", run_all_reduce, FP16, FP16, 3, REDUCE_MIN, 0, 0, 0, 1, 0 },
	{ "adamw", run_adamw, F32, F32, 0, 0, 0.1f, 0.9999f, 1e-8f, 0, 0 },
	{ "adamw, other branch of lerp", run_adamw, F32, F32, 0, 0, 0.7f, 1, 0, 0, 0 },
	{ "adamw, lerp of one half", run_adamw, F32, F32, 0, 0, 0.5f, 1, 0.1f, 0, 0 },
	{ "adam", run_adam, F32, F32, 0, 0, 0.1f, 0, 1e-8f, 0, 0 },
	{ "adam decay", run_adam, F32, F32, 0, 0, 0.1f, 0.01f, 1e-8f, 0, 0 },
	{ "adam, other branch of lerp", run_adam, F32, F32, 0, 0, 0.7f, 0.3f, 0, 0, 0 },
	{ "adam, lerp of one half", run_adam, F32, F32, 0, 0, 0.5f, 0, 0.1f, 0, 0 },
	{ "adamw, all but the profile", run_adamw, F32, F32, 0, K_FOREACH, 0.1f, 0.999f, 0, 1, 1 },
	{ "adamw fused", run_adamw, F32, F32, 0, K_FUSED, 0.1f, 0.999f, 1e-8f, 0, 0 },
	{ "adamw fused amsgrad", run_adamw, F32, F32, 0, K_FUSED, 0.7f, 0.999f, 0, 1, 1 },
	{ "adamw f64", run_adamw, F32, F32, 0, K_REFERENCE_F64, 0, 0, 0, 0, 0 },
	{ "adamw f64 amsgrad", run_adamw, F32, F32, 0, K_REFERENCE_F64, 0, 0, 0, 1, 1 },
	{ "adam amsgrad", run_adam, F32, F32, 0, K_FOREACH, 0.1f, 0, 1e-8f, 1, 0 },
	{ "adam maximize", run_adam, F32, F32, 0, K_EAGER_SINGLE, 0.1f, 0.3f, 1e-8f, 0, 1 },
	{ "adam fused", run_adam, F32, F32, 0, K_FUSED, 0.1f, 0.3f, 1e-8f, 0, 1 },
	{ "adam fused amsgrad", run_adam, F32, F32, 0, K_FUSED, 0.7f, 0, 1e-8f, 1, 0 },
	{ "adam f64", run_adam, F32, F32, 0, K_REFERENCE_F64, 0, 0.1f, 0, 0, 1 },
	{ "adam f64 amsgrad", run_adam, F32, F32, 0, K_REFERENCE_F64, 0, 0, 0, 1, 0 },
	{ "sgd dampened", run_sgd, F32, F32, 0, K_FOREACH, 0.1f, 0.9f, 0.3f, 0, 0 },
	{ "sgd fused", run_sgd, F32, F32, 0, K_FUSED, 0.1f, 0.9f, 0, 1, 0 },
	{ "sgd fused dampened", run_sgd, F32, F32, 0, K_FUSED, 0, 0.9f, 0.3f, 0, 0 },
	{ "sgd plain maximize", run_sgd, F32, F32, 0, K_FUSED, 0.1f, 0, 0.3f, 0, 0 },
	{ "sgd", run_sgd, F32, F32, 0, 0, 0, 0, 0, 0, 0 },
	{ "sgd decay", run_sgd, F32, F32, 0, 0, 0.01f, 0, 0, 0, 0 },
	{ "sgd momentum first", run_sgd, F32, F32, 0, 0, 0.01f, 0.9f, 0, 0, 1 },
	{ "sgd momentum", run_sgd, F32, F32, 0, 0, 0, 0.9f, 0, 0, 0 },
	{ "sgd nesterov first", run_sgd, F32, F32, 0, 0, 0, 0.9f, 0, 1, 1 },
	{ "sgd nesterov decay", run_sgd, F32, F32, 0, 0, 0.1f, 0.9f, 0, 1, 0 },
	{ "norm", run_norm, F32, F32, 0, 0, 2, 0, 0, 0, 0 },
	{ "norm of numbers", run_norm, F32, F32, 0, 0, 2, 0, 0, 0, 1 },
	{ "norm inf", run_norm, F32, F32, 0, 0, __builtin_inff(), 0, 0, 0, 0 },
	{ "norm inf of numbers", run_norm, F32, F32, 0, 0, __builtin_inff(), 0, 0, 0, 1 },
	{ "norm 1", run_norm, F32, F32, 0, 0, 1, 0, 0, 0, 0 },
	{ "norm 1 of numbers", run_norm, F32, F32, 0, 0, 1, 0, 0, 0, 1 },
	{ "norm 3", run_norm, F32, F32, 0, 0, 3, 0, 0, 0, 0 },
	{ "norm 0.5 of numbers", run_norm, F32, F32, 0, 0, 0.5f, 0, 0, 0, 1 },
	{ "clamp", run_clamp, F32, F32, 0, 0, -1, 1, 0, 0, 0 },
	{ "clamp from zero", run_clamp, F32, F32, 0, 0, 0, __builtin_inff(), 0, 0, 0 },
	{ "clamp crossed", run_clamp, F32, F32, 0, 0, 1, -1, 0, 0, 0 },
	{ "unscale", run_unscale, F32, F32, 0, 0, 0x1p-16f, 0, 0, 0, 0 },
	{ "unscale by one", run_unscale, F32, F32, 0, 0, 1, 0, 0, 0, 0 },
	{ "unscale numbers", run_unscale, F32, F32, 0, 0, 0.3f, 0, 0, 1, 0 },
	{ "add rows", run_add_rows, F32, F32, 0, 0, 0, 0, 0, 0, 0 },
	{ "add rows by 3", run_add_rows, F32, F32, 0, 0, 3, 0, 0, 0, 0 },
	{ "add rows bf16 by 4", run_add_rows, BF16, F32, 0, 1, 4, 0, 0, 0, 0 },
	{ "add rows fp16 by 3", run_add_rows, FP16, F32, 0, 2, 3, 0, 0, 0, 0 },

	{ "scale", run_scale, F32, F32, 0, 0, 0.37f, 0, 0, 0, 0 },
	{ "scale by nan", run_scale, F32, F32, 0, 0, __builtin_nanf(""), 0, 0, 0, 0 },
	{ "found inf", run_found_inf, F32, F32, 0, 0, 0, 0, 0, 0, 0 },
	{ "found inf at the end", run_found_inf, F32, F32, 0, 0, 0, 0, 0, 1, 0 },
	{ "found inf nowhere", run_found_inf, F32, F32, 0, 0, 0, 0, 0, 0, 1 },
	{ "found inf bf16", run_found_inf, BF16, F32, 0, 0, 0, 0, 0, 1, 0 },
	{ "found inf bf16 nowhere", run_found_inf, BF16, F32, 0, 0, 0, 0, 0, 0, 1 },
	{ "found inf fp16", run_found_inf, FP16, F32, 0, 0, 0, 0, 0, 1, 0 },
	{ "found inf fp16 nowhere", run_found_inf, FP16, F32, 0, 0, 0, 0, 0, 0, 1 },
	{ "pack fp32 bf16", run_pack, F32, BF16, 5, 0, 0, 0, 0, 0, 1 },
	{ "unpack bf16 fp32", run_pack, BF16, F32, 17, 0, 0, 0, 0, 1, 0 },
	{ "pack fp32 fp32, both apart", run_pack, F32, F32, 1, 0, 0, 0, 0, 1, 1 },
	{ "pack fp16 fp16 in one", run_pack, FP16, FP16, 8, 0, 0, 0, 0, 0, 0 },
	{ "pack bf16 fp16", run_pack, BF16, FP16, 1500, 0, 0, 0, 0, 0, 1 },
	{ "fill constant", run_fill, F32, F32, 0, FILL_CONSTANT, 0.1f, 0, 0, 0, 0 },
	{ "fill uniform", run_fill, F32, F32, 1, FILL_UNIFORM, -0.5f, 0.25f, 0, 0, 0 },
	{ "fill normal", run_fill, F32, F32, 2, FILL_NORMAL, 1, 0.02f, 0, 0, 0 },
	{ "fill normal from an odd index", run_fill, F32, F32, 2, FILL_NORMAL, 0, 1, 0, 1, 0 },
	{ "reduce 1 fp32, sgd", run_reduce_step, F32, F32, 1, 8, STEP_SGD, 1, 0, 0, 0 },
	{ "reduce 2 fp32, sgd", run_reduce_step, F32, F32, 2, 0, STEP_SGD, 1, 0, 1, 0 },
	{ "reduce 5 fp32, sgd", run_reduce_step, F32, F32, 5, 1, STEP_SGD, 1, 0, 0, 0 },
	{ "reduce 4 fp32, sgd", run_reduce_step, F32, F32, 4, 4, STEP_SGD, 1, 0, 1, 0 },
	{ "reduce 1 bf16, sgd", run_reduce_step, F32, F32, 1, 8, STEP_SGD, 2, 0, 1, 0 },
	{ "reduce 2 bf16, sgd", run_reduce_step, F32, F32, 2, 0, STEP_SGD, 2, 0, 0, 0 },
	{ "reduce 5 bf16, sgd", run_reduce_step, F32, F32, 5, 1, STEP_SGD, 2, 0, 1, 0 },
	{ "reduce 4 bf16, sgd", run_reduce_step, F32, F32, 4, 4, STEP_SGD, 2, 0, 0, 0 },
	{ "reduce 1 fp16, sgd", run_reduce_step, F32, F32, 1, 8, STEP_SGD, 3, 0, 0, 0 },
	{ "reduce 2 fp16, sgd", run_reduce_step, F32, F32, 2, 0, STEP_SGD, 3, 0, 1, 0 },
	{ "reduce 5 fp16, sgd", run_reduce_step, F32, F32, 5, 1, STEP_SGD, 3, 0, 0, 0 },
	{ "reduce 4 fp16, sgd", run_reduce_step, F32, F32, 4, 4, STEP_SGD, 3, 0, 1, 0 },
	{ "reduce 1 fp32, adamw", run_reduce_step, F32, F32, 1, 8, STEP_ADAMW, 1, 0, 1, 0 },
	{ "reduce 2 fp32, adamw", run_reduce_step, F32, F32, 2, 0, STEP_ADAMW, 1, 0, 0, 1 },
	{ "reduce 5 fp32, adamw", run_reduce_step, F32, F32, 5, 1, STEP_ADAMW, 1, 0, 1, 0 },
	{ "reduce 4 fp32, adamw", run_reduce_step, F32, F32, 4, 4, STEP_ADAMW, 1, 0, 0, 1 },
	{ "reduce 1 bf16, adamw", run_reduce_step, F32, F32, 1, 8, STEP_ADAMW, 2, 0, 0, 1 },
	{ "reduce 2 bf16, adamw", run_reduce_step, F32, F32, 2, 0, STEP_ADAMW, 2, 0, 1, 0 },
	{ "reduce 5 bf16, adamw", run_reduce_step, F32, F32, 5, 1, STEP_ADAMW, 2, 0, 0, 1 },
	{ "reduce 4 bf16, adamw", run_reduce_step, F32, F32, 4, 4, STEP_ADAMW, 2, 0, 1, 0 },
	{ "reduce 1 fp16, adamw", run_reduce_step, F32, F32, 1, 8, STEP_ADAMW, 3, 0, 1, 0 },
	{ "reduce 2 fp16, adamw", run_reduce_step, F32, F32, 2, 0, STEP_ADAMW, 3, 0, 0, 1 },
	{ "reduce 5 fp16, adamw", run_reduce_step, F32, F32, 5, 1, STEP_ADAMW, 3, 0, 1, 0 },
	{ "reduce 4 fp16, adamw", run_reduce_step, F32, F32, 4, 4, STEP_ADAMW, 3, 0, 0, 1 },
	{ "reduce 1 fp32, adam f64", run_reduce_step, F32, F32, 1, 8, STEP_ADAM, 1, 0, 0, 1 },
	{ "reduce 2 fp32, adam f64", run_reduce_step, F32, F32, 2, 0, STEP_ADAM, 1, 0, 1, 0 },
	{ "reduce 5 fp32, adam f64", run_reduce_step, F32, F32, 5, 1, STEP_ADAM, 1, 0, 0, 1 },
	{ "reduce 4 fp32, adam f64", run_reduce_step, F32, F32, 4, 4, STEP_ADAM, 1, 0, 1, 0 },
	{ "reduce 1 bf16, adam f64", run_reduce_step, F32, F32, 1, 8, STEP_ADAM, 2, 0, 1, 0 },
	{ "reduce 2 bf16, adam f64", run_reduce_step, F32, F32, 2, 0, STEP_ADAM, 2, 0, 0, 1 },
	{ "reduce 5 bf16, adam f64", run_reduce_step, F32, F32, 5, 1, STEP_ADAM, 2, 0, 1, 0 },
	{ "reduce 4 bf16, adam f64", run_reduce_step, F32, F32, 4, 4, STEP_ADAM, 2, 0, 0, 1 },
	{ "reduce 1 fp16, adam f64", run_reduce_step, F32, F32, 1, 8, STEP_ADAM, 3, 0, 0, 1 },
	{ "reduce 2 fp16, adam f64", run_reduce_step, F32, F32, 2, 0, STEP_ADAM, 3, 0, 1, 0 },
	{ "reduce 5 fp16, adam f64", run_reduce_step, F32, F32, 5, 1, STEP_ADAM, 3, 0, 0, 1 },
	{ "reduce 4 fp16, adam f64", run_reduce_step, F32, F32, 4, 4, STEP_ADAM, 3, 0, 1, 0 },
	{ "copy", run_copy, F32, F32, 0, 0, 0, 0, 0, 0, 0 },
};

static const struct {
	size_t n, begin, end;
} ranges[] = {
	{ 1, 0, 1 },   { 1, 0, 0 },       { 3, 2, 2 },       { 7, 1, 6 },       { 31, 0, 31 },
	{ 33, 1, 33 }, { 1024, 0, 1024 }, { 1025, 1, 1024 }, { 5003, 3, 4999 }, { 4099, 7, 4098 },
};

static void check_range(const struct kernels *k, const struct op_case *c, size_t n, size_t begin,
			size_t end)
{
	_cleanup_(bed_deinit) struct bed want = { 0 };
	_cleanup_(bed_deinit) struct bed got = { 0 };

	bed_init(&want, c, n);
	bed_copy(&got, &want);
	c->run(kernels_ref(), c, &want, begin, end);
	c->run(k, c, &got, begin, end);
	expect_same(&want, &got, c, k->name);
}

Test(kernels, variants_equal_ref, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120)
{
	for (size_t v = 1; v < ARRAY_SIZE(variants); v++) {
		const struct kernels *k = kernels_named(variants[v]);

		for (size_t c = 0; k && c < ARRAY_SIZE(cases); c++)
			for (size_t r = 0; r < ARRAY_SIZE(ranges); r++)
				check_range(k, &cases[c], ranges[r].n, ranges[r].begin,
					    ranges[r].end);
	}
}

/* Ranges that meet at odd places give what one range gives. */
static void check_cut(const struct kernels *k, const struct op_case *c, size_t n)
{
	_cleanup_(bed_deinit) struct bed whole = { 0 };
	_cleanup_(bed_deinit) struct bed cut = { 0 };
	size_t at = 0;

	bed_init(&whole, c, n);
	bed_copy(&cut, &whole);
	c->run(k, c, &whole, 0, n);
	for (size_t step = 1; at < n; step = step * 3 + 2) {
		size_t end = at + step < n ? at + step : n;

		c->run(k, c, &cut, at, end);
		at = end;
	}
	expect_same(&whole, &cut, c, k->name);
}

Test(kernels, cuts_do_not_matter, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120)
{
	for (size_t v = 0; v < ARRAY_SIZE(variants); v++) {
		const struct kernels *k = kernels_named(variants[v]);

		for (size_t c = 0; k && c < ARRAY_SIZE(cases); c++)
			if (cases[c].run != run_norm)
				check_cut(k, &cases[c], 6007);
	}
}

/* A step that takes the gradient from the reduction has the bits of one that reads it. */
Test(kernels, fused_is_the_two_apart, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120)
{
	for (size_t v = 0; v < ARRAY_SIZE(variants); v++) {
		const struct kernels *k = kernels_named(variants[v]);

		for (size_t c = 0; k && c < ARRAY_SIZE(cases); c++) {
			_cleanup_(bed_deinit) struct bed fused = { 0 };
			_cleanup_(bed_deinit) struct bed apart = { 0 };

			if (cases[c].run != run_reduce_step)
				continue;
			bed_init(&fused, &cases[c], 7001);
			bed_copy(&apart, &fused);
			run_reduce_step(k, &cases[c], &fused, 3, 6990);
			run_apart(k, &cases[c], &apart, 3, 6990);
			expect_same(&apart, &fused, &cases[c], k->name);
		}
	}
}

/* Norms: several blocks, the last one short, and from any block on. */
Test(kernels, norm_blocks_equal_ref, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120)
{
	const size_t n = 2 * KERNEL_NORM_BLOCK + 4321;

	for (size_t v = 1; v < ARRAY_SIZE(variants); v++) {
		const struct kernels *k = kernels_named(variants[v]);

		for (size_t c = 0; k && c < ARRAY_SIZE(cases); c++) {
			if (cases[c].run != run_norm)
				continue;
			check_range(k, &cases[c], n, 0, n);
			check_range(k, &cases[c], n, KERNEL_NORM_BLOCK, n);
			check_range(k, &cases[c], n, 0, KERNEL_NORM_BLOCK);
			check_range(k, &cases[c], n, 2 * KERNEL_NORM_BLOCK, n - 5);
		}
	}
}

/* Every pattern of each 16-bit type, to the other types. */
Test(kernels, all_16_bit_patterns, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60)
{
	static uint16_t patterns[65536];
	static uint32_t want[65536], got[65536];

	for (unsigned i = 0; i < 65536; i++)
		patterns[i] = (uint16_t)i;
	for (unsigned pair = 0; pair < 9; pair++) {
		struct k_cast a = { want, patterns, pair % 3 + 1, pair / 3 + 1, false };

		if (a.src_dtype == F32)
			continue;
		for (size_t v = 1; v < ARRAY_SIZE(variants); v++) {
			const struct kernels *k = kernels_named(variants[v]);

			if (!k)
				continue;
			a.dst = want;
			kernels_ref()->cast(&a, 0, 65536);
			a.dst = got;
			k->cast(&a, 0, 65536);
			cr_assert_arr_eq(want, got, 65536 * dtype_size(a.dst_dtype), "%s %s to %s",
					 k->name, dtype_name(a.src_dtype), dtype_name(a.dst_dtype));
		}
	}
}

Test(kernels, names, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	cr_assert_null(kernels_named("avx1024"));
	cr_assert_null(kernels_named(""));
	cr_assert_not_null(kernels_named("portable"));
	cr_assert_eq(kernels_named("ref"), kernels_ref());
	for (size_t v = 0; v < ARRAY_SIZE(variants); v++)
		if (kernels_named(variants[v]))
			cr_assert_str_eq(kernels_named(variants[v])->name, variants[v]);
}

/* Each test is a process: the choice is made for the first time. */
Test(kernels, environment_chooses, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	setenv("SHARDD_KERNELS", "portable", 1);
	cr_assert_str_eq(kernels_host()->name, "portable");
	setenv("SHARDD_KERNELS", "ref", 1);
	cr_assert_str_eq(kernels_host()->name, "portable", "chosen once");
}

Test(kernels, unknown_name_is_ignored, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	const char *fastest = kernels_named("avx512") ? "avx512"
			      : kernels_named("avx2") ? "avx2"
						      : "portable";

	setenv("SHARDD_KERNELS", "nonsense", 1);
	cr_assert_str_eq(kernels_host()->name, fastest);
}
