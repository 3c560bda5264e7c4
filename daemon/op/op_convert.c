/*
 * ConvertUnits: other layouts for units that are there. Parameters, gradients and optimizer
 * state are repacked into new memory, array after array, tensor by tensor; the old memory goes
 * when all of it is done. Until then nothing has changed, so that whatever fails leaves the
 * units as they were.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "mem/stagger.h"
#include "op/guard.h"
#include "op/op_impl.h"
#include "unit/reduce_plan.h"
#include "op/registered.h"
#include "unit/optim.h"
#include "unit/runs.h"

/* One unit: what it is and what it becomes. */
struct changing {
	struct unit *old;
	state_unit rec;     /* the record as it will be; only parts are its own */
	struct unit *fresh; /* laid out by that */
};

/* Kept at the collective until its end. */
struct convert {
	struct changing *units;
	unsigned n;
	struct {
		uint64_t bytes[2]; /* of parameters; of the other arrays */
		uint64_t at[2];
		struct slab *slabs[2];
	} on[NODE_MAX_DEVICES]; /* by device of the node */
	unsigned unit, array;   /* what is repacked now */
};

typedef Shardd__V1__ConvertUnitsRequest request;

/* ------------------------------------------------------------- what is asked for */

static int decode_choices(struct op *op, const request *r, struct fault *f)
{
	op->args.convert.layout = r->layout ? (uint32_t)r->layout : LAYOUT_FLAT;
	op->args.convert.multiple = r->shard_multiple ? r->shard_multiple : 1;
	op->args.convert.strategy = (uint32_t)r->strategy;
	op->args.convert.shard_ranks = r->shard_ranks;
	if ((unsigned)r->layout >= _LAYOUT_N)
		return fault_set(f, FAULT_INVALID, "layout",
				 "layout is %d: FLAT or DIM0 is allowed", r->layout);
	if ((unsigned)r->strategy >= _STRATEGY_N)
		return fault_set(f, FAULT_INVALID, "strategy",
				 "strategy is %d: SHARD, REPLICATE or HYBRID is allowed",
				 r->strategy);
	if (r->shard_multiple > (1u << 20) ||
	    (op->args.convert.layout == LAYOUT_DIM0 && r->shard_multiple > 1))
		return fault_set(f, FAULT_INVALID, "shard_multiple",
				 "shard_multiple is %u: 0 to %u is allowed, with DIM0 0 or 1",
				 r->shard_multiple, 1u << 20);
	return 0;
}

static int decode_unit(struct op *op, const request *r, size_t i, struct fault *f)
{
	struct unit *u = job_unit_by_id(op->m->job, r->units[i]);

	if (!u)
		return fault_set(f, FAULT_NOT_FOUND, "units",
				 "there is no unit %u in job '%s': it has 1 to %u", r->units[i],
				 op->m->job->rec->name, op->m->job->n_units);
	if (i && r->units[i] <= r->units[i - 1])
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %u behind %u: ascending numbers are allowed",
				 r->units[i], r->units[i - 1]);
	if (i && u->rec->group != op->group->id)
		return fault_set(f, FAULT_INVALID, "units",
				 "unit '%.100s' is of another group than the first one: units of "
				 "one group are allowed",
				 u->rec->name);
	op->group = job_group_by_id(op->m->job, u->rec->group);
	return 0;
}

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const request *r = (const request *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	if (!r->n_units)
		return fault_set(f, FAULT_INVALID, "units",
				 "units is empty: one or more are allowed");
	for (size_t i = 0; i < r->n_units; i++)
		if (decode_unit(op, r, i, f))
			return f->code;
	op->args.convert.units = r->units;
	op->args.convert.n = r->n_units;
	return decode_choices(op, r, f);
}

