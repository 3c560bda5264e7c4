/* Of a resize: the units as they will be, their memory, and the copies into it. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/job.h"
#include "job/resize_impl.h"
#include "unit/reduce_plan.h"
#include "unit/runs.h"

/* ------------------------------------------------------------------- what can be resized */

/* The record of @u as it would be with @world ranks: without parts and buffers. */
static int resize_layout_record(const struct job *job, const struct unit *u, uint32_t world,
				state_unit *ret, struct layout *l, struct fault *f)
{
	*ret = *u->rec;
	ret->parts = NULL;
	ret->buffer_regions = NULL;
	ret->n_parts = ret->n_buffer_regions = 0;
	if (u->rec->group)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' belongs to group '%.64s'; only units of all ranks "
				 "can be laid out for another world size: convert or drop it first",
				 u->rec->name, job->groups[u->rec->group]->rec->name);
	if (ret->strategy != STRATEGY_HYBRID)
		ret->shard_ranks = 0;
	reduce_reopen_factors(ret, job->rec->world_size);
	if (unit_resolve(ret, world, f))
		return f->code;
	if (!unit_layout(ret, world, l))
		return fault_set(f, FAULT_INVALID, "world_size",
				 "unit '%.100s' would have more than 2^48 elements with its "
				 "padding for %u ranks",
				 u->rec->name, world);
	return 0;
}

int resize_check_units(const struct job *job, uint32_t world, struct fault *f)
{
	for (uint32_t i = 0; !f->code && i < job->n_units; i++) {
		state_unit rec;
		struct layout l;

		if (!job->units[i]->rec->dropped)
			(void)resize_layout_record(job, job->units[i], world, &rec, &l, f);
	}
	return f->code;
}
/* ------------------------------------------------------------------------ the new layout */

/* A rank that stays is where its process computes. */
static struct device *resize_layout_device(const struct resize *r, uint32_t i)
{
	if (resize_rank_stays(r, i) && r->job->placed[r->from[i]])
		return r->job->placed[r->from[i]];
	if (r->stay && r->stay->devices[i])
		return r->stay->devices[i];
	return job_place_default(r->job, i, r->world);
}

static void resize_layout_place_ranks(struct resize *r)
{
	for (uint32_t i = 0; i < r->world; i++) {
		struct device *d = resize_layout_device(r, i);
		unsigned k = 0;

		r->ranks[i].device = d;
		while (k < r->n_devices && r->devices[k] != d)
			k++;
		if (k == r->n_devices)
			r->devices[r->n_devices++] = d;
	}
}

/* Do its parts stay on their devices, all of it on each of them, and has each tensor the place that it
 * has now? Then its memory does, if it is large enough. */
static bool resize_layout_stays(const struct relayout *x)
{
	struct unit *old = x->old, *fresh = x->fresh;
	struct unit_run was, is;

	if (old->n_parts != fresh->n_parts || old->spread != 1 || fresh->spread != 1)
		return false;
	for (uint32_t t = 0; t < old->rec->n_tensors; t++)
		if (unit_part_run(old, &old->parts[0], t, &was) &&
		    unit_part_run(fresh, &fresh->parts[0], t, &is) && was.at != is.at)
			return false;
	for (unsigned d = 0; d < old->n_parts; d++) {
		if (old->parts[d].device != fresh->parts[d].device)
			return false;
		for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
			if (relayout_has_array(x, i) && relayout_array(&old->parts[d], i)->bytes <
								relayout_array_bytes(fresh, i))
				return false;
	}
	return true;
}

/* Has it memory for a copy of the committed state? Then it will have some. */
static bool resize_layout_has_kept(const struct relayout *x)
{
	return x->old->parts[0].kept.slab;
}

/* Of the copy of part @d: as many as its arrays will have, which are those of today if it stays. */
static uint64_t resize_layout_kept_bytes(const struct resize *r, const struct relayout *x,
					 unsigned d)
{
	bool moves = r->moves[x->old->id - 1];
	uint64_t bytes = 0;

	for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
		if (i != 1 && relayout_has_array(x, i))
			bytes += moves ? relayout_array_bytes(x->fresh, i)
				       : relayout_array(&x->old->parts[d], i)->bytes;
	return bytes;
}

