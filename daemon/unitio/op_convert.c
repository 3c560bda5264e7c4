/*
 * ConvertUnits: other layouts for units that are there, and frozen tensors that become trained.
 * Parameters, gradients and optimizer
 * state are repacked into new memory, array after array, tensor by tensor; the old memory goes
 * when all of it is done. Until then nothing has changed, so that whatever fails leaves the
 * units as they were.
 */
#include <errno.h>
#include <stdlib.h>

#include "copies/hold.h"
#include "core/check.h"
#include "core/fnv.h"
#include "job/kept.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "unitio/convert.h"
#include "op/op_list.h"
#include "unitio/registered.h"
#include "work/coll.h"
#include "work/drain.h"
#include "shardd.pb-c.h"

typedef Shardd__V1__ConvertUnitsRequest request;

/* ------------------------------------------------------------- what is asked for */

static int op_convert_decode_choices(struct op *op, const request *r, struct fault *f)
{
	convert_args(op)->layout = r->layout ? (uint32_t)r->layout : LAYOUT_FLAT;
	convert_args(op)->multiple = r->shard_multiple ? r->shard_multiple : 1;
	convert_args(op)->strategy = (uint32_t)r->strategy;
	convert_args(op)->shard_ranks = r->shard_ranks;
	if ((unsigned)r->layout >= _LAYOUT_N)
		return fault_set(f, FAULT_INVALID, "layout",
				 "layout is %d; it must be FLAT or DIM0", r->layout);
	if ((unsigned)r->strategy >= _STRATEGY_N)
		return fault_set(f, FAULT_INVALID, "strategy",
				 "strategy is %d; it must be SHARD, REPLICATE or HYBRID",
				 r->strategy);
	if (r->shard_multiple > (1u << 20) ||
	    (convert_args(op)->layout == LAYOUT_DIM0 && r->shard_multiple > 1))
		return fault_set(f, FAULT_INVALID, "shard_multiple",
				 "shard_multiple is %u; it must be 0 to %u, with DIM0 0 or 1",
				 r->shard_multiple, 1u << 20);
	return 0;
}

static int op_convert_decode_tensor(const state_unit *rec, const uint32_t *unfreeze, size_t i,
				    struct fault *f)
{
	uint32_t tensor = unfreeze[i];

	if (tensor >= rec->n_tensors)
		return fault_set(f, FAULT_INVALID, "unfreeze",
				 "tensor %u of unit '%.100s' is out of range (0..%zu)", tensor,
				 rec->name, rec->n_tensors - 1);
	if (i && tensor <= unfreeze[i - 1])
		return fault_set(f, FAULT_INVALID, "unfreeze",
				 "unfreeze has %u after %u; its numbers must ascend", tensor,
				 unfreeze[i - 1]);
	if (unit_is_alias(rec->tensors[tensor]))
		return fault_set(f, FAULT_INVALID, "unfreeze",
				 "tensor '%.100s' of unit '%.100s' is an alias; name the tensor "
				 "that it stands for",
				 rec->tensors[tensor]->name, rec->name);
	return 0;
}

static bool op_convert_has_optimizer(const state_unit *rec)
{
	return rec->optimizer->kind != OPTIM_NONE || rec->optimizer->when == OPTIM_BY_TRAINER;
}

static int op_convert_check_like(const struct op *op, const state_unit *rec, struct fault *f)
{
	const struct unit *like = convert_args(op)->like;

	if (guard_check_there(op, like, f))
		return f->code;
	if (op_convert_has_optimizer(rec))
		return fault_set(f, FAULT_INVALID, "optimizer_like",
				 "unit '%.100s' has an optimizer already; optimizer_like must be 0",
				 rec->name);
	if (!op_convert_has_optimizer(like->rec))
		return fault_set(f, FAULT_INVALID, "optimizer_like",
				 "unit '%.100s' has no optimizer; name a unit that has one",
				 like->rec->name);
	if (like->rec->optimizer->kind != OPTIM_NONE && rec->storage_dtype != DTYPE_FP32)
		return fault_set(f, FAULT_INVALID, "optimizer_like",
				 "unit '%.100s' is stored in %s, and the optimizer of unit "
				 "'%.100s' runs in the daemon, which steps FP32",
				 rec->name, dtype_name((enum dtype)rec->storage_dtype),
				 like->rec->name);
	return 0;
}

