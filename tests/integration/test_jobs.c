/*
 * How long jobs live: lifetimes, time to live, deletion under trainers, drain, the
 * daemon's own end, new limits by SIGHUP.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "failfix.h"

static void test_jobs_begin(void)
{
	failfix_begin(NULL);
}

TestSuite(jobs, .init = test_jobs_begin, .fini = failfix_end, .timeout = 120);
/* Those that need a daemon of their own; a suite's .init would be run besides the test's. */
TestSuite(jobs_own, .timeout = 120);

enum { WORLD = 2, N = 300 };

struct play {
	enum shardd_lifetime lifetime;
	uint32_t ttl_s;
	bool stay; /* do not leave */
	stage go, at[WORLD];
	struct told told[WORLD];
	pid_t pids[WORLD];
	float params[N];
};

static struct play *play_new(enum shardd_lifetime lifetime, uint32_t ttl_s)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->lifetime = lifetime;
	p->ttl_s = ttl_s;
	return p;
}

static int join(shardd_client *c, const struct trainer *t, struct shardd_membership *ret)
{
	const struct play *p = t->arg;
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .lifetime = p->lifetime,
				  .ttl_s = p->ttl_s };

	return shardd_join(c, &job, ret, &train_err);
}

static void all_at(struct play *p, unsigned where)
{
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) >= where, 30);
}

static void start_all(struct play *p, const char *job, trainer_fn fn)
{
	for (uint32_t r = 0; r < WORLD; r++)
		p->pids[r] = trainer_start(&trainfix, job, r, WORLD, fn, p);
}

static void end_all(struct play *p)
{
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
}

static int ctl(const char *const *args, const char *words)
{
	char out[2048];
	int code = daemonfix_ctl_text(&trainfix, args, out, sizeof(out));

	cr_assert(strstr(out, words), "\"%s\" is not in \"%s\"", words, out);
	return code;
}

/* ----------------------------------------------------------------- lifetimes */

/* Makes something, then ends cleanly or not. */
static int makes(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit u;

	TRAIN_OK(join(c, t, NULL));
	u = train_zero_unit(c, "u", N, NULL);
	TRAIN_OK(shardd_init_seed(c, u, 1 + t->world, &train_err));
	TRAIN_OK(shardd_commit(c, 8, "blob", 4, &train_err));
	if (t->rank == 0)
		train_params(c, u, p->params, sizeof(p->params));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (p->stay && t->rank == 1) {
		/* the last one, and not cleanly */
		TRAINER_AWAIT(atomic_load(&p->at[0]) == 1, 60);
		shardd_close(c);
		return 0;
	}
	train_leave(c);
	stage_set(&p->at[t->rank], 1);
	return 0;
}

static int finds(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me;
	struct shardd_unit_info u;
	float *x = train_alloc(sizeof(p->params));

	TRAIN_OK(join(c, t, &me));
	TRAINER_CHECK(me.resumed && me.has_commit && me.step == 8 && !me.torn);
	TRAINER_CHECK(me.blob_bytes == 4 && memcmp(me.blob, "blob", 4) == 0);
	u = train_register(c, "u", N, NULL);
	TRAINER_CHECK(u.initialised);
	train_params(c, u.unit, x, sizeof(p->params));
	TRAIN_SAME(x, p->params, sizeof(p->params));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	free(x);
	train_leave(c);
	return 0;
}

Test(jobs, ephemeral_is_freed_when_the_last_has_left)
{
	struct play *p = play_new(SHARDD_EPHEMERAL, 0);

	trainers_run(&trainfix, "e", WORLD, makes, p, 60);
	AWAIT(!fail_has_job(&trainfix, "e"), 20);
	cr_assert_eq(daemonfix_bytes(&trainfix), 0);
}

Test(jobs, ephemeral_is_kept_after_an_unclean_end_until_its_time_is_up)
{
	static const char *const delete[] = { "job", "delete", "long", NULL };
	struct play *p = play_new(SHARDD_EPHEMERAL, 0);
	struct play *brief = play_new(SHARDD_EPHEMERAL, 1);

	p->stay = brief->stay = true;
	trainers_run(&trainfix, "long", WORLD, makes, p, 60);
	AWAIT(fail_job_is(&trainfix, "long", "IDLE"), 20);
	trainers_run(&trainfix, "brief", WORLD, makes, brief, 60);
	AWAIT(!fail_has_job(&trainfix, "brief"), 20);
	cr_assert(fail_job_is(&trainfix, "long", "IDLE"));
	p->stay = false;
	trainers_run(&trainfix, "long", WORLD, finds, p, 60);
	AWAIT(!fail_has_job(&trainfix, "long"), 20);
	cr_assert_neq(ctl(delete, "there is no job 'long'"), 0);
}

