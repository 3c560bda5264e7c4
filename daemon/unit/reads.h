/*
 * Streams of trainers that may still read a piece of device memory: the points that must
 * be reached before it is written again. One entry a slot, with its latest point. Loop
 * thread only.
 */
#ifndef SHARDD_UNIT_READS_H
#define SHARDD_UNIT_READS_H

#include "backend/backend.h"

struct reads {
	struct backend_wait *waits; /* owned */
	unsigned n;
	unsigned room;
};

/* Note one more point. Return: 0 or -ENOMEM. */
int reads_add(struct reads *r, const struct backend_wait *w);
/* Add all of @from, which is empty afterwards. Return: 0 or -ENOMEM (then @from stays). */
int reads_move(struct reads *r, struct reads *from);
/* Forget those of one session: it is gone, its signals are poisoned. */
void reads_forget(struct reads *r, const struct backend_signals *signals);
/* Forget all. Safe to call twice. */
void reads_deinit(struct reads *r);

#endif