/* What the record becomes. Its parts, tensors and names stay the unit's. */
static int new_record(const struct op *op, const struct unit *u, state_unit *ret, struct fault *f)
{
	struct layout l;

	*ret = *u->rec;
	ret->parts = NULL;
	ret->n_parts = 0;
	ret->layout = op->args.convert.layout;
	ret->shard_multiple = op->args.convert.multiple;
	if (op->args.convert.strategy) {
		ret->strategy = op->args.convert.strategy;
		ret->shard_ranks = op->args.convert.shard_ranks;
	} else if (op->args.convert.shard_ranks) {
		return fault_set(f, FAULT_INVALID, "shard_ranks",
				 "shard_ranks is %u without a strategy: 0 is allowed",
				 op->args.convert.shard_ranks);
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

static int check(struct op *op, struct fault *f)
{
	uint64_t hash = 14695981039346656037u;

	if (op_check_not_torn(op, f))
		return f->code;
	for (size_t i = 0; i < op->args.convert.n; i++) {
		state_unit rec;

		if (new_record(op, job_unit_by_id(op->m->job, op->args.convert.units[i]), &rec, f))
			return f->code;
		hash = (hash ^ op->args.convert.units[i]) * 1099511628211u;
	}
	op_print(op, "ConvertUnits of %zu units to layout %u, multiple %u, strategy %u of %u",
		 op->args.convert.n, op->args.convert.layout, op->args.convert.multiple,
		 op->args.convert.strategy, op->args.convert.shard_ranks);
	op->entry.print.words[2] = hash;
	op->entry.print.words[3] = op->args.convert.layout;
	op->entry.print.words[4] = op->args.convert.multiple;
	op->entry.print.words[5] = op->args.convert.strategy;
	op->entry.print.words[6] = op->args.convert.shard_ranks;
	return 0;
}

/* Is there anything that is laid out by the old layout and is not repacked? */
static int check_passing(const struct unit *u, struct fault *f)
{
	if (u->arrived)
		return fault_set(f, FAULT_STATE, NULL,
				 "the gradient of unit '%.100s' is dealt with as the plan of this "
				 "backward pass says: end it with Step before it is converted",
				 u->rec->name);
	if (u->has_partials)
		return fault_set(f, FAULT_STATE, NULL,
				 "the all-reduce of unit '%.100s' is deferred: reduce it before it "
				 "is converted",
				 u->rec->name);
	return 0;
}

static const char *held_by(const struct member_unit *mu)
{
	if (!mu)
		return NULL;
	return mu->gradient.slab      ? "given a gradient buffer"
	       : mu->accumulated.slab ? "accumulated"
				      : NULL;
}

/* Does anybody have anything of it in his hands? */
static int check_idle(const struct coll *c, const struct unit *u, struct fault *f)
{
	const char *what = u->summoned_ranks ? "summoned" : u->gathered_ranks ? "gathered" : NULL;

	if (unit_pools_gradient(u->rec) && (u->has_gradient || u->shards_left))
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' has a gradient that its optimizer is yet to use: "
				 "end the backward pass with Step before it is converted",
				 u->rec->name);
	if (check_passing(u, f))
		return f->code;
	if (ddp_unit_is_busy(c->job, u))
		return fault_set(
			f, FAULT_STATE, NULL,
			"unit '%.100s' is in buckets of a pass that is not over: DdpFinish "
			"comes before it is converted",
			u->rec->name);
	for (uint32_t i = 0; !what && i < c->n; i++)
		what = held_by(member_unit_find(c->members[i], u));
	if (!what)
		return 0;
	return fault_set(
		f, FAULT_STATE, NULL,
		"unit '%.100s' is %s: it has to be released, returned or reduced before it "
		"is converted",
		u->rec->name, what);
}

/* -------------------------------------------------------------------- memory */

/* The arrays of a part, parameters first. */
#define ARRAYS (2 + UNIT_MAX_STATES)

static struct region *array_of(struct unit_part *p, unsigned i)
{
	struct region *const arrays[ARRAYS] = { &p->params, &p->grads, &p->state1, &p->state2,
						&p->state3 };

	return arrays[i];
}

static state_region **record_of(state_part *p, unsigned i)
{
	state_region **const fields[ARRAYS] = { &p->params, &p->grads, &p->state1, &p->state2,
						&p->state3 };

	return fields[i];
}

static void free_parts(state_unit *rec)
{
	for (size_t i = 0; i < rec->n_parts; i++)
		shardd__state__part__free_unpacked(rec->parts[i], NULL);
	free(rec->parts);
	rec->parts = NULL;
	rec->n_parts = 0;
}

/* Old memory is the job's, or with it gone; the new one has become the job's or goes here. */
static void convert_free(struct coll *c)
{
	struct convert *v = c->convert;

	for (unsigned i = 0; i < v->n; i++) {
		unit_free(v->units[i].fresh);
		free_parts(&v->units[i].rec);
	}
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		for (unsigned k = 0; k < 2; k++)
			slab_unref(v->on[d].slabs[k]);
	free(v->units);
	free(v);
}

static uint64_t array_bytes(const struct unit *u, unsigned i)
{
	return i ? unit_array_bytes(&u->layout, u->spread)
		 : unit_params_bytes(&u->layout, u->spread);
}

static uint64_t array_room(const struct unit *u, unsigned d, unsigned i)
{
	return stagger_room(u->parts[d].device, array_bytes(u, i));
}

static int begin_unit(struct coll *c, struct changing *x, struct unit *u)
{
	struct fault f = FAULT_NULL;
	struct layout l;
	struct group *g = c->group;

	x->old = u;
	if (unit_pools_gradient(u->rec))
		job_give_grads(c->job, u); /* nobody's: check_idle */
	CHECK(new_record(c->ops[0], u, &x->rec, &f) == 0);
	CHECK(unit_layout(&x->rec, group_size(g), &l));
	if (unit_new(u->id, &x->rec, &l, g->devices, g->n_devices, &x->fresh) < 0)
		return -ENOMEM;
	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		x->fresh->tensors[i].of_unit = u->tensors[i].of_unit;
		x->fresh->tensors[i].of = u->tensors[i].of;
	}
	for (unsigned d = 0; d < u->n_parts; d++)
		for (unsigned i = 0; i < ARRAYS; i++)
			if (array_of(&u->parts[d], i)->slab)
				c->convert->on[u->parts[d].device->index].bytes[i > 0] +=
					array_bytes(x->fresh, i) + array_room(x->fresh, d, i);
	return 0;
}