Test(jobs, keep_stays_until_it_is_deleted)
{
	static const char *const delete[] = { "job", "delete", "k", NULL };
	struct play *p = play_new(SHARDD_KEEP, 0);

	trainers_run(&trainfix, "k", WORLD, makes, p, 60);
	AWAIT(fail_job_is(&trainfix, "k", "IDLE"), 20);
	cr_assert_gt(daemonfix_bytes(&trainfix), 0);
	trainers_run(&trainfix, "k", WORLD, finds, p, 60);
	cr_assert(fail_job_is(&trainfix, "k", "IDLE"));
	cr_assert_eq(ctl(delete, "deleted"), 0);
	AWAIT(daemonfix_bytes(&trainfix) == 0, 20);
	cr_assert(!fail_has_job(&trainfix, "k"));
}

Test(jobs, keep_ends_with_its_time_to_live)
{
	struct play *p = play_new(SHARDD_KEEP, 1);
	uint64_t begin_us;

	trainers_run(&trainfix, "k", WORLD, makes, p, 60);
	begin_us = clock_now_us();
	AWAIT(!fail_has_job(&trainfix, "k"), 20);
	cr_assert_geq(clock_now_us() - begin_us, 500000u);
	AWAIT(daemonfix_bytes(&trainfix) == 0, 20);
}

/* ------------------------------------------------------------------ deletion */

/* Rank 0 waits in a barrier that rank 1 never reaches. */
static int is_deleted_under(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me;
	const void *full;
	shardd_unit u;

	TRAIN_OK(join(c, t, NULL));
	u = train_zero_unit(c, "u", N, NULL);
	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	stage_set(&p->at[t->rank], 1);
	if (t->rank == 0) {
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		told_now("job 'd' was deleted");
	} else {
		TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
		TRAIN_FAILS(shardd_release(c, u, &train_err), SHARDD_ABORTED);
		told_now("job 'd' was deleted");
	}
	/* there is nothing to leave; a new job of that name is another one */
	TRAIN_FAILS(shardd_leave(c, &train_err), SHARDD_ABORTED);
	told_now("job 'd' was deleted");
	TRAIN_OK(join(c, t, &me));
	TRAINER_CHECK(!me.resumed && !me.has_commit);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(jobs, deletion_under_trainers_only_by_force)
{
	/* Was: leaving a job that had been deleted ended the daemon. */
	static const char *const gentle[] = { "job", "delete", "d", NULL };
	static const char *const force[] = { "job", "delete", "--force", "d", NULL };
	struct play *p = play_new(SHARDD_EPHEMERAL, 0);

	start_all(p, "d", is_deleted_under);
	all_at(p, 1);
	AWAIT(fail_has_op(&trainfix, "d", 0, "Barrier", "WAIT"), 20);
	cr_assert_neq(ctl(gentle, "has 2 trainers"), 0);
	cr_assert(fail_job_is(&trainfix, "d", "RUNNING"));
	cr_assert_eq(ctl(force, "deleted"), 0);
	stage_set(&p->go, 1);
	end_all(p);
}

enum { LARGE = 4 << 20 };

/* Most of its time it is in a commit that applies a step. */
static int commits_for_long(const struct trainer *t)
{
	static const struct shardd_unit_spec spec = { .optimizer = { .kind = SHARDD_ADAMW,
								     .lr = 1 } };
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "u", LARGE, &spec);
	void *gradient;
	int r = 0;

	for (uint64_t step = 1; r == 0 && step < 100000; step++) {
		r = shardd_gradient(c, u, &gradient, &train_err);
		r = r ? r : shardd_reduce(c, u, &train_err);
		r = r ? r : shardd_step(c, SHARDD_WORLD, NULL, &train_err);
		r = r ? r : shardd_commit(c, step, NULL, 0, &train_err);
		stage_set(&p->at[0], (unsigned)step);
	}
	TRAIN_FAILS(r, SHARDD_ABORTED);
	pause();
	return 0;
}

