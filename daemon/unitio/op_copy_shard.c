/*
 * CopyShard: this rank's piece of a tensor, or of its reduced gradient, into a buffer of its
 * session or out of it. It concerns this rank alone. Trainers look at shards and change them by it
 * without a full copy of the unit. The copy is a task of the rank's device; while parameters are
 * written nobody gathers the unit, on no node (unitio/writes.h).
 */
#include <errno.h>
#include <stdlib.h>

#include "copies/full.h"
#include "copies/hold.h"
#include "core/check.h"
#include "job/position.h"
#include "op/op.h"
#include "op/op_list.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/queue_task.h"
#include "step/apply.h"
#include "unit/optim.h"
#include "unit/runs.h"
#include "unitio/writes.h"
#include "shardd.pb-c.h"

struct copy_shard_args {
	uint32_t tensor;
	bool gradient; /* else the parameters */
	bool write;
	uint64_t offset;
	uint64_t elements;
};

static inline struct copy_shard_args *copy_shard_args(const struct op *op)
{
	_Static_assert(sizeof(struct copy_shard_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

struct copy_shard {
	struct queue_task queue;
	struct op *op;
	struct launch launch;
};

static bool op_copy_shard_changes(const struct op *op)
{
	return copy_shard_args(op)->write && !copy_shard_args(op)->gradient;
}

/* ------------------------------------------------------------------- the request */

static int op_copy_shard_decode_tensor(struct op *op, struct fault *f)
{
	const struct copy_shard_args *a = copy_shard_args(op);
	const state_unit *rec = op->unit->rec;

	if (a->tensor >= rec->n_tensors)
		return fault_set(f, FAULT_INVALID, "tensor",
				 "tensor %u of unit '%.100s' is out of range (0..%zu)", a->tensor,
				 rec->name, rec->n_tensors - 1);
	if (op->unit->tensors[a->tensor].alias)
		return fault_set(f, FAULT_INVALID, "tensor",
				 "tensor '%.100s' of unit '%.100s' is an alias: name the tensor "
				 "whose memory it has",
				 rec->tensors[a->tensor]->name, rec->name);
	if (a->gradient && op->unit->tensors[a->tensor].frozen)
		return fault_set(f, FAULT_INVALID, "tensor",
				 "tensor '%.100s' of unit '%.100s' is frozen: it has no gradient",
				 rec->tensors[a->tensor]->name, rec->name);
	return 0;
}

static int op_copy_shard_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__CopyShardRequest *r = (const Shardd__V1__CopyShardRequest *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	op->buffer = r->buffer;
	*copy_shard_args(op) = (struct copy_shard_args){
		.tensor = r->tensor,
		.gradient = r->array == SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_GRADIENT,
		.write = r->write,
		.offset = r->offset,
		.elements = r->elements,
	};
	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	if (r->array != SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_PARAMETERS &&
	    r->array != SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_GRADIENT)
		return fault_set(f, FAULT_INVALID, "array",
				 "array is %d; it must be PARAMETERS or GRADIENT", (int)r->array);
	return op_copy_shard_decode_tensor(op, f);
}

/* ---------------------------------------------------------------------- the piece */

/* This rank's piece, on the part of its own device. Return: 0 or a fault code. */
static int op_copy_shard_find(const struct op *op, struct unit_run *ret, struct fault *f)
{
	struct unit *u = op->unit;
	const struct unit_part *p = unit_part_on(u, op->m->device);
	uint32_t index = 0;

	CHECK(group_index(op->group, op->m->rank, &index));
	if (copy_shard_args(op)->write && u->layout.sets)
		return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
				 "each replica of unit '%.100s' has devices of its own, and all "
				 "would need what rank %u writes: summon the unit instead",
				 u->rec->name, op->m->rank);
	if (unit_position(u, p) != unit_rank_position(u, index) ||
	    (u->all_parts != u->spread && !u->layout.sets))
		return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
				 "the ranks of unit '%.100s' are on several devices, and rank %u's "
				 "piece is not on its own alone: summon the unit instead",
				 u->rec->name, op->m->rank);
	(void)unit_rank_run(u, index, copy_shard_args(op)->tensor, ret);
	return 0;
}

/* Bytes of an element: parameters as they are stored, gradients in FP32. */
static size_t op_copy_shard_size(const struct op *op)
{
	return copy_shard_args(op)->gradient ? sizeof(float)
					     : dtype_size(unit_state_dtype(op->unit->rec, 0));
}

static int op_copy_shard_check(struct op *op, struct fault *f)
{
	const struct copy_shard_args *a = copy_shard_args(op);
	struct unit_run run = { 0 };

	if (op_check_not_torn(op, f) || op_check_in_group(op, f) || op_check_initialised(op, f) ||
	    op_check_not_summoned(op, f) || op_copy_shard_find(op, &run, f))
		return f->code;
	if (a->elements != run.n)
		return fault_set(f, FAULT_INVALID, "elements",
				 "elements is %llu, but rank %u has %llu elements of tensor "
				 "'%.100s' of unit '%.100s'",
				 (unsigned long long)a->elements, op->m->rank,
				 (unsigned long long)run.n, op->unit->rec->tensors[a->tensor]->name,
				 op->unit->rec->name);
	return op_buffer_at(op, a->offset, a->elements * op_copy_shard_size(op), f) ? 0
										    : (int)f->code;
}

/* What may have changed while it waited. Return: 0 or a fault code. */
static int op_copy_shard_check_now(const struct op *op, struct fault *f)
{
	const struct copy_shard_args *a = copy_shard_args(op);
	const struct unit *u = op->unit;

	if (op_check_not_torn(op, f) || op_check_not_summoned(op, f))
		return f->code;
	if (a->gradient && (unit_lacks_gradient(u, a->tensor) || u->step != UNIT_STEP_NONE))
		return fault_set(f, FAULT_STATE, NULL,
				 "tensor '%.100s' of unit '%.100s' has no reduced gradient: there "
				 "is one from its Reduce to the Step, unless its optimizer steps "
				 "in backward",
				 u->rec->tensors[a->tensor]->name, u->rec->name);
	if (u->step == UNIT_STEP_DUE || u->shards_left)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is stepped at the end of this backward pass: call "
				 "Step before its shards are copied",
				 u->rec->name);
	if (op_copy_shard_changes(op) && u->gathered_ranks)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is still gathered by %u ranks: release it before "
				 "its parameters are written",
				 u->rec->name, u->gathered_ranks);
	return 0;
}

