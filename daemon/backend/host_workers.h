/*
 * The threads that run kernels on the host.
 *
 * A task is cut into chunks, which all threads take from one counter, so that they end together
 * regardless of their speed. Tasks of one job start in the order in which they were submitted; a
 * thread that finds no chunk left in the first continues with the next. While there are tasks of
 * several jobs, a thread checks after each chunk which task's turn it is (host_fair.h). Which
 * thread runs a chunk, and when, makes no difference to its result.
 */
#ifndef SHARDD_BACKEND_HOST_WORKERS_H
#define SHARDD_BACKEND_HOST_WORKERS_H

#include <sched.h>

#include "backend/backend.h"
#include "core/loopq.h"

struct workers;
typedef void (*workers_done_cb)(void *userdata, struct backend_task *task);

struct workers_options {
	struct loopq *loopq;           /* borrowed */
	const struct kernels *kernels; /* static */
	unsigned threads;              /* at least 1 */
	const cpu_set_t *node_cpus;    /* threads are spread over these; NULL: unbound */
	unsigned n_nodes;
	workers_done_cb done; /* loop thread, once per task */
	void *userdata;
};

/* Start the threads. Loop thread. Return: 0 or negative errno. */
int workers_new(const struct workers_options *o, struct workers **ret);

/* Queue @task (borrowed until done). Allocates nothing, cannot fail. Loop thread. */
void workers_submit(struct workers *w, struct backend_task *task);

/* Run @launch on the calling thread, which wakes no more than all but two of the threads to help: who calls has
 * others that are busy at the same time, such as the one that sends what was made before. Threads that are awake help,
 * too. Its chunks are smaller than those of tasks. Any thread but those of @w; until workers_free. */
void workers_run(struct workers *w, struct launch *launch, struct backend_owner owner);

/* Stop and join; no task may be unfinished. Loop thread. NULL is allowed.
 * Return: NULL. */
struct workers *workers_free(struct workers *w);

#endif
