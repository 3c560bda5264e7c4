/*
 * References to the gathered copy of a unit: those of passes, and those that a reshard policy
 * keeps. Loop thread only.
 */
#ifndef SHARDD_COPIES_HOLD_H
#define SHARDD_COPIES_HOLD_H

#include "op/op.h"

/* The policy of @op's rank for its unit. */
enum unit_reshard hold_reshard(const struct op *op);
/* The passes' reference goes, if there is one. Its memory goes back to the pool when no rank
 * uses the copy and none is behind this one, which would only have it made again. */
void hold_let_go(struct member *m, struct unit *u);

/* Parameters of @u are about to change, and no rank is in a pass with it: what its policy made
 * ranks keep is let go of. */
void hold_drop(struct job *job, struct unit *u);
/* The same for all units of @group, before a step. */
void hold_step(struct job *job, uint32_t group);

/* The trainer's streams may read the op's unit until they come to the op's points. Return: 0 or
 * -ENOMEM (nothing was noted that matters). */
int hold_note_reads(struct op *op);

/* The trainer has computed what it hands over in this backward pass: it needs the parameters
 * no more. @sync: the pass's. Return: 0 or a fault code. */
int hold_end_use(struct op *op, bool sync, struct fault *f);

#endif
