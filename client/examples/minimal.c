/*
 * The shortest useful trainer: gather, use, release, and one optimizer step. Alone it is a world of
 * one rank; shardctl run --standalone -n 4 -- minimal: of four. If another rank or the daemon dies,
 * it joins again.
 */
#include <shardd/shardd.h>
#include <stdio.h>
#include <stdlib.h>

static struct shardd_error err;

struct trainer {
	shardd_client *c;
	struct shardd_membership me;
	struct shardd_unit_info u;
	uint64_t goal; /* the step that this run makes */
	float before, after;
};

/* Return: 0, or -SHARDD_ABORTED: a rank or the daemon has died, and the epoch has ended. */
static int check(int rc, const char *what)
{
	if (rc < 0)
		fprintf(stderr, "minimal: %s: %s: %s\n", what, shardd_code_name(rc), err.text);
	if (rc < 0 && rc != -SHARDD_ABORTED)
		exit(1); /* for the others this rank has died */
	return rc;
}

#define TRY(call, what)              \
	if (check((call), what) < 0) \
	return -SHARDD_ABORTED

/* On a GPU what ops hand out are addresses there: copies go through the library. */
static int read_first(struct trainer *t, float *ret)
{
	const void *full;

	/* All parameters of the unit, mapped read-only, the same memory in every rank. */
	TRY(shardd_gather(t->c, t->u.unit, &full, &err), "gather");
	TRY(shardd_read(t->c, ret, full, sizeof(*ret), &err), "read");
	TRY(shardd_release(t->c, t->u.unit, &err), "release"); /* full is not to be read any more */
	return 0;
}

/* The first time, and after each death. */
static int enter(void *data)
{
	/* Rank and world size: from torchrun's variables if they are set, else a single rank. */
	struct shardd_job job = { .size = sizeof(job),
				  .name = getenv("SHARDD_JOB") ? NULL : "minimal",
				  .world_size = getenv("WORLD_SIZE") ? 0 : 1,
				  .rank = getenv("RANK") ? SHARDD_RANK_FROM_ENV : 0 };
	struct shardd_tensor w = { .name = "w",
				   .shape = (uint64_t[]){ 256, 1024 },
				   .dims = 2,
				   .init = SHARDD_INIT_UNIFORM,
				   .a = -1,
				   .b = 1 };
	struct shardd_unit_spec spec = { sizeof(spec), "layer", &w, 1, .group = SHARDD_WORLD };
	struct trainer *t = data;

	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = 0.5 };
	TRY(shardd_join(t->c, &job, &t->me, &err), "join");
	TRY(shardd_register(t->c, &spec, 1, &t->u, &err), "register");
	if (!t->u.initialised) /* else an earlier life of the job left its parameters */
		TRY(shardd_init_seed(t->c, t->u.unit, 1, &err), "initialise");
	if (!t->goal)
		t->goal = t->me.step + 1;
	return 0;
}

/* Every rank writes its own gradient; the daemon reduces them to their mean. */
static int step(struct trainer *t)
{
	void *gradient;
	float *mine;
	int rc;

	TRY(shardd_gradient(t->c, t->u.unit, &gradient, &err), "gradient");
	mine = malloc(t->u.elements * sizeof(float));
	for (uint64_t i = 0; mine && i < t->u.elements; i++)
		mine[i] = 1.0f + (float)t->me.rank;
	rc = shardd_write(t->c, gradient, mine, t->u.elements * sizeof(float), &err);
	free(mine);
	TRY(rc, "write");
	TRY(shardd_reduce(t->c, t->u.unit, &err), "reduce");
	TRY(shardd_step(t->c, SHARDD_WORLD, NULL, &err), "step");
	TRY(shardd_commit(t->c, t->goal, NULL, 0, &err), "commit"); /* now it counts */
	return 0;
}

static int train(void *data)
{
	struct trainer *t = data;

	if (t->me.step < t->goal && (read_first(t, &t->before) < 0 || step(t) < 0))
		return -SHARDD_ABORTED;
	if (read_first(t, &t->after) < 0)
		return -SHARDD_ABORTED;
	TRY(shardd_leave(t->c, &err), "leave");
	return 0;
}

int main(void)
{
	struct trainer t = { 0 };

	if (check(shardd_connect(NULL, &t.c, &err), "connect") < 0)
		return 1;
	shardd_rejoin(enter, train, &t);
	printf("rank %u of %u: w[0] was %f, is %f\n", t.me.rank, t.me.world_size, t.before,
	       t.after);
	shardd_close(t.c);
	return 0;
}
