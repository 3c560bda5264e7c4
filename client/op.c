#include "op.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "call.h"
#include "reconnect.h"
#include "client_error.h"
#include "completion.h"
#include "core/check.h"
#include "core/clock.h"
#include "options.h"
#include "status.h"
#include "stream.h"

/* The daemon's own deadline is to come first: its error says what was waited for. */
#define RPC_GRACE_MS 2000u

/* ----------------------------------------------------------------- submission */

static int op_add_ticket(struct shardd_client *c, const struct op *op, struct ticket **ret,
			 uint64_t *ret_id, struct shardd_error *err)
{
	int r = tickets_add(&c->tickets, op, c->daemon.max_ops, ret, ret_id);

	if (r == TICKET_E_FULL)
		return error_set(err, SHARDD_RESOURCE_EXHAUSTED, NULL,
				 "%u ops of this session are unanswered, which is the limit: wait "
				 "for a ticket first",
				 c->daemon.max_ops);
	return r < 0 ? error_memory(err) : 0;
}

static uint32_t op_rpc_timeout(uint32_t timeout_ms)
{
	if (!timeout_ms)
		return 0;
	return timeout_ms > INT32_MAX - RPC_GRACE_MS ? INT32_MAX : timeout_ms + RPC_GRACE_MS;
}

static int op_not_taken(int ring_error, struct shardd_error *err)
{
	if (ring_error == RING_E_LOST)
		return error_lost(err, "the daemon has closed the connection");
	return error_set(err, SHARDD_RESOURCE_EXHAUSTED, NULL,
			 "the ring to the daemon is full: wait for a ticket first");
}

/* Called with c->order held. Ops are static, so their addresses identify them. */
static uint16_t op_number_of(struct shardd_client *c, const struct op *op)
{
	struct client_number *n = &c->numbers[(uintptr_t)op / sizeof(*op) % CLIENT_NUMBERS];

	if (n->op != op)
		*n = (struct client_number){ op, ring_number(op->method) };
	return n->number;
}

/* Over the ring, where it goes there. */
static int op_send_request(struct shardd_client *c, const struct op *op,
			   const ProtobufCMessage *request, uint32_t timeout_ms,
			   struct ticket *ticket, struct shardd_error *err)
{
	struct link *l = c->link;
	uint16_t number = l->ring ? op_number_of(c, op) : 0;
	int r;

	ticket->link = l;
	r = number ? ring_start(l->ring, number, request, op->method, op->reply, timeout_ms,
				&ticket->ring)
		   : RING_E_TOO_LONG;
	if (r == RING_E_FULL || r == RING_E_LOST)
		return op_not_taken(r, err);
	if (r == 0)
		return 0;
	return rpc_client_start(l->rpc, op->method, request, op->reply, false, timeout_ms,
				&ticket->pending, err);
}

/* Number it and send it. Called with c->order held. */
static int op_start(struct shardd_client *c, const struct op *op, ProtobufCMessage *request,
		    uint64_t id, struct ticket *ticket, struct shardd_error *err)
{
	Shardd__V1__StreamPoint point = SHARDD__V1__STREAM_POINT__INIT;
	Shardd__V1__StreamPoint *after[] = { &point };
	Shardd__V1__OpHeader header = SHARDD__V1__OP_HEADER__INIT;
	struct op_request *q = (struct op_request *)request;
	struct streams *streams = atomic_load(&c->streams);
	uint32_t timeout_ms = atomic_load(&c->timeout_ms);
	int r = streams ? stream_begin(streams, id, &ticket->stream, &point, err) : 0;

	if (r < 0)
		return r;
	header.stream = r > 0;
	header.n_after = r > 0;
	header.after = after;
	header.epoch = c->epoch;
	header.seq = c->seq + 1;
	header.timeout_ms = timeout_ms;
	q->header = &header;
	r = op_send_request(c, op, request, op_rpc_timeout(timeout_ms), ticket, err);
	q->header = NULL;
	if (r == 0)
		c->seq++;
	return r;
}

