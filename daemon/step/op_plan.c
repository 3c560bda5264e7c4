/*
 * PlanBackward: what becomes of the gradients of a group's units as they arrive, until the
 * next Step. The one place where an optimizer in backward is told of what concerns all
 * gradients together: the norm, the scale of the loss, the learning rate. backward.c does it.
 */
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "step/clip.h"
#include "op/op_list.h"
#include "step/shards.h"
#include "step/step_settings.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

struct plan_args {
	struct pass_plan plan;
};

static inline struct plan_args *plan_args(const struct op *op)
{
	_Static_assert(sizeof(struct plan_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

typedef Shardd__V1__PlanBackwardRequest request;

static int op_plan_decode_clip(struct op *op, const Shardd__V1__PlanBackwardRequest__Clip *c,
			       struct fault *f)
{
	const struct clip_fields fields = { .max_norm = c->max_norm,
					    .norm_type = c->norm_type,
					    .profile = (uint32_t)c->profile,
					    .error_if_nonfinite = c->error_if_nonfinite,
					    .field_max_norm = "clip.max_norm",
					    .field_norm_type = "clip.norm_type",
					    .field_profile = "clip.profile" };

	plan_args(op)->plan.has_clip = true;
	return op_clip_take(&fields, &plan_args(op)->plan.clip, f);
}

static int op_plan_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const request *r = (const request *)msg;

	op->touches = TOUCH_GRADS;
	plan_args(op)->plan = (struct pass_plan){
		.set = true,
		.inv_scale = r->inv_scale,
		.rates = { .has_lr = r->optional_lr_case, .lr = r->lr },
	};
	if (!(r->inv_scale >= 0) || isinf(r->inv_scale))
		return fault_set(f, FAULT_INVALID, "inv_scale",
				 "inv_scale is %g; it must be 0 (none) or a positive number",
				 r->inv_scale);
	if (step_settings_check_lr(&plan_args(op)->plan.rates, f) ||
	    (r->clip && op_plan_decode_clip(op, r->clip, f)) || op_take_group(op, r->group, f))
		return f->code;
	return step_settings_take(op, r->settings, r->n_settings, &plan_args(op)->plan.rates, f);
}

static void op_plan_forget(struct op *op)
{
	step_rates_clear(&plan_args(op)->plan.rates);
}

static int op_plan_check(struct op *op, struct fault *f)
{
	const struct pass_plan *plan = &plan_args(op)->plan;
	uint64_t *words = op->entry.print.words;
	char text[STEP_SETTINGS_TEXT];

	if (op_check_not_torn(op, f))
		return f->code;
	op_print(op, "PlanBackward (max_norm %.9g, norm %g, profile %d, inv_scale %.9g)%s",
		 plan->clip.max_norm, plan->clip.type, plan->clip.profile, plan->inv_scale,
		 step_settings_text(&plan->rates, text));
	memcpy(&words[2], &plan->clip.max_norm, sizeof(double));
	memcpy(&words[3], &plan->clip.type, sizeof(double));
	words[4] = (uint64_t)plan->clip.profile | (uint64_t)plan->clip.error_if_nonfinite << 8 |
		   (uint64_t)plan->rates.has_lr << 9 | (uint64_t)plan->has_clip << 10;
	memcpy(&words[5], &plan->inv_scale, sizeof(double));
	memcpy(&words[6], &plan->rates.lr, sizeof(double));
	words[7] = settings_word(plan->rates.settings);
	return 0;
}

/* A gradient that is there already was not dealt with so. */
static int op_plan_check_begin(const struct coll *c, struct fault *f)
{
	if (shards_check_whole(c, f))
		return f->code;
	for (uint32_t i = 0; i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];

		if (u->has_gradient && u->rec->group == c->group->id)
			return fault_set(f, FAULT_STATE, NULL,
					 "unit '%.100s' has a gradient already: plan before the "
					 "first Reduce after a Step",
					 u->rec->name);
	}
	return 0;
}

enum op_plan_stage { PLAN_APPLY, PLAN_SET };

static enum res op_plan_tick(struct coll *c)
{
	switch ((enum op_plan_stage)c->stage) {
	case PLAN_APPLY:
		c->stage = PLAN_SET;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case PLAN_SET:
		RES_TRY(coll_check_epoch(c, true));
		if (op_plan_check_begin(c, c->fault))
			return RES_FAILED;
		group_set_plan(c->group, &plan_args(c->ops[0])->plan);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_plan = {
	.name = "PlanBackward",
	.collective = true,
	.request = &shardd__v1__plan_backward_request__descriptor,
	.decode = op_plan_decode,
	.check = op_plan_check,
	.coll_tick = op_plan_tick,
	.reply = &shardd__v1__plan_backward_response__descriptor,
	.move = MOVE_NEEDS_IDLE,
	.forget = op_plan_forget,
};
