/*
 * A daemon that is started again has nothing of the first one. A trainer that expects state there gets an
 * error and ends non-zero: nothing begins again at step 0 without a word, and no KEEP job comes back as
 * an EPHEMERAL one. Nor does charlm, ended by a signal before its last step, end with 0.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "failfix.h"

static void test_restarted_daemon_begin(void)
{
	failfix_begin(NULL);
}

TestSuite(restarted_daemon, .init = test_restarted_daemon_begin, .fini = failfix_end,
	  .timeout = 120);

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

struct play {
	stage at, go;
	char instance[40];
};

static void join_named(shardd_client *c, const char *name, int rc, const char *words)
{
	struct shardd_job job = { .size = sizeof(job), .name = name, .world_size = 1 };
	struct shardd_membership m;

	if (rc == 0) {
		TRAIN_OK(shardd_join(c, &job, &m, &train_err));
		return;
	}
	TRAIN_FAILS(shardd_join(c, &job, &m, &train_err), rc);
	TRAINER_CHECK(strstr(train_err.text, words));
}

/* ------------------------------------------------------- a process that reconnects */

static int reconnects(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);

	train_join_as(c, t, SHARDD_KEEP);
	train_zero_unit(c, "u", 100, NULL);
	TRAIN_OK(shardd_commit(c, 7, NULL, 0, &train_err));
	stage_set(&p->at, 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_UNAVAILABLE);
	shardd_close(c);
	/* as often as a loop may try */
	for (int i = 0; i < 3; i++) {
		c = train_connect(t);
		join_named(c, t->job, SHARDD_DATA_LOSS, "the daemon was restarted at 20");
		join_named(c, t->job, SHARDD_DATA_LOSS, "the state of job 'kept' is gone");
		shardd_close(c);
	}
	stage_set(&p->at, 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 2, 60);
	c = train_connect(t);
	join_named(c, "another", 0, NULL); /* it was never there */
	train_leave(c);
	setenv("SHARDD_INSTANCE", "any", 1);
	c = train_connect(t);
	join_named(c, t->job, 0, NULL);
	train_leave(c);
	return 0;
}

Test(restarted_daemon, a_trainer_that_reconnects_is_told)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pid = trainer_start(&trainfix, "kept", 0, 1, reconnects, p);

	AWAIT(atomic_load(&p->at) == 1, 30);
	daemonfix_restart(&trainfix, NULL);
	stage_set(&p->go, 1);
	AWAIT(atomic_load(&p->at) == 2, 30);
	cr_assert(!fail_has_job(&trainfix, "kept"), "it was not made again");
	AWAIT(fail_logged(&trainfix, "code=DATA_LOSS"), 20);
	stage_set(&p->go, 2);
	cr_assert_eq(trainer_wait(pid, 30), 0);
}

/* ------------------------------------------------------- one that is started again */

static int notes_instance(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);

	TRAINER_CHECK(strlen(shardd_instance(c)) == 32 && shardd_daemon_started(c) > 1600000000u);
	snprintf(p->instance, sizeof(p->instance), "%s", shardd_instance(c));
	setenv("SHARDD_INSTANCE", p->instance, 1);
	join_named(c, t->job, 0, NULL);
	train_leave(c);
	return 0;
}

static int starts_again(const struct trainer *t)
{
	static const char *const wrong[] = { "x", "0123456789abcdef0123456789abcde",
					     "0123456789abcdef0123456789abcdefa",
					     "0123456789abcdef0123456789abcdeg" };
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);

	setenv("SHARDD_INSTANCE", p->instance, 1);
	join_named(c, t->job, SHARDD_DATA_LOSS, "the daemon was restarted at");
	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
		setenv("SHARDD_INSTANCE", wrong[i], 1);
		join_named(c, t->job, SHARDD_INVALID_ARGUMENT, "32 hexadecimal digits");
	}
	setenv("SHARDD_INSTANCE", shardd_instance(c), 1);
	join_named(c, t->job, 0, NULL);
	train_leave(c);
	return 0;
}

Test(restarted_daemon, a_trainer_that_is_started_again_is_told)
{
	struct play *p = trainer_shared(sizeof(*p));

	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "j", 0, 1, notes_instance, p), 30), 0);
	daemonfix_restart(&trainfix, NULL);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "j", 0, 1, starts_again, p), 30), 0);
}

/* ------------------------------------------------------------------ programs */

static void program(const char *name, char *buf, size_t bytes)
{
	const char *dir = getenv("SHARDD_BIN_DIR");

	snprintf(buf, bytes, "%s/%s", dir && *dir ? dir : SHARDD_BIN_DIR, name);
}

