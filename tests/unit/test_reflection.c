/*
 * Server reflection over a real socket, and with it streams on which both sides send: the client
 * is core's, because libshardd has no such calls.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"
#include "descriptor_set.h"
#include "fdcheck.h"
#include "reflection.pb-c.h"
#include "rpc/svc_reflection.h"
#include "rpchost.h"
#include "shardd.pb-c.h"
#include "status.pb-c.h"

#define V1    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
#define ALPHA "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

#define REQUEST(kind)  GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##kind
#define RESPONSE(kind) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##kind

typedef Grpc__Reflection__V1__ServerReflectionRequest request;
typedef Grpc__Reflection__V1__ServerReflectionResponse response;

static struct rpchost host;
static struct svc_reflection svc;
/* Two that are known by name only, and the two of reflection. */
static struct rpc_service services[4];
static unsigned n_descriptors;
static grpc_channel *channel;
static grpc_completion_queue *cq;

/* A stream, from the client's side. */
struct talk {
	grpc_call *call;
	grpc_metadata_array initial, trailing;
	grpc_status_code status;
	grpc_slice text;
	bool headers; /* have come */
};

/* Of the tags; a talk has one batch of each at most. */
enum { SENT = 1, RECEIVED, ENDED };

static grpc_channel *test_reflection_connect(void)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	grpc_channel_credentials *creds = grpc_insecure_credentials_create();
	grpc_channel *c;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", host.path);
	cr_assert_eq(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	cr_assert_eq(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	c = grpc_channel_create_from_fd("x", fd, creds, NULL);
	grpc_channel_credentials_release(creds);
	return c;
}

static void test_reflection_begin(void)
{
	static const struct rpc_options options = { .max_message_bytes = 1 << 20,
						    .max_calls_per_conn = 100 };

	n_descriptors = rpchost_begin();
	cr_assert_eq(svc_reflection_init(&svc, services, ARRAY_SIZE(services)), 0);
	services[0].desc = &shardd__v1__status_service__descriptor;
	services[1].desc = &shardd__v1__job_service__descriptor;
	memcpy(&services[2], svc.own, sizeof(svc.own));
	rpchost_start(&host, &options, &services[2], SVC_REFLECTION_SERVICES);
	grpc_init();
	cq = grpc_completion_queue_create_for_next(NULL);
	channel = test_reflection_connect();
}

static void finish_client(void)
{
	gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);

	grpc_channel_destroy(channel);
	grpc_completion_queue_shutdown(cq);
	cr_assert_eq(grpc_completion_queue_next(cq, never, NULL).type, GRPC_QUEUE_SHUTDOWN);
	grpc_completion_queue_destroy(cq);
	grpc_shutdown();
}

static void finish_host(void)
{
	rpchost_stop(&host);
	svc_reflection_deinit(&svc);
	svc_reflection_deinit(&svc);
}

static void finish(void)
{
	finish_client();
	finish_host();
	rpchost_descriptors(n_descriptors);
}

TestSuite(reflection, .init = test_reflection_begin, .timeout = 60);

/* ------------------------------------------------------------ client's side */

/* Wait for the end of batch @tag of the one talk that has any. */
static void await(intptr_t tag)
{
	gpr_timespec until =
		gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(20, GPR_TIMESPAN));
	grpc_event e = grpc_completion_queue_next(cq, until, NULL);

	cr_assert_eq(e.type, GRPC_OP_COMPLETE);
	cr_assert_eq((intptr_t)e.tag, tag);
}

/* @ms: its deadline; 0: none. */
static struct talk talk_begin(const char *method, int ms)
{
	gpr_timespec until = ms ? gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
					       gpr_time_from_millis(ms, GPR_TIMESPAN))
				: gpr_inf_future(GPR_CLOCK_MONOTONIC);
	grpc_op op = { .op = GRPC_OP_SEND_INITIAL_METADATA };
	struct talk t = { .status = GRPC_STATUS_OK };

	grpc_metadata_array_init(&t.initial);
	grpc_metadata_array_init(&t.trailing);
	t.call = grpc_channel_create_call(channel, NULL, 0, cq,
					  grpc_slice_from_static_string(method), NULL, until, NULL);
	cr_assert_eq(grpc_call_start_batch(t.call, &op, 1, (void *)SENT, NULL), GRPC_CALL_OK);
	await(SENT);
	return t;
}

