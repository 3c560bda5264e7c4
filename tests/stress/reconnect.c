/*
 * Threads of one client submit, wait, detach, poll and ask while the daemon is killed again and again
 * under shardd-holder, for the thread sanitizer. Other clients are opened and closed meanwhile. At the end a step is made and committed, and each client is closed
 * while no daemon is there.
 *
 * Only the thread that joins must succeed. The others take each error that a death explains.
 */
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "shardd/shardd.h"

enum { SUBMITTERS = 3, ELEMENTS = 4096, FAIL_S = 120 };

static struct {
	char dir[64], socket[96], log[96];
	pid_t holder;
	shardd_client *c;
	shardd_unit unit;
	atomic_bool end;      /* all threads return */
	atomic_uint joined;   /* how often */
	atomic_uint done;     /* ops that succeeded */
	atomic_uint told;     /* events of the connection */
	atomic_uint lifetime; /* other clients that were closed */
} stress;

/* Of a library that is not instrumented the sanitizer sees locks and system calls, and no atomics: in
 * gRPC, and where the memory into which it has written is freed. */
__attribute__((visibility("default"))) const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
	return "race:libgrpc.so\nrace:libgpr.so\nrace:libabsl_\nrace:^pending_destroy$\n"
	       "mutex:libgrpc.so\nmutex:libabsl_\ndeadlock:libgrpc.so\ndeadlock:libabsl_\n";
}

/* Else the frame that is in gRPC may be forgotten. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "history_size=7";
}

/* ------------------------------------------------------------------- the daemon */

static const char *stress_bin(const char *name, char *ret, size_t bytes)
{
	const char *dir = getenv("SHARDD_BIN_DIR");

	snprintf(ret, bytes, "%s/%s", dir ? dir : SHARDD_BIN_DIR, name);
	return ret;
}

static void stress_start_holder(void)
{
	char holder[512], daemon[512];

	CHECK(mkdtemp(strcpy(stress.dir, "/tmp/shardd-stress-XXXXXX")));
	snprintf(stress.socket, sizeof(stress.socket), "%s/s", stress.dir);
	snprintf(stress.log, sizeof(stress.log), "%s/log", stress.dir);
	stress_bin("shardd-holder", holder, sizeof(holder));
	stress_bin("shardd", daemon, sizeof(daemon));
	stress.holder = fork();
	CHECK(stress.holder >= 0);
	if (stress.holder)
		return;
	CHECK(prctl(PR_SET_PDEATHSIG, SIGTERM) == 0);
	setenv("TSAN_OPTIONS", "report_bugs=0", 1); /* in gRPC, which is not instrumented */
	CHECK(freopen(stress.log, "a", stderr) && dup2(2, 1) == 1);
	execl(holder, holder, "--", daemon, "--socket", stress.socket, "--backend", "host", NULL);
	_exit(127);
}

/* Return: 0: between two. */
static pid_t stress_daemon(void)
{
	char path[64];
	FILE *f;
	int pid = 0;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", stress.holder, stress.holder);
	f = fopen(path, "re");
	CHECK(f);
	if (fscanf(f, "%d", &pid) != 1)
		pid = 0;
	fclose(f);
	return pid;
}

static void stress_kill_daemon(void)
{
	pid_t pid = stress_daemon();

	if (pid > 0)
		kill(pid, SIGKILL);
}

static void stress_end_holder(void)
{
	char line[512];
	FILE *log;
	int status;

	kill(stress.holder, SIGTERM);
	CHECK(waitpid(stress.holder, &status, 0) == stress.holder);
	log = fopen(stress.log, "re");
	CHECK(log);
	while (fgets(line, sizeof(line), log))
		CHECK(!strstr(line, "broken invariant"));
	fclose(log);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(unlink(stress.log) == 0 && rmdir(stress.dir) == 0);
}

/* ------------------------------------------------------------------- errors */

/* Would a death explain it, or that the client has not joined again yet? Also a full ring. */
static bool stress_is_allowed(int r)
{
	return r >= 0 || r == -SHARDD_ABORTED || r == -SHARDD_FAILED_PRECONDITION ||
	       r == -SHARDD_RESOURCE_EXHAUSTED || r == -SHARDD_INVALID_ARGUMENT ||
	       r == -SHARDD_CANCELLED || r == -SHARDD_NOT_FOUND;
}

