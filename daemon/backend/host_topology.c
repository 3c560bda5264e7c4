#include "backend/host_topology.h"

#include <errno.h>
#include <hwloc.h>
#include <hwloc/glibc-sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/host_memory.h"
#include "core/cleanup.h"

#define SHMEM_HUGE "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

/* First line of a small file, without its end. Return: whether there was one. */
static bool host_topology_read_line(const char *path, char *buf, size_t bytes)
{
	_cleanup_(fclosep) FILE *f = fopen(path, "re");

	if (!f || !fgets(buf, (int)bytes, f))
		return false;
	buf[strcspn(buf, "\n")] = '\0';
	return true;
}

static uint64_t host_topology_memory_bytes(void)
{
	struct host_memory m;

	if (host_memory_read(&HOST_MEMORY_OWN, &m) == 0)
		return host_memory_total(&m);
	return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* The word in brackets of "always within_size [advise] never deny force". */
static void host_topology_huge_page_mode(char *buf, size_t bytes)
{
	char line[128], *open, *close;

	snprintf(buf, bytes, "unknown");
	if (!host_topology_read_line(SHMEM_HUGE, line, sizeof(line)))
		return;
	open = strchr(line, '[');
	close = open ? strchr(open, ']') : NULL;
	if (close)
		snprintf(buf, bytes, "%.*s", (int)(close - open - 1), open + 1);
}

static unsigned host_topology_count(hwloc_topology_t hw, hwloc_obj_type_t type)
{
	int n = hwloc_get_nbobjs_by_type(hw, type);

	return n > 0 ? (unsigned)n : 0;
}

static int host_topology_keep_node_cpus(struct host_topology *t, hwloc_topology_t hw)
{
	t->node_cpus = calloc(t->n_nodes, sizeof(*t->node_cpus));
	if (!t->node_cpus)
		return -ENOMEM;
	for (unsigned i = 0; i < t->n_nodes; i++) {
		hwloc_obj_t node = hwloc_get_obj_by_type(hw, HWLOC_OBJ_NUMANODE, i);

		hwloc_cpuset_to_glibc_sched_affinity(hw, node->cpuset, &t->node_cpus[i],
						     sizeof(t->node_cpus[i]));
	}
	return 0;
}

static uint64_t host_topology_last_level_cache(hwloc_topology_t hw)
{
	hwloc_obj_t cache = hwloc_get_obj_by_type(hw, HWLOC_OBJ_L3CACHE, 0);

	if (!cache)
		cache = hwloc_get_obj_by_type(hw, HWLOC_OBJ_L2CACHE, 0);
	return cache ? cache->attr->cache.size : 0;
}

static int host_topology_read_topology(struct host_topology *t, hwloc_topology_t hw)
{
	unsigned sockets = host_topology_count(hw, HWLOC_OBJ_PACKAGE);
	unsigned nodes = host_topology_count(hw, HWLOC_OBJ_NUMANODE);
	char huge[32];

	t->cores = host_topology_count(hw, HWLOC_OBJ_CORE);
	if (t->cores == 0)
		t->cores = host_topology_count(hw, HWLOC_OBJ_PU);
	if (t->cores == 0)
		t->cores = 1;
	t->n_nodes = nodes ? nodes : 1;
	t->cache = host_topology_last_level_cache(hw);
	host_topology_huge_page_mode(huge, sizeof(huge));
	t->huge_by_advice = strcmp(huge, "advise") == 0;
	snprintf(t->detail, sizeof(t->detail),
		 "sockets %u, cores %u, NUMA nodes %u, huge pages for shared memory: %s",
		 sockets ? sockets : 1, t->cores, t->n_nodes, huge);
	return t->n_nodes > 1 ? host_topology_keep_node_cpus(t, hw) : 0;
}

int host_topology_init(struct host_topology *t)
{
	hwloc_topology_t hw;
	int r = -EIO;

	*t = HOST_TOPOLOGY_NULL;
	if (hwloc_topology_init(&hw) < 0)
		return -ENOMEM;
	if (hwloc_topology_load(hw) == 0)
		r = host_topology_read_topology(t, hw);
	hwloc_topology_destroy(hw);
	if (r)
		return r;
	t->memory = host_topology_memory_bytes();
	return 0;
}

void host_topology_deinit(struct host_topology *t)
{
	free(t->node_cpus);
	*t = HOST_TOPOLOGY_NULL;
}
