/*
 * Uneven inputs, unused parameters and a parameter that a pass uses twice, against PyTorch's
 * DistributedDataParallel: tests/golden/ddp.safetensors, which make_ddp.py writes and
 * describes. Its ranks' gradients are handed in pass by pass; what then is in the views, and
 * which of them nobody has touched, is what PyTorch had, bit for bit, and so are the
 * parameters at the end. Four ranks on several devices are bounded.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "golden.h"
#include "trainfix.h"

TestSuite(golden_ddp, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { TENSORS = 5, N = 64, NAME = 64, MAX_USES = 2 };

/* Of make_ddp.py. */
static const uint64_t shapes[TENSORS][3] = { { 5, 3 }, { 7 }, { 1 }, { 2, 2, 3 }, { 29 } };
static const uint32_t dims[TENSORS] = { 2, 1, 1, 3, 1 };
static const size_t numels[TENSORS] = { 15, 7, 1, 12, 29 };
enum { bucket_bytes = 100 };

struct replay {
	char kind[16];
	uint32_t world;
	bool initial, clear;
	double lr;       /* join; 0: no steps are taken */
	enum dtype grad; /* of views; what is below is widened */
	unsigned passes, uses;
	const float *g;    /* [pass, rank, use, N] */
	const float *used; /* [pass, rank, TENSORS] */
	const float *out;  /* [pass, N] */
	const float *has;  /* [pass, TENSORS] */
	const float *p;    /* [N]; NULL: not compared */
};

/* ---------------------------------------------------------------- the file */

static const char *about_of(const struct safetensors *f, const char *name)
{
	const char *key, *about;
	void *iter = NULL;

	while (safetensors_next(f, &iter, &key, &about))
		if (strcmp(key, name) == 0)
			return about;
	cr_assert_fail("no case %s", name);
	return NULL;
}

static const float *read_part(const struct safetensors *f, const char *name, const char *part,
			      uint64_t elements)
{
	struct safetensors_tensor t = golden_part(f, name, part);

	cr_assert(t.dtype == DTYPE_FP32 && t.elements == elements, "%s/%s", name, part);
	return t.data;
}

static struct replay read_replay(const struct safetensors *f, const char *name)
{
	struct safetensors_tensor g = golden_part(f, name, "g");
	const char *about = about_of(f, name);
	struct replay r = { .world = (uint32_t)golden_number(about, "world") };
	bool join;

	golden_text(about, "kind", r.kind, sizeof(r.kind));
	join = strcmp(r.kind, "join") == 0;
	r.clear = golden_number(about, "clear") != 0;
	r.initial = join && golden_number(about, "initial") != 0;
	r.grad = golden_dtype(about, "grad");
	r.lr = join && r.grad == DTYPE_FP32 ? golden_number(about, "lr") : 0;
	cr_assert(g.dtype == DTYPE_FP32 && g.dims == 4 && g.shape[1] == r.world);
	cr_assert(g.shape[2] <= MAX_USES && g.shape[3] == N);
	r.passes = (unsigned)g.shape[0];
	r.uses = (unsigned)g.shape[2];
	r.g = g.data;
	r.used = read_part(f, name, "used", (uint64_t)r.passes * r.world * TENSORS);
	r.out = read_part(f, name, "out", (uint64_t)r.passes * N);
	r.has = read_part(f, name, "has", (uint64_t)r.passes * TENSORS);
	r.p = r.lr != 0 ? read_part(f, name, "p", N) : NULL;
	return r;
}

/* ------------------------------------------------------------------ a rank */

struct model {
	const struct replay *r;
	uint32_t rank;
	shardd_client *c;
	shardd_unit unit;
	shardd_ddp ddp;
	struct shardd_ddp_view views[TENSORS];
	bool has[TENSORS]; /* is there a gradient from before? */
};

static void register_model(struct model *m)
{
	static const char *const names[TENSORS] = { "a", "b", "c", "d", "e" };
	struct shardd_tensor tensors[TENSORS];
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "model",
					 .tensors = tensors,
					 .n_tensors = TENSORS,
					 .strategy = SHARDD_REPLICATE,
					 .reduce_profile = SHARDD_PROFILE_DDP };
	struct shardd_unit_info info;

	for (unsigned i = 0; i < TENSORS; i++)
		tensors[i] = (struct shardd_tensor){ .name = names[i],
						     .shape = shapes[i],
						     .dims = dims[i] };
	spec.gradient_dtype = (enum shardd_dtype)m->r->grad;
	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = m->r->lr };
	TRAIN_OK(shardd_register(m->c, &spec, 1, &info, &train_err));
	TRAINER_CHECK(info.elements == N);
	m->unit = info.unit;
	TRAIN_OK(shardd_init_seed(m->c, m->unit, 1, &train_err));
}

