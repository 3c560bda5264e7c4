#include "ticket.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"

#define SLOT_BITS 24u
#define SLOT_MAX  (1u << SLOT_BITS)
#define USES_MAX  (UINT64_MAX >> SLOT_BITS)
#define SPARE_MAX 256u

void tickets_init(struct tickets *t)
{
	*t = (struct tickets){ .first_free = TICKET_NO_SLOT };
	pthread_mutex_init(&t->lock, NULL);
}

bool ticket_wait(struct ticket *ticket, int timeout_ms)
{
	return ticket->pending ? rpc_pending_wait(ticket->pending, timeout_ms)
			       : ring_pending_wait(&ticket->ring, timeout_ms);
}

int ticket_result(struct ticket *ticket, ProtobufCMessage **ret, struct shardd_error *err)
{
	return ticket->pending ? rpc_pending_result(ticket->pending, ret, err)
			       : ring_pending_result(&ticket->ring, ret, err);
}

bool ticket_is_lost(const struct ticket *ticket)
{
	if (ticket->reply)
		return false;
	return ticket->pending ? rpc_pending_is_lost(ticket->pending)
			       : ring_pending_is_lost(&ticket->ring);
}

/* ------------------------------------------------------------- one of several */

int ticket_set_init(struct ticket_set *s, size_t n)
{
	*s = (struct ticket_set){ .n = n };
	s->tickets = calloc(n, sizeof(struct ticket *));
	s->rings = calloc(n, sizeof(struct ring_pending *));
	s->rpcs = calloc(n, sizeof(struct rpc_pending *));
	return s->tickets && s->rings && s->rpcs ? 0 : -ENOMEM;
}

void ticket_set_put(struct ticket_set *s, size_t place, struct ticket *ticket)
{
	s->tickets[place] = ticket;
	if (ticket->pending) {
		s->rpcs[s->n_rpcs++] = ticket->pending;
	} else {
		s->ring = ticket->ring.ring;
		s->rings[s->n_rings++] = &ticket->ring;
	}
}

void ticket_set_deinit(struct ticket_set *s)
{
	free(STEAL_PTR(s->tickets));
	free(STEAL_PTR(s->rings));
	free(STEAL_PTR(s->rpcs));
}

/* The first that has ended, as far as is known. */
static bool ticket_set_find(const struct ticket_set *s, size_t *ret)
{
	for (size_t i = 0; i < s->n; i++) {
		struct ticket *x = s->tickets[i];

		if (!x || !(x->reply || (x->pending ? rpc_pending_wait(x->pending, 0)
						    : ring_pending_ended(&x->ring))))
			continue;
		*ret = i;
		return true;
	}
	return false;
}

/* Some are in the ring. gRPC calls are driven by another thread, which pokes it. */
static bool ticket_set_wait_ring(const struct ticket_set *s, int timeout_ms)
{
	uint64_t end = clock_now_us() + (uint64_t)timeout_ms * 1000;

	for (;;) {
		unsigned pokes = ring_pokes(s->ring);
		uint64_t now = clock_now_us();
		int left = timeout_ms < 0 ? -1 : now < end ? (int)((end - now + 999) / 1000) : 0;

		if ((s->n_rpcs && rpc_pending_wait_any(s->rpcs, s->n_rpcs, 0)) ||
		    ring_wait_any(s->ring, s->rings, s->n_rings, pokes, left))
			return true;
		if (left == 0)
			return false;
	}
}

bool ticket_set_wait(const struct ticket_set *s, int timeout_ms, size_t *ret)
{
	bool any;

	if (ticket_set_find(s, ret))
		return true;
	any = s->n_rings ? ticket_set_wait_ring(s, timeout_ms)
			 : rpc_pending_wait_any(s->rpcs, s->n_rpcs, timeout_ms);
	return any && ticket_set_find(s, ret);
}

/* ------------------------------------------------------------------- the table */

/* Let go of what it has. */
static void ticket_clear(struct ticket *ticket)
{
	if (ticket->reply)
		protobuf_c_message_free_unpacked(STEAL_PTR(ticket->reply), NULL);
	if (ticket->pending)
		rpc_pending_free(STEAL_PTR(ticket->pending));
	ring_pending_free(&ticket->ring);
}