/* When it is the op's turn: one before it may have unfrozen the same. */
static int op_convert_check_unfreeze(const struct op *op, struct fault *f)
{
	const struct convert_args *a = convert_args(op);
	const struct unit *u = job_unit_by_id(op->m->job, a->units[0]);

	for (size_t i = 0; i < a->n_unfreeze; i++) {
		const state_tensor *t = u->rec->tensors[a->unfreeze[i]];

		if (!t->frozen)
			return fault_set(f, FAULT_INVALID, "unfreeze",
					 "tensor '%.100s' of unit '%.100s' is trained already",
					 t->name, u->rec->name);
	}
	return a->like ? op_convert_check_like(op, u->rec, f) : 0;
}

static int op_convert_decode_like(struct op *op, uint32_t id, struct fault *f)
{
	struct unit *like = job_unit_by_number(op->m->job, id);

	if (like)
		like->ops++;
	convert_args(op)->like = like;
	if (like || !id)
		return 0;
	return fault_set(f, FAULT_NOT_FOUND, "optimizer_like",
			 "there is no unit %u in job '%s': its units are 1 to %u", id,
			 op->m->job->rec->name, op->m->job->n_units);
}

static int op_convert_decode_unfreeze(struct op *op, const request *r, struct fault *f)
{
	convert_args(op)->unfreeze = r->unfreeze;
	convert_args(op)->n_unfreeze = r->n_unfreeze;
	if (r->optimizer_like && !r->n_unfreeze)
		return fault_set(f, FAULT_INVALID, "optimizer_like",
				 "optimizer_like is %u, and unfreeze is empty; it must be 0",
				 r->optimizer_like);
	if (r->n_unfreeze && r->n_units != 1)
		return fault_set(f, FAULT_INVALID, "unfreeze",
				 "unfreeze names tensors of one unit, and units has %zu; convert "
				 "them one by one",
				 r->n_units);
	for (size_t i = 0; i < r->n_unfreeze; i++)
		if (op_convert_decode_tensor(job_unit_by_number(op->m->job, r->units[0])->rec,
					     r->unfreeze, i, f))
			return f->code;
	return op_convert_decode_like(op, r->optimizer_like, f);
}

static int op_convert_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const request *r = (const request *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	if (op_take_units(op, r->units, r->n_units, f))
		return f->code;
	convert_args(op)->units = r->units;
	convert_args(op)->n = r->n_units;
	if (op_convert_decode_unfreeze(op, r, f))
		return f->code;
	return op_convert_decode_choices(op, r, f);
}

static int op_convert_check(struct op *op, struct fault *f)
{
	const struct convert_args *a = convert_args(op);
	uint64_t hash = FNV_BEGIN;

	if (op_check_not_torn(op, f) || op_check_all_there(op, a->units, a->n, f) ||
	    op_convert_check_unfreeze(op, f))
		return f->code;
	for (size_t i = 0; i < a->n; i++) {
		const struct unit *u = job_unit_by_id(op->m->job, a->units[i]);
		state_unit rec;

		if (convert_record(op, u, &rec, f))
			return f->code;
		convert_record_free(u, &rec);
		hash = fnv_add(hash, op_unit_word(op, u));
	}
	for (size_t i = 0; i < a->n_unfreeze; i++)
		hash = fnv_add(hash, a->unfreeze[i]);
	hash = fnv_add(hash, a->like ? op_unit_word(op, a->like) : 0);
	op_print(op,
		 "ConvertUnits of %zu units to layout %u, multiple %u, strategy %u of %u, "
		 "unfreezing %zu tensors",
		 a->n, a->layout, a->multiple, a->strategy, a->shard_ranks, a->n_unfreeze);
	op->entry.print.words[2] = hash;
	op->entry.print.words[3] = convert_args(op)->layout;
	op->entry.print.words[4] = convert_args(op)->multiple;
	op->entry.print.words[5] = convert_args(op)->strategy;
	op->entry.print.words[6] = convert_args(op)->shard_ranks;
	return 0;
}

/* Is there anything that is laid out by the old layout and is not repacked? */
static int op_convert_check_passing(const struct unit *u, struct fault *f)
{
	if (u->step == UNIT_STEP_ARRIVED)
		return fault_set(f, FAULT_STATE, NULL,
				 "the gradient of unit '%.100s' belongs to the plan of this "
				 "backward pass: call Step before ConvertUnits",
				 u->rec->name);
	if (u->has_partials)
		return fault_set(f, FAULT_STATE, NULL,
				 "the all-reduce of unit '%.100s' is deferred: reduce it before "
				 "ConvertUnits",
				 u->rec->name);
	return 0;
}

