/*
 * Methods and calls: the interface of gRPC for a service.
 *
 * A service is protobuf-c's descriptor and a table of handlers by method name;
 * adding a method is the .proto and one line here. Handlers run on the loop
 * thread. A handler must end its call exactly once, immediately or later (rpc_call_reply,
 * rpc_call_fail, or for streams rpc_call_end / rpc_call_fail). A handler gets the first message of
 * a stream from the client, and asks for each further one (rpc_call_next).
 */
#ifndef SHARDD_RPC_METHOD_H
#define SHARDD_RPC_METHOD_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "net/conn.h"

struct rpc_call;

/* @request: unpacked, of the descriptor's input type; valid until the call ends. NULL for a
 * packed method. */
typedef void (*rpc_handler)(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
typedef void (*rpc_cancelled_cb)(struct rpc_call *call, void *userdata);

struct rpc_method {
	const char *name; /* as in the .proto; NULL ends the table */
	rpc_handler fn;
	bool streaming; /* the server sends any number of messages */
	bool packed;    /* the handler gets no message, but rpc_call_packed */
};

struct rpc_service {
	const ProtobufCServiceDescriptor *desc;
	const struct rpc_method *methods; /* every method of desc, CHECKed at start */
	void *userdata;
};

/* Its connection; NULL if that has closed meanwhile. Borrowed. */
struct conn *rpc_call_conn(struct rpc_call *call);

/* Charge one of @kind to its user until the answer has been taken by the peer or is dropped.
 * Return: 0 or a fault code. */
int rpc_call_charge(struct rpc_call *call, enum user_kind kind, struct fault *f);

/* Name of the method, "/package.Service/Method". Borrowed. */
const char *rpc_call_method(const struct rpc_call *call);

/* The caller's deadline on the clock of clock_now_us; 0: none. */
uint64_t rpc_call_deadline_us(const struct rpc_call *call);

/* The request of a packed method as received: borrowed, valid until the call ends. */
const uint8_t *rpc_call_packed(const struct rpc_call *call, size_t *ret_bytes);

/* Unpack it. Any thread, one at a time; the call must not end meanwhile. The result is valid until
 * rpc_call_drop, or until the call ends. Return: NULL: it cannot be unpacked; then call
 * rpc_call_refuse. */
const ProtobufCMessage *rpc_call_unpack(struct rpc_call *call);
/* Free the unpacked request, which is not needed any more. */
void rpc_call_drop(struct rpc_call *call);
/* Fail the call with the reason why it could not be unpacked. Ends the call. */
void rpc_call_refuse(struct rpc_call *call);

/* Call @fn once if the caller gives up (cancel, deadline, connection lost) before
 * the call has ended. The call must still be ended; sent messages are dropped. fn == NULL removes
 * the callback. */
void rpc_call_on_cancelled(struct rpc_call *call, rpc_cancelled_cb fn, void *userdata);

/* Unary: send @reply (borrowed) and status OK. Ends the call. */
void rpc_call_reply(struct rpc_call *call, const ProtobufCMessage *reply);
/* The same with a reply that is packed already; borrowed. */
void rpc_call_reply_packed(struct rpc_call *call, const uint8_t *reply, size_t bytes);

/* Status and details from @fault (borrowed). Ends the call. */
void rpc_call_fail(struct rpc_call *call, const struct fault *fault);

/* Streams: queue one message (borrowed, packed at once). Messages go out one
 * after the other as the peer takes them.
 * Return: 0, or -ENOBUFS when 256 are waiting (nothing queued: end the call). */
int rpc_call_send(struct rpc_call *call, const ProtobufCMessage *message);

/* Bytes of a packed message. */
struct rpc_piece {
	const uint8_t *bytes;
	size_t n;
};

/* The same with a message that is packed already: @head (borrowed, copied), then @rest, whose bytes
 * are in static memory and are not copied, however many answers wait. */
int rpc_call_send_with(struct rpc_call *call, const struct rpc_piece *head,
		       const struct rpc_piece *rest);

/* Core has no part of the bytes any more. From the loop, exactly once, perhaps after the call. */
typedef void (*rpc_returned_cb)(void *userdata);

/* The same, but the bytes of @rest are lent, not copied: they do not change and stay mapped until
 * @returned. Another thread than the loop's writes them to the socket. Return: 0, -ENOBUFS or
 * -ECANCELED: nothing is lent, and @returned is not called. (call_lend.c) */
int rpc_call_send_lent(struct rpc_call *call, const struct rpc_piece *head,
		       const struct rpc_piece *rest, rpc_returned_cb returned, void *userdata);

/* Streams: call @fn, from the loop, each time when all messages have been passed to the connection,
 * as fast as the peer makes room. NULL: no more. */
typedef void (*rpc_taken_cb)(struct rpc_call *call, void *userdata);
void rpc_call_on_taken(struct rpc_call *call, rpc_taken_cb fn, void *userdata);

/* The peer gets the status of @fault now, although it does not take messages that wait. The callback
 * of rpc_call_on_cancelled follows, and ends the call. */
void rpc_call_abort(struct rpc_call *call, const struct fault *fault);

/* @message: valid until the next call of rpc_call_next, or until the call ends. NULL: @why->code
 * is FAULT_NONE when the client sends no more; otherwise the message cannot be taken: fail the
 * call with @why (borrowed). */
typedef void (*rpc_next_cb)(struct rpc_call *call, const ProtobufCMessage *message,
			    const struct fault *why, void *userdata);

/* Streams: call @fn once with the next message from the client. The daemon reads it when the peer
 * has taken all that was sent: so a client that does not read has one message of memory, and no
 * more. The handler needs rpc_call_on_cancelled: a call that is cancelled gets no message. Not
 * while a message is awaited. A call has at most 64 messages from the client. */
void rpc_call_next(struct rpc_call *call, rpc_next_cb fn, void *userdata);

/* Streams: status OK after what is queued. Ends the call. */
void rpc_call_end(struct rpc_call *call);

#endif
