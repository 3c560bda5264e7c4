/* What Gather and BeginPass share (op_gather.c). Loop thread only. */
#ifndef SHARDD_GATHER_GATHER_H
#define SHARDD_GATHER_GATHER_H

#include "op/op.h"

struct pass_args {
	enum pass_kind kind; /* 0: Gather */
	bool sync;
	bool asked; /* the next is known */
	bool there; /* a copy is, or is on its way, or none is needed */
};

static inline struct pass_args *pass_args(const struct op *op)
{
	_Static_assert(sizeof(struct pass_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

/* May this rank gather op->unit? Return: 0 or a fault code. */
int gather_check(struct op *op, struct fault *f);
/* Do it: ends the op, now or later, with its place as the result. The reference that a BeginPass
 * takes is noted as the passes' (member_unit.held); there is one at most. */
enum res gather_start(struct op *op);

/* The copy that @op waited for is there, or came to nothing (status of a backend or an engine).
 * Ends the op. */
void gather_answer(struct op *op, int status);

#endif
