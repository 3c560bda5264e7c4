/*
 * One user takes as much of everything as there is to take. The user is told which limit ends
 * that; another user and root go on meanwhile; and when the user's process is killed, nothing is
 * left on the account.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "failfix.h"
#include "local_abi.h"
#include "rawcall.h"
#include "rawsock.h"

TestSuite(user_limits, .timeout = 180);

enum { ALICE = 30001, BOB = 30002, MOST = 64 };

/* In shared memory. */
struct play {
	stage full;    /* the hog has been refused, and holds what it has */
	stage refused; /* there is nothing left */
	atomic_ullong p50_us, p99_us;
};

/* And nobody who only waits outlives a test that has failed. */
static void user_limits_become(uid_t uid)
{
	TRAINER_CHECK(setgid(uid) == 0 && setuid(uid) == 0);
	TRAINER_CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
}

static void hold(const struct trainer *t)
{
	struct play *p = t->arg;

	stage_set(&p->full, 1);
	for (;;)
		pause();
}

/* ------------------------------------------------------------------- the hogs */

static unsigned count_open(const int *fds, unsigned n)
{
	unsigned open = 0;
	char byte;

	for (unsigned i = 0; i < n; i++)
		open += recv(fds[i], &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
	return open;
}

static int hog_sockets(const struct trainer *t)
{
	int fds[MOST];

	user_limits_become(ALICE);
	for (unsigned i = 0; i < MOST; i++) {
		fds[i] = rawsock_connect(t->socket);
		TRAINER_CHECK(fds[i] >= 0);
	}
	TRAINER_AWAIT(count_open(fds, MOST) == 10, 20);
	hold(t);
	return 0;
}

static int hog_sessions(const struct trainer *t)
{
	Shardd__V1__AttachRequest r = SHARDD__V1__ATTACH_REQUEST__INIT;

	user_limits_become(ALICE);
	for (unsigned i = 0; i < 5; i++)
		raw_attach(raw_connect(t->socket));
	r.protocol = 1;
	raw_refused(raw_connect(t->socket), "Attach", &r.base, SHARDD_RESOURCE_EXHAUSTED, NULL,
		    "user 30001 has 5 sessions, which is the limit (max_sessions_per_user): end "
		    "some (shardctl sessions lists them), or raise the limit in shardd.yaml");
	hold(t);
	return 0;
}

static int hog_jobs(const struct trainer *t)
{
	Shardd__V1__CreateJobRequest r = SHARDD__V1__CREATE_JOB_REQUEST__INIT;
	Shardd__V1__JobSpec spec = SHARDD__V1__JOB_SPEC__INIT;
	struct rpc_client *c;
	char name[16];

	user_limits_become(ALICE);
	c = raw_connect(t->socket);
	raw_attach(c);
	r.job = &spec;
	spec.name = name;
	spec.world_size = 1;
	spec.lifetime = SHARDD__V1__LIFETIME__LIFETIME_KEEP;
	for (unsigned i = 0; i < 4; i++) {
		snprintf(name, sizeof(name), "hog%u", i);
		if (i < 3)
			raw_done(c, "CreateJob", &r.base);
		else
			raw_refused(
				c, "CreateJob", &r.base, SHARDD_RESOURCE_EXHAUSTED, NULL,
				"user 30001 has 3 jobs, which is the limit (max_jobs_per_user)");
	}
	hold(t);
	return 0;
}

/* Calls until one is refused with @words. */
static void call_until_refused(struct rpc_client *c, const char *method, const ProtobufCMessage *r,
			       const char *words)
{
	struct shardd_error err;
	unsigned n = 0;

	while (raw_call(c, method, r, NULL, &err) == 0)
		TRAINER_CHECK(++n < 1000);
	TRAINER_CHECK(raw_refusal_is(-SHARDD_RESOURCE_EXHAUSTED, &err, SHARDD_RESOURCE_EXHAUSTED,
				     NULL, words));
}

static int hog_slabs(const struct trainer *t)
{
	Shardd__V1__AllocBufferRequest r = SHARDD__V1__ALLOC_BUFFER_REQUEST__INIT;

	user_limits_become(ALICE);
	r.bytes = 300u << 10;
	call_until_refused(raw_trainer(t->socket, "hog", 0, 1, false), "AllocBuffer", &r.base,
			   "user 30001 has 6 slabs of memory, which is the limit "
			   "(max_slabs_per_user)");
	hold(t);
	return 0;
}

static int hog_state(const struct trainer *t)
{
	Shardd__V1__AllocBufferRequest r = SHARDD__V1__ALLOC_BUFFER_REQUEST__INIT;

	user_limits_become(ALICE);
	r.bytes = 5u << 20;
	call_until_refused(raw_trainer(t->socket, "hog", 0, 1, false), "AllocBuffer", &r.base,
			   "the limit is 33554432 (max_state_bytes_per_user)");
	hold(t);
	return 0;
}

/* A session, and then, when @at has come, its channel. @ret: its connection. */
static int channel_when(const struct trainer *t, stage *at, struct rpc_client **ret)
{
	struct shd1_hello hello = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(hello), 7, 0 },
				    .version = SHD1_VERSION };
	Shardd__V1__AttachRequest r = SHARDD__V1__ATTACH_REQUEST__INIT;
	Shardd__V1__AttachResponse *reply;
	struct shd1_welcome w;
	int fd;

	r.protocol = 1;
	*ret = raw_connect(t->socket);
	reply = raw_must(*ret, "Attach", &r.base);
	memcpy(hello.token, reply->token.data, sizeof(hello.token));
	shardd__v1__attach_response__free_unpacked(reply, NULL);
	TRAINER_AWAIT(!at || atomic_load(at) == 1, 60);
	fd = rawsock_connect(t->socket);
	rawsock_send(fd, &hello, sizeof(hello));
	TRAINER_CHECK(rawsock_read(fd, &w, sizeof(w), 20) && w.h.type == SHD1_WELCOME);
	return fd;
}

