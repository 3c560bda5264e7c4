/* StatusService. */
#include "rpc/svc_status.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"
#include "job/pooled.h"
#include "rpc/arena.h"
#include "rpc/status_fill.h"
#include "rpc/status_survey.h"
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

int svc_status_set_observers(struct svc_status *svc, const uid_t *uids, size_t n)
{
	uid_t *copy = calloc(n + 1, sizeof(*copy));

	if (!copy)
		return -ENOMEM;
	if (n)
		memcpy(copy, uids, n * sizeof(*copy));
	free(svc->observers);
	svc->observers = copy;
	svc->n_observers = n;
	return 0;
}

bool svc_status_is_observer(const struct svc_status *svc, uid_t uid)
{
	for (size_t i = 0; i < svc->n_observers; i++)
		if (svc->observers[i] == uid)
			return true;
	return false;
}

struct status_scope svc_status_scope_of(const struct svc_status *svc, uid_t uid)
{
	return (struct status_scope){
		.uid = uid, .sees_all = job_is_admin(uid) || svc_status_is_observer(svc, uid)
	};
}

/* Of the caller. @name: the job that it asks for; "": all. Return: 0 or a fault code. */
static int svc_status_scope_of_call(struct rpc_call *call, struct svc_status *svc, const char *name,
				    struct status_scope *ret, struct fault *f)
{
	struct conn *c = rpc_call_conn(call);
	struct job *job = NULL;

