/* Registration: a whole model at once, all units or none. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/job.h"

/* One registration under way: what must be undone if it fails. */
struct reg {
	struct job *job;
	state_unit **specs;
	size_t n;
	uint32_t *ids; /* 0: new */
	struct layout *layouts;
	size_t n_new;
	uint64_t params_bytes; /* of all new units */
	uint64_t other_bytes;  /* gradient shards and optimizer state */
	struct slab *params;
	struct slab *other;
};

/* Factors are part of what is compared, so 0 is resolved first. */
static void resolve_factors(state_unit *spec, uint32_t ranks)
{
	if (spec->pre_divide == 0 && spec->post_divide == 0)
		layout_divide_factors(ranks, &spec->pre_divide, &spec->post_divide);
	if (spec->pre_divide == 0)
		spec->pre_divide = 1;
	if (spec->post_divide == 0)
		spec->post_divide = 1;
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
	resolve_factors(spec, group_size(g));
	if (!unit_layout(spec, group_size(g), &r->layouts[i]))
		return fault_set(f, FAULT_INVALID, "units.tensors",
				 "unit '%.100s': its shapes must be of 1 to 2^48 elements in total",
				 spec->name);
	have = htab_find(&r->job->unit_names, spec->name);
	if (!have) {
		r->n_new++;
		return 0;
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

static int reg_check(struct reg *r, struct fault *f)
{
	uint32_t most = r->job->node->limits.max_units_per_job;

	for (size_t i = 0; i < r->n; i++)
		if (reg_check_unit(r, i, f))
			return f->code;
	if (reg_check_names(r, f))
		return f->code;
	/* the limit may have been lowered since */
	if (r->n_new && r->job->n_units + (uint64_t)r->n_new > most)
		return fault_set(
			f, FAULT_EXHAUSTED, NULL,
			"job '%s' would have %llu units: %u (max_units_per_job) are allowed",
			r->job->rec->name, (unsigned long long)r->job->n_units + r->n_new, most);
	return reg_check_tensors(r, f);
}

/* One unit's bytes fit 64 bits by far; those of a hundred thousand need not. */
static uint64_t add(uint64_t a, uint64_t b)
{
	return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static void reg_sum(struct reg *r)
{
	for (size_t i = 0; i < r->n; i++) {
		uint64_t bytes = unit_array_bytes(&r->layouts[i]);

		if (r->ids[i])
			continue;
		r->params_bytes = add(r->params_bytes, bytes);
		r->other_bytes = add(r->other_bytes, bytes * (1 + unit_state_arrays(r->specs[i])));
	}
}

static int reg_slab(struct reg *r, uint64_t bytes, struct slab **ret, struct fault *f)
{
	struct job *job = r->job;
	char holders[300];
	int e = slab_new(&job->node->device, &job->quota, MEM_SHARD, bytes, job->rec->name, -1,
			 ret);

	if (e == 0)
		e = state_job_add_slab(job->rec, *ret);
	if (e == 0)
		return 0;
	if (e < 0 && e != -ENOMEM)
		return fault_errno(f, e, "taking memory for shards");
	/* what this call has taken so far is not what the job holds */
	r->params = slab_unref(r->params);
	job_holders(job, holders, sizeof(holders));
	return fault_set(f, FAULT_EXHAUSTED, NULL, "%llu bytes for shards are not to be had: %s",
			 (unsigned long long)add(r->params_bytes, r->other_bytes), holders);
}

/* Cut the next @bytes off @slab at *@at. */
static struct region cut(struct slab *slab, uint64_t *at, uint64_t bytes)
{
	struct region r = { slab, *at, bytes };

	*at += bytes;
	CHECK(*at <= slab->bytes);
	return r;
}

static int place(struct unit *u, struct reg *r, uint64_t *params_at, uint64_t *other_at)
{
	uint64_t bytes = unit_array_bytes(&u->layout);
	unsigned states = unit_state_arrays(u->rec);

	u->params = cut(r->params, params_at, bytes);
	u->grads = cut(r->other, other_at, bytes);
	if (states > 0)
		u->state1 = cut(r->other, other_at, bytes);
	if (states > 1)
		u->state2 = cut(r->other, other_at, bytes);
	if (state_region_set(&u->rec->params, &u->params) < 0 ||
	    state_region_set(&u->rec->grads, &u->grads) < 0 ||
	    (states > 0 && state_region_set(&u->rec->state1, &u->state1) < 0) ||
	    (states > 1 && state_region_set(&u->rec->state2, &u->state2) < 0))
		return -ENOMEM;
	return 0;
}

/* Append one unit with its record and name. On failure nothing of it is left. */
static int add_unit(struct reg *r, size_t i, uint64_t *params_at, uint64_t *other_at)
{
	struct job *job = r->job;
	struct unit *u = NULL;

	if (unit_new(job->n_units + 1, r->specs[i], &r->layouts[i], &u) < 0)
		return -ENOMEM;
	if (place(u, r, params_at, other_at) < 0 ||
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

static int grow_tables(struct job *job, size_t units, size_t slabs)
{
	void *grown = realloc(job->units, (job->n_units + units) * sizeof(struct unit *));

	if (!grown)
		return -ENOMEM;
	job->units = grown;
	grown = realloc(job->slabs, (job->n_slabs + slabs) * sizeof(struct slab *));
	if (!grown)
		return -ENOMEM;
	job->slabs = grown;
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

static int reg_build(struct reg *r, struct fault *f)
{
	struct job *job = r->job;
	uint32_t first = job->n_units;
	uint64_t params_at = 0, other_at = 0;

	if (grow_tables(job, r->n_new, 2) < 0)
		return fault_errno(f, -ENOMEM, "registering units");
	if (reg_slab(r, r->params_bytes, &r->params, f) ||
	    reg_slab(r, r->other_bytes, &r->other, f))
		return f->code;
	for (size_t i = 0; i < r->n; i++) {
		if (r->ids[i])
			continue;
		if (add_unit(r, i, &params_at, &other_at) < 0) {
			undo_units(r, first);
			return fault_errno(f, -ENOMEM, "registering units");
		}
	}
	job->slabs[job->n_slabs++] = STEAL_PTR(r->params);
	job->slabs[job->n_slabs++] = STEAL_PTR(r->other);
	return 0;
}

/* The specs of new units belong to the job now. */
static void take_specs(struct reg *r, uint32_t first)
{
	for (size_t i = 0; i < r->n; i++)
		if (r->ids[i] > first)
			r->specs[i] = NULL;
}

int job_register(struct job *job, state_unit **specs, size_t n, uint32_t *ret_ids,
		 uint64_t *ret_charged, struct fault *f)
{
	struct reg r = { .job = job, .specs = specs, .n = n, .ids = ret_ids };
	uint64_t before = job->quota.used;
	uint32_t first = job->n_units;
	size_t slabs = job->rec->n_slabs;

	for (size_t i = 0; i < n; i++)
		ret_ids[i] = 0;
	r.layouts = calloc(n ? n : 1, sizeof(*r.layouts));
	if (!r.layouts)
		return fault_errno(f, -ENOMEM, "registering units");
	if (reg_check(&r, f) == 0 && r.n_new) {
		reg_sum(&r);
		if (reg_build(&r, f)) {
			slab_unref(r.params);
			slab_unref(r.other);
			state_job_drop_slabs(job->rec, job->rec->n_slabs - slabs);
		}
	}
	free(r.layouts);
	if (f->code)
		return f->code;
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

static bool regions_fit(const struct unit *u)
{
	uint64_t need = unit_array_bytes(&u->layout);
	unsigned states = unit_state_arrays(u->rec);

	return u->params.bytes >= need && u->grads.bytes >= need &&
	       (states < 1 || u->state1.bytes >= need) && (states < 2 || u->state2.bytes >= need);
}

static int restore_unit(struct job *job, state_unit *rec, struct fault *f)
{
	struct layout layout;
	struct unit *u;

	if (!unit_layout(rec, group_size(job->groups[rec->group]), &layout))
		return fault_set(f, FAULT_INVALID, "state",
				 "saved unit '%.100s' has no valid layout", rec->name);
	if (unit_new(job->n_units + 1, rec, &layout, &u) < 0)
		return fault_errno(f, -ENOMEM, "restoring units");
	u->params = region_of(job, rec->params);
	u->grads = region_of(job, rec->grads);
	u->state1 = region_of(job, rec->state1);
	u->state2 = region_of(job, rec->state2);
	if (!regions_fit(u) || htab_add(&job->unit_names, rec->name, u) < 0) {
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
	if (job->rec->n_units && grow_tables(job, job->rec->n_units, 0) < 0)
		return fault_errno(f, -ENOMEM, "restoring units");
	for (size_t i = 0; i < job->rec->n_units; i++)
		if (restore_unit(job, job->rec->units[i], f))
			return f->code;
	return 0;
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

/* Slabs of parameters are for all ranks; gradients and optimizer state are not. */
static bool holds_params(const struct job *job, const struct slab *s)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->params.slab == s)
			return true;
	return false;
}

struct slab *job_slab_for(struct member *m, uint32_t id)
{
	struct job *job = m->job;
	struct slab *s = slab_find(&job->node->device, id);
	struct slab *own = s;

	if (!s || s->payer != &job->quota || m->state == MEMBER_DEAD || m->state == MEMBER_LEFT)
		return NULL;
	if (s->class == MEM_FULL)
		return s;
	if (s->class == MEM_SHARD)
		return holds_params(job, s) ? s : NULL;
	pool_each_slab(&m->pool, is_that, &own);
	return own ? NULL : s;
}
