/* The simulated libcuda: order inside and between streams, values, events. */
#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fix.h"

TestSuite(sim_stream, .init = fix_init, .timeout = 30);

#define GEQ CU_STREAM_WAIT_VALUE_GEQ

/* A page of words, all zero. */
static CUdeviceptr words(void)
{
	struct slab s = slab_new(2 * MIB);

	put32(s.addr, 0, 1024);
	return s.addr;
}

/* @q stands still until open_gate. */
static void shut_gate(CUstream q, CUdeviceptr gate)
{
	OK(cu->cuStreamWaitValue64(q, gate, 1, GEQ));
}

static void open_gate(CUdeviceptr gate)
{
	CUstream s = stream_new();

	OK(cu->cuStreamWriteValue64(s, gate, 1, 0));
	OK(cu->cuStreamDestroy(s));
}

/* -- order --------------------------------------------------------------------------- */

Test(sim_stream, runs_in_its_own_order)
{
	CUdeviceptr w;
	CUstream q;

	fix_open();
	w = words();
	q = stream_new();
	for (uint32_t i = 1; i <= 200; i++) {
		OK(cu->cuMemsetD32Async(w, i, 1, q));
		OK(cu->cuMemcpyDtoDAsync(w + 4 * i, w, 4, q));
	}
	OK(cu->cuStreamSynchronize(q));
	for (uint32_t i = 1; i <= 200; i++)
		IS(get32(w + 4 * i), i);
}

