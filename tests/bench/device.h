/* Inside device.c and nccl.c: CUDA in a process that does nothing else. */
#ifndef SHARDD_TESTS_BENCH_DEVICE_H
#define SHARDD_TESTS_BENCH_DEVICE_H

#define DEVICE_MAX_VALUES 8

/* Run @fn in a process of its own; what it writes to its @ret becomes @ret's @n values. It
 * ends with _exit(1) when it fails, which it has said. Return: 0 or -1. */
typedef void (*device_fn)(const void *arg, double *ret);
int device_aside(device_fn fn, const void *arg, double *ret, unsigned n);
int device_compare(const void *a, const void *b); /* of doubles, for qsort */

#ifdef SHARDD_CUDA
#include "core/cuda_lib.h"
#include "cuda_kernels.h"

struct gpu {
	const struct cuda_lib *cuda;
	CUdevice device;
	CUcontext context;
	CUstream stream;
	CUevent begin, end;
};

/* A GPU's primary context, current, and a stream. All of these end the process when
 * something fails, which they say. */
void gpu_open(struct gpu *g, unsigned ordinal);
void gpu_must(const struct gpu *g, CUresult r, const char *what);
CUdeviceptr gpu_alloc(const struct gpu *g, uint64_t bytes);
/* Time on the stream from here, and to here. */
void gpu_begin(const struct gpu *g);
double gpu_end_us(const struct gpu *g);
#endif

#endif
