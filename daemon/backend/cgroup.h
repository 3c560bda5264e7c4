/* Memory that the control group of this process (cgroup v2), and those above it, may have: a
 * container's limit. */
#ifndef SHARDD_BACKEND_CGROUP_H
#define SHARDD_BACKEND_CGROUP_H

#include <stdint.h>

#define CGROUP_ROOT "/sys/fs/cgroup"

/* Lowest memory.max of the group @path ("/a/b") and those above it, below @root. Any thread; reads
 * files. Return: bytes, UINT64_MAX if none is set. */
uint64_t cgroup_memory_limit(const char *root, const char *path);

/* What is left until the first of those limits is reached: memory.max less memory.current, file
 * pages that nobody has used lately (inactive_file of memory.stat) taken for free, since the
 * kernel takes them first. Any thread; reads files. Return: bytes, UINT64_MAX if no limit is set. */
uint64_t cgroup_memory_left(const char *root, const char *path);

/* The two of this process. */
uint64_t cgroup_own_limit(void);
uint64_t cgroup_own_left(void);

#endif
