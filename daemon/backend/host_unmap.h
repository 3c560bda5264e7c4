/*
 * A thread that gives memory back: unmapping and closing gigabytes takes long,
 * and the loop must not wait for it.
 *
 *   empty --> its pages are given back, it stays
 *   free ---> nobody else holds it --> unmapped, closed
 *         '-> somebody does ---------> left over: emptied every second until nobody does
 *
 * Memory that is left over is charged to no account, so it must stay empty: a process that still
 * maps it gets pages of zeros when it touches them, which the next turn frees again.
 */
#ifndef SHARDD_BACKEND_HOST_UNMAP_H
#define SHARDD_BACKEND_HOST_UNMAP_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend/host_fill.h"
#include "backend/memfd.h"

/* Most left-over entries that are watched. Each costs a descriptor; beyond this the oldest is
 * closed. */
#define UNMAPPER_MAX_LEFT 1024u

struct unmapper {
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct list queue;     /* of struct memfd; under the lock */
	struct list left;      /* of struct memfd, oldest first; the thread's own */
	unsigned n_left;       /* the thread's own */
	uint64_t pending;      /* bytes to be freed that are not yet; under the lock */
	bool stop;             /* under the lock */
	struct filler *filler; /* borrowed: may be working on memory that is being freed */
};

/* Start the thread. @filler: does not have to be running. Return: 0 or negative errno (then no
 * deinit). */
int unmapper_init(struct unmapper *u, struct filler *filler);

/* Take over @m. Any thread, does not block on the unmapping. */
void unmapper_free(struct unmapper *u, struct memfd *m);

/* Give the pages of @m back; unmapper_free is still to come. Any thread, does not block on it. */
void unmapper_empty(struct unmapper *u, struct memfd *m);

/* Bytes that were given to unmapper_free and are not free yet. Any thread. */
uint64_t unmapper_pending(struct unmapper *u);

/* Unmap what is queued, stop, join. Left-over memory is empty then. */
void unmapper_deinit(struct unmapper *u);

#endif
