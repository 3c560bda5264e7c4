/*
 * Before parameters are written on devices with queues of their own: everything that reads
 * them, in both queues and in trainers' streams, must be over. The loop waits for markers,
 * no processor does.
 */
#include "work/drain.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/queue_task.h"
#include "work/coll.h"

struct drain;

struct drain_task {
	struct queue_task queue;
	struct drain *drain;
	struct backend *backend;
};

struct drain {
	struct list link; /* in job->copies.drains, until gathers that were begun ahead are over */
	struct job *job;
	struct condition over; /* one waiter */
	unsigned pending;
	unsigned n;
	struct drain_task tasks[NODE_MAX_DEVICES * _BACKEND_Q_N];
};

static void drain_free(struct drain *d)
{
	for (unsigned i = 0; i < d->n; i++)
		queue_task_deinit(&d->tasks[i].queue);
	free(d);
}

static void drain_end(struct drain *d)
{
	struct job *job = d->job;

	CHECK(!d->pending);
	condition_signal(&d->over);
	CHECK(condition_is_idle(&d->over));
	drain_free(d);
	job_ran(job);
}

/* What failed is told by what comes after it on the same device. */
static void drain_on_done(struct backend_task *task, int status)
{
	struct drain_task *t = CONTAINER_OF(task, struct drain_task, queue.task);

	(void)status;
	queue_task_done(&t->queue);
	CHECK(t->drain->pending > 0);
	if (--t->drain->pending == 0)
		drain_end(t->drain);
}

/* Streams that read the shards themselves, each at its latest point. Those of copies are the
 * next cast's to wait for. They stay noted: waiting again for a point that was reached
 * costs next to nothing. */
static int drain_take_reads(struct job *job, const struct device *device, struct queue_task *t)
{
	struct reads all = { 0 };
	int r = 0;

	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];

		for (unsigned d = 0; unit_is_direct(u) && d < u->n_parts; d++) {
			const struct reads *of = &u->parts[d].reads;

			if (u->parts[d].device != device)
				continue;
			for (unsigned k = 0; r == 0 && k < of->n; k++)
				r = reads_add(&all, &of->waits[k]);
		}
	}
	if (r == 0)
		r = queue_task_wait(t, all.waits, all.n);
	reads_deinit(&all);
	return r;
}

static bool drain_is_used(const struct job *job, const struct device *device)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->placed[r] == device)
			return true;
	return false;
}

static int drain_prepare(struct drain *d)
{
	struct node *node = d->job->node;

	for (unsigned i = 0; i < node->n_devices; i++) {
		struct device *device = &node->devices[i];

		for (unsigned q = 0; drain_is_used(d->job, device) && q < _BACKEND_Q_N; q++) {
			struct drain_task *t = &d->tasks[d->n++];

			CHECK(d->n <= ARRAY_SIZE(d->tasks));
			t->drain = d;
			t->backend = device->backend;
			queue_task_init(&t->queue, d->job);
			t->queue.task = (struct backend_task){ .queue = (enum backend_queue)q,
							       .sync = true,
							       .done = drain_on_done };
			if (q == BACKEND_Q_MAIN && drain_take_reads(d->job, device, &t->queue) < 0)
				return -ENOMEM;
		}
	}
	return 0;
}

static void drain_go(struct drain *d)
{
	unsigned n = d->n;

	d->pending = n;
	for (unsigned i = 0; i < n; i++)
		queue_task_submit(&d->tasks[i].queue, d->tasks[i].backend, 0);
	if (!n)
		drain_end(d);
}

enum res drain_wait(struct job *job, struct waiter *w)
{
	bool queues = backend_info(job->node->devices[0].backend)->order != BACKEND_ORDER_NONE;
	struct drain *d;

	if (!queues && !job->copies.ahead)
		return RES_DONE;
	d = calloc(1, sizeof(*d));
	if (!d)
		return RES_FAILED;
	d->job = job;
	condition_init(&d->over, "reads of the parameters that devices still do");
	list_init(&d->link);
	if (queues && drain_prepare(d) < 0) {
		drain_free(d);
		return RES_FAILED;
	}
	if (!job->copies.ahead && !d->n) {
		drain_free(d);
		return RES_DONE;
	}
	job->running++;
	condition_wait(&d->over, w);
	if (job->copies.ahead)
		list_append(&job->copies.drains, &d->link);
	else
		drain_go(d);
	return RES_WAIT;
}

void drain_go_on(struct job *job)
{
	struct list now = LIST_INIT(now);

	list_take_all(&now, &job->copies.drains);
	while (!list_empty(&now)) {
		struct drain *d = list_first(&now, struct drain, link);

		list_unlink(&d->link);
		drain_go(d);
	}
}

enum res drain_coll(struct coll *c)
{
	enum res r = drain_wait(c->job, &c->waiter);

	return r == RES_FAILED ? coll_fail(c, -ENOMEM) : r;
}

enum res drain_may_write(struct coll *c, enum job_change what)
{
	if (c->writes)
		return RES_DONE;
	RES_TRY(readers_let(c->job, what, &c->waiter));
	c->writes = true;
	c->job->readers.writing++;
	return RES_DONE;
}

enum res drain_may_free(struct coll *c)
{
	return readers_let(c->job, JOB_CHANGE_WHOLE, &c->waiter);
}
