/* Virtual memory management: handles, reservations, mappings, access, descriptors. */
#include <fcntl.h>
#include <unistd.h>

#include "sim_impl.h"

struct handle {
	uint32_t live;
	int device; /* CUdevice, -1: not seen by this process */
	bool exportable;
	struct block *block;
};

static struct objects handles = { .what = "memory handle", .size = sizeof(struct handle) };

static bool unaligned(uint64_t v)
{
	return v % SIM_GRANULARITY != 0;
}

static CUresult check_prop(const CUmemAllocationProp *p)
{
	if (!p || p->type != CU_MEM_ALLOCATION_TYPE_PINNED || p->win32HandleMetaData)
		return CUDA_ERROR_INVALID_VALUE;
	if (p->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (p->location.id < 0 || p->location.id >= (int)sim_devices())
		return CUDA_ERROR_INVALID_DEVICE;
	if (p->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED; /* no fabric here */
	return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *ret, const CUmemAllocationProp *prop,
				       CUmemAllocationGranularity_flags option)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);

	(void)option;
	if (r == CUDA_SUCCESS)
		r = check_prop(prop);
	if (r == CUDA_SUCCESS)
		*ret = SIM_GRANULARITY;
	return r;
}

static CUmemGenericAllocationHandle handle_new(struct block *b, int device, bool exportable)
{
	struct handle *h = objects_new(&handles);

	h->device = device;
	h->exportable = exportable;
	h->block = b;
	return (CUmemGenericAllocationHandle)(uintptr_t)h;
}

static struct handle *handle_get(CUmemGenericAllocationHandle h, const char *function)
{
	return objects_get(&handles, (void *)(uintptr_t)h, function);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *ret, size_t size,
		     const CUmemAllocationProp *prop, unsigned long long flags)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);
	struct block *b;

	if (r == CUDA_SUCCESS)
		r = check_prop(prop);
	if (r)
		return r;
	if (!size || unaligned(size) || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	r = block_new(BLOCK_VMM, prop->location.id, size, &b);
	if (r == CUDA_SUCCESS)
		*ret = handle_new(b, prop->location.id, prop->requestedHandleTypes != 0);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);
	struct handle *h;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	h = handle_get(handle, __func__);
	if (h) {
		h->live = 0;
		block_unref(h->block);
	}
	pthread_mutex_unlock(&sim_lock);
	return h ? sim_leave(c) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *ret, CUmemGenericAllocationHandle handle,
				      CUmemAllocationHandleType type, unsigned long long flags)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);
	struct handle *h;

	if (r)
		return r;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	h = handle_get(handle, __func__);
	if (!h || !h->exportable)
		r = CUDA_ERROR_INVALID_VALUE;
	else /* not close-on-exec: nothing promises that */
		*(int *)ret = fcntl(h->block->fd, F_DUPFD, 3);
	if (r == CUDA_SUCCESS && *(int *)ret < 0)
		r = CUDA_ERROR_OPERATING_SYSTEM;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static int device_at(int place)
{
	for (unsigned i = 0; i < sim_devices(); i++)
		if (sim_physical((int)i) == place)
			return (int)i;
	return -1;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *ret, void *os_handle,
					CUmemAllocationHandleType type)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);
	struct block *b;

	if (r)
		return r;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	r = block_import((int)(intptr_t)os_handle, BLOCK_VMM, &b);
	if (r == CUDA_SUCCESS)
		*ret = handle_new(b, device_at(b->head->physical), true);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *ret, void *addr)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);
	struct range *v;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	v = range_find((uint64_t)(uintptr_t)addr);
	if (v && v->kind == RANGE_VMM) {
		v->block->refs++;
		*ret = handle_new(v->block, v->device, true);
	} else {
		r = CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}

/* -- addresses --------------------------------------------------------------------- */

/* @hint is a hint: CUDA may give another address, and so does this. */
CUresult cuMemAddressReserve(CUdeviceptr *ret, size_t size, size_t alignment, CUdeviceptr hint,
			     unsigned long long flags)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);

	(void)hint;
	if (r)
		return r;
	if (!size || unaligned(size) || flags || (alignment & (alignment - 1)))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	*ret = addr_take(size, alignment);
	if (*ret)
		addr_reserve(*ret, size);
	else
		r = CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuMemAddressFree(CUdeviceptr addr, size_t size)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);
	struct range *v;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	v = range_next(addr);
	if (v && v->addr < addr + size)
		sim_breach("cuMemAddressFree: memory is still mapped there");
	if (!addr_unreserve(addr, size))
		r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&sim_lock);
	return r ? r : sim_leave(c);
}

static CUresult map(struct handle *h, uint64_t addr, uint64_t size)
{
	struct range *r = range_next(addr);

	if (!addr_reserved(addr, size) || size > h->block->bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (r && r->addr < addr + size)
		return CUDA_ERROR_ALREADY_MAPPED;
	h->block->refs++;
	range_add(&(struct range){ .addr = addr,
				   .bytes = size,
				   .kind = RANGE_VMM,
				   .block = h->block,
				   .device = h->device });
	return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr addr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
		  unsigned long long flags)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);
	struct handle *h;

	if (r)
		return r;
	if (offset || flags || !size || unaligned(size) || unaligned(addr))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	h = handle_get(handle, __func__);
	r = h ? map(h, addr, size) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

/* Is [addr, addr+size) made of whole mappings? */
static bool whole_mappings(uint64_t addr, uint64_t size)
{
	uint64_t at = addr;

	while (at < addr + size) {
		struct range *r = range_find(at);

		if (!r || r->kind != RANGE_VMM || r->addr != at || r->bytes > addr + size - at)
			return false;
		at += r->bytes;
	}
	return size > 0;
}

CUresult cuMemUnmap(CUdeviceptr addr, size_t size)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	if (!whole_mappings(addr, size))
		r = CUDA_ERROR_INVALID_VALUE;
	for (uint64_t at = addr; r == CUDA_SUCCESS && at < addr + size;) {
		struct range *v = range_find(at);

		at += v->bytes;
		range_remove(v);
	}
	pthread_mutex_unlock(&sim_lock);
	return r ? r : sim_leave(c);
}

static CUresult check_access(const CUmemAccessDesc *desc, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
			return CUDA_ERROR_NOT_SUPPORTED;
		if (desc[i].location.id < 0 || desc[i].location.id >= (int)sim_devices())
			return CUDA_ERROR_INVALID_DEVICE;
		if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
		    desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
		    desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			return CUDA_ERROR_INVALID_VALUE;
	}
	return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr addr, size_t size, const CUmemAccessDesc *desc, size_t n)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);

	if (r == CUDA_SUCCESS)
		r = desc ? check_access(desc, n) : CUDA_ERROR_INVALID_VALUE;
	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	if (!whole_mappings(addr, size))
		r = CUDA_ERROR_INVALID_VALUE;
	for (uint64_t at = addr; r == CUDA_SUCCESS && at < addr + size;) {
		struct range *v = range_find(at);

		for (size_t i = 0; i < n; i++)
			v->access[desc[i].location.id] = (uint8_t)desc[i].flags;
		at += v->bytes;
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}