static int stress_look(int r, const struct shardd_error *err, const char *what)
{
	if (!stress_is_allowed(r))
		fprintf(stderr, "%s: %d: %s\n", what, r, err->text);
	CHECK(stress_is_allowed(r));
	atomic_fetch_add(&stress.done, r >= 0);
	return r;
}

static void stress_on_connection(void *data, const struct shardd_connection_event *e)
{
	(void)data;
	CHECK(e->state != SHARDD_CONNECTION_GIVEN_UP);
	atomic_fetch_add(&stress.told, 1);
}

static shardd_client *stress_open(bool must)
{
	const struct shardd_options options = { .size = sizeof(options),
						.socket = stress.socket,
						.connect_timeout_ms = FAIL_S * 1000,
						.on_connection = stress_on_connection };
	struct shardd_error err;
	shardd_client *c = NULL;
	int r;

	do /* a daemon that dies meanwhile is UNAVAILABLE */
		r = shardd_connect(&options, &c, &err);
	while (must && r == -SHARDD_UNAVAILABLE);
	if (r < 0 && r != -SHARDD_UNAVAILABLE)
		fprintf(stderr, "connect: %d: %s\n", r, err.text);
	CHECK(r == 0 || (!must && r == -SHARDD_UNAVAILABLE));
	return c;
}

/* ------------------------------------------------------------------- the threads */

/* Return: 0, or another death. */
static int stress_join(shardd_client *c, const char *name, shardd_unit *ret)
{
	static const uint64_t shape = ELEMENTS;
	const struct shardd_tensor tensor = { .name = "w", .shape = &shape, .dims = 1 };
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = "u",
					       .tensors = &tensor,
					       .n_tensors = 1,
					       .optimizer = { .kind = SHARDD_SGD, .lr = 0.1 } };
	const struct shardd_job job = { .size = sizeof(job), .name = name, .world_size = 1 };
	struct shardd_membership m;
	struct shardd_unit_info info;
	struct shardd_error err;
	int r = shardd_join(c, &job, &m, &err);

	if (r == 0)
		r = shardd_register(c, &spec, 1, &info, &err);
	if (r == 0 && !info.initialised)
		r = shardd_init_seed(c, info.unit, 1, &err);
	if (r < 0 && r != -SHARDD_ABORTED && r != -SHARDD_FAILED_PRECONDITION)
		fprintf(stderr, "join: %d: %s\n", r, err.text);
	CHECK(r == 0 || r == -SHARDD_ABORTED || r == -SHARDD_FAILED_PRECONDITION);
	if (r == 0)
		*ret = info.unit;
	return r;
}

/* An op that only this thread waits for tells it of each death. */
static void *stress_join_again(void *arg)
{
	struct shardd_error err;

	(void)arg;
	while (!atomic_load(&stress.end)) {
		int r = shardd_barrier(stress.c, SHARDD_WORLD, &err);

		stress_look(r, &err, "barrier");
		if (r < 0 && stress_join(stress.c, "stress", &stress.unit) == 0)
			atomic_fetch_add(&stress.joined, 1);
	}
	return NULL;
}

static int stress_finish(shardd_ticket t, unsigned how, struct shardd_error *err)
{
	size_t which;
	int fd, r;

	if (how % 4 == 0)
		return shardd_detach(stress.c, t, err);
	if (how % 4 == 1) {
		(void)shardd_cancel(stress.c, t, err);
		return shardd_wait(stress.c, t, -1, NULL, err);
	}
	if (how % 4 == 2) {
		r = shardd_wait_any(stress.c, &t, 1, 5, &which, err);
		CHECK(r == 0 || stress_is_allowed(r) || r == -SHARDD_DEADLINE_EXCEEDED);
	} else if (shardd_completion_fd(stress.c, &fd, err) == 0) {
		struct pollfd p = { .fd = fd, .events = POLLIN };

		poll(&p, 1, 5);
	}
	return shardd_wait(stress.c, t, -1, NULL, err);
}

