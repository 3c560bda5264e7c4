/*
 * Epochs: what a death leaves behind, who is told what until he joins again, and what
 * joining again, leaving and coming back mean for the others.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(epoch, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 3, N = 500 };

/* Shared between a test and its trainers. */
struct play {
	stage go;        /* the test's word to the trainers */
	stage at[WORLD]; /* how far each has come */
	pid_t pids[WORLD];
	struct told told[WORLD];
	float before[N], after[N];
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
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .op_timeout_ms = 50000 };
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

/* ------------------------------------------------- between step and commit */

/* One commit, then a step that is prepared; rank 2 dies there once. */
static int step_without_commit(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t);
	struct shardd_unit_info u = train_register(c, "u", N, &with_adamw);

	if (!me.has_commit) {
		TRAIN_OK(shardd_init_seed(c, u.unit, 5, &train_err));
		TRAIN_OK(shardd_commit(c, 1, &t->rank, 4, &train_err));
		if (t->rank == 0)
			train_params(c, u.unit, p->before, sizeof(p->before));
		reduce(c, u.unit, t->rank, 1);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		stage_set(&p->at[t->rank], 1);
		if (t->rank == 2)
			for (;;)
				pause();
		TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
		TRAIN_FAILS(shardd_commit(c, 2, NULL, 0, &train_err), SHARDD_ABORTED);
		me = join(c, t);
	}
	TRAINER_CHECK(me.has_commit && me.step == 1 && !me.torn && me.resumed);
	TRAINER_CHECK(me.blob_bytes == 4 && memcmp(me.blob, &t->rank, 4) == 0);
	if (t->rank == 0) {
		train_params(c, u.unit, p->after, sizeof(p->after));
		TRAIN_SAME(p->after, p->before, sizeof(p->before));
	}
	/* the gradient went as well: with no new one a step does nothing */
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 2, NULL, 0, &train_err));
	if (t->rank == 0) {
		train_params(c, u.unit, p->after, sizeof(p->after));
		TRAIN_SAME(p->after, p->before, sizeof(p->before));
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(epoch, death_between_step_and_commit_leaves_the_parameters)
{
	struct play *p = play_new();

	play_start(p, "between", step_without_commit);
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) == 1, 30);
	fail_kill(p->pids[2]);
	/* also if its successor is there before the others have noticed */
	p->pids[2] = trainer_start(&trainfix, "between", 2, WORLD, step_without_commit, p);
	AWAIT(fail_rank_is(&trainfix, "between", 2, "JOINED"), 30);
	stage_set(&p->go, 1);
	play_end(p);
}

/* ---------------------------------------------------------------- survivors */

