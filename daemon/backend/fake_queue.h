/*
 * The fake backend's queues, for tests of the behaviour of a device with its own queues: a task is
 * issued first, and executed later, behind the trainers' streams that it waits for. The kernels of
 * a task that is issued but not executed are kept here, with copies of everything they read of
 * their owner: the owner may be gone by then. Loop thread only.
 */
#ifndef SHARDD_BACKEND_FAKE_QUEUE_H
#define SHARDD_BACKEND_FAKE_QUEUE_H

#include "backend/backend_impl.h"
#include "core/list.h"

struct memfd;

struct fake_queues {
	bool on;
	struct list tasks[_BACKEND_Q_N]; /* of struct fake_exec: issued, not executed */
	uint64_t issued[_BACKEND_Q_N];   /* points */
	unsigned pending;                /* in all queues */
	struct list frees;               /* of struct memfd: freed when nothing is pending */
	struct memfd *ready;             /* the page of the queues' words; owned */
};

/* A task that was issued. */
struct fake_exec {
	struct list link;
	struct backend_task *task; /* to be completed; NULL: it was when it was issued */
	enum backend_queue queue;
	uint64_t point;
	int status;
	struct launch *launches; /* owned, with the lists of inputs behind them */
	unsigned n_launches;
	void **sources; /* by launch: owned, what it copies of host memory; NULL: of a device's */
	struct backend_wait *waits; /* owned */
	unsigned n_waits;
};

/* Issue @task: put it in its queue. @status: the result with which it will end. The caller
 * completes it if it is not sync. Aborts without memory: tests only. */
void fake_queues_issue(struct fake_queues *q, struct backend *b, struct backend_task *task,
		       int status);
/* Can a task be executed now? */
bool fake_queues_can(const struct fake_queues *q);
/* The first such task, taken out of its queue. Return: NULL: none. */
struct fake_exec *fake_queues_next(struct fake_queues *q);
/* Run its kernels, publish the progress of the queue, and complete its task; frees @e. */
void fake_queues_execute(struct fake_queues *q, struct backend *b, struct fake_exec *e);

/* Count @m as memory of a device until it is freed. What a task copies of other memory is read when the task is
 * issued, as GPUs' staging copies do. */
void fake_queues_own(struct memfd *m);
/* Free @m when no task that may use it is left. */
void fake_queues_free(struct fake_queues *q, struct memfd *m);
void fake_queues_deinit(struct fake_queues *q);

/* The slots of struct backend_ops. */
int fake_signals_new(struct backend *b, struct backend_mem *mem, struct backend_signals **ret);
void fake_signals_poison(struct backend_signals *s);
void fake_signals_free(struct backend_signals *s, void (*freed)(void *userdata), void *userdata);

#endif
