/* shardctl: exit codes, changing jobs, and `run` as the parent of trainers. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "daemonfix.h"
#include "daemonwatch.h"
#include "fdcheck.h"
#include "rawsock.h"

TestSuite(shardctl, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

enum { TURN_MS = 5, LIMIT_S = 40 };

/* More than a socket address holds. */
#define TEN  "/012345678"
#define LONG TEN TEN TEN TEN TEN TEN TEN TEN TEN TEN TEN TEN

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

/* ------------------------------------------------------------------ exit codes */

struct expected {
	const char *args[10];
	int code;
	const char *words;
};

static void check_all(struct daemonfix *d, const struct expected *e, size_t n)
{
	char out[8192];

	for (size_t i = 0; i < n; i++) {
		int code = daemonfix_ctl_text(d, e[i].args, out, sizeof(out));

		cr_assert_eq(code, e[i].code, "row %zu: exit code %d, not %d: %s", i, code,
			     e[i].code, out);
		cr_assert(strstr(out, e[i].words), "row %zu: no '%s' in: %s", i, e[i].words, out);
	}
}

Test(shardctl, wrong_arguments_end_with_2)
{
	static const struct expected rows[] = {
		{ { NULL }, 2, "no verb" },
		{ { "nonsense" }, 2, "nonsense" },
		{ { "--nonsense" }, 2, "nonsense" },
		{ { "status", "more", "jobs" }, 2, "one job" },
		{ { "status", "--more" }, 2, "more" },
		{ { "statsu" }, 2, "there is no verb \"statsu\": is \"status\" meant?" },
		{ { "blam" }, 2, "is \"blame\" meant?" },
		{ { "chekpoint", "save" }, 2, "is \"checkpoint\" meant?" },
		{ { "x" }, 2, "there is no verb \"x\"\n" },
		{ { "memory", "more" }, 2, "more" },
		{ { "jobs", "more" }, 2, "more" },
		{ { "sessions", "more" }, 2, "more" },
		{ { "health", "more" }, 2, "more" },
		{ { "units" }, 2, "one job" },
		{ { "units", "a", "b" }, 2, "one job" },
		{ { "ops", "a", "b" }, 2, "one job" },
		{ { "ops", "-n", "-1" }, 2, "-1" },
		{ { "ops", "-n", "many" }, 2, "many" },
		{ { "history", "a", "b" }, 2, "one job" },
		{ { "history", "-n", "0" }, 2, "-n \"0\"" },
		{ { "history", "--before", "x" }, 2, "--before \"x\"" },
		{ { "events", "a", "b" }, 2, "one job" },
		{ { "events", "-n", "0" }, 2, "-n \"0\"" },
		{ { "events", "-n", "1001" }, 2, "-n \"1001\"" },
		{ { "slow" }, 2, "one job" },
		{ { "slow", "a", "b" }, 2, "one job" },
		{ { "slow", "a", "-n", "0" }, 2, "-n \"0\"" },
		{ { "slow", "a", "-n", "-3" }, 2, "-n \"-3\"" },
		{ { "job" }, 2, "create, delete, drain or resize" },
		{ { "job", "destroy" }, 2, "create, delete, drain or resize" },
		{ { "job", "create", "--world-size", "1" }, 2, "name of one job" },
		{ { "job", "create", "a" }, 2, "--world-size" },
		{ { "job", "create", "a", "--world-size", "0" }, 2, "\"0\"" },
		{ { "job", "create", "a", "--world-size", "99999999999" }, 2, "99999999999" },
		{ { "job", "create", "a", "--world-size", "1", "--quota", "much" }, 2, "much" },
		{ { "job", "create", "a", "--world-size", "1", "--ttl", "-5" }, 2, "-5" },
		{ { "checkpoint" },
		  2,
		  "save, load, policy, inspect, verify, consolidate, convert, import or prune" },
		{ { "checkpoint", "mend" },
		  2,
		  "save, load, policy, inspect, verify, consolidate, convert, import or prune" },
		{ { "checkpoint", "save", "a" }, 2, "a job and a folder" },
		{ { "checkpoint", "save", "a", "b", "--rate", "fast" }, 2, "fast" },
		{ { "checkpoint", "load", "a" }, 2, "a job and a folder" },
		{ { "checkpoint", "consolidate", "a" }, 2, "--out" },
		{ { "checkpoint", "policy", "a", "b" }, 2, "--every-steps" },
		{ { "checkpoint", "prune", "a" }, 2, "--keep" },
		{ { "checkpoint", "verify", "a", "--step", "last" }, 2, "last" },
		{ { "job", "delete" }, 2, "one job" },
		{ { "job", "delete", "--fast", "a" }, 2, "fast" },
		{ { "job", "drain" }, 2, "one job" },
		{ { "cordon", "more" }, 2, "more" },
		{ { "uncordon", "more" }, 2, "more" },
		{ { "drain", "a" }, 2, "job drain" },
		{ { "drain", "--timeout", "x" }, 2, "\"x\"" },
		{ { "handover", "more" }, 2, "more" },
		{ { "handover", "--timeout", "-1" }, 2, "\"-1\"" },
		{ { "shutdown", "more" }, 2, "more" },
		{ { "shutdown", "--force" }, 2, "force" },
		{ { "run", "--", "true" }, 2, "-n N" },
		{ { "run", "-n", "0", "--", "true" }, 2, "\"0\"" },
		{ { "run", "-n", "x", "--", "true" }, 2, "\"x\"" },
		{ { "run", "-n", "2" }, 2, "a command" },
		{ { "run", "-n", "2", "--max-restarts", "-1", "--", "true" }, 2, "-1" },
		{ { "checkpoint", "save", "a", "b", "--fast" },
		  2,
		  "shardctl: INVALID_ARGUMENT: save: unrecognized option '--fast'\nTry `" },
		{ { "checkpoint", "save", "a", "b", "--rate" },
		  2,
		  "INVALID_ARGUMENT: save: option" },
		{ { "publications", "--jsn" }, 2, "publications: unrecognized option '--jsn'" },
		{ { "publications", "a", "b" }, 2, "one job" },
		{ { "units", "--jsn" }, 2, "units: unrecognized option '--jsn'" },
		{ { "job", "resize", "a", "-3" }, 2, "INVALID_ARGUMENT: resize: invalid option" },
		{ { "--help" }, 0, "usage:" },
		{ { "checkpoint", "save", "--help" },
		  0,
		  "  checkpoint save JOB DIR [--rate BYTES]\n" },
		{ { "blame", "-h" }, 0, "usage: shardctl [--socket PATH] [--json] blame [JOB]\n" },
		{ { "run", "--help" }, 0, "usage: shardctl run" },
		{ { "--version" }, 0, "shardctl " },
	};
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	check_all(&d, rows, ARRAY_SIZE(rows));
	daemonfix_stop(&d);
}

