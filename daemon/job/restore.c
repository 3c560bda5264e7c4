#include "job/restore.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "core/state.h"
#include "job/job_journal.h"
#include "job/loading.h"
#include "job/policy.h"
#include "job/restore_impl.h"
#include "publish/making.h"
#include "job/saving.h"
#include "job/span.h"

enum restore_stage {
	RESTORE_READING,
	RESTORE_WAITING,
	RESTORE_DRAINING,
	RESTORE_LAYING_OUT,
	RESTORE_LOADING
};

static const struct state_row restore_stages[] = {
	[RESTORE_READING] = { "READING", STATE_TO(RESTORE_WAITING) },
	[RESTORE_WAITING] = { "WAITING", STATE_TO(RESTORE_DRAINING) },
	[RESTORE_DRAINING] = { "DRAINING", STATE_TO(RESTORE_LAYING_OUT) },
	[RESTORE_LAYING_OUT] = { "LAYING_OUT", STATE_TO(RESTORE_LOADING) },
	[RESTORE_LOADING] = { "LOADING", 0 },
};

bool restore_is_busy(const struct job *job)
{
	return job->life.restore;
}

uint8_t *restore_pack_specs(const struct job *job, size_t *ret_bytes)
{
	return state_specs_encode(job->rec, ret_bytes);
}

/* ---------------------------------------------------------------------------- its end */

static void restore_free(struct restore *r)
{
	restore_layout_deinit(r);
	index_deinit(&r->x);
	htab_deinit(&r->elsewhere);
	state_job_free(r->specs);
	span_free(r->span);
	free(r->parts);
	free(r->started);
	free(r);
}

/* A node that has nothing of the job has no policy of its checkpoints either. */
static void restore_take_policy(struct restore *r)
{
	struct fault f = FAULT_NULL;

	if (r->job->rec->checkpoints || !r->specs->checkpoints)
		return;
	if (policy_take(r->job, r->specs->checkpoints, &f))
		log_warn("job", "policy not taken job=%s why=\"%s\"", r->job->label, f.text);
}

/* Nothing of it runs any more. May free the job. */
static void restore_over(struct restore *r)
{
	struct job *job = r->job;

	CHECK(!r->posted);
	waiter_leave(&r->waiter);
	job->life.restore = NULL;
	job->readers.writing -= r->writes;
	if (r->f.code) {
		log_warn("job", "not restored job=%s step=%llu why=\"%s\"", job->label,
			 (unsigned long long)r->step, r->f.text);
		job_note_error(job, &r->f);
	} else {
		restore_take_policy(r);
		log_info("job", "restored job=%s step=%llu world=%u", job->label,
			 (unsigned long long)r->step, job->rec->world_size);
	}
	r->done(job, r->f.code ? &r->f : NULL, r->userdata);
	restore_free(r);
	readers_go_on(job);
	job_ran(job);
}

