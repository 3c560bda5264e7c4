#include "op/queue_task.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "op/device_note.h"

/* Where the daemon's op_timeout_ms is 0: no queue is held up for ever all the same. */
#define LONGEST_WAIT_US (600u * 1000000u)
/* What one that stood behind another's wait gets when that is over. */
#define GRACE_US 1000000u

static uint64_t last_number;

void queue_task_init(struct queue_task *t, struct job *job)
{
	*t = (struct queue_task){ .job = job };
	list_init(&t->link);
}

int queue_task_wait(struct queue_task *t, const struct backend_wait *waits, unsigned n)
{
	struct backend_wait *grown;
	bool *gone;

	if (!n)
		return 0;
	grown = realloc(t->waits, (t->n_waits + n) * sizeof(*grown));
	if (!grown)
		return -ENOMEM;
	t->waits = grown;
	gone = realloc(t->gone, (t->n_waits + n) * sizeof(*gone));
	if (!gone)
		return -ENOMEM;
	t->gone = gone;
	memcpy(grown + t->n_waits, waits, n * sizeof(*waits));
	memset(gone + t->n_waits, 0, n * sizeof(*gone));
	t->n_waits += n;
	return 0;
}

/* A job may say how long its own ops may take, but not how long it holds up a queue that
 * others share: that is the daemon's to say. */
static void queue_task_begin_watch(struct queue_task *t, uint64_t deadline_us)
{
	uint64_t own = t->job->rec->op_timeout_ms, most = t->job->node->limits.op_timeout_ms;
	uint64_t now = clock_now_us();

	CHECK(list_empty(&t->link));
	most = most ? most * 1000u : LONGEST_WAIT_US;
	if (!deadline_us || deadline_us == UINT64_MAX)
		deadline_us = own ? now + own * 1000u : UINT64_MAX;
	t->deadline_us = deadline_us < now + most ? deadline_us : now + most;
	list_append(&t->job->waiting_tasks, &t->link);
}

void queue_task_submit(struct queue_task *t, struct backend *b, uint64_t deadline_us)
{
	t->task.waits = t->waits;
	t->task.n_waits = t->n_waits;
	t->task.owner = job_as_owner(t->job);
	t->backend = b;
	t->number = ++last_number;
	if (t->n_waits)
		queue_task_begin_watch(t, deadline_us);
	device_note_task(&t->note, b, &t->task);
	backend_submit(b, &t->task);
}

void queue_task_watch(struct queue_task *t, struct node_comm *nc, uint64_t deadline_us)
{
	t->between = nc;
	queue_task_begin_watch(t, deadline_us);
}

void queue_task_follow(struct queue_task *t, struct backend *b)
{
	CHECK(t->number && t->backend == b); /* behind one in the same queue */
	t->task.waits = NULL;
	t->task.n_waits = 0;
	t->task.owner = job_as_owner(t->job);
	device_note_task(&t->note, b, &t->task);
	backend_submit(b, &t->task);
}

void queue_task_done(struct queue_task *t)
{
	list_unlink(&t->link);
	free(t->waits);
	free(t->gone);
	t->waits = NULL;
	t->gone = NULL;
	t->n_waits = 0;
}

void queue_task_deinit(struct queue_task *t)
{
	if (t->job)
		queue_task_done(t);
}

static struct member *queue_task_owner_of(const struct job *job,
					  const struct backend_signals *signals)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r] && member_signals(job->ranks[r]) == signals)
			return job->ranks[r];
	return NULL;
}

/* One of those it waits for that has not been lost yet. */
static struct member *queue_task_suspect(const struct queue_task *t)
{
	for (unsigned i = 0; i < t->n_waits; i++) {
		struct member *m =
			t->gone[i] ? NULL : queue_task_owner_of(t->job, t->waits[i].signals);

		if (m && (m->state == MEMBER_JOINED || m->state == MEMBER_STALE))
			return m;
	}
	return NULL;
}

