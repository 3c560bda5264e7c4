#include "rpc/status_memory.h"

#include "core/check.h"
#include "core/formula.h"
#include "mem/stagger.h"
#include "publish/publication.h"
#include "step/external.h"
#include "reduce/reduce_run.h"

/* The A of docs/semantics.md. */
static uint64_t status_memory_aligned(const struct device *d, uint64_t bytes)
{
	return formula_array(bytes, stagger_room(d, STAGGER_FROM) > 0);
}

static uint64_t status_memory_array(const struct device *d, uint64_t elements, enum dtype dtype)
{
	return status_memory_aligned(d, elements * dtype_size(dtype));
}

/* ------------------------------------------------------------ what is in use */

static uint64_t status_memory_taken(const struct region *r)
{
	return r->slab ? r->bytes + stagger_room(r->slab->device, r->bytes) : 0;
}

static uint64_t status_memory_part_regions(const struct unit_part *p)
{
	return status_memory_taken(&p->params) + status_memory_taken(&p->state1) +
	       status_memory_taken(&p->state2) + status_memory_taken(&p->state3) + p->kept.bytes;
}

static void status_memory_add_used(const struct job *job, struct status_memory *m)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		for (unsigned d = 0; d < u->n_parts; d++)
			m->used[MEM_SHARD] += status_memory_part_regions(&u->parts[d]) +
					      (unit_pools_gradient(u->rec)
						       ? 0
						       : status_memory_taken(&u->parts[d].grads));
		for (uint32_t r = 0; u->buffers && r < group_size(job->groups[u->rec->group]); r++)
			m->used[MEM_SHARD] += u->buffers[r].bytes;
	}
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		m->used[MEM_FULL] += job->mem.full[d].used + job->mem.scratch[d].used;
		m->used[MEM_GRAD] += job->mem.grads[d].used;
	}
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			m->used[MEM_GRAD] += job->ranks[r]->pool.used;
	m->used[MEM_CONTROL] = job->quota.by_class[MEM_CONTROL];
	m->used[MEM_PUBLISHED] = job->quota.by_class[MEM_PUBLISHED];
}

/* ------------------------------------------------------------- the formulas */

/* In the elements of one part: trained ones have a gradient and states, frozen ones do not. */
static uint64_t status_memory_shards_of(const struct job *job, const struct unit *u)
{
	const struct formula_part p = {
		.trained = unit_part_elements(u),
		.frozen = unit_frozen_elements(u),
		.storage_bytes = (unsigned)dtype_size(unit_state_dtype(u->rec, 0)),
		.states = unit_state_arrays(u->rec),
		.pools_gradient = unit_pools_gradient(u->rec),
		.has_copy = u->parts[0].kept.slab,
		.is_staggered = stagger_room(u->parts[0].device, STAGGER_FROM) >
				0, /* all are of one kind */
	};

	return u->n_parts * (formula_params(&p) + formula_copy(&p) + formula_gradients(&p) +
			     formula_states(&p)) +
	       group_size(job->groups[u->rec->group]) * unit_buffers_bytes(u->rec);
}

static uint64_t status_memory_copies_of(const struct unit *u)
{
	uint64_t all = (unit_part_elements(u) + unit_frozen_elements(u)) * u->spread;

	return unit_has_copy(u)
		       ? u->n_parts * status_memory_array(u->parts[0].device, all,
							  (enum dtype)u->rec->compute_dtype)
		       : 0;
}

static struct device *status_memory_device_of(const struct job *job, const struct unit *u,
					      uint32_t index)
{
	return group_device(job->groups[u->rec->group], index);
}

/* Is there a replica with ranks on two devices? */
static bool status_memory_has_split_replicas(const struct job *job, const struct unit *u)
{
	uint32_t ranks = group_size(job->groups[u->rec->group]), shard = u->rec->shard_ranks;

	for (uint32_t i = 0; i < ranks; i++)
		if (status_memory_device_of(job, u, i) !=
		    status_memory_device_of(job, u, i - i % shard))
			return true;
	return false;
}

/* Number of replicas on the device that has most of them. */
static uint32_t status_memory_replicas_here(const struct job *job, const struct unit *u)
{
	uint32_t ranks = group_size(job->groups[u->rec->group]), most = 0;

	for (unsigned d = 0; d < u->n_parts; d++) {
		uint32_t here = 0;

		for (uint32_t i = 0; i < ranks; i++)
			here += status_memory_device_of(job, u, i) == u->parts[d].device;
		most = here > most ? here : most;
	}
	return most / u->rec->shard_ranks;
}

/* Sums of replicas: each device has its own. If replicas have sets of devices, that is its segment of
 * one. If they are split over devices otherwise and have a factor of their own, every device has its
 * segment of all of them; else it has one sum of its ranks. */
