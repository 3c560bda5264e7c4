/*
 * P9: how long does a trainer take to map all memory of a job with 1,000 units?
 *
 * As many slabs as units is the worst a daemon can do; few large ones is what pools
 * make of them. Two ways to map: each slab by itself, and all of them one behind the
 * other in one range of addresses with one call for access.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "stage.h"

#define UNITS 1000u

static void many_descriptors(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

/* value: slabs, bytes of each. Makes them and hands them over one by one. */
static void maker(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	uint64_t n = a->order->value[0];
	struct vmm v;

	actor_cuda(a);
	for (uint64_t i = 0; i < n; i++) {
		vmm_create(a, a->order->value[1], &v);
		m.fd = vmm_export(a, &v);
		m.value[0] = v.bytes;
		actor_tell(a, &m);
		close(m.fd);
	}
	actor_hear(a, &m);
}

struct mapping {
	unsigned n;
	int fd[UNITS];
	size_t bytes;
	struct vmm slab[UNITS];
};

static uint64_t map_each(struct actor *a, struct mapping *p)
{
	uint64_t begin = now_ns();

	for (unsigned i = 0; i < p->n; i++) {
		actor_must(a, vmm_import(a, p->fd[i], p->bytes, true, &p->slab[i]), "importing");
		close(p->fd[i]);
	}
	return now_ns() - begin;
}

static uint64_t map_together(struct actor *a, struct mapping *p)
{
	CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = a->device },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	uint64_t begin = now_ns();
	CUmemGenericAllocationHandle handle;
	CUdeviceptr base;

	actor_must(a, a->cuda->cuMemAddressReserve(&base, p->n * p->bytes, 0, 0, 0),
		   "cuMemAddressReserve");
	for (unsigned i = 0; i < p->n; i++) {
		actor_must(a,
			   a->cuda->cuMemImportFromShareableHandle(
				   &handle, (void *)(uintptr_t)p->fd[i],
				   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
			   "importing");
		actor_must(a, a->cuda->cuMemMap(base + i * p->bytes, p->bytes, 0, handle, 0),
			   "cuMemMap");
		close(p->fd[i]);
	}
	actor_must(a, a->cuda->cuMemSetAccess(base, p->n * p->bytes, &access, 1), "cuMemSetAccess");
	return now_ns() - begin;
}

/* value: slabs, bytes of each, all at once; the descriptors come one by one. */
static void mapper(struct actor *a)
{
	static struct mapping p;
	struct message m;

	many_descriptors();
	p.n = (unsigned)a->order->value[0];
	p.bytes = a->order->value[1];
	actor_cuda(a);
	for (unsigned i = 0; i < p.n; i++) {
		actor_hear(a, &m);
		p.fd[i] = m.fd;
	}
	actor_done(a, a->order->value[2] ? map_together(a, &p) : map_each(a, &p), 0);
	actor_hear(a, &m);
}

/* Return: milliseconds. */
static double attach(struct stage *s, unsigned n, uint64_t bytes, bool together)
{
	struct message order = MESSAGE_NULL, m;
	struct role make, map;
	char name[56];

	stage_step(s, "%u slabs of %llu MiB, %s", n, (unsigned long long)(bytes / MIB),
		   together ? "together" : "one by one");
	order.value[0] = n;
	order.value[1] = bytes;
	order.value[2] = together;
	make = role_start(s, "the maker", maker, &order);
	map = role_start(s, "the mapper", mapper, &order);
	for (unsigned i = 0; i < n; i++) {
		role_must(s, &make, 30000, &m);
		role_tell(s, &map, &m);
		close(m.fd);
	}
	role_must(s, &map, 60000, &m);
	snprintf(name, sizeof(name), "%u_slabs_of_%llu_MiB_%s", n,
		 (unsigned long long)(bytes / MIB), together ? "together" : "each");
	stage_number(s, name, "ms", (double)m.value[0] / 1e6);
	role_kill(s, &map);
	role_kill(s, &make);
	return (double)m.value[0] / 1e6;
}

void probe_attach(struct stage *s)
{
	unsigned n = s->small ? 50 : UNITS, few = s->small ? 4 : 16;
	uint64_t large = s->small ? 16 * MIB : 256 * MIB;
	double each, together, pooled;

	many_descriptors();
	each = attach(s, n, 2 * MIB, false);
	together = attach(s, n, 2 * MIB, true);
	pooled = attach(s, few, large, false);
	stage_answer(s,
		     "%u slabs take %.1f ms one by one and %.1f ms in one range; %u large ones "
		     "take %.1f ms.",
		     n, each, together, few, pooled);
}
