/*
 * The life of an op, for the files that implement ops. Loop thread only.
 */
#ifndef SHARDD_OP_OP_RUN_H
#define SHARDD_OP_OP_RUN_H

#include "op/op.h"

/* Move op->state. CHECKs that the move is in the table (op.c, docs/states.md). */
void op_state_move(struct op *op, enum op_state to);

/* End an op: with op->fault as it stands. Its memory is gone afterwards. */
void op_end(struct op *op);

/* It runs from here on: cannot be cancelled, counts as work of the job. */
void op_begin_run(struct op *op);

/* It waits for @c, and is started again then. Return: RES_WAIT. */
enum res op_wait(struct op *op, struct condition *c);

/* In @type's enter: have the daemon itself do an op for @by's rank, before @by: with its
 * deadline and its way of answering. @fill sets args, group, buffer and streams; @arg is
 * handed to it. @done is called when it is over. Return: 0 or -ENOMEM. */
int op_spawn(struct op *by, const struct op_type *type, void (*fill)(struct op *op, void *arg),
	     void *arg, op_done_cb done, void *userdata);

/* After op_spawn of a collective failed, for want of @why: it is over for this rank, and its
 * peers, who would wait for it, are told. */
void op_give_up(struct op *by, const struct op_type *type, struct group *g,
		const struct fault *why);

/* op.c's: an op of nobody, in place of @op. Return: NULL without memory. */
struct op *op_new_surrogate(struct op *join, struct op *of);
void op_announce(struct op *op);

#endif
