/*
 * The step that is prepared and applied later.
 *
 * Step only notes that all ranks want it. It is applied as a whole by the commit that
 * follows, so that a trainer's death between the two leaves parameters, optimizer
 * state and commit as they were; or, for those who go on without a
 * commit, by the next op that needs parameters or gradients, and then the job is past its
 * last commit until the next one.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op_impl.h"
#include "unit/optim.h"

/* What one device does of it. */
struct apply_part {
	struct backend_task task;
	struct apply *apply;
};

struct apply {
	struct job *job;
	struct parked parked; /* until nobody reads the parameters any more */
	struct unit **units;  /* those that are stepped */
	unsigned n;
	struct apply_part parts[NODE_MAX_DEVICES]; /* by device */
	unsigned pending;
	int status;
};

static void apply_free(struct apply *a)
{
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		free(a->parts[d].task.kops);
	free(a->units);
	free(a);
}

static void resume_all(struct list *waiting)
{
	struct list now = LIST_INIT(now);

	list_take_all(&now, waiting);
	while (!list_empty(&now)) {
		struct parked *p = list_first(&now, struct parked, link);

		list_unlink(&p->link);
		p->resume(p);
	}
}

/* A device that failed half-way leaves parameters that nobody can go on from. */
static void mark_failed(struct job *job)
{
	job->torn = true;
	for (uint32_t i = 0; i < job->n_units; i++)
		job->units[i]->torn = true;
}

static void apply_done(struct job *job, struct unit **units, unsigned n, int status)
{
	for (unsigned i = 0; i < n; i++) {
		struct unit *u = units[i];

		u->version++;
		u->has_gradient = false;
		u->rec->optimizer->steps++;
		full_invalidate(job, u);
	}
	if (status)
		mark_failed(job);
	if (n)
		job->rec->uncommitted_steps++;
	job->step.applying = false;
	if (job->step.epoch != job->rec->epoch)
		job_tear(job); /* a trainer died meanwhile, without a commit to cover this */
	resume_all(&job->step.waiting);
	job->running--; /* only now: those resumed may have been the last of a deleted job */
	job_settle(job);
}

static void on_applied(struct backend_task *task, int status)
{
	struct apply *a = CONTAINER_OF(task, struct apply_part, task)->apply;
	struct job *job = a->job;

	a->status = a->status ? a->status : status;
	if (--a->pending)
		return;
	apply_done(job, a->units, a->n, a->status);
	apply_free(a);
}

static bool takes_part(const struct job *job, const struct unit *u)
{
	return u->has_gradient && u->rec->group == job->step.group &&
	       u->rec->optimizer->kind != OPTIM_NONE;
}

static struct apply *apply_new(struct job *job)
{
	size_t room = job->n_units ? job->n_units : 1;
	struct apply *a = calloc(1, sizeof(*a));
	bool there;

	if (!a)
		return NULL;
	a->job = job;
	list_init(&a->parked.link);
	a->units = calloc(room, sizeof(struct unit *));
	there = a->units;
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		a->parts[d].apply = a;
		a->parts[d].task.sync = true;
		a->parts[d].task.done = on_applied;
		a->parts[d].task.kops = calloc(room, sizeof(struct kop));
		there = there && a->parts[d].task.kops;
	}
	if (there)
		return a;
	apply_free(a);
	return NULL;
}

static void add_unit(struct apply *a, struct unit *u)
{
	const struct job_step *step = &a->job->step;
	double lr = step->has_lr ? step->lr : u->rec->optimizer->lr;

	CHECK(!u->gathered_ranks);
	for (unsigned d = 0; d < u->n_parts; d++) {
		struct backend_task *task = &a->parts[u->parts[d].device->index].task;

		if (!u->parts[d].n)
			continue;
		CHECK(optim_step_kop(u, &u->parts[d], lr, &task->kops[task->n_kops]));
		task->n_kops++;
	}
	a->units[a->n++] = u;
}

/* Only to devices that have something to do: another may be lost, which is not our affair.
 * With nothing to do at all it still ends from the loop. */
static void submit_parts(struct apply *a)
{
	struct node *node = a->job->node;
	unsigned n = node->n_devices;

	for (unsigned d = 0; d < n; d++)
		a->pending += a->parts[d].task.n_kops > 0;
	if (!a->pending) {
		const struct device *d = a->job->placed[0] ? a->job->placed[0] : &node->devices[0];

		a->pending = 1;
		backend_submit(d->backend, &a->parts[d->index].task);
		return;
	}
	for (unsigned d = 0; d < n; d++)
		if (a->parts[d].task.n_kops)
			backend_submit(node->devices[d].backend, &a->parts[d].task);
}

/* The epoch may have ended while streams were waited for: then what they brought is worth
 * nothing, and the step never was. */
static void submit(struct parked *p)
{
	struct apply *a = CONTAINER_OF(p, struct apply, parked);
	struct job *job = a->job;

	if (job->step.epoch != job->rec->epoch) {
		job->step.abandoned = true;
		apply_done(job, NULL, 0, 0);
		apply_free(a);
		return;
	}
	for (uint32_t i = 0; i < job->n_units; i++)
		if (takes_part(job, job->units[i]))
			add_unit(a, job->units[i]);
	submit_parts(a);
}

static void apply_start(struct job *job)
{
	struct apply *a = apply_new(job);
	int r = -ENOMEM;

	job->step.prepared = false;
	job->step.applying = true;
	job->step.abandoned = false;
	job->step.epoch = job->rec->epoch;
	job->running++;
	if (a)
		r = drain_ensure(job, &a->parked, submit);
	if (r == 0) {
		submit(&a->parked);
	} else if (r < 0) {
		apply_done(job, NULL, 0, r);
		if (a)
			apply_free(a);
	}
}

bool apply_ensure(struct job *job, struct parked *p, void (*resume)(struct parked *p))
{
	if (!job->step.prepared && !job->step.applying)
		return true;
	p->resume = resume;
	list_append(&job->step.waiting, &p->link);
	if (!job->step.applying)
		apply_start(job);
	return false;
}