static uint64_t status_memory_deferred_of(const struct job *job, const struct unit *u)
{
	uint32_t ranks = group_size(job->groups[u->rec->group]), sums = 1;
	const struct reduce_plan plan = reduce_plan_for(job, u);
	uint64_t elements = u->layout.elements;

	if (!u->has_partials)
		return 0;
	if (u->layout.sets)
		elements = unit_part_elements(u);
	else if (!status_memory_has_split_replicas(job, u)) {
		sums = status_memory_replicas_here(job, u);
	} else if (plan.partial.how || plan.replica.how) {
		sums = ranks / u->rec->shard_ranks;
		elements = u->spread == 1 ? elements : unit_part_elements(u);
	}
	return u->n_parts *
	       status_memory_aligned(
		       u->parts[0].device,
		       sums * formula_rounded(elements *
					      dtype_size((enum dtype)u->rec->reduce_dtype)));
}

/* Gradient shards that exist only while they are needed. */
static uint64_t status_memory_pooled_of(const struct unit *u)
{
	if (!unit_pools_gradient(u->rec) || !u->has_gradient)
		return 0;
	return u->n_parts *
	       status_memory_array(u->parts[0].device, unit_part_elements(u), DTYPE_FP32);
}

static enum dtype status_memory_accumulate_dtype(const struct unit *u)
{
	return u->rec->reduce_profile == PROFILE_FSDP2 ? (enum dtype)u->rec->reduce_dtype
						       : (enum dtype)u->rec->gradient_dtype;
}

/* Parameters and gradient of the rank's share for its external optimizer, at least one element. */
static uint64_t status_memory_external_of(const struct job *job, struct unit *u,
					  const struct member *m)
{
	uint64_t n;
	uint32_t index;

	CHECK(group_index(job->groups[u->rec->group], m->rank, &index));
	n = external_share_elements(job, u, index);
	n = n ? n : 1;
	return status_memory_aligned(m->device,
				     formula_rounded(n * dtype_size(unit_state_dtype(u->rec, 0))) +
					     formula_rounded(n * sizeof(float)));
}

/* @mu says whether the rank holds something; the size follows from the unit. */
static uint64_t status_memory_held_of(const struct job *job, struct unit *u, const struct member *m,
				      const struct member_unit *mu)
{
	uint64_t bytes = 0;

	if (mu->gradient.slab)
		bytes += status_memory_array(m->device, u->layout.elements,
					     (enum dtype)u->rec->gradient_dtype);
	if (mu->accumulated.slab)
		bytes += status_memory_array(m->device, u->layout.elements,
					     status_memory_accumulate_dtype(u));
	if (mu->is_summoned)
		bytes += status_memory_array(m->device, unit_full_elements(u),
					     unit_state_dtype(u->rec, u->summoned_state));
	if (mu->shard_state == SHARD_GOING || mu->shard_state == SHARD_OUT ||
	    mu->shard_state == SHARD_BACK)
		bytes += status_memory_external_of(job, u, m);
	return bytes;
}

/* For a buffer the formula is the requested size. */
static uint64_t status_memory_held_by(const struct job *job, struct member *m)
{
	const struct member_buffer *b, *tmp;
	uint64_t bytes = 0, held;

	if (!m->pool.used) /* all that follows is of its pool */
		return 0;
	for (uint32_t i = member_next_held(m, 0); i < m->n_units && i < job->n_units;
	     i = member_next_held(m, i + 1)) {
		held = status_memory_held_of(job, job->units[i], m, &m->units[i]);
		bytes += held;
		if (!held)
			member_note_held(m, &m->units[i]);
	}
	list_for_each (b, tmp, (struct list *)&m->buffers, link)
		bytes += status_memory_aligned(m->device, b->region.bytes);
	return bytes;
}

static void status_memory_add_formula(const struct job *job, struct status_memory *m)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		if (job->units[i]->rec->dropped)
			continue;
		m->formula[MEM_SHARD] += status_memory_shards_of(job, job->units[i]);
		m->formula[MEM_FULL] += status_memory_copies_of(job->units[i]) +
					status_memory_deferred_of(job, job->units[i]);
		m->formula[MEM_GRAD] += status_memory_pooled_of(job->units[i]);
	}
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			m->formula[MEM_GRAD] += status_memory_held_by(job, job->ranks[r]);
	for (size_t i = 0; i < job->rec->n_blobs; i++)
		m->formula[MEM_CONTROL] += job->rec->blobs[i]->data.len;
	m->formula[MEM_CONTROL] += regcache_bytes(job);
	m->formula[MEM_PUBLISHED] += publications_bytes(job);
}

void status_memory(const struct job *job, struct status_memory *ret)
{
	*ret = (struct status_memory){ 0 };
	status_memory_add_used(job, ret);
	status_memory_add_formula(job, ret);
}
