/* Jobs and groups. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster.h"
#include "core/check.h"
#include "core/text.h"
#include "rpc/audit.h"
#include "job/base.h"
#include "job/saving.h"
#include "rpc/svc_shardd_impl.h"
#include "rpc/unit_spec.h"

struct fault svc_not_connected(void)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_CANCELLED, NULL, "the connection is closed");
	return f;
}

/* What @p says of checkpoints, which may be NULL. */
static const state_checkpoints *svc_shardd_jobs_checkpoints(const Shardd__V1__CheckpointPolicy *p,
							    state_checkpoints *room)
{
	if (!p)
		return NULL;
	*room = (state_checkpoints)SHARDD__STATE__V1__CHECKPOINTS__INIT;
	room->path = p->path;
	room->every_steps = p->every_steps;
	room->every_s = p->every_s;
	room->keep = p->keep;
	room->bytes_per_s = p->bytes_per_s;
	return room;
}

int svc_decode_job(const Shardd__V1__JobSpec *spec, state_checkpoints *room, struct job_spec *ret,
		   struct fault *f)
{
	struct job_ref ref;

	if (!spec)
		return fault_set(f, FAULT_INVALID, "job", "job is missing");
	if (job_ref_parse(spec->name, "job.name", &ref, f))
		return f->code;
	if (!spec->world_size)
		return fault_set(f, FAULT_INVALID, "job.world_size",
				 "job.world_size is 0; it must be 1 or more");
	if ((unsigned)spec->lifetime > JOB_BASE)
		return fault_set(f, FAULT_INVALID, "job.lifetime",
				 "job.lifetime is %d; it must be EPHEMERAL, KEEP or BASE",
				 spec->lifetime);
	if ((unsigned)spec->resume > JOB_RESUME_NO_COPY)
		return fault_set(f, FAULT_INVALID, "job.resume",
				 "job.resume is %d; it must be APPLIED, COMMITTED or NO_COPY",
				 spec->resume);
	if (spec->resume == SHARDD__V1__RESUME__RESUME_COMMITTED && spec->allow_torn)
		return fault_set(
			f, FAULT_INVALID, "job.allow_torn",
			"job.allow_torn is set and job.resume is COMMITTED: a job that "
			"resumes at its commits is never torn by a trainer's death; set one "
			"of them");
	if ((spec->min_ranks || spec->max_ranks) &&
	    (!spec->min_ranks || spec->min_ranks > spec->world_size ||
	     spec->max_ranks < spec->world_size))
		return fault_set(f, FAULT_INVALID, "job.min_ranks",
				 "job.min_ranks %u and job.max_ranks %u must be 1 or more, with "
				 "job.world_size %u between them, or both 0",
				 spec->min_ranks, spec->max_ranks, spec->world_size);
	if (spec->join_grace_ms && !spec->max_ranks)
		return fault_set(
			f, FAULT_INVALID, "job.join_grace_ms",
			"job.join_grace_ms is %u, and job.min_ranks and job.max_ranks are 0: "
			"only an elastic job changes its size by itself",
			spec->join_grace_ms);
	if (spec->priority < -USER_PRIORITY_MAX || spec->priority > USER_PRIORITY_MAX)
		return fault_set(f, FAULT_INVALID, "job.priority",
				 "job.priority %d is out of range (-%d..%d)", spec->priority,
				 USER_PRIORITY_MAX, USER_PRIORITY_MAX);
	*ret = (struct job_spec){ .name = spec->name,
				  .world_size = spec->world_size,
				  .lifetime = (enum job_lifetime)spec->lifetime,
				  .quota_bytes = spec->quota_bytes,
				  .ttl_s = spec->ttl_s,
				  .op_timeout_ms = spec->op_timeout_ms,
				  .allow_torn = spec->allow_torn,
				  .resume = (enum job_resume)spec->resume,
				  .min_ranks = spec->min_ranks,
				  .max_ranks = spec->max_ranks,
				  .join_grace_ms = spec->join_grace_ms,
				  .priority = spec->priority,
				  .wait_for_memory_ms = spec->wait_for_memory_ms,
				  .ipc = spec->ipc,
				  .is_private = spec->is_private,
				  .checkpoints =
					  svc_shardd_jobs_checkpoints(spec->checkpoints, room) };
	return 0;
}

void svc_log_created(const struct proc *who, const struct job *job)
{
	audit(who, "created", job->label, "world_size=%u lifetime=%s ttl_s=%u private=%s",
	      job->rec->world_size, job_lifetime_word(job->rec->lifetime), job->rec->ttl_s,
	      job->rec->is_private ? "yes" : "no");
}

void svc_refuse(struct rpc_call *call, const char *what, const char *job, const struct fault *f)
{
	struct conn *c = rpc_call_conn(call);

	if (c)
		audit_refused(conn_proc(c), what, job, f);
	rpc_call_fail(call, f);
}

/* Whom the job is created for. */
static int svc_shardd_jobs_owner(const Shardd__V1__CreateJobRequest *r, uid_t uid,
				 struct job_spec *spec, struct fault *f)
{
	struct job_ref ref;

