/*
 * A thread that gives memory back: unmapping and closing gigabytes takes long,
 * and the loop must not wait for it.
 */
#ifndef SHARDD_BACKEND_HOST_UNMAP_H
#define SHARDD_BACKEND_HOST_UNMAP_H

#include <pthread.h>
#include <stdbool.h>

#include "backend/host_fill.h"
#include "backend/memfd.h"

struct unmapper {
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct list queue;     /* of struct memfd; under the lock */
	bool stop;             /* under the lock */
	struct filler *filler; /* borrowed: may be at what is to be freed */
};

/* Start the thread. @filler: need not have been started. Return: 0 or negative errno (then no
 * deinit). */
int unmapper_init(struct unmapper *u, struct filler *filler);

/* Take over @m. Any thread, does not block on the unmapping. */
void unmapper_free(struct unmapper *u, struct memfd *m);

/* Unmap what is queued, stop, join. */
void unmapper_deinit(struct unmapper *u);

#endif
