#include "step/doubt.h"

#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "job/group.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/position.h"
#include "op/op.h"
#include "op/op_list.h"
#include "step/apply.h"
#include "step/commit.h"

struct doubt {
	struct job *job;
	uint64_t epoch;        /* that has ended */
	struct commit *commit; /* that was announced; owned; NULL: none */
	bool completes;
	struct waiter waiter; /* until the step is applied */
};

static bool doubt_is_prepared(const struct job *job)
{
	return job->step.state == JOB_STEP_PREPARED && job->step.across;
}

static void doubt_free(struct doubt *d)
{
	d->job->step.doubt = NULL;
	commit_free(d->job, d->commit);
	free(d);
}

/* ------------------------------------------------------------------ an epoch ends */

/* The Commit that all ranks here have announced, and that has not started. */
static struct match_slot *doubt_find_commit(struct job *job)
{
	struct group *world = job_group_by_id(job, 0);

	for (size_t i = 0; world && i < world->match.n_slots; i++) {
		struct match_slot *s = &world->match.slots[i];

		if (s->here && !s->complete && !s->failed &&
		    CONTAINER_OF(s->first, struct op, entry)->type == &op_commit)
			return s;
	}
	return NULL;
}

/* Return: NULL: no memory. */
static struct commit *doubt_take_commit(struct job *job, const struct match_slot *s)
{
	const struct op *first = CONTAINER_OF(s->first, struct op, entry);
	struct commit *c = commit_new(job, op_commit_step(first));

	for (uint32_t i = 0; c && i < job_group_by_id(job, 0)->here; i++) {
		struct op *op = CONTAINER_OF(s->entries[i], struct op, entry);

		commit_add(c, op->m->rank, op_commit_take(op));
	}
	return c;
}

void doubt_epoch_ends(struct job *job)
{
	struct match_slot *s = doubt_find_commit(job);
	struct doubt *d = job->step.doubt;

	if (d && !d->completes && job->life.deleted)
		doubt_free(d);
	if (d || job->life.deleted || job->life.torn || job->step.committing ||
	    (!s && !doubt_is_prepared(job)))
		return;
	d = calloc(1, sizeof(*d));
	if (!d) {
		log_error("job", "no memory to keep a step that is in doubt job=%s", job->label);
		return;
	}
	d->job = job;
	d->epoch = job->rec->epoch;
	d->commit = s ? doubt_take_commit(job, s) : NULL;
	job->step.doubt = d;
}

void doubt_open_of(const struct job *job, struct doubt_open *ret)
{
	const struct doubt *d = job->step.doubt;

	*ret = (struct doubt_open){ 0 };
	if (!d)
		return;
	ret->has_commit = d->commit;
	ret->step = d->commit ? d->commit->step : 0;
	ret->epoch = d->epoch;
	ret->has_prepared = doubt_is_prepared(job);
	ret->prepared = job->step.id;
}

bool doubt_position_dropped(const struct job *job, uint64_t *ret)
{
	state_job rec = *job->rec;

	if (job->step.doubt && kept_at_commits(job)) {
		*ret = rec.step;
		return rec.has_commit;
	}
	if (kept_goes_back(job)) {
		rec.partial = false;
		rec.uncommitted_steps = rec.kept_uncommitted;
	} else if (rec.partial) {
		return false;
	}
	return position_of(&rec, ret);
}

bool doubt_position_applied(const struct job *job, uint64_t *ret)
{
	const struct job_step *step = &job->step;
	state_job rec = *job->rec;

	*ret = step->number;
	if (step->numbered)
		return true;
	rec.partial = false;
	rec.skips_since += step->skips;
	rec.steps_since += !step->skips;
	rec.uncommitted_steps += !step->skips;
	return position_of(&rec, ret);
}

/* ------------------------------------------------------------------ it is known */

/* It never was. What its epoch's end would have done is done now. */
static void doubt_drop(struct doubt *d)
{
	struct job *job = d->job;

	log_info("job", "step in doubt dropped job=%s epoch=%llu", job->label,
		 (unsigned long long)d->epoch);
	doubt_free(d);
	apply_drop_prepared(job);
	job_tear(job);
	kept_epoch_ended(job);
	kept_go_on(job);
}

static void doubt_completed(struct waiter *w)
{
	struct doubt *d = CONTAINER_OF(w, struct doubt, waiter);
	struct job *job = d->job;
	struct fault f = FAULT_NULL;
	bool committing = job->step.committing, abandoned = false;

	if (committing)
		(void)commit_end(job, &abandoned, &f);
	CHECK(!abandoned); /* what all nodes have prepared is applied */
	if (f.code)
		log_error("job", "a step that was decided cannot be completed job=%s why=\"%s\"",
			  job->label, f.text);
	else
		log_info("job", "step in doubt completed job=%s epoch=%llu committed=%s",
			 job->label, (unsigned long long)d->epoch, committing ? "yes" : "no");
	doubt_free(d);
	if (!committing) {
		job_tear(job);
		kept_epoch_ended(job);
	}
	job_journal_write(job);
	job_ran(job);
}

static void doubt_complete(struct doubt *d)
{
	struct job *job = d->job;

	d->completes = true;
	job->running++;
	if (d->commit)
		commit_begin(job, STEAL_PTR(d->commit));
	apply_allow_all(job);
	waiter_init(&d->waiter, doubt_completed);
	if (apply_wait(job, &d->waiter) == RES_DONE)
		doubt_completed(&d->waiter);
}

static bool doubt_same_step(const struct job_step_id *a, const struct job_step_id *b)
{
	return a->epoch == b->epoch && a->group == b->group && a->number == b->number;
}

void doubt_resolve(struct job *job, const struct doubt_ruling *r)
{
	struct doubt *d = job->step.doubt;
	struct doubt_open open;

	if (!d || d->completes)
		return;
	doubt_open_of(job, &open);
	if (open.has_commit && r->has_commit && r->step == open.step && r->epoch == open.epoch) {
		doubt_complete(d);
		return;
	}
	d->commit = commit_free(job, d->commit);
	if (open.has_prepared && r->has_applied && doubt_same_step(&open.prepared, &r->applied) &&
	    !kept_at_commits(job))
		doubt_complete(d);
	else
		doubt_drop(d);
}
