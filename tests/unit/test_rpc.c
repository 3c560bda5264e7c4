/*
 * The gRPC server and the client of libshardd against each other, over a real
 * socket. The service is shardd.v1.StatusService with handlers of our own: Get does what
 * request.job says, Ops is a stream.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "rpc_client.h"
#include "rpchost.h"
#include "shardd.pb-c.h"
#include "status.pb-c.h"

#define GET "/shardd.v1.StatusService/GetStatus"
#define OPS "/shardd.v1.StatusService/Ops"

static struct rpchost host;
static unsigned n_descriptors;      /* when the test began */
static struct rpc_call *held[1024]; /* loop thread */
static struct work late_work;
static struct rpc_call *late_call;
static struct rpc_call *stream;
static uint64_t seen_deadline_us;
static atomic_uint n_held, n_cancelled, n_served;

/* ------------------------------------------------- handlers, loop thread */

static void on_held_cancelled(struct rpc_call *call, void *userdata)
{
	(void)userdata;
	for (size_t i = 0; i < ARRAY_SIZE(held); i++)
		if (held[i] == call)
			held[i] = NULL;
	atomic_fetch_add(&n_cancelled, 1);
	rpc_call_fail(call,
		      &(struct fault){ .code = FAULT_CANCELLED, .text = "nobody hears this" });
}

static void hold(struct rpc_call *call)
{
	size_t i = 0;

	while (held[i])
		CHECK(++i < ARRAY_SIZE(held));
	held[i] = call;
	seen_deadline_us = rpc_call_deadline_us(call);
	rpc_call_on_cancelled(call, on_held_cancelled, NULL);
	atomic_fetch_add(&n_held, 1);
}

static void end_late(struct work *work)
{
	(void)work;
	rpc_call_fail(late_call, &(struct fault){ .code = FAULT_ABORTED, .text = "late" });
}

/* Ends its call in a later turn of the loop, as an op in the engine does. */
static void on_late_cancelled(struct rpc_call *call, void *userdata)
{
	(void)userdata;
	late_call = call;
	atomic_fetch_add(&n_cancelled, 1);
	loopq_post(&host.queue, &late_work, end_late);
}

static void reply(struct rpc_call *call, const char *version)
{
	Shardd__V1__GetStatusResponse msg = SHARDD__V1__GET_STATUS_RESPONSE__INIT;

	msg.version = (char *)version;
	atomic_fetch_add(&n_served, 1);
	rpc_call_reply(call, &msg.base);
}

static void get(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__GetStatusRequest *req = (const void *)request;
	struct fault f = { .code = FAULT_INVALID,
			   .domain = FAULT_DOMAIN_OS,
			   .native = ENOSPC,
			   .field = "units[3].name",
			   .text = "a sentence, with an umlaut: \xc3\xbc, and \xff." };

	CHECK(userdata == &host && rpc_call_conn(call));
	CHECK(strcmp(rpc_call_method(call), GET) == 0);
	if (strcmp(req->job, "hold") == 0) {
		hold(call);
	} else if (strcmp(req->job, "late") == 0) {
		rpc_call_on_cancelled(call, on_late_cancelled, NULL);
		atomic_fetch_add(&n_held, 1);
	} else if (strcmp(req->job, "unwatched") == 0) {
		late_call = call;
		atomic_fetch_add(&n_held, 1);
	} else if (strcmp(req->job, "fault") == 0) {
		rpc_call_fail(call, &f);
	} else {
		reply(call, req->job);
	}
}

static void on_stream_cancelled(struct rpc_call *call, void *userdata)
{
	(void)userdata;
	CHECK(call == stream);
	stream = NULL;
	atomic_fetch_add(&n_cancelled, 1);
	rpc_call_end(call);
}

