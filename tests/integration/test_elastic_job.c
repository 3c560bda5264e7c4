/*
 * Jobs that change their number of ranks by themselves, while their trainers stay: 4 ranks, one is killed,
 * 3 go on in the same processes, then one comes back. At every size they train as a fresh job of that size
 * does that has loaded the same state, bit for bit.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "fdcheck.h"

enum {
	UNITS = 2,
	MOST = 8,
	ROWS = 1003,
	WIDTH = 5,
	ELEMENTS = ROWS * (WIDTH + 1),
	GRACE_MS = 700,
	ALL_STEPS = 7
};

static char root[64];

static void root_begin(void)
{
	snprintf(root, sizeof(root), "/tmp/shardd-elastic-XXXXXX");
	cr_assert(mkdtemp(root));
}

static void root_end(void)
{
	char command[256];

	snprintf(command, sizeof(command), "rm -rf '%s'", root);
	cr_assert_eq(system(command), 0);
}

static void begin(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

	root_begin();
	snprintf(set, sizeof(set), "checkpoint_roots=%s", root);
	args[1] = set;
	failfix_begin(args);
}

static void end(void)
{
	failfix_end();
	root_end();
}

TestSuite(elastic_job, .init = begin, .fini = end, .timeout = 180);

/* Shared with all trainers of a job. */
struct play {
	char dir[128];     /* a fresh job: load what is there first; "": not */
	uint32_t grace_ms; /* 0: the job is not elastic */
	stage until;       /* they may train up to this step */
	atomic_uint done;  /* the last step that rank 0 has made */
	atomic_uint joins[MOST], rank[MOST], world[MOST]; /* by number: so far, and now */
	float at_end[UNITS][ELEMENTS];                    /* after the step @until */
};

static struct play *play_new(uint32_t grace_ms, unsigned until)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->grace_ms = grace_ms;
	stage_set(&p->until, until);
	return p;
}

static struct shardd_membership join(shardd_client *c, const struct trainer *t)
{
	struct play *p = t->arg;
	const struct shardd_job job = { .size = sizeof(job),
					.name = t->job,
					.world_size = t->world,
					.rank = t->rank,
					.lifetime = SHARDD_KEEP,
					.op_timeout_ms = 50000,
					.min_ranks = p->grace_ms ? 2 : 0,
					.max_ranks = p->grace_ms ? MOST : 0,
					.join_grace_ms = p->grace_ms };
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	atomic_store(&p->rank[t->rank], me.rank);
	atomic_store(&p->world[t->rank], me.world_size);
	atomic_fetch_add(&p->joins[t->rank], 1);
	return me;
}

static void register_units(shardd_client *c, shardd_unit *ret)
{
	static const enum shardd_layout layouts[UNITS] = { SHARDD_LAYOUT_FLAT, SHARDD_LAYOUT_DIM0 };

	for (unsigned i = 0; i < UNITS; i++) {
		const uint64_t shape[] = { ROWS, WIDTH };
		const struct shardd_tensor tensors[] = {
			{ .name = "weight", .shape = shape, .dims = 2 },
			{ .name = "bias", .shape = shape, .dims = 1 },
		};
		const char *const names[UNITS] = { "flat", "dim0" };
		struct shardd_unit_spec spec = {
			.size = sizeof(spec),
			.name = names[i],
			.tensors = tensors,
			.n_tensors = 2,
			.layout = layouts[i],
			.optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01, .weight_decay = 0.1 },
		};
		struct shardd_unit_info info;

		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		ret[i] = info.unit;
	}
}

