/* AllocBuffer and FreeBuffer: writable memory of the session's own. */
#include <errno.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "shardd.pb-c.h"

struct alloc_args {
	uint64_t bytes;
};

static inline struct alloc_args *alloc_args(const struct op *op)
{
	_Static_assert(sizeof(struct alloc_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

static int op_buffer_alloc_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__AllocBufferRequest *r = (const Shardd__V1__AllocBufferRequest *)msg;

	alloc_args(op)->bytes = r->bytes;
	if (r->bytes && r->bytes <= LAYOUT_MAX_ELEMENTS * sizeof(float))
		return 0;
	return fault_set(f, FAULT_INVALID, "bytes", "bytes is %llu; it must be 1 to 2^50",
			 (unsigned long long)r->bytes);
}

static int op_buffer_alloc_check(struct op *op, struct fault *f)
{
	if (op->m->n_buffers < MEMBER_MAX_BUFFERS)
		return 0;
	return fault_set(f, FAULT_EXHAUSTED, NULL,
			 "this session has %u buffers, the maximum: free one", op->m->n_buffers);
}

static enum res op_buffer_alloc_start(struct op *op)
{
	struct member_buffer *b;
	struct region region;

	RES_TRY(op_wait_for_memory(op));
	if (op_buffer_alloc_check(op, &op->fault)) /* others came while this one waited */
		return RES_FAILED;
	RES_TRY(op_need_memory(op, alloc_args(op)->bytes, "a buffer", &region));
	op_begin_run(op);
	b = member_buffer_add(op->m, &region);
	if (!b) {
		pool_give(&op->m->pool, &region);
		op_memory_fault(op->m->job, -ENOMEM, alloc_args(op)->bytes, "a buffer", &op->fault);
		return RES_FAILED;
	}
	op->result.buffer = b->id;
	op->result.place = b->region;
	op->result.place.bytes = alloc_args(op)->bytes;
	op->result.writable = true;
	if (op->m->executing)
		op->result.ready = op->m->ready;
	return RES_DONE;
}

static void op_buffer_alloc_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__AllocBufferResponse reply = SHARDD__V1__ALLOC_BUFFER_RESPONSE__INIT;
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	op_place(op, &place, handle);
	reply.place = &place;
	reply.buffer = op->result.buffer;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

static int op_buffer_free_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	(void)f;
	op->buffer = ((const Shardd__V1__FreeBufferRequest *)msg)->buffer;
	return 0;
}

static int op_buffer_free_check(struct op *op, struct fault *f)
{
	return op_buffer_at(op, 0, 0, f) ? 0 : (int)f->code;
}

static enum res op_buffer_free_start(struct op *op)
{
	CHECK(op->held && op->held->id == op->buffer);
	op_begin_run(op);
	member_buffer_free(op->m, op->held);
	return RES_DONE;
}

const struct op_type op_alloc_buffer = {
	.name = "AllocBuffer",
	.request = &shardd__v1__alloc_buffer_request__descriptor,
	.decode = op_buffer_alloc_decode,
	.check = op_buffer_alloc_check,
	.tick = op_buffer_alloc_start,
	.encode = op_buffer_alloc_encode,
};

const struct op_type op_free_buffer = {
	.name = "FreeBuffer",
	.request = &shardd__v1__free_buffer_request__descriptor,
	.decode = op_buffer_free_decode,
	.check = op_buffer_free_check,
	.tick = op_buffer_free_start,
	.reply = &shardd__v1__free_buffer_response__descriptor,
};
