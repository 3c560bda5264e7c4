/* Sessions, and their running ops. */

#include "core/clock.h"
#include "rpc/status_fill.h"

/* The job of which it is a rank. */
static const struct job *status_sessions_job_of(const struct session *s)
{
	return s->member ? s->member->job : NULL;
}

static bool status_sessions_session_visible(const struct status_scope *scope,
					    const struct session *s)
{
	const struct job *job = status_sessions_job_of(s);

	if (!status_sees(scope, proc_uid(s->proc)))
		return false;
	if (job && !status_may_look_at(scope, job))
		return false; /* its pids and ranks are hidden */
	return !scope->job || job == scope->job;
}

static void status_sessions_fill_ring(struct arena *a, const struct session *s,
				      Shardd__V1__SessionStatus *r)
{
	struct session_ring_info info;
	Shardd__V1__RingStatus **ring =
		s->ring ? STATUS_MESSAGES(a, 1, RingStatus, ring_status) : NULL;

	if (!ring)
		return;
	s->sessions->rings->info(s, &info);
	r->ring = ring[0];
	r->ring->bytes = info.bytes;
	r->ring->submissions = info.submissions;
	r->ring->completions = info.completions;
	r->ring->wakes = info.wakes;
	r->ring->woken = info.woken;
	r->ring->full = info.full;
}

static void status_sessions_fill_session(struct arena *a, const struct session *s,
					 Shardd__V1__SessionStatus *r)
{
	const struct member *m = s->member;

	r->session = s->id;
	r->pid = (int32_t)proc_pid(s->proc);
	r->uid = proc_uid(s->proc);
	r->client_name = status_text(a, s->name);
	r->job = status_text(a,
			     status_sessions_job_of(s) ? status_sessions_job_of(s)->rec->name : "");
	r->job_uid = status_sessions_job_of(s) ? status_sessions_job_of(s)->rec->uid : 0;
	r->rank = m ? (int32_t)m->rank : -1;
	r->age_s = (clock_now_us() - s->created_us) / 1000000u;
	r->pending_ops = m ? m->pending : 0;
	r->ops_total = s->ops_total;
	r->held_bytes = m ? m->pool.used : 0;
	r->local_channel = !list_empty(&s->locals);
	status_sessions_fill_ring(a, s, r);
}

void status_fill_sessions(struct arena *a, struct sessions *sessions,
			  const struct status_scope *scope, Shardd__V1__GetStatusResponse *reply)
{
	struct session *s, *tmp;

	reply->sessions = STATUS_MESSAGES(a, sessions->count, SessionStatus, session_status);
	if (!reply->sessions)
		return;
	list_for_each (s, tmp, &sessions->all, link)
		if (status_sessions_session_visible(scope, s))
			status_sessions_fill_session(a, s, reply->sessions[reply->n_sessions++]);
}
