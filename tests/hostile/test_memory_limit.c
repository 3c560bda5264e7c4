/*
 * Clients that ask for more memory than there is: the daemon's control group, or the machine, or
 * what is configured. They get an error; the daemon is not killed. Needs root and a control group
 * with the memory controller, of either version, else it skips.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/host_memory.h"
#include "core/cleanup.h"
#include "failfix.h"
#include "fdcheck.h"
#include "rawcall.h"
#include "witness.h"

TestSuite(memory_limit, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

#define MIB   (UINT64_C(1) << 20)
#define LIMIT (600 * MIB)

/* A group of our own, below the one that this process is in at first. */
struct cage {
	char own[300], group[330];
	bool v1;
};

static bool put(const char *group, const char *name, const char *value)
{
	char path[400];
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "%s/%s", group, name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	n = write(fd, value, strlen(value));
	fd_close(fd);
	return n == (ssize_t)strlen(value);
}

static bool exists(const char *group, const char *name)
{
	char path[400];

	snprintf(path, sizeof(path), "%s/%s", group, name);
	return access(path, F_OK) == 0;
}

/* Of the memory controller: "4:memory:/x" in version 1, "0::/x" in version 2. */
static bool find_own(struct cage *c)
{
	_cleanup_(fclosep) FILE *file = fopen("/proc/self/cgroup", "re");
	char line[300], *path;

	while (file && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = '\0';
		c->v1 = strstr(line, ":memory:") != NULL;
		path = strchr(line, '/');
		if (!path || (!c->v1 && strncmp(line, "0::", 3) != 0))
			continue;
		snprintf(c->own, sizeof(c->own), "/sys/fs/cgroup%s%s", c->v1 ? "/memory" : "",
			 strcmp(path, "/") == 0 ? "" : path);
		if (exists(c->own, "cgroup.procs") &&
		    (c->v1 || exists(c->own, "cgroup.subtree_control")))
			return true;
	}
	return false;
}

static bool cage_make(struct cage *c)
{
	const char *name;

	if (!find_own(c))
		return false;
	snprintf(c->group, sizeof(c->group), "%s/shardd-test-%d", c->own, getpid());
	if (mkdir(c->group, 0755) < 0)
		return false;
	name = c->v1 ? "memory.limit_in_bytes" : "memory.max";
	if (exists(c->group, name) && put(c->group, name, "629145600"))
		return true;
	rmdir(c->group);
	return false;
}

static void cage_begin(struct cage *c)
{
	if (strcmp(daemonfix_backend(), "host") != 0)
		cr_skip("this is about the host's memory");
	if (!cage_make(c))
		cr_skip("no control group with a memory limit can be made here (root, cgroup v1 or "
			"a delegated v2)");
}

static void move_to(const char *group)
{
	char pid[16];

	snprintf(pid, sizeof(pid), "%d", getpid());
	cr_assert(put(group, "cgroup.procs", pid), "%s: %s", group, strerror(errno));
}

static void start_in(const struct cage *c, struct witness *w, const char *const *args)
{
	move_to(c->group);
	witness_begin(w, args);
	move_to(c->own);
}

static void cage_end(const struct cage *c)
{
	AWAIT(rmdir(c->group) == 0 || errno == ENOENT, 20);
}

static uint64_t times_killed(const struct cage *c)
{
	_cleanup_(fclosep) FILE *file = NULL;
	unsigned long long n;
	char path[400], key[64];

	snprintf(path, sizeof(path), "%s/%s", c->group,
		 c->v1 ? "memory.oom_control" : "memory.events");
	file = fopen(path, "re");
	cr_assert_not_null(file);
	while (fscanf(file, "%63s %llu", key, &n) == 2)
		if (strcmp(key, "oom_kill") == 0)
			return n;
	return 0;
}

/* Units of 24 MiB of parameters, each initialised, until there is no more; then buffers. Until
 * it was refused it made the daemon touch all that it got. */
static int takes_all(const struct trainer *t)
{
	static const uint64_t elements = 6 * MIB;
	struct rpc_client *c = raw_trainer(t->socket, "greedy", 0, 1, true);
	Shardd__V1__TensorSpec tensor = SHARDD__V1__TENSOR_SPEC__INIT, *tensors[] = { &tensor };
	Shardd__V1__UnitSpec unit = SHARDD__V1__UNIT_SPEC__INIT, *units[] = { &unit };
	Shardd__V1__RegisterUnitsRequest r = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT;
	atomic_uint *n = t->arg;
	struct shardd_error err = { 0 };
	ProtobufCMessage *reply;
	char name[16];

	tensor.name = (char *)"weight";
	tensor.shape = (uint64_t *)&elements;
	tensor.n_shape = 1;
	tensor.frozen = true; /* no gradient beside it: all of it is touched */
	unit.name = name;
	unit.tensors = tensors;
	unit.n_tensors = 1;
	unit.compute_dtype = SHARDD__V1__DTYPE__DTYPE_FP32;
	r.units = units;
	r.n_units = 1;
	for (*n = 0; *n < 100; ++*n) {
		snprintf(name, sizeof(name), "u%u", *n);
		if (raw_call(c, "RegisterUnits", &r.base, &reply, &err) < 0)
			break;
		raw_init(&c, 1, ((Shardd__V1__RegisterUnitsResponse *)reply)->units[0]->unit);
		protobuf_c_message_free_unpacked(reply, NULL);
	}
	fprintf(stderr, "# %u units, then: %s\n", *n, err.text);
	TRAINER_CHECK(err.code == SHARDD_RESOURCE_EXHAUSTED);
	rpc_client_close(c);
	return 0;
}