/* The unit that a request names, 0: none. */
static uint32_t op_unit_of(const ProtobufCMessage *request)
{
	const ProtobufCFieldDescriptor *f =
		protobuf_c_message_descriptor_get_field_by_name(request->descriptor, "unit");

	if (!f || f->type != PROTOBUF_C_TYPE_UINT32 || f->label == PROTOBUF_C_LABEL_REPEATED)
		return 0;
	return *(const uint32_t *)((const char *)request + f->offset);
}

static int op_submit_ordered(struct shardd_client *c, const struct op *op,
			     ProtobufCMessage *request, struct op_out out, shardd_ticket *t,
			     struct shardd_error *err)
{
	struct ticket *ticket;
	uint64_t id;
	int r;

	if (!c->joined && c->ended_epoch)
		return reconnect_outcome(c, 0, c->ended_epoch, err);
	if (!c->joined)
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "this client has not joined a job: call shardd_join first");
	r = op_add_ticket(c, op, &ticket, &id, err);
	if (r < 0)
		return r;
	ticket->out = out;
	ticket->epoch = c->epoch;
	ticket->number = c->seq + 1;
	if (c->on_stall.call)
		ticket->unit = op_unit_of(request);
	r = op_start(c, op, request, id, ticket, err);
	if (r < 0) {
		tickets_end(&c->tickets, id);
		return r;
	}
	if (c->debug)
		ticket->debug = debug_begin(c->debug, c->seq, request);
	tickets_release(&c->tickets, ticket);
	*t = id;
	return 0;
}

/* Answered by the ring itself. */
static const struct op nop = { .method = "Nop" };

/* Called with c->order held. */
static int op_submit_nop(struct shardd_client *c, shardd_ticket *t, struct shardd_error *err)
{
	struct ticket *ticket;
	uint64_t id;
	int r;

	if (!c->link->ring)
		return error_set(err, SHARDD_UNIMPLEMENTED, NULL,
				 "this client has no ring to the daemon");
	r = op_add_ticket(c, &nop, &ticket, &id, err);
	if (r < 0)
		return r;
	ticket->link = c->link;
	r = ring_start(c->link->ring, RING_NOP, NULL, nop.method, NULL,
		       op_rpc_timeout(atomic_load(&c->timeout_ms)), &ticket->ring);
	if (r) {
		tickets_end(&c->tickets, id);
		return op_not_taken(r, err);
	}
	tickets_release(&c->tickets, ticket);
	*t = id;
	return 0;
}

static int op_check_submit(const struct shardd_client *c, const shardd_ticket *t,
			   struct shardd_error *err)
{
	int r = client_check(c, err);

	if (r < 0 || t)
		return r;
	return error_set(err, SHARDD_INVALID_ARGUMENT, "ticket",
			 "the pointer to the ticket is NULL");
}

int shardd_submit_nop(shardd_client *c, const struct shardd_nop_options *options, shardd_ticket *t,
		      struct shardd_error *err)
{
	struct shardd_nop_options room;
	struct shardd_error e;
	uint32_t link;
	int r = op_check_submit(c, t, err);

	if (r < 0)
		return r;
	if (!OPTIONS_READ(options, &room, err))
		return -SHARDD_INVALID_ARGUMENT;
	pthread_mutex_lock(&c->order);
	r = op_submit_nop(c, t, &e);
	link = c->link->number;
	pthread_mutex_unlock(&c->order);
	if (r == 0)
		return 0;
	r = call_after_loss(c, link, r, &e);
	if (err)
		*err = e;
	return r;
}

int op_submit_out(struct shardd_client *c, const struct op *op, ProtobufCMessage *request,
		  struct op_out out, shardd_ticket *t, struct shardd_error *err)
{
	struct shardd_error e;
	uint32_t link;
	uint64_t epoch;
	int r = op_check_submit(c, t, err);

	if (r < 0)
		return r;
	if (atomic_load_explicit(&c->tickets.detached, memory_order_relaxed) ||
	    atomic_load_explicit(&c->failure.is_there, memory_order_relaxed)) {
		r = op_detached(c, false, err);
		if (r < 0)
			return r;
	}
	pthread_mutex_lock(&c->order);
	r = op_submit_ordered(c, op, request, out, t, &e);
	link = c->link->number;
	epoch = c->epoch;
	pthread_mutex_unlock(&c->order);
	if (r == 0)
		return 0;
	if (error_is_lost(r, &e) && reconnect_is_on(c)) {
		reconnect_wait(c, link, -1);
		r = reconnect_outcome(c, link, epoch, &e);
	}
	if (err)
		*err = e;
	return r;
}

