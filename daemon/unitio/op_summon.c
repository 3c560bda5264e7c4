/*
 * SummonFull: the parameters as they are stored, in memory of each rank's own; or in their place
 * an array of the optimizer's state, in which what is frozen is 0. Everybody's copy is as the unit
 * was. Until ReturnFull the unit stands still: it is not gathered, reduced or stepped.
 */
#include <errno.h>
#include <stdlib.h>

#include "copies/hold.h"
#include "core/check.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "unit/optim.h"
#include "unit/pack.h"
#include "unitio/import.h"
#include "op/op_list.h"
#include "work/coll.h"
#include "shardd.pb-c.h"
#include "unitio/summon_args.h"

struct op_summon_state {
	struct region
		*copies; /* owned, by member: memory for its copy, the collective's until it is
				* the trainer's */
};

static struct op_summon_state *op_summon_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct op_summon_state));
}

static struct region *op_summon_copy_of(const struct coll *c, uint32_t i)
{
	return op_summon_of(c)->copies + i;
}

static uint64_t op_summon_bytes_of(const struct unit *u, uint32_t state)
{
	return unit_full_elements(u) * dtype_size(unit_state_dtype(u->rec, state));
}

static int op_summon_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__SummonFullRequest *r = (const Shardd__V1__SummonFullRequest *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	summon_args(op)->state = r->state;
	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	if (r->state > unit_state_arrays(op->unit->rec))
		return fault_set(f, FAULT_INVALID, "state",
				 "state is %u; it must be 0 to %u: the optimizer of unit '%.100s' "
				 "has no more arrays",
				 r->state, unit_state_arrays(op->unit->rec), op->unit->rec->name);
	return 0;
}

static int op_summon_check(struct op *op, struct fault *f)
{
	static const char *const what[1 + UNIT_MAX_STATES] = { "", " (state 1)", " (state 2)",
							       " (state 3)" };

	if (op_check_not_torn(op, f) || op_check_initialised(op, f) || op_check_not_summoned(op, f))
		return f->code;
	op_print(op, "SummonFull of unit '%.64s'%s", op->unit->rec->name,
		 what[summon_args(op)->state]);
	op->entry.print.words[2] = summon_args(op)->state;
	return 0;
}

static uint32_t op_summon_state_of(const struct coll *c)
{
	return summon_args(c->ops[0])->state;
}

/* Elements of all that is summoned that come from the unit: of state, what is trained. */
static uint64_t op_summon_elements_of(const struct coll *c)
{
	uint64_t all = unit_full_elements(c->unit);
	uint64_t trained = unit_part_elements(c->unit) * c->unit->spread;

	return op_summon_state_of(c) && trained < all ? trained : all;
}

/* Of whom it did not come to be summoned. */
static void op_summon_give_back(struct coll *c)
{
	for (uint32_t i = 0; op_summon_of(c)->copies && i < c->n; i++)
		pool_give(&c->members[i]->pool, op_summon_copy_of(c, i));
}

static int op_summon_take(struct coll *c, uint32_t i)
{
	struct member *m = c->members[i];
	uint64_t bytes = op_summon_bytes_of(c->unit, op_summon_state_of(c));

	if (!member_unit(m, c->unit))
		return -ENOMEM;
	if (op_summon_copy_of(c, i)->slab)
		return 0;
	return job_take(c->job, &m->pool, bytes, op_summon_copy_of(c, i));
}

/* Everybody's memory. */
static enum res op_summon_take_memory(struct coll *c)
{
	bool later = false;
	int r = 0;

	for (uint32_t i = 0; r == 0 && i < c->n; i++) {
		r = op_summon_take(c, i);
		r = slab_note_later(r, &later);
	}
	if (r) {
		op_memory_fault(c->job, r,
				op_summon_bytes_of(c->unit, op_summon_state_of(c)) * c->n,
				"summoned units", c->fault);
		return RES_FAILED;
	}
	return later ? coll_wait_for_node(c) : RES_DONE;
}

/* The copy is the trainer's. */
static void op_summon_hand_over(struct coll *c, uint32_t i)
{
	struct member_unit *mu = member_unit_find(c->members[i], c->unit);
	struct op *op = c->ops[i];

	CHECK(!mu->is_summoned && !mu->summoned.slab);
	mu->summoned = region_steal(op_summon_copy_of(c, i));
	mu->is_summoned = true;
	member_note_held(c->members[i], mu);
	c->unit->summoned_ranks++;
	op->result.place = mu->summoned;
	op->result.place.bytes = op_summon_bytes_of(c->unit, op_summon_state_of(c));
	op->result.writable = true;
}

