/*
 * Reduce: the gradient buffers of all ranks of the unit's group into the fp32 gradient
 * shards. Inside the device one kernel folds them in rank order (cast, pre-divide, sum,
 * post-divide, accumulate); between devices the engine's reduce-scatter.
 */
#include "core/check.h"
#include "op/op_impl.h"
#include "unit/optim.h"

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ReduceRequest *r = (const Shardd__V1__ReduceRequest *)msg;

	op->touches = TOUCH_GRADS;
	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	return 0;
}

static int check(struct op *op, struct fault *f)
{
	struct member_unit *mu = member_unit_find(op->m, op->unit);

	if (op_check_not_torn(op, f) || op_check_initialised(op, f))
		return f->code;
	if (!mu || !mu->gradient.slab)
		return fault_set(
			f, FAULT_STATE, NULL,
			"reduce of unit '%.100s': this rank has not asked for its gradient buffer",
			op->unit->rec->name);
	op_print(op, "Reduce of unit '%.64s' (%llu elements, %s)", op->unit->rec->name,
		 (unsigned long long)op->unit->layout.elements,
		 dtype_name(op->unit->rec->gradient_dtype));
	return 0;
}

/* The buffers are taken back: the next gradient gets its own. */
static void done(struct coll *c)
{
	c->unit->has_gradient = true;
	for (uint32_t i = 0; i < c->n; i++) {
		struct op *op = c->ops[i];
		struct member_unit *mu = member_unit_find(op->m, c->unit);

		if (op->m->state == MEMBER_JOINED)
			pool_give(&op->m->pool, &mu->gradient);
	}
	/* a gradient of an epoch that has ended is of no use to the next one */
	if (c->ops[0]->m->epoch != c->job->rec->epoch)
		c->unit->has_gradient = false;
	coll_end(c, NULL);
}

static void to_other_devices(struct coll *c)
{
	float *grads = optim_at(&c->unit->grads, 0);
	struct comm *comm = c->job->node->comm;

	comm_reduce_scatter(comm, coll_comm(c, done), grads, grads,
			    c->unit->layout.padded / comm_size(comm), DTYPE_FP32);
}

static void start(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);
	const state_unit *rec = c->unit->rec;
	bool accumulate = c->unit->has_gradient;

	if (coll_overtaken(c, true) || !coll_need_kops(c, 1))
		return;
	c->unit->has_gradient = false; /* until it is whole: a device may fail half-way */
	for (uint32_t i = 0; i < c->n; i++)
		c->inputs[i] = region_addr(&member_unit_find(c->ops[i]->m, c->unit)->gradient);
	c->kops[0] = (struct kop){ .kind = KOP_REDUCE, .n = c->unit->layout.elements };
	c->kops[0].reduce = (struct k_reduce){ .out = optim_at(&c->unit->grads, 0),
					       .in = c->inputs,
					       .k = c->n,
					       .in_dtype = (enum dtype)rec->gradient_dtype,
					       .pre = (float)rec->pre_divide,
					       .post = (float)rec->post_divide,
					       .accumulate = accumulate };
	coll_kernels(c, 1, to_other_devices);
}

static void run(struct coll *c)
{
	/* a prepared step still needs the gradients that this one would overwrite */
	if (apply_ensure(c->job, &c->parked, start))
		start(&c->parked);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ReduceReply reply = SHARDD__V1__REDUCE_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_reduce = {
	.name = "Reduce",
	.collective = true,
	.request = &shardd__v1__reduce_request__descriptor,
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
};
