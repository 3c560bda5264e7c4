#include "daemonfix.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "daemonwatch.h"

enum {
	START_S = 20,
	STOP_S = 30,
	SETTLE_S = 20,
	CTL_S = 30,
	TURN_MS = 5, /* between two looks at a condition that nothing announces */
	MAX_ARGS = 32,
	LEAK_CODE = 97, /* exit code of a trainer that leaks */
};

/* Fail the test. An assertion of Criterion would not do it from a .fini, an abort does. */
#define MUST(cond, ...) ((cond) ? (void)0 : fail(__VA_ARGS__))
__attribute__((format(printf, 1, 2))) static _Noreturn void fail(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
	abort();
}

static uint64_t deadline_in(unsigned seconds)
{
	return clock_now_us() + seconds * 1000000ull;
}

static void program_path(char *path, size_t bytes, const char *name)
{
	const char *dir = getenv("SHARDD_BIN_DIR");

	snprintf(path, bytes, "%s/%s", dir && *dir ? dir : SHARDD_BIN_DIR, name);
}

/* In a forked child: it must not outlive @parent, nor be hit by what is sent to the
 * test's process group. */
static void bind_to(pid_t parent)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(125);
	setpgid(0, 0);
}

/* ------------------------------------------------------------------ waiting */

static int exit_code(int status)
{
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* Return: the exit code, or -1 when it still runs at @deadline_us. */
static int await_exit(pid_t pid, uint64_t deadline_us)
{
	int status;

	while (waitpid(pid, &status, WNOHANG) == 0) {
		if (clock_now_us() > deadline_us)
			return -1;
		daemonwatch_turn(TURN_MS);
	}
	return exit_code(status);
}

static int kill_and_reap(pid_t pid)
{
	int status = 0;

	kill(pid, SIGKILL);
	waitpid(pid, &status, 0);
	return exit_code(status);
}

/* ---------------------------------------------------------------- the daemon */

const char *daemonfix_backend(void)
{
	const char *name = getenv("SHARDD_TEST_BACKEND");

	return name && *name ? name : "host";
}

const char *daemonfix_device(void)
{
	return strcmp(daemonfix_backend(), "host") == 0 ? "host:0" : "cuda:0";
}

static void exec_daemon(const struct daemonfix *d, const char *const *args)
{
	/* What a service manager or a caller told us is not about this daemon. */
	static const char *const env[] = { "NOTIFY_SOCKET", "LISTEN_PID",    "LISTEN_FDS",
					   "WATCHDOG_USEC", "SHARDD_SOCKET", "SHARDD_JOB" };
	char program[4096], holder[4096];
	/* What a start measures of GPUs takes a moment, and no test looks at it. */
	const char *argv[MAX_ARGS + 10] = { holder,
					    "--",
					    program,
					    "--socket",
					    d->socket,
					    "--set",
					    "gpu_measure_overlap=no",
					    "--backend",
					    daemonfix_backend() };
	const char *const *from = d->held ? argv : argv + 2;
	int fd = open(d->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	sigset_t none;

	for (size_t i = 0; args && args[i] && i < MAX_ARGS; i++)
		argv[i + 9] = args[i];
	for (size_t i = 0; i < ARRAY_SIZE(env); i++)
		unsetenv(env[i]);
	program_path(program, sizeof(program), "shardd");
	program_path(holder, sizeof(holder), "shardd-holder");
	dup2(fd, STDOUT_FILENO);
	dup2(fd, STDERR_FILENO);
	close_range(STDERR_FILENO + 1, ~0u, CLOSE_RANGE_CLOEXEC);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	execv(from[0], (char *const *)from);
	dprintf(STDERR_FILENO, "%s: %s\n", from[0], strerror(errno));
	_exit(127);
}

static bool accepts(const char *path)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool ok;

	memcpy(a.sun_path, path, strnlen(path, sizeof(a.sun_path) - 1));
	ok = fd >= 0 && connect(fd, (const struct sockaddr *)&a, sizeof(a)) == 0;
	fd_close(fd);
	return ok;
}

/* The daemon makes no folders in it. */
static void remove_dir(struct daemonfix *d)
{
	DIR *dir = opendir(d->dir);
	struct dirent *e;

	while (dir && (e = readdir(dir)))
		unlinkat(dirfd(dir), e->d_name, 0);
	if (dir)
		closedir(dir);
	rmdir(d->dir);
}

/* Fail the test with the daemon's log; nothing of it stays behind. */
static _Noreturn void give_up(struct daemonfix *d, const char *why)
{
	daemonwatch_drop(d->pid);
	if (d->pid > 0)
		kill_and_reap(d->pid);
	d->pid = 0;
	daemonwatch_print_log(d->log);
	remove_dir(d);
	fail("daemon: %s", why);
}

/* On d->socket; waits until it accepts. */
static void launch(struct daemonfix *d, const char *const *args)
{
	uint64_t deadline = deadline_in(START_S);
	pid_t parent = getpid();

	fflush(NULL);
	d->pid = fork();
	MUST(d->pid >= 0, "fork: %s", strerror(errno));
	if (d->pid == 0) {
		bind_to(parent);
		exec_daemon(d, args);
	}
	while (!accepts(d->socket)) {
		if (waitpid(d->pid, NULL, WNOHANG) != 0) {
			d->pid = 0;
			give_up(d, "ended before it served");
		}
		if (clock_now_us() > deadline)
			give_up(d, "does not serve");
		poll(NULL, 0, TURN_MS);
	}
	daemonwatch_add(d->pid, d->log);
}

void daemonfix_may_end(const struct daemonfix *d)
{
	daemonwatch_drop(d->pid);
}

void daemonfix_restart(struct daemonfix *d, const char *const *args)
{
	kill_and_reap(d->pid);
	launch(d, args);
}

static void start(struct daemonfix *d, bool held, const char *const *args)
{
	const char *base = getenv("TMPDIR");

	/* The socket's path must fit into a socket address, ours into the struct. */
	if (!base || !*base || strlen(base) > sizeof(d->dir) - sizeof("/shardd-test-XXXXXX"))
		base = "/tmp";
	memset(d, 0, sizeof(*d));
	d->held = held;
	snprintf(d->dir, sizeof(d->dir), "%s/shardd-test-XXXXXX", base);
	MUST(mkdtemp(d->dir), "%s: %s", d->dir, strerror(errno));
	snprintf(d->socket, sizeof(d->socket), "%s/s", d->dir);
	snprintf(d->log, sizeof(d->log), "%s/log", d->dir);
	launch(d, args);
}

void daemonfix_start(struct daemonfix *d, const char *const *args)
{
	start(d, false, args);
}

void daemonfix_start_held(struct daemonfix *d, const char *const *args)
{
	start(d, true, args);
}

/* Return: what in the log is a defect of the daemon, or NULL. */
static const char *defect_in_log(const struct daemonfix *d)
{
	static const char *const signs[] = { "Sanitizer", "runtime error:", "broken invariant" };
	_cleanup_(fclosep) FILE *f = fopen(d->log, "re");
	char line[1024];

	while (f && fgets(line, sizeof(line), f))
		for (size_t i = 0; i < ARRAY_SIZE(signs); i++)
			if (strstr(line, signs[i]))
				return signs[i];
	return f ? NULL : "no log";
}

void daemonfix_stop(struct daemonfix *d)
{
	const char *defect;
	char why[64];
	int code;

	daemonwatch_look();
	daemonfix_may_end(d);
	kill(d->pid, SIGTERM);
	code = await_exit(d->pid, deadline_in(STOP_S));
	if (code < 0)
		give_up(d, "does not end after SIGTERM");
	d->pid = 0;
	defect = defect_in_log(d);
	snprintf(why, sizeof(why), "exit code %d, in its log: %s", code, defect ? defect : "-");
	if (code != 0 || defect)
		give_up(d, why);
	remove_dir(d);
}

void daemonfix_check_alive(struct daemonfix *d)
{
	static const char *const health[] = { "health", NULL };
	char out[512];

	daemonwatch_look();
	if (daemonfix_ctl_text(d, health, out, sizeof(out)) != 0)
		give_up(d, out);
}

/* ------------------------------------------------------------------ shardctl */

static void exec_ctl(const struct daemonfix *d, const char *const *args, bool json, int out)
{
	char program[4096];
	const char *argv[MAX_ARGS + 5] = { program, "--socket", d->socket };
	const char *ctl = getenv("TEST_SHARDCTL"); /* tests/lib/runner.sh */
	size_t n = 3;

	if (ctl && *ctl)
		snprintf(program, sizeof(program), "%s", ctl);
	else
		program_path(program, sizeof(program), "shardctl");
	if (json)
		argv[n++] = "--json";
	for (size_t i = 0; args[i] && i < MAX_ARGS; i++)
		argv[n++] = args[i];
	dup2(out, STDOUT_FILENO);
	if (!json)
		dup2(out, STDERR_FILENO);
	close_range(STDERR_FILENO + 1, ~0u, CLOSE_RANGE_CLOEXEC);
	execv(program, (char *const *)argv);
	dprintf(STDERR_FILENO, "%s: %s\n", program, strerror(errno));
	_exit(127);
}

/* All that comes from @fd until its end; what does not fit is dropped. */
static void read_text(int fd, char *out, size_t bytes, uint64_t deadline_us)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	char rest[4096];
	size_t have = 0;

	for (;;) {
		bool full = have + 1 >= bytes;
		ssize_t n;

		if (clock_now_us() > deadline_us)
			break;
		if (poll(&p, 1, 100) <= 0)
			continue;
		n = full ? read(fd, rest, sizeof(rest)) : read(fd, out + have, bytes - 1 - have);
		if (n <= 0)
			break;
		have += full ? 0 : (size_t)n;
	}
	out[have] = 0;
}

