/*
 * What administrators do with the daemon: cordon, drain, handover, shutdown. Jobs that exist are not
 * disturbed, what keeps is kept, and what is lost is refused or said.
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
#include "trainunits.h"

static void begin(void)
{
	fdcheck_begin();
	daemonfix_start_held(&trainfix, NULL);
}

static void end(void)
{
	if (trainfix.pid)
		daemonfix_stop(&trainfix);
	fdcheck_end();
}

TestSuite(maintenance, .init = begin, .fini = end, .timeout = 120);

enum { NOBODY = 30002 };

struct play {
	stage steps, end;
	stage stubborn;  /* does not leave when told to */
	stage uncommits; /* leaves without a commit */
	enum shardd_lifetime lifetime;
};

static int ctl(const char *words, const char *const *args)
{
	char out[8192];
	int code = daemonfix_ctl_text(&trainfix, args, out, sizeof(out));

	cr_expect(strstr(out, words), "no '%s' in: %s", words, out);
	return code;
}

#define CTL(words, ...) ctl(words, (const char *const[]){ __VA_ARGS__, NULL })

/* Trains until it is told to end, or to leave. */
static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit units[TRAINUNITS];
	const void *params;
	uint64_t step = 0;

	train_join_as(c, t, p->lifetime);
	trainunits_register(c, units);
	trainunits_init(c, units);
	while (!atomic_load(&p->end) && (atomic_load(&p->stubborn) || !shardd_draining(c))) {
		trainunits_step(c, units, t->rank, ++step);
		stage_set(&p->steps, (unsigned)step);
		poll(NULL, 0, 1);
	}
	if (atomic_load(&p->uncommits)) {
		trainunits_reduce(c, units, t->rank, step + 1);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_gather(c, units[0], &params, &train_err)); /* it is applied */
		TRAIN_OK(shardd_release(c, units[0], &train_err));
	}
	train_leave(c);
	return 0;
}

static pid_t start(struct play *p, enum shardd_lifetime lifetime)
{
	pid_t pid;

	p->lifetime = lifetime;
	pid = trainer_start(&trainfix, "trains", 0, 1, trains, p);
	AWAIT(atomic_load(&p->steps) >= 2, 60);
	return pid;
}

static void finish(struct play *p, pid_t pid)
{
	stage_set(&p->end, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
}

/* ----------------------------------------------------------------------- cordon */

static int is_refused(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	struct shardd_job job = { .size = sizeof(job), .name = t->job, .world_size = t->world };

	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_UNAVAILABLE);
	told_now("cordoned (by uid");
	shardd_close(c);
	return 0;
}

Test(maintenance, a_cordon_refuses_new_jobs_and_leaves_the_others)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid = start(p, SHARDD_EPHEMERAL);
	unsigned steps;

	cr_expect_eq(CTL("is cordoned", "cordon"), 0);
	cr_expect_eq(CTL("already cordoned", "cordon"), 0);
	cr_expect_eq(CTL("cordoned (by uid", "job", "create", "more", "--world-size", "1"), 3);
	cr_expect_eq(trainer_wait(trainer_start(&trainfix, "more", 0, 1, is_refused, NULL), 30), 0);
	cr_expect_eq(CTL("cordoned by", "status"), 0);
	steps = atomic_load(&p->steps);
	AWAIT(atomic_load(&p->steps) > steps + 2, 30);
	cr_expect_eq(CTL("is uncordoned", "uncordon"), 0);
	cr_expect_eq(CTL("created", "job", "create", "more", "--world-size", "1"), 0);
	cr_expect(fail_logged(&trainfix, "daemon cordoned uid="));
	finish(p, pid);
}

Test(maintenance, a_cordon_outlives_the_daemon)
{
	cr_expect_eq(CTL("is cordoned", "cordon"), 0);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect_eq(CTL("cordoned by", "status"), 0);
	cr_expect_eq(CTL("cordoned (by uid", "job", "create", "more", "--world-size", "1"), 3);
	cr_expect_eq(CTL("is uncordoned", "uncordon"), 0);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	cr_expect_eq(CTL("created", "job", "create", "more", "--world-size", "1"), 0);
}

/* ------------------------------------------------------------------------ drain */

Test(maintenance, a_drain_waits_until_all_have_committed_and_left)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid = start(p, SHARDD_KEEP);

	cr_expect_eq(CTL("1 trainer was told to commit and leave, and has left", "drain",
			 "--timeout", "60"),
		     0);
	cr_expect_eq(trainer_wait(pid, 1), 0);
	cr_expect(fail_job_is(&trainfix, "trains", "IDLE"));
	cr_expect_eq(fail_job_number(&trainfix, "trains", "uncommitted"), 0);
	cr_expect_eq(CTL("0 jobs", "drain", "--wait"), 0, "nobody is there any more");
}

