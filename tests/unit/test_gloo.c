/*
 * The gloo engine between processes: every member is a process of its own with a loop, and
 * they meet through files in a folder. A member reports by its exit status.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "engine/engine_impl.h"
#include "fdcheck.h"
#include "looprun.h"

TestSuite(gloo, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#define MAX_MEMBERS 4

/* In a member: Criterion's own checks belong to the parent. */
#define EXPECT(cond)                                                               \
	do {                                                                       \
		if (!(cond)) {                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); \
			_exit(1);                                                  \
		}                                                                  \
	} while (0)

/* ------------------------------------------------------------------------ the store */

static char folder[64];

static int store_set(void *userdata, const char *key, const void *value, size_t bytes)
{
	char part[160], path[160];
	FILE *f;

	(void)userdata;
	snprintf(path, sizeof(path), "%s/%s", folder, key);
	*strchr(path + strlen(folder) + 1, '/') = '_';
	snprintf(part, sizeof(part), "%s.part", path);
	f = fopen(part, "we");
	if (!f)
		return -errno;
	fwrite(value, 1, bytes, f);
	fclose(f);
	return rename(part, path) ? -errno : 0;
}

static long store_get(void *userdata, const char *key, unsigned timeout_ms, void *value,
		      size_t capacity)
{
	const struct timespec pause = { 0, 2000000 };
	char path[160];
	long got;

	(void)userdata;
	snprintf(path, sizeof(path), "%s/%s", folder, key);
	*strchr(path + strlen(folder) + 1, '/') = '_';
	for (unsigned ms = 0; ms <= timeout_ms; ms += 2) {
		int fd = open(path, O_RDONLY | O_CLOEXEC);

		if (fd >= 0) {
			got = read(fd, value, capacity);
			close(fd);
			return got;
		}
		nanosleep(&pause, NULL);
	}
	return -ETIMEDOUT;
}

static const struct comm_store store = { store_set, store_get, NULL };

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static void make_folder(void)
{
	snprintf(folder, sizeof(folder), "/tmp/test_gloo.XXXXXX");
	cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
	nftw(folder, remove_one, 4, FTW_DEPTH | FTW_PHYS);
}

/* ------------------------------------------------------------------------ one member */

struct member {
	unsigned rank, size;
	unsigned descriptors; /* at the start */
	struct looprun run;
	struct backend *b;
	struct engine *e;
	struct comm *c;
	int status; /* of making @c */
	bool ready, failed;
	unsigned n_failed;
};

static void on_ready(void *userdata, struct comm *comm, int status)
{
	struct member *m = userdata;

	m->c = comm;
	m->status = status;
	m->ready = true;
}

static void on_failed(void *userdata, struct comm *comm, const char *why)
{
	struct member *m = userdata;

	(void)comm;
	EXPECT(*why);
	m->failed = true;
	m->n_failed++;
}

static void member_begin(struct member *m, unsigned rank, unsigned size)
{
	const struct gloo_options options = { .address = "127.0.0.1" };

	signal(SIGPIPE, SIG_IGN);
	*m = (struct member){ .rank = rank, .size = size, .descriptors = fdcheck_count() };
	looprun_init(&m->run);
	EXPECT(backend_fake_new(&m->run.queue, 0, &m->b) == 0);
	EXPECT(engine_gloo_new(&m->run.queue, &options, &m->e) == 0);
}

/* Start to make one; the result is in @m. */
static void member_ask(struct member *m, const char *prefix, unsigned rank, unsigned size,
		       unsigned connect_ms)
{
	struct comm_group group = { .size = size,
				    .member = rank,
				    .prefix = prefix,
				    .store = &store,
				    .connect_ms = connect_ms };
	struct comm_options options = { .name = prefix,
					.devices = &m->b,
					.n_devices = 1,
					.group = &group,
					.ready = on_ready,
					.failed = on_failed,
					.userdata = m };

	m->ready = false;
	EXPECT(engine_comm_new(m->e, &options) == 0);
	EXPECT(!m->ready);
}

static struct comm *member_meet(struct member *m, const char *prefix, unsigned rank, unsigned size)
{
	member_ask(m, prefix, rank, size, 20000);
	looprun_flag(&m->run, &m->ready, 30);
	if (!m->c)
		fprintf(stderr, "%s: %s\n", prefix, engine_why(m->e));
	EXPECT(m->c && m->status == 0 && m->c->size == size && m->c->member == rank);
	return m->c;
}

