/*
 * The life of an op: how it is submitted and cancelled, for the layers above, and how it runs and ends,
 * for the files that implement ops. Loop thread only.
 */
#ifndef SHARDD_OP_OP_RUN_H
#define SHARDD_OP_OP_RUN_H

#include "op/op.h"

/* Move op->state. CHECKs that the move is in the table (op_run.c, docs/states.md). */
void op_state_move(struct op *op, enum op_state to);

/* Take a request in. On return 0 the op is on its way, or over: @done has been or
 * will be called. @deadline_us: of the caller's, 0: none.
 * Return: 0, or a fault code (@done will not be called, nothing was made). */
int op_submit(struct member *m, const struct op_type *type, const ProtobufCMessage *request,
	      uint64_t deadline_us, op_done_cb done, void *userdata, struct op **ret,
	      struct fault *f);

/* The caller has given up. An op that waits ends with @code, for its peers too; one
 * that runs ends as it would have. */
void op_cancel(struct op *op, enum fault_code code, const char *why);

/* HELD, DEPS... Return: static string. */
const char *op_state_name(enum op_state s);

/* Slots for job_ops. */
void op_abort_all(struct job *job, const struct fault *fault);
void op_failed(struct match_entry *entry, const struct fault *fault, void *userdata);

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

/* What ranks that have no more inputs (JoinUneven) mean for the collectives of their group: the slot
 * group.joined, which the first of them fills (op/uneven.c). */
struct op_joined_ops {
	/* @op gets a number: is it refused? Return: 0 or op->fault.code. */
	int (*check)(struct op *op);
	/* It has its number. May fail it by op->fault. */
	void (*number)(struct op *op);
	/* It is about to be announced. Return: 0, or op->fault.code: it fails instead. */
	int (*announce)(struct op *op);
	/* The collective at @number has failed: ranks that have joined have no part in it. */
	void (*skip)(struct group *g, uint64_t number);
	/* @op, which had @number, is refused with @fault. It may be freed already. */
	void (*refuse)(struct group *g, uint64_t number, const struct op *op,
		       const struct fault *fault);
	/* (optional) A surrogate in @g is over, and freed. */
	void (*over)(struct group *g);
};

/* An op of nobody, in the place of @join's rank: the equal of @of. Return: NULL without memory. */
struct op *op_new_surrogate(struct op *join, struct op *of);
/* The op of a peer on another node, as @a says, for surrogates to be made from: it takes part in nothing,
 * and is freed by op_free_peer. Return: NULL: @f. */
struct op *op_new_peer(struct op *join, const struct op_type *type, const struct asked *a,
		       struct fault *f);
void op_free_peer(struct op *op);
/* Announce a surrogate that was made later than the op of a peer. */
void op_announce(struct op *op);

#endif
