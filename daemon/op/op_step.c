/* Step: all ranks want the optimizer stepped. Prepared here, applied in apply.c. */
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "op/guard.h"
#include "op/op_impl.h"

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__StepRequest *r = (const Shardd__V1__StepRequest *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	op->args.step.lr = r->lr;
	op->args.step.has_lr = r->has_lr;
	if (r->has_lr && (!isfinite(r->lr) || r->lr < 0))
		return fault_set(f, FAULT_INVALID, "lr",
				 "lr is %g: 0 or a positive number is allowed", r->lr);
	return op_take_group(op, r->group, f);
}

static int check(struct op *op, struct fault *f)
{
	uint64_t bits = 0;

	if (op_check_not_torn(op, f))
		return f->code;
	if (op->args.step.has_lr)
		memcpy(&bits, &op->args.step.lr, sizeof(bits));
	op_print(op, op->args.step.has_lr ? "Step with lr %.17g" : "Step", op->args.step.lr);
	op->entry.print.words[2] = op->args.step.has_lr;
	op->entry.print.words[3] = bits;
	return 0;
}

/* Nobody may read parameters that are about to change under him. */
static int check_released(const struct coll *c, struct fault *f)
{
	for (uint32_t i = 0; i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];

		if (u->summoned_ranks && u->rec->group == c->group->id)
			return fault_set(f, FAULT_STATE, NULL,
					 "unit '%.100s' is summoned by %u ranks: return it before "
					 "the step",
					 u->rec->name, u->summoned_ranks);
		if (!u->gathered_ranks || u->rec->group != c->group->id)
			continue;
		for (uint32_t r = 0; r < c->job->rec->world_size; r++) {
			struct member *m = c->job->ranks[r];
			struct member_unit *mu = m ? member_unit_find(m, u) : NULL;

			if (mu && mu->gathers > mu->held)
				return fault_set(f, FAULT_STATE, NULL,
						 "unit '%.100s' is still gathered by rank %u (pid "
						 "%d): release it "
						 "before the step",
						 u->rec->name, r, member_pid(m));
		}
	}
	return 0;
}

static void prepare(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);
	const struct op *op = c->ops[0];
	struct fault f = FAULT_NULL;

	if (coll_overtaken(c, true))
		return;
	if (check_released(c, &f) == 0) {
		guard_step(c->job, c->group->id);
		c->job->step.prepared = true;
		c->job->step.group = c->group->id;
		c->job->step.has_lr = op->args.step.has_lr;
		c->job->step.lr = op->args.step.lr;
	}
	coll_end(c, &f);
}

static void run(struct coll *c)
{
	/* two steps without a commit between them: the first one is applied now */
	if (apply_ensure(c->job, &c->parked, prepare))
		prepare(&c->parked);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__StepReply reply = SHARDD__V1__STEP_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_step = {
	.name = "Step",
	.collective = true,
	.request = &shardd__v1__step_request__descriptor,
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
	.move = MOVE_NEEDS_IDLE,
};