static int run_ctl(struct daemonfix *d, const char *const *args, bool json, char *out, size_t bytes)
{
	uint64_t deadline = deadline_in(CTL_S);
	pid_t parent = getpid(), pid;
	int fds[2], code;

	MUST(pipe2(fds, O_CLOEXEC) == 0, "pipe: %s", strerror(errno));
	fflush(NULL);
	pid = fork();
	MUST(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		bind_to(parent);
		exec_ctl(d, args, json, fds[1]);
	}
	fd_close(fds[1]);
	read_text(fds[0], out, bytes, deadline);
	fd_close(fds[0]);
	code = await_exit(pid, deadline);
	if (code < 0)
		kill_and_reap(pid);
	MUST(code >= 0, "shardctl %s does not end", args[0]);
	if (code != 0)
		daemonwatch_look();
	return code;
}

int daemonfix_ctl_text(struct daemonfix *d, const char *const *args, char *out, size_t bytes)
{
	return run_ctl(d, args, false, out, bytes);
}

json_t *daemonfix_ctl(struct daemonfix *d, const char *const *args)
{
	static const size_t size = 16u << 20;
	char *text = malloc(size);
	json_error_t error;
	json_t *j;
	int code;

	MUST(text, "no memory");
	code = run_ctl(d, args, true, text, size);
	MUST(code == 0, "shardctl --json %s ended with %d: %.500s", args[0], code, text);
	j = json_loads(text, 0, &error);
	MUST(j, "shardctl --json %s: %s in: %.500s", args[0], error.text, text);
	free(text);
	return j;
}

