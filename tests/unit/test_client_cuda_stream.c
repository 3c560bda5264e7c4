/*
 * The client's streams against a process that plays the daemon's queue, on the
 * simulator, which executes streams late and in random order: what is not waited for
 * gives wrong bytes. A mapping while a stream waits for a value aborts there.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client.h"
#include "core/clock.h"
#include "device.h"
#include "gpupeer.h"

TestSuite(client_cuda_stream, .timeout = 60);

#ifdef SHARDD_CUDA

#include "stream_impl.h"

#define BYTES GPUPEER_SLAB_BYTES
#define OPS   24u

struct world {
	struct gpupeer peer;
	struct shardd_client c;
	struct shardd_error err;
	const struct cuda_lib *cu;
	struct streams *streams;
	bool events;
	CUstream stream;
	uint64_t ready;  /* of the last op */
	unsigned shared; /* rings the peer was told of */
	void *from, *to;
};

/* ------------------------------------------------------------------------ joins */

struct link_told {
	Shardd__V1__StreamLink link;
	Shardd__V1__Placement signals, ready;
	ProtobufCBinaryData events[GPUPEER_RING];
};

static void describe(const struct gpupeer *p, bool events, struct link_told *l)
{
	shardd__v1__stream_link__init(&l->link);
	shardd__v1__placement__init(&l->signals);
	shardd__v1__placement__init(&l->ready);
	l->link.slots = 3;
	l->link.slot_stride = GPUPEER_STRIDE;
	l->signals.slab = GPUPEER_SIGNALS;
	l->signals.bytes = 4096;
	l->signals.writable = true;
	l->ready.slab = GPUPEER_READY;
	l->ready.bytes = GPUPEER_STRIDE;
	l->link.order = events ? SHARDD__V1__STREAM_LINK__ORDER__ORDER_EVENTS
			       : SHARDD__V1__STREAM_LINK__ORDER__ORDER_TIMELINE;
	l->link.signals = &l->signals;
	l->link.ready = &l->ready;
	if (!events)
		return;
	for (unsigned i = 0; i < GPUPEER_RING; i++)
		l->events[i] =
			(ProtobufCBinaryData){ GPUPEER_HANDLE, (uint8_t *)p->ready_events[i] };
	l->link.event_ring = GPUPEER_RING;
	l->link.ready_events = l->events;
	l->link.n_ready_events = GPUPEER_RING;
}

static int join(struct world *w, Shardd__V1__StreamLink *link)
{
	Shardd__V1__JoinResponse reply = SHARDD__V1__JOIN_RESPONSE__INIT;
	Shardd__V1__Device device = SHARDD__V1__DEVICE__INIT;

	device.id = "cuda:0";
	device.backend = "cuda";
	device.uuid = w->peer.uuid;
	reply.device = &device;
	reply.streams = link;
	return device_take(&w->c, &reply, &w->err);
}

static struct world *telling; /* the test's only one */

static int tell(struct streams *s, uint32_t slot, const uint8_t *handles, uint32_t n,
		struct shardd_error *err)
{
	(void)s;
	(void)err;
	cr_assert_eq(n, GPUPEER_RING);
	/* opened once: the same events come again after another join */
	if (telling->shared++ == 0)
		gpupeer_share(&telling->peer, slot, handles);
	return 0;
}

static void *mapped(struct world *w, uint32_t slab)
{
	struct map_place place = { .slab = slab, .bytes = BYTES };
	void *at = NULL;

	cr_assert_eq(map_address(&w->c.map, &place, -1, &at, &w->err), 0, "%s", w->err.text);
	return at;
}

