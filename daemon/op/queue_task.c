#include "op/queue_task.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"

/* A job without op_timeout_ms still does not hold a device's queue for ever. */
#define LONGEST_WAIT_US (600u * 1000000u)

void queue_task_init(struct queue_task *t, struct job *job)
{
	*t = (struct queue_task){ .job = job };
	list_init(&t->link);
}

int queue_task_wait(struct queue_task *t, const struct backend_wait *waits, unsigned n)
{
	struct backend_wait *grown;

	if (!n)
		return 0;
	grown = realloc(t->waits, (t->n_waits + n) * sizeof(*grown));
	if (!grown)
		return -ENOMEM;
	memcpy(grown + t->n_waits, waits, n * sizeof(*waits));
	t->waits = grown;
	t->n_waits += n;
	return 0;
}

static void watch(struct queue_task *t, uint64_t deadline_us)
{
	uint32_t ms = t->job->rec->op_timeout_ms;

	if (!deadline_us || deadline_us == UINT64_MAX)
		deadline_us = clock_now_us() + (ms ? (uint64_t)ms * 1000u : LONGEST_WAIT_US);
	t->deadline_us = deadline_us;
	list_append(&t->job->waiting_tasks, &t->link);
}

void queue_task_submit(struct queue_task *t, struct backend *b, uint64_t deadline_us)
{
	t->task.waits = t->waits;
	t->task.n_waits = t->n_waits;
	if (t->n_waits)
		watch(t, deadline_us);
	backend_submit(b, &t->task);
}

void queue_task_watch(struct queue_task *t, struct node_comm *nc, uint64_t deadline_us)
{
	t->between = nc;
	watch(t, deadline_us);
}

void queue_task_follow(struct queue_task *t, struct backend *b)
{
	t->task.waits = NULL;
	t->task.n_waits = 0;
	backend_submit(b, &t->task);
}

void queue_task_done(struct queue_task *t)
{
	list_unlink(&t->link);
	free(t->waits);
	t->waits = NULL;
	t->n_waits = 0;
}

void queue_task_deinit(struct queue_task *t)
{
	if (t->job)
		queue_task_done(t);
}

static struct member *owner_of(const struct job *job, const struct backend_signals *signals)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r] && member_signals(job->ranks[r]) == signals)
			return job->ranks[r];
	return NULL;
}

/* One of those it waits for that has not been lost yet. */
static struct member *suspect(const struct queue_task *t)
{
	for (unsigned i = 0; i < t->n_waits; i++) {
		struct member *m = owner_of(t->job, t->waits[i].signals);

		if (m && (m->state == MEMBER_JOINED || m->state == MEMBER_STALE))
			return m;
	}
	return NULL;
}

static struct queue_task *first_late(struct job *job, uint64_t now_us)
{
	struct queue_task *t, *tmp;

	list_for_each (t, tmp, &job->waiting_tasks, link)
		if (now_us >= t->deadline_us && suspect(t))
			return t;
	return NULL;
}

/* While streams are waited for, it may be they who hold up everything behind them. */
static bool streams_awaited(const struct jobs *jobs)
{
	const struct job *job, *tmp;

	list_for_each (job, tmp, &jobs->all, link) {
		const struct queue_task *t, *next;

		list_for_each (t, next, &job->waiting_tasks, link)
			if (t->n_waits)
				return true;
	}
	return false;
}

static struct node_comm *first_hung(struct job *job, uint64_t now_us)
{
	struct queue_task *t, *tmp;

	list_for_each (t, tmp, &job->waiting_tasks, link)
		if (t->between && t->between->state == COMM_READY && now_us >= t->deadline_us)
			return t->between;
	return NULL;
}

void queue_tasks_tick(struct job *job, uint64_t now_us)
{
	struct node_comm *nc;
	struct queue_task *t;

	while ((t = first_late(job, now_us)))
		job_lost(suspect(t), "has streams that did not come to their ops in time");
	while ((nc = first_hung(job, now_us)) && !streams_awaited(job->jobs))
		node_comm_break(nc, "a collective between them did not end in time");
}
