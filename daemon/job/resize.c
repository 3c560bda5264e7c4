#include "job/resize.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/loopq.h"
#include "core/state.h"
#include "job/base.h"
#include "job/generation.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/resize_impl.h"
#include "publish/making.h"

enum resize_stage { RESIZE_WAITING, RESIZE_MEMORY, RESIZE_COPYING };

static const struct state_row resize_stages[] = {
	[RESIZE_WAITING] = { "WAITING", STATE_TO(RESIZE_MEMORY) },
	[RESIZE_MEMORY] = { "MEMORY", STATE_TO(RESIZE_COPYING) },
	[RESIZE_COPYING] = { "COPYING", 0 },
};

bool resize_is_busy(const struct job *job)
{
	return job->life.resize;
}

/* ------------------------------------------------------------------- what can be resized */

static int resize_check(const struct job *job, uint32_t world, struct fault *f)
{
	uint32_t most = job->node->limits.max_world_size;

	if (job->life.resize)
		return fault_set(f, FAULT_STATE, NULL, "job '%s' is being resized to %u ranks",
				 job->rec->name, job->life.resize->world);
	if (base_check_change(job, "its world size stays", f))
		return f->code;
	if (!world || world > most)
		return fault_set(f, FAULT_INVALID, "world_size",
				 "world_size %u is out of range (1..%u, max_world_size)", world,
				 most);
	/* its processes have no other numbers, and a record with others is damaged */
	if (job->rec->join_grace_ms && world > job->rec->max_ranks)
		return fault_set(f, FAULT_INVALID, "world_size",
				 "world_size is %u, and job '%s' is elastic from %u to %u ranks",
				 world, job->rec->name, job->rec->min_ranks, job->rec->max_ranks);
	if (job->life.restore)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is being restored from other nodes' memory: wait for "
				 "its end",
				 job->rec->name);
	if (job->checkpoints.loading)
		return fault_set(f, FAULT_STATE, NULL,
				 "a checkpoint is being loaded into job '%s': wait for its end",
				 job->rec->name);
	return resize_check_units(job, world, f);
}

static int resize_refuse_present(const struct job *job, struct fault *f)
{
	return fault_set(
		f, FAULT_STATE, NULL,
		"job '%s' has %u trainers: its world size can change only while no rank is "
		"in it; drain it first (shardctl job drain)",
		job->rec->name, job->present);
}

/* ---------------------------------------------------------------------------- its end */

static void resize_free(struct resize *r)
{
	for (uint32_t i = 0; r->units && i < r->job->n_units; i++) {
		relayout_deinit(&r->units[i]);
		for (size_t k = 0; k < r->units[i].rec.n_buffer_regions; k++)
			state_region_free(&r->units[i].rec.buffer_regions[k]);
		free(r->units[i].rec.buffer_regions);
	}
	relayout_memory_deinit(&r->mem);
	for (uint32_t i = 0; r->ranks && i < r->world; i++)
		slab_unref(r->ranks[i].slab);
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++) {
		slab_unref(r->kept[d]);
		free(r->parts[d].launches);
	}
	group_free(r->group);
	state_group_free(r->group_rec);
	free(r->units);
	free(r->moves);
	free(r->ranks);
	free(r->from);
	if (r->stay) {
		free(r->stay->numbers);
		free(r->stay->devices);
	}
	free(r->stay);
	free(r);
}

/* It is over. Then the caller lets ranks that have waited go on (job_settle). */
static void resize_over(struct resize *r, const struct fault *f)
{
	struct job *job = r->job;

	job->life.resize = NULL;
	waiter_leave(&r->waiter);
	job->readers.writing -= r->writes;
	if (f) {
		log_warn("job", "not resized job=%s from=%u to=%u why=\"%s\"", job->label,
			 r->report.from, r->report.to, f->text);
		job_note_error(job, f);
	}
	if (r->done)
		r->done(&r->report, f, r->userdata);
	resize_free(r);
}

static void resize_fail(struct resize *r, int error)
{
	struct fault f = FAULT_NULL;
	char holders[440];

	if (slab_is_short(error)) {
		job_holders(r->job, holders, sizeof(holders));
		fault_set(&f, FAULT_EXHAUSTED, NULL,
			  "cannot allocate %llu bytes to lay job '%s' out for %u ranks: %s",
			  (unsigned long long)relayout_bytes(&r->mem), r->job->rec->name, r->world,
			  holders);
	} else {
		fault_errno(&f, error, "resizing a job");
	}
	resize_over(r, &f);
}