Test(jobs, deleted_and_killed_while_a_step_is_applied)
{
	/* Was: the commit that waited for the step was the last to hold the job, which
	 * was freed under the end of the step. */
	static const char *const force[] = { "job", "delete", "--force", "big", NULL };

	for (int i = 0; i < 10; i++) {
		struct play *p = play_new(SHARDD_EPHEMERAL, 0);
		pid_t pid = trainer_start(&trainfix, "big", 0, 1, commits_for_long, p);

		AWAIT(atomic_load(&p->at[0]) >= 2, 60);
		AWAIT(fail_has_op(&trainfix, "big", 0, "Commit", "RUN"), 60);
		cr_assert_eq(ctl(force, "deleted"), 0);
		fail_kill(pid);
		AWAIT(daemonfix_bytes(&trainfix) == 0, 20);
	}
	daemonfix_check_alive(&trainfix);
}

/* ---------------------------------------------------------------------- drain */

/* Works until it is told to leave, commits, leaves. */
static int drains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	uint64_t step;
	float all = 0;
	uint64_t buffer;
	void *data;

	TRAIN_OK(join(c, t, NULL));
	TRAIN_OK(shardd_alloc(c, 64, &buffer, &data, &train_err));
	/* all must stop at the same step: one tells the others */
	for (step = 1; all == 0; step++) {
		train_poke(c, data, shardd_draining(c));
		TRAIN_OK(shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, 1, SHARDD_FP32, SHARDD_MAX,
					   &train_err));
		all = train_peek(c, data);
		stage_set(&p->at[t->rank], 1);
	}
	TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
	TRAINER_CHECK(shardd_draining(c));
	stage_set(&p->at[t->rank], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	train_leave(c);
	return 0;
}

static int is_not_let_in(const struct trainer *t)
{
	shardd_client *c = train_connect(t);

	TRAIN_FAILS(join(c, t, NULL), SHARDD_UNAVAILABLE);
	told_now("draining");
	shardd_close(c);
	return 0;
}

static int goes_on(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	struct shardd_membership me;

	TRAIN_OK(join(c, t, &me));
	TRAINER_CHECK(me.has_commit && !shardd_draining(c));
	train_leave(c);
	return 0;
}

Test(jobs, a_drained_job_is_left_with_a_commit)
{
	static const char *const drain[] = { "job", "drain", "k", NULL };
	static const char *const delete[] = { "job", "delete", "k", NULL };
	struct play *p = play_new(SHARDD_KEEP, 0);

	start_all(p, "k", drains);
	all_at(p, 1);
	cr_assert_eq(ctl(drain, "2 trainers were told"), 0);
	all_at(p, 2);
	cr_assert(fail_job_is(&trainfix, "k", "DRAINING"));
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "k", 0, WORLD, is_not_let_in, p), 30),
		     0);
	stage_set(&p->go, 1);
	end_all(p);
	/* that was it: the next trainers may go on from that commit */
	cr_assert(fail_job_is(&trainfix, "k", "IDLE"));
	cr_assert_gt(fail_job_number(&trainfix, "k", "step"), 1);
	cr_assert_neq(fail_job_number(&trainfix, "k", "step"), UINT64_MAX);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "k", 0, WORLD, goes_on, p), 30), 0);
	cr_assert_eq(ctl(delete, "deleted"), 0);
}

/* ------------------------------------------------------- the daemon's own end */

static void sigterm(void)
{
	daemonfix_may_end(&trainfix);
	cr_assert_eq(kill(trainfix.pid, SIGTERM), 0);
}

Test(jobs, sigterm_lets_trainers_commit_and_leave)
{
	struct play *p = play_new(SHARDD_EPHEMERAL, 0);

	stage_set(&p->go, 1);
	start_all(p, "s", drains);
	all_at(p, 1);
	sigterm();
	end_all(p);
	cr_assert_eq(failfix_await_daemon(10), 0);
}

static int ignores(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);

	TRAIN_OK(join(c, t, NULL));
	train_zero_unit(c, "u", N, NULL);
	stage_set(&p->at[t->rank], 1);
	/* rank 0 waits for a rank 1 that does something else */
	if (t->rank == 0)
		told_note(&p->told[0], shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_UNAVAILABLE);
	shardd_close(c);
	return 0;
}

