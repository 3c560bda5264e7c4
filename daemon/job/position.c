#include "job/position.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/job_journal.h"
#include "job/job_types.h"

int position_mark_new(uint64_t number, const void *blob, size_t bytes, struct position_mark **ret,
		      struct fault *f)
{
	struct position_mark *m;

	if (bytes > JOB_MAX_BLOB)
		return fault_set(f, FAULT_INVALID, "blob", "blob has %zu bytes; the maximum is %u",
				 bytes, JOB_MAX_BLOB);
	m = calloc(1, sizeof(*m));
	if (m)
		m->blob = malloc(bytes ? bytes : 1);
	if (!m || !m->blob) {
		free(m);
		return fault_errno(f, -ENOMEM, "keeping a blob");
	}
	m->number = number;
	m->bytes = bytes;
	if (bytes)
		memcpy(m->blob, blob, bytes);
	*ret = m;
	return 0;
}

void position_mark_free(struct job *job, struct position_mark *m)
{
	if (!m)
		return;
	if (m->charged)
		quota_return(&job->quota, MEM_CONTROL, m->bytes);
	free(m->blob);
	free(m);
}

/* ------------------------------------------------------------------- numbers */

/* The last Step that was applied said its number, and no commit has said it since. */
static bool position_is_numbered(const state_job *rec)
{
	return rec->anchored && !rec->steps_since && !rec->skips_since &&
	       (!rec->has_commit || rec->anchor != rec->step);
}

static bool position_is_prepared(const struct job *job, uint64_t *ret)
{
	*ret = job->step.number;
	return job->step.state == JOB_STEP_PREPARED && job->step.numbered && !job->step.positioned;
}

/* The last number that somebody has said. Return: false: none. */
static bool position_last(const struct job *job, uint64_t *ret)
{
	const state_job *rec = job->rec;

	if (position_is_prepared(job, ret))
		return true;
	*ret = rec->anchored ? rec->anchor : rec->step;
	return rec->anchored || rec->has_commit;
}

int position_check_step(const struct job *job, uint64_t number, struct fault *f)
{
	uint64_t before;

	if (!position_last(job, &before) || number > before)
		return 0;
	return fault_set(f, FAULT_INVALID, "step",
			 "step is %llu; it must be above the step before it, %llu",
			 (unsigned long long)number, (unsigned long long)before);
}

int position_check_commit(const struct job *job, uint64_t number, struct fault *f)
{
	const state_job *rec = job->rec;
	uint64_t is = rec->anchor;
	bool prepared = job->step.state == JOB_STEP_PREPARED && !job->step.positioned;

	if (rec->has_commit && number <= rec->step)
		return fault_set(f, FAULT_INVALID, "step",
				 "step is %llu; it must be above the last committed step, %llu",
				 (unsigned long long)number, (unsigned long long)rec->step);
	if (prepared ? !position_is_prepared(job, &is) : !position_is_numbered(rec))
		return 0;
	if (number == is)
		return 0;
	return fault_set(
		f, FAULT_INVALID, "step",
		"step is %llu, but the last Step said that it is step %llu: commit that one",
		(unsigned long long)number, (unsigned long long)is);
}

/* The parameters are those of @number, as somebody has said. */
static void position_anchor(struct job *job, uint64_t number)
{
	state_job *rec = job->rec;
	uint64_t applied = (rec->anchored ? rec->anchor : 0) + rec->steps_since;

	if (rec->steps_since) /* who skips may have counted that, or not */
		rec->regular = number == applied || number == applied + rec->skips_since;
	rec->anchor = number;
	rec->anchored = true;
	rec->altered = false;
	rec->steps_since = rec->skips_since = 0;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}

void position_committed(struct job *job, uint64_t number)
{
	position_anchor(job, number);
	job->rec->partial = false;
}

void position_rolled_back(struct job *job)
{
	state_job *rec = job->rec;

	rec->steps_since = rec->skips_since = rec->uncommitted_steps = 0;
	rec->partial = false;
	position_anchor(job, rec->step);
}

void position_reset(struct job *job)
{
	state_job *rec = job->rec;

	rec->has_commit = rec->anchored = rec->regular = rec->partial = rec->altered = false;
	rec->kept = rec->rollback = false; /* of a commit that is no more */
	rec->step = rec->anchor = rec->steps_since = rec->skips_since = 0;
	rec->uncommitted_steps = 0;
	for (size_t i = 0; i < rec->n_blobs; i++) {
		quota_return(&job->quota, MEM_CONTROL, rec->blobs[i]->data.len);
		CHECK(state_job_set_blob(rec, rec->blobs[i]->rank, NULL, 0, 0) == 0);
	}
	job_journal_mark(job, JOB_JOURNAL_PROGRESS | JOB_JOURNAL_BLOBS);
}

/* Units of groups are stepped at times that the world's Steps do not tell. */
static bool position_has_groups(const state_job *rec)
{
	for (size_t i = 0; i < rec->n_units; i++)
		if (rec->units[i]->group && !rec->units[i]->dropped &&
		    rec->units[i]->optimizer->kind != OPTIM_NONE)
			return true;
	return false;
}