Test(shardctl, help_fits_80_columns)
{
	char out[8192];
	struct daemonfix d;
	size_t most = 0;

	daemonfix_start(&d, NULL);
	cr_assert_eq(daemonfix_ctl_text(&d, WORDS("--help"), out, sizeof(out)), 0);
	for (const char *at = out; *at; at += strcspn(at, "\n") + (strchr(at, '\n') != NULL))
		most = strcspn(at, "\n") > most ? strcspn(at, "\n") : most;
	cr_expect_leq(most, 80);
	daemonfix_stop(&d);
}

Test(shardctl, what_the_daemon_refuses_ends_with_1)
{
	static const struct expected rows[] = {
		{ { "units", "nobody" }, 1, "NOT_FOUND" },
		{ { "status", "nobody" }, 1, "NOT_FOUND" },
		{ { "units", "12345/nobody" }, 1, "NOT_FOUND" },
		{ { "units", "no-such-user/j" }, 2, "there is no user" },
		{ { "trace", "nobody", "-o", "-" }, 1, "NOT_FOUND" },
		{ { "trace", "-o", "/nonexistent/file" }, 2, "cannot write the file" },
		{ { "ops", "nobody" }, 1, "NOT_FOUND" },
		{ { "slow", "nobody" }, 1, "NOT_FOUND" },
		{ { "history", "nobody" }, 1, "NOT_FOUND: you have no job \"nobody\"" },
		{ { "events", "7/nobody" }, 1, "NOT_FOUND: you see no job \"nobody\"" },
		{ { "events", "a b" }, 1, "INVALID_ARGUMENT" },
		{ { "history", "a b" }, 1, "INVALID_ARGUMENT" },
		{ { "job", "delete", "nobody" }, 1, "NOT_FOUND" },
		{ { "job", "drain", "nobody" }, 1, "NOT_FOUND" },
		{ { "job", "drain", "a b" }, 1, "INVALID_ARGUMENT" },
		{ { "job", "create", "a b", "--world-size", "1" }, 1, "[A-Za-z0-9._-]" },
		{ { "job", "create", "a", "--world-size", "70000" }, 1, "max_world_size" },
		{ { "job", "create", "a", "--world-size", "2" }, 0, "created" },
		{ { "job", "create", "a", "--world-size", "2" }, 0, "already" },
		{ { "job", "create", "a", "--world-size", "3" }, 1, "world size 2, not 3" },
		{ { "job", "create", "a", "--world-size", "2", "--ephemeral" }, 1, "lifetime" },
		{ { "job", "create", "a", "--world-size", "2", "--quota", "1G" }, 1, "quota" },
		{ { "slow", "a" }, 0, "nothing to compare" },
		{ { "job", "drain", "a" }, 0, "0 trainers" },
		{ { "jobs" }, 0, "IDLE" },
		{ { "--json", "jobs" }, 0, "\"state\": \"IDLE\"" },
		{ { "jobs", "--json" }, 0, "\"state\": \"IDLE\"" },
		{ { "job", "delete", "a" }, 0, "deleted" },
		{ { "job", "delete", "a" }, 1, "NOT_FOUND" },
	};
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	check_all(&d, rows, ARRAY_SIZE(rows));
	daemonfix_stop(&d);
}

