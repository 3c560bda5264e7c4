/*
 * Reduce: the gradient buffers of all ranks of the unit's group, and what they have
 * accumulated, into the fp32 gradient shards, in the order that the unit's profile has
 * (reduce_run.h). With one device and one replica that is one kernel; between several
 * devices the engine adds their sums in the reduce dtype, and a last kernel divides and
 * widens them. With defer_all_reduce the replicas' own sums are kept, and the next
 * reduction without it takes them along.
 */
#include <errno.h>

#include "copies/hold.h"
#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "reduce/fused.h"
#include "op/op_list.h"
#include "reduce/reduce_batch.h"
#include "reduce/reduce_run.h"
#include "reduce/reduce_unused.h"
#include "step/apply.h"
#include "step/backward.h"
#include "step/external.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

static int op_reduce_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ReduceRequest *r = (const Shardd__V1__ReduceRequest *)msg;

	reduce_args(op)->defer = r->defer_all_reduce;
	reduce_args(op)->more = r->more || r->defer_all_reduce;
	reduce_args(op)->unused = r->unused;
	if (r->unused && r->defer_all_reduce)
		return fault_set(f, FAULT_INVALID, "unused",
				 "unused and defer_all_reduce are both set: set one of them");
	if (op_take_unit(op, r->unit, f))
		return f->code;
	/* the optimizer in backward changes parameters */
	op->touches = TOUCH_GRADS | (unit_pools_gradient(op->unit->rec) ? TOUCH_PARAMS : 0);
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	return reduce_unused_decode(op, r, f);
}

/* Systems that reduce again what they reduced know no partial sums: what is not to be reduced
 * is accumulated. */
static int op_reduce_check_defer(const struct op *op, struct fault *f)
{
	const state_unit *rec = op->unit->rec;

	if (!reduce_args(op)->defer)
		return 0;
	if (rec->shard_ranks == group_size(op->group))
		return fault_set(f, FAULT_INVALID, "defer_all_reduce",
				 "unit '%.100s' has one replica: defer_all_reduce needs strategy "
				 "HYBRID or REPLICATE",
				 rec->name);
	if (reduce_plan_for(op->m->job, op->unit).adds_before)
		return fault_set(f, FAULT_INVALID, "defer_all_reduce",
				 "unit '%.100s' has a %s profile, which has no partial sums: "
				 "use Accumulate instead",
				 rec->name, rec->reduce_profile >= PROFILE_DDP ? "DDP" : "FSDP1");
	return 0;
}

static int op_reduce_check(struct op *op, struct fault *f)
{
	struct member_unit *mu = member_unit_find(op->m, op->unit);

	if (op_check_not_torn(op, f) || op_check_initialised(op, f) || op_check_trained(op, f) ||
	    op_check_not_summoned(op, f) || op_reduce_check_defer(op, f))
		return f->code;
	if (!mu || (!mu->gradient.slab && !mu->accumulated.slab))
		return fault_set(f, FAULT_STATE, NULL,
				 "reduce of unit '%.100s': this rank has not asked for its "
				 "gradient buffer and has accumulated nothing",
				 op->unit->rec->name);
	op_print(op, "Reduce of unit '%.64s' (%llu elements, %s%s%s)", op->unit->rec->name,
		 (unsigned long long)op->unit->layout.elements,
		 dtype_name(op->unit->rec->gradient_dtype),
		 reduce_args(op)->defer ? ", all-reduce deferred" : "",
		 reduce_args(op)->more ? ", more to come" : "");
	op->entry.print.words[2] = reduce_args(op)->defer;
	op->entry.print.words[3] = reduce_args(op)->more;
	reduce_unused_declare(op);
	op_print_order(op);
	return 0;
}

/* ------------------------------------------------------------------ the end */

/* A gradient of an epoch that has ended is of no use to the next one. */
static bool op_reduce_in_time(const struct coll *c)
{
	return c->ops[0]->m->epoch == c->job->rec->epoch;
}

static void op_reduce_done(struct coll *c)
{
	CHECK(!reduce_of(c)->run->defer && !reduce_of(c)->batch);
	reduce_give_inputs(c); /* the next gradient gets its own */
	c->unit->has_gradient = op_reduce_in_time(c) && !gradient_of(c)->fused;
	job_give_partials(c->job, c->unit);
	if (gradient_of(c)->fused)
		fused_end(c);
	else
		backward_reduced(c);
}

/* The partials stay for the next reduction. */
static void op_reduce_deferred(struct coll *c)
{
	CHECK(reduce_of(c)->run->defer && reduce_of(c)->run->apart && !gradient_of(c)->fused);
	reduce_give_inputs(c);
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct region *made = &c->parts[d].scratch[REDUCE_PARTIALS];

		if (!made->slab)
			continue; /* there was memory from before */
		c->unit->parts[d].partials = *made;
		*made = REGION_NULL;
	}
	c->unit->has_gradient = reduce_of(c)->run->accumulate && op_reduce_in_time(c);
	c->unit->has_partials = op_reduce_in_time(c);
	if (!op_reduce_in_time(c))
		job_give_partials(c->job, c->unit);
}

