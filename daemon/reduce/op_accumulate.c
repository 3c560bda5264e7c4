/*
 * Accumulate: this rank's gradient buffer is added to what it has accumulated of the unit,
 * in the dtype that the unit's profile has, and is free to be asked for again; nothing is
 * reduced. The first time nothing is added either: the buffer becomes the sum, unless its
 * dtype is another. What the trainer's streams have yet to write is waited for on the
 * device, like everything that follows.
 */
#include <errno.h>
#include <stdlib.h>

#include "copies/hold.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "op/device_note.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/queue_task.h"
#include "op/op_list.h"
#include "reduce/reduce_run.h"
#include "step/apply.h"
#include "shardd.pb-c.h"

struct accumulate {
	struct op *op; /* NULL: answered */
	struct job *job;
	struct member *m;
	struct unit *unit;
	struct queue_task queue;
	struct reduce_plan plan;
	struct launch launch;
	struct region gradient, sum; /* taken out of the member's table until it is answered */
	bool included;               /* what was reduced earlier is in @sum */
	const void *from;            /* that is added */
	bool adds;                   /* to what is there */
	bool marked;                 /* the member counts it among what its memory waits for */
	bool told;                   /* of when that is over */
};

static int op_accumulate_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__AccumulateRequest *r = (const Shardd__V1__AccumulateRequest *)msg;

	op->touches = TOUCH_GRADS;
	return op_take_unit(op, r->unit, f);
}

static int op_accumulate_check(struct op *op, struct fault *f)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	if (op_check_not_torn(op, f) || op_check_in_group(op, f) || op_check_initialised(op, f) ||
	    op_check_trained(op, f))
		return f->code;
	if (!mu || !mu->gradient.slab)
		return fault_set(f, FAULT_STATE, NULL,
				 "accumulate of unit '%.100s': this rank has not asked for its "
				 "gradient buffer",
				 op->unit->rec->name);
	return 0;
}

/* ------------------------------------------------------------------ the end */

static void op_accumulate_free(struct accumulate *a)
{
	if (!a)
		return;
	queue_task_deinit(&a->queue);
	member_unref(a->m);
	free(a);
}

static void op_accumulate_answer(struct accumulate *a, int status)
{
	struct op *op = STEAL_PTR(a->op);

	if (!op)
		return;
	if (!op_told_of_end(op) && status) {
		op_device_fault(a->job, "Accumulate", &op->fault);
		fault_errno(&op->fault, status, "Accumulate");
	}
	op_end(op);
}

/* The buffer goes back as soon as the order of the device says when it is read, and the sum is the
 * rank's again, while it is in the epoch. */
static void op_accumulate_give_back(struct accumulate *a)
{
	struct member *m = a->m;
	struct member_unit *mu = member_unit_find(m, a->unit);

	CHECK(mu && a->op);
	pool_give(&m->pool, &a->gradient);
	if (m->state == MEMBER_JOINED && m->epoch == a->job->rec->epoch) {
		CHECK(!mu->accumulated.slab); /* ops on it come behind this one */
		mu->accumulated = region_steal(&a->sum);
		mu->included = a->included;
		member_note_held(m, mu);
	}
	pool_give(&m->pool, &a->sum);
}

static void op_accumulate_finish(struct accumulate *a, int status)
{
	struct job *job = a->job;

	if (a->op)
		op_accumulate_give_back(a);
	if (a->marked && !a->told)
		member_marked(a->m, 0);
	if (a->marked)
		member_executed(a->m);
	op_accumulate_answer(a, status);
	op_accumulate_free(a);
	node_wake(job->node);
	job_ran(job);
}

static void op_accumulate_on_executed(struct backend_task *task, int status)
{
	op_accumulate_finish(CONTAINER_OF(task, struct accumulate, queue.task), status);
}

static void op_accumulate_on_issued(struct backend_task *task, int status)
{
	struct accumulate *a = CONTAINER_OF(task, struct accumulate, queue.task);

	(void)status;
	CHECK(a->op && a->marked && !a->told);
	a->told = true;
	member_marked(a->m, task->ready);
	if (!a->op->stream)
		return;
	a->op->result.queue = BACKEND_Q_MAIN;
	a->op->result.ready = task->ready;
	op_accumulate_give_back(a);
	op_accumulate_answer(a, 0);
	node_wake(a->job->node);
}

/* --------------------------------------------------------------- the kernels */

/* Return: whether there is one. */
static bool op_accumulate_fill_kernel(struct accumulate *a)
{
	const struct unit_part *p = unit_part_on(a->unit, a->m->device);
	void *to = region_addr(&a->sum);

	CHECK(a->sum.bytes >= a->unit->layout.elements * dtype_size(a->plan.accumulate_dtype));
	if (a->adds)
		reduce_add_launch(a->unit, &a->plan, to, &a->from, &a->launch);
	else if (a->included)
		reduce_include_launch(a->unit, p, &a->from, to, &a->launch);
	else if (a->from)
		reduce_convert_launch(a->unit, &a->plan, to, a->from, &a->launch);
	return a->adds || a->included || a->from;
}