/* One stream writes, another one copies: a missing wait must show. */
static unsigned wrong_copies(bool wait, unsigned times)
{
	CUdeviceptr w = words();
	CUstream a = stream_new(), b = stream_new();
	CUevent e;
	unsigned wrong = 0;

	OK(cu->cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	for (uint32_t i = 1; i <= times; i++) {
		OK(cu->cuMemsetD32Async(w, i, 1, a));
		OK(cu->cuEventRecord(e, a));
		if (wait)
			OK(cu->cuStreamWaitEvent(b, e, 0));
		OK(cu->cuMemcpyDtoDAsync(w + 64, w, 4, b));
		OK(cu->cuStreamSynchronize(b));
		OK(cu->cuStreamSynchronize(a));
		wrong += get32(w + 64) != i;
	}
	OK(cu->cuEventDestroy(e));
	return wrong;
}

Test(sim_stream, shows_a_missing_wait)
{
	fix_open();
	cr_assert_gt(wrong_copies(false, 300), 0);
}

Test(sim_stream, orders_streams_by_events)
{
	fix_open();
	IS(wrong_copies(true, 300), 0);
}

Test(sim_stream, orders_blocking_streams_by_the_default_stream)
{
	CUdeviceptr w;
	CUstream a, b;

	fix_open();
	w = words();
	OK(cu->cuStreamCreateWithPriority(&a, 0, 0));
	OK(cu->cuStreamCreateWithPriority(&b, 0, -5));
	for (uint32_t i = 1; i <= 100; i++) {
		OK(cu->cuMemsetD32Async(w, i, 1, a));
		OK(cu->cuMemcpyDtoDAsync(w + 64, w, 4, NULL));
		OK(cu->cuMemcpyDtoDAsync(w + 128, w + 64, 4, b));
		OK(cu->cuStreamSynchronize(b));
		IS(get32(w + 128), i);
	}
}

Test(sim_stream, leaves_nonblocking_streams_alone)
{
	CUdeviceptr w;
	CUstream a, other;

	fix_open();
	w = words();
	OK(cu->cuStreamCreateWithPriority(&a, 0, 0));
	other = stream_new();
	shut_gate(a, w);
	OK(cu->cuMemsetD32Async(w + 64, 3, 1, NULL)); /* comes after a */
	OK(cu->cuMemsetD32Async(w + 128, 4, 1, other));
	OK(cu->cuStreamSynchronize(other));
	IS(get32(w + 128), 4);
	IS(get32(w + 64), 0);
	IS(cu->cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
	open_gate(w);
	OK(cu->cuStreamSynchronize(NULL));
	IS(get32(w + 64), 3);
}

Test(sim_stream, finishes_after_it_was_destroyed)
{
	CUdeviceptr w;
	CUstream q;

	fix_open();
	w = words();
	q = stream_new();
	shut_gate(q, w);
	OK(cu->cuStreamWriteValue64(q, w + 64, 5, 0));
	OK(cu->cuStreamDestroy(q));
	open_gate(w);
	q = stream_new();
	OK(cu->cuStreamWaitValue64(q, w + 64, 5, GEQ));
	OK(cu->cuStreamSynchronize(q));
}

/* -- copies ------------------------------------------------------------------------------ */

Test(sim_stream, reads_pinned_memory_late_and_pageable_memory_at_once)
{
	uint32_t pageable = 1, *pinned;
	CUdeviceptr w;
	CUstream q;
	void *p;

	fix_open();
	w = words();
	OK(cu->cuMemAllocHost(&p, 4096));
	pinned = p;
	*pinned = 1;
	q = stream_new();
	shut_gate(q, w);
	OK(cu->cuMemcpyHtoDAsync(w + 64, pinned, 4, q));
	OK(cu->cuMemcpyHtoDAsync(w + 128, &pageable, 4, q));
	*pinned = pageable = 2;
	open_gate(w);
	OK(cu->cuStreamSynchronize(q));
	IS(get32(w + 64), 2);
	IS(get32(w + 128), 1);
}

Test(sim_stream, writes_pinned_memory_late_and_pageable_memory_before_it_returns)
{
	uint32_t pageable = 0, *pinned;
	CUdeviceptr w;
	CUstream q;
	void *p;

	fix_open();
	w = words();
	put32(w + 64, 7, 1);
	OK(cu->cuMemAllocHost(&p, 4096));
	pinned = p;
	*pinned = 0;
	q = stream_new();
	OK(cu->cuMemcpyDtoHAsync(&pageable, w + 64, 4, q));
	IS(pageable, 7);
	shut_gate(q, w);
	OK(cu->cuMemcpyAsync((CUdeviceptr)(uintptr_t)p, w + 64, 4, q));
	IS(*(volatile uint32_t *)pinned, 0);
	open_gate(w);
	OK(cu->cuStreamSynchronize(q));
	IS(*(volatile uint32_t *)pinned, 7);
}

Test(sim_stream, refuses_what_cannot_be_copied)
{
	char buf[8];
	CUdeviceptr w;
	CUstream q;

	fix_open();
	w = words();
	q = stream_new();
	IS(cu->cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)buf, buf, 8, q), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemcpyDtoHAsync(buf, w - 4096, 8, q), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemcpyDtoDAsync(w, w + 2 * MIB, 8, q), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemsetD32Async(w + 2, 0, 1, q), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuMemcpyDtoDAsync(w, w, 8, (CUstream)buf), CUDA_ERROR_INVALID_HANDLE);
	OK(cu->cuStreamQuery(q));
}

/* -- values ------------------------------------------------------------------------------ */

struct wait_case {
	uint64_t now, wanted;
	unsigned flags;
	bool goes_on;
};

static const struct wait_case wait_cases[] = {
	{ 5, 5, GEQ, true },
	{ 6, 5, GEQ, true },
	{ 4, 5, GEQ, false },
	{ INT64_MAX, 1234, GEQ, true },   /* frees everybody */
	{ UINT64_MAX, 1, GEQ, false },    /* is -1 */
	{ 3, UINT64_MAX - 2, GEQ, true }, /* cyclic */
	{ 5, 5, CU_STREAM_WAIT_VALUE_EQ, true },
	{ 6, 5, CU_STREAM_WAIT_VALUE_EQ, false },
	{ 6, 2, CU_STREAM_WAIT_VALUE_AND, true },
	{ 5, 2, CU_STREAM_WAIT_VALUE_AND, false },
	{ 5, 2, CU_STREAM_WAIT_VALUE_NOR, true },
	{ UINT64_MAX - 1, 1, CU_STREAM_WAIT_VALUE_NOR, false },
};