/* limit messages and the end; 0: none yet, the test sends. */
static void ops(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__OpsRequest *req = (const void *)request;
	Shardd__V1__OpsResponse msg = SHARDD__V1__OPS_RESPONSE__INIT;

	(void)userdata;
	if (req->limit == 0) {
		stream = call;
		rpc_call_on_cancelled(call, on_stream_cancelled, NULL);
		atomic_fetch_add(&n_held, 1);
		return;
	}
	for (msg.now_us = 1; msg.now_us <= req->limit; msg.now_us++)
		CHECK(rpc_call_send(call, &msg.base) == 0);
	rpc_call_end(call);
}

static const struct rpc_method methods[] = {
	{ "GetStatus", get, false, false }, { "Ops", ops, true, false },
	{ "History", get, false, false }, /* every method has a handler; nobody calls these */
	{ "Events", get, false, false },    { NULL, NULL, false, false },
};

static const struct rpc_service service = { &shardd__v1__status_service__descriptor, methods,
					    &host };

static void start_with(const struct rpc_options *options)
{
	rpchost_start(&host, options, &service, 1);
}

static void test_rpc_begin(void)
{
	n_descriptors = rpchost_begin();
}

/* In the test itself: Criterion does not count what fails after it. */
static void finish(struct rpc_client *c)
{
	rpc_client_close(c);
	rpchost_stop(&host);
	rpchost_descriptors(n_descriptors);
}

TestSuite(rpc, .init = test_rpc_begin, .timeout = 60);

/* -------------------------------------------------------- client's side */

static struct rpc_client *connect_client(void)
{
	struct shardd_error err = { 0 };
	struct rpc_client *c = NULL;

	cr_assert_eq(rpc_client_connect(host.path, 1000, &c, &err), 0, "%s", err.text);
	return c;
}

static struct rpc_pending *start_get(struct rpc_client *c, const char *job, uint32_t timeout_ms)
{
	Shardd__V1__GetStatusRequest req = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct rpc_pending *p = NULL;
	struct shardd_error err;

	req.job = (char *)job;
	cr_assert_eq(rpc_client_start(c, GET, &req.base,
				      &shardd__v1__get_status_response__descriptor, false,
				      timeout_ms, &p, &err),
		     0);
	return p;
}

/* End @p. Return: the code; the reply's version must be @expected. */
static int finish_get(struct rpc_pending *p, const char *expected, struct shardd_error *err)
{
	ProtobufCMessage *msg = NULL;
	int r;

	cr_assert(rpc_pending_wait(p, 20000));
	r = rpc_pending_result(p, &msg, err);
	if (r == 0) {
		cr_assert_str_eq(((Shardd__V1__GetStatusResponse *)msg)->version, expected);
		protobuf_c_message_free_unpacked(msg, NULL);
	}
	rpc_pending_free(p);
	return r;
}

static int call_get(struct rpc_client *c, const char *job, struct shardd_error *err)
{
	return finish_get(start_get(c, job, 0), job, err);
}

static int call_raw(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
		    struct shardd_error *err)
{
	ProtobufCMessage *msg = NULL;

	return rpc_client_call(c, method, request, &shardd__v1__get_status_response__descriptor, 0,
			       &msg, err);
}

static struct rpc_pending *start_ops(struct rpc_client *c, uint32_t limit)
{
	Shardd__V1__OpsRequest req = SHARDD__V1__OPS_REQUEST__INIT;
	struct rpc_pending *p = NULL;
	struct shardd_error err;

	req.limit = limit;
	cr_assert_eq(rpc_client_start(c, OPS, &req.base, &shardd__v1__ops_response__descriptor,
				      true, 0, &p, &err),
		     0);
	return p;
}

/* ---------------------------------------------------------------- tests */

Test(rpc, unary_call_is_answered)
{
	struct shardd_error err;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	cr_assert_eq(call_get(c, "one", &err), 0);
	cr_assert_eq(call_get(c, "", &err), 0);
	finish(c);
}