static void ticket_free(struct ticket *ticket)
{
	if (!ticket)
		return;
	ticket_clear(ticket);
	free(ticket);
}

void tickets_deinit(struct tickets *t)
{
	for (uint32_t i = 0; i < t->count; i++)
		ticket_free(STEAL_PTR(t->slots[i].ticket));
	while (t->spare) {
		struct ticket *x = t->spare;

		t->spare = x->next;
		free(x);
	}
	t->n_spare = 0;
	free(STEAL_PTR(t->slots));
	t->count = 0;
	t->room = 0;
	t->unanswered = 0;
	t->first_free = TICKET_NO_SLOT;
}

static uint32_t ticket_slot_of(uint64_t id)
{
	return (uint32_t)(id & (SLOT_MAX - 1));
}

static struct ticket_slot *ticket_find(struct tickets *t, uint64_t id)
{
	uint32_t i = ticket_slot_of(id);

	if (i >= t->count || !t->slots[i].ticket || t->slots[i].uses != id >> SLOT_BITS)
		return NULL;
	return &t->slots[i];
}

/* Add a free slot. Return: 0 or -ENOMEM. */
static int ticket_grow(struct tickets *t)
{
	uint32_t room = t->room ? t->room * 2 : 64;
	struct ticket_slot *bigger;

	if (t->count == SLOT_MAX)
		return -ENOMEM;
	if (t->count == t->room) {
		bigger = realloc(t->slots, room * sizeof(*bigger));
		if (!bigger)
			return -ENOMEM;
		t->slots = bigger;
		t->room = room;
	}
	t->slots[t->count] = (struct ticket_slot){ .next_free = t->first_free };
	t->first_free = t->count++;
	return 0;
}

/* There may be answers that no thread has waited for yet. */
static void ticket_count_again(struct tickets *t)
{
	for (uint32_t i = 0; i < t->count; i++) {
		struct ticket *x = t->slots[i].ticket;

		if (!x || x->claimed || x->answered || !ticket_wait(x, 0))
			continue;
		x->answered = true;
		t->unanswered--;
	}
}

static int ticket_add(struct tickets *t, struct ticket *x, uint32_t limit, uint64_t *ret_id)
{
	struct ticket_slot *slot;

	if (limit && t->unanswered >= limit)
		ticket_count_again(t);
	if (limit && t->unanswered >= limit)
		return TICKET_E_FULL;
	if (t->first_free == TICKET_NO_SLOT && ticket_grow(t) < 0)
		return -ENOMEM;
	slot = &t->slots[t->first_free];
	slot->uses++;
	slot->ticket = x;
	*ret_id = slot->uses << SLOT_BITS | t->first_free;
	t->first_free = slot->next_free;
	t->unanswered++;
	return 0;
}

/* A cleared one, or NULL without memory. */
static struct ticket *ticket_take_spare(struct tickets *t)
{
	struct ticket *x = t->spare;

	if (!x)
		return calloc(1, sizeof(*x));
	t->spare = x->next;
	t->n_spare--;
	x->stream = (struct stream_ref){ 0 };
	x->out = (struct op_out){ 0 };
	x->debug = NULL;
	x->link = NULL;
	x->answered = false;
	x->detached = false;
	x->epoch = x->number = x->unit = 0;
	return x;
}

static void ticket_give_spare(struct tickets *t, struct ticket *x)
{
	if (t->n_spare == SPARE_MAX) {
		free(x);
		return;
	}
	x->next = t->spare;
	t->spare = x;
	t->n_spare++;
}

int tickets_add(struct tickets *t, const struct op *op, uint32_t limit, struct ticket **ret,
		uint64_t *ret_id)
{
	struct ticket *x;
	int r = -ENOMEM;

	pthread_mutex_lock(&t->lock);
	x = ticket_take_spare(t);
	if (x) {
		x->op = op;
		atomic_init(&x->claimed, true);
		r = ticket_add(t, x, limit, ret_id);
		if (r)
			ticket_give_spare(t, x);
	}
	pthread_mutex_unlock(&t->lock);
	if (r == 0)
		*ret = x;
	return r;
}