static void make_ddp(struct model *m)
{
	const struct shardd_ddp_create_options spec = {
		.size = sizeof(spec),
		.units = &m->unit,
		.n_units = 1,
		.bucket_bytes = bucket_bytes,
		.find_unused = strcmp(m->r->kind, "unused") == 0,
		.static_graph = strcmp(m->r->kind, "static") == 0,
	};
	uint32_t n;

	TRAIN_OK(shardd_ddp_create(m->c, &spec, &m->ddp, &n, &train_err));
	TRAINER_CHECK(n == TENSORS);
}

static unsigned uses_of(const struct model *m, unsigned pass, unsigned tensor)
{
	return (unsigned)m->r->used[(pass * m->r->world + m->rank) * TENSORS + tensor];
}

static bool has_input(const struct model *m, unsigned pass)
{
	unsigned n = 0;

	for (unsigned i = 0; pass < m->r->passes && i < TENSORS; i++)
		n += uses_of(m, pass, i);
	return n > 0;
}

static size_t start_of(unsigned tensor)
{
	size_t at = 0;

	for (unsigned i = 0; i < tensor; i++)
		at += numels[i];
	return at;
}

/* Every element is one of its type. */
static void *narrowed(const struct model *m, const float *x, size_t n)
{
	void *to = train_alloc(n * sizeof(*x));
	const struct k_cast cast = { to, x, m->r->grad, DTYPE_FP32, false };

	kernels_ref()->cast(&cast, 0, n);
	return to;
}

/* As autograd does it: a gradient is there already, or this is the first. */
static void use(struct model *m, unsigned pass, unsigned tensor, unsigned nth)
{
	size_t n = numels[tensor], bytes = n * dtype_size(m->r->grad);
	const float *g = m->r->g + ((pass * m->r->world + m->rank) * m->r->uses + nth) * (size_t)N +
			 start_of(tensor);
	float *sum = train_alloc(n * sizeof(*sum));
	void *there = train_copy(m->c, m->views[tensor].data, bytes), *to;
	uint32_t i = tensor;

	for (size_t e = 0; e < n; e++)
		sum[e] = m->has[tensor] || nth ? golden_at(there, m->r->grad, e) + g[e] : g[e];
	to = narrowed(m, sum, n);
	train_write(m->c, m->views[tensor].data, to, bytes);
	TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &i, 1, &train_err));
	free(to);
	free(there);
	free(sum);
}

static void begin_backward(struct model *m, unsigned pass)
{
	uint32_t unused[TENSORS], kept[TENSORS], n_unused = 0, n_kept = 0;
	bool named = strcmp(m->r->kind, "unused") == 0; /* a static graph finds them itself */

	for (uint32_t i = 0; named && i < TENSORS; i++) {
		if (uses_of(m, pass, i))
			continue;
		if (m->has[i])
			kept[n_kept++] = i;
		else
			unused[n_unused++] = i;
	}
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, unused, n_unused, kept, n_kept, &train_err));
}

/* Several devices add what their own ranks have first: of four that is another order. */
static bool other_order(const struct replay *r)
{
	const char *devices = getenv("SHARDD_SIM_DEVICES");

	return r->world > 3 && devices && atoi(devices) > 1;
}

/* Then each of the roundings on either side, @world and a few a pass, is at most half a unit
 * of the sum of magnitudes that were given until then. */
static double bound_of(const struct replay *r, unsigned passes, size_t element)
{
	double unit = r->grad == DTYPE_FP32 ? 0x1p-24 : 0x1p-8, sum = 0;

	for (size_t i = 0; i < (size_t)passes * r->world * r->uses; i++)
		sum += fabs((double)r->g[i * N + element]);
	return 2 * passes * (r->world + 3) * unit * sum;
}

static void check_close(const struct model *m, unsigned passes, size_t element, float got,
			float want)
{
	if (fabs((double)got - (double)want) <= bound_of(m->r, passes, element))
		return;
	fprintf(stderr, "element %zu after %u passes is %a, not %a\n", element, passes, (double)got,
		(double)want);
	TRAINER_CHECK(!"close");
}

static void check_view(const struct model *m, unsigned pass, unsigned tensor)
{
	const float *out = m->r->out + (size_t)pass * N + start_of(tensor);
	size_t n = numels[tensor], bytes = n * dtype_size(m->r->grad);
	void *want = narrowed(m, out, n), *got = train_copy(m->c, m->views[tensor].data, bytes);

	for (size_t e = 0; other_order(m->r) && e < n; e++)
		check_close(m, pass + 1, start_of(tensor) + e, golden_at(got, m->r->grad, e),
			    out[e]);
	if (!other_order(m->r))
		train_same(got, want, bytes, "view", __FILE__, __LINE__);
	free(got);
	free(want);
}

