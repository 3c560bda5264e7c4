/*
 * Passes under no_sync and passes that reduce, in turn, of a ddp that finds unused tensors,
 * against PyTorch's DistributedDataParallel: tests/golden/no_sync.safetensors, which
 * make_no_sync.py writes and describes. The trainers here do what docs/protocol.md tells them,
 * and no more; after every pass each rank's views are its gradients there, bit for bit.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "golden.h"
#include "trainfix.h"

TestSuite(golden_no_sync, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

/* Of make_no_sync.py. */
enum { TENSORS = 5, N = 64, PASSES = 16, bucket_bytes = 100 };
static const uint64_t numels[TENSORS] = { 15, 7, 1, 12, 29 };

struct replay {
	uint32_t world;
	bool skip;
	const float *g;    /* [pass, rank, N] */
	const float *used; /* [pass, rank, TENSORS] */
	const float *kind; /* [pass, 2] */
	const float *out;  /* [pass, rank, N] */
	const float *has;  /* [pass, rank, TENSORS] */
};

struct model {
	const struct replay *r;
	uint32_t rank;
	shardd_client *c;
	shardd_unit unit;
	shardd_ddp ddp;
	struct shardd_ddp_view views[TENSORS];
	bool has[TENSORS];   /* is there a gradient from before? */
	bool since[TENSORS]; /* was it used since the last pass that reduced? */
	bool added[TENSORS]; /* has its bucket ever been reduced? */
};

static const float *part(const struct safetensors *f, const char *name, const char *what,
			 uint64_t elements)
{
	struct safetensors_tensor t = golden_part(f, name, what);

	cr_assert(t.dtype == DTYPE_FP32 && t.elements == elements, "%s/%s", name, what);
	return t.data;
}

static struct replay read_replay(const struct safetensors *f, const char *name, uint32_t world)
{
	const uint64_t ranks = (uint64_t)PASSES * world;

	return (struct replay){ .world = world,
				.skip = strncmp(name, "skip", 4) == 0,
				.g = part(f, name, "g", ranks * N),
				.used = part(f, name, "used", ranks * TENSORS),
				.kind = part(f, name, "kind", PASSES * 2),
				.out = part(f, name, "out", ranks * N),
				.has = part(f, name, "has", ranks * TENSORS) };
}

static size_t row(const struct model *m, unsigned pass)
{
	return (size_t)pass * m->r->world + m->rank;
}

static bool uses(const struct model *m, unsigned pass, unsigned tensor)
{
	return m->r->used[row(m, pass) * TENSORS + tensor] != 0;
}

static size_t start_of(unsigned tensor)
{
	size_t at = 0;

	for (unsigned i = 0; i < tensor; i++)
		at += numels[i];
	return at;
}

static void make_model(struct model *m)
{
	static const char *const names[TENSORS] = { "a", "b", "c", "d", "e" };
	struct shardd_tensor tensors[TENSORS];
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = "model",
					       .tensors = tensors,
					       .n_tensors = TENSORS,
					       .strategy = SHARDD_REPLICATE,
					       .reduce_profile = SHARDD_PROFILE_DDP };
	struct shardd_ddp_create_options ddp = { .size = sizeof(ddp),
						 .units = &m->unit,
						 .n_units = 1,
						 .bucket_bytes = bucket_bytes,
						 .find_unused = true };
	struct shardd_unit_info info;

	for (unsigned i = 0; i < TENSORS; i++)
		tensors[i] =
			(struct shardd_tensor){ .name = names[i], .shape = &numels[i], .dims = 1 };
	TRAIN_OK(shardd_register(m->c, &spec, 1, &info, &train_err));
	m->unit = info.unit;
	TRAIN_OK(shardd_init_seed(m->c, m->unit, 1, &train_err));
	TRAIN_OK(shardd_ddp_create(m->c, &ddp, &m->ddp, NULL, &train_err));
}

/* skip_all_reduce_unused_params: a bucket is left out if the backward uses nothing of it. */
static bool left_out(const struct model *m, unsigned pass, unsigned tensor)
{
	bool used = false;

	for (unsigned i = 0; i < TENSORS; i++)
		used = used || (m->views[i].bucket == m->views[tensor].bucket && uses(m, pass, i));
	return m->r->skip && !used;
}

/* What PyTorch does then to what no_sync passes left there, if the bucket was reduced in an
 * earlier pass: it stays the rank's own, but divided. */
