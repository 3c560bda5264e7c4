/* The ops of this room: buckets of DDP, and uneven inputs. */
#ifndef SHARDD_DDP_OPS_H
#define SHARDD_DDP_OPS_H

#include "op/op.h"

extern const struct op_type op_ddp_create;
extern const struct op_type op_ddp_forward;
extern const struct op_type op_ddp_backward;
extern const struct op_type op_ddp_ready;
extern const struct op_type op_ddp_finish;
extern const struct op_type op_ddp_bucket;
extern const struct op_type op_join_uneven;

#endif