static int channel(const struct trainer *t)
{
	struct rpc_client *c;

	return channel_when(t, NULL, &c);
}

static void ask_ring(int fd, uint32_t part)
{
	struct shd1_get_ring g = { .h = { SHD1_MAGIC, SHD1_GET_RING, sizeof(g), 9, 0 },
				   .part = part };

	rawsock_send(fd, &g, sizeof(g));
}

/* The next answer; an error must have @words. Return: it was one. */
static bool is_refused(int fd, const char *words)
{
	struct shd1_ring ring;
	struct shd1_error e;

	TRAINER_CHECK(rawsock_read(fd, &e.h, sizeof(e.h), 20));
	if (e.h.type == SHD1_RING) {
		TRAINER_CHECK(rawsock_read(fd, (char *)&ring + sizeof(ring.h),
					   sizeof(ring) - sizeof(ring.h), 20));
		return false;
	}
	TRAINER_CHECK(rawsock_read(fd, (char *)&e + sizeof(e.h), sizeof(e) - sizeof(e.h), 20));
	if (!strstr(e.text, words))
		fprintf(stderr, "wanted '%s', got '%s'\n", words, e.text);
	TRAINER_CHECK(strstr(e.text, words));
	return true;
}

static size_t waiting(int fd)
{
	int bytes = 0;

	TRAINER_CHECK(ioctl(fd, FIONREAD, &bytes) == 0);
	return (size_t)bytes;
}

static int hog_rings(const struct trainer *t)
{
	unsigned n = 0;

	user_limits_become(ALICE);
	for (;; n++) {
		int fd = channel(t);

		TRAINER_CHECK(n < 100);
		ask_ring(fd, SHD1_RING_MEMORY);
		if (is_refused(fd, "bytes of the daemon's own memory"))
			break;
	}
	TRAINER_CHECK(n > 0);
	hold(t);
	return 0;
}

/* Records of units, each with a place for each rank of a large world. */
static int hog_records(const struct trainer *t)
{
	Shardd__V1__RegisterUnitsRequest r = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT;
	Shardd__V1__UnitSpec unit = SHARDD__V1__UNIT_SPEC__INIT, *units = &unit;
	Shardd__V1__TensorSpec tensor = SHARDD__V1__TENSOR_SPEC__INIT, *tensors = &tensor;
	struct rpc_client *c;
	struct shardd_error err;
	uint64_t elements = 1;
	char name[16];
	unsigned n = 0;

	user_limits_become(ALICE);
	c = raw_trainer(t->socket, "hog", 0, 512, false);
	tensor.name = (char *)"t";
	tensor.shape = &elements;
	tensor.n_shape = 1;
	unit.name = name;
	unit.tensors = &tensors;
	unit.n_tensors = 1;
	r.units = &units;
	r.n_units = 1;
	do {
		TRAINER_CHECK(n < 1000);
		snprintf(name, sizeof(name), "u%u", n++);
	} while (raw_call(c, "RegisterUnits", &r.base, NULL, &err) == 0);
	TRAINER_CHECK(n > 1 && strstr(err.text, "bytes of the daemon's own memory"));
	hold(t);
	return 0;
}