static void *stress_submit(void *arg)
{
	unsigned how = (unsigned)(uintptr_t)arg;
	struct shardd_error err;
	shardd_ticket t;

	for (; !atomic_load(&stress.end); how++) {
		int r = shardd_submit_nop(stress.c, SHARDD_OPTIONS(nop), &t, &err);

		if (r == 0)
			r = stress_finish(t, how, &err);
		stress_look(r, &err, "nop");
		r = shardd_submit_gather(stress.c, SHARDD_OPTIONS(gather, .unit = 1), &t, &err);
		if (r == 0)
			r = stress_finish(t, how / 4, &err);
		stress_look(r, &err, "gather");
		r = shardd_submit_release(stress.c, SHARDD_OPTIONS(release, .unit = 1), &t, &err);
		if (r == 0)
			r = stress_finish(t, how / 16, &err);
		stress_look(r, &err, "release");
	}
	return NULL;
}

static void *stress_ask(void *arg)
{
	struct shardd_error err;
	struct shardd_info info = { .size = sizeof(info) };

	(void)arg;
	while (!atomic_load(&stress.end)) {
		char *json = NULL;

		CHECK(shardd_get_info(stress.c, &info, &err) == 0);
		stress_look(shardd_status(stress.c, NULL, &json, &err), &err, "status");
		free(json);
		shardd_interrupt(stress.c);
	}
	return NULL;
}

/* Clients that are closed with ops under way, connected or not. */
static void *stress_open_and_close(void *arg)
{
	struct shardd_error err;
	shardd_ticket t;
	shardd_unit u;

	(void)arg;
	while (!atomic_load(&stress.end)) {
		shardd_client *c = stress_open(false);

		if (c && stress_join(c, "other", &u) == 0)
			(void)shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &t, &err);
		shardd_close(c);
		atomic_fetch_add(&stress.lifetime, 1);
	}
	return NULL;
}

/* ------------------------------------------------------------------- the run */

static void stress_await(atomic_uint *count, unsigned more)
{
	uint64_t until = clock_now_us() + FAIL_S * UINT64_C(1000000);
	unsigned want = atomic_load(count) + more;

	while (atomic_load(count) < want) {
		CHECK(clock_now_us() < until);
		poll(NULL, 0, 1);
	}
}

/* After one more death, which ends all that the threads left. */
static void stress_train(void)
{
	struct shardd_error err;
	void *gradient;

	stress_kill_daemon();
	while (shardd_barrier(stress.c, SHARDD_WORLD, &err) < 0)
		(void)stress_join(stress.c, "stress", &stress.unit);
	CHECK(shardd_gradient(stress.c, stress.unit, &gradient, &err) == 0);
	CHECK(shardd_reduce(stress.c, stress.unit, &err) == 0);
	CHECK(shardd_step(stress.c, SHARDD_WORLD, NULL, &err) == 0);
	CHECK(shardd_commit(stress.c, 1, NULL, 0, &err) == 0);
}

int main(void)
{
	void *(*const run[])(void *) = { stress_join_again, stress_ask, stress_open_and_close,
					 stress_submit };
	const char *is_long = getenv("SHARDD_TEST_LONG");
	unsigned deaths = is_long && strcmp(is_long, "1") == 0 ? 200 : 12;
	enum { OTHERS = 3 };
	pthread_t threads[OTHERS + SUBMITTERS];

	setenv("SHARDD_RECONNECT_MS", "120000", 1);
	stress_start_holder();
	stress.c = stress_open(true);
	CHECK(stress_join(stress.c, "stress", &stress.unit) == 0);
	for (unsigned i = 0; i < OTHERS + SUBMITTERS; i++)
		CHECK(pthread_create(&threads[i], NULL, run[i < OTHERS ? i : OTHERS],
				     (void *)(uintptr_t)i) == 0);
	for (unsigned i = 0; i < deaths; i++) {
		stress_await(&stress.done, 20 * (i % 8));
		stress_kill_daemon();
		stress_await(&stress.joined, 1);
	}
	atomic_store(&stress.end, true);
	for (unsigned i = 0; i < OTHERS + SUBMITTERS; i++)
		pthread_join(threads[i], NULL);
	stress_train();
	stress_kill_daemon();
	shardd_close(stress.c);
	shardd_close(stress_open(true)); /* a daemon is there, which removes its socket */
	printf("reconnect ok deaths=%u ops=%u events=%u clients=%u\n", deaths,
	       atomic_load(&stress.done), atomic_load(&stress.told), atomic_load(&stress.lifetime));
	stress_end_holder();
	return 0;
}
