/*
 * A task on a device's queue, with the streams of trainers that it waits for and a deadline for
 * that wait. A rank whose stream does not arrive in time is lost: its signals are poisoned, and
 * the queue continues. If an operation between devices does not end in time, its communicator is
 * aborted. Loop thread only.
 */
#ifndef SHARDD_OP_QUEUE_TASK_H
#define SHARDD_OP_QUEUE_TASK_H

#include "job/job.h"
#include "op/device_note.h"

struct queue_task {
	struct backend_task task;
	struct device_note note; /* (optional) filled by the submitter; zero: not recorded */
	struct job *job;
	struct list link; /* job->waiting_tasks, while it may wait for a trainer */
	uint64_t deadline_us;
	struct backend_wait *waits; /* owned */
	bool *gone;                 /* owned; by wait: its session has ended */
	unsigned n_waits;
	struct backend *backend;   /* where it was submitted, and as which of all tasks */
	uint64_t number;           /* 0: not yet */
	struct node_comm *between; /* watch this: borrowed; NULL: streams only */
};

/* Safe to deinit from here on. */
void queue_task_init(struct queue_task *t, struct job *job);
/* Wait for @n points more than before. Return: 0 or -ENOMEM. */
int queue_task_wait(struct queue_task *t, const struct backend_wait *waits, unsigned n);
/* Submit t->task (whose waits are set here). @deadline_us: for its streams; 0: the job's
 * op_timeout_ms from now on. The callbacks are the task's own. */
void queue_task_submit(struct queue_task *t, struct backend *b, uint64_t deadline_us);
/* Submit t->task in the same queue behind the one that waits: it waits for nobody itself
 * (those streams may be gone by now), and is watched in place of that one. */
void queue_task_follow(struct queue_task *t, struct backend *b);
/* Without a task: watch an operation on @nc until queue_task_done. */
void queue_task_watch(struct queue_task *t, struct node_comm *nc, uint64_t deadline_us);
/* The device has executed it: no trainer is waited for any more. Safe twice. */
void queue_task_done(struct queue_task *t);
void queue_task_deinit(struct queue_task *t);

/* The session of @signals has ended: do not look it up any more. */
void queue_tasks_forget(struct job *job, const struct backend_signals *signals);

/* The epoch of @job ends, perhaps because of a rank that its tasks waited for. Tasks of any job
 * behind such a wait get a new deadline, because they could not run before. */
void queue_tasks_epoch_ends(struct job *job);

/* Operations between devices that run for @job may take no longer than until then. */
void queue_tasks_limit(struct job *job, uint64_t deadline_us);

/* Declare ranks lost whose streams are past their deadline. */
void queue_tasks_tick(struct job *job, uint64_t now_us);

#endif
