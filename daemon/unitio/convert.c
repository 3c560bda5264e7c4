#include "unitio/convert.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "copies/full.h"
#include "core/check.h"
#include "mem/stagger.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "op/op.h"
#include "unit/optim.h"
#include "unit/reduce_plan.h"
#include "unit/runs.h"
#include "unitio/import.h"
#include "work/coll.h"

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

/* The arrays of a part, parameters first. */
#define ARRAYS (2 + UNIT_MAX_STATES)

static struct region *convert_array_of(struct unit_part *p, unsigned i)
{
	struct region *const arrays[ARRAYS] = { &p->params, &p->grads, &p->state1, &p->state2,
						&p->state3 };

	return arrays[i];
}

static state_region **convert_record_of(state_part *p, unsigned i)
{
	state_region **const fields[ARRAYS] = { &p->params, &p->grads, &p->state1, &p->state2,
						&p->state3 };

	return fields[i];
}

static void convert_free_parts(state_unit *rec)
{
	for (size_t i = 0; i < rec->n_parts; i++)
		shardd__state__v1__part__free_unpacked(rec->parts[i], NULL);
	free(rec->parts);
	rec->parts = NULL;
	rec->n_parts = 0;
}

void convert_let_go(struct coll *c)
{
	struct convert *v = convert_of(c);

	for (unsigned i = 0; i < v->n; i++) {
		unit_free(v->units[i].fresh);
		convert_free_parts(&v->units[i].rec);
		convert_record_free(v->units[i].old, &v->units[i].rec);
	}
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		for (unsigned k = 0; k < 2; k++)
			slab_unref(v->on[d].slabs[k]);
	free(v->units);
}

static uint64_t convert_array_bytes(const struct unit *u, unsigned i)
{
	return i ? unit_array_bytes(&u->layout, u->spread)
		 : unit_params_bytes(u->rec, &u->layout, u->spread);
}

static uint64_t convert_array_room(const struct unit *u, unsigned d, unsigned i)
{
	return stagger_room(u->parts[d].device, convert_array_bytes(u, i));
}

/* Has the unit array @i, as it will be? */
static bool convert_has_array(const struct changing *x, unsigned i)
{
	if (!i)
		return true;
	if (!x->fresh->layout.shard_elements)
		return false;
	return i == 1 ? !unit_pools_gradient(&x->rec) : i - 2 < unit_state_arrays(&x->rec);
}

static int convert_begin_unit(struct coll *c, struct changing *x, struct unit *u)
{
	struct fault f = FAULT_NULL;
	struct layout l;
	struct group *g = c->group;

	x->old = u;
	if (unit_pools_gradient(u->rec))
		job_give_grads(c->job, u); /* nobody's: check_idle */
	if (convert_record(c->ops[0], u, &x->rec, &f))
		return -ENOMEM; /* everything else was checked */
	if (convert_args(c->ops[0])->n_unfreeze && unit_track_gradients(u) < 0)
		return -ENOMEM;
	CHECK(unit_layout(&x->rec, group_size(g), &l));
	if (unit_new(u->id, &x->rec, &l, g->devices, g->n_devices, &x->fresh) < 0)
		return -ENOMEM;
	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		x->fresh->tensors[i].of_unit = u->tensors[i].of_unit;
		x->fresh->tensors[i].of = u->tensors[i].of;
	}
	for (unsigned d = 0; d < u->n_parts; d++)
		for (unsigned i = 0; i < ARRAYS; i++)
			if (convert_has_array(x, i))
				convert_of(c)->on[u->parts[d].device->index].bytes[i > 0] +=
					convert_array_bytes(x->fresh, i) +
					convert_array_room(x->fresh, d, i);
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

int convert_take_slabs(struct coll *c)
{
	struct convert *v = convert_of(c);
	bool later = false;
	int r = 0;

	for (unsigned i = 0; r == 0 && i < 2 * c->job->node->n_devices; i++) {
		struct device *d = &c->job->node->devices[i / 2];
		uint64_t bytes = v->on[i / 2].bytes[i % 2];

		if (!bytes || v->on[i / 2].slabs[i % 2])
			continue;
		r = slab_new(d, &c->job->quota, MEM_SHARD, job_share(c->job), bytes,
			     c->job->rec->name, -1, &v->on[i / 2].slabs[i % 2]);
		if (slab_is_short(r) && job_evict(c->job, UINT64_MAX))
			r = slab_new(d, &c->job->quota, MEM_SHARD, job_share(c->job), bytes,
				     c->job->rec->name, -1, &v->on[i / 2].slabs[i % 2]);
		r = slab_note_later(r, &later);
	}
	return r || !later ? r : SLAB_E_LATER;
}

uint64_t convert_bytes(const struct coll *c)
{
	uint64_t sum = 0;

	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		sum += convert_of(c)->on[d].bytes[0] + convert_of(c)->on[d].bytes[1];
	return sum;
}

