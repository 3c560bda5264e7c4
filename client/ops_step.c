/* Clipping, loss scaling, optimizers in backward, the trainer's own optimizer. */
#include <stddef.h>
#include <stdlib.h>

#include "client_error.h"
#include "core/check.h"
#include "op.h"
#include "options.h"
#include "settings.h"

static_assert((int)SHARDD_CLIP_TORCH == SHARDD__V1__CLIP_PROFILE__CLIP_PROFILE_TORCH,
	      "clip profiles");

static void ops_step_clip_result(const ProtobufCMessage *m, struct shardd_result *ret,
				 const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->total_norm = ((const Shardd__V1__ClipGradNormResponse *)m)->total_norm;
}

static void ops_step_unscale_result(const ProtobufCMessage *m, struct shardd_result *ret,
				    const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->found_inf = ((const Shardd__V1__UnscaleResponse *)m)->found_inf;
}

static void ops_step_result(const ProtobufCMessage *m, struct shardd_result *ret,
			    const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__StepResponse *reply = (const Shardd__V1__StepResponse *)m;

	(void)ret_place;
	ret->skipped = reply->skipped;
	ret->found_inf = reply->found_inf;
	ret->has_total_norm = reply->optional_total_norm_case;
	ret->total_norm = reply->total_norm;
}

static void ops_step_next_shard_result(const ProtobufCMessage *m, struct shardd_result *ret,
				       const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__NextShardResponse *reply = (const Shardd__V1__NextShardResponse *)m;

	ret->unit = reply->unit;
	ret->elements = reply->elements;
	ret->gradient_offset = reply->gradient_offset;
	*ret_place = reply->place;
}

static int ops_step_next_shard_keep(struct shardd_client *c, const ProtobufCMessage *m,
				    struct shardd_error *err)
{
	return places_take_pieces(&c->places, (const Shardd__V1__NextShardResponse *)m, err);
}

OP(clip_grad_norm, ClipGradNorm, clip_grad_norm, ops_step_clip_result);
OP(clip_grad_value, ClipGradValue, clip_grad_value, NULL);
OP(unscale, Unscale, unscale, ops_step_unscale_result);
OP(step, Step, step, ops_step_result);
OP(copy_shard, CopyShard, copy_shard, NULL);
OP(drop_gradients, DropGradients, drop_gradients, NULL);
OP(plan_backward, PlanBackward, plan_backward, NULL);
OP_KEEPING(next_shard, NextShard, next_shard, ops_step_next_shard_result, ops_step_next_shard_keep);
OP(shard_done, ShardDone, shard_done, NULL);

/* -------------------------------------------------------------------- clipping */

static int ops_step_clip_check_units(const struct shardd_clip_options *o, struct shardd_error *err)
{
	if (!o->n_units || o->units)
		return 0;
	return error_set(err, SHARDD_INVALID_ARGUMENT, "options.units",
			 "units is NULL, but n_units is %zu", o->n_units);
}

/* By value: what belongs to the norm is refused. */
static int ops_step_clip_values(shardd_client *c, const struct shardd_clip_options *o,
				shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ClipGradValueRequest q = SHARDD__V1__CLIP_GRAD_VALUE_REQUEST__INIT;

	if (o->max_norm != 0 || o->norm_type != 0 || o->profile || o->error_if_nonfinite ||
	    o->whole_job)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.by_value",
				 "by_value is set together with max_norm, norm_type, profile, "
				 "error_if_nonfinite or whole_job, which it does not use: leave "
				 "them 0");
	q.group = o->group;
	q.value = o->value;
	q.units = (uint32_t *)o->units;
	q.n_units = o->n_units;
	return op_submit(c, &clip_grad_value, &q.base, t, err);
}

int shardd_submit_clip(shardd_client *c, const struct shardd_clip_options *options,
		       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ClipGradNormRequest q = SHARDD__V1__CLIP_GRAD_NORM_REQUEST__INIT;
	struct shardd_clip_options room;
	const struct shardd_clip_options *o = OPTIONS_READ(options, &room, err);
	int r = o ? ops_step_clip_check_units(o, err) : -SHARDD_INVALID_ARGUMENT;

	if (r < 0)
		return r;
	if (o->by_value)
		return ops_step_clip_values(c, o, t, err);
	if (o->value != 0)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.value",
				 "value is %g, but by_value is not set: set it, or leave value 0",
				 o->value);
	q.group = o->group;
	q.max_norm = o->max_norm;
	q.norm_type = o->norm_type;
	q.profile = (Shardd__V1__ClipProfile)o->profile;
	q.error_if_nonfinite = o->error_if_nonfinite;
	q.units = (uint32_t *)o->units;
	q.n_units = o->n_units;
	q.whole_job = o->whole_job;
	return op_submit(c, &clip_grad_norm, &q.base, t, err);
}

/* ---------------------------------------------------------------- loss scaling */

int shardd_submit_unscale(shardd_client *c, const struct shardd_unscale_options *options,
			  shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__UnscaleRequest q = SHARDD__V1__UNSCALE_REQUEST__INIT;
	struct shardd_unscale_options room;
	const struct shardd_unscale_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.group = o->group;
	q.inv_scale = o->inv_scale;
	return op_submit(c, &unscale, &q.base, t, err);
}

