#include "map_cuda.h"

#include "client_error.h"
#include "cuda_context.h"

#ifdef SHARDD_CUDA

#include <string.h>

#include "core/cleanup.h"
#include "stream.h"

/* ------------------------------------------------------------------ mapping */

/* Map @handle at @at and let the context's device use it. */
static CUresult map_cuda_at(const struct cuda *c, CUmemGenericAllocationHandle handle,
			    CUdeviceptr at, const struct map_source *s)
{
	CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)c->device },
		.flags = s->writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
				     : CU_MEM_ACCESS_FLAGS_PROT_READ,
	};
	CUresult r = c->lib->cuMemMap(at, s->bytes, 0, handle, 0);

	if (r != CUDA_SUCCESS)
		return r;
	r = c->lib->cuMemSetAccess(at, s->bytes, &access, 1);
	if (r != CUDA_SUCCESS)
		c->lib->cuMemUnmap(at, s->bytes);
	return r;
}

/* A reservation of exactly the slab's size: address space of a device is not endless. */
static CUresult map_cuda_reserve_and_map(const struct cuda *c, CUmemGenericAllocationHandle handle,
					 const struct map_source *s, CUdeviceptr *ret)
{
	CUdeviceptr at = 0;
	CUresult r = c->lib->cuMemAddressReserve(&at, s->bytes, 0, 0, 0);

	if (r != CUDA_SUCCESS)
		return r;
	r = map_cuda_at(c, handle, at, s);
	if (r != CUDA_SUCCESS)
		c->lib->cuMemAddressFree(at, s->bytes);
	else
		*ret = at;
	return r;
}

static CUresult map_cuda_import_fd(const struct cuda *c, const struct map_source *s,
				   CUdeviceptr *ret)
{
	CUmemGenericAllocationHandle handle;
	CUresult r = c->lib->cuMemImportFromShareableHandle(
		&handle, (void *)(uintptr_t)s->fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

	if (r != CUDA_SUCCESS)
		return r;
	r = map_cuda_reserve_and_map(c, handle, s, ret);
	c->lib->cuMemRelease(handle); /* the mapping keeps the memory */
	return r;
}

static CUresult map_cuda_open_handle(const struct cuda *c, const struct map_source *s,
				     CUdeviceptr *ret)
{
	CUipcMemHandle handle;

	memcpy(&handle, s->ipc, sizeof(handle));
	return c->lib->cuIpcOpenMemHandle(ret, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static int map_cuda_entered(const struct cuda *c, const struct map_source *s, uint8_t **ret,
			    struct shardd_error *err)
{
	CUdeviceptr at = 0;
	CUresult r;

	if (!s->bytes || (!s->ipc && s->fd < 0))
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "slab %u came without its %llu bytes of memory", s->slab,
				 (unsigned long long)s->bytes);
	r = s->ipc ? map_cuda_open_handle(c, s, &at) : map_cuda_import_fd(c, s, &at);
	if (r != CUDA_SUCCESS)
		return cuda_error(c, r, err, "cannot map slab %u of %llu bytes on GPU %s", s->slab,
				  (unsigned long long)s->bytes, c->uuid);
	*ret = (uint8_t *)(uintptr_t)at;
	return 0;
}

static int map_cuda_map(void *device, const struct map_source *s, int timeout_ms, uint8_t **ret,
			struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	struct cuda *c = device;
	int r = cuda_enter(c, &scope, err);

	if (r < 0)
		return r;
	/* Mapping may wait inside the driver for a stream which itself waits for a value
	 * that only gets written once this call is through. */
	r = streams_quiet(c->streams, timeout_ms, err);
	if (r < 0)
		return r;
	r = map_cuda_entered(c, s, ret, err);
	streams_unquiet(c->streams);
	return r;
}

static void map_cuda_unmap(void *device, const struct mapping *m)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	CUdeviceptr at = (CUdeviceptr)(uintptr_t)m->base;
	struct cuda *c = device;

	if (cuda_enter(c, &scope, NULL) < 0)
		return;
	if (m->ipc) {
		c->lib->cuIpcCloseMemHandle(at);
		return;
	}
	c->lib->cuMemUnmap(at, m->bytes);
	c->lib->cuMemAddressFree(at, m->bytes);
}

/* ------------------------------------------------------------------ windows */

static int map_cuda_window_new(void *device, uint64_t bytes, uint8_t **ret,
			       struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	struct cuda *c = device;
	CUdeviceptr at = 0;
	int e = cuda_enter(c, &scope, err);
	CUresult r;

	if (e < 0)
		return e;
	r = c->lib->cuMemAddressReserve(&at, bytes, 0, 0, 0);
	if (r != CUDA_SUCCESS)
		return cuda_error(c, r, err, "cannot reserve %llu bytes of addresses of GPU %s",
				  (unsigned long long)bytes, c->uuid);
	*ret = (uint8_t *)(uintptr_t)at;
	return 0;
}

/* The memory at @base, which is mapped with a descriptor, at @at as well, for reading. */
static CUresult map_cuda_window_map(const struct cuda *c, CUdeviceptr at, uint64_t bytes,
				    const uint8_t *base)
{
	const struct map_source s = { .bytes = bytes };
	CUmemGenericAllocationHandle handle;
	CUresult r = c->lib->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)base);

	if (r != CUDA_SUCCESS)
		return r;
	r = map_cuda_at(c, handle, at, &s);
	c->lib->cuMemRelease(handle); /* the mapping keeps the memory */
	return r;
}

