/*
 * Deaths while something runs in the daemon: a step that is being applied, a commit,
 * an op of the dead one's own. All or nothing, and nobody gets in its way.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(dying_midway, .init = trainfix_begin, .fini = trainfix_end, .timeout = 240);

enum { WORLD = 2, N = 4 << 20, ROUNDS = 24, SPAN_US = 8000 };

struct play {
	bool by_gather;     /* the step is applied by a gather, not by the commit */
	stage ready[WORLD]; /* the round whose step is prepared */
	stage resumed;      /* the round rank 0 has gone on from */
	stage over;
	pid_t pids[WORLD];
};

/* Every step takes exactly 1 off every parameter, which begin with 0. */
static const struct shardd_unit_spec sgd = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };

static struct shardd_membership join(shardd_client *c, const struct trainer *t)
{
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .op_timeout_ms = 50000,
				  .allow_torn = true };
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	return me;
}

static int prepare_step(shardd_client *c, shardd_unit u)
{
	float *ones = train_alloc(N * sizeof(*ones));
	void *gradient;
	int r = shardd_gradient(c, u, &gradient, &train_err);

	for (int i = 0; i < N; i++)
		ones[i] = 1;
	if (r == 0)
		train_write(c, gradient, ones, N * sizeof(*ones));
	free(ones);
	r = r ? r : shardd_reduce(c, u, &train_err);
	return r ? r : shardd_step(c, SHARDD_WORLD, NULL, &train_err);
}

/* All parameters have taken @steps steps. */
static void check_params(shardd_client *c, shardd_unit u, unsigned steps)
{
	float *x = train_alloc(N * sizeof(*x));

	train_params(c, u, x, N * sizeof(*x));
	for (int i = 0; i < N; i++)
		if (x[i] != -(float)steps) {
			fprintf(stderr, "element %d is %g after %u steps\n", i, x[i], steps);
			TRAINER_CHECK(x[i] == -(float)steps);
		}
	free(x);
}

/* The last move of a round, in which rank 1 dies: have the step applied. */
static int apply(shardd_client *c, shardd_unit u, const struct play *p, uint32_t rank,
		 uint64_t step)
{
	const struct timespec half = { .tv_nsec = SPAN_US / 2 * 1000 };
	const void *full;

	nanosleep(&half, NULL); /* so that the death may come before, meanwhile or after */
	if (!p->by_gather)
		return shardd_commit(c, step, NULL, 0, &train_err);
	if (rank == 1)
		for (;;)
			pause();
	return shardd_gather(c, u, &full, &train_err);
}

/* Is what rank 0 finds after its call ended with @rc what that result promised? */
static unsigned check_outcome(const struct play *p, int rc, const struct shardd_membership *before,
			      const struct shardd_membership *after)
{
	bool applied;

	TRAINER_CHECK(rc == 0 || rc == -SHARDD_ABORTED);
	if (!p->by_gather) {
		TRAINER_CHECK(!after->torn && after->step == before->step + (rc == 0));
		return rc == 0;
	}
	/* a step that was being applied goes on to its end, but the gather does not */
	applied = after->torn || after->step == before->step + 1;
	TRAINER_CHECK(applied ? !after->torn || after->step == before->step
			      : after->step == before->step && rc < 0);
	return applied;
}

/* In one life of rank 1 (the process), in all of rank 0's. */
static int survives(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t), after;
	shardd_unit u = train_register(c, "u", N, &sgd).unit;
	unsigned taken = 0;
	int r;

	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	me.step = 1;
	for (unsigned round = 1; round <= ROUNDS; round++) {
		TRAIN_OK(prepare_step(c, u));
		stage_set(&p->ready[0], round);
		TRAINER_AWAIT(atomic_load(&p->ready[1]) == round, 60);
		r = apply(c, u, p, 0, me.step + 1);
		if (r == 0)
			TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		after = join(c, t);
		taken += check_outcome(p, r, &me, &after);
		check_params(c, u, taken);
		me = after;
		if (me.torn) /* no commit has counted steps yet: this one does */
			TRAIN_OK(shardd_commit(c, ++me.step, NULL, 0, &train_err));
		stage_set(&p->resumed, round);
	}
	fprintf(stderr, "dying_midway: %s: %u of %d steps were applied\n", t->job, taken, ROUNDS);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

