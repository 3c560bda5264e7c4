/* GradientBuffer: where this rank writes the full gradients of a unit. Asked again
 * before the reduce: the same buffer. */
#include <errno.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/op_list.h"
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

static enum res op_gradient_start(struct op *op)
{
	uint64_t bytes = unit_gradient_bytes(op->unit);
	struct member_unit *mu = member_unit(op->m, op->unit);

	RES_TRY(op_wait_for_memory(op));
	if (!mu) {
		op_memory_fault(op->m->job, -ENOMEM, bytes, "a gradient buffer", &op->fault);
		return RES_FAILED;
	}
	if (!mu->gradient.slab)
		RES_TRY(op_need_memory(op, bytes, "a gradient buffer", &mu->gradient));
	member_note_held(op->m, mu);
	CHECK(mu->gradient.bytes >=
	      bytes); /* nothing converts a unit while a rank has its buffer */
	op_begin_run(op);
	op->result.place = mu->gradient;
	op->result.place.bytes = bytes;
	op->result.writable = true;
	if (op->m->executing)
		op->result.ready = op->m->ready;
	return RES_DONE;
}

static void op_gradient_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__GradientBufferResponse reply = SHARDD__V1__GRADIENT_BUFFER_RESPONSE__INIT;
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
	.tick = op_gradient_start,
	.encode = op_gradient_encode,
};
