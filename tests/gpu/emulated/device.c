/*
 * kernel_device.h without a device: memory is the host's, a launch runs the kernels that
 * were compiled for the host. Few multiprocessors, so that blocks have several turns.
 */
#include "kernel_device.h"

#include "emulated.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMS    3
#define PER_SM 1

void device_ok(const struct device *d, CUresult r, const char *call)
{
	(void)d;
	if (r == CUDA_SUCCESS)
		return;
	fprintf(stderr, "%s: %d\n", call, (int)r);
	exit(1);
}

void device_open(struct device *d, int ordinal)
{
	*d = (struct device){ .ordinal = ordinal, .sms = SMS, .name = "emulated" };
	for (unsigned i = 0; i < _CUDA_FN_N; i++)
		d->per_sm[i] = PER_SM;
}

void device_close(struct device *d)
{
	*d = (struct device){ 0 };
}

CUdeviceptr device_alloc(const struct device *d, size_t bytes)
{
	void *p = aligned_alloc(512, (bytes + 511) / 512 * 512);

	(void)d;
	if (!p) {
		fprintf(stderr, "no memory\n");
		exit(1);
	}
	return (CUdeviceptr)(uintptr_t)p;
}

void device_free(const struct device *d, CUdeviceptr p)
{
	(void)d;
	free((void *)(uintptr_t)p);
}

void device_put(const struct device *d, CUdeviceptr dst, const void *src, size_t bytes)
{
	(void)d;
	memcpy((void *)(uintptr_t)dst, src, bytes);
}

void device_get(const struct device *d, void *dst, CUdeviceptr src, size_t bytes)
{
	(void)d;
	memcpy(dst, (const void *)(uintptr_t)src, bytes);
}

void device_wait(const struct device *d)
{
	(void)d;
}

unsigned device_blocks(const struct device *d, enum cuda_fn fn, uint64_t n)
{
	return cuda_fn_blocks(fn, n, d->sms, d->per_sm[fn]);
}

void device_launch(const struct device *d, enum cuda_fn fn, const void *args, uint64_t n)
{
	emulated_launch(fn, device_blocks(d, fn, n), args);
}
