/*
 * The step that is prepared and applied later.
 *
 * Step only notes that all ranks want it. It is applied as a whole by the commit that
 * follows, so that a trainer's death between the two leaves parameters, optimizer
 * state and commit as they were; or, for those who go on without a
 * commit, by the next op that needs parameters or gradients, and then the job is past its
 * last commit until the next one.
 */
#include "step/apply.h"

#include <errno.h>
#include <stdlib.h>

#include "backend/redo.h"
#include "copies/full.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "job/elastic.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/pooled.h"
#include "job/position.h"
#include "op/device_note.h"
#include "op/op.h"
#include "step/commit.h"
#include "step/doubt_record.h"
#include "unit/optim.h"
#include "work/drain.h"

/* What one device does of it. */
struct apply_part {
	struct backend_task task;
	struct device_note note;
	struct apply *apply;
	struct launch *launches; /* owned: those of the factor, then those of the step */
	unsigned n_scale, n_step;
	unsigned first_scale, first_step; /* of them, in the redo task */
};

struct apply {
	struct job *job;
	struct waiter waiter; /* until nobody holds or reads the parameters any more */
	unsigned stage;       /* enum apply_stage */
	struct unit **units;  /* those that are stepped */
	unsigned n;
	struct apply_part parts[NODE_MAX_DEVICES]; /* by device */
	unsigned pending;
	int status;
	struct redo_task
		*redo; /* owned: all launches, for a successor; NULL: none can complete them */
	bool changes;  /* job_change_begin was called */
	bool recorded; /* the units have made the step, says the record */
	bool filled;   /* its launches are made */
	uint64_t old;  /* a predecessor's task that makes the step; 0: none */
};

static void apply_free(struct apply *a)
{
	redo_task_free(a->redo);
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		free(a->parts[d].launches);
	free(a->units);
	free(a);
}

void apply_mark(struct job *job)
{
	if (!job->step.mid)
		job_count_uncommitted(job);
	job->step.mid = true;
	position_begin_partial(job);
}

/* A device that failed half-way leaves parameters that nobody can go on from. */
void apply_failed(struct job *job)
{
	job_set_torn(job);
}

static void apply_count_steps(struct job *job, struct unit **units, unsigned n)
{
	state_applied *applied;

	for (unsigned i = 0; i < n; i++) {
		unit_stepped(units[i]);
		job_journal_mark_steps(job, units[i]);
	}
	if (n && !job->step.counted)
		job_count_uncommitted(job);
	position_stepped(job, job->step.skips);
	if (!job->step.across)
		return;
	applied = state_job_applied(job->rec, job->step.id.group);
	CHECK(applied); /* since it was prepared */
	applied->epoch = job->step.id.epoch;
	applied->number = job->step.id.number;
	doubt_record_applied(job);
}

/* It never was, and what was stepped before it stays half a step. */
static void apply_drop(struct job *job)
{
	position_drop(job);
	position_end_partial(job);
}

/* A trainer died meanwhile, perhaps without a commit to cover this. */
static void apply_outlived(struct job *job)
{
	job_tear(job);
	if (!job->step.committing)
		kept_epoch_ended(job);
}

/* @recorded: that the units have made the step. */
static void apply_done(struct job *job, struct unit **units, unsigned n, bool recorded, int status)
{
	if (job->step.abandoned)
		apply_drop(job);
	else if (!recorded)
		apply_count_steps(job, units, n);
	for (unsigned i = 0; i < n; i++) {
		struct unit *u = units[i];

		CHECK(!u->gathered_ranks && !u->summoned_ranks); /* nobody has begun to read it */
		u->version++;
		u->has_gradient = false;
		full_invalidate(job, u);
		job_give_grads(job, u);
	}
	if (status)
		apply_failed(job);
	job->step.counted = job->step.covered = job->step.across = job->step.skips = false;
	job->step.old_redo = 0;
	job_step_move(job, JOB_STEP_NONE);
	step_rates_clear(&job->step.rates);
	if (job->step.epoch != job->rec->epoch)
		apply_outlived(job);
	apply_go_on(job);
	elastic_stepped(job);
	job_ran(job);
}