static void begin_with_short_drain(void)
{
	static const char *const args[] = { "--set", "drain_timeout_ms=700", NULL };

	failfix_begin(args);
}

Test(jobs_own, sigterm_does_not_wait_for_ever, .init = begin_with_short_drain, .fini = failfix_end)
{
	struct play *p = play_new(SHARDD_EPHEMERAL, 0);
	uint64_t begin_us;

	start_all(p, "s", ignores);
	all_at(p, 1);
	begin_us = clock_now_us();
	sigterm();
	cr_assert_eq(failfix_await_daemon(20), 0);
	cr_assert_geq(clock_now_us() - begin_us, 600000u);
	told_check(&p->told[0], SHARDD_UNAVAILABLE, "");
	stage_set(&p->go, 1);
	end_all(p);
}

static void begin_with_long_drain(void)
{
	static const char *const args[] = { "--set", "drain_timeout_ms=10min", NULL };

	failfix_begin(args);
}

Test(jobs_own, a_second_sigterm_ends_at_once, .init = begin_with_long_drain, .fini = failfix_end)
{
	struct play *p = play_new(SHARDD_EPHEMERAL, 0);

	start_all(p, "s", ignores);
	all_at(p, 1);
	sigterm();
	/* still there, and says what it does */
	AWAIT(fail_logged(&trainfix, "draining trainers=2"), 20);
	cr_assert(fail_has_job(&trainfix, "s"));
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "s2", 0, WORLD, is_not_let_in, p), 30),
		     0);
	sigterm();
	cr_assert_eq(failfix_await_daemon(10), 0);
	told_check(&p->told[0], SHARDD_UNAVAILABLE, "");
	stage_set(&p->go, 1);
	end_all(p);
}

/* ---------------------------------------------------------------------- SIGHUP */

static char config_path[64];

static void write_config(const char *text)
{
	FILE *f = fopen(config_path, "we");

	cr_assert(f);
	cr_assert_geq(fputs(text, f), 0);
	cr_assert_eq(fclose(f), 0);
}

static void begin_with_file(void)
{
	const char *args[] = { "--config", config_path, NULL };
	int fd;

	snprintf(config_path, sizeof(config_path), "/tmp/shardd-test-conf-XXXXXX");
	fd = mkstemp(config_path);
	cr_assert_geq(fd, 0);
	fd_close(fd);
	write_config("max_jobs: 1\n");
	failfix_begin(args);
}

static void end_with_file(void)
{
	unlink(config_path);
	failfix_end();
}

Test(jobs_own, sighup_brings_new_limits, .init = begin_with_file, .fini = end_with_file)
{
	static const char *const first[] = { "job", "create", "--world-size", "1", "a", NULL };
	static const char *const second[] = { "job", "create", "--world-size", "1", "b", NULL };
	static const char *const third[] = { "job", "create", "--world-size", "1", "c", NULL };
	char out[1024];

	cr_assert_eq(ctl(first, "created"), 0);
	cr_assert_neq(ctl(second, "max_jobs"), 0);
	write_config("max_jobs: nonsense\n");
	cr_assert_eq(kill(trainfix.pid, SIGHUP), 0);
	AWAIT(fail_logged(&trainfix, "configuration not reread"), 20);
	cr_assert_neq(ctl(second, "max_jobs"), 0);
	write_config("max_jobs: 2\n");
	cr_assert_eq(kill(trainfix.pid, SIGHUP), 0);
	AWAIT(daemonfix_ctl_text(&trainfix, second, (char[512]){ 0 }, 512) == 0, 20);
	cr_assert_neq(ctl(third, "max_jobs"), 0);
	/* limits of a user, too; one that names root holds for root */
	write_config("max_jobs: 9\nuser_limits: [\"root:max_jobs=2\"]\n");
	cr_assert_eq(kill(trainfix.pid, SIGHUP), 0);
	AWAIT((daemonfix_ctl_text(&trainfix, third, out, sizeof(out)), strstr(out, "user_limits")),
	      20);
	cr_assert(strstr(out,
			 "user 0 has 2 jobs, which is the limit ('0:max_jobs' of user_limits)"),
		  "%s", out);
}
