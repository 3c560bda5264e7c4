#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "channel.h"
#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "methods.h"
#include "shardd.pb-c.h"
#include "thread.h"

/* How long one sleeps before it looks whether the daemon is still there: no futex says so. After a
 * death this is a part of the time to the next step. */
#define SLEEP_US 10000u
/* A slot whose submission has no waiter any more. */
#define ABANDONED ((struct ring_pending *)-1)

/* A thread that sleeps until @p is done, or until it is asked to look. */
struct ring_waiter {
	struct ring_waiter *next;
	const struct ring_pending *p; /* NULL: any */
	pthread_cond_t wake;
	int told_fd; /* an eventfd that is signalled, too; -1: none */
};

/* The thread of ring_serve. */
struct ring_server {
	pthread_t id;
	struct ring_waiter waiter; /* in ring.waiters while it runs */
	bool runs, stop;
	uint64_t late_us; /* which deadlines had passed when it last looked */
};

struct ring {
	struct ring_shared *shared;
	const struct ring_entry *cq;
	struct ring_entry *sq;
	const uint8_t *cq_long;
	uint8_t *sq_long;
	uint64_t bytes;
	uint32_t entries;
	int event_fd; /* wakes the daemon */
	int watch_fd; /* the local channel's, for its hang-up */
	char path[128];

	pthread_mutex_t lock; /* over all below */
	uint32_t sq_tail, cq_head;
	uint32_t sq_head;            /* as last seen */
	struct ring_pending **slots; /* by tag; NULL: free */
	uint32_t *free_slots;
	uint32_t n_free;
	uint64_t cancelled[RING_MAX_ENTRIES / 64]; /* slots whose ops were cancelled; bits */
	uint32_t n_cancelled;
	bool looking;       /* a thread does, without the lock */
	bool lost;          /* the daemon is gone */
	uint64_t looked_us; /* whether it is, last */
	struct ring_waiter *waiters;
	atomic_uint pokes; /* calls of ring_poke */
	struct ring_server server;
};

/* ------------------------------------------------------------------ submission */

/* Behind the barrier of what was published. */
static void ring_wake_daemon(struct ring *r)
{
	const uint64_t one = 1;

	if (atomic_load_explicit(&r->shared->daemon_sleeps, memory_order_seq_cst) &&
	    atomic_exchange_explicit(&r->shared->daemon_sleeps, 0, memory_order_relaxed))
		while (write(r->event_fd, &one, sizeof(one)) < 0 && errno == EINTR)
			;
}

uint16_t ring_number(const char *method)
{
	const char *name = strrchr(method, '/');
	const struct method *m = name ? methods_find(name + 1) : NULL;

	return m && m->carried ? m->number : 0;
}

/* With the lock held. */
static void ring_put(struct ring *r, uint16_t op, const ProtobufCMessage *request, uint32_t bytes,
		     uint32_t slot)
{
	uint32_t i = r->sq_tail & (r->entries - 1);
	struct ring_entry *e = &r->sq[i];

	e->tag = slot;
	e->op = op;
	e->code = 0;
	e->bytes = bytes;
	if (bytes)
		protobuf_c_message_pack(request,
					bytes <= RING_SHORT_BYTES
						? e->data
						: r->sq_long + (size_t)i * RING_LONG_BYTES);
	r->sq_tail++;
	/* with the daemon's acquire of sq_tail: the entry is there; and a barrier before
	 * daemon_sleeps is looked at, as the daemon has one between the same two */
	ring_publish(&r->shared->sq_tail, r->sq_tail);
}

static bool ring_has_room(struct ring *r)
{
	if (r->sq_tail - r->sq_head == r->entries)
		/* with the daemon's release of sq_head: it has read those entries */
		r->sq_head = atomic_load_explicit(&r->shared->sq_head, memory_order_acquire);
	return r->n_free > 0 && r->sq_tail - r->sq_head < r->entries;
}

/* ------------------------------------------------------------------ completions */

__attribute__((noinline)) static void ring_wake(struct ring_waiter *w)
{
	const uint64_t one = 1;

	pthread_cond_signal(&w->wake);
	if (w->told_fd >= 0) /* if it is full it is readable already */
		while (write(w->told_fd, &one, sizeof(one)) < 0 && errno == EINTR)
			;
}

