/*
 * The client's GPU parts against a process that owns device memory, on the simulator:
 * contexts, mappings of both kinds, copies, and one sentence for each mistake.
 */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client.h"
#include "cuda_context.h"
#include "device.h"
#include "fdcheck.h"
#include "gpupeer.h"
#include "map_cuda.h"

TestSuite(client_cuda, .timeout = 60);

#ifdef SHARDD_CUDA

#define BYTES GPUPEER_SLAB_BYTES

struct world {
	struct gpupeer peer;
	struct cuda *cuda;
	struct map map;
	struct shardd_error err;
};

static void map_begin(struct world *w)
{
	map_init(&w->map);
	map_use(&w->map, &map_cuda_ops, w->cuda);
	cr_assert_eq(map_open(&w->map, w->peer.path, gpupeer_token, GPUPEER_SESSION, &w->err), 0,
		     "%s", w->err.text);
}

static void test_client_cuda_begin(struct world *w)
{
	*w = (struct world){ 0 };
	gpupeer_start(&w->peer, 0, false);
	cr_assert_eq(cuda_open(w->peer.uuid, false, &w->cuda, &w->err), 0, "%s", w->err.text);
	map_begin(w);
}

static void test_client_cuda_end(struct world *w)
{
	map_deinit(&w->map);
	w->cuda = cuda_close(w->cuda);
	gpupeer_stop(&w->peer);
}

static int address(struct world *w, uint32_t slab, bool writable, void **ret)
{
	struct map_place place = { .slab = slab, .bytes = BYTES, .writable = writable };

	if (slab == GPUPEER_IPC) {
		place.ipc = w->peer.ipc;
		place.slab_bytes = GPUPEER_IPC_BYTES;
	}
	return map_address(&w->map, &place, -1, ret, &w->err);
}

static void expect_said(const struct world *w, const char *words)
{
	cr_expect_not_null(strstr(w->err.text, words), "no \"%s\" in: %s", words, w->err.text);
}

/* A library and a device of our own, as a trainer has them. */
static const struct cuda_lib *own_context(int device, CUcontext *ret)
{
	const struct cuda_lib *cu;
	char why[256];
	CUdevice d;

	cr_assert_eq(cuda_lib_open(&cu, why, sizeof(why)), 0, "%s", why);
	cr_assert_eq(cu->cuDeviceGet(&d, device), CUDA_SUCCESS);
	cr_assert_eq(cu->cuDevicePrimaryCtxRetain(ret, d), CUDA_SUCCESS);
	cr_assert_eq(cu->cuCtxSetCurrent(*ret), CUDA_SUCCESS);
	return cu;
}

/* ------------------------------------------------------------------ mappings */

static void check_copies(struct world *w, enum gpupeer_slab slab)
{
	uint8_t *mine = malloc(BYTES);
	void *at = NULL, *again = NULL;

	cr_assert_eq(address(w, slab, true, &at), 0, "%s", w->err.text);
	gpupeer_fill(&w->peer, slab, 7);
	cr_assert_eq(map_read(&w->map, mine, at, BYTES, &w->err), 0, "%s", w->err.text);
	for (size_t i = 0; i < BYTES; i++)
		cr_assert_eq(mine[i], 7);
	memset(mine, 9, BYTES);
	cr_assert_eq(map_write(&w->map, at, mine, BYTES, &w->err), 0, "%s", w->err.text);
	cr_expect(gpupeer_holds(&w->peer, slab, 9));
	cr_assert_eq(address(w, slab, true, &again), 0);
	cr_expect_eq(again, at, "mapped once");
	free(mine);
}

Test(client_cuda, what_is_written_is_what_the_owner_reads)
{
	struct world w;

	test_client_cuda_begin(&w);
	check_copies(&w, GPUPEER_WRITABLE);
	check_copies(&w, GPUPEER_IPC);
	test_client_cuda_end(&w);
}

