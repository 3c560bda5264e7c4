/*
 * Modules, functions and launches.
 *
 * Any image that looks like one is accepted, and holds exactly shardd's kernels. A launch
 * is checked as a device would check it, and for what shardd's kernels promise: one
 * argument, a struct by value.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_kernels.h"
#include "sim_impl.h"

#define SMS_PER_DEVICE_THREADS 2048

struct function {
	const char *name;
	size_t args; /* bytes */
};

static const struct function functions[_CUDA_FN_N] = {
	[CUDA_FN_CAST] = { "shardd_cast", sizeof(struct cuda_cast) },
	[CUDA_FN_REDUCE] = { "shardd_reduce", sizeof(struct cuda_reduce) },
	[CUDA_FN_REDUCE_MANY] = { "shardd_reduce_many", sizeof(struct cuda_reduce_many) },
	[CUDA_FN_REDUCE_ROUND] = { "shardd_reduce_round", sizeof(struct cuda_reduce) },
	[CUDA_FN_REDUCE_ROUND_MANY] = { "shardd_reduce_round_many",
					sizeof(struct cuda_reduce_many) },
	[CUDA_FN_ALL_REDUCE] = { "shardd_all_reduce", sizeof(struct cuda_all_reduce) },
	[CUDA_FN_ALL_REDUCE_MANY] = { "shardd_all_reduce_many",
				      sizeof(struct cuda_all_reduce_many) },
	[CUDA_FN_ADAMW] = { "shardd_adamw", sizeof(struct cuda_adamw) },
	[CUDA_FN_ADAM] = { "shardd_adam", sizeof(struct cuda_adam) },
	[CUDA_FN_ADAM_ANY] = { "shardd_adam_any", sizeof(struct cuda_adam_any) },
	[CUDA_FN_ADAM_F64] = { "shardd_adam_f64", sizeof(struct cuda_adam_f64) },
	[CUDA_FN_SGD] = { "shardd_sgd", sizeof(struct cuda_sgd) },
	[CUDA_FN_NORM] = { "shardd_norm", sizeof(struct cuda_norm) },
	[CUDA_FN_NORM_POWER] = { "shardd_norm_power", sizeof(struct cuda_norm_power) },
	[CUDA_FN_SCALE] = { "shardd_scale", sizeof(struct cuda_scale) },
	[CUDA_FN_FILL] = { "shardd_fill", sizeof(struct cuda_fill) },
	[CUDA_FN_FOUND_INF] = { "shardd_found_inf", sizeof(struct cuda_found_inf) },
	[CUDA_FN_PACK] = { "shardd_pack", sizeof(struct cuda_pack) },
	[CUDA_FN_CLAMP] = { "shardd_clamp", sizeof(struct cuda_clamp) },
	[CUDA_FN_UNSCALE] = { "shardd_unscale", sizeof(struct cuda_unscale) },
	[CUDA_FN_ADD_ROWS] = { "shardd_add_rows", sizeof(struct cuda_add_rows) },
	[CUDA_FN_ASSEMBLE] = { "shardd_assemble", sizeof(struct cuda_assemble) },
	[CUDA_FN_ADAM_UNDO] = { "shardd_adam_undo", sizeof(struct cuda_adam_undo) },
	[CUDA_FN_ADAM_F64_UNDO] = { "shardd_adam_f64_undo", sizeof(struct cuda_adam_f64_undo) },
	[CUDA_FN_SGD_UNDO] = { "shardd_sgd_undo", sizeof(struct cuda_sgd_undo) },
	[CUDA_FN_SCALE_UNDO] = { "shardd_scale_undo", sizeof(struct cuda_scale_undo) },
	[CUDA_FN_SPIN] = { "shardd_spin", sizeof(struct cuda_spin) },
};

struct entry {
	uint32_t live;
	struct module *module;
	unsigned fn;
};

struct module {
	uint32_t live;
	struct ctx *ctx;
	struct entry *entries[_CUDA_FN_N];
};

static struct objects modules = { .what = "module", .size = sizeof(struct module) };
static struct objects entries = { .what = "kernel", .size = sizeof(struct entry) };

static bool is_image(const void *image)
{
	static const uint32_t magics[] = { 0xba55ed50, 0x466243b1, 0x464c457f }; /* fatbin, its
								wrapper, ELF */
	uint32_t first;

	memcpy(&first, image, sizeof(first));
	for (unsigned i = 0; i < sizeof(magics) / sizeof(magics[0]); i++)
		if (first == magics[i])
			return true;
	return false;
}