static void ring_wake_waiters(struct ring *r, const struct ring_pending *p)
{
	for (struct ring_waiter *w = r->waiters; w; w = w->next)
		if (!p || !w->p || w->p == p)
			ring_wake(w);
}

static void ring_take_message(struct ring_pending *p, const struct ring_entry *e,
			      const uint8_t *longer)
{
	uint8_t *to = p->data;

	p->code = e->code;
	p->bytes = e->bytes;
	if (e->bytes > RING_SHORT_BYTES) {
		p->longer = malloc(e->bytes);
		to = p->longer;
	}
	if (to)
		memcpy(to, e->bytes > RING_SHORT_BYTES ? longer : e->data, e->bytes);
	/* with the acquire of whoever waits without the lock: all of it is there */
	atomic_store_explicit(&p->done, true, memory_order_release);
}

/* Its op has ended, and the slot is going to be another one's. */
static void ring_end_cancel(struct ring *r, uint32_t slot)
{
	uint64_t bit = UINT64_C(1) << slot % 64;

	if (!(r->cancelled[slot / 64] & bit))
		return;
	r->cancelled[slot / 64] &= ~bit;
	r->n_cancelled--;
	/* before the next submission with this slot, so that the daemon never takes it for that one */
	atomic_fetch_and(&r->shared->cancels[slot / 64], ~bit);
}

static void ring_take(struct ring *r)
{
	uint32_t i = r->cq_head & (r->entries - 1);
	const struct ring_entry *e = &r->cq[i];
	struct ring_pending *p;

	r->cq_head++;
	CHECK(e->tag < r->entries && r->slots[e->tag] && e->bytes <= RING_LONG_BYTES);
	p = r->slots[e->tag];
	r->slots[e->tag] = NULL;
	if (r->n_cancelled)
		ring_end_cancel(r, (uint32_t)e->tag);
	r->free_slots[r->n_free++] = (uint32_t)e->tag;
	if (p == ABANDONED)
		return;
	ring_take_message(p, e, r->cq_long + (size_t)i * RING_LONG_BYTES);
	ring_wake_waiters(r, p); /* @p may be gone: only its address is looked at */
}

static bool ring_is_there(const struct ring *r)
{
	/* with the daemon's release of cq_tail: the entries are there */
	return atomic_load_explicit(&r->shared->cq_tail, memory_order_seq_cst) != r->cq_head;
}

/* All that are there. Lock held. */
static void ring_take_all(struct ring *r)
{
	uint32_t tail = atomic_load_explicit(&r->shared->cq_tail, memory_order_acquire);
	bool blocked;

	if (tail == r->cq_head)
		return;
	while (r->cq_head != tail)
		ring_take(r);
	/* with the daemon's acquire of cq_head: it may write there again; and a barrier, as above */
	ring_publish(&r->shared->cq_head, r->cq_head);
	/* it may have stopped taking, for want of room */
	blocked = atomic_load_explicit(&r->shared->sq_head, memory_order_relaxed) != r->sq_tail;
	if (blocked)
		ring_wake_daemon(r);
}

int ring_start(struct ring *r, uint16_t op, const ProtobufCMessage *request, const char *method,
	       const ProtobufCMessageDescriptor *reply, uint32_t timeout_ms, struct ring_pending *p)
{
	size_t bytes = request ? protobuf_c_message_get_packed_size(request) : 0;
	int rc = 0;

	if (bytes > RING_LONG_BYTES)
		return RING_E_TOO_LONG;
	/* field by field: its data need not be cleared */
	p->ring = r;
	p->method = method;
	p->reply = reply;
	p->timeout_ms = timeout_ms;
	p->deadline_us = timeout_ms ? clock_now_us() + timeout_ms * 1000ull : 0;
	atomic_init(&p->done, false);
	atomic_init(&p->lost, false);
	p->longer = NULL;
	pthread_mutex_lock(&r->lock);
	if (!ring_has_room(r) && !r->looking) /* slots without a waiter */
		ring_take_all(r);
	if (r->lost) {
		p->ring = NULL;
		rc = RING_E_LOST;
	} else if (ring_has_room(r)) {
		p->slot = r->free_slots[--r->n_free];
		r->slots[p->slot] = p;
		ring_put(r, op, request, (uint32_t)bytes, p->slot);
	} else {
		p->ring = NULL;
		rc = RING_E_FULL;
	}
	pthread_mutex_unlock(&r->lock);
	if (rc == 0)
		ring_wake_daemon(r);
	return rc;
}

