/* What the actors do with the driver. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "stage.h"

void actor_cuda(struct actor *a)
{
	char why[256];

	if (cuda_lib_open(&a->cuda, why, sizeof(why)) < 0)
		actor_fail(a, -1, "%s", why);
	actor_must(a, a->cuda->cuDeviceGet(&a->device, 0), "cuDeviceGet");
	actor_must(a, a->cuda->cuDevicePrimaryCtxRetain(&a->context, a->device),
		   "cuDevicePrimaryCtxRetain");
	actor_must(a, a->cuda->cuCtxSetCurrent(a->context), "cuCtxSetCurrent");
	a->stream = actor_stream(a);
}

CUstream actor_stream(struct actor *a)
{
	CUstream stream;

	actor_must(a, a->cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0),
		   "cuStreamCreateWithPriority");
	return stream;
}

void *cuda_extra(const char *name)
{
	const char *path = getenv("SHARDD_LIBCUDA");
	void *so = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	return so ? dlsym(so, name) : NULL;
}

/* ------------------------------------------------------------------ memory */

static CUmemAllocationProp vmm_kind(struct actor *a)
{
	return (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = a->device },
	};
}

size_t vmm_round(struct actor *a, size_t bytes)
{
	CUmemAllocationProp kind = vmm_kind(a);
	size_t step;

	actor_must(a,
		   a->cuda->cuMemGetAllocationGranularity(&step, &kind,
							  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
		   "cuMemGetAllocationGranularity");
	return (bytes + step - 1) / step * step;
}

void vmm_map(struct actor *a, struct vmm *v, bool writable)
{
	CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = a->device },
		.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
				  : CU_MEM_ACCESS_FLAGS_PROT_READ,
	};

	actor_must(a, a->cuda->cuMemAddressReserve(&v->addr, v->bytes, 0, 0, 0),
		   "cuMemAddressReserve");
	actor_must(a, a->cuda->cuMemMap(v->addr, v->bytes, 0, v->handle, 0), "cuMemMap");
	actor_must(a, a->cuda->cuMemSetAccess(v->addr, v->bytes, &access, 1), "cuMemSetAccess");
}

void vmm_create(struct actor *a, size_t bytes, struct vmm *ret)
{
	CUmemAllocationProp kind = vmm_kind(a);
	struct vmm v = { .bytes = vmm_round(a, bytes) };

	actor_must(a, a->cuda->cuMemCreate(&v.handle, v.bytes, &kind, 0), "cuMemCreate");
	vmm_map(a, &v, true);
	*ret = v;
}