static const char *op_convert_held_by(const struct member_unit *mu)
{
	if (!mu)
		return NULL;
	return mu->gradient.slab      ? "given a gradient buffer"
	       : mu->accumulated.slab ? "accumulated"
				      : NULL;
}

/* Does anybody have anything of it in his hands? */
static int op_convert_check_idle(const struct coll *c, const struct unit *u, struct fault *f)
{
	const char *what = u->summoned_ranks ? "summoned" : u->gathered_ranks ? "gathered" : NULL;

	if (unit_pools_gradient(u->rec) && (u->has_gradient || u->shards_left))
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' has a gradient that its optimizer has not used "
				 "yet: call Step before ConvertUnits",
				 u->rec->name);
	if (op_convert_check_passing(u, f))
		return f->code;
	if (ddp_unit_is_busy(c->job, u))
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is in buckets of a pass that has not ended: call "
				 "DdpFinish before ConvertUnits",
				 u->rec->name);
	if (convert_args(c->ops[0])->n_unfreeze && ddp_has_unit(c->job, u))
		return fault_set(
			f, FAULT_STATE, NULL,
			"unit '%.100s' is in the buckets of a ddp, which were made without "
			"its frozen tensors: unfreeze before DdpCreate",
			u->rec->name);
	for (uint32_t i = 0; !what && i < c->n; i++)
		what = op_convert_held_by(member_unit_find(c->members[i], u));
	if (!what)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "unit '%.100s' is %s: release, return or reduce it before "
			 "ConvertUnits",
			 u->rec->name, what);
}

/* ------------------------------------------------------------------ the op */

static bool op_convert_is_waiting_for_copies(const struct coll *c)
{
	for (unsigned i = 0; i < convert_of(c)->n; i++)
		if (unit_is_copying(convert_of(c)->units[i].old))
			return true;
	return false;
}

/* A copy of the old layout is of no use to the new one. */
static int op_convert_check_kept(const struct coll *c, struct fault *f)
{
	const struct job *job = c->job;

	if (!job->rec->kept || convert_of(c)->clean)
		return 0;
	if (kept_at_commits(job))
		return fault_set(
			f, FAULT_STATE, NULL,
			"job '%s' resumes at step %llu, its last commit, of which it keeps "
			"a copy: commit what has changed since then before ConvertUnits",
			job->rec->name, (unsigned long long)job->rec->step);
	if (!job->rec->partial) /* with units of groups: what was committed then does not come back */
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "units of job '%s' have made a step before others, and it keeps a copy of "
			 "them from before: call Step before ConvertUnits",
			 job->rec->name);
}

static int op_convert_check_all(const struct coll *c, struct fault *f)
{
	if (op_convert_check_kept(c, f))
		return f->code;
	convert_of(c)->clean = true; /* the copy that is made from here on is ours */
	for (size_t i = 0; i < convert_args(c->ops[0])->n; i++) {
		struct unit *u = job_unit_by_id(c->job, convert_args(c->ops[0])->units[i]);

		hold_drop(c->job, u);
		if (op_convert_check_idle(c, u, f))
			return f->code;
	}
	return 0;
}

/* Of the largest array that is brought together. */
static uint64_t op_convert_scratch_bytes(const struct coll *c)
{
	uint64_t most = 0;

	for (unsigned i = 0; i < convert_of(c)->n; i++) {
		const struct unit *u = convert_of(c)->units[i].old;
		uint64_t bytes = (unit_part_elements(u) + unit_frozen_elements(u)) * u->spread *
				 sizeof(float); /* a type of parameters is no larger */

		if (u->spread > 1 && bytes > most)
			most = bytes;
	}
	return most;
}

static enum res op_convert_need_memory(struct coll *c)
{
	int r = convert_of(c)->units ? 0 : convert_new(c);

	CHECK(r || convert_of(c)->n == convert_args(c->ops[0])->n);
	if (r == 0)
		r = relayout_take(c->job, &convert_of(c)->mem);
	if (r == SLAB_E_LATER || (r == 0 && op_convert_is_waiting_for_copies(c)))
		return coll_wait_for_node(c);
	if (r == 0)
		return RES_DONE;
	op_memory_fault(c->job, r, relayout_bytes(&convert_of(c)->mem), "converted units",
			c->fault);
	return RES_FAILED;
}

static enum res op_convert_ready(struct coll *c)
{
	uint64_t bytes = op_convert_scratch_bytes(c);

	if (!bytes)
		return RES_DONE;
	for (unsigned i = 0; i < convert_of(c)->n; i++)
		RES_TRY(coll_ready_for(c, convert_of(c)->units[i].old));
	return coll_need_scratch(c, 0, bytes);
}

