/*
 * The prepared step. Loop thread only.
 */
#ifndef SHARDD_STEP_APPLY_H
#define SHARDD_STEP_APPLY_H

#include "work/coll.h"

/* Is the prepared step (if any) applied, and no optimizer runs in backward? If not: begin to
 * apply it, put @p into the list of those that wait, to be resumed. Return: true if there is
 * nothing to wait for. */
bool apply_ensure_then(struct job *job, struct parked *p, void (*resume)(struct parked *p));

/* The same for an op on one unit that looks after what runs in backward itself: only for the
 * prepared step. */
bool apply_ensure_step_then(struct job *job, struct parked *p, void (*resume)(struct parked *p));

/* The same for collectives: over at the next tick, which does not ask again. A step that was
 * prepared meanwhile is not this one's to apply. */
enum res apply_wait_coll(struct coll *c);
enum res apply_wait_step_coll(struct coll *c);

/* An optimizer that ran in backward has ended: who waited goes on. */
void apply_go_on(struct job *job);

/* The device failed to change parameters as a whole: the job is TORN. */
void apply_failed(struct job *job);

#endif
