/*
 * StatusService.Events: what has happened to jobs, and, for a call that says so, a wait until something does.
 * A call that waits is one of its user's Status calls. It looks EVENTS_PAUSE_MS after the first event, so that a
 * burst of them is one answer.
 */
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "job/events.h"
#include "rpc/arena.h"
#include "rpc/status_fill.h"
#include "rpc/svc_events.h"

#define EVENTS_PAUSE_MS 20u
#define EVENTS_WAIT_MS  30000u
#define EVENTS_LIMIT    1000u

struct svc_events_wait {
	struct waiter waiter;
	uv_timer_t timer; /* until the wait is over, or the pause */
	struct rpc_call *call;
	const ProtobufCMessage *request; /* the call's */
	uid_t view;
	uint64_t until_us;
	bool is_pause;
};

/* Whose events the caller wants; a name without an owner is one of his jobs. */
struct svc_events_scope {
	uid_t uid;
	uint64_t after; /* 0: that of a caller who has seen events of an earlier daemon, too */
	struct job_ref job;
	bool one_job;
};

static int svc_events_scope(uid_t view, const Shardd__V1__EventsRequest *r,
			    struct svc_events_scope *ret, struct fault *f)
{
	*ret = (struct svc_events_scope){ .uid = view,
					  .after = r->after > events_last() ? 0 : r->after,
					  .one_job = *r->job };
	return *r->job ? job_ref_parse(r->job, "job", &ret->job, f) : 0;
}

static bool svc_events_wanted(const struct events_record *e, const struct svc_events_scope *s,
			      const Shardd__V1__EventsRequest *r)
{
	if (!e || e->head.id <= s->after || (e->head.uid != s->uid && !job_is_admin(s->uid)))
		return false;
	if (e->kind == EVENTS_COMMIT && !r->with_commits)
		return false;
	return !s->one_job || (strcmp(s->job.name, e->job) == 0 &&
			       e->head.uid == (s->job.has_uid ? s->job.uid : s->uid));
}

static int svc_events_compare(const void *x, const void *y)
{
	const struct events_record *const *a = x, *const *b = y;

	return (*a)->head.id < (*b)->head.id ? -1 : (*a)->head.id > (*b)->head.id;
}

/* Of a private job of another user only what status tells of it. */
static void svc_events_fill(struct arena *a, const struct events_record *e, uid_t uid,
			    Shardd__V1__Event *ret)
{
	bool hidden = e->is_private && e->head.uid != uid;

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
static size_t svc_events_find(struct arena *a, const struct svc_events_scope *s,
			      const Shardd__V1__EventsRequest *r, Shardd__V1__EventsResponse *reply)
{
	size_t most = r->limit && r->limit < EVENTS_LIMIT ? r->limit : EVENTS_LIMIT, n = 0, skip;
	const struct events_record **all = arena_take(a, (events_size() + 1) * sizeof(*all));

	reply->last = s->after; /* what is not in the answer may come in the next one */
	if (!all)
		return 0;
	for (size_t i = 0; i < events_size(); i++)
		if (svc_events_wanted(events_at(i), s, r))
			all[n++] = events_at(i);
	qsort(all, n, sizeof(*all), svc_events_compare);
	skip = n > most && !s->after ? n - most : 0; /* the latest, or the next */
	n = n > most ? most : n;
	reply->events = STATUS_MESSAGES(a, n, Event, event);
	for (size_t i = 0; reply->events && i < n; i++)
		svc_events_fill(a, all[skip + i], s->uid, reply->events[reply->n_events++]);
	reply->last = n == most && n ? all[skip + n - 1]->head.id : events_last();
	return n;
}

int svc_events_list(struct arena *a, uid_t view, const Shardd__V1__EventsRequest *request,
		    Shardd__V1__EventsResponse *reply, struct fault *f)
{
	struct svc_events_scope scope;

	if (svc_events_scope(view, request, &scope, f))
		return (int)f->code;
	svc_events_find(a, &scope, request, reply);
	return 0;
}

/* Return: false: there are none, and @may_wait. */
static bool svc_events_answer(struct rpc_call *call, uid_t view, const Shardd__V1__EventsRequest *r,
			      bool may_wait)
{
	Shardd__V1__EventsResponse reply = SHARDD__V1__EVENTS_RESPONSE__INIT;
	struct svc_events_scope scope;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;

	if (!rpc_call_conn(call))
		fault_set(&f, FAULT_CANCELLED, NULL, "the connection is closed");
	if (f.code || svc_events_scope(view, r, &scope, &f)) {
		rpc_call_fail(call, &f);
		return true;
	}
	if (!svc_events_find(&a, &scope, r, &reply) && may_wait && !a.failed) {
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
	rpc_call_on_cancelled(w->call, svc_events_on_cancelled, w);
	condition_wait(events_changed(), &w->waiter);
	uv_timer_start(&w->timer, svc_events_on_timer,
		       w->until_us > now ? (w->until_us - now + 999) / 1000 : 0, 0);
}

static void svc_events_on_timer(uv_timer_t *timer)
{
	struct svc_events_wait *w = CONTAINER_OF(timer, struct svc_events_wait, timer);

	waiter_leave(&w->waiter);
	rpc_call_on_cancelled(w->call, NULL, NULL);
	if (svc_events_answer(w->call, w->view, (const Shardd__V1__EventsRequest *)w->request,
			      w->is_pause && clock_now_us() < w->until_us))
		svc_events_wait_end(w);
	else
		svc_events_go_on(w);
}

static void svc_events_on_event(struct waiter *waiter)
{
	struct svc_events_wait *w = CONTAINER_OF(waiter, struct svc_events_wait, waiter);

	w->is_pause = true;
	uv_timer_start(&w->timer, svc_events_on_timer, EVENTS_PAUSE_MS, 0);
}

void svc_events_run(struct rpc_call *call, const ProtobufCMessage *request, uid_t view,
		    uv_loop_t *loop)
{
	const Shardd__V1__EventsRequest *r = (const Shardd__V1__EventsRequest *)request;
	uint64_t wait_ms = r->wait_ms < EVENTS_WAIT_MS ? r->wait_ms : EVENTS_WAIT_MS;
	struct svc_events_wait *w;
	struct fault f = FAULT_NULL;

	if (svc_events_answer(call, view, r, wait_ms > 0))
		return;
	w = calloc(1, sizeof(*w));
	if (!w) {
		fault_errno(&f, -ENOMEM, "waiting for events");
		rpc_call_fail(call, &f);
		return;
	}
	*w = (struct svc_events_wait){ .call = call,
				       .request = request,
				       .view = view,
				       .until_us = clock_now_us() + wait_ms * 1000 };
	waiter_init(&w->waiter, svc_events_on_event);
	uv_timer_init(loop, &w->timer);
	svc_events_go_on(w);
}