Test(shardctl, a_daemon_that_is_not_there_ends_with_3)
{
	static const struct expected rows[] = {
		{ { "--socket", "/nonexistent/s", "status" }, 3, "/nonexistent/s" },
		{ { "--socket", "/nonexistent/s", "health" }, 3, "UNAVAILABLE" },
		{ { "--socket", "/nonexistent/s", "job", "delete", "a" }, 3, "UNAVAILABLE" },
		{ { "--socket", "/dev/null", "status" }, 3, "/dev/null" },
		{ { "--socket", LONG, "status" }, 2, "INVALID_ARGUMENT" },
		{ { "--socket", "/nonexistent/s", "trace", "-o", "-" }, 3, "UNAVAILABLE" },
		{ { "--socket", "/nonexistent/s", "run", "-n", "1", "--", "false" }, 1, "rank 0" },
	};
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	check_all(&d, rows, ARRAY_SIZE(rows));
	daemonfix_stop(&d);
}

/* ------------------------------------------------------------------------- run */

Test(shardctl, run_gives_each_trainer_its_rank_and_prefixes_its_lines)
{
	static const char script[] = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE "
				     "$SHARDD_JOB $SHARDD_SOCKET; echo bad >&2; printf half";
	char out[8192], line[512];
	struct daemonfix d;
	int code;

	daemonfix_start(&d, NULL);
	code = daemonfix_ctl_text(
		&d, WORDS("run", "-n", "3", "--job", "mine", "--", "sh", "-c", script), out,
		sizeof(out));
	cr_assert_eq(code, 0, "%s", out);
	for (int r = 0; r < 3; r++) {
		snprintf(line, sizeof(line), "[%d] %d 3 %d 3 mine %s\n", r, r, r, d.socket);
		cr_assert(strstr(out, line), "no '%s' in:\n%s", line, out);
		snprintf(line, sizeof(line), "[%d] bad\n", r);
		cr_assert(strstr(out, line), "no '%s' in:\n%s", line, out);
		snprintf(line, sizeof(line), "[%d] half\n", r);
		cr_assert(strstr(out, line), "no '%s' in:\n%s", line, out);
	}
	daemonfix_stop(&d);
}

Test(shardctl, run_says_where_torch_distributed_meets)
{
	static const char script[] = "echo $MASTER_ADDR:$MASTER_PORT";
	char out[8192];
	struct daemonfix d;
	unsigned ports[2] = { 0 };
	int code;

	daemonfix_start(&d, NULL);
	unsetenv("MASTER_ADDR");
	unsetenv("MASTER_PORT");
	code = daemonfix_ctl_text(&d, WORDS("run", "-n", "2", "--", "sh", "-c", script), out,
				  sizeof(out));
	cr_assert_eq(code, 0, "%s", out);
	for (int r = 0; r < 2; r++) {
		static const char *const prefix[] = { "[0] 127.0.0.1:", "[1] 127.0.0.1:" };
		const char *line = strstr(out, prefix[r]);

		cr_assert(line, "no '%s' in:\n%s", prefix[r], out);
		ports[r] = (unsigned)strtoul(line + strlen(prefix[r]), NULL, 10);
	}
	cr_assert_gt(ports[0], 1023u);
	cr_assert_eq(ports[0], ports[1], "the same for all ranks");
	setenv("MASTER_ADDR", "here", 1); /* the caller's choice */
	setenv("MASTER_PORT", "7", 1);
	code = daemonfix_ctl_text(&d, WORDS("run", "-n", "1", "--", "sh", "-c", script), out,
				  sizeof(out));
	cr_assert_eq(code, 0, "%s", out);
	cr_assert(strstr(out, "[0] here:7\n"), "%s", out);
	unsetenv("MASTER_ADDR");
	unsetenv("MASTER_PORT");
	daemonfix_stop(&d);
}

