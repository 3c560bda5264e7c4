/* What the host backend needs to know about the machine, read once. */
#ifndef SHARDD_BACKEND_HOST_TOPOLOGY_H
#define SHARDD_BACKEND_HOST_TOPOLOGY_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

struct host_topology {
	unsigned cores;       /* this process may run on */
	unsigned n_nodes;     /* NUMA nodes, at least 1 */
	cpu_set_t *node_cpus; /* processors of each node; NULL when there is one node */
	uint64_t cache;       /* bytes of the last level, of one such cache; 0: not known */
	uint64_t memory;      /* bytes: the machine's, or the control group's limit if lower */
	bool huge_by_advice;  /* huge pages of shared memory are made where madvise asks for them */
	char detail[128];     /* for people */
};

#define HOST_TOPOLOGY_NULL ((struct host_topology){ 0 })

/* Takes tens of milliseconds. Any thread. Return: 0 or negative errno. */
int host_topology_init(struct host_topology *t);

/* Safe after HOST_TOPOLOGY_NULL and twice. */
void host_topology_deinit(struct host_topology *t);

#endif
