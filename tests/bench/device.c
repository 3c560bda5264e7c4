/*
 * What a GPU gives without a daemon. Measured in a process of its own that ends with it:
 * the program forks trainers later, and CUDA does not live through a fork.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "device.h"
#include "kernels.h"

int device_aside(device_fn fn, const void *arg, double *ret, unsigned n)
{
	double values[DEVICE_MAX_VALUES] = { 0 };
	size_t bytes = n * sizeof(*ret);
	int fds[2], status = 0;
	ssize_t got;
	pid_t pid;

	if (pipe(fds) < 0)
		return -1;
	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		fn(arg, values);
		_exit(write(fds[1], values, bytes) == (ssize_t)bytes ? 0 : 1);
	}
	close(fds[1]);
	got = pid > 0 ? read(fds[0], ret, bytes) : -1;
	close(fds[0]);
	while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return got == (ssize_t)bytes && status == 0 ? 0 : -1;
}

int device_compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

#ifdef SHARDD_CUDA

#define TURNS      10
#define TURN_BYTES (UINT64_C(4) << 30) /* at least, so that starting costs nothing */

void gpu_must(const struct gpu *g, CUresult r, const char *what)
{
	char text[160];

	if (r == CUDA_SUCCESS)
		return;
	fprintf(stderr, "shardd-bench: %s: %s\n", what,
		cuda_lib_text(g->cuda, r, text, sizeof(text)));
	_exit(1);
}

void gpu_open(struct gpu *g, unsigned ordinal)
{
	char why[256];

	if (cuda_lib_open(&g->cuda, why, sizeof(why)) < 0) {
		fprintf(stderr, "shardd-bench: %s\n", why);
		_exit(1);
	}
	gpu_must(g, g->cuda->cuDeviceGet(&g->device, (int)ordinal), "cuDeviceGet");
	gpu_must(g, g->cuda->cuDevicePrimaryCtxRetain(&g->context, g->device),
		 "cuDevicePrimaryCtxRetain");
	gpu_must(g, g->cuda->cuCtxSetCurrent(g->context), "cuCtxSetCurrent");
	gpu_must(g, g->cuda->cuStreamCreateWithPriority(&g->stream, CU_STREAM_NON_BLOCKING, 0),
		 "cuStreamCreateWithPriority");
	gpu_must(g, g->cuda->cuEventCreate(&g->begin, CU_EVENT_DEFAULT), "cuEventCreate");
	gpu_must(g, g->cuda->cuEventCreate(&g->end, CU_EVENT_DEFAULT), "cuEventCreate");
}

CUdeviceptr gpu_alloc(const struct gpu *g, uint64_t bytes)
{
	CUdeviceptr addr;

	gpu_must(g, g->cuda->cuMemAlloc(&addr, bytes), "cuMemAlloc");
	/* numbers like any other: 0x3f803f80 is 1.0 and a bit, in all three types */
	gpu_must(g, g->cuda->cuMemsetD32Async(addr, 0x3f803f80, bytes / 4, g->stream),
		 "cuMemsetD32Async");
	return addr;
}

void gpu_begin(const struct gpu *g)
{
	gpu_must(g, g->cuda->cuEventRecord(g->begin, g->stream), "cuEventRecord");
}

double gpu_end_us(const struct gpu *g)
{
	float ms;

	gpu_must(g, g->cuda->cuEventRecord(g->end, g->stream), "cuEventRecord");
	gpu_must(g, g->cuda->cuEventSynchronize(g->end), "cuEventSynchronize");
	gpu_must(g, g->cuda->cuEventElapsedTime(&ms, g->begin, g->end), "cuEventElapsedTime");
	return (double)ms * 1e3;
}

static void copy_limit(const void *arg, double *ret)
{
	uint64_t bytes = *(const uint64_t *)arg / 2 / 4 * 4, passes;
	struct gpu g;
	CUdeviceptr dst, src;

	bytes = bytes ? bytes : 4;
	passes = (TURN_BYTES + 2 * bytes - 1) / (2 * bytes);
	passes = passes > 1000 ? 1000 : passes;
	gpu_open(&g, 0);
	dst = gpu_alloc(&g, bytes);
	src = gpu_alloc(&g, bytes);
	for (unsigned turn = 0; turn < TURNS; turn++) {
		double rate;

		gpu_begin(&g);
		for (uint64_t i = 0; i < passes; i++)
			gpu_must(&g, g.cuda->cuMemcpyDtoDAsync(dst, src, bytes, g.stream),
				 "cuMemcpyDtoDAsync");
		rate = 2.0 * (double)bytes * (double)passes / gpu_end_us(&g) / 1e3;
		*ret = rate > *ret ? rate : *ret;
	}
}

double device_copy_limit(uint64_t footprint)
{
	double rate;

	return device_aside(copy_limit, &footprint, &rate, 1) < 0 ? -1 : rate;
}

