/* DdpForward: where this rank's gradients are, before the next pass. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "ddp/op_ddp.h"
#include "op/op_list.h"
#include "op/device_note.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "shardd.pb-c.h"

static int op_ddp_forward_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__DdpForwardRequest *r = (const Shardd__V1__DdpForwardRequest *)msg;

	ddp_args(op)->known = r->generation;
	return op_ddp_take(op, r->ddp, f);
}

static void op_ddp_forward_enter(struct op *op)
{
	if (ddp_forward(ddp_args(op)->rank, &ddp_args(op)->layout, &op->fault))
		return;
	ddp_args(op)->holds = true;
	op_ddp_follow(op);
}

static void op_ddp_forward_leave(struct op *op)
{
	if (!ddp_args(op)->holds)
		return;
	CHECK(ddp_args(op)->rank->moving);
	ddp_args(op)->rank->moving = false;
}

static int op_ddp_forward_check(struct op *op, struct fault *f)
{
	return op_check_not_torn(op, f);
}

/* -- moving what is in the old buckets ------------------------------------------ */

struct move {
	struct backend_task task;
	struct device_note note;
	struct op *op;
	struct region to;
	struct launch launches[];
};

static struct member_buffer *op_ddp_forward_buffer_of(const struct op *op)
{
	uint64_t id = ddp_args(op)->rank->buffer;

	return id ? member_buffer_find(op->m, id) : NULL;
}

/* It is the rank's from here on; the old one goes. */
static enum res op_ddp_forward_finish(struct op *op, struct region *to, int status)
{
	struct ddp_rank *rank = ddp_args(op)->rank;
	struct member_buffer *old = op_ddp_forward_buffer_of(op), *b = NULL;

	if (!op_told_of_end(op) && status) {
		fault_errno(&op->fault, status, "moving gradients to new buckets");
	} else if (!op->fault.code) {
		b = member_buffer_add(op->m, to);
		if (!b)
			fault_errno(&op->fault, -ENOMEM, "new buckets");
	}
	if (b && old)
		member_buffer_free(op->m, old);
	if (b)
		ddp_moved(rank, ddp_args(op)->layout, b->id);
	else
		pool_give(&op->m->pool, to);
	op->result.place = b ? b->region : REGION_NULL;
	op->result.writable = true;
	return op->fault.code ? RES_FAILED : RES_DONE;
}

static void op_ddp_forward_on_moved(struct backend_task *task, int status)
{
	struct move *mv = CONTAINER_OF(task, struct move, task);
	struct op *op = mv->op;
	struct job *job = op->m->job;
	struct region to = mv->to;

	free(mv);
	(void)op_ddp_forward_finish(op, &to, status);
	op_end(op);
	job_ran(job);
}

static enum res op_ddp_forward_move(struct op *op, struct region *to)
{
	const struct region *from = &op_hold_buffer(op, ddp_args(op)->rank->buffer)->region;
	const struct ddp *d = ddp_args(op)->d;
	const struct ddp_buckets *a = ddp_buckets_of(ddp_args(op)->rank);
	const struct ddp_buckets *b = &d->layouts[ddp_args(op)->layout];
	struct move *mv = calloc(1, sizeof(*mv) + d->n * sizeof(mv->launches[0]));

	if (!mv)
		return op_ddp_forward_finish(op, to, -ENOMEM);
	CHECK(from->bytes >= a->bytes && to->bytes >= b->bytes);
	mv->op = op;
	mv->to = *to;
	mv->note = (struct device_note){ .name = op->type->name, .job = op->m->job };
	mv->task = (struct backend_task){ .launches = mv->launches,
					  .sync = true,
					  .done = op_ddp_forward_on_moved };
	for (uint32_t i = 0; i < d->n; i++) {
		const struct ddp_tensor *t = &d->tensors[i];
		size_t size = dtype_size((enum dtype)t->unit->rec->gradient_dtype);

		if (t->sparse)
			continue;
		mv->launches[mv->task.n_launches++] =
			(struct launch){ .kind = LAUNCH_COPY,
					 .n = t->elements * size,
					 .copy = { (char *)region_addr(to) + b->offset[i],
						   (char *)region_addr(from) + a->offset[i] } };
	}
	op->m->job->running++;
	mv->task.owner = job_as_owner(op->m->job);
	device_note_task(&mv->note, op->m->device->backend, &mv->task);
	backend_submit(op->m->device->backend, &mv->task);
	return RES_WAIT;
}

