/*
 * ReadBytes and WriteBytes: bytes of what the rank has been handed, for clients that cannot map
 * memory. The copy is a task of the rank's device, so the loop does not wait for it, and the op
 * holds what it copies: the session's later ops on the same unit or buffer come after it, and the
 * job and the member keep their memory until it has ended.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/queue_task.h"
#include "op/op_list.h"
#include "shardd.pb-c.h"

#define BYTES_MAX (UINT64_C(1) << 20)

enum bytes_place {
	BYTES_NONE,
	BYTES_GATHERED,
	BYTES_GRADIENT,
	BYTES_BUFFER,
	BYTES_SUMMONED,
};

struct bytes_args {
	enum bytes_place place;
	uint64_t offset;
	uint64_t bytes;
	const uint8_t *data; /* WriteBytes: the request's; valid until done */
	uint8_t *at;         /* set by the check */
	struct user *payer;  /* of op->owned; a reference */
};

static inline struct bytes_args *bytes_args(const struct op *op)
{
	_Static_assert(sizeof(struct bytes_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

struct bytes_copy {
	struct queue_task queue;
	struct op *op;
	struct launch launch;
};

/* ------------------------------------------------------------------- the request */

static int op_bytes_decode(struct op *op, enum bytes_place place, uint32_t unit, uint64_t buffer,
			   struct fault *f)
{
	static const unsigned touches[] = {
		[BYTES_NONE] = 0,
		[BYTES_GATHERED] = TOUCH_PARAMS | TOUCH_GRADS, /* a Reduce may let go of it */
		[BYTES_GRADIENT] = TOUCH_GRADS,
		[BYTES_BUFFER] = 0,
		[BYTES_SUMMONED] = TOUCH_PARAMS | TOUCH_GRADS,
	};
	struct bytes_args *a = bytes_args(op);

	a->place = place;
	op->touches = touches[place];
	if (place == BYTES_NONE)
		return fault_set(f, FAULT_INVALID, "memory",
				 "memory is missing: name a unit or a buffer");
	if (!a->bytes || a->bytes > BYTES_MAX)
		return fault_set(f, FAULT_INVALID, "bytes",
				 "bytes is %llu; it must be 1 to 2^20: use several calls",
				 (unsigned long long)a->bytes);
	if (place != BYTES_BUFFER)
		return op_take_unit(op, unit, f);
	op->buffer = buffer;
	return 0;
}

static int op_bytes_read_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ReadBytesRequest *r = (const Shardd__V1__ReadBytesRequest *)msg;

	bytes_args(op)->offset = r->offset;
	bytes_args(op)->bytes = r->bytes;
	switch (r->memory_case) {
	case SHARDD__V1__READ_BYTES_REQUEST__MEMORY_GATHERED:
		return op_bytes_decode(op, BYTES_GATHERED, r->gathered, 0, f);
	case SHARDD__V1__READ_BYTES_REQUEST__MEMORY_GRADIENT:
		return op_bytes_decode(op, BYTES_GRADIENT, r->gradient, 0, f);
	case SHARDD__V1__READ_BYTES_REQUEST__MEMORY_BUFFER:
		return op_bytes_decode(op, BYTES_BUFFER, 0, r->buffer, f);
	case SHARDD__V1__READ_BYTES_REQUEST__MEMORY_SUMMONED:
		return op_bytes_decode(op, BYTES_SUMMONED, r->summoned, 0, f);
	default:
		return op_bytes_decode(op, BYTES_NONE, 0, 0, f);
	}
}

static int op_bytes_write_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__WriteBytesRequest *r = (const Shardd__V1__WriteBytesRequest *)msg;

	bytes_args(op)->offset = r->offset;
	bytes_args(op)->bytes = r->data.len;
	bytes_args(op)->data = r->data.data;
	switch (r->memory_case) {
	case SHARDD__V1__WRITE_BYTES_REQUEST__MEMORY_GRADIENT:
		return op_bytes_decode(op, BYTES_GRADIENT, r->gradient, 0, f);
	case SHARDD__V1__WRITE_BYTES_REQUEST__MEMORY_BUFFER:
		return op_bytes_decode(op, BYTES_BUFFER, 0, r->buffer, f);
	case SHARDD__V1__WRITE_BYTES_REQUEST__MEMORY_SUMMONED:
		return op_bytes_decode(op, BYTES_SUMMONED, r->summoned, 0, f);
	default:
		return op_bytes_decode(op, BYTES_NONE, 0, 0, f);
	}
}

/* --------------------------------------------------------------------- the place */

/* What the rank has been handed of its unit: no slab if it has not. */
static struct region op_bytes_region(const struct op *op)
{
	struct member_unit *mu = member_unit_find(op->m, op->unit);
	const struct unit_part *p;
	struct region none = REGION_NULL, found;

	if (!mu)
		return none;
	switch (bytes_args(op)->place) {
	case BYTES_GATHERED:
		if (!mu->gathers)
			return none;
		p = unit_part_on(op->unit, op->m->device);
		found = unit_is_direct(op->unit) ? unit_direct_region(op->unit, p) : p->full;
		found.bytes = unit_full_bytes(op->unit);
		return found;
	case BYTES_GRADIENT:
		found = mu->gradient;
		found.bytes = unit_gradient_bytes(op->unit);
		return found;
	case BYTES_SUMMONED:
		found = mu->is_summoned ? mu->summoned : none;
		found.bytes = unit_full_elements(op->unit) *
			      dtype_size(unit_state_dtype(op->unit->rec, op->unit->summoned_state));
		return found;
	default:
		return none;
	}
}

static int op_bytes_check_unit(struct op *op, struct fault *f)
{
	static const struct {
		const char *lacks, *call;
	} what[] = {
		[BYTES_GATHERED] = { "has not gathered", "Gather" },
		[BYTES_GRADIENT] = { "has no gradient buffer of", "GradientBuffer" },
		[BYTES_SUMMONED] = { "has not summoned", "SummonFull" },
	};
	struct bytes_args *a = bytes_args(op);
	struct region place;

	if (op_check_in_group(op, f))
		return f->code;
	place = op_bytes_region(op);
	if (!place.slab)
		return fault_set(f, FAULT_STATE, NULL, "rank %u %s unit '%.100s': call %s first",
				 op->m->rank, what[a->place].lacks, op->unit->rec->name,
				 what[a->place].call);
	if (a->offset > place.bytes || a->bytes > place.bytes - a->offset)
		return fault_set(f, FAULT_INVALID, "offset",
				 "offset %llu and %llu bytes do not fit %llu bytes of unit "
				 "'%.100s'",
				 (unsigned long long)a->offset, (unsigned long long)a->bytes,
				 (unsigned long long)place.bytes, op->unit->rec->name);
	a->at = (uint8_t *)region_addr(&place) + a->offset;
	return 0;
}

static int op_bytes_check(struct op *op, struct fault *f)
{
	struct bytes_args *a = bytes_args(op);

	if (member_signals(op->m))
		return fault_set(f, FAULT_STATE, NULL,
				 "%s is for sessions without CUDA streams: this one maps its "
				 "memory",
				 op->type->name);
	if (a->place != BYTES_BUFFER)
		return op_bytes_check_unit(op, f);
	a->at = op_buffer_at(op, a->offset, a->bytes, f);
	return a->at ? 0 : (int)f->code;
}

/* ---------------------------------------------------------------------- the copy */

/* A rank that dies has let go of the gathered copy before the device has read it. */
static bool op_bytes_reads_copy(const struct op *op)
{
	return bytes_args(op)->place == BYTES_GATHERED && !unit_is_direct(op->unit);
}

static void op_bytes_on_copied(struct backend_task *task, int status)
{
	struct bytes_copy *copy = CONTAINER_OF(task, struct bytes_copy, queue.task);
	struct op *op = copy->op;
	struct job *job = op->m->job;

	if (!op_told_of_end(op) && status)
		fault_errno(&op->fault, status, "copying bytes");
	if (op_bytes_reads_copy(op)) {
		CHECK(op->unit->copy_reads > 0);
		op->unit->copy_reads--;
		job_full_unused(job, op->unit);
	}
	queue_task_deinit(&copy->queue);
	free(copy);
	op_end(op);
	job_ran(job);
}

/* The reply's memory, which the rank's user pays for. Return: 0 or a fault code. */
static int op_bytes_take(struct op *op, struct fault *f)
{
	struct bytes_args *a = bytes_args(op);
	struct user *u = op->m->user;

	if (u && !user_has_room(u, USER_MEMORY, a->bytes))
		return user_refuse(u, USER_MEMORY, a->bytes, f);
	op->owned = malloc(a->bytes);
	if (!op->owned)
		return fault_errno(f, -ENOMEM, "reading bytes");
	if (u) {
		a->payer = user_ref(u);
		user_add(u, USER_MEMORY, a->bytes);
	}
	return 0;
}

static void op_bytes_leave(struct op *op)
{
	struct bytes_args *a = bytes_args(op);

	if (a->payer)
		user_sub(a->payer, USER_MEMORY, a->bytes);
	a->payer = user_unref(a->payer);
}

static enum res op_bytes_tick(struct op *op)
{
	struct bytes_args *a = bytes_args(op);
	struct bytes_copy *copy = calloc(1, sizeof(*copy));

	CHECK(a->at && !op->owned); /* found by the check, in the same turn */
	op_begin_run(op);
	if (!copy)
		fault_errno(&op->fault, -ENOMEM, "copying bytes");
	if (!copy || (!a->data && op_bytes_take(op, &op->fault))) {
		free(copy);
		return RES_FAILED;
	}
	copy->op = op;
	queue_task_init(&copy->queue, op->m->job);
	copy->queue.note =
		(struct device_note){ .name = op->type->name, .job = op->m->job, .unit = op->unit };
	copy->launch = (struct launch){ .kind = LAUNCH_COPY, .n = a->bytes };
	copy->launch.copy =
		a->data ? (struct k_copy){ a->at, a->data } : (struct k_copy){ op->owned, a->at };
	copy->queue.task = (struct backend_task){
		.launches = &copy->launch, .n_launches = 1, .sync = true, .done = op_bytes_on_copied
	};
	if (op_bytes_reads_copy(op))
		op->unit->copy_reads++;
	op->m->job->running++;
	queue_task_submit(&copy->queue, op->m->device->backend, op->deadline_us);
	return RES_WAIT;
}

static void op_bytes_read_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ReadBytesResponse reply = SHARDD__V1__READ_BYTES_RESPONSE__INIT;

	reply.data = (ProtobufCBinaryData){ bytes_args(op)->bytes, op->owned };
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_read_bytes = {
	.name = "ReadBytes",
	.request = &shardd__v1__read_bytes_request__descriptor,
	.decode = op_bytes_read_decode,
	.check = op_bytes_check,
	.tick = op_bytes_tick,
	.leave = op_bytes_leave,
	.encode = op_bytes_read_encode,
};

const struct op_type op_write_bytes = {
	.name = "WriteBytes",
	.request = &shardd__v1__write_bytes_request__descriptor,
	.decode = op_bytes_write_decode,
	.check = op_bytes_check,
	.tick = op_bytes_tick,
	.leave = op_bytes_leave,
	.reply = &shardd__v1__write_bytes_response__descriptor,
};
