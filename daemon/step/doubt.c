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
#include "step/doubt_record.h"

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

/* @takes: its blobs are taken out of the ops; else they stay theirs. Return: NULL: no memory. */
static struct commit *doubt_take_commit(struct job *job, const struct match_slot *s, bool takes)
{
	const struct op *first = CONTAINER_OF(s->first, struct op, entry);
	struct commit *c = commit_new(job, op_commit_step(first));

	for (uint32_t i = 0; c && i < job_group_by_id(job, 0)->here; i++) {
		struct op *op = CONTAINER_OF(s->entries[i], struct op, entry);

		commit_add(c, op->m->rank, takes ? op_commit_take(op) : op_commit_mark(op));
	}
	return c;
}

/* @commit is taken. */
static void doubt_begin(struct job *job, uint64_t epoch, struct commit *commit)
{
	struct doubt *d = calloc(1, sizeof(*d));

	if (!d) {
		log_error("job", "no memory to keep a step that is in doubt job=%s", job->label);
		commit_free(job, commit);
		doubt_record_clear(job);
		return;
	}
	d->job = job;
	d->epoch = epoch;
	d->commit = commit;
	job->step.doubt = d;
}

/* It never was. What its epoch's end would have done is done now. */
static void doubt_drop(struct doubt *d)
{
	struct job *job = d->job;

	log_info("job", "step in doubt dropped job=%s epoch=%llu", job->label,
		 (unsigned long long)d->epoch);
	doubt_free(d);
	apply_drop_prepared(job);
	doubt_record_clear(job);
	job_tear(job);
	kept_epoch_ended(job);
	kept_go_on(job);
}

void doubt_epoch_ends(struct job *job)
{
	struct match_slot *s = doubt_find_commit(job);
	struct doubt *d = job->step.doubt;

	if (d && !d->completes && job->life.deleted)
		doubt_free(d);
	if (d && !job->life.deleted)
		return;
	if (!job->life.deleted && !job->life.torn && !job->step.committing &&
	    (s || doubt_is_prepared(job)))
		doubt_begin(job, job->rec->epoch, s ? doubt_take_commit(job, s, true) : NULL);
	if (job->step.doubt || job->step.committing)
		return;
	if (doubt_is_prepared(job))
		apply_drop_prepared(job); /* job_epoch_end does the rest */
	doubt_record_clear(job);
}

void doubt_keep(struct job *job, uint64_t epoch, struct commit *c)
{
	CHECK(!job->step.doubt);
	doubt_begin(job, epoch, c);
}

/* Return: false: no memory. */
static bool doubt_note_marks(struct position_mark *const *marks, uint32_t world, state_blob ***list,
			     size_t *n)
{
	for (uint32_t r = 0; marks && r < world; r++)
		if (marks[r] && state_doubt_add_blob(list, n, r, marks[r]->number, marks[r]->blob,
						     marks[r]->bytes) < 0)
			return false;
	return true;
}

static bool doubt_note_units(const struct job *job, state_doubt *d)
{
	d->units = malloc((job->n_units + 1) * sizeof(*d->units));
	for (uint32_t i = 0; d->units && i < job->n_units; i++)
		if (apply_takes_part(job, job->units[i]))
			d->units[d->n_units++] = i;
	return d->units;
}

void doubt_note_prepared(struct job *job)
{
	const struct job_step *step = &job->step;
	uint64_t redo = 0;
	state_doubt *d;

	doubt_record_clear(job);
	if (!job->jobs->journal || !(job->jobs->redo_some || job->jobs->redo_take) ||
	    !apply_make_ready(job, &redo))
		return;
	d = doubt_record_get(job);
	if (!d || !doubt_note_units(job, d) ||
	    !doubt_note_marks(step->marks, job->rec->world_size, &d->marks, &d->n_marks)) {
		doubt_record_clear(job);
		return;
	}
	d->prepared = true;
	d->group = step->group;
	d->group_key = step->id.group;
	d->number = step->id.number;
	d->skips = step->skips;
	d->counted = step->counted;
	d->numbered = step->numbered;
	d->step_number = step->number;
	d->redo = redo;
	job_journal_mark(job, JOB_JOURNAL_DOUBT);
	job_journal_write(job);
}

static void doubt_note_commit(struct job *job, const struct commit *c)
{
	state_doubt *d = job->jobs->journal ? doubt_record_get(job) : NULL;
	bool covers = job->step.state == JOB_STEP_NONE || (d && d->prepared);

	if (!d)
		return;
	for (size_t i = 0; i < d->n_blobs; i++)
		state_blob_free(d->blobs[i]);
	d->n_blobs = 0;
	if (!covers || !doubt_note_marks(c->marks, job->rec->world_size, &d->blobs, &d->n_blobs)) {
		doubt_record_clear(job);
		return;
	}
	d->has_commit = true;
	d->step = c->step;
	job_journal_mark(job, JOB_JOURNAL_DOUBT);
	job_journal_write(job);
}

