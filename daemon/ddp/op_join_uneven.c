/* JoinUneven: this rank has no more inputs. Ends when all ranks of the group have said so;
 * until then surrogates take part in its place (op/surrogate.h, op/uneven_nodes.h). */
#include "core/check.h"
#include "op/op_list.h"
#include "job/ddp.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/surrogate.h"
#include "op/uneven.h"
#include "op/uneven_nodes.h"
#include "shardd.pb-c.h"

/* Ranks on other nodes may have begun a collective before they hear of it, as a schedule allows. */
static int op_join_uneven_check_across(const struct op *op, struct fault *f)
{
	if (!join_args(op)->by_active && !join_args(op)->strict)
		return 0;
	return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
			 "%s is not possible: group '%.64s' of job '%s' has ranks on several nodes",
			 join_args(op)->strict ? "error_if_uneven" : "divide_by_active",
			 op->group->rec->name, op->m->job->rec->name);
}

static int op_join_uneven_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__JoinUnevenRequest *r = (const Shardd__V1__JoinUnevenRequest *)msg;

	op->touches = TOUCH_ALL;
	join_args(op)->by_active = r->divide_by_active;
	join_args(op)->strict = r->error_if_uneven;
	if (op_take_group(op, r->group, f))
		return f->code;
	return group_spans(op->group) ? op_join_uneven_check_across(op, f) : 0;
}

static struct op *op_join_uneven_join_at(struct list *at)
{
	return CONTAINER_OF(list_entry(at, struct waiter, link), struct op, waiter);
}

static int op_join_uneven_fault_differs(const struct op *first, const char *field, bool value,
					struct fault *f)
{
	return fault_set(f, FAULT_STATE, NULL,
			 "%s is %s here, but rank %u (pid %d) has joined with %s: all ranks must "
			 "give the same",
			 field, value ? "false" : "true", first->m->rank, member_pid(first->m),
			 value ? "true" : "false");
}

/* The optimizer of a rank that has no more inputs steps nothing, but has a share. */
static int op_join_uneven_check_own(const struct op *op, struct fault *f)
{
	for (unsigned i = 0; i < JOB_MAX_DDPS; i++) {
		const struct ddp *d = op->m->job->ddps[i];

		if (!d || d->group != op->group || d->epoch != op->m->epoch)
			continue;
		for (uint32_t k = 0; k < d->n; k++)
			if (d->tensors[k].unit->rec->optimizer->when == OPTIM_BY_TRAINER)
				return fault_set(f, FAULT_STATE, NULL,
						 "unit '%.100s' is stepped by the trainers "
						 "(BY_TRAINER): all of them have a share of it in "
						 "every step, so none can be without inputs",
						 d->tensors[k].unit->rec->name);
	}
	return 0;
}

static int op_join_uneven_check(struct op *op, struct fault *f)
{
	struct list *joins = &op->group->joins.waiters;
	const struct op *first = list_empty(joins) ? NULL : op_join_uneven_join_at(joins->next);

	if (uneven_told(op) || op_join_uneven_check_own(op, f))
		return f->code;
	if (!first)
		return 0;
	if (join_args(first)->strict != join_args(op)->strict)
		return op_join_uneven_fault_differs(first, "error_if_uneven",
						    join_args(first)->strict, f);
	if (join_args(first)->by_active != join_args(op)->by_active)
		return op_join_uneven_fault_differs(first, "divide_by_active",
						    join_args(first)->by_active, f);
	return 0;
}

static uint32_t op_join_uneven_joined(const struct group *g)
{
	uint32_t n = 0;

	for (const struct list *at = g->joins.waiters.next; at != &g->joins.waiters; at = at->next)
		n++;
	return n;
}

/* Everything before it is over on each of them, so nothing is under way in the group. */
static void op_join_uneven_end_others(struct group *g, uint32_t last)
{
	while (!list_empty(&g->joins.waiters)) {
		struct op *op = op_join_uneven_join_at(g->joins.waiters.next);

		op_begin_run(op);
		join_args(op)->last = last;
		op_end(op);
	}
}

/* Until the last rank comes, only the end of the epoch or its own deadline ends it. */
static enum res op_join_uneven_start(struct op *op)
{
	struct group *g = op->group;
	uint32_t last = op->m->rank;
	bool all;

	if (join_args(op)->is_over) {
		op_begin_run(op);
		return RES_DONE;
	}
	join_args(op)->begun = true;
	(void)op_wait(op, &g->joins);
	join_args(op)->number = g->match.next[op->entry.index];
	all = op_join_uneven_joined(g) == g->here;
	CHECK(op_join_uneven_joined(g) <= g->here);
	if (!all || group_spans(g))
		uneven_begin(op);
	if (!all || (group_spans(g) && !uneven_all_here(g, &last)))
		return RES_WAIT;
	op_begin_run(op);
	join_args(op)->last = last;
	op_join_uneven_end_others(g, last);
	return RES_DONE;
}

static void op_join_uneven_leave(struct op *op)
{
	if (op->group && join_args(op)->begun && op->fault.code)
		uneven_gave_up(op);
}

static void op_join_uneven_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__JoinUnevenResponse reply = SHARDD__V1__JOIN_UNEVEN_RESPONSE__INIT;

	reply.last = join_args(op)->last;
	reply.surrogates = join_args(op)->surrogates;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_join_uneven = {
	.name = "JoinUneven",
	.request = &shardd__v1__join_uneven_request__descriptor,
	.decode = op_join_uneven_decode,
	.check = op_join_uneven_check,
	.tick = op_join_uneven_start,
	.leave = op_join_uneven_leave,
	.encode = op_join_uneven_encode,
};