Test(client_cuda, a_read_only_slab_can_be_read_only)
{
	struct world w;
	uint8_t byte = 1;
	void *at;

	test_client_cuda_begin(&w);
	gpupeer_fill(&w.peer, GPUPEER_READ_ONLY, 5);
	cr_expect_eq(address(&w, GPUPEER_READ_ONLY, true, &at), -SHARDD_INTERNAL);
	cr_assert_eq(address(&w, GPUPEER_READ_ONLY, false, &at), 0, "%s", w.err.text);
	cr_expect_eq(map_read(&w.map, &byte, at, 1, &w.err), 0);
	cr_expect_eq(byte, 5);
	cr_expect_eq(map_write(&w.map, at, &byte, 1, &w.err), -SHARDD_INVALID_ARGUMENT);
	expect_said(&w, "read-only");
	test_client_cuda_end(&w);
}

Test(client_cuda, pointers_that_were_not_handed_out_are_refused)
{
	struct world w;
	uint8_t bytes[16] = { 0 };
	void *at;

	test_client_cuda_begin(&w);
	cr_assert_eq(address(&w, GPUPEER_WRITABLE, true, &at), 0, "%s", w.err.text);
	cr_expect_eq(map_write(&w.map, bytes, bytes, 16, &w.err), -SHARDD_INVALID_ARGUMENT);
	expect_said(&w, "not all in memory that the daemon handed out");
	cr_expect_eq(map_read(&w.map, bytes, (char *)at + BYTES - 8, 16, &w.err),
		     -SHARDD_INVALID_ARGUMENT);
	cr_expect_eq(map_read(&w.map, bytes, (char *)at - 8, 16, &w.err), -SHARDD_INVALID_ARGUMENT);
	cr_expect_eq(map_read(&w.map, bytes, (char *)at + BYTES - 16, 16, &w.err), 0);
	cr_expect_eq(map_read(&w.map, bytes, (char *)at + BYTES, 0, &w.err), 0);
	test_client_cuda_end(&w);
}

Test(client_cuda, all_is_given_back)
{
	unsigned open = 0;
	struct world w;
	void *at;

	test_client_cuda_begin(&w);
	for (int i = 0; i < 4; i++) {
		for (uint32_t slab = 1; slab < GPUPEER_SLABS; slab++)
			cr_assert_eq(address(&w, slab, false, &at), 0, "%s", w.err.text);
		map_deinit(&w.map);
		w.cuda = cuda_close(w.cuda);
		if (i == 0)
			open = fdcheck_count();
		else
			cr_expect_eq(fdcheck_count(), open);
		cr_assert_eq(cuda_open(w.peer.uuid, false, &w.cuda, &w.err), 0);
		map_begin(&w);
	}
	test_client_cuda_end(&w);
}

/* In a process of its own: the simulator counts calls from its start. Return: 0, or
 * which expectation was not met. */
static int refused(const char *fail)
{
	uint32_t slab = strstr(fail, "Ipc") ? GPUPEER_IPC : GPUPEER_READY;
	struct world w = { 0 };
	void *at;

	gpupeer_start(&w.peer, 0, false);
	setenv("SHARDD_SIM_FAIL", fail, 1);
	if (cuda_open(w.peer.uuid, false, &w.cuda, &w.err) < 0)
		return 1;
	map_begin(&w);
	if (address(&w, slab, false, &at) >= 0 || strcmp(w.err.domain, "cuda") != 0 ||
	    !w.err.native || !strstr(w.err.text, "CUDA_ERROR"))
		return 2;
	/* nothing was left behind: it goes the next time */
	if (address(&w, slab, false, &at) != 0)
		return 3;
	test_client_cuda_end(&w);
	return 0;
}

Test(client_cuda, a_refusal_of_the_driver_is_told_and_undone)
{
	static const char *const fails[] = { "cuMemImportFromShareableHandle:1:2",
					     "cuMemAddressReserve:1:2", "cuMemMap:1:1",
					     "cuMemSetAccess:1:1", "cuIpcOpenMemHandle:1:1" };

	for (size_t i = 0; i < sizeof(fails) / sizeof(fails[0]); i++) {
		pid_t pid = fork();
		int status;

		cr_assert_geq(pid, 0);
		if (pid == 0)
			_exit(refused(fails[i]));
		cr_assert_eq(waitpid(pid, &status, 0), pid);
		cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status 0x%x",
			  fails[i], status);
	}
}