/* ------------------------------------------------------------------------ step */

static int ops_step_fill_mark(const struct shardd_step_options *o, Shardd__V1__StepRequest *q,
			      struct shardd_error *err)
{
	if (o->blob_bytes && !o->number)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "number",
				 "a blob is given, but not the number of the step: give both");
	if (o->blob_bytes && !o->blob)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "blob",
				 "the blob is NULL, and has %zu bytes", o->blob_bytes);
	if (o->number) {
		q->optional_step_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_STEP_STEP;
		q->step = *o->number;
	}
	q->blob = (ProtobufCBinaryData){ o->blob_bytes, (uint8_t *)o->blob };
	return 0;
}

int shardd_submit_step(shardd_client *c, const struct shardd_step_options *options,
		       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;
	struct shardd_step_options room;
	const struct shardd_step_options *o = OPTIONS_READ(options, &room, err);
	int r = o ? settings_out(o->settings, o->n_settings, &q.settings, err)
		  : -SHARDD_INVALID_ARGUMENT;

	if (r < 0)
		return r;
	q.group = o->group;
	if (o->lr) {
		q.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
		q.lr = *o->lr;
	}
	q.skip_if_found = o->skip_if_found;
	q.discard = o->discard;
	q.n_settings = o->n_settings;
	r = ops_step_fill_mark(o, &q, err);
	if (r == 0)
		r = op_submit(c, &step, &q.base, t, err);
	free(q.settings);
	return r;
}

/* ---------------------------------------------------------- shards and gradients */

static_assert((int)SHARDD_GRADIENT == SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_GRADIENT,
	      "arrays of shards");

int shardd_submit_copy_shard(shardd_client *c, const struct shardd_copy_shard_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__CopyShardRequest q = SHARDD__V1__COPY_SHARD_REQUEST__INIT;
	struct shardd_copy_shard_options room;
	const struct shardd_copy_shard_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	q.tensor = o->tensor;
	q.array = (Shardd__V1__CopyShardRequest__Array)o->array;
	q.write = o->write;
	q.buffer = o->buffer;
	q.offset = o->offset;
	q.elements = o->elements;
	return op_submit(c, &copy_shard, &q.base, t, err);
}

int shardd_submit_drop_gradients(shardd_client *c,
				 const struct shardd_drop_gradients_options *options,
				 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__DropGradientsRequest q = SHARDD__V1__DROP_GRADIENTS_REQUEST__INIT;
	struct shardd_drop_gradients_options room;
	const struct shardd_drop_gradients_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	q.tensors = (uint32_t *)o->tensors;
	q.n_tensors = o->n_tensors;
	return op_submit(c, &drop_gradients, &q.base, t, err);
}

/* ----------------------------------------------------------------- in backward */

static int ops_step_plan_clip(const struct shardd_clip_options *options,
			      Shardd__V1__PlanBackwardRequest__Clip *to, struct shardd_error *err)
{
	struct shardd_clip_options room;
	const struct shardd_clip_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (o->n_units || o->whole_job || o->group || o->by_value || o->value != 0)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "plan.clip.units",
				 "plan.clip names a group, units, the whole job or a value: leave "
				 "them out, a plan clips the norm of all units of its group");
	to->max_norm = o->max_norm;
	to->norm_type = o->norm_type;
	to->profile = (Shardd__V1__ClipProfile)o->profile;
	to->error_if_nonfinite = o->error_if_nonfinite;
	return 0;
}

int shardd_submit_plan_backward(shardd_client *c,
				const struct shardd_plan_backward_options *options,
				shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__PlanBackwardRequest q = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__PlanBackwardRequest__Clip clip = SHARDD__V1__PLAN_BACKWARD_REQUEST__CLIP__INIT;
	struct shardd_plan_backward_options room;
	const struct shardd_plan_backward_options *o = OPTIONS_READ(options, &room, err);
	int r = o ? 0 : -SHARDD_INVALID_ARGUMENT;

	if (r == 0 && o->clip)
		r = ops_step_plan_clip(o->clip, &clip, err);
	if (r == 0)
		r = settings_out(o->settings, o->n_settings, &q.settings, err);
	if (r < 0)
		return r;
	q.group = o->group;
	q.clip = o->clip ? &clip : NULL;
	q.inv_scale = o->inv_scale;
	if (o->lr) {
		q.optional_lr_case = SHARDD__V1__PLAN_BACKWARD_REQUEST__OPTIONAL_LR_LR;
		q.lr = *o->lr;
	}
	q.n_settings = o->n_settings;
	r = op_submit(c, &plan_backward, &q.base, t, err);
	free(q.settings);
	return r;
}

/* ------------------------------------------------------ the trainer's optimizer */

int shardd_submit_next_shard(shardd_client *c, const struct shardd_next_shard_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__NextShardRequest q = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;
	struct shardd_next_shard_options room;
	const struct shardd_next_shard_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.group = o->group;
	return op_submit(c, &next_shard, &q.base, t, err);
}

int shardd_submit_shard_done(shardd_client *c, const struct shardd_shard_done_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ShardDoneRequest q = SHARDD__V1__SHARD_DONE_REQUEST__INIT;
	struct shardd_shard_done_options room;
	const struct shardd_shard_done_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	return op_submit(c, &shard_done, &q.base, t, err);
}
