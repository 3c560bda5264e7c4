/*
 * The same training gives the same bits, in whatever order and however late the ranks
 * arrive, and whichever kernels the daemon runs.
 */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "trainfix.h"

enum { WORLD = 4, UNITS = 5, N = 3333, STEPS = 25, COLLECTIVES = UNITS + 3 };

/* How the ranks come to a collective. */
enum arrival {
	FREE,   /* as they are scheduled */
	LATE,   /* each after a random time of work */
	FORCED, /* in an order drawn for this collective */
};

struct run {
	enum arrival arrival;
	unsigned seed;
	atomic_uint arrived[STEPS * COLLECTIVES];
	float losses[STEPS];
	double norms[STEPS];
	float params[UNITS][N];
	uint32_t masks[STEPS * COLLECTIVES]; /* who came first: a rank's bit */
};

static const struct {
	enum dtype dtype;
	struct shardd_optimizer o;
} kinds[UNITS] = {
	{ DTYPE_FP32, { .kind = SHARDD_ADAMW, .lr = 0.01, .weight_decay = 0.01 } },
	{ DTYPE_BF16, { .kind = SHARDD_ADAMW, .lr = 0.02 } },
	{ DTYPE_FP16, { .kind = SHARDD_SGD, .lr = 0.1, .momentum = 0.9 } },
	{ DTYPE_FP32, { .kind = SHARDD_SGD, .lr = 0.05, .momentum = 0.5, .nesterov = true } },
	{ DTYPE_BF16, { .kind = SHARDD_SGD, .lr = 0.3, .weight_decay = 0.001 } },
};

static uint32_t draw(uint64_t *state)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(*state >> 33);
}

/* Place of @rank in the order drawn for collective @k. */
static unsigned place_of(const struct run *r, unsigned k, uint32_t rank)
{
	uint32_t order[WORLD] = { 0, 1, 2, 3 };
	uint64_t state = (uint64_t)r->seed * 1000003u + k;

	for (unsigned i = WORLD; i-- > 1;) {
		unsigned j = draw(&state) % (i + 1);
		uint32_t held = order[i];

		order[i] = order[j];
		order[j] = held;
	}
	for (unsigned i = 0; i < WORLD; i++)
		if (order[i] == rank)
			return i;
	return 0;
}

/* Before collective @k is submitted, and after. */
static void arrive(struct run *r, unsigned k, uint32_t rank)
{
	uint64_t state = (uint64_t)r->seed * 77 + (uint64_t)k * WORLD + rank;

	if (r->arrival == LATE)
		for (volatile uint32_t n = draw(&state) % 200000; n; n--)
			;
	if (r->arrival == FORCED)
		while (atomic_load(&r->arrived[k]) != place_of(r, k, rank))
			sched_yield();
}

static void arrived(struct run *r, unsigned k, uint32_t rank)
{
	if (atomic_fetch_add(&r->arrived[k], 1) == 0)
		r->masks[k] = 1u << rank;
}

/* ------------------------------------------------------------------ the model */

/* What a rank sees of unit @u in step @step: loss and gradient of |p - x|^2 with an x of
 * its own, so that an error of one bit lives on. */
static float unit_loss(const struct trainer *t, unsigned u, unsigned step, const float *p, float *g)
{
	float *x = train_numbers(N, (step * UNITS + u) * WORLD + t->rank);
	float loss = 0;

	for (unsigned i = 0; i < N; i++) {
		float d = p[i] - x[i];

		loss += d * d;
		g[i] = d * 2 / N;
	}
	free(x);
	return loss / N;
}

/* @p: fp32 whatever the compute dtype. */
static void read_unit(shardd_client *c, shardd_unit u, enum dtype dtype, float *p)
{
	struct k_cast cast = { .dst = p, .dst_dtype = DTYPE_FP32, .src_dtype = dtype };
	const void *data;
	void *copy;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	cast.src = copy = train_copy(c, data, N * dtype_size(dtype));
	kernels_ref()->cast(&cast, 0, N);
	free(copy);
	TRAIN_OK(shardd_release(c, u, &train_err));
}

struct state {
	shardd_client *c;
	shardd_unit u[UNITS];
	uint64_t buffer;
	void *shared; /* the buffer: one number */
};

static void set_up(struct state *s, const struct trainer *t)
{
	s->c = train_join(t);
	for (unsigned i = 0; i < UNITS; i++) {
		uint64_t shape = N;
		struct shardd_tensor tensor = { .name = "weight",
						.shape = &shape,
						.dims = 1,
						.init = SHARDD_INIT_NORMAL,
						.b = 1 };
		struct shardd_unit_spec spec = { .size = sizeof(spec),
						 .name = (char[]){ (char)('a' + i), 0 },
						 .tensors = &tensor,
						 .n_tensors = 1,
						 .compute_dtype = (enum shardd_dtype)kinds[i].dtype,
						 .optimizer = kinds[i].o };
		struct shardd_unit_info info;

		TRAIN_OK(shardd_register(s->c, &spec, 1, &info, &train_err));
		TRAIN_OK(shardd_init_seed(s->c, info.unit, 5, &train_err));
		s->u[i] = info.unit;
	}
	TRAIN_OK(shardd_alloc(s->c, sizeof(float), &s->buffer, &s->shared, &train_err));
}

