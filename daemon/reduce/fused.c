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

#include <stdlib.h>

#include "copies/hold.h"
#include "core/check.h"
#include "op/guard.h"
#include "op/op.h"
#include "reduce/reduce_batch.h"
#include "reduce/reduce_run.h"
#include "reduce/reduce_unused.h"
#include "step.h"
#include "step/backward.h"
#include "unit/optim.h"
#include "unit/runs.h"
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
	       !(c->n_parts == 1 && c->job->node->engine_for_one);
}

/* The steps of a part cut its spans into at most so many launches. */
static size_t fused_most_steps(const struct coll *c)
{
	size_t most = 0;

	for (unsigned d = 0; d < c->n_parts; d++) {
		size_t n = optim_step_launches(c->unit, &c->unit->parts[d],
					       backward_rates(c->job, c->unit), NULL);

		most = n > most ? n : most;
	}
	return most;
}

/* Without memory for the launches it is done as elsewhere. */
void fused_plan(struct coll *c)
{
	struct reduce_run *run = reduce_of(c)->run;
	size_t steps;

	CHECK(gradient_of(c)->fused < FUSED_BEGUN);
	gradient_of(c)->fused = FUSED_NOT;
	if (!fused_is_possible(c))
		return;
	steps = fused_most_steps(c);
	free(run->steps);
	run->steps = calloc(steps ? steps : 1, sizeof(*run->steps));
	run->step_room = (unsigned)steps;
	if (!run->steps)
		return;
	if (run->launches < steps + run->spans)
		run->launches = steps + run->spans;
	gradient_of(c)->fused = FUSED_WANTED;
}

/* ---------------------------------------------------------------- stepping */

void fused_begin(struct coll *c)
{
	if (!gradient_of(c)->fused)
		return;
	CHECK(gradient_of(c)->fused == FUSED_WANTED && reduce_of(c)->run->steps);
	if (c->unit->rec->guarded)
		hold_drop(c->job, c->unit); /* what a policy keeps, as at a step */
	backward_hold(c->job, c->unit);
	gradient_of(c)->fused = FUSED_BEGUN;
}

static bool fused_in_time(const struct coll *c)
{
	return c->ops[0]->m->epoch == c->job->rec->epoch;
}

bool fused_ready(struct coll *c, unsigned d)
{
	struct reduce_run *run = reduce_of(c)->run;

	if (gradient_of(c)->fused == FUSED_BEGUN && !fused_in_time(c))
		return false;
	if (gradient_of(c)->fused == FUSED_BEGUN)
		backward_mark(c->job);
	gradient_of(c)->fused = FUSED_STEPPED;
	run->n_steps = (unsigned)optim_step_launches(c->unit, &c->unit->parts[d],
						     backward_rates(c->job, c->unit), run->steps);
	CHECK(run->n_steps <= run->step_room); /* as many as were counted when it was planned */
	return true;
}

static struct k_step fused_step_of(const struct launch *launch)
{
	struct k_step s = { 0 };

	if (launch->kind == LAUNCH_ADAMW) {
		s.kind = K_STEP_ADAMW;
		s.adamw = launch->adamw;
	} else if (launch->kind == LAUNCH_ADAM) {
		s.kind = K_STEP_ADAM;
		s.adam = launch->adam;
	} else {
		CHECK(launch->kind == LAUNCH_SGD);
		s.kind = K_STEP_SGD;
		s.sgd = launch->sgd;
	}
	return s;
}

static uint64_t fused_begin_of(const struct k_step *s, const struct unit_part *p)
{
	const float *first = s->kind == K_STEP_ADAMW  ? s->adamw.p
			     : s->kind == K_STEP_ADAM ? s->adam.p
						      : s->sgd.p;

	return (uint64_t)(first - optim_at(&p->params, 0));
}

/* A step may reach over several spans: what is between them stays as it is. */
void fused_launches(struct coll *c, unsigned d, const struct unit_run *span,
		    const struct k_reduce *r)
{
	const struct reduce_run *run = reduce_of(c)->run;
	uint64_t span_end = span->at + span->n;

	for (unsigned i = 0; i < run->n_steps; i++) {
		const struct k_step step = fused_step_of(&run->steps[i]);
		uint64_t at = fused_begin_of(&step, &c->unit->parts[d]), end = at + run->steps[i].n;
		uint64_t from = at > span->at ? at : span->at;

		end = end < span_end ? end : span_end;
		if (from >= end)
			continue;
		coll_launch(&c->parts[d], LAUNCH_REDUCE_STEP, end - from)->reduce_step =
			(struct k_reduce_step){ .reduce = *r,
						.first = from - span->at,
						.step = k_step_at(&step, from - at, NULL) };
	}
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
	backward_let_go(c->job, c->unit, fused == FUSED_STEPPED && fused_in_time(c));
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
