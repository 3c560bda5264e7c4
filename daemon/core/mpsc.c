#include "core/mpsc.h"

void mpsc_init(struct mpsc *q)
{
	atomic_init(&q->stub.next, NULL);
	atomic_init(&q->head, &q->stub);
	q->tail = &q->stub;
}

void mpsc_push(struct mpsc *q, struct mpsc_node *node)
{
	struct mpsc_node *prev;

	atomic_store_explicit(&node->next, NULL, memory_order_relaxed);
	/* acq_rel: later pushers link behind a node whose next is already NULL */
	prev = atomic_exchange_explicit(&q->head, node, memory_order_acq_rel);
	/* release: pairs with the acquire loads in mpsc_pop */
	atomic_store_explicit(&prev->next, node, memory_order_release);
}

struct mpsc_node *mpsc_pop(struct mpsc *q)
{
	struct mpsc_node *tail = q->tail;
	struct mpsc_node *next = atomic_load_explicit(&tail->next, memory_order_acquire);

	if (tail == &q->stub) {
		if (!next)
			return NULL;
		q->tail = next;
		tail = next;
		next = atomic_load_explicit(&tail->next, memory_order_acquire);
	}
	if (next) {
		q->tail = next;
		return tail;
	}
	/* tail is the last complete node: take it only if the stub can follow it */
	if (tail != atomic_load_explicit(&q->head, memory_order_acquire))
		return NULL;
	mpsc_push(q, &q->stub);
	next = atomic_load_explicit(&tail->next, memory_order_acquire);
	if (!next)
		return NULL;
	q->tail = next;
	return tail;
}