static void member_end(struct member *m)
{
	m->e = engine_close(m->e);
	m->b = backend_close(m->b);
	looprun_deinit(&m->run);
	EXPECT(fdcheck_count() == m->descriptors);
}

struct waited {
	struct comm_op op;
	bool done;
	int status;
};

static void on_done(struct comm_op *op, int status)
{
	struct waited *w = CONTAINER_OF(op, struct waited, op);

	EXPECT(!w->done);
	w->done = true;
	w->status = status;
}

static struct waited waited(void)
{
	return (struct waited){ .op = { .done = on_done } };
}

static void expect(struct member *m, struct waited *w, int status)
{
	looprun_flag(&m->run, &w->done, 20);
	if (w->status != status)
		fprintf(stderr, "member %u: status %d\n", m->rank, w->status);
	EXPECT(w->status == status);
}

/* --------------------------------------------------------------- values and their sums */

/* The value of an element before it is rounded: sums of such depend on their order. */
static float value(unsigned member, uint64_t i)
{
	uint32_t x = (uint32_t)i * 2654435761u + member * 40503u + 12345u;

	x ^= x >> 15;
	x *= 2246822519u;
	x ^= x >> 13;
	return ((float)(x & 0xffff) - 32768.0f) / (float)(1u << (x >> 16 & 15));
}

static void convert(void *dst, enum dtype to, const void *src, enum dtype from, uint64_t n)
{
	const struct k_cast cast = { .dst = dst, .src = src, .dst_dtype = to, .src_dtype = from };

	kernels_ref()->cast(&cast, 0, n);
}

static void fill(void *data, enum dtype dtype, unsigned member, uint64_t n)
{
	float *plain = malloc(n * sizeof(float) + 1);

	for (uint64_t i = 0; i < n; i++)
		plain[i] = value(member, i);
	convert(data, dtype, plain, DTYPE_FP32, n);
	free(plain);
}

/* The left fold: t = round(t + x) for one member after the other. */
static void sum(void *out, enum dtype dtype, unsigned members, uint64_t n)
{
	float *t = malloc(n * sizeof(float) + 1), *x = malloc(n * sizeof(float) + 1);
	void *narrow = malloc(n * sizeof(float) + 1);

	for (unsigned m = 0; m < members; m++) {
		fill(narrow, dtype, m, n);
		convert(x, DTYPE_FP32, narrow, dtype, n);
		for (uint64_t i = 0; i < n; i++)
			t[i] = m == 0 ? x[i] : t[i] + x[i];
		convert(narrow, dtype, t, DTYPE_FP32, n);
		convert(t, DTYPE_FP32, narrow, dtype, n);
	}
	memcpy(out, narrow, n * dtype_size(dtype));
	free(t);
	free(x);
	free(narrow);
}

#define SEND(...) ((const void *const[]){ __VA_ARGS__ })
#define RECV(...) ((void *const[]){ __VA_ARGS__ })

static void check_reduce_scatter(struct member *m, enum dtype dtype, uint64_t count, bool in_place)
{
	const uint64_t all = count * m->size, bytes = count * dtype_size(dtype);
	char *data = malloc(all * 4 + 1), *want = malloc(all * 4 + 1), *own = malloc(bytes + 1);
	char *recv = in_place ? data + m->rank * bytes : own;
	struct waited w = waited();

	fill(data, dtype, m->rank, all);
	sum(want, dtype, m->size, all);
	comm_reduce_scatter(m->c, &w.op, SEND(data), RECV(recv), count, dtype);
	expect(m, &w, 0);
	EXPECT(memcmp(recv, want + m->rank * bytes, bytes) == 0);
	free(data);
	free(want);
	free(own);
}

static void check_all_reduce(struct member *m, enum dtype dtype, uint64_t count)
{
	const uint64_t bytes = count * dtype_size(dtype);
	char *data = malloc(bytes + 1), *want = malloc(bytes + 1);
	struct waited w = waited();

	fill(data, dtype, m->rank, count);
	sum(want, dtype, m->size, count);
	comm_all_reduce(m->c, &w.op, RECV(data), count, dtype, REDUCE_SUM);
	expect(m, &w, 0);
	EXPECT(memcmp(data, want, bytes) == 0);
	free(data);
	free(want);
}

