#include "unitio/convert.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "copies/full.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "op/op.h"
#include "unit/optim.h"
#include "unit/reduce_plan.h"
#include "unit/runs.h"
#include "unitio/import.h"
#include "work/coll.h"
#include "work/drain.h"

/* The tensors of @ret become an array of its own, in one piece with those that change. */
static int convert_retype(const struct convert_args *a, const struct unit *u, state_unit *ret)
{
	size_t n = u->rec->n_tensors;
	state_tensor **tensors =
		calloc(1, n * sizeof(*tensors) + a->n_unfreeze * sizeof(**tensors));
	state_tensor *own = (state_tensor *)(void *)(tensors + n);

	if (!tensors)
		return -ENOMEM;
	memcpy(tensors, u->rec->tensors, n * sizeof(*tensors));
	for (size_t i = 0; i < a->n_unfreeze; i++) {
		own[i] = *u->rec->tensors[a->unfreeze[i]];
		own[i].frozen = false;
		tensors[a->unfreeze[i]] = &own[i];
	}
	ret->tensors = tensors;
	if (a->like)
		ret->optimizer = a->like->rec->optimizer;
	return 0;
}

void convert_record_free(const struct unit *u, state_unit *rec)
{
	if (rec->tensors != u->rec->tensors)
		free(rec->tensors);
	rec->tensors = NULL;
}

static int convert_choose(const struct op *op, const struct unit *u, state_unit *ret,
			  struct fault *f)
{
	struct layout l;

	ret->layout = convert_args(op)->layout;
	ret->shard_multiple = convert_args(op)->multiple;
	if (convert_args(op)->strategy) {
		ret->strategy = convert_args(op)->strategy;
		ret->shard_ranks = convert_args(op)->shard_ranks;
	} else if (convert_args(op)->shard_ranks) {
		return fault_set(f, FAULT_INVALID, "shard_ranks",
				 "shard_ranks is %u without a strategy; it must be 0",
				 convert_args(op)->shard_ranks);
	}
	reduce_reopen(ret);
	if (unit_resolve(ret, group_size(op->group), f))
		return f->code;
	group_set_replicas(op->group, ret);
	if (!unit_layout(ret, group_size(op->group), &l))
		return fault_set(
			f, FAULT_INVALID, "units",
			"unit '%.100s' would have more than 2^48 elements with its padding",
			u->rec->name);
	return 0;
}

int convert_record(const struct op *op, const struct unit *u, state_unit *ret, struct fault *f)
{
	*ret = *u->rec;
	ret->parts = NULL;
	ret->n_parts = 0;
	if (convert_args(op)->n_unfreeze && convert_retype(convert_args(op), u, ret) < 0)
		return fault_errno(f, -ENOMEM, "converting units");
	if (!convert_choose(op, u, ret, f))
		return 0;
	convert_record_free(u, ret);
	return (int)f->code;
}

/* -------------------------------------------------------------------- memory */

void convert_let_go(struct coll *c)
{
	struct convert *v = convert_of(c);

	for (unsigned i = 0; i < v->n; i++) {
		relayout_deinit(&v->units[i]);
		convert_record_free(v->units[i].old, &v->units[i].rec);
	}
	relayout_memory_deinit(&v->mem);
	free(v->units);
	agree_end(&v->agree);
}

static int convert_begin_unit(struct coll *c, struct relayout *x, struct unit *u)
{
	struct fault f = FAULT_NULL;
	struct layout l;
	struct group *g = c->group;
	const struct unit_place place = group_unit_place(g);

	x->old = u;
	if (unit_pools_gradient(u->rec))
		job_give_grads(c->job, u); /* nobody's: check_idle */
	if (convert_record(c->ops[0], u, &x->rec, &f))
		return -ENOMEM; /* everything else was checked */
	if (convert_args(c->ops[0])->n_unfreeze && unit_track_gradients(u) < 0)
		return -ENOMEM;
	CHECK(unit_layout(&x->rec, group_size(g), &l));
	if (unit_new(u->id, &x->rec, &l, &place, &x->fresh) < 0)
		return -ENOMEM;
	x->copied = kept_takes(c->job, &x->rec, &l);
	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		x->fresh->tensors[i].of_unit = u->tensors[i].of_unit;
		x->fresh->tensors[i].of = u->tensors[i].of;
	}
	relayout_sum(x, &convert_of(c)->mem);
	return 0;
}