CUresult cuModuleLoadData(CUmodule *ret, const void *image)
{
	struct ctx *c;
	struct module *m;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	if (r)
		return r;
	if (!image)
		return CUDA_ERROR_INVALID_VALUE;
	if (!is_image(image))
		return CUDA_ERROR_INVALID_IMAGE;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	m = objects_new(&modules);
	m->ctx = c;
	pthread_mutex_unlock(&sim_lock);
	*ret = (CUmodule)m;
	return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module)
{
	struct ctx *c;
	struct module *m;
	CUresult r = sim_enter(__func__, NEED_END, &c);

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	sim_no_waits(__func__);
	m = objects_get(&modules, module, __func__);
	if (m)
		m->live = 0;
	for (unsigned i = 0; m && i < _CUDA_FN_N; i++)
		if (m->entries[i])
			m->entries[i]->live = 0;
	pthread_mutex_unlock(&sim_lock);
	return m ? sim_leave(c) : CUDA_ERROR_INVALID_HANDLE;
}

static CUfunction entry(struct module *m, unsigned fn)
{
	if (!m->entries[fn]) {
		struct entry *e = objects_new(&entries);

		e->module = m;
		e->fn = fn;
		m->entries[fn] = e;
	}
	return (CUfunction)m->entries[fn];
}

CUresult cuModuleGetFunction(CUfunction *ret, CUmodule module, const char *name)
{
	struct module *m;
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	m = objects_get(&modules, module, __func__);
	r = m ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE;
	for (unsigned i = 0; m && i < _CUDA_FN_N; i++) {
		if (strcmp(functions[i].name, name) != 0)
			continue;
		*ret = entry(m, i);
		r = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static struct entry *entry_get(CUfunction f, const char *function)
{
	struct entry *e;

	pthread_mutex_lock(&sim_lock);
	e = objects_get(&entries, f, function);
	pthread_mutex_unlock(&sim_lock);
	return e;
}

CUresult cuFuncGetAttribute(int *ret, CUfunction_attribute attribute, CUfunction f)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);

	if (r)
		return r;
	if (!entry_get(f, __func__))
		return CUDA_ERROR_INVALID_HANDLE;
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
		*ret = 1024;
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_NUM_REGS:
		*ret = 32;
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
	case CU_FUNC_ATTRIBUTE_PTX_VERSION:
		*ret = 90;
		return CUDA_SUCCESS;
	default:
		*ret = 0;
		return attribute < CU_FUNC_ATTRIBUTE_MAX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *ret, CUfunction f, int threads,
						     size_t shared)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);

	(void)shared;
	if (r)
		return r;
	if (!entry_get(f, __func__))
		return CUDA_ERROR_INVALID_HANDLE;
	if (threads < 1)
		return CUDA_ERROR_INVALID_VALUE;
	*ret = threads > 1024 ? 0 : SMS_PER_DEVICE_THREADS / threads;
	return CUDA_SUCCESS;
}

/* -- launches ------------------------------------------------------------------------------ */

struct launch {
	unsigned fn, blocks;
	_Alignas(16) char args[];
};

static void launch_run(struct stream *s, struct item *item)
{
	const struct launch *l = (void *)item->payload;

	(void)s;
	kernel_run(l->fn, l->args, l->blocks);
}

static bool possible(const unsigned grid[3], const unsigned block[3], unsigned shared)
{
	return grid[0] >= 1 && grid[0] <= INT32_MAX && grid[1] >= 1 && grid[1] <= 65535 &&
	       grid[2] >= 1 && grid[2] <= 65535 && block[0] >= 1 && block[1] >= 1 &&
	       block[2] >= 1 && block[0] <= 1024 && block[1] <= 1024 && block[2] <= 64 &&
	       (uint64_t)block[0] * block[1] * block[2] <= 1024 && shared <= 48u << 10;
}

static CUresult launch(const struct entry *e, struct stream *s, unsigned blocks, const void *args)
{
	size_t bytes = functions[e->fn].args;
	struct item *item;
	struct launch *l;
	uint64_t seq;

	if (!s || s->ctx != e->module->ctx)
		return CUDA_ERROR_INVALID_HANDLE;
	item = item_new(launch_run, functions[e->fn].name, sizeof(*l) + bytes);
	l = (void *)item->payload;
	l->fn = e->fn;
	l->blocks = blocks;
	memcpy(l->args, args, bytes);
	seq = stream_put(s, item);
	if (sim_env("CUDA_LAUNCH_BLOCKING", 0)) /* also behind a wait that nobody ends */
		stream_wait(s, seq);
	return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
			unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
			CUstream stream, void **params, void **extra)
{
	const unsigned grid[3] = { gx, gy, gz }, block[3] = { bx, by, bz };
	struct entry *e;
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	if (r)
		return r;
	e = entry_get(f, __func__);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!possible(grid, block, shared) || extra || !params || !params[0])
		return CUDA_ERROR_INVALID_VALUE;
	if (gy != 1 || gz != 1 || by != 1 || bz != 1)
		sim_breach("cuLaunchKernel: %s is a kernel of one dimension",
			   functions[e->fn].name);
	sim_device_launch(c);
	if (c->error)
		return (CUresult)c->error;
	pthread_mutex_lock(&sim_lock);
	r = launch(e, stream_get(stream, c, __func__), gx, params[0]);
	pthread_mutex_unlock(&sim_lock);
	return r;
}
