/*
 * Allocations: cuMemCreate memory that is handed over by descriptor, or cuMemAlloc memory
 * for legacy CUDA IPC. The handle with which another process opens them is created at once, because
 * it is handed out on the loop thread.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"

CUmemAllocationProp cuda_mem_properties(const struct cuda *c)
{
	CUmemAllocationProp p = { .type = CU_MEM_ALLOCATION_TYPE_PINNED };

	p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	p.location.id = c->device;
	p.allocFlags.gpuDirectRDMACapable = c->reach.rdma;
	return p;
}

/* Once, for all devices that will ever access it: changing it later may wait for the device. */
static CUresult cuda_mem_set_access(const struct cuda *c, CUdeviceptr at, uint64_t bytes)
{
	CUmemAccessDesc desc[CUDA_MAX_DEVICES];

	for (unsigned i = 0; i < c->reach.n_peers; i++) {
		desc[i] = (CUmemAccessDesc){ .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
		desc[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		desc[i].location.id = c->reach.peers[i];
	}
	return c->lib->cuMemSetAccess(at, bytes, desc, c->reach.n_peers);
}

/* Map @handle; the mapping keeps it alive from then on. */
static CUresult cuda_mem_map(const struct cuda *c, CUmemGenericAllocationHandle handle,
			     uint64_t bytes, CUdeviceptr *ret)
{
	CUdeviceptr at = 0;
	CUresult r;

	r = c->lib->cuMemAddressReserve(&at, bytes, c->backend.info.granularity, 0, 0);
	if (r != CUDA_SUCCESS)
		return r;
	r = c->lib->cuMemMap(at, bytes, 0, handle, 0);
	if (r != CUDA_SUCCESS)
		goto fail_map;
	r = cuda_mem_set_access(c, at, bytes);
	if (r != CUDA_SUCCESS)
		goto fail_access;
	*ret = at;
	return CUDA_SUCCESS;

fail_access:
	c->lib->cuMemUnmap(at, bytes);
fail_map:
	c->lib->cuMemAddressFree(at, bytes);
	return r;
}

/* Fresh memory holds its previous contents, which no process may see. */
static CUresult cuda_mem_clear(struct cuda *c, CUdeviceptr at, uint64_t bytes)
{
	CUresult r = c->lib->cuMemsetD8Async(at, 0, bytes, c->control);

	return cuda_drain(c, c->control) ? CUDA_ERROR_LAUNCH_FAILED : r;
}

static void cuda_mem_set_memory(struct cuda_mem *m, CUdeviceptr at, uint64_t bytes)
{
	m->mem.addr = (void *)(uintptr_t)at;
	m->mem.bytes = bytes;
}

static CUresult cuda_mem_make_vmm(struct cuda *c, struct cuda_mem *m, uint64_t bytes)
{
	CUmemAllocationProp p = cuda_mem_properties(c);
	CUmemGenericAllocationHandle handle;
	CUdeviceptr at = 0;
	CUresult r = c->lib->cuMemCreate(&handle, bytes, &p, 0);

	if (r != CUDA_SUCCESS)
		return r;
	r = cuda_mem_map(c, handle, bytes, &at);
	if (r == CUDA_SUCCESS) {
		cuda_mem_set_memory(m, at, bytes);
		r = cuda_mem_clear(c, at, bytes);
	}
	if (r == CUDA_SUCCESS)
		r = c->lib->cuMemExportToShareableHandle(
			&m->fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	c->lib->cuMemRelease(handle);
	if (r == CUDA_SUCCESS)
		fcntl(m->fd, F_SETFD, FD_CLOEXEC);
	return r;
}

static CUresult cuda_mem_make_legacy(struct cuda *c, struct cuda_mem *m, uint64_t bytes)
{
	CUdeviceptr at = 0;
	CUresult r = c->lib->cuMemAlloc(&at, bytes);

	if (r != CUDA_SUCCESS)
		return r;
	cuda_mem_set_memory(m, at, bytes);
	r = cuda_mem_clear(c, at, bytes);
	return r == CUDA_SUCCESS ? c->lib->cuIpcGetMemHandle(&m->ipc, at) : r;
}

static struct cuda_mem *cuda_mem_new(enum backend_share share)
{
	struct cuda_mem *m = calloc(1, sizeof(*m));

	if (!m)
		return NULL;
	m->mem.share = share;
	m->fd = -1;
	list_init(&m->link);
	return m;
}

int cuda_mem_make(struct cuda *c, uint64_t bytes, enum backend_share share, struct cuda_mem **ret)
{
	struct cuda_mem *m = cuda_mem_new(share);
	int r;

	if (!m)
		return -ENOMEM;
	r = cuda_result(c,
			share == BACKEND_SHARE_FD ? cuda_mem_make_vmm(c, m, bytes)
						  : cuda_mem_make_legacy(c, m, bytes),
			"an allocation");
	if (r) {
		cuda_mem_unmake(c, m);
		return r == -ENOMEM ? BACKEND_E_FULL : r == -EINVAL ? -EIO : r;
	}
	*ret = m;
	return 0;
}

int cuda_mem_import(struct cuda *c, int fd, uint64_t bytes, struct cuda_mem **ret)
{
	struct cuda_mem *m = cuda_mem_new(BACKEND_SHARE_FD);
	CUmemGenericAllocationHandle handle;
	CUdeviceptr at = 0;
	CUresult r;

	if (!m)
		return -ENOMEM;
	r = c->lib->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
						   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	if (r == CUDA_SUCCESS) {
		r = cuda_mem_map(c, handle, bytes, &at);
		c->lib->cuMemRelease(handle);
	}
	if (r != CUDA_SUCCESS) {
		free(m);
		return cuda_result(c, r, "an import") == -ENOMEM ? -ENOMEM
		       : atomic_load(&c->lost)                   ? -EIO
								 : -EINVAL;
	}
	cuda_mem_set_memory(m, at, bytes);
	m->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (m->fd < 0) {
		int err = -errno;

		cuda_mem_unmake(c, m);
		return err;
	}
	*ret = m;
	return 0;
}

/* A lost device may refuse; its memory goes with the context then. */
struct cuda_mem *cuda_mem_unmake(struct cuda *c, struct cuda_mem *m)
{
	if (!m)
		return NULL;
	CHECK(list_empty(&m->link));
	if (m->mem.addr && m->mem.share == BACKEND_SHARE_FD) {
		if (cuda_result(c, c->lib->cuMemUnmap(cuda_ptr(m->mem.addr), m->mem.bytes),
				"cuMemUnmap") == 0)
			cuda_result(c,
				    c->lib->cuMemAddressFree(cuda_ptr(m->mem.addr), m->mem.bytes),
				    "cuMemAddressFree");
	} else if (m->mem.addr) {
		cuda_result(c, c->lib->cuMemFree(cuda_ptr(m->mem.addr)), "cuMemFree");
	}
	fd_close(m->fd);
	free(m);
	return NULL;
}

#endif
