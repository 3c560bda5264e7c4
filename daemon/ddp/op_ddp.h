/* What the op_ddp_*.c files share. Loop thread only. */
#ifndef SHARDD_DDP_OP_DDP_H
#define SHARDD_DDP_OP_DDP_H

#include "op/op.h"

/* None of these ops has a move in the guard's table: a ddp has units that are each in a pass of
 * their own, and what fits of its own passes is for job/ddp_pass.c to say. Those of its
 * units end without a Reduce. */

/* Decode: find ddp @id and the rank's place in it. Return: 0 or a fault code. */
int op_ddp_take(struct op *op, uint32_t id, struct fault *f);
/* The same for a list of its tensors. @field: its name. */
int op_ddp_check_list(const struct op *op, const uint32_t *list, size_t n, const char *field,
		      struct fault *f);
/* In enter: the op comes after what was launched for its rank, and before what will be. */
void op_ddp_follow(struct op *op);
/* Launch every bucket of @op's rank that can go, before @op. */
void op_ddp_launch(struct op *op);

#endif
