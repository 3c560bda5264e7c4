/* Registration: a whole model at once, all units or none. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/aliases.h"
#include "job/job.h"

/* One registration under way: what must be undone if it fails. */
struct reg {
	struct job *job;
	state_unit **specs;
	size_t n;
	uint32_t *ids; /* 0: new */
	struct layout *layouts;
	size_t n_new;
	struct {
		uint64_t params_bytes; /* of all new units */
		uint64_t other_bytes;  /* gradient shards and optimizer state */
		struct slab *params;
		struct slab *other;
		uint64_t params_at; /* what has been cut off */
		uint64_t other_at;
	} on[NODE_MAX_DEVICES]; /* by device */
	struct {
		uint64_t bytes; /* of its buffers of all new units */
		struct slab *slab;
		uint64_t at;
	} * ranks; /* by rank of the job */
};

/* New units go where the ranks of their group are, and need communicators there. */
static int reg_place(struct group *g, struct fault *f)
{
	int e = group_place(g);

	if (e == -ENOMEM)
		return fault_errno(f, e, "placing a group");
	if (e == 0)
		e = group_comms(g, f);
	return e == NODE_E_LATER ? JOB_E_LATER : e;
}

static int reg_check_unit(struct reg *r, size_t i, struct fault *f)
{
	state_unit *spec = r->specs[i];
	struct group *g = job_group_by_id(r->job, spec->group);
	struct unit *have;

	if (!g)
		return fault_set(f, FAULT_INVALID, "units.group",
				 "unit '%.100s': group is %u: 0 to %u is allowed", spec->name,
				 spec->group, r->job->n_groups - 1);
	if (unit_resolve(spec, group_size(g), f))
		return f->code;
	if (!unit_layout(spec, group_size(g), &r->layouts[i]))
		return fault_set(f, FAULT_INVALID, "units.tensors",
				 "unit '%.100s': its shapes must be of 1 to 2^48 elements in "
				 "total, those of aliases not counted",
				 spec->name);
	if (!unit_buffers_fit(spec))
		return fault_set(f, FAULT_INVALID, "units.buffers",
				 "unit '%.100s': its buffers must be of up to 2^50 bytes in total",
				 spec->name);
	have = htab_find(&r->job->unit_names, spec->name);
	if (!have) {
		r->n_new++;
		return reg_place(g, f);
	}
	r->ids[i] = have->id;
	return unit_same_spec(have->rec, spec, f) ? 0 : (int)f->code;
}

/* The same name twice in one call. */
static int reg_check_names(struct reg *r, struct fault *f)
{
	struct htab names = HTAB_NULL;
	int e = 0;

	for (size_t i = 0; e == 0 && i < r->n; i++) {
		e = htab_add(&names, r->specs[i]->name, r->specs[i]);
		if (e == -EEXIST)
			fault_set(f, FAULT_INVALID, "units.name", "unit '%.100s' is there twice",
				  r->specs[i]->name);
		else if (e)
			fault_errno(f, e, "registering units");
	}
	htab_deinit(&names);
	return f->code;
}

static int reg_check_tensors(const struct reg *r, struct fault *f)
{
	const struct job *job = r->job;
	uint64_t tensors = 0;

	for (uint32_t i = 0; i < job->n_units; i++)
		tensors += job->units[i]->rec->n_tensors;
	for (size_t i = 0; i < r->n; i++)
		tensors += r->ids[i] ? 0 : r->specs[i]->n_tensors;
	if (tensors <= JOB_MAX_TENSORS)
		return 0;
	return fault_set(f, FAULT_EXHAUSTED, NULL,
			 "job '%s' would have %llu tensors: %u are allowed", job->rec->name,
			 (unsigned long long)tensors, JOB_MAX_TENSORS);
}

/* What is another name of what. */
static int reg_check_aliases(struct reg *r, struct fault *f)
{
	struct aliases a;

	aliases_init(&a, r->job);
	for (size_t i = 0; !f->code && i < r->n; i++)
		if (aliases_add(&a, r->specs[i]) < 0)
			fault_errno(f, -ENOMEM, "registering units");
	for (size_t i = 0; !f->code && i < r->n; i++)
		aliases_check(&a, r->specs[i], f);
	aliases_deinit(&a);
	return f->code;
}

