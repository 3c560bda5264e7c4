/*
 * StatusService.Events: what has happened to jobs, and, for a call that says so, a wait until something does.
 * A call that waits is one of its user's Status calls. It is woken by events that it asks for only, looks
 * EVENTS_PAUSE_MS after the first one, so that a burst of them is one answer, and takes its user's turn for that.
 */
#include "rpc/svc_events.h"

#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "job/events.h"

#define EVENTS_PAUSE_MS 20u
#define EVENTS_WAIT_MS  30000u
#define EVENTS_LIMIT    1000u

/* What is asked for, and by whom; a name without an owner is one of his jobs. */
struct svc_events_ask {
	struct status_scope scope;
	uint64_t after; /* 0: also of a caller who has seen those of another run of the daemon */
	size_t most;
	bool with_commits;
	struct job_ref job; /* without a name: all jobs */
};

struct svc_events_wait {
	struct waiter waiter;
	struct status_turn turn;
	struct status_turns *turns;
	uv_timer_t timer; /* until the wait is over, or the pause */
	struct rpc_call *call;
	struct svc_events_ask ask; /* the name is the request's */
	uint64_t until_us;
	bool is_pause;
};

static int svc_events_read(const struct status_scope *scope, const Shardd__V1__EventsRequest *r,
			   struct svc_events_ask *ret, struct fault *f)
{
	*ret = (struct svc_events_ask){ .scope = *scope,
					.after = r->run == events_run() ? r->after : 0,
					.most = r->limit && r->limit < EVENTS_LIMIT ? r->limit
										    : EVENTS_LIMIT,
					.with_commits = r->with_commits };
	if (r->after && !r->run)
		return fault_set(f, FAULT_INVALID, "run",
				 "run is 0, and after is %llu; run must be that of the answer that "
				 "after is from",
				 (unsigned long long)r->after);
	return *r->job ? job_ref_parse(r->job, "job", &ret->job, f) : 0;
}

static bool svc_events_wanted(const struct events_record *e, const struct svc_events_ask *ask)
{
	if (!e || e->head.id <= ask->after || !status_sees(&ask->scope, e->head.uid))
		return false;
	if (e->kind == EVENTS_COMMIT && !ask->with_commits)
		return false;
	if (!ask->job.name)
		return true;
	return strcmp(ask->job.name, e->job) == 0 &&
	       e->head.uid == (ask->job.has_uid ? ask->job.uid : ask->scope.uid);
}

static int svc_events_compare(const void *x, const void *y)
{
	const struct events_record *const *a = x, *const *b = y;

	return (*a)->head.id < (*b)->head.id ? -1 : (*a)->head.id > (*b)->head.id;
}

/* Of a private job of another user only what status tells of it. */
static void svc_events_fill(struct arena *a, const struct events_record *e,
			    const struct status_scope *scope, Shardd__V1__Event *ret)
{
	bool hidden = !status_may_look(scope, e->head.uid, e->is_private);

	ret->id = e->head.id;
	ret->nth = e->nth;
	ret->unix_ms = e->unix_ms;
	ret->kind = (Shardd__V1__EventKind)e->kind;
	ret->job = status_text(a, e->job);
	ret->uid = e->head.uid;
	ret->rank = hidden ? EVENTS_NO_RANK : e->rank;
	ret->pid = hidden ? 0 : e->pid;
	ret->epoch = hidden ? 0 : e->epoch;
	ret->text = status_text(a, hidden ? "" : e->text);
}

/* Return: the number of events; the arena says if there was no memory. */
static size_t svc_events_find(struct arena *a, const struct svc_events_ask *ask,
			      Shardd__V1__EventsResponse *reply)
{
	const struct events_record **all = arena_take(a, (events_size() + 1) * sizeof(*all));
	size_t n = 0, skip;

	reply->run = events_run();
	reply->last = ask->after; /* what is not in the answer may come in the next one */
	if (!all)
		return 0;
	for (size_t i = 0; i < events_size(); i++)
		if (svc_events_wanted(events_at(i), ask))
			all[n++] = events_at(i);
	qsort(all, n, sizeof(*all), svc_events_compare);
	skip = n > ask->most && !ask->after ? n - ask->most : 0; /* the latest, or the next */
	n = n > ask->most ? ask->most : n;
	reply->events = STATUS_MESSAGES(a, n, Event, event);
	for (size_t i = 0; reply->events && i < n; i++)
		svc_events_fill(a, all[skip + i], &ask->scope, reply->events[reply->n_events++]);
	reply->last = n == ask->most && n ? all[skip + n - 1]->head.id : events_last();
	return n;
}

