/* Joining and leaving a job. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster.h"
#include "core/check.h"
#include "core/text.h"
#include "job/elastic.h"
#include "job/history.h"
#include "job/launched.h"
#include "job/position.h"
#include "job/resize.h"
#include "rpc/audit.h"
#include "rpc/svc_shardd_impl.h"

/* ------------------------------------------------------------- the answer */

/* The description of a page for a client: the page of its signals, or the ready page. */
static void svc_shardd_join_fill_page(const struct member *m, struct slab *s,
				      Shardd__V1__Placement *p, uint8_t *handle)
{
	shardd__v1__placement__init(p);
	p->slab = s->id;
	p->bytes = p->slab_bytes = s->bytes;
	p->writable = s->writable;
	if (m->job->rec->ipc && slab_export_ipc(s, handle) == 0)
		p->ipc_handle = (ProtobufCBinaryData){ BACKEND_IPC_BYTES, handle };
}

/* Everything a StreamLink points to. */
struct link_parts {
	Shardd__V1__Placement signals, ready;
	uint8_t signals_handle[BACKEND_IPC_BYTES], ready_handle[BACKEND_IPC_BYTES];
	uint8_t events[_BACKEND_Q_N * BACKEND_EVENT_RING][BACKEND_IPC_BYTES];
	ProtobufCBinaryData event_data[_BACKEND_Q_N * BACKEND_EVENT_RING];
};

static int svc_shardd_join_fill_events(const struct member *m, struct link_parts *parts,
				       Shardd__V1__StreamLink *l, struct fault *f)
{
	for (unsigned i = 0; i < ARRAY_SIZE(parts->events); i++) {
		int r = backend_ready_event(m->device->backend,
					    (enum backend_queue)(i / BACKEND_EVENT_RING),
					    i % BACKEND_EVENT_RING, parts->events[i]);

		if (r)
			return fault_errno(f, r, "handing out the daemon's events");
		parts->event_data[i] = (ProtobufCBinaryData){ BACKEND_IPC_BYTES, parts->events[i] };
	}
	l->ready_events = parts->event_data;
	l->n_ready_events = ARRAY_SIZE(parts->events);
	return 0;
}

static int svc_shardd_join_fill_link(const struct member *m, struct link_parts *parts,
				     Shardd__V1__StreamLink *l, struct fault *f)
{
	bool events = backend_info(m->device->backend)->order == BACKEND_ORDER_EVENTS;
	struct slab *ready = slab_device_ready(m->device, job_share(m->job));

	shardd__v1__stream_link__init(l);
	l->order = events ? SHARDD__V1__STREAM_LINK__ORDER__ORDER_EVENTS
			  : SHARDD__V1__STREAM_LINK__ORDER__ORDER_TIMELINE;
	l->slots = BACKEND_SIGNAL_SLOTS;
	l->slot_stride = BACKEND_SLOT_STRIDE;
	l->event_ring = events ? BACKEND_EVENT_RING : 0;
	svc_shardd_join_fill_page(m, member_signals_slab(m), &parts->signals,
				  parts->signals_handle);
	if (!ready)
		return fault_errno(f, -ENOMEM, "handing out the ready page");
	svc_shardd_join_fill_page(m, ready, &parts->ready, parts->ready_handle);
	l->signals = &parts->signals;
	l->ready = &parts->ready;
	return events ? svc_shardd_join_fill_events(m, parts, l, f) : 0;
}

/* @reply: step is that of the last commit if nobody knows that of the parameters. */
static void svc_shardd_join_fill_position(const state_job *rec, Shardd__V1__JoinResponse *reply)
{
	uint64_t step;
	bool known = position_of(rec, &step) && !rec->torn;

	if (known || rec->has_commit) {
		reply->optional_step_case = SHARDD__V1__JOIN_RESPONSE__OPTIONAL_STEP_STEP;
		reply->step = known ? step : rec->step;
	}
	if (rec->has_commit) {
		reply->optional_committed_step_case =
			SHARDD__V1__JOIN_RESPONSE__OPTIONAL_COMMITTED_STEP_COMMITTED_STEP;
		reply->committed_step = rec->step;
	}
	reply->torn = rec->torn ||
		      (!known && (rec->has_commit || rec->anchored) && rec->uncommitted_steps);
}