static int reg_check(struct reg *r, struct fault *f)
{
	uint32_t most = r->job->node->limits.max_units_per_job;
	bool later = false;

	for (size_t i = 0; i < r->n; i++) {
		int e = reg_check_unit(r, i, f);

		later = later || e == JOB_E_LATER;
		if (f->code)
			return f->code;
	}
	if (reg_check_names(r, f))
		return f->code;
	/* the limit may have been lowered since */
	if (r->n_new && r->job->n_units + (uint64_t)r->n_new > most)
		return fault_set(
			f, FAULT_EXHAUSTED, NULL,
			"job '%s' would have %llu units: %u (max_units_per_job) are allowed",
			r->job->rec->name, (unsigned long long)r->job->n_units + r->n_new, most);
	if (reg_check_tensors(r, f) || reg_check_aliases(r, f))
		return f->code;
	return later ? JOB_E_LATER : 0;
}

/* One unit's bytes fit 64 bits by far; those of a hundred thousand need not. */
static uint64_t add(uint64_t a, uint64_t b)
{
	return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* Beside the parameters. */
static unsigned other_arrays(const state_unit *rec)
{
	return !unit_pools_gradient(rec) + unit_state_arrays(rec);
}

static void reg_sum_buffers(struct reg *r, const state_unit *spec)
{
	const state_group *g = r->job->groups[spec->group]->rec;
	uint64_t bytes = unit_buffers_bytes(spec);

	for (size_t i = 0; i < g->n_ranks; i++)
		r->ranks[g->ranks[i]].bytes = add(r->ranks[g->ranks[i]].bytes, bytes);
}

static void reg_sum(struct reg *r)
{
	for (size_t i = 0; i < r->n; i++) {
		struct group *g = r->job->groups[r->specs[i]->group];
		const struct layout *l = &r->layouts[i];
		unsigned spread = layout_spread(l, g->n_devices);
		uint64_t bytes = unit_array_bytes(l, spread);

		for (unsigned d = 0; !r->ids[i] && d < g->n_devices; d++) {
			unsigned on = g->devices[d]->index;

			r->on[on].params_bytes =
				add(r->on[on].params_bytes, unit_params_bytes(l, spread));
			r->on[on].other_bytes =
				add(r->on[on].other_bytes, bytes * other_arrays(r->specs[i]));
		}
		if (!r->ids[i])
			reg_sum_buffers(r, r->specs[i]);
	}
}

/* Where a rank's buffers are. */
static unsigned device_of(const struct job *job, uint32_t rank)
{
	return job->placed[rank] ? job->placed[rank]->index : 0;
}

/* What an earlier try of a registration took and kept. */
static struct slab *take_spare(struct job *job, const struct device *d, uint64_t bytes)
{
	uint64_t granularity = backend_info(d->backend)->granularity;

	for (unsigned i = 0; i < job->n_spare; i++) {
		struct slab *s = job->spare[i];

		if (s->device == d && s->bytes >= bytes && s->bytes - bytes < granularity) {
			job->spare[i] = job->spare[--job->n_spare];
			return s;
		}
	}
	return NULL;
}

void job_drop_spare(struct job *job)
{
	while (job->n_spare)
		slab_unref(job->spare[--job->n_spare]);
	free(job->spare);
	job->spare = NULL;
}

uint64_t job_spare_bytes(const struct job *job)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < job->n_spare; i++)
		bytes += job->spare[i]->bytes;
	return bytes;
}

/* Return: 0, SLAB_E_*, or negative errno. */
static int reg_slab(struct reg *r, unsigned d, uint64_t bytes, struct slab **ret)
{
	struct job *job = r->job;
	struct device *device = &job->node->devices[d];

	if (!bytes)
		return 0;
	*ret = take_spare(job, device, bytes);
	if (*ret)
		return 0;
	return slab_new(device, &job->quota, MEM_SHARD, job_share(job), bytes, job->rec->name, -1,
			ret);
}