/* Collectives of a rank of a large world that gives up one after the other: each has a place for
 * every rank until its peers have come to it. */
static int hog_collectives(const struct trainer *t)
{
	enum { GROUPS = 64, ROUNDS = 20, AT_ONCE = 100, WORLD = 512 };
	Shardd__V1__CreateGroupRequest g = SHARDD__V1__CREATE_GROUP_REQUEST__INIT;
	Shardd__V1__BarrierRequest r = SHARDD__V1__BARRIER_REQUEST__INIT;
	Shardd__V1__OpHeader header = SHARDD__V1__OP_HEADER__INIT;
	struct rpc_pending *pending[AT_ONCE];
	uint32_t ranks[WORLD];
	struct shardd_error err;
	struct rpc_client *c;
	unsigned refused = 0;
	char name[16];

	user_limits_become(ALICE);
	c = raw_trainer(t->socket, "hog", 0, WORLD, false);
	for (unsigned i = 0; i < WORLD; i++)
		ranks[i] = i;
	g.name = name;
	g.ranks = ranks;
	g.n_ranks = WORLD;
	header.timeout_ms = 1;
	r.header = &header;
	for (unsigned i = 0; !refused && i < GROUPS; i++) {
		Shardd__V1__CreateGroupResponse *made;

		snprintf(name, sizeof(name), "g%u", i);
		made = raw_must(c, "CreateGroup", &g.base);
		r.group = made->group;
		shardd__v1__create_group_response__free_unpacked(made, NULL);
		for (unsigned k = 0; !refused && k < ROUNDS; k++) {
			for (unsigned n = 0; n < AT_ONCE; n++)
				pending[n] = raw_start(c, "Barrier", &r.base);
			for (unsigned n = 0; n < AT_ONCE; n++)
				refused += raw_finish(pending[n], NULL, &err) < 0 &&
					   strstr(err.text, "bytes of the daemon's own memory");
		}
	}
	TRAINER_CHECK(refused);
	hold(t);
	return 0;
}

/* Descriptors that nobody receives stay in the kernel, which counts them against the daemon. */
static int hog_descriptors(const struct trainer *t)
{
	unsigned refused = 0;
	int fd;

	user_limits_become(ALICE);
	fd = channel(t);
	ask_ring(fd, SHD1_RING_MEMORY);
	TRAINER_CHECK(!is_refused(fd, "none"));
	for (unsigned i = 0; i < 20; i++)
		ask_ring(fd, SHD1_RING_EVENT);
	/* all answers are there, and none was received */
	TRAINER_AWAIT(waiting(fd) == 4 * sizeof(struct shd1_ring) + 16 * sizeof(struct shd1_error),
		      20);
	for (unsigned i = 0; i < 20; i++)
		refused += is_refused(fd, "user 30001 has 4 descriptors that wait to be received, "
					  "which is the limit (max_fds_per_user)");
	TRAINER_CHECK(refused == 16);
	for (unsigned i = 0; i < 20; i++)
		ask_ring(fd, SHD1_RING_EVENT);
	hold(t);
	return 0;
}

static unsigned count_over(struct rpc_pending **pending, unsigned n)
{
	unsigned over = 0;

	for (unsigned i = 0; i < n; i++)
		over += rpc_pending_wait(pending[i], 1);
	return over;
}

static int hog_ops(const struct trainer *t)
{
	Shardd__V1__BarrierRequest r = SHARDD__V1__BARRIER_REQUEST__INIT;
	struct rpc_pending *pending[12];
	struct rpc_client *c[2];

	user_limits_become(ALICE);
	for (unsigned i = 0; i < 2; i++)
		c[i] = raw_trainer(t->socket, i ? "hog1" : "hog0", 0, 2, false);
	for (unsigned i = 0; i < ARRAY_SIZE(pending); i++)
		pending[i] = raw_start(c[i % 2], "Barrier", &r.base);
	TRAINER_AWAIT(count_over(pending, ARRAY_SIZE(pending)) == 2, 30);
	for (unsigned i = 0; i < ARRAY_SIZE(pending); i++)
		if (rpc_pending_wait(pending[i], 0))
			raw_finish_refused(pending[i], SHARDD_RESOURCE_EXHAUSTED, NULL,
					   "user 30001 has 10 unanswered ops, which is the limit "
					   "(max_ops_per_user)");
	hold(t);
	return 0;
}

