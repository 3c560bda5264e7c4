#include "gpufix.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "cuda_kernels.h"

bool gpu_simulated(void)
{
	const char *library = getenv("SHARDD_LIBCUDA");

	return library && *library;
}

void gpu_set(const char *name, const char *value)
{
	if (!train_on_host() && !gpu_simulated())
		cr_skip_test("only the simulator knows %s", name);
	if (value)
		setenv(name, value, 1);
	else
		unsetenv(name);
}

unsigned gpu_count(void)
{
	static const char *const status[] = { "status", NULL };
	json_t *s = daemonfix_ctl(&trainfix, status);
	unsigned n = (unsigned)json_array_size(json_object_get(s, "devices"));

	json_decref(s);
	return n;
}

void gpu_begin(unsigned devices, const char *const *args)
{
	char text[16];
	unsigned there;

	if (train_on_host())
		cr_skip_test("no GPU: SHARDD_TEST_BACKEND is not cuda");
	snprintf(text, sizeof(text), "%u", devices);
	if (gpu_simulated())
		setenv("SHARDD_SIM_DEVICES", text, 1);
	failfix_begin(args);
	there = gpu_count();
	if (there >= devices)
		return;
	failfix_end();
	cr_skip_test("needs %u GPUs, there are %u", devices, there);
}

void gpu_end(void)
{
	failfix_end();
}

void gpu_uuid(unsigned device, char ret[48])
{
	static const char *const status[] = { "status", NULL };
	json_t *s = daemonfix_ctl(&trainfix, status);
	json_t *d = json_array_get(json_object_get(s, "devices"), device);
	const char *uuid = json_string_value(json_object_get(d, "uuid"));

	cr_assert(uuid && strncmp(uuid, "GPU-", 4) == 0, "device %u has no UUID", device);
	snprintf(ret, 48, "%s", uuid);
	json_decref(s);
}

unsigned gpu_of(const struct gpu_layout *l, uint32_t rank)
{
	return l->in_turn ? rank % l->devices : rank * l->devices / l->world;
}

/* ------------------------------------------------------------------- trainers */

shardd_client *gpu_connect(const struct trainer *t, unsigned device)
{
	char id[32];
	struct shardd_options o = {
		.size = sizeof(o), .socket = t->socket, .name = "test", .device = id
	};
	shardd_client *c = NULL;

	snprintf(id, sizeof(id), "cuda:%u", device);
	TRAIN_OK(shardd_connect(&o, &c, &train_err));
	return c;
}

shardd_client *gpu_join(const struct trainer *t, unsigned device)
{
	shardd_client *c = gpu_connect(t, device);
	struct shardd_info info = { .size = sizeof(info) };
	char id[32];

	train_join_as(c, t, SHARDD_EPHEMERAL);
	snprintf(id, sizeof(id), "cuda:%u", device);
	TRAIN_OK(shardd_get_info(c, &info, &train_err));
	TRAINER_CHECK(strcmp(info.device.id, id) == 0 && strcmp(info.device.backend, "cuda") == 0);
	return c;
}

#ifdef SHARDD_CUDA

void gpu_ok(const struct gpu *g, CUresult r, const char *call, const char *file, int line)
{
	char text[256];

	if (r != CUDA_SUCCESS)
		fprintf(stderr, "%s\n", cuda_lib_text(g->cu, r, text, sizeof(text)));
	trainer_check(r == CUDA_SUCCESS, call, file, line);
}

void gpu_open(struct gpu *g, unsigned device)
{
	uint64_t bytes;
	char why[256] = "";
	CUmodule module;

	if (cuda_lib_open(&g->cu, why, sizeof(why)) != 0)
		fprintf(stderr, "%s\n", why);
	TRAINER_CHECK(!*why);
	GPU_OK(g, g->cu->cuDeviceGet(&g->device, (int)device));
	GPU_OK(g, g->cu->cuDevicePrimaryCtxRetain(&g->context, g->device));
	GPU_OK(g, g->cu->cuCtxSetCurrent(g->context));
	GPU_OK(g, g->cu->cuModuleLoadData(&module, cuda_kernels_image(&bytes)));
	GPU_OK(g, g->cu->cuModuleGetFunction(&g->spin, module, cuda_fn_name(CUDA_FN_SPIN)));
}

CUstream gpu_stream(const struct gpu *g)
{
	CUstream s;

	GPU_OK(g, g->cu->cuStreamCreateWithPriority(&s, CU_STREAM_NON_BLOCKING, 0));
	return s;
}

void gpu_spin(const struct gpu *g, CUstream stream, unsigned us)
{
	struct cuda_spin spin = { .nanoseconds = us * 1000ull };
	void *args[] = { &spin };

	GPU_OK(g, g->cu->cuLaunchKernel(g->spin, 1, 1, 1, cuda_fn_threads(CUDA_FN_SPIN), 1, 1, 0,
					stream, args, NULL));
}

void *gpu_pinned(const struct gpu *g, size_t bytes)
{
	void *p;

	GPU_OK(g, g->cu->cuMemAllocHost(&p, bytes));
	memset(p, 0, bytes);
	return p;
}

void gpu_put(const struct gpu *g, CUstream stream, void *dst, const void *pinned, size_t bytes)
{
	GPU_OK(g, g->cu->cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)dst, pinned, bytes, stream));
}

void gpu_get(const struct gpu *g, CUstream stream, void *pinned, const void *src, size_t bytes)
{
	GPU_OK(g, g->cu->cuMemcpyDtoHAsync(pinned, (CUdeviceptr)(uintptr_t)src, bytes, stream));
}

void gpu_block(const struct gpu *g, CUstream stream)
{
	CUdeviceptr word;

	GPU_OK(g, g->cu->cuMemAlloc(&word, 4096));
	GPU_OK(g, g->cu->cuMemsetD8Async(word, 0, 4096, stream));
	GPU_OK(g, g->cu->cuStreamSynchronize(stream));
	GPU_OK(g, g->cu->cuStreamWaitValue64(stream, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
}

void gpu_drain(const struct gpu *g, CUstream stream)
{
	CUresult r = CUDA_ERROR_NOT_READY;

	TRAINER_AWAIT((r = g->cu->cuStreamQuery(stream)) != CUDA_ERROR_NOT_READY, 60);
	GPU_OK(g, r);
}

#endif
