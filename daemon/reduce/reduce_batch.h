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

/* @c has its run, scratch, and room for launches: it goes on at REDUCE_BETWEEN or REDUCE_ARRIVE, behind
 * those that were added before. Return: RES_WAIT. */
enum res reduce_batch_add(struct coll *c);

/* Slot op_type.coll_arrived of Reduce. */
bool reduce_batch_arrived(struct coll *c);

#endif
