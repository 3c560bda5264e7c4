/*
 * ReturnFull: what SummonFull handed out comes back. With @write each rank's own shard of it
 * becomes the parameters, or the state, nothing else of it counts; a rank that is lost gives its
 * copy back unread.
 */
#include <errno.h>
#include <stdlib.h>

#include "copies/full.h"
#include "core/check.h"
#include "core/fnv.h"
#include "job/job_journal.h"
#include "job/position.h"
#include "op/op.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "unitio/import.h"
#include "work/coll.h"
#include "work/drain.h"
#include "shardd.pb-c.h"
#include "unitio/summon_args.h"

/* A double counts as far. */
#define MAX_STEPS (UINT64_C(1) << 52)

static int op_return_decode_steps(struct op *op, const Shardd__V1__ReturnFullRequest *r,
				  struct fault *f)
{
	summon_args(op)->write = r->write;
	summon_args(op)->has_steps = r->optional_optimizer_steps_case;
	summon_args(op)->steps = r->optional_optimizer_steps_case ? r->optimizer_steps : 0;
	if (r->optional_optimizer_steps_case && !r->write)
		return fault_set(f, FAULT_INVALID, "optimizer_steps",
				 "optimizer_steps is set without write: set write, or leave "
				 "optimizer_steps out");
	if (summon_args(op)->steps > MAX_STEPS)
		return fault_set(f, FAULT_INVALID, "optimizer_steps",
				 "optimizer_steps is %llu; it must be 0 to 2^52",
				 (unsigned long long)r->optimizer_steps);
	return 0;
}

static int op_return_decode_tensor_steps(struct op *op, const Shardd__V1__ReturnFullRequest *r,
					 struct fault *f)
{
	summon_args(op)->tensor_steps = r->tensor_steps;
	summon_args(op)->n_tensor_steps = r->n_tensor_steps;
	if (!r->n_tensor_steps)
		return 0;
	if (!r->optional_optimizer_steps_case)
		return fault_set(f, FAULT_INVALID, "tensor_steps",
				 "tensor_steps is set without optimizer_steps: set both");
	if (r->n_tensor_steps != op->unit->rec->n_tensors)
		return fault_set(f, FAULT_INVALID, "tensor_steps",
				 "tensor_steps has %zu entries; unit '%.100s' has %zu tensors",
				 r->n_tensor_steps, op->unit->rec->name, op->unit->rec->n_tensors);
	for (size_t i = 0; i < r->n_tensor_steps; i++)
		if (r->tensor_steps[i] > r->optimizer_steps)
			return fault_set(f, FAULT_INVALID, "tensor_steps",
					 "tensor_steps[%zu] of unit '%.100s' is %llu; it must be "
					 "at most optimizer_steps, %llu",
					 i, op->unit->rec->name,
					 (unsigned long long)r->tensor_steps[i],
					 (unsigned long long)r->optimizer_steps);
	return 0;
}

static int op_return_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ReturnFullRequest *r = (const Shardd__V1__ReturnFullRequest *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	if (op_return_decode_steps(op, r, f))
		return f->code;
	return op_return_decode_tensor_steps(op, r, f);
}

static uint64_t op_return_hash_of_steps(const struct op *op)
{
	uint64_t hash = FNV_BEGIN;

	for (size_t i = 0; i < summon_args(op)->n_tensor_steps; i++)
		hash = fnv_add(hash, summon_args(op)->tensor_steps[i]);
	return hash;
}

static int op_return_check(struct op *op, struct fault *f)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	if (!mu || !mu->is_summoned)
		return fault_set(f, FAULT_STATE, NULL,
				 "ReturnFull of unit '%.100s': this rank has not summoned it",
				 op->unit->rec->name);
	op_print(op, "ReturnFull of unit '%.64s' (%s)", op->unit->rec->name,
		 summon_args(op)->write ? "written back" : "not written back");
	op->entry.print.words[2] = summon_args(op)->write;
	op->entry.print.words[3] = summon_args(op)->has_steps;
	op->entry.print.words[4] = summon_args(op)->steps;
	op->entry.print.words[5] = op_return_hash_of_steps(op);
	return 0;
}

struct op_return_state {
	struct import_state import; /* first: import_of */
	struct region *copies;      /* owned, by member: what it returns, the collective's from its
				     * beginning on */
};

static struct op_return_state *op_return_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct op_return_state));
}

static struct region *op_return_copy_of(const struct coll *c, uint32_t i)
{
	return op_return_of(c)->copies + i;
}

static bool op_return_is_in_time(const struct coll *c, uint32_t i)
{
	const struct member *m = c->members[i];

	return m->state == MEMBER_JOINED && m->epoch == c->job->rec->epoch;
}

