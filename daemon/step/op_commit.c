/*
 * Commit: the step a restarted trainer goes on from, on all ranks or on none. Applies
 * the prepared step; then, in one turn of the loop, step and blobs change together.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/bufcopy.h"
#include "job/elastic.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/policy.h"
#include "job/position.h"
#include "job/saving.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "step/backward.h"
#include "op/op_list.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

struct commit_args {
	uint64_t step;
	uint8_t *blob; /* owned; charged when checked */
	size_t bytes;
	bool charged;
};

static inline struct commit_args *commit_args(const struct op *op)
{
	_Static_assert(sizeof(struct commit_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

static int op_commit_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__CommitRequest *r = (const Shardd__V1__CommitRequest *)msg;

	op->touches = TOUCH_ALL;
	commit_args(op)->step = r->step;
	commit_args(op)->bytes = r->blob.len;
	op->group = job_group_by_id(op->m->job, 0);
	if (r->blob.len > JOB_MAX_BLOB)
		return fault_set(f, FAULT_INVALID, "blob", "blob has %zu bytes; the maximum is %u",
				 r->blob.len, JOB_MAX_BLOB);
	commit_args(op)->blob = malloc(r->blob.len ? r->blob.len : 1);
	if (!commit_args(op)->blob)
		return fault_errno(f, -ENOMEM, "keeping a blob");
	if (r->blob.len)
		memcpy(commit_args(op)->blob, r->blob.data, r->blob.len);
	return 0;
}

static int op_commit_check(struct op *op, struct fault *f)
{
	struct job *job = op->m->job;

	if (op_check_not_torn(op, f))
		return f->code;
	if (position_check_commit(job, commit_args(op)->step, f))
		return f->code;
	if (quota_charge(&job->quota, MEM_CONTROL, commit_args(op)->bytes))
		return op_memory_fault(job, SLAB_E_QUOTA, commit_args(op)->bytes, "a blob", f);
	commit_args(op)->charged = true;
	op_print(op, "Commit of step %llu", (unsigned long long)commit_args(op)->step);
	op->entry.print.words[2] = commit_args(op)->step;
	return 0;
}

/* Every rank has an entry from here on, so that what follows cannot fail half-way. */
static int op_commit_reserve_blobs(struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++)
		if (!state_job_blob(c->job->rec, c->ops[i]->m->rank) &&
		    state_job_set_blob(c->job->rec, c->ops[i]->m->rank, NULL, 0, 0) < 0)
			return -ENOMEM;
	return 0;
}

/* The old blob's charge goes back, the new one's passes to the record. A blob that the Step of this
 * number has given stays if the commit gives none. */
static void op_commit_store_blob(struct op *op)
{
	struct job *job = op->m->job;
	const state_blob *old = state_job_blob(job->rec, op->m->rank);

	if (!commit_args(op)->bytes && old->data.len && old->step == commit_args(op)->step)
		return;
	quota_return(&job->quota, MEM_CONTROL, old->data.len);
	CHECK(state_job_set_blob(job->rec, op->m->rank, STEAL_PTR(commit_args(op)->blob),
				 commit_args(op)->bytes, commit_args(op)->step) == 0);
	commit_args(op)->charged = false;
}

/* Units that were stepped in backward may be reduced again. */
static void op_commit_end_pass(struct job *job)
{
	job->step.mid = false;
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->step == UNIT_STEP_STEPPED)
			unit_pass_end(job->units[i]);
}

/* The epoch has ended, and this commit might have covered what has changed. */
static void op_commit_lost(struct job *job)
{
	job_tear(job);
	kept_epoch_ended(job);
}

/* Did the step come to be applied? */
static enum res op_commit_check_step(struct coll *c)
{
	struct job *job = c->job;

	if (job->step.abandoned) {
		job->step.abandoned = false;
		if (c->ops[0]->m->epoch != job->rec->epoch)
			op_commit_lost(job);
		RES_TRY(coll_check_epoch(c, false));
	}
	if (job->life.torn) { /* the device failed the step */
		op_device_fault(job, "the step could not be applied", c->fault);
		fault_set(c->fault, FAULT_INTERNAL, NULL,
			  "the step could not be applied: job '%s' is TORN", job->rec->name);
	} else {
		(void)backward_check_over(job, NULL, c->fault);
	}
	return c->fault->code ? RES_FAILED : RES_DONE;
}

