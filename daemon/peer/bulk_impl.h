/*
 * Fetches: what their files share.
 *
 * Threads: the loop begins and ends streams and has all their state. BULK_HANDS threads ("hands") take the
 * events of a completion queue of fetches alone, and move the bytes: between two chunks of a stream no turn
 * of the loop is needed. What they have of a stream is under its lock @mu, which the loop takes only before
 * they have begun; what both have is atomic. They hand a stream back to the loop by its work.
 *
 * A stream has a reference for each batch of core, and each work that is posted. When the last one is
 * dropped core has nothing of it any more, and the loop frees it.
 */
#ifndef SHARDD_PEER_BULK_IMPL_H
#define SHARDD_PEER_BULK_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "peer/bulk.h"
#include "peer/peer_impl.h"

#define BULK_METHOD "/shardd.v1.PeerService/Fetch"
#define BULK_HANDS  2u
/* Of a message: a chunk, and what is in front of it. */
#define BULK_HEAD_BYTES    512u
#define BULK_MESSAGE_BYTES (BULK_CHUNK_BYTES + BULK_HEAD_BYTES)

/* A batch of gRPC core. On a hand; it drops the batch's reference last. */
struct bulk_tag {
	void (*fn)(void *of, bool ok);
	void *of;
};

/* That time passes, as the loop sees it. */
struct bulk_watch {
	uint64_t seen;    /* chunks, when it last looked */
	uint64_t seen_us; /* when it saw that there were more */
};

/* A connection to a node, for its fetches. */
struct bulk_channel {
	struct list link; /* b->channels */
	struct peers *ps;
	char node[NAME_BYTES];
	char at[PEER_PLACE_BYTES];
	grpc_channel *channel;
	unsigned users;
	uint64_t idle_us; /* since when there are none */
	bool spoiled;     /* it had none of late, or it failed: for no other fetch */
	struct bulk_tag watched;
	struct work gone;
};

struct bulk {
	struct peers *ps;
	grpc_completion_queue *cq;
	void *method; /* core's */
	pthread_t threads[BULK_HANDS];
	unsigned n_threads;

	const struct bulk_ops *ops; /* NULL: nothing is served */
	void *userdata;
	struct list served; /* of struct bulk_stream */
	unsigned n_open;    /* of these: their owner has opened what they fetch */
	unsigned n_silent;  /* of these: they have not said what they fetch */
	unsigned n_armed;

	struct list fetches, channels;
	unsigned n_fetches;
};

/* ----------------------------------------------------------- bulk_hands.c */

void bulk_hands_submit(struct bulk_tag *t, atomic_uint *refs, grpc_call *call, const grpc_op *ops,
		       size_t n);
/* @moved: chunks so far. Return: us since there were more of them than before. */
uint64_t bulk_hands_silent_us(struct bulk_watch *w, uint64_t moved, uint64_t now_us,
			      uint64_t blocked_us);
/* A key that may be asked for. */
bool bulk_hands_key_is_good(const char *key);
/* The status for a fault, and the other way. */
grpc_status_code bulk_hands_status(enum fault_code code);
enum fault_code bulk_hands_code(grpc_status_code status);

/* ----------------------------------------------------------- bulk_serve.c */

void bulk_serve_arm(struct bulk *b);
void bulk_serve_tick(struct bulk *b, uint64_t now_us, uint64_t blocked_us);
void bulk_serve_close(struct bulk *b);

/* ----------------------------------------------------------- bulk_fetch.c */

void bulk_fetch_tick(struct bulk *b, uint64_t now_us, uint64_t blocked_us);
void bulk_fetch_close(struct bulk *b);

/* ------------------------------------------------------------ bulk_dial.c */

/* A connection to @node at @at, which has one more user. Return: NULL without memory. */
struct bulk_channel *bulk_dial_get(struct bulk *b, const char *node, const char *at);
/* @failed: the node could not be reached, was lost, or is silent. */
void bulk_dial_put(struct bulk_channel *c, bool failed);
void bulk_dial_tick(struct bulk *b, uint64_t now_us);
void bulk_dial_close(struct bulk *b);

/* ------------------------------------------------------------ bulk_wire.c */

/* A chunk, of @hello and @total if it is the first one. @data: taken. Return: the caller's. */
grpc_byte_buffer *bulk_wire_pack(const Shardd__V1__PeerHello *hello, uint64_t total,
				 uint64_t offset, grpc_slice data);

/* A chunk as it came. */
struct bulk_chunk {
	Shardd__V1__FetchChunk *m; /* without data; the caller's */
	const grpc_slice *slices;  /* its data are in these, borrowed */
	size_t n_slices;
	size_t skip;  /* bytes in front of them in the first one */
	size_t bytes; /* of data, up to the end of the last one */
};

/* Return: false: it is none. */
bool bulk_wire_unpack(const grpc_byte_buffer *buffer, struct bulk_chunk *ret);
uint32_t bulk_wire_crc(const struct bulk_chunk *c);
/* Write its data to @fd from @at on. Return: 0 or negative errno. */
int bulk_wire_write(const struct bulk_chunk *c, int fd, uint64_t at);

/* Return: NULL: it is none. */
Shardd__V1__FetchRequest *bulk_wire_request(grpc_byte_buffer *buffer);

#endif
