/* The end of jobs: deletion, memory that is still mapped, time to live; and descriptions of a
 * job. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "job/admission.h"
#include "job/base.h"
#include "job/bufcopy.h"
#include "job/elastic.h"
#include "job/events.h"
#include "job/history.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/loading.h"
#include "job/replica.h"
#include "job/resize.h"
#include "job/restore.h"
#include "job/saving.h"
#include "job/span.h"
#include "publish/publication.h"

/* Processes of the job that live may have the shared slabs mapped. */
static void job_end_keep_while_mapped(struct job *job, struct slab *s)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		struct member *m = job->ranks[r];

		if (m && s->exported && !proc_gone(m->proc))
			(void)quarantine_slab(&job->node->quarantine, m->proc, s);
	}
}

static void job_end_keep_full_slab(struct slab *s, void *arg)
{
	job_end_keep_while_mapped(arg, s);
}

/* Nothing runs any more: release all memory. */
static void job_end_release_memory(struct job *job)
{
	struct unit *u, *tmp;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		pool_each_slab(&job->mem.full[d], job_end_keep_full_slab, job);
	for (uint32_t i = 0; i < job->mem.n_slabs; i++)
		job_end_keep_while_mapped(job, job->mem.slabs[i]);
	list_for_each (u, tmp, &job->copies.idle, idle)
		list_unlink(&u->idle);
	for (uint32_t i = 0; i < job->n_units; i++) {
		/* readers are quarantined with the slabs */
		for (unsigned d = 0; d < job->units[i]->n_parts; d++)
			reads_deinit(&job->units[i]->parts[d].reads);
		job_give_grads(job, job->units[i]);
		job_give_full(job, job->units[i]);
		job_give_partials(job, job->units[i]);
	}
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		pool_deinit(&job->mem.full[d]);
		pool_deinit(&job->mem.scratch[d]);
		pool_deinit(&job->mem.grads[d]);
		reads_deinit(&job->mem.stray[d]);
	}
	job_drop_spare(job);
	ddps_free(job);
	saving_forget(job);
	saving_forget_memory(job);
	replica_forget(job);
	bufcopy_forget(job);
	publications_free(job);
	job->life.memory_gone = true;
	job_units_free(job);
	if (job->quota.by_class[MEM_CONTROL])
		quota_return(&job->quota, MEM_CONTROL, job->quota.by_class[MEM_CONTROL]);
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		job->ranks[r] = member_unref(job->ranks[r]);
}

static bool job_end_ops_over(const struct job *job)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r] && job->ranks[r]->pending)
			return false;
	return !job->running && !job->generation && !making_is_busy(job) && !saving_is_busy(job) &&
	       !resize_is_busy(job) && !elastic_is_posted(job) &&
	       job->step.state != JOB_STEP_APPLYING && !job->step.stepping;
}

/* Of a deleted job: is there something to give back? */
static bool job_end_may_go(const struct job *job)
{
	if (!job->life.deleted || !job_end_ops_over(job))
		return false;
	return !job->life.memory_gone || (!job->members && !job->quota.used);
}

/* Deleted jobs of which nothing runs any more lose their memory, and go with their last byte. Not from inside
 * anything that is about a job: whoever lets the last thing of it end goes on to use it. */
static void job_end_zombies(struct jobs *jobs)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &jobs->zombies, link) {
		if (!job_end_may_go(job))
			continue;
		if (!job->life.memory_gone)
			job_end_release_memory(job);
		if (!job->members && !job->quota.used)
			job_free_zombie(job);
	}
}

static void job_end_on_posted(struct work *w)
{
	struct jobs *jobs = CONTAINER_OF(w, struct jobs, ends);

	jobs->ends_posted = false;
	job_end_zombies(jobs);
}

static void job_end_soon(struct job *job)
{
	struct jobs *jobs = job->jobs;

	if (jobs->ends_posted)
		return;
	jobs->ends_posted = true;
	loopq_post(jobs->node->loopq, &jobs->ends, job_end_on_posted);
}