static void train_step(struct state *s, const struct trainer *t, unsigned step)
{
	struct run *r = t->arg;
	unsigned k = step * COLLECTIVES;
	shardd_ticket tickets[COLLECTIVES];
	struct shardd_result result;
	float p[N], g[N], loss = 0;

	for (unsigned i = 0; i < UNITS; i++) {
		read_unit(s->c, s->u[i], kinds[i].dtype, p);
		loss += unit_loss(t, i, step, p, g);
		train_fill_gradient(s->c, s->u[i], kinds[i].dtype, g, N);
		arrive(r, k + i, t->rank);
		TRAIN_OK(shardd_submit_reduce(s->c, SHARDD_OPTIONS(reduce, .unit = s->u[i]),
					      &tickets[i], &train_err));
		arrived(r, k + i, t->rank);
	}
	train_poke(s->c, s->shared, loss);
	arrive(r, k + UNITS, t->rank);
	TRAIN_OK(
		shardd_submit_all_reduce(s->c,
					 SHARDD_OPTIONS(all_reduce, .buffer = s->buffer, .count = 1,
							.dtype = SHARDD_FP32, .op = SHARDD_AVG),
					 &tickets[UNITS], &train_err));
	arrived(r, k + UNITS, t->rank);
	arrive(r, k + UNITS + 1, t->rank);
	TRAIN_OK(shardd_submit_clip(s->c, SHARDD_OPTIONS(clip, .max_norm = 0.05, .norm_type = 2),
				    &tickets[UNITS + 1], &train_err));
	arrived(r, k + UNITS + 1, t->rank);
	arrive(r, k + UNITS + 2, t->rank);
	TRAIN_OK(shardd_submit_step(s->c, SHARDD_OPTIONS(step), &tickets[UNITS + 2], &train_err));
	arrived(r, k + UNITS + 2, t->rank);
	for (unsigned i = 0; i < COLLECTIVES; i++) {
		TRAIN_OK(shardd_wait(s->c, tickets[i], -1, &result, &train_err));
		if (i == UNITS + 1 && t->rank == 0)
			r->norms[step] = result.total_norm;
	}
	if (t->rank == 0)
		r->losses[step] = train_peek(s->c, s->shared);
}

static int run_trainer(const struct trainer *t)
{
	struct run *r = t->arg;
	struct state s;

	set_up(&s, t);
	for (unsigned step = 0; step < STEPS; step++)
		train_step(&s, t, step);
	for (unsigned i = 0; i < UNITS; i++) {
		if (t->rank == 0)
			read_unit(s.c, s.u[i], kinds[i].dtype, r->params[i]);
	}
	TRAIN_OK(shardd_barrier(s.c, SHARDD_WORLD, &train_err));
	train_leave(s.c);
	return 0;
}

/* ----------------------------------------------------------------- comparing */

static struct run *train(enum arrival arrival, unsigned seed)
{
	struct run *r = trainer_shared(sizeof(*r));

	r->arrival = arrival;
	r->seed = seed;
	trainfix_run(WORLD, run_trainer, r);
	return r;
}

static void check_equal(const struct run *a, const struct run *b, const char *what)
{
	for (unsigned i = 0; i < STEPS; i++) {
		cr_assert_eq(memcmp(&a->losses[i], &b->losses[i], sizeof(float)), 0,
			     "%s: loss of step %u: %.9g and %.9g", what, i, (double)a->losses[i],
			     (double)b->losses[i]);
		cr_assert_eq(memcmp(&a->norms[i], &b->norms[i], sizeof(double)), 0,
			     "%s: norm of step %u: %.17g and %.17g", what, i, a->norms[i],
			     b->norms[i]);
	}
	cr_assert_eq(memcmp(a->params, b->params, sizeof(a->params)), 0, "%s: parameters", what);
}

Test(determinism, in_every_order_of_arrival, .timeout = 200, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct run *first = train(FREE, 0);
	uint32_t seen = 0;

	cr_assert_lt(first->losses[STEPS - 1], first->losses[0], "it does not learn: %g to %g",
		     (double)first->losses[0], (double)first->losses[STEPS - 1]);
	check_equal(first, train(FREE, 1), "the same again");
	for (unsigned seed = 1; seed <= 2; seed++)
		check_equal(first, train(LATE, seed), "ranks are late");
	for (unsigned seed = 1; seed <= 4; seed++) {
		struct run *r = train(FORCED, seed);

		check_equal(first, r, "another order");
		for (unsigned k = 0; k < ARRAY_SIZE(r->masks); k++)
			seen |= r->masks[k];
	}
	cr_assert_eq(seen, (1u << WORLD) - 1, "every rank was first at times");
}

/* The daemon takes the kernels from its environment. */
Test(determinism, with_every_kernel, .timeout = 200, .init = fdcheck_begin, .fini = fdcheck_end)
{
	static const char *const names[] = { "ref", "portable", "avx2", "avx512" };
	struct run *first = NULL;

	if (!train_on_host()) {
		train_not_here("several kinds of kernels");
		return;
	}
	for (unsigned i = 0; i < ARRAY_SIZE(names); i++) {
		struct run *r;

		if (!kernels_named(names[i]))
			continue;
		setenv("SHARDD_KERNELS", names[i], 1);
		daemonfix_start(&trainfix, NULL);
		r = train(FREE, i);
		daemonfix_stop(&trainfix);
		if (first)
			check_equal(first, r, names[i]);
		first = first ? first : r;
	}
	cr_assert(first);
}
