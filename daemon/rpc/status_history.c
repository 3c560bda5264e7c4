/* Jobs that have ended. */
#include <string.h>

#include "job/history.h"
#include "rpc/status_fill.h"

#define STATUS_HISTORY_LIMIT 100u
#define STATUS_HISTORY_MOST  1000u

/* A name without an owner is one of the caller's. */
static bool status_history_wanted(const struct history_record *r, const struct status_scope *scope,
				  const struct job_ref *ref)
{
	if (!status_sees(scope, r->head.uid))
		return false;
	return !ref || (strcmp(ref->name, r->job) == 0 &&
			r->head.uid == (ref->has_uid ? ref->uid : scope->uid));
}

static void status_history_fill(struct arena *a, const struct history_record *r,
				const struct status_scope *scope, Shardd__V1__EndedJob *j)
{
	j->id = r->head.id;
	j->name = status_text(a, r->job);
	j->uid = r->head.uid;
	j->began_unix_s = r->began_unix_s;
	j->ended_unix_s = r->ended_unix_s;
	j->end = (Shardd__V1__EndCause)r->why;
	j->peak_bytes = r->peak_bytes;
	j->is_private = r->is_private;
	if (!status_may_look(scope, r->head.uid, r->is_private))
		return;
	j->world_size = r->ranks;
	j->has_commit = r->has_commit;
	j->step = r->step;
	j->ops_total = r->ops;
	j->torn = r->was_torn;
	j->last_error = status_text(a, r->error);
}

static size_t status_history_limit(const Shardd__V1__HistoryRequest *request)
{
	if (!request->limit)
		return STATUS_HISTORY_LIMIT;
	return request->limit < STATUS_HISTORY_MOST ? request->limit : STATUS_HISTORY_MOST;
}

void status_fill_history(struct arena *a, const struct status_scope *scope,
			 const struct job_ref *ref, const Shardd__V1__HistoryRequest *request,
			 Shardd__V1__HistoryResponse *reply)
{
	const struct history_record *all[HISTORY_MOST];
	size_t limit = status_history_limit(request), found = history_all(all), n = 0;

	for (size_t i = 0; i < found; i++)
		if ((!request->before || all[i]->head.id < request->before) &&
		    status_history_wanted(all[i], scope, ref))
			all[n++] = all[i];
	reply->jobs = STATUS_MESSAGES(a, n < limit ? n : limit, EndedJob, ended_job);
	if (!reply->jobs)
		return;
	while (reply->n_jobs < n && reply->n_jobs < limit) {
		status_history_fill(a, all[reply->n_jobs], scope, reply->jobs[reply->n_jobs]);
		reply->n_jobs++;
	}
	if (n > limit)
		reply->next = all[limit - 1]->head.id;
}
