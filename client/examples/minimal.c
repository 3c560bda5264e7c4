/*
 * The shortest useful trainer: gather, use, release, and one optimizer step. Alone
 * it is a world of one rank; shardctl run --standalone -n 4 -- minimal: of four.
 */
#include <shardd/shardd.h>
#include <stdio.h>
#include <stdlib.h>

static struct shardd_error err;

static void must(int rc, const char *what)
{
	if (rc < 0) {
		fprintf(stderr, "minimal: %s: %s: %s\n", what, shardd_code_name(rc), err.text);
		exit(1); /* for the others this rank has died */
	}
}

/* On a GPU what ops hand out are addresses there: copies go through the library. */
static float first_of(shardd_client *c, const void *full)
{
	float x;

	must(shardd_read(c, &x, full, sizeof(x), &err), "read");
	return x;
}

int main(void)
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
	struct shardd_membership me;
	struct shardd_unit_info u;
	shardd_client *c;
	const void *full;
	void *gradient;
	float before, *mine;

	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = 0.5 };
	must(shardd_connect(NULL, &c, &err), "connect");
	must(shardd_join(c, &job, &me, &err), "join");
	must(shardd_register(c, &spec, 1, &u, &err), "register");
	if (!u.initialised) /* else an earlier life of the job left its parameters */
		must(shardd_init_seed(c, u.unit, 1, &err), "initialise");

	/* All parameters of the unit, mapped read-only, the same memory in every rank. */
	must(shardd_gather(c, u.unit, &full, &err), "gather");
	before = first_of(c, full);
	must(shardd_release(c, u.unit, &err), "release"); /* full is not to be read any more */

	/* Every rank writes its own gradient; the daemon reduces them to their mean. */
	must(shardd_gradient(c, u.unit, &gradient, &err), "gradient");
	mine = malloc(u.elements * sizeof(float));
	for (uint64_t i = 0; mine && i < u.elements; i++)
		mine[i] = 1.0f + (float)me.rank;
	must(shardd_write(c, gradient, mine, u.elements * sizeof(float), &err), "write");
	free(mine);
	must(shardd_reduce(c, u.unit, &err), "reduce");
	must(shardd_step(c, SHARDD_WORLD, NULL, &err), "step");
	must(shardd_commit(c, me.step + 1, NULL, 0, &err), "commit"); /* now it counts */

	must(shardd_gather(c, u.unit, &full, &err), "gather");
	printf("rank %u of %u: w[0] was %f, is %f\n", me.rank, me.world_size, before,
	       first_of(c, full));
	must(shardd_release(c, u.unit, &err), "release");
	must(shardd_leave(c, &err), "leave");
	shardd_close(c);
	return 0;
}
