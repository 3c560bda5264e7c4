/*
 * The setup thread: allocates and frees memory, only while no foreign wait is open on its device,
 * and writes poison at any time.
 *
 * It waits for the streams first. That wait ends, since nothing in the streams waits for another
 * process then, of this node or of another one, and the engine starts nothing new until the thread is
 * done.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"

/* Memory that so many later requests have overtaken is no longer wanted: its requester is gone. */
#define MOST_AGE 16u
/* After this time the requester does not claim it any more: its trainer is gone. */
#define UNCLAIMED_US 2000000u
/* A session that still lives may overwrite its poison: it is written again at this interval while
 * something waits. */
#define REPOISON_NS 20000000L

/* --------------------------------------------------------------- setup thread */

/* Issued work may use the memory that is freed now. Also, the calls that allocate memory may wait
 * for the device while they hold the driver's locks: then the work on the device must not wait for
 * the launch of its counterpart on another device. */
static void cuda_setup_drain(struct cuda *c)
{
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		cuda_drain(c, c->queues[q].stream);
}

static void cuda_setup_free_all(struct cuda *c, struct list *frees)
{
	struct cuda_mem *m, *tmp;

	list_for_each (m, tmp, frees, link) {
		list_unlink(&m->link);
		cuda_mem_unmake(c, m);
	}
}

static void cuda_setup_make_all(struct cuda *c, struct list *requests)
{
	struct cuda_request *q, *tmp;

	list_for_each (q, tmp, requests, link)
		q->result = atomic_load(&c->lost) ? -EIO
						  : cuda_mem_make(c, q->bytes, q->share, &q->mem);
}

static bool cuda_setup_has_work(const struct cuda *c)
{
	return !list_empty(&c->requests) || !list_empty(&c->frees) || c->import_fd >= 0;
}

static bool cuda_setup_is_quiet(const struct cuda *c)
{
	if (atomic_load(&c->lost))
		return true;
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		if (c->queues[q].holds > 0)
			return false;
	return c->foreign == 0;
}

/* Handle all requests. With the lock held, dropped inside. */
static void cuda_setup_work(struct cuda *c)
{
	struct list frees = LIST_INIT(frees);
	int fd = c->import_fd;

	list_take_all(&frees, &c->frees);
	list_take_all(&c->doing, &c->requests);
	c->setting_up = true;
	pthread_mutex_unlock(&c->lock);
	cuda_setup_drain(c);
	cuda_setup_free_all(c, &frees);
	cuda_setup_make_all(c, &c->doing);
	if (fd >= 0)
		c->import.result = cuda_mem_import(c, fd, c->import.bytes, &c->import.mem);
	pthread_mutex_lock(&c->lock);
	c->setting_up = false;
	if (fd >= 0)
		c->import_fd = -1;
	if (!list_empty(&c->doing))
		cuda_tick(c);
	list_take_all(&c->finished, &c->doing);
	pthread_cond_broadcast(&c->calm);
}

static void cuda_setup_write_poison(struct cuda *c)
{
	struct cuda_signals *s = list_first(&c->poison, struct cuda_signals, poison_link);

	list_unlink(&s->poison_link);
	s->writing = true;
	pthread_mutex_unlock(&c->lock);
	cuda_order_write_poison(c, s);
	pthread_mutex_lock(&c->lock);
	s->writing = false;
	cuda_tick(c); /* another thread may wait to free it */
}

static bool cuda_setup_is_waited_for(const struct cuda *c, const struct cuda_signals *s)
{
	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		if (s->until[q] > c->queues[q].marks_tail)
			return true;
	return false;
}

