/* Checkpoint, SetCheckpoints and LoadCheckpoint: the calls of a job's owner that have it written to
 * files, now or regularly, and filled from them (job/saving.h, job/policy.h, job/loading.h). */
#include <errno.h>
#include <stdlib.h>

#include "core/clock.h"
#include "core/log.h"
#include "core/text.h"
#include "job/loading.h"
#include "job/policy.h"
#include "job/saving.h"
#include "rpc/audit.h"
#include "rpc/svc_shardd_impl.h"

/* Until the checkpoint is over, which the call may not live to see. */
struct checkpoint_call {
	struct rpc_call *call; /* NULL: its caller has given up */
	struct job *job;       /* lives until the checkpoint is over */
	char label[JOB_LABEL_MAX + 1];
};

static void svc_shardd_checkpoint_log(const struct checkpoint_call *c,
				      const struct saving_report *r, const struct fault *f)
{
	if (f)
		log_warn("rpc", "checkpoint_failed job=%s step=%llu path=%s code=%s why=\"%s\"",
			 c->label, (unsigned long long)r->step, r->path, fault_code_name(f->code),
			 f->text);
	else
		log_info("rpc", "checkpoint job=%s step=%llu path=%s bytes=%llu copied=%llu",
			 c->label, (unsigned long long)r->step, r->path,
			 (unsigned long long)r->bytes, (unsigned long long)r->copied);
}

static void svc_shardd_checkpoint_on_over(const struct saving_report *r, const struct fault *f,
					  void *userdata)
{
	Shardd__V1__CheckpointResponse reply = SHARDD__V1__CHECKPOINT_RESPONSE__INIT;
	struct checkpoint_call *c = userdata;

	svc_shardd_checkpoint_log(c, r, f);
	reply.step = r->step;
	reply.bytes = r->bytes;
	reply.copied = r->copied;
	reply.buffers_as_left = r->as_left;
	if (c->call)
		rpc_call_on_cancelled(c->call, NULL, NULL);
	if (c->call && f)
		rpc_call_fail(c->call, f);
	else if (c->call)
		rpc_call_reply(c->call, &reply.base);
	free(c);
}

static void svc_shardd_checkpoint_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct checkpoint_call *c = userdata;
	struct fault f = FAULT_NULL;

	c->call = NULL;
	saving_leave(c->job, c);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

static int svc_shardd_checkpoint_begin(struct checkpoint_call *c,
				       const Shardd__V1__CheckpointRequest *r, struct fault *f)
{
	uint64_t ms = r->timeout_ms ? r->timeout_ms : c->job->rec->op_timeout_ms;
	struct saving_options o = {
		.path = r->path,
		.bytes_per_s = r->bytes_per_s,
		.deadline_us = ms ? clock_now_us() + ms * 1000u : UINT64_MAX,
	};

	return saving_begin(c->job, conn_proc(rpc_call_conn(c->call)), &o,
			    svc_shardd_checkpoint_on_over, c, f);
}

void svc_checkpoint(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__CheckpointRequest *r = (const Shardd__V1__CheckpointRequest *)request;
	struct checkpoint_call *c = calloc(1, sizeof(*c));
	struct fault f = FAULT_NULL;

	if (!c) {
		fault_errno(&f, -ENOMEM, "beginning a checkpoint");
		rpc_call_fail(call, &f);
		return;
	}
	c->call = call;
	if (svc_find_job(call, userdata, r->job, &c->job, &f) ||
	    svc_shardd_checkpoint_begin(c, r, &f)) {
		free(c);
		svc_refuse(call, "checkpoint", r->job, &f);
		return;
	}
	text_copy(c->label, sizeof(c->label), c->job->label);
	audit(conn_proc(rpc_call_conn(call)), "saving", c->label, "path=%.200s", r->path);
	rpc_call_on_cancelled(call, svc_shardd_checkpoint_on_cancelled, c);
}

/* ---------------------------------------------------------------------------- loading */

static void svc_shardd_checkpoint_on_loaded(const struct loading_report *r, const struct fault *f,
					    void *userdata)
{
	Shardd__V1__LoadCheckpointResponse reply = SHARDD__V1__LOAD_CHECKPOINT_RESPONSE__INIT;
	struct checkpoint_call *c = userdata;

	reply.step = r->step;
	reply.bytes = r->bytes;
	reply.world_size = r->world_size;
	reply.blobs_left_out = r->left_out;
	reply.buffers_left_out = r->buffers_left_out;
	reply.buffers_missing = r->buffers_missing;
	if (c->call)
		rpc_call_on_cancelled(c->call, NULL, NULL);
	if (c->call && f)
		rpc_call_fail(c->call, f);
	else if (c->call)
		rpc_call_reply(c->call, &reply.base);
	free(c);
}

static void svc_shardd_checkpoint_on_load_cancelled(struct rpc_call *call, void *userdata)
{
	struct checkpoint_call *c = userdata;
	struct fault f = FAULT_NULL;

	c->call = NULL;
	loading_cancel(c->job);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

void svc_load_checkpoint(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__LoadCheckpointRequest *r =
		(const Shardd__V1__LoadCheckpointRequest *)request;
	struct loading_options o = {
		.path = r->path,
		.has_step = r->optional_step_case ==
			    SHARDD__V1__LOAD_CHECKPOINT_REQUEST__OPTIONAL_STEP_STEP,
		.step = r->step,
	};
	struct checkpoint_call *c = calloc(1, sizeof(*c));
	struct fault f = FAULT_NULL;

	if (!c) {
		fault_errno(&f, -ENOMEM, "beginning to load a checkpoint");
		rpc_call_fail(call, &f);
		return;
	}
	c->call = call;
	if (svc_find_job(call, userdata, r->job, &c->job, &f) ||
	    loading_begin(c->job, &o, svc_shardd_checkpoint_on_loaded, c, &f)) {
		free(c);
		svc_refuse(call, "load checkpoint", r->job, &f);
		return;
	}
	audit(conn_proc(rpc_call_conn(call)), "loading", c->job->label, "path=%.200s", r->path);
	rpc_call_on_cancelled(call, svc_shardd_checkpoint_on_load_cancelled, c);
}

/* ---------------------------------------------------------------------------- regularly */

void svc_set_checkpoints(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__SetCheckpointsRequest *r =
		(const Shardd__V1__SetCheckpointsRequest *)request;
	Shardd__V1__SetCheckpointsResponse reply = SHARDD__V1__SET_CHECKPOINTS_RESPONSE__INIT;
	const Shardd__V1__CheckpointPolicy *p = r->policy;
	state_checkpoints c = SHARDD__STATE__V1__CHECKPOINTS__INIT;
	struct fault f = FAULT_NULL;
	struct job *job;

	if (p) {
		c.path = p->path;
		c.every_steps = p->every_steps;
		c.every_s = p->every_s;
		c.keep = p->keep;
		c.bytes_per_s = p->bytes_per_s;
	}
	if (svc_find_job(call, userdata, r->job, &job, &f) || policy_set(job, p ? &c : NULL, &f)) {
		svc_refuse(call, "set checkpoints", r->job, &f);
		return;
	}
	audit(conn_proc(rpc_call_conn(call)), "checkpoints", job->label,
	      "path=%.200s every_steps=%llu every_s=%llu keep=%u", c.path,
	      (unsigned long long)c.every_steps, (unsigned long long)c.every_s, c.keep);
	rpc_call_reply(call, &reply.base);
}