static void divide_left_out(struct model *m, unsigned tensor)
{
	size_t n = numels[tensor];
	float *x = train_copy(m->c, m->views[tensor].data, n * sizeof(*x));

	for (size_t e = 0; e < n; e++)
		x[e] *= (float)(1.0 / m->r->world);
	train_write(m->c, m->views[tensor].data, x, n * sizeof(*x));
	free(x);
}

/* What was used under no_sync alone is there already. */
static void begin_backward(struct model *m, unsigned pass)
{
	uint32_t unused[TENSORS], kept[TENSORS], there[TENSORS];
	size_t n_unused = 0, n_kept = 0, n_there = 0;

	for (uint32_t i = 0; i < TENSORS; i++) {
		bool out = left_out(m, pass, i);

		if (out && m->since[i] && m->added[i])
			divide_left_out(m, i);
		m->added[i] = m->added[i] || !out;
		if (uses(m, pass, i))
			continue;
		if (m->since[i] && !out)
			there[n_there++] = i;
		else if (m->has[i])
			kept[n_kept++] = i;
		else
			unused[n_unused++] = i;
	}
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, unused, n_unused, kept, n_kept, &train_err));
	if (n_there)
		TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, there, n_there, &train_err));
}

/* As autograd does it: a gradient is there already, or this is the first. */
static void add_gradient(struct model *m, unsigned pass, unsigned tensor)
{
	const float *g = m->r->g + row(m, pass) * N + start_of(tensor);
	size_t n = numels[tensor];
	float *x = train_copy(m->c, m->views[tensor].data, n * sizeof(*x));

	for (size_t e = 0; e < n; e++)
		x[e] = m->has[tensor] ? x[e] + g[e] : g[e];
	train_write(m->c, m->views[tensor].data, x, n * sizeof(*x));
	free(x);
	m->has[tensor] = true;
	m->since[tensor] = true;
}

static void backward(struct model *m, unsigned pass, bool reduces)
{
	if (reduces)
		begin_backward(m, pass);
	for (uint32_t i = TENSORS; i-- > 0;) {
		if (!uses(m, pass, i))
			continue;
		add_gradient(m, pass, i);
		if (reduces)
			TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &i, 1, &train_err));
	}
}

static void finish(struct model *m)
{
	uint8_t untouched[TENSORS];

	TRAIN_OK(shardd_ddp_finish(m->c, m->ddp, untouched, TENSORS, &train_err));
	for (unsigned i = 0; i < TENSORS; i++) {
		m->has[i] = m->has[i] || !untouched[i];
		m->since[i] = false;
	}
}

static void check_pass(const struct model *m, unsigned pass)
{
	const float *has = m->r->has + row(m, pass) * TENSORS;

	for (unsigned i = 0; i < TENSORS; i++) {
		TRAINER_CHECK(m->has[i] == (has[i] != 0));
		if (m->has[i])
			TRAIN_HAS(m->c, m->views[i].data,
				  m->r->out + row(m, pass) * N + start_of(i),
				  numels[i] * sizeof(float));
	}
}

static int replay_trainer(const struct trainer *t)
{
	struct model m = { .r = t->arg, .rank = t->rank, .c = train_join(t) };

	make_model(&m);
	for (unsigned pass = 0; pass < PASSES; pass++) {
		bool reduces = m.r->kind[2 * pass] != 0;

		TRAIN_OK(shardd_ddp_forward(m.c, m.ddp, m.views, TENSORS, &train_err));
		backward(&m, pass, reduces);
		if (reduces)
			finish(&m);
		check_pass(&m, pass);
		if (m.r->kind[2 * pass + 1] != 0)
			memset(m.has, 0, sizeof(m.has));
	}
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	train_leave(m.c);
	return 0;
}

static void replay(const char *name, uint32_t world)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("no_sync.safetensors");
	struct replay r = read_replay(f, name, world);

	trainfix_run(world, replay_trainer, &r);
}

Test(golden_no_sync, of_one_rank)
{
	replay("all/w1", 1);
	replay("skip/w1", 1);
}

Test(golden_no_sync, of_two_ranks)
{
	replay("all/w2", 2);
	replay("skip/w2", 2);
}

Test(golden_no_sync, of_three_ranks)
{
	replay("all/w3", 3);
	replay("skip/w3", 3);
}