/* ----------------------------------------------------------------------------- its course */

static void resize_copied(struct resize *r)
{
	struct job *job = r->job;
	struct fault f = FAULT_NULL;
	int e = r->status;

	if (job->life.deleted)
		fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	else if (e == 0)
		e = resize_exchange(r);
	if (!f.code && e)
		fault_errno(&f, e, "resizing a job");
	if (!f.code)
		log_info("job", "resized job=%s from=%u to=%u moved=%llu in_place=%u", job->label,
			 r->report.from, r->report.to, (unsigned long long)r->report.moved,
			 r->report.in_place);
	resize_over(r, f.code ? &f : NULL);
	job_ran(job);
}

static void resize_on_copied(struct backend_task *task, int status)
{
	struct resize *r = CONTAINER_OF(task, struct resize_part, task)->resize;

	r->status = r->status ? r->status : status;
	CHECK(r->pending > 0);
	if (--r->pending == 0)
		resize_copied(r);
}

/* With nothing to copy it still ends from the loop. */
static void resize_submit(struct resize *r)
{
	struct job *job = r->job;
	unsigned n = job->node->n_devices;

	job->running++;
	state_move(resize_stages, &r->stage, RESIZE_COPYING);
	for (unsigned d = 0; d < n; d++)
		r->pending += r->parts[d].task.n_launches > 0 || d == 0;
	for (unsigned d = 0; d < n; d++) {
		struct resize_part *p = &r->parts[d];

		if (!p->task.n_launches && d)
			continue;
		p->resize = r;
		p->task.launches = p->launches;
		p->task.sync = true;
		p->task.done = resize_on_copied;
		p->task.owner = job_as_owner(job);
		backend_submit(job->node->devices[d].backend, &p->task);
	}
}

/* Nothing of the epochs before it goes on. */
static bool resize_may_lay_out(const struct job *job)
{
	const struct job_step *step = &job->step;

	if (job->running || job->kept.run || kept_is_rolling_back(job) || job->generation ||
	    making_is_busy(job))
		return false;
	if (step->state != JOB_STEP_NONE || step->committing || step->stepping)
		return false;
	for (uint32_t i = 0; i < job->rec->world_size; i++)
		if (job->ranks[i] && (job->ranks[i]->pending || job->ranks[i]->executing))
			return false;
	return list_empty(&job->registrations);
}

static void resize_end_epoch(struct resize *r)
{
	struct job *job = r->job;
	struct fault f = FAULT_NULL;

	if (r->ended)
		return;
	r->ended = true;
	fault_set(&f, FAULT_ABORTED, NULL, "job '%s' is resized to %u ranks", job->rec->name,
		  r->world);
	job_roll_back(job);
	job_epoch_end(job, r->stay ? &r->stay->told : &f);
	job_roll_back(job); /* if ranks were joined until now */
}

static void resize_on_posted(struct work *w);

static void resize_post(struct resize *r)
{
	r->posted = true;
	loopq_post(r->job->node->loopq, &r->begun, resize_on_posted);
}

static void resize_on_readers(struct waiter *w)
{
	resize_post(CONTAINER_OF(w, struct resize, waiter));
}

static void resize_wait(struct resize *r)
{
	struct job *job = r->job;
	struct fault f = FAULT_NULL;
	int e;

	if (!r->stay && job->present && clock_now_us() < r->until_us)
		return;
	if (!r->stay && job->present) {
		(void)resize_refuse_present(job, &f);
		resize_over(r, &f);
		return;
	}
	resize_end_epoch(r);
	if (!resize_may_lay_out(job) || !readers_begin_move(r->job, &r->waiter, &r->writes))
		return;
	if (resize_check_units(job, r->world, &f)) { /* of ranks that were there when it began */
		resize_over(r, &f);
		return;
	}
	e = resize_lay_out(r);
	if (e) {
		resize_fail(r, e);
		return;
	}
	state_move(resize_stages, &r->stage, RESIZE_MEMORY);
}

static void resize_get_memory(struct resize *r)
{
	int e = resize_take(r);

	if (e == SLAB_E_LATER)
		return;
	if (e == 0)
		e = resize_make_group(r);
	if (e == 0)
		e = resize_place(r);
	if (e == 0)
		e = resize_list_copies(r);
	if (e)
		resize_fail(r, e);
	else
		resize_submit(r);
}

