/*
 * The tickets of a client: what shardd_wait looks up.
 *
 * A ticket's number is its slot and how often the slot has been used, so a
 * number is never reused. A thread that waits has claimed its ticket: no other
 * thread may end it meanwhile. Any thread.
 */
#ifndef SHARDD_CLIENT_TICKET_H
#define SHARDD_CLIENT_TICKET_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ring.h"
#include "rpc_client.h"

struct link;
struct op;
struct debug_op;
struct stream;
struct stream_link;

/* Which stream an op was submitted on. All zero: none. */
struct stream_ref {
	struct stream *stream;
	const struct stream_link *link;
};

/* Where an op's result goes beside struct shardd_result: the caller's, until the ticket ends. */
struct op_out {
	void *data; /* NULL: not wanted */
	uint32_t n; /* elements */
};

struct ticket {
	const struct op *op;         /* static */
	struct rpc_pending *pending; /* owned; NULL: sent over the ring */
	struct ring_pending ring;
	const struct link *link;  /* it was sent over; kept while the ticket is there */
	ProtobufCMessage *reply;  /* owned; taken already, its memory is not mapped yet */
	struct stream_ref stream; /* that it was submitted on */
	struct op_out out;        /* of op->out */
	struct debug_op *debug;   /* NULL: no debug mode; ended before the ticket */
	struct ticket *next;      /* in tickets.spare */
	atomic_bool claimed;      /* set under the lock */
	uint64_t epoch;           /* of the op */
	uint64_t number;          /* of the op in its session; 0: of a nop */
	uint32_t unit;            /* of the op, with a stall callback; 0: none or not looked up */
	bool detached;            /* nobody waits for it */
	bool answered;            /* no longer one of the daemon's unanswered ops */
};

/* As rpc_pending_wait and rpc_pending_result, whichever way it was sent. */
bool ticket_wait(struct ticket *ticket, int timeout_ms);
int ticket_result(struct ticket *ticket, ProtobufCMessage **ret, struct shardd_error *err);

/* Has it ended because the connection was lost? */
bool ticket_is_lost(const struct ticket *ticket);

/* Claimed tickets, one of which is waited for. */
struct ticket_set {
	struct ticket **tickets; /* NULL: none at this place */
	size_t n;
	struct ring *ring;
	struct ring_pending **rings; /* of those that were sent over the ring */
	size_t n_rings;
	struct rpc_pending **rpcs; /* of the others */
	size_t n_rpcs;
};

/* @n: places. Return: 0 or -ENOMEM. */
int ticket_set_init(struct ticket_set *s, size_t n);
void ticket_set_put(struct ticket_set *s, size_t place, struct ticket *ticket);
void ticket_set_deinit(struct ticket_set *s);

/* Wait until one has ended, at most @timeout_ms. If some were sent over the ring and others not, a
 * thread must serve the gRPC client (rpc_client_serve) and poke the ring. @ret: its place; of several
 * the first. Return: false: none has. */
bool ticket_set_wait(const struct ticket_set *s, int timeout_ms, size_t *ret);

struct ticket_slot {
	struct ticket *ticket; /* owned; NULL: free */
	uint64_t uses;         /* the number's upper part; a slot that is used up stays free */
	uint32_t next_free;    /* index, TICKET_NO_SLOT: the last */
};

struct tickets {
	pthread_mutex_t lock;
	struct ticket_slot *slots;
	uint32_t count; /* of slots */
	uint32_t room;
	uint32_t first_free;
	uint32_t unanswered;       /* of the tickets in the table */
	_Atomic uint32_t detached; /* tickets in the table */
	struct ticket *spare;      /* ended ones, to be used again; owned */
	uint32_t n_spare;
};

#define TICKET_NO_SLOT UINT32_MAX

enum {
	TICKET_E_NONE = 1,    /* no such ticket */
	TICKET_E_CLAIMED = 2, /* another thread waits for it */
	TICKET_E_FULL = 3,    /* too many unanswered ops */
	TICKET_E_GRPC = 4,    /* the op is a gRPC call */
};

void tickets_init(struct tickets *t);

/* Cancel and free all. No other thread may be using it. Safe twice. */
void tickets_deinit(struct tickets *t);

/* Make a ticket, claimed. @limit: of unanswered ops; 0: none.
 * @ret: the table's, until tickets_end. @ret_id: its number, never 0.
 * Return: 0, TICKET_E_FULL, or -ENOMEM. */
int tickets_add(struct tickets *t, const struct op *op, uint32_t limit, struct ticket **ret,
		uint64_t *ret_id);

/* Find and claim. @ret: borrowed until tickets_release or tickets_end.
 * Return: 0, TICKET_E_NONE, TICKET_E_CLAIMED. */
int tickets_claim(struct tickets *t, uint64_t id, struct ticket **ret);

/* Nobody waits for a claimed ticket any more: tickets_take_detached finds it, tickets_claim does not. */
void tickets_detach(struct tickets *t, struct ticket *ticket);

/* Claim a detached ticket. @ended: only one whose op has ended. Return: false: there is none. */
bool tickets_take_detached(struct tickets *t, bool ended, uint64_t *ret_id, struct ticket **ret);

/* Ask the daemon to give up the op of @id, claimed or not. Return: 0, TICKET_E_NONE, TICKET_E_GRPC.
 * Never blocks. */
int tickets_cancel(struct tickets *t, uint64_t id);

/* Give a claimed ticket back: its op continues. */
void tickets_release(struct tickets *t, struct ticket *ticket);

/* The op of a claimed ticket has been answered. */
void tickets_answered(struct tickets *t, struct ticket *ticket);

/* Has the op of ticket @id been answered, or its ticket ended? Never blocks. */
bool tickets_is_answered(struct tickets *t, uint64_t id);

/* Was the op of a ticket in the table sent over @l? */
bool tickets_uses(struct tickets *t, const struct link *l);

/* End a claimed ticket: it is gone. */
void tickets_end(struct tickets *t, uint64_t id);

#endif
