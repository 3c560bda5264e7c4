#include "job/job_journal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backend/redo.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"

/* Of an entry, beside units, slabs and blobs. */
#define JOB_JOURNAL_ROOM 1024u

/* An entry that is being built. */
struct job_journal_entry {
	state_change change;
	state_job head;
	state_progress progress;
	state_doubt no_doubt;
	/* Owned, of a unit or slab each. */
	state_units_at *runs;
	state_units_at **run_at;
	state_stepped *steps;
	state_stepped **step_at;
	state_slab **added;
	uint32_t *gone;
	state_pooled **pooled;
};

void job_journal_init(struct job *job)
{
	list_init(&job->unsaved.link);
}

void job_journal_deinit(struct job *job)
{
	list_unlink(&job->unsaved.link);
	free(job->unsaved.slabs);
	free(job->unsaved.pooled_gone);
	job->unsaved.slabs = job->unsaved.pooled_gone = NULL;
}

void job_journal_mark(struct job *job, unsigned parts)
{
	if (!job->jobs->journal || job->life.deleted || job->rec->ipc)
		return;
	job->unsaved.parts |= (uint8_t)parts;
	if (list_empty(&job->unsaved.link))
		list_append(&job->jobs->unsaved, &job->unsaved.link);
}

void job_journal_mark_unit(struct job *job, struct unit *u)
{
	u->unsaved = UNIT_UNSAVED_ALL;
	job_journal_mark(job, JOB_JOURNAL_UNITS);
}

void job_journal_mark_steps(struct job *job, struct unit *u)
{
	CHECK(u->unsaved); /* unit_stepped has marked it */
	job_journal_mark(job, JOB_JOURNAL_UNITS);
}

/* ------------------------------------------------------------------- an entry */

static void job_journal_entry_deinit(struct job_journal_entry *e)
{
	free(e->runs);
	free(e->run_at);
	free(e->steps);
	free(e->step_at);
	free(e->added);
	free(e->gone);
	free(e->pooled);
}

/* Consecutive units are one run. */
static void job_journal_add_unit(struct job *job, struct job_journal_entry *e, uint32_t i)
{
	state_units_at *last = e->change.n_units ? &e->runs[e->change.n_units - 1] : NULL;

	if (!last || last->first + last->n_units != i) {
		last = &e->runs[e->change.n_units];
		shardd__state__v1__units_at__init(last);
		last->first = i;
		last->units = &job->rec->units[i];
		e->run_at[e->change.n_units++] = last;
	}
	last->n_units++;
}

static void job_journal_add_steps(const struct job *job, struct job_journal_entry *e, uint32_t i)
{
	state_stepped *last = e->change.n_stepped ? &e->steps[e->change.n_stepped - 1] : NULL;
	uint64_t steps = job->rec->units[i]->optimizer->steps;

	if (!last || last->first + last->n != i || last->steps != steps) {
		last = &e->steps[e->change.n_stepped];
		shardd__state__v1__stepped__init(last);
		last->first = i;
		last->steps = steps;
		e->step_at[e->change.n_stepped++] = last;
	}
	last->n++;
}

static int job_journal_add_units(struct job *job, struct job_journal_entry *e)
{
	size_t n = job->n_units ? job->n_units : 1;

	CHECK(job->n_units == job->rec->n_units);
	e->runs = calloc(n, sizeof(*e->runs));
	e->run_at = calloc(n, sizeof(*e->run_at));
	e->steps = calloc(n, sizeof(*e->steps));
	e->step_at = calloc(n, sizeof(*e->step_at));
	if (!e->runs || !e->run_at || !e->steps || !e->step_at)
		return -ENOMEM;
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->unsaved == UNIT_UNSAVED_ALL)
			job_journal_add_unit(job, e, i);
		else if (job->units[i]->unsaved)
			job_journal_add_steps(job, e, i);
	e->change.units = e->run_at;
	e->change.stepped = e->step_at;
	return 0;
}

