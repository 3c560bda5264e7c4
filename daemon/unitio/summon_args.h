/* Arguments that several ops of this room have. */
#ifndef SHARDD_UNITIO_SUMMON_ARGS_H
#define SHARDD_UNITIO_SUMMON_ARGS_H

#include "op/op.h"

struct summon_args {
	uint32_t state; /* SummonFull: 0: the parameters */
	bool write;     /* ReturnFull */
	bool has_steps;
	uint64_t steps;
	const uint64_t *tensor_steps; /* the request's; valid until done */
	size_t n_tensor_steps;        /* as many as tensors, or 0 */
};

static inline struct summon_args *summon_args(const struct op *op)
{
	_Static_assert(sizeof(struct summon_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

#endif