static int convert_new(struct coll *c)
{
	const struct op *op = c->ops[0];
	struct convert *v = calloc(1, sizeof(*v));
	int r = 0;

	if (!v)
		return -ENOMEM;
	c->convert = v;
	c->forget = convert_free;
	v->units = calloc(op->args.convert.n, sizeof(*v->units));
	if (!v->units)
		return -ENOMEM;
	while (r == 0 && v->n < op->args.convert.n) {
		struct unit *u = job_unit_by_id(c->job, op->args.convert.units[v->n]);

		r = begin_unit(c, &v->units[v->n++], u);
	}
	return r;
}

/* All slabs are asked for, so that devices make them beside each other. Return: 0,
 * SLAB_E_*, or negative errno. */
static int take_slabs(struct coll *c)
{
	struct convert *v = c->convert;
	bool later = false;
	int r = 0;

	for (unsigned i = 0; r == 0 && i < 2 * c->job->node->n_devices; i++) {
		struct device *d = &c->job->node->devices[i / 2];
		uint64_t bytes = v->on[i / 2].bytes[i % 2];

		if (!bytes || v->on[i / 2].slabs[i % 2])
			continue;
		r = slab_new(d, &c->job->quota, MEM_SHARD, job_share(c->job), bytes,
			     c->job->rec->name, -1, &v->on[i / 2].slabs[i % 2]);
		if (r > 0 && r != SLAB_E_LATER && full_evict(c->job, UINT64_MAX))
			r = slab_new(d, &c->job->quota, MEM_SHARD, job_share(c->job), bytes,
				     c->job->rec->name, -1, &v->on[i / 2].slabs[i % 2]);
		later = later || r == SLAB_E_LATER;
		r = r == SLAB_E_LATER ? 0 : r;
	}
	return r || !later ? r : SLAB_E_LATER;
}