/* If it cannot show @base, it shows what it did. */
static CUresult map_cuda_window_change(const struct cuda *c, CUdeviceptr at, uint64_t bytes,
				       const uint8_t **shows, const uint8_t *base)
{
	const uint8_t *former = *shows;
	CUresult r = former ? c->lib->cuMemUnmap(at, bytes) : CUDA_SUCCESS;

	if (r != CUDA_SUCCESS)
		return r;
	*shows = NULL;
	r = base ? map_cuda_window_map(c, at, bytes, base) : CUDA_SUCCESS;
	if (r == CUDA_SUCCESS)
		*shows = base;
	else if (former && map_cuda_window_map(c, at, bytes, former) == CUDA_SUCCESS)
		*shows = former;
	return r;
}

static int map_cuda_window_show(void *device, uint8_t *at, uint64_t bytes, const uint8_t **shows,
				const uint8_t *base, struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	struct cuda *c = device;
	int e = cuda_enter(c, &scope, err);
	CUresult r;

	if (e == 0)
		e = streams_quiet(c->streams, -1, err); /* as in map_cuda_map */
	if (e < 0)
		return e;
	/* work on other streams than the thread's, too: an address without memory ends the context */
	r = *shows ? c->lib->cuCtxSynchronize() : CUDA_SUCCESS;
	if (r == CUDA_SUCCESS)
		r = map_cuda_window_change(c, (CUdeviceptr)(uintptr_t)at, bytes, shows, base);
	streams_unquiet(c->streams);
	if (r == CUDA_SUCCESS)
		return 0;
	return cuda_error(c, r, err,
			  "cannot map a generation of %llu bytes at its address on GPU %s",
			  (unsigned long long)bytes, c->uuid);
}

static void map_cuda_window_free(void *device, uint8_t *at, uint64_t bytes)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	struct cuda *c = device;

	if (cuda_enter(c, &scope, NULL) == 0)
		c->lib->cuMemAddressFree((CUdeviceptr)(uintptr_t)at, bytes);
}

/* ------------------------------------------------------------------- copies */

/* Copies come after what this thread's stream holds, if it has one: an op on it may be
 * answered long before the device has done it. */
static CUresult map_cuda_order_copy(struct cuda *c)
{
	CUstream stream;
	CUresult r;

	if (!stream_of_thread(c->streams, &stream))
		return CUDA_SUCCESS;
	r = c->lib->cuEventRecord(c->before, stream);
	return r == CUDA_SUCCESS ? c->lib->cuStreamWaitEvent(c->copies, c->before, 0) : r;
}

static int map_cuda_copy(struct cuda *c, void *dst, const void *src, size_t bytes, bool in,
			 struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	int entered = cuda_enter(c, &scope, err);
	CUresult r;

	if (entered < 0)
		return entered;
	pthread_mutex_lock(&c->copying);
	r = map_cuda_order_copy(c);
	if (r == CUDA_SUCCESS && in)
		r = c->lib->cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)dst, src, bytes, c->copies);
	else if (r == CUDA_SUCCESS)
		r = c->lib->cuMemcpyDtoHAsync(dst, (CUdeviceptr)(uintptr_t)src, bytes, c->copies);
	pthread_mutex_unlock(&c->copying);
	if (r == CUDA_SUCCESS)
		r = c->lib->cuStreamSynchronize(c->copies);
	if (r == CUDA_SUCCESS)
		return 0;
	return cuda_error(c, r, err, "cannot copy %zu bytes %s GPU %s", bytes, in ? "to" : "from",
			  c->uuid);
}

static int map_cuda_copy_in(void *device, void *dst, const void *src, size_t bytes,
			    struct shardd_error *err)
{
	return map_cuda_copy(device, dst, src, bytes, true, err);
}

static int map_cuda_copy_out(void *device, void *dst, const void *src, size_t bytes,
			     struct shardd_error *err)
{
	return map_cuda_copy(device, dst, src, bytes, false, err);
}

const struct map_ops map_cuda_ops = {
	.map = map_cuda_map,
	.unmap = map_cuda_unmap,
	.copy_in = map_cuda_copy_in,
	.copy_out = map_cuda_copy_out,
	.by_number = true,
	.window_new = map_cuda_window_new,
	.window_show = map_cuda_window_show,
	.window_free = map_cuda_window_free,
};

#else

const struct map_ops map_cuda_ops = { 0 }; /* cuda_open refuses before it is used */

#endif
