/*
 * Sparse gradients against PyTorch's DistributedDataParallel: the cases "sparse" of
 * tests/golden/ddp.safetensors, which make_ddp.py writes and describes. The rows that its ranks
 * had are handed in, in buckets by DdpReady and without by ReduceSparse. SGD with lr 1 on
 * parameters that are 0 leaves the gradient, turned round.
 *
 * All is PyTorch's bit for bit: what a rank has of a row more than once is added up before it is
 * added to what the ranks before it have.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "golden.h"
#include "trainfix.h"

TestSuite(golden_sparse, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

/* Of make_ddp.py. */
enum { PASSES = 3, ROWS = 11, WIDTH = 3, OTHER = 5, ENTRIES = 8, N = OTHER + ROWS * WIDTH };

struct replay {
	uint32_t world;
	bool buckets;
	const float *rows;  /* [pass, rank, ENTRIES] */
	const float *g;     /* [pass, rank, ENTRIES, WIDTH] */
	const float *dense; /* [pass, rank, OTHER] */
	const float *out;   /* [pass, N] */
};

struct model {
	const struct replay *r;
	uint32_t rank;
	shardd_client *c;
	shardd_unit unit;
	shardd_ddp ddp;
	uint64_t buffer; /* the rows' values */
	void *values;
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
	const char *about = about_of(f, name);
	uint32_t world = (uint32_t)golden_number(about, "world"), each = PASSES * world;

	cr_assert(golden_is(about, "kind", "sparse"));
	return (struct replay){ .world = world,
				.rows = read_part(f, name, "rows", each * ENTRIES),
				.g = read_part(f, name, "g", each * ENTRIES * WIDTH),
				.dense = read_part(f, name, "dense", each * OTHER),
				.out = read_part(f, name, "out", (uint64_t)PASSES * N) };
}

/* ------------------------------------------------------------------ a rank */

static void register_model(struct model *m)
{
	static const uint64_t other[] = { OTHER }, table[] = { ROWS, WIDTH };
	const struct shardd_tensor tensors[] = {
		{ .name = "other", .shape = other, .dims = 1 },
		{ .name = "table", .shape = table, .dims = 2 },
	};
	const struct shardd_unit_spec spec = {
		.size = sizeof(spec),
		.name = "model",
		.tensors = tensors,
		.n_tensors = ARRAY_SIZE(tensors),
		.strategy = SHARDD_REPLICATE,
		.reduce_profile = SHARDD_PROFILE_DDP,
		.div_mode = SHARDD_DIV_TRUE, /* the vectors' tensors are a CPU's */
		.optimizer = { .kind = SHARDD_SGD, .lr = 1 },
	};
	struct shardd_unit_info info;

	TRAIN_OK(shardd_register(m->c, &spec, 1, &info, &train_err));
	TRAINER_CHECK(info.packed_elements == N);
	m->unit = info.unit;
}

static void make_ddp(struct model *m)
{
	const struct shardd_ddp_tensor sparse = { m->unit, 1 };
	const struct shardd_ddp_create_options spec = { .size = sizeof(spec),
							.units = &m->unit,
							.n_units = 1,
							.sparse = &sparse,
							.n_sparse = 1 };

	TRAIN_OK(shardd_ddp_create(m->c, &spec, &m->ddp, NULL, &train_err));
}

/* This rank's rows of @pass; their gradients are in the buffer then. */
static size_t rows_of(struct model *m, unsigned pass, int64_t *rows)
{
	size_t at = pass * m->r->world + m->rank, n = 0;
	const float *mine = m->r->rows + at * ENTRIES;

	for (; n < ENTRIES && mine[n] >= 0; n++)
		rows[n] = (int64_t)mine[n];
	train_write(m->c, m->values, m->r->g + at * ENTRIES * WIDTH, n * WIDTH * sizeof(float));
	return n;
}

static void in_buckets(struct model *m, unsigned pass, const int64_t *rows, size_t n)
{
	const float *dense = m->r->dense + (pass * m->r->world + m->rank) * (size_t)OTHER;
	const uint32_t other = 0, table = 1;
	struct shardd_ddp_view views[2];

	TRAIN_OK(shardd_ddp_forward(m->c, m->ddp, views, 2, &train_err));
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, NULL, 0, NULL, 0, &train_err));
	train_write(m->c, views[0].data, dense, OTHER * sizeof(float));
	TRAIN_OK(shardd_ddp_ready_rows(m->c, m->ddp, table, rows, n, m->buffer, 0, &train_err));
	TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &other, 1, &train_err));
	TRAIN_OK(shardd_ddp_finish(m->c, m->ddp, NULL, 0, &train_err));
}

/* --------------------------------------------------------------- comparing */

static void check_pass(const struct model *m, unsigned pass)
{
	const float *out = m->r->out + (size_t)pass * N;
	size_t first = m->r->buckets ? 0 : OTHER; /* else "other" got none */
	float p[N];

	train_params(m->c, m->unit, p, sizeof(p));
	for (size_t i = first; i < N; i++) {
		if (-p[i] == out[i])
			continue;
		fprintf(stderr, "pass %u, element %zu is %a, not %a\n", pass, i, -(double)p[i],
			(double)out[i]);
		TRAINER_CHECK(!"PyTorch's");
	}
}

static void run_pass(struct model *m, unsigned pass)
{
	int64_t rows[ENTRIES];
	size_t n = rows_of(m, pass, rows);

	TRAIN_OK(shardd_init_seed(m->c, m->unit, 1, &train_err));
	if (m->r->buckets)
		in_buckets(m, pass, rows, n);
	else
		TRAIN_OK(shardd_reduce_sparse(m->c, m->unit, 1, rows, n, m->buffer, 0, &train_err));
	TRAIN_OK(shardd_step(m->c, SHARDD_WORLD, NULL, &train_err));
	check_pass(m, pass);
}

static int replay_trainer(const struct trainer *t)
{
	struct model m = { .r = t->arg, .rank = t->rank, .c = train_join(t) };

	register_model(&m);
	if (m.r->buckets)
		make_ddp(&m);
	TRAIN_OK(shardd_alloc(m.c, ENTRIES * WIDTH * sizeof(float), &m.buffer, &m.values,
			      &train_err));
	for (unsigned pass = 0; pass < PASSES; pass++)
		run_pass(&m, pass);
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	train_leave(m.c);
	return 0;
}

static void replay(const char *name, bool buckets)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("ddp.safetensors");
	struct replay r = read_replay(f, name);

	r.buckets = buckets;
	trainfix_run(r.world, replay_trainer, &r);
}

/* ------------------------------------------------------------------- tests */

#define GOLDEN_SPARSE(test, name)                   \
	Test(golden_sparse, test##_in_a_ddp)        \
	{                                           \
		replay(name, true);                 \
	}                                           \
	Test(golden_sparse, test##_by_ReduceSparse) \
	{                                           \
		replay(name, false);                \
	}

GOLDEN_SPARSE(rows_of_two, "sparse/once/w2")
GOLDEN_SPARSE(rows_of_three, "sparse/once/w3")
GOLDEN_SPARSE(rows_that_two_have_twice, "sparse/twice/w2")
GOLDEN_SPARSE(rows_that_three_have_twice, "sparse/twice/w3")
