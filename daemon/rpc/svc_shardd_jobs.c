/* Jobs, membership, groups, registration. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/log.h"
#include "rpc/svc_impl.h"
#include "rpc/unit_spec.h"

static struct fault not_connected(void)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_CANCELLED, NULL, "the connection is closed");
	return f;
}

/* 1 to 64 of [A-Za-z0-9._-]. */
static int check_job_name(const char *name, const char *field, struct fault *f)
{
	static const char allowed[] =
		"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
	size_t n = strlen(name), good = strspn(name, allowed);

	if (!n || n > JOB_NAME_MAX)
		return fault_set(f, FAULT_INVALID, field,
				 "%s is %zu bytes: 1 to %u of [A-Za-z0-9._-] are allowed", field, n,
				 JOB_NAME_MAX);
	if (good < n)
		return fault_set(f, FAULT_INVALID, field,
				 "%s has byte 0x%02x at %zu: [A-Za-z0-9._-] are allowed", field,
				 (unsigned char)name[good], good);
	return 0;
}

static int decode_job(const Shardd__V1__JobSpec *spec, struct job_spec *ret, struct fault *f)
{
	if (!spec)
		return fault_set(f, FAULT_INVALID, "job", "job is missing");
	if (check_job_name(spec->name, "job.name", f))
		return f->code;
	if (!spec->world_size)
		return fault_set(f, FAULT_INVALID, "job.world_size",
				 "job.world_size is 0: 1 or more is allowed");
	if ((unsigned)spec->lifetime > JOB_KEEP)
		return fault_set(f, FAULT_INVALID, "job.lifetime",
				 "job.lifetime is %d: EPHEMERAL or KEEP is allowed",
				 spec->lifetime);
	*ret = (struct job_spec){ .name = spec->name,
				  .world_size = spec->world_size,
				  .lifetime = (enum job_lifetime)spec->lifetime,
				  .quota_bytes = spec->quota_bytes,
				  .ttl_s = spec->ttl_s,
				  .op_timeout_ms = spec->op_timeout_ms,
				  .allow_torn = spec->allow_torn };
	return 0;
}

