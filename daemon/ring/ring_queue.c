#include "ring/ring_queue.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/memfd.h"
#include "core/check.h"

uint32_t ring_queue_entries(uint32_t ops)
{
	uint32_t n = RING_MIN_ENTRIES;

	while (n < ops && n < RING_MAX_ENTRIES)
		n *= 2;
	return n;
}

uint64_t ring_queue_bytes(uint32_t entries)
{
	struct ring_shared plan;

	ring_layout(&plan, entries);
	return plan.bytes;
}

int ring_queue_init(struct ring_queue *q, uint32_t entries, int *ret_fd)
{
	struct ring_shared plan = { .magic = RING_MAGIC, .version = RING_VERSION };
	struct memfd *m;
	char *p;
	int r;

	ring_layout(&plan, entries);
	r = memfd_new(plan.bytes, &m);
	if (r)
		return r < 0 ? r : -ENOMEM;
	r = memfd_export(m, true, ret_fd);
	if (r) {
		memfd_free(m);
		return r;
	}
	p = m->mem.addr;
	madvise(p, plan.bytes, MADV_NOHUGEPAGE); /* most of it is never touched */
	memcpy(p, &plan, offsetof(struct ring_shared, sq_tail));
	*q = (struct ring_queue){ .memory = m,
				  .shared = (struct ring_shared *)(void *)p,
				  .sq = (struct ring_entry *)(void *)(p + plan.sq),
				  .cq = (struct ring_entry *)(void *)(p + plan.cq),
				  .sq_long = (uint8_t *)p + plan.sq_long,
				  .cq_long = (uint8_t *)p + plan.cq_long,
				  .bytes = plan.bytes,
				  .entries = entries };
	atomic_store(&q->shared->daemon_sleeps, 1);
	return 0;
}

static bool ring_queue_wake_client(struct ring_queue *q)
{
	if (!atomic_load_explicit(&q->shared->client_sleeps, memory_order_seq_cst))
		return false;
	atomic_store_explicit(&q->shared->client_sleeps, 0, memory_order_relaxed);
	q->n_wakes++;
	syscall(SYS_futex, &q->shared->client_sleeps, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	return true;
}

void ring_queue_end(struct ring_queue *q)
{
	if (!q->shared)
		return;
	atomic_store(&q->shared->closed, 1);
	ring_queue_wake_client(q);
}

bool ring_queue_is_held(const struct ring_queue *q)
{
	return memfd_is_held(q->memory);
}

void ring_queue_deinit(struct ring_queue *q)
{
	ring_queue_end(q);
	q->memory = memfd_let_go(q->memory);
	q->shared = NULL;
}

/* Completions that the client has not read. Return: -RING_E_BROKEN: the value is impossible. */
static int ring_queue_unread(struct ring_queue *q)
{
	/* with the client's release of cq_head: it has read those entries */
	uint32_t head = atomic_load_explicit(&q->shared->cq_head, memory_order_seq_cst);

	if (head - q->cq_head > q->cq_tail - q->cq_head)
		return -RING_E_BROKEN;
	q->cq_head = head;
	return (int)(q->cq_tail - head);
}

int ring_queue_ready(struct ring_queue *q)
{
	/* with the client's release of sq_tail: the entries are there */
	uint32_t tail = atomic_load_explicit(&q->shared->sq_tail, memory_order_seq_cst);
	uint32_t n = tail - q->sq_head;
	int left, kept;

	if (n == 0)
		return 0;
	kept = ring_queue_unread(q);
	if (n > q->entries || kept < 0)
		return -RING_E_BROKEN;
	left = (int)(q->entries - q->unanswered) - kept;
	q->n_full += (int)n > left;
	return (int)n < left ? (int)n : left;
}

bool ring_queue_has_more(const struct ring_queue *q)
{
	return atomic_load_explicit(&q->shared->sq_tail, memory_order_seq_cst) != q->sq_head;
}

int ring_queue_take(struct ring_queue *q, struct ring_submission *ret)
{
	uint32_t i = q->sq_head & (q->entries - 1);
	struct ring_entry e;

	/* once: what the client changes from here on changes nothing */
	memcpy(&e, &q->sq[i], sizeof(e));
	ret->tag = e.tag;
	ret->op = e.op;
	ret->bytes = e.bytes;
	if (e.code || e.bytes > RING_LONG_BYTES)
		return RING_E_BROKEN;
	if (e.bytes <= RING_SHORT_BYTES)
		memcpy(ret->data, e.data, e.bytes);
	else
		memcpy(ret->data, q->sq_long + (size_t)i * RING_LONG_BYTES, e.bytes);
	q->sq_head++;
	q->n_taken++;
	q->unanswered++;
	return 0;
}

void ring_queue_taken(struct ring_queue *q)
{
	/* with the client's acquire of sq_head: it may write there again */
	atomic_store_explicit(&q->shared->sq_head, q->sq_head, memory_order_release);
}

void ring_queue_post(struct ring_queue *q, uint64_t tag, uint16_t code, const void *data,
		     uint32_t bytes)
{
	uint32_t i = q->cq_tail & (q->entries - 1);
	struct ring_entry *e = &q->cq[i];

	CHECK(bytes <= RING_LONG_BYTES && q->unanswered > 0);
	e->tag = tag;
	e->op = 0;
	e->code = code;
	e->bytes = bytes;
	if (bytes)
		memcpy(bytes <= RING_SHORT_BYTES ? e->data
						 : q->cq_long + (size_t)i * RING_LONG_BYTES,
		       data, bytes);
	q->unanswered--;
	q->cq_tail++;
	q->n_posted++;
	q->posted = true;
	/* with the client's acquire of cq_tail: the entry is there */
	atomic_store_explicit(&q->shared->cq_tail, q->cq_tail, memory_order_release);
}

bool ring_queue_wake(struct ring_queue *q)
{
	if (!q->posted)
		return false;
	q->posted = false;
	/* between cq_tail and client_sleeps, as the client has one between the same two */
	ring_barrier(&q->shared->cq_tail);
	return ring_queue_wake_client(q);
}

bool ring_queue_sleep(struct ring_queue *q)
{
	/* before sq_tail and cq_head are looked at: the client has a barrier between the same */
	atomic_store_explicit(&q->shared->daemon_sleeps, 1, memory_order_seq_cst);
	if (ring_queue_ready(q) == 0)
		return true;
	ring_queue_awake(q);
	return false;
}

void ring_queue_awake(struct ring_queue *q)
{
	atomic_store_explicit(&q->shared->daemon_sleeps, 0, memory_order_relaxed);
}