void doubt_announces(struct job *job)
{
	struct commit *c = doubt_take_commit(job, doubt_find_commit(job), false);

	if (c)
		doubt_note_commit(job, c);
	free(c ? c->marks : NULL); /* the marks are the ops' */
	free(c);
}

/* ------------------------------------------------------------------ a successor */

/* Return: NULL: no memory, or the job has no room for it. */
static struct position_mark *doubt_restore_mark(struct job *job, const state_blob *b,
						uint64_t number)
{
	struct position_mark *m = NULL;
	struct fault f = FAULT_NULL;

	if (position_mark_new(number, b->data.data, b->data.len, &m, &f))
		return NULL;
	if (quota_charge(&job->quota, MEM_CONTROL, m->bytes)) {
		position_mark_free(job, m);
		return NULL;
	}
	m->charged = true;
	return m;
}

static struct commit *doubt_restore_commit(struct job *job, const state_doubt *from)
{
	struct commit *c = commit_new(job, from->step);

	for (size_t i = 0; c && i < from->n_blobs; i++) {
		const state_blob *b = from->blobs[i];
		struct position_mark *m = doubt_restore_mark(job, b, from->step);

		if (m)
			commit_add(c, b->rank, m);
		else
			c = commit_free(job, c);
		if (c && !state_job_blob(job->rec, b->rank) &&
		    state_job_set_blob(job->rec, b->rank, NULL, 0, 0) < 0)
			c = commit_free(job, c); /* as commit_reserve has done before */
	}
	return c;
}

/* Return: 0 or -ENOMEM. */
static int doubt_restore_step(struct job *job, const state_doubt *from)
{
	struct position_mark **marks = calloc(job->rec->world_size, sizeof(struct position_mark *));
	struct job_step *step = &job->step;
	bool all = marks;
	int r;

	for (size_t i = 0; all && i < from->n_marks; i++) {
		uint32_t rank = from->marks[i]->rank;

		marks[rank] = doubt_restore_mark(job, from->marks[i], from->step_number);
		all = marks[rank];
	}
	r = all ? state_job_reserve_applied(job->rec, from->group_key) : -ENOMEM;
	if (r == 0)
		r = position_prepare(job, marks);
	for (uint32_t i = 0; marks && i < job->rec->world_size; i++)
		position_mark_free(job, marks[i]);
	free(marks);
	if (r < 0)
		return r;
	job_step_move(job, JOB_STEP_PREPARED);
	step->group = from->group;
	step->across = step->gated = true;
	step->skips = from->skips;
	step->counted = from->counted;
	step->id = (struct job_step_id){ from->epoch, from->group_key, from->number };
	step->old_redo = from->redo;
	for (size_t i = 0; i < from->n_units; i++)
		job->units[from->units[i]]->has_gradient = true;
	return 0;
}

/* Its step was half made, or nobody knows of it: it is dropped. */
void doubt_lost(struct job *job)
{
	log_warn("job", "a step in doubt is lost job=%s", job->label);
	job->step.old_redo = 0;
	apply_drop_prepared(job);
	doubt_record_clear(job);
	if (job->step.doubt)
		doubt_drop(job->step.doubt);
}

void doubt_restored(struct job *job)
{
	const state_doubt *from = job->rec->doubt;
	struct commit *c = from->has_commit ? doubt_restore_commit(job, from) : NULL;

	if ((from->has_commit && !c) || (from->prepared && doubt_restore_step(job, from) < 0)) {
		commit_free(job, c);
		log_error("job", "no memory to keep a step that is in doubt job=%s", job->label);
		doubt_record_clear(job);
		return;
	}
	doubt_begin(job, from->epoch, c);
	log_info("job", "step in doubt restored job=%s epoch=%llu prepared=%s commit=%s",
		 job->label, (unsigned long long)from->epoch, from->prepared ? "yes" : "no",
		 c ? "yes" : "no");
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

bool doubt_is_applied(const struct doubt_ruling *r, const struct job_step_id *step)
{
	for (size_t i = 0; i < r->n_applied; i++) {
		const struct job_step_id *a = &r->applied[i];

		if (a->epoch == step->epoch && a->group == step->group && a->number == step->number)
			return true;
	}
	return false;
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
	if (open.has_prepared && doubt_is_applied(r, &open.prepared) && !kept_at_commits(job))
		doubt_complete(d);
	else
		doubt_drop(d);
}

void doubt_drop_all(struct job *job)
{
	const struct doubt_ruling none = { 0 };

	doubt_resolve(job, &none);
}
