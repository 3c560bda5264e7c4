/*
 * SetFactors: by what the reductions of a unit divide, from here on: in place of what it was
 * registered with, until the end of the epoch. All ranks must say the same, between passes: a
 * gradient that is under way would be divided by neither.
 */
#include <math.h>
#include <string.h>

#include "op/op.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "unit/reduce_plan.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

struct factors_args {
	struct unit_factors factors; /* resolved */
};

static inline struct factors_args *factors_args(const struct op *op)
{
	_Static_assert(sizeof(struct factors_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

static int op_factors_check_number(double x, const char *field, struct fault *f)
{
	if (isfinite(x) && x >= 0 && x <= UNIT_MAX_FACTOR)
		return 0;
	return fault_set(f, FAULT_INVALID, field, "%s is %g; it must be 0 to %g", field, x,
			 UNIT_MAX_FACTOR);
}

static int op_factors_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__SetFactorsRequest *r = (const Shardd__V1__SetFactorsRequest *)msg;

	op->touches = TOUCH_GRADS;
	factors_args(op)->factors = (struct unit_factors){ .given = true,
							   .pre_divide = r->pre_divide,
							   .post_divide = r->post_divide,
							   .divide_factor = r->divide_factor,
							   .force_sum = r->force_sum };
	if (op_take_unit(op, r->unit, f) ||
	    op_factors_check_number(r->pre_divide, "pre_divide", f) ||
	    op_factors_check_number(r->post_divide, "post_divide", f) ||
	    op_factors_check_number(r->divide_factor, "divide_factor", f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	return reduce_resolve_factors(op->unit->rec, group_size(op->group),
				      &factors_args(op)->factors, f);
}

/* Of a guarded unit its state says so too. */
static int op_factors_check_between_passes(const struct op *op, struct fault *f)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);
	const char *rest = mu && mu->gradient.slab  ? "this rank has its gradient buffer"
			   : op->unit->has_partials ? "its all-reduce is deferred"
						    : NULL;

	if (!rest)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "SetFactors of unit '%.100s' in the middle of a pass: %s; call Reduce "
			 "first",
			 op->unit->rec->name, rest);
}

static uint64_t op_factors_bits_of(double x)
{
	uint64_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return bits;
}

static int op_factors_check(struct op *op, struct fault *f)
{
	const struct unit_factors *x = &factors_args(op)->factors;

	if (op_factors_check_between_passes(op, f))
		return f->code;
	op_print(op, "SetFactors of unit '%.64s' (%.9g before, %.9g after, divide_factor %.9g%s)",
		 op->unit->rec->name, x->pre_divide, x->post_divide, x->divide_factor,
		 x->force_sum ? ", force_sum" : "");
	op->entry.print.words[2] = op_factors_bits_of(x->pre_divide);
	op->entry.print.words[3] = op_factors_bits_of(x->post_divide);
	op->entry.print.words[4] = op_factors_bits_of(x->divide_factor);
	op->entry.print.words[5] = x->force_sum;
	return 0;
}

static enum res op_factors_tick(struct coll *c)
{
	c->unit->factors = factors_args(c->ops[0])->factors;
	return RES_DONE;
}

const struct op_type op_set_factors = {
	.name = "SetFactors",
	.collective = true,
	.request = &shardd__v1__set_factors_request__descriptor,
	.decode = op_factors_decode,
	.check = op_factors_check,
	.coll_tick = op_factors_tick,
	.reply = &shardd__v1__set_factors_response__descriptor,
	.move = MOVE_NEEDS_IDLE,
};