static uint64_t bytes_of_all(const struct coll *c)
{
	uint64_t sum = 0;

	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		sum += c->convert->on[d].bytes[0] + c->convert->on[d].bytes[1];
	return sum;
}

/* The regions of the new arrays, in the unit and in its record. */
static int place(struct convert *v, struct changing *x)
{
	for (unsigned d = 0; d < x->old->n_parts; d++) {
		struct unit_part *p = &x->fresh->parts[d];
		state_part *rec = state_unit_add_part(&x->rec);
		unsigned on = p->device->index;

		if (!rec)
			return -ENOMEM;
		for (unsigned i = 0; i < ARRAYS; i++) {
			uint64_t *at = &v->on[on].at[i > 0], bytes = array_bytes(x->fresh, i);

			if (!array_of(&x->old->parts[d], i)->slab)
				continue;
			*array_of(p, i) = (struct region){
				v->on[on].slabs[i > 0],
				*at + stagger_by(p->device, bytes, STAGGER_ARRAY(i)), bytes
			};
			*at += bytes + array_room(x->fresh, d, i);
			if (state_region_set(record_of(rec, i), array_of(p, i)) < 0)
				return -ENOMEM;
		}
	}
	return 0;
}

static int place_all(struct convert *v)
{
	int r = 0;

	CHECK(!v->units[0].rec.n_parts);
	for (unsigned i = 0; r == 0 && i < v->n; i++)
		r = place(v, &v->units[i]);
	return r;
}

/* ------------------------------------------------------------------ the swap */

static void swap_region(struct region *a, struct region *b)
{
	struct region t = *a;

	*a = *b;
	*b = t;
}

/* What is reached by pointers from outside stays: the unit, its parts, its record. */
static void swap_unit(struct job *job, struct changing *x)
{
	struct unit *u = x->old, *fresh = x->fresh;
	struct unit_tensor *tensors = u->tensors;
	state_unit *rec = u->rec;
	state_part **parts = rec->parts;

	known_drop(job); /* who registers what it was is to be told what it is */
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
			swap_region(array_of(&u->parts[d], i), array_of(&fresh->parts[d], i));
	unit_lay_out(u, &fresh->layout, NULL);
	u->version++;
}

static void converted(struct coll *c)
{
	struct convert *v = c->convert;
	struct slab *fresh[2 * NODE_MAX_DEVICES];
	unsigned n = 0;

	for (unsigned i = 0; i < 2 * NODE_MAX_DEVICES; i++)
		if (v->on[i / 2].slabs[i % 2])
			fresh[n++] = v->on[i / 2].slabs[i % 2];
	if (job_add_slabs(c->job, fresh, n) < 0) {
		coll_end_status(c, -ENOMEM);
		return;
	}
	for (unsigned i = 0; i < v->n; i++)
		swap_unit(c->job, &v->units[i]);
	job_drop_unused_slabs(c->job);
	c->job->readers.changes++;
	coll_end(c, NULL);
}

/* ---------------------------------------------------------------- repacking */

static void next_array(struct coll *c);

static struct changing *current(const struct coll *c)
{
	return &c->convert->units[c->convert->unit];
}

/* Where element @at of the array of the old part at position @q is to be read on device @d. */
static const float *source(const struct coll *c, unsigned d, unsigned q, uint64_t at)
{
	struct unit *old = current(c)->old;
	uint64_t trained = unit_part_elements(old);

	if (old->spread == 1)
		return optim_at(array_of(&old->parts[d], c->convert->array), at);
	if (at >= trained)
		at += trained * (old->spread - 1) + q * unit_frozen_elements(old);
	else
		at += q * trained;
	/* a frozen element was counted behind one part's trained ones */
	return optim_at(&c->parts[d].scratch[0], at);
}

