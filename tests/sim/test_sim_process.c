/* The simulated libcuda: memory, values, events and time of several processes. */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_kernels.h"
#include "fix.h"

TestSuite(sim_process, .init = fix_init, .timeout = 30);

#define GEQ CU_STREAM_WAIT_VALUE_GEQ
#define IPC CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

static void step(int fd)
{
	tell(fd, "x", 1, -1);
}

static void await_step(int fd)
{
	char c;

	hear(fd, &c, 1);
}

/* -- descriptors -------------------------------------------------------------------------- */

static void give_slab(int fd)
{
	struct slab s;
	int memory;

	fix_open();
	s = slab_new(4 * MIB);
	put32(s.addr, 1, MIB);
	memory = slab_export(&s);
	tell(fd, &s.bytes, sizeof(s.bytes), memory);
	await_step(fd);
	IS(get32(s.addr), 2);
	step(fd);
}

Test(sim_process, shares_memory_by_descriptor)
{
	struct child c = child_start(give_slab);
	struct slab s;
	size_t bytes;
	int fd = hear(c.fd, &bytes, sizeof(bytes));

	NEED(fd >= 0);
	fix_open();
	s = slab_import(fd, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	close(fd);
	IS(get32(s.addr + 4 * MIB - 4), 1);
	put32(s.addr, 2, 1);
	step(c.fd);
	await_step(c.fd);
	child_end(&c);
	IS(get32(s.addr), 2); /* it outlives the process that made it */
	slab_free(&s);
}

Test(sim_process, keeps_memory_that_only_a_descriptor_names)
{
	struct child c = child_start(give_slab);
	struct slab s;
	size_t bytes;
	int fd = hear(c.fd, &bytes, sizeof(bytes));

	child_kill(&c);
	fix_open();
	s = slab_import(fd, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ);
	close(fd);
	IS(get32(s.addr + 1024), 1);
}

/* -- values -------------------------------------------------------------------------------- */

/* Answers each value written to word 0 with the same one in word 64. */
static void echo(int fd)
{
	struct slab s;
	CUstream q;
	int memory;

	fix_open();
	s = slab_new(2 * MIB);
	put32(s.addr, 0, 1024);
	memory = slab_export(&s);
	q = stream_new();
	for (uint64_t i = 1; i <= 50; i++) {
		OK(cu->cuStreamWaitValue64(q, s.addr, i, GEQ));
		OK(cu->cuStreamWriteValue64(q, s.addr + 64, i, 0));
	}
	tell(fd, "m", 1, memory);
	OK(cu->cuStreamSynchronize(q));
}

Test(sim_process, orders_streams_of_two_processes_by_values)
{
	struct child c = child_start(echo);
	struct slab s;
	CUstream q;
	char m;
	int fd = hear(c.fd, &m, 1);

	fix_open();
	s = slab_import(fd, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	close(fd);
	q = stream_new();
	for (uint64_t i = 1; i <= 50; i++) {
		OK(cu->cuStreamWriteValue64(q, s.addr, i, 0));
		OK(cu->cuStreamWaitValue64(q, s.addr + 64, i, GEQ));
		OK(cu->cuStreamSynchronize(q));
		IS(get64(s.addr + 64), i);
	}
	child_end(&c);
}

/* Waits for a process that dies: only the value frees it. */
static void never_writes(int fd)
{
	struct slab s;
	CUstream q;
	int memory;

	fix_open();
	s = slab_new(2 * MIB);
	put32(s.addr, 0, 1024);
	q = stream_new();
	OK(cu->cuStreamWaitValue64(q, s.addr + 512, 1, GEQ));
	OK(cu->cuStreamWriteValue64(q, s.addr, 1, 0));
	memory = slab_export(&s);
	tell(fd, "m", 1, memory);
	pause();
}

Test(sim_process, frees_who_waits_for_the_dead_by_a_value)
{
	struct child c = child_start(never_writes);
	CUstream q, never_blocked;
	struct slab s;
	char m;
	int fd = hear(c.fd, &m, 1);

	fix_open();
	s = slab_import(fd, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	close(fd);
	q = stream_new();
	never_blocked = stream_new();
	OK(cu->cuStreamWaitValue64(q, s.addr, 1, GEQ));
	child_kill(&c);
	OK(cu->cuStreamSynchronize(never_blocked));
	IS(cu->cuStreamQuery(q), CUDA_ERROR_NOT_READY);
	OK(cu->cuStreamWriteValue64(never_blocked, s.addr, INT64_MAX, 0));
	OK(cu->cuStreamSynchronize(q));
}

/* -- legacy handles --------------------------------------------------------------------------- */

static CUdeviceptr ipc_memory(CUipcMemHandle *ret)
{
	CUdeviceptr p;

	OK(cu->cuMemAlloc(&p, 2 * MIB));
	put32(p, 11, 1024);
	OK(cu->cuIpcGetMemHandle(ret, p));
	return p;
}

/* One handle, stale after the first step; ends after the second. */
static void give_handle(int fd)
{
	CUipcMemHandle h;
	CUdeviceptr p;

	fix_open();
	p = ipc_memory(&h);
	tell(fd, &h, sizeof(h), -1);
	await_step(fd);
	IS(get32(p), 12);
	OK(cu->cuMemFree(p));
	step(fd);
	await_step(fd);
}

Test(sim_process, shares_memory_by_handle)
{
	struct child c = child_start(give_handle);
	CUdeviceptr p, again;
	CUipcMemHandle h, bad;
	unsigned before;

	hear(c.fd, &h, sizeof(h));
	fix_open();
	before = descriptors();
	IS(cu->cuIpcOpenMemHandle(&p, h, 0), CUDA_ERROR_INVALID_VALUE);
	memset(&bad, 7, sizeof(bad));
	IS(cu->cuIpcOpenMemHandle(&p, bad, IPC), CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuIpcOpenMemHandle(&p, h, IPC));
	OK(cu->cuIpcOpenMemHandle(&again, h, IPC)); /* a reference more */
	NEED(p == again);
	IS(get32(p), 11);
	put32(p, 12, 1);
	IS(cu->cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuIpcCloseMemHandle(p));
	IS(get32(p), 12);
	OK(cu->cuIpcCloseMemHandle(p));
	IS(descriptors(), before);
	step(c.fd);
	await_step(c.fd); /* freed there */
	IS(cu->cuIpcOpenMemHandle(&p, h, IPC), CUDA_ERROR_MAP_FAILED);
	step(c.fd);
	child_end(&c);
}

Test(sim_process, opens_no_handle_of_a_dead_process)
{
	struct child c = child_start(give_handle);
	CUipcMemHandle h;
	CUdeviceptr p;

	hear(c.fd, &h, sizeof(h));
	child_kill(&c);
	fix_open();
	IS(cu->cuIpcOpenMemHandle(&p, h, IPC), CUDA_ERROR_MAP_FAILED);
}

Test(sim_process, makes_handles_of_whole_plain_allocations_only)
{
	CUipcMemHandle h;
	CUdeviceptr p;
	struct slab s;
	unsigned before;

	fix_open();
	before = descriptors();
	s = slab_new(2 * MIB);
	IS(cu->cuIpcGetMemHandle(&h, s.addr), CUDA_ERROR_INVALID_VALUE);
	slab_free(&s);
	p = ipc_memory(&h);
	IS(cu->cuIpcGetMemHandle(&h, p + 256), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuIpcOpenMemHandle(&p, h, IPC), CUDA_ERROR_INVALID_CONTEXT); /* in its maker */
	OK(cu->cuMemFree(p));
	IS(descriptors(), before);
}

static void free_while_open(void)
{
	CUipcMemHandle h;
	CUdeviceptr p;
	struct child c = child_start(give_handle);
	int status;

	hear(c.fd, &h, sizeof(h));
	fix_open();
	OK(cu->cuIpcOpenMemHandle(&p, h, IPC));
	put32(p, 12, 1);
	step(c.fd); /* and there it is freed */
	waitpid(c.pid, &status, 0);
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT)
		abort(); /* as it did */
}

Test(sim_process, notices_memory_freed_while_others_have_it_open)
{
	dies(free_while_open, "another process still has the memory open");
}

/* Run @fn as process 1 of a PID namespace of its own. Says first whether that can be. */
static void nested(int fd, void (*fn)(int fd))
{
	char ok = unshare(CLONE_NEWPID) == 0;
	int status = 0;
	pid_t pid;

	tell(fd, &ok, 1, -1);
	if (!ok)
		return;
	pid = fork();
	if (!pid) {
		NEED(getpid() == 1);
		fn(fd);
		_exit(0);
	}
	NEED(waitpid(pid, &status, 0) == pid);
	IS(status, 0);
}

static void nested_giver(int fd)
{
	nested(fd, give_handle);
}

static void opener(int fd)
{
	CUipcMemHandle h;
	CUdeviceptr p;

	hear(fd, &h, sizeof(h));
	fix_open();
	IS(cu->cuIpcOpenMemHandle(&p, h, IPC), CUDA_ERROR_INVALID_CONTEXT);
}

static void nested_opener(int fd)
{
	nested(fd, opener);
}

/* Two containers: both processes are number 1. */
Test(sim_process, opens_no_handle_of_a_process_with_the_same_number)
{
	struct child giver, taker;
	CUipcMemHandle h;
	CUdeviceptr p;
	char can;

	giver = child_start(nested_giver);
	hear(giver.fd, &can, 1);
	if (!can)
		cr_skip_test("no right to make PID namespaces");
	hear(giver.fd, &h, sizeof(h));
	taker = child_start(nested_opener);
	hear(taker.fd, &can, 1);
	tell(taker.fd, &h, sizeof(h), -1);
	child_end(&taker);
	fix_open(); /* another number: it works across namespaces */
	OK(cu->cuIpcOpenMemHandle(&p, h, IPC));
	put32(p, 12, 1);
	OK(cu->cuIpcCloseMemHandle(p));
	step(giver.fd);
	await_step(giver.fd);
	step(giver.fd);
	child_end(&giver);
}

/* -- events -------------------------------------------------------------------------------------- */

static CUevent ipc_event(void)
{
	CUevent e;

	OK(cu->cuEventCreate(&e, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
	return e;
}

/* Records behind a gate that opens when told. */
static void give_event(int fd)
{
	CUipcEventHandle h;
	struct slab gate;
	CUstream q, other;
	CUevent e;

	fix_open();
	e = ipc_event();
	gate = slab_new(2 * MIB);
	put32(gate.addr, 0, 16);
	q = stream_new();
	other = stream_new();
	OK(cu->cuIpcGetEventHandle(&h, e));
	tell(fd, &h, sizeof(h), -1);
	await_step(fd);
	OK(cu->cuStreamWaitValue64(q, gate.addr, 1, GEQ));
	OK(cu->cuEventRecord(e, q));
	step(fd);
	await_step(fd);
	OK(cu->cuStreamWriteValue64(other, gate.addr, 1, 0));
	await_step(fd);
	OK(cu->cuEventDestroy(e));
	step(fd);
	await_step(fd);
}

static CUevent event_open(struct child *c)
{
	CUipcEventHandle h;
	CUevent e;

	hear(c->fd, &h, sizeof(h));
	fix_open();
	OK(cu->cuIpcOpenEventHandle(&e, h));
	return e;
}

Test(sim_process, orders_streams_of_two_processes_by_events)
{
	struct child c = child_start(give_event);
	CUevent e = event_open(&c);
	CUstream q = stream_new();

	OK(cu->cuStreamWaitEvent(q, e, 0)); /* not recorded yet: nothing to wait for */
	OK(cu->cuStreamSynchronize(q));
	step(c.fd);
	await_step(c.fd);
	OK(cu->cuStreamWaitEvent(q, e, 0));
	IS(cu->cuEventQuery(e), CUDA_ERROR_NOT_READY);
	IS(cu->cuStreamQuery(q), CUDA_ERROR_NOT_READY);
	step(c.fd);
	OK(cu->cuEventSynchronize(e));
	OK(cu->cuStreamSynchronize(q));
	OK(cu->cuEventDestroy(e));
	step(c.fd);
	await_step(c.fd);
	step(c.fd);
	child_end(&c);
}

static void use_after_their_end(void)
{
	struct child c = child_start(give_event);
	CUevent e = event_open(&c);

	for (unsigned i = 0; i < 3; i++)
		step(c.fd);
	await_step(c.fd);
	await_step(c.fd); /* destroyed there */
	cu->cuEventQuery(e);
}

Test(sim_process, keeps_the_rules_of_event_handles)
{
	CUipcEventHandle h;
	CUevent e, opened;

	dies(use_after_their_end, "cuEventQuery");
	fix_open();
	OK(cu->cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	IS(cu->cuIpcGetEventHandle(&h, e), CUDA_ERROR_INVALID_HANDLE);
	e = ipc_event();
	OK(cu->cuIpcGetEventHandle(&h, e));
	IS(cu->cuIpcOpenEventHandle(&opened, h), CUDA_ERROR_INVALID_CONTEXT); /* in its maker */
}

/* -- time ------------------------------------------------------------------------------------------- */

#define SPIN_NS 40000000u

static void spin(void)
{
	static const uint32_t image[16] = { 0xba55ed50 };
	struct cuda_spin a = { .nanoseconds = SPIN_NS };
	void *params[] = { &a };
	CUfunction f;
	CUmodule m;

	OK(cu->cuModuleLoadData(&m, image));
	OK(cu->cuModuleGetFunction(&f, m, "shardd_spin"));
	OK(cu->cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL));
	OK(cu->cuStreamSynchronize(NULL));
}

static void spinner(int fd)
{
	fix_open();
	step(fd);
	await_step(fd);
	spin();
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Both kernels, from the first begin to the last end. */
static uint64_t both(void)
{
	struct child a = child_start(spinner), b = child_start(spinner);
	uint64_t begin;

	await_step(a.fd);
	await_step(b.fd);
	begin = now_ns();
	step(a.fd);
	step(b.fd);
	child_end(&a);
	child_end(&b);
	return now_ns() - begin;
}

Test(sim_process, lets_processes_take_turns)
{
	cr_assert_geq(both(), 2 * SPIN_NS);
}

Test(sim_process, lets_processes_run_together_under_mps)
{
	uint64_t best = UINT64_MAX;

	setenv("SHARDD_SIM_MPS", "1", 1);
	/* on a busy machine one attempt may be late */
	for (unsigned i = 0; i < 5 && best >= 2 * SPIN_NS; i++) {
		uint64_t t = both();

		best = t < best ? t : best;
	}
	cr_assert_lt(best, 2 * SPIN_NS);
}