int convert_new(struct coll *c)
{
	const struct op *op = c->ops[0];
	struct convert *v = convert_of(c);
	int r = 0;

	v->units = calloc(convert_args(op)->n, sizeof(*v->units));
	if (!v->units)
		return -ENOMEM;
	while (r == 0 && v->n < convert_args(op)->n) {
		struct unit *u = job_unit_by_id(c->job, convert_args(op)->units[v->n]);

		r = convert_begin_unit(c, &v->units[v->n++], u);
	}
	return r;
}

int convert_place(struct convert *v)
{
	int r = 0;

	CHECK(!v->units[0].rec.n_parts);
	for (unsigned i = 0; r == 0 && i < v->n; i++)
		r = relayout_place(&v->units[i], &v->mem);
	return r;
}

/* ------------------------------------------------------------------ the swap */

/* In the unit's record. Steps that it had were none of the tensors'. */
static void convert_swap_tensors(const struct convert_args *a, struct unit *u)
{
	state_optimizer *optimizer = u->rec->optimizer;

	if (a->like) {
		*optimizer = *a->like->rec->optimizer; /* it has no pointers */
		unit_forget_steps(u);
	}
	if (a->n_unfreeze && u->has_gradient && !u->some_lack) {
		memset(u->lacks, 0, u->rec->n_tensors);
		u->some_lack = true;
	}
	for (size_t i = 0; i < a->n_unfreeze; i++) {
		state_tensor *t = u->rec->tensors[a->unfreeze[i]];

		t->frozen = false;
		t->missed = optimizer->steps;
		if (u->has_gradient)
			u->lacks[a->unfreeze[i]] = 1;
	}
}

/* What is reached by pointers from outside stays: the unit, its parts, its record. */
static void convert_swap_unit(struct job *job, const struct convert_args *a, struct relayout *x)
{
	struct unit *u = x->old, *fresh = x->fresh;
	state_unit *rec = u->rec;

	CHECK(!u->gathered_ranks && !u->summoned_ranks && !unit_is_copying(u));
	CHECK(fresh->n_parts == u->n_parts && x->rec.n_parts == rec->n_parts);
	regcache_drop(job); /* a registration of the old layout must be answered with the new one */
	full_invalidate(job, u);
	job_give_partials(job, u); /* of an Initialise: nobody's, and of the old layout's size */
	rec->layout = x->rec.layout;
	rec->shard_multiple = x->rec.shard_multiple;
	rec->strategy = x->rec.strategy;
	rec->shard_ranks = x->rec.shard_ranks;
	rec->sets = x->rec.sets;
	SWAP(rec->parts, x->rec.parts);
	SWAP(u->tensors, fresh->tensors);
	for (unsigned d = 0; d < u->n_parts; d++)
		for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
			SWAP(*relayout_array(&u->parts[d], i),
			     *relayout_array(&fresh->parts[d], i));
	convert_swap_tensors(a, u);
	unit_lay_out(u, &fresh->layout, NULL);
	u->version++;
	kept_moved(job, u, fresh);
	job_journal_mark_unit(job, u);
}

static enum res convert_finish(struct coll *c)
{
	struct convert *v = convert_of(c);

	RES_TRY(drain_may_free(c));
	if (relayout_enter(c->job, &v->mem) < 0)
		return coll_fail(c, -ENOMEM);
	for (unsigned i = 0; i < v->n; i++)
		convert_swap_unit(c->job, convert_args(c->ops[0]), &v->units[i]);
	job_drop_unused_slabs(c->job, NULL);
	c->job->readers.changes++;
	return RES_DONE;
}

/* ---------------------------------------------------------------- repacking */

static struct relayout *convert_current(const struct coll *c)
{
	return &convert_of(c)->units[convert_of(c)->unit];
}

