/* Clipping, loss scaling, optimizers in backward, the trainer's own optimizer. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "client_error.h"
#include "core/check.h"
#include "op.h"
#include "settings.h"

static_assert((int)SHARDD_CLIP_TORCH == SHARDD__V1__CLIP_PROFILE__CLIP_PROFILE_TORCH,
	      "clip profiles");

static void clip_result(const ProtobufCMessage *m, struct shardd_result *ret,
			const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->total_norm = ((const Shardd__V1__ClipGradNormReply *)m)->total_norm;
}

static void unscale_result(const ProtobufCMessage *m, struct shardd_result *ret,
			   const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->found_inf = ((const Shardd__V1__UnscaleReply *)m)->found_inf;
}

static void step_result(const ProtobufCMessage *m, struct shardd_result *ret,
			const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__StepReply *reply = (const Shardd__V1__StepReply *)m;

	(void)ret_place;
	ret->skipped = reply->skipped;
	ret->found_inf = reply->found_inf;
	ret->has_total_norm = reply->optional_total_norm_case;
	ret->total_norm = reply->total_norm;
}

static void reduce_result(const ProtobufCMessage *m, struct shardd_result *ret,
			  const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->skipped = ((const Shardd__V1__ReduceReply *)m)->unused;
}

static int reduce_keep(struct shardd_client *c, const ProtobufCMessage *m, struct shardd_error *err)
{
	return places_take_unused(&c->places, (const Shardd__V1__ReduceReply *)m, err);
}

static void next_shard_result(const ProtobufCMessage *m, struct shardd_result *ret,
			      const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__NextShardReply *reply = (const Shardd__V1__NextShardReply *)m;

	ret->unit = reply->unit;
	ret->elements = reply->elements;
	ret->gradient_offset = reply->gradient_offset;
	*ret_place = reply->place;
}

static int next_shard_keep(struct shardd_client *c, const ProtobufCMessage *m,
			   struct shardd_error *err)
{
	return places_take_pieces(&c->places, (const Shardd__V1__NextShardReply *)m, err);
}

OP(clip_grad_norm, ClipGradNorm, clip_grad_norm, clip_result);
OP(clip_grad_value, ClipGradValue, clip_grad_value, NULL);
OP(unscale, Unscale, unscale, unscale_result);
OP(step, Step, step, step_result);
OP_KEEPING(reduce, Reduce, reduce, reduce_result, reduce_keep);
OP(plan_backward, PlanBackward, plan_backward, NULL);
OP_KEEPING(next_shard, NextShard, next_shard, next_shard_result, next_shard_keep);
OP(shard_done, ShardDone, shard_done, NULL);

/* A struct of a caller's that begins with its size. */
static int check_size(size_t size, size_t known, const char *field, struct shardd_error *err)
{
	if (size == known)
		return 0;
	return error_set(err, SHARDD_INVALID_ARGUMENT, field,
			 "size is %zu, must be %zu, the size in this library", size, known);
}

/* -------------------------------------------------------------------- clipping */

int shardd_clip_submit(shardd_client *c, shardd_group g, const struct shardd_clip *clip,
		       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ClipGradNormRequest q = SHARDD__V1__CLIP_GRAD_NORM_REQUEST__INIT;
	int r = check_size(clip->size, sizeof(*clip), "clip.size", err);

	if (r < 0)
		return r;
	if (clip->n_units && !clip->units)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "clip.units",
				 "clip.units is NULL, but n_units is %zu", clip->n_units);
	q.group = g;
	q.max_norm = clip->max_norm;
	q.norm_type = clip->norm_type;
	q.profile = (Shardd__V1__ClipProfile)clip->profile;
	q.error_if_nonfinite = clip->error_if_nonfinite;
	q.units = (uint32_t *)clip->units;
	q.n_units = clip->n_units;
	q.whole_job = clip->whole_job;
	return op_submit(c, &clip_grad_norm, &q.base, t, err);
}

int shardd_clip(shardd_client *c, shardd_group g, const struct shardd_clip *clip,
		double *total_norm, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_clip_submit(c, g, clip, &t, err), &t, &result, err);

	if (r == 0 && total_norm)
		*total_norm = result.total_norm;
	return r;
}

