/*
 * Accepted sockets that have not said yet which protocol they speak.
 *
 * Each costs its descriptor and a small struct. The first four bytes are peeked at, not read: they
 * belong to the code that takes the socket over. There is one timer for all sockets; the set is
 * ordered by age, and the time limit is the same for all. Loop thread only.
 */
#ifndef SHARDD_NET_PENDING_H
#define SHARDD_NET_PENDING_H

#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "core/list.h"
#include "core/pace.h"
#include "net/conn.h"

struct pending_set;

/* @fd has identified its protocol: the callee owns it now, with @place, which it may move. The set
 * may be closed inside. */
typedef void (*pending_hello_cb)(struct pending_set *set, enum conn_protocol protocol, int fd,
				 struct conn_place *place);
typedef void (*pending_closed_cb)(struct pending_set *set);

struct pending_set {
	uint32_t magic;
	uv_loop_t *loop;
	uv_timer_t timer;
	struct list waiting;    /* of struct pending, the oldest first */
	struct list partial;    /* those of them that sent one to three bytes */
	struct list uids;       /* of struct pending_uid: how many wait for each uid */
	struct list turns;      /* those of them that have said hello and wait for their turn */
	uint64_t told_us;       /* when the log was told that some wait; 0: never */
	struct pace grpc;       /* of new gRPC connections */
	unsigned count;         /* in @waiting */
	unsigned max_per_uid;   /* 0: no limit */
	uint64_t timeout_us;    /* from pending_add to the fourth byte */
	uint64_t recheck_at_us; /* when to check @partial and @turns again */
	pending_hello_cb hello;
	pending_closed_cb closed;
};

enum {
	PENDING_E_LIMIT = 1, /* too many of this uid wait already */
};

/* The set is in use from here until pending_close's callback. */
void pending_init(struct pending_set *set, uv_loop_t *loop, pending_hello_cb hello);

void pending_limits(struct pending_set *set, unsigned max_per_uid, uint64_t timeout_us);

/* Take @fd and @place (always consumed), whose peer runs as @uid.
 * Return: 0, PENDING_E_LIMIT, negative errno. */
int pending_add(struct pending_set *set, int fd, uid_t uid, struct conn_place *place);

/* Close all sockets and the timer; @closed from the loop, then the memory is free. */
void pending_close(struct pending_set *set, pending_closed_cb closed);

#endif