/* Where device @d reads element @at of the array of the old part at position @q. */
static const void *convert_source(const struct coll *c, unsigned d, unsigned q, uint64_t at)
{
	struct unit *old = convert_current(c)->old;
	uint64_t trained = unit_part_elements(old);

	if (old->spread == 1)
		return unit_state_at(old->rec, relayout_array(&old->parts[d], convert_of(c)->array),
				     convert_of(c)->array, at);
	if (at >= trained)
		at += trained * (old->spread - 1) + q * unit_frozen_elements(old);
	else
		at += q * trained;
	/* a frozen element was counted behind one part's trained ones */
	return unit_state_at(old->rec, &c->parts[d].scratch[0], convert_of(c)->array, at);
}

/* What the new run @to takes of the old run @from, both of one tensor. */
static void convert_copy_common(struct coll *c, unsigned d, unsigned q, const struct unit_run *to,
				const struct unit_run *from)
{
	uint64_t begin = to->first > from->first ? to->first : from->first;
	uint64_t to_end = to->first + to->n, from_end = from->first + from->n;
	uint64_t end = to_end < from_end ? to_end : from_end;
	struct region *array =
		relayout_array(&convert_current(c)->fresh->parts[d], convert_of(c)->array);
	const state_unit *rec = convert_current(c)->old->rec;

	if (begin < end)
		coll_launch(&c->parts[d], LAUNCH_COPY,
			    (end - begin) * dtype_size(unit_state_dtype(rec, convert_of(c)->array)))
			->copy =
			(struct k_copy){ unit_state_at(rec, array, convert_of(c)->array,
						       to->at + begin - to->first),
					 convert_source(c, d, q, from->at + begin - from->first) };
}

static void convert_repack_part(struct coll *c, unsigned d)
{
	struct relayout *x = convert_current(c);
	struct unit_run to, from;

	for (uint32_t t = 0; t < x->old->rec->n_tensors; t++) {
		if (convert_of(c)->array && x->old->tensors[t].frozen)
			continue;
		if (!unit_part_run(x->fresh, &x->fresh->parts[d], t, &to))
			continue;
		for (unsigned q = 0; q < x->old->spread; q++)
			if (unit_position_run(x->old, q, t, &from))
				convert_copy_common(c, d, q, &to, &from);
	}
}

static enum res convert_repack(struct coll *c)
{
	struct relayout *x = convert_current(c);

	RES_TRY(coll_need_launches(c, (size_t)x->old->rec->n_tensors * x->old->spread));
	for (unsigned d = 0; d < c->n_parts; d++)
		convert_repack_part(c, d);
	convert_of(c)->array++;
	return coll_kernels_sync(c);
}

static enum res convert_gather(struct coll *c, bool frozen)
{
	const struct region *arrays[NODE_MAX_DEVICES];

	for (unsigned d = 0; d < c->n_parts; d++)
		arrays[d] =
			relayout_array(&convert_current(c)->old->parts[d], convert_of(c)->array);
	c->unit = convert_current(c)->old;
	return import_gather_array(c, arrays, convert_of(c)->array, frozen);
}

/* The next array that is there. Return: false: there is none. */
static bool convert_next_array(struct convert *v)
{
	for (; v->unit < v->n; v->unit++, v->array = 0)
		for (; v->array < RELAYOUT_ARRAYS; v->array++)
			if (relayout_array(&v->units[v->unit].old->parts[0], v->array)->slab)
				return true;
	return false;
}

enum convert_stage { CONVERT_NEXT, CONVERT_FROZEN, CONVERT_REPACK };

enum res convert_tick(struct coll *c)
{
	struct convert *v = convert_of(c);

	CHECK(v->unit <= v->n);
	switch ((enum convert_stage)v->stage) {
	case CONVERT_NEXT:
		if (!convert_next_array(v))
			return convert_finish(c);
		v->stage = CONVERT_FROZEN;
		if (convert_current(c)->old->spread > 1)
			RES_TRY(convert_gather(c, false));
		fallthrough;
	case CONVERT_FROZEN: /* in the parameters alone */
		v->stage = CONVERT_REPACK;
		if (convert_current(c)->old->spread > 1 && !v->array)
			RES_TRY(convert_gather(c, true));
		fallthrough;
	case CONVERT_REPACK:
		v->stage = CONVERT_NEXT;
		return convert_repack(c);
	}
	CHECK_NOT_REACHED();
}