int shardd_clip_value_submit(shardd_client *c, shardd_group g, double value,
			     const shardd_unit *units, size_t n, shardd_ticket *t,
			     struct shardd_error *err)
{
	Shardd__V1__ClipGradValueRequest q = SHARDD__V1__CLIP_GRAD_VALUE_REQUEST__INIT;

	if (n && !units)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "units",
				 "units is NULL, but n is %zu", n);
	q.group = g;
	q.value = value;
	q.units = (uint32_t *)units;
	q.n_units = n;
	return op_submit(c, &clip_grad_value, &q.base, t, err);
}

int shardd_clip_value(shardd_client *c, shardd_group g, double value, const shardd_unit *units,
		      size_t n, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_clip_value_submit(c, g, value, units, n, &t, err), &t, NULL,
			 err);
}

/* ---------------------------------------------------------------- loss scaling */

int shardd_unscale_submit(shardd_client *c, shardd_group g, double inv_scale, shardd_ticket *t,
			  struct shardd_error *err)
{
	Shardd__V1__UnscaleRequest q = SHARDD__V1__UNSCALE_REQUEST__INIT;

	q.group = g;
	q.inv_scale = inv_scale;
	return op_submit(c, &unscale, &q.base, t, err);
}

int shardd_unscale(shardd_client *c, shardd_group g, double inv_scale, bool *found_inf,
		   struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_unscale_submit(c, g, inv_scale, &t, err), &t, &result, err);

	if (r == 0 && found_inf)
		*found_inf = result.found_inf;
	return r;
}

void shardd_scaler_init(struct shardd_scaler *s)
{
	*s = (struct shardd_scaler){
		.scale = 65536, .growth_factor = 2, .backoff_factor = 0.5, .growth_interval = 2000
	};
}

double shardd_scaler_inverse(const struct shardd_scaler *s)
{
	return (float)(1.0 / (double)s->scale);
}

/* What would no longer be a number does not grow. */
void shardd_scaler_update(struct shardd_scaler *s, bool found_inf)
{
	float grown;

	if (found_inf) {
		s->scale = (float)(s->scale * s->backoff_factor);
		s->steps = 0;
		return;
	}
	if (++s->steps != s->growth_interval)
		return;
	grown = (float)(s->scale * s->growth_factor);
	if (isfinite(grown))
		s->scale = grown;
	s->steps = 0;
}

/* ------------------------------------------------------------------------ step */

int shardd_step_with_submit(shardd_client *c, shardd_group g, const struct shardd_step_options *o,
			    shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;
	int r = check_size(o->size, sizeof(*o), "options.size", err);

	if (r == 0)
		r = settings_out(o->settings, o->n_settings, &q.settings, err);
	if (r < 0)
		return r;
	q.group = g;
	if (o->lr) {
		q.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
		q.lr = *o->lr;
	}
	q.skip_if_found = o->skip_if_found;
	q.discard = o->discard;
	q.n_settings = o->n_settings;
	r = op_submit(c, &step, &q.base, t, err);
	free(q.settings);
	return r;
}

int shardd_step_with(shardd_client *c, shardd_group g, const struct shardd_step_options *o,
		     struct shardd_result *ret, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_step_with_submit(c, g, o, &t, err), &t, ret, err);
}

/* ----------------------------------------------------------------- in backward */

int shardd_reduce_more_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			      struct shardd_error *err)
{
	Shardd__V1__ReduceRequest q = SHARDD__V1__REDUCE_REQUEST__INIT;

	q.unit = u;
	q.more = true;
	return op_submit(c, &reduce, &q.base, t, err);
}

int shardd_reduce_more(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_reduce_more_submit(c, u, &t, err), &t, NULL, err);
}

int shardd_reduce_unused_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				struct shardd_error *err)
{
	Shardd__V1__ReduceRequest q = SHARDD__V1__REDUCE_REQUEST__INIT;

	q.unit = u;
	q.unused = true;
	return op_submit(c, &reduce, &q.base, t, err);
}