/* The same as before? */
static bool op_ddp_forward_stays(const struct op *op)
{
	const struct ddp_rank *rank = ddp_args(op)->rank;

	return !ddp_args(op)->d->layouts[0].bytes ||
	       (op_ddp_forward_buffer_of(op) && rank->layout == ddp_args(op)->layout);
}

static enum res op_ddp_forward_stay(struct op *op)
{
	const struct member_buffer *b = op_ddp_forward_buffer_of(op);

	op_begin_run(op);
	if (b)
		op->result.place = b->region;
	else
		ddp_moved(ddp_args(op)->rank, ddp_args(op)->layout, 0);
	op->result.writable = true;
	return RES_DONE;
}

static enum res op_ddp_forward_start(struct op *op)
{
	uint64_t bytes = ddp_args(op)->d->layouts[ddp_args(op)->layout].bytes;
	struct region to = REGION_NULL;

	if (op_ddp_forward_stays(op))
		return op_ddp_forward_stay(op);
	RES_TRY(op_wait_for_memory(op));
	if (op->m->n_buffers >= MEMBER_MAX_BUFFERS) {
		op_memory_fault(op->m->job, -ENOSPC, bytes, "buckets of gradients", &op->fault);
		return RES_FAILED;
	}
	RES_TRY(op_need_memory(op, bytes, "buckets of gradients", &to));
	op_begin_run(op);
	return op_ddp_forward_buffer_of(op) ? op_ddp_forward_move(op, &to)
					    : op_ddp_forward_finish(op, &to, 0);
}

/* -- the answer ----------------------------------------------------------------- */

static void op_ddp_forward_fill_views(const struct op *op, Shardd__V1__DdpView *views,
				      Shardd__V1__DdpView **pointers)
{
	const struct ddp *d = ddp_args(op)->d;
	const struct ddp_buckets *b = ddp_buckets_of(ddp_args(op)->rank);

	for (uint32_t i = 0; i < d->n; i++) {
		const struct ddp_tensor *t = &d->tensors[i];

		shardd__v1__ddp_view__init(&views[i]);
		views[i].unit = t->unit->id;
		views[i].tensor = t->tensor;
		views[i].bucket = b->of[i];
		views[i].offset = b->offset[i];
		views[i].elements = t->sparse ? 0 : t->elements;
		pointers[i] = &views[i];
	}
}

static void op_ddp_forward_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__DdpForwardResponse reply = SHARDD__V1__DDP_FORWARD_RESPONSE__INIT;
	const struct ddp *d = ddp_args(op)->d;
	Shardd__V1__DdpView *views = calloc(d->n, sizeof(*views));
	Shardd__V1__DdpView **pointers = calloc(d->n, sizeof(*pointers));
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	reply.generation = ddp_args(op)->rank->layout + 1;
	if (op->result.place.slab) {
		op_place(op, &place, handle);
		place.bytes = ddp_buckets_of(ddp_args(op)->rank)->bytes;
		reply.place = &place;
	}
	/* without memory for them the caller sees that they are missing */
	if (views && pointers && reply.generation != ddp_args(op)->known) {
		op_ddp_forward_fill_views(op, views, pointers);
		reply.views = pointers;
		reply.n_views = d->n;
	}
	op_send(op, &reply.base, &reply.info, send, ctx);
	free(views);
	free(pointers);
}

const struct op_type op_ddp_forward = {
	.name = "DdpForward",
	.request = &shardd__v1__ddp_forward_request__descriptor,
	.decode = op_ddp_forward_decode,
	.enter = op_ddp_forward_enter,
	.leave = op_ddp_forward_leave,
	.check = op_ddp_forward_check,
	.tick = op_ddp_forward_start,
	.encode = op_ddp_forward_encode,
};
