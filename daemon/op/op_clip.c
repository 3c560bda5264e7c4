/*
 * ClipGradNorm: total norm of all gradient shards of a group's units, and scaling by
 * max_norm/(total + 1e-6) where that is below 1 (fairscale's rule: a NaN or a smaller
 * total changes nothing). On the host per 64 Ki block in fp64 lanes, blocks added in order
 * in fp64: the same bits in every run and for every world size. On a device in a fixed order
 * of its own; several devices are added in their order.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "op/op_impl.h"
#include "unit/optim.h"

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ClipGradNormRequest *r = (const Shardd__V1__ClipGradNormRequest *)msg;
	double type = r->norm_type == 0 ? 2 : r->norm_type;

	op->touches = TOUCH_GRADS;
	op->args.clip.max_norm = r->max_norm;
	op->args.clip.norm_type = type;
	if (!(r->max_norm > 0) || isinf(r->max_norm))
		return fault_set(f, FAULT_INVALID, "max_norm",
				 "max_norm is %g: a positive number is allowed", r->max_norm);
	if (type != 2 && !(isinf(type) && type > 0))
		return fault_set(f, FAULT_INVALID, "norm_type",
				 "norm_type is %g: 2 or inf is allowed", type);
	return op_take_group(op, r->group, f);
}

static uint64_t bits_of(double x)
{
	uint64_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return bits;
}

static int check(struct op *op, struct fault *f)
{
	if (op_check_not_torn(op, f))
		return f->code;
	op_print(op, "ClipGradNorm to %.17g (norm %g)", op->args.clip.max_norm,
		 op->args.clip.norm_type);
	op->entry.print.words[2] = bits_of(op->args.clip.max_norm);
	op->entry.print.words[3] = bits_of(op->args.clip.norm_type);
	return 0;
}

static bool takes_part(const struct coll *c, const struct unit *u)
{
	return u->has_gradient && u->rec->group == c->group->id;
}

/* Of part @d; a device that has what another has already counts nothing. */
static uint64_t blocks_of(const struct unit *u, unsigned d)
{
	return d < u->spread ? (u->parts[d].n + KERNEL_NORM_BLOCK - 1) / KERNEL_NORM_BLOCK : 0;
}

static double fold(double sum, double x, bool inf)
{
	if (inf)
		return isnan(x) || x > sum ? x : sum;
	return sum + x;
}

/* Of all devices, in their order: the sum of squares, or the maximum. */
static double fold_blocks(const struct coll *c, bool inf)
{
	uint64_t at = 0;
	double sum = 0;

	for (unsigned d = 0; d < c->n_parts; d++) {
		for (uint32_t i = 0; i < c->job->n_units; i++) {
			const struct unit *u = c->job->units[i];

			if (!takes_part(c, u))
				continue;
			for (uint64_t b = 0; b < blocks_of(u, d); b++, at++)
				sum = fold(sum, c->partials[at], inf);
		}
	}
	return sum;
}

static void done(struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++)
		c->ops[i]->result.total_norm = c->value;
	coll_end(c, NULL);
}

static bool is_inf(const struct coll *c)
{
	return isinf(c->ops[0]->args.clip.norm_type);
}

static uint64_t blocks_of_all(const struct coll *c)
{
	uint64_t blocks = 0;

	for (uint32_t i = 0; i < c->job->n_units; i++)
		for (unsigned d = 0; takes_part(c, c->job->units[i]) && d < c->n_parts; d++)
			blocks += blocks_of(c->job->units[i], d);
	return blocks;
}

static void scale_part(struct coll *c, unsigned d, float coef)
{
	for (uint32_t i = 0; i < c->job->n_units; i++) {
		struct unit *u = c->job->units[i];

		if (takes_part(c, u) && u->parts[d].n)
			coll_kop(&c->parts[d], KOP_SCALE, u->parts[d].n)->scale =
				(struct k_scale){ optim_at(&u->parts[d].grads, 0), coef };
	}
}

static void scale(struct coll *c)
{
	double coef, total;

	if (coll_overtaken(c, true) || !coll_need_kops(c, c->job->n_units))
		return;
	total = fold_blocks(c, is_inf(c));
	c->value = is_inf(c) ? total : sqrt(total);
	coef = c->ops[0]->args.clip.max_norm / (c->value + 1e-6);
	if (!(coef < 1)) {
		done(c);
		return;
	}
	for (unsigned d = 0; d < c->n_parts; d++)
		scale_part(c, d, (float)coef);
	coll_kernels(c, done);
}

static void norm_part(struct coll *c, unsigned d, uint64_t *at)
{
	for (uint32_t i = 0; i < c->job->n_units; i++) {
		struct unit *u = c->job->units[i];

		if (!takes_part(c, u) || !blocks_of(u, d))
			continue;
		coll_kop(&c->parts[d], KOP_NORM, u->parts[d].n)->norm =
			(struct k_norm){ optim_at(&u->parts[d].grads, 0), c->partials + *at,
					 c->ops[0]->args.clip.norm_type };
		*at += blocks_of(u, d);
	}
}

static void start(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);
	uint64_t at = 0;

	if (coll_overtaken(c, true))
		return;
	if (!coll_need_kops(c, c->job->n_units))
		return;
	c->partials = calloc(blocks_of_all(c) + 1, sizeof(*c->partials));
	if (!c->partials) {
		coll_end_status(c, -ENOMEM);
		return;
	}
	for (unsigned d = 0; d < c->n_parts; d++)
		norm_part(c, d, &at);
	coll_kernels_sync(c, scale);
}

static void run(struct coll *c)
{
	if (apply_ensure(c->job, &c->parked, start))
		start(&c->parked);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ClipGradNormReply reply = SHARDD__V1__CLIP_GRAD_NORM_REPLY__INIT;

	reply.total_norm = op->result.total_norm;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_clip = {
	.name = "ClipGradNorm",
	.collective = true,
	.request = &shardd__v1__clip_grad_norm_request__descriptor,
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
	.move = MOVE_NEEDS_IDLE,
};
