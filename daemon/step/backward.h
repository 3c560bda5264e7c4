/*
 * Optimizers that run in backward. Loop thread only.
 */
#ifndef SHARDD_STEP_BACKWARD_H
#define SHARDD_STEP_BACKWARD_H

#include "step/gradient.h"
#include "work/coll.h"

/* A Reduce of c->unit begins, or a bucket of a ddp with gradients of it: is there memory for its
 * gradient shards, and what the plan needs, and may its parameters be written? Fails if the unit
 * has been reduced for the last time in this pass. */
enum res backward_prepare(struct coll *c);

/* The reduced gradient is in the shards: deal with it as the plan says. A tick of its own. */
enum res backward_arrive_tick(struct coll *c);

/* At the end of the Reduce, when unit.has_gradient says how it ended: step the unit, now or
 * when nobody has it gathered any more; or offer its shards to the trainers. */
void backward_reduced(struct coll *c);

/* A Reduce of c->unit that no rank has anything for. If it is the last of its pass, what those
 * before it have left is the trainers' now. Return: 0, or the code of @f: it cannot be the last. */
int backward_end_unused(struct coll *c, struct fault *f);

/* Somebody has let go of @u: step it if that is due. */
void backward_released(struct job *job, struct unit *u);
/* Before a gather: are the parameters of the pass before stepped? */
enum res backward_gather(struct op *op);

/* At what @u is stepped in backward: the plan's. */
const struct step_rates *backward_rates(const struct job *job, const struct unit *u);

/* From here on nobody begins to read the parameters of @u, until backward_let_go; its gradient
 * shards go back to their pool then. @stepped: it was, in the epoch that is. */
void backward_hold(struct job *job, struct unit *u);
void backward_let_go(struct job *job, struct unit *u, bool stepped);

/* In between: its parameters were changed. @whole: else the device has failed on the way. */
void backward_stepped(struct job *job, struct unit *u, bool whole);

#endif