/* Was it ended from outside? */
static bool restore_is_ended(struct restore *r)
{
	if (r->job->life.deleted)
		fault_set(&r->f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", r->job->rec->name);
	else if (r->cancelled)
		fault_set(&r->f, FAULT_CANCELLED, NULL, "restoring job '%s' was cancelled",
			  r->job->rec->name);
	return r->f.code;
}

/* --------------------------------------------------------------------------- the parts */

static void restore_on_posted(struct work *w);

static void *restore_read_main(void *arg)
{
	struct restore *r = arg;

	if (parts_merge(r->parts, r->n_parts, r->job->rec->name, r->step, &r->x, &r->f) == 0)
		restore_plan_renumber(r->specs, r->started, r->world, &r->x);
	loopq_post(r->job->node->loopq, &r->ended, restore_on_posted);
	return NULL;
}

/* ------------------------------------------------------------------------------ waiting */

static void restore_post(struct restore *r)
{
	if (r->posted)
		return;
	r->posted = true;
	loopq_post(r->job->node->loopq, &r->ended, restore_on_posted);
}

static void restore_on_resumed(struct waiter *w)
{
	restore_post(CONTAINER_OF(w, struct restore, waiter));
}

/* What of the epochs before it goes on: a name. NULL: nothing. */
static const char *restore_busy_with(const struct job *job)
{
	const struct job_step *step = &job->step;

	if (step->doubt || step->state != JOB_STEP_NONE || step->committing || step->stepping)
		return "a step that is being applied";
	if (job->kept.run)
		return "the copy that the job is rolled back to";
	if (job->generation)
		return "a checkpoint that is being written";
	if (making_is_busy(job))
		return "a generation that is being published";
	for (uint32_t i = 0; i < job->rec->world_size; i++)
		if (job->ranks[i] && (job->ranks[i]->pending || job->ranks[i]->executing))
			return "ops of an earlier epoch";
	if (job->running > 1 || !list_empty(&job->registrations)) /* 1: this */
		return "ops of an earlier epoch";
	return NULL;
}

const char *restore_waits_for(const struct job *job)
{
	const struct restore *r = job->life.restore;
	const char *busy = r && r->stage == RESTORE_WAITING ? restore_busy_with(job) : NULL;

	if (busy)
		return busy;
	if (r && r->stage == RESTORE_WAITING && waiter_on(&r->waiter))
		return "readers of the job's parameters";
	return r && r->stage == RESTORE_LAYING_OUT && waiter_on(&r->waiter) ? "memory" : "";
}

/* ----------------------------------------------------------------------------- its course */

/* They join again anyway; what they hold is of an epoch that has ended. */
static void restore_reset_members(struct job *job)
{
	for (uint32_t i = 0; i < job->rec->world_size; i++)
		if (job->ranks[i] && job->ranks[i]->state == MEMBER_STALE)
			member_reset(job->ranks[i]);
}

static enum res restore_empty(struct restore *r)
{
	struct job *job = r->job;
	enum res res;

	state_move(restore_stages, &r->stage, RESTORE_DRAINING);
	restore_reset_members(job);
	for (size_t i = 0; i < job->rec->n_applied; i++) /* of steps that never were */
		job->rec->applied[i]->epoch = job->rec->applied[i]->number = 0;
	loading_empty(job);
	res = job->jobs->ops.drain ? job->jobs->ops.drain(job, &r->waiter) : RES_DONE;
	if (res == RES_FAILED)
		fault_errno(&r->f, -ENOMEM, "restoring a job");
	return res;
}

static bool restore_is_elsewhere(void *arg, const char *unit)
{
	const struct restore *r = arg;

	return htab_find(&r->elsewhere, unit);
}

static void restore_on_loaded(const struct loading_report *report, const struct fault *f,
			      void *userdata)
{
	struct restore *r = userdata;

	(void)report;
	if (f && !restore_is_ended(r))
		r->f = *f;
	restore_over(r);
}

static enum res restore_load(struct restore *r)
{
	const struct loading_memory m = { &r->x, restore_is_elsewhere, r };

	state_move(restore_stages, &r->stage, RESTORE_LOADING);
	return res_of(loading_begin_memory(r->job, &m, restore_on_loaded, r, &r->f)) == RES_FAILED
		       ? RES_FAILED
		       : RES_WAIT;
}

static enum res restore_tick(struct restore *r)
{
	switch ((enum restore_stage)r->stage) {
	case RESTORE_READING: /* the thread has said so */
		state_move(restore_stages, &r->stage, RESTORE_WAITING);
		fallthrough;
	case RESTORE_WAITING:
		if (restore_busy_with(r->job) ||
		    !readers_begin_move(r->job, &r->waiter, &r->writes))
			return RES_WAIT;
		RES_TRY(restore_empty(r));
		fallthrough;
	case RESTORE_DRAINING:
		state_move(restore_stages, &r->stage, RESTORE_LAYING_OUT);
		if (restore_make_room(r))
			return RES_FAILED;
		fallthrough;
	case RESTORE_LAYING_OUT:
		RES_TRY(restore_register(r));
		return restore_load(r);
	case RESTORE_LOADING:
		return RES_WAIT;
	}
	CHECK_NOT_REACHED();
}

static void restore_run(struct restore *r)
{
	if (r->f.code || restore_is_ended(r) || restore_tick(r) == RES_FAILED)
		restore_over(r);
}

/* The thread, or who waits. */
static void restore_on_posted(struct work *w)
{
	struct restore *r = CONTAINER_OF(w, struct restore, ended);

	r->posted = false;
	if (r->stage == RESTORE_READING)
		pthread_join(r->thread, NULL);
	if (r->stage != RESTORE_LOADING)
		restore_run(r);
}

void restore_go_on(struct job *job)
{
	struct restore *r = job->life.restore;

	if (r && r->stage == RESTORE_WAITING)
		restore_post(r);
}

void restore_cancel(struct job *job)
{
	struct restore *r = job->life.restore;

	if (!r)
		return;
	r->cancelled = true;
	if (r->stage == RESTORE_LOADING)
		loading_cancel(job);
	else if (r->stage != RESTORE_DRAINING) /* which ends by itself */
		restore_post(r);
}

/* ----------------------------------------------------------------------------- its begin */

static int restore_check_job(const struct job *job, struct fault *f)
{
	if (job->life.deleted)
		return fault_set(f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	if (job->joined)
		return fault_set(f, FAULT_STATE, NULL,
				 "%u ranks are in job '%s': it can be restored only between epochs",
				 job->joined, job->rec->name);
	if (!job->life.restore && !job->life.resize && !job->checkpoints.loading)
		return 0;
	return fault_set(f, FAULT_STATE, NULL, "job '%s' is being %s: wait for its end",
			 job->rec->name, job->life.resize ? "resized" : "restored");
}

int restore_check_span(const struct job *job, const struct span *span, struct fault *f)
{
	const struct span_node *here = &span->nodes[span->self];

	if (span->world > job->node->limits.max_world_size)
		return fault_set(f, FAULT_INVALID, "world_size",
				 "job '%s' would have %u ranks; the maximum is %u (max_world_size)",
				 job->rec->name, span->world, job->node->limits.max_world_size);
	for (uint32_t i = 0; i < here->n; i++)
		if (here->devices[i] >= job->node->n_devices)
			return fault_set(f, FAULT_INVALID, "device",
					 "rank %u of job '%s' is on device %u of this node, which "
					 "has %u",
					 here->first + i, job->rec->name, here->devices[i],
					 job->node->n_devices);
	return 0;
}

static struct restore *restore_new(struct job *job, const struct restore_options *o,
				   struct fault *f)
{
	struct restore *r = calloc(1, sizeof(*r));

	if (r)
		r->parts = calloc(o->n_parts + 1, sizeof(*r->parts));
	if (!r || !r->parts) {
		free(r);
		fault_errno(f, -ENOMEM, "restoring a job");
		return NULL;
	}
	r->job = job;
	r->step = o->step;
	r->world = o->span->world;
	r->launched = o->launched;
	r->elsewhere = HTAB_NULL;
	waiter_init(&r->waiter, restore_on_resumed);
	for (unsigned i = 0; i < o->n_parts; i++)
		r->parts[i] = (struct parts_memory){ o->parts[i].fd, o->parts[i].index,
						     o->parts[i].index_bytes };
	r->n_parts = o->n_parts;
	if (o->numbers) {
		r->started = calloc(r->world, sizeof(*r->started));
		if (r->started)
			memcpy(r->started, o->numbers, r->world * sizeof(*r->started));
		else
			fault_errno(f, -ENOMEM, "restoring a job");
	}
	if (!f->code && restore_plan(job, o, &r->specs, &r->elsewhere, f) == 0)
		return r;
	restore_free(r);
	return NULL;
}

static int restore_start(struct restore *r, struct fault *f)
{
	struct job *job = r->job;
	int e = saving_start_thread(&r->thread, restore_read_main, r);

	if (e)
		return fault_errno(f, e, "starting a thread to restore a job");
	r->posted = true;
	job->life.restore = r;
	job->running++;
	if (job->jobs->ops.drop_doubt)
		job->jobs->ops.drop_doubt(job);
	return 0;
}

int restore_begin(struct job *job, const struct restore_options *o, restore_cb done, void *userdata,
		  struct fault *f)
{
	struct restore *r = NULL;

	if (restore_check_job(job, f) == 0 && restore_check_span(job, o->span, f) == 0)
		r = restore_new(job, o, f);
	if (r && restore_start(r, f)) {
		restore_free(r);
		r = NULL;
	}
	if (!r) {
		span_free(o->span);
		return f->code;
	}
	r->span = o->span;
	r->done = done;
	r->userdata = userdata;
	return 0;
}
