/* The memory of gathered copies: one region on each device of a unit. */
#include "job/job_full.h"

#include "core/check.h"
#include "job/job_types.h"

static struct pool *job_full_pool_of(struct job *job, const struct unit_part *p)
{
	return &job->mem.full[p->device->index];
}

int job_take_full(struct job *job, struct unit *u)
{
	uint64_t bytes = unit_full_room(u);
	int r = 0;

	CHECK(!unit_has_copy(u));
	for (unsigned d = 0; r == 0 && d < u->n_parts; d++)
		r = pool_take(job_full_pool_of(job, &u->parts[d]), bytes, &u->parts[d].full);
	if (r == 0)
		unit_copy_move(u, UNIT_COPY_KEPT);
	for (unsigned d = 0; r && d < u->n_parts; d++)
		pool_give(job_full_pool_of(job, &u->parts[d]), &u->parts[d].full);
	return r;
}

void job_give_full(struct job *job, struct unit *u)
{
	for (unsigned d = 0; unit_has_copy(u) && d < u->n_parts; d++) {
		struct unit_part *p = &u->parts[d];

		/* without memory to remember them the copy stays where it is */
		if (reads_move(&job->mem.stray[p->device->index], &p->reads) < 0)
			return;
	}
	for (unsigned d = 0; unit_has_copy(u) && d < u->n_parts; d++)
		pool_give(job_full_pool_of(job, &u->parts[d]), &u->parts[d].full);
	if (unit_has_copy(u))
		unit_copy_move(u, UNIT_COPY_NONE);
	u->full_version = 0;
}

void job_full_unused(struct job *job, struct unit *u)
{
	if (u->copy != UNIT_COPY_KEPT || u->gathered_ranks || u->copy_reads)
		return;
	list_unlink(&u->idle);
	if (u->drop)
		job_give_full(job, u);
	u->drop = false;
	if (unit_has_copy(u))
		list_append(&job->copies.idle, &u->idle);
}