void svc_create_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__CreateJobRequest *r = (const Shardd__V1__CreateJobRequest *)request;
	struct svc_shardd *svc = userdata;
	Shardd__V1__CreateJobReply reply = SHARDD__V1__CREATE_JOB_REPLY__INIT;
	struct conn *c = rpc_call_conn(call);
	struct fault f = c ? FAULT_NULL : not_connected();
	struct job_spec spec;
	struct job *job;
	bool created = false;

	if (f.code || decode_job(r->job, &spec, &f) ||
	    job_open(svc->jobs, &spec, proc_uid(conn_proc(c)), proc_gid(conn_proc(c)), &job,
		     &created, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	if (created)
		log_info("rpc", "job created job=%s world_size=%u", job->rec->name,
			 job->rec->world_size);
	reply.created = created;
	rpc_call_reply(call, &reply.base);
}

static int find_job(struct rpc_call *call, struct svc_shardd *svc, const char *name,
		    struct job **ret, struct fault *f)
{
	struct conn *c = rpc_call_conn(call);

	*f = c ? FAULT_NULL : not_connected();
	if (f->code || check_job_name(name, "job", f))
		return f->code;
	return job_find(svc->jobs, name, proc_uid(conn_proc(c)), ret, f);
}

void svc_delete_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__DeleteJobRequest *r = (const Shardd__V1__DeleteJobRequest *)request;
	Shardd__V1__DeleteJobReply reply = SHARDD__V1__DELETE_JOB_REPLY__INIT;
	struct fault f;
	struct job *job;

	if (find_job(call, userdata, r->job, &job, &f) ||
	    job_delete(job, r->force, &reply.freed_bytes, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	log_info("rpc", "job deleted job=%s bytes=%llu", r->job,
		 (unsigned long long)reply.freed_bytes);
	rpc_call_reply(call, &reply.base);
}

void svc_drain_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__DrainJobRequest *r = (const Shardd__V1__DrainJobRequest *)request;
	Shardd__V1__DrainJobReply reply = SHARDD__V1__DRAIN_JOB_REPLY__INIT;
	struct fault f;
	struct job *job;

	if (find_job(call, userdata, r->job, &job, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	reply.ranks = job_drain(job);
	rpc_call_reply(call, &reply.base);
}

/* -------------------------------------------------------- join and leave */

static void send_join(struct rpc_call *call, const struct member *m)
{
	Shardd__V1__JoinReply reply = SHARDD__V1__JOIN_REPLY__INIT;
	const state_job *rec = m->job->rec;
	const state_blob *blob = rec->has_commit ? state_job_blob(rec, m->rank) : NULL;

	reply.epoch = m->epoch;
	reply.world_size = rec->world_size;
	reply.resumed = rec->has_commit || (rec->epoch > 1 && rec->n_units);
	reply.has_commit = rec->has_commit;
	reply.step = rec->step;
	reply.torn = rec->has_commit && rec->uncommitted_steps;
	if (blob)
		reply.blob = blob->data;
	rpc_call_reply(call, &reply.base);
}

/* A join that waits until ops of an earlier epoch have ended. */
struct joining {
	struct job_waiter waiter;
	struct rpc_call *call;
	struct job *job;
	uint32_t rank;
};

static void on_join_cancelled(struct rpc_call *call, void *userdata)
{
	struct joining *j = userdata;
	struct fault f = FAULT_NULL;

	list_unlink(&j->waiter.link);
	free(j);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up this join");
	rpc_call_fail(call, &f);
}

/* Return: 0 or a fault code, then the call is answered; or JOB_E_BUSY. */
static int join_now(struct rpc_call *call, struct job *job, uint32_t rank)
{
	struct conn *c = rpc_call_conn(call);
	struct session *s = c ? conn_user(c) : NULL;
	struct fault f = s ? FAULT_NULL : not_connected();
	int r = s ? session_join(s, job, rank, &f) : (int)f.code;

	if (r == JOB_E_BUSY)
		return r;
	if (r) {
		rpc_call_fail(call, &f);
		return r;
	}
	log_info("rpc", "rank joined job=%s rank=%u pid=%d session=%llu epoch=%llu", job->rec->name,
		 rank, member_pid(s->member), (unsigned long long)s->id,
		 (unsigned long long)s->member->epoch);
	send_join(call, s->member);
	return 0;
}

static void on_settled(struct job_waiter *w)
{
	struct joining *j = CONTAINER_OF(w, struct joining, waiter);
	struct fault f = FAULT_NULL;

	rpc_call_on_cancelled(j->call, NULL, NULL);
	if (j->job->deleted) {
		fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", j->job->rec->name);
		rpc_call_fail(j->call, &f);
	} else if (join_now(j->call, j->job, j->rank) == JOB_E_BUSY) {
		rpc_call_on_cancelled(j->call, on_join_cancelled, j);
		job_wait_settled(j->job, &j->waiter);
		return;
	}
	free(j);
}

static void join_later(struct rpc_call *call, struct job *job, uint32_t rank)
{
	struct joining *j = calloc(1, sizeof(*j));
	struct fault f = FAULT_NULL;

	if (!j) {
		fault_errno(&f, -ENOMEM, "joining a job");
		rpc_call_fail(call, &f);
		return;
	}
	*j = (struct joining){ .call = call, .job = job, .rank = rank };
	j->waiter.fn = on_settled;
	list_init(&j->waiter.link);
	rpc_call_on_cancelled(call, on_join_cancelled, j);
	job_wait_settled(job, &j->waiter);
}

void svc_join(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__JoinRequest *r = (const Shardd__V1__JoinRequest *)request;
	struct svc_shardd *svc = userdata;
	struct session *s = svc_session(call);
	struct fault f = FAULT_NULL;
	struct job_spec spec;
	struct job *job;
	bool created;
	int e;

	if (!s)
		return;
	if (decode_job(r->job, &spec, &f) == 0 && r->rank >= spec.world_size)
		fault_set(&f, FAULT_INVALID, "rank", "rank is %u: 0 to %u is allowed", r->rank,
			  spec.world_size - 1);
	if (f.code ||
	    job_open(svc->jobs, &spec, proc_uid(s->proc), proc_gid(s->proc), &job, &created, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	if (created)
		log_info("rpc", "job created job=%s world_size=%u", job->rec->name,
			 job->rec->world_size);
	e = join_now(call, job, r->rank);
	if (e == JOB_E_BUSY)
		join_later(call, job, r->rank);
	else if (e && created) /* nobody asked for a job without its first rank */
		(void)job_delete(job, false, NULL, &f);
}

void svc_leave(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	Shardd__V1__LeaveReply reply = SHARDD__V1__LEAVE_REPLY__INIT;
	struct session *s = svc_session(call);
	struct fault f = FAULT_NULL;
	bool freed = false;

	(void)request;
	(void)userdata;
	if (!s)
		return;
	if (session_leave(s, &freed, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	log_info("rpc", "rank left session=%llu pid=%d job_freed=%d", (unsigned long long)s->id,
		 (int)proc_pid(s->proc), freed);
	reply.job_freed = freed;
	rpc_call_reply(call, &reply.base);
}

/* ------------------------------------------------------- groups and units */

static int check_ranks(const struct job *job, const uint32_t *ranks, size_t n, struct fault *f)
{
	bool *seen;

	if (!n || n > job->rec->world_size)
		return fault_set(f, FAULT_INVALID, "ranks",
				 "ranks has %zu entries: 1 to %u are allowed", n,
				 job->rec->world_size);
	seen = calloc(job->rec->world_size, sizeof(*seen));
	if (!seen)
		return fault_errno(f, -ENOMEM, "making a group");
	for (size_t i = 0; !f->code && i < n; i++) {
		if (ranks[i] >= job->rec->world_size)
			fault_set(f, FAULT_INVALID, "ranks", "ranks has %u: 0 to %u is allowed",
				  ranks[i], job->rec->world_size - 1);
		else if (seen[ranks[i]])
			fault_set(f, FAULT_INVALID, "ranks", "ranks has %u twice", ranks[i]);
		else
			seen[ranks[i]] = true;
	}
	free(seen);
	return f->code;
}

static int check_joined(const struct member *m, struct fault *f)
{
	if (m->state == MEMBER_JOINED)
		return 0;
	if (m->state == MEMBER_STALE)
		return fault_set(f, FAULT_ABORTED, NULL, "%s", m->ended.text);
	return fault_set(f, FAULT_STATE, NULL, "this session has left its job: join again");
}

void svc_create_group(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__CreateGroupRequest *r = (const Shardd__V1__CreateGroupRequest *)request;
	Shardd__V1__CreateGroupReply reply = SHARDD__V1__CREATE_GROUP_REPLY__INIT;
	struct member *m = svc_member(call);
	struct fault f = FAULT_NULL;
	struct group *g = NULL;

	(void)userdata;
	if (!m)
		return;
	if (check_joined(m, &f) || unit_spec_name(r->name, UNIT_NAME_MAX, "name", &f) ||
	    check_ranks(m->job, r->ranks, r->n_ranks, &f) ||
	    job_group(m->job, r->name, r->ranks, r->n_ranks, &g, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	reply.group = g->id;
	rpc_call_reply(call, &reply.base);
}

/* All specs of a request, as records. */
static int decode_units(const Shardd__V1__RegisterRequest *r, state_unit **specs, struct fault *f)
{
	for (size_t i = 0; i < r->n_units; i++)
		if (unit_spec_decode(r->units[i], i, &specs[i], f))
			return f->code;
	return 0;
}

static void send_registered(struct rpc_call *call, const struct job *job, const uint32_t *ids,
			    size_t n, uint64_t charged)
{
	Shardd__V1__RegisterReply reply = SHARDD__V1__REGISTER_REPLY__INIT;
	Shardd__V1__RegisteredUnit *units = calloc(n, sizeof(*units));
	Shardd__V1__RegisteredUnit **pointers = calloc(n, sizeof(*pointers));
	struct fault f = FAULT_NULL;

	for (size_t i = 0; units && pointers && i < n; i++) {
		const struct unit *u = job->units[ids[i] - 1];

		pointers[i] = &units[i];
		shardd__v1__registered_unit__init(&units[i]);
		units[i].unit = u->id;
		units[i].elements = u->layout.elements;
		units[i].shard_elements = u->layout.shard_elements;
		units[i].initialised = u->rec->initialised && !u->torn;
		units[i].optimizer_steps = u->rec->optimizer->steps;
	}
	reply.units = pointers;
	reply.n_units = n;
	reply.charged_bytes = charged;
	if (units && pointers) {
		rpc_call_reply(call, &reply.base);
	} else {
		fault_errno(&f, -ENOMEM, "answering a registration");
		rpc_call_fail(call, &f);
	}
	free(units);
	free(pointers);
}

static void register_for(struct rpc_call *call, struct member *m,
			 const Shardd__V1__RegisterRequest *r)
{
	state_unit **specs = calloc(r->n_units, sizeof(*specs));
	uint32_t *ids = calloc(r->n_units, sizeof(*ids));
	struct fault f = FAULT_NULL;
	uint64_t charged = 0;

	if (!specs || !ids)
		fault_errno(&f, -ENOMEM, "registering units");
	if (!f.code && decode_units(r, specs, &f) == 0)
		(void)job_register(m->job, specs, r->n_units, ids, &charged, &f);
	if (f.code)
		rpc_call_fail(call, &f);
	else
		send_registered(call, m->job, ids, r->n_units, charged);
	for (size_t i = 0; specs && i < r->n_units; i++)
		state_unit_free(specs[i]);
	free(specs);
	free(ids);
}

void svc_register(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__RegisterRequest *r = (const Shardd__V1__RegisterRequest *)request;
	struct svc_shardd *svc = userdata;
	uint32_t most = svc->jobs->node->limits.max_units_per_job;
	struct member *m = svc_member(call);
	struct fault f = FAULT_NULL;

	if (!m)
		return;
	if (!r->n_units || r->n_units > most)
		fault_set(&f, FAULT_INVALID, "units", "units has %zu entries: 1 to %u are allowed",
			  r->n_units, most);
	if (f.code || check_joined(m, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	register_for(call, m, r);
}