/* What the new run @to takes of the old run @from, both of one tensor. */
static void copy_common(struct coll *c, unsigned d, unsigned q, const struct unit_run *to,
			const struct unit_run *from)
{
	uint64_t begin = to->first > from->first ? to->first : from->first;
	uint64_t to_end = to->first + to->n, from_end = from->first + from->n;
	uint64_t end = to_end < from_end ? to_end : from_end;
	struct region *array = array_of(&current(c)->fresh->parts[d], c->convert->array);

	if (begin < end)
		coll_kop(&c->parts[d], KOP_COPY, (end - begin) * sizeof(float))->copy =
			(struct k_copy){ optim_at(array, to->at + begin - to->first),
					 source(c, d, q, from->at + begin - from->first) };
}

static void repack_part(struct coll *c, unsigned d)
{
	struct changing *x = current(c);
	struct unit_run to, from;

	for (uint32_t t = 0; t < x->old->rec->n_tensors; t++) {
		if (c->convert->array && x->old->tensors[t].frozen)
			continue;
		if (!unit_part_run(x->fresh, &x->fresh->parts[d], t, &to))
			continue;
		for (unsigned q = 0; q < x->old->spread; q++)
			if (unit_part_run(x->old, &x->old->parts[q], t, &from))
				copy_common(c, d, q, &to, &from);
	}
}

static void repack(struct coll *c)
{
	struct changing *x = current(c);

	if (!coll_need_kops(c, (size_t)x->old->rec->n_tensors * x->old->spread))
		return;
	for (unsigned d = 0; d < c->n_parts; d++)
		repack_part(c, d);
	c->convert->array++;
	coll_kernels_sync(c, next_array);
}

static void gather(struct coll *c, bool frozen, void (*next)(struct coll *c))
{
	const struct region *arrays[NODE_MAX_DEVICES];

	for (unsigned d = 0; d < c->n_parts; d++)
		arrays[d] = array_of(&current(c)->old->parts[d], c->convert->array);
	c->unit = current(c)->old;
	coll_gather_array(c, arrays, frozen, next);
}

static void gather_frozen(struct coll *c)
{
	if (c->convert->array)
		repack(c);
	else
		gather(c, true, repack);
}

static void next_array(struct coll *c)
{
	struct convert *v = c->convert;

	if (v->unit < v->n && v->array == ARRAYS) {
		v->unit++;
		v->array = 0;
	}
	if (v->unit == v->n) {
		converted(c);
		return;
	}
	if (!array_of(&current(c)->old->parts[0], v->array)->slab) {
		v->array++;
		next_array(c);
	} else if (current(c)->old->spread > 1) {
		gather(c, false, gather_frozen);
	} else {
		repack(c);
	}
}

/* ------------------------------------------------------------------ the op */

static bool is_waiting_for_copies(const struct coll *c)
{
	for (unsigned i = 0; i < c->convert->n; i++)
		if (c->convert->units[i].old->casting || c->convert->units[i].old->executing)
			return true;
	return false;
}

static int check_all(const struct coll *c, struct fault *f)
{
	for (size_t i = 0; i < c->ops[0]->args.convert.n; i++) {
		struct unit *u = job_unit_by_id(c->job, c->ops[0]->args.convert.units[i]);

		guard_drop(c->job, u);
		if (check_idle(c, u, f))
			return f->code;
	}
	return 0;
}

static void start(struct parked *p);

/* Of the largest array that is brought together. */
static uint64_t scratch_bytes(const struct coll *c)
{
	uint64_t most = 0;

	for (unsigned i = 0; i < c->convert->n; i++) {
		const struct unit *u = c->convert->units[i].old;
		uint64_t bytes = (unit_part_elements(u) + unit_frozen_elements(u)) * u->spread *
				 sizeof(float);

		if (u->spread > 1 && bytes > most)
			most = bytes;
	}
	return most;
}