/* May the buffers of new rank @i stay where those of the rank that it was are? */
static bool resize_layout_buffers_stay(const struct resize *r, const struct unit *u, uint32_t i)
{
	return r->from[i] != RESIZE_NEW &&
	       u->buffers[r->from[i]].slab->device == r->ranks[i].device;
}

static void resize_layout_sum_buffers(struct resize *r, const struct unit *u)
{
	for (uint32_t i = 0; u->buffers && i < r->world; i++)
		if (!resize_layout_buffers_stay(r, u, i))
			r->ranks[i].bytes += unit_buffers_bytes(u->rec);
}

/* Of the record @x->rec, and its layout. Return: 0 or -ENOMEM. */
static int resize_layout_set_replicas(const struct resize *r, struct relayout *x, struct layout *l)
{
	uint16_t *device_of = calloc(r->world, sizeof(*device_of));

	if (!device_of)
		return -ENOMEM;
	for (uint32_t i = 0; i < r->world; i++)
		while (r->devices[device_of[i]] != r->ranks[i].device)
			device_of[i]++;
	x->rec.sets = layout_has_sets(device_of, r->world, x->rec.shard_ranks, r->n_devices);
	l->sets = x->rec.sets;
	free(device_of);
	return 0;
}

static int resize_layout_lay_out_unit(struct resize *r, uint32_t i)
{
	struct relayout *x = &r->units[i];
	struct unit *u = r->job->units[i];
	const struct unit_place place = { r->devices, r->n_devices, r->n_devices, 0 };
	struct fault f = FAULT_NULL;
	struct layout l;

	x->old = u;
	CHECK(resize_layout_record(r->job, u, r->world, &x->rec, &l, &f) == 0);
	if (resize_layout_set_replicas(r, x, &l) < 0 ||
	    unit_new(u->id, &x->rec, &l, &place, &x->fresh) < 0)
		return -ENOMEM;
	for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
		x->fresh->tensors[t].of_unit = u->tensors[t].of_unit;
		x->fresh->tensors[t].of = u->tensors[t].of;
	}
	r->moves[i] = !resize_layout_stays(x);
	return 0;
}

/* Is an array of the unit in a slab that is marked? @mark: mark them. */
static bool resize_layout_is_in_marked(const struct unit *u, bool mark)
{
	bool found = false;

	for (unsigned d = 0; d < u->n_parts; d++)
		for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++) {
			struct slab *s = relayout_array(&u->parts[d], i)->slab;

			found = found || (s && s->used);
			if (s && mark)
				s->used = true;
		}
	return found;
}

/* A slab goes when nothing is in it any more: units that share one move together, or the job would keep
 * more with each resize. */
static void resize_layout_move_together(struct resize *r)
{
	struct job *job = r->job;
	bool again;

	do {
		again = false;
		for (uint32_t i = 0; i < job->mem.n_slabs; i++)
			job->mem.slabs[i]->used = false;
		for (uint32_t i = 0; i < job->n_units; i++)
			if (r->moves[i])
				resize_layout_is_in_marked(job->units[i], true);
		for (uint32_t i = 0; i < job->n_units; i++)
			if (r->units[i].old && !r->moves[i] &&
			    resize_layout_is_in_marked(job->units[i], false))
				r->moves[i] = again = true;
	} while (again);
	for (uint32_t i = 0; i < job->n_units; i++)
		r->moves_kept = r->moves_kept || r->moves[i];
}

static void resize_layout_sum(struct resize *r, uint32_t i)
{
	const struct relayout *x = &r->units[i];

	resize_layout_sum_buffers(r, x->old);
	if (r->moves[i])
		relayout_sum(x, &r->mem);
	for (unsigned d = 0; r->moves_kept && resize_layout_has_kept(x) && d < x->fresh->n_parts;
	     d++)
		r->kept_bytes[x->fresh->parts[d].device->index] +=
			resize_layout_kept_bytes(r, x, d);
}

