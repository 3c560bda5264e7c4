/*
 * The other process of the experiment in cuda_overlap.c: keeps one block of a device busy
 * until its standard input ends. Writes one byte when it has begun.
 */
#include "backend/backend_impl.h"
#include "backend/cuda_impl.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef SHARDD_CUDA

#define SPIN_NS 20000000u
/* Kernels at most, if the input never ends: a minute. */
#define MOST_SPINS 3000u

static CUresult cuda_overlap_child_launch(const struct cuda_lib *lib, CUfunction fn,
					  CUstream stream)
{
	struct cuda_spin args = { .nanoseconds = SPIN_NS };
	void *params[1] = { &args };

	return lib->cuLaunchKernel(fn, 1, 1, 1, cuda_fn_threads(CUDA_FN_SPIN), 1, 1, 0, stream,
				   params, NULL);
}

static bool cuda_overlap_child_has_ended(void)
{
	struct pollfd p = { .fd = STDIN_FILENO, .events = POLLIN };

	return poll(&p, 1, 0) != 0;
}

/* One ahead, so that there is no gap. */
static CUresult cuda_overlap_child_keep_busy(const struct cuda_lib *lib, CUfunction fn,
					     CUstream stream)
{
	CUevent event[2];
	CUresult r = lib->cuEventCreate(&event[0], CU_EVENT_BLOCKING_SYNC);

	if (r == CUDA_SUCCESS)
		r = lib->cuEventCreate(&event[1], CU_EVENT_BLOCKING_SYNC);
	for (unsigned i = 0; r == CUDA_SUCCESS && i < MOST_SPINS && !cuda_overlap_child_has_ended();
	     i++) {
		r = cuda_overlap_child_launch(lib, fn, stream);
		if (r == CUDA_SUCCESS)
			r = lib->cuEventRecord(event[i % 2], stream);
		if (i == 0 && write(STDOUT_FILENO, "", 1) != 1)
			break;
		if (r == CUDA_SUCCESS && i > 0)
			r = lib->cuEventSynchronize(event[(i + 1) % 2]);
	}
	return r;
}

static CUresult cuda_overlap_child_run(const struct cuda_lib *lib, CUdevice device)
{
	CUcontext context;
	CUmodule module;
	CUfunction fn;
	CUstream stream;
	uint64_t bytes;
	CUresult r = lib->cuDevicePrimaryCtxRetain(&context, device);

	if (r == CUDA_SUCCESS)
		r = lib->cuCtxSetCurrent(context);
	if (r == CUDA_SUCCESS)
		r = lib->cuModuleLoadData(&module, cuda_kernels_image(&bytes));
	if (r == CUDA_SUCCESS)
		r = lib->cuModuleGetFunction(&fn, module, cuda_fn_name(CUDA_FN_SPIN));
	if (r == CUDA_SUCCESS)
		r = lib->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
	return r == CUDA_SUCCESS ? cuda_overlap_child_keep_busy(lib, fn, stream) : r;
}

/* The process ends with it: nothing is cleaned up. */
int backend_cuda_overlap_child(const char *uuid)
{
	const struct backend_cuda_options o = { .uuids = &uuid, .n_uuids = 1 };
	struct fault f = FAULT_NULL;
	const struct cuda_lib *lib;
	char why[256];
	CUdevice device;
	unsigned n = 0;

	if (cuda_lib_open(&lib, why, sizeof(why)) || cuda_find(lib, &o, &device, 1, &n, &f) ||
	    n == 0)
		return EXIT_FAILURE;
	return cuda_overlap_child_run(lib, device) == CUDA_SUCCESS ? EXIT_SUCCESS : EXIT_FAILURE;
}

#else

int backend_cuda_overlap_child(const char *uuid)
{
	(void)uuid;
	return EXIT_FAILURE;
}

#endif