void resize_go_on(struct job *job)
{
	struct resize *r = job->life.resize;

	if (r && r->stage == RESIZE_WAITING && !r->posted)
		resize_wait(r);
	r = job->life.resize;
	if (r && r->stage == RESIZE_MEMORY)
		resize_get_memory(r);
}

static void resize_on_posted(struct work *w)
{
	struct resize *r = CONTAINER_OF(w, struct resize, begun);
	struct job *job = r->job;
	struct fault f = FAULT_NULL;

	r->posted = false;
	if (job->life.deleted) {
		fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
		resize_over(r, &f);
	}
	job_settle(job);
}

/* Ranks keep their numbers. */
static int resize_take_ranks(struct resize *r)
{
	r->from = calloc(r->world, sizeof(*r->from));
	for (uint32_t i = 0; r->from && i < r->world; i++)
		r->from[i] = i < r->report.from ? i : RESIZE_NEW;
	return r->from ? 0 : -ENOMEM;
}

static int resize_take_plan(struct resize *r, const struct resize_plan *plan)
{
	struct resize_stay *stay = calloc(1, sizeof(*stay));

	r->stay = stay;
	r->from = calloc(r->world, sizeof(*r->from));
	if (!stay || !r->from)
		return -ENOMEM;
	stay->numbers = calloc(r->world, sizeof(*stay->numbers));
	stay->devices = calloc(r->world, sizeof(struct device *));
	if (!stay->numbers || !stay->devices)
		return -ENOMEM;
	for (uint32_t i = 0; i < r->world; i++) {
		CHECK(plan->from[i] == RESIZE_NEW || plan->from[i] < r->report.from);
		r->from[i] = plan->from[i];
		stay->numbers[i] = plan->numbers[i];
		stay->devices[i] = plan->devices[i];
	}
	stay->launched = plan->launched;
	stay->told = *plan->told;
	return 0;
}

/* @plan: NULL: nobody is in the job, or is going to be. */
static int resize_new(struct job *job, uint32_t world, const struct resize_plan *plan,
		      struct resize **ret)
{
	struct resize *r = calloc(1, sizeof(*r));

	if (!r)
		return -ENOMEM;
	*r = (struct resize){ .job = job,
			      .world = world,
			      .report = { .from = job->rec->world_size, .to = world } };
	if ((plan ? resize_take_plan(r, plan) : resize_take_ranks(r)) < 0) {
		resize_free(r);
		return -ENOMEM;
	}
	waiter_init(&r->waiter, resize_on_readers);
	*ret = r;
	return 0;
}

static int resize_start(struct job *job, uint32_t world, const struct resize_plan *plan,
			struct resize **ret, struct fault *f)
{
	if (resize_new(job, world, plan, ret) < 0)
		return fault_errno(f, -ENOMEM, "resizing a job");
	job->life.resize = *ret;
	resize_post(*ret);
	return 0;
}

int resize_begin(struct job *job, uint32_t world, uint64_t wait_us, resize_cb done, void *userdata,
		 struct fault *f)
{
	struct resize *r;

	if (job_check_here(job, "resizing", f) || resize_check(job, world, f))
		return f->code;
	if (job->present && !wait_us)
		return resize_refuse_present(job, f);
	if (resize_start(job, world, NULL, &r, f))
		return f->code;
	r->until_us = clock_now_us() + wait_us;
	r->done = done;
	r->userdata = userdata;
	return 0;
}

int resize_begin_staying(struct job *job, const struct resize_plan *plan, resize_cb done,
			 void *userdata, struct fault *f)
{
	struct resize *r;

	if (resize_check(job, plan->world, f) || resize_start(job, plan->world, plan, &r, f))
		return f->code;
	r->done = done;
	r->userdata = userdata;
	return 0;
}

void resize_hurry(struct job *job)
{
	if (job->life.resize)
		job->life.resize->until_us = 0;
}

void resize_cancel(struct job *job)
{
	struct resize *r = job->life.resize;
	struct fault f = FAULT_NULL;

	if (!r || r->posted || r->stage == RESIZE_COPYING)
		return; /* it finds the job deleted */
	fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	resize_over(r, &f);
}