static void check_pass(struct model *m, unsigned pass, const uint8_t *untouched)
{
	for (unsigned i = 0; i < TENSORS; i++) {
		m->has[i] = m->has[i] || !untouched[i];
		TRAINER_CHECK(m->has[i] == (m->r->has[pass * TENSORS + i] != 0));
		if (m->has[i])
			check_view(m, pass, i);
		m->has[i] = m->has[i] && !m->r->clear;
	}
}

static void run_pass(struct model *m, unsigned pass)
{
	uint8_t untouched[TENSORS];

	TRAIN_OK(shardd_ddp_forward(m->c, m->ddp, m->views, TENSORS, &train_err));
	begin_backward(m, pass);
	for (unsigned i = TENSORS; i-- > 0;)
		for (unsigned nth = 0; nth < uses_of(m, pass, i); nth++)
			use(m, pass, i, nth);
	TRAIN_OK(shardd_ddp_finish(m->c, m->ddp, untouched, TENSORS, &train_err));
	check_pass(m, pass, untouched);
}

/* The rank with the most inputs is the last. */
static void join(struct model *m)
{
	uint32_t last = UINT32_MAX, most = 0;
	float p[N];

	for (uint32_t rank = 0; rank < m->r->world; rank++)
		if (m->r->used[((m->r->passes - 1) * m->r->world + rank) * TENSORS] != 0)
			most = rank;
	TRAIN_OK(shardd_join_uneven(m->c, SHARDD_WORLD, !m->r->initial, &last, NULL, &train_err));
	TRAINER_CHECK(last == most);
	if (!m->r->p)
		return;
	train_params(m->c, m->unit, p, sizeof(p));
	for (size_t e = 0; other_order(m->r) && e < N; e++)
		check_close(m, m->r->passes, e, p[e], m->r->p[e]);
	if (!other_order(m->r))
		TRAIN_SAME(p, m->r->p, sizeof(p));
}

static int replay_trainer(const struct trainer *t)
{
	struct model m = { .r = t->arg, .rank = t->rank, .c = train_join(t) };

	register_model(&m);
	make_ddp(&m);
	for (unsigned pass = 0; has_input(&m, pass); pass++) {
		run_pass(&m, pass);
		if (m.r->p)
			TRAIN_OK(shardd_step(m.c, SHARDD_WORLD, NULL, &train_err));
	}
	if (strcmp(m.r->kind, "join") == 0)
		join(&m);
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	train_leave(m.c);
	return 0;
}

static void replay(const char *name)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("ddp.safetensors");
	struct replay r = read_replay(f, name);

	trainfix_run(r.world, replay_trainer, &r);
}

/* ------------------------------------------------------- uneven inputs are an error */

enum { MAX_WORLD = 4, AFTERWARDS = 2 };

struct throwing {
	struct replay r;
	unsigned inputs[MAX_WORLD], passes[MAX_WORLD];
	char error[MAX_WORLD][16]; /* none, exhausted, detected */
};

/* "1,3" to numbers. */
static void read_numbers(const char *about, const char *key, unsigned *ret, uint32_t n)
{
	char buf[64], *at = buf;

	golden_text(about, key, buf, sizeof(buf));
	for (uint32_t i = 0; i < n; i++, at += *at == ',')
		ret[i] = (unsigned)strtoul(at, &at, 10);
	cr_assert_eq(*at, 0, "%s of %s", key, about);
}

static struct throwing read_throwing(const struct safetensors *f, const char *name)
{
	const char *about = about_of(f, name);
	struct throwing t = { .r = { .world = (uint32_t)golden_number(about, "world"),
				     .grad = DTYPE_FP32,
				     .lr = 1 } };
	char errors[64], *at = errors;

	cr_assert(golden_number(about, "throws") == 1 && t.r.world <= MAX_WORLD);
	read_numbers(about, "inputs", t.inputs, t.r.world);
	read_numbers(about, "passes", t.passes, t.r.world);
	golden_text(about, "errors", errors, sizeof(errors));
	for (uint32_t i = 0; i < t.r.world; i++)
		snprintf(t.error[i], sizeof(t.error[i]), "%s", strtok_r(at, ",", &at));
	return t;
}

/* All gradients are 1. Return: of DdpFinish. */
static int ones_pass(struct model *m)
{
	static const float one[N] = { [0 ... N - 1] = 1 };

	TRAIN_OK(shardd_ddp_forward(m->c, m->ddp, m->views, TENSORS, &train_err));
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, NULL, 0, NULL, 0, &train_err));
	for (uint32_t i = TENSORS; i-- > 0;) {
		train_write(m->c, m->views[i].data, one, numels[i] * sizeof(float));
		TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &i, 1, &train_err));
	}
	return shardd_ddp_finish(m->c, m->ddp, NULL, 0, &train_err);
}

