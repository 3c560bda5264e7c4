/*
 * Turns for calls that may take the loop long: what tells users of jobs, which takes milliseconds if a job is large, and
 * declarations of publications, whose patterns may be compared with many tensors. What they make of the units is made
 * again in turns like these when the units have changed (publish/publication.c). A user gets at most a tenth of the
 * loop's time for that: after an answer, the next one for the same user waits nine times as long as the last one took.
 * Those for others, and everything else, go on. Loop thread only.
 */
#ifndef SHARDD_RPC_STATUS_TURNS_H
#define SHARDD_RPC_STATUS_TURNS_H

#include <uv.h>

#include "core/list.h"
#include "core/user.h"
#include "rpc/method.h"

struct status_turns {
	struct users *users; /* borrowed */
	uv_timer_t timer;    /* for those whose turn has not come */
	bool open;
};

/* One that waits for its turn. Embedded by value in what waits; the link is initialised with list_init. */
struct status_turn {
	struct list link; /* user.waiting */
	void (*fn)(struct status_turn *turn);
};

void status_turns_init(struct status_turns *ts, uv_loop_t *loop, struct users *users);
/* None waits any more. Safe if it was never begun, and twice. */
void status_turns_close(struct status_turns *ts);

/* Call @fn now or when the turn of @u has come; its time is charged to @u. @u: NULL: now. @fn may free @t. */
void status_turns_run(struct status_turns *ts, struct user *u, struct status_turn *t,
		      void (*fn)(struct status_turn *turn));

/* Serve @call with @fn, now or when its user's turn has come. @request: the call's. Without memory the call fails. */
void status_turns_serve(struct status_turns *ts, struct rpc_call *call,
			const ProtobufCMessage *request, rpc_handler fn, void *userdata);

/* It does not come. Safe for one that does not wait. */
static inline void status_turn_cancel(struct status_turn *t)
{
	list_unlink(&t->link);
}

#endif
