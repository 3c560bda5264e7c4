#include "rpc/status_turns.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/clock.h"
#include "net/conn.h"

static void status_turns_call(struct user *u, struct status_turn *t,
			      void (*fn)(struct status_turn *turn))
{
	uint64_t began = clock_now_us();

	user_ref(u); /* what is answered may be the last that it has */
	fn(t);
	user_turn_took(u, USER_TURN_CALLS, began, clock_now_us());
	user_unref(u);
}

static void status_turns_arm(struct status_turns *ts);

/* Each user whose time has come gets one turn. */
static void status_turns_on_timer(uv_timer_t *timer)
{
	struct status_turns *ts = timer->data;
	uint64_t now = clock_now_us();

	for (struct user *u = users_next(ts->users, NULL); u;) {
		struct user *next;
		struct status_turn *t;

		user_ref(u); /* it is needed for the next one */
		if (!list_empty(&u->waiting) && user_turn_has_come(u, USER_TURN_CALLS, now)) {
			t = list_first(&u->waiting, struct status_turn, link);
			list_unlink(&t->link);
			status_turns_call(u, t, t->fn);
		}
		next = users_next(ts->users, u);
		user_unref(u);
		u = next;
	}
	status_turns_arm(ts);
}

static void status_turns_arm(struct status_turns *ts)
{
	uint64_t at = UINT64_MAX, now = clock_now_us();

	for (struct user *u = users_next(ts->users, NULL); u; u = users_next(ts->users, u))
		if (!list_empty(&u->waiting) && u->turn_at_us[USER_TURN_CALLS] < at)
			at = u->turn_at_us[USER_TURN_CALLS];
	if (at != UINT64_MAX)
		uv_timer_start(&ts->timer, status_turns_on_timer,
			       at > now ? (at - now + 999) / 1000 : 0, 0);
}

void status_turns_run(struct status_turns *ts, struct user *u, struct status_turn *t,
		      void (*fn)(struct status_turn *turn))
{
	if (!u) {
		fn(t);
		return;
	}
	if (list_empty(&u->waiting) && user_turn_has_come(u, USER_TURN_CALLS, clock_now_us())) {
		status_turns_call(u, t, fn);
		return;
	}
	t->fn = fn;
	list_append(&u->waiting, &t->link);
	status_turns_arm(ts);
}

/* A call that may wait for its turn. */
struct status_turns_call {
	struct status_turn turn;
	struct rpc_call *call;
	const ProtobufCMessage *request; /* the call's */
	rpc_handler fn;
	void *userdata;
};

static void status_turns_cancelled(struct rpc_call *call, void *userdata)
{
	struct status_turns_call *w = userdata;
	struct fault f = FAULT_NULL;

	status_turn_cancel(&w->turn);
	free(w);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

static void status_turns_on_turn(struct status_turn *turn)
{
	struct status_turns_call *w = CONTAINER_OF(turn, struct status_turns_call, turn), was = *w;

	free(w);
	rpc_call_on_cancelled(was.call, NULL, NULL);
	was.fn(was.call, was.request, was.userdata);
}

void status_turns_serve(struct status_turns *ts, struct rpc_call *call,
			const ProtobufCMessage *request, rpc_handler fn, void *userdata)
{
	struct conn *c = rpc_call_conn(call);
	struct status_turns_call *w = malloc(sizeof(*w));
	struct fault f = FAULT_NULL;

	if (!w) {
		fault_errno(&f, -ENOMEM, "waiting for a turn");
		rpc_call_fail(call, &f);
		return;
	}
	*w = (struct status_turns_call){
		.call = call, .request = request, .fn = fn, .userdata = userdata
	};
	list_init(&w->turn.link);
	rpc_call_on_cancelled(call, status_turns_cancelled, w);
	status_turns_run(ts, c ? conn_account(c) : NULL, &w->turn, status_turns_on_turn);
}

void status_turns_init(struct status_turns *ts, uv_loop_t *loop, struct users *users)
{
	*ts = (struct status_turns){ .users = users, .open = true };
	uv_timer_init(loop, &ts->timer);
	ts->timer.data = ts;
}

void status_turns_close(struct status_turns *ts)
{
	if (ts->open)
		uv_close((uv_handle_t *)&ts->timer, NULL);
	ts->open = false;
}
