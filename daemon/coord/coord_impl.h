/* Coordination, for stores. coord.c checks the contract and calls the slots, on the loop thread. */
#ifndef SHARDD_COORD_IMPL_H
#define SHARDD_COORD_IMPL_H

#include "coord/coord.h"

struct coord_impl {
	int (*txn)(struct coord *c, struct coord_call *call, const struct coord_txn *txn,
		   uint32_t timeout_ms);
	int (*grant)(struct coord *c, struct coord_call *call, int64_t ttl_s, uint32_t timeout_ms);
	int (*keep)(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms);
	int (*revoke)(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms);
	/* @call->impl is set */
	void (*cancel)(struct coord_call *call);
	int (*watch_begin)(struct coord *c, struct coord_watch *w, const char *prefix,
			   int64_t from);
	/* @w->impl is set */
	void (*watch_end)(struct coord_watch *w);
	void (*close)(struct coord *c); /* frees @c */
};

struct coord {
	const struct coord_impl *impl;
	unsigned running; /* calls and watches */
};

/* It is over: count it, and tell its owner. */
void coord_call_end(struct coord *c, struct coord_call *call, const struct coord_reply *reply);
/* The same for one that its owner has cancelled, and for a watch. */
void coord_cancelled(struct coord *c, struct coord_call *call);
void coord_watch_over(struct coord *c, struct coord_watch *w);

/* A store in the memory of this process, for tests: time passes only in coord_fake_pass, and any answer
 * may be held back or lost. Several users of one fake are several daemons of one store. */
struct coord_fake;

int coord_fake_new(struct coord_fake **ret);
void coord_fake_free(struct coord_fake *f);
/* A user of it. @loopq: borrowed. Return: 0 or -ENOMEM. */
int coord_fake_open(struct coord_fake *f, struct loopq *loopq, struct coord **ret);
/* Leases grow older by so much. */
void coord_fake_pass(struct coord_fake *f, uint64_t ms);
/* How the calls of @c end: answered; lost before they take effect; lost after that (both:
 * COORD_DOUBT when coord_fake_lose is called); watches get nothing unless answered. */
enum coord_fake_fate { COORD_FAKE_ANSWERED, COORD_FAKE_LOST_BEFORE, COORD_FAKE_LOST_AFTER };
void coord_fake_fate(struct coord *c, enum coord_fake_fate fate);
/* End what was lost. */
void coord_fake_lose(struct coord *c);
/* Forget changes up to now: watches that begin earlier end as compacted. */
void coord_fake_compact(struct coord_fake *f);

#endif