/* A lost device answers every call so; the simulator does it at the first copy. */
Test(client_cuda, a_lost_gpu_is_told)
{
	struct world w = { 0 };
	uint8_t byte = 0;
	void *at;

	gpupeer_start(&w.peer, 0, false);
	setenv("SHARDD_SIM_FAIL", "cuMemcpyHtoDAsync:1:214,cuMemcpyDtoHAsync:1:700", 1);
	cr_assert_eq(cuda_open(w.peer.uuid, false, &w.cuda, &w.err), 0, "%s", w.err.text);
	map_begin(&w);
	cr_assert_eq(address(&w, GPUPEER_WRITABLE, true, &at), 0, "%s", w.err.text);
	cr_expect_eq(map_write(&w.map, at, &byte, 1, &w.err), -SHARDD_INTERNAL);
	cr_expect_str_eq(w.err.domain, "cuda");
	cr_expect_eq(w.err.native, 214);
	expect_said(&w, "CUDA_ERROR_ECC_UNCORRECTABLE");
	expect_said(&w, "restart it");
	cr_expect_eq(map_read(&w.map, &byte, at, 1, &w.err), -SHARDD_INTERNAL);
	cr_expect_eq(w.err.native, 700);
	test_client_cuda_end(&w);
}

/* -------------------------------------------------------------------- contexts */

Test(client_cuda, the_current_context_is_used_and_restored)
{
	const struct cuda_lib *cu;
	struct world w = { 0 };
	CUcontext own, now;
	void *at;

	setenv("SHARDD_SIM_DEVICES", "2", 1);
	gpupeer_start(&w.peer, 1, false);
	cu = own_context(1, &own);
	cr_assert_eq(cuda_open(w.peer.uuid, false, &w.cuda, &w.err), 0, "%s", w.err.text);
	cr_expect_eq(w.cuda->context, own);
	map_begin(&w);
	/* from a thread that has none, and from one that has another */
	for (int i = 0; i < 2; i++) {
		CUcontext other = NULL;

		if (i)
			own_context(0, &other);
		cr_assert_eq(cu->cuCtxSetCurrent(other), CUDA_SUCCESS);
		cr_expect_eq(address(&w, i ? GPUPEER_READY : GPUPEER_LATER, false, &at), 0, "%s",
			     w.err.text);
		cr_assert_eq(cu->cuCtxGetCurrent(&now), CUDA_SUCCESS);
		cr_expect_eq(now, other);
	}
	test_client_cuda_end(&w);
	cu->cuCtxGetCurrent(&now);
}

Test(client_cuda, a_context_on_another_gpu_is_told)
{
	struct world w = { 0 };
	char other[CUDA_UUID_BYTES];
	CUcontext own;

	setenv("SHARDD_SIM_DEVICES", "2", 1);
	gpupeer_start(&w.peer, 1, false);
	own_context(0, &own);
	cr_assert(cuda_current_uuid(other));
	cr_expect_str_neq(other, w.peer.uuid);
	cr_expect_eq(cuda_open(w.peer.uuid, false, &w.cuda, &w.err), -SHARDD_FAILED_PRECONDITION);
	expect_said(&w, other);
	expect_said(&w, w.peer.uuid);
	gpupeer_stop(&w.peer);
}

Test(client_cuda, a_gpu_that_is_not_visible_is_told)
{
	struct world w = { 0 };

	setenv("SHARDD_SIM_DEVICES", "2", 1);
	gpupeer_start(&w.peer, 1, false);
	setenv("CUDA_VISIBLE_DEVICES", "0", 1);
	cr_expect_eq(cuda_open(w.peer.uuid, false, &w.cuda, &w.err), -SHARDD_FAILED_PRECONDITION);
	expect_said(&w, "not visible in this process (CUDA_VISIBLE_DEVICES is 0)");
	expect_said(&w, w.peer.uuid);
	gpupeer_stop(&w.peer);
}

Test(client_cuda, a_missing_driver_is_told, .init = fdcheck_begin, .fini = fdcheck_end)
{
	struct world w = { 0 };
	struct cuda *c = NULL;

	setenv("SHARDD_LIBCUDA", "/nonexistent/libcuda.so.1", 1);
	cr_expect_eq(cuda_open("GPU-1", false, &c, &w.err), -SHARDD_FAILED_PRECONDITION);
	expect_said(&w, "GPU-1");
	expect_said(&w, "no NVIDIA driver");
	cr_expect_null(c);
}