/* ---------------------------------------------------------------------- the copy */

static void op_copy_shard_written(struct op *op)
{
	struct unit *u = op->unit;

	CHECK(u->shard_writes > 0);
	u->shard_writes--;
	u->version++;
	full_invalidate(op->m->job, u);
	if (!u->shard_writes)
		condition_signal(&u->step_done);
}

static void op_copy_shard_on_copied(struct backend_task *task, int status)
{
	struct copy_shard *copy = CONTAINER_OF(task, struct copy_shard, queue.task);
	struct op *op = copy->op;
	struct job *job = op->m->job;

	if (status && op_copy_shard_changes(op))
		apply_failed(job); /* a part of it may be written */
	if (!op_told_of_end(op) && status)
		fault_errno(&op->fault, status, "copying a shard");
	if (op_copy_shard_changes(op)) {
		job_change_end(job);
		op_copy_shard_written(op);
	}
	queue_task_deinit(&copy->queue);
	free(copy);
	op_end(op);
	job_ran(job);
}

/* After the streams that wrote the buffer, and those that read the parameters themselves. */
static int op_copy_shard_take_waits(struct copy_shard *copy, const struct op *op)
{
	const struct reads *reads = &unit_part_on(op->unit, op->m->device)->reads;
	int r = queue_task_wait(&copy->queue, op->after, op->n_after);

	if (r == 0 && op_copy_shard_changes(op))
		r = queue_task_wait(&copy->queue, reads->waits, reads->n);
	return r;
}