/* Return: 0 while none answers. */
static pid_t answering_daemon(struct daemonfix *d)
{
	static const char *const status[] = { "status", NULL };
	const size_t size = 1 << 20;
	char *out = malloc(size);
	json_t *s;
	pid_t pid;

	CHECK(out);
	*out = '\0';
	s = accepts(d->socket) && run_ctl(d, status, true, out, size) == 0
		    ? json_loads(out, 0, NULL)
		    : NULL;
	pid = (pid_t)json_integer_value(json_object_get(s, "pid"));
	json_decref(s);
	free(out);
	return pid;
}

pid_t daemonfix_daemon(struct daemonfix *d)
{
	uint64_t deadline = deadline_in(START_S);
	pid_t pid = 0;

	while (!(pid = answering_daemon(d))) {
		if (clock_now_us() > deadline)
			give_up(d, "no daemon answers");
		daemonwatch_turn(TURN_MS);
	}
	return pid;
}

void daemonfix_replace_daemon(struct daemonfix *d, int signal)
{
	uint64_t deadline = deadline_in(START_S);
	pid_t old = daemonfix_daemon(d);

	MUST(d->held, "the daemon has no holder");
	kill(signal == SIGUSR2 ? d->pid : old, signal);
	while (daemonfix_daemon(d) == old) {
		if (clock_now_us() > deadline)
			give_up(d, "no other daemon comes");
		daemonwatch_turn(TURN_MS);
	}
}

unsigned daemonfix_fds(struct daemonfix *d)
{
	char path[64];
	struct dirent *e;
	unsigned n = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)d->pid);
	dir = opendir(path);
	if (!dir)
		daemonwatch_look();
	MUST(dir, "%s: %s", path, strerror(errno));
	while ((e = readdir(dir)))
		n += e->d_name[0] != '.';
	closedir(dir);
	return n;
}

uint64_t daemonfix_bytes(struct daemonfix *d)
{
	static const char *const status[] = { "status", NULL };
	json_t *j = daemonfix_ctl(d, status), *device, *used;
	uint64_t bytes = 0;
	size_t i;

	json_array_foreach(json_object_get(j, "devices"), i, device)
	{
		used = json_object_get(device, "used_bytes");
		MUST(json_is_integer(used), "status has no devices[%zu].used_bytes", i);
		bytes += (uint64_t)json_integer_value(used);
	}
	MUST(i > 0, "status has no device");
	json_decref(j);
	return bytes;
}