/* Run @argv with its output in the file @name of the daemon's directory. */
static pid_t start(const char *name, const char *const *argv, const char *const *env)
{
	char path[160];
	pid_t pid;

	snprintf(path, sizeof(path), "%s/%s", trainfix.dir, name);
	fflush(NULL);
	pid = fork();
	cr_assert_geq(pid, 0);
	if (pid == 0) {
		int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (size_t i = 0; env && env[i]; i++)
			putenv((char *)env[i]);
		setenv("SHARDD_SOCKET", trainfix.socket, 1);
		dup2(fd, STDOUT_FILENO);
		dup2(fd, STDERR_FILENO);
		execv(argv[0], (char *const *)argv);
		_exit(127);
	}
	return pid;
}

/* How often @words are in what the program @name has written. */
static unsigned said(const char *name, const char *words)
{
	_cleanup_(freep) char *text = calloc(1, 1 << 20);
	char path[160];
	unsigned n = 0;
	FILE *f;

	snprintf(path, sizeof(path), "%s/%s", trainfix.dir, name);
	f = fopen(path, "re");
	cr_assert(text && f);
	(void)!fread(text, 1, (1 << 20) - 1, f);
	fclose(f);
	for (const char *at = text; (at = strstr(at, words)); at++)
		n++;
	return n;
}

static void write_text(char *path, size_t bytes)
{
	FILE *f;

	snprintf(path, bytes, "%s/text", trainfix.dir);
	f = fopen(path, "we");
	cr_assert_not_null(f);
	for (unsigned i = 0; i < 200; i++)
		fputs("the quick brown fox jumps over the lazy dog\n", f);
	fclose(f);
}

static uint64_t step_of(const char *job)
{
	return fail_has_job(&trainfix, job) ? fail_job_number(&trainfix, job, "step") : 0;
}

/* The trainers were started again and again, and trained from step 0 in an EPHEMERAL job. */
Test(restarted_daemon, shardctl_run_does_not_begin_anew)
{
	char ctl[4096], charlm[4096], text[160];
	const char *argv[] = { ctl,       "run",       "-n",       "2",    "--max-restarts", "5",
			       "--job",   "j",         "--",       charlm, "--data",         text,
			       "--steps", "100000000", "--hidden", "8",    "--json",         NULL };
	pid_t pid;

	program("shardctl", ctl, sizeof(ctl));
	program("charlm", charlm, sizeof(charlm));
	write_text(text, sizeof(text));
	json_decref(daemonfix_ctl(&trainfix,
				  WORDS("job", "create", "j", "--keep", "--world-size", "2")));
	pid = start("run", argv, NULL);
	AWAIT(step_of("j") >= 3, 60);
	daemonfix_restart(&trainfix, NULL);
	cr_assert_eq(trainer_wait(pid, 60), 1);
	cr_assert_geq(said("run", "the daemon was restarted at"), 1);
	cr_assert_geq(said("run", "DATA_LOSS"), 1);
	cr_assert_eq(said("run", "{\"step\":1,"), 1, "step 1 was made once");
	cr_assert(!fail_has_job(&trainfix, "j"));
}

/* ------------------------------------------------------------- charlm and signals */

/* SIGTERM of one rank ended all with 0, and the EPHEMERAL job with its parameters was freed. */
Test(restarted_daemon, charlm_that_is_terminated_unfinished_says_so)
{
	char charlm[4096], text[160];
	const char *argv[] = { charlm,     "--data", text,     "--steps", "100000000",
			       "--hidden", "8",      "--json", NULL };
	char last[32];
	const char *few[] = { charlm, "--data", text, "--steps", last, "--hidden", "8", NULL };
	pid_t pids[2], again[2];

	program("charlm", charlm, sizeof(charlm));
	write_text(text, sizeof(text));
	pids[0] = start("out0", argv, WORDS("SHARDD_JOB=c", "RANK=0", "WORLD_SIZE=2"));
	pids[1] = start("out1", argv, WORDS("SHARDD_JOB=c", "RANK=1", "WORLD_SIZE=2"));
	AWAIT(step_of("c") >= 2, 60);
	kill(pids[1], SIGTERM);
	cr_assert_eq(trainer_wait(pids[0], 30), 3);
	cr_assert_eq(trainer_wait(pids[1], 30), 3);
	AWAIT(fail_job_is(&trainfix, "c", "IDLE"), 20);
	cr_assert_geq(step_of("c"), 2, "it stays for a restart");
	snprintf(last, sizeof(last), "%llu", (unsigned long long)step_of("c") + 3);
	again[0] = start("out2", few, WORDS("SHARDD_JOB=c", "RANK=0", "WORLD_SIZE=2"));
	again[1] = start("out3", few, WORDS("SHARDD_JOB=c", "RANK=1", "WORLD_SIZE=2"));
	cr_assert_eq(trainer_wait(again[0], 30), 0, "finished: all it was asked for");
	cr_assert_eq(trainer_wait(again[1], 30), 0);
	cr_assert_eq(said("out2", "resumed at step"), 1);
}
