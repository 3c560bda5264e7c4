/* Memory of a job that can go when other memory is needed. */
#include "core/check.h"
#include "job/bufcopy.h"
#include "job/generation.h"
#include "job/job.h"
#include "mem/slab.h"

static uint64_t job_evict_trim(struct job *job, uint64_t want)
{
	uint64_t freed = 0;

	if (job->step.old_redo) /* it reads what is there */
		return 0;
	for (unsigned d = 0; d < job->node->n_devices && freed < want; d++) {
		struct pool *pools[] = { &job->mem.grads[d], &job->mem.full[d] };

		for (size_t i = 0; i < ARRAY_SIZE(pools) && freed < want; i++)
			freed += pool_trim(pools[i], want - freed);
	}
	return freed;
}

/* What other jobs keep for their next step is theirs as long as nobody else needs it. */
static uint64_t job_evict_trim_others(struct job *job)
{
	struct job *other, *tmp;
	uint64_t freed = 0;

	list_for_each (other, tmp, &job->jobs->all, link)
		if (other != job)
			freed += job_evict_trim(other, UINT64_MAX) + generation_evict(other, false);
	return freed;
}

uint64_t job_evict(struct job *job, uint64_t want)
{
	struct unit *u, *tmp;
	uint64_t freed;

	list_for_each (u, tmp, &job->copies.idle, idle) {
		list_unlink(&u->idle);
		job_give_full(job, u);
	}
	freed = job_evict_trim(job, want);
	freed = freed ? freed : generation_evict(job, false);
	freed = freed ? freed : job_evict_trim_others(job);
	freed = freed ? freed : bufcopy_evict(job); /* training comes first */
	return freed ? freed : generation_evict(job, true);
}

int job_evict_later(struct job *job, int error)
{
	if (!slab_is_short(error))
		return error;
	if (generation_gives_later(job))
		return SLAB_E_LATER;
	/* the thread that reads may have left a block since job_evict has looked */
	if (!job_evict(job, UINT64_MAX)) /* it may have come back to one */
		return generation_gives_later(job) ? SLAB_E_LATER : error;
	node_wake_later(job->node);
	return SLAB_E_LATER;
}

int job_take(struct job *job, struct pool *pool, uint64_t bytes, struct region *ret)
{
	int r = pool_take(pool, bytes, ret);

	while (slab_is_short(r) && job_evict(job, UINT64_MAX))
		r = pool_take(pool, bytes, ret);
	return job_evict_later(job, r);
}
