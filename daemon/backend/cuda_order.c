/*
 * Order between our streams and those of other processes.
 *
 * TIMELINE: a slot is a word that only grows. The other process raises it on its stream, ours waits
 * until it has reached a value (cyclic compare, so INT64_MAX is the poison that satisfies every
 * wait; a plain copy would not wake it). Our own words say how far the queues have come. EVENTS:
 * for drivers without stream memory operations. Value v is event v modulo the ring's size; the
 * words are not raised. If a process dies, the driver ends the waits for its events.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"

#define POISON INT64_MAX
/* A word of the ready page that belongs to no queue, for the probe. */
#define PROBE_SLOT   63u
#define PROBE_S      5
#define INTERPROCESS (CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING)

static CUdeviceptr cuda_order_slot_of(const struct backend_mem *page, uint32_t slot)
{
	return cuda_ptr(page->addr) + (uint64_t)slot * BACKEND_SLOT_STRIDE;
}

/* ---------------------------------------------------------------------- probe */

static double cuda_order_now_s(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

/* Return: success, or an error: NOT_READY if it has not come in time. */
static CUresult cuda_order_wait_for_stream(const struct cuda *c, CUstream stream)
{
	const struct timespec moment = { .tv_nsec = 100000 };
	double end = cuda_order_now_s() + PROBE_S;
	CUresult r;

	while ((r = c->lib->cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY &&
	       cuda_order_now_s() < end)
		nanosleep(&moment, NULL);
	return r;
}

/* A wait that is issued first must be ended by a write; the device attributes alone prove nothing.
 * A stream that never continues is abandoned. */
static CUresult cuda_order_probe(const struct cuda *c)
{
	CUdeviceptr slot = cuda_order_slot_of(&c->ready.page->mem, PROBE_SLOT);
	CUstream stream;
	CUresult r = c->lib->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);

	if (r != CUDA_SUCCESS)
		return r;
	r = c->lib->cuStreamWaitValue64(stream, slot, 1, CU_STREAM_WAIT_VALUE_GEQ);
	if (r == CUDA_SUCCESS)
		r = c->lib->cuStreamWriteValue64(c->control, slot, POISON,
						 CU_STREAM_WRITE_VALUE_DEFAULT);
	if (r == CUDA_SUCCESS)
		r = cuda_order_wait_for_stream(c, stream);
	if (r != CUDA_ERROR_NOT_READY)
		c->lib->cuStreamDestroy(stream);
	return r;
}

static CUresult cuda_order_open_ready_events(struct cuda *c)
{
	for (unsigned i = 0; i < _BACKEND_Q_N * BACKEND_EVENT_RING; i++) {
		struct cuda_queue *q = &c->queues[i / BACKEND_EVENT_RING];
		unsigned k = i % BACKEND_EVENT_RING;
		CUresult r = c->lib->cuEventCreate(&q->ready_events[k], INTERPROCESS);

		if (r == CUDA_SUCCESS)
			r = c->lib->cuIpcGetEventHandle(&q->ready_handles[k], q->ready_events[k]);
		if (r != CUDA_SUCCESS)
			return r;
	}
	return CUDA_SUCCESS;
}

static int cuda_order_refuse(struct cuda *c, struct fault *f, CUresult memops, CUresult events)
{
	char a[128] = "not tried", b[128] = "not tried";

	if (memops != CUDA_SUCCESS)
		cuda_lib_text(c->lib, memops, a, sizeof(a));
	if (events != CUDA_SUCCESS)
		cuda_lib_text(c->lib, events, b, sizeof(b));
	fault_set(f, FAULT_INTERNAL, NULL,
		  "%s cannot order its work with other processes: stream memory operations: %s; "
		  "interprocess events: %s",
		  c->backend.info.id, a, b);
	f->domain = FAULT_DOMAIN_CUDA;
	f->native = (int)(memops != CUDA_SUCCESS ? memops : events);
	return f->code;
}

static int cuda_order_make_ready_page(struct cuda *c, struct fault *f)
{
	uint64_t bytes = c->backend.info.granularity;
	int r = cuda_mem_make(c, bytes, BACKEND_SHARE_FD, &c->ready.page);

	if (r)
		return fault_set(f, r == BACKEND_E_FULL ? FAULT_EXHAUSTED : FAULT_INTERNAL, NULL,
				 "%s has no memory that can be shared (%s)", c->backend.info.id,
				 r == BACKEND_E_FULL ? "it is full" : strerror(-r));
	/* some machines have no legacy IPC: they work without it */
	if (cuda_mem_make(c, bytes, BACKEND_SHARE_IPC, &c->ready.page_ipc))
		c->ready.page_ipc = NULL;
	return 0;
}

int cuda_order_open(struct cuda *c, enum backend_order order, struct fault *f)
{
	CUresult memops = CUDA_SUCCESS, events;

	if (cuda_order_make_ready_page(c, f))
		return f->code;
	if (order != BACKEND_ORDER_EVENTS) {
		memops = cuda_order_probe(c);
		c->backend.info.order = BACKEND_ORDER_TIMELINE;
		if (memops == CUDA_SUCCESS)
			return 0;
		if (order == BACKEND_ORDER_TIMELINE)
			return cuda_order_refuse(c, f, memops, CUDA_SUCCESS);
	}
	c->backend.info.order = BACKEND_ORDER_EVENTS;
	events = cuda_order_open_ready_events(c);
	return events == CUDA_SUCCESS ? 0 : cuda_order_refuse(c, f, memops, events);
}

void cuda_order_close(struct cuda *c)
{
	for (unsigned i = 0; i < _BACKEND_Q_N * BACKEND_EVENT_RING; i++) {
		CUevent e = c->queues[i / BACKEND_EVENT_RING].ready_events[i % BACKEND_EVENT_RING];

		if (e)
			c->lib->cuEventDestroy(e);
	}
	c->ready.page = cuda_mem_unmake(c, c->ready.page);
	c->ready.page_ipc = cuda_mem_unmake(c, c->ready.page_ipc);
}

/* Waits of trainers, queued on their streams, that the dead daemon's queues would have satisfied. What
 * runs behind them belongs to an epoch that has ended. */
int cuda_order_release(struct backend *b, struct backend_mem *page)
{
	struct cuda *c = cuda_of(b);
	CUcontext old = NULL;
	CUresult r;
	int e;

	c->lib->cuCtxGetCurrent(&old);
	r = c->lib->cuCtxSetCurrent(c->context);
	for (uint32_t i = 0; r == CUDA_SUCCESS && i < PROBE_SLOT; i++)
		r = c->lib->cuStreamWriteValue64(c->control, cuda_order_slot_of(page, i), POISON,
						 CU_STREAM_WRITE_VALUE_DEFAULT);
	e = cuda_result(c, r, "poison");
	if (e == 0)
		e = cuda_drain(c, c->control);
	c->lib->cuCtxSetCurrent(old);
	return e;
}

/* ------------------------------------------------------------------- executor */

CUresult cuda_order_wait(struct cuda *c, struct cuda_queue *q, const struct backend_wait *w)
{
	const struct cuda_signals *s = cuda_signals_of(w);
	CUevent *ring = s->events[w->slot];
	CUevent e;

	if (c->backend.info.order == BACKEND_ORDER_TIMELINE)
		return c->lib->cuStreamWaitValue64(q->stream, cuda_order_slot_of(s->mem, w->slot),
						   w->value, CU_STREAM_WAIT_VALUE_GEQ);
	e = ring ? ring[w->value % BACKEND_EVENT_RING] : NULL;
	return e ? c->lib->cuStreamWaitEvent(q->stream, e, 0) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuda_order_raise(struct cuda *c, struct cuda_queue *q)
{
	CUresult r;

	if (c->backend.info.order == BACKEND_ORDER_EVENTS)
		return c->lib->cuEventRecord(q->ready_events[q->ready % BACKEND_EVENT_RING],
					     q->stream);
	r = c->lib->cuStreamWriteValue64(q->stream,
					 cuda_order_slot_of(&c->ready.page->mem, q->which),
					 q->ready, CU_STREAM_WRITE_VALUE_DEFAULT);
	if (r == CUDA_SUCCESS && atomic_load(&c->ready.ipc_used))
		r = c->lib->cuStreamWriteValue64(
			q->stream, cuda_order_slot_of(&c->ready.page_ipc->mem, q->which), q->ready,
			CU_STREAM_WRITE_VALUE_DEFAULT);
	return r;
}

/* ---------------------------------------------------------------- setup thread */

void cuda_order_write_poison(struct cuda *c, struct cuda_signals *s)
{
	uint8_t waited[sizeof(s->waited)];
	CUresult r = CUDA_SUCCESS;

	pthread_mutex_lock(&c->lock);
	memcpy(waited, s->waited, sizeof(waited));
	pthread_mutex_unlock(&c->lock);
	for (uint32_t i = 0; r == CUDA_SUCCESS && i < BACKEND_SIGNAL_SLOTS; i++)
		if (waited[i / 8] & 1u << i % 8)
			r = c->lib->cuStreamWriteValue64(c->control, cuda_order_slot_of(s->mem, i),
							 POISON, CU_STREAM_WRITE_VALUE_DEFAULT);
	cuda_result(c, r, "poison");
	cuda_drain(c, c->control);
}

/* ---------------------------------------------------------------- loop thread */

int cuda_signals_new(struct backend *b, struct backend_mem *mem, struct backend_signals **ret)
{
	struct cuda *c = cuda_of(b);
	struct cuda_signals *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	s->base.backend = b;
	s->mem = mem;
	list_init(&s->link);
	list_init(&s->poison_link);
	pthread_mutex_lock(&c->lock);
	list_append(&c->signals, &s->link);
	pthread_mutex_unlock(&c->lock);
	*ret = &s->base;
	return 0;
}

static struct cuda_signals *cuda_order_to_signals(struct backend_signals *s)
{
	return CONTAINER_OF(s, struct cuda_signals, base);
}

/* All or none, with our context current on the loop thread during the call. */
static CUresult cuda_order_open_ring(struct cuda *c, const uint8_t *const *handles, CUevent *ring)
{
	CUcontext old = NULL;
	CUipcEventHandle h;
	unsigned n = 0;
	CUresult r;

	c->lib->cuCtxGetCurrent(&old);
	r = c->lib->cuCtxSetCurrent(c->context);
	for (; r == CUDA_SUCCESS && n < BACKEND_EVENT_RING; n += r == CUDA_SUCCESS) {
		memcpy(&h, handles[n], sizeof(h));
		r = c->lib->cuIpcOpenEventHandle(&ring[n], h);
	}
	while (r != CUDA_SUCCESS && n > 0)
		c->lib->cuEventDestroy(ring[--n]);
	c->lib->cuCtxSetCurrent(old);
	return r;
}

int cuda_signals_events(struct backend_signals *base, uint32_t slot, const uint8_t *const *handles)
{
	struct cuda_signals *s = cuda_order_to_signals(base);
	struct cuda *c = cuda_of(base->backend);
	CUevent *ring;
	int r;

	if (s->events[slot])
		return -EEXIST;
	ring = calloc(BACKEND_EVENT_RING, sizeof(*ring));
	if (!ring)
		return -ENOMEM;
	r = cuda_result(c, cuda_order_open_ring(c, handles, ring), "cuIpcOpenEventHandle");
	if (r == 0)
		s->events[slot] = ring;
	else
		free(ring);
	return r;
}

void cuda_signals_poison(struct backend_signals *base)
{
	struct cuda_signals *s = cuda_order_to_signals(base);
	struct cuda *c = cuda_of(base->backend);

	pthread_mutex_lock(&c->lock);
	if (!atomic_exchange(&s->poisoned, true)) {
		if (c->backend.info.order == BACKEND_ORDER_TIMELINE)
			list_append(&c->poison, &s->poison_link);
		pthread_cond_signal(&c->setup);
		pthread_cond_signal(&c->work); /* the gate no longer holds it back */
	}
	pthread_mutex_unlock(&c->lock);
}

void cuda_signals_free(struct backend_signals *base, void (*freed)(void *userdata), void *userdata)
{
	struct cuda_signals *s = cuda_order_to_signals(base);
	struct cuda *c = cuda_of(base->backend);

	s->freed = freed;
	s->userdata = userdata;
	s->freeing = true;
	pthread_mutex_lock(&c->lock);
	cuda_tick(c);
	pthread_mutex_unlock(&c->lock);
}

static void cuda_order_close_events(struct cuda *c, struct cuda_signals *s)
{
	for (unsigned i = 0; i < BACKEND_SIGNAL_SLOTS; i++) {
		CUevent *ring = s->events[i];

		for (unsigned k = 0; ring && k < BACKEND_EVENT_RING; k++)
			cuda_result(c, c->lib->cuEventDestroy(ring[k]), "cuEventDestroy");
		free(ring);
	}
}

/* With the lock held. */
static bool cuda_order_is_free(const struct cuda *c, const struct cuda_signals *s)
{
	bool is = s->freeing && s->pending == 0 && !s->writing && list_empty(&s->poison_link);

	for (unsigned q = 0; is && q < _BACKEND_Q_N; q++)
		is = s->until[q] <= c->queues[q].marks_tail;
	return is;
}

static struct cuda_signals *cuda_order_take_free(struct cuda *c)
{
	struct cuda_signals *s, *tmp, *found = NULL;

	pthread_mutex_lock(&c->lock);
	list_for_each (s, tmp, &c->signals, link)
		if (!found && cuda_order_is_free(c, s))
			found = s;
	if (found)
		list_unlink(&found->link);
	pthread_mutex_unlock(&c->lock);
	return found;
}

void cuda_signals_collect(struct cuda *c)
{
	struct cuda_signals *s;

	while ((s = cuda_order_take_free(c))) {
		void (*freed)(void *) = s->freed;
		void *userdata = s->userdata;

		cuda_order_close_events(c, s);
		free(s);
		if (freed)
			freed(userdata);
	}
}

#endif
