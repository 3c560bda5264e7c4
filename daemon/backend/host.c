/*
 * The host's memory as a device: memfds, and kernels on a set of threads.
 */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "backend/host_fill.h"
#include "backend/host_room.h"
#include "backend/host_topology.h"
#include "backend/host_unmap.h"
#include "backend/host_workers.h"
#include "backend/launch.h"
#include "backend/memfd.h"
#include "backend/redo.h"
#include "core/check.h"
#include "core/cleanup.h"

struct host {
	struct backend backend; /* first */
	struct unmapper unmapper;
	struct filler filler; /* without prefault: not started */
	struct host_room room;
	struct workers *workers;
	uint64_t used;  /* bytes of all allocations */
	uint64_t cache; /* of the last level, bytes; 0: not known */
};

static struct host *host_to_host(struct backend *b)
{
	return CONTAINER_OF(b, struct host, backend);
}

static struct memfd *host_to_memfd(struct backend_mem *mem)
{
	return CONTAINER_OF(mem, struct memfd, mem);
}

static int host_alloc(struct backend *b, uint64_t bytes, enum backend_share share,
		      struct backend_mem **ret)
{
	struct host *h = host_to_host(b);
	struct memfd *m;
	int r;

	(void)share; /* a descriptor is all there is */
	/* A memfd of any size can be created; we promise that its pages exist. */
	if (h->used > b->info.capacity_bytes || bytes > b->info.capacity_bytes - h->used)
		return BACKEND_E_FULL;
	if (!host_room_take(&h->room, bytes, b->info.short_of, sizeof(b->info.short_of)))
		return BACKEND_E_FULL;
	r = memfd_new(bytes, &m);
	if (r)
		return r;
	h->used += bytes;
	list_append(&h->room.all, &m->live);
	filler_add(&h->filler, m);
	*ret = &m->mem;
	return 0;
}

static int host_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret)
{
	struct host *h = host_to_host(b);
	struct memfd *m;
	int r;

	if (bytes % b->info.granularity != 0)
		return -EINVAL;
	r = memfd_import(fd, bytes, &m);
	if (r)
		return r;
	h->used += bytes; /* it exists already: never refused for lack of space */
	list_append(&h->room.all, &m->live);
	*ret = &m->mem;
	return 0;
}

static void host_free(struct backend *b, struct backend_mem *mem)
{
	struct host *h = host_to_host(b);

	CHECK(h->used >= mem->bytes);
	h->used -= mem->bytes;
	list_unlink(&host_to_memfd(mem)->live);
	unmapper_free(&h->unmapper, host_to_memfd(mem));
}

static int host_export(struct backend *b, struct backend_mem *mem, bool writable, int *ret_fd)
{
	(void)b;
	return memfd_export(host_to_memfd(mem), writable, ret_fd);
}

static int host_store(struct backend *b, struct backend_mem *mem, int *ret_fd)
{
	(void)b;
	return memfd_store(host_to_memfd(mem), ret_fd);
}

static bool host_is_held(struct backend *b, struct backend_mem *mem)
{
	(void)b;
	return memfd_is_held(host_to_memfd(mem));
}

static void host_empty(struct backend *b, struct backend_mem *mem)
{
	struct memfd *m = host_to_memfd(mem);

	if (!m->sealed && !mem->lasts && memfd_resident(m))
		unmapper_empty(&host_to_host(b)->unmapper, m);
}

static int host_seal(struct backend *b, struct backend_mem *mem)
{
	(void)b;
	return memfd_seal(host_to_memfd(mem));
}

static struct host_room *host_room(struct backend *b)
{
	return &host_to_host(b)->room;
}

/* Data that does not fit the caches anyway bypasses them when written: then a line is not fetched
 * before it is overwritten (docs/performance.md). */