void job_settle(struct job *job)
{
	if (job->mem.stale_partials && !job->running)
		job_drop_partials(job);
	kept_go_on(job);
	if (!job->life.deleted)
		resize_go_on(job);
	restore_go_on(job);
	condition_signal(&job->settled);
	readers_grant(job);
	job_give_stray_grads(job);
	if (job_end_may_go(job))
		job_end_soon(job);
}

void job_ran(struct job *job)
{
	CHECK(job->running > 0);
	job->running--;
	job_settle(job);
}

static const char *job_end_why(const struct job *job)
{
	static const char *const texts[] = {
		[HISTORY_DELETED] = "deleted",
		[HISTORY_FINISHED] = "all its ranks have left",
		[HISTORY_EXPIRED] = "its trainers have left, and none came back in time",
		[HISTORY_CRASHED] = "a trainer has died, and none came back in time",
		[HISTORY_REPLACED] = "replaced by a new job of its name",
		[HISTORY_UNUSED] = "the first rank could not join it",
	};

	CHECK(job->life.why < ARRAY_SIZE(texts));
	return texts[job->life.why ? job->life.why : HISTORY_DELETED];
}

int job_delete(struct job *job, bool force, uint64_t *ret_freed, struct fault *f)
{
	struct fault told = FAULT_NULL;

	if (job->present && !force)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' has %u trainers: drain it first, or force the deletion",
				 job->rec->name, job->present);
	if (ret_freed)
		*ret_freed = job->quota.used;
	fault_set(&told, FAULT_ABORTED, NULL, "job '%s' was deleted", job->rec->name);
	if (job->jobs->ops.deleted)
		job->jobs->ops.deleted(job);
	history_add(job);
	events_add(job, EVENTS_ENDED, "%s", job_end_why(job));
	job_journal_gone(job);
	restore_cancel(job);
	loading_cancel(job);
	resize_cancel(job);
	job->life.deleted = true;
	readers_lose_job(job);
	publications_end(job);
	job_epoch_end(job, &told);
	htab_remove(&job->jobs->names, job->label);
	job->jobs->count--;
	list_unlink(&job->link);
	list_append(&job->jobs->zombies, &job->link);
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		struct member *m = job->ranks[r];

		if (m && m->state == MEMBER_STALE) {
			member_state_move(m, MEMBER_DEAD);
			m->ended = told;
			job->present--;
			member_retire(m);
		}
	}
	job_settle(job);
	return 0;
}

/* How long it is kept without trainers. A job that crashed before its first commit has
 * nothing to resume from, unless its Steps had numbers. A KEEP job stays: its trainers would create it again as EPHEMERAL. */
static uint64_t job_end_job_kept_us(const struct job *job)
{
	uint64_t ttl = job->rec->ttl_s, early = job->node->limits.uncommitted_ttl_s;

	if (early && early < ttl && job->life.crashed && !job->rec->has_commit &&
	    !job->rec->anchored && job->rec->lifetime == JOB_EPHEMERAL)
		ttl = early;
	return ttl * 1000000u;
}

/* A base is kept from the last time that somebody used it. */
static bool job_end_has_expired(struct job *job, uint64_t now_us)
{
	if (!job->life.idle_since_us || job->present ||
	    now_us - job->life.idle_since_us < job_end_job_kept_us(job))
		return false;
	if (!base_is_used(job))
		return true;
	job->life.idle_since_us = now_us;
	return false;
}

static void job_end_job_expire(struct job *job)
{
	struct fault f = FAULT_NULL;

	if (job->jobs->ops.expired)
		job->jobs->ops.expired(job);
	job->life.why = job->life.crashed ? HISTORY_CRASHED : HISTORY_EXPIRED;
	(void)job_delete(job, false, NULL, &f);
}

