#include "ctl/run_daemon.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/close_range.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "ctl/ctl.h"
#include "health.pb-c.h"

#define START_LIMIT_US (60 * 1000000u)
#define STOP_LIMIT_US  (15 * 1000000u) /* longer than it waits for trainers */
#define TURN_MS        20              /* between two looks at its health */
#define CALL_MS        1000u

void run_daemon_init(struct run_daemon *d)
{
	d->dir[0] = 0;
	d->socket[0] = 0;
	d->cleaner = 0;
	d->alive = -1;
	run_proc_init(&d->proc, "shardd");
}

/* -------------------------------------------------------------------- start */

static int run_daemon_make_dir(struct run_daemon *d)
{
	static const char name[] = "shardd-run-XXXXXX";
	const char *base = getenv("TMPDIR");

	/* The socket's path must fit into a socket address. */
	if (!base || !*base || strlen(base) + sizeof(name) + 1 > sizeof(d->dir))
		base = "/tmp";
	snprintf(d->dir, sizeof(d->dir), "%s/%s", base, name);
	if (!mkdtemp(d->dir)) {
		fprintf(stderr, "shardctl: INTERNAL: cannot create a directory in %s: %s\n", base,
			strerrordesc_np(errno));
		d->dir[0] = 0;
		return CTL_FAILED;
	}
	snprintf(d->socket, sizeof(d->socket), "%s/shardd.sock", d->dir);
	return 0;
}

/* The program @name beside our own, else the one in PATH. */
static void run_daemon_find_program(const char *name, char *path, size_t size)
{
	ssize_t n = readlink("/proc/self/exe", path, size - 1);
	char *slash;

	path[n > 0 ? n : 0] = 0;
	slash = strrchr(path, '/');
	if (slash && (size_t)(slash + 1 - path) + strlen(name) < size) {
		strcpy(slash + 1, name);
		if (access(path, X_OK) == 0)
			return;
	}
	snprintf(path, size, "%s", name);
}

static int run_daemon_spawn(struct run_daemon *d)
{
	/* What an init system told us is not about this daemon. */
	static const char *const env[] = {
		"NOTIFY_SOCKET", "LISTEN_PID",   "LISTEN_FDS", "LISTEN_FDNAMES",
		"WATCHDOG_USEC", "WATCHDOG_PID", NULL
	};
	char holder[PATH_MAX], program[PATH_MAX];
	char *argv[] = { holder, "--", program, "--socket", d->socket, NULL };
	struct run_command command = { argv, env, SIGTERM };
	int r;

	run_daemon_find_program("shardd-holder", holder, sizeof(holder));
	run_daemon_find_program("shardd", program, sizeof(program));
	r = run_proc_start(&d->proc, &command);
	if (r < 0) {
		fprintf(stderr, "shardctl: INTERNAL: cannot start %s: %s\n", holder,
			strerrordesc_np(-r));
		return CTL_FAILED;
	}
	return 0;
}

/* Remove the directory with the files in it; the daemon makes no folders there. */
static void run_daemon_remove_dir(struct run_daemon *d)
{
	DIR *dir = d->dir[0] ? opendir(d->dir) : NULL;
	struct dirent *e;

	if (!dir)
		return;
	while ((e = readdir(dir)))
		unlinkat(dirfd(dir), e->d_name, 0);
	closedir(dir);
	rmdir(d->dir);
	d->dir[0] = 0;
}

/* In the child. @parent: a pipe that ends with us. Keeps nothing else open: a reader of
 * our output must not wait for it. After an orderly end there is nothing to remove. */
static _Noreturn void run_daemon_clean_up_after(struct run_daemon *d, int parent)
{
	struct pollfd daemon = { .fd = 1, .events = POLLIN };
	char byte;

	setpgid(0, 0); /* a Ctrl-C is not for us */
	if (dup2(parent, 0) < 0 || dup2(d->proc.pidfd, 1) < 0)
		_exit(1);
	close_range(2, ~0u, 0);
	while (read(0, &byte, 1) < 0 && errno == EINTR)
		;
	poll(&daemon, 1, (int)(STOP_LIMIT_US / 1000));
	run_daemon_remove_dir(d);
	_exit(0);
}