static void talk_send_bytes(struct talk *t, const void *bytes, size_t n)
{
	grpc_slice slice = grpc_slice_from_copied_buffer(bytes, n);
	grpc_op op = { .op = GRPC_OP_SEND_MESSAGE };

	op.data.send_message.send_message = grpc_raw_byte_buffer_create(&slice, 1);
	cr_assert_eq(grpc_call_start_batch(t->call, &op, 1, (void *)SENT, NULL), GRPC_CALL_OK);
	await(SENT);
	grpc_byte_buffer_destroy(op.data.send_message.send_message);
	grpc_slice_unref(slice);
}

static void talk_send(struct talk *t, const request *req)
{
	uint8_t bytes[8192];
	size_t n = grpc__reflection__v1__server_reflection_request__get_packed_size(req);

	cr_assert_leq(n, sizeof(bytes));
	grpc__reflection__v1__server_reflection_request__pack(req, bytes);
	talk_send_bytes(t, bytes, n);
}

/* No more from the client. */
static void talk_close(struct talk *t)
{
	grpc_op op = { .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT };

	cr_assert_eq(grpc_call_start_batch(t->call, &op, 1, (void *)SENT, NULL), GRPC_CALL_OK);
	await(SENT);
}

/* Return: the next response, the caller's; NULL: there is none. */
static response *talk_next(struct talk *t)
{
	grpc_op ops[2] = { { .op = GRPC_OP_RECV_MESSAGE },
			   { .op = GRPC_OP_RECV_INITIAL_METADATA } };
	grpc_byte_buffer *answer = NULL;
	grpc_byte_buffer_reader reader;
	response *r = NULL;
	grpc_slice all;

	ops[0].data.recv_message.recv_message = &answer;
	ops[1].data.recv_initial_metadata.recv_initial_metadata = &t->initial;
	cr_assert_eq(grpc_call_start_batch(t->call, ops, t->headers ? 1 : 2, (void *)RECEIVED,
					   NULL),
		     GRPC_CALL_OK);
	t->headers = true;
	await(RECEIVED);
	if (!answer)
		return NULL;
	cr_assert(grpc_byte_buffer_reader_init(&reader, answer));
	all = grpc_byte_buffer_reader_readall(&reader);
	r = grpc__reflection__v1__server_reflection_response__unpack(NULL, GRPC_SLICE_LENGTH(all),
								     GRPC_SLICE_START_PTR(all));
	cr_assert(r);
	grpc_slice_unref(all);
	grpc_byte_buffer_reader_destroy(&reader);
	grpc_byte_buffer_destroy(answer);
	return r;
}

/* The status of @t; its text begins with @text. Ends @t. */
static void talk_end(struct talk *t, grpc_status_code status, const char *text)
{
	/* core keeps the status until the headers have been read */
	grpc_op ops[2] = { { .op = GRPC_OP_RECV_STATUS_ON_CLIENT },
			   { .op = GRPC_OP_RECV_INITIAL_METADATA } };
	char *said;

	ops[0].data.recv_status_on_client.trailing_metadata = &t->trailing;
	ops[0].data.recv_status_on_client.status = &t->status;
	ops[0].data.recv_status_on_client.status_details = &t->text;
	ops[1].data.recv_initial_metadata.recv_initial_metadata = &t->initial;
	cr_assert_eq(grpc_call_start_batch(t->call, ops, t->headers ? 1 : 2, (void *)ENDED, NULL),
		     GRPC_CALL_OK);
	await(ENDED);
	said = grpc_slice_to_c_string(t->text);
	cr_assert_eq(t->status, status, "%d: %s", t->status, said);
	cr_assert(strncmp(said, text, strlen(text)) == 0, "%s", said);
	gpr_free(said);
	grpc_slice_unref(t->text);
	grpc_metadata_array_destroy(&t->initial);
	grpc_metadata_array_destroy(&t->trailing);
	grpc_call_unref(t->call);
}

