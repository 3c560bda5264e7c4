/* All ops: from the call into op/, and back. */
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "rpc/svc_shardd_impl.h"

static void svc_shardd_ops_send_reply(const ProtobufCMessage *reply, void *ctx)
{
	rpc_call_reply(ctx, reply);
}

/* Log that a limit was the reason. */
static void svc_shardd_ops_fail(struct rpc_call *call, const struct op_type *type,
				const struct member *m, const struct fault *f)
{
	if (f->code == FAULT_EXHAUSTED)
		svc_refuse(call, type->name, m->job->label, f);
	else
		rpc_call_fail(call, f);
}

static void svc_shardd_ops_on_done(struct op *op, void *userdata)
{
	struct rpc_call *call = userdata;

	rpc_call_on_cancelled(call, NULL, NULL);
	if (op->fault.code)
		svc_shardd_ops_fail(call, op->type, op->m, &op->fault);
	else
		op_encode(op, svc_shardd_ops_send_reply, call);
}

/* The calls of a process that died are cancelled before the daemon sees its connection close. In
 * that case the session ends, and its peers are told why. */
static void svc_shardd_ops_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct conn *c = rpc_call_conn(call);
	uint64_t deadline = rpc_call_deadline_us(call);

	if (!c || conn_hung_up(c)) {
		if (c)
			conn_close(c);
		return;
	}
	op_cancel(userdata,
		  deadline && deadline <= clock_now_us() ? FAULT_DEADLINE : FAULT_CANCELLED,
		  "the caller has given up this op");
}

/* "/shardd.v1.TrainingService/Gather" -> Gather */
static const struct op_type *svc_shardd_ops_type_of(const struct rpc_call *call)
{
	const char *slash = strrchr(rpc_call_method(call), '/');
	const struct op_type *type = slash ? op_type_by_name(slash + 1) : NULL;

	CHECK(type);
	return type;
}

/* op_submit may end the op before it returns; then the call is gone with it. */
struct pending {
	struct rpc_call *call;
	bool over;
};

static struct pending *submitting;

static void svc_shardd_ops_on_done_first(struct op *op, void *userdata)
{
	if (submitting && submitting->call == userdata)
		submitting->over = true;
	svc_shardd_ops_on_done(op, userdata);
}

void svc_op(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	struct pending p = { call, false }, *outer = submitting;
	struct session *s = svc_session(call);
	struct member *m = s ? svc_member(call) : NULL;
	struct fault f = FAULT_NULL;
	struct op *op = NULL;
	int r;

	(void)userdata;
	if (!m)
		return;
	s->ops_total++;
	submitting = &p;
	r = op_submit(m, svc_shardd_ops_type_of(call), request, rpc_call_deadline_us(call),
		      svc_shardd_ops_on_done_first, call, &op, &f);
	submitting = outer;
	if (r)
		svc_shardd_ops_fail(call, svc_shardd_ops_type_of(call), m, &f);
	else if (!p.over)
		rpc_call_on_cancelled(call, svc_shardd_ops_on_cancelled, op);
}