/* ------------------------------------------------------------------ waiting */

static bool ring_hung_up(const struct ring *r)
{
	struct pollfd p = { .fd = r->watch_fd, .events = POLLRDHUP };

	return atomic_load(&r->shared->closed) || poll(&p, 1, 0) > 0;
}

/* Without the lock; one thread. Return: something may be there. */
static bool ring_spin(const struct ring *r)
{
	uint32_t us = atomic_load_explicit(&r->shared->spin_us, memory_order_relaxed);
	uint64_t end;

	if (ring_is_there(r) || !us)
		return ring_is_there(r);
	end = clock_now_us() + us;
	do {
		for (unsigned i = 0; i < 64; i++) {
			if (ring_is_there(r))
				return true;
			ring_pause();
		}
		sched_yield(); /* the daemon may have been put on this core */
	} while (clock_now_us() < end);
	return false;
}

/* Not beyond a poke after @pokes of them. */
static void ring_sleep_for(struct ring *r, uint64_t us, unsigned pokes)
{
	struct timespec ts = { .tv_sec = (time_t)(us / 1000000),
			       .tv_nsec = (long)(us % 1000000) * 1000 };

	/* before cq_tail and the pokes are looked at: the daemon and ring_poke have a barrier between
	 * the same two */
	atomic_store_explicit(&r->shared->client_sleeps, 1, memory_order_seq_cst);
	if (!ring_is_there(r) && atomic_load(&r->pokes) == pokes)
		syscall(SYS_futex, &r->shared->client_sleeps, FUTEX_WAIT, 1, &ts, NULL, 0);
	atomic_store_explicit(&r->shared->client_sleeps, 0, memory_order_relaxed);
}

/* The daemon is gone, and with it all answers that are not there. Lock held. */
static void ring_lose(struct ring *r)
{
	if (r->lost)
		return;
	r->lost = true;
	for (uint32_t i = 0; i < r->entries; i++)
		if (r->slots[i] && r->slots[i] != ABANDONED)
			r->slots[i]->lost = true;
	ring_wake_waiters(r, NULL);
}

static bool ring_is_done(const struct ring_pending *p)
{
	/* with take_message's release */
	return atomic_load_explicit(&p->done, memory_order_acquire);
}

static bool ring_has_ended(const struct ring_pending *p)
{
	return ring_is_done(p) || atomic_load_explicit(&p->lost, memory_order_acquire);
}

/* Without sleeping; who never does sees here that the daemon is gone. Lock held. */
__attribute__((always_inline)) static inline void ring_glance(struct ring *r,
							      const struct ring_pending *p)
{
	uint64_t now;
	bool gone;

	ring_take_all(r);
	if (ring_has_ended(p))
		return;
	now = clock_now_us();
	if (now - r->looked_us < SLEEP_US)
		return;
	r->looked_us = now;
	gone = ring_hung_up(r);
	ring_take_all(r);
	if (gone)
		ring_lose(r);
}

/* Look, sleep a while at most. Lock dropped meanwhile. */
__attribute__((always_inline)) static inline void ring_look(struct ring *r, uint64_t until_us,
							    bool spins)
{
	unsigned pokes = atomic_load(&r->pokes);
	uint64_t now;
	bool gone = false;

	r->looking = true;
	pthread_mutex_unlock(&r->lock);
	if (!(spins ? ring_spin(r) : ring_is_there(r))) {
		now = clock_now_us();
		if (now < until_us)
			ring_sleep_for(r, until_us - now < SLEEP_US ? until_us - now : SLEEP_US,
				       pokes);
		gone = ring_hung_up(r);
	}
	pthread_mutex_lock(&r->lock);
	r->looking = false;
	ring_take_all(r);
	if (gone)
		ring_lose(r);
}