static void test_client_cuda_stream_begin(struct world *w, bool events)
{
	struct link_told l;

	*w = (struct world){ .events = events };
	telling = w;
	gpupeer_start(&w->peer, 0, events);
	w->c.magic = CLIENT_MAGIC;
	w->c.pid = getpid();
	pthread_mutex_init(&w->c.device_lock, NULL);
	map_init(&w->c.map);
	tickets_init(&w->c.tickets);
	cr_assert_eq(map_open(&w->c.map, w->peer.path, gpupeer_token, GPUPEER_SESSION, &w->err), 0);
	describe(&w->peer, events, &l);
	cr_assert_eq(join(w, &l.link), 0, "%s", w->err.text);
	w->streams = w->c.streams;
	w->streams->tell = tell;
	w->cu = w->c.cuda->lib;
	cr_assert_eq(w->cu->cuCtxSetCurrent(w->c.cuda->context), CUDA_SUCCESS);
	cr_assert_eq(w->cu->cuStreamCreateWithPriority(&w->stream, CU_STREAM_NON_BLOCKING, 0),
		     CUDA_SUCCESS);
	w->from = mapped(w, GPUPEER_WRITABLE);
	w->to = mapped(w, GPUPEER_LATER);
}

static void test_client_cuda_stream_end(struct world *w)
{
	device_close(&w->c);
	cr_expect_null(w->c.cuda, "closed, not left");
	tickets_deinit(&w->c.tickets);
	gpupeer_stop(&w->peer);
}

static void set(struct world *w)
{
	cr_assert_eq(shardd_set_stream(&w->c, w->stream, &w->err), 0, "%s", w->err.text);
}

/* -------------------------------------------------------------------------- ops */

/* Begin an op on this thread's stream, hand it to the peer, and put the wait for it on the
 * stream, as op.c does. */
static void op(struct world *w, bool held)
{
	Shardd__V1__StreamPoint after = SHARDD__V1__STREAM_POINT__INIT;
	Shardd__V1__StreamPoint ready = SHARDD__V1__STREAM_POINT__INIT;
	struct stream_ref ref;

	cr_assert_eq(stream_begin(w->streams, 1, &ref, &after, &w->err), 1, "%s", w->err.text);
	ready.value = ++w->ready;
	gpupeer_op(&w->peer, after.slot, after.value, GPUPEER_WRITABLE, GPUPEER_LATER, ready.value,
		   held);
	cr_assert_eq(stream_end(w->streams, &ref, &ready, &w->err), 0, "%s", w->err.text);
}

static void fill(struct world *w, uint8_t byte)
{
	cr_assert_eq(w->cu->cuMemsetD8Async((CUdeviceptr)(uintptr_t)w->from, byte, BYTES,
					    w->stream),
		     CUDA_SUCCESS);
}

/* Each op sees what the stream wrote before it, and the stream what the op wrote. */
static void check_order(bool events)
{
	uint8_t *seen;
	struct world w;
	void *pinned;

	test_client_cuda_stream_begin(&w, events);
	set(&w);
	cr_assert_eq(w.cu->cuMemAllocHost(&pinned, OPS * 2), CUDA_SUCCESS);
	seen = pinned;
	for (unsigned i = 0; i < OPS; i++) {
		CUdeviceptr to = (CUdeviceptr)(uintptr_t)w.to;

		fill(&w, (uint8_t)(i + 1));
		op(&w, false);
		/* first and last byte, read when the stream comes to it */
		w.cu->cuMemcpyDtoHAsync(seen + 2 * i, to, 1, w.stream);
		w.cu->cuMemcpyDtoHAsync(seen + 2 * i + 1, to + BYTES - 1, 1, w.stream);
	}
	cr_assert_eq(w.cu->cuStreamSynchronize(w.stream), CUDA_SUCCESS);
	for (unsigned i = 0; i < OPS; i++)
		cr_expect(seen[2 * i] == i + 1 && seen[2 * i + 1] == i + 1, "op %u: %u and %u", i,
			  seen[2 * i], seen[2 * i + 1]);
	cr_assert_eq(w.cu->cuMemFreeHost(pinned), CUDA_SUCCESS);
	test_client_cuda_stream_end(&w);
}

Test(client_cuda_stream, words_order_ops_with_the_stream)
{
	check_order(false);
}

Test(client_cuda_stream, events_order_ops_with_the_stream)
{
	check_order(true);
}