static void drop(response *r)
{
	grpc__reflection__v1__server_reflection_response__free_unpacked(r, NULL);
}

static request named(int kind, const char *name)
{
	request req = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;

	req.host = "here";
	req.message_request_case = kind;
	req.file_by_filename = (char *)name; /* the strings of the oneof are one */
	return req;
}

/* Ask and be answered with @kind; what was asked is in it. Return: the caller's. */
static response *ask(struct talk *t, const request *req, int kind)
{
	response *r;

	talk_send(t, req);
	r = talk_next(t);
	cr_assert(r);
	cr_assert_eq((int)r->message_response_case, kind);
	cr_assert_str_eq(r->valid_host, req->host);
	cr_assert(r->original_request);
	cr_assert_eq(r->original_request->message_request_case, req->message_request_case);
	return r;
}

static void refused(struct talk *t, const request *req, int code, const char *text)
{
	response *r = ask(t, req, RESPONSE(ERROR_RESPONSE));

	cr_assert_eq(r->error_response->error_code, code);
	cr_assert_str_eq(r->error_response->error_message, text);
	drop(r);
}

/* Does the answer have the one file @name? What the daemon sends is a field of the set of the build. */
static void has_file(struct talk *t, const request *req, const char *name)
{
	response *r = ask(t, req, RESPONSE(FILE_DESCRIPTOR_RESPONSE));
	ProtobufCBinaryData *file = r->file_descriptor_response->file_descriptor_proto;

	cr_assert_eq(r->file_descriptor_response->n_file_descriptor_proto, 1);
	/* field 1, its name */
	cr_assert_eq(file->data[0], 0x0a);
	cr_assert_eq(file->data[1], strlen(name));
	cr_assert_eq(memcmp(file->data + 2, name, strlen(name)), 0, "%s", name);
	cr_assert(memmem(descriptor_set, descriptor_set_bytes, file->data, file->len));
	drop(r);
}

/* ---------------------------------------------------------------- answers */

Test(reflection, lists_the_services_of_the_server_under_both_names)
{
	static const char *const paths[] = { V1, ALPHA };
	request req = named(REQUEST(LIST_SERVICES), "*");

	for (size_t k = 0; k < ARRAY_SIZE(paths); k++) {
		struct talk t = talk_begin(paths[k], 0);
		response *r = ask(&t, &req, RESPONSE(LIST_SERVICES_RESPONSE));

		cr_assert_eq(r->list_services_response->n_service, ARRAY_SIZE(services));
		for (size_t i = 0; i < ARRAY_SIZE(services); i++)
			cr_assert_str_eq(r->list_services_response->service[i]->name,
					 services[i].desc->name);
		drop(r);
		talk_close(&t);
		cr_assert_null(talk_next(&t));
		talk_end(&t, GRPC_STATUS_OK, "");
	}
	finish();
}

