/*
 * The serialised form, and checks of a saved state before anything is built on it. The bytes may be
 * from another version or damaged, so everything is checked.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "kernels.h"
#include "mem/pool.h"
#include "store/state.h"

enum { STATE_LIFETIMES = 3 }; /* ephemeral, keep, base */

static int state_check_bad(struct fault *f, const char *what, const char *name)
{
	return fault_set(f, FAULT_INVALID, "state", "saved state of '%s': %s", name ? name : "?",
			 what);
}

static bool state_check_name_ok(const char *name, size_t max)
{
	return name && *name && strlen(name) <= max;
}

/* Slabs are numbered and recorded in the order in which they are made. */
static int state_check_slabs(const state_job *j, uint32_t next_slab, struct fault *f)
{
	uint32_t last = 0;

	for (size_t i = 0; i < j->n_slabs; i++) {
		const state_slab *s = j->slabs[i];

		if (s->id <= last || s->id >= next_slab)
			return state_check_bad(f, "a slab with a wrong number", j->name);
		if (!s->bytes || s->class_ != MEM_SHARD)
			return state_check_bad(f, "a slab without size, or not of shards", j->name);
		last = s->id;
	}
	return 0;
}

/* Pools of gradients or of gathered copies. Those that a process may write say which one. */
static int state_check_pooled(const state_job *j, uint32_t next_slab, struct fault *f)
{
	for (size_t i = 0; i < j->n_pooled; i++) {
		const state_slab *s = j->pooled[i]->slab;

		if (!s || !s->id || s->id >= next_slab)
			return state_check_bad(f, "a slab of a pool with a wrong number", j->name);
		if (!s->bytes || (s->class_ != MEM_GRAD && s->class_ != MEM_FULL))
			return state_check_bad(f, "a slab of a pool without size, or of shards",
					       j->name);
		if (j->pooled[i]->pid > INT32_MAX)
			return state_check_bad(f, "a slab of a pool with a wrong pid", j->name);
	}
	return 0;
}

static int state_check_compare_id(const void *key, const void *item)
{
	uint32_t id = *(const uint32_t *)key, other = (*(state_slab *const *)item)->id;

	return id < other ? -1 : id > other;
}

static const state_slab *state_check_find_slab(const state_job *j, uint32_t id)
{
	state_slab **found = j->n_slabs ? bsearch(&id, j->slabs, j->n_slabs, sizeof(*j->slabs),
						  state_check_compare_id)
					: NULL;

	return found ? *found : NULL;
}

static bool state_check_region_ok(const state_job *j, const state_region *r)
{
	const state_slab *s = r ? state_check_find_slab(j, r->slab) : NULL;

	return s && r->bytes && r->offset % POOL_ALIGN == 0 && r->offset <= s->bytes &&
	       r->bytes <= s->bytes - r->offset;
}

static bool state_check_optional_region_ok(const state_job *j, const state_region *r)
{
	return !r || state_check_region_ok(j, r);
}

static bool state_check_numbers_ok(const state_unit *u)
{
	const state_optimizer *o = u->optimizer;

	return isfinite(u->pre_divide) && u->pre_divide > 0 && isfinite(u->post_divide) &&
	       u->post_divide > 0 && isfinite(u->divide_factor) && u->divide_factor >= 0 && o &&
	       o->kind <= 3 && isfinite(o->lr) && isfinite(o->weight_decay) &&
	       isfinite(o->momentum) && isfinite(o->beta1) && isfinite(o->beta2) &&
	       isfinite(o->eps) && isfinite(o->dampening);
}

static bool state_check_in(uint32_t value, uint32_t most)
{
	return value >= 1 && value <= most;
}

/* What unit_resolve produces: no setting is left open. */
static bool state_check_choices_ok(const state_unit *u)
{
	return state_check_in(u->layout, 2) && state_check_in(u->strategy, 3) && u->shard_ranks &&
	       state_check_in(u->reduce_profile, 7) && u->div_mode <= 2 &&
	       dtype_is_stored(u->reduce_dtype) && state_check_in(u->reshard, 4) &&
	       state_check_in(u->optimizer->profile, u->optimizer->kind == 1 ? 3 : 4) &&
	       state_check_in(u->optimizer->when, 3);
}

static bool state_check_tensor_ok(const state_tensor *t)
{
	return state_check_name_ok(t->name, 255) && t->init_kind <= 3 &&
	       strlen(t->alias_of) <= 255 && strlen(t->alias_unit) <= 255 &&
	       isfinite(t->weight_decay) && isfinite(t->lr_factor) &&
	       (!t->n_strides || t->n_strides == t->n_shape);
}

