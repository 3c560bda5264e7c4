/*
 * Optimizers in backward (semantics 4.18): what a unit's last Reduce of a backward pass, or
 * the last of its buckets, leads to.
 *
 *   last Reduce --plan holds--> arrived (unscaled, norm taken) ------------Step--> prepared
 *        |                                                                            ^
 *        |--somebody has it gathered--> due --last release--> stepping --> stepped    |
 *        |                               '---- Step, where memory was short ----------'
 *        |--nobody has--> stepping --> stepped --Step, Commit--> (next pass)
 *        '--nobody had from its start on--> stepped by its own kernel (fused.c)
 *
 * The optimizer runs on the same queue as the reduction, unit by unit, each as a whole on
 * all its devices; then its gradient shards go back to their pool. Parameters are changed
 * before the Step: the first such unit of a pass counts as an uncommitted step, so a death
 * from there to the commit leaves the job TORN (if it has a commit to fall back behind).
 * A gather waits for a step that is due or under way, so nobody sees parameters of two steps.
 */
#include "step/backward.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "copies/full.h"
#include "copies/hold.h"
#include "core/check.h"
#include "job/job_journal.h"
#include "op/device_note.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/queue_task.h"
#include "step/apply.h"
#include "step/external.h"
#include "step/shards.h"
#include "unit/norm.h"
#include "unit/optim.h"
#include "unit/runs.h"
#include "work/coll.h"
#include "work/drain.h"

/* The step of one unit. */
struct back_part {
	struct back *back;
	struct queue_task queue;
	struct launch *launches; /* owned */
};

struct back {
	struct job *job;
	struct unit *u;
	uint64_t epoch; /* in which it began */
	unsigned pending;
	int status;
	struct back_part parts[];
};

/* ------------------------------------------------------------ the Reduce begins */

static int backward_check_reduce(const struct unit *u, struct fault *f)
{
	if (u->shards_from)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' was reduced for the last time in this backward "
				 "pass, and the trainers have its shards: end the pass with Step, "
				 "or set more in all Reduces but the last",
				 u->rec->name);
	if (u->step == UNIT_STEP_STEPPED || u->step == UNIT_STEP_STEPPING ||
	    u->step == UNIT_STEP_DUE || u->step == UNIT_STEP_ARRIVED)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' was reduced for the last time in this backward "
				 "pass, and its optimizer has the gradient: end the pass with "
				 "Step, or set more in all Reduces but the last",
				 u->rec->name);
	return 0;
}

static bool backward_plan_concerns(const struct coll *c)
{
	return group_plan_holds(c->group) && !gradient_of(c)->more &&
	       c->unit->rec->optimizer->kind != OPTIM_NONE;
}

/* What lies between tensors in memory that was something else before. Return: RES_DONE: there is
 * nothing between them. */
static enum res backward_clear_gaps(struct coll *c)
{
	struct unit_run *gaps = calloc(c->unit->rec->n_tensors, sizeof(*gaps));
	enum res r = gaps ? coll_need_launches(c, c->unit->rec->n_tensors) : coll_fail(c, -ENOMEM);
	unsigned all = 0;

	for (unsigned d = 0; r == RES_DONE && d < c->n_parts; d++) {
		const struct unit_part *p = &c->unit->parts[d];
		unsigned n = unit_gaps(c->unit, p, gaps);

		all += n;
		for (unsigned i = 0; i < n; i++)
			coll_launch(&c->parts[d], LAUNCH_FILL, gaps[i].n)->fill =
				(struct k_fill){ .dst = optim_at(&p->grads, gaps[i].at),
						 .kind = FILL_CONSTANT };
	}
	free(gaps);
	return all ? coll_kernels(c) : r;
}

/* Asked again when the gaps are cleared, it finds the shards there. */
static enum res backward_need_grads(struct coll *c)
{
	bool fresh = !c->unit->parts[0].grads.slab;
	int r = job_take_grads(c->job, c->unit);

	while (slab_is_short(r) && job_evict(c->job, UINT64_MAX))
		r = job_take_grads(c->job, c->unit);
	r = job_evict_later(c->job, r);
	if (r == 0)
		return fresh && c->unit->layout.dim0 ? backward_clear_gaps(c) : RES_DONE;
	if (r == SLAB_E_LATER)
		return coll_wait_for_node(c);
	op_memory_fault(c->job, r, unit_array_bytes(&c->unit->layout, c->unit->spread),
			"gradient shards", c->fault);
	return RES_FAILED;
}

/* Will the unit be stepped because of it, without a Step? Then nobody may hold it from here on:
 * held up later, the gradient would need memory that is not needed otherwise. */
static bool backward_leads_to_step(const struct coll *c)
{
	const state_optimizer *o = c->unit->rec->optimizer;

	return o->when == OPTIM_IN_BACKWARD && o->kind != OPTIM_NONE && !gradient_of(c)->more &&
	       !group_plan_holds(c->group);
}

