/*
 * Initialise: the parameters of a unit, from a seed, from one rank, or each shard from
 * its own rank. Optimizer state is zeroed. Heals a unit of a torn job.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copies/full.h"
#include "copies/hold.h"
#include "core/check.h"
#include "job/job_journal.h"
#include "job/position.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "unit/definition.h"
#include "unit/optim.h"
#include "unit/runs.h"
#include "op/op_list.h"
#include "unitio/import.h"
#include "work/coll.h"
#include "work/drain.h"
#include "shardd.pb-c.h"

struct init_args {
	int how; /* Initialise: the oneof's case */
	uint64_t seed;
	uint32_t root;
	const uint8_t *data; /* the request's; valid until done */
	uint64_t data_bytes;
};

static inline struct init_args *init_args(const struct op *op)
{
	_Static_assert(sizeof(struct init_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

typedef Shardd__V1__InitialiseRequest request;

#define HOW_SEED      SHARDD__V1__INITIALISE_REQUEST__HOW_SEED
#define HOW_BROADCAST SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST
#define HOW_OWN       SHARDD__V1__INITIALISE_REQUEST__HOW_OWN

/* Of all tensors, one after the other, as a rank gives them. */
static uint64_t op_init_bytes(const struct unit *u)
{
	return u->packed * dtype_size(unit_state_dtype(u->rec, 0));
}

static int op_init_decode_source(struct op *op, const request *r, struct fault *f)
{
	uint64_t need = op_init_bytes(op->unit);
	bool must = r->how_case == HOW_OWN ||
		    (r->how_case == HOW_BROADCAST && init_args(op)->root == op->m->rank);

	op->buffer = r->buffer;
	init_args(op)->data = r->data.data;
	init_args(op)->data_bytes = r->data.len;
	if (r->buffer && r->data.len)
		return fault_set(f, FAULT_INVALID, "data",
				 "buffer and data are both given: give one of them");
	if (!must && (r->buffer || r->data.len))
		return fault_set(
			f, FAULT_INVALID, "buffer",
			"this rank gives no parameters, so buffer must be 0 and data empty");
	if (must && !r->buffer && r->data.len != need)
		return fault_set(f, FAULT_INVALID, "data",
				 "data has %zu bytes; unit '%.100s' needs %llu, or a buffer",
				 r->data.len, op->unit->rec->name, (unsigned long long)need);
	return 0;
}

static int op_init_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const request *r = (const request *)msg;

	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	init_args(op)->how = (int)r->how_case;
	if (r->how_case == HOW_SEED) {
		init_args(op)->seed = r->seed->seed;
	} else if (r->how_case == HOW_BROADCAST) {
		uint32_t index;

		init_args(op)->root = r->broadcast->root;
		if (!group_index(op->group, r->broadcast->root, &index))
			return fault_set(f, FAULT_INVALID, "broadcast.root",
					 "broadcast.root is %u; it must be a rank of group '%.64s'",
					 r->broadcast->root, op->group->rec->name);
	} else if (r->how_case != HOW_OWN) {
		return fault_set(f, FAULT_INVALID, "how",
				 "how is missing; it must be seed, broadcast or own");
	}
	return op_init_decode_source(op, r, f);
}

/* What all ranks must say the same, in words. */
static void op_init_print_how(struct op *op)
{
	const char *name = op->unit->rec->name;

	if (init_args(op)->how == HOW_SEED)
		op_print(op, "Initialise of unit '%.64s' (seed %llu)", name,
			 (unsigned long long)init_args(op)->seed);
	else if (init_args(op)->how == HOW_BROADCAST)
		op_print(op, "Initialise of unit '%.64s' (from rank %u)", name,
			 init_args(op)->root);
	else
		op_print(op, "Initialise of unit '%.64s' (own)", name);
}

/* On one node registration has compared it. */
static void op_init_print_definition(struct op *op)
{
	struct fingerprint *p = &op->entry.print;
	size_t at = strlen(p->text);

	p->words[5] = definition_hash(op->unit->rec);
	snprintf(p->text + at, sizeof(p->text) - at, ", %llu elements, definition %08x",
		 (unsigned long long)op->unit->packed, (uint32_t)p->words[5]);
}

static int op_init_check(struct op *op, struct fault *f)
{
	if (op_check_not_summoned(op, f) ||
	    (op->buffer && !op_buffer_at(op, 0, op_init_bytes(op->unit), f)))
		return f->code;
	op_init_print_how(op);
	op->entry.print.words[2] = (uint64_t)init_args(op)->how;
	op->entry.print.words[3] = init_args(op)->seed;
	op->entry.print.words[4] = init_args(op)->root;
	if (job_is_across(op->m->job))
		op_init_print_definition(op);
	return 0;
}

/* What @op's rank brings: the op holds its buffer since it was checked. */
static const void *op_init_source_of(struct op *op)
{
	struct fault f = FAULT_NULL;
	const void *at;

	if (init_args(op)->data_bytes)
		return init_args(op)->data;
	at = op_buffer_at(op, 0, op_init_bytes(op->unit), &f);
	CHECK(at);
	return at;
}

/* Also of no bytes. */
static void op_init_copy_launch(struct coll_part *p, void *dst, const void *src, uint64_t bytes)
{
	if (bytes)
		coll_launch(p, LAUNCH_COPY, bytes)->copy = (struct k_copy){ dst, src };
}

static void op_init_job_heal(struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->torn && !job->units[i]->rec->dropped)
			return;
	/* what was committed belongs to parameters that are no more */
	job->life.torn = false;
	job->rec->torn = false;
	position_reset(job);
}

static enum res op_init_finish(struct coll *c)
{
	struct unit *u = c->unit;

	CHECK(!u->rec->initialised && !u->gathered_ranks && !u->summoned_ranks);
	u->version++;
	u->has_gradient = false;
	u->has_partials = false;
	c->job->mem.stale_partials = true;
	c->job->mem.stray_gradients = true;
	full_invalidate(c->job, u);
	if (coll_promised(c))
		RES_TRY(coll_check_epoch(c, false)); /* else it is as good as never initialised */
	u->rec->initialised = true;
	job_journal_mark_unit(c->job, u);
	unit_forget_steps(u);
	if (u->torn) {
		u->torn = false;
		op_init_job_heal(c->job);
	}
	return RES_DONE;
}

static int op_init_check_unused(const struct coll *c, struct fault *f)
{
	for (uint32_t i = 0; i < c->n; i++) {
		const struct member_unit *mu = member_unit_find(c->members[i], c->unit);

		if (mu && (mu->shard.slab || mu->shard_state == SHARD_GOING ||
			   mu->shard_state == SHARD_BACK))
			return fault_set(
				f, FAULT_STATE, NULL,
				"rank %u has its shard of unit '%.100s': it must give the shard "
				"back (ShardDone) before the unit is initialised",
				c->members[i]->rank, c->unit->rec->name);
	}
	if (!c->unit->gathered_ranks)
		return 0;
	return fault_set(
		f, FAULT_STATE, NULL,
		"unit '%.100s' is still gathered by %u ranks: release it before it is initialised",
		c->unit->rec->name, c->unit->gathered_ranks);
}

/* An initialised unit has no optimizer state. */
static enum res op_init_zero(struct coll *c)
{
	RES_TRY(coll_need_launches(c, UNIT_MAX_STATES));
	for (unsigned d = 0; d < c->n_parts; d++)
		c->parts[d].n_launches =
			optim_zero_launches(&c->unit->parts[d], c->parts[d].launches);
	return coll_kernels_sync(c);
}

/* -- from a seed: the fill kernels write FP32, into scratch[0] if the parameters are not -- */

static bool op_init_fills_apart(const struct unit *u)
{
	return unit_state_dtype(u->rec, 0) != DTYPE_FP32;
}

static enum res op_init_from_seed(struct coll *c)
{
	RES_TRY(coll_need_launches(c, c->unit->rec->n_tensors));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];
		const struct unit_part *up = &c->unit->parts[d];

		p->n_launches = optim_seed_launches(
			c->unit, up, op_init_fills_apart(c->unit) ? &p->scratch[0] : &up->params,
			init_args(c->ops[0])->seed, p->launches);
	}
	return coll_kernels(c);
}