Test(rpc, fault_arrives_with_all_its_fields)
{
	struct shardd_error err;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	cr_assert_eq(call_get(c, "fault", &err), -SHARDD_INVALID_ARGUMENT);
	cr_assert_eq(err.code, SHARDD_INVALID_ARGUMENT);
	cr_assert_eq(err.native, ENOSPC);
	cr_assert_str_eq(err.domain, "os");
	cr_assert_str_eq(err.field, "units[3].name");
	cr_assert_str_eq(err.text, "a sentence, with an umlaut: \xc3\xbc, and ?.");
	cr_assert_eq(call_get(c, "after", NULL), 0);
	finish(c);
}

Test(rpc, unknown_method_is_unimplemented)
{
	Shardd__V1__GetStatusRequest req = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct shardd_error err;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	for (int i = 0; i < 20; i++) { /* more than are armed at once */
		cr_assert_eq(call_raw(c, "/shardd.v1.StatusService/Nope", &req.base, &err),
			     -SHARDD_UNIMPLEMENTED);
		cr_assert_str_eq(err.text, "there is no method /shardd.v1.StatusService/Nope");
	}
	finish(c);
}

Test(rpc, malformed_message_is_refused_naming_the_method)
{
	/* On the wire a number where GetStatusRequest has a string. */
	Shardd__V1__DeleteJobResponse wrong = SHARDD__V1__DELETE_JOB_RESPONSE__INIT;
	struct shardd_error err;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	wrong.freed_bytes = 7;
	cr_assert_eq(call_raw(c, GET, &wrong.base, &err), -SHARDD_INVALID_ARGUMENT);
	cr_assert(strstr(err.text, GET), "%s", err.text);
	cr_assert_eq(atomic_load(&n_served), 0);
	finish(c);
}

Test(rpc, message_over_the_limit_is_refused)
{
	static char job[200001];
	struct rpc_options options = { .max_message_bytes = 100000, .max_calls_per_conn = 16 };
	struct shardd_error err;
	struct rpc_client *c;

	start_with(&options);
	c = connect_client();
	memset(job, 'x', 200000);
	cr_assert_eq(call_get(c, job, &err), -SHARDD_RESOURCE_EXHAUSTED, "%s", err.text);
	job[90000] = '\0';
	cr_assert_eq(call_get(c, job, &err), 0, "%s", err.text);
	finish(c);
}

/* Connected to the host, without any library. */
static int connect_socket(void)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", host.path);
	cr_assert_eq(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	return fd;
}

/* A channel that compresses what it sends, as libshardd's does not. */
static grpc_channel *compressing_channel(void)
{
	grpc_arg arg = { GRPC_ARG_INTEGER,
			 (char *)GRPC_COMPRESSION_CHANNEL_DEFAULT_ALGORITHM,
			 { .integer = GRPC_COMPRESS_GZIP } };
	grpc_channel_args args = { 1, &arg };
	grpc_channel_credentials *creds = grpc_insecure_credentials_create();
	int fd = connect_socket();
	grpc_channel *channel;

	cr_assert_eq(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	channel = grpc_channel_create_from_fd("x", fd, creds, &args);
	grpc_channel_credentials_release(creds);
	return channel;
}

/* Return: the status of a call with a message of zeros. */
static grpc_status_code call_zeros(grpc_channel *channel, grpc_completion_queue *cq)
{
	gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);
	grpc_slice zeros = grpc_slice_malloc(100000), text;
	grpc_slice method = grpc_slice_from_static_string(GET);
	grpc_call *call = grpc_channel_create_call(channel, NULL, 0, cq, method, NULL, never, NULL);
	grpc_op ops[6] = {
		{ .op = GRPC_OP_SEND_INITIAL_METADATA },  { .op = GRPC_OP_SEND_MESSAGE },
		{ .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT }, { .op = GRPC_OP_RECV_INITIAL_METADATA },
		{ .op = GRPC_OP_RECV_MESSAGE },           { .op = GRPC_OP_RECV_STATUS_ON_CLIENT }
	};
	grpc_status_code status = GRPC_STATUS_OK;
	grpc_metadata_array initial, trailing;
	grpc_byte_buffer *answer = NULL;

	memset(GRPC_SLICE_START_PTR(zeros), 0, 100000);
	grpc_metadata_array_init(&initial);
	grpc_metadata_array_init(&trailing);
	ops[1].data.send_message.send_message = grpc_raw_byte_buffer_create(&zeros, 1);
	ops[3].data.recv_initial_metadata.recv_initial_metadata = &initial;
	ops[4].data.recv_message.recv_message = &answer;
	ops[5].data.recv_status_on_client.trailing_metadata = &trailing;
	ops[5].data.recv_status_on_client.status = &status;
	ops[5].data.recv_status_on_client.status_details = &text;
	cr_assert_eq(grpc_call_start_batch(call, ops, 6, NULL, NULL), GRPC_CALL_OK);
	cr_assert_eq(grpc_completion_queue_next(cq, never, NULL).type, GRPC_OP_COMPLETE);
	grpc_byte_buffer_destroy(ops[1].data.send_message.send_message);
	grpc_byte_buffer_destroy(answer);
	grpc_metadata_array_destroy(&initial);
	grpc_metadata_array_destroy(&trailing);
	grpc_slice_unref(zeros);
	grpc_slice_unref(text);
	grpc_call_unref(call);
	return status;
}