Test(reflection, finds_each_kind_of_symbol)
{
	static const char *const symbols[][2] = {
		{ "shardd.v1.StatusService", "shardd/v1/status.proto" },
		{ "shardd.v1.StatusService.GetStatus", "shardd/v1/status.proto" },
		{ "shardd.v1.AttachRequest", "shardd/v1/shardd.proto" },
		{ "shardd.v1.AttachRequest.protocol", "shardd/v1/shardd.proto" },
		{ "shardd.v1.WatchResponse.Kind", "shardd/v1/shardd.proto" },
		{ "shardd.v1.WatchResponse.KIND_STALL", "shardd/v1/shardd.proto" },
		{ "shardd.v1.AdminService.Cordon", "shardd/v1/admin.proto" },
		{ "grpc.health.v1.HealthCheckResponse.ServingStatus",
		  "grpc/health/v1/health.proto" },
		{ "grpc.reflection.v1.ServerReflectionRequest.message_request",
		  "grpc/reflection/v1/reflection.proto" },
		{ "grpc.reflection.v1alpha.ErrorResponse",
		  "grpc/reflection/v1alpha/reflection.proto" },
	};
	struct talk t = talk_begin(V1, 0);

	for (size_t i = 0; i < ARRAY_SIZE(symbols); i++) {
		request by_symbol = named(REQUEST(FILE_CONTAINING_SYMBOL), symbols[i][0]);
		request by_name = named(REQUEST(FILE_BY_FILENAME), symbols[i][1]);

		has_file(&t, &by_symbol, symbols[i][1]);
		has_file(&t, &by_name, symbols[i][1]);
	}
	talk_close(&t);
	talk_end(&t, GRPC_STATUS_OK, "");
	finish();
}

Test(reflection, what_is_not_there_is_an_answer_and_the_stream_goes_on)
{
	static const char *const names[] = { "",
					     ".",
					     "shardd",
					     "shardd.v1",
					     "shardd.v1.Nope",
					     ".shardd.v1.StatusService",
					     "shardd.v1.statusservice",
					     "shardd/v1/status.proto" };
	Grpc__Reflection__V1__ExtensionRequest extension =
		GRPC__REFLECTION__V1__EXTENSION_REQUEST__INIT;
	request req = named(REQUEST(FILE_CONTAINING_EXTENSION), NULL);
	struct talk t = talk_begin(V1, 0);
	char text[128];

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		request symbol = named(REQUEST(FILE_CONTAINING_SYMBOL), names[i]);

		snprintf(text, sizeof(text), "there is no symbol %s", names[i]);
		refused(&t, &symbol, GRPC_STATUS_NOT_FOUND, text);
	}
	extension.containing_type = "shardd.v1.AttachRequest";
	extension.extension_number = 7;
	req.file_containing_extension = &extension;
	refused(&t, &req, GRPC_STATUS_NOT_FOUND,
		"there is no extension of shardd.v1.AttachRequest");
	req = named(REQUEST(FILE_BY_FILENAME), "shardd/v1/peer.proto"); /* of no service here */
	refused(&t, &req, GRPC_STATUS_NOT_FOUND, "there is no file shardd/v1/peer.proto");
	req = named(0, NULL);
	refused(&t, &req, GRPC_STATUS_INVALID_ARGUMENT, "message_request is not set");
	talk_close(&t);
	talk_end(&t, GRPC_STATUS_OK, "");
	finish();
}

Test(reflection, messages_have_no_extension_numbers)
{
	request req = named(REQUEST(ALL_EXTENSION_NUMBERS_OF_TYPE), "shardd.v1.AttachRequest");
	struct talk t = talk_begin(V1, 0);
	response *r = ask(&t, &req, RESPONSE(ALL_EXTENSION_NUMBERS_RESPONSE));

	cr_assert_str_eq(r->all_extension_numbers_response->base_type_name,
			 "shardd.v1.AttachRequest");
	cr_assert_eq(r->all_extension_numbers_response->n_extension_number, 0);
	drop(r);
	req = named(REQUEST(ALL_EXTENSION_NUMBERS_OF_TYPE), "shardd.v1.StatusService");
	refused(&t, &req, GRPC_STATUS_NOT_FOUND, "there is no message shardd.v1.StatusService");
	talk_close(&t);
	talk_end(&t, GRPC_STATUS_OK, "");
	finish();
}

/* An answer quotes the name: one that is no text must not make it unreadable. */
Test(reflection, a_name_that_is_no_text_is_quoted_as_text)
{
	request req = named(REQUEST(FILE_CONTAINING_SYMBOL), "a\xff\n");
	struct talk t = talk_begin(V1, 0);

	refused(&t, &req, GRPC_STATUS_NOT_FOUND, "there is no symbol a??");
	talk_close(&t);
	talk_end(&t, GRPC_STATUS_OK, "");
	finish();
}