static void apply_run(struct apply *a);

static void apply_on_applied(struct backend_task *task, int status)
{
	struct apply *a = CONTAINER_OF(task, struct apply_part, task)->apply;

	a->status = a->status ? a->status : status;
	CHECK(a->pending > 0);
	if (--a->pending)
		return;
	apply_run(a);
}

bool apply_takes_part(const struct job *job, const struct unit *u)
{
	return u->has_gradient && u->rec->group == job->step.group &&
	       u->rec->optimizer->kind != OPTIM_NONE;
}

bool apply_has_units(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (apply_takes_part(job, job->units[i]))
			return true;
	return false;
}

static void apply_resume(struct waiter *w);

static struct apply *apply_new(struct job *job)
{
	struct apply *a = calloc(1, sizeof(*a));

	if (!a)
		return NULL;
	a->job = job;
	waiter_init(&a->waiter, apply_resume);
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		a->parts[d].apply = a;
		a->parts[d].note = (struct device_note){ .name = "Step", .job = job };
		a->parts[d].task.sync = true;
		a->parts[d].task.done = apply_on_applied;
	}
	a->units = calloc(job->n_units ? job->n_units : 1, sizeof(struct unit *));
	if (a->units)
		return a;
	apply_free(a);
	return NULL;
}

/* -------------------------------------------------------------------- launches */

/* The launches of the factor of a planned clip: an op on the same elements before the step. @to:
 * NULL: they are only counted. */
static size_t apply_scale_launches(const struct apply *a, const struct unit *u, unsigned d,
				   struct launch *to)
{
	const struct job_step *step = &a->job->step;

	return step->scales ? optim_scale_launches(u, &u->parts[d], step->factor, to) : 0;
}

/* What its launches need. */
struct apply_need {
	size_t launches[NODE_MAX_DEVICES];
	size_t all;     /* launches */
	uint64_t cells; /* at most, of all launches */
};

static void apply_count(const struct apply *a, struct apply_need *ret)
{
	*ret = (struct apply_need){ 0 };
	for (unsigned i = 0; i < a->n; i++) {
		const struct unit *u = a->units[i];

		for (unsigned d = 0; d < u->n_parts; d++) {
			size_t n = apply_scale_launches(a, u, d, NULL) +
				   optim_step_launches(u, &u->parts[d], &a->job->step.rates, NULL);

			ret->launches[u->parts[d].device->index] += n;
			ret->all += n;
			ret->cells += n + 2 * redo_cells(u->parts[d].n);
		}
	}
}

/* Gradient shards from a pool may end with us. */
static bool apply_gradients_outlive(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		for (unsigned d = 0; d < u->n_parts && apply_takes_part(job, u); d++)
			if (u->parts[d].grads.slab && !pooled_outlives(&u->parts[d].grads))
				return false;
	}
	return true;
}

/* A successor can complete a step of memory that outlives us, on backends that note how far it is. */
static bool apply_can_redo(const struct job *job)
{
	bool can = job->jobs->redo && !job->rec->ipc;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		can = can && backend_info(job->node->devices[d].backend)->redoes;
	return can && apply_gradients_outlive(job);
}

static enum res apply_make_room(struct apply *a)
{
	struct apply_need need;

	apply_count(a, &need);
	for (unsigned d = 0; d < a->job->node->n_devices; d++) {
		a->parts[d].launches = calloc(need.launches[d] + 1, sizeof(struct launch));
		if (!a->parts[d].launches)
			return RES_FAILED;
	}
	if (need.all && apply_can_redo(a->job))
		a->redo = redo_task_new(a->job->jobs->redo, (unsigned)need.all, need.cells);
	return RES_DONE;
}