Test(maintenance, a_drain_says_for_whom_it_has_waited_in_vain)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid;

	stage_set(&p->stubborn, 1);
	pid = start(p, SHARDD_KEEP);
	cr_expect_eq(CTL("DEADLINE_EXCEEDED: after 1 s there are still trains (1 rank, step",
			 "drain", "--timeout", "1"),
		     1);
	finish(p, pid);
}

Test(maintenance, a_drain_says_who_has_left_without_a_commit)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid;

	stage_set(&p->uncommits, 1);
	pid = start(p, SHARDD_KEEP);
	cr_expect_eq(CTL("FAILED_PRECONDITION: job trains has", "drain", "--wait"), 1);
	cr_expect_eq(trainer_wait(pid, 30), 0);
}

/* --------------------------------------------------------------------- handover */

Test(maintenance, a_handover_keeps_jobs_and_trainers)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid, daemon = daemonfix_daemon(&trainfix);
	unsigned steps;

	setenv("SHARDD_RECONNECT_MS", "0", 1); /* the job, without its trainer */
	pid = start(p, SHARDD_KEEP);
	finish(p, pid);
	steps = atomic_load(&p->steps);
	cr_expect_eq(CTL("ms from the request to the first answer", "handover"), 0);
	cr_expect_neq(daemonfix_daemon(&trainfix), daemon);
	cr_expect_eq(fail_job_number(&trainfix, "trains", "step"), steps);
	cr_expect(fail_logged(&trainfix, "has ended with exit code 7; it is started again"));
}

/* -------------------------------------------------------------------- shutdown */

Test(maintenance, a_shutdown_is_refused_while_a_job_is_in_memory_only)
{
	struct play *p = trainer_shared(sizeof(*p));

	finish(p, start(p, SHARDD_KEEP));
	cr_expect_eq(CTL("1 KEEP job would be lost: job", "shutdown"), 1);
	cr_expect(fail_has_job(&trainfix, "trains"), "nothing has happened");
	cr_expect_eq(CTL("deleted", "job", "delete", "trains"), 0);
	cr_expect_eq(CTL("created", "job", "create", "empty", "--world-size", "1"), 0);
	daemonfix_may_end(&trainfix);
	cr_expect_eq(CTL("the daemon ends", "shutdown"), 0, "there is nothing to lose");
	cr_expect_eq(trainer_wait(trainfix.pid, 30), 0, "the holder ends, too");
	trainfix.pid = 0;
}

Test(maintenance, a_shutdown_that_discards_says_what_is_lost)
{
	struct play *p = trainer_shared(sizeof(*p));
	char words[96];

	finish(p, start(p, SHARDD_KEEP));
	daemonfix_may_end(&trainfix);
	cr_expect_eq(CTL("1 job ends with it", "shutdown", "--discard"), 0);
	cr_expect_eq(trainer_wait(trainfix.pid, 30), 0);
	snprintf(words, sizeof(words), "job=%d/trains uid=%d lifetime=KEEP step=%u committed=yes",
		 (int)getuid(), (int)getuid(), atomic_load(&p->steps));
	cr_expect(fail_logged(&trainfix, words));
	cr_expect(fail_logged(&trainfix, "state=\"in memory only: lost\""));
	trainfix.pid = 0;
}

static char root[64];

static void begin_saving(void)
{
	const char *args[] = { "--set", NULL, NULL };
	char set[128];

	fdcheck_begin();
	snprintf(root, sizeof(root), "/tmp/shardd-maintenance-XXXXXX");
	cr_assert(mkdtemp(root));
	snprintf(set, sizeof(set), "checkpoint_roots=%s", root);
	args[1] = set;
	daemonfix_start_held(&trainfix, args);
}

static void end_saving(void)
{
	char command[128];

	end();
	snprintf(command, sizeof(command), "rm -rf '%s'", root);
	cr_assert_eq(system(command), 0);
}

TestSuite(maintenance_saved, .init = begin_saving, .fini = end_saving, .timeout = 120);

/* What is in a checkpoint as it is, and nobody can change, is not lost; also in the next daemon's eyes. */
Test(maintenance_saved, a_shutdown_of_jobs_that_are_saved)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid;

	pid = start(p, SHARDD_KEEP);
	cr_expect_eq(CTL("", "checkpoint", "save", "trains", root), 0);
	cr_expect_eq(CTL("memory only", "shutdown"), 1, "it trains on");
	finish(p, pid);
	cr_expect_eq(CTL("memory only", "shutdown"), 1, "it has trained on");
	cr_expect_eq(CTL("", "checkpoint", "save", "trains", root), 0);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	daemonfix_may_end(&trainfix);
	cr_expect_eq(CTL("the daemon ends", "shutdown"), 0);
	cr_expect_eq(trainer_wait(trainfix.pid, 30), 0);
	cr_expect(fail_logged(&trainfix, "state=\"in a checkpoint\""));
	trainfix.pid = 0;
}