	if (!c)
		return fault_set(f, FAULT_CANCELLED, NULL, "the connection is closed");
	*ret = svc_status_scope_of(svc, proc_uid(conn_proc(c)));
	if (*name && job_find_seen(svc->jobs, name, ret->uid, ret->sees_all, &job, f))
		return f->code;
	ret->job = job;
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

static void svc_status_fill_cordon(struct arena *a, const struct jobs_cordon *cordon,
				   Shardd__V1__GetStatusResponse *reply)
{
	Shardd__V1__CordonStatus **c;

	if (!cordon->on)
		return;
	c = STATUS_MESSAGES(a, 1, CordonStatus, cordon_status);
	if (!c)
		return;
	reply->cordon = c[0];
	c[0]->uid = cordon->uid;
	c[0]->unix_s = cordon->unix_s;
}

static void svc_status_fill_daemon(struct svc_status *svc, struct arena *a,
				   Shardd__V1__GetStatusResponse *reply)
{
	struct node *node = svc->jobs->node;
	char instance[2 * NODE_INSTANCE_BYTES + 1];

	reply->version = (char *)SHARDD_VERSION;
	reply->pid = (int32_t)getpid();
	node_instance_text(node, instance);
	reply->instance = status_text(a, instance);
	reply->started_unix_s = node->started_unix_s;
	reply->uptime_s = (clock_now_us() - node->started_us) / 1000000u;
	reply->ring_bytes = svc->sessions->rings ? svc->sessions->rings->bytes(svc->sessions) : 0;
	reply->connections = svc->sources->connections(svc->userdata);
	reply->open_descriptors = svc_status_count_descriptors(svc);
	reply->log_dropped = log_dropped();
	reply->draining = svc->jobs->draining;
	svc_status_fill_cordon(a, &svc->jobs->cordon, reply);
	reply->store_max = svc->sources->store(&reply->store_used, svc->userdata);
	reply->store_left_out = jobs_pooled_left_out(svc->jobs);
	if (svc->sources->exports)
		svc->sources->exports(a, reply, svc->userdata);
}

void svc_status_fill(struct svc_status *svc, const struct status_query *q, struct arena *a,
		     Shardd__V1__GetStatusResponse *reply)
{
	struct node *node = svc->jobs->node;

	svc_status_fill_daemon(svc, a, reply);
	status_fill_cluster(a, reply);
	status_fill_devices(a, node, reply);
	status_fill_comms(a, node, reply);
	status_fill_jobs(a, svc->jobs, &q->scope, q->with_units, reply);
	status_fill_sessions(a, svc->sessions, &q->scope, reply);
	svc_status_note_messages(svc, &node->users);
	status_fill_users(a, &node->users, &q->scope, reply);
	status_fill_groups(a, &node->users, &q->scope, reply);
	status_fill_memory_line(a, node, reply);
	if (q->with_slabs)
		status_fill_slabs(a, svc->jobs, &q->scope, reply);
}

static void svc_status_get(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__GetStatusRequest *r = (const Shardd__V1__GetStatusRequest *)request;
	struct status_query q = { .with_units = r->with_units, .with_slabs = r->with_slabs };
	struct svc_status *svc = userdata;
	Shardd__V1__GetStatusResponse reply = SHARDD__V1__GET_STATUS_RESPONSE__INIT;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;

	if (svc_status_scope_of_call(call, svc, r->job, &q.scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	q.scope.with_nodes = r->with_nodes;
	svc_status_fill(svc, &q, &a, &reply);
	svc_status_finish(call, &a, &reply.base);
}

void svc_status_fill_ops(struct svc_status *svc, const struct status_scope *scope, uint32_t limit,
			 bool with_devices, struct arena *a, Shardd__V1__OpsResponse *reply)
{
	uint64_t start = svc->jobs->node->started_us;

	status_fill_ops(a, scope, limit, start, reply);
	if (with_devices)
		status_fill_device_records(a, scope, limit, start, reply);
	reply->now_us = clock_now_us() - start;
}

static void svc_status_ops(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__OpsRequest *r = (const Shardd__V1__OpsRequest *)request;
	struct svc_status *svc = userdata;
	Shardd__V1__OpsResponse reply = SHARDD__V1__OPS_RESPONSE__INIT;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct status_scope scope;

	if (svc_status_scope_of_call(call, svc, r->job, &scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	svc_status_fill_ops(svc, &scope, r->limit, r->with_devices, &a, &reply);
	if (r->with_publications)
		status_fill_published_records(&a, svc->jobs, &scope, r->limit, &reply);
	svc_status_finish(call, &a, &reply.base);
}

static void svc_status_history(struct rpc_call *call, const ProtobufCMessage *request,
			       void *userdata)
{
	const Shardd__V1__HistoryRequest *r = (const Shardd__V1__HistoryRequest *)request;
	Shardd__V1__HistoryResponse reply = SHARDD__V1__HISTORY_RESPONSE__INIT;
	struct status_scope scope;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct job_ref ref = { 0 };

	if (svc_status_scope_of_call(call, userdata, "", &scope, &f) ||
	    (*r->job && job_ref_parse(r->job, "job", &ref, &f))) {
		rpc_call_fail(call, &f);
		return;
	}
	status_fill_history(&a, &scope, *r->job ? &ref : NULL, r, &reply);
	svc_status_finish(call, &a, &reply.base);
}

/* -------------------------------------------------------------------- turns */

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

/* It is charged. */
static void svc_status_serve(struct rpc_call *call, const ProtobufCMessage *request,
			     struct svc_status *svc, rpc_handler fn)
{
	status_turns_serve(&svc->turns, call, request, fn, svc);
}

/* ------------------------------------------------------------------- other nodes */

/* A GetStatus that waits until other nodes have said what their ranks do. */
struct status_asking {
	struct svc_status *svc;
	struct rpc_call *call;
	const ProtobufCMessage *request; /* the call's */
	struct status_survey *survey;
};

static void svc_status_asking_cancelled(struct rpc_call *call, void *userdata)
{
	struct status_asking *a = userdata;
	struct fault f = FAULT_NULL;

	status_survey_cancel(a->survey);
	free(a);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

static void svc_status_on_told(void *userdata)
{
	struct status_asking *a = userdata, was = *a;

	free(a);
	rpc_call_on_cancelled(was.call, NULL, NULL);
	svc_status_serve(was.call, was.request, was.svc, svc_status_get);
}

/* Return: false: there is nothing to wait for. */
static bool svc_status_ask(struct rpc_call *call, const ProtobufCMessage *request,
			   struct svc_status *svc, const struct status_scope *scope)
{
	struct status_asking *a = malloc(sizeof(*a));

	if (!a)
		return false; /* the answer fails, too, or says which nodes have not answered */
	*a = (struct status_asking){ .svc = svc, .call = call, .request = request };
	a->survey = status_survey_begin(svc->jobs, scope, svc_status_on_told, a);
	if (!a->survey) {
		free(a);
		return false;
	}
	rpc_call_on_cancelled(call, svc_status_asking_cancelled, a);
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
	if (!r->with_nodes || svc_status_scope_of_call(call, svc, r->job, &scope, &none) ||
	    !svc_status_ask(call, request, svc, &scope))
		svc_status_serve(call, request, svc, svc_status_get);
}

static void svc_status_on_ops(struct rpc_call *call, const ProtobufCMessage *request,
			      void *userdata)
{
	if (svc_status_charge(call))
		svc_status_serve(call, request, userdata, svc_status_ops);
}

static void svc_status_on_history(struct rpc_call *call, const ProtobufCMessage *request,
				  void *userdata)
{
	if (svc_status_charge(call))
		svc_status_serve(call, request, userdata, svc_status_history);
}

static void svc_status_events(struct rpc_call *call, const ProtobufCMessage *request,
			      void *userdata)
{
	struct svc_status *svc = userdata;
	struct status_scope scope;
	struct fault f = FAULT_NULL;

	if (svc_status_scope_of_call(call, svc, "", &scope, &f))
		rpc_call_fail(call, &f);
	else
		svc_events_begin(call, request, &scope, &svc->turns, svc->jobs->node->loop);
}

static void svc_status_on_events(struct rpc_call *call, const ProtobufCMessage *request,
				 void *userdata)
{
	if (svc_status_charge(call))
		svc_status_serve(call, request, userdata, svc_status_events);
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
	status_turns_init(&svc->turns, jobs->node->loop, &jobs->node->users);
}

void svc_status_close(struct svc_status *svc)
{
	status_turns_close(&svc->turns);
	free(svc->observers);
	svc->observers = NULL;
	svc->n_observers = 0;
}
