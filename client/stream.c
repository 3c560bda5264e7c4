#include "stream.h"

#include "client.h"
#include "client_error.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "stream_impl.h"

#define NAP_NS 50000

static void stream_nap(void)
{
	nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
}

/* ----------------------------------------------------------------------- ops */

static CUdeviceptr stream_word(CUdeviceptr base, const struct stream_link *link, uint32_t slot)
{
	return base + (uint64_t)slot * link->stride;
}

/* The event is free when the op that it was recorded for last has been answered. Every
 * op is, at the latest at its deadline. */
static void stream_await_event(struct streams *s, const struct stream *x, uint32_t i)
{
	while (x->holders[i] && !tickets_is_answered(&s->client->tickets, x->holders[i]))
		stream_nap();
}

static int stream_signal_event(struct streams *s, struct stream *x, uint64_t id,
			       struct shardd_error *err)
{
	uint32_t i = (uint32_t)((x->value + 1) % x->ring_size);
	CUresult r;

	stream_await_event(s, x, i);
	r = s->cuda->lib->cuEventRecord(x->ring[i], x->stream);
	if (r != CUDA_SUCCESS)
		return cuda_error(s->cuda, r, err, "cannot record an event on the stream");
	x->holders[i] = id;
	x->value++;
	return 0;
}

static int stream_signal_word(struct streams *s, const struct stream_link *link, struct stream *x,
			      struct shardd_error *err)
{
	CUresult r =
		s->cuda->lib->cuStreamWriteValue64(x->stream,
						   stream_word(link->signals, link, x->slot),
						   x->value + 1, CU_STREAM_WRITE_VALUE_DEFAULT);

	if (r != CUDA_SUCCESS)
		return cuda_error(s->cuda, r, err, "cannot queue a write of the stream's word");
	x->value++;
	/* Some answers have no point to wait for that would follow the raising: those of a release, of
	 * a failed op, and of an op without a waiter. */
	x->raising = true;
	r = s->cuda->lib->cuEventRecord(x->raised, x->stream);
	if (r != CUDA_SUCCESS)
		return cuda_error(s->cuda, r, err, "cannot record an event on the stream");
	return 0;
}

int stream_begin(struct streams *s, uint64_t id, struct stream_ref *ret,
		 Shardd__V1__StreamPoint *ret_point, struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	struct stream *x = pthread_getspecific(s->key);
	/* Joins, which change it, hold the order lock as well. */
	const struct stream_link *link = s->link;
	int r;

	if (!x)
		return 0;
	if (!stream_link_orders(link) || !link->open || x->slot >= link->slots)
		return stream_link_refused(err);
	r = cuda_enter(s->cuda, &scope, err);
	if (r == 0 && link->order == SHARDD__V1__STREAM_LINK__ORDER__ORDER_EVENTS)
		r = stream_signal_event(s, x, id, err);
	else if (r == 0)
		r = stream_signal_word(s, link, x, err);
	if (r < 0)
		return r;
	*ret = (struct stream_ref){ x, link };
	ret_point->slot = x->slot;
	ret_point->value = x->value;
	return 1;
}

static CUresult stream_put_wait(const struct cuda *c, const struct stream_ref *ref,
				const Shardd__V1__StreamPoint *ready)
{
	const struct stream_link *link = ref->link;
	uint64_t i = (uint64_t)ready->slot * link->ring_size;

	if (link->order == SHARDD__V1__STREAM_LINK__ORDER__ORDER_EVENTS)
		return c->lib->cuStreamWaitEvent(
			ref->stream->stream, link->ready_events[i + ready->value % link->ring_size],
			0);
	return c->lib->cuStreamWaitValue64(ref->stream->stream,
					   stream_word(link->ready, link, ready->slot),
					   ready->value, CU_STREAM_WAIT_VALUE_GEQ);
}

int stream_end(struct streams *s, const struct stream_ref *ref,
	       const Shardd__V1__StreamPoint *ready, struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	bool gone;
	int entered;
	CUresult r;

	if (!ref->stream || !ready)
		return 0;
	if (ready->slot >= ref->link->queues)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon's answer names queue %u, there are %u", ready->slot,
				 ref->link->queues);
	entered = cuda_enter(s->cuda, &scope, err);
	if (entered < 0)
		return entered;
	pthread_mutex_lock(&s->lock);
	gone = ref->link->gone;
	r = gone ? CUDA_SUCCESS : stream_put_wait(s->cuda, ref, ready);
	if (r == CUDA_SUCCESS && !gone)
		r = s->cuda->lib->cuEventRecord(ref->stream->mark, ref->stream->stream);
	ref->stream->marked |= !gone;
	pthread_mutex_unlock(&s->lock);
	if (gone)
		return 1;
	if (r != CUDA_SUCCESS)
		return cuda_error(s->cuda, r, err, "cannot make the stream wait for the daemon");
	return 0;
}