/* It could be small here and fill the memory there. */
Test(rpc, compressed_message_is_not_unpacked)
{
	grpc_completion_queue *cq;
	grpc_channel *channel;

	start_with(NULL);
	grpc_init();
	cq = grpc_completion_queue_create_for_next(NULL);
	channel = compressing_channel();
	cr_assert_eq(call_zeros(channel, cq), GRPC_STATUS_UNIMPLEMENTED);
	grpc_channel_destroy(channel);
	grpc_completion_queue_shutdown(cq);
	cr_assert_eq(grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type,
		     GRPC_QUEUE_SHUTDOWN);
	grpc_completion_queue_destroy(cq);
	grpc_shutdown();
	finish(NULL);
}

Test(rpc, deadline_cancels_the_call)
{
	struct shardd_error err;
	struct rpc_pending *p;
	struct rpc_client *c;
	uint64_t before;

	start_with(NULL);
	c = connect_client();
	before = clock_now_us();
	p = start_get(c, "hold", 200);
	cr_assert_eq(finish_get(p, "", &err), -SHARDD_DEADLINE_EXCEEDED);
	cr_assert(strstr(err.text, "200 ms"), "%s", err.text);
	rpchost_await(&n_cancelled, 1);
	cr_assert_gt(seen_deadline_us, before);
	cr_assert_lt(seen_deadline_us, before + 400000);
	cr_assert_eq(call_get(c, "after", &err), 0);
	finish(c);
}

Test(rpc, call_without_a_deadline_has_none)
{
	struct rpc_pending *p;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	seen_deadline_us = 1;
	p = start_get(c, "hold", 0);
	rpchost_await(&n_held, 1);
	cr_assert_eq(seen_deadline_us, 0);
	rpc_pending_free(p);
	finish(c);
}

Test(rpc, freeing_an_open_call_cancels_it)
{
	struct rpc_pending *p;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	p = start_get(c, "hold", 0);
	cr_assert_not(rpc_pending_wait(p, 0));
	rpchost_await(&n_held, 1);
	rpc_pending_free(p);
	rpchost_await(&n_cancelled, 1);
	finish(c);
}

Test(rpc, call_started_before_close_of_the_client_can_still_be_freed)
{
	struct shardd_error err;
	ProtobufCMessage *msg;
	struct rpc_pending *p;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	p = start_get(c, "hold", 0);
	rpc_client_close(c);
	cr_assert(rpc_pending_wait(p, 0));
	cr_assert_lt(rpc_pending_result(p, &msg, &err), 0);
	rpc_pending_free(p);
	finish(NULL);
}

