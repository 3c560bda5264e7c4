/* Status.Get and Status.Ops. */
#include "rpc/svc_status.h"

#include <dirent.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"
#include "rpc/arena.h"
#include "rpc/status_fill.h"

static uint32_t count_descriptors(void)
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

static int scope_of(struct rpc_call *call, struct jobs *jobs, const char *name,
		    struct status_scope *ret, struct fault *f)
{
	struct conn *c = rpc_call_conn(call);
	struct job *job = NULL;

	if (!c)
		return fault_set(f, FAULT_CANCELLED, NULL, "the connection is closed");
	if (*name && job_find(jobs, name, proc_uid(conn_proc(c)), &job, f))
		return f->code;
	*ret = (struct status_scope){ proc_uid(conn_proc(c)), job };
	return 0;
}

static void finish(struct rpc_call *call, struct arena *a, const ProtobufCMessage *reply)
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

static void get(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__StatusRequest *r = (const Shardd__V1__StatusRequest *)request;
	struct svc_status *svc = userdata;
	Shardd__V1__StatusReply reply = SHARDD__V1__STATUS_REPLY__INIT;
	struct node *node = svc->jobs->node;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct status_scope scope;
	char instance[2 * NODE_INSTANCE_BYTES + 1];

	if (scope_of(call, svc->jobs, r->job, &scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	reply.version = (char *)SHARDD_VERSION;
	reply.pid = (int32_t)getpid();
	node_instance_text(node, instance);
	reply.instance = instance;
	reply.started_unix_s = node->started_unix_s;
	reply.uptime_s = (clock_now_us() - node->started_us) / 1000000u;
	status_fill_devices(&a, node, &reply);
	status_fill_comms(&a, node, &reply);
	status_fill_jobs(&a, svc->jobs, &scope, r->with_units, &reply);
	status_fill_sessions(&a, svc->sessions, &scope, &reply);
	if (r->with_slabs)
		status_fill_slabs(&a, svc->jobs, &scope, &reply);
	reply.ring_bytes = svc->sessions->rings ? svc->sessions->rings->bytes(svc->sessions) : 0;
	reply.connections = svc->connections(svc->userdata);
	reply.open_descriptors = count_descriptors();
	reply.log_dropped = log_dropped();
	reply.draining = svc->jobs->draining;
	finish(call, &a, &reply.base);
}

static void ops(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__OpsRequest *r = (const Shardd__V1__OpsRequest *)request;
	struct svc_status *svc = userdata;
	Shardd__V1__OpsReply reply = SHARDD__V1__OPS_REPLY__INIT;
	uint64_t start = svc->jobs->node->started_us;
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct status_scope scope;

	if (scope_of(call, svc->jobs, r->job, &scope, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	status_fill_ops(&a, &scope, r->limit, start, &reply);
	if (r->with_devices)
		status_fill_device_records(&a, &scope, r->limit, start, &reply);
	reply.now_us = clock_now_us() - start;
	finish(call, &a, &reply.base);
}

void svc_status_init(struct svc_status *svc, struct sessions *sessions, struct jobs *jobs,
		     unsigned (*connections)(void *userdata), void *userdata)
{
	static const struct rpc_method methods[] = {
		{ "Get", get, false, false },
		{ "Ops", ops, false, false },
		{ NULL, NULL, false, false },
	};

	*svc = (struct svc_status){ sessions,
				    jobs,
				    connections,
				    userdata,
				    { &shardd__v1__status__descriptor, methods, svc } };
}