/* -------------------------------------------------------------------- stages */

/* The next of its kernels. Return: RES_DONE: there are none left before devices talk. */
static enum res op_reduce_fold(struct coll *c)
{
	RES_TRY(coll_need_launches(c, reduce_of(c)->run->launches));
	if (!reduce_next_stage(c))
		return RES_DONE;
	return reduce_of(c)->run->chained ? coll_kernels_sync(c) : reduce_kernels(c);
}

/* With one device the sums are the gradient already, unless an engine was asked for. */
static enum res op_reduce_between(struct coll *c)
{
	void *grads;

	if (reduce_lets_others_talk(c))
		coll_talks_last(c);
	if (!coll_is_alone(c))
		return reduce_talk(c);
	if (!c->job->node->engine_for_one)
		return RES_DONE;
	RES_TRY(coll_can_talk(c));
	grads = region_addr(&c->unit->parts[0].grads);
	coll_reduce_scatter(c, (const void *[]){ grads }, &grads, unit_part_elements(c->unit),
			    DTYPE_FP32);
	return RES_WAIT;
}

static enum res op_reduce_finish(struct coll *c)
{
	if (coll_is_alone(c))
		return RES_DONE;
	RES_TRY(coll_need_launches(c, reduce_of(c)->run->launches));
	for (unsigned d = 0; d < c->n_parts; d++)
		reduce_finish(c, d);
	return reduce_kernels(c);
}

static enum res op_reduce_take_scratch(struct coll *c)
{
	for (unsigned k = REDUCE_SUMS; k <= REDUCE_PACKED; k++)
		if (reduce_scratch(c, k))
			RES_TRY(coll_need_scratch(c, k, reduce_scratch(c, k)));
	return RES_DONE;
}

static void op_reduce_let_go(struct coll *c)
{
	CHECK(!reduce_of(c)->batch);
	if (reduce_of(c)->run)
		reduce_put_back(c);
	external_failed(c);
	fused_failed(c);
	gradient_of(c)->begun = false;
}

static void op_reduce_free(struct coll *c)
{
	reduce_of(c)->run = reduce_run_free(reduce_of(c)->run);
	shards_free(c);
}

/* What it needs to know of the gradients, which are its own from here on. */
static enum res op_reduce_take_run(struct coll *c)
{
	if (!c->unit->has_partials) /* left from an epoch before, perhaps of other sizes */
		job_give_partials(c->job, c->unit);
	if (!reduce_of(c)->run)
		reduce_of(c)->run = reduce_run_new(c);
	if (!reduce_of(c)->run)
		return coll_fail(c, -ENOMEM);
	if (!c->unit->has_gradient) /* then it says nothing, and is of a gradient that was dropped */
		c->unit->some_lack = false;
	fused_plan(c);
	return RES_DONE;
}

/* From here on the unit's gradient is this reduction's. */
static enum res op_reduce_begin_run(struct coll *c)
{
	if (reduce_unused_note(c) < 0)
		return coll_fail(c, -ENOMEM);
	reduce_of(c)->run->accumulate = c->unit->has_gradient;
	c->unit->has_gradient = false; /* until it is whole: a device may fail half-way */
	c->unit->has_partials = false;
	fused_begin(c);
	return coll_need_launches(c, reduce_of(c)->run->launches);
}

/* What they have brought is of no use. It has just begun, so that all are in the epoch. */
static void op_reduce_drop_gradients(struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++) {
		struct member *m = c->members[i];
		struct member_unit *mu = member_unit_find(m, c->unit);

		if (c->ops[i]->surrogate)
			continue;
		CHECK(mu && m->epoch == c->job->rec->epoch);
		pool_give(&m->pool, &mu->gradient);
		pool_give(&m->pool, &mu->accumulated);
		mu->included = false;
	}
}

/* Nothing is reduced, but the pass of the unit may be over with it. */
static enum res op_reduce_end_without(struct coll *c)
{
	if (backward_end_unused(c, c->fault))
		return RES_FAILED;
	op_reduce_drop_gradients(c);
	return RES_DONE;
}

static enum reduce_stage op_reduce_after_fold(const struct reduce_run *run)
{
	if (run->sets)
		return REDUCE_OVER_SETS;
	if (run->crossed)
		return REDUCE_REPLICAS;
	return run->defer ? REDUCE_DEFER : REDUCE_BETWEEN;
}