static void keep_spare(struct job *job, struct slab **s)
{
	struct slab **grown = *s ? realloc(job->spare, (job->n_spare + 1) * sizeof(*grown)) : NULL;

	if (grown) {
		job->spare = grown;
		job->spare[job->n_spare++] = STEAL_PTR(*s);
	}
	*s = slab_unref(*s);
}

/* Some memory is being made: keep the rest for the next try, or give it back. */
static void reg_put_back(struct reg *r, bool keep)
{
	for (unsigned d = 0; d < r->job->node->n_devices; d++) {
		if (keep) {
			keep_spare(r->job, &r->on[d].params);
			keep_spare(r->job, &r->on[d].other);
		}
		r->on[d].params = slab_unref(r->on[d].params);
		r->on[d].other = slab_unref(r->on[d].other);
	}
	for (uint32_t i = 0; i < r->job->rec->world_size; i++) {
		if (keep)
			keep_spare(r->job, &r->ranks[i].slab);
		r->ranks[i].slab = slab_unref(r->ranks[i].slab);
	}
	if (!keep)
		job_drop_spare(r->job);
}

static int reg_memory_fault(struct reg *r, int error, struct fault *f)
{
	char holders[440];
	uint64_t bytes = 0;

	if (error < 0 && error != -ENOMEM) {
		reg_put_back(r, false);
		return fault_errno(f, error, "taking memory for shards");
	}
	for (unsigned d = 0; d < r->job->node->n_devices; d++)
		bytes = add(bytes, add(r->on[d].params_bytes, r->on[d].other_bytes));
	for (uint32_t i = 0; i < r->job->rec->world_size; i++)
		bytes = add(bytes, r->ranks[i].bytes);
	/* what this call has taken so far is not what the job holds */
	reg_put_back(r, false);
	job_holders(r->job, holders, sizeof(holders));
	return fault_set(f, FAULT_EXHAUSTED, NULL, "%llu bytes for shards are not to be had: %s",
			 (unsigned long long)bytes, holders);
}

static uint64_t rounded(const struct reg *r, unsigned d, uint64_t bytes)
{
	uint64_t granularity = backend_info(r->job->node->devices[d].backend)->granularity;

	return bytes > UINT64_MAX - granularity
		       ? UINT64_MAX
		       : (bytes + granularity - 1) / granularity * granularity;
}

/* Is there room for all of it? Devices make memory in their own time: what is refused in
 * the end should not be begun. */
static int reg_room(const struct reg *r)
{
	uint64_t all = 0;

	for (unsigned d = 0; d < r->job->node->n_devices; d++) {
		uint64_t bytes = add(rounded(r, d, r->on[d].params_bytes),
				     rounded(r, d, r->on[d].other_bytes));

		for (uint32_t i = 0; i < r->job->rec->world_size; i++)
			if (device_of(r->job, i) == d)
				bytes = add(bytes, rounded(r, d, r->ranks[i].bytes));
		if (bytes >
		    add(quota_left(&r->job->node->devices[d].quota), job_spare_bytes(r->job)))
			return SLAB_E_FULL;
		all = add(all, bytes);
	}
	return all > add(quota_left(&r->job->quota), job_spare_bytes(r->job)) ? SLAB_E_QUOTA : 0;
}

/* All slabs, or none. Asks for all of them, so that devices make them beside each other. */
static int reg_memory(struct reg *r, struct fault *f)
{
	bool later = false;
	int room = reg_room(r);

	if (room)
		return reg_memory_fault(r, room, f);
	for (unsigned i = 0; i < 2 * r->job->node->n_devices + r->job->rec->world_size; i++) {
		unsigned d = i / 2, rank = i - 2 * r->job->node->n_devices;
		int e;

		if (d >= r->job->node->n_devices)
			e = reg_slab(r, device_of(r->job, rank), r->ranks[rank].bytes,
				     &r->ranks[rank].slab);
		else
			e = i % 2 ? reg_slab(r, d, r->on[d].other_bytes, &r->on[d].other)
				  : reg_slab(r, d, r->on[d].params_bytes, &r->on[d].params);
		later = later || e == SLAB_E_LATER;
		if (e && e != SLAB_E_LATER)
			return reg_memory_fault(r, e, f);
	}
	if (later)
		reg_put_back(r, true);
	return later ? JOB_E_LATER : 0;
}