int shardd_reduce_unused(shardd_client *c, shardd_unit u, bool *by_all, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_reduce_unused_submit(c, u, &t, err), &t, &result, err);

	if (r == 0 && by_all)
		*by_all = result.skipped;
	return r;
}

int shardd_reduce_with_submit(shardd_client *c, shardd_unit u,
			      const struct shardd_reduce_options *o, shardd_ticket *t,
			      struct shardd_error *err)
{
	Shardd__V1__ReduceRequest q = SHARDD__V1__REDUCE_REQUEST__INIT;
	int r = check_size(o->size, sizeof(*o), "options.size", err);

	if (r < 0)
		return r;
	if (o->n_unused && !o->unused)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.unused",
				 "unused is NULL, but n_unused is %zu", o->n_unused);
	q.unit = u;
	q.more = o->more;
	q.unused_tensors = (uint32_t *)o->unused;
	q.n_unused_tensors = o->n_unused;
	return op_submit(c, &reduce, &q.base, t, err);
}

int shardd_reduce_with(shardd_client *c, shardd_unit u, const struct shardd_reduce_options *o,
		       struct shardd_result *ret, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_reduce_with_submit(c, u, o, &t, err), &t, ret, err);
}

static int plan_clip(const struct shardd_clip *from, Shardd__V1__PlanBackwardRequest__Clip *to,
		     struct shardd_error *err)
{
	int r = check_size(from->size, sizeof(*from), "plan.clip.size", err);

	if (r < 0)
		return r;
	if (from->n_units || from->whole_job)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "plan.clip.units",
				 "plan.clip names units or the whole job: leave them out, a plan "
				 "covers all units of the group");
	to->max_norm = from->max_norm;
	to->norm_type = from->norm_type;
	to->profile = (Shardd__V1__ClipProfile)from->profile;
	to->error_if_nonfinite = from->error_if_nonfinite;
	return 0;
}

int shardd_plan_backward_submit(shardd_client *c, shardd_group g, const struct shardd_plan *plan,
				shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__PlanBackwardRequest q = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__PlanBackwardRequest__Clip clip = SHARDD__V1__PLAN_BACKWARD_REQUEST__CLIP__INIT;
	int r = check_size(plan->size, sizeof(*plan), "plan.size", err);

	if (r == 0 && plan->clip)
		r = plan_clip(plan->clip, &clip, err);
	if (r == 0)
		r = settings_out(plan->settings, plan->n_settings, &q.settings, err);
	if (r < 0)
		return r;
	q.group = g;
	q.clip = plan->clip ? &clip : NULL;
	q.inv_scale = plan->inv_scale;
	if (plan->lr) {
		q.optional_lr_case = SHARDD__V1__PLAN_BACKWARD_REQUEST__OPTIONAL_LR_LR;
		q.lr = *plan->lr;
	}
	q.n_settings = plan->n_settings;
	r = op_submit(c, &plan_backward, &q.base, t, err);
	free(q.settings);
	return r;
}

int shardd_plan_backward(shardd_client *c, shardd_group g, const struct shardd_plan *plan,
			 struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_plan_backward_submit(c, g, plan, &t, err), &t, NULL, err);
}

/* ------------------------------------------------------ the trainer's optimizer */

int shardd_next_shard_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
			     struct shardd_error *err)
{
	Shardd__V1__NextShardRequest q = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;

	q.group = g;
	return op_submit(c, &next_shard, &q.base, t, err);
}

int shardd_next_shard(shardd_client *c, shardd_group g, struct shardd_shard *ret,
		      struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_next_shard_submit(c, g, &t, err), &t, &result, err);

	if (r < 0 || !ret)
		return r;
	*ret = (struct shardd_shard){ .unit = result.unit,
				      .elements = result.elements,
				      .params = result.data,
				      .gradient = (const float *)((const char *)result.data +
								  result.gradient_offset) };
	return 0;
}

int shardd_shard_done_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			     struct shardd_error *err)
{
	Shardd__V1__ShardDoneRequest q = SHARDD__V1__SHARD_DONE_REQUEST__INIT;

	q.unit = u;
	return op_submit(c, &shard_done, &q.base, t, err);
}

int shardd_shard_done(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_shard_done_submit(c, u, &t, err), &t, NULL, err);
}
