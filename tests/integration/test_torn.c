/*
 * Torn jobs: a step was applied after the last commit, by a read of the parameters,
 * when a trainer died. What a restart would go on from is no more.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(torn, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 3, N = 500 };

/* Shared between a test and its trainers. */
struct play {
	stage go;        /* the test's word to the trainers */
	stage at[WORLD]; /* how far each has come */
	bool allow_torn; /* how they join */
	pid_t pids[WORLD];
	float before[N];
};

static struct play *play_new(void)
{
	return trainer_shared(sizeof(struct play));
}

static void play_start(struct play *p, const char *job, trainer_fn fn)
{
	for (uint32_t r = 0; r < WORLD; r++)
		p->pids[r] = trainer_start(&trainfix, job, r, WORLD, fn, p);
}

static void play_end(struct play *p)
{
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
}

static struct shardd_membership join(shardd_client *c, const struct trainer *t)
{
	struct play *p = t->arg;
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .op_timeout_ms = 50000,
				  .allow_torn = p->allow_torn };
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	return me;
}

static const struct shardd_unit_spec with_adamw = { .optimizer = { .kind = SHARDD_ADAMW,
								   .lr = 0.1 } };

static void reduce(shardd_client *c, shardd_unit u, uint32_t rank, uint64_t seed)
{
	float *x = train_numbers(N, seed * 8 + rank);

	train_reduce(c, u, DTYPE_FP32, x, N);
	free(x);
}

/* A commit, then a step that a gather applies; rank 2 dies after that. */
static void tear(shardd_client *c, const struct trainer *t, struct shardd_unit_info *u,
		 struct shardd_unit_info *other)
{
	struct play *p = t->arg;

	TRAIN_OK(shardd_init_seed(c, u->unit, 5, &train_err));
	TRAIN_OK(shardd_init_seed(c, other->unit, 6, &train_err));
	TRAIN_OK(shardd_commit(c, 4, NULL, 0, &train_err));
	reduce(c, u->unit, t->rank, 1);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	if (t->rank == 0)
		train_params(c, u->unit, p->before, sizeof(p->before));
	stage_set(&p->at[t->rank], 1);
	if (t->rank == 2)
		for (;;)
			pause();
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
}

static void check_refused(shardd_client *c, shardd_unit u)
{
	const void *full;

	TRAIN_FAILS(shardd_gather(c, u, &full, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("TORN");
	told_now("initialise all units again");
	TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_clip_grad_norm(c, SHARDD_WORLD, 1, 2, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_step(c, SHARDD_WORLD, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_commit(c, 5, NULL, 0, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
}

static int torn_trainer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t);
	struct shardd_unit_info u = train_register(c, "u", N, &with_adamw);
	struct shardd_unit_info other = train_register(c, "other", N, NULL);
	float *x = train_alloc(N * sizeof(*x));

	if (!me.has_commit) {
		tear(c, t, &u, &other);
		me = join(c, t);
	}
	TRAINER_CHECK(me.has_commit && me.torn && me.step == 4);
	stage_set(&p->at[t->rank], 2);
	u = train_register(c, "u", N, &with_adamw);
	TRAINER_CHECK(!u.initialised);
	check_refused(c, u.unit);
	TRAINER_AWAIT(atomic_load(&p->go) == 2, 60);
	/* one unit is not enough */
	TRAIN_OK(shardd_init_seed(c, u.unit, 5, &train_err));
	check_refused(c, other.unit);
	TRAIN_OK(shardd_init_seed(c, other.unit, 6, &train_err));
	train_params(c, u.unit, x, N * sizeof(*x));
	reduce(c, u.unit, t->rank, 1);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	/* the commit went with its parameters: steps count from the begin again */
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	train_params(c, u.unit, x, N * sizeof(*x));
	TRAIN_SAME(x, p->before, N * sizeof(*x));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	free(x);
	train_leave(c);
	return 0;
}

static void kill_and_restart(struct play *p, const char *job, trainer_fn fn)
{
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) == 1, 30);
	fail_kill(p->pids[2]);
	p->pids[2] = trainer_start(&trainfix, job, 2, WORLD, fn, p);
	stage_set(&p->go, 1);
}

Test(torn, a_torn_job_refuses_until_all_units_are_initialised)
{
	struct play *p = play_new();

	play_start(p, "torn", torn_trainer);
	kill_and_restart(p, "torn", torn_trainer);
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) == 2, 30);
	cr_assert(fail_job_is(&trainfix, "torn", "TORN"));
	stage_set(&p->go, 2);
	play_end(p);
}

static int go_on_trainer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t);
	struct shardd_unit_info u = train_register(c, "u", N, &with_adamw);
	struct shardd_unit_info other = train_register(c, "other", N, NULL);
	float *x = train_alloc(N * sizeof(*x));

	if (!me.has_commit) {
		tear(c, t, &u, &other);
		me = join(c, t);
	}
	TRAINER_CHECK(me.has_commit && me.torn && me.step == 4);
	u = train_register(c, "u", N, &with_adamw);
	TRAINER_CHECK(u.initialised && u.optimizer_steps == 1);
	train_params(c, u.unit, x, N * sizeof(*x));
	TRAIN_SAME(x, p->before, N * sizeof(*x));
	TRAIN_OK(shardd_commit(c, 5, NULL, 0, &train_err));
	TRAINER_CHECK(!join(c, t).torn || t->rank != 0);
	free(x);
	shardd_close(c);
	return 0;
}

Test(torn, a_job_made_with_allow_torn_goes_on)
{
	static const char *const delete[] = { "job", "delete", "go-on", NULL };
	struct play *p = play_new();

	p->allow_torn = true;
	play_start(p, "go-on", go_on_trainer);
	kill_and_restart(p, "go-on", go_on_trainer);
	play_end(p);
	AWAIT(fail_job_is(&trainfix, "go-on", "IDLE"), 20);
	json_decref(daemonfix_ctl(&trainfix, delete));
}
