/*
 * Reductions of small units over several devices, as many as wait, run as one: their kernels as one task of each
 * device, and what goes between devices as one collective. Nothing waits for others to come:
 * while a batch runs what arrives forms the next. The bits are those of each by itself.
 * Loop thread only.
 */
#ifndef SHARDD_REDUCE_REDUCE_BATCH_H
#define SHARDD_REDUCE_REDUCE_BATCH_H

#include "work/coll.h"

/* Has it several devices, is it small enough (reduce_batch_bytes), and is all of it to be
 * done now? */
bool reduce_batch_takes(const struct coll *c);

/* What becomes of a collective of a batch: @rest: its kernels have run, devices are to talk;
 * @done: all is over. */
struct reduce_batch_ops {
	void (*rest)(struct coll *c);
	void (*done)(struct coll *c);
};

/* @c has its run, scratch, and room for kops. In the order of these calls. */
void reduce_batch_add(struct coll *c, const struct reduce_batch_ops *ops);

#endif
