/*
 * Devices and their primary contexts.
 *
 * The machine has SHARDD_SIM_DEVICES devices; CUDA_VISIBLE_DEVICES chooses which of them
 * this process sees and in which order. A context that broke stays so until it was released
 * as often as retained, as CUDA says of a primary context that was reset.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_impl.h"

_Atomic pid_t sim_started_in;

static struct ctx contexts[SIM_DEVICES];
static int physical[SIM_DEVICES];
static unsigned n_devices;
static _Thread_local struct ctx *current;

static unsigned machine_devices(void)
{
	long long n = sim_env("SHARDD_SIM_DEVICES", 1);

	if (n < 0 || n > SIM_DEVICES)
		sim_breach("SHARDD_SIM_DEVICES is %lld: it can be 0 to %d", n, SIM_DEVICES);
	return (unsigned)n;
}

static void uuid_of(int place, unsigned char ret[16])
{
	static const unsigned char base[16] = { 0x51, 0x3d, 0xda, 0x7e, 0x1c, 0x0d, 0x4a, 0x11,
						0x9e, 0x57, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00 };

	memcpy(ret, base, sizeof(base));
	ret[15] = (unsigned char)place;
}

static void uuid_text(int place, char ret[48])
{
	unsigned char u[16];
	size_t at = 4;

	uuid_of(place, u);
	memcpy(ret, "GPU-", 5);
	for (unsigned i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			ret[at++] = '-';
		at += (size_t)snprintf(ret + at, 48 - at, "%02x", u[i]);
	}
}

/* A number, or a UUID or the beginning of one. -1: no such device. */
static int device_named(const char *name, unsigned devices)
{
	char uuid[48];
	char *end;
	long n = strtol(name, &end, 10);

	if (*name && !*end)
		return n >= 0 && n < (long)devices ? (int)n : -1;
	for (unsigned i = 0; i < devices; i++) {
		uuid_text((int)i, uuid);
		if (strlen(name) > 4 && strncmp(uuid, name, strlen(name)) == 0)
			return (int)i;
	}
	return -1;
}

/* As CUDA: everything from the first unknown name on is not seen. */
static void devices_visible(const char *list, unsigned devices)
{
	char *copy = strdup(list);
	char *save = NULL;

	for (char *s = strtok_r(copy, ",", &save); s; s = strtok_r(NULL, ",", &save)) {
		int place = device_named(s, devices);

		if (place < 0 || n_devices == SIM_DEVICES)
			break;
		physical[n_devices++] = place;
	}
	free(copy);
}

static void devices_find(void)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	unsigned devices = machine_devices();

	if (visible)
		devices_visible(visible, devices);
	else
		for (; n_devices < devices; n_devices++)
			physical[n_devices] = (int)n_devices;
	for (unsigned i = 0; i < n_devices; i++)
		contexts[i].device = (int)i;
}

CUresult cuInit(unsigned int flags)
{
	CUresult r = sim_enter(__func__, NEED_NOTHING, NULL);

	if (r)
		return r;
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	if (!sim_started_in) {
		devices_find();
		if (n_devices)
			sim_started_in = getpid();
		else
			r = CUDA_ERROR_NO_DEVICE;
	} else if (sim_started_in != getpid()) {
		r = CUDA_ERROR_NOT_INITIALIZED; /* the child of a fork */
	}
	pthread_mutex_unlock(&sim_lock);
	return r;
}

CUresult cuDriverGetVersion(int *ret)
{
	CUresult r = sim_enter(__func__, NEED_NOTHING, NULL);

	if (r == CUDA_SUCCESS)
		*ret = (int)sim_env("SHARDD_SIM_DRIVER", 13000);
	return r;
}

unsigned sim_devices(void)
{
	return n_devices;
}

int sim_physical(CUdevice device)
{
	return device >= 0 && device < (int)n_devices ? physical[device] : -1;
}

struct ctx *sim_current(void)
{
	return current;
}

struct ctx *sim_ctx(int device)
{
	return &contexts[device];
}

void sim_ctx_break(struct ctx *c, CUresult error)
{
	int none = CUDA_SUCCESS;

	if (!atomic_compare_exchange_strong(&c->error, &none, (int)error))
		return;
	pthread_mutex_lock(&sim_lock);
	stream_wake_all(c);
	pthread_mutex_unlock(&sim_lock);
	sim_kick();
}

/* SHARDD_SIM_LOSE=device:launch or device:launch:error */
void sim_device_launch(struct ctx *c)
{
	const char *env = getenv("SHARDD_SIM_LOSE");
	unsigned long long n = ++c->launches;
	unsigned long long nth;
	int device, error = CUDA_ERROR_ECC_UNCORRECTABLE;

	if (!env || !*env)
		return;
	if (sscanf(env, "%d:%llu:%d", &device, &nth, &error) < 2)
		sim_breach("SHARDD_SIM_LOSE is not device:launch: \"%s\"", env);
	if (device == physical[c->device] && n == nth) {
		sim_note("device %d is lost, as SHARDD_SIM_LOSE says", device);
		sim_ctx_break(c, (CUresult)error);
	}
}

/* -- devices ----------------------------------------------------------------- */