int tickets_claim(struct tickets *t, uint64_t id, struct ticket **ret)
{
	struct ticket_slot *slot;
	int r = TICKET_E_NONE;

	pthread_mutex_lock(&t->lock);
	slot = ticket_find(t, id);
	if (slot && slot->ticket->detached)
		slot = NULL;
	if (slot && slot->ticket->claimed) {
		r = TICKET_E_CLAIMED;
	} else if (slot) {
		slot->ticket->claimed = true;
		*ret = slot->ticket;
		r = 0;
	}
	pthread_mutex_unlock(&t->lock);
	return r;
}

void tickets_detach(struct tickets *t, struct ticket *ticket)
{
	pthread_mutex_lock(&t->lock);
	CHECK(ticket->claimed && !ticket->detached);
	ticket->detached = true;
	ticket->out = (struct op_out){ 0 };
	t->detached++;
	ticket->claimed = false;
	pthread_mutex_unlock(&t->lock);
}

bool tickets_take_detached(struct tickets *t, bool ended, uint64_t *ret_id, struct ticket **ret)
{
	bool found = false;

	pthread_mutex_lock(&t->lock);
	for (uint32_t i = 0; i < t->count && !found; i++) {
		struct ticket *x = t->slots[i].ticket;

		found = x && x->detached && !x->claimed && (!ended || ticket_wait(x, 0));
		if (!found)
			continue;
		x->claimed = true;
		*ret = x;
		*ret_id = t->slots[i].uses << SLOT_BITS | i;
	}
	pthread_mutex_unlock(&t->lock);
	return found;
}

int tickets_cancel(struct tickets *t, uint64_t id)
{
	struct ticket_slot *slot;
	int r = TICKET_E_NONE;

	pthread_mutex_lock(&t->lock);
	slot = ticket_find(t, id);
	if (slot && slot->ticket->pending) {
		r = TICKET_E_GRPC;
	} else if (slot) {
		ring_pending_cancel(&slot->ticket->ring);
		r = 0;
	}
	pthread_mutex_unlock(&t->lock);
	return r;
}

void tickets_release(struct tickets *t, struct ticket *ticket)
{
	(void)t;
	CHECK(ticket->claimed);
	/* with the acquire of who claims it next: what this thread has noted in it */
	atomic_store_explicit(&ticket->claimed, false, memory_order_release);
}

static void ticket_answered(struct tickets *t, struct ticket *ticket)
{
	if (ticket->answered)
		return;
	CHECK(t->unanswered > 0);
	ticket->answered = true;
	t->unanswered--;
}

void tickets_answered(struct tickets *t, struct ticket *ticket)
{
	pthread_mutex_lock(&t->lock);
	CHECK(ticket->claimed);
	ticket_answered(t, ticket);
	pthread_mutex_unlock(&t->lock);
}

bool tickets_is_answered(struct tickets *t, uint64_t id)
{
	struct ticket_slot *slot;
	bool is;

	pthread_mutex_lock(&t->lock);
	slot = ticket_find(t, id);
	/* The thread that has claimed it handles the answer. */
	if (slot && !slot->ticket->claimed && !slot->ticket->answered &&
	    ticket_wait(slot->ticket, 0))
		ticket_answered(t, slot->ticket);
	is = !slot || slot->ticket->answered;
	pthread_mutex_unlock(&t->lock);
	return is;
}

bool tickets_uses(struct tickets *t, const struct link *l)
{
	bool found = false;

	pthread_mutex_lock(&t->lock);
	for (uint32_t i = 0; i < t->count && !found; i++)
		found = t->slots[i].ticket && t->slots[i].ticket->link == l;
	pthread_mutex_unlock(&t->lock);
	return found;
}

void tickets_end(struct tickets *t, uint64_t id)
{
	struct ticket_slot *slot;
	struct ticket *ticket;

	pthread_mutex_lock(&t->lock);
	slot = ticket_find(t, id);
	CHECK(slot && slot->ticket->claimed);
	ticket = STEAL_PTR(slot->ticket);
	if (ticket->detached)
		t->detached--;
	ticket_answered(t, ticket);
	ticket_clear(ticket);
	ticket_give_spare(t, ticket);
	if (slot->uses < USES_MAX) {
		slot->next_free = t->first_free;
		t->first_free = ticket_slot_of(id);
	}
	pthread_mutex_unlock(&t->lock);
}