Test(rpc, cut_connection_ends_its_calls_on_both_sides)
{
	struct rpc_pending *p[3];
	struct shardd_error err;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	cr_assert_eq(call_get(c, "first", &err), 0);
	for (int i = 0; i < 3; i++)
		p[i] = start_get(c, "hold", 0);
	rpchost_await(&n_held, 3);
	rpchost_cut(&host);
	for (int i = 0; i < 3; i++) {
		cr_assert_eq(finish_get(p[i], "", &err), -SHARDD_UNAVAILABLE, "%s", err.text);
		cr_assert(strstr(err.text, host.path), "%s", err.text);
	}
	rpchost_await(&n_cancelled, 3);
	rpchost_await(&host.n_conns, 0);
	cr_assert_eq(rpc_server_calls(host.server), 0);
	/* No reconnecting behind the user's back. */
	cr_assert_eq(call_get(c, "again", &err), -SHARDD_UNAVAILABLE);
	finish(c);
}

Test(rpc, client_that_vanishes_ends_its_calls)
{
	struct rpc_pending *p[3];
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	for (int i = 0; i < 3; i++)
		p[i] = start_get(c, "hold", 0);
	rpchost_await(&n_held, 3);
	rpc_client_close(c);
	rpchost_await(&n_cancelled, 3);
	rpchost_await(&host.n_conns, 0);
	for (int i = 0; i < 3; i++)
		rpc_pending_free(p[i]);
	finish(NULL);
}

Test(rpc, stream_comes_whole_and_in_order)
{
	ProtobufCMessage *msg;
	struct shardd_error err;
	struct rpc_pending *p;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	p = start_ops(c, 200);
	for (uint64_t i = 1; i <= 200; i++) {
		cr_assert_eq(rpc_pending_next(p, 10000, &msg, &err), 1, "%s", err.text);
		cr_assert_eq(((Shardd__V1__OpsResponse *)msg)->now_us, i);
		protobuf_c_message_free_unpacked(msg, NULL);
	}
	cr_assert_eq(rpc_pending_next(p, 10000, &msg, &err), 0);
	cr_assert_eq(rpc_pending_next(p, 10000, &msg, &err), 0);
	rpc_pending_free(p);
	finish(c);
}

Test(rpc, stream_without_news_says_so)
{
	ProtobufCMessage *msg;
	struct shardd_error err;
	struct rpc_pending *p;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	p = start_ops(c, 0);
	rpchost_await(&n_held, 1);
	cr_assert_eq(rpc_pending_next(p, 5, &msg, &err), -SHARDD_DEADLINE_EXCEEDED);
	cr_assert_eq(err.native, EAGAIN);
	cr_assert_not(rpc_pending_wait(p, 0));
	rpc_pending_free(p);
	rpchost_await(&n_cancelled, 1);
	finish(c);
}

struct flood {
	unsigned sent;
	bool full;
};

/* 16 KiB messages until the call takes no more, then the end with a fault. */
static void flood(void *arg)
{
	static char text[16384];
	Shardd__V1__OpRecord record = SHARDD__V1__OP_RECORD__INIT;
	Shardd__V1__OpRecord *records[] = { &record };
	Shardd__V1__OpsResponse msg = SHARDD__V1__OPS_RESPONSE__INIT;
	struct flood *f = arg;
	int r = 0;

	memset(text, 'x', sizeof(text) - 1);
	record.op = text;
	msg.ops = records;
	msg.n_ops = 1;
	for (int i = 0; i < 50; i++) { /* a few at a time: what is sent makes room */
		msg.now_us = f->sent + 1;
		r = rpc_call_send(stream, &msg.base);
		if (r)
			break;
		f->sent++;
	}
	f->full = r == -ENOBUFS;
	if (f->full)
		rpc_call_fail(stream, &(struct fault){ .code = FAULT_EXHAUSTED, .text = "slow" });
}