/* The signal ends this process in a moment, wherever it is then. */
static void die_soon(unsigned round)
{
	struct itimerval when = { .it_value.tv_usec = 1 + round * 2654435761u % SPAN_US };

	TRAINER_CHECK(setitimer(ITIMER_REAL, &when, NULL) == 0);
}

static int is_killed(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t);
	shardd_unit u = train_register(c, "u", N, &sgd).unit;
	unsigned round = atomic_load(&p->ready[0]) + 1;

	if (!me.has_commit) {
		TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
		TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
		me.step = 1;
	} else if (me.torn) {
		TRAIN_OK(shardd_commit(c, ++me.step, NULL, 0, &train_err));
	}
	if (round > ROUNDS) {
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		train_leave(c);
		return 0;
	}
	TRAIN_OK(prepare_step(c, u));
	stage_set(&p->ready[1], round);
	die_soon(round);
	(void)apply(c, u, p, 1, me.step + 1);
	pause();
	return 1;
}

static void die_midway(bool by_gather, const char *job)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->by_gather = by_gather;
	p->pids[0] = trainer_start(&trainfix, job, 0, WORLD, survives, p);
	p->pids[1] = trainer_start(&trainfix, job, 1, WORLD, is_killed, p);
	for (unsigned round = 1; round <= ROUNDS; round++) {
		cr_assert_eq(trainer_wait(p->pids[1], 60), 128 + SIGALRM);
		/* at once, so that it comes while the step may still be applied */
		p->pids[1] = trainer_start(&trainfix, job, 1, WORLD, is_killed, p);
		AWAIT(atomic_load(&p->resumed) == round, 60);
	}
	for (int r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %d", r);
}

Test(dying_midway, a_commit_is_made_by_all_or_not_at_all)
{
	die_midway(false, "commit");
}

Test(dying_midway, a_step_that_a_gather_applies_is_applied_whole_or_not_at_all)
{
	die_midway(true, "gather");
}

/* --------------------------------------------------- ops of a dead one run on */

enum { HUGE_UNIT = 24 << 20 };

static int keeps_initialising(const struct trainer *t)
{
	uint64_t n = HUGE_UNIT;
	struct shardd_tensor w = {
		.name = "w", .shape = &n, .dims = 1, .init = SHARDD_INIT_NORMAL, .b = 1
	};
	struct shardd_unit_spec spec = { sizeof(spec), "large", &w, 1, .group = SHARDD_WORLD };
	struct shardd_unit_info u;
	shardd_client *c = train_join(t);

	TRAIN_OK(shardd_register(c, &spec, 1, &u, &train_err));
	for (uint64_t seed = 0; seed < 10000; seed++)
		TRAIN_OK(shardd_init_seed(c, u.unit, seed, &train_err));
	return 1; /* nobody has killed it */
}

static int joins(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);

	stage_set(&p->ready[0], 1);
	TRAINER_AWAIT(atomic_load(&p->over) == 1, 60);
	train_leave(c);
	return 0;
}

Test(dying_midway, a_successor_waits_for_what_its_predecessor_has_running)
{
	/* Was: only ops of the joining process itself were waited for, so an Initialise or
	 * Reduce of a dead rank went on under its successor's feet. */
	struct play *p = trainer_shared(sizeof(*p));
	pid_t first = trainer_start(&trainfix, "heir", 0, 1, keeps_initialising, NULL), second;

	AWAIT(fail_has_op(&trainfix, "heir", 0, "Initialise", "RUN"), 60);
	fail_kill(first);
	second = trainer_start(&trainfix, "heir", 0, 1, joins, p);
	AWAIT(atomic_load(&p->ready[0]) == 1, 60);
	cr_assert(!fail_has_op(&trainfix, "heir", 0, "Initialise", "RUN"));
	stage_set(&p->over, 1);
	cr_assert_eq(trainer_wait(second, 30), 0);
}