int op_submit(struct shardd_client *c, const struct op *op, ProtobufCMessage *request,
	      shardd_ticket *t, struct shardd_error *err)
{
	return op_submit_out(c, op, request, (struct op_out){ 0 }, t, err);
}

/* --------------------------------------------------------------------- result */

static int op_not_yet(struct shardd_error *err)
{
	error_set(err, SHARDD_DEADLINE_EXCEEDED, NULL,
		  "the wait ended before the op: the op continues, wait again");
	err->native = EAGAIN;
	return -SHARDD_DEADLINE_EXCEEDED;
}

static void op_common_result(struct shardd_client *c, const ProtobufCMessage *reply,
			     struct shardd_result *ret)
{
	const Shardd__V1__OpInfo *info = ((const struct op_reply *)reply)->info;

	if (!info)
		return;
	ret->number = info->number;
	ret->waited_us = info->waited_us;
	ret->ran_us = info->ran_us;
	if (info->draining)
		atomic_store(&c->draining, true);
}

static int op_take_place(struct shardd_client *c, const struct ticket *ticket,
			 const Shardd__V1__Placement *p, int timeout_ms, struct shardd_result *ret,
			 struct shardd_error *err)
{
	struct map_place place = { .slab = p->slab,
				   .offset = p->offset,
				   .bytes = p->bytes,
				   .writable = p->writable,
				   .slab_bytes = p->slab_bytes };
	int r;

	if (p->ipc_handle.len == MAP_IPC_BYTES)
		place.ipc = p->ipc_handle.data;
	ret->bytes = p->bytes;
	r = map_address(&c->map, &place, timeout_ms, &ret->data, err);
	if (r == 0 && c->debug)
		r = debug_lend(c->debug, ticket->debug, ticket->reply, &place, &ret->data, err);
	return r;
}

/* What an earlier daemon named may be other memory now. */
static int op_take_place_of_link(struct shardd_client *c, const struct ticket *ticket,
				 const Shardd__V1__Placement *p, int timeout_ms,
				 struct shardd_result *ret, struct shardd_error *err)
{
	uint32_t link = ticket->link->number;
	int r = 0;

	if (client_has_link(c, link))
		r = op_take_place(c, ticket, p, timeout_ms, ret, err);
	if (client_has_link(c, link))
		return r;
	*ret = (struct shardd_result){ 0 };
	return reconnect_outcome(c, link, ticket->epoch, err);
}

/* What follows on the ticket's stream waits for the op. The answer of a daemon that has died since
 * says that the op was queued, and not that it was executed. */
static int op_order_stream(struct shardd_client *c, const struct ticket *ticket,
			   const Shardd__V1__StreamPoint *ready, struct shardd_result *ret,
			   struct shardd_error *err)
{
	uint32_t link = ticket->link->number;
	int r = 1;

	if (client_has_link(c, link))
		r = stream_end(atomic_load(&c->streams), &ticket->stream, ready, err);
	if (r <= 0)
		return r;
	*ret = (struct shardd_result){ 0 };
	return reconnect_outcome(c, link, ticket->epoch, err);
}

/* Turn the reply into a result; its memory is mapped here, by whoever waits. Where
 * that fails the daemon has done the op all the same: the channel is broken or this
 * process cannot map any more, and what the session holds ends with the session. The
 * stream's wait comes last: nothing is mapped while one is pending. */
static int op_take_result(struct shardd_client *c, struct ticket *ticket, int timeout_ms,
			  struct shardd_result *ret, struct shardd_error *err)
{
	const Shardd__V1__Placement *p = NULL;
	const Shardd__V1__OpInfo *info;
	int r = 0;

