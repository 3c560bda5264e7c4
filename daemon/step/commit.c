#include "step/commit.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/base.h"
#include "job/bufcopy.h"
#include "job/elastic.h"
#include "job/events.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/policy.h"
#include "job/position.h"
#include "job/span.h"
#include "publish/publication.h"
#include "op/op_util.h"
#include "step/doubt_record.h"

struct commit *commit_new(const struct job *job, uint64_t step)
{
	struct commit *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->step = step;
	c->marks = calloc(job->rec->world_size, sizeof(struct position_mark *));
	if (c->marks)
		return c;
	free(c);
	return NULL;
}

void commit_add(struct commit *c, uint32_t rank, struct position_mark *mark)
{
	CHECK(!c->marks[rank]);
	c->marks[rank] = mark;
}

struct commit *commit_free(struct job *job, struct commit *c)
{
	for (uint32_t r = 0; c && r < job->rec->world_size; r++)
		position_mark_free(job, c->marks[r]);
	if (c)
		free(c->marks);
	free(c);
	return NULL;
}

/* Every rank here has an entry from here on, so that what follows cannot fail half-way. The commit
 * may not take effect: the journal gets the empty ones here. */
static int commit_reserve_blobs(struct job *job)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		if (!span_is_here(job->across.span, r) || state_job_blob(job->rec, r))
			continue;
		if (state_job_set_blob(job->rec, r, NULL, 0, 0) < 0)
			return -ENOMEM;
		job_journal_mark(job, JOB_JOURNAL_BLOBS);
	}
	return 0;
}

/* A job that resumes at its commits needs room for the copy before it has one to lose. */
enum res commit_reserve(struct job *job, struct fault *f)
{
	int r = commit_reserve_blobs(job);

	if (r < 0)
		return res_of(fault_errno(f, r, "keeping the blobs of a commit"));
	r = kept_at_commits(job) ? kept_reserve(job) : 0;
	if (r == SLAB_E_LATER)
		return RES_WAIT;
	return r ? res_of(op_memory_fault(job, r, kept_bytes(job),
					  "the copy of the committed state (resume COMMITTED)", f))
		 : RES_DONE;
}

int commit_check(struct job *job, struct fault *f)
{
	if (job_pass_check_over(job, NULL, f) == 0)
		(void)commit_reserve(job, f); /* memory that comes later does come */
	return f->code;
}

void commit_begin(struct job *job, struct commit *c)
{
	CHECK(!job->step.committing && !job->step.commit);
	job->step.committing = true;
	job->step.recorded = false;
	job->step.commit = c;
}

/* The old blob's charge goes back, the new one's passes to the record. A blob that the Step of this
 * number has given stays if the commit gives none. */
static void commit_store_blob(struct job *job, uint32_t rank, struct position_mark *m)
{
	const state_blob *old = state_job_blob(job->rec, rank);

	if (!m->bytes && old->data.len && old->step == m->number)
		return;
	CHECK(m->charged);
	quota_return(&job->quota, MEM_CONTROL, old->data.len);
	CHECK(state_job_set_blob(job->rec, rank, STEAL_PTR(m->blob), m->bytes, m->number) == 0);
	m->charged = false;
}

void commit_record(struct job *job)
{
	const struct commit *c = job->step.commit;
	state_job *rec = job->rec;
	struct fault none = FAULT_NULL;

	if (job->step.recorded || job->step.stepping || job_pass_check_over(job, NULL, &none) != 0)
		return;
	job->step.recorded = true;
	job->ops.counts.commits++;
	for (uint32_t r = 0; r < rec->world_size; r++)
		if (c->marks[r])
			commit_store_blob(job, r, c->marks[r]);
	job->ops.stride = c->step > rec->step ? c->step - rec->step : 0;
	rec->has_commit = true;
	rec->step = c->step;
	rec->committed_unix_s = (uint64_t)time(NULL);
	rec->uncommitted_steps = 0;
	position_committed(job, rec->step);
	kept_committed(job);
	doubt_record_clear(job);
	job_journal_mark(job, JOB_JOURNAL_PROGRESS | JOB_JOURNAL_BLOBS);
}

/* Units that were stepped in backward may be reduced again. */
static void commit_end_pass(struct job *job)
{
	job->step.mid = false;
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->step == UNIT_STEP_STEPPED)
			unit_pass_end(job->units[i]);
}

static void commit_store(struct job *job)
{
	CHECK(job->step.state == JOB_STEP_NONE && !job->step.stepping);
	commit_record(job);
	CHECK(job->step.recorded);
	commit_end_pass(job);
	bufcopy_committed(job);
	policy_committed(job);
	elastic_committed(job);
	base_committed(job);
	readers_committed(job); /* before what its ranks have submitted already */
	publications_committed(job);
}

/* Did the step come to be applied? */
static int commit_check_step(struct job *job, struct fault *f)
{
	if (job->life.torn) { /* the device failed the step */
		op_device_fault(job, "the step could not be applied", f);
		return fault_set(f, FAULT_INTERNAL, NULL,
				 "the step could not be applied: job '%s' is TORN", job->rec->name);
	}
	return job_pass_check_over(job, NULL, f);
}

enum res commit_end(struct job *job, bool *ret_abandoned, struct fault *f)
{
	struct commit *c = job->step.commit;

	job->step.committing = false;
	*ret_abandoned = job->step.abandoned;
	job->step.abandoned = false;
	if (!*ret_abandoned && commit_check_step(job, f) == 0) {
		commit_store(job);
		events_add_commit(job, job->rec->step);
	}
	job->step.commit = NULL;
	commit_free(job, c);
	return *ret_abandoned || f->code ? RES_FAILED : RES_DONE;
}