/* Without it all works but the cleaning after a SIGKILL. No thread of gRPC's is there
 * yet that a fork could meet. */
static void run_daemon_start_cleaner(struct run_daemon *d)
{
	int fds[2];

	if (pipe2(fds, O_CLOEXEC) < 0)
		return;
	d->cleaner = fork();
	if (d->cleaner == 0)
		run_daemon_clean_up_after(d, fds[0]);
	fd_close(fds[0]);
	d->alive = fds[1];
	if (d->cleaner < 0)
		d->cleaner = 0;
}

static void run_daemon_stop_cleaner(struct run_daemon *d)
{
	d->alive = fd_close(d->alive);
	if (d->cleaner)
		waitpid(d->cleaner, NULL, 0);
	d->cleaner = 0;
}

static bool run_daemon_is_serving(const struct run_daemon *d)
{
	Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	struct rpc_client *rpc = NULL;
	struct shardd_error err;
	bool serving = false;

	if (access(d->socket, F_OK) < 0 || rpc_client_connect(d->socket, 0, &rpc, &err) < 0)
		return false;
	if (rpc_client_call(rpc, "/grpc.health.v1.Health/Check", &request.base,
			    &grpc__health__v1__health_check_response__descriptor, CALL_MS, &reply,
			    &err) == 0)
		serving = ((const Grpc__Health__V1__HealthCheckResponse *)reply)->status ==
			  GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
	rpc_client_close(rpc);
	return serving;
}

/* One look at the child and at the signals. Return: 0, or the code to end with. */
static int run_daemon_turn(struct run_daemon *d, int signals)
{
	struct pollfd fds[RUN_PROC_FDS + 1];
	struct signalfd_siginfo info;
	int code;

	run_proc_fds(&d->proc, fds);
	fds[RUN_PROC_FDS] = (struct pollfd){ .fd = signals, .events = POLLIN };
	if (poll(fds, ARRAY_SIZE(fds), TURN_MS) <= 0)
		return 0;
	if (fds[RUN_PROC_FDS].revents && read(signals, &info, sizeof(info)) == sizeof(info))
		return 128 + (int)info.ssi_signo;
	if (!run_proc_ready(&d->proc, fds))
		return 0;
	code = run_proc_reap(&d->proc);
	fprintf(stderr, "shardctl: UNAVAILABLE: the private daemon exited with code %d\n", code);
	return CTL_UNREACHABLE;
}

static int run_daemon_await_health(struct run_daemon *d, int signals)
{
	uint64_t deadline = clock_now_us() + START_LIMIT_US;
	int r = 0;

	while (r == 0 && !run_daemon_is_serving(d)) {
		if (clock_now_us() > deadline) {
			fputs("shardctl: UNAVAILABLE: the private daemon did not become ready\n",
			      stderr);
			return CTL_UNREACHABLE;
		}
		r = run_daemon_turn(d, signals);
	}
	return r;
}

int run_daemon_start(struct run_daemon *d, int signals)
{
	int r = run_daemon_make_dir(d);

	if (r == 0)
		r = run_daemon_spawn(d);
	if (r == 0) {
		run_daemon_start_cleaner(d);
		r = run_daemon_await_health(d, signals);
	}
	return r;
}

/* --------------------------------------------------------------------- stop */

static void run_daemon_end(struct run_daemon *d)
{
	uint64_t deadline = clock_now_us() + STOP_LIMIT_US;
	struct pollfd fds[RUN_PROC_FDS];

	run_proc_signal(&d->proc, SIGTERM);
	while (clock_now_us() < deadline) {
		run_proc_fds(&d->proc, fds);
		if (poll(fds, ARRAY_SIZE(fds), TURN_MS) > 0 && run_proc_ready(&d->proc, fds))
			break;
	}
	run_proc_deinit(&d->proc);
}

void run_daemon_stop(struct run_daemon *d)
{
	if (d->proc.pid)
		run_daemon_end(d);
	run_daemon_remove_dir(d);
	run_daemon_stop_cleaner(d);
}
