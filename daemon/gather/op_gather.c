/*
 * Gather: the full parameters of a unit. On one device with equal storage and compute dtype
 * a reference to the shards, which lie side by side; else one cast into a copy that all
 * ranks of a device share, and an all-gather between devices. Waits for no other rank.
 */
#include <errno.h>

#include "copies/full.h"
#include "core/check.h"
#include "gather/ahead.h"
#include "gather/gather.h"
#include "gather/turn.h"
#include "job/mesh.h"
#include "op/op_list.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "step/backward.h"
#include "shardd.pb-c.h"

static int op_gather_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__GatherRequest *r = (const Shardd__V1__GatherRequest *)msg;

	op->touches = TOUCH_PARAMS;
	return op_take_unit(op, r->unit, f);
}

int gather_check(struct op *op, struct fault *f)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	CHECK(!mu || mu->gathers >= mu->held);
	if (op_check_not_torn(op, f) || op_check_in_group(op, f) || op_check_initialised(op, f) ||
	    op_check_not_summoned(op, f))
		return f->code;
	if (mu && mu->gathers == UINT32_MAX)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "unit '%.100s' is gathered %u times by this rank: release it",
				 op->unit->rec->name, mu->gathers);
	return 0;
}

/* Hand @place out and count it. @ready: when it is there; 0: now. */
static enum res op_gather_give(struct op *op, struct region place, bool copied, uint64_t ready)
{
	struct member_unit *mu = member_unit(op->m, op->unit);
	bool pass = op->type->is_pass;

	if (op->state != OP_RUN)
		op_begin_run(op);
	if (!mu) {
		fault_errno(&op->fault, -ENOMEM, "counting a gather");
		return RES_FAILED;
	}
	if (op->m->state != MEMBER_JOINED) {
		fault_set(&op->fault, FAULT_ABORTED, NULL, "%s", op->m->ended.text);
		return RES_FAILED;
	}
	if (!pass || !mu->held)
		member_gathered(op->m, op->unit, mu);
	mu->held = mu->held || pass;
	CHECK(mu->gathers >= mu->held && op->unit->gathered_ranks > 0);
	op->result.place = place;
	op->result.references = mu->gathers - mu->held;
	op->result.copied = copied;
	op->result.queue = BACKEND_Q_GATHER;
	op->result.ready = ready;
	ahead_used(op);
	return RES_DONE;
}

/* The copy on the device of @op's rank. */
static enum res op_gather_give_full(struct op *op, bool copied)
{
	struct unit *u = op->unit;
	const struct unit_part *p = unit_part_on(u, op->m->device);
	struct region place = { p->full.slab, p->full.offset, unit_full_bytes(u) };

	/* what is not executed yet is for ops that wait with their streams */
	CHECK(u->copy == UNIT_COPY_KEPT || (u->copy == UNIT_COPY_EXECUTING && op->stream));
	CHECK(p->full.slab && p->full.bytes >= place.bytes);
	return op_gather_give(op, place, copied, u->copy == UNIT_COPY_EXECUTING ? p->ready : 0);
}

static void op_gather_fault(struct op *op, int status)
{
	const struct group *g = op->m->job->groups[op->unit->rec->group];
	const char *why = g->nc ? g->nc->why : "";

	if (mesh_is_needed(op->unit))
		why = mesh_why(mesh_find(g, op->unit));
	if (status == ENGINE_E_ABORTED)
		fault_set(&op->fault, FAULT_ABORTED, NULL,
			  "Gather: the communicator was aborted%s%s", *why ? ": " : "", why);
	else
		fault_errno(&op->fault, status, "casting a unit");
}

void gather_answer(struct op *op, int status)
{
	CHECK(op->state == OP_RUN || op->state == OP_BLOCKED); /* it began the copy, or waited */
	if (status)
		op_gather_fault(op, status);
	else
		(void)op_gather_give_full(op, op->state == OP_RUN); /* the first one made it */
	op_end(op);
}

static enum res op_gather_begin_cast(struct op *op)
{
	switch (full_begin(op->m->job, op->unit, op->deadline_us, op, &op->fault)) {
	case RES_DONE:
		return RES_WAIT; /* for its end */
	case RES_WAIT:
		return op_wait(op, &op->m->job->node->changed);
	case RES_FAILED:
		break;
	}
	return RES_FAILED;
}

enum res gather_start(struct op *op)
{
	struct job *job = op->m->job;
	struct unit *u = op->unit;

	op_state_move(op, OP_BLOCKED);
	RES_TRY(apply_wait_step(job, &op->waiter));
	ahead_asked(op);
	RES_TRY(backward_gather(op));
	if (op_check_not_torn(op, &op->fault)) /* by the step that was applied meanwhile */
		return RES_FAILED;
	if (unit_is_direct(u))
		return op_gather_give(op, unit_direct_region(u, unit_part_on(u, op->m->device)),
				      false, 0);
	if (turn_is_needed(job, u))
		turn_asked(job, u);
	if (u->copy == UNIT_COPY_CASTING || (u->copy == UNIT_COPY_EXECUTING && !op->stream))
		return op_wait(op, &u->cast_done); /* whose end answers it: gather_answer */
	if (full_valid(u))
		return op_gather_give_full(op, false);
	if (turn_is_needed(job, u)) {
		turn_want(job, u);
		return op_wait(op, &u->cast_done);
	}
	return full_may_begin(job) ? op_gather_begin_cast(op) : full_wait_turn(op);
}

static void op_gather_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__GatherResponse reply = SHARDD__V1__GATHER_RESPONSE__INIT;
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	op_place(op, &place, handle);
	reply.place = &place;
	reply.references = op->result.references;
	reply.copied = op->result.copied;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_gather = {
	.name = "Gather",
	.request = &shardd__v1__gather_request__descriptor,
	.decode = op_gather_decode,
	.check = gather_check,
	.tick = gather_start,
	.encode = op_gather_encode,
	.copied = gather_answer,
};