/* Cut the next @bytes off @slab at *@at. */
static struct region cut(struct slab *slab, uint64_t *at, uint64_t bytes)
{
	struct region r = { slab, *at, bytes };

	*at += bytes;
	CHECK(*at <= slab->bytes);
	return r;
}

/* Memory for one part of a new unit, in the record and in the unit. */
static int place(struct unit *u, struct reg *r, struct unit_part *p)
{
	uint64_t bytes = unit_array_bytes(&u->layout, u->spread);
	unsigned states = unit_state_arrays(u->rec), d = p->device->index;
	state_part *rec = state_unit_add_part(u->rec);

	if (!rec)
		return -ENOMEM;
	p->params =
		cut(r->on[d].params, &r->on[d].params_at, unit_params_bytes(&u->layout, u->spread));
	if (state_region_set(&rec->params, &p->params) < 0)
		return -ENOMEM;
	if (!bytes) /* all of it is frozen */
		return 0;
	if (!unit_pools_gradient(u->rec))
		p->grads = cut(r->on[d].other, &r->on[d].other_at, bytes);
	if (states > 0)
		p->state1 = cut(r->on[d].other, &r->on[d].other_at, bytes);
	if (states > 1)
		p->state2 = cut(r->on[d].other, &r->on[d].other_at, bytes);
	if (states > 2)
		p->state3 = cut(r->on[d].other, &r->on[d].other_at, bytes);
	if ((p->grads.slab && state_region_set(&rec->grads, &p->grads) < 0) ||
	    (states > 0 && state_region_set(&rec->state1, &p->state1) < 0) ||
	    (states > 1 && state_region_set(&rec->state2, &p->state2) < 0) ||
	    (states > 2 && state_region_set(&rec->state3, &p->state3) < 0))
		return -ENOMEM;
	return 0;
}

static int place_all(struct unit *u, struct reg *r)
{
	for (unsigned d = 0; d < u->n_parts; d++)
		if (place(u, r, &u->parts[d]) < 0)
			return -ENOMEM;
	return 0;
}

/* Each rank's buffers, in the record and in the unit. */
static int place_buffers(struct unit *u, struct reg *r)
{
	const state_group *g = r->job->groups[u->rec->group]->rec;
	uint64_t bytes = unit_buffers_bytes(u->rec);

	if (!bytes)
		return 0;
	u->buffers = calloc(g->n_ranks, sizeof(*u->buffers));
	if (!u->buffers)
		return -ENOMEM;
	for (size_t i = 0; i < g->n_ranks; i++) {
		uint32_t rank = g->ranks[i];

		u->buffers[i] = cut(r->ranks[rank].slab, &r->ranks[rank].at, bytes);
		if (state_unit_add_buffer_region(u->rec, &u->buffers[i]) < 0)
			return -ENOMEM;
	}
	return 0;
}

/* Append one unit with its record and name. On failure nothing of it is left. */
static int add_unit(struct reg *r, size_t i)
{
	struct job *job = r->job;
	const struct group *g = job->groups[r->specs[i]->group];
	struct unit *u = NULL;

	if (unit_new(job->n_units + 1, r->specs[i], &r->layouts[i], g->devices, g->n_devices, &u) <
	    0)
		return -ENOMEM;
	if (place_all(u, r) < 0 || place_buffers(u, r) < 0 ||
	    htab_add(&job->unit_names, r->specs[i]->name, u) < 0) {
		unit_free(u);
		return -ENOMEM;
	}
	if (state_job_add_unit(job->rec, r->specs[i]) < 0) {
		htab_remove(&job->unit_names, r->specs[i]->name);
		unit_free(u);
		return -ENOMEM;
	}
	job->units[job->n_units++] = u;
	r->ids[i] = u->id;
	return 0;
}