bool position_of(const state_job *rec, uint64_t *ret)
{
	bool is_committed = rec->has_commit && !rec->uncommitted_steps && !rec->steps_since &&
			    (!rec->anchored || rec->anchor == rec->step);

	*ret = is_committed ? rec->step : rec->anchor + rec->steps_since;
	if (is_committed)
		return true;
	if (!rec->anchored || rec->partial || rec->altered || position_has_groups(rec))
		return false;
	return !rec->steps_since || (rec->regular && !rec->skips_since);
}

/* A Step has replaced what the commit came with. */
static bool position_has_later_blobs(const state_job *rec)
{
	for (size_t i = 0; i < rec->n_blobs; i++)
		if (rec->blobs[i]->data.len && rec->blobs[i]->step > rec->step)
			return true;
	return false;
}

/* All steps since the copy are gone: it was made at the last commit, or before any step. */
static void position_rolled_back_groups(struct job *job)
{
	state_job *rec = job->rec;

	if (!rec->has_commit) {
		position_reset(job);
	} else if (position_has_later_blobs(rec)) {
		position_altered(job);
	} else {
		rec->steps_since = rec->skips_since = 0;
		position_anchor(job, rec->step);
	}
}

/* What was altered meanwhile is not as it was. */
void position_rolled_back_step(struct job *job)
{
	state_job *rec = job->rec;

	rec->partial = false;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	if (rec->altered)
		return;
	rec->uncommitted_steps = rec->kept_uncommitted;
	if (!rec->uncommitted_steps && position_has_groups(rec))
		position_rolled_back_groups(job);
}

/* ------------------------------------------------------------------- steps */

static void position_free_marks(struct job *job, struct position_mark **marks)
{
	for (uint32_t r = 0; marks && r < job->rec->world_size; r++)
		position_mark_free(job, marks[r]);
	free(marks);
}

/* What follows cannot fail half-way. What needs the empty ones may not follow: the journal gets
 * them here. */
static int position_reserve_blobs(struct job *job, struct position_mark *const *marks)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		if (!marks[r] || !marks[r]->bytes || state_job_blob(job->rec, r))
			continue;
		if (state_job_set_blob(job->rec, r, NULL, 0, 0) < 0)
			return -ENOMEM;
		job_journal_mark(job, JOB_JOURNAL_BLOBS);
	}
	return 0;
}

int position_prepare(struct job *job, struct position_mark **marks)
{
	struct job_step *step = &job->step;
	bool any = false;
	struct position_mark **own = calloc(job->rec->world_size, sizeof(struct position_mark *));

	CHECK(!step->marks);
	if (!own || position_reserve_blobs(job, marks) < 0) {
		free(own);
		return -ENOMEM;
	}
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		if (!marks[r])
			continue;
		any = true;
		step->number = marks[r]->number;
		own[r] = STEAL_PTR(marks[r]);
	}
	step->numbered = any;
	step->positioned = false;
	step->marks = own;
	return 0;
}

/* The old blob's charge goes back, the new one's passes to the record. */
static void position_take_blob(struct job *job, uint32_t rank, struct position_mark *m)
{
	CHECK(m->charged);
	quota_return(&job->quota, MEM_CONTROL, state_job_blob(job->rec, rank)->data.len);
	CHECK(state_job_set_blob(job->rec, rank, STEAL_PTR(m->blob), m->bytes, m->number) == 0);
	m->charged = false;
	job_journal_mark(job, JOB_JOURNAL_BLOBS);
}

/* A loss leaves that step from here on, if somebody will know which one it is. */
static void position_is_whole(struct job *job)
{
	state_job *rec = job->rec;

	rec->partial = false;
	if (rec->resume != JOB_RESUME_COMMITTED && !position_has_groups(rec))
		rec->kept = false;
}

void position_stepped(struct job *job, bool skipped)
{
	struct job_step *step = &job->step;

	position_is_whole(job);
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	if (step->positioned)
		return;
	step->positioned = true;
	if (step->numbered)
		position_anchor(job, step->number);
	else if (skipped)
		job->rec->skips_since++;
	else
		job->rec->steps_since++;
	for (uint32_t r = 0; step->marks && r < job->rec->world_size; r++)
		if (step->marks[r] && step->marks[r]->bytes)
			position_take_blob(job, r, step->marks[r]);
	position_drop(job);
}

void position_drop(struct job *job)
{
	position_free_marks(job, STEAL_PTR(job->step.marks));
	job->step.numbered = false;
}

void position_altered(struct job *job)
{
	job->rec->altered = true;
	job->rec->uncommitted_steps++;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}

void position_begin_partial(struct job *job)
{
	if (job->rec->partial)
		return;
	job->rec->partial = true;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}

void position_end_partial(struct job *job)
{
	if (!job->rec->partial || job->rec->kept)
		return;
	job->rec->partial = false;
	job->rec->altered = true;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}