Test(client_cuda_stream, copies_come_after_the_threads_stream)
{
	uint8_t byte;
	struct world w;

	test_client_cuda_stream_begin(&w, false);
	set(&w);
	for (uint8_t i = 1; i < OPS; i++) {
		cr_assert_eq(shardd_write(&w.c, w.from, &i, 1, &w.err), 0, "%s", w.err.text);
		op(&w, false);
		cr_assert_eq(shardd_read(&w.c, &byte, w.to, 1, &w.err), 0, "%s", w.err.text);
		cr_assert_eq(byte, i);
	}
	test_client_cuda_stream_end(&w);
}

Test(client_cuda_stream, without_a_stream_nothing_is_raised)
{
	Shardd__V1__StreamPoint after = SHARDD__V1__STREAM_POINT__INIT;
	struct stream_ref ref;
	struct world w;

	test_client_cuda_stream_begin(&w, false);
	cr_expect_eq(stream_begin(w.streams, 1, &ref, &after, &w.err), 0);
	set(&w);
	cr_expect_eq(stream_begin(w.streams, 1, &ref, &after, &w.err), 1);
	cr_expect_eq(after.value, 1);
	shardd_set_stream(&w.c, SHARDD_NO_STREAM, NULL);
	cr_expect_eq(stream_begin(w.streams, 1, &ref, &after, &w.err), 0);
	test_client_cuda_stream_end(&w);
}

/* ---------------------------------------------------------------------- mappings */

static int try_map(struct world *w, uint32_t slab, int timeout_ms)
{
	struct map_place place = { .slab = slab, .bytes = BYTES };
	void *at;

	if (slab == GPUPEER_IPC) {
		place.ipc = w->peer.ipc;
		place.slab_bytes = BYTES;
	}
	w->err = (struct shardd_error){ 0 };
	return map_address(&w->c.map, &place, timeout_ms, &at, &w->err);
}

Test(client_cuda_stream, nothing_is_mapped_while_a_stream_waits)
{
	static const uint32_t slabs[] = { GPUPEER_READ_ONLY, GPUPEER_IPC };
	struct world w;
	int r;

	test_client_cuda_stream_begin(&w, false);
	set(&w);
	for (int i = 0; i < 2; i++) {
		uint64_t deadline = clock_now_us() + 30000000;

		op(&w, true);
		for (int k = 0; k < 3; k++) {
			r = try_map(&w, slabs[i], k * 5);
			cr_assert_eq(r, -SHARDD_DEADLINE_EXCEEDED, "%s", w.err.text);
			cr_assert_eq(w.err.native, EAGAIN);
		}
		gpupeer_raise(&w.peer, w.ready);
		/* the blocking form waits for the stream, the other one asks again */
		if (i == 0)
			r = try_map(&w, slabs[i], -1);
		else
			while ((r = try_map(&w, slabs[i], 0)) != 0 && clock_now_us() < deadline)
				;
		cr_assert_eq(r, 0, "%s", w.err.text);
	}
	test_client_cuda_stream_end(&w);
}

Test(client_cuda_stream, a_stream_that_waits_for_ever_keeps_its_memory)
{
	struct world w;

	test_client_cuda_stream_begin(&w, false);
	set(&w);
	op(&w, true);
	cr_expect(!streams_settle(w.streams, 20));
	gpupeer_raise(&w.peer, w.ready);
	cr_expect(streams_settle(w.streams, 30000));
	test_client_cuda_stream_end(&w);
}

/* An op that is answered with nothing to wait for, as a release is, leaves its raising of the
 * word on a stream that has not come so far. */
