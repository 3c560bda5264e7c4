/*
 * A queue with many producers and one consumer, links in the elements, no lock.
 *
 * Producers exchange the head and then link; between the two the queue looks
 * shorter than it is, and the consumer sees the rest at its next look. So every
 * producer wakes the consumer after its push has returned.
 * (The algorithm is D. Vyukov's intrusive MPSC node-based queue.)
 */
#ifndef SHARDD_CORE_MPSC_H
#define SHARDD_CORE_MPSC_H

#include <stdatomic.h>
#include <stddef.h>

struct mpsc_node {
	_Atomic(struct mpsc_node *) next;
};

struct mpsc {
	_Atomic(struct mpsc_node *) head; /* last pushed; producers swap it */
	struct mpsc_node *tail;           /* next to pop; the consumer's own */
	struct mpsc_node stub;
};

/* Before any other use; allocates nothing, needs no deinit. */
void mpsc_init(struct mpsc *q);

/* Hand @node over; it must stay valid until it is popped. Any thread, never blocks. */
void mpsc_push(struct mpsc *q, struct mpsc_node *node);

/* Return: the oldest node, which the caller owns again; NULL if none is complete yet. Consumer
 * thread only. */
struct mpsc_node *mpsc_pop(struct mpsc *q);

#endif
