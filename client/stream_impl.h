/* What stream.c and stream_link.c share. Only in a build with the CUDA Toolkit. */
#ifndef SHARDD_CLIENT_STREAM_IMPL_H
#define SHARDD_CLIENT_STREAM_IMPL_H

#include <pthread.h>

#include "map.h"
#include "stream.h"

/* A stream on which ops were submitted. It keeps its slot until streams_free. */
struct stream {
	CUstream stream; /* the caller's; may have been destroyed if no op is in progress */
	uint32_t slot;
	uint64_t value; /* the word's, when all that is on the stream is done; order lock */
	CUevent mark;   /* behind the last wait that was put on the stream */
	bool marked;    /* that wait may still be pending; lock */
	CUevent raised; /* TIMELINE: behind the last raising of the word */
	bool raising;   /* that raising may still be pending; order lock, or closing */

	/* EVENTS, else NULL */
	CUevent *ring;
	uint64_t *holders; /* the tickets that named the events last; 0: none; order lock */
	uint32_t ring_size;
};

/* A placement from the daemon; it is mapped when the first stream is set. */
struct link_place {
	struct map_place place;
	uint8_t handle[MAP_IPC_BYTES];
};

struct stream_link {
	Shardd__V1__StreamLink__Order order;
	uint32_t slots;
	uint32_t stride; /* bytes */
	bool open;       /* mapped, or its events are opened */
	bool gone;       /* its daemon has died, and its words may be unmapped; lock */
	uint32_t queues; /* of the daemon's: slots in ready */

	/* TIMELINE */
	struct link_place signals_place, ready_place;
	CUdeviceptr signals, ready;

	/* EVENTS */
	uint32_t ring_size;
	uint8_t *handles; /* ring_size * queues */
	CUevent *ready_events;

	struct stream_link *older;
};

struct streams {
	struct shardd_client *client;
	struct cuda *cuda;
	/* How the daemon is told of a stream's events: stream_link_tell. */
	int (*tell)(struct streams *s, uint32_t slot, const uint8_t *handles, uint32_t n,
		    struct shardd_error *err);
	pthread_key_t key;        /* a thread's struct stream */
	pthread_mutex_t setup;    /* over setting and joining; taken before @lock */
	struct stream_link *link; /* the last join's; NULL before the first */
	pthread_mutex_t lock;     /* over @items, the marks, and while waits are put */
	struct stream **items;    /* the slot is the index */
	uint32_t count;
};

/* Check and copy what the daemon said. */
int stream_link_new(const Shardd__V1__StreamLink *from, struct stream_link **ret,
		    struct shardd_error *err);
/* Return: the older one. */
struct stream_link *stream_link_free(const struct cuda *c, struct stream_link *link);
/* Are ops ordered with streams at all? NULL is allowed. */
bool stream_link_orders(const struct stream_link *link);
/* Report that ops are not ordered with streams. Return: -SHARDD_FAILED_PRECONDITION. */
int stream_link_refused(struct shardd_error *err);
/* Are both about the same words or events? */
bool stream_link_same(const struct stream_link *a, const struct stream_link *b);
/* Map its words or open its events, once. The context is entered. Blocks. */
int stream_link_open(struct streams *s, struct stream_link *link, struct shardd_error *err);
/* The ShareEvents call. Blocks. */
int stream_link_tell(struct streams *s, uint32_t slot, const uint8_t *handles, uint32_t n,
		     struct shardd_error *err);
/* EVENTS: make the events of @x, where it has none, and tell the daemon. Blocks. */
int stream_link_share(struct streams *s, const struct stream_link *link, struct stream *x,
		      struct shardd_error *err);

#endif
