/*
 * One connection to the daemon: gRPC, the local channel until the client has taken it, and the ring.
 *
 * A client has one at a time. When the daemon ends, reconnect.h makes another one, and the former
 * stays until the tickets and calls that went over it have ended.
 */
#ifndef SHARDD_CLIENT_LINK_H
#define SHARDD_CLIENT_LINK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "channel.h"
#include "expect.h"
#include "ring.h"
#include "rpc_client.h"

struct link {
	struct rpc_client *rpc;
	struct ring *ring;         /* NULL: all goes over gRPC */
	struct channel channel;    /* closed: the client has it, or there is none */
	struct link *next;         /* of former ones */
	unsigned users;            /* calls under way; under the reconnect's lock */
	uint32_t number;           /* of the client's links, from 1; outlives the link in callers */
	const atomic_int *told_fd; /* of the client's completions */
	/* what the daemon said */
	uint64_t session;
	uint8_t instance[EXPECT_BYTES];
	uint64_t started_unix_s;
	uint64_t max_message;
	uint32_t max_ops;
	bool outlives;  /* its jobs outlive it, or the connection: it comes back */
	bool forwarded; /* a relay is in between: no memory of the daemon can be mapped */
	char *version;
};

struct link_plan {
	const char *path;
	const char *name;
	bool local; /* with a local channel */
	/* (optional) Give up when it is true. */
	const atomic_bool *stop;
};

/* Connect, attach, open the local channel and the ring. @connect_ms: how long to retry while no
 * daemon listens. @attach_ms: for the daemon's answer. @ret: ended by link_free. Return: 0 or a
 * negative shardd_code. */
int link_open(const struct link_plan *plan, uint32_t connect_ms, uint32_t attach_ms,
	      struct link **ret, struct shardd_error *err);

/* No other thread may use it. NULL is allowed. Return: NULL. */
struct link *link_free(struct link *l);

#endif
