/* Release: drop one reference of a gather. With none left it does nothing. */
#include <errno.h>

#include "copies/hold.h"
#include "core/check.h"
#include "op/op_list.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "step/backward.h"
#include "shardd.pb-c.h"

static int op_release_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ReleaseRequest *r = (const Shardd__V1__ReleaseRequest *)msg;

	op->touches = TOUCH_PARAMS;
	return op_take_unit(op, r->unit, f);
}

static enum res op_release_start(struct op *op)
{
	struct member_unit *mu = member_unit_find(op->m, op->unit);

	CHECK(!mu || mu->gathers >= mu->held);
	op_begin_run(op);
	/* that of a pass goes with the pass */
	if (mu && mu->gathers > mu->held) {
		if (hold_note_reads(op) < 0) {
			fault_errno(&op->fault, -ENOMEM, "noting how long a unit is read");
			return RES_FAILED;
		}
		member_released(op->m, op->unit, mu);
		backward_released(op->m->job, op->unit);
	}
	op->result.references = mu ? mu->gathers - mu->held : 0;
	return RES_DONE;
}

static void op_release_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ReleaseResponse reply = SHARDD__V1__RELEASE_RESPONSE__INIT;

	reply.references = op->result.references;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_release = {
	.name = "Release",
	.request = &shardd__v1__release_request__descriptor,
	.decode = op_release_decode,
	.tick = op_release_start,
	.encode = op_release_encode,
};
