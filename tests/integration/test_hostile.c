/*
 * Connections that mean no good. After each the daemon lives, answers, and its
 * descriptors and bytes are what they were.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "daemonfix.h"
#include "fdcheck.h"
#include "local_abi.h"
#include "methods.h"
#include "rawcall.h"
#include "rawsock.h"
#include "witness.h"

TestSuite(hostile, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

#define STATUS "/shardd.v1.StatusService/"

/* ---------------------------------------------------- many that say nothing */

/* As many as this process may have, up to @wanted. */
static unsigned allowed(unsigned wanted)
{
	struct rlimit limit;

	cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	return limit.rlim_cur - 200 < wanted ? (unsigned)limit.rlim_cur - 200 : wanted;
}

static unsigned connect_all(const char *path, int *fds, unsigned n)
{
	unsigned got = 0;

	while (got < n && (fds[got] = rawsock_connect(path)) >= 0)
		got++;
	return got;
}

static void close_all(int *fds, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		fd_close(fds[i]);
}

static void silent(const char *const *args)
{
	unsigned n = allowed(10000);
	int *fds = calloc(n, sizeof(*fds));
	struct witness b;

	witness_begin(&b, args);
	cr_assert_eq(connect_all(b.d.socket, fds, n), n);
	fprintf(stderr, "# %u connections that say nothing\n", n);
	witness_serves(&b, 30); /* they are all still held by us */
	close_all(fds, n);
	free(fds);
	witness_end(&b);
}

Test(hostile, ten_thousand_silent_connections_with_the_default_limits)
{
	silent(NULL);
}

Test(hostile, ten_thousand_silent_connections_with_a_low_limit)
{
	static const char *const args[] = { "--set", "max_connections=64", "--set",
					    "hello_timeout_ms=100", NULL };

	silent(args);
}

Test(hostile, ten_thousand_silent_connections_with_room_for_all)
{
	static const char *const args[] = { "--set", "max_connections=30000", "--set",
					    "hello_timeout_ms=3s", NULL };

	silent(args);
}

/* The limit of the process comes before the configured one. */
Test(hostile, more_connections_than_descriptors)
{
	static const char *const args[] = { "--set", "max_connections=30000", "--set",
					    "hello_timeout_ms=500", NULL };
	struct rlimit limit, few;
	int fds[200];
	struct witness b;
	unsigned n;

	witness_begin(&b, args);
	cr_assert_eq(prlimit(b.d.pid, RLIMIT_NOFILE, NULL, &limit), 0);
	few = (struct rlimit){ 60, limit.rlim_max }; /* some 20 are in use */
	cr_assert_eq(prlimit(b.d.pid, RLIMIT_NOFILE, &few, NULL), 0);
	n = connect_all(b.d.socket, fds, ARRAY_SIZE(fds));
	cr_assert_eq(n, ARRAY_SIZE(fds));
	for (unsigned i = 0; i < n; i++)
		cr_assert(rawsock_closed(fds[i], 20));
	close_all(fds, n);
	cr_assert_eq(prlimit(b.d.pid, RLIMIT_NOFILE, &limit, NULL), 0);
	witness_serves(&b, 20);
	witness_end(&b);
}

Test(hostile, thousands_of_connects_and_closes)
{
	struct witness b;

	witness_begin(&b, NULL);
	for (unsigned i = 0; i < 6000; i++) {
		int fd = rawsock_connect(b.d.socket);

		cr_assert_geq(fd, 0);
		if (i % 3 == 1)
			rawsock_send(fd, "PRI * HTTP/2.0\r\n", 16);
		else if (i % 3 == 2)
			rawsock_send(fd, "SHD1", 4);
		fd_close(fd);
	}
	witness_serves(&b, 20);
	witness_end(&b);
}

/* ------------------------------------------------------------- wrong beginnings */

static uint32_t noise_state = 12345;

static void noise(void *data, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++) {
		noise_state = noise_state * 1664525u + 1013904223u;
		((uint8_t *)data)[i] = (uint8_t)(noise_state >> 24);
	}
}

