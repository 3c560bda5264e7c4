#include "rpc/svc_admin.h"

#include "admin.pb-c.h"
#include "job/cordon.h"
#include "job/job.h"
#include "rpc/audit.h"

/* May the caller do this? Return: its process, or NULL with the call ended. */
static const struct proc *svc_admin_caller(struct rpc_call *call, const char *what)
{
	struct conn *c = rpc_call_conn(call);
	struct fault f = FAULT_NULL;

	if (c && job_is_admin(proc_uid(conn_proc(c))))
		return conn_proc(c);
	if (c) {
		fault_set(&f, FAULT_DENIED, NULL,
			  "%s is for administrators: root, and the user that the daemon runs as; "
			  "you are uid %u",
			  what, (unsigned)proc_uid(conn_proc(c)));
		audit_refused(conn_proc(c), what, "", &f);
	} else {
		fault_set(&f, FAULT_CANCELLED, NULL, "the connection is closed");
	}
	rpc_call_fail(call, &f);
	return NULL;
}

static void svc_admin_refuse(struct rpc_call *call, const struct proc *who, const char *what,
			     const struct fault *f)
{
	audit_refused(who, what, "", f);
	rpc_call_fail(call, f);
}

static void svc_admin_cordon(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__CordonRequest *r = (const Shardd__V1__CordonRequest *)request;
	Shardd__V1__CordonResponse reply = SHARDD__V1__CORDON_RESPONSE__INIT;
	const char *what = r->cordoned ? "cordon" : "uncordon";
	const struct proc *who = svc_admin_caller(call, what);
	struct svc_admin *svc = userdata;
	bool was = svc->jobs->cordon.on;
	struct fault f = FAULT_NULL;

	if (!who)
		return;
	if (cordon_set(svc->jobs, r->cordoned, proc_uid(who), &f)) {
		svc_admin_refuse(call, who, what, &f);
		return;
	}
	reply.changed = was != r->cordoned;
	audit_daemon(who, r->cordoned ? "cordoned" : "uncordoned", "changed=%s",
		     reply.changed ? "yes" : "no");
	rpc_call_reply(call, &reply.base);
}

static void svc_admin_hand_over(struct rpc_call *call, const ProtobufCMessage *request,
				void *userdata)
{
	Shardd__V1__HandOverResponse reply = SHARDD__V1__HAND_OVER_RESPONSE__INIT;
	const struct proc *who = svc_admin_caller(call, "handover");
	struct svc_admin *svc = userdata;
	struct fault f = FAULT_NULL;

	(void)request;
	if (!who)
		return;
	if (svc->actions->hand_over(svc->userdata, &f)) {
		svc_admin_refuse(call, who, "handover", &f);
		return;
	}
	audit_daemon(who, "hands over", "jobs=%u", svc->jobs->count);
	reply.jobs = svc->jobs->count;
	rpc_call_reply(call, &reply.base);
}

/* Return: 0, or FAULT_STATE: it would lose state that somebody wants to keep. */
static int svc_admin_check_kept(const struct jobs *jobs, struct fault *f)
{
	struct job *job, *tmp, *first = NULL;
	unsigned n = 0;

	list_for_each (job, tmp, &jobs->all, link)
		if (job->rec->lifetime == JOB_KEEP && job_is_in_memory_only(job)) {
			first = first ? first : job;
			n++;
		}
	if (!n)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "%u KEEP job%s would be lost: job '%s' (step %llu, %llu bytes)%s in the "
			 "daemon's memory only; end its trainers and save it (shardctl checkpoint "
			 "save), or repeat this with --discard",
			 n, n == 1 ? "" : "s", first->label, (unsigned long long)first->rec->step,
			 (unsigned long long)first->quota.used,
			 n == 1 ? " is" : " and the others are");
}

static void svc_admin_shut_down(struct rpc_call *call, const ProtobufCMessage *request,
				void *userdata)
{
	const Shardd__V1__ShutdownRequest *r = (const Shardd__V1__ShutdownRequest *)request;
	Shardd__V1__ShutdownResponse reply = SHARDD__V1__SHUTDOWN_RESPONSE__INIT;
	const struct proc *who = svc_admin_caller(call, "shutdown");
	struct svc_admin *svc = userdata;
	struct fault f = FAULT_NULL;
	struct job *job, *tmp;

	if (!who)
		return;
	if ((!r->discard && svc_admin_check_kept(svc->jobs, &f)) ||
	    svc->actions->shut_down(svc->userdata, &f)) {
		svc_admin_refuse(call, who, "shutdown", &f);
		return;
	}
	reply.jobs = svc->jobs->count;
	list_for_each (job, tmp, &svc->jobs->all, link)
		reply.ranks += job->present;
	audit_daemon(who, "shuts down", "jobs=%u ranks=%u discard=%s", reply.jobs, reply.ranks,
		     r->discard ? "yes" : "no");
	rpc_call_reply(call, &reply.base);
}

static const struct rpc_method svc_admin_methods[] = {
	{ "Cordon", svc_admin_cordon, false, false },
	{ "HandOver", svc_admin_hand_over, false, false },
	{ "Shutdown", svc_admin_shut_down, false, false },
	{ 0 },
};

void svc_admin_init(struct svc_admin *svc, struct jobs *jobs,
		    const struct svc_admin_actions *actions, void *userdata)
{
	*svc = (struct svc_admin){
		.jobs = jobs,
		.actions = actions,
		.userdata = userdata,
		.service = { &shardd__v1__admin_service__descriptor, svc_admin_methods, svc },
	};
}