/* A rank that has left the epoch gets the reason, and its copy goes back. */
static void op_summon_hand_over_all(struct coll *c)
{
	CHECK(!c->unit->summoned_ranks && !c->unit->gathered_ranks);
	c->unit->summoned_state = op_summon_state_of(c);
	for (uint32_t i = 0; i < c->n; i++)
		if (!op_told_of_end(c->ops[i]))
			op_summon_hand_over(c, i);
}

/* What is behind @n of @all is state of what is frozen, which is FP32. */
static void op_summon_copy_to(struct coll_part *p, const struct coll *c, void *to, const void *from,
			      uint64_t n, uint64_t all)
{
	enum dtype dtype = unit_state_dtype(c->unit->rec, op_summon_state_of(c));

	CHECK(n == all || dtype == DTYPE_FP32);
	if (n)
		coll_launch(p, LAUNCH_COPY, n * dtype_size(dtype))->copy =
			(struct k_copy){ to, from };
	if (n < all)
		coll_launch(p, LAUNCH_FILL, all - n)->fill =
			(struct k_fill){ .dst = (float *)to + n, .kind = FILL_CONSTANT };
}

static void op_summon_note_memory(struct coll *c)
{
	for (unsigned d = 0; d < c->n_parts; d++)
		for (uint32_t k = 0; k < c->parts[d].n; k++)
			c->parts[d].inputs[k] =
				region_addr(op_summon_copy_of(c, c->parts[d].members[k]));
}

/* The parts, which were brought together in scratch[0], in their right order. */
static enum res op_summon_unpack(struct coll *c)
{
	enum dtype dtype = unit_state_dtype(c->unit->rec, op_summon_state_of(c));

	RES_TRY(coll_need_launches(c, c->unit->rec->n_tensors));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];
		struct unit_array full = { region_addr(&p->scratch[1]), dtype };
		struct unit_array parts = { region_addr(&p->scratch[0]), dtype };

		p->n_launches =
			unit_unpack_launches(c->unit,
					     op_summon_state_of(c) ? UNIT_TRAINED : UNIT_ALL, &full,
					     &parts, p->launches);
	}
	return coll_kernels(c);
}

static enum res op_summon_gather(struct coll *c, bool frozen)
{
	const struct region *arrays[NODE_MAX_DEVICES];

	for (unsigned d = 0; d < c->n_parts; d++)
		arrays[d] = unit_state(&c->unit->parts[d], op_summon_state_of(c));
	return import_gather_array(c, arrays, op_summon_state_of(c), frozen);
}

/* Where device @d has all of it. Of a unit in which all is frozen there is no state to look at. */
static const void *op_summon_whole(const struct coll *c, unsigned d)
{
	if (c->unit->spread > 1)
		return region_addr(&c->parts[d].scratch[unit_is_packed(c->unit)]);
	return op_summon_elements_of(c)
		       ? region_addr(unit_state(&c->unit->parts[d], op_summon_state_of(c)))
		       : NULL;
}

static enum res op_summon_copy_to_all(struct coll *c)
{
	uint64_t n = op_summon_elements_of(c), all = unit_full_elements(c->unit);

	CHECK(n <= all);
	RES_TRY(coll_need_launches(c, 2 * c->n));
	for (unsigned d = 0; d < c->n_parts; d++)
		for (uint32_t k = 0; k < c->parts[d].n; k++)
			op_summon_copy_to(&c->parts[d], c, (void *)c->parts[d].inputs[k],
					  op_summon_whole(c, d), n, all);
	return coll_kernels(c);
}

/* Room for each reply's steps by tensor. */
static enum res op_summon_need_steps(struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++) {
		struct op *op = c->ops[i];

		if (!op->owned)
			op->owned = calloc(c->unit->rec->n_tensors, sizeof(uint64_t));
		if (!op->owned)
			return coll_fail(c, -ENOMEM);
	}
	return RES_DONE;
}