enum res backward_prepare(struct coll *c)
{
	/* begun: it had waited for memory */
	if (!gradient_of(c)->begun && backward_check_reduce(c->unit, c->fault))
		return RES_FAILED;
	if (backward_leads_to_step(c))
		RES_TRY(drain_may_write(c, JOB_CHANGE_EARLY));
	if (!gradient_of(c)->fused)
		RES_TRY(backward_need_grads(c));
	if (backward_plan_concerns(c) && c->group->plan.inv_scale != 0)
		RES_TRY(coll_need_scratch(c, COLL_FOUND_INF, SHARDS_FOUND_BYTES));
	if (gradient_of(c)->external)
		external_begin(c);
	return RES_DONE;
}

/* -------------------------------------------------------- as the plan says */

static enum res backward_arrived(struct coll *c)
{
	struct unit *u = c->unit;
	double *norms = c->group->plan.has_clip ? shards_take_norms(c) : NULL;

	if (c->group->plan.has_clip && !norms)
		return coll_fail(c, -ENOMEM);
	free(u->norms);
	u->norms = norms;
	unit_step_move(u, UNIT_STEP_ARRIVED);
	return RES_DONE;
}

/* A rank may have died since: then there is neither a plan nor a use for it. */
static bool backward_is_planned(const struct coll *c)
{
	return backward_plan_concerns(c) && c->ops[0]->m->epoch == c->job->rec->epoch;
}

enum backward_arrive_stage { ARRIVE_BEGIN, ARRIVE_UNSCALE, ARRIVE_NORM, ARRIVE_DONE };

enum res backward_arrive_tick(struct coll *c)
{
	switch ((enum backward_arrive_stage)gradient_of(c)->arrive_stage) {
	case ARRIVE_BEGIN:
		if (gradient_of(c)->fused || !backward_is_planned(c))
			return RES_DONE;
		shards_of(c)->factor = (float)c->group->plan.inv_scale;
		gradient_of(c)->arrive_stage =
			c->group->plan.inv_scale != 0 ? ARRIVE_UNSCALE : ARRIVE_NORM;
		return backward_arrive_tick(c);
	case ARRIVE_UNSCALE:
		RES_TRY(shards_unscale_tick(c));
		gradient_of(c)->arrive_stage = ARRIVE_NORM;
		fallthrough;
	case ARRIVE_NORM:
		if (c->group->plan.has_clip)
			RES_TRY(shards_norm_tick(c, c->group->plan.clip.type));
		gradient_of(c)->arrive_stage = ARRIVE_DONE;
		fallthrough;
	case ARRIVE_DONE:
		gradient_of(c)->arrive_stage = ARRIVE_BEGIN;
		return backward_arrived(c);
	}
	CHECK_NOT_REACHED();
}

/* ------------------------------------------------------------------ stepping */

static void backward_back_free(struct back *b)
{
	for (unsigned d = 0; d < b->u->n_parts; d++) {
		queue_task_deinit(&b->parts[d].queue);
		free(b->parts[d].launches);
	}
	free(b);
}

/* An epoch that has ended meanwhile has torn the job already, or there is no commit. */
void backward_stepped(struct job *job, struct unit *u, bool whole)
{
	CHECK(u->step == UNIT_STEP_STEPPING);
	u->has_gradient = false;
	u->version++;
	unit_stepped(u);
	job_journal_mark_steps(job, u);
	job_change_end(job);
	full_invalidate(job, u);
	if (!whole)
		apply_failed(job);
}

/* Its parameters are free again, whether it was stepped or not. */
void backward_let_go(struct job *job, struct unit *u, bool stepped)
{
	CHECK(u->step == UNIT_STEP_STEPPING && job->step.stepping > 0);
	unit_step_move(u, stepped ? UNIT_STEP_STEPPED : UNIT_STEP_NONE);
	job_give_grads(job, u);
	job->step.stepping--;
	condition_signal(&u->step_done);
	apply_go_on(job);
}

void backward_hold(struct job *job, struct unit *u)
{
	CHECK(u->step != UNIT_STEP_STEPPING);
	unit_step_move(u, UNIT_STEP_STEPPING);
	job->step.stepping++;
}

static void backward_back_end(struct back *b)
{
	struct job *job = b->job;
	struct unit *u = b->u;
	bool in_time = b->epoch == job->rec->epoch; /* else its pass is over */

	backward_stepped(job, u, !b->status);
	backward_back_free(b);
	backward_let_go(job, u, in_time);
	job_ran(job);
}

static void backward_on_stepped(struct backend_task *task, int status)
{
	struct back_part *p = CONTAINER_OF(task, struct back_part, queue.task);
	struct back *b = p->back;

	queue_task_done(&p->queue);
	b->status = b->status ? b->status : status;
	CHECK(b->pending > 0);
	if (--b->pending == 0)
		backward_back_end(b);
}

const struct step_rates *backward_rates(const struct job *job, const struct unit *u)
{
	return &job->groups[u->rec->group]->plan.rates;
}

