#include "backend/host_memory.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/cleanup.h"

#define MIN_RESERVE  (UINT64_C(16) << 20)
#define RESERVE_PART 32

/* A line "MemAvailable:  123 kB". */
static bool host_memory_line(FILE *file, const char *name, uint64_t *ret)
{
	char line[128], key[32];
	unsigned long long kib;

	rewind(file);
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, "%31[^:]: %llu", key, &kib) == 2 && strcmp(key, name) == 0) {
			*ret = (uint64_t)kib << 10;
			return true;
		}
	return false;
}

int host_memory_read(const struct host_memory_place *at, struct host_memory *ret)
{
	_cleanup_(fclosep) FILE *file = fopen(at->meminfo, "re");
	struct host_memory m;

	if (!file || !host_memory_line(file, "MemTotal", &m.machine) ||
	    !host_memory_line(file, "MemAvailable", &m.available))
		return -EIO;
	m.limit = cgroup_memory_limit(&at->groups);
	m.left = cgroup_memory_left(&at->groups);
	*ret = m;
	return 0;
}

uint64_t host_memory_total(const struct host_memory *m)
{
	return m->limit < m->machine ? m->limit : m->machine;
}

uint64_t host_memory_left(const struct host_memory *m)
{
	return m->left < m->available ? m->left : m->available;
}

uint64_t host_memory_share(const struct host_memory *m)
{
	return host_memory_total(m) / 5 * 4;
}

uint64_t host_memory_reserve(const struct host_memory *m)
{
	uint64_t part = host_memory_total(m) / RESERVE_PART;

	return part > MIN_RESERVE ? part : MIN_RESERVE;
}