/* Is the optimizer in backward, or the trainer's? */
static bool state_check_pools_gradient(const state_unit *u)
{
	return u->optimizer->when == 2 || u->optimizer->when == 3;
}

/* All arrays of a part are on one device. */
static bool state_check_part_ok(const state_job *j, const state_part *p)
{
	const state_region *const rest[] = { p->grads, p->state1, p->state2, p->state3, p->kept };
	const char *device;

	if (!state_check_region_ok(j, p->params))
		return false;
	for (size_t i = 0; i < ARRAY_SIZE(rest); i++)
		if (!state_check_optional_region_ok(j, rest[i]))
			return false;
	device = state_check_find_slab(j, p->params->slab)->device;
	for (size_t i = 0; i < ARRAY_SIZE(rest); i++)
		if (rest[i] && strcmp(state_check_find_slab(j, rest[i]->slab)->device, device) != 0)
			return false;
	return true;
}

/* A unit with only frozen tensors has no gradients. */
static bool state_check_is_trained(const state_unit *u)
{
	for (size_t i = 0; i < u->n_tensors; i++)
		if (!u->tensors[i]->frozen && !*u->tensors[i]->alias_of)
			return true;
	return false;
}

static int state_check_parts(const state_job *j, const state_unit *u, struct fault *f)
{
	if (u->dropped && (u->n_parts || u->n_buffer_regions))
		return state_check_bad(f, "a dropped unit with memory", u->name);
	if (u->dropped)
		return 0;
	if (!u->n_parts || u->n_parts > j->world_size)
		return state_check_bad(f, "a unit without parts, or with too many", u->name);
	for (size_t i = 0; i < u->n_parts; i++)
		if (!state_check_part_ok(j, u->parts[i]) ||
		    !u->parts[i]->grads !=
			    (state_check_pools_gradient(u) || !state_check_is_trained(u)))
			return state_check_bad(f, "a region outside its slab", u->name);
	return 0;
}

/* Each rank of the group has its own, on its device. */
static int state_check_buffers(const state_job *j, const state_unit *u, struct fault *f)
{
	const state_group *g = j->groups[u->group];

	if (!u->dropped && u->n_buffer_regions != (u->n_buffers ? g->n_ranks : 0))
		return state_check_bad(f, "buffers that not every rank has", u->name);
	for (size_t i = 0; i < u->n_buffer_regions; i++)
		if (!state_check_region_ok(j, u->buffer_regions[i]))
			return state_check_bad(f, "buffers outside their slab", u->name);
	return 0;
}

/* All but its memory. */
static int state_check_spec(const state_job *j, const state_unit *u, struct fault *f)
{
	if (!state_check_name_ok(u->name, 255))
		return state_check_bad(f, "a unit without a name", j->name);
	if (u->group >= j->n_groups)
		return state_check_bad(f, "a unit of a group that does not exist", u->name);
	if (!dtype_is_stored(u->storage_dtype) || !dtype_is_stored(u->compute_dtype) ||
	    !dtype_is_stored(u->gradient_dtype) || !u->shard_multiple)
		return state_check_bad(f, "unknown dtype or layout", u->name);
	if (!state_check_numbers_ok(u))
		return state_check_bad(f, "factors or optimizer settings are not numbers", u->name);
	if (!state_check_choices_ok(u))
		return state_check_bad(f, "an unknown layout, strategy or profile", u->name);
	for (size_t i = 0; i < u->n_tensors; i++) {
		if (!state_check_tensor_ok(u->tensors[i]))
			return state_check_bad(f, "a tensor without a name or initialiser",
					       u->name);
		if (u->tensors[i]->missed > u->optimizer->steps)
			return state_check_bad(f, "a tensor that missed more steps than there were",
					       u->name);
	}
	for (size_t i = 0; i < u->n_buffers; i++)
		if (!state_check_name_ok(u->buffers[i]->name, 255) ||
		    !state_check_in(u->buffers[i]->dtype, 7))
			return state_check_bad(f, "a buffer without a name or dtype", u->name);
	return 0;
}

static int state_check_unit(const state_job *j, const state_unit *u, struct fault *f)
{
	if (state_check_spec(j, u, f))
		return f->code;
	return state_check_parts(j, u, f) || state_check_buffers(j, u, f) ? (int)f->code : 0;
}

static int state_check_compare_place(const void *a, const void *b)
{
	const state_region *x = *(state_region *const *)a, *y = *(state_region *const *)b;

	if (x->slab != y->slab)
		return x->slab < y->slab ? -1 : 1;
	return x->offset < y->offset ? -1 : x->offset > y->offset;
}