/* ----------------------------------------------------------- the holder is killed */

static bool has_store(void)
{
	static const char *const args[] = { "status", NULL };
	json_t *s = daemonfix_ctl(&trainfix, args);
	bool has = json_integer_value(json_object_get(s, "store_max")) > 0;

	json_decref(s);
	return has;
}

/* A daemon outlives its holder, and says so. */
Test(maintenance, trainers_train_on_when_the_holder_is_killed)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid = start(p, SHARDD_EPHEMERAL), daemon = daemonfix_daemon(&trainfix);
	unsigned steps;

	daemonfix_may_end(&trainfix);
	fail_kill(trainfix.pid);
	trainfix.pid = 0;
	steps = atomic_load(&p->steps);
	AWAIT(atomic_load(&p->steps) > steps + 2, 30);
	cr_expect_eq(CTL("RUNNING", "status"), 0);
	AWAIT(!has_store(), 30);
	cr_expect_eq(CTL("jobs end with the daemon", "status"), 0);
	cr_expect_eq(CTL("what kept its jobs has ended", "handover"), 1);
	finish(p, pid);
	cr_assert_eq(kill(daemon, SIGKILL), 0);
}

/* ------------------------------------------------------------- without a store */

static void begin_alone(void)
{
	fdcheck_begin();
	daemonfix_start(&trainfix, NULL);
}

TestSuite(maintenance_alone, .init = begin_alone, .fini = end, .timeout = 120);

Test(maintenance_alone, a_handover_is_refused)
{
	pid_t daemon = trainfix.pid;

	cr_expect_eq(CTL("FAILED_PRECONDITION: nothing would take the jobs over", "handover"), 1);
	cr_assert_eq(kill(daemon, SIGUSR2), 0);
	AWAIT(fail_logged(&trainfix, "no handover"), 20);
	daemonfix_check_alive(&trainfix);
}

Test(maintenance_alone, a_signal_ends_jobs_with_a_line_for_each)
{
	struct play *p = trainer_shared(sizeof(*p));

	finish(p, start(p, SHARDD_KEEP));
	daemonfix_may_end(&trainfix);
	cr_assert_eq(kill(trainfix.pid, SIGTERM), 0);
	cr_expect_eq(trainer_wait(trainfix.pid, 30), 0);
	cr_expect_eq(fail_times_logged(&trainfix, "job ends with the daemon"), 1);
	cr_expect(fail_logged(&trainfix, "state=\"in memory only: lost\""));
	trainfix.pid = 0;
}

/* ---------------------------------------------------------------- who may do it */

static int is_nobody(const struct trainer *t)
{
	static const char *const verbs[] = { "cordon", "uncordon", "handover", "shutdown" };
	char out[4096];

	(void)t;
	TRAINER_CHECK(setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
	setenv("SHARDD_BIN_DIR", trainfix.dir, 1); /* the build need not be open to him */
	for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
		const char *const args[] = { verbs[i], NULL };

		TRAINER_CHECK(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)) == 1);
		TRAINER_CHECK(strstr(out, "PERMISSION_DENIED"));
		TRAINER_CHECK(strstr(out, "is for administrators"));
	}
	return 0;
}

static void begin_open(void)
{
	static const char *const args[] = { "--set", "socket_mode=0666", NULL };

	fdcheck_begin();
	daemonfix_start(&trainfix, args);
	chmod(trainfix.dir, 0755);
}

TestSuite(maintenance_of_others, .init = begin_open, .fini = end, .timeout = 120);

Test(maintenance_of_others, is_refused)
{
	const char *dir = getenv("SHARDD_BIN_DIR");
	char command[4096];

	if (geteuid() != 0)
		cr_skip_test("becoming another user needs the superuser");
	snprintf(command, sizeof(command), "cp '%s/shardctl' '%s/shardctl'",
		 dir && *dir ? dir : SHARDD_BIN_DIR, trainfix.dir);
	cr_assert_eq(system(command), 0);
	cr_expect_eq(trainer_wait(trainer_start(&trainfix, "no", 0, 1, is_nobody, NULL), 60), 0);
	daemonfix_check_alive(&trainfix);
	snprintf(command, sizeof(command), "%s/shardctl", trainfix.dir);
	unlink(command);
}
