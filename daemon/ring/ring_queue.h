/*
 * The daemon's side of a ring (ring_abi.h): its memory, and its two queues. The other side
 * is hostile: each entry is copied once and its fields are checked, impossible indices are an
 * error, and the daemon's own indices are kept in memory that no other process writes. One thread
 * at a time.
 */
#ifndef SHARDD_RING_RING_QUEUE_H
#define SHARDD_RING_RING_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "ring_abi.h"

struct memfd;

struct ring_queue {
	struct memfd *memory;       /* of which @shared is the mapping */
	struct ring_shared *shared; /* NULL: none */
	struct ring_entry *sq, *cq;
	uint8_t *sq_long, *cq_long;
	uint64_t bytes;
	uint32_t entries;
	uint32_t sq_head, cq_tail;
	uint32_t cq_head;    /* as last seen */
	uint32_t unanswered; /* taken, not posted yet */
	bool posted;         /* since the client was last woken */
	uint64_t n_taken, n_posted, n_wakes;
	uint64_t n_full; /* times there was less room for completions than submissions */
};

/* A submission as a copy: nothing of it is in shared memory. */
struct ring_submission {
	uint64_t tag;
	uint16_t op;
	uint32_t bytes;
	uint8_t data[RING_LONG_BYTES];
};

enum {
	RING_E_BROKEN = 1, /* the client wrote an impossible value */
};

/* Bytes of the memory of a ring. */
uint64_t ring_queue_bytes(uint32_t entries);
/* How many entries a queue has so that @ops fit: a power of two within the ABI's bounds. */
uint32_t ring_queue_entries(uint32_t ops);

/* Make the memory, asleep (daemon_sleeps). @ret_fd: a sealed memfd, the caller's.
 * Return: 0 or negative errno. */
int ring_queue_init(struct ring_queue *q, uint32_t entries, int *ret_fd);

/* Tell the client that the ring is over. Safe to call twice, and without init. */
void ring_queue_end(struct ring_queue *q);

/* Does the client, or a process that got it from the client, still have the memory? */
bool ring_queue_is_held(const struct ring_queue *q);

/* End it, and release the memory. A client that still reads it finds its last contents. Safe to
 * call twice. */
void ring_queue_deinit(struct ring_queue *q);

/* Return: how many submissions can be taken, or -RING_E_BROKEN. */
int ring_queue_ready(struct ring_queue *q);

/* Are there submissions that were not taken, whether or not they can be? */
bool ring_queue_has_more(const struct ring_queue *q);

/* Take one of those that are ready; the client sees it with ring_queue_taken.
 * Return: 0 or RING_E_BROKEN. */
int ring_queue_take(struct ring_queue *q, struct ring_submission *ret);
void ring_queue_taken(struct ring_queue *q);

/* Answer one that was taken. @bytes: RING_LONG_BYTES at most. */
void ring_queue_post(struct ring_queue *q, uint64_t tag, uint16_t code, const void *data,
		     uint32_t bytes);

/* Wake the client if it sleeps and something was posted. Return: whether it slept. */
bool ring_queue_wake(struct ring_queue *q);

/* Announce that the daemon sleeps. Return: false: it must not sleep, since a submission arrived
 * meanwhile. */
bool ring_queue_sleep(struct ring_queue *q);
/* Announce that it does not sleep. */
void ring_queue_awake(struct ring_queue *q);

#endif
