#include "job/resize.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/loopq.h"
#include "core/state.h"
#include "job/generation.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/relayout.h"
#include "job/units_impl.h"
#include "unit/reduce_plan.h"
#include "unit/runs.h"

enum resize_stage { RESIZE_WAITING, RESIZE_MEMORY, RESIZE_COPYING };

static const struct state_row resize_stages[] = {
	[RESIZE_WAITING] = { "WAITING", STATE_TO(RESIZE_MEMORY) },
	[RESIZE_MEMORY] = { "MEMORY", STATE_TO(RESIZE_COPYING) },
	[RESIZE_COPYING] = { "COPYING", 0 },
};

/* A rank of the new world: its device, and memory for its buffers. */
struct resize_rank {
	struct device *device;
	uint64_t bytes, at;
	struct slab *slab; /* owned; NULL: none is needed */
};

/* The copies to one device. */
struct resize_part {
	struct backend_task task;
	struct resize *resize;
	size_t room;
	struct launch *launches; /* owned */
};

struct resize {
	struct job *job;
	uint32_t world;
	uint8_t stage;
	uint64_t until_us;
	struct relayout *units; /* owned, by unit of the job; dropped: all NULL */
	bool *moves;            /* owned, by unit */
	bool moves_kept;        /* one does: then all copies of the commit do, which share slabs */
	struct relayout_memory mem;
	uint64_t kept_bytes[NODE_MAX_DEVICES], kept_at[NODE_MAX_DEVICES];
	struct slab *kept[NODE_MAX_DEVICES]; /* owned; of copies (job/kept.h) */
	struct resize_rank *ranks;           /* owned, by new rank */
	struct device *devices[NODE_MAX_DEVICES];
	unsigned n_devices;
	struct resize_part parts[NODE_MAX_DEVICES];
	unsigned pending;
	int status;
	struct resize_report report;
	state_group *group_rec; /* owned, as is the next: of the new world */
	struct group *group;
	struct work begun;
	bool posted;          /* @begun is */
	struct waiter waiter; /* for readers */
	bool writes;          /* counted in the job's readers.writing */
	bool ended;           /* the epoch is */
	resize_cb done;       /* NULL: nobody waits */
	void *userdata;
};

bool resize_is_busy(const struct job *job)
{
	return job->life.resize;
}

/* ------------------------------------------------------------------- what can be resized */

/* The record of @u as it would be with @world ranks: without parts and buffers. */
static int resize_record(const struct job *job, const struct unit *u, uint32_t world,
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

static int resize_check_units(const struct job *job, uint32_t world, struct fault *f)
{
	for (uint32_t i = 0; !f->code && i < job->n_units; i++) {
		state_unit rec;
		struct layout l;

		if (!job->units[i]->rec->dropped)
			(void)resize_record(job, job->units[i], world, &rec, &l, f);
	}
	return f->code;
}

static int resize_check(const struct job *job, uint32_t world, struct fault *f)
{
	uint32_t most = job->node->limits.max_world_size;

	if (job->life.resize)
		return fault_set(f, FAULT_STATE, NULL, "job '%s' is being resized to %u ranks",
				 job->rec->name, job->life.resize->world);
	if (!world || world > most)
		return fault_set(f, FAULT_INVALID, "world_size",
				 "world_size %u is out of range (1..%u, max_world_size)", world,
				 most);
	if (job->checkpoints.loading)
		return fault_set(f, FAULT_STATE, NULL,
				 "a checkpoint is being loaded into job '%s': wait for its end",
				 job->rec->name);
	return resize_check_units(job, world, f);
}

static int resize_refuse_present(const struct job *job, struct fault *f)
{
	return fault_set(
		f, FAULT_STATE, NULL,
		"job '%s' has %u trainers: its world size can change only while no rank is "
		"in it; drain it first (shardctl job drain)",
		job->rec->name, job->present);
}

/* ---------------------------------------------------------------------------- its end */

static void resize_free(struct resize *r)
{
	for (uint32_t i = 0; r->units && i < r->job->n_units; i++) {
		relayout_deinit(&r->units[i]);
		for (size_t k = 0; k < r->units[i].rec.n_buffer_regions; k++)
			state_region_free(&r->units[i].rec.buffer_regions[k]);
		free(r->units[i].rec.buffer_regions);
	}
	relayout_memory_deinit(&r->mem);
	for (uint32_t i = 0; r->ranks && i < r->world; i++)
		slab_unref(r->ranks[i].slab);
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++) {
		slab_unref(r->kept[d]);
		free(r->parts[d].launches);
	}
	group_free(r->group);
	state_group_free(r->group_rec);
	free(r->units);
	free(r->moves);
	free(r->ranks);
	free(r);
}