	if (!ticket->reply)
		r = ticket_result(ticket, &ticket->reply, err);
	if (r < 0)
		return r;
	*ret = (struct shardd_result){ 0 };
	if (!ticket->reply) /* of a nop */
		return 0;
	op_common_result(c, ticket->reply, ret);
	if (ticket->op->result)
		ticket->op->result(ticket->reply, ret, &p);
	if (ticket->op->keep)
		r = ticket->op->keep(c, ticket->reply, err);
	if (r == 0 && p && !ticket->detached)
		r = op_take_place_of_link(c, ticket, p, timeout_ms, ret, err);
	if (r == 0 && ticket->op->out && ticket->out.data)
		r = ticket->op->out(ticket->reply, ret, &ticket->out, err);
	info = ((const struct op_reply *)ticket->reply)->info;
	if (r == 0 && info && info->ready && ticket->stream.stream)
		r = op_order_stream(c, ticket, info->ready, ret, err);
	return r;
}

/* How long a wait does not look for interrupts, and a stall callback's granularity. */
#define WAIT_SLICE_MS 100

static bool op_interrupted(struct shardd_client *c, unsigned seen)
{
	unsigned now = atomic_load(&c->interrupts);

	if (now == seen)
		return false;
	/* another thread may have taken a later one */
	while ((int)(now - seen) > 0 &&
	       !atomic_compare_exchange_weak(&c->interrupts_taken, &seen, now))
		;
	return true;
}

enum { WAIT_ENDED, WAIT_NOT_YET, WAIT_INTERRUPTED };

/* What a thread waits for: a ticket, or one of several. */
struct waited {
	struct shardd_client *c;
	uint32_t lost; /* link number; not 0: for the connection, which was lost, to come back */
	struct ticket *ticket;        /* of several, the one that a stall names */
	const struct ticket_set *set; /* NULL: only @ticket */
	size_t place;                 /* in @set, of the one that has ended */
	uint64_t spent_ms;            /* before the last slice */
};

static inline bool op_wait_slice(struct waited *w, int timeout_ms)
{
	if (w->lost)
		return reconnect_wait(w->c, w->lost, timeout_ms);
	return w->set ? ticket_set_wait(w->set, timeout_ms, &w->place)
		      : ticket_wait(w->ticket, timeout_ms);
}

/* "op 7, Reduce of unit 3, has not ended after 5000 ms: rank 1 ..." */
static void op_describe_stall(struct shardd_client *c, const struct ticket *ticket,
			      uint64_t waited_ms, uint64_t left_ms, char *buf, size_t bytes)
{
	const char *slash = strrchr(ticket->op->method, '/');
	const char *verb = slash ? slash + 1 : ticket->op->method;
	char unit[32] = "", who[1024] = "";
	struct shardd_error scratch;

	if (ticket->unit)
		snprintf(unit, sizeof(unit), " of unit %u", ticket->unit);
	if (left_ms >= STATUS_BLAME_LEAST_MS)
		(void)status_blame(c, left_ms, who, sizeof(who), &scratch); /* "": not known */
	snprintf(buf, bytes, "op %llu, %s%s, has not ended after %llu ms%s%s",
		 (unsigned long long)ticket->number, verb, unit, (unsigned long long)waited_ms,
		 *who ? ": " : "", who);
}

/* Tell it, unless it ends while the daemon is asked. Return: the milliseconds that this took. */
static uint64_t op_stalled(struct shardd_client *c, shardd_ticket t, struct waited *w,
			   uint64_t waited_ms, int timeout_ms)
{
	const uint64_t left = timeout_ms < 0 ? UINT64_MAX : (uint64_t)timeout_ms - waited_ms;
	const uint64_t began = clock_now_us();
	char text[1280];

	op_describe_stall(c, w->ticket, waited_ms, left, text, sizeof(text));
	if (!op_wait_slice(w, 0))
		c->on_stall.call(c->on_stall.data, t, text);
	return (clock_now_us() - began) / 1000;
}

