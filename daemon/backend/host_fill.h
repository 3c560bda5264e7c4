/*
 * A thread that makes the pages of new memory before anybody touches them, while processors
 * have nothing better to do: the first step is then not the one in which the kernel clears
 * gigabytes. Through the descriptor, not the mapping, so that nobody waits for its locks. Who
 * was faster than it loses nothing.
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

/* Begin with @m some time. For want of memory it is left out. Any thread, does not block. */
void filler_add(struct filler *f, struct memfd *m);

/* @m is about to be freed: it is not looked at any more. Waits for the end of a slice; not for the
 * loop. Without init, and after deinit, nothing is to be done. */
void filler_drop(struct filler *f, struct memfd *m);

/* Stop within a slice, join. Safe without init. */
void filler_deinit(struct filler *f);

#endif
