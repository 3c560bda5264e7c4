/* StatusService. */
#include "rpc/svc_status.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cluster/cluster.h"
#include "core/clock.h"
#include "core/log.h"
#include "job/pooled.h"
#include "rpc/arena.h"
#include "rpc/status_fill.h"
#include "rpc/svc_events.h"

#define COUNT_AGAIN_US 1000000u

/* Counts by reading the folder: takes milliseconds for a thousand descriptors. */
static uint32_t svc_status_list_descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	uint32_t n = 0;

	if (!dir)
		return 0;
	while (readdir(dir))
		n++;
	closedir(dir);
	return n - 3; /* ., .., and the directory itself */
}

/* Since Linux 6.2 the folder's size is their number. Before, a client with many connections must
 * not make every Status call slow, so they are counted once a second. */
static uint32_t svc_status_count_descriptors(struct svc_status *svc)
{
	uint64_t now = clock_now_us();
	struct stat st;

	if (stat("/proc/self/fd", &st) == 0 && st.st_size > 0)
		return (uint32_t)st.st_size;
	if (!svc->counted_us || now - svc->counted_us >= COUNT_AGAIN_US) {
		svc->descriptors = svc_status_list_descriptors();
		svc->counted_us = now;
	}
	return svc->descriptors;
}

static int svc_status_scope_of(struct rpc_call *call, struct jobs *jobs, const char *name,
			       struct status_scope *ret, struct fault *f)
{
	struct conn *c = rpc_call_conn(call);
	struct job *job = NULL;

	if (!c)
		return fault_set(f, FAULT_CANCELLED, NULL, "the connection is closed");
	if (*name && job_find(jobs, name, proc_uid(conn_proc(c)), &job, f))
		return f->code;
	*ret = (struct status_scope){ .uid = proc_uid(conn_proc(c)), .job = job };
	return 0;
}

static void svc_status_finish(struct rpc_call *call, struct arena *a, const ProtobufCMessage *reply)
{
	struct fault f = FAULT_NULL;

	if (a->failed) {
		fault_set(&f, FAULT_EXHAUSTED, NULL, "no memory for the answer");
		rpc_call_fail(call, &f);
	} else {
		rpc_call_reply(call, reply);
	}
	arena_free(a);
}

/* The gate counts them on its thread; status shows the value at the time of the request. */
static void svc_status_note_messages(const struct svc_status *svc, const struct users *users)
{
	for (struct user *u = users_next(users, NULL); u; u = users_next(users, u))
		user_sample_messages(u, svc->sources->message_bytes(u->uid, svc->userdata));
}