#define STATE_CHECK_REGIONS 6u

/* The regions of a part. @ret: room for STATE_CHECK_REGIONS. */
static size_t state_check_part_regions(const state_part *p, state_region **ret)
{
	state_region *const of_part[STATE_CHECK_REGIONS] = { p->params, p->grads,  p->state1,
							     p->state2, p->state3, p->kept };
	size_t n = 0;

	for (size_t i = 0; i < ARRAY_SIZE(of_part); i++)
		if (of_part[i])
			ret[n++] = of_part[i];
	return n;
}

/* No byte belongs to two arrays. */
static int state_check_disjoint(const state_job *j, struct fault *f)
{
	_cleanup_(freep) state_region **all = NULL;
	size_t n = 0;

	for (size_t i = 0; i < j->n_units; i++)
		n += STATE_CHECK_REGIONS * j->units[i]->n_parts + j->units[i]->n_buffer_regions;
	all = calloc(n + 1, sizeof(*all));
	if (!all)
		return fault_errno(f, -ENOMEM, "checking a saved state");
	n = 0;
	for (size_t i = 0; i < j->n_units; i++) {
		for (size_t k = 0; k < j->units[i]->n_parts; k++)
			n += state_check_part_regions(j->units[i]->parts[k], all + n);
		for (size_t k = 0; k < j->units[i]->n_buffer_regions; k++)
			all[n++] = j->units[i]->buffer_regions[k];
	}
	qsort(all, n, sizeof(*all), state_check_compare_place);
	for (size_t i = 1; i < n; i++)
		if (all[i]->slab == all[i - 1]->slab &&
		    all[i]->offset < all[i - 1]->offset + all[i - 1]->bytes)
			return state_check_bad(f, "two regions overlap", j->name);
	return 0;
}

/* The owner of a slab: a rank may write to all of the slab that contains its buffers. */
enum { SLAB_NOBODYS, SLAB_SHARDS, SLAB_FIRST_RANK };

static bool state_check_claim(const state_job *j, uint32_t *owners, const state_region *r,
			      uint32_t owner)
{
	const state_slab *s = r ? state_check_find_slab(j, r->slab) : NULL;
	state_slab **at =
		s ? bsearch(&s->id, j->slabs, j->n_slabs, sizeof(*j->slabs), state_check_compare_id)
		  : NULL;
	uint32_t *have = at ? &owners[at - j->slabs] : NULL;

	if (!have || *have == owner)
		return true;
	if (*have != SLAB_NOBODYS)
		return false;
	*have = owner;
	return true;
}

static bool state_check_claim_unit(const state_job *j, uint32_t *owners, const state_unit *u)
{
	const state_group *g = j->groups[u->group];

	for (size_t i = 0; i < u->n_buffer_regions; i++)
		if (!state_check_claim(j, owners, u->buffer_regions[i],
				       SLAB_FIRST_RANK + g->ranks[i]))
			return false;
	for (size_t k = 0; k < u->n_parts; k++) {
		state_region *all[STATE_CHECK_REGIONS];
		size_t n = state_check_part_regions(u->parts[k], all);

		for (size_t i = 0; i < n; i++)
			if (!state_check_claim(j, owners, all[i], SLAB_SHARDS))
				return false;
	}
	return true;
}

static int state_check_owners(const state_job *j, struct fault *f)
{
	_cleanup_(freep) uint32_t *owners = calloc(j->n_slabs + 1, sizeof(*owners));

	if (!owners)
		return fault_errno(f, -ENOMEM, "checking a saved state");
	for (size_t i = 0; i < j->n_units; i++)
		if (!state_check_claim_unit(j, owners, j->units[i]))
			return state_check_bad(
				f, "a slab of one rank's buffers that holds something else",
				j->name);
	return 0;
}

/* Each rank at most once, and none outside the world. @seen: a byte a rank, cleared
 * here. */
static bool state_check_ranks_ok(const state_job *j, const uint32_t *ranks, size_t n, uint8_t *seen)
{
	memset(seen, 0, j->world_size);
	for (size_t i = 0; i < n; i++) {
		if (ranks[i] >= j->world_size || seen[ranks[i]])
			return false;
		seen[ranks[i]] = 1;
	}
	return true;
}

static int state_check_blobs(const state_job *j, uint8_t *seen, struct fault *f)
{
	memset(seen, 0, j->world_size);
	for (size_t i = 0; i < j->n_blobs; i++) {
		uint32_t rank = j->blobs[i]->rank;

		if (rank >= j->world_size || seen[rank])
			return state_check_bad(
				f, "a blob of a rank outside the world, or two of one rank",
				j->name);
		seen[rank] = 1;
	}
	return 0;
}