static void ring_follow(struct ring *r, const struct ring_pending *p, uint64_t until_us)
{
	struct ring_waiter w = { .next = r->waiters, .p = p, .told_fd = -1 };
	struct timespec at = { .tv_sec = (time_t)(until_us / 1000000),
			       .tv_nsec = (long)(until_us % 1000000) * 1000 };
	struct ring_waiter **link;
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&w.wake, &attr);
	pthread_condattr_destroy(&attr);
	r->waiters = &w;
	if (until_us == UINT64_MAX)
		pthread_cond_wait(&w.wake, &r->lock);
	else
		pthread_cond_timedwait(&w.wake, &r->lock, &at);
	for (link = &r->waiters; *link != &w; link = &(*link)->next)
		;
	*link = w.next;
	pthread_cond_destroy(&w.wake);
}

static bool ring_is_late(const struct ring_pending *p)
{
	return p->deadline_us && clock_now_us() >= p->deadline_us;
}

bool ring_pending_wait(struct ring_pending *p, int timeout_ms)
{
	struct ring *r = p->ring;
	uint64_t until;
	bool ended;

	if (!r || ring_has_ended(p)) /* often with one that was waited for before */
		return true;
	until = timeout_ms < 0 ? UINT64_MAX : clock_now_us() + (uint64_t)timeout_ms * 1000u;
	if (p->deadline_us && p->deadline_us < until)
		until = p->deadline_us;
	pthread_mutex_lock(&r->lock);
	if (!ring_has_ended(p) && !r->looking)
		ring_glance(r, p);
	while (!ring_has_ended(p) && timeout_ms != 0 && clock_now_us() < until) {
		if (r->looking)
			ring_follow(r, p, until);
		else
			ring_look(r, until, true);
	}
	/* Another waiter must continue to poll. */
	if (!r->looking && r->waiters)
		pthread_cond_signal(&r->waiters->wake);
	ended = ring_has_ended(p) || ring_is_late(p);
	pthread_mutex_unlock(&r->lock);
	return ended;
}

/* ------------------------------------------------------------------ one of several */

unsigned ring_pokes(const struct ring *r)
{
	return atomic_load(&r->pokes);
}

