#include "backend/cgroup.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

/* The first version says "no limit" with the largest number of pages. */
#define NO_LIMIT (UINT64_C(1) << 62)

/* Bytes of one group, UINT64_MAX: no limit. */
typedef uint64_t (*group_fn)(const char *root, const char *group);

static FILE *cgroup_open_in(const char *root, const char *group, const char *name)
{
	char path[PATH_MAX];

	if ((size_t)snprintf(path, sizeof(path), "%s%s/%s", root, group, name) >= sizeof(path))
		return NULL;
	return fopen(path, "re");
}

/* A file of one number. Return: whether there was one ("max": no digits). */
static bool cgroup_read_number(const char *root, const char *group, const char *name, uint64_t *ret)
{
	_cleanup_(fclosep) FILE *f = cgroup_open_in(root, group, name);
	unsigned long long value;

	if (!f || fscanf(f, "%llu", &value) != 1)
		return false;
	*ret = value;
	return true;
}

/* A line "inactive_file 4096" of memory.stat. Return: whether there is one. */
static bool cgroup_read_stat(const char *root, const char *group, const char *name, uint64_t *ret)
{
	_cleanup_(fclosep) FILE *f = cgroup_open_in(root, group, "memory.stat");
	unsigned long long value;
	char key[64];

	while (f && fscanf(f, "%63s %llu", key, &value) == 2)
		if (strcmp(key, name) == 0) {
			*ret = value;
			return true;
		}
	return false;
}

static uint64_t cgroup_min(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* The value of a file of one number. Return: UINT64_MAX: there is none, or it says "max", or the
 * value of the first version for "max": the largest number of pages. */
static uint64_t cgroup_number(const char *root, const char *group, const char *name)
{
	uint64_t value;

	return cgroup_read_number(root, group, name, &value) && value < NO_LIMIT ? value
										 : UINT64_MAX;
}

/* Limits of groups above those that we can see are in hierarchical_memory_limit. */
static uint64_t cgroup_limit_v1(const char *root, const char *group)
{
	uint64_t all;

	if (!cgroup_read_stat(root, group, "hierarchical_memory_limit", &all) || all >= NO_LIMIT)
		all = UINT64_MAX;
	return cgroup_min(all, cgroup_number(root, group, "memory.limit_in_bytes"));
}

/* Above memory.high the kernel slows a group down until it has less. */
static uint64_t cgroup_limit_v2(const char *root, const char *group)
{
	return cgroup_min(cgroup_number(root, group, "memory.max"),
			  cgroup_number(root, group, "memory.high"));
}

/* @limit minus what is used; file pages count as free, since the kernel reclaims them first.
 * @prefix: of the keys that also count the groups below. */
static uint64_t cgroup_left_of(const char *root, const char *group, uint64_t limit,
			       const char *usage, const char *prefix)
{
	static const char *const lists[] = { "inactive_file", "active_file" };
	uint64_t used, pages;

	if (limit == UINT64_MAX || !cgroup_read_number(root, group, usage, &used))
		return UINT64_MAX;
	for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
		char key[64];

		snprintf(key, sizeof(key), "%s%s", prefix, lists[i]);
		if (cgroup_read_stat(root, group, key, &pages))
			used -= cgroup_min(pages, used);
	}
	return used < limit ? limit - used : 0;
}

static uint64_t cgroup_left_v1(const char *root, const char *group)
{
	return cgroup_left_of(root, group, cgroup_limit_v1(root, group), "memory.usage_in_bytes",
			      "total_");
}

static uint64_t cgroup_left_v2(const char *root, const char *group)
{
	return cgroup_left_of(root, group, cgroup_limit_v2(root, group), "memory.current", "");
}

/* The lowest value of the group and of those above it. */
static uint64_t cgroup_least_of(const char *root, const char *path, group_fn bytes_of)
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

/* One line of /proc/self/cgroup: "0::/path" is the group of the second version, and
 * "4:memory:/path" that of the memory controller of the first. Return: its group, or NULL. */
static const char *cgroup_of_line(char *line, bool *ret_v1)
{
	char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;

	line[strcspn(line, "\n")] = '\0';
	if (!path || path[1] != '/')
		return NULL;
	*path++ = '\0';
	*ret_v1 = *++names != '\0';
	if (!*ret_v1)
		return path;
	for (char *save, *name = strtok_r(names, ",", &save); name;
	     name = strtok_r(NULL, ",", &save))
		if (strcmp(name, "memory") == 0)
			return path;
	return NULL;
}

/* Both versions may be mounted; the memory controller is in one of them. */
static uint64_t cgroup_least(const struct cgroup_place *at, group_fn v1, group_fn v2)
{
	_cleanup_(fclosep) FILE *f = fopen(at->self, "re");
	char line[PATH_MAX], root[PATH_MAX];
	uint64_t bytes = UINT64_MAX;
	bool is_v1;

	while (f && fgets(line, sizeof(line), f)) {
		const char *path = cgroup_of_line(line, &is_v1);

		if (!path)
			continue;
		snprintf(root, sizeof(root), "%s%s", at->root, is_v1 ? "/memory" : "");
		bytes = cgroup_min(bytes, cgroup_least_of(root, path, is_v1 ? v1 : v2));
	}
	return bytes;
}

uint64_t cgroup_memory_limit(const struct cgroup_place *at)
{
	return cgroup_least(at, cgroup_limit_v1, cgroup_limit_v2);
}

uint64_t cgroup_memory_left(const struct cgroup_place *at)
{
	return cgroup_least(at, cgroup_left_v1, cgroup_left_v2);
}
