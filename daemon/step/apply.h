/*
 * The prepared step. Loop thread only.
 */
#ifndef SHARDD_STEP_APPLY_H
#define SHARDD_STEP_APPLY_H

#include "work/coll.h"

/* Is the prepared step (if any) applied, and no optimizer runs in backward? If not: begin to
 * apply it; @w waits. A waiter that is resumed and must not wait for a step that was prepared
 * meanwhile does not ask again. */
enum res apply_wait(struct job *job, struct waiter *w);

/* The same for an op on one unit that looks after what runs in backward itself: only for the
 * prepared step. */
enum res apply_wait_step(struct job *job, struct waiter *w);

/* All nodes have prepared the Step of the group with key @group and @number: it may be applied from here on. Also of
 * one that was applied by a commit. */
void apply_allow(struct job *job, uint64_t group, uint64_t number);
/* The same of whatever is prepared: its commit was decided. */
void apply_allow_all(struct job *job);
/* Make the launches of the prepared step, so that a successor could make them: the number of their redo task is @ret,
 * 0: there are none. Return: false: no successor can. */
bool apply_make_ready(struct job *job, uint64_t *ret);
/* The prepared step, if any, never was. */
void apply_drop_prepared(struct job *job);

/* An optimizer that ran in backward has ended: who waited goes on. */
void apply_go_on(struct job *job);

/* Is @u among the units of the step that is prepared? */
bool apply_takes_part(const struct job *job, const struct unit *u);
/* Does the Step that was just asked for step any unit? Not if all were stepped in backward. */
bool apply_has_units(const struct job *job);

/* The backward pass is noted as changing parameters: a rank that dies now leaves them torn. */
void apply_mark(struct job *job);

/* The device failed to change parameters as a whole: the job is TORN. */
void apply_failed(struct job *job);

#endif