int resize_lay_out(struct resize *r)
{
	struct job *job = r->job;
	int e = 0;

	r->units = calloc(job->n_units + 1, sizeof(*r->units));
	r->moves = calloc(job->n_units + 1, sizeof(*r->moves));
	r->ranks = calloc(r->world, sizeof(*r->ranks));
	if (!r->units || !r->moves || !r->ranks)
		return -ENOMEM;
	resize_layout_place_ranks(r);
	for (uint32_t i = 0; e == 0 && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped)
			e = resize_layout_lay_out_unit(r, i);
	if (e)
		return e;
	resize_layout_move_together(r);
	for (uint32_t i = 0; i < job->n_units; i++)
		if (r->units[i].old)
			resize_layout_sum(r, i);
	return 0;
}

static int resize_layout_take_one(struct resize *r, struct device *d, uint64_t bytes,
				  struct slab **ret, bool *later)
{
	int e = bytes && !*ret ? relayout_take_slab(r->job, d, bytes, ret) : 0;

	return slab_note_later(e, later);
}

int resize_take(struct resize *r)
{
	bool later = false;
	int e = slab_note_later(relayout_take(r->job, &r->mem), &later);

	for (uint32_t i = 0; e == 0 && i < r->world; i++)
		e = resize_layout_take_one(r, r->ranks[i].device, r->ranks[i].bytes,
					   &r->ranks[i].slab, &later);
	for (unsigned d = 0; e == 0 && d < r->job->node->n_devices; d++)
		e = resize_layout_take_one(r, &r->job->node->devices[d], r->kept_bytes[d],
					   &r->kept[d], &later);
	return e || !later ? e : SLAB_E_LATER;
}

/* The memory of a unit that stays is that of the new one, too. */
static int resize_layout_keep_place(const struct resize *r, struct relayout *x)
{
	for (unsigned d = 0; d < x->fresh->n_parts; d++) {
		struct unit_part *to = &x->fresh->parts[d], *from = &x->old->parts[d];
		state_part *rec = state_unit_add_part(&x->rec);

		if (!rec)
			return -ENOMEM;
		for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
			if (relayout_set_array(to, rec, i, relayout_array(from, i)) < 0)
				return -ENOMEM;
		if (r->moves_kept)
			continue;
		to->kept = from->kept;
		if (from->kept.slab && state_region_set(&rec->kept, &from->kept) < 0)
			return -ENOMEM;
	}
	return 0;
}

static int resize_layout_place_kept(struct resize *r, struct relayout *x)
{
	for (unsigned d = 0; resize_layout_has_kept(x) && d < x->fresh->n_parts; d++) {
		uint64_t bytes = resize_layout_kept_bytes(r, x, d);
		struct unit_part *p = &x->fresh->parts[d];
		unsigned on = p->device->index;

		p->kept = (struct region){ r->kept[on], r->kept_at[on], bytes };
		r->kept_at[on] += bytes;
		CHECK(r->kept_at[on] <= r->kept_bytes[on]);
		if (state_region_set(&x->rec.parts[d]->kept, &p->kept) < 0)
			return -ENOMEM;
	}
	return 0;
}

static int resize_layout_place_buffers(struct resize *r, struct relayout *x)
{
	uint64_t bytes = unit_buffers_bytes(&x->rec);

	if (!x->old->buffers)
		return 0;
	x->fresh->buffers = calloc(r->world, sizeof(*x->fresh->buffers));
	if (!x->fresh->buffers)
		return -ENOMEM;
	for (uint32_t i = 0; i < r->world; i++) {
		struct resize_rank *rank = &r->ranks[i];
		struct region *to = &x->fresh->buffers[i];

		if (resize_layout_buffers_stay(r, x->old, i)) {
			*to = x->old->buffers[r->from[i]];
		} else {
			*to = (struct region){ rank->slab, rank->at, bytes };
			rank->at += bytes;
			CHECK(rank->at <= rank->bytes);
		}
		if (state_unit_add_buffer_region(&x->rec, to) < 0)
			return -ENOMEM;
	}
	return 0;
}

int resize_place(struct resize *r)
{
	int e = 0;

	for (uint32_t i = 0; e == 0 && i < r->job->n_units; i++) {
		struct relayout *x = &r->units[i];

		if (!x->old)
			continue;
		e = r->moves[i] ? relayout_place(x, &r->mem) : resize_layout_keep_place(r, x);
		if (e == 0 && r->moves_kept)
			e = resize_layout_place_kept(r, x);
		if (e == 0)
			e = resize_layout_place_buffers(r, x);
	}
	return e;
}
/* --------------------------------------------------------------------------- the copies */