static CUresult device_enter(const char *function, CUdevice device)
{
	CUresult r = sim_enter(function, NEED_START, NULL);

	if (r == CUDA_SUCCESS && (device < 0 || device >= (int)n_devices))
		r = CUDA_ERROR_INVALID_DEVICE;
	return r;
}

CUresult cuDeviceGetCount(int *ret)
{
	CUresult r = sim_enter(__func__, NEED_START, NULL);

	if (r == CUDA_SUCCESS)
		*ret = (int)n_devices;
	return r;
}

CUresult cuDeviceGet(CUdevice *ret, int ordinal)
{
	CUresult r = device_enter(__func__, ordinal);

	if (r == CUDA_SUCCESS)
		*ret = ordinal;
	return r;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice device)
{
	CUresult r = device_enter(__func__, device);

	if (r == CUDA_SUCCESS)
		snprintf(name, (size_t)len, "Simulated GPU %d", physical[device]);
	return r;
}

CUresult cuDeviceGetUuid(CUuuid *ret, CUdevice device)
{
	CUresult r = device_enter(__func__, device);

	if (r == CUDA_SUCCESS)
		uuid_of(physical[device], (unsigned char *)ret->bytes);
	return r;
}

CUresult cuDeviceTotalMem(size_t *ret, CUdevice device)
{
	CUresult r = device_enter(__func__, device);

	if (r == CUDA_SUCCESS)
		*ret = (size_t)sim_env("SHARDD_SIM_MEMORY", 4ll << 30);
	return r;
}

CUresult cuDeviceCanAccessPeer(int *ret, CUdevice device, CUdevice peer)
{
	CUresult r = device_enter(__func__, device);

	if (r == CUDA_SUCCESS)
		r = device_enter(__func__, peer);
	if (r == CUDA_SUCCESS)
		*ret = device != peer;
	return r;
}

static int attribute(CUdevice_attribute a, int place)
{
	switch (a) {
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		return 4;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
		return 1024;
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
		return 64;
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
		return INT32_MAX;
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
		return 65535;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
		return 2048;
	case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
		return 32;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
		return 48 << 10;
	case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
	case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
		return 65536;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		return 9;
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
		return 3;
	case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
		return 50 << 20;
	case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
		return 5120;
	case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
		return 3200000;
	case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
		return 1980000;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		return 0x10 + place;
	case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
		return !sim_env("SHARDD_SIM_NO_MEMOPS", 0);
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
	case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
	case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
		return 1;
	default:
		return 0; /* also COMPUTE_MODE (default) and CAN_USE_STREAM_MEM_OPS_V1 */
	}
}

CUresult cuDeviceGetAttribute(int *ret, CUdevice_attribute a, CUdevice device)
{
	CUresult r = device_enter(__func__, device);

	if (r == CUDA_SUCCESS && (a < 1 || a >= CU_DEVICE_ATTRIBUTE_MAX))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r == CUDA_SUCCESS)
		*ret = attribute(a, physical[device]);
	return r;
}

/* -- contexts ------------------------------------------------------------------ */

CUresult cuDevicePrimaryCtxRetain(CUcontext *ret, CUdevice device)
{
	CUresult r = device_enter(__func__, device);

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	if (!contexts[device].retains++)
		contexts[device].error = CUDA_SUCCESS;
	pthread_mutex_unlock(&sim_lock);
	*ret = (CUcontext)&contexts[device];
	return CUDA_SUCCESS;
}

static void end_memory(struct ctx *c)
{
	for (struct range *r = range_first(), *next; r; r = next) {
		uint64_t end = r->addr + r->bytes;

		if (r->kind == RANGE_MALLOC && r->device == c->device)
			range_remove(r);
		next = range_next(end);
	}
}

/* The last release ends everything that belongs to the context. */
CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
	CUresult r = device_enter(__func__, device);
	struct ctx *c;

	if (r)
		return r;
	c = &contexts[device];
	pthread_mutex_lock(&sim_lock);
	if (!c->retains)
		r = CUDA_ERROR_INVALID_CONTEXT;
	else if (!--c->retains) {
		stream_kill_all(c);
		end_memory(c);
	}
	pthread_mutex_unlock(&sim_lock);
	ipc_settle();
	return r;
}

static bool is_context(CUcontext h)
{
	const struct ctx *c = (const struct ctx *)h;

	return c >= contexts && c < contexts + n_devices && c == &contexts[c->device];
}

CUresult cuCtxSetCurrent(CUcontext h)
{
	CUresult r = sim_enter(__func__, NEED_START, NULL);

	if (r)
		return r;
	if (h && !is_context(h))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (h && !((struct ctx *)h)->retains)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	current = (struct ctx *)h;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *ret)
{
	CUresult r = sim_enter(__func__, NEED_START, NULL);

	if (r)
		return r;
	*ret = (CUcontext)current;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *ret)
{
	CUresult r = sim_enter(__func__, NEED_START, NULL);

	if (r)
		return r;
	if (!current)
		return CUDA_ERROR_INVALID_CONTEXT;
	*ret = current->device;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *ret_least, int *ret_greatest)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);

	if (r)
		return r;
	if (ret_least)
		*ret_least = 0;
	if (ret_greatest)
		*ret_greatest = -5;
	return CUDA_SUCCESS;
}
