/*
 * A thread that allocates the pages of new memory before they are touched, slowly unless processors
 * are idle: so the kernel does not have to clear gigabytes during the first step. It uses the
 * descriptor, not the mapping, so that nobody waits for the mapping's locks. Pages that were
 * touched before keep their contents.
 *
 *   add --> queue --slice by slice--> over, dropped, or memory is short
 */
#ifndef SHARDD_BACKEND_HOST_FILL_H
#define SHARDD_BACKEND_HOST_FILL_H

#include <pthread.h>
#include <stdbool.h>

#include "backend/memfd.h"

struct fill;

struct filler {
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t wake, idle;
	struct list queue;    /* of struct fill, oldest first; under the lock */
	struct fill *current; /* that a slice is made of; under the lock */
	bool stop;            /* under the lock */
	bool started;
};

/* Start the thread. Return: 0 or negative errno (then no deinit). */
int filler_init(struct filler *f);

/* Queue @m. Without memory for the entry it is left out. Any thread, does not block. */
void filler_add(struct filler *f, struct memfd *m);

/* Forget @m, which is about to be freed. Waits for the end of a slice; not for the loop thread.
 * Does nothing without init, and after deinit. */
void filler_drop(struct filler *f, struct memfd *m);

/* Stop within a slice, join. Safe without init. */
void filler_deinit(struct filler *f);

#endif
