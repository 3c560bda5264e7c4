/*
 * ClipGradNorm: total norm of gradient shards of a group's units, and scaling by the factor
 * that the profile makes of it (unit/norm.h; docs/semantics.md). On the host per 64 Ki block
 * in fp64 lanes, blocks added in order in fp64: the same bits in every run and for every
 * world size. On a device in a fixed order of its own; several devices are added in their
 * order.
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
#include "unit/norm.h"
#include "unit/optim.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

int op_clip_take(const struct clip_fields *r, struct clip *ret, struct fault *f)
{
	ret->max_norm = r->max_norm;
	ret->type = r->norm_type == 0 ? 2 : r->norm_type;
	ret->profile = r->profile ? (enum clip_profile)r->profile : CLIP_FAIRSCALE;
	ret->error_if_nonfinite = r->error_if_nonfinite;
	if (!(r->max_norm > 0) || isinf(r->max_norm))
		return fault_set(f, FAULT_INVALID, r->field_max_norm,
				 "max_norm is %g; it must be a positive number", r->max_norm);
	if (!(ret->type > 0))
		return fault_set(f, FAULT_INVALID, r->field_norm_type,
				 "norm_type is %g; it must be above 0, or inf", ret->type);
	if (r->profile >= _CLIP_N)
		return fault_set(f, FAULT_INVALID, r->field_profile,
				 "profile is %u; it must be FAIRSCALE, XLA or TORCH", r->profile);
	return 0;
}

static int op_clip_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ClipGradNormRequest *r = (const Shardd__V1__ClipGradNormRequest *)msg;
	const struct clip_fields fields = { .max_norm = r->max_norm,
					    .norm_type = r->norm_type,
					    .profile = (uint32_t)r->profile,
					    .error_if_nonfinite = r->error_if_nonfinite,
					    .field_max_norm = "max_norm",
					    .field_norm_type = "norm_type",
					    .field_profile = "profile" };

	op->touches = TOUCH_GRADS;
	clip_args(op)->whole_job = r->whole_job;
	if (r->whole_job && op->m->job->n_groups > 1 &&
	    job_check_here(op->m->job, "a norm over all groups", f))
		return f->code;
	if (r->whole_job && (r->group || r->n_units))
		return fault_set(f, FAULT_INVALID, "whole_job",
				 "whole_job is set with group %u and %zu units; it needs group 0 "
				 "and no units",
				 r->group, r->n_units);
	if (op_clip_take(&fields, &clip_args(op)->clip, f) || op_take_group(op, r->group, f))
		return f->code;
	return shards_take_units(op, r->units, r->n_units, f);
}

static uint64_t op_clip_bits_of(double x)
{
	uint64_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return bits;
}

static int op_clip_check(struct op *op, struct fault *f)
{
	const struct clip *clip = &clip_args(op)->clip;

	if (op_check_not_torn(op, f) ||
	    op_check_all_there(op, op->owned, clip_args(op)->n_units, f))
		return f->code;
	op_print(op, "ClipGradNorm to %.17g (norm %g, profile %d, units %zu)", clip->max_norm,
		 clip->type, clip->profile, clip_args(op)->n_units);
	op->entry.print.words[2] = op_clip_bits_of(clip->max_norm);
	op->entry.print.words[3] = op_clip_bits_of(clip->type);
	op->entry.print.words[4] = (uint64_t)clip->profile |
				   (uint64_t)clip->error_if_nonfinite << 8 |
				   (uint64_t)clip_args(op)->whole_job << 16;
	op->entry.print.words[5] = shards_word(op);
	return 0;
}

static size_t op_clip_launches_of(const struct coll *c, unsigned d, float factor,
				  struct launch *launches)
{
	size_t n = 0;

	for (uint32_t i = 0; i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];
		const struct unit_part *p = shards_take_part(c, u) ? shards_part(c, u, d) : NULL;

		if (p)
			n += optim_scale_launches(u, p, factor, launches ? launches + n : NULL);
	}
	return n;
}

/* Their total is known. Return: RES_DONE: no gradient has to be multiplied. */
static enum res op_clip_scale(struct coll *c)
{
	const struct clip *clip = &clip_args(c->ops[0])->clip;
	size_t room = 0;
	float factor;

	shards_of(c)->total = shards_total(c, clip->type);
	c->everywhere = norm_clip_check(clip, shards_of(c)->total, c->fault);
	if (c->everywhere)
		return RES_FAILED;
	if (!norm_clip_factor(clip, shards_of(c)->total, &factor))
		return RES_DONE;
	for (unsigned d = 0; d < c->n_parts; d++) {
		size_t n = op_clip_launches_of(c, d, factor, NULL);

		room = n > room ? n : room;
	}
	RES_TRY(coll_need_launches(c, room));
	for (unsigned d = 0; d < c->n_parts; d++)
		c->parts[d].n_launches =
			(unsigned)op_clip_launches_of(c, d, factor, c->parts[d].launches);
	return coll_kernels(c);
}

enum op_clip_stage { CLIP_APPLY, CLIP_CHECK, CLIP_NORM, CLIP_SCALE, CLIP_DONE };

static enum res op_clip_tick(struct coll *c)
{
	switch ((enum op_clip_stage)c->stage) {
	case CLIP_APPLY: /* a prepared step needs the gradients as they are */
		c->stage = CLIP_CHECK;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case CLIP_CHECK:
		RES_TRY(coll_check_epoch(c, true));
		if (shards_check_whole(c, c->fault))
			return RES_FAILED;
		c->stage = CLIP_NORM;
		fallthrough;
	case CLIP_NORM:
		RES_TRY(shards_norm_tick(c, clip_args(c->ops[0])->clip.type));
		c->stage = CLIP_SCALE;
		fallthrough;
	case CLIP_SCALE:
		RES_TRY(coll_check_epoch(c, true));
		c->stage = CLIP_DONE;
		RES_TRY(op_clip_scale(c));
		fallthrough;
	case CLIP_DONE:
		for (uint32_t i = 0; i < c->n; i++)
			shards_outcome(c->ops[i])->total_norm = shards_of(c)->total;
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void op_clip_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ClipGradNormResponse reply = SHARDD__V1__CLIP_GRAD_NORM_RESPONSE__INIT;

	reply.total_norm = shards_outcome(op)->total_norm;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

static size_t op_clip_surrogate_owned(const struct op *op)
{
	return clip_args(op)->n_units * sizeof(uint32_t);
}

const struct op_type op_clip = {
	.name = "ClipGradNorm",
	.collective = true,
	.surrogates = true,
	.request = &shardd__v1__clip_grad_norm_request__descriptor,
	.decode = op_clip_decode,
	.check = op_clip_check,
	.coll_tick = op_clip_tick,
	.coll_bytes = sizeof(struct shards_state),
	.coll_free = shards_free,
	.encode = op_clip_encode,
	.move = MOVE_NEEDS_IDLE,
	.surrogate_owned = op_clip_surrogate_owned,
};