static void op_copy_shard_submit(struct op *op, struct copy_shard *copy, void *buffer,
				 const struct unit_run *run)
{
	const struct copy_shard_args *a = copy_shard_args(op);
	const struct unit_part *p = unit_part_on(op->unit, op->m->device);
	void *shard = a->gradient ? optim_at(&p->grads, run->at)
				  : unit_state_at(op->unit->rec, &p->params, 0, run->at);

	copy->queue.note =
		(struct device_note){ .name = op->type->name, .job = op->m->job, .unit = op->unit };
	copy->launch = (struct launch){ .kind = LAUNCH_COPY, .n = run->n * op_copy_shard_size(op) };
	copy->launch.copy =
		a->write ? (struct k_copy){ shard, buffer } : (struct k_copy){ buffer, shard };
	copy->queue.task = (struct backend_task){ .launches = &copy->launch,
						  .n_launches = 1,
						  .sync = true,
						  .done = op_copy_shard_on_copied };
	if (op_copy_shard_changes(op)) {
		readers_rewrite(op->m->job);
		position_altered(op->m->job);
		job_change_begin(op->m->job);
		op->unit->shard_writes++;
	}
	op->m->job->running++;
	queue_task_submit(&copy->queue, op->m->device->backend, op->deadline_us);
}

static enum res op_copy_shard_start(struct op *op, const struct unit_run *run)
{
	const struct copy_shard_args *a = copy_shard_args(op);
	struct copy_shard *copy = calloc(1, sizeof(*copy));
	struct fault f = FAULT_NULL;
	void *buffer = op_buffer_at(op, a->offset, run->n * op_copy_shard_size(op), &f);

	op_begin_run(op);
	if (copy) {
		copy->op = op;
		queue_task_init(&copy->queue, op->m->job);
	}
	if (!copy || op_copy_shard_take_waits(copy, op) < 0) {
		if (copy)
			queue_task_deinit(&copy->queue);
		free(copy);
		fault_errno(&op->fault, -ENOMEM, "copying a shard");
		return RES_FAILED;
	}
	CHECK(buffer); /* the op holds it since it was checked */
	op_copy_shard_submit(op, copy, buffer, run);
	return RES_WAIT;
}

/* Does a rank here wait for a copy of several nodes that is not begun? */
static bool op_copy_shard_is_wanted(const struct op *op)
{
	return group_spans(op->group) && !condition_is_idle(&op->unit->cast_done);
}

static enum res op_copy_shard_tick(struct op *op)
{
	struct unit_run run = { 0 };

	op_state_move(op, OP_BLOCKED);
	RES_TRY(apply_wait(op->m->job, &op->waiter));
	if (op_copy_shard_changes(op))
		hold_drop(op->m->job, op->unit);
	if (op->unit->step == UNIT_STEP_STEPPING)
		return op_wait(op, &op->unit->step_done);
	if (op_copy_shard_check_now(op, &op->fault) || op_copy_shard_find(op, &run, &op->fault))
		return RES_FAILED;
	if (!run.n) {
		op_begin_run(op);
		return RES_DONE;
	}
	if (op_copy_shard_changes(op)) {
		/* cast_done is for ops that take the copy; node_wake comes after it */
		if (unit_is_copying(op->unit) || op_copy_shard_is_wanted(op))
			return op_wait(op, &op->m->job->node->changed);
		RES_TRY(readers_let(op->m->job, JOB_CHANGE_WHOLE, &op->waiter));
		if (group_spans(op->group))
			RES_TRY(writes_allow(op, &op->fault));
	}
	return op_copy_shard_start(op, &run);
}

static void op_copy_shard_leave(struct op *op)
{
	if (op_copy_shard_changes(op))
		writes_end(op);
}

static bool op_copy_shard_waits_for_readers(const struct op *op)
{
	return op->state == OP_BLOCKED && op_copy_shard_changes(op);
}

const struct op_type op_copy_shard = {
	.name = "CopyShard",
	.request = &shardd__v1__copy_shard_request__descriptor,
	.decode = op_copy_shard_decode,
	.check = op_copy_shard_check,
	.tick = op_copy_shard_tick,
	.leave = op_copy_shard_leave,
	.reply = &shardd__v1__copy_shard_response__descriptor,
	.waits_for_readers = op_copy_shard_waits_for_readers,
	.move = MOVE_NEEDS_IDLE,
};