/* Return: false: it waits, or has ended. */
static bool memory_ready(struct coll *c)
{
	struct fault f = FAULT_NULL;
	int r = c->convert ? 0 : convert_new(c);

	if (r == 0)
		r = take_slabs(c);
	if (r == SLAB_E_LATER || (r == 0 && is_waiting_for_copies(c))) {
		node_wait(c->job->node, &c->parked, start);
		return false;
	}
	if (r == 0)
		return true;
	op_memory_fault(c->job, r, c->convert ? bytes_of_all(c) : 0, "converted units", &f);
	coll_end(c, &f);
	return false;
}

static bool devices_ready(struct coll *c)
{
	uint64_t bytes = scratch_bytes(c);

	return !bytes || (coll_ready(c, start) && coll_need_scratch(c, 0, bytes, start));
}

/* A copy of one may have been begun meanwhile. */
static void begin(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);

	if (coll_overtaken(c, true))
		return;
	if (is_waiting_for_copies(c))
		node_wait(c->job->node, &c->parked, start);
	else if (place_all(c->convert) < 0)
		coll_end_status(c, -ENOMEM);
	else if (coll_need_kops(c, 0))
		coll_kernels(c, next_array);
}

static void start(struct parked *p)
{
	struct coll *c = CONTAINER_OF(p, struct coll, parked);
	struct fault f = FAULT_NULL;
	int r;

	if (coll_overtaken(c, true))
		return;
	if (check_all(c, &f)) {
		coll_end(c, &f);
		return;
	}
	if (!coll_may_write(c, start) || !memory_ready(c) || !devices_ready(c))
		return;
	r = drain_ensure(c->job, p, begin);
	if (r < 0)
		coll_end_status(c, r);
	else if (r == 0)
		begin(p);
}

static void run(struct coll *c)
{
	if (apply_ensure(c->job, &c->parked, start))
		start(&c->parked);
}

static bool is_converted(const struct op *op, uint32_t id)
{
	size_t lo = 0, hi = op->args.convert.n; /* they ascend */

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (op->args.convert.units[mid] == id)
			return true;
		if (op->args.convert.units[mid] < id)
			lo = mid + 1;
		else
			hi = mid;
	}
	return false;
}

/* Has @u names of tensors that were moved, and was not itself? */
static bool is_tied(const struct op *op, const struct unit *u)
{
	for (uint32_t i = 0; !is_converted(op, u->id) && i < u->rec->n_tensors; i++)
		if (u->tensors[i].alias && is_converted(op, u->tensors[i].of_unit))
			return true;
	return false;
}

static int tell(const struct op *op, const struct unit *u, struct registered *all,
		Shardd__V1__RegisteredUnit **units, size_t *n)
{
	units[*n] = &all[*n].unit;
	return registered_init(&all[(*n)++], op->m->job, u, op->m->rank);
}

/* Without memory the reply has no units: what was done is done. */
static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ConvertUnitsReply reply = SHARDD__V1__CONVERT_UNITS_REPLY__INIT;
	const struct job *job = op->m->job;
	struct registered *all = calloc(job->n_units, sizeof(*all));
	Shardd__V1__RegisteredUnit **units = calloc(job->n_units, sizeof(*units));
	int r = all && units ? 0 : -ENOMEM;
	size_t n = 0;

	for (size_t i = 0; r == 0 && i < op->args.convert.n; i++)
		r = tell(op, job->units[op->args.convert.units[i] - 1], all, units, &n);
	for (uint32_t i = 0; r == 0 && i < job->n_units; i++)
		if (is_tied(op, job->units[i]))
			r = tell(op, job->units[i], all, units, &n);
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
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
	.move = MOVE_NEEDS_IDLE,
};