int vmm_export(struct actor *a, const struct vmm *v)
{
	int fd = -1;

	actor_must(a,
		   a->cuda->cuMemExportToShareableHandle(
			   &fd, v->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
		   "cuMemExportToShareableHandle");
	return fd;
}

CUresult vmm_import(struct actor *a, int fd, size_t bytes, bool writable, struct vmm *ret)
{
	struct vmm v = { .bytes = vmm_round(a, bytes) };
	CUresult r = a->cuda->cuMemImportFromShareableHandle(
		&v.handle, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

	if (r != CUDA_SUCCESS)
		return r;
	vmm_map(a, &v, writable);
	*ret = v;
	return CUDA_SUCCESS;
}

void vmm_free(struct actor *a, struct vmm *v)
{
	actor_must(a, a->cuda->cuMemUnmap(v->addr, v->bytes), "cuMemUnmap");
	actor_must(a, a->cuda->cuMemAddressFree(v->addr, v->bytes), "cuMemAddressFree");
	actor_must(a, a->cuda->cuMemRelease(v->handle), "cuMemRelease");
	*v = (struct vmm){ 0 };
}

/* --------------------------------------------------------------- patterns */

#define CHUNK (MIB / 8) /* words that are prepared at once */

static uint64_t pattern(uint64_t seed, uint64_t i)
{
	uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ seed;

	x = (x ^ x >> 31) * UINT64_C(0xbf58476d1ce4e5b9);
	return x ^ x >> 29;
}

static uint64_t *pattern_room(struct actor *a)
{
	uint64_t *words = malloc(CHUNK * sizeof(*words));

	if (!words)
		actor_fail(a, -1, "no memory");
	return words;
}

void pattern_write(struct actor *a, CUdeviceptr addr, size_t bytes, uint64_t seed)
{
	uint64_t *words = pattern_room(a), n = bytes / sizeof(*words);

	for (uint64_t at = 0; at < n; at += CHUNK) {
		uint64_t count = n - at < CHUNK ? n - at : CHUNK;

		for (uint64_t i = 0; i < count; i++)
			words[i] = pattern(seed, at + i);
		actor_must(a,
			   a->cuda->cuMemcpyHtoDAsync(addr + at * 8, words, count * 8, a->stream),
			   "cuMemcpyHtoDAsync");
		actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "cuStreamSynchronize");
	}
	free(words);
}

CUresult pattern_check(struct actor *a, CUdeviceptr addr, size_t bytes, uint64_t seed,
		       uint64_t *ret_wrong)
{
	uint64_t *words = pattern_room(a), n = bytes / sizeof(*words), wrong = 0;
	CUresult r = CUDA_SUCCESS;

	for (uint64_t at = 0; at < n && r == CUDA_SUCCESS; at += CHUNK) {
		uint64_t count = n - at < CHUNK ? n - at : CHUNK;

		r = a->cuda->cuMemcpyDtoHAsync(words, addr + at * 8, count * 8, a->stream);
		if (r == CUDA_SUCCESS)
			r = a->cuda->cuStreamSynchronize(a->stream);
		for (uint64_t i = 0; i < count && r == CUDA_SUCCESS; i++)
			wrong += words[i] != pattern(seed, at + i);
	}
	free(words);
	*ret_wrong = wrong;
	return r;
}

/* ---------------------------------------------------------------- kernels */

CUfunction kernel_get(struct actor *a, enum cuda_fn fn)
{
	const void *image;
	CUfunction f;
	uint64_t bytes;

	if (!a->module) {
		image = cuda_kernels_image(&bytes);
		if (!image)
			actor_fail(a, -1, "this build has no CUDA kernels");
		actor_must(a, a->cuda->cuModuleLoadData(&a->module, image), "cuModuleLoadData");
	}
	actor_must(a, a->cuda->cuModuleGetFunction(&f, a->module, cuda_fn_name(fn)),
		   cuda_fn_name(fn));
	return f;
}

CUresult kernel_launch(struct actor *a, enum cuda_fn fn, CUfunction f, unsigned blocks,
		       const void *args, CUstream stream)
{
	void *parameters[] = { (void *)args };

	return a->cuda->cuLaunchKernel(f, blocks, 1, 1, cuda_fn_threads(fn), 1, 1, 0, stream,
				       parameters, NULL);
}

unsigned kernel_blocks(struct actor *a, enum cuda_fn fn, CUfunction f, uint64_t n)
{
	int sms = 0, per_sm = 0;

	actor_must(a,
		   a->cuda->cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
						 a->device),
		   "cuDeviceGetAttribute");
	actor_must(a,
		   a->cuda->cuOccupancyMaxActiveBlocksPerMultiprocessor(
			   &per_sm, f, (int)cuda_fn_threads(fn), 0),
		   "cuOccupancyMaxActiveBlocksPerMultiprocessor");
	return cuda_fn_blocks(fn, n, (unsigned)sms, (unsigned)per_sm);
}

void spin_prepare(struct actor *a)
{
	spin(a, 1000, 1, a->stream);
	actor_must(a, a->cuda->cuStreamSynchronize(a->stream), "cuStreamSynchronize");
}

void spin(struct actor *a, uint64_t ns, unsigned blocks, CUstream stream)
{
	struct cuda_spin args = { .nanoseconds = ns };
	CUfunction f = kernel_get(a, CUDA_FN_SPIN);

	actor_must(a, kernel_launch(a, CUDA_FN_SPIN, f, blocks, &args, stream), "cuLaunchKernel");
}

/* ------------------------------------------------------------------ words */

CUresult word_write(struct actor *a, CUstream stream, CUdeviceptr addr, uint64_t value)
{
	return a->cuda->cuStreamWriteValue64(stream, addr, value, CU_STREAM_WRITE_VALUE_DEFAULT);
}

CUresult word_wait(struct actor *a, CUstream stream, CUdeviceptr addr, uint64_t value)
{
	return a->cuda->cuStreamWaitValue64(stream, addr, value, CU_STREAM_WAIT_VALUE_GEQ);
}

CUresult stream_spin(struct actor *a, CUstream stream, unsigned ms)
{
	uint64_t end = now_ns() + (uint64_t)ms * 1000000;
	CUresult r;

	do
		r = a->cuda->cuStreamQuery(stream);
	while (r == CUDA_ERROR_NOT_READY && now_ns() < end);
	return r;
}