/* Both lists are in the order of their numbers. */
static int job_journal_add_slabs(struct job *job, struct job_journal_entry *e)
{
	const state_job *rec = job->rec;
	size_t i = 0, k = 0;

	e->added = calloc(rec->n_slabs + 1, sizeof(*e->added));
	e->gone = calloc(job->unsaved.n_slabs + 1, sizeof(*e->gone));
	if (!e->added || !e->gone)
		return -ENOMEM;
	while (i < rec->n_slabs || k < job->unsaved.n_slabs) {
		uint32_t is = i < rec->n_slabs ? rec->slabs[i]->id : UINT32_MAX;
		uint32_t was = k < job->unsaved.n_slabs ? job->unsaved.slabs[k] : UINT32_MAX;

		if (is < was)
			e->added[e->change.n_slabs_added++] = rec->slabs[i];
		else if (was < is)
			e->gone[e->change.n_slabs_gone++] = was;
		i += is <= was;
		k += was <= is;
	}
	e->change.slabs_added = e->added;
	e->change.slabs_gone = e->gone;
	return 0;
}

static int job_journal_add_pooled(struct job *job, struct job_journal_entry *e)
{
	const state_job *rec = job->rec;

	e->pooled = calloc(rec->n_pooled + 1, sizeof(*e->pooled));
	if (!e->pooled)
		return -ENOMEM;
	for (size_t i = 0; i < rec->n_pooled; i++)
		if (!job->mem.pooled[i]->saved)
			e->pooled[e->change.n_pooled_added++] = rec->pooled[i];
	e->change.pooled_added = e->pooled;
	e->change.n_pooled_gone = job->unsaved.n_pooled_gone;
	e->change.pooled_gone = job->unsaved.pooled_gone;
	return 0;
}

static int job_journal_build(struct job *job, struct job_journal_entry *e)
{
	unsigned parts = job->unsaved.parts;

	shardd__state__v1__change__init(&e->change);
	e->change.job = job->number;
	if (parts & JOB_JOURNAL_HEAD) {
		e->head = change_head(job->rec);
		e->change.head = &e->head;
	} else if (parts & JOB_JOURNAL_PROGRESS) {
		e->progress = change_progress(job->rec);
		e->change.progress = &e->progress;
	}
	if (parts & JOB_JOURNAL_DOUBT) {
		shardd__state__v1__doubt__init(&e->no_doubt);
		e->change.doubt = job->rec->doubt ? job->rec->doubt : &e->no_doubt;
	}
	if (parts & JOB_JOURNAL_BLOBS) {
		e->change.n_blobs = job->rec->n_blobs;
		e->change.blobs = job->rec->blobs;
	}
	if (parts & JOB_JOURNAL_UNITS && job_journal_add_units(job, e) < 0)
		return -ENOMEM;
	if (parts & (JOB_JOURNAL_SLABS | JOB_JOURNAL_POOLED))
		e->change.next_slab = job->node->devices[0].table->next;
	if (parts & JOB_JOURNAL_POOLED && job_journal_add_pooled(job, e) < 0)
		return -ENOMEM;
	return parts & JOB_JOURNAL_SLABS ? job_journal_add_slabs(job, e) : 0;
}

/* The slabs that the journal knows. */
static int job_journal_note_slabs(struct job *job)
{
	uint32_t *ids = calloc(job->rec->n_slabs + 1, sizeof(*ids));

	if (!ids)
		return -ENOMEM;
	for (size_t i = 0; i < job->rec->n_slabs; i++)
		ids[i] = job->rec->slabs[i]->id;
	free(job->unsaved.slabs);
	job->unsaved.slabs = ids;
	job->unsaved.n_slabs = (uint32_t)job->rec->n_slabs;
	return 0;
}

static void job_journal_is_saved(struct job *job)
{
	for (uint32_t i = 0; job->unsaved.parts & JOB_JOURNAL_UNITS && i < job->n_units; i++)
		job->units[i]->unsaved = UNIT_SAVED;
	for (size_t i = 0; job->unsaved.parts & JOB_JOURNAL_POOLED && i < job->rec->n_pooled; i++)
		job->mem.pooled[i]->saved = true;
	job->unsaved.n_pooled_gone = 0;
	job->unsaved.parts = 0;
	list_unlink(&job->unsaved.link);
}

static void job_journal_spoil(struct jobs *jobs)
{
	if (!journal_is_spoiled(jobs->journal))
		log_error("job", "no memory to write the journal: until there is some, no "
				 "successor of this daemon can take its jobs over");
	journal_spoil(jobs->journal);
}

/* An entry had no room: the other file may have some, for all jobs as they are. */
static void job_journal_replace(struct jobs *jobs)
{
	if (jobs_journal_base(jobs) < 0)
		job_journal_spoil(jobs);
}