static int grow_units(struct job *job, size_t units)
{
	void *grown = realloc(job->units, (job->n_units + units) * sizeof(struct unit *));

	if (!grown)
		return -ENOMEM;
	job->units = grown;
	return 0;
}

/* Give the units from @first on back to the caller's specs. */
static void undo_units(struct reg *r, uint32_t first)
{
	struct job *job = r->job;

	while (job->n_units > first) {
		struct unit *u = job->units[--job->n_units];

		htab_remove(&job->unit_names, u->rec->name);
		job->rec->n_units--;
		unit_free(u);
	}
}

static int compare_slab(const void *a, const void *b)
{
	const struct slab *x = *(struct slab *const *)a, *y = *(struct slab *const *)b;

	return x->id < y->id ? -1 : x->id > y->id;
}

int job_add_slabs(struct job *job, struct slab *const *slabs, size_t n)
{
	size_t before = job->rec->n_slabs;
	struct slab **grown = realloc(job->slabs, (job->n_slabs + n + 1) * sizeof(*grown));

	if (!grown)
		return -ENOMEM;
	job->slabs = grown;
	for (size_t i = 0; i < n; i++) {
		if (state_job_add_slab(job->rec, slabs[i]) == 0)
			continue;
		state_job_drop_slabs(job->rec, job->rec->n_slabs - before);
		return -ENOMEM;
	}
	for (size_t i = 0; i < n; i++)
		job->slabs[job->n_slabs++] = slab_ref(slabs[i]);
	qsort(job->slabs, job->n_slabs, sizeof(*job->slabs), compare_slab);
	state_job_sort_slabs(job->rec);
	return 0;
}

static bool part_has(const struct unit_part *p, const struct slab *s)
{
	return p->params.slab == s || p->grads.slab == s || p->state1.slab == s ||
	       p->state2.slab == s || p->state3.slab == s;
}

static bool is_used(const struct job *job, const struct slab *s)
{
	bool used = s->owner_rank >= 0; /* buffers stay where they are */

	for (uint32_t i = 0; !used && i < job->n_units; i++)
		for (unsigned d = 0; !used && d < job->units[i]->n_parts; d++)
			used = part_has(&job->units[i]->parts[d], s);
	return used;
}

void job_drop_unused_slabs(struct job *job)
{
	uint32_t kept = 0;

	CHECK(job->n_slabs == job->rec->n_slabs);
	for (uint32_t i = 0; i < job->n_slabs; i++) {
		if (is_used(job, job->slabs[i])) {
			job->slabs[kept++] = job->slabs[i];
			continue;
		}
		state_job_drop_slab(job->rec, kept);
		slab_unref(job->slabs[i]);
	}
	job->n_slabs = kept;
}

/* Into the job and its record. */
static int enter_slabs(struct reg *r)
{
	struct job *job = r->job;
	_cleanup_(freep) struct slab **all =
		calloc(2 * NODE_MAX_DEVICES + job->rec->world_size, sizeof(*all));
	size_t n = 0;

	if (!all)
		return -ENOMEM;
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		if (r->on[d].params)
			all[n++] = r->on[d].params;
		if (r->on[d].other)
			all[n++] = r->on[d].other;
	}
	for (uint32_t i = 0; i < job->rec->world_size; i++)
		if (r->ranks[i].slab)
			all[n++] = r->ranks[i].slab;
	return job_add_slabs(job, all, n);
}

/* Of the units from @first on. */
static int resolve_aliases(struct job *job, uint32_t first, struct fault *f)
{
	struct aliases a;

	aliases_init(&a, job);
	for (uint32_t i = first; !f->code && i < job->n_units; i++)
		aliases_resolve(&a, job->units[i], f);
	aliases_deinit(&a);
	return f->code;
}

