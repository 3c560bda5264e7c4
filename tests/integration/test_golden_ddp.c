/*
 * Uneven inputs, unused parameters and a parameter that a pass uses twice, against PyTorch's
 * DistributedDataParallel: tests/golden/ddp.safetensors, which make_ddp.py writes and
 * describes. Its ranks' gradients are handed in pass by pass; what then is in the views, and
 * which of them nobody has touched, is what PyTorch had, bit for bit, and so are the
 * parameters at the end.
 */
#include <criterion/criterion.h>
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
	double lr;
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
	r.lr = join ? golden_number(about, "lr") : 0;
	cr_assert(g.dtype == DTYPE_FP32 && g.dims == 4 && g.shape[1] == r.world);
	cr_assert(g.shape[2] <= MAX_USES && g.shape[3] == N);
	r.passes = (unsigned)g.shape[0];
	r.uses = (unsigned)g.shape[2];
	r.g = g.data;
	r.used = read_part(f, name, "used", (uint64_t)r.passes * r.world * TENSORS);
	r.out = read_part(f, name, "out", (uint64_t)r.passes * N);
	r.has = read_part(f, name, "has", (uint64_t)r.passes * TENSORS);
	r.p = join ? read_part(f, name, "p", N) : NULL;
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
	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = m->r->lr };
	TRAIN_OK(shardd_register(m->c, &spec, 1, &info, &train_err));
	TRAINER_CHECK(info.elements == N);
	m->unit = info.unit;
	TRAIN_OK(shardd_init_seed(m->c, m->unit, 1, &train_err));
}

static void make_ddp(struct model *m)
{
	const struct shardd_ddp_spec spec = {
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

/* As autograd does it: a gradient is there already, or this is the first. */
static void use(struct model *m, unsigned pass, unsigned tensor, unsigned nth)
{
	size_t n = numels[tensor], bytes = n * sizeof(float);
	const float *g = m->r->g + ((pass * m->r->world + m->rank) * m->r->uses + nth) * (size_t)N +
			 start_of(tensor);
	float *sum = train_alloc(bytes);
	uint32_t i = tensor;

	if (m->has[tensor] || nth)
		train_read(m->c, sum, m->views[tensor].data, bytes);
	for (size_t e = 0; e < n; e++)
		sum[e] = m->has[tensor] || nth ? sum[e] + g[e] : g[e];
	train_write(m->c, m->views[tensor].data, sum, bytes);
	TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &i, 1, &train_err));
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

static void check_pass(struct model *m, unsigned pass, const uint8_t *untouched)
{
	for (unsigned i = 0; i < TENSORS; i++) {
		m->has[i] = m->has[i] || !untouched[i];
		TRAINER_CHECK(m->has[i] == (m->r->has[pass * TENSORS + i] != 0));
		if (m->has[i])
			TRAIN_HAS(m->c, m->views[i].data,
				  m->r->out + (size_t)pass * N + start_of(i),
				  numels[i] * sizeof(float));
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
	train_params(m->c, m->unit, p, sizeof(p));
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
	if (m.r->p)
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

/* ------------------------------------------------------------------- tests */

#define GOLDEN_DDP(test, name) \
	Test(golden_ddp, test) \
	{                      \
		replay(name);  \
	}

GOLDEN_DDP(join_of_two_divides_by_all, "join/initial/w2")
GOLDEN_DDP(join_of_two_divides_by_those_with_inputs, "join/active/w2")
GOLDEN_DDP(join_of_three_divides_by_all, "join/initial/w3")
GOLDEN_DDP(join_of_three_divides_by_those_with_inputs, "join/active/w3")
GOLDEN_DDP(unused_by_two_and_kept, "unused/kept/w2")
GOLDEN_DDP(unused_by_two_and_cleared, "unused/cleared/w2")
GOLDEN_DDP(unused_by_three_and_kept, "unused/kept/w3")
GOLDEN_DDP(unused_by_three_and_cleared, "unused/cleared/w3")
GOLDEN_DDP(static_graph_of_two, "static/w2")
GOLDEN_DDP(static_graph_of_three, "static/w3")