Test(client_cuda_stream, a_word_that_is_to_be_raised_stays_mapped)
{
	Shardd__V1__StreamPoint after = SHARDD__V1__STREAM_POINT__INIT;
	struct stream_ref ref;
	CUdeviceptr held;
	CUstream other;
	struct world w;

	test_client_cuda_stream_begin(&w, false);
	set(&w);
	cr_assert_eq(w.cu->cuMemAlloc(&held, 8), CUDA_SUCCESS);
	cr_assert_eq(w.cu->cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0),
		     CUDA_SUCCESS);
	cr_assert_eq(w.cu->cuStreamWriteValue64(other, held, 0, CU_STREAM_WRITE_VALUE_DEFAULT),
		     CUDA_SUCCESS);
	cr_assert_eq(w.cu->cuStreamSynchronize(other), CUDA_SUCCESS);
	cr_assert_eq(w.cu->cuStreamWaitValue64(w.stream, held, 1, CU_STREAM_WAIT_VALUE_GEQ),
		     CUDA_SUCCESS);
	cr_assert_eq(stream_begin(w.streams, 1, &ref, &after, &w.err), 1, "%s", w.err.text);
	cr_assert_eq(stream_end(w.streams, &ref, NULL, &w.err), 0, "%s", w.err.text);
	cr_expect(!streams_settle(w.streams, 20));
	cr_assert_eq(w.cu->cuStreamWriteValue64(other, held, 1, CU_STREAM_WRITE_VALUE_DEFAULT),
		     CUDA_SUCCESS);
	cr_expect(streams_settle(w.streams, 30000));
	test_client_cuda_stream_end(&w);
}

/* ------------------------------------------------------------------------ events */

struct submitter {
	struct world *w;
	atomic_bool ended; /* the first op's ticket */
	bool seen;         /* when the submission came through */
};

static void *submit_one_more(void *arg)
{
	Shardd__V1__StreamPoint after = SHARDD__V1__STREAM_POINT__INIT;
	struct submitter *s = arg;
	struct stream_ref ref;

	set(s->w);
	cr_assert_eq(stream_begin(s->w->streams, 99, &ref, &after, &s->w->err), 1);
	s->seen = atomic_load(&s->ended);
	return NULL;
}

Test(client_cuda_stream, an_event_is_recorded_again_when_its_op_was_answered)
{
	Shardd__V1__StreamPoint after = SHARDD__V1__STREAM_POINT__INIT;
	struct submitter s = { 0 };
	struct stream_ref ref;
	struct ticket *ticket;
	pthread_t thread;
	struct world w;
	uint64_t id;

	test_client_cuda_stream_begin(&w, true);
	set(&w);
	s.w = &w;
	cr_assert_eq(tickets_add(&w.c.tickets, NULL, 0, &ticket, &id), 0);
	for (unsigned i = 0; i < GPUPEER_RING; i++)
		cr_assert_eq(stream_begin(w.streams, i ? 1 : id, &ref, &after, &w.err), 1);
	cr_assert_eq(pthread_create(&thread, NULL, submit_one_more, &s), 0);
	/* not before: time for it to go wrong */
	for (int i = 0; i < 1000; i++)
		sched_yield();
	atomic_store(&s.ended, true);
	tickets_answered(&w.c.tickets, ticket);
	pthread_join(thread, NULL);
	cr_expect(s.seen);
	tickets_end(&w.c.tickets, id);
	test_client_cuda_stream_end(&w);
}

/* --------------------------------------------------------------------- refusals */

Test(client_cuda_stream, streams_that_cannot_be_used_are_refused)
{
	CUcontext other;
	CUstream theirs;
	CUdevice second;
	struct world w;

	setenv("SHARDD_SIM_DEVICES", "2", 1);
	test_client_cuda_stream_begin(&w, false);
	cr_expect_eq(shardd_set_stream(&w.c, CU_STREAM_PER_THREAD, &w.err),
		     -SHARDD_INVALID_ARGUMENT);
	cr_expect_str_eq(w.err.field, "stream");
	cr_assert_eq(w.cu->cuDeviceGet(&second, 1), CUDA_SUCCESS);
	cr_assert_eq(w.cu->cuDevicePrimaryCtxRetain(&other, second), CUDA_SUCCESS);
	cr_assert_eq(w.cu->cuCtxSetCurrent(other), CUDA_SUCCESS);
	cr_assert_eq(w.cu->cuStreamCreateWithPriority(&theirs, CU_STREAM_NON_BLOCKING, 0),
		     CUDA_SUCCESS);
	cr_expect_eq(shardd_set_stream(&w.c, theirs, &w.err), -SHARDD_INVALID_ARGUMENT);
	cr_expect_not_null(strstr(w.err.text, "another CUDA context"));
	cr_expect_eq(shardd_set_stream(&w.c, NULL, &w.err), -SHARDD_INVALID_ARGUMENT,
		     "the default stream of another context");
	cr_assert_eq(w.cu->cuCtxSetCurrent(w.c.cuda->context), CUDA_SUCCESS);
	cr_expect_eq(shardd_set_stream(&w.c, NULL, &w.err), 0, "%s", w.err.text);
	op(&w, false);
	cr_expect_eq(w.cu->cuStreamDestroy(theirs), CUDA_SUCCESS);
	test_client_cuda_stream_end(&w);
}

