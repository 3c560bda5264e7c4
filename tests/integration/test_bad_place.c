/* A log that cannot be written, a socket that cannot be had. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "rawsock.h"
#include "witness.h"

TestSuite(bad_place, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

Test(bad_place, a_full_disk_for_the_log)
{
	static const char *const args[] = { "--set", "log_file=/dev/full", "--set",
					    "log_level=debug", NULL };
	static const char *const status[] = { "status", NULL };
	json_t *j;
	struct witness b;

	witness_begin(&b, args);
	for (unsigned i = 0; i < 20; i++)
		daemonfix_check_alive(&b.d);
	kill(b.d.pid, SIGHUP); /* reopens the log */
	daemonfix_check_alive(&b.d);
	j = daemonfix_ctl(&b.d, status);
	cr_assert_gt(json_integer_value(json_object_get(j, "log_dropped")), 0);
	json_decref(j);
	witness_end(&b);
}

/* Run shardd with @socket until it ends. Return: exit code; @out: what it said. */
static int run_shardd(const char *socket, char *out, size_t bytes)
{
	const char *dir = getenv("SHARDD_BIN_DIR");
	char program[4096];
	int fds[2], status;
	size_t have = 0;
	ssize_t n;
	pid_t pid;

	snprintf(program, sizeof(program), "%s/shardd", dir && *dir ? dir : SHARDD_BIN_DIR);
	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	pid = fork();
	cr_assert_geq(pid, 0);
	if (pid == 0) {
		dup2(fds[1], STDERR_FILENO);
		execl(program, program, "--backend", daemonfix_backend(), "--socket", socket, NULL);
		_exit(127);
	}
	fd_close(fds[1]);
	while (have + 1 < bytes && (n = read(fds[0], out + have, bytes - 1 - have)) > 0)
		have += (size_t)n;
	out[have] = 0;
	fd_close(fds[0]);
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void refuses_to_start(const char *socket, int code, const char *words)
{
	char out[8192];
	int got = run_shardd(socket, out, sizeof(out));

	cr_assert_eq(got, code, "%s: exit code %d, not %d: %s", socket, got, code, out);
	cr_assert(strstr(out, words), "%s: no '%s' in: %s", socket, words, out);
	cr_assert(!strstr(out, "Sanitizer") && !strstr(out, "runtime error"), "%s", out);
}

Test(bad_place, sockets_that_cannot_be_had)
{
	char dir[] = "/tmp/shardd-test-XXXXXX", path[512], out[4096];
	struct witness b;
	struct stat st;
	int fd;

	cr_assert_neq(mkdtemp(dir), NULL);
	snprintf(path, sizeof(path), "%s/file", dir);
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	cr_assert_eq(write(fd, "mine", 4), 4);
	fd_close(fd);
	refuses_to_start(path, 4, "is not a socket; it was left alone");
	cr_assert(stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == 4);
	snprintf(out, sizeof(out), "%s/s", path); /* a folder that is a file */
	refuses_to_start(out, 4, "cannot make the socket");
	cr_assert_eq(unlink(path), 0);
	cr_assert_eq(rmdir(dir), 0);
	refuses_to_start("/nonexistent/shardd.sock", 4, "cannot make the socket");
	refuses_to_start("/proc/shardd.sock", 4, "cannot make the socket");
	refuses_to_start("", 2, "socket");
	memset(path, 'x', sizeof(path));
	memcpy(path, "/tmp/", 5);
	path[200] = 0;
	refuses_to_start(path, 2, "107");
	path[108] = 0;
	refuses_to_start(path, 2, "107");

	witness_begin(&b, NULL);
	refuses_to_start(b.d.socket, 3, "another daemon serves the socket");
	witness_end(&b);
}

/* One that was killed leaves its socket behind: the next one takes it. */
Test(bad_place, a_socket_that_a_killed_daemon_left)
{
	struct witness b;
	char path[128], out[4096];
	int r;

	witness_begin(&b, NULL);
	memcpy(path, b.d.socket, sizeof(path));
	daemonfix_may_end(&b.d);
	kill(b.d.pid, SIGKILL);
	cr_assert_eq(waitpid(b.d.pid, NULL, 0), b.d.pid);
	r = rawsock_connect(path);
	cr_assert_eq(r, -ECONNREFUSED);
	b.d.pid = fork();
	if (b.d.pid == 0) {
		const char *dir = getenv("SHARDD_BIN_DIR");
		int log = open(b.d.log, O_WRONLY | O_APPEND | O_CLOEXEC);

		dup2(log, STDERR_FILENO);
		snprintf(out, sizeof(out), "%s/shardd", dir && *dir ? dir : SHARDD_BIN_DIR);
		execl(out, out, "--backend", daemonfix_backend(), "--socket", path, NULL);
		_exit(127);
	}
	witness_serves(&b, 20);
	daemonfix_stop(&b.d);
}