/* ---------------------------------------------------------------- streams */

static void count_calls(void *arg)
{
	*(size_t *)arg = rpc_server_calls(host.server);
}

static void wait_for_calls(size_t wanted)
{
	struct timespec pause = { .tv_nsec = 1000000 };
	size_t n = wanted + 1;

	for (int i = 0; i < 10000 && n != wanted; i++) {
		rpchost_run(&host, count_calls, &n);
		nanosleep(&pause, NULL);
	}
	cr_assert_eq(n, wanted);
}

/* @n requests, all sent before the first answer is read; @answered of them get one. */
static void many(struct talk *t, unsigned n, unsigned answered)
{
	char name[32];

	for (unsigned i = 0; i < n; i++) {
		request req = named(REQUEST(FILE_CONTAINING_SYMBOL), name);

		snprintf(name, sizeof(name), "n%u", i);
		talk_send(t, &req);
	}
	talk_close(t);
	for (unsigned i = 0; i < answered; i++) {
		response *r = talk_next(t);

		snprintf(name, sizeof(name), "n%u", i);
		cr_assert(r);
		cr_assert_str_eq(r->original_request->file_containing_symbol, name);
		drop(r);
	}
	cr_assert_null(talk_next(t));
}

Test(reflection, answers_come_in_the_order_of_the_requests)
{
	struct talk t = talk_begin(V1, 0);

	many(&t, 64, 64);
	talk_end(&t, GRPC_STATUS_OK, "");
	wait_for_calls(0);
	finish();
}

Test(reflection, a_stream_has_64_requests_at_most)
{
	struct talk t = talk_begin(V1, 0);

	many(&t, 65, 64);
	talk_end(&t, GRPC_STATUS_RESOURCE_EXHAUSTED, V1 ": a call has at most 64 messages");
	wait_for_calls(0);
	finish();
}

Test(reflection, a_stream_without_a_request_is_refused)
{
	struct talk t = talk_begin(V1, 0);

	talk_close(&t);
	talk_end(&t, GRPC_STATUS_INVALID_ARGUMENT, V1 ": the request has no message");
	finish();
}

Test(reflection, bytes_that_are_no_request_end_the_stream)
{
	request req = named(REQUEST(LIST_SERVICES), "");
	struct talk t = talk_begin(V1, 0);

	drop(ask(&t, &req, RESPONSE(LIST_SERVICES_RESPONSE)));
	talk_send_bytes(&t, "\xff\xff\xff\xff", 4);
	talk_end(&t, GRPC_STATUS_INVALID_ARGUMENT,
		 V1 ": the request is not a valid grpc.reflection.v1.ServerReflectionRequest");
	wait_for_calls(0);
	finish();
}

/* It is part of the answer. */
Test(reflection, a_long_request_ends_the_stream)
{
	struct talk t = talk_begin(V1, 0);
	request req;
	char name[4097];

	memset(name, 'x', sizeof(name));
	name[4000] = '\0';
	req = named(REQUEST(FILE_CONTAINING_SYMBOL), name);
	drop(ask(&t, &req, RESPONSE(ERROR_RESPONSE)));
	name[4000] = 'x';
	name[4096] = '\0';
	talk_send(&t, &req);
	talk_end(&t, GRPC_STATUS_INVALID_ARGUMENT,
		 "the request is 4105 bytes long; it must be at most 4096");
	finish();
}

/* A connection whose calls hold 4 MiB may send no large message. What the former messages of
 * streams held, 5 MiB here, does not count. */