/* The regions of the new arrays, in the unit and in its record. */
static int convert_place_one(struct convert *v, struct changing *x)
{
	for (unsigned d = 0; d < x->old->n_parts; d++) {
		struct unit_part *p = &x->fresh->parts[d];
		state_part *rec = state_unit_add_part(&x->rec);
		unsigned on = p->device->index;

		CHECK(p->device == x->old->parts[d].device); /* a group's devices stay */
		if (!rec)
			return -ENOMEM;
		for (unsigned i = 0; i < ARRAYS; i++) {
			uint64_t *at = &v->on[on].at[i > 0],
				 bytes = convert_array_bytes(x->fresh, i);

			if (!convert_has_array(x, i))
				continue;
			*convert_array_of(p, i) = (struct region){
				v->on[on].slabs[i > 0],
				*at + stagger_by(p->device, bytes, STAGGER_ARRAY(i)), bytes
			};
			*at += bytes + convert_array_room(x->fresh, d, i);
			CHECK(*at <= v->on[on].bytes[i > 0] && v->on[on].slabs[i > 0]);
			if (state_region_set(convert_record_of(rec, i), convert_array_of(p, i)) < 0)
				return -ENOMEM;
		}
	}
	return 0;
}

int convert_place(struct convert *v)
{
	int r = 0;

	CHECK(!v->units[0].rec.n_parts);
	for (unsigned i = 0; r == 0 && i < v->n; i++)
		r = convert_place_one(v, &v->units[i]);
	return r;
}

/* ------------------------------------------------------------------ the swap */

static void convert_swap_region(struct region *a, struct region *b)
{
	struct region t = *a;

	*a = *b;
	*b = t;
}

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
static void convert_swap_unit(struct job *job, const struct convert_args *a, struct changing *x)
{
	struct unit *u = x->old, *fresh = x->fresh;
	struct unit_tensor *tensors = u->tensors;
	state_unit *rec = u->rec;
	state_part **parts = rec->parts;

	CHECK(!u->gathered_ranks && !u->summoned_ranks && !unit_is_copying(u));
	CHECK(fresh->n_parts == u->n_parts && x->rec.n_parts == rec->n_parts);
	regcache_drop(job); /* a registration of the old layout must be answered with the new one */
	full_invalidate(job, u);
	job_give_partials(job, u); /* of an Initialise: nobody's, and of the old layout's size */
	rec->layout = x->rec.layout;
	rec->shard_multiple = x->rec.shard_multiple;
	rec->strategy = x->rec.strategy;
	rec->shard_ranks = x->rec.shard_ranks;
	rec->parts = x->rec.parts;
	x->rec.parts = parts;
	u->tensors = fresh->tensors;
	fresh->tensors = tensors;
	for (unsigned d = 0; d < u->n_parts; d++)
		for (unsigned i = 0; i < ARRAYS; i++)
			convert_swap_region(convert_array_of(&u->parts[d], i),
					    convert_array_of(&fresh->parts[d], i));
	convert_swap_tensors(a, u);
	unit_lay_out(u, &fresh->layout, NULL);
	u->version++;
	kept_forget(job, u); /* checked: nothing had changed since the commit */
	job_journal_mark_unit(job, u);
}

static enum res convert_finish(struct coll *c)
{
	struct convert *v = convert_of(c);
	struct slab *fresh[2 * NODE_MAX_DEVICES];
	unsigned n = 0;

	for (unsigned i = 0; i < 2 * NODE_MAX_DEVICES; i++)
		if (v->on[i / 2].slabs[i % 2])
			fresh[n++] = v->on[i / 2].slabs[i % 2];
	if (job_add_slabs(c->job, fresh, n) < 0)
		return coll_fail(c, -ENOMEM);
	for (unsigned i = 0; i < v->n; i++)
		convert_swap_unit(c->job, convert_args(c->ops[0]), &v->units[i]);
	job_drop_unused_slabs(c->job, NULL);
	c->job->readers.changes++;
	return RES_DONE;
}

/* ---------------------------------------------------------------- repacking */

static struct changing *convert_current(const struct coll *c)
{
	return &convert_of(c)->units[convert_of(c)->unit];
}

/* Where device @d reads element @at of the array of the old part at position @q. */
static const void *convert_source(const struct coll *c, unsigned d, unsigned q, uint64_t at)
{
	struct unit *old = convert_current(c)->old;
	uint64_t trained = unit_part_elements(old);

	if (old->spread == 1)
		return unit_state_at(old->rec,
				     convert_array_of(&old->parts[d], convert_of(c)->array),
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
		convert_array_of(&convert_current(c)->fresh->parts[d], convert_of(c)->array);
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
	struct changing *x = convert_current(c);
	struct unit_run to, from;

	for (uint32_t t = 0; t < x->old->rec->n_tensors; t++) {
		if (convert_of(c)->array && x->old->tensors[t].frozen)
			continue;
		if (!unit_part_run(x->fresh, &x->fresh->parts[d], t, &to))
			continue;
		for (unsigned q = 0; q < x->old->spread; q++)
			if (unit_part_run(x->old, &x->old->parts[q], t, &from))
				convert_copy_common(c, d, q, &to, &from);
	}
}

static enum res convert_repack(struct coll *c)
{
	struct changing *x = convert_current(c);

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
			convert_array_of(&convert_current(c)->old->parts[d], convert_of(c)->array);
	c->unit = convert_current(c)->old;
	return import_gather_array(c, arrays, convert_of(c)->array, frozen);
}

/* The next array that is there. Return: false: there is none. */
static bool convert_next_array(struct convert *v)
{
	for (; v->unit < v->n; v->unit++, v->array = 0)
		for (; v->array < ARRAYS; v->array++)
			if (convert_array_of(&v->units[v->unit].old->parts[0], v->array)->slab)
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
