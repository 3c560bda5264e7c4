/* The simulated libcuda: devices, contexts, memory of one process, failing on request. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fix.h"

TestSuite(sim, .init = fix_init, .timeout = 20);

static const CUmemAllocationProp device_memory = {
	.type = CU_MEM_ALLOCATION_TYPE_PINNED,
	.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
};

static const CUmemAllocationProp shared_memory = {
	.type = CU_MEM_ALLOCATION_TYPE_PINNED,
	.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
	.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
};

/* -- devices and contexts ---------------------------------------------------------- */

Test(sim, has_every_entry)
{
	int n, value;
	char name[64];
	size_t bytes;

	fix_load();
	IS(cu->driver_version, 13000);
	OK(cu->cuDeviceGetCount(&n));
	IS(n, 1);
	OK(cu->cuDeviceGetName(name, sizeof(name), 0));
	cr_assert_str_eq(name, "Simulated GPU 0");
	OK(cu->cuDeviceTotalMem(&bytes, 0));
	IS(bytes, 4ll << 30);
	OK(cu->cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0));
	IS(value, 1);
	IS(cu->cuDeviceGetName(name, sizeof(name), 1), CUDA_ERROR_INVALID_DEVICE);
}

Test(sim, shows_the_devices_chosen)
{
	char third[48], first[48];
	CUdevice d;
	int n;

	setenv("SHARDD_SIM_DEVICES", "3", 1);
	setenv("CUDA_VISIBLE_DEVICES", "2,0", 1);
	fix_load();
	OK(cu->cuDeviceGetCount(&n));
	IS(n, 2);
	OK(cu->cuDeviceGet(&d, 0));
	OK(cuda_lib_uuid(cu, 0, third));
	OK(cuda_lib_uuid(cu, 1, first));
	cr_assert_str_neq(third, first);
	cr_assert_str_eq(third + strlen(third) - 2, "02");
}

Test(sim, does_not_work_in_the_child_of_a_fork)
{
	int status;
	pid_t pid;

	fix_open();
	pid = fork();
	if (!pid)
		_exit(cu->cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
				      cu->cuDeviceGetCount(&status) == CUDA_ERROR_NOT_INITIALIZED
			      ? 0
			      : 1);
	NEED(waitpid(pid, &status, 0) == pid);
	IS(status, 0);
}

Test(sim, shows_devices_by_uuid)
{
	char uuid[48];
	int n;

	setenv("SHARDD_SIM_DEVICES", "4", 1);
	setenv("CUDA_VISIBLE_DEVICES", "GPU-513dda7e-1c0d-4a11-9e57-000000000003,1,9,0", 1);
	fix_load();
	OK(cu->cuDeviceGetCount(&n));
	IS(n, 2);
	OK(cuda_lib_uuid(cu, 0, uuid));
	cr_assert_str_eq(uuid, "GPU-513dda7e-1c0d-4a11-9e57-000000000003");
}

Test(sim, refuses_to_start)
{
	char why[256];

	setenv("SHARDD_SIM_DEVICES", "0", 1);
	IS(cuda_lib_open(&cu, why, sizeof(why)), -ENODEV);
	setenv("SHARDD_SIM_DEVICES", "1", 1);
	setenv("SHARDD_SIM_DRIVER", "12080", 1);
	IS(cuda_lib_open(&cu, why, sizeof(why)), -EPROTO);
	cr_assert(strstr(why, "12.8"), "%s", why);
	unsetenv("SHARDD_SIM_DRIVER");
	IS(cuda_lib_open(&cu, why, sizeof(why)), 0);
}