Test(client_cuda, the_gpu_in_use_is_known_without_starting_one)
{
	char uuid[CUDA_UUID_BYTES], path[] = SHARDD_SIM_DIR "/libcuda.so.1";
	CUcontext own;

	setenv("SHARDD_LIBCUDA", path, 1);
	cr_expect(!cuda_current_uuid(uuid), "not loaded");
	cr_expect_null(dlopen(path, RTLD_NOW | RTLD_NOLOAD), "nor by asking");
	cr_assert_not_null(dlopen(path, RTLD_NOW));
	cr_expect(!cuda_current_uuid(uuid), "not started");
	own_context(0, &own);
	cr_expect(cuda_current_uuid(uuid));
	cr_expect_eq(strncmp(uuid, "GPU-", 4), 0);
}

/* ----------------------------------------------------------------------- joins */

static int take(struct shardd_client *c, const char *backend, const char *uuid,
		struct shardd_error *err)
{
	Shardd__V1__JoinResponse reply = SHARDD__V1__JOIN_RESPONSE__INIT;
	Shardd__V1__Device device = SHARDD__V1__DEVICE__INIT;

	device.id = "x:0";
	device.backend = (char *)backend;
	device.uuid = (char *)uuid;
	reply.device = &device;
	return device_take(c, &reply, err);
}

Test(client_cuda, a_client_stays_on_its_device)
{
	struct shardd_client c = { .magic = CLIENT_MAGIC, .pid = getpid() };
	struct shardd_device device;
	struct shardd_options o = { .size = sizeof(o) };
	struct shardd_error err;
	Shardd__V1__JoinRequest q = SHARDD__V1__JOIN_REQUEST__INIT;
	Shardd__V1__JobSpec job = SHARDD__V1__JOB_SPEC__INIT;
	struct gpupeer peer;

	gpupeer_start(&peer, 0, false);
	pthread_mutex_init(&c.device_lock, NULL);
	map_init(&c.map);
	q.job = &job;
	cr_assert_eq(device_choose(&c, &o, &err), 0);
	device_ask(&c, &q);
	cr_expect_str_eq(q.device, "", "no context, no wish");
	cr_expect_eq(device_get(&c, &device, &err), -SHARDD_FAILED_PRECONDITION);
	cr_assert_eq(take(&c, "cuda", peer.uuid, &err), 0, "%s", err.text);
	cr_assert_eq(device_get(&c, &device, &err), 0);
	cr_expect_str_eq(device.uuid, peer.uuid);
	cr_expect_str_eq(device.backend, "cuda");
	cr_expect(!device.streams);
	device_ask(&c, &q);
	cr_expect_str_eq(q.device, peer.uuid, "again there");
	cr_expect_eq(take(&c, "cuda", "GPU-2", &err), -SHARDD_FAILED_PRECONDITION);
	cr_expect_not_null(strstr(err.text, "connect again"));
	cr_expect_eq(take(&c, "host", "", &err), -SHARDD_FAILED_PRECONDITION);
	cr_assert_eq(take(&c, "cuda", peer.uuid, &err), 0, "%s", err.text);
	cr_expect_eq(shardd_set_stream(&c, NULL, &err), -SHARDD_FAILED_PRECONDITION);
	cr_expect_not_null(strstr(err.text, "x:0"));
	device_close(&c);
	gpupeer_stop(&peer);
}

Test(client_cuda, options_are_checked)
{
	struct shardd_options o = { .size = sizeof(o) };
	struct shardd_client c = { 0 };
	struct shardd_error err;
	char name[64];

	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = 0;
	o.device = name;
	cr_expect_eq(device_choose(&c, &o, &err), -SHARDD_INVALID_ARGUMENT);
	cr_expect_str_eq(err.field, "options.device");
	o.device = "host:0";
	o.handover = 3;
	cr_expect_eq(device_choose(&c, &o, &err), -SHARDD_INVALID_ARGUMENT);
	cr_expect_str_eq(err.field, "options.handover");
	o.handover = SHARDD_HANDOVER_IPC;
	cr_expect_eq(device_choose(&c, &o, &err), 0);
	cr_expect_str_eq(c.wanted, "host:0");
	cr_expect_eq(c.handover, SHARDD_HANDOVER_IPC);
}

#endif
