/*
 * The client side of gRPC core, shared by libshardd and shardctl: one connection over
 * a socket that is made here, and calls with protobuf-c messages.
 *
 * There is no extra thread, unless rpc_client_serve starts one. One of the waiting threads drives the completion queue; the
 * others sleep until the driver hands over (leader and followers). So a call costs no
 * extra thread switch. All functions: any thread.
 */
#ifndef SHARDD_CLIENT_RPC_CLIENT_H
#define SHARDD_CLIENT_RPC_CLIENT_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

#include "shardd/shardd.h"

struct rpc_client;
struct rpc_pending; /* one call under way */

/* Connect to the unix socket @path; retry for @timeout_ms while no daemon
 * listens. Refused in a child of a process that was connected when it forked.
 * @ret: end with rpc_client_close. Return: 0 or a negative shardd_code. */
int rpc_client_connect(const char *path, uint32_t timeout_ms, struct rpc_client **ret,
		       struct shardd_error *err);

/* Cancels open calls; no other thread may use it. NULL is allowed. */
void rpc_client_close(struct rpc_client *c);

/* Start a unary call or, with @streaming, a server stream. @method:
 * "/shardd.v1.TrainingService/Gather". @request: borrowed, packed at once. @timeout_ms: 0:
 * none. Calls started by one thread are sent in that order.
 * @ret: ended by rpc_pending_free. Return: 0 or a negative shardd_code. */
int rpc_client_start(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
		     const ProtobufCMessageDescriptor *reply, bool streaming, uint32_t timeout_ms,
		     struct rpc_pending **ret, struct shardd_error *err);

/* Wait until the call has ended, at most @timeout_ms (-1: for ever, 0: only look).
 * Return: true if it has. */
bool rpc_pending_wait(struct rpc_pending *p, int timeout_ms);

/* The same for one of @n calls of the same connection. */
bool rpc_pending_wait_any(struct rpc_pending *const *p, size_t n, int timeout_ms);

/* From now on calls end even if nobody waits for them: a thread of the library takes the events, and
 * @on_event is called after each, by whichever thread takes it, with a lock of @c held. Does nothing
 * if there is such a thread already. Return: 0 or a negative errno. */
int rpc_client_serve(struct rpc_client *c, void (*on_event)(void *data), void *data);

/* End that thread, and with it all calls: they are cancelled. rpc_client_close does it, too. Safe
 * twice, and without a thread. */
void rpc_client_stop_serving(struct rpc_client *c);

/* Has it ended because the connection was lost? */
bool rpc_pending_is_lost(const struct rpc_pending *p);

/* The outcome of a unary call that has ended.
 * @ret: the reply, the caller's (protobuf_c_message_free_unpacked).
 * Return: 0 or a negative shardd_code with @err from the status details. */
int rpc_pending_result(struct rpc_pending *p, ProtobufCMessage **ret, struct shardd_error *err);

/* Streams, which only tests read: the next message, waiting at most @timeout_ms.
 * Return: 1 (@ret is the caller's), 0 (ended with OK), -SHARDD_DEADLINE_EXCEEDED
 * with native EAGAIN (nothing yet), or another negative shardd_code (ended so). */
int rpc_pending_next(struct rpc_pending *p, int timeout_ms, ProtobufCMessage **ret,
		     struct shardd_error *err);

/* Free; a call still open is cancelled. NULL is allowed. */
void rpc_pending_free(struct rpc_pending *p);

/* start, wait, result in one. */
int rpc_client_call(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
		    const ProtobufCMessageDescriptor *reply, uint32_t timeout_ms,
		    ProtobufCMessage **ret, struct shardd_error *err);

/* The same with a request that is packed already, and a reply (@reply: its type, for texts)
 * that @take unpacks. @take: bytes are borrowed. Return: 0, a negative shardd_code, or
 * RPC_E_REPLY: it is no such message. */
enum { RPC_E_REPLY = 1 };
typedef int (*rpc_reply_cb)(const uint8_t *reply, size_t bytes, void *userdata,
			    struct shardd_error *err);
int rpc_client_call_packed(struct rpc_client *c, const char *method, const uint8_t *request,
			   size_t bytes, const ProtobufCMessageDescriptor *reply,
			   uint32_t timeout_ms, rpc_reply_cb take, void *userdata,
			   struct shardd_error *err);

#endif
