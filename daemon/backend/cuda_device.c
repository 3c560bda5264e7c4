/*
 * One device: its objects that are created once at the start and kept to the end. The primary
 * context is shared with NCCL, which makes its own calls in it.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <stdio.h>
#include <string.h>

#include "core/check.h"

#define SCRATCH_BYTES (CUDA_NORM_PARTIALS * sizeof(double))
/* Allocations are multiples of this at least: legacy IPC shares whole blocks of it. */
#define LEAST_GRANULARITY (UINT64_C(2) << 20)

/* Return @r; if it is an error, @f says so. */
static CUresult cuda_device_noted(struct cuda *c, struct fault *f, CUresult r, const char *what)
{
	char text[128];

	if (r == CUDA_SUCCESS)
		return r;
	snprintf(text, sizeof(text), "%s: %s", c->backend.info.id, what);
	cuda_fault(c->lib, f, r, text);
	return r;
}

static int cuda_device_attribute(const struct cuda *c, CUdevice_attribute which)
{
	int value = 0;

	return c->lib->cuDeviceGetAttribute(&value, which, c->device) == CUDA_SUCCESS ? value : 0;
}

static CUresult cuda_device_fill_info(struct cuda *c)
{
	struct backend_info *info = &c->backend.info;
	CUmemAllocationProp p = cuda_mem_properties(c);
	char name[64] = "";
	size_t total, granularity;
	CUresult r;

	r = c->lib->cuDeviceGetName(name, sizeof(name), c->device);
	if (r == CUDA_SUCCESS)
		r = cuda_lib_uuid(c->lib, c->device, info->uuid);
	if (r == CUDA_SUCCESS)
		r = c->lib->cuDeviceTotalMem(&total, c->device);
	if (r == CUDA_SUCCESS)
		r = c->lib->cuMemGetAllocationGranularity(&granularity, &p,
							  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
	if (r != CUDA_SUCCESS)
		return r;
	info->name = "cuda";
	info->capacity_bytes = total;
	info->granularity = granularity > LEAST_GRANULARITY ? granularity : LEAST_GRANULARITY;
	info->threads = c->kernels.sms;
	snprintf(info->kernels, sizeof(info->kernels), "cuda sm_%d%d",
		 cuda_device_attribute(c, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
		 cuda_device_attribute(c, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
	snprintf(info->detail, sizeof(info->detail),
		 "%s, %u multiprocessors, driver for CUDA %d.%d", name, c->kernels.sms,
		 c->lib->driver_version / 1000, c->lib->driver_version % 1000 / 10);
	return CUDA_SUCCESS;
}

static CUresult cuda_device_open_streams(struct cuda *c)
{
	int least = 0, greatest = 0;
	CUresult r = c->lib->cuCtxGetStreamPriorityRange(&least, &greatest);

	/* a gather delays a trainer immediately, a reduction does not */
	if (r == CUDA_SUCCESS)
		r = c->lib->cuStreamCreateWithPriority(&c->queues[BACKEND_Q_MAIN].stream,
						       CU_STREAM_NON_BLOCKING, least);
	if (r == CUDA_SUCCESS)
		r = c->lib->cuStreamCreateWithPriority(&c->queues[BACKEND_Q_GATHER].stream,
						       CU_STREAM_NON_BLOCKING, greatest);
	if (r == CUDA_SUCCESS)
		r = c->lib->cuStreamCreateWithPriority(&c->control, CU_STREAM_NON_BLOCKING,
						       greatest);
	return r;
}

static CUresult cuda_device_open_marks(struct cuda *c)
{
	for (unsigned q = 0; q < _BACKEND_Q_N; q++) {
		for (unsigned i = 0; i < CUDA_MARKS; i++) {
			CUresult r = c->lib->cuEventCreate(&c->queues[q].marks[i].event,
							   CU_EVENT_BLOCKING_SYNC |
								   CU_EVENT_DISABLE_TIMING);

			if (r != CUDA_SUCCESS)
				return r;
		}
	}
	return CUDA_SUCCESS;
}

static CUresult cuda_device_open_memory(struct cuda *c)
{
	const uint64_t norms = _BACKEND_Q_N * SCRATCH_BYTES;
	CUresult r = c->lib->cuMemAlloc(&c->scratch, norms + CUDA_BLOCK * sizeof(float));
	void *pinned = NULL;

	if (r == CUDA_SUCCESS)
		r = c->lib->cuMemAllocHost(&pinned, _BACKEND_Q_N * CUDA_STAGE_BYTES);
	if (r != CUDA_SUCCESS)
		return r;
	c->pinned = pinned;
	c->gradient = c->scratch + norms;
	for (unsigned q = 0; q < _BACKEND_Q_N; q++) {
		c->queues[q].scratch = c->scratch + q * SCRATCH_BYTES;
		c->queues[q].stage.base = c->pinned + q * CUDA_STAGE_BYTES;
	}
	return CUDA_SUCCESS;
}

/* All kernels at once: loading one later may wait for the device. */
static CUresult cuda_device_open_kernels(struct cuda *c)
{
	uint64_t bytes;
	CUresult r = c->lib->cuModuleLoadData(&c->kernels.module, cuda_kernels_image(&bytes));

	for (enum cuda_fn i = 0; r == CUDA_SUCCESS && i < _CUDA_FN_N; i++) {
		int blocks = 0;

		r = c->lib->cuModuleGetFunction(&c->kernels.fn[i], c->kernels.module,
						cuda_fn_name(i));
		if (r == CUDA_SUCCESS)
			r = c->lib->cuOccupancyMaxActiveBlocksPerMultiprocessor(
				&blocks, c->kernels.fn[i], (int)cuda_fn_threads(i), 0);
		c->kernels.per_sm[i] = blocks > 0 ? (unsigned)blocks : 1;
	}
	return r;
}

/* For one block, whose threads only read their words. */
static struct cuda_undo cuda_device_warm_undo(const struct cuda *c)
{
	return (struct cuda_undo){
		.words = c->gradient,
		.old = c->gradient + (uint64_t)cuda_fn_threads(CUDA_FN_ADAM_UNDO) * CUDA_UNDO_WORD,
		.launch = 1,
		.room = cuda_fn_threads(CUDA_FN_ADAM_UNDO)
	};
}

/* Arguments for each kernel with which it does nothing. */
static void cuda_device_warm_args(const struct cuda *c, enum cuda_fn fn, union cuda_args *a)
{
	*a = (union cuda_args){ 0 };
	if (fn == CUDA_FN_CAST)
		a->cast.dst_dtype = a->cast.src_dtype = DTYPE_FP32;
	else if (fn == CUDA_FN_REDUCE || fn == CUDA_FN_REDUCE_MANY)
		a->reduce = (struct cuda_reduce){ .k = 1,
						  .in_dtype = DTYPE_FP32,
						  .sum_dtype = DTYPE_FP32,
						  .out_dtype = DTYPE_FP32 };
	else if (fn == CUDA_FN_REDUCE_ROUND || fn == CUDA_FN_REDUCE_ROUND_MANY)
		a->reduce = (struct cuda_reduce){ .k = 1,
						  .in_dtype = DTYPE_BF16,
						  .sum_dtype = DTYPE_BF16,
						  .out_dtype = DTYPE_BF16 };
	else if (fn == CUDA_FN_ALL_REDUCE || fn == CUDA_FN_ALL_REDUCE_MANY)
		a->all_reduce =
			(struct cuda_all_reduce){ .k = 1, .dtype = DTYPE_FP32, .op = REDUCE_SUM };
	else if (fn == CUDA_FN_FILL)
		a->fill.kind = FILL_CONSTANT;
	else if (fn == CUDA_FN_FOUND_INF)
		a->found_inf = (struct cuda_found_inf){ .dtype = DTYPE_FP32, .found = c->scratch };
	else if (fn == CUDA_FN_NORM) /* writes its partial with any input */
		a->norm.partial = c->scratch;
	else if (fn == CUDA_FN_NORM_POWER)
		a->norm_power = (struct cuda_norm_power){ .partial = c->scratch, .p = 3 };
	else if (fn == CUDA_FN_UNSCALE)
		a->unscale.found = c->scratch;
	else if (fn == CUDA_FN_ADD_ROWS)
		a->add_rows.dtype = DTYPE_FP32;
	else if (fn == CUDA_FN_PACK)
		a->pack.dst_dtype = a->pack.src_dtype = DTYPE_FP32;
	else if (fn == CUDA_FN_ADAM_UNDO)
		a->adam_undo.undo = cuda_device_warm_undo(c);
	else if (fn == CUDA_FN_ADAM_F64_UNDO)
		a->adam_f64_undo.undo = cuda_device_warm_undo(c);
	else if (fn == CUDA_FN_SGD_UNDO)
		a->sgd_undo.undo = cuda_device_warm_undo(c);
	else if (fn == CUDA_FN_SCALE_UNDO)
		a->scale_undo.undo = cuda_device_warm_undo(c);
}

/* The driver loads a kernel at its first launch and may then wait for the device. That must not
 * happen while a queue waits for a trainer, so each kernel is launched now. */
static CUresult cuda_device_warm_kernels(struct cuda *c)
{
	CUresult r = CUDA_SUCCESS;

	for (enum cuda_fn i = 0; r == CUDA_SUCCESS && i < _CUDA_FN_N; i++) {
		union cuda_args args;
		void *params[1] = { &args };

		cuda_device_warm_args(c, i, &args);
		r = c->lib->cuLaunchKernel(c->kernels.fn[i], 1, 1, 1, cuda_fn_threads(i), 1, 1, 0,
					   c->control, params, NULL);
	}
	return r == CUDA_SUCCESS ? c->lib->cuStreamSynchronize(c->control) : r;
}

int cuda_device_open(struct cuda *c, CUdevice device, struct fault *f)
{
	uint64_t bytes = 0;

	c->device = device;
	c->backend.info.ordinal = device;
	snprintf(c->backend.info.id, sizeof(c->backend.info.id), "cuda:%d", device);
	if (!cuda_kernels_image(&bytes) || bytes == 0)
		return fault_set(f, FAULT_INTERNAL, NULL, "this build has no CUDA kernels");
	c->kernels.sms =
		(unsigned)cuda_device_attribute(c, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
	c->kernels.sms = c->kernels.sms ? c->kernels.sms : 1;
	c->reach.rdma = cuda_device_attribute(
		c, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
	if (!cuda_device_attribute(c, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) ||
	    !cuda_device_attribute(c,
				   CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
		return fault_set(f, FAULT_INTERNAL, NULL,
				 "%s cannot share memory by file descriptor", c->backend.info.id);
	if (cuda_device_noted(c, f, cuda_device_fill_info(c), "its properties cannot be read") ||
	    cuda_device_noted(c, f, c->lib->cuDevicePrimaryCtxRetain(&c->context, device),
			      "no context") ||
	    cuda_device_noted(c, f, c->lib->cuCtxSetCurrent(c->context),
			      "its context cannot be used") ||
	    cuda_device_noted(c, f, cuda_device_open_kernels(c), "its kernels cannot be loaded") ||
	    cuda_device_noted(c, f, cuda_device_open_streams(c), "no streams") ||
	    cuda_device_noted(c, f, cuda_device_open_marks(c), "no events") ||
	    cuda_device_noted(c, f, cuda_device_open_memory(c), "no memory") ||
	    cuda_device_noted(c, f, cuda_device_warm_kernels(c), "its kernels cannot be started"))
		return f->code;
	return 0;
}

static void cuda_device_close_queue(struct cuda *c, struct cuda_queue *q)
{
	for (unsigned i = 0; i < CUDA_MARKS; i++)
		if (q->marks[i].event)
			c->lib->cuEventDestroy(q->marks[i].event);
	if (q->stream)
		c->lib->cuStreamDestroy(q->stream);
}

/* A lost device refuses all of it, and frees it with the context. */
void cuda_device_close(struct cuda *c)
{
	if (!c->context)
		return;
	c->lib->cuCtxSetCurrent(c->context);
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		cuda_device_close_queue(c, &c->queues[q]);
	if (c->control)
		c->lib->cuStreamDestroy(c->control);
	if (c->pinned)
		c->lib->cuMemFreeHost(c->pinned);
	if (c->scratch)
		c->lib->cuMemFree(c->scratch);
	if (c->kernels.module)
		c->lib->cuModuleUnload(c->kernels.module);
	c->lib->cuCtxSetCurrent(NULL);
	c->lib->cuDevicePrimaryCtxRelease(c->device);
	c->context = NULL;
}

#endif
