/* Plain allocations: cuMemAlloc, pinned host memory; and what addresses are. */
#include <stdlib.h>
#include <string.h>

#include "sim_impl.h"

static CUresult allocate(struct ctx *c, uint64_t bytes, CUdeviceptr *ret)
{
	struct block *b;
	CUresult r = block_new(BLOCK_MALLOC, c->device, bytes, &b);

	if (r)
		return r;
	*ret = addr_take(bytes, SIM_GRANULARITY);
	if (!*ret) {
		block_unref(b);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	range_add(&(struct range){ .addr = *ret,
				   .bytes = bytes,
				   .kind = RANGE_MALLOC,
				   .block = b,
				   .device = c->device });
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *ret, size_t bytes)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	if (r)
		return r;
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	r = allocate(c, bytes, ret);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuMemFree(CUdeviceptr addr)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);
	struct range *v;

	if (r || !addr)
		return r;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	v = range_find(addr);
	if (!v && addr_is_device(addr))
		sim_breach("cuMemFree: nothing is allocated at 0x%llx (any more)",
			   (unsigned long long)addr);
	if (v && ipc_in_use(v))
		sim_breach("cuMemFree: another process still has the memory open");
	if (v && v->addr == addr && v->kind == RANGE_MALLOC)
		range_remove(v);
	else
		r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&sim_lock);
	ipc_settle();
	return r ? r : sim_leave(c);
}

CUresult cuMemAllocHost(void **ret, size_t bytes)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);
	struct block *b;

	if (r)
		return r;
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	r = block_new(BLOCK_HOST, -1, bytes, &b);
	if (r == CUDA_SUCCESS) {
		*ret = b->shadow;
		range_add(&(struct range){ .addr = (uint64_t)(uintptr_t)b->shadow,
					   .bytes = bytes,
					   .kind = RANGE_HOST,
					   .block = b,
					   .device = -1 });
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuMemFreeHost(void *p)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);
	struct range *v;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	v = range_find((uint64_t)(uintptr_t)p);
	if (v && v->kind == RANGE_HOST && v->block->shadow == p)
		range_remove(v);
	else
		r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&sim_lock);
	return r ? r : sim_leave(c);
}

CUresult cuMemGetInfo(size_t *ret_free, size_t *ret_total)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	if (r)
		return r;
	*ret_total = (size_t)sim_env("SHARDD_SIM_MEMORY", 4ll << 30);
	pthread_mutex_lock(&sim_lock);
	*ret_free = *ret_total - block_used(c->device);
	pthread_mutex_unlock(&sim_lock);
	return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *ret_base, size_t *ret_size, CUdeviceptr addr)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);
	struct range *v;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	v = range_find(addr);
	if (!v || v->kind == RANGE_HOST)
		r = CUDA_ERROR_NOT_FOUND;
	if (r == CUDA_SUCCESS && ret_base)
		*ret_base = v->addr;
	if (r == CUDA_SUCCESS && ret_size)
		*ret_size = v->bytes;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static CUresult pointer_attribute(const struct range *v, CUpointer_attribute a, uint64_t addr,
				  void *ret)
{
	switch (a) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)ret = v->kind == RANGE_VMM || v->device < 0
					    ? NULL
					    : (CUcontext)sim_ctx(v->device);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned *)ret =
			v->kind == RANGE_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)ret = addr;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (v->kind != RANGE_HOST)
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)ret = (void *)(uintptr_t)addr;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)ret = v->device < 0 ? 0 : v->device;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(int *)ret = v->kind == RANGE_MALLOC;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)ret = v->addr;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)ret = v->bytes;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(int *)ret = 1;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(int *)ret = 0;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

CUresult cuPointerGetAttribute(void *ret, CUpointer_attribute attribute, CUdeviceptr addr)
{
	CUresult r = sim_enter(__func__, NEED_INIT, NULL);
	struct range *v;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	v = range_find(addr);
	r = v ? pointer_attribute(v, attribute, addr, ret) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&sim_lock);
	return r;
}