int svc_events_list(struct arena *a, const struct status_scope *scope,
		    const Shardd__V1__EventsRequest *request, Shardd__V1__EventsResponse *reply,
		    struct fault *f)
{
	struct svc_events_ask ask;

	if (svc_events_read(scope, request, &ask, f))
		return (int)f->code;
	svc_events_find(a, &ask, reply);
	return 0;
}

/* Return: false: there are none, and it @may_wait. */
static bool svc_events_answer(struct rpc_call *call, const struct svc_events_ask *ask,
			      bool may_wait)
{
	Shardd__V1__EventsResponse reply = SHARDD__V1__EVENTS_RESPONSE__INIT;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;

	if (!svc_events_find(&a, ask, &reply) && may_wait && !a.failed) {
		arena_free(&a);
		return false;
	}
	if (a.failed) {
		fault_set(&f, FAULT_EXHAUSTED, NULL, "no memory for the answer");
		rpc_call_fail(call, &f);
	} else {
		rpc_call_reply(call, &reply.base);
	}
	arena_free(&a);
	return true;
}

static void svc_events_on_closed(uv_handle_t *handle)
{
	free(CONTAINER_OF((uv_timer_t *)handle, struct svc_events_wait, timer));
}

static void svc_events_wait_end(struct svc_events_wait *w)
{
	waiter_leave(&w->waiter);
	status_turn_cancel(&w->turn);
	uv_close((uv_handle_t *)&w->timer, svc_events_on_closed);
}

static void svc_events_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct fault f = FAULT_NULL;

	svc_events_wait_end(userdata);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

static void svc_events_on_timer(uv_timer_t *timer);

static void svc_events_go_on(struct svc_events_wait *w)
{
	uint64_t now = clock_now_us();

	w->is_pause = false;
	condition_wait(events_changed(), &w->waiter);
	uv_timer_start(&w->timer, svc_events_on_timer,
		       w->until_us > now ? (w->until_us - now + 999) / 1000 : 0, 0);
}

/* There are none if those that it was woken by have been pushed out since. */
static void svc_events_on_turn(struct status_turn *turn)
{
	struct svc_events_wait *w = CONTAINER_OF(turn, struct svc_events_wait, turn);
	struct rpc_call *call = w->call;

	rpc_call_on_cancelled(call, NULL, NULL);
	if (svc_events_answer(call, &w->ask, w->is_pause && clock_now_us() < w->until_us)) {
		svc_events_wait_end(w);
		return;
	}
	rpc_call_on_cancelled(call, svc_events_on_cancelled, w);
	svc_events_go_on(w);
}

static void svc_events_on_timer(uv_timer_t *timer)
{
	struct svc_events_wait *w = CONTAINER_OF(timer, struct svc_events_wait, timer);
	struct conn *c = rpc_call_conn(w->call);

	waiter_leave(&w->waiter);
	status_turns_run(w->turns, c ? conn_account(c) : NULL, &w->turn, svc_events_on_turn);
}

static void svc_events_on_event(struct waiter *waiter)
{
	struct svc_events_wait *w = CONTAINER_OF(waiter, struct svc_events_wait, waiter);

	if (!svc_events_wanted(events_newest(), &w->ask)) {
		condition_wait(events_changed(), &w->waiter);
		return;
	}
	w->is_pause = true;
	uv_timer_start(&w->timer, svc_events_on_timer, EVENTS_PAUSE_MS, 0);
}

void svc_events_begin(struct rpc_call *call, const ProtobufCMessage *request,
		      const struct status_scope *scope, struct status_turns *turns, uv_loop_t *loop)
{
	const Shardd__V1__EventsRequest *r = (const Shardd__V1__EventsRequest *)request;
	uint64_t wait_ms = r->wait_ms < EVENTS_WAIT_MS ? r->wait_ms : EVENTS_WAIT_MS;
	struct svc_events_wait *w;
	struct svc_events_ask ask;
	struct fault f = FAULT_NULL;

	if (svc_events_read(scope, r, &ask, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	if (svc_events_answer(call, &ask, wait_ms > 0))
		return;
	w = calloc(1, sizeof(*w));
	if (!w) {
		fault_errno(&f, -ENOMEM, "waiting for events");
		rpc_call_fail(call, &f);
		return;
	}
	*w = (struct svc_events_wait){ .turns = turns,
				       .call = call,
				       .ask = ask,
				       .until_us = clock_now_us() + wait_ms * 1000 };
	waiter_init(&w->waiter, svc_events_on_event);
	list_init(&w->turn.link);
	uv_timer_init(loop, &w->timer);
	rpc_call_on_cancelled(call, svc_events_on_cancelled, w);
	svc_events_go_on(w);
}
