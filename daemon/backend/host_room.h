/*
 * Is there room for another allocation? A memfd of any size can be made. The kernel takes its
 * pages when they are touched, and kills a process when there are too few. So an allocation must
 * fit the configured limit, and what the machine and the control groups have left now, minus the
 * pages that earlier allocations may still touch. The figures are read at most ten times a second.
 * Loop thread only.
 */
#ifndef SHARDD_BACKEND_HOST_ROOM_H
#define SHARDD_BACKEND_HOST_ROOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/host_memory.h"
#include "core/list.h"

struct host_room {
	struct host_memory_place place;
	struct list all;        /* of struct memfd, by live: the allocations there are */
	struct host_memory now; /* the last reading */
	uint64_t left;          /* for new ones, bytes */
	uint64_t read_at_us;    /* 0: never */
};

void host_room_init(struct host_room *r, const struct host_memory_place *place);

/* @pending: bytes that are being given back. @why: a sentence if there is no room, "" if there is.
 * Return: whether @bytes more can be had; then they count as promised. */
bool host_room_take(struct host_room *r, uint64_t bytes, uint64_t pending, char *why,
		    size_t why_bytes);

#endif
