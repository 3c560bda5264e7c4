/* The ops of this room: what fills, reads and changes units and buffers. */
#ifndef SHARDD_UNITIO_OPS_H
#define SHARDD_UNITIO_OPS_H

#include "op/op.h"

extern const struct op_type op_init;
extern const struct op_type op_alloc_buffer;
extern const struct op_type op_free_buffer;
extern const struct op_type op_read_bytes;
extern const struct op_type op_write_bytes;
extern const struct op_type op_all_reduce;
extern const struct op_type op_broadcast;
extern const struct op_type op_barrier;
extern const struct op_type op_unit_buffers;
extern const struct op_type op_broadcast_buffers;
extern const struct op_type op_summon;
extern const struct op_type op_return;
extern const struct op_type op_convert;
extern const struct op_type op_copy_shard;
extern const struct op_type op_verify;

#endif
