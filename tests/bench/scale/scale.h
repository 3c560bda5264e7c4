/*
 * Many daemons in one process: the real core, cluster, membership, rendezvous and order of each, over a
 * store that is coordination's fake and links that are queues here (scale_net.c takes the place of
 * daemon/peer when the program is linked). One loop each; the caller turns them one after the other.
 * Node 0 joins first and leads.
 *
 * A phase counts what passes the links and what is asked of the store, and how long the leader's loop
 * takes for what arrives. Bytes are those of packed messages: without the frames of gRPC, TLS and TCP.
 */
#ifndef SHARDD_BENCH_SCALE_H
#define SHARDD_BENCH_SCALE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SCALE_MOST 1000u

struct scale_counts {
	uint64_t messages, bytes;        /* of all links, both ways */
	uint64_t to_leader, from_leader; /* messages */
	uint64_t largest;                /* bytes of the largest message */
	uint64_t txns, grants, watches;  /* that were asked of the store; not what keeps leases */
	uint64_t store_bytes;            /* of keys and values in these calls */
	uint64_t largest_txn;            /* bytes */
	uint64_t leader_ns,
		slowest_ns;    /* the leader's processor time for messages; for one of them */
	uint64_t turns_ns;     /* and for all else that its loop does */
	int64_t leader_memory; /* bytes that it has allocated, less what it has freed */
};

struct scale;

/* How communicators meet. */
enum scale_way {
	SCALE_AT_ONCE, /* not at all: they are there */
	SCALE_GLOO,    /* as those of Gloo, by cards over the links */
	SCALE_NCCL,    /* as those of NCCL with one device on each node: by keys, over the links */
};

/* @n: 2 to SCALE_MOST. Members of the store; no job yet. */
struct scale *scale_new(unsigned n, enum scale_way way);
/* All of them leave. Return: NULL. */
struct scale *scale_free(struct scale *s);

/* Each phase ends when nothing is under way any more. */
struct scale_counts scale_members(const struct scale *s); /* what scale_new has taken */
struct scale_counts scale_join(struct scale *s); /* one rank a node; up to the epoch's begin */
struct scale_counts scale_meet(struct scale *s); /* communicators of the world are made */
struct scale_counts scale_collective(struct scale *s); /* a sum (AllReduce) */
struct scale_counts scale_commit(struct scale *s);
struct scale_counts scale_step(struct scale *s); /* four sums and a commit; no Step */
/* Steps until a schedule is followed. Return: how many; 0: none is. */
unsigned scale_record(struct scale *s);
/* The last node's rank is lost: the epoch ends on all. */
struct scale_counts scale_end(struct scale *s);

/* Do all nodes follow a schedule? */
bool scale_is_recorded(const struct scale *s);

/* scale_order.c: nanoseconds that the order takes for one entry on one of two nodes, from its announcement to its
 * start, in a schedule (@recorded) or by the leader. */
double scale_order_ns(bool recorded);

/* -- between the files */

/* What the links hand out: @deliver runs a callback of node @to. */
struct scale_net;
void scale_net_begin(unsigned n, void (*enter)(unsigned node, bool arrived), void (*leave)(void));
/* Hand out all that is under way now. Return: whether there was anything. */
bool scale_net_deliver(void);
void scale_net_end(void);
extern struct scale_counts scale_counts;

#include "engine/engine_impl.h"

int scale_engine_new(struct loopq *loopq, enum scale_way way, struct engine **ret);
/* Members of @e that have not met look for the others again. */
void scale_engine_look(struct engine *e);

#endif
