/*
 * Memory limits of the control groups of this process, of either version: a container's limit. The
 * lowest limit of its group and of all above it counts; in a container the groups above are not
 * visible, and the first visible one is the container's own.
 */
#ifndef SHARDD_BACKEND_CGROUP_H
#define SHARDD_BACKEND_CGROUP_H

#include <stdint.h>

/* Where to look; tests use their own places. */
struct cgroup_place {
	const char *self; /* file with the groups of this process */
	const char *root; /* where they are mounted; the memory controller of version 1 below it */
};

#define CGROUP_OWN ((struct cgroup_place){ "/proc/self/cgroup", "/sys/fs/cgroup" })

/* The lowest of memory.max and memory.high (version 2), memory.limit_in_bytes and
 * hierarchical_memory_limit (version 1). Any thread; reads files of the kernel.
 * Return: bytes, UINT64_MAX if none is set. */
uint64_t cgroup_memory_limit(const struct cgroup_place *at);

/* Bytes left until the first of those limits is reached. File pages count as free, since the kernel
 * takes them first. Any thread; reads files of the kernel.
 * Return: bytes, UINT64_MAX if no limit is set. */
uint64_t cgroup_memory_left(const struct cgroup_place *at);

#endif