/* Without a kernel the task is but the place in the order of the device. */
static void op_accumulate_submit(struct accumulate *a, bool kernel)
{
	a->queue.task = (struct backend_task){ .launches = &a->launch,
					       .n_launches = kernel,
					       .queue = BACKEND_Q_MAIN,
					       .sync = true,
					       .issued = op_accumulate_on_issued,
					       .done = op_accumulate_on_executed };
	member_will_execute(a->m);
	a->marked = true;
	queue_task_submit(&a->queue, a->m->device->backend, a->op->deadline_us);
}

/* ------------------------------------------------------------------- the op */

/* Find, or take, the memory for the sum. Return: 0, or as pool_take. */
static int op_accumulate_place_sum(struct accumulate *a, const struct member_unit *mu)
{
	uint64_t bytes = a->unit->layout.elements * dtype_size(a->plan.accumulate_dtype);

	if (mu->accumulated.slab ||
	    a->plan.accumulate_dtype == (enum dtype)a->unit->rec->gradient_dtype)
		return 0;
	return op_take_memory(a->op, bytes, &a->sum);
}

/* The rank's gradient and sum are the accumulation's now. */
static void op_accumulate_take_memory(struct accumulate *a, struct member_unit *mu)
{
	CHECK(mu->gradient.slab && mu->gradient.bytes >= unit_gradient_bytes(a->unit));
	a->adds = mu->accumulated.slab;
	a->from = region_addr(&mu->gradient);
	a->gradient = region_steal(&mu->gradient);
	if (a->adds) {
		a->sum = region_steal(&mu->accumulated);
		a->included = mu->included;
		mu->included = false;
	} else if (!a->sum.slab) { /* the same dtype: the buffer becomes the sum */
		a->sum = region_steal(&a->gradient);
		a->included = a->plan.adds_before && a->unit->has_gradient;
		a->from = NULL;
	}
}

static struct accumulate *op_accumulate_new(struct op *op)
{
	struct accumulate *a = calloc(1, sizeof(*a));

	if (!a)
		return NULL;
	a->op = op;
	a->job = op->m->job;
	a->m = member_ref(op->m);
	a->unit = op->unit;
	a->plan = reduce_plan_for(a->job, a->unit);
	queue_task_init(&a->queue, a->job);
	a->queue.note =
		(struct device_note){ .name = op->type->name, .job = a->job, .unit = op->unit };
	if (queue_task_wait(&a->queue, op->after, op->n_after) == 0)
		return a;
	op_accumulate_free(a);
	return NULL;
}

static enum res op_accumulate_refuse(struct op *op, int error)
{
	if (error == SLAB_E_LATER)
		return op_wait(op, &op->m->job->node->changed);
	op_memory_fault(op->m->job, error, unit_gradient_bytes(op->unit), "accumulated gradients",
			&op->fault);
	return RES_FAILED;
}

static enum res op_accumulate_start(struct op *op)
{
	struct job *job = op->m->job;
	struct accumulate *a;
	bool kernel;
	int r;

	op_state_move(op, OP_BLOCKED);
	/* a prepared step takes the gradients that DDP would add */
	RES_TRY(apply_wait(job, &op->waiter));
	if (op_check_not_torn(op, &op->fault)) /* by that step */
		return RES_FAILED;
	a = op_accumulate_new(op);
	r = a ? op_accumulate_place_sum(a, member_unit_find(op->m, op->unit)) : -ENOMEM;
	if (r) {
		op_accumulate_free(a);
		return op_accumulate_refuse(op, r);
	}
	op_begin_run(op);
	op_accumulate_take_memory(a, member_unit_find(a->m, a->unit));
	kernel = op_accumulate_fill_kernel(a);
	if (!kernel && backend_info(a->m->device->backend)->order == BACKEND_ORDER_NONE) {
		op_accumulate_give_back(a);
		op_accumulate_free(a);
		node_wake(job->node);
		return RES_DONE;
	}
	job->running++;
	op_accumulate_submit(a, kernel);
	return RES_WAIT;
}

static int op_accumulate_begin(struct op *op, struct fault *f)
{
	return hold_end_use(op, false, f);
}

const struct op_type op_accumulate = {
	.name = "Accumulate",
	.request = &shardd__v1__accumulate_request__descriptor,
	.decode = op_accumulate_decode,
	.check = op_accumulate_check,
	.tick = op_accumulate_start,
	.reply = &shardd__v1__accumulate_response__descriptor,
	.move = MOVE_ACCUMULATE,
	.begin = op_accumulate_begin,
};
