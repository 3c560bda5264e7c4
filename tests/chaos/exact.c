/*
 * chaos-exact [--steps N] [--commit-every N] [--in-backward]: one rank of the training that exact.h describes. Rank 0
 * prints each step, and as "loss" the sum of the parameters before it, or 0. It looks at them in each fourth step only,
 * and makes the gradients of a step before it commits the one before: so most steps change the masters at once, while
 * their generation is being made.
 *
 * chaos-exact --publish RANK STEP...: what readers of the publication must see (exact_model.c).
 */
#include "exact.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <shardd/shardd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct exact_unit exact_units[EXACT_UNITS] = {
	{ "root",
	  false,
	  { { "embed", 250, 288 },
	    { "norm", 96, 0 },
	    { "c_attn", 96, 288 },
	    { "tiles", 200, 201 } } },
#define EXACT_LAYER                                                                     \
	{                                                                               \
		{ "q", 64, 96 }, { "k", 32, 96 }, { "v", 32, 96 }, { "q_bias", 64, 0 }, \
			{ "k_bias", 32, 0 }, { "v_bias", 32, 0 }, { "o", 96, 96 },      \
	}
	{ "layers.0", false, EXACT_LAYER },
	{ "layers.1", true, EXACT_LAYER },
};

uint64_t exact_elements(const struct exact_tensor *t)
{
	return t->rows * (t->columns ? t->columns : 1);
}

uint64_t exact_unit_elements(const struct exact_unit *u)
{
	uint64_t n = 0;

	for (const struct exact_tensor *t = u->tensors; t->name; t++)
		n += exact_elements(t);
	return n;
}

uint64_t exact_first(unsigned u, uint64_t step, uint64_t *ret_stride)
{
	*ret_stride = exact_units[u].momentum ? 1 : EXACT_EVERY;
	return step % *ret_stride;
}

float exact_gradient(uint64_t step, unsigned rank, unsigned u, uint64_t i)
{
	uint64_t h = ((step * EXACT_RANKS + rank) * EXACT_UNITS + u) * 0x9e3779b97f4a7c15u + i;

	h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
	h = (h ^ h >> 27) * 0x94d049bb133111ebu;
	h ^= h >> 31;
	if (i / EXACT_EVERY % 2)
		return (float)((int)(h >> 8 & 0x1ff) - 0x100) / 128;
	return (float)((int)(h >> 8 & 0xffffff) - 0x800000) / 0x400000;
}

/* -------------------------------------------------------------------------- a trainer */

struct exact {
	uint64_t steps, commit_every;
	bool in_backward;
	shardd_client *c;
	struct shardd_membership me;
	struct shardd_unit_info units[EXACT_UNITS];
	float *gradients[EXACT_UNITS];
	uint64_t prepared; /* step of @gradients */
	struct shardd_error err;
	const char *doing;
};

/* Its result is negative, and the caller returns it. */
#define TRY(e, what, call)           \
	do {                         \
		int rc_;             \
                                     \
		(e)->doing = (what); \
		rc_ = (call);        \
		if (rc_ < 0)         \
			return rc_;  \
	} while (0)

/* @tensors, @shapes: EXACT_MOST_TENSORS. */
static struct shardd_unit_spec exact_spec(const struct exact *e, const struct exact_unit *u,
					  struct shardd_tensor *tensors, uint64_t (*shapes)[2])
{
	uint32_t n = 0;

	for (const struct exact_tensor *t = u->tensors; t->name; t++, n++) {
		shapes[n][0] = t->rows;
		shapes[n][1] = t->columns;
		tensors[n] = (struct shardd_tensor){ .name = t->name,
						     .shape = shapes[n],
						     .dims = t->columns ? 2 : 1 };
	}
	return (struct shardd_unit_spec){
		.size = sizeof(struct shardd_unit_spec),
		.name = u->name,
		.tensors = tensors,
		.n_tensors = n,
		.layout = u->momentum ? SHARDD_LAYOUT_FLAT : SHARDD_LAYOUT_DIM0,
		.compute_dtype = SHARDD_FP32,
		.gradient_dtype = SHARDD_FP32,
		.optimizer = { .kind = SHARDD_SGD,
			       .lr = EXACT_RATE,
			       .momentum = u->momentum ? EXACT_MOMENTUM : 0,
			       .when = e->in_backward ? SHARDD_OPTIM_IN_BACKWARD
						      : SHARDD_OPTIM_AT_STEP },
	};
}

/* The first time, and after each death. */
static int exact_enter(void *data)
{
	struct shardd_tensor tensors[EXACT_UNITS][EXACT_MOST_TENSORS];
	uint64_t shapes[EXACT_UNITS][EXACT_MOST_TENSORS][2];
	struct shardd_unit_spec specs[EXACT_UNITS];
	struct exact *e = data;
	struct shardd_job job = { .size = sizeof(job),
				  .rank = SHARDD_RANK_FROM_ENV,
				  /* 0: as the job is */
				  .resume = e->commit_every > 1 ? SHARDD_RESUME_COMMITTED : 0 };

	TRY(e, "join", shardd_join(e->c, &job, &e->me, &e->err));
	for (unsigned u = 0; u < EXACT_UNITS; u++)
		specs[u] = exact_spec(e, &exact_units[u], tensors[u], shapes[u]);
	TRY(e, "register", shardd_register(e->c, specs, EXACT_UNITS, e->units, &e->err));
	for (unsigned u = 0; u < EXACT_UNITS; u++)
		if (!e->units[u].initialised)
			TRY(e, "initialise", shardd_init_seed(e->c, e->units[u].unit, 1, &e->err));
	return 0;
}

