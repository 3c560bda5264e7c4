/*
 * Unscale: undo the scaling of the loss in the gradient shards of a group, and say whether
 * one of them, of any rank, held an infinity or NaN. Step may ask for that (skip_if_found).
 * What the scale grows and shrinks by is the trainer's.
 */
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "op/op_list.h"
#include "step/shards.h"
#include "work/coll.h"
#include "shardd.pb-c.h"
#include "step/clip.h"

static int op_unscale_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__UnscaleRequest *r = (const Shardd__V1__UnscaleRequest *)msg;

	op->touches = TOUCH_GRADS;
	clip_args(op)->value = r->inv_scale;
	if (!(r->inv_scale > 0) || isinf(r->inv_scale))
		return fault_set(f, FAULT_INVALID, "inv_scale",
				 "inv_scale is %g; it must be a positive number", r->inv_scale);
	return op_take_group(op, r->group, f);
}

static int op_unscale_check(struct op *op, struct fault *f)
{
	if (op_check_not_torn(op, f))
		return f->code;
	op_print(op, "Unscale by %.17g", clip_args(op)->value);
	memcpy(&op->entry.print.words[2], &clip_args(op)->value, sizeof(double));
	return 0;
}

static int op_unscale_check_once(const struct coll *c, struct fault *f)
{
	if (shards_check_whole(c, f))
		return f->code;
	if (!c->group->unscaled)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "the gradients of group '%.64s' were unscaled since the last step already",
			 c->group->rec->name);
}

static void op_unscale_answer(struct coll *c)
{
	CHECK(!c->group->unscaled); /* checked when it began; only a collective of the group sets it */
	c->group->unscaled = c->ops[0]->m->epoch == c->job->rec->epoch;
	for (uint32_t i = 0; i < c->n; i++)
		shards_outcome(c->ops[i])->found_inf = c->group->found_inf;
}

enum op_unscale_stage { UNSCALE_APPLY, UNSCALE_BEGIN, UNSCALE_MULTIPLY };

static enum res op_unscale_tick(struct coll *c)
{
	switch ((enum op_unscale_stage)c->stage) {
	case UNSCALE_APPLY:
		c->stage = UNSCALE_BEGIN;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case UNSCALE_BEGIN:
		RES_TRY(coll_check_epoch(c, true));
		if (op_unscale_check_once(c, c->fault))
			return RES_FAILED;
		RES_TRY(coll_need_scratch(c, COLL_FOUND_INF, SHARDS_FOUND_BYTES));
		shards_of(c)->factor = (float)clip_args(c->ops[0])->value;
		c->stage = UNSCALE_MULTIPLY;
		fallthrough;
	case UNSCALE_MULTIPLY:
		RES_TRY(shards_unscale_tick(c));
		op_unscale_answer(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void op_unscale_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__UnscaleResponse reply = SHARDD__V1__UNSCALE_RESPONSE__INIT;

	reply.found_inf = shards_outcome(op)->found_inf;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_unscale = {
	.name = "Unscale",
	.collective = true,
	.request = &shardd__v1__unscale_request__descriptor,
	.decode = op_unscale_decode,
	.check = op_unscale_check,
	.coll_tick = op_unscale_tick,
	.coll_bytes = sizeof(struct shards_state),
	.coll_free = shards_free,
	.encode = op_unscale_encode,
	.move = MOVE_NEEDS_IDLE,
};