static void host_choose_stores(const struct host *h, struct backend_task *task)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < task->n_launches; i++)
		bytes += launch_bytes(&task->launches[i]);
	for (unsigned i = 0; i < task->n_launches; i++) {
		struct launch *launch = &task->launches[i];

		if (launch->kind == LAUNCH_REDUCE)
			launch->reduce.stream = h->cache && bytes > h->cache;
		if (launch->kind == LAUNCH_CAST)
			launch->cast.stream = h->cache && bytes > h->cache;
	}
}

static void host_submit(struct backend *b, struct backend_task *task)
{
	host_choose_stores(host_to_host(b), task);
	workers_submit(host_to_host(b)->workers, task);
}

static void host_run(struct backend *b, struct launch *launch, struct backend_owner owner)
{
	workers_run(host_to_host(b)->workers, launch, owner);
}

static void host_on_task_done(void *userdata, struct backend_task *task)
{
	backend_complete(userdata, task, 0);
}

static void host_close(struct backend *b)
{
	struct host *h = host_to_host(b);

	CHECK(h->used == 0);
	workers_free(h->workers);
	unmapper_deinit(&h->unmapper);
	filler_deinit(&h->filler);
	free(h);
}

static const struct backend_ops host_ops = {
	.alloc = host_alloc,
	.free = host_free,
	.export = host_export,
	.import = host_import,
	.store = host_store,
	.is_held = host_is_held,
	.empty = host_empty,
	.seal = host_seal,
	.room = host_room,
	.submit = host_submit,
	.run = host_run,
	.close = host_close,
};

static void host_fill_info(struct backend_info *info, const struct host_topology *t,
			   unsigned threads, uint64_t capacity)
{
	snprintf(info->id, sizeof(info->id), "host:0");
	info->name = "host";
	info->ordinal = -1;
	info->capacity_bytes = capacity ? capacity : t->memory;
	info->granularity = (uint64_t)sysconf(_SC_PAGESIZE);
	info->threads = threads ? threads : t->cores;
	if (info->threads > REDO_SLOTS - 1) /* one is the loop's (app/survive.c) */
		info->threads = REDO_SLOTS - 1;
	info->redoes = true;
	snprintf(info->kernels, sizeof(info->kernels), "%s", kernels_host()->name);
	snprintf(info->detail, sizeof(info->detail), "%s%s", t->detail,
		 memfd_knows_holders() ? "" : ", cannot tell which processes hold memory");
}

static int host_start(struct host *h, const struct host_topology *t, bool prefault)
{
	const struct workers_options o = {
		.loopq = h->backend.loopq,
		.kernels = kernels_host(),
		.threads = h->backend.info.threads,
		.node_cpus = t->node_cpus,
		.n_nodes = t->n_nodes,
		.done = host_on_task_done,
		.userdata = &h->backend,
	};
	int r = unmapper_init(&h->unmapper, &h->filler);

	if (r)
		return r;
	r = workers_new(&o, &h->workers);
	/* where huge pages are made on advice, they come with the first touch of a mapping */
	if (r == 0 && prefault && !t->huge_by_advice)
		r = filler_init(&h->filler);
	if (r == 0)
		return 0;
	if (h->workers)
		workers_free(h->workers);
	unmapper_deinit(&h->unmapper);
	return r;
}

int backend_host_new(struct loopq *loopq, unsigned threads, uint64_t capacity, bool prefault,
		     struct backend **ret)
{
	_cleanup_(host_topology_deinit) struct host_topology t = HOST_TOPOLOGY_NULL;
	_cleanup_(freep) struct host *h = calloc(1, sizeof(*h));
	int r;

	if (!h)
		return -ENOMEM;
	r = host_topology_init(&t);
	if (r)
		return r;
	backend_init(&h->backend, &host_ops, loopq);
	host_fill_info(&h->backend.info, &t, threads, capacity);
	h->cache = t.cache;
	host_room_init(&h->room, &HOST_MEMORY_OWN);
	h->room.unmapper = &h->unmapper;
	r = host_start(h, &t, prefault);
	if (r)
		return r;
	*ret = &h->backend;
	h = NULL;
	return 0;
}