Test(hostile, half_a_hello_then_silence)
{
	static const char *const args[] = { "--set", "hello_timeout_ms=200", NULL };
	static const char *const halves[] = { "P", "PRI", "S", "SHD", "SHD1", "SHD1\1\0" };
	int fds[ARRAY_SIZE(halves)];
	struct witness b;

	witness_begin(&b, args);
	for (size_t i = 0; i < ARRAY_SIZE(halves); i++) {
		fds[i] = rawsock_connect(b.d.socket);
		rawsock_send(fds[i], halves[i], strlen(halves[i]));
	}
	for (size_t i = 0; i < ARRAY_SIZE(halves); i++) {
		cr_assert(rawsock_closed(fds[i], 10), "'%s' is not closed", halves[i]);
		fd_close(fds[i]);
	}
	witness_end(&b);
}

Test(hostile, garbage_on_the_socket)
{
	uint8_t data[4096];
	struct witness b;

	witness_begin(&b, NULL);
	for (unsigned i = 0; i < 500; i++) {
		int fd = rawsock_connect(b.d.socket);

		noise(data, sizeof(data));
		data[0] = (uint8_t)(i % 2 ? 'x' : data[0] | 0x80);
		rawsock_send(fd, data, 1 + i * 8);
		cr_assert(rawsock_closed(fd, 10), "%u", i);
		fd_close(fd);
	}
	witness_end(&b);
}

/* A good preface, then one thing that is wrong. */
static void wrong_frames(int fd, unsigned what)
{
	static const uint8_t large[] = { 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1 };
	static const uint8_t zeros[64];
	uint8_t data[4096];

	rawsock_h2_begin(fd);
	noise(data, sizeof(data));
	switch (what) {
	case 0: /* frames of noise */
		rawsock_send(fd, data, sizeof(data));
		break;
	case 1: /* headers of noise */
		rawsock_h2_frame(fd, H2_HEADERS, H2_END_HEADERS, 1, data, 100);
		break;
	case 2: /* a frame of 16 MiB that does not come */
		rawsock_send(fd, large, sizeof(large));
		break;
	case 3: /* settings whose length is no multiple of 6 */
		rawsock_h2_frame(fd, H2_SETTINGS, 0, 0, data, 5);
		break;
	case 4: /* data on a stream that was never opened, and on stream 0 */
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 77, data, 100);
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 0, data, 100);
		break;
	case 5: /* a window update of 0 */
		rawsock_h2_frame(fd, H2_WINDOW, 0, 0, zeros, 4);
		break;
	case 6: /* a message that says it is 4 GiB */
		rawsock_h2_headers(fd, 1, METHOD_Attach);
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, "\0\xff\xff\xff\xff", 5);
		break;
	case 7: /* one that says it is compressed */
		rawsock_h2_headers(fd, 1, METHOD_Attach);
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, "\1\0\0\0\3abc", 8);
		break;
	case 8: /* one that is shorter than it says */
		rawsock_h2_headers(fd, 1, METHOD_Attach);
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, "\0\0\0\0\77abc", 8);
		break;
	case 9: /* one that is no such message */
		rawsock_h2_headers(fd, 1, METHOD_Attach);
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, "\0\0\0\0\3\377\377\377", 8);
		break;
	case 10: /* a method that is not there */
		rawsock_h2_headers(fd, 1, "/shardd.v1.SessionService/Destroy");
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, zeros, 5);
		break;
	case 11: /* a call without a message, and one whose message never comes */
		rawsock_h2_headers(fd, 1, METHOD_Attach);
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, NULL, 0);
		rawsock_h2_headers(fd, 3, METHOD_Join);
		break;
	default: /* half a frame */
		rawsock_send(fd, "\0\0\40\1", 4);
		break;
	}
}

Test(hostile, http2_preface_then_garbage)
{
	int fds[13 * 4];
	struct witness b;

	witness_begin(&b, NULL);
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++) {
		fds[i] = rawsock_connect(b.d.socket);
		wrong_frames(fds[i], i % 13);
	}
	daemonfix_check_alive(&b.d); /* while they are all there, in silence now */
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++)
		fd_close(fds[i]);
	witness_end(&b);
}

Test(hostile, floods_of_pings_and_resets)
{
	int fd;
	struct witness b;

	witness_begin(&b, NULL);
	fd = rawsock_connect(b.d.socket);
	rawsock_h2_begin(fd);
	for (unsigned i = 0; i < 100000; i++)
		if (!rawsock_h2_frame(fd, H2_PING, 0, 0, "12345678", 8))
			break;
	fd_close(fd);
	fd = rawsock_connect(b.d.socket);
	rawsock_h2_begin(fd);
	for (uint32_t i = 0; i < 20000; i++)
		if (!rawsock_h2_headers(fd, 2 * i + 1, METHOD_Attach) ||
		    !rawsock_h2_frame(fd, H2_RST, 0, 2 * i + 1, "\0\0\0\10", 4))
			break;
	daemonfix_check_alive(&b.d);
	fd_close(fd);
	witness_end(&b);
}

