/*
 * The gRPC core server: adopted descriptors, one completion-queue thread, and
 * the hand-off into the loop.
 *
 * The thread sits in grpc_completion_queue_next, unpacks requests (with a memory
 * budget) and posts work to the loop; it holds no state. Everything below is
 * called on the loop thread.
 */
#ifndef SHARDD_RPC_SERVER_H
#define SHARDD_RPC_SERVER_H

#include <stddef.h>
#include <stdint.h>

#include "core/loopq.h"
#include "net/conn.h"
#include "rpc/method.h"

struct rpc_server;

/* Streams beyond max_calls_per_conn that core accepts, so that a client gets an error text instead
 * of waiting; further ones wait on the client's side. */
#define RPC_EXTRA_STREAMS 64u
/* The longest frame core accepts, which it tells clients: HTTP/2's default. */
#define RPC_FRAME_BYTES 16384u

struct rpc_options {
	uint64_t max_message_bytes;  /* larger ones: RESOURCE_EXHAUSTED */
	uint32_t max_calls_per_conn; /* unanswered at once: RESOURCE_EXHAUSTED */
	uint32_t max_metadata_bytes; /* headers of a call, unpacked; 0: 16384 */
	const struct fault *
		refusal; /* copied: of calls of methods that are not in a service; NULL: UNIMPLEMENTED */
	uint64_t memory_bytes; /* core's own buffers: then it slows senders; 0: no limit */
};

/* @services: borrowed until close, an array of @n. Starts the thread.
 * Return: 0 or negative errno. */
int rpc_server_new(struct loopq *loopq, const struct rpc_options *options,
		   const struct rpc_service *services, size_t n, struct rpc_server **ret);

/* Give gRPC a duplicate of @fd (borrowed), from which it reads what @c's client sends: the
 * inner end of its gate, or its socket itself. Calls from it carry @c.
 * Return: 0 or negative errno. */
int rpc_server_adopt(struct rpc_server *s, struct conn *c, int fd);

/* The connection is about to be freed: its calls have rpc_call_conn NULL from
 * here on, and are cancelled. */
void rpc_server_forget(struct rpc_server *s, struct conn *c);

/* Calls that have not ended. For tests. */
size_t rpc_server_calls(const struct rpc_server *s);

/* Answers that core has not written yet: it writes them at once, unless its own thread uses the
 * connection at that moment. */
size_t rpc_server_answers(const struct rpc_server *s);

/* Methods, for @i from 0 on. @ret_calls: calls that came since the start; @ret_failed: of these, those that were
 * answered with an error. Return: the path, as long as @s; NULL: there are no more. */
const char *rpc_server_method_at(const struct rpc_server *s, size_t i, uint64_t *ret_calls,
				 uint64_t *ret_failed);

/* The time when the thread was last alive, on the clock of clock_now_us; it answers at least once a
 * second. For the watchdog. Any thread. */
uint64_t rpc_server_heartbeat_us(const struct rpc_server *s);

/* Processor time of the thread. If it grows, a thread that does not answer is busy with data from a
 * client, and does not hang. */
uint64_t rpc_server_cpu_us(const struct rpc_server *s);

typedef void (*rpc_server_closed_cb)(void *userdata);

/* Cancel open calls, stop the thread; @done from the loop when all calls have ended and the server
 * is freed. */
void rpc_server_close(struct rpc_server *s, rpc_server_closed_cb done, void *userdata);

#endif
