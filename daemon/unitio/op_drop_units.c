/*
 * DropUnits: units that no rank needs any more. Their memory goes when nothing reads or writes it; the
 * slabs of a registration go with the last unit in them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "copies/full.h"
#include "copies/hold.h"
#include "core/check.h"
#include "core/fnv.h"
#include "job/ddp.h"
#include "op/op.h"
#include "op/op_list.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "work/agree.h"
#include "work/coll.h"
#include "work/drain.h"
#include "shardd.pb-c.h"

struct drop_units_args {
	const uint32_t *units; /* the request's; valid until done */
	size_t n;
	size_t n_slabs; /* in the op's owned: those that are gone */
};

static inline struct drop_units_args *drop_units_args(const struct op *op)
{
	_Static_assert(sizeof(struct drop_units_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

static struct agree *op_drop_units_agree_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct agree));
}

static void op_drop_units_free(struct coll *c)
{
	agree_end(op_drop_units_agree_of(c));
}

static int op_drop_units_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__DropUnitsRequest *r = (const Shardd__V1__DropUnitsRequest *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS | TOUCH_BUFFERS;
	drop_units_args(op)->units = r->units;
	drop_units_args(op)->n = r->n_units;
	return op_take_units(op, r->units, r->n_units, f);
}

static int op_drop_units_check(struct op *op, struct fault *f)
{
	uint64_t hash = FNV_BEGIN;

	if (op_check_all_there(op, drop_units_args(op)->units, drop_units_args(op)->n, f))
		return f->code;
	for (size_t i = 0; i < drop_units_args(op)->n; i++)
		hash = fnv_add(hash,
			       op_unit_word(op, job_unit_by_id(op->m->job,
							       drop_units_args(op)->units[i])));
	op_print(op, "DropUnits of %zu units", drop_units_args(op)->n);
	op->entry.print.words[2] = hash;
	return 0;
}

static struct unit *op_drop_units_at(const struct coll *c, size_t i)
{
	return job_unit_by_id(c->job, drop_units_args(c->ops[0])->units[i]);
}

static const char *op_drop_units_held_by(const struct member_unit *mu)
{
	if (!mu)
		return NULL;
	return mu->gradient.slab                ? "given a gradient buffer"
	       : mu->accumulated.slab           ? "accumulated"
	       : mu->shard.slab                 ? "given a shard"
	       : mu->shard_state == SHARD_GOING ? "being given as a shard"
	       : mu->pass != PASS_IDLE          ? "in a pass"
						: NULL;
}

/* Does anybody have anything of it, or need it? */
static int op_drop_units_check_unit(const struct coll *c, const struct unit *u, struct fault *f)
{
	const char *what = u->summoned_ranks ? "summoned" : u->gathered_ranks ? "gathered" : NULL;

	for (uint32_t i = 0; !what && i < c->n; i++)
		what = op_drop_units_held_by(member_unit_find(c->members[i], u));
	if (what)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is %s: release, return or reduce it before "
				 "DropUnits",
				 u->rec->name, what);
	if (ddp_has_unit(c->job, u))
		return fault_set(
			f, FAULT_STATE, NULL,
			"unit '%.100s' is in the buckets of a ddp: it is freed with the job",
			u->rec->name);
	return 0;
}

static int op_drop_units_check_tied(const struct coll *c, struct fault *f)
{
	const struct drop_units_args *a = drop_units_args(c->ops[0]);
	uint32_t of = 0;
	const struct unit *tied = job_unit_tied_to(c->job, a->units, a->n, &of);

	if (!tied)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "unit '%.100s' has an alias of a tensor of unit '%.100s': drop both "
			 "together",
			 tied->rec->name, job_unit_by_id(c->job, of)->rec->name);
}

static int op_drop_units_check_all(const struct coll *c, struct fault *f)
{
	for (size_t i = 0; i < drop_units_args(c->ops[0])->n; i++) {
		hold_drop(c->job, op_drop_units_at(c, i));
		if (op_drop_units_check_unit(c, op_drop_units_at(c, i), f))
			return f->code;
	}
	return op_drop_units_check_tied(c, f);
}

