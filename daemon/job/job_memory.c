#include "job/job_memory.h"

#include "unit/reduce_plan.h"

static uint64_t aligned(uint64_t bytes)
{
	return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

static uint64_t array(uint64_t elements, enum dtype dtype)
{
	return aligned(elements * dtype_size(dtype));
}

/* ------------------------------------------------------------ what is in use */

static uint64_t part_regions(const struct unit_part *p)
{
	return p->params.bytes + p->state1.bytes + p->state2.bytes + p->state3.bytes;
}

static void add_used(const struct job *job, struct job_memory *m)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		for (unsigned d = 0; d < u->n_parts; d++)
			m->used[MEM_SHARD] +=
				part_regions(&u->parts[d]) +
				(unit_pools_gradient(u->rec) ? 0 : u->parts[d].grads.bytes);
		for (uint32_t r = 0; u->buffers && r < group_size(job->groups[u->rec->group]); r++)
			m->used[MEM_SHARD] += u->buffers[r].bytes;
	}
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		m->used[MEM_FULL] += job->full[d].used + job->scratch[d].used;
		m->used[MEM_GRAD] += job->grads[d].used;
	}
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			m->used[MEM_GRAD] += job->ranks[r]->pool.used;
	m->used[MEM_CONTROL] = job->quota.by_class[MEM_CONTROL];
}

/* ------------------------------------------------------------- the formulas */

/* In the elements of one part: trained ones have a gradient and states, frozen ones do not. */
static uint64_t shards_of(const struct job *job, const struct unit *u)
{
	uint64_t trained = unit_part_elements(u), all = trained + unit_frozen_elements(u);
	uint64_t ranks = group_size(job->groups[u->rec->group]);

	return u->n_parts * (array(all, DTYPE_FP32) +
			     array(trained, DTYPE_FP32) *
				     (!unit_pools_gradient(u->rec) + unit_state_arrays(u->rec))) +
	       ranks * unit_buffers_bytes(u->rec);
}

static uint64_t copies_of(const struct unit *u)
{
	uint64_t all = (unit_part_elements(u) + unit_frozen_elements(u)) * u->spread, bytes = 0;

	if (u->has_full)
		bytes += u->n_parts * array(all, (enum dtype)u->rec->compute_dtype);
	for (unsigned d = 0; d < u->n_parts; d++)
		bytes += aligned(u->parts[d].partials.bytes);
	return bytes;
}

/* Gradient shards that are there only while they are needed. */
static uint64_t pooled_of(const struct unit *u)
{
	if (!unit_pools_gradient(u->rec) || !u->parts[0].grads.slab)
		return 0;
	return u->n_parts * array(unit_part_elements(u), DTYPE_FP32);
}

static enum dtype accumulate_dtype(const struct unit *u)
{
	return u->rec->reduce_profile == PROFILE_FSDP2 ? (enum dtype)u->rec->reduce_dtype
						       : (enum dtype)u->rec->gradient_dtype;
}

static uint64_t held_of(const struct unit *u, const struct member_unit *mu)
{
	uint64_t bytes = 0;

	if (mu->gradient.slab)
		bytes += array(u->layout.elements, (enum dtype)u->rec->gradient_dtype);
	if (mu->accumulated.slab)
		bytes += array(u->layout.elements, accumulate_dtype(u));
	if (mu->summoned.slab)
		bytes += array(unit_full_elements(u), DTYPE_FP32);
	return bytes + aligned(mu->shard.bytes);
}

static uint64_t held_by(const struct job *job, const struct member *m)
{
	const struct member_buffer *b, *tmp;
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < m->n_units && i < job->n_units; i++)
		bytes += held_of(job->units[i], &m->units[i]);
	list_for_each (b, tmp, (struct list *)&m->buffers, link)
		bytes += aligned(b->region.bytes);
	return bytes;
}

static void add_formula(const struct job *job, struct job_memory *m)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		m->formula[MEM_SHARD] += shards_of(job, job->units[i]);
		m->formula[MEM_FULL] += copies_of(job->units[i]);
		m->formula[MEM_GRAD] += pooled_of(job->units[i]);
	}
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			m->formula[MEM_GRAD] += held_by(job, job->ranks[r]);
	for (size_t i = 0; i < job->rec->n_blobs; i++)
		m->formula[MEM_CONTROL] += job->rec->blobs[i]->data.len;
}

void job_memory(const struct job *job, struct job_memory *ret)
{
	*ret = (struct job_memory){ 0 };
	add_used(job, ret);
	add_formula(job, ret);
}