static void all_aborted(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	struct shardd_unit_info info;
	struct shardd_tensor w = { .name = "w" };
	struct shardd_unit_spec spec = { sizeof(spec), "late", &w, 1, .group = SHARDD_WORLD };
	uint32_t ranks[] = { 0, 1 };
	shardd_group g;
	const void *full;
	void *data;

	TRAIN_FAILS(shardd_gather(c, u, &full, &train_err), SHARDD_ABORTED);
	told_now("join again");
	TRAIN_FAILS(shardd_release(c, u, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_gradient(c, u, &data, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_alloc(c, 64, &buffer, &data, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_free(c, buffer, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_init_seed(c, u, 1, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_step(c, SHARDD_WORLD, NULL, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_commit(c, 9, NULL, 0, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_group_create(c, "g", ranks, 2, &g, &train_err), SHARDD_ABORTED);
	told_now("join again");
}

/* Rank 0 holds things, is told, joins again; ids and addresses stay. */
static int survivor(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t), again;
	shardd_unit u = train_zero_unit(c, "u", N, NULL);
	const void *full, *full_again;
	uint64_t buffer;
	void *data;

	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	TRAIN_OK(shardd_alloc(c, 64, &buffer, &data, &train_err));
	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	stage_set(&p->at[t->rank], 1);
	if (t->rank == 2)
		for (;;)
			pause();
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	all_aborted(c, u, buffer);
	stage_set(&p->at[t->rank], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 2, 60);
	again = join(c, t);
	TRAINER_CHECK(again.epoch > me.epoch);
	TRAINER_CHECK(train_register(c, "u", N, NULL).unit == u);
	/* nothing is held from before */
	TRAIN_FAILS(shardd_free(c, buffer, &train_err), SHARDD_NOT_FOUND);
	TRAIN_OK(shardd_gather(c, u, &full_again, &train_err));
	TRAINER_CHECK(full_again == full);
	stage_set(&p->at[t->rank], 3);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_release(c, u, &train_err));
	train_leave(c);
	return 0;
}

static int newcomer(const struct trainer *t)
{
	shardd_client *c = train_connect(t);

	join(c, t);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(epoch, survivors_are_refused_until_they_join_again)
{
	struct play *p = play_new();

	play_start(p, "survive", survivor);
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) == 1, 30);
	fail_kill(p->pids[2]);
	AWAIT(fail_rank_is(&trainfix, "survive", 2, "DEAD"), 20);
	cr_assert(fail_rank_is(&trainfix, "survive", 0, "STALE"));
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < 2; r++)
		AWAIT(atomic_load(&p->at[r]) == 2, 30);
	stage_set(&p->go, 2);
	for (uint32_t r = 0; r < 2; r++)
		AWAIT(atomic_load(&p->at[r]) == 3, 30);
	cr_assert(fail_job_is(&trainfix, "survive", "FORMING"));
	p->pids[2] = trainer_start(&trainfix, "survive", 2, WORLD, newcomer, p);
	play_end(p);
}

/* --------------------------------------------------------- join, join, leave */

/* Rank 1 joins twice: that ends the epoch of the others. */
static int double_joiner(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	uint64_t epoch = join(c, t).epoch;

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 1) {
		uint64_t second = join(c, t).epoch;

		TRAINER_CHECK(second > epoch);
	} else {
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		told_now("rank 1 (pid ");
		told_now("has joined again");
		join(c, t);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(epoch, joining_twice_ends_the_epoch_for_the_others)
{
	struct play *p = play_new();

	play_start(p, "double", double_joiner);
	play_end(p);
}

/* Rank 0 leaves and comes back on the same client, and can do all it could before. */
static int comes_back(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit u;
	void *data;

	join(c, t);
	u = train_zero_unit(c, "u", N, &with_adamw);
	reduce(c, u, t->rank, 1);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 0) {
		TRAIN_OK(shardd_leave(c, &train_err));
		TRAIN_FAILS(shardd_leave(c, &train_err), SHARDD_FAILED_PRECONDITION);
		TRAIN_FAILS(shardd_gradient(c, u, &data, &train_err), SHARDD_FAILED_PRECONDITION);
		stage_set(&p->at[0], 1);
		TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	} else {
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		told_now("rank 0 (pid ");
		told_now("has left job 'back'");
		stage_set(&p->at[t->rank], 1);
		TRAINER_AWAIT(atomic_load(&p->at[0]) == 2, 60);
	}
	join(c, t);
	stage_set(&p->at[t->rank], 2);
	/* joining one after the other may have ended an epoch in between */
	while (shardd_barrier(c, SHARDD_WORLD, &train_err) == -SHARDD_ABORTED)
		join(c, t);
	reduce(c, u, t->rank, 1);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	train_leave(c);
	return 0;
}

Test(epoch, who_has_left_may_come_back_on_the_same_client)
{
	/* Was: the member came back with the pool that went when it left, and its next
	 * gradient buffer ended the daemon. */
	struct play *p = play_new();

	play_start(p, "back", comes_back);
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) == 1, 30);
	stage_set(&p->go, 1);
	play_end(p);
}

/* A client that has left may come back as another rank. */
static int changes_rank(const struct trainer *t)
{
	struct trainer other = *t;
	shardd_client *c = train_connect(t);
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = 3,
				  .lifetime = SHARDD_KEEP,
				  .rank = 1 };

	job.rank = 0;
	TRAIN_OK(shardd_join(c, &job, NULL, &train_err));
	job.rank = 1;
	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("cannot become rank 1");
	TRAIN_OK(shardd_leave(c, &train_err));
	TRAIN_OK(shardd_join(c, &job, NULL, &train_err));
	other.rank = 1;
	train_register(c, "u", N, NULL);
	train_leave(c);
	return other.rank != 1;
}

Test(epoch, another_rank_is_free_to_take_only_after_leaving)
{
	static const char *const delete[] = { "job", "delete", "change", NULL };

	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "change", 0, WORLD, changes_rank, NULL),
				  30),
		     0);
	json_decref(daemonfix_ctl(&trainfix, delete));
}

static int takes_rank(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);

	join(c, t);
	stage_set(&p->at[0], 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_OK(shardd_leave(c, &train_err));
	shardd_close(c);
	return 0;
}

static int wants_rank(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_job job = {
		.size = sizeof(job), .name = t->job, .world_size = t->world, .rank = t->rank
	};
	char who[64];

	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	snprintf(who, sizeof(who), "is taken by pid %d", (int)p->pids[0]);
	told_now(who);
	shardd_close(c);
	return 0;
}

Test(epoch, a_rank_is_one_process)
{
	struct play *p = play_new();

	p->pids[0] = trainer_start(&trainfix, "taken", 1, WORLD, takes_rank, p);
	AWAIT(atomic_load(&p->at[0]) == 1, 30);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "taken", 1, WORLD, wants_rank, p), 30),
		     0);
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(p->pids[0], 30), 0);
}

/* Ranks 1 and 2 wait in a collective when rank 0 leaves. */
static int is_left(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);

	join(c, t);
	if (t->rank == 0)
		TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	else
		told_note(&p->told[t->rank], shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(epoch, those_who_wait_are_told_that_a_rank_has_left)
{
	struct play *p = play_new();
	char who[64];

	play_start(p, "left", is_left);
	for (uint32_t r = 1; r < WORLD; r++)
		AWAIT(fail_has_op(&trainfix, "left", r, "Barrier", "WAIT"), 20);
	stage_set(&p->go, 1);
	snprintf(who, sizeof(who), "rank 0 (pid %d) has left job 'left'", (int)p->pids[0]);
	for (uint32_t r = 1; r < WORLD; r++)
		told_check(&p->told[r], SHARDD_ABORTED, who);
	play_end(p);
}