Test(reflection, a_stream_holds_its_last_message_only)
{
	static char large[200000];
	char name[4001];
	request req = named(REQUEST(FILE_CONTAINING_SYMBOL), name);
	struct talk t[20], last;

	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		t[i] = talk_begin(V1, 0);
		for (unsigned k = 0; k < 63; k++)
			drop(ask(&t[i], &req, RESPONSE(ERROR_RESPONSE)));
	}
	memcpy(large, "\x22\xb8\x9a\x0c", 4); /* field 4, of 199,992 bytes */
	memset(large + 4, 'x', sizeof(large) - 8);
	last = talk_begin(V1, 0);
	talk_send_bytes(&last, large, sizeof(large) - 4);
	talk_end(&last, GRPC_STATUS_INVALID_ARGUMENT, "the request is 199996 bytes long");
	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		talk_close(&t[i]);
		talk_end(&t[i], GRPC_STATUS_OK, "");
	}
	finish();
}

Test(reflection, a_message_over_the_limit_ends_the_stream)
{
	static char zeros[(1 << 20) + 1];
	request req = named(REQUEST(LIST_SERVICES), "");
	struct talk t = talk_begin(V1, 0);

	drop(ask(&t, &req, RESPONSE(LIST_SERVICES_RESPONSE)));
	talk_send_bytes(&t, zeros, sizeof(zeros));
	talk_end(&t, GRPC_STATUS_RESOURCE_EXHAUSTED, "");
	wait_for_calls(0);
	finish();
}

Test(reflection, a_deadline_ends_a_stream_that_waits)
{
	request req = named(REQUEST(LIST_SERVICES), "");
	struct talk t = talk_begin(V1, 200);

	drop(ask(&t, &req, RESPONSE(LIST_SERVICES_RESPONSE)));
	wait_for_calls(1);
	talk_end(&t, GRPC_STATUS_DEADLINE_EXCEEDED, "");
	wait_for_calls(0);
	finish();
}

Test(reflection, streams_that_are_cancelled_are_forgotten)
{
	request req = named(REQUEST(LIST_SERVICES), "");
	struct talk t[50];

	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		t[i] = talk_begin(i % 2 ? V1 : ALPHA, 0);
		drop(ask(&t[i], &req, RESPONSE(LIST_SERVICES_RESPONSE)));
	}
	wait_for_calls(50);
	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		cr_assert_eq(grpc_call_cancel(t[i].call, NULL), GRPC_CALL_OK);
		talk_end(&t[i], GRPC_STATUS_CANCELLED, "");
	}
	wait_for_calls(0);
	finish();
}

Test(reflection, streams_count_as_calls_of_their_connection)
{
	request req = named(REQUEST(LIST_SERVICES), "");
	struct talk t[101];

	for (size_t i = 0; i < 100; i++) {
		t[i] = talk_begin(V1, 0);
		drop(ask(&t[i], &req, RESPONSE(LIST_SERVICES_RESPONSE)));
	}
	t[100] = talk_begin(V1, 0);
	talk_send(&t[100], &req);
	talk_end(&t[100], GRPC_STATUS_RESOURCE_EXHAUSTED,
		 "100 calls of this connection are unanswered");
	for (size_t i = 0; i < 100; i++) {
		talk_close(&t[i]);
		talk_end(&t[i], GRPC_STATUS_OK, "");
	}
	wait_for_calls(0);
	finish();
}

/* The server's end, and a connection's, while a stream waits for its next request. */
Test(reflection, a_server_that_closes_ends_streams_that_wait)
{
	request req = named(REQUEST(LIST_SERVICES), "");
	struct talk t = talk_begin(V1, 0);

	drop(ask(&t, &req, RESPONSE(LIST_SERVICES_RESPONSE)));
	finish_host();
	talk_end(&t, GRPC_STATUS_UNAVAILABLE, "");
	finish_client();
	rpchost_descriptors(n_descriptors);
}

Test(reflection, a_connection_that_is_cut_ends_streams_that_wait)
{
	request req = named(REQUEST(LIST_SERVICES), "");
	struct talk t[10];

	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		t[i] = talk_begin(V1, 0);
		drop(ask(&t[i], &req, RESPONSE(LIST_SERVICES_RESPONSE)));
	}
	rpchost_cut(&host);
	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		talk_end(&t[i], GRPC_STATUS_UNAVAILABLE, "");
	}
	wait_for_calls(0);
	finish();
}
