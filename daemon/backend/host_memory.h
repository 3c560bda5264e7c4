/*
 * The memory that this process can have: that of the machine or of its control groups, whichever is
 * less. Plain figures, read from files of the kernel at every call. Any thread.
 */
#ifndef SHARDD_BACKEND_HOST_MEMORY_H
#define SHARDD_BACKEND_HOST_MEMORY_H

#include <stdint.h>

#include "backend/cgroup.h"

/* Where the figures come from; tests have files of their own. */
struct host_memory_place {
	const char *meminfo;
	struct cgroup_place groups;
};

#define HOST_MEMORY_OWN ((struct host_memory_place){ "/proc/meminfo", CGROUP_OWN })

struct host_memory {
	uint64_t machine;   /* bytes it has */
	uint64_t available; /* bytes of it that new work can have without swapping */
	uint64_t limit;     /* of the control groups; UINT64_MAX: none */
	uint64_t left;      /* until that limit is reached; UINT64_MAX: there is none */
};

/* Read the figures. Return: 0, or -EIO if the kernel does not tell them. */
int host_memory_read(const struct host_memory_place *at, struct host_memory *ret);

/* The lower of machine and limit, and of available and left. */
uint64_t host_memory_total(const struct host_memory *m);
uint64_t host_memory_left(const struct host_memory *m);

/* The default limit for jobs: the total, minus a fifth for trainers, the page cache and the daemon
 * itself. */
uint64_t host_memory_share(const struct host_memory *m);

/* The amount that new slabs never use, whatever is configured: the daemon's own heap and the
 * kernel's structures for it are in the same control group. */
uint64_t host_memory_reserve(const struct host_memory *m);

#endif