static void check_all_gather(struct member *m, enum dtype dtype, uint64_t count, bool in_place)
{
	const uint64_t bytes = count * dtype_size(dtype);
	char *all = malloc(bytes * m->size + 1), *own = malloc(bytes + 1),
	     *want = malloc(bytes + 1);
	char *send = in_place ? all + m->rank * bytes : own;
	struct waited w = waited();

	fill(send, dtype, m->rank, count);
	comm_all_gather(m->c, &w.op, SEND(send), RECV(all), count, dtype);
	expect(m, &w, 0);
	for (unsigned i = 0; i < m->size; i++) {
		fill(want, dtype, i, count);
		EXPECT(memcmp(all + i * bytes, want, bytes) == 0);
	}
	free(all);
	free(own);
	free(want);
}

static void check_broadcast(struct member *m, uint64_t count, unsigned root)
{
	float *data = malloc(count * 4 + 1), *want = malloc(count * 4 + 1);
	struct waited w = waited();

	fill(data, DTYPE_FP32, m->rank, count);
	fill(want, DTYPE_FP32, root, count);
	comm_broadcast(m->c, &w.op, RECV(data), count * 4, root);
	expect(m, &w, 0);
	EXPECT(memcmp(data, want, count * 4) == 0);
	free(data);
	free(want);
}

static void check_extremes(struct member *m)
{
	float x[3] = { (float)m->rank, -(float)m->rank, 6 };
	struct waited w[3] = { waited(), waited(), waited() };

	comm_all_reduce(m->c, &w[0].op, RECV(&x[0]), 1, DTYPE_FP32, REDUCE_MAX);
	comm_all_reduce(m->c, &w[1].op, RECV(&x[1]), 1, DTYPE_FP32, REDUCE_MIN);
	comm_all_reduce(m->c, &w[2].op, RECV(&x[2]), 1, DTYPE_FP32, REDUCE_AVG);
	for (unsigned i = 0; i < 3; i++)
		expect(m, &w[i], 0);
	EXPECT(x[0] == (float)(m->size - 1) && x[1] == -x[0] && x[2] == 6);
}

/* --------------------------------------------------------------------------- processes */

typedef void (*scene_fn)(struct member *m);

static pid_t start_member(scene_fn scene, unsigned rank, unsigned size)
{
	pid_t pid = fork();

	if (pid == 0) {
		struct member m;

		member_begin(&m, rank, size);
		scene(&m);
		member_end(&m);
		_exit(0);
	}
	return pid;
}

static void end_member(pid_t pid, bool killed)
{
	int status;

	cr_assert_eq(waitpid(pid, &status, 0), pid);
	if (killed)
		cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	else
		cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", status);
}

/* @scene at every member; the last one is killed by its scene if @killed. */
static void play(scene_fn scene, unsigned size, bool killed)
{
	pid_t pids[MAX_MEMBERS];

	make_folder();
	for (unsigned i = 0; i < size; i++)
		pids[i] = start_member(scene, i, size);
	for (unsigned i = 0; i < size; i++)
		end_member(pids[i], killed && i == size - 1);
	remove_folder();
}

/* Counts around the edges: none, below the number of members, odd; one of many chunks. */
static void scene_results(struct member *m)
{
	static const uint64_t counts[] = { 0, 1, 3, 1000, 65537 };
	static const enum dtype dtypes[] = { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };

	member_meet(m, "results", m->rank, m->size);
	for (unsigned i = 0; i < ARRAY_SIZE(counts) * ARRAY_SIZE(dtypes); i++) {
		uint64_t count = counts[i / ARRAY_SIZE(dtypes)];
		enum dtype dtype = dtypes[i % ARRAY_SIZE(dtypes)];

		check_reduce_scatter(m, dtype, count, i % 2);
		check_all_reduce(m, dtype, count);
		check_all_gather(m, dtype, count, i % 2);
		check_broadcast(m, count, i % m->size);
	}
	check_reduce_scatter(m, DTYPE_FP32, 1400001, true);
	check_extremes(m);
	m->c = comm_free(m->c);
}

Test(gloo, two_members_compute_the_left_fold)
{
	play(scene_results, 2, false);
}

Test(gloo, three_members_compute_the_left_fold)
{
	play(scene_results, 3, false);
}

Test(gloo, four_members_compute_the_left_fold)
{
	play(scene_results, 4, false);
}

