/* The ops of this room: reductions of gradients. */
#ifndef SHARDD_REDUCE_OPS_H
#define SHARDD_REDUCE_OPS_H

#include "op/op.h"

extern const struct op_type op_gradient;
extern const struct op_type op_reduce;
extern const struct op_type op_accumulate;
extern const struct op_type op_sparse;
extern const struct op_type op_set_factors;

#endif
