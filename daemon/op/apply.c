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

struct apply {
	struct backend_task task;
	struct job *job;
	struct unit **units; /* those that are stepped */
	unsigned n;
};

static void apply_free(struct apply *a)
{
	free(a->task.kops);
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
	struct apply *a = CONTAINER_OF(task, struct apply, task);
	struct job *job = a->job;

	apply_done(job, a->units, a->n, status);
	apply_free(a);
}

static bool takes_part(const struct job *job, const struct unit *u)
{
	return u->has_gradient && u->rec->group == job->step.group &&
	       u->rec->optimizer->kind != OPTIM_NONE;
}

static struct apply *apply_new(struct job *job)
{
	struct apply *a = calloc(1, sizeof(*a));

	if (!a)
		return NULL;
	a->job = job;
	a->task.kops = calloc(job->n_units ? job->n_units : 1, sizeof(struct kop));
	a->units = calloc(job->n_units ? job->n_units : 1, sizeof(struct unit *));
	if (!a->task.kops || !a->units) {
		apply_free(a);
		return NULL;
	}
	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];
		double lr = job->step.has_lr ? job->step.lr : u->rec->optimizer->lr;

		if (!takes_part(job, u))
			continue;
		CHECK(!u->gathered_ranks);
		CHECK(optim_step_kop(u, lr, &a->task.kops[a->n]));
		a->units[a->n++] = u;
	}
	a->task.n_kops = a->n;
	a->task.done = on_applied;
	return a;
}

static void apply_start(struct job *job)
{
	struct apply *a = apply_new(job);

	job->step.prepared = false;
	job->step.applying = true;
	job->step.epoch = job->rec->epoch;
	job->running++;
	if (a)
		backend_submit(job->node->backend, &a->task);
	else
		apply_done(job, NULL, 0, -ENOMEM);
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
