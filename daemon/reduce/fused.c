/*
 * A Reduce whose last kernel steps the unit: the gradient goes from the reduction to the optimizer block by block,
 * and is never in memory. With an optimizer in backward, where
 *
 * - nobody reads the parameters when the Reduce begins; and nobody begins to until it is over,
 *   as while the unit is stepped;
 * - no plan needs the gradient first (a norm, an unscaling that may find an infinity);
 * - it is the unit's only Reduce of the pass, or its last one: then the shards that hold those before
 *   are an input more, and are given back afterwards;
 * - it is not one of a batch, nor of a DDP's buckets, and no trainer's stream is waited for: with a
 *   promise that was not kept nothing may have been changed;
 * - all of its tensors were used.
 *
 * Everywhere else the unit is stepped behind its Reduce, or later (backward.c), with the same bits.
 * The pass counts as changing parameters from the submission of that kernel on.
 */
#include "reduce/fused.h"

#include "copies/hold.h"
#include "core/check.h"
#include "op/guard.h"
#include "op/op.h"
#include "reduce/fused_steps.h"
#include "reduce/reduce_batch.h"
#include "reduce/reduce_run.h"
#include "reduce/reduce_unused.h"
#include "step/backward.h"
#include "work/coll.h"

/* ----------------------------------------------------------------- whether */

static bool fused_is_last(const struct coll *c)
{
	return !reduce_args(c->ops[0])->more && !reduce_args(c->ops[0])->defer;
}

/* By streams that have let go of the shards themselves, and have not come so far. */
static bool fused_is_still_read(const struct unit *u)
{
	for (unsigned d = 0; unit_is_direct(u) && d < u->n_parts; d++)
		if (u->parts[d].reads.n)
			return true;
	return unit_is_read(u);
}

static bool fused_is_possible(const struct coll *c)
{
	const struct unit *u = c->unit;
	const state_optimizer *o = u->rec->optimizer;

	return o->kind != OPTIM_NONE && o->when == OPTIM_IN_BACKWARD && fused_is_last(c) &&
	       !group_plan_holds(c->group) && !u->some_lack && !reduce_leaves_out(c) &&
	       !fused_is_still_read(u) && !coll_promised(c) && !reduce_batch_takes(c) &&
	       !(coll_is_alone(c) && c->job->node->engine_for_one);
}

/* Without memory for the launches it is done as elsewhere. */
void fused_plan(struct coll *c)
{
	struct reduce_run *run = reduce_of(c)->run;

	CHECK(gradient_of(c)->fused < FUSED_BEGUN);
	gradient_of(c)->fused = FUSED_NOT;
	if (!fused_is_possible(c))
		return;
	if (fused_steps_init(&run->steps, c) < 0)
		return;
	if (run->launches < run->steps.room + run->spans)
		run->launches = run->steps.room + run->spans;
	gradient_of(c)->fused = FUSED_WANTED;
}

/* ---------------------------------------------------------------- stepping */

void fused_begin(struct coll *c)
{
	if (!gradient_of(c)->fused)
		return;
	CHECK(gradient_of(c)->fused == FUSED_WANTED && reduce_of(c)->run->steps.launches);
	if (c->unit->rec->guarded)
		hold_drop(c->job, c->unit); /* what a policy keeps, as at a step */
	backward_hold(c->job, c->unit);
	gradient_of(c)->fused = FUSED_BEGUN;
}

/* ------------------------------------------------------------------ the end */

void fused_end(struct coll *c)
{
	enum fused fused = gradient_of(c)->fused;

	CHECK(fused >= FUSED_BEGUN);
	gradient_of(c)->fused = FUSED_NOT;
	if (fused == FUSED_STEPPED)
		backward_stepped(c->job, c->unit, true);
	else
		unit_pass_end(c->unit); /* of an epoch that has ended */
	backward_let_go(c->job, c->unit, fused == FUSED_STEPPED && fused_steps_in_time(c));
}

void fused_failed(struct coll *c)
{
	bool begun = gradient_of(c)->fused >= FUSED_BEGUN;

	if (gradient_of(c)->fused == FUSED_STEPPED)
		backward_stepped(c->job, c->unit, false);
	gradient_of(c)->fused = FUSED_NOT;
	if (begun)
		backward_let_go(c->job, c->unit, false);
}