/* Step and blobs, once: with the record of the step that it commits if it waits for that, so that a
 * successor finds both or none. */
static void op_commit_record(struct coll *c)
{
	state_job *rec = c->job->rec;
	struct fault none = FAULT_NULL;

	if (c->job->step.recorded || c->job->step.stepping ||
	    backward_check_over(c->job, NULL, &none) != 0)
		return;
	c->job->step.recorded = true;
	for (uint32_t i = 0; i < c->n; i++)
		op_commit_store_blob(c->ops[i]);
	rec->has_commit = true;
	rec->step = commit_args(c->ops[0])->step;
	rec->committed_unix_s = (uint64_t)time(NULL);
	rec->uncommitted_steps = 0;
	position_committed(c->job, rec->step);
	kept_committed(c->job);
	job_journal_mark(c->job, JOB_JOURNAL_PROGRESS | JOB_JOURNAL_BLOBS);
}

static void op_commit_store(struct coll *c)
{
	CHECK(c->job->step.state == JOB_STEP_NONE && !c->job->step.stepping);
	op_commit_record(c);
	CHECK(c->job->step.recorded);
	op_commit_end_pass(c->job);
	bufcopy_committed(c->job);
	policy_committed(c->job);
	elastic_committed(c->job);
	readers_committed(c->job); /* before what its ranks have submitted already */
}

/* A job that resumes at its commits needs room for the copy before it has one to lose. */
static enum res op_commit_reserve_copy(struct coll *c)
{
	int r = kept_at_commits(c->job) ? kept_reserve(c->job) : 0;

	if (r == SLAB_E_LATER)
		return coll_wait_for_node(c);
	if (r == 0)
		return RES_DONE;
	op_memory_fault(c->job, r, kept_bytes(c->job),
			"the copy of the committed state (resume COMMITTED)", c->fault);
	return RES_FAILED;
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

enum op_commit_stage { COMMIT_BUFFERS, COMMIT_ORDERED, COMMIT_COPIED, COMMIT_APPLY, COMMIT_STORE };

static enum res op_commit_tick(struct coll *c)
{
	switch ((enum op_commit_stage)c->stage) {
	case COMMIT_BUFFERS:
		RES_TRY(bufcopy_settle(c->job, &c->waiter));
		c->stage = COMMIT_ORDERED;
		RES_TRY(op_commit_order_buffers(c));
		fallthrough;
	case COMMIT_ORDERED:
		RES_TRY(coll_check_epoch(c, false));
		c->stage = COMMIT_COPIED;
		RES_TRY(op_commit_copy_buffers(c));
		fallthrough;
	case COMMIT_COPIED:
		RES_TRY(coll_check_epoch(c, false)); /* it may have waited */
		c->stage = COMMIT_APPLY;
		fallthrough;
	case COMMIT_APPLY:
		if (backward_check_over(c->job, NULL, c->fault))
			return RES_FAILED;
		if (op_commit_reserve_blobs(c) < 0)
			return coll_fail(c, -ENOMEM);
		RES_TRY(op_commit_reserve_copy(c));
		CHECK(!c->job->step.committing);
		c->job->step.committing = true;
		c->job->step.recorded = false;
		c->job->step.commit = c;
		c->job->step.commit_record = op_commit_record;
		c->stage = COMMIT_STORE;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case COMMIT_STORE:
		c->job->step.committing = false;
		c->job->step.commit = NULL;
		RES_TRY(op_commit_check_step(c));
		op_commit_store(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void op_commit_forget(struct op *op)
{
	if (commit_args(op)->charged)
		quota_return(&op->m->job->quota, MEM_CONTROL, commit_args(op)->bytes);
	free(commit_args(op)->blob);
}

const struct op_type op_commit = {
	.name = "Commit",
	.collective = true,
	.request = &shardd__v1__commit_request__descriptor,
	.decode = op_commit_decode,
	.check = op_commit_check,
	.coll_tick = op_commit_tick,
	.reply = &shardd__v1__commit_response__descriptor,
	.lasts = true,
	.forget = op_commit_forget,
	.move = MOVE_NEEDS_IDLE,
	.ends_step = true,
	.waits_for_readers = op_writes_params,
};
