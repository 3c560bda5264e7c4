/* Every op, one line each. */
#ifndef SHARDD_OP_TABLE_H
#define SHARDD_OP_TABLE_H

#include "op/op.h"

extern const struct op_type op_init;
extern const struct op_type op_gather;
extern const struct op_type op_release;
extern const struct op_type op_gradient;
extern const struct op_type op_alloc_buffer;
extern const struct op_type op_free_buffer;
extern const struct op_type op_reduce;
extern const struct op_type op_all_reduce;
extern const struct op_type op_broadcast;
extern const struct op_type op_barrier;
extern const struct op_type op_clip;
extern const struct op_type op_step;
extern const struct op_type op_commit;
extern const struct op_type op_begin_pass;
extern const struct op_type op_end_pass;
extern const struct op_type op_set_reshard;
extern const struct op_type op_unit_buffers;
extern const struct op_type op_broadcast_buffers;
extern const struct op_type op_summon;
extern const struct op_type op_return;
extern const struct op_type op_convert;
extern const struct op_type op_accumulate;
extern const struct op_type op_set_prefetch;
extern const struct op_type op_clip_value;
extern const struct op_type op_unscale;
extern const struct op_type op_plan;
extern const struct op_type op_next_shard;
extern const struct op_type op_shard_done;
extern const struct op_type op_ddp_create;
extern const struct op_type op_ddp_forward;
extern const struct op_type op_ddp_backward;
extern const struct op_type op_ddp_ready;
extern const struct op_type op_ddp_finish;
extern const struct op_type op_ddp_bucket;
extern const struct op_type op_verify;
extern const struct op_type op_sparse;
extern const struct op_type op_join_uneven;
extern const struct op_type op_set_factors;

#endif