/* ------------------------------------------------------------- bare kernel */

struct reduce_ask {
	unsigned k, repeat;
	uint64_t elements;
	enum shardd_dtype dtype;
};

static unsigned blocks_for(const struct gpu *g, CUfunction f, uint64_t n)
{
	int sms = 0, per_sm = 0;

	gpu_must(g,
		 g->cuda->cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
					       g->device),
		 "cuDeviceGetAttribute");
	gpu_must(g,
		 g->cuda->cuOccupancyMaxActiveBlocksPerMultiprocessor(
			 &per_sm, f, (int)cuda_fn_threads(CUDA_FN_REDUCE), 0),
		 "cuOccupancyMaxActiveBlocksPerMultiprocessor");
	return cuda_fn_blocks(CUDA_FN_REDUCE, n, (unsigned)sms, (unsigned)per_sm);
}

static void bare_reduce(const void *arg, double *ret)
{
	const struct reduce_ask *ask = arg;
	double *us = calloc(ask->repeat, sizeof(*us));
	uint64_t image_bytes;
	const void *image = cuda_kernels_image(&image_bytes);
	struct cuda_reduce a = { .n = ask->elements,
				 .k = ask->k,
				 .in_dtype = (uint32_t)ask->dtype,
				 .out_dtype = DTYPE_FP32,
				 .sum_dtype = DTYPE_FP32,
				 .post = { K_FACTOR_DIV, DTYPE_FP32, (float)ask->k },
				 .accumulate = 1 };
	void *parameters[] = { &a };
	CUfunction f;
	CUmodule module;
	unsigned blocks;
	struct gpu g;

	if (!image || !us || ask->k > CUDA_FEW_INPUTS)
		_exit(1);
	gpu_open(&g, 0);
	gpu_must(&g, g.cuda->cuModuleLoadData(&module, image), "cuModuleLoadData");
	gpu_must(&g, g.cuda->cuModuleGetFunction(&f, module, cuda_fn_name(CUDA_FN_REDUCE)),
		 "cuModuleGetFunction");
	a.out = gpu_alloc(&g, ask->elements * 4);
	for (unsigned i = 0; i < ask->k; i++)
		a.in[i] = gpu_alloc(&g, ask->elements * shardd_dtype_size(ask->dtype));
	blocks = blocks_for(&g, f, ask->elements);
	for (int i = -3; i < (int)ask->repeat; i++) {
		double taken;

		gpu_begin(&g);
		gpu_must(&g,
			 g.cuda->cuLaunchKernel(f, blocks, 1, 1, cuda_fn_threads(CUDA_FN_REDUCE), 1,
						1, 0, g.stream, parameters, NULL),
			 "cuLaunchKernel");
		taken = gpu_end_us(&g);
		if (i >= 0)
			us[i] = taken;
	}
	qsort(us, ask->repeat, sizeof(*us), device_compare);
	*ret = us[ask->repeat / 2];
}

double device_reduce_us(unsigned k, uint64_t elements, enum shardd_dtype dtype, unsigned repeat)
{
	const struct reduce_ask ask = { k, repeat, elements, dtype };
	double us;

	return device_aside(bare_reduce, &ask, &us, 1) < 0 ? -1 : us;
}

static void count_devices(const void *arg, double *ret)
{
	struct gpu g;
	int n = 0;

	(void)arg;
	gpu_open(&g, 0);
	gpu_must(&g, g.cuda->cuDeviceGetCount(&n), "cuDeviceGetCount");
	*ret = n;
}

int device_count(void)
{
	double n;

	return device_aside(count_devices, NULL, &n, 1) < 0 ? -1 : (int)n;
}

/* -------------------------------------------------------------- in trainers */

static struct gpu trainer_gpu;

void *device_stream(unsigned device)
{
	gpu_open(&trainer_gpu, device);
	return trainer_gpu.stream;
}

void device_drain(void *stream)
{
	gpu_must(&trainer_gpu, trainer_gpu.cuda->cuStreamSynchronize(stream),
		 "cuStreamSynchronize");
}

#else

static int without_cuda(void)
{
	fputs("shardd-bench: this build has no CUDA\n", stderr);
	return -1;
}

double device_copy_limit(uint64_t footprint)
{
	(void)footprint;
	return without_cuda();
}

double device_reduce_us(unsigned k, uint64_t elements, enum shardd_dtype dtype, unsigned repeat)
{
	(void)k;
	(void)elements;
	(void)dtype;
	(void)repeat;
	return without_cuda();
}

int device_count(void)
{
	return without_cuda();
}

void *device_stream(unsigned device)
{
	(void)device;
	_exit(-without_cuda());
}

void device_drain(void *stream)
{
	(void)stream;
}

#endif
