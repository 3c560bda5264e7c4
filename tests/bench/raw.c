/*
 * Bare gRPC core: a client that calls as libshardd does, and a server that does what
 * has to be done for a unary call and nothing else.
 */
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

struct raw_client {
	grpc_channel *channel;
	grpc_completion_queue *cq;
};

__attribute__((noreturn)) static void give_up(const char *what, const char *why)
{
	fprintf(stderr, "shardd-bench: %s: %s\n", what, why);
	_exit(1);
}

static int connect_to(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	if (fd < 0 || connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		give_up("cannot connect to", path);
	return fd;
}

struct raw_client *raw_client_new(const char *socket)
{
	grpc_arg args[] = {
		{ GRPC_ARG_INTEGER, (char *)GRPC_ARG_HTTP2_BDP_PROBE, { .integer = 0 } },
		{ GRPC_ARG_INTEGER, (char *)GRPC_ARG_KEEPALIVE_TIME_MS, { .integer = INT_MAX } },
	};
	grpc_channel_args list = { sizeof(args) / sizeof(args[0]), args };
	grpc_channel_credentials *creds;
	struct raw_client *c = calloc(1, sizeof(*c));
	int fd = connect_to(socket);

	if (!c)
		give_up("gRPC client", "no memory");
	grpc_init();
	creds = grpc_insecure_credentials_create();
	c->cq = grpc_completion_queue_create_for_next(NULL);
	c->channel = grpc_channel_create_from_fd("bench", fd, creds, &list);
	grpc_channel_credentials_release(creds);
	return c;
}

static void drain(grpc_completion_queue *cq)
{
	grpc_completion_queue_shutdown(cq);
	while (grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
	       GRPC_QUEUE_SHUTDOWN)
		;
	grpc_completion_queue_destroy(cq);
}

void raw_client_free(struct raw_client *c)
{
	grpc_channel_destroy(c->channel);
	drain(c->cq);
	grpc_shutdown();
	free(c);
}

static void take_reply(grpc_byte_buffer *incoming, uint8_t **ret, size_t *ret_bytes)
{
	grpc_byte_buffer_reader reader;
	grpc_slice slice;

	if (!grpc_byte_buffer_reader_init(&reader, incoming))
		give_up("gRPC client", "a reply cannot be read");
	slice = grpc_byte_buffer_reader_readall(&reader);
	grpc_byte_buffer_reader_destroy(&reader);
	*ret_bytes = GRPC_SLICE_LENGTH(slice);
	*ret = malloc(*ret_bytes + 1);
	if (!*ret)
		give_up("gRPC client", "no memory");
	memcpy(*ret, GRPC_SLICE_START_PTR(slice), *ret_bytes);
	grpc_slice_unref(slice);
}

/* All of a unary call is one batch. */
static void run_batch(struct raw_client *c, grpc_call *call, grpc_byte_buffer *request,
		      grpc_byte_buffer **reply, const char *method)
{
	grpc_metadata_array initial, trailing;
	grpc_status_code status = GRPC_STATUS_UNKNOWN;
	grpc_slice text = grpc_empty_slice();
	grpc_op ops[6] = {
		{ .op = GRPC_OP_SEND_INITIAL_METADATA },
		{ .op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = request },
		{ .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT },
		{ .op = GRPC_OP_RECV_INITIAL_METADATA,
		  .data.recv_initial_metadata.recv_initial_metadata = &initial },
		{ .op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = reply },
		{ .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
		  .data.recv_status_on_client = { .trailing_metadata = &trailing,
						  .status = &status,
						  .status_details = &text } },
	};

	grpc_metadata_array_init(&initial);
	grpc_metadata_array_init(&trailing);
	if (grpc_call_start_batch(call, ops, 6, c, NULL) != GRPC_CALL_OK)
		give_up(method, "the call could not be started");
	grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
	if (status != GRPC_STATUS_OK)
		give_up(method, "the call failed");
	grpc_metadata_array_destroy(&initial);
	grpc_metadata_array_destroy(&trailing);
	grpc_slice_unref(text);
}

void raw_call(struct raw_client *c, const char *method, const void *request, size_t bytes,
	      uint8_t **ret, size_t *ret_bytes)
{
	grpc_slice name = grpc_slice_from_copied_string(method);
	grpc_slice slice = grpc_slice_from_copied_buffer(request, bytes);
	grpc_byte_buffer *out = grpc_raw_byte_buffer_create(&slice, 1), *in = NULL;
	grpc_call *call =
		grpc_channel_create_call(c->channel, NULL, GRPC_PROPAGATE_DEFAULTS, c->cq, name,
					 NULL, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);

	run_batch(c, call, out, &in, method);
	if (!in)
		give_up(method, "there is no reply");
	if (ret)
		take_reply(in, ret, ret_bytes);
	grpc_byte_buffer_destroy(in);
	grpc_byte_buffer_destroy(out);
	grpc_call_unref(call);
	grpc_slice_unref(slice);
	grpc_slice_unref(name);
}

/* ------------------------------------------------------------------ server */

/* A method, and the call of it that is awaited or answered. */
struct echo {
	void *method;
	grpc_call *call;
	gpr_timespec deadline;
	grpc_metadata_array metadata;
	grpc_byte_buffer *payload;
};

static void await_call(grpc_server *server, grpc_completion_queue *cq, struct echo *e)
{
	grpc_metadata_array_init(&e->metadata);
	if (grpc_server_request_registered_call(server, e->method, &e->call, &e->deadline,
						&e->metadata, &e->payload, cq, cq,
						e) != GRPC_CALL_OK)
		give_up("echo", "a call cannot be awaited");
}

static struct echo *next_event(grpc_completion_queue *cq)
{
	return grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).tag;
}

