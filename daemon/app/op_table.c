#include "app/op_table.h"

const struct op_type *const op_table[] = {
	&op_init,         &op_gather,       &op_release,
	&op_gradient,     &op_alloc_buffer, &op_free_buffer,
	&op_reduce,       &op_all_reduce,   &op_broadcast,
	&op_barrier,      &op_clip,         &op_step,
	&op_commit,       &op_begin_pass,   &op_end_pass,
	&op_set_reshard,  &op_unit_buffers, &op_broadcast_buffers,
	&op_summon,       &op_return,       &op_convert,
	&op_accumulate,   &op_set_prefetch, &op_clip_value,
	&op_unscale,      &op_plan,         &op_next_shard,
	&op_shard_done,   &op_ddp_create,   &op_ddp_forward,
	&op_ddp_backward, &op_ddp_ready,    &op_ddp_finish,
	&op_ddp_bucket,   &op_verify,       &op_sparse,
	&op_join_uneven,  &op_set_factors,  NULL,
};
