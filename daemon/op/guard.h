/*
 * The guard of the passes: a rank that trains uses its guarded units in the order of
 * job/passes.h. Loop thread only.
 */
#ifndef SHARDD_OP_GUARD_H
#define SHARDD_OP_GUARD_H

#include "op/op.h"

/* Is @u there, or was it dropped since @op was taken in? Return: 0 or a fault code. */
int guard_check_there(const struct op *op, const struct unit *u, struct fault *f);
/* The op is active: is it allowed in the present state? Changes nothing. Return: 0 or a fault
 * code. */
int guard_check(struct op *op, struct fault *f);
/* As if @op were @move, which is not allowed now. Return: the fault's code. */
int guard_refuse(const struct op *op, enum pass_move move, struct fault *f);
/* It has ended well. */
void guard_done(struct op *op);

#endif