Test(sim, needs_a_context)
{
	CUdeviceptr p;
	CUcontext ctx, now;
	CUstream s;

	fix_load();
	IS(cu->cuMemAlloc(&p, 64), CUDA_ERROR_INVALID_CONTEXT);
	IS(cu->cuStreamCreateWithPriority(&s, 0, 0), CUDA_ERROR_INVALID_CONTEXT);
	OK(cu->cuDevicePrimaryCtxRetain(&ctx, 0));
	OK(cu->cuCtxSetCurrent(ctx));
	OK(cu->cuCtxGetCurrent(&now));
	NEED(now == ctx);
	OK(cu->cuMemAlloc(&p, 64));
	OK(cu->cuDevicePrimaryCtxRelease(0));
	IS(cu->cuMemAlloc(&p, 64), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	IS(cu->cuDevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
	OK(cu->cuCtxSetCurrent(NULL));
	IS(cu->cuMemAlloc(&p, 64), CUDA_ERROR_INVALID_CONTEXT);
}

/* -- memory ----------------------------------------------------------------------------- */

Test(sim, keeps_the_rules_of_mapping)
{
	CUmemGenericAllocationHandle h, other;
	CUdeviceptr va;
	size_t granularity;
	int fd;

	fix_open();
	OK(cu->cuMemGetAllocationGranularity(&granularity, &device_memory,
					     CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	IS(granularity, 2 * MIB);
	IS(cu->cuMemCreate(&h, MIB, &device_memory, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuMemCreate(&h, 4 * MIB, &device_memory, 0));
	OK(cu->cuMemCreate(&other, 4 * MIB, &device_memory, 0));
	IS(cu->cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
	   CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemAddressReserve(&va, MIB, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuMemAddressReserve(&va, 8 * MIB, 0, 0, 0));
	IS(va % granularity, 0);
	IS(cu->cuMemMap(va, 2 * MIB, 2 * MIB, h, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemMap(va, 8 * MIB, 0, h, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemMap(va + 6 * MIB, 4 * MIB, 0, h, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuMemMap(va, 4 * MIB, 0, h, 0));
	IS(cu->cuMemMap(va + 2 * MIB, 4 * MIB, 0, other, 0), CUDA_ERROR_ALREADY_MAPPED);
	IS(cu->cuMemUnmap(va, 2 * MIB), CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuMemUnmap(va, 4 * MIB));
	OK(cu->cuMemAddressFree(va, 8 * MIB));
	OK(cu->cuMemRelease(h));
	OK(cu->cuMemRelease(other));
}

Test(sim, gives_memory_that_is_not_zero_and_back)
{
	unsigned before;
	struct slab s;
	size_t unused, total;

	fix_open();
	put32(slab_new(2 * MIB).addr, 0, 1);
	before = descriptors();
	s = slab_new(4 * MIB);
	IS(get32(s.addr), 0xa5a5a5a5);
	IS(get32(s.addr + 4 * MIB - 4), 0xa5a5a5a5);
	OK(cu->cuMemGetInfo(&unused, &total));
	IS(total - unused, 6 * MIB);
	slab_free(&s);
	OK(cu->cuMemGetInfo(&unused, &total));
	IS(total - unused, 2 * MIB);
	IS(descriptors(), before);
}

Test(sim, keeps_memory_while_anything_names_it)
{
	struct slab s, again;
	int fd;

	fix_open();
	s = slab_new(2 * MIB);
	put32(s.addr, 77, 4);
	fd = slab_export(&s);
	OK(cu->cuMemRelease(s.handle));
	IS(get32(s.addr), 77);
	OK(cu->cuMemUnmap(s.addr, s.bytes));
	OK(cu->cuMemAddressFree(s.addr, s.bytes));
	again = slab_import(fd, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	close(fd);
	IS(get32(again.addr + 12), 77);
	IS(get32(again.addr + 16), 0xa5a5a5a5);
	slab_free(&again);
}

Test(sim, imports_only_what_was_exported)
{
	CUmemGenericAllocationHandle h;
	int fd = memfd_create("other", MFD_ALLOW_SEALING);

	fix_open();
	NEED(ftruncate(fd, 2 * MIB + 4096) == 0);
	IS(cu->cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd,
					      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
	   CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemImportFromShareableHandle(&h, (void *)(intptr_t)12345,
					      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
	   CUDA_ERROR_INVALID_VALUE);
	close(fd);
}

Test(sim, faults_who_writes_read_only_memory)
{
	struct slab s, reader;
	CUstream q;
	int fd;

	fix_open();
	s = slab_new(2 * MIB);
	put32(s.addr, 5, 1);
	fd = slab_export(&s);
	reader = slab_import(fd, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
	close(fd);
	IS(get32(reader.addr), 5);
	q = stream_new();
	OK(cu->cuMemsetD32Async(reader.addr, 6, 1, q));
	IS(cu->cuStreamSynchronize(q), CUDA_ERROR_ILLEGAL_ADDRESS);
	IS(cu->cuMemsetD32Async(s.addr, 6, 1, q), CUDA_ERROR_ILLEGAL_ADDRESS); /* and so on */
	IS(cu->cuStreamQuery(q), CUDA_ERROR_ILLEGAL_ADDRESS);
	IS(cu->cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
	/* a new context works, and the memory is as it was */
	OK(cu->cuDevicePrimaryCtxRelease(0));
	fix_open();
	IS(get32(s.addr), 5);
}

Test(sim, faults_who_uses_memory_without_access)
{
	CUmemGenericAllocationHandle h;
	struct slab s;
	CUstream q;

	fix_open();
	OK(cu->cuMemCreate(&h, 2 * MIB, &device_memory, 0));
	s = slab_map(h, 2 * MIB, 0);
	q = stream_new();
	OK(cu->cuMemsetD8Async(s.addr, 6, 1, q));
	IS(cu->cuStreamSynchronize(q), CUDA_ERROR_ILLEGAL_ADDRESS);
}

Test(sim, faults_who_goes_too_far)
{
	CUdeviceptr p;
	CUstream q;

	fix_open();
	OK(cu->cuMemAlloc(&p, 1000));
	q = stream_new();
	OK(cu->cuMemsetD8Async(p, 1, 1000, q));
	OK(cu->cuStreamSynchronize(q));
	OK(cu->cuMemsetD8Async(p + 1, 1, 1000, q));
	IS(cu->cuStreamSynchronize(q), CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* The work was queued when the memory was there still. */
Test(sim, faults_who_comes_after_the_unmapping)
{
	struct slab s, flag;
	CUstream q;

	setenv("SHARDD_SIM_ALLOW_WAITS", "1", 1);
	fix_open();
	s = slab_new(2 * MIB);
	flag = slab_new(2 * MIB);
	put64(flag.addr, 0);
	q = stream_new();
	OK(cu->cuStreamWaitValue64(q, flag.addr, 1, CU_STREAM_WAIT_VALUE_GEQ));
	OK(cu->cuMemsetD8Async(s.addr, 1, 8, q));
	slab_free(&s);
	OK(cu->cuStreamWriteValue64(stream_new(), flag.addr, 1, 0));
	IS(cu->cuStreamSynchronize(q), CUDA_ERROR_ILLEGAL_ADDRESS);
}

Test(sim, has_no_device_memory_for_the_cpu)
{
	struct slab s;
	int status;
	pid_t pid = fork();

	if (!pid) {
		setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
		signal(SIGSEGV, SIG_DFL);
		signal(SIGBUS, SIG_DFL);
		fix_open();
		s = slab_new(2 * MIB);
		close(STDERR_FILENO);
		_exit(*(volatile char *)(uintptr_t)s.addr == 0);
	}
	NEED(waitpid(pid, &status, 0) == pid);
	/* killed, or ended by the address sanitizer's handler */
	cr_assert(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) > 1));
}

Test(sim, runs_out_of_memory)
{
	CUmemGenericAllocationHandle h, more;
	CUdeviceptr p;

	setenv("SHARDD_SIM_MEMORY", "16777216", 1);
	fix_open();
	OK(cu->cuMemCreate(&h, 12 * MIB, &device_memory, 0));
	IS(cu->cuMemCreate(&more, 6 * MIB, &device_memory, 0), CUDA_ERROR_OUT_OF_MEMORY);
	IS(cu->cuMemAlloc(&p, 5 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cu->cuMemAlloc(&p, 4 * MIB));
	OK(cu->cuMemRelease(h));
	OK(cu->cuMemCreate(&more, 6 * MIB, &device_memory, 0));
}

Test(sim, knows_what_addresses_are)
{
	CUdeviceptr p, base;
	struct slab s;
	void *host;
	size_t bytes;
	int value;

	fix_open();
	s = slab_new(4 * MIB);
	OK(cu->cuMemAlloc(&p, 3000));
	OK(cu->cuMemAllocHost(&host, 100));
	OK(cu->cuMemGetAddressRange(&base, &bytes, s.addr + 3 * MIB));
	NEED(base == s.addr && bytes == 4 * MIB);
	OK(cu->cuMemGetAddressRange(&base, &bytes, p + 5));
	NEED(base == p && bytes == 3000);
	OK(cu->cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
	IS(value, 1);
	OK(cu->cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
				     s.addr));
	IS(value, 0);
	OK(cu->cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
				     (CUdeviceptr)(uintptr_t)host));
	IS(value, CU_MEMORYTYPE_HOST);
	IS(cu->cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
				     (CUdeviceptr)(uintptr_t)&value),
	   CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuMemFreeHost(host));
	OK(cu->cuMemFree(p));
}

Test(sim, reaches_peers_only_with_access)
{
	CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 },
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUcontext second;
	struct slab s;
	CUstream q;
	int can;

	setenv("SHARDD_SIM_DEVICES", "2", 1);
	fix_open();
	OK(cu->cuDeviceCanAccessPeer(&can, 0, 1));
	IS(can, 1);
	s = slab_new(2 * MIB);
	OK(cu->cuMemSetAccess(s.addr, s.bytes, &access, 1));
	OK(cu->cuDevicePrimaryCtxRetain(&second, 1));
	OK(cu->cuCtxSetCurrent(second));
	q = stream_new();
	OK(cu->cuMemsetD8Async(s.addr, 9, 4, q));
	OK(cu->cuStreamSynchronize(q));
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
	OK(cu->cuMemSetAccess(s.addr, s.bytes, &access, 1));
	OK(cu->cuMemsetD8Async(s.addr, 8, 4, q));
	IS(cu->cuStreamSynchronize(q), CUDA_ERROR_ILLEGAL_ADDRESS);
	/* the other context is unharmed */
	fix_open();
	IS(get32(s.addr), 0x09090909);
}

/* -- breaches --------------------------------------------------------------------------- */

static void release_twice(void)
{
	CUmemGenericAllocationHandle h;

	fix_open();
	OK(cu->cuMemCreate(&h, 2 * MIB, &shared_memory, 0));
	OK(cu->cuMemRelease(h));
	cu->cuMemRelease(h);
}

static void free_twice(void)
{
	CUdeviceptr p;

	fix_open();
	OK(cu->cuMemAlloc(&p, 100));
	OK(cu->cuMemFree(p));
	cu->cuMemFree(p);
}

static void address_free_while_mapped(void)
{
	struct slab s;

	fix_open();
	s = slab_new(2 * MIB);
	cu->cuMemAddressFree(s.addr, s.bytes);
}

static void stream_after_its_end(void)
{
	CUstream s;

	fix_open();
	s = stream_new();
	OK(cu->cuStreamDestroy(s));
	cu->cuStreamQuery(s);
}

static void event_destroyed_twice(void)
{
	CUevent e;

	fix_open();
	OK(cu->cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	OK(cu->cuEventDestroy(e));
	cu->cuEventDestroy(e);
}

Test(sim, notices_objects_used_after_their_end)
{
	dies(release_twice, "cuMemRelease");
	dies(free_twice, "cuMemFree");
	dies(address_free_while_mapped, "cuMemAddressFree");
	dies(stream_after_its_end, "cuStreamQuery");
	dies(event_destroyed_twice, "cuEventDestroy");
}

static CUstream waiting(struct slab *flag)
{
	CUstream q;

	fix_open();
	*flag = slab_new(2 * MIB);
	put64(flag->addr, 0);
	q = stream_new();
	OK(cu->cuStreamWaitValue64(q, flag->addr, 1, CU_STREAM_WAIT_VALUE_GEQ));
	return q;
}

static void alloc_while_waiting(void)
{
	struct slab flag;
	CUdeviceptr p;

	waiting(&flag);
	cu->cuMemAlloc(&p, 100);
}

static void create_while_waiting(void)
{
	CUmemGenericAllocationHandle h;
	struct slab flag;

	waiting(&flag);
	cu->cuMemCreate(&h, 2 * MIB, &shared_memory, 0);
}

static void unmap_while_waiting(void)
{
	struct slab flag, s;

	fix_open();
	s = slab_new(2 * MIB);
	waiting(&flag);
	cu->cuMemUnmap(s.addr, s.bytes);
}

static void load_while_waiting(void)
{
	static const uint32_t image[4] = { 0xba55ed50 };
	struct slab flag;
	CUmodule m;

	waiting(&flag);
	cu->cuModuleLoadData(&m, image);
}

Test(sim, notices_memory_calls_while_a_stream_waits)
{
	dies(alloc_while_waiting, "cuMemAlloc while a stream waits for a value");
	dies(create_while_waiting, "cuMemCreate while a stream waits for a value");
	dies(unmap_while_waiting, "cuMemUnmap while a stream waits for a value");
	dies(load_while_waiting, "cuModuleLoadData while a stream waits for a value");
}

Test(sim, allows_memory_calls_when_no_stream_waits)
{
	struct slab flag;
	CUdeviceptr p;
	CUstream q = waiting(&flag);
	CUstream other = stream_new();

	OK(cu->cuStreamWriteValue64(other, flag.addr, 1, 0));
	OK(cu->cuStreamSynchronize(q));
	OK(cu->cuMemAlloc(&p, 100));
}

/* -- failing on request --------------------------------------------------------------------- */

Test(sim, fails_the_nth_call)
{
	CUdeviceptr p;
	CUstream s;

	setenv("SHARDD_SIM_FAIL", "cuMemAlloc:2,cuStreamQuery:1:719,cuMemAlloc:3:999", 1);
	fix_open();
	OK(cu->cuMemAlloc(&p, 100));
	IS(cu->cuMemAlloc(&p, 100), CUDA_ERROR_OUT_OF_MEMORY);
	IS(cu->cuMemAlloc(&p, 100), CUDA_ERROR_UNKNOWN);
	OK(cu->cuMemAlloc(&p, 100));
	s = stream_new();
	IS(cu->cuStreamQuery(s), CUDA_ERROR_LAUNCH_FAILED);
	OK(cu->cuStreamQuery(s));
}

Test(sim, gives_errors_names)
{
	char text[160];

	fix_load();
	cr_assert_str_eq(cuda_lib_text(cu, CUDA_ERROR_OUT_OF_MEMORY, text, sizeof(text)),
			 "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory");
	cr_assert(strstr(cuda_lib_text(cu, (CUresult)4711, text, sizeof(text)), "unknown"));
}