void queue_tasks_forget(struct job *job, const struct backend_signals *signals)
{
	struct queue_task *t, *tmp;

	list_for_each (t, tmp, &job->waiting_tasks, link)
		for (unsigned i = 0; i < t->n_waits; i++)
			t->gone[i] = t->gone[i] || t->waits[i].signals == signals;
}

/* Call @fn with every task that is watched, of all jobs, until it returns true. */
static bool queue_task_any_task(struct jobs *jobs,
				bool (*fn)(struct queue_task *t, const void *arg), const void *arg)
{
	struct list *lists[] = { &jobs->all, &jobs->zombies };

	for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
		struct job *job, *tmp;

		list_for_each (job, tmp, lists[i], link) {
			struct queue_task *t, *next;

			list_for_each (t, next, &job->waiting_tasks, link)
				if (fn(t, arg))
					return true;
		}
	}
	return false;
}

/* The waits of number *@number are over soon: what stood behind has its time only now. */
static bool queue_task_give_grace(struct queue_task *t, const void *number)
{
	uint64_t until = clock_now_us() + GRACE_US;

	if ((t->between || t->number > *(const uint64_t *)number) && t->deadline_us < until)
		t->deadline_us = until;
	return false;
}

void queue_tasks_epoch_ends(struct job *job)
{
	uint64_t first = UINT64_MAX;
	struct queue_task *t, *tmp;

	list_for_each (t, tmp, &job->waiting_tasks, link)
		if (queue_task_suspect(t) && t->number < first)
			first = t->number;
	if (first != UINT64_MAX)
		queue_task_any_task(job->jobs, queue_task_give_grace, &first);
}

static bool queue_task_stands_before(struct queue_task *t, const void *arg)
{
	const struct queue_task *behind = arg;

	return t->number < behind->number && t->backend == behind->backend &&
	       t->task.queue == behind->task.queue && queue_task_suspect(t);
}

/* Jobs share the queues of a device: who stands behind the wait of another cannot know
 * yet whether its own streams have come, and nobody is blamed before that is over. */
static struct queue_task *queue_task_first_late(struct job *job, uint64_t now_us)
{
	struct queue_task *t, *tmp;

	list_for_each (t, tmp, &job->waiting_tasks, link) {
		if (now_us < t->deadline_us || !queue_task_suspect(t))
			continue;
		if (!queue_task_any_task(job->jobs, queue_task_stands_before, t))
			return t;
		t->deadline_us = now_us + GRACE_US;
	}
	return NULL;
}

static bool queue_task_is_awaited(struct queue_task *t, const void *arg)
{
	(void)arg;
	return queue_task_suspect(t);
}

/* While streams are waited for, it may be they who hold up everything behind them. */
static struct node_comm *queue_task_first_hung(struct job *job, uint64_t now_us)
{
	struct queue_task *t, *tmp;

	list_for_each (t, tmp, &job->waiting_tasks, link) {
		if (!t->between || t->between->state != COMM_READY || now_us < t->deadline_us)
			continue;
		if (!queue_task_any_task(job->jobs, queue_task_is_awaited, NULL))
			return t->between;
		t->deadline_us = now_us + GRACE_US;
	}
	return NULL;
}

void queue_tasks_limit(struct job *job, uint64_t deadline_us)
{
	struct queue_task *t, *tmp;

	list_for_each (t, tmp, &job->waiting_tasks, link)
		if (t->between && t->deadline_us > deadline_us)
			t->deadline_us = deadline_us;
}

void queue_tasks_tick(struct job *job, uint64_t now_us)
{
	struct node_comm *nc;
	struct queue_task *t;

	while ((t = queue_task_first_late(job, now_us)))
		job_lost(queue_task_suspect(t), "has streams that did not reach their ops in time");
	while ((nc = queue_task_first_hung(job, now_us)))
		node_comm_break(nc, "a collective between them did not end in time");
}