/* They are their ranks' own to write. */
static void open_buffers(struct reg *r)
{
	for (uint32_t i = 0; i < r->job->rec->world_size; i++) {
		struct slab *s = r->ranks[i].slab;

		if (s) {
			s->writable = true;
			s->owner_rank = (int)i;
		}
	}
}

static int reg_build(struct reg *r, struct fault *f)
{
	struct job *job = r->job;
	uint32_t first = job->n_units;
	int e = 0;

	if (grow_units(job, r->n_new) < 0)
		return fault_errno(f, -ENOMEM, "registering units");
	for (size_t i = 0; e == 0 && i < r->n; i++)
		if (!r->ids[i])
			e = add_unit(r, i);
	if (e == 0 && resolve_aliases(job, first, f))
		e = -ENOMEM; /* all else was checked */
	if (e == 0)
		e = enter_slabs(r);
	if (e < 0) {
		undo_units(r, first);
		return fault_errno(f, -ENOMEM, "registering units");
	}
	open_buffers(r);
	return 0;
}

/* The specs of new units belong to the job now. */
static void take_specs(struct reg *r, uint32_t first)
{
	for (size_t i = 0; i < r->n; i++)
		if (r->ids[i] > first)
			r->specs[i] = NULL;
}

static int reg_run(struct reg *r, struct fault *f)
{
	int e = reg_check(r, f);

	if (e || !r->n_new)
		return e;
	reg_sum(r);
	e = reg_memory(r, f);
	if (e)
		return e;
	(void)reg_build(r, f);
	reg_put_back(r, false); /* the job has references of its own, if it took them */
	return (int)f->code;
}

int job_register(struct job *job, state_unit **specs, size_t n, uint32_t *ret_ids,
		 uint64_t *ret_charged, struct fault *f)
{
	struct reg r = { .job = job, .specs = specs, .n = n, .ids = ret_ids };
	uint64_t before = job->quota.used - job_spare_bytes(job);
	uint32_t first = job->n_units;
	int e;

	for (size_t i = 0; i < n; i++)
		ret_ids[i] = 0;
	r.layouts = calloc(n ? n : 1, sizeof(*r.layouts));
	r.ranks = calloc(job->rec->world_size, sizeof(*r.ranks));
	e = r.layouts && r.ranks ? reg_run(&r, f) : fault_errno(f, -ENOMEM, "registering units");
	free(r.layouts);
	free(r.ranks);
	if (e && e != JOB_E_LATER)
		job_drop_spare(job);
	if (e)
		return e;
	take_specs(&r, first);
	*ret_charged = job->quota.used - before;
	return 0;
}

/* A saved region, or none. */
static struct region region_of(struct job *job, const state_region *rec)
{
	struct region r = REGION_NULL;

	for (uint32_t i = 0; rec && i < job->n_slabs; i++)
		if (job->slabs[i]->id == rec->slab)
			r = (struct region){ job->slabs[i], rec->offset, rec->bytes };
	return r;
}

static bool part_fits(const struct unit *u, const struct unit_part *p)
{
	uint64_t need = unit_array_bytes(&u->layout, u->spread);
	unsigned states = need ? unit_state_arrays(u->rec) : 0;

	return p->params.bytes >= unit_params_bytes(&u->layout, u->spread) &&
	       (unit_pools_gradient(u->rec) ? !p->grads.slab : p->grads.bytes >= need) &&
	       (states < 1 || p->state1.bytes >= need) && (states < 2 || p->state2.bytes >= need) &&
	       (states < 3 || p->state3.bytes >= need);
}

static bool restore_parts(struct job *job, struct unit *u)
{
	if (u->rec->n_parts != u->n_parts)
		return false;
	for (unsigned d = 0; d < u->n_parts; d++) {
		const state_part *rec = u->rec->parts[d];
		struct unit_part *p = &u->parts[d];

		p->params = region_of(job, rec->params);
		p->grads = region_of(job, rec->grads);
		p->state1 = region_of(job, rec->state1);
		p->state2 = region_of(job, rec->state2);
		p->state3 = region_of(job, rec->state3);
		if (!part_fits(u, p) || p->params.slab->device != p->device)
			return false;
	}
	return true;
}

