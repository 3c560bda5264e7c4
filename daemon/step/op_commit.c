/*
 * Commit: the step a restarted trainer goes on from, on all ranks or on none. Applies
 * the prepared step; then, in one turn of the loop, step and blobs change together (step/commit.h).
 *
 * Where ranks are on other nodes, too, or may come from there, it starts when the store has decided it. From there on it takes
 * effect even if the epoch ends.
 */
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/bufcopy.h"
#include "job/group.h"
#include "job/kept.h"
#include "job/policy.h"
#include "job/position.h"
#include "job/saving.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "step/commit.h"
#include "step/doubt.h"
#include "op/op_list.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

struct commit_args {
	uint64_t step;
	struct position_mark *mark; /* owned; charged when checked */
};

static inline struct commit_args *commit_args(const struct op *op)
{
	_Static_assert(sizeof(struct commit_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

uint64_t op_commit_step(const struct op *op)
{
	return commit_args(op)->step;
}

struct position_mark *op_commit_mark(const struct op *op)
{
	return commit_args(op)->mark;
}

struct position_mark *op_commit_take(struct op *op)
{
	return STEAL_PTR(commit_args(op)->mark);
}

static int op_commit_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__CommitRequest *r = (const Shardd__V1__CommitRequest *)msg;

	op->touches = TOUCH_ALL;
	commit_args(op)->step = r->step;
	op->group = job_group_by_id(op->m->job, 0);
	return position_mark_new(r->step, r->blob.data, r->blob.len, &commit_args(op)->mark, f);
}

static int op_commit_check(struct op *op, struct fault *f)
{
	struct position_mark *m = commit_args(op)->mark;
	struct job *job = op->m->job;

	if (op_check_not_torn(op, f))
		return f->code;
	if (position_check_commit(job, commit_args(op)->step, f))
		return f->code;
	if (quota_charge(&job->quota, MEM_CONTROL, m->bytes))
		return op_memory_fault(job, SLAB_E_QUOTA, m->bytes, "a blob", f);
	m->charged = true;
	op_print(op, "Commit of step %llu", (unsigned long long)commit_args(op)->step);
	op->entry.print.words[2] = commit_args(op)->step;
	return 0;
}

/* The store has decided it: it is not undone here. */
static bool op_commit_is_decided(const struct coll *c)
{
	return group_is_ordered(c->group);
}

static enum res op_commit_check_epoch(struct coll *c)
{
	return op_commit_is_decided(c) ? RES_DONE : coll_check_epoch(c, false);
}

static bool op_commit_epoch_has_ended(const struct coll *c)
{
	return c->members[0]->epoch != c->job->rec->epoch;
}

/* From here on the end of the epoch waits for it. Safe twice. */
static enum res op_commit_begin(struct coll *c)
{
	struct commit *commit;

	if (c->job->step.committing)
		return RES_DONE;
	commit = commit_new(c->job, commit_args(c->ops[0])->step);
	if (!commit)
		return coll_fail(c, -ENOMEM);
	for (uint32_t i = 0; i < c->n; i++)
		commit_add(commit, c->ops[i]->m->rank, op_commit_take(c->ops[i]));
	commit_begin(c->job, commit);
	return RES_DONE;
}

static enum res op_commit_reserve(struct coll *c)
{
	enum res r = commit_reserve(c->job, c->fault);

	return r == RES_WAIT ? coll_wait_for_node(c) : r;
}

/* All ranks have come, and none goes on before its answer: their buffers are of this commit. */
static enum res op_commit_copy_buffers(struct coll *c)
{
	uint64_t step = commit_args(c->ops[0])->step;

	return bufcopy_begin(c->job, step, saving_waits(c->job) || policy_will_be_due(c->job, step),
			     &c->waiter);
}

/* What its ranks' streams write to buffers is there when they come to the commit. */
static enum res op_commit_order_buffers(struct coll *c)
{
	if (!bufcopy_needs_streams(c->job))
		return RES_DONE;
	RES_TRY(coll_need_launches(c, 0));
	return coll_kernels(c);
}

/* Before it stands in line: the epoch may end there. */
static void op_commit_coll_begin(struct coll *c)
{
	if (op_commit_is_decided(c))
		(void)op_commit_begin(c);
}

enum op_commit_stage { COMMIT_BUFFERS, COMMIT_ORDERED, COMMIT_COPIED, COMMIT_APPLY, COMMIT_STORE };

/* It has waited. Return: does the epoch of those whose buffers these are go on? */
static bool op_commit_buffers_count(const struct coll *c)
{
	return !op_commit_is_decided(c) || !op_commit_epoch_has_ended(c);
}

static enum res op_commit_end(struct coll *c)
{
	struct job *job = c->job;
	bool abandoned;
	enum res r = commit_end(job, &abandoned, c->fault);

	if (!abandoned)
		return r;
	if (op_commit_epoch_has_ended(
		    c)) { /* and this commit might have covered what has changed */
		job_tear(job);
		kept_epoch_ended(job);
	}
	return coll_check_epoch(c, false);
}

static enum res op_commit_tick(struct coll *c)
{
	switch ((enum op_commit_stage)c->stage) {
	case COMMIT_BUFFERS:
		RES_TRY(bufcopy_settle(c->job, &c->waiter));
		c->stage = COMMIT_ORDERED;
		if (op_commit_buffers_count(c))
			RES_TRY(op_commit_order_buffers(c));
		fallthrough;
	case COMMIT_ORDERED:
		RES_TRY(op_commit_check_epoch(c));
		c->stage = COMMIT_COPIED;
		if (op_commit_buffers_count(c))
			RES_TRY(op_commit_copy_buffers(c));
		fallthrough;
	case COMMIT_COPIED:
		RES_TRY(op_commit_check_epoch(c)); /* it may have waited */
		c->stage = COMMIT_APPLY;
		fallthrough;
	case COMMIT_APPLY:
		if (job_pass_check_over(c->job, NULL, c->fault))
			return RES_FAILED;
		RES_TRY(op_commit_reserve(c));
		RES_TRY(op_commit_begin(c));
		c->stage = COMMIT_STORE;
		apply_allow_all(c->job);
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case COMMIT_STORE:
		return op_commit_end(c);
	}
	CHECK_NOT_REACHED();
}

/* It has failed before its end. Other nodes may have one that was decided: it is in doubt here. */
static void op_commit_let_go(struct coll *c)
{
	struct job *job = c->job;
	struct commit *commit = job->step.commit;

	if (!commit || !c->fault->code)
		return;
	job->step.committing = false;
	job->step.commit = NULL;
	if (op_commit_is_decided(c) && !job->life.torn && !job->life.deleted)
		doubt_keep(job, c->members[0]->epoch, commit);
	else
		commit_free(job, commit);
}

static void op_commit_forget(struct op *op)
{
	position_mark_free(op->m->job, commit_args(op)->mark);
}

const struct op_type op_commit = {
	.name = "Commit",
	.collective = true,
	.request = &shardd__v1__commit_request__descriptor,
	.decode = op_commit_decode,
	.check = op_commit_check,
	.coll_tick = op_commit_tick,
	.coll_let_go = op_commit_let_go,
	.reply = &shardd__v1__commit_response__descriptor,
	.coll_begin = op_commit_coll_begin,
	.lasts = true,
	.decided = true,
	.forget = op_commit_forget,
	.move = MOVE_NEEDS_IDLE,
	.ends_step = true,
	.waits_for_readers = op_writes_params,
};