static int resize_layout_copy(struct resize *r, const struct device *d, void *dst, const void *src,
			      uint64_t bytes)
{
	struct resize_part *p = &r->parts[d->index];

	if (p->task.n_launches == p->room) {
		size_t room = p->room ? p->room * 2 : 64;
		struct launch *grown = realloc(p->launches, room * sizeof(*grown));

		if (!grown)
			return -ENOMEM;
		p->launches = grown;
		p->room = room;
	}
	p->launches[p->task.n_launches++] = (struct launch){ .kind = LAUNCH_COPY,
							     .n = bytes,
							     .copy = { .dst = dst, .src = src } };
	r->report.moved += bytes;
	return 0;
}

/* The part of @u that has position @q of a replica, on @d if there is one. */
static struct unit_part *resize_layout_source(const struct unit *u, unsigned q,
					      const struct device *d)
{
	for (unsigned k = q; k < u->n_parts; k += u->spread)
		if (u->parts[k].device == d)
			return &u->parts[k];
	return &u->parts[q];
}

/* What the run @to, of array @i of the new part @p, takes of position @q of the old unit. */
static int resize_layout_copy_run(struct resize *r, const struct relayout *x, struct unit_part *p,
				  unsigned i, const struct unit_run *to, unsigned q)
{
	struct unit_part *source = resize_layout_source(x->old, q, p->device);
	uint64_t begin, end;
	struct unit_run from;

	if (!unit_part_run(x->old, source, to->tensor, &from))
		return 0;
	begin = to->first > from.first ? to->first : from.first;
	end = to->first + to->n < from.first + from.n ? to->first + to->n : from.first + from.n;
	if (begin >= end)
		return 0;
	return resize_layout_copy(
		r, p->device,
		unit_state_at(&x->rec, relayout_array(p, i), i, to->at + begin - to->first),
		unit_state_at(&x->rec, relayout_array(source, i), i, from.at + begin - from.first),
		(end - begin) * dtype_size(unit_state_dtype(&x->rec, i)));
}

/* All but gradients, which belong to an epoch. */
static int resize_layout_copy_part(struct resize *r, const struct relayout *x, struct unit_part *p)
{
	struct unit_run to;
	int e = 0;

	for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
		for (uint32_t t = 0; i != 1 && relayout_has_array(x, i) && t < x->rec.n_tensors;
		     t++) {
			if ((i && x->old->tensors[t].frozen) || !unit_part_run(x->fresh, p, t, &to))
				continue;
			for (unsigned q = 0; e == 0 && q < x->old->spread; q++)
				e = resize_layout_copy_run(r, x, p, i, &to, q);
		}
	return e;
}

/* Those of a rank that is new are copies of rank 0's. */
static const struct region *resize_layout_buffers_of(const struct resize *r,
						     const struct relayout *x, uint32_t i)
{
	uint32_t from = r->from[i] != RESIZE_NEW ? r->from[i] : r->from[0];

	return &x->old->buffers[from != RESIZE_NEW ? from : 0];
}

static int resize_layout_copy_buffers(struct resize *r, const struct relayout *x)
{
	int e = 0;

	for (uint32_t i = 0; e == 0 && x->old->buffers && i < r->world; i++)
		if (!resize_layout_buffers_stay(r, x->old, i))
			e = resize_layout_copy(r, r->ranks[i].device,
					       region_addr(&x->fresh->buffers[i]),
					       region_addr(resize_layout_buffers_of(r, x, i)),
					       unit_buffers_bytes(&x->rec));
	return e;
}

int resize_list_copies(struct resize *r)
{
	int e = 0;

	for (uint32_t i = 0; e == 0 && i < r->job->n_units; i++) {
		const struct relayout *x = &r->units[i];

		if (!x->old)
			continue;
		for (unsigned d = 0;
		     e == 0 && r->moves[i] && x->old->rec->initialised && d < x->fresh->n_parts;
		     d++)
			e = resize_layout_copy_part(r, x, &x->fresh->parts[d]);
		if (e == 0)
			e = resize_layout_copy_buffers(r, x);
	}
	return e;
}