static bool restore_buffers(struct job *job, struct unit *u)
{
	const struct group *g = job->groups[u->rec->group];
	uint64_t bytes = unit_buffers_bytes(u->rec);

	if (!bytes)
		return true;
	u->buffers = calloc(group_size(g), sizeof(*u->buffers));
	if (!u->buffers || u->rec->n_buffer_regions != group_size(g))
		return false;
	for (uint32_t i = 0; i < group_size(g); i++) {
		uint32_t rank = g->rec->ranks[i];
		struct region r = region_of(job, u->rec->buffer_regions[i]);

		if (!r.slab || r.bytes < bytes || r.slab->device->index != device_of(job, rank))
			return false;
		r.slab->writable = true;
		r.slab->owner_rank = (int)rank;
		u->buffers[i] = r;
	}
	return true;
}

static int restore_unit(struct job *job, state_unit *rec, struct fault *f)
{
	struct group *g = job->groups[rec->group];
	struct layout layout;
	struct unit *u;

	if (!unit_layout(rec, group_size(g), &layout) || !unit_buffers_fit(rec))
		return fault_set(f, FAULT_INVALID, "state",
				 "saved unit '%.100s' has no valid layout", rec->name);
	if (group_place(g))
		return fault_set(f, FAULT_INVALID, "state",
				 "saved unit '%.100s' has ranks without a device", rec->name);
	if (unit_new(job->n_units + 1, rec, &layout, g->devices, g->n_devices, &u) < 0)
		return fault_errno(f, -ENOMEM, "restoring units");
	if (!restore_parts(job, u) || !restore_buffers(job, u) ||
	    htab_add(&job->unit_names, rec->name, u) < 0) {
		unit_free(u);
		return fault_set(
			f, FAULT_INVALID, "state",
			"saved unit '%.100s' has memory too small, or its name is there twice",
			rec->name);
	}
	job->units[job->n_units++] = u;
	return 0;
}

int job_units_restore(struct job *job, struct fault *f)
{
	if (job->rec->n_units && grow_units(job, job->rec->n_units) < 0)
		return fault_errno(f, -ENOMEM, "restoring units");
	for (size_t i = 0; i < job->rec->n_units; i++)
		if (restore_unit(job, job->rec->units[i], f))
			return f->code;
	return resolve_aliases(job, 0, f);
}

void job_units_free(struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		unit_free(job->units[i]);
	free(job->units);
	job->units = NULL;
	job->n_units = 0;
	for (uint32_t i = 0; i < job->n_slabs; i++)
		slab_unref(job->slabs[i]);
	free(job->slabs);
	job->slabs = NULL;
	job->n_slabs = 0;
}

static void is_that(struct slab *s, void *arg)
{
	struct slab **looked_for = arg;

	if (s == *looked_for)
		*looked_for = NULL;
}

/* Slabs of parameters are for all ranks of their device; gradients and optimizer state
 * are not; buffers are for their rank alone. */
static bool holds_params(const struct job *job, const struct slab *s)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		for (unsigned d = 0; d < job->units[i]->n_parts; d++)
			if (job->units[i]->parts[d].params.slab == s)
				return true;
	return false;
}

struct slab *job_slab_for(struct member *m, uint32_t id)
{
	struct job *job = m->job;
	struct slab *s = slab_find(m->device, id);
	struct slab *own = s;

	if (!s || m->state == MEMBER_DEAD || m->state == MEMBER_LEFT)
		return NULL;
	if (s == m->device->ready || s == member_signals_slab(m))
		return s;
	if (s->payer != &job->quota || s->device != m->device)
		return NULL;
	if (s->class == MEM_FULL)
		return s;
	if (s->class == MEM_SHARD)
		return holds_params(job, s) || (s->writable && s->owner_rank == (int)m->rank)
			       ? s
			       : NULL;
	pool_each_slab(&m->pool, is_that, &own);
	return own ? NULL : s;
}
