/* ResizeJob: a job's owner gives it another world size (job/resize.h). */
#include <errno.h>
#include <stdlib.h>

#include "core/text.h"
#include "job/resize.h"
#include "rpc/audit.h"
#include "rpc/svc_shardd_impl.h"

/* Until the resize is over, which the call may not live to see. */
struct resize_call {
	struct rpc_call *call; /* NULL: its caller has given up */
	struct job *job;       /* lives until the resize is over */
};

static void svc_shardd_resize_on_over(const struct resize_report *r, const struct fault *f,
				      void *userdata)
{
	Shardd__V1__ResizeJobResponse reply = SHARDD__V1__RESIZE_JOB_RESPONSE__INIT;
	struct resize_call *c = userdata;

	reply.from_world_size = r->from;
	reply.moved_bytes = r->moved;
	reply.units_in_place = r->in_place;
	reply.blobs_left_out = r->left_out;
	if (c->call)
		rpc_call_on_cancelled(c->call, NULL, NULL);
	if (c->call && f)
		rpc_call_fail(c->call, f);
	else if (c->call)
		rpc_call_reply(c->call, &reply.base);
	free(c);
}

/* What has begun goes on; what still waits for trainers ends. */
static void svc_shardd_resize_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct resize_call *c = userdata;
	struct fault f = FAULT_NULL;

	c->call = NULL;
	resize_hurry(c->job);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

void svc_resize_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__ResizeJobRequest *r = (const Shardd__V1__ResizeJobRequest *)request;
	struct resize_call *c = calloc(1, sizeof(*c));
	struct fault f = FAULT_NULL;

	if (!c) {
		fault_errno(&f, -ENOMEM, "resizing a job");
		rpc_call_fail(call, &f);
		return;
	}
	c->call = call;
	if (svc_find_job(call, userdata, r->job, &c->job, &f) ||
	    resize_begin(c->job, r->world_size, r->timeout_ms * UINT64_C(1000),
			 svc_shardd_resize_on_over, c, &f)) {
		free(c);
		svc_refuse(call, "resize", r->job, &f);
		return;
	}
	audit(conn_proc(rpc_call_conn(call)), "resizing", c->job->label, "world_size=%u",
	      r->world_size);
	rpc_call_on_cancelled(call, svc_shardd_resize_on_cancelled, c);
}