static int exact_forward(struct exact *e, unsigned u, double *sum)
{
	const void *full;

	TRY(e, "gather", shardd_gather(e->c, e->units[u].unit, &full, &e->err));
	for (uint64_t i = 0; i < e->units[u].elements; i++)
		*sum += (double)((const float *)full)[i];
	TRY(e, "release", shardd_release(e->c, e->units[u].unit, &e->err));
	return 0;
}

/* The gradients of @step, in our own memory. */
static void exact_prepare(struct exact *e, uint64_t step)
{
	for (unsigned u = 0; u < EXACT_UNITS && e->prepared != step; u++) {
		uint64_t n = exact_unit_elements(&exact_units[u]), stride;
		uint64_t i = exact_first(u, step, &stride);

		memset(e->gradients[u], 0, n * sizeof(float));
		for (; i < n; i += stride)
			e->gradients[u][i] = exact_gradient(step, e->me.rank, u, i);
	}
	e->prepared = step;
}

static int exact_backward(struct exact *e, unsigned u)
{
	void *gradient;

	TRY(e, "gradient", shardd_gradient(e->c, e->units[u].unit, &gradient, &e->err));
	TRY(e, "write",
	    shardd_write(e->c, gradient, e->gradients[u], e->units[u].elements * sizeof(float),
			 &e->err));
	TRY(e, "reduce", shardd_reduce(e->c, e->units[u].unit, &e->err));
	return 0;
}

static int exact_step(struct exact *e, uint64_t step)
{
	double sum = 0;
	int rc = 0;

	exact_prepare(e, step);
	for (unsigned u = 0; u < EXACT_UNITS && rc >= 0 && step % EXACT_LOOKS == 0; u++)
		rc = exact_forward(e, u, &sum);
	for (unsigned u = EXACT_UNITS; u-- > 0 && rc >= 0;)
		rc = exact_backward(e, u);
	if (rc < 0)
		return rc;
	TRY(e, "step",
	    shardd_step_with(e->c, SHARDD_OPTIONS(step, .number = &step), NULL, &e->err));
	exact_prepare(e, step + 1);
	if (step % e->commit_every == 0 || step == e->steps)
		TRY(e, "commit", shardd_commit(e->c, step, NULL, 0, &e->err));
	if (e->me.rank == 0)
		printf("{\"step\":%" PRIu64 ",\"loss\":%.17g}\n", step, sum);
	fflush(stdout);
	return 0;
}

static int exact_train(void *data)
{
	struct exact *e = data;
	uint64_t step = e->me.has_step ? e->me.step : 0;
	int rc;

	if (step >= e->steps && !(e->me.has_commit && e->me.committed_step == step))
		TRY(e, "commit", shardd_commit(e->c, step, NULL, 0, &e->err)); /* only applied */
	while (step < e->steps) {
		rc = exact_step(e, ++step);
		if (rc < 0)
			return rc;
	}
	e->doing = "leave";
	rc = shardd_leave(e->c, &e->err);
	return rc == -SHARDD_ABORTED ? 0 : rc; /* others left before: all is committed */
}

static int exact_run(struct exact *e)
{
	int rc;

	for (unsigned u = 0; u < EXACT_UNITS; u++) {
		e->gradients[u] = calloc(exact_unit_elements(&exact_units[u]), sizeof(float));
		if (!e->gradients[u])
			return 1;
	}
	e->doing = "connect";
	rc = shardd_connect(NULL, &e->c, &e->err);
	if (rc >= 0)
		rc = shardd_rejoin(exact_enter, exact_train, e);
	if (rc < 0)
		fprintf(stderr, "chaos-exact: %s: %s: %s\n", e->doing, shardd_code_name(rc),
			e->err.text);
	shardd_close(e->c);
	for (unsigned u = 0; u < EXACT_UNITS; u++)
		free(e->gradients[u]);
	return rc < 0 ? 1 : 0;
}

/* A whole number of at least @min. It ends the process if @text is not one. */
static uint64_t exact_number(const char *text, uint64_t min)
{
	char *end;
	uint64_t n;

	errno = 0;
	n = strtoull(text, &end, 10);
	if (errno == 0 && text[0] >= '0' && text[0] <= '9' && *end == '\0' && n >= min)
		return n;
	fprintf(stderr, "chaos-exact: %s is not a whole number of at least %" PRIu64 "\n", text,
		min);
	exit(2);
}

static int exact_ask(unsigned rank, char **texts, int n)
{
	uint64_t *steps = calloc((size_t)n + 1, sizeof(*steps));
	int rc;

	if (!steps)
		return 1;
	for (int i = 0; i < n; i++)
		steps[i] = exact_number(texts[i], i > 0 ? steps[i - 1] : 1);
	rc = exact_publish(rank, steps, n);
	free(steps);
	return rc;
}

int main(int argc, char **argv)
{
	static const struct option options[] = { { "steps", 1, NULL, 's' },
						 { "commit-every", 1, NULL, 'c' },
						 { "in-backward", 0, NULL, 'b' },
						 { "publish", 1, NULL, 'p' },
						 { 0 } };
	struct exact e = { .steps = 100, .commit_every = 1 };
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (c == 's')
			e.steps = exact_number(optarg, 1);
		else if (c == 'c')
			e.commit_every = exact_number(optarg, 1);
		else if (c == 'b')
			e.in_backward = true;
		else if (c == 'p')
			return exact_ask((unsigned)exact_number(optarg, 0), argv + optind,
					 argc - optind);
		else
			return 2;
	}
	return exact_run(&e);
}