/* Streams that still read the shards themselves; who reads a copy is not concerned. */
static int backward_fill_part(struct back *b, unsigned d)
{
	const struct unit_part *p = &b->u->parts[d];
	const struct step_rates *rates = backward_rates(b->job, b->u);
	size_t n = optim_step_launches(b->u, p, rates, NULL);
	struct back_part *part = &b->parts[d];

	part->launches = calloc(n ? n : 1, sizeof(*part->launches));
	if (!part->launches)
		return -ENOMEM;
	optim_step_launches(b->u, p, rates, part->launches);
	part->queue.task = (struct backend_task){ .launches = part->launches,
						  .n_launches = (unsigned)n,
						  .sync = true,
						  .done = backward_on_stepped };
	return unit_is_direct(b->u) ? queue_task_wait(&part->queue, p->reads.waits, p->reads.n) : 0;
}

static struct back *backward_back_new(struct job *job, struct unit *u)
{
	struct back *b = calloc(1, sizeof(*b) + u->n_parts * sizeof(b->parts[0]));
	int r = b ? 0 : -ENOMEM;

	if (b) {
		b->job = job;
		b->u = u;
		b->epoch = job->rec->epoch;
		b->pending = u->n_parts;
		for (unsigned d = 0; d < u->n_parts; d++) {
			b->parts[d].back = b;
			queue_task_init(&b->parts[d].queue, job);
			b->parts[d].queue.note =
				(struct device_note){ .name = "Step", .job = job, .unit = u };
		}
	}
	for (unsigned d = 0; r == 0 && d < u->n_parts; d++)
		r = backward_fill_part(b, d);
	if (r == 0)
		return b;
	if (b)
		backward_back_free(b);
	return NULL;
}

/* Without memory for it the unit stays due: the Step does it then, with what it needs. */
void backward_released(struct job *job, struct unit *u)
{
	struct back *b;

	if (!unit_is_read(u))
		condition_signal(&u->step_done); /* ShardDone; whoever is too early waits again */
	if (u->step != UNIT_STEP_DUE || unit_is_read(u))
		return;
	CHECK(u->has_gradient && !u->summoned_ranks);
	b = backward_back_new(job, u);
	if (!b)
		return;
	backward_hold(job, u);
	job->running++;
	apply_mark(job);
	job_change_begin(job);
	for (unsigned d = 0; d < u->n_parts; d++)
		queue_task_submit(&b->parts[d].queue, u->parts[d].device->backend, 0);
}

/* -------------------------------------------------------------- the Reduce ends */

static void backward_offer(struct coll *c)
{
	external_ready(c);
	if (c->unit->rec->guarded)
		hold_drop(c->job, c->unit);
}

void backward_reduced(struct coll *c)
{
	struct unit *u = c->unit;

	if (!u->has_gradient) { /* of an epoch that has ended */
		unit_pass_end(u);
		return;
	}
	if (gradient_of(c)->more)
		return;
	if (u->rec->optimizer->when == OPTIM_BY_TRAINER) {
		backward_offer(c);
	} else if (u->rec->optimizer->when == OPTIM_IN_BACKWARD && u->step != UNIT_STEP_ARRIVED &&
		   u->rec->optimizer->kind != OPTIM_NONE) {
		unit_step_move(u, UNIT_STEP_DUE);
		if (u->rec->guarded)
			hold_drop(c->job, u); /* what a policy keeps, as at a step */
		backward_released(c->job, u);
	}
}

/* What is the daemon's to step waits for its Step. */
int backward_end_unused(struct coll *c, struct fault *f)
{
	struct unit *u = c->unit;

	if (u->rec->optimizer->when != OPTIM_BY_TRAINER || gradient_of(c)->more || !u->has_gradient)
		return 0;
	if (backward_check_reduce(u, f))
		return f->code;
	backward_offer(c);
	return 0;
}

/* --------------------------------------------------------------- who looks on */

static bool backward_holds(const struct op *op)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	return mu && mu->gathers;
}

static enum res backward_gather_own(struct op *op)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	if (!mu || mu->shard_state == SHARD_GIVEN_BACK)
		return op_wait(op, &op->unit->step_done);
	fault_set(&op->fault, FAULT_STATE, NULL,
		  "unit '%.100s' cannot be gathered: this rank has not given its shard back "
		  "(NextShard, ShardDone)",
		  op->unit->rec->name);
	return RES_FAILED;
}

/* A rank that has gathered the unit already gets the same copy. */
enum res backward_gather(struct op *op)
{
	struct unit *u = op->unit;

	if (u->shard_writes)
		return op_wait(op, &u->step_done);
	if (u->shards_left && !backward_holds(op))
		return backward_gather_own(op);
	if (u->step == UNIT_STEP_DUE)
		backward_released(op->m->job, u);
	if (u->step == UNIT_STEP_STEPPING ||
	    (u->step == UNIT_STEP_DUE && u->gathered_ranks && !backward_holds(op)))
		return op_wait(op, &u->step_done);
	if (u->step != UNIT_STEP_DUE || unit_is_read(u))
		return RES_DONE;
	fault_errno(&op->fault, -ENOMEM, "stepping a unit in backward");
	return RES_FAILED;
}