static void svc_status_get(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__GetStatusRequest *r = (const Shardd__V1__GetStatusRequest *)request;
	struct svc_status *svc = userdata;
	Shardd__V1__GetStatusResponse reply = SHARDD__V1__GET_STATUS_RESPONSE__INIT;
	Shardd__V1__CordonStatus cordon = SHARDD__V1__CORDON_STATUS__INIT;
	struct node *node = svc->jobs->node;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct status_scope scope;
	char instance[2 * NODE_INSTANCE_BYTES + 1];

	if (svc_status_scope_of(call, svc->jobs, r->job, &scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	scope.with_nodes = r->with_nodes;
	reply.version = (char *)SHARDD_VERSION;
	reply.pid = (int32_t)getpid();
	node_instance_text(node, instance);
	reply.instance = instance;
	reply.started_unix_s = node->started_unix_s;
	reply.uptime_s = (clock_now_us() - node->started_us) / 1000000u;
	status_fill_cluster(&a, &reply);
	status_fill_devices(&a, node, &reply);
	status_fill_comms(&a, node, &reply);
	status_fill_jobs(&a, svc->jobs, &scope, r->with_units, &reply);
	status_fill_sessions(&a, svc->sessions, &scope, &reply);
	svc_status_note_messages(svc, &node->users);
	status_fill_users(&a, &node->users, &scope, &reply);
	if (r->with_slabs)
		status_fill_slabs(&a, svc->jobs, &scope, &reply);
	reply.ring_bytes = svc->sessions->rings ? svc->sessions->rings->bytes(svc->sessions) : 0;
	reply.connections = svc->sources->connections(svc->userdata);
	reply.open_descriptors = svc_status_count_descriptors(svc);
	reply.log_dropped = log_dropped();
	reply.draining = svc->jobs->draining;
	if (svc->jobs->cordon.on) {
		cordon.uid = svc->jobs->cordon.uid;
		cordon.unix_s = svc->jobs->cordon.unix_s;
		reply.cordon = &cordon;
	}
	reply.store_max = svc->sources->store(&reply.store_used, svc->userdata);
	reply.store_left_out = jobs_pooled_left_out(svc->jobs);
	svc_status_finish(call, &a, &reply.base);
}

static void svc_status_ops(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__OpsRequest *r = (const Shardd__V1__OpsRequest *)request;
	struct svc_status *svc = userdata;
	Shardd__V1__OpsResponse reply = SHARDD__V1__OPS_RESPONSE__INIT;
	uint64_t start = svc->jobs->node->started_us;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct status_scope scope;

	if (svc_status_scope_of(call, svc->jobs, r->job, &scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	status_fill_ops(&a, &scope, r->limit, start, &reply);
	if (r->with_devices)
		status_fill_device_records(&a, &scope, r->limit, start, &reply);
	reply.now_us = clock_now_us() - start;
	svc_status_finish(call, &a, &reply.base);
}

static void svc_status_history(struct rpc_call *call, const ProtobufCMessage *request,
			       void *userdata)
{
	const Shardd__V1__HistoryRequest *r = (const Shardd__V1__HistoryRequest *)request;
	Shardd__V1__HistoryResponse reply = SHARDD__V1__HISTORY_RESPONSE__INIT;
	struct conn *c = rpc_call_conn(call);
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct job_ref ref = { 0 };

	(void)userdata;
	if (!c)
		fault_set(&f, FAULT_CANCELLED, NULL, "the connection is closed");
	else if (*r->job)
		job_ref_parse(r->job, "job", &ref, &f);
	if (f.code) {
		rpc_call_fail(call, &f);
		return;
	}
	status_fill_history(&a, proc_uid(conn_proc(c)), *r->job ? &ref : NULL, r, &reply);
	svc_status_finish(call, &a, &reply.base);
}

/* -------------------------------------------------------------------- turns */

/* A call that takes less than this delays no later call. */
#define STATUS_FREE_US 500u
/* The pause before a user's next call: this many times what the last one took. */
#define STATUS_PAUSE 9u

/* A call that waits for its turn. */
struct status_turn {
	struct list link; /* user.waiting */
	struct svc_status *svc;
	struct rpc_call *call;
	const ProtobufCMessage *request; /* the call's */
	rpc_handler fn;
};

static void svc_status_run(struct svc_status *svc, struct user *u, struct rpc_call *call,
			   const ProtobufCMessage *request, rpc_handler fn)
{
	uint64_t began = clock_now_us(), took;

	fn(call, request, svc);
	took = clock_now_us() - began;
	if (took > STATUS_FREE_US)
		u->status_at_us = began + took + took * STATUS_PAUSE;
}

static void svc_status_turn_free(struct status_turn *t)
{
	list_unlink(&t->link);
	free(t);
}

static void svc_status_cancelled(struct rpc_call *call, void *userdata)
{
	struct fault f = FAULT_NULL;

	svc_status_turn_free(userdata);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

static void svc_status_arm(struct svc_status *svc);

/* Each user whose time has come gets one turn. */
static void svc_status_on_timer(uv_timer_t *timer)
{
	struct svc_status *svc = timer->data;
	struct users *us = &svc->jobs->node->users;
	uint64_t now = clock_now_us();

	for (struct user *u = users_next(us, NULL); u; u = users_next(us, u)) {
		struct status_turn *t, turn;

		if (list_empty(&u->waiting) || now < u->status_at_us)
			continue;
		t = list_first(&u->waiting, struct status_turn, link);
		turn = *t;
		rpc_call_on_cancelled(t->call, NULL, NULL);
		svc_status_turn_free(t);
		svc_status_run(svc, u, turn.call, turn.request, turn.fn);
	}
	svc_status_arm(svc);
}

static void svc_status_arm(struct svc_status *svc)
{
	const struct users *us = &svc->jobs->node->users;
	uint64_t at = UINT64_MAX, now = clock_now_us();

	for (struct user *u = users_next(us, NULL); u; u = users_next(us, u))
		if (!list_empty(&u->waiting) && u->status_at_us < at)
			at = u->status_at_us;
	if (at != UINT64_MAX)
		uv_timer_start(&svc->timer, svc_status_on_timer,
			       at > now ? (at - now + 999) / 1000 : 0, 0);
}

static void svc_status_wait(struct svc_status *svc, struct user *u, struct rpc_call *call,
			    const ProtobufCMessage *request, rpc_handler fn)
{
	struct status_turn *t = malloc(sizeof(*t));
	struct fault f = FAULT_NULL;

	if (!t) {
		fault_errno(&f, -ENOMEM, "waiting for a turn");
		rpc_call_fail(call, &f);
		return;
	}
	*t = (struct status_turn){ .svc = svc, .call = call, .request = request, .fn = fn };
	list_init(&t->link);
	list_append(&u->waiting, &t->link);
	rpc_call_on_cancelled(call, svc_status_cancelled, t);
	svc_status_arm(svc);
}

/* Return: false: its user has too many such calls; it has ended. */
static bool svc_status_charge(struct rpc_call *call)
{
	struct conn *c = rpc_call_conn(call);
	struct fault f = FAULT_NULL;

	if (!c || !conn_account(c) || rpc_call_charge(call, USER_STATUS_CALLS, &f) == 0)
		return true;
	rpc_call_fail(call, &f);
	return false;
}

/* Now, or when its user's turn has come. It is charged. */
static void svc_status_call(struct rpc_call *call, const ProtobufCMessage *request,
			    struct svc_status *svc, rpc_handler fn)
{
	struct conn *c = rpc_call_conn(call);
	struct user *u = c ? conn_account(c) : NULL;

	if (!u)
		fn(call, request, svc);
	else if (list_empty(&u->waiting) && clock_now_us() >= u->status_at_us)
		svc_status_run(svc, u, call, request, fn);
	else
		svc_status_wait(svc, u, call, request, fn);
}

/* ------------------------------------------------------------------- other nodes */

/* A GetStatus that waits until other nodes have said what their ranks do. */
struct status_survey {
	struct svc_status *svc;
	struct rpc_call *call;
	const ProtobufCMessage *request; /* the call's */
	size_t pending;                  /* jobs that are asked for still */
	size_t n;
	struct cluster_ask asks[]; /* of jobs */
};

static void svc_status_survey_free(struct status_survey *s)
{
	for (size_t i = 0; i < s->n; i++)
		cluster_ask_cancel(&s->asks[i]);
	free(s);
}

static void svc_status_survey_cancelled(struct rpc_call *call, void *userdata)
{
	struct fault f = FAULT_NULL;

	svc_status_survey_free(userdata);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

static void svc_status_on_told(struct cluster_ask *a)
{
	struct status_survey *s = a->userdata, was;

	if (--s->pending)
		return;
	was = *s;
	rpc_call_on_cancelled(s->call, NULL, NULL);
	svc_status_survey_free(s);
	svc_status_call(was.call, was.request, was.svc, svc_status_get);
}

/* Return: false: there is nothing to wait for. */
static bool svc_status_survey(struct rpc_call *call, const ProtobufCMessage *request,
			      struct svc_status *svc, const struct status_scope *scope)
{
	struct job *job, *tmp;
	struct status_survey *s;
	size_t n = 0;

	list_for_each (job, tmp, &svc->jobs->all, link)
		n += status_visible(scope, job) && job_may_look(job, scope->uid);
	s = calloc(1, sizeof(*s) + n * sizeof(s->asks[0]));
	if (!s)
		return false; /* the answer fails, too, or says which nodes have not answered */
	s->svc = svc;
	s->call = call;
	s->request = request;
	list_for_each (job, tmp, &svc->jobs->all, link) {
		struct cluster_ask *a = &s->asks[s->n];

		if (!status_visible(scope, job) || !job_may_look(job, scope->uid))
			continue;
		*a = (struct cluster_ask){ .done = svc_status_on_told, .userdata = s };
		s->n++;
		s->pending += !cluster_ask(a, job);
	}
	if (!s->pending) {
		svc_status_survey_free(s);
		return false;
	}
	rpc_call_on_cancelled(call, svc_status_survey_cancelled, s);
	return true;
}

static void svc_status_on_get(struct rpc_call *call, const ProtobufCMessage *request,
			      void *userdata)
{
	const Shardd__V1__GetStatusRequest *r = (const Shardd__V1__GetStatusRequest *)request;
	struct svc_status *svc = userdata;
	struct fault none = FAULT_NULL;
	struct status_scope scope;

	if (!svc_status_charge(call))
		return;
	if (!r->with_nodes || svc_status_scope_of(call, svc->jobs, r->job, &scope, &none) ||
	    !svc_status_survey(call, request, svc, &scope))
		svc_status_call(call, request, svc, svc_status_get);
}

static void svc_status_on_ops(struct rpc_call *call, const ProtobufCMessage *request,
			      void *userdata)
{
	if (svc_status_charge(call))
		svc_status_call(call, request, userdata, svc_status_ops);
}

static void svc_status_on_history(struct rpc_call *call, const ProtobufCMessage *request,
				  void *userdata)
{
	if (svc_status_charge(call))
		svc_status_call(call, request, userdata, svc_status_history);
}

static void svc_status_events(struct rpc_call *call, const ProtobufCMessage *request,
			      void *userdata)
{
	struct svc_status *svc = userdata;

	svc_events_run(call, request, svc->jobs->node->loop);
}

static void svc_status_on_events(struct rpc_call *call, const ProtobufCMessage *request,
				 void *userdata)
{
	if (svc_status_charge(call))
		svc_status_call(call, request, userdata, svc_status_events);
}

void svc_status_init(struct svc_status *svc, struct sessions *sessions, struct jobs *jobs,
		     const struct svc_status_sources *sources, void *userdata)
{
	static const struct rpc_method methods[] = {
		{ "GetStatus", svc_status_on_get, false, false },
		{ "Ops", svc_status_on_ops, false, false },
		{ "History", svc_status_on_history, false, false },
		{ "Events", svc_status_on_events, false, false },
		{ NULL, NULL, false, false },
	};

	*svc = (struct svc_status){ .sessions = sessions,
				    .jobs = jobs,
				    .sources = sources,
				    .userdata = userdata,
				    .service = { &shardd__v1__status_service__descriptor, methods,
						 svc } };
	uv_timer_init(jobs->node->loop, &svc->timer);
	svc->timer.data = svc;
}

void svc_status_close(struct svc_status *svc)
{
	if (svc->jobs)
		uv_close((uv_handle_t *)&svc->timer, NULL);
}