static bool state_check_doubt_blobs_ok(const state_job *j, state_blob *const *blobs, size_t n,
				       uint8_t *seen)
{
	memset(seen, 0, j->world_size);
	for (size_t i = 0; i < n; i++)
		if (blobs[i]->rank >= j->world_size || seen[blobs[i]->rank]++)
			return false;
	return true;
}

static int state_check_doubt(const state_job *j, uint8_t *seen, struct fault *f)
{
	const state_doubt *d = j->doubt;
	bool ok = true;

	if (!d)
		return 0;
	ok = d->epoch && d->group < j->n_groups &&
	     state_check_doubt_blobs_ok(j, d->blobs, d->n_blobs, seen) &&
	     state_check_doubt_blobs_ok(j, d->marks, d->n_marks, seen);
	for (size_t i = 0; ok && i < d->n_units; i++)
		ok = d->units[i] < j->n_units && !j->units[d->units[i]]->dropped &&
		     j->units[d->units[i]]->optimizer && (!i || d->units[i] > d->units[i - 1]);
	return ok ? 0
		  : state_check_bad(f,
				    "a step in doubt with a rank, a group or a unit that it does "
				    "not have",
				    j->name);
}

static int state_check_groups(const state_job *j, uint8_t *seen, struct fault *f)
{
	for (size_t i = 0; i < j->n_groups; i++) {
		const state_group *g = j->groups[i];

		if (!state_check_name_ok(g->name, 255) || !g->n_ranks)
			return state_check_bad(f, "a group without name or ranks", j->name);
		if (!state_check_ranks_ok(j, g->ranks, g->n_ranks, seen))
			return state_check_bad(
				f, "a group with a rank outside the world, or with a rank twice",
				g->name);
	}
	return 0;
}

/* Group 0 is all ranks in their order; it also bounds world_size. */
static bool state_check_world_ok(const state_job *j)
{
	const state_group *g = j->n_groups ? j->groups[0] : NULL;

	if (!g || !j->world_size || g->n_ranks != j->world_size)
		return false;
	for (uint32_t i = 0; i < j->world_size; i++)
		if (g->ranks[i] != i)
			return false;
	return true;
}

/* They ascend. */
static bool state_check_launched_ok(const state_job *j)
{
	if (j->n_numbers != (j->launched ? j->world_size : 0))
		return false;
	for (size_t i = 1; i < j->n_numbers; i++)
		if (j->numbers[i] <= j->numbers[i - 1])
			return false;
	return !j->n_numbers || (j->max_ranks && j->numbers[j->n_numbers - 1] < j->max_ranks);
}

static int state_check_ranks(const state_job *j, struct fault *f)
{
	_cleanup_(freep) uint8_t *seen = NULL;

	if (!state_check_world_ok(j))
		return state_check_bad(f, "its first group is not the world", j->name);
	if (!state_check_launched_ok(j))
		return state_check_bad(f, "wrong numbers of its processes", j->name);
	seen = malloc(j->world_size);
	if (!seen)
		return fault_errno(f, -ENOMEM, "checking a saved state");
	return state_check_groups(j, seen, f) || state_check_blobs(j, seen, f) ||
			       state_check_doubt(j, seen, f)
		       ? (int)f->code
		       : 0;
}

static int state_check_job(const state_job *j, uint32_t next_slab, struct fault *f)
{
	int r;

	if (!state_check_name_ok(j->name, 64))
		return state_check_bad(f, "a job without a name", j->name);
	if (!j->lifetime || j->lifetime > STATE_LIFETIMES)
		return state_check_bad(f, "an unknown lifetime", j->name);
	for (size_t i = 0; i < j->n_published; i++)
		if (!j->published[i]->declaration)
			return state_check_bad(f, "a publication without a declaration", j->name);
	if (j->rollback && !j->kept)
		return state_check_bad(f, "a way back to a copy that there is not", j->name);
	r = state_check_ranks(j, f);
	if (!r && j->n_devices != j->world_size)
		r = state_check_bad(f, "the devices of the ranks are missing", j->name);
	if (!r)
		r = state_check_slabs(j, next_slab, f);
	if (!r)
		r = state_check_pooled(j, next_slab, f);
	for (size_t i = 0; !r && i < j->n_units; i++)
		r = state_check_unit(j, j->units[i], f);
	if (!r)
		r = state_check_owners(j, f);
	return r ? r : state_check_disjoint(j, f);
}