Test(hostile, descriptors_where_none_belong)
{
	static const char h2[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
	struct shd1_hello hello = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(hello), 0, 0 },
				    .version = SHD1_VERSION };
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
	int grpc[20], local;
	struct witness b;

	witness_begin(&b, NULL);
	for (unsigned i = 0; i < ARRAY_SIZE(grpc); i++) {
		grpc[i] = rawsock_connect(b.d.socket);
		rawsock_send_fd(grpc[i], h2, sizeof(h2) - 1, null);
		rawsock_send_fd(grpc[i], "\0\0\0\4\0\0\0\0\0", 9, null);
		local = rawsock_connect(b.d.socket);
		rawsock_send_fd(local, &hello, sizeof(hello), null);
		cr_assert(rawsock_closed(local, 10));
		fd_close(local);
		local = rawsock_connect(b.d.socket);
		rawsock_send_fd(local, "x", 1, null);
		cr_assert(rawsock_closed(local, 10));
		fd_close(local);
	}
	daemonfix_check_alive(&b.d);
	/* two of each connection, and those of the probe: none of ours is among them */
	for (unsigned i = 0; i < ARRAY_SIZE(grpc); i++)
		fd_close(grpc[i]);
	fd_close(null);
	witness_end(&b);
}

/* ------------------------------------------------------------ those that do not read */

/* A session over plain frames. Return: the next free stream. */
static uint32_t h2_attach(int fd)
{
	Shardd__V1__AttachRequest attach = SHARDD__V1__ATTACH_REQUEST__INIT;

	attach.protocol = 1;
	rawsock_h2_begin(fd);
	cr_assert(rawsock_h2_call(fd, 1, METHOD_Attach, &attach.base));
	return 3;
}

Test(hostile, a_client_that_never_reads_its_answers)
{
	Shardd__V1__GetStatusRequest status = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__OpsRequest ops = SHARDD__V1__OPS_REQUEST__INIT;
	uint32_t stream;
	unsigned calls = 0;
	struct witness b;
	int fd;

	witness_begin(&b, NULL);
	fd = rawsock_connect(b.d.socket);
	stream = h2_attach(fd);
	status.with_units = status.with_slabs = true;
	for (; calls < 20000; calls++, stream += 2)
		if (!rawsock_h2_call(fd, stream, calls % 2 ? STATUS "GetStatus" : STATUS "Ops",
				     calls % 2 ? &status.base : &ops.base))
			break;
	fprintf(stderr, "# %u calls were taken of a client that does not read\n", calls);
	/* Up to as many calls as a connection may have open are answered first: 20 ms of the
	 * processor, some 300 with a sanitizer, of which a busy machine gives a part. */
	witness_serves(&b, 60);
	fd_close(fd);
	witness_end(&b);
}

/* Each Join ends the epoch that the one before it made: an event for each watch. */
Test(hostile, a_watcher_that_never_reads_its_events)
{
	Shardd__V1__WatchRequest watch = SHARDD__V1__WATCH_REQUEST__INIT;
	Shardd__V1__JoinRequest join = SHARDD__V1__JOIN_REQUEST__INIT;
	Shardd__V1__JobSpec job = SHARDD__V1__JOB_SPEC__INIT;
	static const char *const remove[] = { "job", "delete", "--force", "watched", NULL };
	unsigned joins = 0;
	uint32_t stream;
	char out[512];
	struct witness b;
	int fd;

	witness_begin(&b, NULL);
	fd = rawsock_connect(b.d.socket);
	stream = h2_attach(fd);
	for (unsigned i = 0; i < 100; i++, stream += 2)
		cr_assert(rawsock_h2_call(fd, stream, METHOD_Watch, &watch.base));
	job.name = (char *)"watched";
	job.world_size = 1;
	join.job = &job;
	for (; joins < 3000; joins++, stream += 2)
		if (!rawsock_h2_call(fd, stream, METHOD_Join, &join.base))
			break;
	fprintf(stderr, "# %u joins were taken\n", joins);
	daemonfix_check_alive(&b.d);
	fd_close(fd);
	cr_assert_eq(daemonfix_ctl_text(&b.d, remove, out, sizeof(out)), 0, "%s", out);
	witness_end(&b);
}