struct run_row {
	const char *restarts;
	const char *script;
	int code;
	const char *words;
};

Test(shardctl, run_restarts_and_ends_with_the_worst_exit_code)
{
	/* $F: a file that is there from the second time on */
	static const struct run_row rows[] = {
		{ "0", "exit 0", 0, "" },
		{ "0", "test $RANK = 1 && exit 7; exit 0", 7, "rank 1" },
		{ "0", "test $RANK = 1 && exit 7; exec sleep 1000", 7, "ending the others" },
		{ "0", "kill -9 $$", 137, "signal 9" },
		{ "0", "exec /nonexistent/program", 127, "nonexistent" },
		{ "1", "F=$D/a$RANK; test -e $F && exit 0; : > $F; exit 5", 0, "restart 1 of 1" },
		{ "2", "F=$D/b$RANK; test -e $F && exit 6; : > $F; exit 5", 6, "restart 2 of 2" },
		{ "1", "F=$D/c$RANK; test -e $F && exit 0; : > $F; kill -9 $$", 0,
		  "restart 1 of 1" },
	};
	char out[16384];
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	setenv("D", d.dir, 1);
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		int code = daemonfix_ctl_text(&d,
					      WORDS("run", "-n", "2", "--max-restarts",
						    rows[i].restarts, "--", "sh", "-c",
						    rows[i].script),
					      out, sizeof(out));

		cr_assert_eq(code, rows[i].code, "'%s': exit code %d: %s", rows[i].script, code,
			     out);
		cr_assert(strstr(out, rows[i].words), "'%s': %s", rows[i].script, out);
	}
	daemonfix_stop(&d);
}

/* ------------------------------------------------------ a run that is interrupted */

/* shardctl with the end of a pipe to read from, and a folder for its temporary files. */
struct spawned {
	pid_t pid;
	int out;
	char dir[64];
	char text[8192];
	size_t have;
};

static void spawn_run(struct spawned *s, const char *script)
{
	const char *bin = getenv("SHARDD_BIN_DIR");
	char program[4096];
	int fds[2];

	*s = (struct spawned){ .dir = "/tmp/shardd-test-XXXXXX" };
	cr_assert_neq(mkdtemp(s->dir), NULL);
	snprintf(program, sizeof(program), "%s/shardctl", bin && *bin ? bin : SHARDD_BIN_DIR);
	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	s->pid = fork();
	cr_assert_geq(s->pid, 0);
	if (s->pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		setpgid(0, 0);
		setenv("TMPDIR", s->dir, 1);
		setenv("SHARDD_BACKEND", daemonfix_backend(), 1);
		dup2(fds[1], STDOUT_FILENO);
		execl(program, program, "run", "-n", "2", "--standalone", "--", "sh", "-c", script,
		      NULL);
		_exit(127);
	}
	fd_close(fds[1]);
	s->out = fds[0];
}

/* Until @word has come @n times. */
static void await_words(struct spawned *s, const char *word, unsigned n)
{
	uint64_t deadline = clock_now_us() + LIMIT_S * 1000000ull;

	for (;;) {
		struct pollfd p = { .fd = s->out, .events = POLLIN };
		unsigned found = 0;
		ssize_t got;

		for (const char *at = s->text; (at = strstr(at, word)); at++)
			found++;
		if (found >= n)
			return;
		cr_assert(clock_now_us() < deadline, "no '%s': %s", word, s->text);
		if (poll(&p, 1, 100) <= 0)
			continue;
		got = read(s->out, s->text + s->have, sizeof(s->text) - 1 - s->have);
		cr_assert_gt(got, 0, "it ended: %s", s->text);
		s->have += (size_t)got;
	}
}

/* Numbers behind each "pid ". */
static unsigned pids_of(const struct spawned *s, pid_t *pids, unsigned most)
{
	unsigned n = 0;

	for (const char *at = s->text; n < most && (at = strstr(at, "pid ")); at += 4)
		pids[n++] = atoi(at + 4);
	return n;
}

