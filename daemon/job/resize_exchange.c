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
	rec->sets = x->rec.sets;
	rec->pre_divide = x->rec.pre_divide;
	rec->post_divide = x->rec.post_divide;
	SWAP(u->parts, fresh->parts);
	SWAP(u->n_parts, fresh->n_parts);
	SWAP(u->all_parts, fresh->all_parts);
	SWAP(u->first_part, fresh->first_part);
	SWAP(u->tensors, fresh->tensors);
	SWAP(u->buffers, fresh->buffers);
	unit_lay_out(u, &fresh->layout, NULL);
	u->version++;
	u->has_partials = false;
	for (uint32_t k = 0; u->buffers && k < r->world; k++)
		u->buffers[k].slab->owner_rank = (int)k;
	r->report.in_place += !r->moves[i];
	job_journal_mark_unit(job, u);
}

/* They only keep their numbers; what is in the record must fit the world. */
static void resize_exchange_dropped_unit(struct job *job, struct unit *u)
{
	u->rec->group = 0;
	u->rec->shard_ranks = 1;
	u->rec->sets = false;
	job_journal_mark_unit(job, u);
}

/* Its world is on the devices that were chosen. */
static int resize_exchange_place(struct resize *r)
{
	struct device **on = calloc(r->world, sizeof(struct device *));
	int e = -ENOMEM;

	for (uint32_t i = 0; on && i < r->world; i++)
		on[i] = r->ranks[i].device;
	if (on)
		e = group_place_on(r->group, on);
	free(on);
	CHECK(e < 0 || r->group->n_devices == r->n_devices);
	return e;
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
	return resize_exchange_place(r);
}

/* The device of new rank @i; NULL: it is not placed yet. */
static struct device *resize_exchange_placed(const struct resize *r, uint32_t i)
{
	if (r->group->n_devices)
		return r->ranks[i].device;
	return resize_rank_stays(r, i) ? r->job->placed[r->from[i]] : NULL;
}

static const char **resize_exchange_device_names(const struct resize *r)
{
	const char **names = calloc(r->world, sizeof(*names));

	for (uint32_t i = 0; names && i < r->world; i++) {
		const struct device *d = resize_exchange_placed(r, i);

		names[i] = d ? backend_lasting_name(d->backend) : "";
	}
	return names;
}

/* The ranks are not those that were started, as the same. */
static bool resize_exchange_has_numbers(const struct resize *r)
{
	if (!r->stay)
		return false;
	for (uint32_t i = 0; i < r->world; i++)
		if (r->stay->numbers[i] != i)
			return true;
	return r->stay->launched != r->world;
}

static int resize_exchange_record(struct resize *r)
{
	bool numbers = resize_exchange_has_numbers(r);
	const char **names = resize_exchange_device_names(r);
	const struct state_size to = { .world = r->group_rec,
				       .devices = names,
				       .from = r->from,
				       .launched = numbers ? r->stay->launched : 0,
				       .numbers = numbers ? r->stay->numbers : NULL };
	uint64_t blobs = 0;
	int e = names ? state_job_resize(r->job->rec, &to, &r->report.left_out, &blobs) : -ENOMEM;

	free(names);
	if (e)
		return e;
	r->group_rec = NULL;
	quota_return(&r->job->quota, MEM_CONTROL, blobs);
	return 0;
}

/* Its process is in the job, and did not come back in time. */
static void resize_exchange_leave_out(struct resize *r, struct member *m)
{
	struct fault f = FAULT_NULL;

	if (m->state != MEMBER_STALE)
		return;
	fault_set(&f, FAULT_ABORTED, NULL,
		  "job '%s' has gone on with %u ranks, without this process (rank %u), which had "
		  "not joined again in time: join again",
		  r->job->rec->name, r->world, m->rank);
	job_leave_out(m, &f);
}

/* Those that stay have new numbers; what they had of the units as these were is gone. */
static void resize_exchange_members(struct resize *r, struct member **ranks)
{
	struct job *job = r->job;

	for (uint32_t i = 0; i < r->world; i++) {
		if (!resize_rank_stays(r, i) || !job->ranks[r->from[i]])
			continue;
		ranks[i] = STEAL_PTR(job->ranks[r->from[i]]);
		member_reset(ranks[i]);
		member_renumber(ranks[i], i);
	}
	for (uint32_t i = 0; i < r->report.from; i++) {
		if (job->ranks[i])
			resize_exchange_leave_out(r, job->ranks[i]);
		member_unref(job->ranks[i]);
	}
	free(job->ranks);
	job->ranks = ranks;
}

/* The record, and what the job has by rank. On failure nothing has changed. */
static int resize_exchange_world(struct resize *r)
{
	struct job *job = r->job;
	uint64_t before = job_own_bytes(job, job->n_units, 0);
	struct member **ranks = calloc(r->world, sizeof(struct member *));
	struct device **placed = calloc(r->world, sizeof(struct device *));
	int e = ranks && placed ? 0 : -ENOMEM;

	for (uint32_t i = 0; e == 0 && i < r->world; i++)
		placed[i] = resize_exchange_placed(r, i);
	if (e == 0)
		e = resize_exchange_record(r);
	if (e) {
		free(ranks);
		free(placed);
		return e;
	}
	/* more ranks are more records; a user who has no room for them finds out at the next unit */
	(void)user_charge_resize(
		&job->memory, job->memory.n - before + job_own_bytes(job, job->n_units, 0), NULL);
	resize_exchange_members(r, ranks);
	free(job->placed);
	job->placed = placed;
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

/* Those that stay unmap them. */
static void resize_exchange_drop_slabs(const struct resize *r)
{
	struct job *job = r->job;
	struct slab_list gone = { .ids = calloc(job->mem.n_slabs + 1, sizeof(*gone.ids)) };

	job_drop_unused_slabs(job, gone.ids ? &gone : NULL);
	for (uint32_t i = 0; i < r->world; i++)
		if (job->ranks[i])
			member_slabs_gone(job->ranks[i], gone.ids, (uint32_t)gone.n);
	free(gone.ids);
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
	resize_exchange_drop_slabs(r);
	return 0;
}