Test(client_cuda_stream, slots_have_a_limit)
{
	CUstream more[4];
	struct world w;

	test_client_cuda_stream_begin(&w, false);
	for (int i = 0; i < 4; i++) {
		cr_assert_eq(w.cu->cuStreamCreateWithPriority(&more[i], CU_STREAM_NON_BLOCKING, 0),
			     CUDA_SUCCESS);
		cr_expect_eq(shardd_set_stream(&w.c, more[i], &w.err),
			     i < 3 ? 0 : -SHARDD_RESOURCE_EXHAUSTED);
	}
	cr_expect_eq(shardd_set_stream(&w.c, more[0], &w.err), 0, "it has its slot");
	cr_expect_eq(w.streams->count, 3);
	test_client_cuda_stream_end(&w);
}

/* ------------------------------------------------------------------------ rejoins */

static void check_rejoin(bool events)
{
	Shardd__V1__StreamPoint after = SHARDD__V1__STREAM_POINT__INIT;
	struct stream_ref ref;
	struct world w;
	struct link_told l;

	test_client_cuda_stream_begin(&w, events);
	set(&w);
	op(&w, false);
	describe(&w.peer, events, &l);
	cr_assert_eq(join(&w, &l.link), 0, "%s", w.err.text);
	cr_expect_null(w.streams->link->older, "the same words: the same link");
	op(&w, false);
	cr_expect_eq(w.shared, (events ? 1u : 0u));
	l.signals.bytes = 8192; /* what differs is another page, of which nothing is known yet */
	cr_assert_eq(join(&w, &l.link), 0, "%s", w.err.text);
	cr_expect_not_null(w.streams->link->older);
	cr_expect_eq(w.shared, events ? 2u : 0u);
	op(&w, false);
	cr_assert_eq(join(&w, NULL), 0, "%s", w.err.text);
	cr_expect_eq(stream_begin(w.streams, 1, &ref, &after, &w.err), -SHARDD_FAILED_PRECONDITION);
	cr_expect_eq(shardd_set_stream(&w.c, w.stream, &w.err), -SHARDD_FAILED_PRECONDITION);
	test_client_cuda_stream_end(&w);
}

Test(client_cuda_stream, streams_with_words_go_on_after_another_join)
{
	check_rejoin(false);
}

Test(client_cuda_stream, streams_with_events_go_on_after_another_join)
{
	check_rejoin(true);
}

Test(client_cuda_stream, links_that_make_no_sense_are_refused)
{
	struct world w;
	struct link_told l;

	test_client_cuda_stream_begin(&w, false);
	for (int i = 0; i < 8; i++) {
		describe(&w.peer, i >= 5, &l);
		if (i == 0)
			l.link.signals = NULL;
		else if (i == 1)
			l.link.ready = NULL;
		else if (i == 2)
			l.link.slot_stride = 4;
		else if (i == 3)
			l.link.slots = 65;
		else if (i == 4)
			l.ready.ipc_handle = (ProtobufCBinaryData){ 3, (uint8_t *)"abc" };
		else if (i == 5)
			l.link.event_ring = 0;
		else if (i == 6)
			l.link.event_ring = 3;
		else
			l.events[1].len = 8;
		cr_expect_eq(join(&w, &l.link), -SHARDD_INTERNAL, "link %d", i);
	}
	describe(&w.peer, false, &l);
	cr_assert_eq(join(&w, &l.link), 0, "%s", w.err.text);
	set(&w);
	op(&w, false);
	test_client_cuda_stream_end(&w);
}

#endif