/* ABORTED is nothing that a trainer dies of here. */
#define TRY(call)                                         \
	do {                                              \
		int rc_ = (call);                         \
		if (rc_ == -SHARDD_ABORTED)               \
			return rc_;                       \
		train_ok(rc_, #call, __FILE__, __LINE__); \
	} while (0)

static int reduce(shardd_client *c, shardd_unit u, uint32_t rank, uint64_t seed)
{
	struct shardd_tensor_place places[2];
	float *values = train_numbers(ELEMENTS, seed * 64 + rank);
	void *buffer;
	int rc = shardd_gradient(c, u, &buffer, &train_err);
	const float *from = values;

	if (rc == 0)
		rc = shardd_tensor_places(c, u, places, 2, &train_err);
	for (unsigned k = 0; rc == 0 && k < 2; k++) {
		train_write(c, (float *)buffer + places[k].offset, from,
			    places[k].elements * sizeof(float));
		from += places[k].elements;
	}
	free(values);
	return rc ? rc : shardd_reduce(c, u, &train_err);
}

static int read_params(shardd_client *c, const shardd_unit *units, struct play *p, uint32_t rank)
{
	for (unsigned i = 0; i < UNITS; i++) {
		struct shardd_tensor_place places[2];
		float *to = p->at_end[i];
		const void *full;

		TRY(shardd_gather(c, units[i], &full, &train_err));
		TRY(shardd_tensor_places(c, units[i], places, 2, &train_err));
		for (unsigned k = 0; rank == 0 && k < 2; to += places[k++].elements)
			train_read(c, to, (const float *)full + places[k].offset,
				   places[k].elements * sizeof(float));
		TRY(shardd_release(c, units[i], &train_err));
	}
	return 0;
}

/* The gradients are those of the step and of the rank that the process is now. */
static int make_step(shardd_client *c, const shardd_unit *units, const struct shardd_membership *me,
		     uint64_t step)
{
	uint64_t blob[2] = { step, me->rank };

	for (unsigned i = UNITS; i-- > 0;)
		TRY(reduce(c, units[i], me->rank, step * UNITS + i));
	TRY(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRY(shardd_commit(c, step, blob, sizeof(blob), &train_err));
	return 0;
}

/* One epoch, from the step that the job is at. @ret: 0: all steps are made. */
static int epoch(shardd_client *c, const struct trainer *t, struct shardd_membership *me)
{
	struct play *p = t->arg;
	uint64_t step = me->has_step ? me->step : 0;
	shardd_unit units[UNITS];

	TRAINER_CHECK(!me->torn);
	register_units(c, units);
	for (unsigned i = 0; !me->has_step && i < UNITS; i++)
		TRY(shardd_init_seed(c, units[i], i + 1, &train_err));
	for (; step < ALL_STEPS; step++) {
		if (step == atomic_load(&p->until)) {
			TRY(read_params(c, units, p, me->rank));
			TRY(shardd_barrier(c, SHARDD_WORLD, &train_err));
			if (me->rank == 0)
				atomic_store(&p->done, (unsigned)step);
			TRAINER_AWAIT(step < atomic_load(&p->until), 60);
		}
		TRY(make_step(c, units, me, step + 1));
	}
	TRY(read_params(c, units, p, me->rank));
	TRY(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (me->rank == 0)
		atomic_store(&p->done, (unsigned)step);
	return 0;
}

static int trains(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t);

	while (epoch(c, t, &me))
		me = join(c, t);
	train_leave(c);
	return 0;
}

/* A fresh job: it loads the checkpoint, and makes the steps up to @until. */
static int trains_fresh(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = join(c, t);
	shardd_unit units[UNITS];

	register_units(c, units);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 0)
		TRAIN_OK(shardd_load_checkpoint(c, t->job, p->dir, NULL, NULL, &train_err));
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	me = join(c, t);
	register_units(c, units);
	for (uint64_t step = me.step + 1; step <= atomic_load(&p->until); step++)
		TRAIN_OK(make_step(c, units, &me, step));
	TRAIN_OK(read_params(c, units, p, me.rank));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static void ctl_ok(const char *const *args)
{
	char out[2048];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
}

static void delete (const char *job)
{
	ctl_ok((const char *const[]){ "job", "delete", job, NULL });
}

/* The state of the job, of which its ranks train up to the step @until; and then those of @world ranks
 * who load it do the same. */
static void expect_as_fresh(struct play *p, uint32_t world, unsigned until)
{
	struct play *fresh = play_new(0, until);

	snprintf(fresh->dir, sizeof(fresh->dir), "%s/%u", root, until);
	(void)mkdir(fresh->dir, 0777);
	ctl_ok((const char *const[]){ "checkpoint", "save", "walks", fresh->dir, NULL });
	stage_set(&p->until, until);
	AWAIT(atomic_load(&p->done) == until, 30);
	trainers_run(&trainfix, "fresh", world, trains_fresh, fresh, 60);
	delete ("fresh");
	for (unsigned i = 0; i < UNITS; i++)
		cr_expect_arr_eq(p->at_end[i], fresh->at_end[i], sizeof(p->at_end[i]),
				 "%u ranks, step %u: unit %u differs", world, until, i);
	cr_expect_neq(p->at_end[0][0], 0);
}

static void expect_is(const struct play *p, uint32_t number, uint32_t rank, uint32_t world)
{
	AWAIT(atomic_load(&p->rank[number]) == rank && atomic_load(&p->world[number]) == world, 30);
}

static void wait_text(const char *words)
{
	char text[512] = "";

	AWAIT((fail_job_text(&trainfix, "walks", "elastic_wait", text, sizeof(text)),
	       strstr(text, words)),
	      20);
}

static pid_t start(uint32_t number, struct play *p)
{
	return trainer_start(&trainfix, "walks", number, 4, trains, p);
}

static void start_four(struct play *p, pid_t *pids)
{
	for (uint32_t i = 0; i < 4; i++)
		pids[i] = start(i, p);
	AWAIT(atomic_load(&p->done) == 2, 30);
}

Test(elastic_job, goes_on_with_three_of_four_and_with_four_again)
{
	struct play *p = play_new(GRACE_MS, 2);
	pid_t pids[4];

	start_four(p, pids);
	fail_kill(pids[1]);
	stage_set(&p->until, 3); /* the step that they begin finds out */
	wait_text("waiting for 1 of 4 ranks (1), shrinks to 3 in ");
	expect_is(p, 3, 2, 3);
	expect_is(p, 2, 1, 3);
	expect_is(p, 0, 0, 3);
	AWAIT(atomic_load(&p->done) == 3, 30);
	cr_expect_eq(fail_job_number(&trainfix, "walks", "world_size"), 3);
	expect_as_fresh(p, 3, 4);

	pids[1] = start(1, p);
	wait_text("rank 1 (pid ");
	stage_set(&p->until, 5);
	expect_is(p, 1, 1, 4);
	expect_is(p, 3, 3, 4);
	AWAIT(atomic_load(&p->done) == 5, 30);
	expect_as_fresh(p, 4, ALL_STEPS);
	for (uint32_t i = 0; i < 4; i++)
		cr_expect_eq(trainer_wait(pids[i], 30), 0);
	delete ("walks");
}

/* In one process of each number that was not killed. */
Test(elastic_job, shrinks_to_its_least_size_and_grows_beyond_the_first)
{
	struct play *p = play_new(GRACE_MS, 2);
	pid_t pids[4], more[2];

	start_four(p, pids);
	fail_kill(pids[0]);
	fail_kill(pids[2]);
	stage_set(&p->until, 3);
	expect_is(p, 1, 0, 2);
	expect_is(p, 3, 1, 2);
	AWAIT(atomic_load(&p->done) == 3, 30);
	expect_as_fresh(p, 2, 4);
	/* all that were started, and two more */
	pids[0] = start(0, p);
	pids[2] = start(2, p);
	more[0] = start(4, p);
	more[1] = start(5, p);
	AWAIT(fail_times_logged(&trainfix, "waits to join") == 4, 20);
	stage_set(&p->until, 5);
	expect_is(p, 5, 5, 6);
	expect_is(p, 1, 1, 6);
	AWAIT(atomic_load(&p->done) == 5, 30);
	expect_as_fresh(p, 6, ALL_STEPS);
	for (uint32_t i = 0; i < 4; i++)
		cr_expect_eq(trainer_wait(pids[i], 30), 0);
	for (uint32_t i = 0; i < 2; i++)
		cr_expect_eq(trainer_wait(more[i], 30), 0);
	delete ("walks");
}

/* All have ended, and their launcher starts as many as at first: they do not have to wait for a commit. */
Test(elastic_job, has_its_first_size_when_all_are_started_again)
{
	struct play *p = play_new(GRACE_MS, 2), *q = play_new(GRACE_MS, ALL_STEPS);
	pid_t pids[4];

	start_four(p, pids);
	fail_kill(pids[1]);
	stage_set(&p->until, 3);
	AWAIT(atomic_load(&p->done) == 3, 30);
	for (uint32_t i = 0; i < 4; i++)
		if (i != 1)
			fail_kill(pids[i]);
	cr_expect_eq(fail_job_number(&trainfix, "walks", "world_size"), 3);
	for (uint32_t i = 0; i < 4; i++)
		pids[i] = start(i, q);
	for (uint32_t i = 0; i < 4; i++)
		cr_expect_eq(trainer_wait(pids[i], 30), 0);
	for (uint32_t i = 0; i < 4; i++)
		expect_is(q, i, i, 4);
	cr_expect_eq(fail_job_number(&trainfix, "walks", "step"), ALL_STEPS);
	delete ("walks");
}

/* ----------------------------------------------------------------------- what is refused */

struct wish {
	uint32_t world_size, rank, grace_ms;
	struct told told;
};

static int is_refused(const struct trainer *t)
{
	struct wish *w = t->arg;
	const struct shardd_job job = { .size = sizeof(job),
					.name = t->job,
					.world_size = w->world_size,
					.rank = w->rank,
					.lifetime = SHARDD_KEEP,
					.min_ranks = 2,
					.max_ranks = MOST,
					.join_grace_ms = w->grace_ms };
	shardd_client *c = train_connect(t);

	told_note(&w->told, shardd_join(c, &job, NULL, &train_err));
	shardd_close(c);
	return 0;
}

static void expect_refused(uint32_t world, uint32_t rank, uint32_t grace_ms, enum shardd_code code,
			   const char *words)
{
	struct wish *w = trainer_shared(sizeof(*w));
	pid_t pid;

	w->world_size = world;
	w->rank = rank;
	w->grace_ms = grace_ms;
	pid = trainer_start(&trainfix, "walks", 0, 4, is_refused, w);
	told_check(&w->told, code, words);
	cr_assert_eq(trainer_wait(pid, 30), 0, "%s", words);
}

Test(elastic_job, refuses_what_would_be_a_surprise)
{
	struct play *p = play_new(GRACE_MS, 2);
	pid_t pids[4];

	start_four(p, pids);
	expect_refused(4, 1, GRACE_MS, SHARDD_FAILED_PRECONDITION,
		       "rank 1 of job 'walks' is taken by pid");
	expect_refused(4, 1, 0, SHARDD_FAILED_PRECONDITION,
		       "job 'walks' has a join_grace_ms of 700, not 0");
	expect_refused(4, 8, GRACE_MS, SHARDD_INVALID_ARGUMENT, "rank 8 is out of range (0..7)");
	expect_refused(4, 5, 0, SHARDD_INVALID_ARGUMENT, "rank 5 is out of range (0..3)");
	for (uint32_t i = 0; i < 4; i++) {
		kill(pids[i], SIGKILL);
		(void)trainer_wait(pids[i], 20);
	}
	delete ("walks");
}

/* -------------------------------------------------------------- the daemon dies, too */

static void begin_held(void)
{
	fdcheck_begin();
	root_begin();
	daemonfix_start_held(&trainfix, NULL);
}

static void end_held(void)
{
	daemonfix_stop(&trainfix);
	root_end();
	fdcheck_end();
}

TestSuite(elastic_held, .init = begin_held, .fini = end_held, .timeout = 180);

/* Within the grace, whose time then begins again, and when the ranks have other numbers than their
 * processes. */
Test(elastic_held, outlives_the_daemon)
{
	struct play *p = play_new(3000, 2);
	pid_t pids[4];

	start_four(p, pids);
	fail_kill(pids[0]);
	stage_set(&p->until, 3);
	wait_text("shrinks to 3 in ");
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	wait_text("shrinks to 3 in ");
	expect_is(p, 1, 0, 3);
	expect_is(p, 3, 2, 3);
	AWAIT(atomic_load(&p->done) == 3, 30);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect_eq(fail_job_number(&trainfix, "walks", "world_size"), 3);
	cr_expect_eq(fail_job_number(&trainfix, "walks", "launched"), 4);
	stage_set(&p->until, 4);
	AWAIT(atomic_load(&p->done) == 4, 30);
	expect_is(p, 3, 2, 3);
	pids[0] = start(0, p);
	wait_text("rank 0 (pid ");
	stage_set(&p->until, ALL_STEPS);
	AWAIT(atomic_load(&p->done) == ALL_STEPS, 30);
	expect_is(p, 0, 0, 4);
	for (uint32_t i = 0; i < 4; i++)
		cr_expect_eq(trainer_wait(pids[i], 30), 0);
	delete ("walks");
}
