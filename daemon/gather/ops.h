/* The ops of this room: Gather, release, passes, and their policies. */
#ifndef SHARDD_GATHER_OPS_H
#define SHARDD_GATHER_OPS_H

#include "op/op.h"

extern const struct op_type op_gather;
extern const struct op_type op_release;
extern const struct op_type op_begin_pass;
extern const struct op_type op_end_pass;
extern const struct op_type op_set_reshard;
extern const struct op_type op_set_prefetch;

#endif
