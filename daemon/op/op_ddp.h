/* What the op_ddp_*.c files share. Loop thread only. */
#ifndef SHARDD_OP_OP_DDP_H
#define SHARDD_OP_OP_DDP_H

#include "op/op_impl.h"

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

/* By how many ranks the gradients of a collective are divided. */
uint32_t op_ddp_divide_by(const struct coll *c);
/* Tensor @tensor of @d was reduced by @c. Return: whether its unit, all of whose tensors have been
 * in this pass, goes on as after its last Reduce. */
bool op_ddp_unit_is_whole(const struct coll *c, struct ddp *d, uint32_t tensor);
/* Bucket @bucket is over: after the last one of a pass, those who had no more inputs have
 * passed it too, so that they have the same buckets afterwards. */
void op_ddp_shadows_passed(const struct coll *c, struct ddp *d, uint32_t bucket);
/* Rows of tensor @tensor of @u: are they in range, and is it one that has rows? Return: 0 or a
 * fault code. */
int op_sparse_check(const struct unit *u, uint32_t tensor, const int64_t *rows, size_t n,
		    struct fault *f);

extern const struct op_type op_ddp_bucket, op_sparse;

#endif
