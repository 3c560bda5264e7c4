#include "kernel_device.h"

#ifdef SHARDD_CUDA
#include <stdio.h>
#include <stdlib.h>

void device_ok(const struct device *d, CUresult r, const char *call)
{
	char text[200];

	if (r == CUDA_SUCCESS)
		return;
	fprintf(stderr, "%s: %s\n", call, cuda_lib_text(d->cu, r, text, sizeof(text)));
	exit(1);
}

static void open_lib(struct device *d, int ordinal)
{
	char why[256];
	int count = 0;

	if (cuda_lib_open(&d->cu, why, sizeof(why))) {
		printf("no device: %s\n", why);
		exit(EXIT_NO_DEVICE);
	}
	DEVICE_OK(d, d->cu->cuDeviceGetCount(&count));
	if (ordinal >= count) {
		printf("no device %d: there are %d\n", ordinal, count);
		exit(EXIT_NO_DEVICE);
	}
}

static void load_kernels(struct device *d)
{
	uint64_t bytes;
	int per_sm;

	DEVICE_OK(d, d->cu->cuModuleLoadData(&d->module, cuda_kernels_image(&bytes)));
	for (unsigned i = 0; i < _CUDA_FN_N; i++) {
		DEVICE_OK(d, d->cu->cuModuleGetFunction(&d->fn[i], d->module, cuda_fn_name(i)));
		DEVICE_OK(d, d->cu->cuOccupancyMaxActiveBlocksPerMultiprocessor(
				     &per_sm, d->fn[i], (int)cuda_fn_threads(i), 0));
		d->per_sm[i] = (unsigned)per_sm;
	}
}

void device_open(struct device *d, int ordinal)
{
	int sms = 0;

	*d = (struct device){ 0 };
	open_lib(d, ordinal);
	DEVICE_OK(d, d->cu->cuDeviceGet(&d->ordinal, ordinal));
	DEVICE_OK(d, d->cu->cuDeviceGetName(d->name, sizeof(d->name), d->ordinal));
	DEVICE_OK(d, d->cu->cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
						 d->ordinal));
	d->sms = (unsigned)sms;
	DEVICE_OK(d, d->cu->cuDevicePrimaryCtxRetain(&d->context, d->ordinal));
	DEVICE_OK(d, d->cu->cuCtxSetCurrent(d->context));
	DEVICE_OK(d, d->cu->cuStreamCreateWithPriority(&d->stream, CU_STREAM_NON_BLOCKING, 0));
	load_kernels(d);
}

void device_close(struct device *d)
{
	DEVICE_OK(d, d->cu->cuStreamDestroy(d->stream));
	DEVICE_OK(d, d->cu->cuModuleUnload(d->module));
	DEVICE_OK(d, d->cu->cuDevicePrimaryCtxRelease(d->ordinal));
}

CUdeviceptr device_alloc(const struct device *d, size_t bytes)
{
	CUdeviceptr p = 0;

	DEVICE_OK(d, d->cu->cuMemAlloc(&p, bytes));
	return p;
}

void device_free(const struct device *d, CUdeviceptr p)
{
	DEVICE_OK(d, d->cu->cuMemFree(p));
}

void device_wait(const struct device *d)
{
	DEVICE_OK(d, d->cu->cuStreamSynchronize(d->stream));
}

void device_put(const struct device *d, CUdeviceptr dst, const void *src, size_t bytes)
{
	DEVICE_OK(d, d->cu->cuMemcpyHtoDAsync(dst, src, bytes, d->stream));
	device_wait(d);
}

void device_get(const struct device *d, void *dst, CUdeviceptr src, size_t bytes)
{
	DEVICE_OK(d, d->cu->cuMemcpyDtoHAsync(dst, src, bytes, d->stream));
	device_wait(d);
}

unsigned device_blocks(const struct device *d, enum cuda_fn fn, uint64_t n)
{
	return cuda_fn_blocks(fn, n, d->sms, d->per_sm[fn]);
}

void device_launch(const struct device *d, enum cuda_fn fn, const void *args, uint64_t n)
{
	void *params[] = { (void *)args };

	DEVICE_OK(d, d->cu->cuLaunchKernel(d->fn[fn], device_blocks(d, fn, n), 1, 1,
					   cuda_fn_threads(fn), 1, 1, 0, d->stream, params, NULL));
}
#else
typedef int kernel_device_not_empty;
#endif