/* Lock held. */
static void ring_poke_locked(struct ring *r)
{
	atomic_fetch_add(&r->pokes, 1); /* as the daemon posts: before the flag is looked at */
	if (atomic_exchange(&r->shared->client_sleeps, 0))
		syscall(SYS_futex, &r->shared->client_sleeps, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	for (struct ring_waiter *w = r->waiters; w; w = w->next)
		if (!w->p)
			ring_wake(w);
}

void ring_poke(struct ring *r)
{
	pthread_mutex_lock(&r->lock);
	ring_poke_locked(r);
	pthread_mutex_unlock(&r->lock);
}

bool ring_pending_ended(const struct ring_pending *p)
{
	return ring_has_ended(p) || ring_is_late(p);
}

bool ring_pending_is_lost(const struct ring_pending *p)
{
	return atomic_load(&p->lost) && !ring_is_done(p);
}

static bool ring_any_ended(struct ring_pending *const *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (ring_has_ended(p[i]))
			return true;
	return false;
}

bool ring_wait_any(struct ring *r, struct ring_pending *const *p, size_t n, unsigned pokes,
		   int timeout_ms)
{
	uint64_t until =
		timeout_ms < 0 ? UINT64_MAX : clock_now_us() + (uint64_t)timeout_ms * 1000u;
	bool ended;

	CHECK(n > 0);
	for (size_t i = 0; i < n; i++)
		if (p[i]->deadline_us && p[i]->deadline_us < until)
			until = p[i]->deadline_us;
	pthread_mutex_lock(&r->lock);
	if (!r->looking)
		ring_glance(r, p[0]);
	while (!ring_any_ended(p, n) && timeout_ms != 0 && ring_pokes(r) == pokes &&
	       clock_now_us() < until) {
		if (r->looking)
			ring_follow(r, NULL, until);
		else
			ring_look(r, until, true);
	}
	if (!r->looking && r->waiters)
		pthread_cond_signal(&r->waiters->wake);
	ended = ring_any_ended(p, n);
	pthread_mutex_unlock(&r->lock);
	for (size_t i = 0; !ended && i < n; i++)
		ended = ring_is_late(p[i]);
	return ended;
}

/* ------------------------------------------------------- a thread that waits */

/* Submissions whose deadline has passed since the last look have ended, too. Lock held. */
static void ring_tell_late(struct ring *r)
{
	uint64_t now = clock_now_us();
	bool any = false;

	for (uint32_t i = 0; i < r->entries && !any; i++) {
		const struct ring_pending *p = r->slots[i];

		any = p && p != ABANDONED && p->deadline_us > r->server.late_us &&
		      p->deadline_us <= now;
	}
	r->server.late_us = now;
	if (any)
		ring_wake(&r->server.waiter);
}

static void *ring_serve_thread(void *arg)
{
	struct ring *r = arg;
	struct ring_waiter *w = &r->server.waiter;

	pthread_mutex_lock(&r->lock);
	while (!r->server.stop && !r->lost) {
		if (r->looking)
			pthread_cond_wait(&w->wake, &r->lock);
		else
			ring_look(r, UINT64_MAX, false);
		ring_tell_late(r);
	}
	while (!r->server.stop) /* nothing ends any more */
		pthread_cond_wait(&w->wake, &r->lock);
	if (!r->looking && r->waiters)
		pthread_cond_signal(&r->waiters->wake);
	pthread_mutex_unlock(&r->lock);
	return NULL;
}

int ring_serve(struct ring *r, int told_fd)
{
	struct ring_server *s = &r->server;
	int e = 0;

	pthread_mutex_lock(&r->lock);
	if (!s->runs) {
		s->waiter = (struct ring_waiter){ .told_fd = told_fd };
		s->late_us = clock_now_us();
		pthread_cond_init(&s->waiter.wake, NULL);
		e = thread_start(&s->id, ring_serve_thread, r);
		s->runs = e == 0;
		if (s->runs) {
			s->waiter.next = r->waiters;
			r->waiters = &s->waiter;
		} else {
			pthread_cond_destroy(&s->waiter.wake);
		}
	}
	pthread_mutex_unlock(&r->lock);
	return -e;
}

/* Its waiter stays in the list: nobody waits any more. */
static void ring_stop_serving(struct ring *r)
{
	if (!r->server.runs)
		return;
	pthread_mutex_lock(&r->lock);
	r->server.stop = true;
	ring_poke_locked(r);
	pthread_mutex_unlock(&r->lock);
	pthread_join(r->server.id, NULL);
	pthread_cond_destroy(&r->server.waiter.wake);
}

/* ------------------------------------------------------------------ outcome */

static int ring_failed(const struct ring_pending *p, const uint8_t *data, struct shardd_error *err)
{
	Shardd__V1__ErrorInfo *info = shardd__v1__error_info__unpack(NULL, p->bytes, data);
	int code = p->code <= 16 ? p->code : SHARDD_UNKNOWN;

	if (!info)
		return error_set(err, (enum shardd_code)code, NULL, "%s failed", p->method);
	if (err)
		error_from_info(err, code, info);
	shardd__v1__error_info__free_unpacked(info, NULL);
	return -code;
}

int ring_pending_result(struct ring_pending *p, ProtobufCMessage **ret, struct shardd_error *err)
{
	const uint8_t *data = p->longer ? p->longer : p->data;
	ProtobufCMessage *msg;

	if (!ring_is_done(p) && p->lost)
		return error_lost(err,
				  "the daemon at %s closed the connection: %s was not answered",
				  p->ring->path, p->method);
	if (!ring_is_done(p))
		return error_set(err, SHARDD_DEADLINE_EXCEEDED, NULL,
				 "%s was not answered within %u ms", p->method, p->timeout_ms);
	if (p->bytes > RING_SHORT_BYTES && !p->longer)
		return error_memory(err);
	if (p->code)
		return ring_failed(p, data, err);
	if (!p->reply) { /* RING_NOP */
		*ret = NULL;
		return 0;
	}
	msg = protobuf_c_message_unpack(p->reply, NULL, p->bytes, data);
	if (!msg)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "%s: the daemon's answer is not a valid %s", p->method,
				 p->reply->name);
	*ret = msg;
	return 0;
}