/* -------------------------------------------------------------- of one connection */

static int flood_attach(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	Shardd__V1__AttachRequest r = SHARDD__V1__ATTACH_REQUEST__INIT;
	static struct rpc_pending *pending[1000];
	struct shardd_error err;
	unsigned done = 0, refused = 0;

	r.protocol = 1;
	for (unsigned i = 0; i < ARRAY_SIZE(pending); i++)
		pending[i] = raw_start(c, "Attach", &r.base);
	for (unsigned i = 0; i < ARRAY_SIZE(pending); i++) {
		int e = raw_finish(pending[i], NULL, &err);

		done += e == 0;
		refused += e == -SHARDD_FAILED_PRECONDITION;
	}
	TRAINER_CHECK(done == 1 && refused == ARRAY_SIZE(pending) - 1);
	rpc_client_close(c);
	return 0;
}

/* Take the answers that are there. Return: how many refusals there are so far. */
static unsigned take_refusals(struct rpc_pending **pending, unsigned n)
{
	static unsigned refused;
	struct shardd_error err;

	for (unsigned i = 0; i < n; i++) {
		if (!pending[i] || !rpc_pending_wait(pending[i], 0))
			continue;
		TRAINER_CHECK(raw_finish(pending[i], NULL, &err) == -SHARDD_RESOURCE_EXHAUSTED);
		pending[i] = NULL;
		refused++;
	}
	return refused;
}

/* More calls that wait than a connection may have: a sentence, not a hang. Which ones
 * are refused is not said: calls of one connection may arrive in any order. */
static int flood_waiting(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "flood", 0, 2, false);
	Shardd__V1__BarrierRequest r = SHARDD__V1__BARRIER_REQUEST__INIT;
	static struct rpc_pending *pending[1500];
	uint64_t end = clock_now_us() + 60000000u;
	unsigned most = ARRAY_SIZE(pending) - 1024, refused = 0;

	for (unsigned i = 0; i < ARRAY_SIZE(pending); i++)
		pending[i] = raw_start(c, "Barrier", &r.base);
	/* 1024 are max_inflight_ops and wait for rank 1; all others are refused */
	while (refused < most && clock_now_us() < end) {
		struct rpc_pending *open = NULL;

		refused = take_refusals(pending, ARRAY_SIZE(pending));
		for (unsigned i = 0; !open && i < ARRAY_SIZE(pending); i++)
			open = pending[i];
		rpc_pending_wait(open, 10); /* drives the connection */
	}
	TRAINER_CHECK(refused == most && take_refusals(pending, ARRAY_SIZE(pending)) == most);
	rpc_client_close(c);
	return 0;
}

Test(hostile, a_flood_of_attaches_on_one_connection)
{
	witness_trainer(NULL, "flood", flood_attach, 100);
}

Test(hostile, a_flood_of_ops_that_wait)
{
	witness_trainer(NULL, "flood", flood_waiting, 100);
}

/* A rank that gives its collectives up and goes on numbers them for ever: what it is
 * ahead of its peers is limited. */
static int flood_ahead(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "flood", 0, 2, false);
	Shardd__V1__BarrierRequest r = SHARDD__V1__BARRIER_REQUEST__INIT;
	Shardd__V1__OpHeader h = SHARDD__V1__OP_HEADER__INIT;
	static struct rpc_pending *pending[1000];
	struct shardd_error err;
	unsigned late = 0, refused = 0;

	h.timeout_ms = 1;
	r.header = &h;
	for (unsigned round = 0; round < 6; round++) {
		for (unsigned i = 0; i < ARRAY_SIZE(pending); i++)
			pending[i] = raw_start(c, "Barrier", &r.base);
		for (unsigned i = 0; i < ARRAY_SIZE(pending); i++) {
			int e = raw_finish(pending[i], NULL, &err);

			late += e == -SHARDD_DEADLINE_EXCEEDED;
			refused += e == -SHARDD_RESOURCE_EXHAUSTED;
		}
	}
	fprintf(stderr, "# %u late, %u refused: %s\n", late, refused, err.text);
	TRAINER_CHECK(late + refused == 6 * ARRAY_SIZE(pending) && late && refused);
	TRAINER_CHECK(strstr(err.text, "join again"));
	rpc_client_close(c);
	return 0;
}

Test(hostile, a_rank_that_runs_ahead_of_its_peers)
{
	witness_trainer(NULL, "flood", flood_ahead, 100);
}