static void take_all(const char *const *args)
{
	static const char *const delete[] = { "job", "delete", "greedy", "--force", NULL };
	atomic_uint *n = trainer_shared(sizeof(*n));
	struct cage c = { 0 };
	struct witness w;

	cage_begin(&c);
	start_in(&c, &w, args);
	cr_assert_eq(trainer_wait(trainer_start(&w.d, "greedy", 0, 1, takes_all, n), 60), 0);
	cr_assert_gt(*n, 2, "there was room for some");
	cr_assert_eq(times_killed(&c), 0);
	daemonfix_check_alive(&w.d);
	json_decref(daemonfix_ctl(&w.d, delete));
	witness_end(&w);
	cage_end(&c);
}

/* The daemon took the machine's memory for its own, and was killed. */
Test(memory_limit, the_default_fits_the_control_group)
{
	take_all(NULL);
}

/* What is configured leaves nothing for the daemon itself: what is left now decides. */
Test(memory_limit, what_the_group_has_left_is_a_limit_too)
{
	static const char *const args[] = { "--set", "memory_bytes=600MiB", NULL };

	take_all(args);
}

/* The prefault helper does not fill the group. */
Test(memory_limit, pages_made_ahead_leave_room)
{
	static const char *const args[] = { "--set", "prefault=yes", "--set", "memory_bytes=600MiB",
					    NULL };

	take_all(args);
}

/* Exit status, and what it wrote. */
static int start_once(const char *setting, char *out, size_t bytes)
{
	int fds[2], status;
	size_t n = 0;
	ssize_t r;
	pid_t pid;

	cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
	pid = fork();
	if (pid == 0) {
		alarm(20); /* where it is not refused it runs */
		dup2(fds[1], STDERR_FILENO);
		dup2(fds[1], STDOUT_FILENO);
		execl(SHARDD_BIN_DIR "/shardd", "shardd", "--socket", "/tmp/shardd-test-none.sock",
		      "--set", "backend=host", "--set", setting, (char *)NULL);
		_exit(127);
	}
	close(fds[1]);
	while (n + 1 < bytes && (r = read(fds[0], out + n, bytes - 1 - n)) > 0)
		n += (size_t)r;
	out[n] = '\0';
	close(fds[0]);
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* It was cut down to what there is without a word, and then the daemon was killed. */
Test(memory_limit, more_than_the_machine_has_is_refused_at_start)
{
	char out[4096];

	if (strcmp(daemonfix_backend(), "host") != 0)
		cr_skip("this is about the host's memory");
	cr_assert_eq(start_once("memory_bytes=900TiB", out, sizeof(out)), 2, "%s", out);
	cr_assert(strstr(out, "memory_bytes is"), "%s", out);
}

Test(memory_limit, more_than_the_control_group_has_is_refused_at_start)
{
	struct cage c = { 0 };
	char out[4096];
	int code;

	cage_begin(&c);
	move_to(c.group);
	code = start_once("memory_bytes=601MiB", out, sizeof(out));
	move_to(c.own);
	cr_assert_eq(code, 2, "%s", out);
	cr_assert(strstr(out, "the control group has 629145600 bytes"), "%s", out);
	cage_end(&c);
}

/* All of it is never available; who says so is told, and may mean it. */
Test(memory_limit, more_than_is_available_now_is_a_warning)
{
	struct host_memory m;
	char setting[64];
	const char *args[] = { "--set", setting, NULL };
	struct witness w;

	if (strcmp(daemonfix_backend(), "host") != 0)
		cr_skip("this is about the host's memory");
	cr_assert_eq(host_memory_read(&HOST_MEMORY_OWN, &m), 0);
	snprintf(setting, sizeof(setting), "memory_bytes=%llu",
		 (unsigned long long)host_memory_total(&m));
	witness_begin(&w, args);
	cr_assert(fail_logged(&w.d, "memory_bytes is more than what is available now"));
	witness_end(&w);
}