static struct redo_place apply_place(void *arg, const void *at)
{
	const struct unit_part *p = arg;
	const struct region *arrays[] = { &p->params, &p->grads, &p->state1, &p->state2,
					  &p->state3 };

	for (unsigned i = 0; i < ARRAY_SIZE(arrays); i++) {
		const struct slab *s = arrays[i]->slab;
		const char *begin = s ? region_addr(arrays[i]) : NULL;

		if (s && (const char *)at >= begin && (const char *)at < begin + arrays[i]->bytes)
			return (struct redo_place){ (uint64_t)((const char *)at -
							       (const char *)backend_addr(s->mem)),
						    s->id };
	}
	CHECK_NOT_REACHED();
}

static void apply_add_redo(struct apply *a, unsigned phase, const struct unit_part *p,
			   const struct launch *launches, size_t n)
{
	for (size_t i = 0; a->redo && i < n; i++)
		redo_task_add(a->redo, phase, &launches[i], apply_place, (void *)p);
}

static void apply_fill_scale(struct apply *a, const struct unit *u, unsigned d)
{
	struct apply_part *p = &a->parts[u->parts[d].device->index];
	struct launch *to = &p->launches[p->n_scale];
	size_t n = apply_scale_launches(a, u, d, to);

	apply_add_redo(a, 0, &u->parts[d], to, n);
	p->n_scale += (unsigned)n;
}

/* The scalars are those of the step after the ones that the unit has made. */
static void apply_fill_step(struct apply *a, const struct unit *u, unsigned d)
{
	struct apply_part *p = &a->parts[u->parts[d].device->index];
	struct launch *to = &p->launches[p->n_scale + p->n_step];
	size_t n = optim_step_launches(u, &u->parts[d], &a->job->step.rates, to);

	apply_add_redo(a, 1, &u->parts[d], to, n);
	p->n_step += (unsigned)n;
}

/* All that @fill makes for one device, so that they follow each other in the redo task, too. */
static void apply_fill_device(struct apply *a, unsigned device,
			      void (*fill)(struct apply *a, const struct unit *u, unsigned d))
{
	for (unsigned i = 0; i < a->n; i++)
		for (unsigned d = 0; d < a->units[i]->n_parts; d++)
			if (a->units[i]->parts[d].device->index == device)
				fill(a, a->units[i], d);
}

static void apply_fill(struct apply *a)
{
	unsigned n = a->job->node->n_devices, at = 0;

	for (unsigned d = 0; d < n; d++) {
		a->parts[d].first_scale = at;
		apply_fill_device(a, d, apply_fill_scale);
		at += a->parts[d].n_scale;
	}
	for (unsigned d = 0; d < n; d++) {
		a->parts[d].first_step = at;
		apply_fill_device(a, d, apply_fill_step);
		at += a->parts[d].n_step;
	}
}

/* Not where this node's shards are empty. */
static bool apply_launches(const struct apply *a)
{
	bool any = false;

	for (unsigned d = 0; d < a->job->node->n_devices; d++)
		any = any || a->parts[d].n_scale || a->parts[d].n_step;
	return any;
}

/* A step that a successor can complete is recorded before it runs: one entry of the journal names it
 * together with what holds when it is done. So is one that all units have made in backward, of which
 * nothing is left to do. Any other step is recorded when it is done; a successor that finds one under
 * way finds the job TORN. */
static void apply_record(struct apply *a)
{
	struct job *job = a->job;

	if (!job->step.skips)
		kept_applies(job, a->units, a->n);
	a->recorded = a->redo || !apply_launches(a);
	a->changes = !a->recorded;
	if (a->changes) {
		job_change_begin(job);
		return;
	}
	apply_count_steps(job, a->units, a->n);
	if (job->step.committing)
		commit_record(job);
	if (a->redo)
		job_redo_begin(job, a->redo);
}

/* Only to devices that have something to do: another may be lost, which is not our affair.
 * With nothing to do at all it still ends from the loop. */