	if (!r->gid)
		return 0;
	if (job_ref_parse(spec->name, "job.name", &ref, f))
		return f->code;
	if (!job_is_admin(uid))
		return fault_set(f, FAULT_DENIED, "gid",
				 "only an administrator creates a job for another user");
	if (!ref.has_uid)
		return fault_set(f, FAULT_INVALID, "job.name",
				 "gid is %u, and job.name '%.75s' has no owner: write UID/NAME",
				 r->gid, spec->name);
	spec->gid = (gid_t)r->gid;
	return 0;
}

void svc_create_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__CreateJobRequest *r = (const Shardd__V1__CreateJobRequest *)request;
	struct svc_shardd *svc = userdata;
	Shardd__V1__CreateJobResponse reply = SHARDD__V1__CREATE_JOB_RESPONSE__INIT;
	struct conn *c = rpc_call_conn(call);
	struct fault f = c ? FAULT_NULL : svc_not_connected();
	state_checkpoints checkpoints;
	struct job_spec spec;
	struct job *job;
	bool created = false;

	if (f.code || svc_decode_job(r->job, &checkpoints, &spec, &f) ||
	    svc_shardd_jobs_owner(r, proc_uid(conn_proc(c)), &spec, &f) ||
	    job_open(svc->jobs, &spec, proc_uid(conn_proc(c)), proc_gid(conn_proc(c)), &job,
		     &created, &f)) {
		svc_refuse(call, "create", r->job ? r->job->name : "", &f);
		return;
	}
	if (created)
		svc_log_created(conn_proc(c), job);
	reply.created = created;
	rpc_call_reply(call, &reply.base);
}

int svc_find_job(struct rpc_call *call, struct svc_shardd *svc, const char *name, struct job **ret,
		 struct fault *f)
{
	struct conn *c = rpc_call_conn(call);

	*f = c ? FAULT_NULL : svc_not_connected();
	return f->code ? (int)f->code : job_find(svc->jobs, name, proc_uid(conn_proc(c)), ret, f);
}

/* -- on all nodes of the job */

/* A call that waits until they have done their part. */
struct acting {
	struct cluster_acting w;
	struct rpc_call *call;
	char label[JOB_LABEL_MAX + 1];
};

static Shardd__V1__MissedNode **svc_shardd_jobs_missed(const struct cluster_acting *w)
{
	Shardd__V1__MissedNode *all, **list;

	list = calloc(w->n_missed + 1, sizeof(*list) + sizeof(*all));
	all = (Shardd__V1__MissedNode *)(list + w->n_missed + 1);
	for (size_t i = 0; list && i < w->n_missed; i++) {
		shardd__v1__missed_node__init(&all[i]);
		all[i].node = (char *)w->missed[i].node;
		all[i].why = (char *)w->missed[i].why;
		list[i] = &all[i];
	}
	return list;
}

static void svc_shardd_jobs_reply(struct rpc_call *call, const char *label,
				  const struct cluster_acting *w)
{
	Shardd__V1__DeleteJobResponse deleted = SHARDD__V1__DELETE_JOB_RESPONSE__INIT;
	Shardd__V1__DrainJobResponse drains = SHARDD__V1__DRAIN_JOB_RESPONSE__INIT;
	Shardd__V1__MissedNode **missed = svc_shardd_jobs_missed(w);
	struct fault f = w->f;

	if (!missed && !f.code)
		fault_errno(&f, -ENOMEM, "naming the nodes that were not reached");
	deleted.freed_bytes = w->bytes;
	drains.ranks = w->ranks;
	deleted.missed = drains.missed = missed;
	deleted.n_missed = drains.n_missed = w->n_missed;
	if (f.code)
		svc_refuse(call, w->drain ? "drain" : "delete", label, &f);
	else if (w->drain)
		audit(conn_proc(rpc_call_conn(call)), "draining", label, "ranks=%u missed=%zu",
		      w->ranks, w->n_missed);
	else
		audit(conn_proc(rpc_call_conn(call)), "deleted", label,
		      "bytes=%llu forced=%s missed=%zu", (unsigned long long)w->bytes,
		      w->force ? "yes" : "no", w->n_missed);
	if (!f.code)
		rpc_call_reply(call, w->drain ? &drains.base : &deleted.base);
	free(missed);
}

static void svc_shardd_jobs_acted(struct cluster_acting *w)
{
	struct acting *a = CONTAINER_OF(w, struct acting, w);

	rpc_call_on_cancelled(a->call, NULL, NULL);
	svc_shardd_jobs_reply(a->call, a->label, w);
	free(a);
}