/* Answers larger than HTTP/2's window, which are not read. */
static int hog_status(const struct trainer *t)
{
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct shardd_error err;
	struct rpc_client *c;
	unsigned calls = 0;
	char name[160];

	user_limits_become(ALICE);
	c = raw_trainer(t->socket, "hog", 0, 1, false);
	for (unsigned i = 0; i < 1500; i++) {
		snprintf(name, sizeof(name), "unit-%0100u", i);
		raw_register(c, name, 8);
	}
	r.with_units = true;
	/* one of these is refused itself where it comes while @c's own call is under way: give it ever
	 * more time to come before */
	do {
		int fd = rawsock_connect(t->socket);

		rawsock_h2_begin(fd);
		TRAINER_CHECK(
			rawsock_h2_call(fd, 1, "/shardd.v1.StatusService/GetStatus", &r.base));
		TRAINER_CHECK(++calls < 100);
		(void)poll(NULL, 0, (int)calls);
	} while (raw_call(c, "Status/GetStatus", &r.base, NULL, &err) == 0);
	TRAINER_CHECK(raw_refusal_is(-SHARDD_RESOURCE_EXHAUSTED, &err, SHARDD_RESOURCE_EXHAUSTED,
				     NULL,
				     "user 30001 has 2 unanswered calls of Status, which is the "
				     "limit (max_status_calls_per_user)"));
	hold(t);
	return 0;
}

/* -------------------------------------------------------------- who goes on */

static int compare_u64(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* Steps of a small job, and how long they take. */
static int steps_of_bob(const struct trainer *t)
{
	enum { STEPS = 300, N = 4096 };
	static uint64_t took[STEPS];
	struct play *p = t->arg;
	float *gradient;
	shardd_client *c;
	shardd_unit u;

	user_limits_become(BOB);
	c = train_connect(t);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	u = train_zero_unit(c, "u", N, NULL);
	gradient = train_numbers(N, 1);
	for (unsigned i = 0; i < STEPS; i++) {
		uint64_t began = clock_now_us();
		const void *full;

		TRAIN_OK(shardd_gather(c, u, &full, &train_err));
		TRAIN_OK(shardd_release(c, u, &train_err));
		train_reduce(c, u, DTYPE_FP32, gradient, N);
		took[i] = clock_now_us() - began;
	}
	qsort(took, STEPS, sizeof(took[0]), compare_u64);
	atomic_store(&p->p50_us, took[STEPS / 2]);
	atomic_store(&p->p99_us, took[STEPS * 99 / 100]);
	free(gradient);
	train_leave(c);
	return 0;
}

static void run_bob(struct play *p, const char *what)
{
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "bobs", 0, 1, steps_of_bob, p), 60), 0,
		     "%s", what);
	fprintf(stderr, "# %s: step p50 %llu us, p99 %llu us\n", what,
		(unsigned long long)atomic_load(&p->p50_us),
		(unsigned long long)atomic_load(&p->p99_us));
}

/* What `shardctl users` says of @uid and @kind; UINT64_MAX: nothing is known of the user. */
static uint64_t usage(uid_t uid, const char *kind, const char *key)
{
	static const char *const args[] = { "users", NULL };
	json_t *all = daemonfix_ctl(&trainfix, args), *user, *k;
	uint64_t found = UINT64_MAX;
	size_t i, j;

	json_array_foreach(json_object_get(all, "users"), i, user)
	{
		if ((uid_t)json_integer_value(json_object_get(user, "uid")) != uid)
			continue;
		json_array_foreach(json_object_get(user, "usage"), j,
				   k) if (strcmp(json_string_value(json_object_get(k, "name")),
						 kind) == 0) found =
			(uint64_t)json_integer_value(json_object_get(k, key));
	}
	json_decref(all);
	return found;
}

