/* ClipGradValue: every element of the gradient shards of a group's units into [-v, v]; a NaN
 * stays what it is, as in PyTorch. */
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "op/op_list.h"
#include "step/shards.h"
#include "unit/optim.h"
#include "work/coll.h"
#include "shardd.pb-c.h"
#include "step/clip.h"

static int op_clip_value_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ClipGradValueRequest *r = (const Shardd__V1__ClipGradValueRequest *)msg;

	op->touches = TOUCH_GRADS;
	clip_args(op)->value = r->value;
	if (!(r->value >= 0))
		return fault_set(f, FAULT_INVALID, "value",
				 "value is %g; it must be 0 or a positive number", r->value);
	if (op_take_group(op, r->group, f))
		return f->code;
	return shards_take_units(op, r->units, r->n_units, f);
}

static int op_clip_value_check(struct op *op, struct fault *f)
{
	if (op_check_not_torn(op, f) ||
	    op_check_all_there(op, op->owned, clip_args(op)->n_units, f))
		return f->code;
	op_print(op, "ClipGradValue to %.17g (units %zu)", clip_args(op)->value,
		 clip_args(op)->n_units);
	memcpy(&op->entry.print.words[2], &clip_args(op)->value, sizeof(double));
	op->entry.print.words[3] = shards_word(op);
	return 0;
}

static void op_clip_value_clamp_part(struct coll *c, unsigned d)
{
	float value = (float)clip_args(c->ops[0])->value;

	for (uint32_t i = 0; i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];

		if (!shards_take_part(c, u) || !u->parts[d].n)
			continue;
		CHECK(u->parts[d].device == c->parts[d].device);
		coll_launch(&c->parts[d], LAUNCH_CLAMP, u->parts[d].n)->clamp =
			(struct k_clamp){ optim_at(&u->parts[d].grads, 0), -value, value };
	}
}

static enum res op_clip_value_clamp(struct coll *c)
{
	RES_TRY(coll_need_launches(c, c->job->n_units));
	for (unsigned d = 0; d < c->n_parts; d++)
		op_clip_value_clamp_part(c, d);
	return coll_kernels(c);
}

enum op_clip_value_stage { CLIP_VALUE_APPLY, CLIP_VALUE_CLAMP, CLIP_VALUE_DONE };

static enum res op_clip_value_tick(struct coll *c)
{
	switch ((enum op_clip_value_stage)c->stage) {
	case CLIP_VALUE_APPLY:
		c->stage = CLIP_VALUE_CLAMP;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case CLIP_VALUE_CLAMP:
		RES_TRY(coll_check_epoch(c, true));
		if (shards_check_whole(c, c->fault))
			return RES_FAILED;
		c->stage = CLIP_VALUE_DONE;
		return op_clip_value_clamp(c);
	case CLIP_VALUE_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_clip_value = {
	.name = "ClipGradValue",
	.collective = true,
	.request = &shardd__v1__clip_grad_value_request__descriptor,
	.decode = op_clip_value_decode,
	.check = op_clip_value_check,
	.coll_tick = op_clip_value_tick,
	.reply = &shardd__v1__clip_grad_value_response__descriptor,
	.move = MOVE_NEEDS_IDLE,
};