/* Wait for work; only for a moment if poison may have to be written again. */
static void cuda_setup_wait_for_work(struct cuda *c)
{
	struct cuda_signals *s, *tmp;
	struct timespec at;
	bool again = false;

	list_for_each (s, tmp, &c->signals, link)
		again |= atomic_load(&s->poisoned) && cuda_setup_is_waited_for(c, s);
	if (!again || atomic_load(&c->lost)) {
		pthread_cond_wait(&c->setup, &c->lock);
		return;
	}
	clock_gettime(CLOCK_MONOTONIC, &at);
	at.tv_nsec += REPOISON_NS;
	at.tv_sec += at.tv_nsec / 1000000000L;
	at.tv_nsec %= 1000000000L;
	if (pthread_cond_clockwait(&c->setup, &c->lock, CLOCK_MONOTONIC, &at) != ETIMEDOUT)
		return;
	list_for_each (s, tmp, &c->signals, link)
		if (atomic_load(&s->poisoned) && cuda_setup_is_waited_for(c, s) &&
		    list_empty(&s->poison_link))
			list_append(&c->poison, &s->poison_link);
}

static void cuda_setup_set_gate(struct cuda *c, bool closed)
{
	if (c->gate && !closed)
		pthread_cond_broadcast(&c->work);
	c->gate = closed;
}

void *cuda_setup_main(void *cuda)
{
	struct cuda *c = cuda;

	cuda_result(c, c->lib->cuCtxSetCurrent(c->context), "cuCtxSetCurrent");
	pthread_mutex_lock(&c->lock);
	for (;;) {
		if (!list_empty(&c->poison)) {
			cuda_setup_write_poison(c);
			continue;
		}
		cuda_setup_set_gate(c, cuda_setup_has_work(c));
		if (c->gate && cuda_setup_is_quiet(c))
			cuda_setup_work(c);
		else if (!c->gate && c->threads.stop_setup)
			break;
		else
			cuda_setup_wait_for_work(c);
	}
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

/* ---------------------------------------------------------------- loop thread */

static struct cuda_request *cuda_setup_find(struct list *list, uint64_t bytes,
					    enum backend_share share)
{
	struct cuda_request *q, *tmp;

	list_for_each (q, tmp, list, link)
		if (q->bytes == bytes && q->share == share)
			return q;
	return NULL;
}

/* Wake the setup thread; no new foreign wait from here on. With the lock held. */
static void cuda_setup_wake(struct cuda *c)
{
	c->gate = true;
	pthread_cond_signal(&c->setup);
}

static void cuda_setup_hand_in(struct cuda *c, struct cuda_request *q)
{
	pthread_mutex_lock(&c->lock);
	list_append(&c->requests, &q->link);
	cuda_setup_wake(c);
	pthread_mutex_unlock(&c->lock);
}

static bool cuda_setup_is_asked_for(struct cuda *c, uint64_t bytes, enum backend_share share)
{
	bool is;

	pthread_mutex_lock(&c->lock);
	is = cuda_setup_find(&c->requests, bytes, share) ||
	     cuda_setup_find(&c->doing, bytes, share) ||
	     cuda_setup_find(&c->finished, bytes, share);
	pthread_mutex_unlock(&c->lock);
	return is;
}

static int cuda_setup_ask(struct cuda *c, uint64_t bytes, enum backend_share share)
{
	struct cuda_request *q;

	if (cuda_setup_is_asked_for(c, bytes, share))
		return BACKEND_E_LATER;
	q = calloc(1, sizeof(*q));
	if (!q)
		return -ENOMEM;
	q->bytes = bytes;
	q->share = share;
	list_init(&q->link);
	cuda_setup_hand_in(c, q);
	return BACKEND_E_LATER;
}

int cuda_setup_alloc(struct backend *b, uint64_t bytes, enum backend_share share,
		     struct backend_mem **ret)
{
	struct cuda *c = cuda_of(b);
	struct cuda_request *q = cuda_setup_find(&c->unclaimed, bytes, share);
	int r;

	if (!q && atomic_load(&c->lost))
		return -EIO;
	if (!q)
		return bytes > b->info.capacity_bytes ? BACKEND_E_FULL
						      : cuda_setup_ask(c, bytes, share);
	r = q->result;
	if (r == 0)
		*ret = &q->mem->mem;
	list_unlink(&q->link);
	free(q);
	return r;
}

void cuda_setup_free(struct backend *b, struct backend_mem *mem)
{
	struct cuda *c = cuda_of(b);
	struct cuda_mem *m = CONTAINER_OF(mem, struct cuda_mem, mem);

	pthread_mutex_lock(&c->lock);
	list_append(&c->frees, &m->link);
	cuda_setup_wake(c);
	pthread_mutex_unlock(&c->lock);
}

/* Only at start, for memory that outlived another daemon: the loop blocks for it. */
int cuda_setup_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret)
{
	struct cuda *c = cuda_of(b);
	int r = 0;

	if (bytes == 0 || bytes % b->info.granularity != 0)
		return -EINVAL;
	if (atomic_load(&c->lost))
		return -EIO;
	pthread_mutex_lock(&c->lock);
	if (b->in_flight > 0 || !cuda_setup_is_quiet(c)) {
		r = -EBUSY;
	} else {
		c->import = (struct cuda_request){ .bytes = bytes };
		c->import_fd = fd;
		cuda_setup_wake(c);
		while (c->import_fd >= 0)
			pthread_cond_wait(&c->calm, &c->lock);
		r = c->import.result;
	}
	pthread_mutex_unlock(&c->lock);
	if (r == 0)
		*ret = &c->import.mem->mem;
	return r;
}