void daemonfix_settles(struct daemonfix *d, unsigned fds, uint64_t bytes)
{
	uint64_t deadline = deadline_in(SETTLE_S), now_bytes = 0;
	unsigned now_fds;

	for (;;) {
		now_fds = daemonfix_fds(d);
		/* Less is well too: a connection may still have been closing at the start. */
		if (now_fds <= fds) {
			now_bytes = daemonfix_bytes(d);
			if (now_bytes == bytes)
				return;
		}
		MUST(clock_now_us() < deadline,
		     "daemon: descriptors %u then, %u now; bytes %llu then, %llu now", fds, now_fds,
		     (unsigned long long)bytes, (unsigned long long)now_bytes);
		daemonwatch_turn(TURN_MS);
	}
}

/* ------------------------------------------------------------------ trainers */

/* Of the address sanitizer: there only in a build with it. */
extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

pid_t trainer_start(struct daemonfix *d, const char *job, uint32_t rank, uint32_t world,
		    trainer_fn fn, void *arg)
{
	const struct trainer t = { d->socket, job, rank, world, arg };
	pid_t parent = getpid(), pid;

	fflush(NULL);
	pid = fork();
	MUST(pid >= 0, "fork: %s", strerror(errno));
	if (pid == 0) {
		int code;

		bind_to(parent);
		code = fn(&t);
		fflush(NULL);
		if (code == 0 && __lsan_do_recoverable_leak_check &&
		    __lsan_do_recoverable_leak_check())
			code = LEAK_CODE;
		/* Not exit: what the test framework registered is the test's alone. */
		_exit(code);
	}
	return pid;
}

int trainer_wait(pid_t pid, unsigned seconds)
{
	int code = await_exit(pid, deadline_in(seconds));

	if (code < 0)
		kill_and_reap(pid);
	if (code != 0)
		daemonwatch_look();
	MUST(code >= 0, "trainer %d did not end in %u s", (int)pid, seconds);
	return code;
}

/* What the daemon says of its ops and sessions, and where each process is. */
static void explain_stuck(struct daemonfix *d, const pid_t *pids, uint32_t world)
{
	static const char *const ops[] = { "ops", NULL }, *const sessions[] = { "sessions", NULL };
	static char text[1u << 16];
	const char *const *const asks[] = { ops, sessions };

	for (uint32_t r = 0; r < world; r++)
		daemonwatch_print_threads(pids[r], "a trainer");
	daemonwatch_print_threads(d->pid, "the daemon");
	for (size_t i = 0; i < ARRAY_SIZE(asks); i++) {
		(void)daemonfix_ctl_text(d, asks[i], text, sizeof(text));
		fprintf(stderr, "---- shardctl %s\n%s----\n", asks[i][0], text);
	}
}

void trainers_run(struct daemonfix *d, const char *job, uint32_t world, trainer_fn fn, void *arg,
		  unsigned seconds)
{
	/* The framework's limit may be the same @seconds, and it says nothing: explain before it. */
	uint64_t deadline = deadline_in(seconds), explain = deadline_in(seconds * 3 / 4);
	pid_t *pids = calloc(world, sizeof(*pids));
	int *codes = calloc(world, sizeof(*codes));
	bool ok = true, explained = false;

	MUST(pids && codes, "no memory");
	for (uint32_t r = 0; r < world; r++)
		pids[r] = trainer_start(d, job, r, world, fn, arg);
	for (uint32_t r = 0; r < world; r++) {
		codes[r] = await_exit(pids[r], explained ? deadline : explain);
		if (codes[r] < 0 && !explained) {
			fprintf(stderr, "rank %u runs for %u s\n", r, seconds * 3 / 4);
			explain_stuck(d, pids, world);
			explained = true;
			codes[r] = await_exit(pids[r], deadline);
		}
		if (codes[r] < 0)
			kill_and_reap(pids[r]);
		if (codes[r])
			fprintf(stderr, "trainer of rank %u: %s %d\n", r,
				codes[r] < 0 ? "did not end" : "exit code", codes[r]);
		ok = ok && codes[r] == 0;
	}
	free(pids);
	free(codes);
	daemonwatch_look();
	if (!ok)
		daemonwatch_print_log(d->log);
	MUST(ok, "trainers of job %s failed", job);
}

void *trainer_shared(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	MUST(p != MAP_FAILED, "mmap: %s", strerror(errno));
	return p;
}

void trainer_check(bool ok, const char *cond, const char *file, int line)
{
	if (ok)
		return;
	fprintf(stderr, "trainer %d: %s:%d: not so: %s\n", (int)getpid(), file, line, cond);
	fflush(stderr);
	_exit(1);
}