int state_encode(state_job *const *jobs, size_t n, uint32_t next_slab, uint8_t **ret,
		 size_t *ret_bytes)
{
	state_all s;
	size_t bytes;
	uint8_t *data;

	shardd__state__v1__state__init(&s);
	s.version = STATE_VERSION;
	s.jobs = (state_job **)jobs;
	s.n_jobs = n;
	s.next_slab = next_slab;
	bytes = shardd__state__v1__state__get_packed_size(&s);
	data = malloc(bytes ? bytes : 1);
	if (!data)
		return -ENOMEM;
	CHECK(shardd__state__v1__state__pack(&s, data) == bytes);
	*ret = data;
	*ret_bytes = bytes;
	return 0;
}

void state_free(state_all *s)
{
	size_t kept = 0;

	if (!s)
		return;
	for (size_t i = 0; i < s->n_jobs; i++)
		if (s->jobs[i])
			s->jobs[kept++] = s->jobs[i];
	s->n_jobs = kept;
	shardd__state__v1__state__free_unpacked(s, NULL);
}

int state_check(const state_all *s, struct fault *f)
{
	int r = 0;

	if (s->version != STATE_VERSION)
		r = fault_set(f, FAULT_INVALID, "state", "saved state has version %u, not %u",
			      s->version, STATE_VERSION);
	for (size_t i = 0; !r && i < s->n_jobs; i++)
		r = state_check_job(s->jobs[i], s->next_slab, f);
	return r;
}

int state_decode(const uint8_t *data, size_t bytes, state_all **ret, struct fault *f)
{
	state_all *s = shardd__state__v1__state__unpack(NULL, bytes, data);

	if (!s)
		return fault_set(f, FAULT_INVALID, "state",
				 "saved state of %zu bytes cannot be unpacked", bytes);
	if (state_check(s, f)) {
		state_free(s);
		return f->code;
	}
	*ret = s;
	return 0;
}

/* ------------------------------------------------------------------------------- specs */

uint8_t *state_specs_encode(const state_job *j, size_t *ret_bytes)
{
	state_unit *units = calloc(j->n_units + 1, sizeof(*units));
	state_unit **list = calloc(j->n_units + 1, sizeof(*list));
	state_job s = SHARDD__STATE__V1__JOB__INIT;
	uint8_t *data = NULL;

	s.name = j->name;
	s.world_size = j->world_size;
	s.max_ranks = j->max_ranks;
	s.launched = j->launched;
	s.n_numbers = j->n_numbers;
	s.numbers = j->numbers;
	s.checkpoints = j->checkpoints;
	s.n_groups = j->n_groups;
	s.groups = j->groups;
	s.units = list;
	for (size_t i = 0; units && list && i < j->n_units; i++) {
		if (j->units[i]->dropped)
			continue;
		units[s.n_units] = *j->units[i];
		units[s.n_units].n_parts = units[s.n_units].n_buffer_regions = 0;
		list[s.n_units] = &units[s.n_units];
		s.n_units++;
	}
	if (units && list) {
		*ret_bytes = shardd__state__v1__job__get_packed_size(&s);
		data = malloc(*ret_bytes + 1);
	}
	if (data)
		CHECK(shardd__state__v1__job__pack(&s, data) == *ret_bytes);
	free(units);
	free(list);
	return data;
}

static int state_check_specs(const state_job *j, struct fault *f)
{
	if (!state_check_name_ok(j->name, 64))
		return state_check_bad(f, "a job without a name", j->name);
	if (j->n_blobs || j->n_slabs || j->n_pooled || j->doubt)
		return state_check_bad(f, "more than groups and units", j->name);
	if (state_check_ranks(j, f))
		return f->code;
	for (size_t i = 0; !f->code && i < j->n_units; i++) {
		const state_unit *u = j->units[i];

		if (u->n_parts || u->n_buffer_regions || u->dropped)
			state_check_bad(f, "a unit with memory, or that was dropped", u->name);
		else
			(void)state_check_spec(j, u, f);
	}
	return f->code;
}

int state_specs_decode(const uint8_t *data, size_t bytes, state_job **ret, struct fault *f)
{
	state_job *j = shardd__state__v1__job__unpack(NULL, bytes, data);

	if (!j)
		return fault_set(f, FAULT_INVALID, "state",
				 "%zu bytes of a job's units cannot be unpacked", bytes);
	if (state_check_specs(j, f)) {
		state_job_free(j);
		return f->code;
	}
	*ret = j;
	return 0;
}