static void delete_jobs(void)
{
	static const char *const names[] = { "hog", "hog0", "hog1", "hog2" };
	char out[1024];

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		const char *const args[] = { "job", "delete", "--force", names[i], NULL };

		(void)daemonfix_ctl_text(&trainfix, args, out, sizeof(out));
	}
}

/* ------------------------------------------------------- the last connections */

/* All that are left for users, 60 less 20: again and again, for those that were refused. */
static int hog_all(const struct trainer *t)
{
	struct play *p = t->arg;
	int fds[MOST];

	user_limits_become(ALICE);
	for (unsigned i = 0; i < MOST; i++)
		fds[i] = -1;
	for (;;) {
		for (unsigned i = 0; i < MOST; i++) {
			if (fds[i] >= 0 && count_open(&fds[i], 1))
				continue;
			fd_close(fds[i]);
			fds[i] = rawsock_connect(t->socket);
			rawsock_send(fds[i], "SHD1", 4);
		}
		stage_set(&p->full, 1);
		poll(NULL, 0, 1);
	}
	return 0;
}

/* Attaches, and opens its channel when there are no connections left for others. */
static int channel_of_bob(const struct trainer *t)
{
	struct play *p = t->arg;
	struct rpc_client *c;
	int fd;

	user_limits_become(BOB);
	fd = channel_when(t, &p->refused, &c);
	ask_ring(fd, SHD1_RING_MEMORY);
	TRAINER_CHECK(!is_refused(fd, "none"));
	rpc_client_close(c);
	return 0;
}

Test(user_limits, root_and_channels_of_sessions_get_in_when_all_is_taken)
{
	static const char *const args[] = { "--set", "socket_mode=0666",
					    "--set", "hello_timeout_ms=2min",
					    "--set", "max_connections=60",
					    "--set", "reserved_connections=20",
					    NULL };
	struct play *p;
	pid_t hog, bob;

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	failfix_begin(args);
	chmod(trainfix.dir, 0755);
	p = trainer_shared(sizeof(*p));
	bob = trainer_start(&trainfix, "bobs", 0, 1, channel_of_bob, p);
	AWAIT(usage(BOB, "sessions", "used") == 1, 30);
	hog = trainer_start(&trainfix, "hog", 0, 1, hog_all, p);
	AWAIT(usage(ALICE, "connections", "used") >= 37, 60);
	stage_set(&p->refused, 1);
	cr_assert_eq(trainer_wait(bob, 30), 0);
	daemonfix_check_alive(&trainfix);
	fail_kill(hog);
	AWAIT(usage(ALICE, "connections", "used") == UINT64_MAX, 30);
	failfix_end();
}

struct hog_case {
	const char *kind;
	trainer_fn hog;
	uint64_t limit; /* 0: what is used is not exactly the limit */
	const char *set[5];
	const char *what; /* the log says that it was refused; NULL: need not */
};

static void expect_logged(const char *what)
{
	char line[64];

	snprintf(line, sizeof(line), "refused what=%s uid=%u pid=", what, (unsigned)ALICE);
	AWAIT(fail_logged(&trainfix, line), 20);
}

static void a_hog(const struct hog_case *h)
{
	const char *args[16] = { "--set", "socket_mode=0666", "--set", "hello_timeout_ms=2min" };
	struct play *p;
	pid_t hog;
	unsigned n = 4;

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	for (unsigned i = 0; h->set[i]; i++) {
		args[n++] = "--set";
		args[n++] = h->set[i];
	}
	failfix_begin(args);
	chmod(trainfix.dir, 0755);
	p = trainer_shared(sizeof(*p));
	hog = trainer_start(&trainfix, "hog", 0, 1, h->hog, p);
	AWAIT(atomic_load(&p->full) == 1, 60);
	cr_expect_geq(usage(ALICE, h->kind, "refused"), 1);
	if (h->limit)
		cr_expect_eq(usage(ALICE, h->kind, "used"), h->limit);
	if (h->what)
		expect_logged(h->what);
	run_bob(p, h->kind);
	/* a second for a step of microseconds: it is not told to wait for the hog */
	cr_expect_lt(atomic_load(&p->p99_us), 1000000u);
	daemonfix_check_alive(&trainfix);
	fail_kill(hog);
	AWAIT(usage(ALICE, "connections", "used") == 0 ||
		      usage(ALICE, "connections", "used") == UINT64_MAX,
	      30);
	delete_jobs();
	/* the account goes with the last thing that is charged to it */
	AWAIT(usage(ALICE, h->kind, "used") == UINT64_MAX, 30);
	failfix_end();
}

