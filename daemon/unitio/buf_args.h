/* Arguments that several ops of this room have. */
#ifndef SHARDD_UNITIO_BUF_ARGS_H
#define SHARDD_UNITIO_BUF_ARGS_H

#include "op/op.h"

struct buf_args {
	uint64_t offset, count, bytes;
	enum dtype dtype;
	enum reduce_op op;
	uint32_t root;
};

static inline struct buf_args *buf_args(const struct op *op)
{
	_Static_assert(sizeof(struct buf_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

#endif
