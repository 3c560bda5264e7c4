/*
 * The client's side of the ring (ring_abi.h): submissions out, completions back.
 *
 * The ring has no thread, unless ring_serve starts one. One of the waiting threads polls; the others sleep until their
 * completion was found or the polling thread has left (leader and followers, as for gRPC).
 * The daemon is trusted to be correct, but it may end: a sleeping thread wakes from time to time to
 * check that it still runs. Any thread.
 */
#ifndef SHARDD_CLIENT_RING_H
#define SHARDD_CLIENT_RING_H

#include <protobuf-c/protobuf-c.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ring_abi.h"
#include "shardd/shardd.h"

struct channel;
struct ring;

/* A submission that was sent; embedded in what waits for it. */
struct ring_pending {
	struct ring *ring; /* NULL: not sent over the ring */
	const char *method;
	const ProtobufCMessageDescriptor *reply;
	uint32_t slot;
	uint32_t timeout_ms;
	uint64_t deadline_us; /* the daemon should have answered by then; 0: none */
	atomic_bool done;     /* all below is there */
	atomic_bool lost;     /* it will never be answered */
	uint16_t code;
	uint32_t bytes;
	uint8_t data[RING_SHORT_BYTES];
	uint8_t *longer; /* owned; where @data is too small */
};

/* Ask for the ring of the session that @channel is bound to. @path: of the socket, for
 * texts. Return: 0 or a negative shardd_code. */
int ring_open(struct channel *channel, const char *path, struct ring **ret,
	      struct shardd_error *err);

/* As ring_open, with memory and descriptors that are already open; all of them are consumed.
 * @event_fd: wakes the daemon. @watch_fd: hangs up when the daemon has gone. */
int ring_use(void *memory, uint64_t bytes, int event_fd, int watch_fd, const char *path,
	     struct ring **ret, struct shardd_error *err);

/* No other thread may use it; unfinished submissions are lost. NULL is allowed. */
void ring_close(struct ring *r);

enum {
	RING_E_FULL = 1,     /* no room now */
	RING_E_TOO_LONG = 2, /* this one goes another way */
	RING_E_LOST = 3,     /* the daemon is gone */
};

/* The number of @method ("/shardd.v1.TrainingService/Gather"), 0: it does not go over a ring. */
uint16_t ring_number(const char *method);

/* Submit, in the order of calls. @request: NULL for RING_NOP. @method: static.
 * @p: must stay until it is done or freed. Return: 0 or RING_E_*. */
int ring_start(struct ring *r, uint16_t op, const ProtobufCMessage *request, const char *method,
	       const ProtobufCMessageDescriptor *reply, uint32_t timeout_ms,
	       struct ring_pending *p);

/* As rpc_pending_wait, rpc_pending_result. */
bool ring_pending_wait(struct ring_pending *p, int timeout_ms);
int ring_pending_result(struct ring_pending *p, ProtobufCMessage **ret, struct shardd_error *err);

/* Has it ended, or is it late? Does not read the ring. Never blocks. */
bool ring_pending_ended(const struct ring_pending *p);

/* Has it ended without an answer, because the daemon is gone? */
bool ring_pending_is_lost(const struct ring_pending *p);

/* Wait until one of @n submissions, above 0, has ended. Return: false: @timeout_ms has passed, or
 * ring_poke was called after ring_pokes returned @pokes. */
bool ring_wait_any(struct ring *r, struct ring_pending *const *p, size_t n, unsigned pokes,
		   int timeout_ms);

/* End the ring_wait_any that block now, and signal the descriptor of ring_serve. */
void ring_poke(struct ring *r);
unsigned ring_pokes(const struct ring *r);

/* From now on completions are taken even if nobody waits for them, by a thread of the library, and
 * @told_fd, an eventfd (borrowed), is signalled whenever something has ended: a submission was
 * answered or its deadline has passed, or the daemon is gone. Does nothing if there is such a thread
 * already. Ends with ring_close. Return: 0 or a negative errno. */
int ring_serve(struct ring *r, int told_fd);

/* Ask the daemon to give it up; it is answered all the same. Does nothing if it has been. Never
 * blocks, and needs no room. */
void ring_pending_cancel(struct ring_pending *p);

/* It need not be answered any more. Safe twice. */
void ring_pending_free(struct ring_pending *p);

#endif