/* --------------------------------------------------------------------- quiet */

/* Return: 1 (the device has not come to it), 0, or a negative shardd_code. */
static int stream_is_pending(struct streams *s, CUevent event, bool *pending,
			     struct shardd_error *err)
{
	CUresult r = *pending ? s->cuda->lib->cuEventQuery(event) : CUDA_SUCCESS;

	if (r == CUDA_ERROR_NOT_READY)
		return 1;
	if (r != CUDA_SUCCESS)
		return cuda_error(s->cuda, r, err, "a stream has failed");
	*pending = false;
	return 0;
}

/* Locked. Return: 1 (a stream waits), 0, or a negative shardd_code. */
static int stream_is_waiting(struct streams *s, struct shardd_error *err)
{
	int r = 0;

	for (uint32_t i = 0; i < s->count && r == 0; i++)
		r = stream_is_pending(s, s->items[i]->mark, &s->items[i]->marked, err);
	return r;
}

/* Locked, and no op begins. Return: 1 (a stream waits, or has a word to raise), 0, or a
 * negative shardd_code. */
static int stream_is_using(struct streams *s, struct shardd_error *err)
{
	int r = stream_is_waiting(s, err);

	for (uint32_t i = 0; i < s->count && r == 0; i++)
		r = stream_is_pending(s, s->items[i]->raised, &s->items[i]->raising, err);
	return r;
}

/* Locked, so no wait is added and this ends. Return: the last value of @look. */
static int stream_look_until(struct streams *s,
			     int (*look)(struct streams *s, struct shardd_error *err),
			     uint64_t start, int timeout_ms, struct shardd_error *err)
{
	int r;

	while ((r = look(s, err)) > 0) {
		if (timeout_ms >= 0 && clock_now_us() - start >= (uint64_t)timeout_ms * 1000u)
			break;
		stream_nap();
	}
	return r;
}

static int stream_not_now(struct shardd_error *err)
{
	error_set(err, SHARDD_DEADLINE_EXCEEDED, NULL,
		  "new memory cannot be mapped while a stream waits for the daemon");
	if (err)
		err->native = EAGAIN;
	return -SHARDD_DEADLINE_EXCEEDED;
}

int streams_quiet(struct streams *s, int timeout_ms, struct shardd_error *err)
{
	uint64_t start = clock_now_us();
	int r;

	if (!s)
		return 0;
	if (timeout_ms != 0)
		pthread_mutex_lock(&s->lock);
	else if (pthread_mutex_trylock(&s->lock) != 0)
		return stream_not_now(err);
	r = stream_look_until(s, stream_is_waiting, start, timeout_ms, err);
	if (r == 0)
		return 0;
	pthread_mutex_unlock(&s->lock);
	return r < 0 ? r : stream_not_now(err);
}

void streams_unquiet(struct streams *s)
{
	if (s)
		pthread_mutex_unlock(&s->lock);
}

static int stream_stuck(const struct streams *s, struct shardd_error *err)
{
	return error_set(err, SHARDD_UNAVAILABLE, NULL,
			 "a stream of this process on GPU %s still waits for the daemon that has "
			 "ended, or does not end: start this process again",
			 s->cuda->uuid);
}

int streams_part(struct streams *s, int timeout_ms, struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	int r = cuda_enter(s->cuda, &scope, err);
	CUresult cr;

	if (r < 0)
		return r;
	pthread_mutex_lock(&s->lock);
	r = stream_look_until(s, stream_is_using, clock_now_us(), timeout_ms, err);
	for (struct stream_link *l = s->link; r == 0 && l; l = l->older)
		l->gone = true;
	pthread_mutex_unlock(&s->lock);
	if (r != 0)
		return r < 0 ? r : stream_stuck(s, err);
	cr = s->cuda->lib->cuCtxSynchronize();
	return cr == CUDA_SUCCESS ? 0
				  : cuda_error(s->cuda, cr, err, "this process's work has failed");
}

bool streams_settle(struct streams *s, int timeout_ms)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	struct shardd_error err;
	int r = cuda_enter(s->cuda, &scope, &err);

	if (r == 0) {
		pthread_mutex_lock(&s->lock);
		r = stream_look_until(s, stream_is_using, clock_now_us(), timeout_ms, &err);
		pthread_mutex_unlock(&s->lock);
	}
	/* A lost device runs nothing any more. */
	return r <= 0;
}

#endif
