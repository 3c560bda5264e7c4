/*
 * The trainer's CUDA streams, and how they and the daemon's queues wait for each other.
 *
 * A stream has a slot in the session's signals. To submit an op on it, the library puts "raise
 * the slot's word to v" on the stream and names (slot, v) in the op's header; the daemon's
 * queue waits for that value. The answer names a word of the daemon and a value; the thread
 * that takes the result puts a wait for it on the stream. The word of a slot only grows, in
 * the order of submission: the client's order lock is held from the raising to the sending.
 *
 * If the device cannot do that with words (ORDER_EVENTS), interprocess events represent the
 * values: value v is event v % ring of its slot. An event is recorded again only when the
 * last op that named it has been answered, because the daemon's wait exists then.
 *
 * While a wait is pending nothing may be mapped (streams_quiet): the driver could wait for
 * the stream inside that call, while the daemon waits for this process.
 *
 * A link holds the words and events of one join. Ops of an earlier join keep their link,
 * so links live until streams_free.
 */
#ifndef SHARDD_CLIENT_STREAM_H
#define SHARDD_CLIENT_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_context.h"
#include "shardd.pb-c.h"
#include "shardd/shardd.h"

struct stream;
struct stream_link;
struct stream_ref;
struct streams;

/* @c, @cuda: borrowed; mappings of @cuda wait for these streams from here on.
 * Return: NULL: no memory, or no thread-specific key is left. */
struct streams *streams_new(struct shardd_client *c, struct cuda *cuda);
/* No wait may be pending. NULL is allowed. */
void streams_free(struct streams *s);

/* A join's answer. @link: NULL: ops are not ordered with streams. Under the order lock.
 * Return: 0 or a negative shardd_code. */
int streams_join(struct streams *s, const Shardd__V1__StreamLink *link, struct shardd_error *err);
bool streams_linked(struct streams *s);

/* Order this thread's later ops with @stream. May block. Any thread. */
int streams_set(struct streams *s, void *stream, struct shardd_error *err);
void streams_clear(struct streams *s);

/* Begin an op with the ticket @id: raise the word of this thread's stream. Under the order
 * lock. @ret: the op's, for stream_end. @ret_point: for its header.
 * Return: 1, 0 (this thread has no stream), or a negative shardd_code. */
int stream_begin(struct streams *s, uint64_t id, struct stream_ref *ret,
		 Shardd__V1__StreamPoint *ret_point, struct shardd_error *err);

/* The op was answered: its stream continues when the daemon has reached @ready. Any thread.
 * Return: 0, 1 (streams_part was called since: there is nothing to wait for), or a negative
 * shardd_code. */
int stream_end(struct streams *s, const struct stream_ref *ref,
	       const Shardd__V1__StreamPoint *ready, struct shardd_error *err);

/* Wait until no stream waits for the daemon, and keep it so until streams_unquiet. The
 * context is entered. @s: may be NULL. @timeout_ms: -1: none; 0: only look.
 * Return: 0, -SHARDD_DEADLINE_EXCEEDED with native EAGAIN, or another negative
 * shardd_code; streams_unquiet only after 0. */
int streams_quiet(struct streams *s, int timeout_ms, struct shardd_error *err);
void streams_unquiet(struct streams *s);

/* The daemon has died and another one is there: wait as above until no stream waits for the dead one,
 * whose successor releases them, and until the device is done with all work of this process's
 * context. From then on nothing uses the words and the memory of the dead daemon. Under the order
 * lock, before a join. Return: 0 or a negative shardd_code. */
int streams_part(struct streams *s, int timeout_ms, struct shardd_error *err);

/* Before the client unmaps everything, while no thread submits: wait that long for the streams that
 * wait for the daemon or have not raised their word yet. Return: false: some are not done. */
bool streams_settle(struct streams *s, int timeout_ms);

#ifdef SHARDD_CUDA
/* The calling thread's stream. @s: may be NULL. Return: false: it has none. */
bool stream_of_thread(struct streams *s, CUstream *ret);
#endif

#endif
