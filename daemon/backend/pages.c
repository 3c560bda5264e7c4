/*
 * Pages of the host on a node whose devices are GPUs: memfds, without threads and without kernels. For what a
 * process and the daemon share beside the device's memory.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "backend/memfd.h"
#include "core/check.h"

/* Room for all readers of all publications of a few jobs. */
#define PAGES_CAPACITY (UINT64_C(256) << 20)

struct pages {
	struct backend backend; /* first */
	uint64_t used;          /* bytes of all allocations */
};

static struct pages *pages_of(struct backend *b)
{
	return CONTAINER_OF(b, struct pages, backend);
}

static struct memfd *pages_memfd(struct backend_mem *mem)
{
	return CONTAINER_OF(mem, struct memfd, mem);
}

static int pages_alloc(struct backend *b, uint64_t bytes, enum backend_share share,
		       struct backend_mem **ret)
{
	struct pages *p = pages_of(b);
	struct memfd *m;
	int r;

	(void)share;
	if (bytes > b->info.capacity_bytes - p->used)
		return BACKEND_E_FULL;
	r = memfd_new(bytes, &m);
	if (r)
		return r;
	p->used += bytes;
	*ret = &m->mem;
	return 0;
}

/* A few pages, so it takes no time. */
static void pages_free(struct backend *b, struct backend_mem *mem)
{
	struct pages *p = pages_of(b);

	CHECK(p->used >= mem->bytes);
	p->used -= mem->bytes;
	memfd_free(pages_memfd(mem));
}

static int pages_export(struct backend *b, struct backend_mem *mem, bool writable, int *ret_fd)
{
	(void)b;
	return memfd_export(pages_memfd(mem), writable, ret_fd);
}

/* They end with the daemon. */
static int pages_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret)
{
	(void)b;
	(void)fd;
	(void)bytes;
	(void)ret;
	return -EOPNOTSUPP;
}

static int pages_store(struct backend *b, struct backend_mem *mem, int *ret_fd)
{
	(void)b;
	(void)mem;
	(void)ret_fd;
	return -EOPNOTSUPP;
}

static bool pages_is_held(struct backend *b, struct backend_mem *mem)
{
	(void)b;
	return memfd_is_held(pages_memfd(mem));
}

static void pages_empty(struct backend *b, struct backend_mem *mem)
{
	struct memfd *m = pages_memfd(mem);

	(void)b;
	if (!m->sealed && memfd_resident(m))
		(void)memfd_empty(m);
}

static int pages_seal(struct backend *b, struct backend_mem *mem)
{
	(void)b;
	return memfd_seal(pages_memfd(mem));
}

static void pages_submit(struct backend *b, struct backend_task *task)
{
	(void)b;
	CHECK(!task); /* nobody has anything to compute here */
}

static void pages_close(struct backend *b)
{
	struct pages *p = pages_of(b);

	CHECK(p->used == 0);
	free(p);
}

static const struct backend_ops pages_ops = {
	.alloc = pages_alloc,
	.free = pages_free,
	.export = pages_export,
	.import = pages_import,
	.store = pages_store,
	.is_held = pages_is_held,
	.empty = pages_empty,
	.seal = pages_seal,
	.submit = pages_submit,
	.close = pages_close,
};

int backend_pages_new(struct loopq *loopq, struct backend **ret)
{
	struct pages *p = calloc(1, sizeof(*p));

	if (!p)
		return -ENOMEM;
	backend_init(&p->backend, &pages_ops, loopq);
	snprintf(p->backend.info.id, sizeof(p->backend.info.id), "pages");
	p->backend.info.name = "host";
	p->backend.info.ordinal = -1;
	p->backend.info.capacity_bytes = PAGES_CAPACITY;
	p->backend.info.granularity = (uint64_t)sysconf(_SC_PAGESIZE);
	*ret = &p->backend;
	return 0;
}