void jobs_tick(struct jobs *jobs, uint64_t now_us)
{
	struct job *job, *tmp;

	for (unsigned d = 0; d < jobs->node->n_devices; d++)
		slabs_sweep(&jobs->node->devices[d]);
	slabs_sweep(&jobs->node->pages);
	admission_tick(jobs, now_us);
	list_for_each (job, tmp, &jobs->all, link) {
		saving_tick(job);
		kept_go_on(job);
		if (job->step.redoes)
			node_wake(job->node);
		elastic_tick(job, now_us);
		if (resize_is_busy(job) || restore_is_busy(job))
			job_settle(job);
		if (job->life.deleted)
			continue; /* by who has waited for that */
		if (job->life.idle_since_us && jobs->ops.is_awaited && jobs->ops.is_awaited(job))
			job->life.idle_since_us = now_us;
		if (job_end_has_expired(job, now_us))
			job_end_job_expire(job);
		else {
			readers_tick(job, now_us);
			publications_tick(job, now_us);
		}
	}
	list_for_each (job, tmp, &jobs->zombies, link) {
		saving_tick(job);
		readers_tick(job, now_us);
		job_settle(job);
	}
	job_end_zombies(jobs);
	jobs_journal_tick(jobs);
}

void jobs_end(struct jobs *jobs)
{
	struct job *job, *tmp;

	events_deinit();
	history_close(); /* they go on in a successor, or end with all that is kept */
	list_for_each (job, tmp, &jobs->zombies, link)
		saving_cancel(job);
	list_for_each (job, tmp, &jobs->all, link) {
		struct fault f = FAULT_NULL;

		saving_cancel(job);
		CHECK(job_delete(job, false, NULL, &f) == 0);
	}
	job_end_zombies(jobs);
	quarantine_deinit(&jobs->node->quarantine);
	for (unsigned d = 0; d < jobs->node->n_devices; d++)
		slabs_let_go(&jobs->node->devices[d]);
	slabs_let_go(&jobs->node->pages);
}

bool jobs_gone(struct jobs *jobs)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &jobs->zombies, link) {
		saving_tick(job);
		job_settle(job);
	}
	job_end_zombies(jobs);
	quarantine_deinit(&jobs->node->quarantine); /* what they had mapped goes, too */
	return list_empty(&jobs->zombies);
}

void jobs_deinit(struct jobs *jobs)
{
	jobs_end(jobs);
	CHECK(jobs_gone(jobs));
	htab_deinit(&jobs->names);
}

void job_saved(struct job *job, uint64_t step)
{
	job->rec->saved = !job->readers.rewritten; /* since it began */
	job->rec->saved_step = step;
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	job_journal_write(job);
}

static bool job_end_has_state(const struct job *job)
{
	if (job->rec->has_commit)
		return true;
	for (size_t i = 0; i < job->rec->n_units; i++)
		if (job->rec->units[i]->initialised && !job->rec->units[i]->dropped)
			return true;
	return false;
}

/* Is the last checkpoint of what is in memory, and will it be? */
static bool job_end_is_saved(const struct job *job)
{
	const state_job *rec = job->rec;

	if (!rec->saved || !rec->has_commit || rec->saved_step != rec->step || rec->torn)
		return false;
	return !rec->uncommitted_steps && !job->present;
}

const char *job_state_place(const struct job *job)
{
	if (!job_end_has_state(job))
		return "none";
	return job_end_is_saved(job) ? "in a checkpoint" : "in memory only: lost";
}

bool job_is_in_memory_only(const struct job *job)
{
	return job_end_has_state(job) && !job_end_is_saved(job);
}

const char *job_state_name(const struct job *job)
{
	if (job->life.deleted)
		return "DELETED";
	if (job->life.resize)
		return "RESIZING";
	if (job->life.draining)
		return "DRAINING";
	if (job->life.torn)
		return "TORN";
	if (!job->present)
		return "IDLE";
	return job->joined == span_ranks_here(job->across.span, job->rec->world_size) ? "RUNNING"
										      : "FORMING";
}

void job_note_error(struct job *job, const struct fault *f)
{
	job->ops.failed++;
	job->ops.last_error_us = clock_now_us();
	snprintf(job->ops.last_error, sizeof(job->ops.last_error), "%s: %.220s",
		 fault_code_name(f->code), f->text);
}