static struct cuda_request *cuda_setup_discard(struct cuda *c, struct cuda_request *q)
{
	list_unlink(&q->link);
	if (q->mem)
		cuda_setup_free(&c->backend, &q->mem->mem);
	free(q);
	return NULL;
}

/* Free all unclaimed memory and try once more. Return: false if that cannot help. */
static bool cuda_setup_try_again(struct cuda *c, struct cuda_request *q)
{
	struct cuda_request *other, *tmp;
	bool gain = false;

	if (q->result != BACKEND_E_FULL || q->again)
		return false;
	list_for_each (other, tmp, &c->unclaimed, link) {
		if (!other->mem || other->age == 0)
			continue;
		cuda_setup_discard(c, other);
		gain = true;
	}
	if (!gain)
		return false;
	q->again = true;
	list_unlink(&q->link);
	cuda_setup_hand_in(c, q);
	return true;
}

static void cuda_setup_age_unclaimed(struct cuda *c)
{
	struct cuda_request *q, *tmp;

	list_for_each (q, tmp, &c->unclaimed, link)
		if (++q->age > MOST_AGE)
			cuda_setup_discard(c, q);
}

void cuda_setup_tick(struct backend *b, uint64_t now_us)
{
	struct cuda *c = cuda_of(b);
	struct cuda_request *q, *tmp;

	list_for_each (q, tmp, &c->unclaimed, link) {
		if (!q->made_us)
			q->made_us = now_us;
		else if (now_us - q->made_us > UNCLAIMED_US)
			cuda_setup_discard(c, q);
	}
}

bool cuda_setup_collect(struct cuda *c)
{
	struct list finished = LIST_INIT(finished);
	struct cuda_request *q, *tmp;
	bool news = false;

	pthread_mutex_lock(&c->lock);
	list_take_all(&finished, &c->finished);
	pthread_mutex_unlock(&c->lock);
	list_for_each (q, tmp, &finished, link) {
		if (cuda_setup_try_again(c, q))
			continue;
		cuda_setup_age_unclaimed(c);
		list_unlink(&q->link);
		list_append(&c->unclaimed, &q->link);
		news = true;
	}
	return news;
}

/* At the end, in the thread that closes, which has the context. */
void cuda_setup_deinit(struct cuda *c)
{
	struct cuda_request *q, *tmp;

	list_take_all(&c->unclaimed, &c->finished);
	list_take_all(&c->unclaimed, &c->requests);
	list_for_each (q, tmp, &c->unclaimed, link) {
		list_unlink(&q->link);
		cuda_mem_unmake(c, q->mem);
		free(q);
	}
	CHECK(list_empty(&c->frees) && list_empty(&c->doing));
}

#endif
