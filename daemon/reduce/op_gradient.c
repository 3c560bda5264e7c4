/* GradientBuffer: where this rank writes the full gradients of a unit. Asked again
 * before the reduce: the same buffer. */
#include <errno.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "reduce/ops.h"
#include "shardd.pb-c.h"

static int op_gradient_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__GradientBufferRequest *r = (const Shardd__V1__GradientBufferRequest *)msg;

	op->touches = TOUCH_GRADS;
	return op_take_unit(op, r->unit, f);
}

static int op_gradient_check(struct op *op, struct fault *f)
{
	return op_check_in_group(op, f) || op_check_trained(op, f) ? (int)f->code : 0;
}

static void op_gradient_resume(struct parked *p);

static void op_gradient_start(struct op *op)
{
	struct member_unit *mu = member_unit(op->m, op->unit);
	int r = mu ? 0 : -ENOMEM;

	if (op_wait_for_memory(op, op_gradient_resume))
		return;
	if (mu && !mu->gradient.slab)
		r = op_take_memory(op, unit_gradient_bytes(op->unit), &mu->gradient);
	if (r == SLAB_E_LATER) {
		op->state = OP_PARKED;
		node_wait(op->m->job->node, &op->parked, op_gradient_resume);
		return;
	}
	op_begin_run(op);
	if (r) {
		op_memory_fault(op->m->job, r, unit_gradient_bytes(op->unit), "a gradient buffer",
				&op->fault);
	} else {
		op->result.place = mu->gradient;
		op->result.place.bytes = unit_gradient_bytes(op->unit);
		op->result.writable = true;
		if (op->m->executing)
			op->result.ready = op->m->ready;
	}
	op_end(op);
}

static void op_gradient_resume(struct parked *p)
{
	op_gradient_start(CONTAINER_OF(p, struct op, parked));
}

static void op_gradient_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__GradientBufferReply reply = SHARDD__V1__GRADIENT_BUFFER_REPLY__INIT;
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	op_place(op, &place, handle);
	reply.place = &place;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_gradient = {
	.name = "GradientBuffer",
	.request = &shardd__v1__gradient_buffer_request__descriptor,
	.decode = op_gradient_decode,
	.check = op_gradient_check,
	.start = op_gradient_start,
	.encode = op_gradient_encode,
};