void job_journal_pooled_gone(struct job *job, const struct pooled *p)
{
	struct job_unsaved *u = &job->unsaved;

	if (!p->saved || !job->jobs->journal || job->life.deleted)
		return;
	if (u->n_pooled_gone == u->pooled_gone_room) {
		uint32_t room = u->pooled_gone_room ? 2 * u->pooled_gone_room : 16;
		uint32_t *grown = realloc(u->pooled_gone, room * sizeof(*grown));

		if (!grown) {
			job_journal_spoil(job->jobs);
			return;
		}
		u->pooled_gone = grown;
		u->pooled_gone_room = room;
	}
	u->pooled_gone[u->n_pooled_gone++] = p->slab->id;
	job_journal_mark(job, JOB_JOURNAL_POOLED);
}

void job_journal_write_now(struct job *job)
{
	struct job_journal_entry e = { 0 };
	unsigned parts = job->unsaved.parts;

	CHECK(parts && job->jobs->journal);
	if (job_journal_build(job, &e) < 0 || change_append(job->jobs->journal, &e.change) < 0 ||
	    (parts & JOB_JOURNAL_SLABS && job_journal_note_slabs(job) < 0))
		job_journal_replace(job->jobs); /* else jobs_journal_tick does */
	job_journal_entry_deinit(&e);
	job_journal_is_saved(job);
}

void jobs_journal_write(struct jobs *jobs)
{
	while (!list_empty(&jobs->unsaved)) /* a new base takes all of them out */
		job_journal_write_now(list_first(&jobs->unsaved, struct job, unsaved.link));
}

void job_redo_begin(struct job *job, struct redo_task *t)
{
	job->rec->redo = redo_task_publish(t);
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	job_journal_write(job);
}

int job_journal_reserve(struct job *job, size_t bytes)
{
	struct journal *j = job->jobs->journal;

	if (!j || journal_is_spoiled(j))
		return j ? -ENOMEM : 0;
	return journal_reserve(j, bytes + JOB_JOURNAL_ROOM + job->n_units * sizeof(state_stepped));
}

void job_journal_gone(struct job *job)
{
	state_change c = SHARDD__STATE__V1__CHANGE__INIT;

	if (!job->jobs->journal || job->rec->ipc)
		return;
	job_journal_is_saved(job);
	c.job = job->number;
	c.gone = true;
	if (change_append(job->jobs->journal, &c) < 0)
		job_journal_spoil(job->jobs); /* it is still in the list of all */
}

/* -------------------------------------------------------------------- a base */

int jobs_journal_base(struct jobs *jobs)
{
	_cleanup_(freep) state_job **all = calloc(jobs->count + 1, sizeof(*all));
	Shardd__State__V1__Cordon cordon = SHARDD__STATE__V1__CORDON__INIT;
	state_all s = SHARDD__STATE__V1__STATE__INIT;
	struct job *job, *tmp;

	if (!all)
		return -ENOMEM;
	s.version = STATE_VERSION;
	s.next_slab = jobs->node->devices[0].table->next;
	s.instance = (ProtobufCBinaryData){ NODE_INSTANCE_BYTES, jobs->node->instance };
	s.started_unix_s = jobs->node->started_unix_s;
	if (jobs->cordon.on) {
		cordon.uid = jobs->cordon.uid;
		cordon.unix_s = jobs->cordon.unix_s;
		s.cordon = &cordon;
	}
	s.jobs = all;
	list_for_each (job, tmp, &jobs->all, link) {
		if (job->rec->ipc)
			continue;
		if (job_journal_note_slabs(job) < 0)
			return -ENOMEM;
		all[s.n_jobs++] = job->rec;
	}
	if (change_base(jobs->journal, &s) < 0)
		return -ENOMEM;
	list_for_each (job, tmp, &jobs->all, link) {
		job->unsaved.parts |= JOB_JOURNAL_UNITS | JOB_JOURNAL_POOLED;
		job_journal_is_saved(job);
	}
	return 0;
}

void jobs_journal_tick(struct jobs *jobs)
{
	if (!jobs->journal)
		return;
	jobs_journal_write(jobs);
	if (!journal_is_spoiled(jobs->journal) && !journal_is_long(jobs->journal))
		return;
	(void)jobs_journal_base(jobs); /* without memory: at the next tick */
}