static void op_init_round(struct coll_part *p, const struct unit *u, const struct unit_part *up)
{
	enum dtype dtype = unit_state_dtype(u->rec, 0);
	struct unit_run run;

	for (uint32_t t = 0; t < u->rec->n_tensors; t++)
		if (unit_part_run(u, up, t, &run) && run.n)
			coll_launch(p, LAUNCH_CAST, run.n)->cast = (struct k_cast){
				.dst = unit_state_at(u->rec, &up->params, 0, run.at),
				.src = optim_at(&p->scratch[0], run.at),
				.dst_dtype = dtype,
				.src_dtype = DTYPE_FP32,
			};
}

static enum res op_init_from_seed_rounded(struct coll *c)
{
	if (!op_init_fills_apart(c->unit))
		return RES_DONE;
	RES_TRY(coll_need_launches(c, c->unit->rec->n_tensors));
	for (unsigned d = 0; d < c->n_parts; d++)
		op_init_round(&c->parts[d], c->unit, &c->unit->parts[d]);
	return coll_kernels(c);
}

/* -- from the root's memory, on several devices through a whole copy on each -- */

static void *op_init_whole(const struct coll_part *p)
{
	return region_addr(&p->scratch[0]);
}

static void op_init_keep(struct coll *c, unsigned d, const void *from)
{
	const struct unit_part *up = &c->unit->parts[d];
	const state_unit *rec = c->unit->rec;
	size_t size = dtype_size(unit_state_dtype(rec, 0));
	struct unit_run run;

	for (uint32_t t = 0; t < rec->n_tensors; t++)
		if (unit_part_run(c->unit, up, t, &run))
			op_init_copy_launch(&c->parts[d],
					    unit_state_at(rec, &up->params, 0, run.at),
					    (const char *)from +
						    (c->unit->tensors[t].packed + run.first) * size,
					    run.n * size);
}

