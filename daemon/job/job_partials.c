/* Sums of replicas whose all-reduce was deferred: they are freed here if it never comes. */
#include "core/check.h"
#include "job/job.h"

void job_give_partials(struct job *job, struct unit *u)
{
	u->has_partials = false;
	for (unsigned d = 0; d < u->n_parts; d++)
		pool_give(&job->mem.scratch[u->parts[d].device->index], &u->parts[d].partials);
}

/* A running reduction may still write to them: it frees them itself, or this is called again when
 * it has ended. */
void job_drop_partials(struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		job->units[i]->has_partials = false;
	job->mem.stale_partials = job->running > 0;
	for (uint32_t i = 0; !job->running && i < job->n_units; i++)
		job_give_partials(job, job->units[i]);
}