static void scene_alone(struct member *m)
{
	struct comm_info info;

	member_meet(m, "alone", 0, 1);
	check_reduce_scatter(m, DTYPE_BF16, 5, false);
	check_all_gather(m, DTYPE_FP32, 5, false);
	check_all_reduce(m, DTYPE_FP32, 5);
	check_broadcast(m, 5, 0);
	comm_info(m->c, &info);
	EXPECT(strcmp(info.engine, "gloo") == 0 && info.size == 1 && info.ops == 4);
	EXPECT(strcmp(info.detail, "Gloo over TCP, 127.0.0.1") == 0);
	m->c = comm_free(m->c);
}

Test(gloo, one_member_copies)
{
	play(scene_alone, 1, false);
}

/* Many are started before the first has ended, on two communicators with other members' numbers. */
static void scene_two(struct member *m)
{
	struct comm *c[2];
	struct waited w[20];
	float x[20];

	c[0] = member_meet(m, "one", m->rank, m->size);
	c[1] = member_meet(m, "other", m->size - 1 - m->rank, m->size);
	for (unsigned i = 0; i < 20; i++) {
		w[i] = waited();
		x[i] = (float)(m->rank + i);
		comm_all_reduce(c[i % 2], &w[i].op, RECV(&x[i]), 1, DTYPE_FP32, REDUCE_SUM);
	}
	EXPECT(comm_in_flight(c[0]) == 10);
	for (unsigned i = 0; i < 20; i++) {
		expect(m, &w[i], 0);
		EXPECT(x[i] == (float)(m->size * (m->size - 1) / 2 + i * m->size));
	}
	comm_free(c[0]);
	comm_free(c[1]);
}

Test(gloo, two_communicators_work_at_the_same_time)
{
	play(scene_two, 3, false);
}

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* All members are here: they are connected, and what the last operation sent has arrived. */
static void meet_in_store(struct member *m)
{
	char key[32], value[1];

	snprintf(key, sizeof(key), "met/%u", m->rank);
	EXPECT(store_set(NULL, key, "x", 1) == 0);
	for (unsigned i = 0; i < m->size; i++) {
		snprintf(key, sizeof(key), "met/%u", i);
		EXPECT(store_get(NULL, key, 20000, value, sizeof(value)) == 1);
	}
}

#define LARGE (16u << 20)

/* The last member dies in the middle of an operation. */
static void scene_killed(struct member *m)
{
	const uint64_t count = LARGE / 4;
	char *send = calloc(m->size, LARGE), *recv = calloc(1, LARGE);
	struct waited w = waited(), after = waited();
	double begin;

	member_meet(m, "before", m->rank, m->size);
	meet_in_store(m);
	comm_reduce_scatter(m->c, &w.op, SEND(send), RECV(recv), count, DTYPE_FP32);
	if (m->rank == m->size - 1) {
		const struct timespec pause = { 0, 5000000 };

		nanosleep(&pause, NULL);
		kill(getpid(), SIGKILL);
	}
	begin = now_s();
	comm_all_reduce(m->c, &after.op, RECV(recv), count, DTYPE_FP32, REDUCE_SUM);
	expect(m, &w, ENGINE_E_ABORTED);
	expect(m, &after, ENGINE_E_ABORTED);
	EXPECT(now_s() - begin < 5);
	EXPECT(m->n_failed == 1);
	m->c = comm_free(m->c);
	m->size--;
	member_meet(m, "after", m->rank, m->size);
	check_all_reduce(m, DTYPE_BF16, 300001);
	m->c = comm_free(m->c);
	free(send);
	free(recv);
}

Test(gloo, a_killed_member_ends_the_operation_and_the_others_meet_again)
{
	play(scene_killed, 3, true);
}

/* A message of the killed member is under way: what Gloo itself does not notice. */
static void scene_killed_message(struct member *m)
{
	char *all = calloc(m->size, LARGE);
	struct waited w = waited();

	member_meet(m, "message", m->rank, m->size);
	meet_in_store(m);
	comm_all_gather(m->c, &w.op, SEND(all + m->rank * LARGE), RECV(all), LARGE / 4, DTYPE_FP32);
	if (m->rank == m->size - 1) {
		const struct timespec pause = { 0, 3000000 };

		nanosleep(&pause, NULL);
		kill(getpid(), SIGKILL);
	}
	looprun_flag(&m->run, &w.done, 5);
	looprun_flag(&m->run, &m->failed, 5);
	m->c = comm_free(m->c);
	free(all);
}

