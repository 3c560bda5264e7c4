/* Every op, one line each. */
#ifndef SHARDD_OP_TABLE_H
#define SHARDD_OP_TABLE_H

#include "op/op.h"

extern const struct op_type op_init, op_gather, op_release, op_gradient, op_alloc_buffer,
	op_free_buffer, op_reduce, op_all_reduce, op_broadcast, op_barrier, op_clip, op_step,
	op_commit, op_begin_pass, op_end_pass, op_set_reshard, op_unit_buffers,
	op_broadcast_buffers, op_summon, op_return, op_convert;

#endif
