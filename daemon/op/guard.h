/*
 * The guard of the passes: a rank that trains uses its guarded units in the order of
 * job/passes.h, and the gathered copies come and go with the passes by the unit's reshard
 * policy. Loop thread only.
 */
#ifndef SHARDD_OP_GUARD_H
#define SHARDD_OP_GUARD_H

#include "op/op_impl.h"

/* The op is active: is it allowed in the present state? Changes nothing. Return: 0 or a fault
 * code. */
int guard_check(struct op *op, struct fault *f);
/* Its own checks have passed, too: a Reduce lets go of what its backward read.
 * Return: 0 or a fault code. */
int guard_begin(struct op *op, struct fault *f);
/* As if @op were @move, which is not allowed now. Return: the fault's code. */
int guard_refuse(const struct op *op, enum pass_move move, struct fault *f);
/* It has ended well. */
void guard_done(struct op *op);

/* The policy of @op's rank for its unit. */
enum unit_reshard guard_reshard(const struct op *op);
/* The passes' reference goes, if there is one. Its memory goes back to the pool when no rank
 * uses the copy and none is behind this one, which would only have it made again. */
void guard_let_go(struct member *m, struct unit *u);

/* Parameters of @u are about to change, and no rank is in a pass with it: what its policy made
 * ranks keep is let go of. */
void guard_drop(struct job *job, struct unit *u);
/* The same for all units of @group, before a step. */
void guard_step(struct job *job, uint32_t group);

#endif