/*
 *   AGREE --no rank has anything--> over
 *     '--> PREPARE --small, several devices--> BATCH (reduce_batch.c) --> BETWEEN or ARRIVE
 *             '--> FOLD, until no kernel is left --> BETWEEN --> FINISH --> ARRIVE --> DONE
 *                    |--all-reduce deferred--> DEFER --> over   ^            ^
 *                    |--replicas have sets of devices--> OVER_SETS           |
 *                    '--replicas cross devices--> REPLICAS ------------------'
 */
static enum res op_reduce_tick(struct coll *c)
{
	bool none;

	switch ((enum reduce_stage)c->stage) {
	case REDUCE_AGREE: /* a gradient of 0 would let decay and momentum move parameters */
		RES_TRY(reduce_unused_agree(c, &none));
		gradient_of(c)->more = reduce_args(c->ops[0])->more;
		gradient_of(c)->external =
			!gradient_of(c)->more && c->unit->rec->optimizer->when == OPTIM_BY_TRAINER;
		if (none)
			return op_reduce_end_without(c);
		/* a prepared step still needs the gradients that this one would overwrite */
		c->stage = REDUCE_PREPARE;
		RES_TRY(apply_wait_step(c->job, &c->waiter));
		fallthrough;
	case REDUCE_PREPARE:
		RES_TRY(coll_check_epoch(c, true));
		RES_TRY(coll_ready(c));
		RES_TRY(op_reduce_take_run(c));
		RES_TRY(reduce_check_chain(c));
		RES_TRY(backward_prepare(c));
		RES_TRY(op_reduce_take_scratch(c));
		RES_TRY(op_reduce_begin_run(c));
		if (reduce_batch_takes(c))
			return reduce_batch_add(c);
		c->stage = REDUCE_FOLD;
		fallthrough;
	case REDUCE_FOLD:
		RES_TRY(op_reduce_fold(c));
		c->stage = op_reduce_after_fold(reduce_of(c)->run);
		return op_reduce_tick(c);
	case REDUCE_REPLICAS:
		RES_TRY(reduce_replicas_tick(c));
		c->stage = reduce_of(c)->run->defer ? REDUCE_DEFER : REDUCE_ARRIVE;
		return op_reduce_tick(c);
	case REDUCE_OVER_SETS:
		RES_TRY(reduce_sets_tick(c));
		c->stage = reduce_of(c)->run->defer ? REDUCE_DEFER : REDUCE_FINISH;
		return op_reduce_tick(c);
	case REDUCE_DEFER:
		op_reduce_deferred(c);
		return RES_DONE;
	case REDUCE_BETWEEN:
		c->stage = REDUCE_FINISH;
		RES_TRY(op_reduce_between(c));
		fallthrough;
	case REDUCE_FINISH:
		c->stage = REDUCE_ARRIVE;
		RES_TRY(op_reduce_finish(c));
		fallthrough;
	case REDUCE_ARRIVE: /* the gradient shards are whole */
		RES_TRY(backward_arrive_tick(c));
		op_reduce_done(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void op_reduce_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ReduceResponse reply = SHARDD__V1__REDUCE_RESPONSE__INIT;

	reduce_unused_reply(op, &reply);
	op_send(op, &reply.base, &reply.info, send, ctx);
}

/* Zeros count where gradients are whole on every rank, as with DDP; a share of the optimizer's
 * own would be missing. */
static bool op_reduce_surrogate_allowed(const struct op *op)
{
	const state_unit *rec = op->unit->rec;

	return rec->reduce_profile >= PROFILE_DDP && rec->optimizer->when != OPTIM_BY_TRAINER;
}

static void op_reduce_surrogate_init(struct op *op)
{
	reduce_args(op)->unused = true;
	reduce_args(op)->tensors = NULL;
	reduce_args(op)->n_tensors = 0;
}

static bool op_reduce_waits_for_readers(const struct op *op)
{
	return op_writes_params(op) && op->unit &&
	       op->unit->rec->optimizer->when == OPTIM_IN_BACKWARD;
}

static int op_reduce_begin(struct op *op, struct fault *f)
{
	return hold_end_use(op, true, f);
}

const struct op_type op_reduce = {
	.name = "Reduce",
	.collective = true,
	.surrogates = true,
	.request = &shardd__v1__reduce_request__descriptor,
	.decode = op_reduce_decode,
	.check = op_reduce_check,
	.coll_tick = op_reduce_tick,
	.coll_bytes = sizeof(struct reduce_state),
	.coll_arrived = reduce_batch_arrived,
	.coll_let_go = op_reduce_let_go,
	.coll_free = op_reduce_free,
	.encode = op_reduce_encode,
	.move = MOVE_REDUCE,
	.reads_inputs = true,
	.begin = op_reduce_begin,
	.surrogate_allowed = op_reduce_surrogate_allowed,
	.surrogate_init = op_reduce_surrogate_init,
	.waits_for_readers = op_reduce_waits_for_readers,
};
