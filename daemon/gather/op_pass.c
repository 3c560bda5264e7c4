/*
 * BeginPass and EndPass: a rank uses a guarded unit for one pass of training. Its parameters
 * are gathered at the beginning; whether they are let go of at the end is the policy's to say.
 */
#include <errno.h>

#include "copies/hold.h"
#include "core/check.h"
#include "gather/ahead.h"
#include "gather/gather.h"
#include "op/op_list.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "shardd.pb-c.h"

static int op_pass_take_pass(struct op *op, uint32_t unit, int pass, struct fault *f)
{
	/* after this unit's reductions too: they change the state */
	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	pass_args(op)->kind = (enum pass_kind)pass;
	if (pass != PASS_KIND_FORWARD && pass != PASS_KIND_BACKWARD)
		return fault_set(f, FAULT_INVALID, "pass",
				 "pass is %d; it must be FORWARD or BACKWARD", pass);
	return op_take_unit(op, unit, f);
}

/* ------------------------------------------------------------------ BeginPass */

static int op_pass_decode_begin(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__BeginPassRequest *r = (const Shardd__V1__BeginPassRequest *)msg;

	if (op_pass_take_pass(op, r->unit, (int)r->pass, f))
		return f->code;
	op->move =
		pass_args(op)->kind == PASS_KIND_FORWARD ? MOVE_BEGIN_FORWARD : MOVE_BEGIN_BACKWARD;
	return 0;
}

static void op_pass_encode_begin(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__BeginPassResponse reply = SHARDD__V1__BEGIN_PASS_RESPONSE__INIT;
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	op_place(op, &place, handle);
	reply.place = &place;
	reply.copied = op->result.copied;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

/* Which passes of its ddps the unit has seen when this one begins. */
static int op_pass_begin_start(struct op *op, struct fault *f)
{
	(void)f;
	CHECK(op->unit->rec->guarded); /* the guard has refused others */
	if (op->move == MOVE_BEGIN_BACKWARD)
		member_unit_find(op->m, op->unit)->ddp_passes =
			ddp_unit_passes(op->m->job, op->unit, op->m->rank);
	return 0;
}

static const char *op_pass_detail(const struct op *op)
{
	return pass_args(op)->kind == PASS_KIND_FORWARD ? "(FORWARD)" : "(BACKWARD)";
}

const struct op_type op_begin_pass = {
	.name = "BeginPass",
	.request = &shardd__v1__begin_pass_request__descriptor,
	.decode = op_pass_decode_begin,
	.check = gather_check,
	.tick = gather_start,
	.encode = op_pass_encode_begin,
	.begin = op_pass_begin_start,
	.is_pass = true,
	.detail = op_pass_detail,
	.copied = gather_answer,
};

/* -------------------------------------------------------------------- EndPass */

/* Are there gradients that a pass with sync reduces? */
static bool op_pass_is_reduced(const struct op *op)
{
	const state_unit *rec = op->unit->rec;
	bool trainable = false;

	for (size_t i = 0; i < rec->n_tensors; i++)
		trainable = trainable || !rec->tensors[i]->frozen;
	return trainable && pass_args(op)->sync && pass_args(op)->kind == PASS_KIND_BACKWARD;
}

/* Replicated units may be reduced in buckets, which is known when it is the op's turn. */
static enum pass_move op_pass_end_of(const struct op *op)
{
	if (pass_args(op)->kind == PASS_KIND_FORWARD)
		return MOVE_END_FORWARD;
	return op_pass_is_reduced(op) && op->unit->rec->strategy != STRATEGY_REPLICATE
		       ? MOVE_END_BACKWARD
		       : MOVE_END_WITHOUT;
}

static int op_pass_decode_end(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__EndPassRequest *r = (const Shardd__V1__EndPassRequest *)msg;

	if (op_pass_take_pass(op, r->unit, (int)r->pass, f))
		return f->code;
	pass_args(op)->sync = r->sync;
	op->move = op_pass_end_of(op);
	return 0;
}

/* Has a ddp got the gradients of this pass, or have they been reduced by another one since? */
static bool op_pass_is_in_buckets(const struct op *op, const struct member_unit *mu)
{
	const struct job *job = op->m->job;

	return ddp_unit_is_ready(job, op->unit, op->m->rank) ||
	       ddp_unit_passes(job, op->unit, op->m->rank) > mu->ddp_passes;
}

static int op_pass_check_end(struct op *op, struct fault *f)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);
	enum pass_state to;

	if (!op_pass_is_reduced(op) || op_pass_is_in_buckets(op, mu))
		return 0;
	if (!passes_move(mu->pass, MOVE_END_BACKWARD, &to))
		return guard_refuse(op, MOVE_END_BACKWARD, f);
	if (!mu->added)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "EndPass(BACKWARD): the gradients of unit '%.100s' were accumulated on "
			 "rank %u and not reduced: call Reduce, or end the pass without sync",
			 op->unit->rec->name, op->m->rank);
}

/* Forward that was computed again inside backward goes on with the same parameters. */
static bool op_pass_lets_go(const struct op *op)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	return mu->pass != PASS_FORWARD_IN_PRE &&
	       passes_let_go(op->unit->rec, hold_reshard(op), pass_args(op)->kind,
			     pass_args(op)->sync);
}

static enum res op_pass_start_end(struct op *op)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	CHECK(mu && mu->gathers >= mu->held); /* the guard has made it */
	op_begin_run(op);
	if (hold_note_reads(op) < 0) {
		fault_errno(&op->fault, -ENOMEM, "noting how long a unit is read");
		return RES_FAILED;
	}
	/* its parameters change now */
	if (op_pass_lets_go(op) || op->unit->step == UNIT_STEP_DUE || op->unit->shards_left)
		hold_let_go(op->m, op->unit);
	op->result.kept = mu->held;
	ahead_next(op);
	return RES_DONE;
}

static void op_pass_encode_end(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__EndPassResponse reply = SHARDD__V1__END_PASS_RESPONSE__INIT;

	reply.kept = op->result.kept;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_end_pass = {
	.name = "EndPass",
	.request = &shardd__v1__end_pass_request__descriptor,
	.decode = op_pass_decode_end,
	.check = op_pass_check_end,
	.tick = op_pass_start_end,
	.encode = op_pass_encode_end,
	.is_pass = true,
	.detail = op_pass_detail,
};
