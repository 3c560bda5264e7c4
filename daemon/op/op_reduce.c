/*
 * Reduce: the gradient buffers of all ranks of the unit's group into the fp32 gradient
 * shards. Inside a device one kernel folds them in rank order (cast, pre-divide, sum). With
 * one device the same kernel post-divides and accumulates; between several the engine's
 * reduce-scatter adds the sums, and a second kernel finishes each device's segment.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op_impl.h"
#include "unit/optim.h"
#include "unit/pack.h"

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

	if (op_check_not_torn(op, f) || op_check_initialised(op, f) || op_check_trained(op, f) ||
	    op_check_not_summoned(op, f))
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
		struct member *m = c->members[i];

		if (m->state == MEMBER_JOINED)
			pool_give(&m->pool, &member_unit_find(m, c->unit)->gradient);
	}
	/* a gradient of an epoch that has ended is of no use to the next one */
	if (c->ops[0]->m->epoch != c->job->rec->epoch)
		c->unit->has_gradient = false;
	coll_end(c, NULL);
}

/* Kops and inputs for @spans on each part. Return: false: no memory, it has ended. */
static bool need_inputs(struct coll *c, size_t spans)
{
	bool there = true;

	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];
		void *grown = realloc(p->inputs, spans * (p->n + 1) * sizeof(*p->inputs));

		p->inputs = grown ? grown : p->inputs;
		there = there && grown;
	}
	if (!there)
		coll_end_status(c, -ENOMEM);
	return there && coll_need_kops(c, spans);
}

static struct unit_run *spans_new(struct coll *c)
{
	struct unit_run *spans = calloc(c->unit->rec->n_tensors, sizeof(*spans));

	if (!spans)
		coll_end_status(c, -ENOMEM);
	return spans;
}

static void fold_in_span(struct coll *c, unsigned d, const float *sums, const struct unit_run *span)
{
	struct coll_part *p = &c->parts[d];
	const void **in = &p->inputs[p->n_kops];

	*in = sums + span->at;
	coll_kop(p, KOP_REDUCE, span->n)->reduce =
		(struct k_reduce){ .out = optim_at(&c->unit->parts[d].grads, span->at),
				   .in = in,
				   .k = 1,
				   .in_dtype = DTYPE_FP32,
				   .out_dtype = DTYPE_FP32,
				   .sum_dtype = DTYPE_FP32,
				   .post = k_divide_by((float)c->unit->rec->post_divide,
						       DTYPE_FP32),
				   .accumulate = c->accumulate };
}

/* Several devices: this one's segment of the sum, into its gradient shards. */
static void fold_in(struct coll *c)
{
	struct unit_run *spans = spans_new(c);
	unsigned k = unit_is_packed(c->unit);

	if (!spans)
		return;
	if (need_inputs(c, c->unit->rec->n_tensors)) {
		for (unsigned d = 0; d < c->n_parts; d++) {
			const struct unit_part *up = &c->unit->parts[d];
			unsigned n = unit_spans(c->unit, up, spans);

			for (unsigned i = 0; i < n; i++)
				fold_in_span(c, d, optim_at(&c->parts[d].scratch[k], up->begin),
					     &spans[i]);
		}
		coll_kernels(c, done);
	}
	free(spans);
}

/* In place: each device's segment is where it was. With one device nothing moves. */
static void to_other_devices(struct coll *c)
{
	unsigned k = unit_is_packed(c->unit);
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];
	bool one = c->n_parts == 1;

	if (!coll_can_talk(c))
		return;
	for (unsigned d = 0; d < c->n_parts; d++) {
		const struct unit_part *up = &c->unit->parts[d];
		float *sums = optim_at(one ? &up->grads : &c->parts[d].scratch[k], 0);

		send[d] = sums;
		recv[d] = sums + up->begin;
	}
	if (c->unit->spread < c->n_parts)
		comm_all_reduce(coll_between(c), coll_comm(c, fold_in), recv,
				c->unit->layout.elements, DTYPE_FP32, REDUCE_SUM);
	else
		comm_reduce_scatter(coll_between(c), coll_comm(c, one ? done : fold_in), send, recv,
				    unit_part_elements(c->unit), DTYPE_FP32);
}

/* Into the order in which it is scattered. */
static void pack(struct coll *c)
{
	if (!coll_need_kops(c, c->unit->rec->n_tensors))
		return;
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];
		struct unit_array full = { region_addr(&p->scratch[0]), DTYPE_FP32 };
		struct unit_array parts = { region_addr(&p->scratch[1]), DTYPE_FP32 };

		p->n_kops = unit_pack_kops(c->unit, UNIT_TRAINED, &parts, &full, p->kops);
	}
	coll_kernels(c, to_other_devices);
}

static void add_up_span(struct coll *c, unsigned d, const struct unit_run *span)
{
	struct coll_part *p = &c->parts[d];
	const state_unit *rec = c->unit->rec;
	const void **in = &p->inputs[p->n_kops * p->n];
	bool one = c->n_parts == 1;

	for (uint32_t i = 0; i < p->n; i++) {
		struct member *m = c->members[p->members[i]];
		char *from = region_addr(&member_unit_find(m, c->unit)->gradient);

		in[i] = from + span->full * dtype_size((enum dtype)rec->gradient_dtype);
	}
	coll_kop(p, KOP_REDUCE, span->n)->reduce = (struct k_reduce){
		.out = optim_at(one ? &c->unit->parts[0].grads : &p->scratch[0], span->at),
		.in = in,
		.k = p->n,
		.in_dtype = (enum dtype)rec->gradient_dtype,
		.out_dtype = DTYPE_FP32,
		.sum_dtype = DTYPE_FP32,
		.pre = k_divide_by((float)rec->pre_divide, DTYPE_FP32),
		.post = k_divide_by(one ? (float)rec->post_divide : 1, DTYPE_FP32),
		.accumulate = one && c->accumulate
	};
}

/* The buffers of the ranks of one device, in rank order; on one device that is all there is
 * to do, else it is a sum on its way. What lies between tensors is not the trainers' to
 * write: on one device it is left out. */
static void add_up(struct coll *c, unsigned d, struct unit_run *spans)
{
	unsigned n = 1;

	spans[0] = (struct unit_run){ .n = c->unit->layout.elements };
	if (c->n_parts == 1)
		n = unit_spans(c->unit, &c->unit->parts[0], spans);
	for (unsigned i = 0; i < n; i++)
		add_up_span(c, d, &spans[i]);
}

static void start(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);
	uint64_t bytes = unit_part_elements(c->unit) * c->unit->spread * sizeof(float);
	struct unit_run *spans;

	if (coll_overtaken(c, true) || !coll_ready(c, start))
		return;
	if (c->n_parts > 1 && !coll_need_scratch(c, 0, bytes, start))
		return;
	if (unit_is_packed(c->unit) && !coll_need_scratch(c, 1, bytes, start))
		return;
	spans = spans_new(c);
	if (!spans)
		return;
	if (need_inputs(c, c->unit->rec->n_tensors)) {
		c->accumulate = c->unit->has_gradient;
		c->unit->has_gradient = false; /* until it is whole: a device may fail half-way */
		for (unsigned d = 0; d < c->n_parts; d++)
			add_up(c, d, spans);
		coll_kernels(c, unit_is_packed(c->unit) ? pack : to_other_devices);
	}
	free(spans);
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
	.move = MOVE_REDUCE,
};