static enum res op_summon_ready(struct coll *c)
{
	uint64_t bytes = (unit_part_elements(c->unit) + unit_frozen_elements(c->unit)) *
			 c->unit->spread *
			 dtype_size(unit_state_dtype(c->unit->rec, op_summon_state_of(c)));

	if (c->unit->spread > 1) {
		RES_TRY(coll_ready(c));
		RES_TRY(coll_need_scratch(c, 0, bytes));
	}
	if (unit_is_packed(c->unit))
		RES_TRY(coll_need_scratch(c, 1, bytes));
	RES_TRY(op_summon_need_steps(c));
	return op_summon_take_memory(c);
}

static int op_summon_check_idle(const struct unit *u, struct fault *f)
{
	if (u->step == UNIT_STEP_DUE || u->shards_left)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is stepped at the end of this backward pass: call "
				 "Step before it is summoned",
				 u->rec->name);
	if (!u->gathered_ranks)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "unit '%.100s' is still gathered by %u ranks: release it before it is "
			 "summoned",
			 u->rec->name, u->gathered_ranks);
}

static void op_summon_free(struct coll *c)
{
	free(op_summon_of(c)->copies);
}

enum op_summon_stage {
	SUMMON_APPLY,
	SUMMON_BEGIN,
	SUMMON_GATHER, /* from several parts */
	SUMMON_GATHER_FROZEN,
	SUMMON_UNPACK,
	SUMMON_COPY,
	SUMMON_DONE
};

static enum res op_summon_tick(struct coll *c)
{
	switch ((enum op_summon_stage)c->stage) {
	case SUMMON_APPLY:
		op_summon_of(c)->copies = calloc(c->n, sizeof(struct region));
		if (!op_summon_of(c)->copies)
			return coll_fail(c, -ENOMEM);
		c->stage = SUMMON_BEGIN;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case SUMMON_BEGIN:
		RES_TRY(coll_check_epoch(c, true));
		hold_drop(c->job, c->unit);
		if (op_summon_check_idle(c->unit, c->fault))
			return RES_FAILED;
		RES_TRY(op_summon_ready(c));
		RES_TRY(coll_need_launches(c, 0));
		op_summon_note_memory(c);
		c->stage = c->unit->spread > 1 ? SUMMON_GATHER : SUMMON_COPY;
		return coll_kernels(c);
	case SUMMON_GATHER:
		c->stage = SUMMON_GATHER_FROZEN;
		RES_TRY(op_summon_gather(c, false));
		fallthrough;
	case SUMMON_GATHER_FROZEN:
		c->stage = SUMMON_UNPACK;
		if (!op_summon_state_of(c))
			RES_TRY(op_summon_gather(c, true));
		fallthrough;
	case SUMMON_UNPACK:
		c->stage = SUMMON_COPY;
		if (unit_is_packed(c->unit))
			return op_summon_unpack(c);
		fallthrough;
	case SUMMON_COPY:
		c->stage = SUMMON_DONE;
		return op_summon_copy_to_all(c);
	case SUMMON_DONE:
		op_summon_hand_over_all(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

/* By tensor into @ret. Return: how many there are to tell, 0 if all have had the unit's. */
static size_t op_summon_fill_steps(const struct unit *u, uint64_t *ret)
{
	bool some_missed = false;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		ret[i] = unit_trains(u, i) ? unit_steps(u, i) : u->rec->optimizer->steps;
		some_missed |= ret[i] != u->rec->optimizer->steps;
	}
	return some_missed ? u->rec->n_tensors : 0;
}

static void op_summon_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__SummonFullResponse reply = SHARDD__V1__SUMMON_FULL_RESPONSE__INIT;
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	op_place(op, &place, handle);
	reply.place = &place;
	reply.unit = op->unit->id;
	reply.optimizer_steps = op->unit->rec->optimizer->steps;
	reply.tensor_steps = op->owned;
	reply.n_tensor_steps = op_summon_fill_steps(op->unit, op->owned);
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_summon = {
	.name = "SummonFull",
	.collective = true,
	.request = &shardd__v1__summon_full_request__descriptor,
	.decode = op_summon_decode,
	.check = op_summon_check,
	.coll_tick = op_summon_tick,
	.coll_bytes = sizeof(struct op_summon_state),
	.coll_let_go = op_summon_give_back,
	.coll_free = op_summon_free,
	.encode = op_summon_encode,
	.move = MOVE_SUMMON,
};