static bool says_uneven(void)
{
	return strstr(train_err.text, "has no more inputs") &&
	       strstr(train_err.text, "error_if_uneven");
}

static void throw(struct model * m, const struct throwing *x)
{
	const char *error = x->error[m->rank];
	bool none = strcmp(error, "none") == 0;

	for (unsigned pass = 0; pass < x->passes[m->rank]; pass++)
		TRAIN_OK(ones_pass(m));
	if (strcmp(error, "detected") == 0) {
		TRAIN_FAILS(ones_pass(m), SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(says_uneven());
		TRAIN_FAILS(shardd_barrier(m->c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(says_uneven());
	} else {
		TRAINER_CHECK(x->passes[m->rank] == x->inputs[m->rank]);
	}
	if (none)
		TRAIN_OK(shardd_join_even(m->c, SHARDD_WORLD, &train_err));
	else
		TRAIN_FAILS(shardd_join_even(m->c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(none || says_uneven());
}

/* It is as if the pass that failed had not been. */
static int throwing_trainer(const struct trainer *t)
{
	const struct throwing *x = t->arg;
	struct model m = { .r = &x->r, .rank = t->rank, .c = train_join(t) };
	float p[N];

	register_model(&m);
	make_ddp(&m);
	throw(&m, x);
	for (unsigned pass = 0; pass < AFTERWARDS; pass++) {
		TRAIN_OK(ones_pass(&m));
		TRAIN_OK(shardd_step(m.c, SHARDD_WORLD, NULL, &train_err));
	}
	TRAIN_OK(shardd_join_even(m.c, SHARDD_WORLD, &train_err));
	train_params(m.c, m.unit, p, sizeof(p));
	for (unsigned i = 0; i < N; i++)
		TRAINER_CHECK(fabsf(p[i] + AFTERWARDS) < 1e-6F);
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	train_leave(m.c);
	return 0;
}

static void replay_throwing(const char *name)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("ddp.safetensors");
	struct throwing x = read_throwing(f, name);

	trainfix_run(x.r.world, throwing_trainer, &x);
}

/* ------------------------------------------------------------------- tests */

#define GOLDEN_DDP(test, name, world)          \
	Test(golden_ddp, test)                 \
	{                                      \
		replay(name "/w" #world);      \
	}                                      \
	Test(golden_ddp, test##_in_bf16)       \
	{                                      \
		replay(name "/bf16/w" #world); \
	}

GOLDEN_DDP(join_of_two_divides_by_all, "join/initial", 2)
GOLDEN_DDP(join_of_two_divides_by_those_with_inputs, "join/active", 2)
GOLDEN_DDP(join_of_three_divides_by_all, "join/initial", 3)
GOLDEN_DDP(join_of_three_divides_by_those_with_inputs, "join/active", 3)
GOLDEN_DDP(unused_by_two_and_kept, "unused/kept", 2)
GOLDEN_DDP(unused_by_two_and_cleared, "unused/cleared", 2)
GOLDEN_DDP(unused_by_three_and_kept, "unused/kept", 3)
GOLDEN_DDP(unused_by_three_and_cleared, "unused/cleared", 3)
GOLDEN_DDP(static_graph_of_two, "static", 2)
GOLDEN_DDP(static_graph_of_three, "static", 3)
GOLDEN_DDP(join_of_four_divides_by_all, "join/initial", 4)
GOLDEN_DDP(join_of_four_divides_by_those_with_inputs, "join/active", 4)
GOLDEN_DDP(unused_by_four_and_kept, "unused/kept", 4)
GOLDEN_DDP(unused_by_four_and_cleared, "unused/cleared", 4)
GOLDEN_DDP(static_graph_of_four, "static", 4)

#define GOLDEN_THROWS(test, name)      \
	Test(golden_ddp, test)         \
	{                              \
		replay_throwing(name); \
	}

GOLDEN_THROWS(uneven_inputs_of_two_are_an_error, "throws/1,3/w2")
GOLDEN_THROWS(uneven_inputs_of_three_are_an_error, "throws/2,1,4/w3")
GOLDEN_THROWS(one_of_two_without_inputs_is_an_error, "throws/2,0/w2")
GOLDEN_THROWS(two_of_three_without_inputs_are_an_error, "throws/2,0,0/w3")
GOLDEN_THROWS(even_inputs_of_two_are_none, "throws/2,2/w2")
GOLDEN_THROWS(even_inputs_of_three_are_none, "throws/2,2,2/w3")
GOLDEN_THROWS(uneven_inputs_of_four_are_an_error, "throws/2,1,4,3/w4")
GOLDEN_THROWS(three_of_four_without_inputs_are_an_error, "throws/2,0,0,0/w4")
GOLDEN_THROWS(even_inputs_of_four_are_none, "throws/2,2,2,2/w4")
