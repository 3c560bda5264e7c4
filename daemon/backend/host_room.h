/*
 * Is there room for another allocation? A memfd of any size can be made. The kernel takes its
 * pages when they are touched, and kills a process when there are too few. So an allocation must
 * fit the configured limit, and what the machine and the control groups have left now, minus the
 * pages that earlier allocations may still touch. The figures are read at most ten times a second.
 * What is no allocation of a backend, but files in memory that are being written, is a promise here.
 * Loop thread only.
 */
#ifndef SHARDD_BACKEND_HOST_ROOM_H
#define SHARDD_BACKEND_HOST_ROOM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/host_memory.h"
#include "core/list.h"

/* Files in memory that will have @bytes in all. */
struct host_promise {
	struct list link; /* host_room_promise */
	const int *fds;   /* borrowed; negative ones are none yet */
	unsigned n_fds;
	uint64_t bytes;
};

struct unmapper;

struct host_room {
	struct host_memory_place place;
	struct list all; /* of struct memfd, by live: the allocations there are */
	/* (optional) Borrowed: what it has still to free counts as free. */
	struct unmapper *unmapper;
	struct list promises; /* of struct host_promise */
	/* Bytes of files that are being closed. Any thread. */
	atomic_uint_least64_t leaving;
	struct host_memory now; /* the last reading */
	uint64_t left;          /* for new ones, bytes */
	uint64_t read_at_us;    /* 0: never */
};

void host_room_init(struct host_room *r, const struct host_memory_place *place);

/* @why: a sentence if there is no room, "" if there is.
 * Return: whether @bytes more can be had; then they count as promised. */
bool host_room_take(struct host_room *r, uint64_t bytes, char *why, size_t why_bytes);

/* Count what @p's files do not have yet, from here on until its link is taken out of the list: all of it
 * was taken before. @p: borrowed; its bytes may change. */
void host_room_promise(struct host_room *r, struct host_promise *p);
/* Bytes of the pages that @n files in memory have; negative descriptors are none. Any thread; does not
 * block. */
uint64_t host_room_resident(const int *fds, unsigned n);

#endif