/* Inlined: this is the path of every wait for one ticket. */
__attribute__((always_inline)) static inline int op_wait_in_slices_inline(struct shardd_client *c,
									  shardd_ticket t,
									  struct waited *w,
									  int timeout_ms)
{
	int slice = c->on_stall.call && c->on_stall.ms < WAIT_SLICE_MS ? (int)c->on_stall.ms
								       : WAIT_SLICE_MS;
	unsigned seen = atomic_load(&c->interrupts_taken);
	uint64_t waited = 0, next_stall = c->on_stall.ms;

	if (timeout_ms == 0)
		return op_wait_slice(w, 0) ? WAIT_ENDED : WAIT_NOT_YET;
	if (atomic_load(&c->interrupts) != seen && !op_wait_slice(w, 0) && op_interrupted(c, seen))
		return WAIT_INTERRUPTED;
	for (;;) {
		int left = timeout_ms < 0 ? slice : timeout_ms - (int)waited;
		int now = left < slice ? left : slice;

		w->spent_ms = waited;
		if (op_wait_slice(w, now))
			return WAIT_ENDED;
		waited += (uint64_t)now;
		if (op_interrupted(c, seen))
			return WAIT_INTERRUPTED;
		if (timeout_ms > 0 && waited >= (uint64_t)timeout_ms)
			return WAIT_NOT_YET;
		if (c->on_stall.call && waited >= next_stall) {
			waited += op_stalled(c, t, w, waited, timeout_ms);
			next_stall += c->on_stall.ms;
			if (timeout_ms > 0 && waited >= (uint64_t)timeout_ms)
				return op_wait_slice(w, 0) ? WAIT_ENDED : WAIT_NOT_YET;
		}
	}
}

/* For all other waits. */
static int op_wait_in_slices(struct shardd_client *c, shardd_ticket t, struct waited *w,
			     int timeout_ms)
{
	return op_wait_in_slices_inline(c, t, w, timeout_ms);
}

static int op_was_interrupted(struct shardd_error *err)
{
	error_set(err, SHARDD_CANCELLED, NULL, "the wait was interrupted by shardd_interrupt");
	err->native = EINTR;
	return -SHARDD_CANCELLED;
}

/* The connection of @w->ticket was lost: wait until it is back. Return: the op's error: ABORTED, what
 * the client gave up with, or that the wait ended before. */
static int op_wait_back(struct shardd_client *c, shardd_ticket t, struct waited *w, int timeout_ms,
			struct shardd_error *err)
{
	int left = timeout_ms < 0                       ? -1
		   : w->spent_ms < (uint64_t)timeout_ms ? timeout_ms - (int)w->spent_ms
							: 0;
	int how;

	w->c = c;
	w->lost = w->ticket->link->number;
	how = op_wait_in_slices(c, t, w, left);
	if (how != WAIT_ENDED)
		return how == WAIT_NOT_YET ? op_not_yet(err) : op_was_interrupted(err);
	return reconnect_outcome(c, w->lost, w->ticket->epoch, err);
}

/* @r: of op_take_result. */
static bool op_is_lost(const struct shardd_client *c, int r, const struct shardd_error *err)
{
	return error_is_lost(r, err) && reconnect_is_on(c);
}

static bool op_goes_on(int r, const struct shardd_error *err)
{
	return error_is_again(r, err) || (r == -SHARDD_CANCELLED && err->native == EINTR);
}

static int op_wait_claimed(struct shardd_client *c, shardd_ticket t, struct ticket *ticket,
			   int timeout_ms, struct shardd_result *ret, struct shardd_error *err)
{
	struct waited w = { .ticket = ticket };
	int how = ticket->reply ? WAIT_ENDED : op_wait_in_slices_inline(c, t, &w, timeout_ms);
	int r;

	if (how != WAIT_ENDED) {
		tickets_release(&c->tickets, ticket);
		return how == WAIT_NOT_YET ? op_not_yet(err) : op_was_interrupted(err);
	}
	if (ticket->op->result ||
	    atomic_load(&c->streams)) /* taking it may last; else its end says it */
		tickets_answered(&c->tickets, ticket);
	r = op_take_result(c, ticket, timeout_ms, ret, err);
	if (r < 0 && op_is_lost(c, r, err)) {
		r = op_wait_back(c, t, &w, timeout_ms, err);
		if (op_goes_on(r, err)) {
			tickets_release(&c->tickets, ticket);
			return r;
		}
	}
	if (ticket->reply && error_is_again(r, err)) {
		tickets_release(&c->tickets, ticket);
		return r;
	}
	if (c->debug)
		debug_end(c->debug, ticket->debug, ticket->reply);
	tickets_end(&c->tickets, t);
	return r;
}