Test(gloo, a_member_killed_within_a_message_is_noticed)
{
	play(scene_killed_message, 3, true);
}

/* Nothing runs; the owner is told all the same. */
static void scene_killed_idle(struct member *m)
{
	struct waited w = waited();
	float x = 1;

	member_meet(m, "idle", m->rank, m->size);
	check_all_reduce(m, DTYPE_FP32, 1);
	meet_in_store(m);
	if (m->rank == m->size - 1)
		kill(getpid(), SIGKILL);
	looprun_flag(&m->run, &m->failed, 5);
	comm_all_reduce(m->c, &w.op, RECV(&x), 1, DTYPE_FP32, REDUCE_SUM);
	expect(m, &w, ENGINE_E_ABORTED);
	m->c = comm_free(m->c);
}

Test(gloo, a_member_killed_between_operations_is_reported)
{
	play(scene_killed_idle, 3, true);
}

/* The other members do not take part: only member 0's abort ends it, and they are told. */
static void scene_abort(struct member *m)
{
	struct waited w[2] = { waited(), waited() };
	float x[2] = { 1, 2 };
	double begin;

	member_meet(m, "abort", m->rank, m->size);
	check_all_reduce(m, DTYPE_FP32, 1);
	meet_in_store(m);
	begin = now_s();
	if (m->rank == 0) {
		comm_all_reduce(m->c, &w[0].op, RECV(&x[0]), 1, DTYPE_FP32, REDUCE_SUM);
		comm_all_reduce(m->c, &w[1].op, RECV(&x[1]), 1, DTYPE_FP32, REDUCE_SUM);
		comm_abort(m->c);
		expect(m, &w[0], ENGINE_E_ABORTED);
		expect(m, &w[1], ENGINE_E_ABORTED);
		EXPECT(m->n_failed == 0);
	} else {
		looprun_flag(&m->run, &m->failed, 5);
	}
	EXPECT(now_s() - begin < 5);
	m->c = comm_free(m->c);
}

Test(gloo, an_abort_ends_an_operation_that_waits_for_a_member)
{
	play(scene_abort, 3, false);
}

/* Member 1 never comes. */
static void scene_absent(struct member *m)
{
	if (m->rank == 1)
		return;
	member_ask(m, "absent", 0, 2, 300);
	looprun_flag(&m->run, &m->ready, 10);
	EXPECT(!m->c && m->status == -ECONNABORTED);
	EXPECT(strcmp(engine_why(m->e), "member 1 did not publish its addresses in time") == 0);
}

Test(gloo, a_member_that_does_not_come_is_named)
{
	play(scene_absent, 2, false);
}

/* The published address leads nowhere. */
static void scene_stale(struct member *m)
{
	if (m->rank == 0)
		EXPECT(store_set(NULL, "stale/1", "nothing", 7) == 0);
	if (m->rank == 1)
		return;
	member_ask(m, "stale", 0, 2, 2000);
	looprun_flag(&m->run, &m->ready, 10);
	EXPECT(!m->c && m->status == -ECONNABORTED && *engine_why(m->e));
}

Test(gloo, a_malformed_address_is_refused)
{
	play(scene_stale, 2, false);
}

Test(gloo, options_are_checked)
{
	const struct gloo_options none = { .iface = NULL }, here = { .address = "127.0.0.1" };
	struct comm_group group = { .size = 2, .member = 2, .prefix = "x", .store = &store };
	struct member m = { .n_failed = 0 };
	struct comm_options options = {
		.devices = &m.b, .n_devices = 1, .ready = on_ready, .userdata = &m
	};
	struct engine *local;

	looprun_init(&m.run);
	cr_assert_eq(backend_fake_new(&m.run.queue, 0, &m.b), 0);
	cr_assert_eq(engine_gloo_new(&m.run.queue, &none, &m.e), -EINVAL);
	cr_assert_eq(engine_gloo_new(&m.run.queue, &here, &m.e), 0);
	cr_assert_eq(engine_local_new(&m.run.queue, &local), 0);
	cr_assert_eq(engine_comm_new(m.e, &options), -EINVAL, "no group");
	options.group = &group;
	cr_assert_eq(engine_comm_new(m.e, &options), -EINVAL, "no such member");
	cr_assert_eq(engine_comm_new(local, &options), -EOPNOTSUPP);
	engine_close(local);
	engine_close(m.e);
	backend_close(m.b);
	looprun_deinit(&m.run);
}
