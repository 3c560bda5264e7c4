/*
 * Step: all ranks want the optimizer stepped. Prepared here, applied in apply.c. It ends the
 * backward pass: what PlanBackward said is decided here, and optimizers in backward have
 * left nothing to do, or all of it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copies/hold.h"
#include "core/check.h"
#include "job/kept.h"
#include "job/position.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "step/backward.h"
#include "step/doubt.h"
#include "op/op_list.h"
#include "step/step_settings.h"
#include "unit/norm.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

struct step_args {
	struct step_rates rates; /* with a reference */
	bool skip_if_found, discard;
	struct position_mark *mark; /* owned; NULL: it says no number */
	uint64_t number;            /* of the mark, also of a surrogate's peer */
	bool numbered;
};

static inline struct step_args *step_args(const struct op *op)
{
	_Static_assert(sizeof(struct step_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

static int op_step_decode_mark(struct op *op, const Shardd__V1__StepRequest *r, struct fault *f)
{
	if (r->blob.len && !r->optional_step_case)
		return fault_set(f, FAULT_INVALID, "step",
				 "a blob is given, but not the number of the step: give both");
	if (!r->optional_step_case)
		return 0;
	if (r->group)
		return fault_set(f, FAULT_INVALID, "step",
				 "step is %llu, and group %u: only a Step of all ranks (group 0) "
				 "has a number",
				 (unsigned long long)r->step, r->group);
	step_args(op)->number = r->step;
	step_args(op)->numbered = true;
	return position_mark_new(r->step, r->blob.data, r->blob.len, &step_args(op)->mark, f);
}

static int op_step_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__StepRequest *r = (const Shardd__V1__StepRequest *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	step_args(op)->rates = (struct step_rates){ .has_lr = r->optional_lr_case, .lr = r->lr };
	step_args(op)->skip_if_found = r->skip_if_found;
	step_args(op)->discard = r->discard;
	if (step_settings_check_lr(&step_args(op)->rates, f) || op_take_group(op, r->group, f) ||
	    op_step_decode_mark(op, r, f))
		return f->code;
	return step_settings_take(op, r->settings, r->n_settings, &step_args(op)->rates, f);
}

static void op_step_forget(struct op *op)
{
	step_rates_clear(&step_args(op)->rates);
	position_mark_free(op->m->job, step_args(op)->mark);
}

static int op_step_check_mark(struct op *op, struct fault *f)
{
	struct position_mark *m = step_args(op)->mark;
	struct job *job = op->m->job;

	if (!m)
		return 0;
	if (kept_at_commits(job) && m->bytes)
		return fault_set(f, FAULT_INVALID, "blob",
				 "job '%s' resumes at its commits: give the blob to Commit",
				 job->rec->name);
	if (position_check_step(job, m->number, f))
		return f->code;
	if (quota_charge(&job->quota, MEM_CONTROL, m->bytes))
		return op_memory_fault(job, SLAB_E_QUOTA, m->bytes, "a blob", f);
	m->charged = true;
	return 0;
}

static int op_step_check(struct op *op, struct fault *f)
{
	const struct step_rates *rates = &step_args(op)->rates;
	const struct position_mark *mark = step_args(op)->mark;
	char text[STEP_SETTINGS_TEXT], number[24] = "";
	uint64_t bits = 0;

	if (op_check_not_torn(op, f) || op_step_check_mark(op, f))
		return f->code;
	if (rates->has_lr)
		memcpy(&bits, &rates->lr, sizeof(bits));
	if (mark)
		snprintf(number, sizeof(number), " %llu", (unsigned long long)mark->number);
	op_print(op, "Step%s%s%s%s", number, step_args(op)->skip_if_found ? " (skip_if_found)" : "",
		 step_args(op)->discard ? " (discard)" : "", step_settings_text(rates, text));
	op->entry.print.words[6] = mark ? mark->number : 0;
	op->entry.print.words[7] = mark != NULL;
	op->entry.print.words[2] = rates->has_lr;
	op->entry.print.words[4] = step_args(op)->skip_if_found | step_args(op)->discard << 1;
	op->entry.print.words[3] = bits;
	op->entry.print.words[5] = settings_word(rates->settings);
	return 0;
}

/* Nobody may read parameters that are about to change under him. */
static int op_step_check_released(const struct coll *c, struct fault *f)
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

static bool op_step_is_of(const struct coll *c, const struct unit *u)
{
	return u->rec->group == c->group->id;
}

static bool op_step_is_stepped_by_us(const struct coll *c, const struct unit *u)
{
	return op_step_is_of(c, u) && u->has_gradient && u->rec->optimizer->kind != OPTIM_NONE;
}

/* Optimizers in backward had no way to know of a learning rate that comes now. */
static int op_step_check_lr(const struct coll *c, struct fault *f)
{
	if (!step_rates_given(&step_args(c->ops[0])->rates))
		return 0;
	for (uint32_t i = 0; i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];

		if (op_step_is_of(c, u) && u->step == UNIT_STEP_STEPPED &&
		    u->rec->optimizer->kind != OPTIM_NONE)
			return fault_set(f, FAULT_STATE, NULL,
					 "unit '%.100s' was stepped in backward: give the "
					 "learning rate of such units in PlanBackward",
					 u->rec->name);
	}
	if (step_rates_given(&c->group->plan.rates))
		return fault_set(f, FAULT_INVALID, "lr",
				 "lr or settings are given in Step and in PlanBackward: give "
				 "them once");
	return 0;
}

/* With a plan every gradient has been dealt with by its last Reduce. */
static int op_step_check_arrived(const struct coll *c, struct fault *f)
{
	for (uint32_t i = 0; group_plan_holds(c->group) && i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];

		if (op_step_is_stepped_by_us(c, u) && u->step != UNIT_STEP_ARRIVED)
			return fault_set(f, FAULT_STATE, NULL,
					 "the last Reduce of unit '%.100s' in this backward pass "
					 "is missing: all of them were called with more",
					 u->rec->name);
	}
	return 0;
}

/* The order of a ClipGradNorm: devices, units, blocks. */
static double op_step_planned_norm(const struct coll *c)
{
	double type = c->group->plan.clip.type, sum = 0;

	for (unsigned d = 0; d < coll_devices(c); d++) {
		for (uint32_t i = 0; i < c->job->n_units; i++) {
			const struct unit *u = c->job->units[i];
			const double *at = u->norms;

			if (!op_step_is_stepped_by_us(c, u) || !norm_blocks_of(u, d))
				continue;
			CHECK(at);
			for (unsigned before = 0; before < d; before++)
				at += norm_blocks_of(u, before);
			for (size_t b = 0; b < norm_blocks_of(u, d); b++)
				sum = norm_add(sum, at[b], type);
		}
	}
	return norm_of(sum, type);
}

/* Gradients that nobody steps with. */
static void op_step_drop_gradients(struct coll *c)
{
	for (uint32_t i = 0; i < c->job->n_units; i++)
		if (op_step_is_of(c, c->job->units[i]))
			c->job->units[i]->has_gradient = false;
	c->job->mem.stray_gradients = true;
}

/* The pass is over; work that is left is in job->step. Shards that no trainer was handed do not
 * belong to the next pass. */
static void op_step_drop_never_handed_out(struct coll *c)
{
	for (uint32_t i = 0; i < c->job->n_units; i++) {
		struct unit *u = c->job->units[i];

		if (op_step_is_of(c, u) && u->rec->optimizer->when == OPTIM_BY_TRAINER)
			u->has_gradient = false;
	}
}

static void op_step_end_pass(struct coll *c)
{
	struct job_step *step = &c->job->step;

	op_step_drop_never_handed_out(c);

	hold_step(c->job, c->group->id);
	step->counted = step->mid;
	step->mid = false;
	job_pass_end(c->job, c->group);
}

static void op_step_answer(struct coll *c, bool skipped, bool found)
{
	/* what is discarded need not have come, so it has no norm */
	bool has_norm = c->group->plan.has_clip && !step_args(c->ops[0])->discard;

	for (uint32_t i = 0; i < c->n; i++) {
		*shards_outcome(c->ops[i]) =
			(struct shards_outcome){ .total_norm = shards_of(c)->total,
						 .has_total_norm = has_norm,
						 .found_inf = found,
						 .skipped = skipped };
	}
}

/* What the ranks say of it; the world's ranks are the ops' order. */
static enum res op_step_take_marks(struct coll *c)
{
	struct position_mark **marks =
		calloc(c->job->rec->world_size, sizeof(struct position_mark *));
	int r = marks ? 0 : -ENOMEM;

	for (uint32_t i = 0; marks && i < c->n; i++)
		marks[c->ops[i]->m->rank] = step_args(c->ops[i])->mark;
	if (r == 0 && group_is_ordered(c->group))
		r = state_job_reserve_applied(c->job->rec, group_key(c->group));
	if (r == 0)
		r = position_prepare(c->job, marks);
	if (r == 0 && step_args(c->ops[0])->numbered) { /* also where no rank has inputs */
		c->job->step.number = step_args(c->ops[0])->number;
		c->job->step.numbered = true;
	}
	for (uint32_t i = 0; r == 0 && i < c->n; i++)
		step_args(c->ops[i])->mark = marks[c->ops[i]->m->rank];
	free(marks);
	return r < 0 ? coll_fail(c, r) : RES_DONE;
}

/* It is in job->step. Other nodes prepare it, too: it is applied when all have. */
static void op_step_tell(struct coll *c)
{
	struct job *job = c->job;

	if (job->step.across)
		doubt_note_prepared(job);
	if (job->step.across && job->jobs->ops.prepared)
		job->jobs->ops.prepared(c->group, job->step.id.number);
}

/* Which one it is, on all nodes. */
static void op_step_identify(struct coll *c)
{
	struct job_step *step = &c->job->step;

	step->across = step->gated = group_is_ordered(c->group);
	step->id = (struct job_step_id){ c->job->rec->epoch, group_key(c->group),
					 c->ops[0]->entry.number };
}

/* Nobody may be at another step because the epoch has ended before it came here. */
static void op_step_skip_across(struct coll *c, bool found)
{
	struct job_step *step = &c->job->step;

	job_step_move(c->job, JOB_STEP_PREPARED);
	step->group = c->group->id;
	step->scales = false;
	step->skips = true;
	op_step_identify(c);
	op_step_answer(c, true, found);
	op_step_drop_gradients(c);
	op_step_end_pass(c);
}

static void op_step_skip(struct coll *c, bool found)
{
	if (group_is_ordered(c->group)) {
		op_step_skip_across(c, found);
		return;
	}
	position_stepped(c->job, true);
	op_step_answer(c, true, found);
	op_step_drop_gradients(c);
	op_step_end_pass(c);
}

static int op_step_check_all(const struct coll *c, struct fault *f)
{
	if (op_step_check_released(c, f) || job_pass_check_over(c->job, c->group, f))
		return f->code;
	return op_step_check_lr(c, f);
}

/* It is applied later: step/apply.c. */
static void op_step_note(struct coll *c)
{
	struct job_step *step = &c->job->step;
	const struct pass_plan *plan = &c->group->plan;
	const struct op *op = c->ops[0];

	CHECK(step->state == JOB_STEP_NONE && !step->stepping);
	step->scales =
		plan->has_clip && norm_clip_factor(&plan->clip, shards_of(c)->total, &step->factor);
	job_step_move(c->job, JOB_STEP_PREPARED);
	step->group = c->group->id;
	step_rates_copy(&step->rates,
			step_rates_given(&plan->rates) ? &plan->rates : &step_args(op)->rates);
	op_step_identify(c);
	op_step_answer(c, false, c->group->found_inf);
	op_step_end_pass(c);
	if (!step->across && !apply_has_units(c->job) &&
	    !kept_goes_back(c->job)) /* all were stepped in backward */
		position_stepped(c->job, false);
}

static enum res op_step_prepare(struct coll *c)
{
	const struct op *op = c->ops[0];
	const struct pass_plan *plan = &c->group->plan;
	bool found = c->group->found_inf;

	if (op_step_check_all(c, c->fault))
		return RES_FAILED;
	if (step_args(op)->discard) {
		RES_TRY(op_step_take_marks(c));
		op_step_skip(c, found);
		return RES_DONE;
	}
	if (op_step_check_arrived(c, c->fault))
		return RES_FAILED;
	if (plan->has_clip)
		shards_of(c)->total = op_step_planned_norm(c);
	if (found && (step_args(op)->skip_if_found || plan->inv_scale != 0)) {
		RES_TRY(op_step_take_marks(c));
		op_step_skip(c, found);
		return RES_DONE;
	}
	c->everywhere =
		plan->has_clip && norm_clip_check(&plan->clip, shards_of(c)->total, c->fault);
	if (c->everywhere)
		return RES_FAILED;
	RES_TRY(op_step_take_marks(c));
	op_step_note(c);
	return RES_DONE;
}

/* Steps without a commit between them: those before are applied now. While this one waits, a step
 * of another group may be prepared: so it asks again. */
static enum res op_step_tick(struct coll *c)
{
	RES_TRY(coll_check_epoch(c, true));
	RES_TRY(apply_wait(c->job, &c->waiter));
	RES_TRY(coll_check_epoch(c, true));
	if (group_is_ordered(c->group) && c->job->mem.pooled_waiting && !c->job->jobs->keeper_lost)
		return coll_wait_for_node(c); /* gradients that a successor would not have */
	RES_TRY(op_step_prepare(c));
	op_step_tell(c);
	return RES_DONE;
}

static void op_step_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__StepResponse reply = SHARDD__V1__STEP_RESPONSE__INIT;

	reply.skipped = shards_outcome(op)->skipped;
	reply.found_inf = shards_outcome(op)->found_inf;
	if (shards_outcome(op)->has_total_norm) {
		reply.optional_total_norm_case =
			SHARDD__V1__STEP_RESPONSE__OPTIONAL_TOTAL_NORM_TOTAL_NORM;
		reply.total_norm = shards_outcome(op)->total_norm;
	}
	op_send(op, &reply.base, &reply.info, send, ctx);
}

static void op_step_surrogate_init(struct op *op)
{
	settings_ref(step_args(op)->rates.settings);
	step_args(op)->mark = NULL; /* of the op that it was copied from */
}

const struct op_type op_step = {
	.name = "Step",
	.collective = true,
	.surrogates = true,
	.request = &shardd__v1__step_request__descriptor,
	.decode = op_step_decode,
	.check = op_step_check,
	.coll_tick = op_step_tick,
	.coll_bytes = sizeof(struct shards_state),
	.coll_free = shards_free,
	.encode = op_step_encode,
	.move = MOVE_NEEDS_IDLE,
	.forget = op_step_forget,
	.ends_step = true,
	.surrogate_init = op_step_surrogate_init,
};