/* It is over. Then the caller lets ranks that have waited go on (job_settle). */
static void resize_over(struct resize *r, const struct fault *f)
{
	struct job *job = r->job;

	job->life.resize = NULL;
	waiter_leave(&r->waiter);
	job->readers.writing -= r->writes;
	if (f) {
		log_warn("job", "not resized job=%s from=%u to=%u why=\"%s\"", job->label,
			 r->report.from, r->report.to, f->text);
		job_note_error(job, f);
	}
	if (r->done)
		r->done(&r->report, f, r->userdata);
	resize_free(r);
}

static void resize_fail(struct resize *r, int error)
{
	struct fault f = FAULT_NULL;
	char holders[440];

	if (slab_is_short(error)) {
		job_holders(r->job, holders, sizeof(holders));
		fault_set(&f, FAULT_EXHAUSTED, NULL,
			  "cannot allocate %llu bytes to lay job '%s' out for %u ranks: %s",
			  (unsigned long long)relayout_bytes(&r->mem), r->job->rec->name, r->world,
			  holders);
	} else {
		fault_errno(&f, error, "resizing a job");
	}
	resize_over(r, &f);
}

/* ------------------------------------------------------------------------ the new layout */

static void resize_place_ranks(struct resize *r)
{
	for (uint32_t i = 0; i < r->world; i++) {
		struct device *d = job_place_default(r->job, i, r->world);
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
static bool resize_stays(const struct relayout *x)
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
static bool resize_has_kept(const struct relayout *x)
{
	return x->old->parts[0].kept.slab;
}

/* Of the copy of part @d: as many as its arrays will have, which are those of today if it stays. */
static uint64_t resize_kept_bytes(const struct resize *r, const struct relayout *x, unsigned d)
{
	bool moves = r->moves[x->old->id - 1];
	uint64_t bytes = 0;

	for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
		if (i != 1 && relayout_has_array(x, i))
			bytes += moves ? relayout_array_bytes(x->fresh, i)
				       : relayout_array(&x->old->parts[d], i)->bytes;
	return bytes;
}

/* May the buffers of new rank @i stay where those of the rank of that number are? */
static bool resize_buffers_stay(const struct resize *r, const struct unit *u, uint32_t i)
{
	return i < r->report.from && u->buffers[i].slab->device == r->ranks[i].device;
}

static void resize_sum_buffers(struct resize *r, const struct unit *u)
{
	for (uint32_t i = 0; u->buffers && i < r->world; i++)
		if (!resize_buffers_stay(r, u, i))
			r->ranks[i].bytes += unit_buffers_bytes(u->rec);
}

static int resize_lay_out_unit(struct resize *r, uint32_t i)
{
	struct relayout *x = &r->units[i];
	struct unit *u = r->job->units[i];
	struct fault f = FAULT_NULL;
	struct layout l;

	x->old = u;
	CHECK(resize_record(r->job, u, r->world, &x->rec, &l, &f) == 0);
	if (unit_new(u->id, &x->rec, &l, r->devices, r->n_devices, &x->fresh) < 0)
		return -ENOMEM;
	for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
		x->fresh->tensors[t].of_unit = u->tensors[t].of_unit;
		x->fresh->tensors[t].of = u->tensors[t].of;
	}
	r->moves[i] = !resize_stays(x);
	return 0;
}

/* Is an array of the unit in a slab that is marked? @mark: mark them. */
static bool resize_is_in_marked(const struct unit *u, bool mark)
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
static void resize_move_together(struct resize *r)
{
	struct job *job = r->job;
	bool again;

	do {
		again = false;
		for (uint32_t i = 0; i < job->mem.n_slabs; i++)
			job->mem.slabs[i]->used = false;
		for (uint32_t i = 0; i < job->n_units; i++)
			if (r->moves[i])
				resize_is_in_marked(job->units[i], true);
		for (uint32_t i = 0; i < job->n_units; i++)
			if (r->units[i].old && !r->moves[i] &&
			    resize_is_in_marked(job->units[i], false))
				r->moves[i] = again = true;
	} while (again);
	for (uint32_t i = 0; i < job->n_units; i++)
		r->moves_kept = r->moves_kept || r->moves[i];
}

static void resize_sum(struct resize *r, uint32_t i)
{
	const struct relayout *x = &r->units[i];

	resize_sum_buffers(r, x->old);
	if (r->moves[i])
		relayout_sum(x, &r->mem);
	for (unsigned d = 0; r->moves_kept && resize_has_kept(x) && d < x->fresh->n_parts; d++)
		r->kept_bytes[x->fresh->parts[d].device->index] += resize_kept_bytes(r, x, d);
}

static int resize_lay_out(struct resize *r)
{
	struct job *job = r->job;
	int e = 0;

	r->units = calloc(job->n_units + 1, sizeof(*r->units));
	r->moves = calloc(job->n_units + 1, sizeof(*r->moves));
	r->ranks = calloc(r->world, sizeof(*r->ranks));
	if (!r->units || !r->moves || !r->ranks)
		return -ENOMEM;
	resize_place_ranks(r);
	for (uint32_t i = 0; e == 0 && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped)
			e = resize_lay_out_unit(r, i);
	if (e)
		return e;
	resize_move_together(r);
	for (uint32_t i = 0; i < job->n_units; i++)
		if (r->units[i].old)
			resize_sum(r, i);
	return 0;
}

static int resize_take_one(struct resize *r, struct device *d, uint64_t bytes, struct slab **ret,
			   bool *later)
{
	int e = bytes && !*ret ? relayout_take_slab(r->job, d, bytes, ret) : 0;

	return slab_note_later(e, later);
}

static int resize_take(struct resize *r)
{
	bool later = false;
	int e = slab_note_later(relayout_take(r->job, &r->mem), &later);

	for (uint32_t i = 0; e == 0 && i < r->world; i++)
		e = resize_take_one(r, r->ranks[i].device, r->ranks[i].bytes, &r->ranks[i].slab,
				    &later);
	for (unsigned d = 0; e == 0 && d < r->job->node->n_devices; d++)
		e = resize_take_one(r, &r->job->node->devices[d], r->kept_bytes[d], &r->kept[d],
				    &later);
	return e || !later ? e : SLAB_E_LATER;
}

/* The memory of a unit that stays is that of the new one, too. */
static int resize_keep_place(const struct resize *r, struct relayout *x)
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

static int resize_place_kept(struct resize *r, struct relayout *x)
{
	for (unsigned d = 0; resize_has_kept(x) && d < x->fresh->n_parts; d++) {
		uint64_t bytes = resize_kept_bytes(r, x, d);
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

static int resize_place_buffers(struct resize *r, struct relayout *x)
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

		if (resize_buffers_stay(r, x->old, i)) {
			*to = x->old->buffers[i];
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

static int resize_place(struct resize *r)
{
	int e = 0;

	for (uint32_t i = 0; e == 0 && i < r->job->n_units; i++) {
		struct relayout *x = &r->units[i];

		if (!x->old)
			continue;
		e = r->moves[i] ? relayout_place(x, &r->mem) : resize_keep_place(r, x);
		if (e == 0 && r->moves_kept)
			e = resize_place_kept(r, x);
		if (e == 0)
			e = resize_place_buffers(r, x);
	}
	return e;
}

/* --------------------------------------------------------------------------- the copies */

static int resize_copy(struct resize *r, const struct device *d, void *dst, const void *src,
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
static struct unit_part *resize_source(const struct unit *u, unsigned q, const struct device *d)
{
	for (unsigned k = q; k < u->n_parts; k += u->spread)
		if (u->parts[k].device == d)
			return &u->parts[k];
	return &u->parts[q];
}

/* What the run @to, of array @i of the new part @p, takes of position @q of the old unit. */
static int resize_copy_run(struct resize *r, const struct relayout *x, struct unit_part *p,
			   unsigned i, const struct unit_run *to, unsigned q)
{
	struct unit_part *source = resize_source(x->old, q, p->device);
	uint64_t begin, end;
	struct unit_run from;

	if (!unit_part_run(x->old, source, to->tensor, &from))
		return 0;
	begin = to->first > from.first ? to->first : from.first;
	end = to->first + to->n < from.first + from.n ? to->first + to->n : from.first + from.n;
	if (begin >= end)
		return 0;
	return resize_copy(
		r, p->device,
		unit_state_at(&x->rec, relayout_array(p, i), i, to->at + begin - to->first),
		unit_state_at(&x->rec, relayout_array(source, i), i, from.at + begin - from.first),
		(end - begin) * dtype_size(unit_state_dtype(&x->rec, i)));
}

/* All but gradients, which belong to an epoch. */
static int resize_copy_part(struct resize *r, const struct relayout *x, struct unit_part *p)
{
	struct unit_run to;
	int e = 0;

	for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
		for (uint32_t t = 0; i != 1 && relayout_has_array(x, i) && t < x->rec.n_tensors;
		     t++) {
			if ((i && x->old->tensors[t].frozen) || !unit_part_run(x->fresh, p, t, &to))
				continue;
			for (unsigned q = 0; e == 0 && q < x->old->spread; q++)
				e = resize_copy_run(r, x, p, i, &to, q);
		}
	return e;
}

static int resize_copy_buffers(struct resize *r, const struct relayout *x)
{
	int e = 0;

	for (uint32_t i = 0; e == 0 && x->old->buffers && i < r->world; i++)
		if (!resize_buffers_stay(r, x->old, i))
			e = resize_copy(r, r->ranks[i].device, region_addr(&x->fresh->buffers[i]),
					region_addr(&x->old->buffers[i < r->report.from ? i : 0]),
					unit_buffers_bytes(&x->rec));
	return e;
}

static int resize_list_copies(struct resize *r)
{
	int e = 0;

	for (uint32_t i = 0; e == 0 && i < r->job->n_units; i++) {
		const struct relayout *x = &r->units[i];

		if (!x->old)
			continue;
		for (unsigned d = 0;
		     e == 0 && r->moves[i] && x->old->rec->initialised && d < x->fresh->n_parts;
		     d++)
			e = resize_copy_part(r, x, &x->fresh->parts[d]);
		if (e == 0)
			e = resize_copy_buffers(r, x);
	}
	return e;
}

/* -------------------------------------------------------------------------- the exchange */

static int resize_enter_slabs(struct resize *r)
{
	struct job *job = r->job;
	struct slab **all = calloc(r->world + NODE_MAX_DEVICES, sizeof(*all));
	size_t n = 0;
	int e;

	if (!all)
		return -ENOMEM;
	for (uint32_t i = 0; i < r->world; i++) {
		struct slab *s = r->ranks[i].slab;

		if (!s)
			continue;
		s->writable = true;
		s->owner_rank = (int)i;
		all[n++] = s;
	}
	for (unsigned d = 0; d < job->node->n_devices; d++)
		if (r->kept[d])
			all[n++] = r->kept[d];
	e = job_add_slabs(job, all, n);
	free(all);
	return e < 0 ? e : relayout_enter(job, &r->mem);
}

/* The unit's own record and memory are @x's from here on. */
static void resize_swap_unit(struct resize *r, uint32_t i)
{
	struct relayout *x = &r->units[i];
	struct unit *u = x->old, *fresh = x->fresh;
	struct job *job = r->job;
	state_unit *rec = u->rec;

	if (job->jobs->ops.rolled_back)
		job->jobs->ops.rolled_back(job, u);
	job_give_full(job, u);
	job_give_grads(job, u);
	job_give_partials(job, u);
	CHECK(!unit_has_copy(u) && !u->gathered_ranks && !u->summoned_ranks);
	for (unsigned d = 0; d < u->n_parts; d++)
		reads_deinit(&u->parts[d].reads);
	SWAP(rec->parts, x->rec.parts);
	SWAP(rec->n_parts, x->rec.n_parts);
	SWAP(rec->buffer_regions, x->rec.buffer_regions);
	SWAP(rec->n_buffer_regions, x->rec.n_buffer_regions);
	rec->strategy = x->rec.strategy;
	rec->shard_ranks = x->rec.shard_ranks;
	rec->pre_divide = x->rec.pre_divide;
	rec->post_divide = x->rec.post_divide;
	SWAP(u->parts, fresh->parts);
	SWAP(u->n_parts, fresh->n_parts);
	SWAP(u->tensors, fresh->tensors);
	SWAP(u->buffers, fresh->buffers);
	unit_lay_out(u, &fresh->layout, NULL);
	u->version++;
	u->has_partials = false;
	r->report.in_place += !r->moves[i];
	job_journal_mark_unit(job, u);
}

/* They only keep their numbers; what is in the record must fit the world. */
static void resize_dropped_unit(struct job *job, struct unit *u)
{
	u->rec->group = 0;
	u->rec->shard_ranks = 1;
	job_journal_mark_unit(job, u);
}

/* The world group, as it will be. */
static int resize_make_group(struct resize *r)
{
	uint32_t *ranks = calloc(r->world, sizeof(*ranks));
	struct job *job = r->job;

	if (!ranks)
		return -ENOMEM;
	for (uint32_t i = 0; i < r->world; i++)
		ranks[i] = i;
	r->group_rec = state_group_new(job->groups[0]->rec->name, ranks, r->world);
	free(ranks);
	if (!r->group_rec || group_new(job, 0, r->group_rec, job->jobs->ops.complete,
				       job->jobs->ops.failed, &r->group) < 0)
		return -ENOMEM;
	if (!job->n_units)
		return 0; /* its ranks choose their devices when they join */
	r->group->devices = malloc(r->n_devices * sizeof(struct device *));
	if (!r->group->devices)
		return -ENOMEM;
	memcpy(r->group->devices, r->devices, r->n_devices * sizeof(struct device *));
	r->group->n_devices = r->n_devices;
	return 0;
}

/* Names of the devices of the new ranks; "": not placed yet. */
static const char **resize_device_names(const struct resize *r)
{
	const char **names = calloc(r->world, sizeof(*names));

	for (uint32_t i = 0; names && i < r->world; i++)
		names[i] = r->group->n_devices ? backend_lasting_name(r->ranks[i].device->backend)
					       : "";
	return names;
}

/* The record, and what the job has by rank. On failure nothing has changed. */
static int resize_world(struct resize *r)
{
	struct job *job = r->job;
	uint64_t before = job_own_bytes(job, job->n_units, 0), blobs;
	struct member **ranks = calloc(r->world, sizeof(struct member *));
	struct device **placed = calloc(r->world, sizeof(struct device *));
	const char **names = resize_device_names(r);
	int e = ranks && placed && names ? 0 : -ENOMEM;

	if (e == 0)
		e = state_job_resize(job->rec, r->group_rec, names, &r->report.left_out, &blobs);
	free(names);
	if (e) {
		free(ranks);
		free(placed);
		return e;
	}
	r->group_rec = NULL;
	quota_return(&job->quota, MEM_CONTROL, blobs);
	/* more ranks are more records; a user who has no room for them finds out at the next unit */
	(void)user_charge_resize(
		&job->memory, job->memory.n - before + job_own_bytes(job, job->n_units, 0), NULL);
	for (uint32_t i = 0; i < r->report.from; i++)
		member_unref(job->ranks[i]);
	free(job->ranks);
	free(job->placed);
	job->ranks = ranks;
	job->placed = placed;
	for (uint32_t i = 0; i < r->world; i++)
		placed[i] = r->group->n_devices ? r->ranks[i].device : NULL;
	return 0;
}

static void resize_groups(struct resize *r)
{
	struct job *job = r->job;

	ddps_free(job);
	while (job->n_groups)
		group_free(job->groups[--job->n_groups]);
	job->groups[job->n_groups++] = STEAL_PTR(r->group);
}

/* One entry of the journal: the job is the old one until it is complete, and the new one then. */
static int resize_exchange(struct resize *r)
{
	struct job *job = r->job;
	int e = resize_enter_slabs(r);

	if (e == 0)
		e = resize_world(r);
	if (e) {
		job_drop_unused_slabs(job, NULL);
		return e;
	}
	resize_groups(r);
	regcache_drop(job);
	for (uint32_t i = 0; i < job->n_units; i++)
		if (r->units[i].old)
			resize_swap_unit(r, i);
		else
			resize_dropped_unit(job, job->units[i]);
	job->readers.changes++;
	job_journal_mark(job, JOB_JOURNAL_HEAD | JOB_JOURNAL_BLOBS | JOB_JOURNAL_SLABS);
	job_journal_write(job);
	job_drop_unused_slabs(job, NULL);
	return 0;
}

/* ----------------------------------------------------------------------------- its course */

static void resize_copied(struct resize *r)
{
	struct job *job = r->job;
	struct fault f = FAULT_NULL;
	int e = r->status;

	if (job->life.deleted)
		fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	else if (e == 0)
		e = resize_exchange(r);
	if (!f.code && e)
		fault_errno(&f, e, "resizing a job");
	if (!f.code)
		log_info("job", "resized job=%s from=%u to=%u moved=%llu in_place=%u", job->label,
			 r->report.from, r->report.to, (unsigned long long)r->report.moved,
			 r->report.in_place);
	resize_over(r, f.code ? &f : NULL);
	job_ran(job);
}

static void resize_on_copied(struct backend_task *task, int status)
{
	struct resize *r = CONTAINER_OF(task, struct resize_part, task)->resize;

	r->status = r->status ? r->status : status;
	CHECK(r->pending > 0);
	if (--r->pending == 0)
		resize_copied(r);
}

/* With nothing to copy it still ends from the loop. */
static void resize_submit(struct resize *r)
{
	struct job *job = r->job;
	unsigned n = job->node->n_devices;

	job->running++;
	state_move(resize_stages, &r->stage, RESIZE_COPYING);
	for (unsigned d = 0; d < n; d++)
		r->pending += r->parts[d].task.n_launches > 0 || d == 0;
	for (unsigned d = 0; d < n; d++) {
		struct resize_part *p = &r->parts[d];

		if (!p->task.n_launches && d)
			continue;
		p->resize = r;
		p->task.launches = p->launches;
		p->task.sync = true;
		p->task.done = resize_on_copied;
		p->task.owner = job_as_owner(job);
		backend_submit(job->node->devices[d].backend, &p->task);
	}
}

/* Nothing of the epochs before it goes on. */
static bool resize_may_lay_out(const struct job *job)
{
	const struct job_step *step = &job->step;

	if (job->running || job->kept.run || kept_is_rolling_back(job) || job->generation)
		return false;
	if (step->state != JOB_STEP_NONE || step->committing || step->stepping)
		return false;
	for (uint32_t i = 0; i < job->rec->world_size; i++)
		if (job->ranks[i] && job->ranks[i]->pending)
			return false;
	return list_empty(&job->registrations);
}

static void resize_end_epoch(struct resize *r)
{
	struct job *job = r->job;
	struct fault f = FAULT_NULL;

	if (r->ended)
		return;
	r->ended = true;
	job_roll_back(job);
	fault_set(&f, FAULT_ABORTED, NULL, "job '%s' is resized to %u ranks", job->rec->name,
		  r->world);
	job_epoch_end(job, &f);
}

static void resize_on_posted(struct work *w);

static void resize_post(struct resize *r)
{
	r->posted = true;
	loopq_post(r->job->node->loopq, &r->begun, resize_on_posted);
}

static void resize_on_readers(struct waiter *w)
{
	resize_post(CONTAINER_OF(w, struct resize, waiter));
}

/* Readers hold parameters where they are: none does any more, and none will until the end. */
static bool resize_may_move(struct resize *r)
{
	if (r->writes)
		return true;
	if (waiter_on(&r->waiter) || readers_let_move(r->job, &r->waiter) == RES_WAIT)
		return false;
	r->writes = true;
	r->job->readers.writing++;
	return true;
}

static void resize_wait(struct resize *r)
{
	struct job *job = r->job;
	struct fault f = FAULT_NULL;
	int e;

	if (job->present && clock_now_us() < r->until_us)
		return;
	if (job->present) {
		(void)resize_refuse_present(job, &f);
		resize_over(r, &f);
		return;
	}
	resize_end_epoch(r);
	if (!resize_may_lay_out(job) || !resize_may_move(r))
		return;
	if (resize_check_units(job, r->world, &f)) { /* of ranks that were there when it began */
		resize_over(r, &f);
		return;
	}
	e = resize_lay_out(r);
	if (e) {
		resize_fail(r, e);
		return;
	}
	state_move(resize_stages, &r->stage, RESIZE_MEMORY);
}

static void resize_get_memory(struct resize *r)
{
	int e = resize_take(r);

	if (e == SLAB_E_LATER)
		return;
	if (e == 0)
		e = resize_make_group(r);
	if (e == 0)
		e = resize_place(r);
	if (e == 0)
		e = resize_list_copies(r);
	if (e)
		resize_fail(r, e);
	else
		resize_submit(r);
}

void resize_go_on(struct job *job)
{
	struct resize *r = job->life.resize;

	if (r && r->stage == RESIZE_WAITING && !r->posted)
		resize_wait(r);
	r = job->life.resize;
	if (r && r->stage == RESIZE_MEMORY)
		resize_get_memory(r);
}

static void resize_on_posted(struct work *w)
{
	struct resize *r = CONTAINER_OF(w, struct resize, begun);
	struct job *job = r->job;
	struct fault f = FAULT_NULL;

	r->posted = false;
	if (job->life.deleted) {
		fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
		resize_over(r, &f);
	}
	job_settle(job);
}

int resize_begin(struct job *job, uint32_t world, uint64_t wait_us, resize_cb done, void *userdata,
		 struct fault *f)
{
	struct resize *r;

	if (resize_check(job, world, f))
		return f->code;
	if (job->present && !wait_us)
		return resize_refuse_present(job, f);
	r = calloc(1, sizeof(*r));
	if (!r)
		return fault_errno(f, -ENOMEM, "resizing a job");
	*r = (struct resize){ .job = job,
			      .world = world,
			      .until_us = clock_now_us() + wait_us,
			      .report = { .from = job->rec->world_size, .to = world },
			      .done = done,
			      .userdata = userdata };
	waiter_init(&r->waiter, resize_on_readers);
	job->life.resize = r;
	resize_post(r);
	return 0;
}

void resize_hurry(struct job *job)
{
	if (job->life.resize)
		job->life.resize->until_us = 0;
}

void resize_cancel(struct job *job)
{
	struct resize *r = job->life.resize;
	struct fault f = FAULT_NULL;

	if (!r || r->posted || r->stage == RESIZE_COPYING)
		return; /* it finds the job deleted */
	fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	resize_over(r, &f);
}