static void apply_submit_parts(struct apply *a)
{
	struct node *node = a->job->node;
	unsigned n = node->n_devices;

	CHECK(!a->pending);
	for (unsigned d = 0; d < n; d++)
		a->pending += a->parts[d].task.n_launches > 0;
	if (!a->pending) {
		const struct device *d = a->job->placed[0] ? a->job->placed[0] : &node->devices[0];

		a->pending = 1;
		backend_submit(d->backend, &a->parts[d->index].task);
		return;
	}
	for (unsigned d = 0; d < n; d++) {
		struct backend *b = node->devices[d].backend;

		if (!a->parts[d].task.n_launches)
			continue;
		a->parts[d].task.owner = job_as_owner(a->job);
		device_note_task(&a->parts[d].note, b, &a->parts[d].task);
		backend_submit(b, &a->parts[d].task);
	}
}

/* As apply_record. */
static void apply_record_old(struct apply *a)
{
	struct job *job = a->job;

	kept_applies(job, a->units, a->n);
	a->recorded = true;
	job->rec->redo = a->old;
	apply_count_steps(job, a->units, a->n);
	if (job->step.committing)
		commit_record(job);
	job_journal_write(job);
}

/* So long at a time, so that links to other nodes and other jobs go on. */
#define APPLY_OLD_US 50000u

/* A part of it after each tick (jobs_tick). */
static enum res apply_run_old(struct apply *a)
{
	struct job *job = a->job;
	struct fault f = FAULT_NULL;
	uint64_t began = clock_now_us();
	bool left = true;

	while (!f.code && left && clock_now_us() - began < APPLY_OLD_US)
		(void)job->jobs->redo_some(job->jobs, a->old, &left, &f);
	job->step.redoes = !f.code && left;
	if (!left || f.code) {
		job->rec->redo = job->step.old_redo = 0;
		job_journal_mark(job, JOB_JOURNAL_PROGRESS);
		redo_drop(job->jobs->redo, a->old);
	}
	if (f.code) {
		log_error("job", "a step in doubt cannot be applied job=%s why=\"%s\"", job->label,
			  f.text);
		a->status = -EIO;
		return RES_FAILED;
	}
	if (left) {
		condition_wait(&job->node->changed, &a->waiter);
		return RES_WAIT;
	}
	return RES_DONE;
}

/* Launch @i of it, on its device. Return: false: the task is none of apply_fill. */
static bool apply_take_launch(struct apply *a, const struct launch *launch, unsigned i)
{
	const struct slab *s =
		slab_find(&a->job->node->devices[0], redo_task_place(a->redo, i).slab);
	struct apply_part *p = s ? &a->parts[s->device->index] : NULL;
	bool scales = redo_task_phase(a->redo, i) == 0;
	unsigned *first, *n;

	if (!p || (scales && p->n_step))
		return false;
	first = scales ? &p->first_scale : &p->first_step;
	n = scales ? &p->n_scale : &p->n_step;
	if (!*n)
		*first = i;
	p->launches[p->n_scale + p->n_step] = *launch;
	return *first + (*n)++ == i;
}

static bool apply_take_launches(struct apply *a, const struct launch *launches)
{
	unsigned n = redo_task_count(a->redo);
	bool all = true;

	for (unsigned d = 0; all && d < a->job->node->n_devices; d++) {
		a->parts[d].launches = calloc(n + 1, sizeof(struct launch));
		all = a->parts[d].launches;
	}
	for (unsigned i = 0; all && i < n; i++)
		all = apply_take_launch(a, &launches[i], i);
	return all;
}

/* On devices a predecessor's task is run as one of our own. */
static enum res apply_take_old(struct apply *a)
{
	_cleanup_(freep) struct launch *launches = NULL;
	struct jobs *jobs = a->job->jobs;
	struct fault f = FAULT_NULL;