static enum res op_init_keep_parts(struct coll *c)
{
	RES_TRY(coll_need_launches(c, c->unit->rec->n_tensors));
	for (unsigned d = 0; d < c->n_parts; d++)
		op_init_keep(c, d, op_init_whole(&c->parts[d]));
	return coll_kernels(c);
}

static enum res op_init_show_root(struct coll *c)
{
	void *data[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = op_init_whole(&c->parts[d]);
	coll_broadcast(c, data, op_init_bytes(c->unit),
		       coll_device_of(c, init_args(c->ops[0])->root));
	return RES_WAIT;
}

static enum res op_init_from_root(struct coll *c)
{
	uint32_t root = coll_index(c, init_args(c->ops[0])->root);
	struct coll_part *p = root == COLL_ELSEWHERE ? NULL : coll_part(c, root);

	RES_TRY(coll_need_launches(c, c->unit->rec->n_tensors));
	if (coll_is_alone(c))
		op_init_keep(c, 0, op_init_source_of(c->ops[root]));
	else if (p)
		op_init_copy_launch(p, op_init_whole(p), op_init_source_of(c->ops[root]),
				    op_init_bytes(c->unit));
	return coll_kernels(c);
}

static const void *op_init_own_source(const struct coll *c, uint32_t i)
{
	return op_init_source_of(c->ops[i]);
}

/* ------------------------------------------------------------------ the op */

/* Does nobody need what is there? */
static enum res op_init_check_begin(struct coll *c)
{
	RES_TRY(coll_check_epoch(c, false));
	hold_drop(c->job, c->unit);
	return op_init_check_unused(c, c->fault) ? RES_FAILED : RES_DONE;
}

static enum res op_init_ready(struct coll *c, int how)
{
	const struct unit *u = c->unit;