Test(rpc, reader_that_is_too_slow_gets_all_that_was_taken_and_the_reason)
{
	struct flood f = { 0 };
	ProtobufCMessage *msg;
	struct shardd_error err;
	struct rpc_pending *p;
	struct rpc_client *c;
	unsigned got = 0;
	int r;

	start_with(NULL);
	c = connect_client();
	p = start_ops(c, 0);
	rpchost_await(&n_held, 1);
	while (!f.full)
		rpchost_run(&host, flood, &f);
	cr_assert_geq(f.sent, 256);
	while ((r = rpc_pending_next(p, 10000, &msg, &err)) == 1) {
		cr_assert_eq(((Shardd__V1__OpsResponse *)msg)->now_us, ++got);
		protobuf_c_message_free_unpacked(msg, NULL);
	}
	cr_assert_eq(r, -SHARDD_RESOURCE_EXHAUSTED);
	cr_assert_str_eq(err.text, "slow");
	cr_assert_eq(got, f.sent);
	rpc_pending_free(p);
	finish(c);
}

Test(rpc, thousand_calls_at_once)
{
	static struct rpc_pending *p[1000];
	struct rpc_client *c;
	char job[16];

	start_with(NULL);
	c = connect_client();
	for (int i = 0; i < 1000; i++) {
		snprintf(job, sizeof(job), "%d", i);
		p[i] = start_get(c, job, 0);
	}
	for (int i = 0; i < 1000; i++) {
		snprintf(job, sizeof(job), "%d", i);
		cr_assert_eq(finish_get(p[i], job, NULL), 0);
	}
	cr_assert_eq(atomic_load(&n_served), 1000);
	finish(c);
}

static void release_held(void *arg)
{
	(void)arg;
	for (size_t i = 0; i < ARRAY_SIZE(held); i++)
		if (held[i]) {
			reply(held[i], "hold");
			held[i] = NULL;
		}
}

Test(rpc, calls_over_the_limit_of_a_connection_are_refused)
{
	struct rpc_options options = { .max_message_bytes = 1 << 20, .max_calls_per_conn = 4 };
	struct rpc_pending *p[4];
	struct shardd_error err;
	struct rpc_client *c, *other;

	start_with(&options);
	c = connect_client();
	other = connect_client();
	for (int i = 0; i < 4; i++)
		p[i] = start_get(c, "hold", 0);
	rpchost_await(&n_held, 4);
	cr_assert_eq(call_get(c, "fifth", &err), -SHARDD_RESOURCE_EXHAUSTED);
	cr_assert_eq(call_get(other, "other", &err), 0);
	rpchost_run(&host, release_held, NULL);
	for (int i = 0; i < 4; i++)
		cr_assert_eq(finish_get(p[i], "hold", &err), 0);
	cr_assert_eq(call_get(c, "room", &err), 0);
	rpc_client_close(c);
	rpc_client_close(other);
	finish(NULL);
}

struct caller {
	struct rpc_client *c;
	pthread_t thread;
};

static void *use(void *arg)
{
	struct caller *u = arg;

	for (int i = 0; i < 200; i++)
		cr_assert_eq(call_get(u->c, i % 2 ? "odd" : "even", NULL), 0);
	return NULL;
}