static void svc_shardd_join_send_join(struct rpc_call *call, struct member *m, bool created)
{
	Shardd__V1__JoinResponse reply = SHARDD__V1__JOIN_RESPONSE__INIT;
	Shardd__V1__Device device = SHARDD__V1__DEVICE__INIT;
	const struct backend_info *info = backend_info(m->device->backend);
	const state_job *rec = m->job->rec;
	const state_blob *blob =
		rec->has_commit || rec->anchored ? state_job_blob(rec, m->rank) : NULL;
	Shardd__V1__StreamLink link;
	struct link_parts parts;
	struct fault f = FAULT_NULL;

	reply.epoch = m->epoch;
	reply.created = created;
	reply.lifetime = (Shardd__V1__Lifetime)rec->lifetime;
	reply.instance = (ProtobufCBinaryData){ NODE_INSTANCE_BYTES, m->job->node->instance };
	reply.started_unix_s = m->job->node->started_unix_s;
	reply.world_size = rec->world_size;
	reply.rank = m->rank;
	reply.wait_for_memory_ms = rec->wait_for_memory_ms;
	reply.slabs_gone = m->gone.slabs;
	reply.n_slabs_gone = m->gone.n;
	reply.resumed = rec->has_commit || rec->anchored || (rec->epoch > 1 && rec->n_units);
	svc_shardd_join_fill_position(rec, &reply);
	if (blob) {
		reply.blob = blob->data;
		reply.blob_step = rec->anchored ? blob->step : rec->step;
	}
	device.id = (char *)info->id;
	device.backend = (char *)info->name;
	device.uuid = (char *)info->uuid;
	reply.device = &device;
	if (member_signals(m) && svc_shardd_join_fill_link(m, &parts, &link, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	if (member_signals(m))
		reply.streams = &link;
	rpc_call_reply(call, &reply.base);
	m->gone.n = 0;
}

/* Joined: with signals for its streams, if it wants them. @userdata: not NULL if it created the
 * job. */
static enum res svc_shardd_join_answer_join(struct rpc_call *call, const ProtobufCMessage *request,
					    void *userdata, struct fault *f)
{
	const Shardd__V1__JoinRequest *r = (const Shardd__V1__JoinRequest *)request;
	struct member *m = svc_member(call);

	if (!m)
		return RES_DONE;
	if (m->state == MEMBER_DEAD || m->state == MEMBER_LEFT)
		return res_of(fault_set(f, FAULT_ABORTED, NULL, "job '%s' was deleted",
					m->job->rec->name));
	if (r->streams)
		RES_TRY(member_link(m, f));
	svc_shardd_join_send_join(call, m, userdata);
	return RES_DONE;
}

/* ---------------------------------------------------------- join and leave */

/* A join: it may have to wait until ops of an earlier epoch have ended, or until the job has a rank for
 * it. */
struct joining {
	struct waiter waiter;
	struct elastic_newcomer newcomer;
	struct rpc_call *call;
	struct svc_shardd *svc;
	struct job *job;
	const Shardd__V1__JoinRequest *request; /* the call's */
	uint32_t rank; /* the request's: it stays when the call is answered */
	bool created;  /* the job, by this call */
};

static void svc_shardd_join_free(struct joining *j)
{
	waiter_leave(&j->waiter);
	elastic_newcomer_leave(&j->newcomer);
	free(j);
}

/* It waits no longer, and its rank is not there for other nodes. Frees @j. */
static void svc_shardd_join_give_up(struct joining *j)
{
	uint32_t rank = j->rank;
	struct job *job = j->job;

	svc_shardd_join_free(j);
	job_join_given_up(job, rank);
}

static void svc_shardd_join_on_join_cancelled(struct rpc_call *call, void *userdata)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up this join");
	svc_shardd_join_give_up(userdata);
	rpc_call_fail(call, &f);
}

/* RES_WAIT: wait for job.settled. Else the call is answered, or will be. */
static enum res svc_shardd_join_now(struct joining *j)
{
	const Shardd__V1__JoinRequest *r = j->request;
	const struct job_joining how = { .rank = r->rank,
					 .world_size = r->job->world_size,
					 .device = r->device,
					 .no_channel = r->no_channel,
					 .returns = r->returns,
					 .local_rank = r->local_rank,
					 .local_world_size = r->local_world_size,
					 .newcomer = &j->newcomer };
	struct conn *c = rpc_call_conn(j->call);
	struct session *s = c ? conn_user(c) : NULL;
	struct fault f = s ? FAULT_NULL : svc_not_connected();
	enum res res = s ? session_join(s, j->job, &how, &f) : RES_FAILED;

	if (res == RES_FAILED)
		svc_refuse(j->call, "join", j->job->label, &f);
	RES_TRY(res);
	job_existing_joined(j->job, r->run);
	audit(s->proc, "joined", j->job->label, "rank=%u of=%u session=%llu epoch=%llu",
	      s->member->rank, j->job->rec->world_size, (unsigned long long)s->id,
	      (unsigned long long)s->member->epoch);
	svc_later_run(j->call, &r->base, j->job->node, svc_shardd_join_answer_join, NULL,
		      j->created ? j->call : NULL);
	return RES_DONE;
}

static void svc_shardd_join_wait(struct joining *j)
{
	rpc_call_on_cancelled(j->call, svc_shardd_join_on_join_cancelled, j);
	condition_wait(&j->job->settled, &j->waiter);
}

/* All ranks have left an earlier job of this name, which this rank has come too early for. */
static void svc_shardd_join_anew(struct joining *j)
{
	const struct joining was = *j;

	svc_shardd_join_free(j);
	svc_join(was.call, &was.request->base, was.svc);
}

static void svc_shardd_join_on_settled(struct waiter *w)
{
	struct joining *j = CONTAINER_OF(w, struct joining, waiter);
	struct fault f = FAULT_NULL;
	enum res res;

	rpc_call_on_cancelled(j->call, NULL, NULL);
	if (j->job->life.finished) {
		svc_shardd_join_anew(j);
		return;
	}
	if (j->job->life.deleted) {
		fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", j->job->rec->name);
		rpc_call_fail(j->call, &f);
		svc_shardd_join_free(j);
		return;
	}
	res = svc_shardd_join_now(j);
	if (res == RES_WAIT)
		svc_shardd_join_wait(j);
	else if (res ==
		 RES_FAILED) /* such as that its process is gone: other nodes must hear of it */
		svc_shardd_join_give_up(j);
	else
		svc_shardd_join_free(j);
}

static void svc_shardd_join_begin(struct rpc_call *call, struct svc_shardd *svc, struct job *job,
				  const Shardd__V1__JoinRequest *r, bool created)
{
	struct joining *j = calloc(1, sizeof(*j));
	struct fault f = FAULT_NULL;
	enum res res = RES_FAILED;

	if (j) {
		*j = (struct joining){ .call = call,
				       .svc = svc,
				       .job = job,
				       .request = r,
				       .rank = r->rank,
				       .created = created };
		waiter_init(&j->waiter, svc_shardd_join_on_settled);
		elastic_newcomer_init(&j->newcomer);
		res = svc_shardd_join_now(j);
	} else {
		fault_errno(&f, -ENOMEM, "joining a job");
		rpc_call_fail(call, &f);
	}
	if (res == RES_WAIT) {
		svc_shardd_join_wait(j);
		return;
	}
	if (j)
		svc_shardd_join_free(j);
	if (res == RES_FAILED && created) { /* nobody requested a job without its first rank */
		job->life.why = HISTORY_UNUSED;
		(void)job_delete(job, false, NULL, &f);
	}
}

/* The run of the daemon that the trainer continues from. */
static int svc_shardd_join_instance(const Shardd__V1__JoinRequest *r, struct job_spec *spec,
				    struct fault *f)
{
	if (!r->instance.len)
		return 0;
	if (r->instance.len != NODE_INSTANCE_BYTES)
		return fault_set(f, FAULT_INVALID, "instance",
				 "instance has %zu bytes; it must have 0 or %u", r->instance.len,
				 NODE_INSTANCE_BYTES);
	spec->instance = r->instance.data;
	return 0;
}

/* What the trainer wants if the job has state. A session that is in it already joins again. */
static int svc_shardd_join_existing(const Shardd__V1__JoinRequest *r, const struct session *s,
				    struct job_spec *spec, struct fault *f)
{
	if ((unsigned)r->on_existing > JOB_FRESH)
		return fault_set(f, FAULT_INVALID, "on_existing",
				 "on_existing is %d; it must be RESUME, ERROR or FRESH",
				 (int)r->on_existing);
	if (strlen(r->run) > JOB_RUN_MAX)
		return fault_set(f, FAULT_INVALID, "run",
				 "run has %zu bytes; it must have at most %u", strlen(r->run),
				 JOB_RUN_MAX);
	for (const char *c = r->run; *c; c++)
		if (*c < ' ' || *c > '~')
			return fault_set(f, FAULT_INVALID, "run",
					 "run has byte %u at %zu; it must be printable ASCII",
					 (unsigned char)*c, (size_t)(c - r->run));
	spec->on_existing = (enum job_on_existing)r->on_existing;
	if (s->member && s->member->state != MEMBER_LEFT)
		spec->on_existing = JOB_RESUME;
	spec->run = r->run;
	return 0;
}

/* How long ranks of another number wait for the end of those that are still there: their launcher has
 * ended them. */
#define RESIZE_WAIT_US UINT64_C(10000000)

/* A process joins with the same numbers each time, whichever rank it has become. */
static int svc_shardd_join_refuse_other(const struct member *m, uint32_t world, struct fault *f)
{
	return fault_set(
		f, FAULT_STATE, NULL,
		"this process was started as rank %u of %u in job '%s' and is rank %u of %u "
		"now: it joins with the numbers that it was started with, not with world size "
		"%u",
		launched_number(m->job, m->rank), launched_world(m->job), m->job->rec->name,
		m->rank, m->job->rec->world_size, world);
}

/* Ranks of another number have come to an elastic job. */
static int svc_shardd_join_resize(struct job *job, const struct session *s, uint32_t world,
				  struct fault *f)
{
	const struct member *m = s->member && s->member->job == job ? s->member : NULL;

	if (world == launched_world(job))
		return 0;
	if (m && (m->state == MEMBER_JOINED || m->state == MEMBER_STALE))
		return svc_shardd_join_refuse_other(m, world, f);
	if (resize_is_busy(job))
		return 0; /* it has that size afterwards, or the join is refused */
	return resize_begin(job, world, RESIZE_WAIT_US, NULL, NULL, f);
}

/* Beside those of the job's first size, an elastic job that grows by itself has more ranks. */
static int svc_shardd_join_check_rank(const Shardd__V1__JoinRequest *r, const struct job_spec *spec,
				      struct fault *f)
{
	uint32_t ranks = spec->join_grace_ms ? spec->max_ranks : spec->world_size;

	if (r->rank >= ranks)
		fault_set(f, FAULT_INVALID, "rank", "rank %u is out of range (0..%u)", r->rank,
			  ranks - 1);
	return f->code;
}

/* Ranks on other machines have other daemons, with which this one must be in a cluster. */
static int svc_shardd_join_check_here(const Shardd__V1__JoinRequest *r, bool is_elastic,
				      struct fault *f)
{
	struct cluster_info info = { 0 };
	bool alone = !cluster_info(&info);

	if (r->local_world_size >= r->job->world_size || !(alone || (is_elastic && !info.replicas)))
		return 0;
	return fault_set(
		f, FAULT_STATE, "local_world_size",
		"the launcher has started %u of the %u ranks of job '%s' on this machine, "
		"and %s",
		r->local_world_size, r->job->world_size, r->job->name,
		alone ? "this daemon is in no cluster (coord is none): set coord on the "
			"daemons of all machines, or start all ranks here"
		      : "an elastic job with ranks on several nodes needs replicas: 1 in the "
			"configuration of their daemons: set it, or start all ranks here");
}

static int svc_shardd_join_check_local(const Shardd__V1__JoinRequest *r,
				       const struct job_spec *spec, struct fault *f)
{
	if (!r->local_world_size && !r->local_rank)
		return 0;
	if (r->local_rank >= r->local_world_size || r->local_world_size > r->job->world_size)
		return fault_set(f, FAULT_INVALID, "local_rank",
				 "local_rank is %u and local_world_size %u: the first must be "
				 "smaller than the second, and that at most world_size, which is "
				 "%u",
				 r->local_rank, r->local_world_size, r->job->world_size);
	return svc_shardd_join_check_here(r, spec->max_ranks, f);
}

/* The job may be an elastic one of which these trainers say nothing. */
static int svc_shardd_join_check_elastic(const Shardd__V1__JoinRequest *r, const struct job *job,
					 struct fault *f)
{
	return r->local_world_size ? svc_shardd_join_check_here(r, job->rec->max_ranks, f) : 0;
}

void svc_join(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__JoinRequest *r = (const Shardd__V1__JoinRequest *)request;
	struct svc_shardd *svc = userdata;
	struct session *s = svc_session(call);
	struct fault f = FAULT_NULL;
	state_checkpoints checkpoints;
	struct job_spec spec;
	struct job *job;
	bool created;

	if (!s)
		return;
	if (svc_decode_job(r->job, &checkpoints, &spec, &f) == 0 &&
	    svc_shardd_join_check_rank(r, &spec, &f) == 0)
		(void)svc_shardd_join_check_local(r, &spec, &f);
	spec.resizes = true;
	if (f.code || svc_shardd_join_instance(r, &spec, &f) ||
	    svc_shardd_join_existing(r, s, &spec, &f) ||
	    job_open(svc->jobs, &spec, proc_uid(s->proc), proc_gid(s->proc), &job, &created, &f) ||
	    svc_shardd_join_check_elastic(r, job, &f) ||
	    svc_shardd_join_resize(job, s, spec.world_size, &f)) {
		svc_refuse(call, "join", r->job ? r->job->name : "", &f);
		return;
	}
	if (job->rec->max_ranks && r->local_world_size && r->local_world_size < spec.world_size)
		job->across.elastic = true;
	if (created)
		svc_log_created(s->proc, job);
	svc_shardd_join_begin(call, svc, job, r, created);
}

static enum res svc_shardd_join_leave_now(struct rpc_call *call, const ProtobufCMessage *request,
					  void *userdata, struct fault *f)
{
	Shardd__V1__LeaveResponse reply = SHARDD__V1__LEAVE_RESPONSE__INIT;
	struct session *s = svc_session(call);
	char label[JOB_LABEL_MAX + 1] = "";
	bool freed = false;

	(void)request;
	(void)userdata;
	if (!s)
		return RES_DONE;
	if (s->member) /* its job may be freed with it */
		text_copy(label, sizeof(label), s->member->job->label);
	RES_TRY(session_leave(s, &freed, f));
	audit(s->proc, "left", label, "session=%llu job_freed=%d", (unsigned long long)s->id,
	      freed);
	reply.job_freed = freed;
	rpc_call_reply(call, &reply.base);
	return RES_DONE;
}

void svc_leave(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	struct svc_shardd *svc = userdata;

	svc_later_run(call, request, svc->jobs->node, svc_shardd_join_leave_now, NULL, NULL);
}

/* ----------------------------------------------------------------- events */

static int svc_shardd_join_take_events(struct member *m, const Shardd__V1__ShareEventsRequest *r,
				       struct fault *f)
{
	const uint8_t *handles[BACKEND_EVENT_RING];
	int e;

	if (!member_signals(m) || backend_info(m->device->backend)->order != BACKEND_ORDER_EVENTS)
		return fault_set(f, FAULT_STATE, NULL,
				 "the daemon does not use events to wait for this rank's streams");
	if (r->slot >= BACKEND_SIGNAL_SLOTS)
		return fault_set(f, FAULT_INVALID, "slot", "slot %u is out of range (0..%u)",
				 r->slot, BACKEND_SIGNAL_SLOTS - 1);
	if (r->n_handles != BACKEND_EVENT_RING)
		return fault_set(f, FAULT_INVALID, "handles",
				 "handles has %zu entries; it must have %u", r->n_handles,
				 BACKEND_EVENT_RING);
	for (unsigned i = 0; i < BACKEND_EVENT_RING; i++) {
		if (r->handles[i].len != BACKEND_IPC_BYTES)
			return fault_set(f, FAULT_INVALID, "handles",
					 "handles[%u] has %zu bytes; it must have %u", i,
					 r->handles[i].len, BACKEND_IPC_BYTES);
		handles[i] = r->handles[i].data;
	}
	e = backend_signals_events(member_signals(m), r->slot, handles);
	if (e == -EEXIST)
		return fault_set(f, FAULT_INVALID, "slot",
				 "slot %u already has its events: they can be set only once",
				 r->slot);
	if (e == -ENOMEM)
		return fault_errno(f, e, "opening events");
	if (e)
		return fault_set(f, FAULT_INVALID, "handles",
				 "handles contains events that this daemon cannot open");
	return 0;
}

void svc_share_events(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	Shardd__V1__ShareEventsResponse reply = SHARDD__V1__SHARE_EVENTS_RESPONSE__INIT;
	struct member *m = svc_member(call);
	struct fault f = FAULT_NULL;

	(void)userdata;
	if (!m)
		return;
	if (svc_check_joined(m, &f) ||
	    svc_shardd_join_take_events(m, (const Shardd__V1__ShareEventsRequest *)request, &f))
		rpc_call_fail(call, &f);
	else
		rpc_call_reply(call, &reply.base);
}
