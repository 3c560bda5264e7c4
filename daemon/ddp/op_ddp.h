/* What the op_ddp_*.c files share. Loop thread only. */
#ifndef SHARDD_DDP_OP_DDP_H
#define SHARDD_DDP_OP_DDP_H

#include "op/op.h"

struct ddp_args {
	struct ddp *d;
	struct ddp_rank *rank;
	const uint32_t *first, *second; /* the request's; valid until done */
	size_t n_first, n_second;
	struct ddp_rows rows;
	bool has_rows;
	bool holds;      /* its rank waits for its answer */
	uint32_t bucket; /* DdpBucket */
	uint32_t known;  /* DdpForward */
	unsigned layout;
};

/* A bucket; no method: DdpReady submits it. */
extern const struct op_type op_ddp_bucket;

static inline struct ddp_args *ddp_args(const struct op *op)
{
	_Static_assert(sizeof(struct ddp_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

/* None of these ops has a move in the guard's table: a ddp has units that are each in a pass of
 * their own, and what fits of its own passes is for job/ddp_pass.c to say. Those of its
 * units end without a Reduce. */

/* Decode: find ddp @id and the rank's place in it. Return: 0 or a fault code. */
int op_ddp_take(struct op *op, uint32_t id, struct fault *f);
/* In enter: the op comes after what was launched for its rank, and before what will be. */
void op_ddp_follow(struct op *op);
/* Launch every bucket of @op's rank that can go, before @op. */
void op_ddp_launch(struct op *op);

#endif