static enum res op_return_take_copies(struct coll *c)
{
	CHECK(!op_return_of(c)->copies && c->unit->summoned_ranks > 0);
	op_return_of(c)->copies = calloc(c->n, sizeof(struct region));
	if (!op_return_of(c)->copies)
		return coll_fail(c, -ENOMEM);
	for (uint32_t i = 0; i < c->n; i++) {
		struct member_unit *mu = member_unit_find(c->members[i], c->unit);

		CHECK(mu->is_summoned && mu->summoned.slab);
		*op_return_copy_of(c, i) = region_steal(&mu->summoned);
	}
	return RES_DONE;
}

/* It has ended without that: they are the trainers' still. */
static void op_return_put_back(struct coll *c)
{
	for (uint32_t i = 0; op_return_of(c)->copies && i < c->n; i++) {
		struct member *m = c->members[i];

		if (op_return_is_in_time(c, i) && op_return_copy_of(c, i)->slab)
			member_unit_find(m, c->unit)->summoned =
				region_steal(op_return_copy_of(c, i));
		pool_give(&m->pool, op_return_copy_of(c, i));
	}
}

static void op_return_returned(struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++) {
		struct member *m = c->members[i];

		pool_give(&m->pool, op_return_copy_of(c, i));
		if (op_return_is_in_time(c, i))
			member_unsummon(m, c->unit, member_unit_find(m, c->unit));
	}
}

/* Of the same number of steps tensors have missed what they had missed before, if nothing is said
 * of them. */
static void op_return_take_steps(struct unit *u, const struct op *op)
{
	uint64_t steps = summon_args(op)->steps;

	if (steps != u->rec->optimizer->steps) {
		unit_forget_steps(u);
		u->rec->optimizer->steps = steps;
	}
	for (size_t i = 0; i < summon_args(op)->n_tensor_steps; i++)
		u->rec->tensors[i]->missed = steps - summon_args(op)->tensor_steps[i];
}

/* Parameters, or state, that no committed step knows: a restart would find them, so it has to
 * know. */
static enum res op_return_written(struct coll *c)
{
	const struct op *op = c->ops[0];

	CHECK(!c->unit->rec->initialised && !c->unit->gathered_ranks);
	c->unit->version++;
	full_invalidate(c->job, c->unit);
	position_altered(c->job);
	if (op->m->epoch != c->job->rec->epoch)
		job_tear(c->job);
	if (coll_promised(c)) /* what was read may be anything: the unit stays uninitialised */
		RES_TRY(coll_check_epoch(c, false));
	c->unit->rec->initialised = true;
	job_journal_mark_unit(c->job, c->unit);
	if (summon_args(op)->has_steps)
		op_return_take_steps(c->unit, op);
	return RES_DONE;
}

static const void *op_return_source(const struct coll *c, uint32_t i)
{
	return region_addr(op_return_copy_of(c, i));
}

static void op_return_begin_write(struct coll *c)
{
	c->unit->rec->initialised = false; /* until it is whole: a device may fail half-way */
	job_journal_mark_unit(c->job, c->unit);
	job_journal_write(c->job);
	readers_rewrite(c->job);
	coll_writes_unit(c);
	import_write(c, op_return_source, false, c->unit->summoned_state);
}

static void op_return_free(struct coll *c)
{
	free(op_return_of(c)->copies);
}

enum op_return_stage {
	RETURN_BEGIN,
	RETURN_DRAIN, /* with write */
	RETURN_READY,
	RETURN_WRITE,
	RETURN_DONE
};

static enum res op_return_tick(struct coll *c)
{
	switch ((enum op_return_stage)c->stage) {
	case RETURN_BEGIN:
		if (!summon_args(c->ops[0])->write) {
			RES_TRY(op_return_take_copies(c));
			RES_TRY(coll_need_launches(c, 0));
			c->stage = RETURN_DONE;
			return coll_kernels(c); /* none: for the streams that may still use them */
		}
		c->stage = RETURN_DRAIN;
		fallthrough;
	case RETURN_DRAIN:
		RES_TRY(coll_check_epoch(c, false));
		RES_TRY(drain_may_write(c, JOB_CHANGE_WHOLE));
		c->stage = RETURN_READY;
		RES_TRY(drain_coll(c));
		fallthrough;
	case RETURN_READY:
		RES_TRY(coll_check_epoch(c, false));
		RES_TRY(import_ready(c));
		RES_TRY(op_return_take_copies(c));
		op_return_begin_write(c);
		c->stage = RETURN_WRITE;
		fallthrough;
	case RETURN_WRITE:
		RES_TRY(import_write_tick(c));
		RES_TRY(op_return_written(c));
		fallthrough;
	case RETURN_DONE:
		op_return_returned(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_return = {
	.name = "ReturnFull",
	.collective = true,
	.request = &shardd__v1__return_full_request__descriptor,
	.decode = op_return_decode,
	.check = op_return_check,
	.coll_tick = op_return_tick,
	.coll_bytes = sizeof(struct op_return_state),
	.coll_let_go = op_return_put_back,
	.coll_free = op_return_free,
	.reply = &shardd__v1__return_full_response__descriptor,
	.lasts = true,
	.move = MOVE_RETURN,
	.waits_for_readers = op_writes_params,
};