static int op_no_ticket(shardd_ticket t, struct shardd_error *err)
{
	error_set(err, SHARDD_INVALID_ARGUMENT, "ticket",
		  "there is no ticket %llu: it was never handed out, or has ended",
		  (unsigned long long)t);
	if (err)
		err->native = EBADF;
	return -SHARDD_INVALID_ARGUMENT;
}

/* @ret, @err: not NULL. */
static int op_wait_ticket(struct shardd_client *c, shardd_ticket t, int timeout_ms,
			  struct shardd_result *ret, struct shardd_error *err)
{
	struct ticket *ticket;
	int r = client_check(c, err);

	if (r < 0)
		return r;
	r = tickets_claim(&c->tickets, t, &ticket);
	if (r == TICKET_E_NONE)
		return op_no_ticket(t, err);
	if (r == TICKET_E_CLAIMED && timeout_ms == 0)
		return op_not_yet(err);
	if (r == TICKET_E_CLAIMED)
		return error_set(err, SHARDD_FAILED_PRECONDITION, "ticket",
				 "another thread is waiting for ticket %llu",
				 (unsigned long long)t);
	return op_wait_claimed(c, t, ticket, timeout_ms, ret, err);
}

int shardd_wait(shardd_client *c, shardd_ticket t, int timeout_ms, struct shardd_result *ret,
		struct shardd_error *err)
{
	struct shardd_error e; /* set where r is negative */
	struct shardd_result result;
	int r = op_wait_ticket(c, t, timeout_ms < 0 ? -1 : timeout_ms, &result, &e);

	if (r < 0 && err)
		*err = e;
	if (r == 0 && ret)
		*ret = result;
	return r;
}

/* ------------------------------------------------------------- one of several */

static int op_claim(struct shardd_client *c, shardd_ticket t, struct ticket **ret,
		    struct shardd_error *err)
{
	int r = tickets_claim(&c->tickets, t, ret);

	if (r == TICKET_E_NONE)
		return op_no_ticket(t, err);
	if (r == TICKET_E_CLAIMED)
		return error_set(err, SHARDD_FAILED_PRECONDITION, "ticket",
				 "a thread is waiting for ticket %llu already",
				 (unsigned long long)t);
	return 0;
}

/* Claim all but those that are 0. @ret: the first. */
static int op_claim_all(struct shardd_client *c, const shardd_ticket *tickets, size_t n,
			struct ticket_set *set, struct ticket **ret, struct shardd_error *err)
{
	for (size_t i = 0; i < n; i++) {
		struct ticket *ticket;
		int r = tickets[i] ? op_claim(c, tickets[i], &ticket, err) : 0;

		if (r < 0)
			return r;
		if (!tickets[i])
			continue;
		ticket_set_put(set, i, ticket);
		*ret = *ret ? *ret : ticket;
	}
	if (!*ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "tickets",
				 "there is no ticket to wait for: %zu were given, all of them 0",
				 n);
	return 0;
}

/* A ticket of an earlier connection has ended, with or without an answer. */
static bool op_find_former(struct shardd_client *c, const struct ticket_set *set, size_t *ret)
{
	for (size_t i = 0; i < set->n; i++) {
		const struct ticket *t = set->tickets[i];

		if (!t || !t->link || client_has_link(c, t->link->number))
			continue;
		*ret = i;
		return true;
	}
	return false;
}

static int op_wait_set(struct shardd_client *c, const shardd_ticket *tickets,
		       struct ticket_set *set, int timeout_ms, size_t *ret,
		       struct shardd_error *err)
{
	struct waited w = { .set = set };
	shardd_ticket first = 0;
	int r = op_claim_all(c, tickets, set->n, set, &w.ticket, err);

	if (r == 0 && set->n_rings && set->n_rpcs)
		r = completion_serve_rpc(c, err);
	if (r < 0 || op_find_former(c, set, ret))
		return r;
	for (size_t i = 0; !first; i++)
		first = tickets[i];
	timeout_ms = timeout_ms < 0 ? -1 : timeout_ms;
	r = op_wait_in_slices(c, first, &w, timeout_ms);
	if (r != WAIT_ENDED)
		return r == WAIT_NOT_YET ? op_not_yet(err) : op_was_interrupted(err);
	*ret = w.place;
	w.ticket = set->tickets[w.place];
	if (!ticket_is_lost(w.ticket) || !reconnect_is_on(c))
		return 0;
	r = op_wait_back(c, first, &w, timeout_ms, err);
	return op_goes_on(r, err) ? r : 0; /* its error is for who waits for it */
}

