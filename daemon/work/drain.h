/*
 * Before parameters are written: waiting for those who read or write them. Loop thread only.
 */
#ifndef SHARDD_WORK_DRAIN_H
#define SHARDD_WORK_DRAIN_H

#include "work/coll.h"

/* Before parameters are written: is everything over that reads or writes them, on all
 * devices of the job, also in trainers' streams that have said how far they must come? If
 * not, @resume is called with @p then. Only devices with queues of their own have to be
 * asked; gathers that nobody has asked for are waited for anywhere. Return: 0 (nothing to
 * wait for), DRAIN_E_WAIT, or -ENOMEM. */
enum { DRAIN_E_WAIT = 1 };
enum res drain_wait(struct job *job, struct waiter *w);
int drain_ensure_then(struct job *job, struct waiter *p, void (*resume)(struct waiter *p));

/* No gather that nobody has asked for is under way any more: those that wait go on. */
void drain_go_on(struct job *job);

/* @c is about to change parameters, or will lead to that: may it, or do readers hold them? If not,
 * @again is called with c->waiter, and asks again. From true on until its end none will. */
bool coll_may_write_then(struct coll *c, void (*again)(struct waiter *p));

/* The same for ticks: drain_coll once for each write, its stage ends with it. */
enum res drain_coll(struct coll *c);
enum res coll_may_write(struct coll *c);

#endif
