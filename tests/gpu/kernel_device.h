/*
 * One device with the kernels loaded, for kernel_test and kernel_bench: everything happens
 * on one stream, and a call of CUDA that fails ends the program.
 */
#ifndef SHARDD_TESTS_KERNEL_DEVICE_H
#define SHARDD_TESTS_KERNEL_DEVICE_H

#ifdef SHARDD_CUDA
#include "core/cuda_lib.h"
#include "cuda_kernels.h"
#include "kernels.h"

/* What a program ends with where there is nothing to run on. */
#define EXIT_NO_DEVICE 77

struct device {
	const struct cuda_lib *cu;
	CUdevice ordinal;
	CUcontext context;
	CUmodule module;
	CUstream stream;
	CUfunction fn[_CUDA_FN_N];
	unsigned sms;
	unsigned per_sm[_CUDA_FN_N]; /* resident blocks of each kernel */
	char name[128];
};

/* The call must succeed, else the program ends with 1 and says why. */
#define DEVICE_OK(d, call) device_ok((d), (call), #call)
void device_ok(const struct device *d, CUresult r, const char *call);

/* Device number @ordinal, its primary context current. Without a driver or such a device:
 * one line, and the program ends with EXIT_NO_DEVICE. */
void device_open(struct device *d, int ordinal);
void device_close(struct device *d);

CUdeviceptr device_alloc(const struct device *d, size_t bytes);
void device_free(const struct device *d, CUdeviceptr p);
/* These wait for everything before them on the stream. */
void device_put(const struct device *d, CUdeviceptr dst, const void *src, size_t bytes);
void device_get(const struct device *d, void *dst, CUdeviceptr src, size_t bytes);
void device_wait(const struct device *d);

/* How many blocks device_launch uses for @n elements. */
unsigned device_blocks(const struct device *d, enum cuda_fn fn, uint64_t n);
/* @args: the struct of @fn. */
void device_launch(const struct device *d, enum cuda_fn fn, const void *args, uint64_t n);
#endif

#endif