void ring_pending_cancel(struct ring_pending *p)
{
	const uint64_t one = 1;
	struct ring *r = p->ring;
	uint64_t bit = UINT64_C(1) << p->slot % 64;
	bool first = false;

	if (!r || ring_has_ended(p))
		return;
	pthread_mutex_lock(&r->lock);
	if (!ring_has_ended(p)) {
		first = !(r->cancelled[p->slot / 64] & bit);
		r->n_cancelled += first;
		r->cancelled[p->slot / 64] |= bit;
		atomic_fetch_or(&r->shared->cancels[p->slot / 64], bit);
	}
	pthread_mutex_unlock(&r->lock);
	/* also while it polls: it looks at the bits for an event only */
	while (first && write(r->event_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void ring_pending_free(struct ring_pending *p)
{
	struct ring *r = STEAL_PTR(p->ring);

	if (r && !ring_is_done(p)) {
		pthread_mutex_lock(&r->lock);
		if (!ring_is_done(p))
			r->slots[p->slot] = ABANDONED;
		pthread_mutex_unlock(&r->lock);
	}
	free(STEAL_PTR(p->longer));
}

/* ------------------------------------------------------------------ open, close */

static bool ring_is_right(const struct ring_shared *s, uint64_t bytes)
{
	struct ring_shared plan = { .magic = 0 };

	if (s->magic != RING_MAGIC || s->entries < RING_MIN_ENTRIES ||
	    s->entries > RING_MAX_ENTRIES || s->entries & (s->entries - 1))
		return false;
	ring_layout(&plan, s->entries);
	return s->bytes == plan.bytes && bytes == plan.bytes && s->sq == plan.sq &&
	       s->cq == plan.cq && s->sq_long == plan.sq_long && s->cq_long == plan.cq_long;
}

static int ring_make_slots(struct ring *r)
{
	r->slots = calloc(r->entries, sizeof(struct ring_pending *));
	r->free_slots = calloc(r->entries, sizeof(*r->free_slots));
	if (!r->slots || !r->free_slots)
		return -ENOMEM;
	for (uint32_t i = 0; i < r->entries; i++)
		r->free_slots[r->n_free++] = r->entries - 1 - i;
	return 0;
}

int ring_use(void *memory, uint64_t bytes, int event_fd, int watch_fd, const char *path,
	     struct ring **ret, struct shardd_error *err)
{
	struct ring_shared *s = memory;
	struct ring *r = calloc(1, sizeof(*r));

	if (r)
		*r = (struct ring){
			.shared = s, .bytes = bytes, .event_fd = event_fd, .watch_fd = watch_fd
		};
	if (r && ring_is_right(s, bytes)) {
		pthread_mutex_init(&r->lock, NULL);
		snprintf(r->path, sizeof(r->path), "%s", path);
		r->entries = s->entries;
		r->sq = (struct ring_entry *)((char *)s + s->sq);
		r->cq = (const struct ring_entry *)((char *)s + s->cq);
		r->sq_long = (uint8_t *)s + s->sq_long;
		r->cq_long = (const uint8_t *)s + s->cq_long;
		*ret = r;
		if (ring_make_slots(r) == 0)
			return 0;
		ring_close(r);
		return error_memory(err);
	}
	munmap(memory, bytes);
	fd_close(event_fd);
	fd_close(watch_fd);
	if (!r)
		return error_memory(err);
	free(r);
	return error_set(err, SHARDD_INTERNAL, NULL, "the daemon's ring is invalid");
}

int ring_open(struct channel *channel, const char *path, struct ring **ret,
	      struct shardd_error *err)
{
	_cleanup_(fd_closep) int fd = -1, event_fd = -1;
	uint64_t bytes = 0;
	void *memory;
	int watch_fd;
	int r = channel_ring(channel, SHD1_RING_MEMORY, &fd, &bytes, err);

	if (r == 0)
		r = channel_ring(channel, SHD1_RING_EVENT, &event_fd, &bytes, err);
	if (r < 0)
		return r;
	if (bytes < sizeof(struct ring_shared))
		return error_set(err, SHARDD_INTERNAL, NULL, "the daemon's ring is too small");
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno, "cannot map the ring");
	watch_fd = fcntl(channel->fd, F_DUPFD_CLOEXEC, 3);
	if (watch_fd < 0) {
		r = error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno, "cannot watch the channel");
		munmap(memory, bytes);
		return r;
	}
	return ring_use(memory, bytes, STEAL_FD(event_fd), watch_fd, path, ret, err);
}

void ring_close(struct ring *r)
{
	if (!r)
		return;
	ring_stop_serving(r);
	munmap(r->shared, r->bytes);
	fd_close(r->event_fd);
	fd_close(r->watch_fd);
	free(r->slots);
	free(r->free_slots);
	pthread_mutex_destroy(&r->lock);
	free(r);
}
