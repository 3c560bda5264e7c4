/* The ops of this room: clipping, steps and commits. */
#ifndef SHARDD_STEP_OPS_H
#define SHARDD_STEP_OPS_H

#include "op/op.h"

extern const struct op_type op_clip;
extern const struct op_type op_step;
extern const struct op_type op_commit;
extern const struct op_type op_clip_value;
extern const struct op_type op_unscale;
extern const struct op_type op_drop;
extern const struct op_type op_plan;
extern const struct op_type op_next_shard;
extern const struct op_type op_shard_done;

#endif
