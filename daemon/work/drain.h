/*
 * Before parameters are written: waiting for those who read or write them. Loop thread only.
 */
#ifndef SHARDD_WORK_DRAIN_H
#define SHARDD_WORK_DRAIN_H

#include "work/coll.h"

/* Before parameters are written: is everything over that reads or writes them, on all devices
 * of the job, also in trainers' streams that have said how far they must come? If not, @w is
 * resumed when it is, and does not ask again. Only devices with queues of their own have to be
 * asked; gathers that nobody has asked for are waited for anywhere. RES_FAILED: no memory. */
enum res drain_wait(struct job *job, struct waiter *w);
/* The same for a collective. */
enum res drain_coll(struct coll *c);

/* No gather that nobody has asked for is under way any more: those that wait go on. */
void drain_go_on(struct job *job);

/* @c is about to change parameters, or will lead to that: may it, or do readers hold them? Asked
 * again at the next tick. From RES_DONE on until its end none will. */
enum res drain_may_write(struct coll *c, enum job_change what);

/* Before memory of units that @c was allowed to write goes away: is none of it being copied, for
 * another unit that was about to change meanwhile? Asked again at the next tick. */
enum res drain_may_free(struct coll *c);

#endif