	if (jobs->redo_take(jobs, a->old, &a->redo, &launches, &f) == 0 &&
	    apply_take_launches(a, launches))
		return RES_DONE;
	log_error("job", "a step in doubt cannot be applied job=%s why=\"%s\"", a->job->label,
		  f.code ? f.text : "its task is damaged, or there is no memory");
	if (!a->redo)
		redo_drop(jobs->redo, a->old);
	a->status = -EIO;
	return RES_FAILED;
}

static bool apply_has_scale(const struct apply *a)
{
	bool any = false;

	for (unsigned d = 0; d < a->job->node->n_devices; d++)
		any = any || a->parts[d].n_scale;
	return any;
}

static void apply_take_units(struct apply *a)
{
	struct job *job = a->job;

	CHECK(!a->n && job->step.state != JOB_STEP_NONE);
	for (uint32_t i = 0; i < job->n_units; i++) {
		CHECK(!apply_takes_part(job, job->units[i]) || !job->units[i]->gathered_ranks);
		if (apply_takes_part(job, job->units[i]))
			a->units[a->n++] = job->units[i];
	}
}

static enum res apply_make(struct apply *a)
{
	if (a->filled)
		return RES_DONE;
	apply_take_units(a);
	if (a->old)
		return RES_DONE;
	RES_TRY(apply_make_room(a));
	apply_fill(a);
	a->filled = true;
	return RES_DONE;
}

static enum res apply_submit_scale(struct apply *a)
{
	for (unsigned d = 0; d < a->job->node->n_devices; d++) {
		struct apply_part *p = &a->parts[d];

		p->task.launches = p->launches;
		p->task.n_launches = p->n_scale;
		p->task.redo = a->redo;
		p->task.first_redo = p->first_scale;
	}
	apply_submit_parts(a);
	return RES_WAIT;
}

static enum res apply_submit_step(struct apply *a)
{
	for (unsigned d = 0; d < a->job->node->n_devices; d++) {
		struct apply_part *p = &a->parts[d];

		p->task.launches = p->launches + p->n_scale;
		p->task.n_launches = p->n_step;
		p->task.redo = a->redo;
		p->task.first_redo = p->first_step;
	}
	apply_submit_parts(a);
	return RES_WAIT;
}

/* The epoch may have ended while readers or streams were waited for: then what they brought is
 * worth nothing, and the step never was. Not if other nodes apply it, too. */
static bool apply_is_abandoned(struct apply *a)
{
	struct job_step *step = &a->job->step;
	bool goes_on = step->across ||
		       (step->committing && (job_is_across(a->job) || job_is_alone(a->job)));

	step->abandoned = !goes_on && step->epoch != a->job->rec->epoch;
	return step->abandoned;
}

enum apply_stage { APPLY_READERS, APPLY_SCALE, APPLY_OLD, APPLY_STEP, APPLY_DONE };

static enum res apply_tick(struct apply *a)
{
	struct job *job = a->job;