/* It goes on without the caller. */
static void svc_shardd_jobs_cancelled(struct rpc_call *call, void *userdata)
{
	struct acting *a = userdata;
	struct fault f = FAULT_NULL;

	cluster_act_cancel(&a->w);
	free(a);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

/* RES_DONE: the job is on this node alone: nothing was done. Else the call is answered, or will be. */
static enum res svc_shardd_jobs_act(struct rpc_call *call, struct job *job, bool drain, bool force)
{
	struct acting *a = calloc(1, sizeof(*a));
	struct fault f = FAULT_NULL;
	enum res r;

	if (!a) {
		fault_errno(&f, -ENOMEM, "asking the nodes of a job");
		rpc_call_fail(call, &f);
		return RES_FAILED;
	}
	a->w = (struct cluster_acting){ .drain = drain,
					.force = force,
					.done = svc_shardd_jobs_acted };
	a->call = call;
	text_copy(a->label, sizeof(a->label), job->label);
	r = cluster_act(&a->w, job, &f);
	if (r == RES_WAIT) {
		rpc_call_on_cancelled(call, svc_shardd_jobs_cancelled, a);
		return r;
	}
	if (r == RES_FAILED)
		svc_refuse(call, drain ? "drain" : "delete", job->label, &f);
	free(a);
	return r;
}

void svc_delete_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__DeleteJobRequest *r = (const Shardd__V1__DeleteJobRequest *)request;
	Shardd__V1__DeleteJobResponse reply = SHARDD__V1__DELETE_JOB_RESPONSE__INIT;
	struct fault f;
	char label[JOB_LABEL_MAX + 1];
	struct job *job;

	if (svc_find_job(call, userdata, r->job, &job, &f) == 0) {
		if (svc_shardd_jobs_act(call, job, false, r->force) != RES_DONE)
			return;
		text_copy(label, sizeof(label), job->label);
		if (base_check_delete(job, r->force, &f) == 0) {
			if (r->force || !job->present)
				saving_cancel(job);
			job_delete(job, r->force, &reply.freed_bytes, &f);
		}
	}
	if (f.code) {
		svc_refuse(call, "delete", r->job, &f);
		return;
	}
	audit(conn_proc(rpc_call_conn(call)), "deleted", label, "bytes=%llu forced=%s",
	      (unsigned long long)reply.freed_bytes, r->force ? "yes" : "no");
	rpc_call_reply(call, &reply.base);
}

void svc_drain_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__DrainJobRequest *r = (const Shardd__V1__DrainJobRequest *)request;
	Shardd__V1__DrainJobResponse reply = SHARDD__V1__DRAIN_JOB_RESPONSE__INIT;
	struct fault f;
	struct job *job;

	if (svc_find_job(call, userdata, r->job, &job, &f)) {
		svc_refuse(call, "drain", r->job, &f);
		return;
	}
	if (svc_shardd_jobs_act(call, job, true, false) != RES_DONE)
		return;
	reply.ranks = job_drain(job);
	audit(conn_proc(rpc_call_conn(call)), "draining", job->label, "ranks=%u", reply.ranks);
	rpc_call_reply(call, &reply.base);
}

/* ---------------------------------------------------------------- groups */

static int svc_shardd_jobs_check_ranks(const struct job *job, const uint32_t *ranks, size_t n,
				       struct fault *f)
{
	bool *seen;

	if (!n || n > job->rec->world_size)
		return fault_set(f, FAULT_INVALID, "ranks",
				 "ranks has %zu entries; it must have 1 to %u", n,
				 job->rec->world_size);
	seen = calloc(job->rec->world_size, sizeof(*seen));
	if (!seen)
		return fault_errno(f, -ENOMEM, "making a group");
	for (size_t i = 0; !f->code && i < n; i++) {
		if (ranks[i] >= job->rec->world_size)
			fault_set(f, FAULT_INVALID, "ranks",
				  "ranks contains %u, which is out of range (0..%u)", ranks[i],
				  job->rec->world_size - 1);
		else if (seen[ranks[i]])
			fault_set(f, FAULT_INVALID, "ranks", "ranks contains %u twice", ranks[i]);
		else
			seen[ranks[i]] = true;
	}
	free(seen);
	return f->code;
}

int svc_check_joined(const struct member *m, struct fault *f)
{
	if (m->state == MEMBER_JOINED)
		return 0;
	if (m->state == MEMBER_STALE || m->state == MEMBER_DEAD)
		return fault_set(f, FAULT_ABORTED, NULL, "%s", m->ended.text);
	return fault_set(f, FAULT_STATE, NULL, "this session has left its job: join again");
}

void svc_create_group(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__CreateGroupRequest *r = (const Shardd__V1__CreateGroupRequest *)request;
	Shardd__V1__CreateGroupResponse reply = SHARDD__V1__CREATE_GROUP_RESPONSE__INIT;
	struct member *m = svc_member(call);
	struct fault f = FAULT_NULL;
	struct group *g = NULL;

	(void)userdata;
	if (!m)
		return;
	if (svc_check_joined(m, &f) || unit_spec_name(r->name, UNIT_NAME_MAX, "name", &f) ||
	    svc_shardd_jobs_check_ranks(m->job, r->ranks, r->n_ranks, &f) ||
	    job_group(m->job, r->name, r->ranks, r->n_ranks, &g, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	reply.group = g->id;
	rpc_call_reply(call, &reply.base);
}