static void answer(grpc_completion_queue *cq, struct echo *e)
{
	int cancelled;
	grpc_op ops[4] = {
		{ .op = GRPC_OP_SEND_INITIAL_METADATA },
		{ .op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = e->payload },
		{ .op = GRPC_OP_SEND_STATUS_FROM_SERVER,
		  .data.send_status_from_server = { .status = GRPC_STATUS_OK } },
		{ .op = GRPC_OP_RECV_CLOSE_ON_SERVER,
		  .data.recv_close_on_server.cancelled = &cancelled },
	};

	/* There is one client and it asks for one thing at a time: the next event is
	 * the end of this batch. */
	if (grpc_call_start_batch(e->call, ops, 4, e, NULL) != GRPC_CALL_OK || next_event(cq) != e)
		give_up("echo", "a call could not be answered");
	grpc_byte_buffer_destroy(e->payload);
	grpc_metadata_array_destroy(&e->metadata);
	grpc_call_unref(e->call);
}

static void *add_method(grpc_server *server, const char *name)
{
	return grpc_server_register_method(server, name, NULL,
					   GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
}

static grpc_server *listen_at(const char *socket, grpc_completion_queue *cq)
{
	grpc_arg arg = { GRPC_ARG_STRING,
			 (char *)GRPC_ARG_OPTIMIZATION_TARGET,
			 { .string = (char *)"latency" } };
	grpc_channel_args list = { 1, &arg };
	grpc_server_credentials *creds = grpc_insecure_server_credentials_create();
	grpc_server *server = grpc_server_create(&list, NULL);
	char address[128];

	grpc_server_register_completion_queue(server, cq, NULL);
	snprintf(address, sizeof(address), "unix:%s", socket);
	if (!grpc_server_add_http2_port(server, address, creds))
		give_up("echo: cannot listen at", socket);
	grpc_server_credentials_release(creds);
	return server;
}

void raw_await_listener(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	const struct timespec pause = { .tv_nsec = 1000000 };
	int fd;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	for (;;) {
		fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (fd >= 0 && connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0)
			break;
		close(fd);
		nanosleep(&pause, NULL);
	}
	close(fd);
}

void raw_echo_serve(const char *socket)
{
	struct echo echo = { 0 }, end = { 0 }, *e;
	grpc_completion_queue *cq;
	grpc_server *server;

	grpc_init();
	cq = grpc_completion_queue_create_for_next(NULL);
	server = listen_at(socket, cq);
	echo.method = add_method(server, RAW_ECHO);
	end.method = add_method(server, RAW_END);
	grpc_server_start(server);
	await_call(server, cq, &echo);
	await_call(server, cq, &end);
	while ((e = next_event(cq)) != &end) {
		answer(cq, e);
		await_call(server, cq, e);
	}
	answer(cq, e);
	_exit(0);
}