enum op_convert_stage { OP_CONVERT_APPLY, OP_CONVERT_BEGIN, OP_CONVERT_PLACE, OP_CONVERT_ARRAYS };

static enum res op_convert_tick(struct coll *c)
{
	switch ((enum op_convert_stage)c->stage) {
	case OP_CONVERT_APPLY:
		c->stage = OP_CONVERT_BEGIN;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case OP_CONVERT_BEGIN:
		RES_TRY(coll_check_epoch(c, true));
		RES_TRY(agree_tick(c, &convert_of(c)->agree, op_convert_check_all));
		RES_TRY(drain_may_write(c, JOB_CHANGE_WHOLE));
		RES_TRY(op_convert_need_memory(c));
		RES_TRY(op_convert_ready(c));
		c->stage = OP_CONVERT_PLACE;
		RES_TRY(drain_coll(c));
		fallthrough;
	case OP_CONVERT_PLACE:
		RES_TRY(coll_check_epoch(c, true));
		if (op_convert_is_waiting_for_copies(c)) { /* of one begun meanwhile */
			c->stage = OP_CONVERT_BEGIN;
			return coll_wait_for_node(c);
		}
		if (convert_place(convert_of(c)) < 0)
			return coll_fail(c, -ENOMEM);
		RES_TRY(coll_need_launches(c, 0));
		c->stage = OP_CONVERT_ARRAYS;
		return coll_kernels(c);
	case OP_CONVERT_ARRAYS:
		return convert_tick(c);
	}
	CHECK_NOT_REACHED();
}

static bool op_convert_is_converted(const struct op *op, uint32_t id)
{
	size_t lo = 0, hi = convert_args(op)->n; /* they ascend */

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (convert_args(op)->units[mid] == id)
			return true;
		if (convert_args(op)->units[mid] < id)
			lo = mid + 1;
		else
			hi = mid;
	}
	return false;
}

/* Has @u names of tensors that were moved, and was not itself? */
static bool op_convert_is_tied(const struct op *op, const struct unit *u)
{
	for (uint32_t i = 0; !op_convert_is_converted(op, u->id) && i < u->rec->n_tensors; i++)
		if (u->tensors[i].alias && op_convert_is_converted(op, u->tensors[i].of_unit))
			return true;
	return false;
}

static int op_convert_tell(const struct op *op, const struct unit *u, struct registered *all,
			   Shardd__V1__RegisteredUnit **units, size_t *n)
{
	units[*n] = &all[*n].unit;
	return registered_init(&all[(*n)++], op->m->job, u, op->m->rank);
}

static void op_convert_forget(struct op *op)
{
	if (convert_args(op)->like)
		convert_args(op)->like->ops--;
}

/* Without memory the reply has no units: what was done is done. */
static void op_convert_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ConvertUnitsResponse reply = SHARDD__V1__CONVERT_UNITS_RESPONSE__INIT;
	const struct job *job = op->m->job;
	struct registered *all = calloc(job->n_units, sizeof(*all));
	Shardd__V1__RegisteredUnit **units = calloc(job->n_units, sizeof(*units));
	int r = all && units ? 0 : -ENOMEM;
	size_t n = 0;

	for (size_t i = 0; r == 0 && i < convert_args(op)->n; i++)
		r = op_convert_tell(op, job->units[convert_args(op)->units[i] - 1], all, units, &n);
	for (uint32_t i = 0; r == 0 && i < job->n_units; i++)
		if (op_convert_is_tied(op, job->units[i]))
			r = op_convert_tell(op, job->units[i], all, units, &n);
	reply.units = units;
	reply.n_units = r == 0 ? n : 0;
	op_send(op, &reply.base, &reply.info, send, ctx);
	for (size_t i = 0; all && i < n; i++)
		registered_deinit(&all[i]);
	free(all);
	free(units);
}

const struct op_type op_convert = {
	.name = "ConvertUnits",
	.collective = true,
	.request = &shardd__v1__convert_units_request__descriptor,
	.decode = op_convert_decode,
	.check = op_convert_check,
	.coll_tick = op_convert_tick,
	.of_units = true,
	.coll_bytes = sizeof(struct convert),
	.coll_let_go = convert_let_go,
	.encode = op_convert_encode,
	.forget = op_convert_forget,
	.lasts = true,
	.move = MOVE_NEEDS_IDLE,
	.waits_for_readers = op_writes_params,
};