	if (how == HOW_SEED && op_init_fills_apart(u))
		return coll_need_scratch(
			c, 0, (unit_part_elements(u) + unit_frozen_elements(u)) * sizeof(float));
	if (how == HOW_SEED || coll_is_alone(c))
		return RES_DONE;
	if (how == HOW_OWN)
		return import_ready(c);
	RES_TRY(coll_ready(c));
	return coll_need_scratch(c, 0, op_init_bytes(u));
}

enum op_init_stage {
	INIT_APPLY,
	INIT_DRAIN,
	INIT_BEGIN,
	INIT_SEED,
	INIT_ROUND, /* to the type of the parameters */
	INIT_ROOT, /* then, on several devices: its parameters to all of them, and what is theirs */
	INIT_SHOW,
	INIT_KEEP,
	INIT_OWN,
	INIT_ZERO,
	INIT_DONE
};

/* No shard is handed out meanwhile. */
static void op_init_end_pass(struct coll *c)
{
	unit_pass_end(c->unit);
	for (uint32_t i = 0; i < c->n; i++) {
		struct member_unit *mu = member_unit_find(c->members[i], c->unit);

		if (mu)
			member_shard_drop(mu);
	}
}

static enum op_init_stage op_init_begin(struct coll *c, int how)
{
	if (c->unit->rec->initialised && !c->unit->torn)
		position_altered(c->job);
	c->unit->rec->initialised = false; /* until it is whole: a device may fail half-way */
	job_journal_mark_unit(c->job, c->unit);
	job_journal_write(c->job);
	readers_rewrite(c->job);
	coll_writes_unit(c);
	op_init_end_pass(c);
	if (how == HOW_OWN)
		import_write(c, op_init_own_source, true, 0);
	return how == HOW_SEED ? INIT_SEED : how == HOW_BROADCAST ? INIT_ROOT : INIT_OWN;
}

static enum res op_init_tick(struct coll *c)
{
	int how = init_args(c->ops[0])->how;

	switch ((enum op_init_stage)c->stage) {
	case INIT_APPLY:
		c->stage = INIT_DRAIN;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case INIT_DRAIN:
		RES_TRY(op_init_check_begin(c));
		RES_TRY(drain_may_write(c, JOB_CHANGE_WHOLE));
		c->stage = INIT_BEGIN;
		RES_TRY(drain_coll(c));
		fallthrough;
	case INIT_BEGIN:
		RES_TRY(op_init_check_begin(c));
		RES_TRY(op_init_ready(c, how));
		c->stage = op_init_begin(c, how);
		return op_init_tick(c);
	case INIT_SEED:
		c->stage = INIT_ROUND;
		return op_init_from_seed(c);
	case INIT_ROUND:
		c->stage = INIT_ZERO;
		RES_TRY(op_init_from_seed_rounded(c));
		return op_init_tick(c);
	case INIT_ROOT:
		c->stage = coll_is_alone(c) ? INIT_ZERO : INIT_SHOW;
		return op_init_from_root(c);
	case INIT_SHOW:
		c->stage = INIT_KEEP;
		return op_init_show_root(c);
	case INIT_KEEP:
		c->stage = INIT_ZERO;
		return op_init_keep_parts(c);
	case INIT_OWN:
		RES_TRY(import_write_tick(c));
		fallthrough;
	case INIT_ZERO:
		c->stage = INIT_DONE;
		return op_init_zero(c);
	case INIT_DONE:
		return op_init_finish(c);
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_init = {
	.name = "Initialise",
	.collective = true,
	.request = &shardd__v1__initialise_request__descriptor,
	.decode = op_init_decode,
	.check = op_init_check,
	.coll_tick = op_init_tick,
	.coll_bytes = sizeof(struct import_state),
	.reply = &shardd__v1__initialise_response__descriptor,
	.lasts = true,
	.move = MOVE_NEEDS_IDLE,
	.waits_for_readers = op_writes_params,
};