/* A stream that ran another item after the wait's has passed the wait. What shows that one
 * stays is a long time for the others: 100 items of another stream. */
static bool goes_on(const struct wait_case *c, CUdeviceptr w)
{
	CUstream q = stream_new(), other = stream_new();

	put64(w, c->now);
	OK(cu->cuStreamWaitValue64(q, w, c->wanted, c->flags));
	if (c->goes_on)
		return cu->cuStreamSynchronize(q) == CUDA_SUCCESS;
	for (unsigned i = 0; i < 100; i++)
		OK(cu->cuMemsetD8Async(w + 512, 1, 1, other));
	OK(cu->cuStreamSynchronize(other));
	return cu->cuStreamQuery(q) != CUDA_ERROR_NOT_READY;
}

Test(sim_stream, compares_values)
{
	CUdeviceptr w;

	setenv("SHARDD_SIM_ALLOW_WAITS", "1", 1);
	fix_open();
	for (unsigned i = 0; i < sizeof(wait_cases) / sizeof(wait_cases[0]); i++) {
		w = words();
		cr_expect_eq(goes_on(&wait_cases[i], w), wait_cases[i].goes_on, "case %u", i);
	}
}

static void find(const char *name, void *ret)
{
	void *lib = dlopen(getenv("SHARDD_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD);
	void *p = dlsym(lib, name);

	NEED(p != NULL);
	memcpy(ret, &p, sizeof(p));
}

Test(sim_stream, is_not_woken_by_a_copy)
{
	bool (*waits)(CUstream stream);
	CUdeviceptr w;
	CUstream q;

	fix_open();
	find("sim_stream_waits", &waits);
	w = words();
	q = stream_new();
	OK(cu->cuStreamWaitValue64(q, w, 1, GEQ));
	while (!waits(q))
		sched_yield();
	put64(w, 1);
	for (unsigned i = 0; i < 100; i++)
		put64(w + 512, i);
	IS(cu->cuStreamQuery(q), CUDA_ERROR_NOT_READY);
	open_gate(w);
	OK(cu->cuStreamSynchronize(q));
}

Test(sim_stream, refuses_bad_values)
{
	CUdeviceptr w;
	CUstream q;

	fix_open();
	w = words();
	q = stream_new();
	IS(cu->cuStreamWaitValue64(q, w + 4, 1, GEQ), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuStreamWriteValue64(q, w + 4, 1, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuStreamWriteValue64(q, w, 1, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER),
	   CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuStreamWriteValue64(q, w + 2 * MIB, 1, 0), CUDA_ERROR_INVALID_VALUE);
	setenv("SHARDD_SIM_NO_MEMOPS", "1", 1);
	IS(cu->cuStreamWriteValue64(q, w, 1, 0), CUDA_ERROR_NOT_SUPPORTED);
	IS(cu->cuStreamWaitValue64(q, w, 1, GEQ), CUDA_ERROR_NOT_SUPPORTED);
}

Test(sim_stream, faults_a_value_written_to_read_only_memory)
{
	struct slab s, reader;
	CUstream q;
	int fd;

	fix_open();
	s = slab_new(2 * MIB);
	put64(s.addr, 0);
	fd = slab_export(&s);
	reader = slab_import(fd, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ);
	close(fd);
	q = stream_new();
	OK(cu->cuStreamWaitValue64(q, reader.addr, 0, GEQ));
	OK(cu->cuStreamSynchronize(q));
	OK(cu->cuStreamWriteValue64(q, reader.addr, 1, 0));
	IS(cu->cuStreamSynchronize(q), CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* -- events ------------------------------------------------------------------------------ */

Test(sim_stream, tells_what_an_event_has_reached)
{
	CUdeviceptr w;
	CUstream q;
	CUevent a, b;
	float ms = -1;

	fix_open();
	w = words();
	q = stream_new();
	OK(cu->cuEventCreate(&a, CU_EVENT_DEFAULT));
	OK(cu->cuEventCreate(&b, CU_EVENT_DEFAULT));
	OK(cu->cuEventQuery(a)); /* never recorded: nothing to wait for */
	IS(cu->cuEventElapsedTime(&ms, a, b), CUDA_ERROR_INVALID_HANDLE);
	OK(cu->cuEventRecord(a, q));
	shut_gate(q, w);
	OK(cu->cuEventRecord(b, q));
	OK(cu->cuEventSynchronize(a));
	IS(cu->cuEventQuery(b), CUDA_ERROR_NOT_READY);
	IS(cu->cuEventElapsedTime(&ms, a, b), CUDA_ERROR_NOT_READY);
	open_gate(w);
	OK(cu->cuEventSynchronize(b));
	OK(cu->cuEventElapsedTime(&ms, a, b));
	cr_assert_geq(ms, 0);
	cr_assert_lt(ms, 10000);
}

/* A wait means the record of its own time, not a later one. */
Test(sim_stream, waits_for_the_record_of_its_time)
{
	CUdeviceptr w;
	CUstream a, b;
	CUevent e;

	fix_open();
	w = words();
	a = stream_new();
	b = stream_new();
	OK(cu->cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	OK(cu->cuEventRecord(e, a));
	OK(cu->cuStreamWaitEvent(b, e, 0));
	shut_gate(a, w);
	OK(cu->cuEventRecord(e, a)); /* b waits for the first one */
	OK(cu->cuStreamSynchronize(b));
	OK(cu->cuStreamWaitEvent(b, e, 0));
	IS(cu->cuStreamQuery(b), CUDA_ERROR_NOT_READY);
	open_gate(w);
	OK(cu->cuStreamSynchronize(b));
}

Test(sim_stream, waits_for_events_of_another_device)
{
	CUcontext second;
	CUdeviceptr w;
	CUstream a, b;
	CUevent e;

	setenv("SHARDD_SIM_DEVICES", "2", 1);
	fix_open();
	w = words();
	a = stream_new();
	OK(cu->cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	shut_gate(a, w);
	OK(cu->cuEventRecord(e, a));
	OK(cu->cuDevicePrimaryCtxRetain(&second, 1));
	OK(cu->cuCtxSetCurrent(second));
	b = stream_new();
	IS(cu->cuEventRecord(e, b), CUDA_ERROR_INVALID_HANDLE); /* another context's */
	OK(cu->cuStreamWaitEvent(b, e, 0));
	IS(cu->cuStreamQuery(b), CUDA_ERROR_NOT_READY);
	fix_open();
	open_gate(w);
	OK(cu->cuCtxSetCurrent(second));
	OK(cu->cuStreamSynchronize(b));
}

Test(sim_stream, makes_interprocess_events_without_timing_only)
{
	CUevent e;

	fix_open();
	IS(cu->cuEventCreate(&e, CU_EVENT_INTERPROCESS), CUDA_ERROR_INVALID_VALUE);
	OK(cu->cuEventCreate(&e, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
	OK(cu->cuEventQuery(e));
	OK(cu->cuEventRecord(e, NULL));
	OK(cu->cuEventSynchronize(e));
	OK(cu->cuEventDestroy(e));
}

Test(sim_stream, keeps_no_descriptors)
{
	unsigned before;
	CUstream q;
	CUevent e;

	fix_open();
	OK(cu->cuStreamSynchronize(NULL));
	before = descriptors();
	q = stream_new();
	OK(cu->cuEventCreate(&e, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
	OK(cu->cuEventRecord(e, q));
	OK(cu->cuEventDestroy(e));
	OK(cu->cuStreamSynchronize(q));
	OK(cu->cuStreamDestroy(q));
	IS(descriptors(), before);
}

/* Waits and work end with an error when the device does. */
Test(sim_stream, ends_everything_when_the_context_breaks)
{
	CUdeviceptr w;
	CUstream a, b, bad;
	CUevent e;
	struct slab gone;

	setenv("SHARDD_SIM_ALLOW_WAITS", "1", 1);
	fix_open();
	w = words();
	gone = slab_new(2 * MIB);
	a = stream_new();
	b = stream_new();
	bad = stream_new();
	OK(cu->cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	shut_gate(a, w);
	OK(cu->cuEventRecord(e, a));
	OK(cu->cuStreamWaitEvent(b, e, 0));
	OK(cu->cuStreamWaitValue64(bad, w + 64, 1, GEQ));
	OK(cu->cuMemsetD8Async(gone.addr, 1, 1, bad));
	slab_free(&gone);
	OK(cu->cuStreamWriteValue64(stream_new(), w + 64, 1, 0));
	IS(cu->cuStreamSynchronize(a), CUDA_ERROR_ILLEGAL_ADDRESS);
	IS(cu->cuStreamSynchronize(b), CUDA_ERROR_ILLEGAL_ADDRESS);
	IS(cu->cuEventSynchronize(e), CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* -- steps, for the simulated NCCL ---------------------------------------------------------- */

static CUresult (*enqueue)(CUstream stream, int (*step)(void *arg), void *arg);
static void *(*translate)(CUdeviceptr addr, size_t bytes, int write);
static CUresult (*step_error)(void);

struct steps {
	CUdeviceptr word;
	unsigned calls;
	CUresult error;
};

static int third_time(void *arg)
{
	struct steps *s = arg;
	uint32_t *p;

	if (++s->calls < 3)
		return 0;
	p = translate(s->word, 4, 1);
	if (p)
		*p += 1;
	s->error = step_error();
	return 1;
}

Test(sim_stream, runs_steps_until_they_are_done)
{
	/* static: the last one may run on when the test has ended */
	static struct steps good, bad = { .word = 4096 };
	CUstream q;

	fix_open();
	find("sim_stream_enqueue", &enqueue);
	find("sim_translate", &translate);
	find("sim_step_error", &step_error);
	good.word = words();
	q = stream_new();
	OK(cu->cuMemsetD32Async(good.word, 41, 1, q));
	OK(enqueue(q, third_time, &good));
	OK(cu->cuStreamSynchronize(q));
	IS(get32(good.word), 42);
	IS(good.calls, 3);
	OK(good.error);
	OK(enqueue(q, third_time, &bad));
	IS(cu->cuStreamSynchronize(q), CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* A step is asked in a broken context too: it must be able to end what it is part of. */
Test(sim_stream, runs_steps_in_a_broken_context)
{
	static struct steps s;
	CUdeviceptr w;
	CUstream q, other;

	fix_open();
	find("sim_stream_enqueue", &enqueue);
	find("sim_translate", &translate);
	find("sim_step_error", &step_error);
	w = words();
	s.word = w;
	q = stream_new();
	other = stream_new();
	shut_gate(q, w);
	OK(enqueue(q, third_time, &s));
	OK(cu->cuMemsetD8Async(w, 1, 4 * MIB, other)); /* too far */
	IS(cu->cuStreamSynchronize(other), CUDA_ERROR_ILLEGAL_ADDRESS);
	while (__atomic_load_n(&s.calls, __ATOMIC_ACQUIRE) < 3)
		sched_yield();
	while (__atomic_load_n(&s.error, __ATOMIC_ACQUIRE) == CUDA_SUCCESS)
		sched_yield();
	IS(s.error, CUDA_ERROR_ILLEGAL_ADDRESS);
}