static bool is_gone(pid_t pid)
{
	char path[64], line[512] = "";
	const char *state;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	f = fopen(path, "re");
	if (!f)
		return true;
	if (!fgets(line, sizeof(line), f))
		line[0] = 0;
	fclose(f);
	state = strrchr(line, ')');
	return !state || state[2] == 'Z'; /* whoever inherited it may not look */
}

static void await_gone(pid_t pid)
{
	uint64_t deadline = clock_now_us() + LIMIT_S * 1000000ull;

	while (!is_gone(pid)) {
		cr_assert(clock_now_us() < deadline, "process %d is still there", (int)pid);
		daemonwatch_turn(TURN_MS);
	}
}

static bool is_empty(const char *dir)
{
	DIR *d = opendir(dir);
	struct dirent *e;
	unsigned n = 0;

	cr_assert_neq(d, NULL);
	while ((e = readdir(d)))
		n += e->d_name[0] != '.';
	closedir(d);
	return n == 0;
}

static void await_empty(const char *dir)
{
	uint64_t deadline = clock_now_us() + LIMIT_S * 1000000ull;

	while (!is_empty(dir)) {
		cr_assert(clock_now_us() < deadline, "something is left in %s", dir);
		daemonwatch_turn(TURN_MS);
	}
}

/* The pid of the private daemon: the peer of its socket. */
static pid_t daemon_of(const struct spawned *s)
{
	const char *at = strstr(s->text, "socket ");
	char path[128];
	struct ucred cred;
	socklen_t len = sizeof(cred);
	int fd;

	cr_assert_neq(at, NULL);
	snprintf(path, sizeof(path), "%.*s", (int)strcspn(at + 7, "\n"), at + 7);
	fd = rawsock_connect(path);
	cr_assert_geq(fd, 0, "%s", path);
	cr_assert_eq(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len), 0);
	fd_close(fd);
	return cred.pid;
}

static int reap(struct spawned *s)
{
	uint64_t deadline = clock_now_us() + LIMIT_S * 1000000ull;
	int status;

	while (waitpid(s->pid, &status, WNOHANG) == 0) {
		cr_assert(clock_now_us() < deadline, "shardctl does not end");
		daemonwatch_turn(TURN_MS);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static const char waits[] =
	"trap 'exit 9' TERM; echo pid $$; echo socket $SHARDD_SOCKET; sleep 1000 & wait";
/* Without a child of its own: that one nobody could end. */
static const char waits_alone[] = "echo pid $$; echo socket $SHARDD_SOCKET; exec sleep 1000";

/* @signal to shardctl in a standalone run: nothing of it may stay. */
static void interrupted(const char *script, int signal, int code)
{
	struct spawned s;
	pid_t pids[2], daemon;
	int got;

	spawn_run(&s, script);
	await_words(&s, "socket /", 2);
	cr_assert_eq(pids_of(&s, pids, 2), 2);
	daemon = daemon_of(&s);
	cr_assert_eq(kill(s.pid, signal), 0);
	got = reap(&s);
	cr_assert_eq(got, code, "exit code %d, not %d", got, code);
	await_gone(pids[0]);
	await_gone(pids[1]);
	await_gone(daemon);
	await_empty(s.dir);
	fd_close(s.out);
	cr_assert_eq(rmdir(s.dir), 0);
}

Test(shardctl, a_standalone_run_that_ends_leaves_nothing)
{
	struct spawned s;
	char path[128];
	struct stat st;

	spawn_run(&s, "test -S $SHARDD_SOCKET || exit 8; echo socket $SHARDD_SOCKET; exit 0");
	await_words(&s, "socket /", 2);
	cr_assert_eq(reap(&s), 0);
	snprintf(path, sizeof(path), "%.*s", (int)strcspn(strstr(s.text, "socket ") + 7, "\n"),
		 strstr(s.text, "socket ") + 7);
	cr_assert_lt(stat(path, &st), 0);
	cr_assert(strncmp(path, s.dir, strlen(s.dir)) == 0 && is_empty(s.dir));
	fd_close(s.out);
	cr_assert_eq(rmdir(s.dir), 0);
}

Test(shardctl, a_standalone_run_that_is_terminated_leaves_nothing)
{
	interrupted(waits, SIGTERM, 9);
}

Test(shardctl, a_standalone_run_that_is_interrupted_leaves_nothing)
{
	interrupted(waits, SIGINT, 130);
}

Test(shardctl, a_standalone_run_that_is_killed_leaves_nothing)
{
	interrupted(waits_alone, SIGKILL, 137);
}
