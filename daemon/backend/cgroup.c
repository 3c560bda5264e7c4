#include "backend/cgroup.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/cleanup.h"

/* Bytes of one group, UINT64_MAX: no limit. */
typedef uint64_t (*group_fn)(const char *root, const char *group);

static FILE *open_in(const char *root, const char *group, const char *name)
{
	char path[PATH_MAX];

	if ((size_t)snprintf(path, sizeof(path), "%s%s/%s", root, group, name) >= sizeof(path))
		return NULL;
	return fopen(path, "re");
}

/* A file of one number. Return: whether there was one ("max": no digits). */
static bool read_number(const char *root, const char *group, const char *name, uint64_t *ret)
{
	_cleanup_(fclosep) FILE *f = open_in(root, group, name);
	unsigned long long value;

	if (!f || fscanf(f, "%llu", &value) != 1)
		return false;
	*ret = value;
	return true;
}

/* A line "inactive_file 4096" of memory.stat. Return: 0 if there is none. */
static uint64_t unused_pages(const char *root, const char *group)
{
	_cleanup_(fclosep) FILE *f = open_in(root, group, "memory.stat");
	unsigned long long value;
	char key[64];

	while (f && fscanf(f, "%63s %llu", key, &value) == 2)
		if (strcmp(key, "inactive_file") == 0)
			return value;
	return 0;
}

static uint64_t group_limit(const char *root, const char *group)
{
	uint64_t limit;

	return read_number(root, group, "memory.max", &limit) ? limit : UINT64_MAX;
}

static uint64_t group_left(const char *root, const char *group)
{
	uint64_t limit = group_limit(root, group), used, unused;

	if (limit == UINT64_MAX || !read_number(root, group, "memory.current", &used))
		return UINT64_MAX;
	unused = unused_pages(root, group);
	used -= unused < used ? unused : used;
	return used < limit ? limit - used : 0;
}

/* The least of the group and of those above it. */
static uint64_t least(const char *root, const char *path, group_fn bytes_of)
{
	char group[PATH_MAX];
	uint64_t bytes = UINT64_MAX;
	char *slash;

	snprintf(group, sizeof(group), "%s", strcmp(path, "/") == 0 ? "" : path);
	while (true) {
		uint64_t here = bytes_of(root, group);

		if (here < bytes)
			bytes = here;
		slash = strrchr(group, '/');
		if (!slash)
			return bytes;
		*slash = '\0';
	}
}

uint64_t cgroup_memory_limit(const char *root, const char *path)
{
	return least(root, path, group_limit);
}

uint64_t cgroup_memory_left(const char *root, const char *path)
{
	return least(root, path, group_left);
}

/* The line "0::/path" of /proc/self/cgroup is the one of cgroup v2. */
static uint64_t own(group_fn bytes_of)
{
	_cleanup_(fclosep) FILE *f = fopen("/proc/self/cgroup", "re");
	char line[PATH_MAX];

	while (f && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = '\0';
		if (strncmp(line, "0::/", 4) == 0)
			return least(CGROUP_ROOT, line + 3, bytes_of);
	}
	return UINT64_MAX;
}

uint64_t cgroup_own_limit(void)
{
	return own(group_limit);
}

uint64_t cgroup_own_left(void)
{
	return own(group_left);
}