Test(rpc, threads_share_a_client)
{
	struct caller users[4];
	struct rpc_pending *p;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	p = start_get(c, "hold", 0);
	rpchost_await(&n_held, 1);
	for (int i = 0; i < 4; i++) {
		users[i].c = c;
		pthread_create(&users[i].thread, NULL, use, &users[i]);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(users[i].thread, NULL);
	cr_assert_eq(atomic_load(&n_served), 800);
	rpc_pending_free(p);
	finish(c);
}

Test(rpc, connections_come_and_go_without_leaving_descriptors)
{
	unsigned before;

	start_with(NULL);
	before = 0;
	for (int i = 0; i < 300; i++) {
		struct rpc_client *c = connect_client();

		cr_assert_eq(call_get(c, "x", NULL), 0);
		rpc_client_close(c);
		rpchost_await(&host.n_conns, 0);
		if (i == 20)
			before = fdcheck_count();
	}
	/* Core closes its descriptor on its own thread: a few may be on the way. */
	cr_assert_leq(fdcheck_count(), before + 3);
	finish(NULL);
}

Test(rpc, close_cancels_and_waits_for_calls_that_end_late)
{
	struct rpc_pending *p[3];
	struct shardd_error err;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	p[0] = start_get(c, "hold", 0);
	p[1] = start_get(c, "late", 0);
	p[2] = start_ops(c, 0);
	rpchost_await(&n_held, 3);
	rpchost_stop(&host);
	cr_assert_eq(atomic_load(&n_cancelled), 3);
	cr_assert_lt(finish_get(p[0], "", &err), 0);
	cr_assert_lt(finish_get(p[1], "", &err), 0);
	rpc_pending_free(p[2]);
	rpc_client_close(c);
	rpchost_descriptors(n_descriptors);
}

static void watch_late_call(void *arg)
{
	(void)arg;
	rpc_call_on_cancelled(late_call, on_late_cancelled, NULL);
	cr_assert_eq(atomic_load(&n_cancelled), 0); /* from the loop, not from within */
}

Test(rpc, who_asks_late_for_a_cancellation_is_told)
{
	struct rpc_pending *p;
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	p = start_get(c, "unwatched", 0);
	rpchost_await(&n_held, 1);
	rpc_client_close(c);
	rpc_pending_free(p);
	rpchost_await(&host.n_conns, 0);
	rpchost_run(&host, watch_late_call, NULL);
	rpchost_await(&n_cancelled, 1);
	finish(NULL);
}

Test(rpc, close_at_once)
{
	start_with(NULL);
	finish(NULL);
}

Test(rpc, heartbeat_follows_the_clock)
{
	uint64_t now = clock_now_us();

	start_with(NULL);
	cr_assert_geq(rpc_server_heartbeat_us(host.server), now);
	cr_assert_leq(rpc_server_heartbeat_us(host.server), clock_now_us());
	finish(NULL);
}

/* Read until the end of the stream. Return: true: the daemon closed it. */
static bool is_closed(int fd)
{
	char buf[4096];
	ssize_t n;

	while ((n = read(fd, buf, sizeof(buf))) > 0)
		;
	return n == 0 || errno == ECONNRESET;
}

Test(rpc, garbage_after_the_preface_ends_that_connection_only)
{
	static const char *const garbage[] = {
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nthis is no frame, and nobody thinks it is one",
		"PRI hello",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x04\xff\xff\xff\xff\xff",
	};
	struct rpc_client *c;

	start_with(NULL);
	c = connect_client();
	for (size_t i = 0; i < ARRAY_SIZE(garbage); i++) {
		int fd = connect_socket();

		cr_assert_gt(write(fd, garbage[i], strlen(garbage[i])), 0);
		cr_assert(is_closed(fd));
		close(fd);
	}
	cr_assert_eq(call_get(c, "fine", NULL), 0);
	rpchost_await(&host.n_conns, 1);
	finish(c);
}

Test(rpc, client_names_the_path_where_nobody_listens)
{
	struct shardd_error err;
	struct rpc_client *c;

	cr_assert_eq(rpc_client_connect("/tmp/there/is/no/socket", 30, &c, &err),
		     -SHARDD_UNAVAILABLE);
	cr_assert(strstr(err.text, "/tmp/there/is/no/socket"), "%s", err.text);
	cr_assert_eq(err.native, ENOENT);
}

Test(rpc, client_refuses_a_path_that_is_too_long)
{
	char path[200];
	struct shardd_error err;
	struct rpc_client *c;

	memset(path, 'p', sizeof(path) - 1);
	path[sizeof(path) - 1] = '\0';
	cr_assert_eq(rpc_client_connect(path, 0, &c, &err), -SHARDD_INVALID_ARGUMENT);
}

Test(rpc, client_that_is_not_admitted_is_told_so)
{
	struct shardd_error err;
	struct rpc_client *c;

	start_with(NULL);
	atomic_store(&host.refusing, true);
	c = connect_client();
	cr_assert_eq(call_get(c, "x", &err), -SHARDD_UNAVAILABLE);
	cr_assert(strstr(err.text, "does not admit uid"), "%s", err.text);
	cr_assert(strstr(err.text, "max_connections_per_user"), "%s", err.text);
	finish(c);
}