#define HOG(name, ...)                                            \
	Test(user_limits, name)                                   \
	{                                                         \
		static const struct hog_case h = { __VA_ARGS__ }; \
		a_hog(&h);                                        \
	}

HOG(connections_without_a_session, "unattached", hog_sockets, 10, { "max_unattached_per_user=10" },
    NULL)
HOG(connections, "connections", hog_sockets, 10,
    { "max_connections_per_user=10", "max_unattached_per_user=0" }, NULL)
HOG(sessions, "sessions", hog_sessions, 5, { "max_sessions_per_user=5" }, "attach")
HOG(jobs, "jobs", hog_jobs, 3, { "max_jobs_per_user=3" }, "create")
HOG(slabs, "slabs", hog_slabs, 6, { "max_slabs_per_user=6" }, "AllocBuffer")
HOG(state, "state_bytes", hog_state, 0, { "max_state_bytes_per_user=32MiB" }, "AllocBuffer")
HOG(rings, "daemon_bytes", hog_rings, 0, { "max_daemon_bytes_per_user=6MiB" }, NULL)
HOG(records, "daemon_bytes", hog_records, 0, { "max_daemon_bytes_per_user=6MiB" }, "register")
HOG(collectives, "daemon_bytes", hog_collectives, 0, { "max_daemon_bytes_per_user=6MiB" }, NULL)
HOG(descriptors_that_are_not_received, "fds", hog_descriptors, 4, { "max_fds_per_user=4" }, NULL)
HOG(ops, "ops", hog_ops, 10, { "max_ops_per_user=10" }, NULL)
HOG(status_calls, "status_calls", hog_status, 0, { "max_status_calls_per_user=2" }, NULL)

/* ---------------------------------------------------------------- in a loop */

enum { LARGE_JOB = 4000, ASKERS = 4 };

/* All about a large job, on several connections, again as soon as it is answered. */
static int hog_status_loop(const struct trainer *t)
{
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct rpc_pending *pending[ASKERS];
	struct rpc_client *c[ASKERS];
	struct play *p = t->arg;
	struct shardd_error err;
	char name[32];

	user_limits_become(ALICE);
	for (unsigned i = 0; i < ASKERS; i++)
		c[i] = i ? raw_connect(t->socket) : raw_trainer(t->socket, "hog", 0, 1, false);
	for (unsigned i = 0; i < LARGE_JOB; i++) {
		snprintf(name, sizeof(name), "unit-%u", i);
		raw_register(c[0], name, 8);
	}
	r.with_units = true;
	r.with_slabs = true;
	for (unsigned i = 0; i < ASKERS; i++)
		pending[i] = raw_start(c[i], "Status/GetStatus", &r.base);
	for (stage_set(&p->full, 1);;)
		for (unsigned i = 0; i < ASKERS; i++) {
			if (raw_finish(pending[i], NULL, &err) != 0) {
				fprintf(stderr, "Status/Get: %s\n", err.text);
				return 1;
			}
			pending[i] = raw_start(c[i], "Status/GetStatus", &r.base);
		}
	return 0;
}

/* An answer takes the loop milliseconds; asked for in a loop it took all of its time. */
Test(user_limits, status_in_a_loop)
{
	static const char *const args[] = { "--set", "socket_mode=0666",
					    "--set", "max_slabs_per_user=0",
					    "--set", "max_status_calls_per_user=0",
					    NULL };
	struct play *p;
	pid_t hog;

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	failfix_begin(args);
	chmod(trainfix.dir, 0755);
	p = trainer_shared(sizeof(*p));
	run_bob(p, "alone");
	hog = trainer_start(&trainfix, "hog", 0, 1, hog_status_loop, p);
	AWAIT(atomic_load(&p->full) == 1, 120);
	run_bob(p, "beside Status of a large job in a loop");
	cr_expect_lt(atomic_load(&p->p99_us), 1000000u);
	fail_kill(hog);
	AWAIT(usage(ALICE, "connections", "used") == 0 ||
		      usage(ALICE, "connections", "used") == UINT64_MAX,
	      30);
	delete_jobs();
	AWAIT(usage(ALICE, "connections", "used") == UINT64_MAX, 30);
	failfix_end();
}
