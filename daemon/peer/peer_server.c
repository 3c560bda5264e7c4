/* The end that listens. */
#include <errno.h>
#include <grpc/support/alloc.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "peer/peer_impl.h"

#define PEER_SERVER_ARMED   4u  /* streams that are awaited at once */
#define PEER_SERVER_STREAMS 128 /* of one connection, at once */
/* For the handshakes of a connection, and for the answer to a ping of HTTP/2. */
#define PEER_SERVER_HANDSHAKE_MS 5000
/* For a connection without a stream, after which core ends it within the same time. */
#define PEER_SERVER_IDLE_MS 2000

static grpc_arg peer_server_arg(const char *key, int value)
{
	return (grpc_arg){ GRPC_ARG_INTEGER, (char *)key, { .integer = value } };
}

static grpc_server *peer_server_new(void)
{
	grpc_arg args[] = {
		peer_server_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)PEER_MESSAGE_BYTES),
		/* One of links, or of fetches as many as are served and some that are refused. */
		peer_server_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, PEER_SERVER_STREAMS),
		peer_server_arg(GRPC_ARG_MAX_METADATA_SIZE, 8192),
		/* Refuse messages that are small on the wire and large when decompressed. */
		peer_server_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
		/* Else two daemons could share a port. */
		peer_server_arg(GRPC_ARG_ALLOW_REUSEPORT, 0),
		peer_server_arg(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, PEER_SERVER_HANDSHAKE_MS),
		peer_server_arg(GRPC_ARG_MAX_CONNECTION_IDLE_MS, PEER_SERVER_IDLE_MS),
		/* A connection that stops in the middle of a frame has no stream that could be late. */
		peer_server_arg(GRPC_ARG_KEEPALIVE_TIME_MS, PEER_SERVER_HANDSHAKE_MS),
		peer_server_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, PEER_SERVER_HANDSHAKE_MS),
		peer_server_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
		peer_server_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
		peer_server_arg(GRPC_ARG_HTTP2_BDP_PROBE, 0),
		peer_server_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 20),
	};
	grpc_channel_args list = { ARRAY_SIZE(args), args };

	return grpc_server_create(&list, NULL);
}

int peer_server_listen(struct peers *ps, const char *at, struct fault *f)
{
	int port;

	ps->server = peer_server_new();
	grpc_server_register_completion_queue(ps->server, ps->cq, NULL);
	bulk_hands_register(ps);
	port = grpc_server_add_http2_port(ps->server, at, ps->listen_creds);
	if (port <= 0)
		return peer_address_why(at, f);
	ps->port = (uint16_t)port;
	grpc_server_start(ps->server);
	return 0;
}

/* "ipv4:10.0.0.1:33012" or "ipv6:%5Bfd00::1%5D:33012", without what is for URIs. */
void peer_server_address(grpc_call *call, char *ret)
{
	char *name = grpc_call_get_peer(call);
	const char *from = name ? name : "?";
	size_t n = 0;

	if (strncmp(from, "ipv4:", 5) == 0 || strncmp(from, "ipv6:", 5) == 0)
		from += 5;
	for (; *from && n < PEER_PLACE_BYTES - 1; from++) {
		bool bracket = strncmp(from, "%5B", 3) == 0 || strncmp(from, "%5D", 3) == 0;

		ret[n++] = !bracket ? *from : from[2] == 'B' ? '[' : ']';
		from += bracket ? 2 : 0;
	}
	ret[n] = '\0';
	gpr_free(name);
}

static void peer_server_on_stream(struct peer *p)
{
	struct peers *ps = p->ps;

	ps->n_armed--;
	if (!p->requested.ok || ps->closing) { /* nothing more comes */
		peer_unref(p);
		return;
	}
	peer_server_arm(ps);
	peer_server_address(p->call, p->at);
	peer_begin(p);
	if (grpc_slice_str_cmp(p->request.method, PEER_METHOD) != 0)
		peer_fail(p, "the node at %s calls a method that is not there", p->at);
	else if (ps->n_links > ps->max_links)
		peer_fail(p, "node '%s' has %u links, its limit: raise it", ps->node,
			  ps->max_links);
}

/* Return: false: no memory. */
static bool peer_server_arm_one(struct peers *ps)
{
	struct peer *p = peer_new(ps);

	if (!p)
		return false;
	p->requested.then = peer_server_on_stream;
	peer_stream_hold(p);
	CHECK(grpc_server_request_call(ps->server, &p->call, &p->request, &p->initial, ps->cq,
				       ps->cq, &p->requested) == GRPC_CALL_OK);
	ps->n_armed++;
	return true;
}

void peer_server_arm(struct peers *ps)
{
	while (ps->n_armed < PEER_SERVER_ARMED && peer_server_arm_one(ps))
		;
}