int shardd_wait_any(shardd_client *c, const shardd_ticket *tickets, size_t n, int timeout_ms,
		    size_t *ret, struct shardd_error *err)
{
	struct ticket_set set;
	struct shardd_error e;
	int r = client_check(c, err);

	if (r < 0)
		return r;
	if (!tickets || !n || !ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, ret ? "tickets" : "ret",
				 ret ? "there is no ticket to wait for: the list is empty"
				     : "ret is NULL");
	r = ticket_set_init(&set, n) < 0 ? error_memory(&e)
					 : op_wait_set(c, tickets, &set, timeout_ms, ret, &e);
	for (size_t i = 0; set.tickets && i < n; i++)
		if (set.tickets[i])
			tickets_release(&c->tickets, set.tickets[i]);
	ticket_set_deinit(&set);
	if (r < 0 && err)
		*err = e;
	return r;
}

/* -------------------------------------------------------------- detach, cancel */

int shardd_detach(shardd_client *c, shardd_ticket t, struct shardd_error *err)
{
	struct ticket *ticket;
	int r = client_check(c, err);

	if (r < 0)
		return r;
	r = op_claim(c, t, &ticket, err);
	if (r < 0)
		return r;
	if (c->debug)
		debug_detached(c->debug, ticket->debug);
	tickets_detach(&c->tickets, ticket);
	return 0;
}

/* Keep the first failure; one of an earlier epoch has been dropped with it. */
static void op_keep_failure(struct shardd_client *c, const struct ticket *ticket,
			    const struct shardd_error *e)
{
	pthread_mutex_lock(&c->failure.lock);
	if (!c->failure.is_there && ticket->epoch == c->epoch) {
		c->failure.first = *e;
		snprintf(c->failure.first.text, sizeof(c->failure.first.text),
			 "op %llu, which was detached, failed: %.400s",
			 (unsigned long long)ticket->number, e->text);
		c->failure.is_there = true;
	}
	pthread_mutex_unlock(&c->failure.lock);
}

int op_detached(struct shardd_client *c, bool all, struct shardd_error *err)
{
	struct shardd_result result;
	struct shardd_error e;
	struct ticket *ticket;
	uint64_t id;
	int r = 0;

	while (tickets_take_detached(&c->tickets, !all, &id, &ticket)) {
		struct waited w = { .ticket = ticket };

		if (all && op_wait_in_slices(c, id, &w, -1) == WAIT_INTERRUPTED) {
			tickets_release(&c->tickets, ticket);
			return op_was_interrupted(err);
		}
		r = op_take_result(c, ticket, -1, &result, &e);
		if (r < 0 && op_is_lost(c, r, &e))
			r = op_wait_back(c, id, &w, -1, &e);
		if (r < 0 && op_goes_on(r, &e)) {
			tickets_release(&c->tickets, ticket);
			return op_was_interrupted(err);
		}
		if (r < 0)
			op_keep_failure(c, ticket, &e);
		r = 0;
		if (c->debug)
			debug_end(c->debug, ticket->debug, ticket->reply);
		tickets_end(&c->tickets, id);
	}
	pthread_mutex_lock(&c->failure.lock);
	if (c->failure.is_there) {
		r = -c->failure.first.code;
		if (err)
			*err = c->failure.first;
		c->failure.is_there = false;
	}
	pthread_mutex_unlock(&c->failure.lock);
	return r;
}

int shardd_cancel(shardd_client *c, shardd_ticket t, struct shardd_error *err)
{
	int r = client_check(c, err);

	if (r < 0)
		return r;
	r = tickets_cancel(&c->tickets, t);
	if (r == TICKET_E_NONE)
		return op_no_ticket(t, err);
	if (r == TICKET_E_GRPC)
		return error_set(err, SHARDD_FAILED_PRECONDITION, "ticket",
				 "op %llu was sent over gRPC, and only ops in the ring can be "
				 "cancelled: give it a deadline with shardd_set_timeout",
				 (unsigned long long)t);
	return 0;
}
