/* ClipGradValue: every element of the gradient shards of a group's units into [-v, v]; a NaN
 * stays what it is, as in PyTorch. */
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "step/ops.h"
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
				 "value is %g: 0 or a positive number is allowed", r->value);
	if (op_take_group(op, r->group, f))
		return f->code;
	return shards_take_units(op, r->units, r->n_units, f);
}

static int op_clip_value_check(struct op *op, struct fault *f)
{
	if (op_check_not_torn(op, f))
		return f->code;
	op_print(op, "ClipGradValue to %.17g (units %zu)", clip_args(op)->value,
		 clip_args(op)->n_units);
	memcpy(&op->entry.print.words[2], &clip_args(op)->value, sizeof(double));
	op->entry.print.words[3] = shards_word(op);
	return 0;
}

static void op_clip_value_done(struct coll *c)
{
	coll_end(c, NULL);
}

static void op_clip_value_clamp_part(struct coll *c, unsigned d)
{
	float value = (float)clip_args(c->ops[0])->value;

	for (uint32_t i = 0; i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];

		if (shards_take_part(c, u) && u->parts[d].n)
			coll_kop(&c->parts[d], KOP_CLAMP, u->parts[d].n)->clamp =
				(struct k_clamp){ optim_at(&u->parts[d].grads, 0), -value, value };
	}
}

static void op_clip_value_start(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);
	struct fault f = FAULT_NULL;

	if (coll_overtaken_then(c, true))
		return;
	if (shards_check_whole(c, &f)) {
		coll_end(c, &f);
		return;
	}
	if (!coll_need_kops_then(c, c->job->n_units))
		return;
	for (unsigned d = 0; d < c->n_parts; d++)
		op_clip_value_clamp_part(c, d);
	coll_kernels_then(c, op_clip_value_done);
}

static void op_clip_value_run(struct coll *c)
{
	if (apply_ensure_then(c->job, &c->parked, op_clip_value_start))
		op_clip_value_start(&c->parked);
}

static void op_clip_value_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ClipGradValueReply reply = SHARDD__V1__CLIP_GRAD_VALUE_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_clip_value = {
	.name = "ClipGradValue",
	.collective = true,
	.request = &shardd__v1__clip_grad_value_request__descriptor,
	.decode = op_clip_value_decode,
	.check = op_clip_value_check,
	.run = op_clip_value_run,
	.encode = op_clip_value_encode,
	.move = MOVE_NEEDS_IDLE,
};
