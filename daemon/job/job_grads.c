/* Gradient shards that exist only while they are needed, and the end of a backward pass. */
#include "core/check.h"
#include "job/job.h"

static struct pool *job_grads_pool_of(struct job *job, const struct unit_part *p)
{
	return &job->mem.grads[p->device->index];
}

int job_take_grads(struct job *job, struct unit *u)
{
	uint64_t bytes = unit_array_bytes(&u->layout, u->spread);
	int r = 0;

	if (!unit_pools_gradient(u->rec) || u->parts[0].grads.slab)
		return 0;
	if (!bytes) /* nothing is trained */
		return 0;
	for (unsigned d = 0; r == 0 && d < u->n_parts; d++)
		r = pool_take(job_grads_pool_of(job, &u->parts[d]), bytes, &u->parts[d].grads);
	job->mem.stray_gradients = true;
	if (r)
		job_give_grads(job, u);
	return r;
}

void job_give_grads(struct job *job, struct unit *u)
{
	for (unsigned d = 0; unit_pools_gradient(u->rec) && d < u->n_parts; d++)
		pool_give(job_grads_pool_of(job, &u->parts[d]), &u->parts[d].grads);
}

void job_give_stray_grads(struct job *job)
{
	if (!job->mem.stray_gradients || job->running)
		return;
	job->mem.stray_gradients = false;
	for (uint32_t i = 0; i < job->n_units; i++)
		if (!job->units[i]->has_gradient)
			job_give_grads(job, job->units[i]);
}

void job_pass_end(struct job *job, struct group *g)
{
	for (uint32_t i = 0; i < job->n_groups; i++) {
		struct group *other = job->groups[i];

		if (g && other != g)
			continue;
		group_set_plan(other, NULL);
		other->unscaled = false;
		other->found_inf = false;
	}
	for (uint32_t i = 0; i < job->n_units; i++)
		if (!g || job->units[i]->rec->group == g->id)
			unit_pass_end(job->units[i]);
}

int job_pass_check_over(const struct job *job, const struct group *g, struct fault *f)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		if (g && u->rec->group != g->id)
			continue;
		if (u->shards_left && (g || job->step.mid))
			return fault_set(f, FAULT_STATE, NULL,
					 "%u ranks have not given back their shard of unit "
					 "'%.100s' (NextShard, ShardDone)",
					 u->shards_left, u->rec->name);
		if (!g && job->step.mid && u->step == UNIT_STEP_DUE)
			return fault_set(
				f, FAULT_STATE, NULL,
				"unit '%.100s' is still gathered and so not stepped, while "
				"others are: release it, and end the backward pass with "
				"Step",
				u->rec->name);
	}
	return 0;
}