/* Is one of them read by the daemon, or being stepped? */
static bool op_drop_units_is_busy(const struct coll *c)
{
	for (size_t i = 0; i < drop_units_args(c->ops[0])->n; i++) {
		const struct unit *u = op_drop_units_at(c, i);

		if (unit_is_copying(u) || u->copy_reads || u->shard_writes ||
		    u->step == UNIT_STEP_STEPPING)
			return true;
	}
	return false;
}

/* For the slabs of each reply. */
static int op_drop_units_make_room(const struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++) {
		struct op *op = c->ops[i];

		free(op->owned);
		op->owned = calloc(c->job->mem.n_slabs + 1, sizeof(uint32_t));
		if (!op->owned)
			return -ENOMEM;
	}
	return 0;
}

static enum res op_drop_units_drop(struct coll *c)
{
	const struct drop_units_args *a = drop_units_args(c->ops[0]);
	struct slab_list gone = { 0 };

	if (op_drop_units_make_room(c) < 0)
		return coll_fail(c, -ENOMEM);
	for (size_t i = 0; i < a->n; i++) {
		full_invalidate(c->job, op_drop_units_at(c, i));
		if (unit_has_copy(
			    op_drop_units_at(c, i))) /* no memory to note who still reads it */
			return coll_fail(c, -ENOMEM);
	}
	for (size_t i = 0; i < a->n; i++)
		job_drop_unit(c->job, op_drop_units_at(c, i));
	gone.ids = c->ops[0]->owned;
	job_units_dropped(c->job, &gone);
	for (uint32_t i = 1; i < c->n; i++)
		memcpy(c->ops[i]->owned, gone.ids, gone.n * sizeof(*gone.ids));
	for (uint32_t i = 0; i < c->n; i++) {
		drop_units_args(c->ops[i])->n_slabs = gone.n;
	}
	(void)job_evict(c->job, UINT64_MAX);
	return RES_DONE;
}

enum op_drop_units_stage { DROP_UNITS_APPLY, DROP_UNITS_BEGIN, DROP_UNITS_DROP };

static enum res op_drop_units_tick(struct coll *c)
{
	switch ((enum op_drop_units_stage)c->stage) {
	case DROP_UNITS_APPLY:
		c->stage = DROP_UNITS_BEGIN;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case DROP_UNITS_BEGIN:
		RES_TRY(coll_check_epoch(c, true));
		RES_TRY(agree_tick(c, op_drop_units_agree_of(c), op_drop_units_check_all));
		RES_TRY(drain_may_write(c, JOB_CHANGE_WHOLE));
		if (op_drop_units_is_busy(c))
			return coll_wait_for_node(c);
		c->stage = DROP_UNITS_DROP;
		RES_TRY(drain_coll(c));
		fallthrough;
	case DROP_UNITS_DROP:
		RES_TRY(coll_check_epoch(c, true));
		if (op_drop_units_is_busy(c)) { /* with a copy begun meanwhile */
			c->stage = DROP_UNITS_BEGIN;
			return coll_wait_for_node(c);
		}
		if (op_drop_units_check_all(c, c->fault)) /* an alias was registered meanwhile */
			return RES_FAILED;
		RES_TRY(drain_may_free(c));
		return op_drop_units_drop(c);
	}
	CHECK_NOT_REACHED();
}

static void op_drop_units_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__DropUnitsResponse reply = SHARDD__V1__DROP_UNITS_RESPONSE__INIT;

	reply.slabs = op->owned;
	reply.n_slabs = drop_units_args(op)->n_slabs;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_drop_units = {
	.name = "DropUnits",
	.coll_bytes = sizeof(struct agree),
	.coll_free = op_drop_units_free,
	.collective = true,
	.request = &shardd__v1__drop_units_request__descriptor,
	.decode = op_drop_units_decode,
	.check = op_drop_units_check,
	.coll_tick = op_drop_units_tick,
	.encode = op_drop_units_encode,
	.lasts = true,
	.move = MOVE_NEEDS_IDLE,
	.waits_for_readers = op_writes_params,
};