	switch ((enum apply_stage)a->stage) {
	case APPLY_READERS:
		if (apply_is_abandoned(a))
			return RES_DONE;
		job->step.covered = job->step.committing && apply_can_redo(job);
		if (!job->step.skips)
			RES_TRY(readers_let(job, JOB_CHANGE_WHOLE, &a->waiter));
		a->stage = APPLY_SCALE;
		if (!job->step.skips)
			RES_TRY(drain_wait(job, &a->waiter));
		fallthrough;
	case APPLY_SCALE:
		if (apply_is_abandoned(a))
			return RES_DONE;
		RES_TRY(apply_make(a));
		if (a->old && !job->jobs->redo_take) {
			apply_record_old(a);
			a->stage = APPLY_OLD;
			return apply_run_old(a);
		}
		if (a->old) {
			RES_TRY(apply_take_old(a));
			apply_record_old(a);
		} else {
			apply_record(a);
		}
		a->stage = APPLY_STEP;
		if (job->step.scales || (a->old && apply_has_scale(a)))
			return apply_submit_scale(a);
		fallthrough;
	case APPLY_STEP:
		a->stage = APPLY_DONE;
		return apply_submit_step(a);
	case APPLY_OLD:
		return apply_run_old(a);
	case APPLY_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void apply_run(struct apply *a)
{
	enum res r = a->status ? RES_FAILED : apply_tick(a);

	if (r == RES_WAIT)
		return;
	if (r == RES_FAILED && !a->status)
		a->status = -ENOMEM;
	if (a->changes)
		job_change_end(a->job);
	apply_done(a->job, a->units, a->n, a->recorded, a->status);
	if (a->status)
		job_journal_write(a->job); /* before a successor believes that all is done */
	apply_free(a);
}

static void apply_resume(struct waiter *w)
{
	apply_run(CONTAINER_OF(w, struct apply, waiter));
}

static void apply_start(struct job *job)
{
	struct apply *a = job->step.ready ? STEAL_PTR(job->step.ready) : apply_new(job);

	if (a)
		a->old = job->step.old_redo; /* whose memory stays until it is done (job_evict.c) */
	job_step_move(job, JOB_STEP_APPLYING);
	job->step.abandoned = false;
	job->step.epoch = job->rec->epoch;
	job->running++;
	if (a) {
		apply_run(a);
		return;
	}
	job->step.old_redo = 0;
	apply_done(job, NULL, 0, false, -ENOMEM);
}

/* Neither runs. */
void apply_go_on(struct job *job)
{
	bool wanted = !condition_is_idle(&job->step.applied);

	if (job->step.state == JOB_STEP_APPLYING || job->step.stepping)
		return;
	if (job->step.state == JOB_STEP_PREPARED && wanted && job->step.gated)
		return;
	if (job->step.state == JOB_STEP_PREPARED && wanted)
		apply_start(job);
	else
		condition_signal(&job->step.applied);
}

bool apply_make_ready(struct job *job, uint64_t *ret)
{
	struct apply *a = apply_new(job);

	*ret = 0;
	if (!a || apply_make(a) != RES_DONE || (apply_launches(a) && !a->redo)) {
		if (a)
			apply_free(a);
		return false;
	}
	job->step.ready = a;
	if (a->redo)
		*ret = redo_task_publish(a->redo);
	return true;
}

void apply_allow_all(struct job *job)
{
	job->step.gated = false;
	apply_go_on(job);
}

void apply_allow(struct job *job, uint64_t group, uint64_t number)
{
	const struct job_step_id *id = &job->step.id;

	if (job->step.state == JOB_STEP_PREPARED && job->step.gated && id->group == group &&
	    id->number == number && id->epoch == job->rec->epoch)
		apply_allow_all(job);
}

void apply_drop_prepared(struct job *job)
{
	if (job->step.state != JOB_STEP_PREPARED)
		return;
	apply_drop(job);
	if (job->step.ready)
		apply_free(STEAL_PTR(job->step.ready));
	if (job->step.old_redo)
		redo_drop(job->jobs->redo, job->step.old_redo);
	job->step.old_redo = 0;
	job->step.gated = job->step.across = job->step.skips = job->step.counted = false;
	for (uint32_t i = 0; i < job->n_units; i++)
		job->units[i]->has_gradient = false;
	job->mem.stray_gradients = true;
	job_give_stray_grads(job);
	step_rates_clear(&job->step.rates);
	job_step_move(job, JOB_STEP_NONE);
}

static enum res apply_begin_wait(struct job *job, struct waiter *w)
{
	condition_wait(&job->step.applied, w);
	apply_go_on(job);
	return RES_WAIT;
}

enum res apply_wait(struct job *job, struct waiter *w)
{
	if (job->step.state == JOB_STEP_NONE && !job->step.stepping)
		return RES_DONE;
	return apply_begin_wait(job, w);
}

enum res apply_wait_step(struct job *job, struct waiter *w)
{
	if (job->step.state == JOB_STEP_NONE)
		return RES_DONE;
	return apply_begin_wait(job, w);
}
