/*
 * A daemon that cannot start its threads says so and ends; one that serves ends at SIGTERM. It
 * hung in gRPC core, deaf to SIGTERM, with `ulimit -v` of 100000 and of 300000 KiB among others.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "fdcheck.h"

TestSuite(start_limits, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 300);

enum { LIMIT_S = 30, UID = 30003 };

struct started {
	pid_t pid;
	char dir[64], socket[96], log[96], program[96];
};

/* The program is copied: where the build is need not be open to other users. */
static void prepare(struct started *s)
{
	const char *dir = getenv("SHARDD_BIN_DIR");
	char command[4096];

	snprintf(s->dir, sizeof(s->dir), "/tmp/shardd-limits-XXXXXX");
	cr_assert_not_null(mkdtemp(s->dir));
	cr_assert_eq(chmod(s->dir, 0777), 0);
	snprintf(s->socket, sizeof(s->socket), "%s/s", s->dir);
	snprintf(s->log, sizeof(s->log), "%s/log", s->dir);
	snprintf(s->program, sizeof(s->program), "%s/shardd", s->dir);
	snprintf(command, sizeof(command), "cp '%s/shardd' '%s'",
		 dir && *dir ? dir : SHARDD_BIN_DIR, s->program);
	cr_assert_eq(system(command), 0);
}

static void discard(struct started *s)
{
	char command[128];

	snprintf(command, sizeof(command), "rm -rf '%s'", s->dir);
	cr_assert_eq(system(command), 0);
}

/* @uid: 0: as we are. */
static void start(struct started *s, int resource, rlim_t limit, uid_t uid)
{
	const struct rlimit r = { limit, limit };

	unlink(s->log);
	fflush(NULL);
	s->pid = fork();
	cr_assert_geq(s->pid, 0);
	if (s->pid)
		return;
	if (uid && (setgroups(0, NULL) < 0 || setgid(uid) < 0 || setuid(uid) < 0))
		_exit(126);
	umask(0);
	{
		int fd = open(s->log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

		dup2(fd, STDOUT_FILENO);
		dup2(fd, STDERR_FILENO);
	}
	/* the leak check starts a task of its own */
	setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
	setrlimit(resource, &r);
	execl(s->program, s->program, "--backend", "host", "--socket", s->socket, NULL);
	_exit(127);
}

static bool logged(const struct started *s, const char *words)
{
	FILE *f = fopen(s->log, "re");
	char line[2048];
	bool found = false;

	while (f && !found && fgets(line, sizeof(line), f))
		found = strstr(line, words) != NULL;
	if (f)
		fclose(f);
	return found;
}

/* Until it has ended or is ready. Return: -1: ready, else the exit code. */
static int outcome(struct started *s)
{
	uint64_t deadline = clock_now_us() + LIMIT_S * 1000000ull;
	int status;

	for (;;) {
		if (waitpid(s->pid, &status, WNOHANG) == s->pid)
			return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		if (logged(s, " ready "))
			return -1;
		if (clock_now_us() > deadline) {
			kill(s->pid, SIGKILL);
			waitpid(s->pid, NULL, 0);
			cr_assert_fail("it hangs: neither ready nor ended");
		}
		poll(NULL, 0, 5);
	}
}

static int ended(struct started *s)
{
	uint64_t deadline = clock_now_us() + LIMIT_S * 1000000ull;
	int status;

	while (waitpid(s->pid, &status, WNOHANG) != s->pid) {
		if (clock_now_us() > deadline) {
			kill(s->pid, SIGKILL);
			waitpid(s->pid, NULL, 0);
			cr_assert_fail("it is deaf to SIGTERM");
		}
		poll(NULL, 0, 5);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Return: did it serve? */
static bool try(struct started *s, int resource, rlim_t limit, uid_t uid)
{
	int code;

	start(s, resource, limit, uid);
	code = outcome(s);
	if (code < 0) {
		kill(s->pid, SIGTERM);
		code = ended(s);
		cr_assert_eq(code, 0, "limit %llu: exit code %d", (unsigned long long)limit, code);
		return true;
	}
	/* 127: not even the libraries fit, and the loader has said so */
	if (code == 127)
		return false;
	cr_assert(code == 1 || code == 5, "limit %llu: exit code %d", (unsigned long long)limit,
		  code);
	cr_assert(logged(s, "cannot start"), "limit %llu", (unsigned long long)limit);
	return false;
}

Test(start_limits, address_space)
{
	struct started s;
	unsigned served = 0, refused = 0;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	cr_skip_test("a sanitizer takes terabytes of addresses: RLIMIT_AS says nothing here");
#endif
	prepare(&s);
	for (rlim_t kib = 20000; kib < 1600000; kib += kib < 500000 ? 20000 : 200000) {
		bool ok = try(&s, RLIMIT_AS, kib << 10, 0);

		served += ok;
		refused += !ok;
	}
	cr_assert(served && refused, "%u served, %u did not", served, refused);
	discard(&s);
}

Test(start_limits, processes_of_a_user)
{
	struct started s;
	unsigned served = 0, refused = 0;

	if (geteuid() != 0)
		cr_skip_test("becoming a user without other processes needs the superuser");
	prepare(&s);
	for (rlim_t n = 1; n < 400 && !(served && n > 100); n += n < 40 ? 1 : 20) {
		bool ok = try(&s, RLIMIT_NPROC, n, UID);

		served += ok;
		refused += !ok;
		if (!ok)
			cr_assert(logged(&s, "ulimit -u"), "limit %llu", (unsigned long long)n);
	}
	cr_assert(served && refused, "%u served, %u did not", served, refused);
	discard(&s);
}

/* Signals come while nothing of the loop runs yet. */
Test(start_limits, sigterm_during_the_start)
{
	struct started s;

	prepare(&s);
	for (unsigned us = 0; us < 60000; us += 3000) {
		uint64_t until;
		int code;

		start(&s, RLIMIT_CORE, 0, 0);
		for (until = clock_now_us() + us; clock_now_us() < until;)
			;
		kill(s.pid, SIGTERM);
		code = ended(&s);
		cr_assert(code == 0 || code == 128 + SIGTERM, "after %u us: exit code %d", us,
			  code);
	}
	discard(&s);
}
