/* The private daemon that is measured. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

#define START_LIMIT_MS 60000 /* a GPU is slow to start */
#define STOP_LIMIT_MS  30000
#define TURN_MS        5

static int failed(const char *what, const char *name)
{
	fprintf(stderr, "shardd-bench: %s %s: %s\n", what, name, strerrordesc_np(errno));
	return -1;
}

static int make_dir(struct bench *b)
{
	static const char name[] = "/shardd-bench-XXXXXX";
	const char *base = getenv("TMPDIR");

	/* The path of a socket in it must fit into an address. */
	if (!base || !*base || strlen(base) + sizeof(name) > sizeof(b->dir))
		base = "/tmp";
	snprintf(b->dir, sizeof(b->dir), "%s%s", base, name);
	if (mkdtemp(b->dir))
		return 0;
	b->dir[0] = 0;
	return failed("cannot make a folder in", base);
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
	(void)st, (void)kind, (void)ftw;
	return remove(path);
}

void daemon_remove_folder(const char *path)
{
	nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* With the checkpoints that a case has made there. */
static void remove_dir(struct bench *b)
{
	if (b->dir[0])
		daemon_remove_folder(b->dir);
	b->dir[0] = 0;
}

static void log_path(const struct bench *b, char *path, size_t size)
{
	snprintf(path, size, "%s/log", b->dir);
}

/* With a folder for checkpoints. Never without the holder: the cases that ask for it measure what is
 * kept over a restart, and checkpoints. */
static void exec_holder(const struct bench *b, const char *program, const char *config)
{
	char holder[PATH_MAX], root[128], set[160];

	snprintf(root, sizeof(root), "%s/checkpoints", b->dir);
	snprintf(set, sizeof(set), "checkpoint_roots=%s", root);
	mkdir(root, 0700);
	bench_program("shardd-holder", holder, sizeof(holder));
	execlp(holder, "shardd-holder", "--", program, "--config", config, "--socket", b->socket,
	       "--backend", b->o.backend, "--set", set, NULL);
	dprintf(STDERR_FILENO, "cannot start %s: %s; build it: ninja -C build shardd-holder\n",
		holder, strerrordesc_np(errno));
	_exit(127);
}

/* In the child. Neither an init system's variables nor the machine's own
 * configuration are for this daemon. */
static void exec_daemon(const struct bench *b, pid_t parent)
{
	static const char *const unset[] = { "NOTIFY_SOCKET",  "LISTEN_PID",    "LISTEN_FDS",
					     "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID" };
	char program[PATH_MAX], log[128], config[128];
	int fd;

	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != parent)
		_exit(1);
	for (size_t i = 0; i < sizeof(unset) / sizeof(unset[0]); i++)
		unsetenv(unset[i]);
	log_path(b, log, sizeof(log));
	snprintf(config, sizeof(config), "%s/shardd.yaml", b->dir);
	fd = open(config, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	if (fd >= 0 &&
	    dprintf(fd, "socket: %s\n%s", b->socket, b->no_spin ? "ring_spin_us: 0\n" : "") > 0)
		fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (fd < 0 || dup2(fd, STDERR_FILENO) < 0 || dup2(fd, STDOUT_FILENO) < 0)
		_exit(1);
	bench_program("shardd", program, sizeof(program));
	if (b->held)
		exec_holder(b, program, config);
	execlp(program, "shardd", "--config", config, "--socket", b->socket, "--backend",
	       b->o.backend, NULL);
	dprintf(STDERR_FILENO, "cannot start %s: %s\n", program, strerrordesc_np(errno));
	_exit(127);
}

static bool accepts(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool yes;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	yes = fd >= 0 && connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0;
	if (fd >= 0)
		close(fd);
	return yes;
}

static void show_log(const struct bench *b)
{
	char path[128], line[1024];
	FILE *f;

	log_path(b, path, sizeof(path));
	f = fopen(path, "re");
	if (!f)
		return;
	while (fgets(line, sizeof(line), f))
		fprintf(stderr, "shardd: %s", line);
	fclose(f);
}

/* Wait for the daemon's end. Return: 1 it has ended, 0 it has not. */
static int has_ended(struct bench *b, int limit_ms, int *status)
{
	for (int ms = 0;; ms += TURN_MS) {
		pid_t p = waitpid(b->daemon, status, WNOHANG);

		if (p == b->daemon) {
			b->daemon = 0;
			return 1;
		}
		if (ms >= limit_ms)
			return 0;
		poll(NULL, 0, TURN_MS);
	}
}

static void say_end(int status)
{
	fprintf(stderr, "shardd-bench: the private daemon ended with %s %d\n",
		WIFSIGNALED(status) ? "signal" : "code",
		WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

static int await_daemon(struct bench *b)
{
	int status = 0;

	for (int ms = 0; ms < START_LIMIT_MS && !bench_interrupted(); ms += TURN_MS) {
		if (accepts(b->socket))
			return 0;
		if (has_ended(b, 0, &status)) {
			say_end(status);
			break;
		}
		poll(NULL, 0, TURN_MS);
	}
	fputs("shardd-bench: the private daemon did not get ready\n", stderr);
	show_log(b);
	return -1;
}

int daemon_start(struct bench *b)
{
	pid_t parent = getpid();

	if (make_dir(b) < 0)
		return -1;
	if (b->o.socket) {
		snprintf(b->socket, sizeof(b->socket), "%s", b->o.socket);
		if (accepts(b->socket))
			return 0;
		return failed("no daemon answers at", b->socket);
	}
	snprintf(b->socket, sizeof(b->socket), "%s/shardd.sock", b->dir);
	b->daemon = fork();
	if (b->daemon == 0)
		exec_daemon(b, parent);
	if (b->daemon < 0) {
		b->daemon = 0;
		return failed("cannot start", "a process");
	}
	return await_daemon(b);
}

int daemon_stop(struct bench *b)
{
	int status = 0, r = 0;

	if (b->daemon) {
		kill(b->daemon, SIGTERM);
		if (!has_ended(b, STOP_LIMIT_MS, &status)) {
			kill(b->daemon, SIGKILL);
			has_ended(b, STOP_LIMIT_MS, &status);
		}
		if (status) {
			say_end(status);
			show_log(b);
			r = -1;
		}
	}
	remove_dir(b);
	return r;
}
