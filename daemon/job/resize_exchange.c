/* Of a resize: the exchange, in one entry of the journal. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/resize_impl.h"

static int resize_exchange_enter_slabs(struct resize *r)
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
static void resize_exchange_swap_unit(struct resize *r, uint32_t i)
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
static void resize_exchange_dropped_unit(struct job *job, struct unit *u)
{
	u->rec->group = 0;
	u->rec->shard_ranks = 1;
	job_journal_mark_unit(job, u);
}

/* The world group, as it will be. */
int resize_make_group(struct resize *r)
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
static const char **resize_exchange_device_names(const struct resize *r)
{
	const char **names = calloc(r->world, sizeof(*names));

	for (uint32_t i = 0; names && i < r->world; i++)
		names[i] = r->group->n_devices ? backend_lasting_name(r->ranks[i].device->backend)
					       : "";
	return names;
}

/* The record, and what the job has by rank. On failure nothing has changed. */
static int resize_exchange_world(struct resize *r)
{
	struct job *job = r->job;
	uint64_t before = job_own_bytes(job, job->n_units, 0), blobs;
	struct member **ranks = calloc(r->world, sizeof(struct member *));
	struct device **placed = calloc(r->world, sizeof(struct device *));
	const char **names = resize_exchange_device_names(r);
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

static void resize_exchange_groups(struct resize *r)
{
	struct job *job = r->job;

	ddps_free(job);
	while (job->n_groups)
		group_free(job->groups[--job->n_groups]);
	job->groups[job->n_groups++] = STEAL_PTR(r->group);
}

/* One entry of the journal: the job is the old one until it is complete, and the new one then. */
int resize_exchange(struct resize *r)
{
	struct job *job = r->job;
	int e = resize_exchange_enter_slabs(r);

	if (e == 0)
		e = resize_exchange_world(r);
	if (e) {
		job_drop_unused_slabs(job, NULL);
		return e;
	}
	resize_exchange_groups(r);
	regcache_drop(job);
	for (uint32_t i = 0; i < job->n_units; i++)
		if (r->units[i].old)
			resize_exchange_swap_unit(r, i);
		else
			resize_exchange_dropped_unit(job, job->units[i]);
	job->readers.changes++;
	job_journal_mark(job, JOB_JOURNAL_HEAD | JOB_JOURNAL_BLOBS | JOB_JOURNAL_SLABS);
	job_journal_write(job);
	job_drop_unused_slabs(job, NULL);
	return 0;
}
