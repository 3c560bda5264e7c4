/* A job from its saved record and its slabs. */
#include <errno.h>
#include <stdlib.h>

#include "job/base.h"
#include "job/events.h"
#include "job/job.h"
#include "job/job_impl.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/policy.h"
#include "job/units_impl.h"
#include "publish/publication.h"

/* A saved region, or none. */
static struct region job_restore_region_of(struct job *job, const state_region *rec)
{
	struct region r = REGION_NULL;

	for (uint32_t i = 0; rec && i < job->mem.n_slabs; i++)
		if (job->mem.slabs[i]->id == rec->slab)
			r = (struct region){ job->mem.slabs[i], rec->offset, rec->bytes };
	return r;
}

static bool job_restore_part_fits(const struct unit *u, const struct unit_part *p)
{
	uint64_t need = unit_array_bytes(&u->layout, u->spread);
	unsigned states = need ? unit_state_arrays(u->rec) : 0;

	return p->params.bytes >= unit_params_bytes(u->rec, &u->layout, u->spread) &&
	       (unit_pools_gradient(u->rec) ? !p->grads.slab : p->grads.bytes >= need) &&
	       (states < 1 || p->state1.bytes >= need) && (states < 2 || p->state2.bytes >= need) &&
	       (states < 3 || p->state3.bytes >= need) &&
	       (!p->kept.slab || p->kept.bytes >= p->params.bytes + p->state1.bytes +
							  p->state2.bytes + p->state3.bytes);
}

static bool job_restore_parts(struct job *job, struct unit *u)
{
	if (u->rec->n_parts != u->n_parts)
		return false;
	for (unsigned d = 0; d < u->n_parts; d++) {
		const state_part *rec = u->rec->parts[d];
		struct unit_part *p = &u->parts[d];

		p->params = job_restore_region_of(job, rec->params);
		p->grads = job_restore_region_of(job, rec->grads);
		p->state1 = job_restore_region_of(job, rec->state1);
		p->state2 = job_restore_region_of(job, rec->state2);
		p->state3 = job_restore_region_of(job, rec->state3);
		p->kept = job_restore_region_of(job, rec->kept);
		if (!job_restore_part_fits(u, p) || p->params.slab->device != p->device)
			return false;
	}
	return true;
}

static bool job_restore_buffers(struct job *job, struct unit *u)
{
	const struct group *g = job->groups[u->rec->group];
	uint64_t bytes = unit_buffers_bytes(u->rec);

	if (!bytes)
		return true;
	u->buffers = calloc(group_size(g), sizeof(*u->buffers));
	if (!u->buffers || u->rec->n_buffer_regions != group_size(g))
		return false;
	for (uint32_t i = 0; i < group_size(g); i++) {
		uint32_t rank = g->rec->ranks[i];
		struct region r = job_restore_region_of(job, u->rec->buffer_regions[i]);

		if (!r.slab || r.bytes < bytes || r.slab->device->index != job_device_of(job, rank))
			return false;
		r.slab->writable = true;
		r.slab->owner_rank = (int)rank;
		u->buffers[i] = r;
	}
	return true;
}

static int job_restore_unit(struct job *job, state_unit *rec, struct fault *f)
{
	struct group *g = job->groups[rec->group];
	struct unit_place place;
	struct layout layout;
	struct unit *u;

	if (group_place(g, f) != RES_DONE)
		return fault_set(f, FAULT_INVALID, "state",
				 "saved unit '%.100s' has ranks without a device", rec->name);
	if (!unit_layout(rec, group_size(g), &layout) || !unit_buffers_fit(rec) ||
	    !group_can_have(g, &layout))
		return fault_set(f, FAULT_INVALID, "state",
				 "saved unit '%.100s' has no valid layout", rec->name);
	place = group_unit_place(g);
	if (unit_new(job->n_units + 1, rec, &layout, &place, &u) < 0)
		return fault_errno(f, -ENOMEM, "restoring units");
	if (rec->dropped) {
		job->units[job->n_units++] = u;
		job_note_dropped(job, u->id);
		return 0;
	}
	if (!job_restore_parts(job, u) || !job_restore_buffers(job, u) ||
	    htab_add(&job->unit_names, rec->name, u) < 0) {
		unit_free(u);
		return fault_set(
			f, FAULT_INVALID, "state",
			"saved unit '%.100s' has too little memory, or its name occurs twice",
			rec->name);
	}
	job->units[job->n_units++] = u;
	return 0;
}

static int job_restore_units(struct job *job, struct fault *f)
{
	if (job->rec->n_units && job_units_grow(job, job->rec->n_units) < 0)
		return fault_errno(f, -ENOMEM, "restoring units");
	for (size_t i = 0; i < job->rec->n_units; i++)
		if (job_restore_unit(job, job->rec->units[i], f))
			return f->code;
	return job_units_resolve_aliases(job, 0, f);
}

/* Charge the blobs of the record. */
static int job_restore_charge_blobs(struct job *job)
{
	for (size_t i = 0; i < job->rec->n_blobs; i++)
		if (quota_charge(&job->quota, MEM_CONTROL, job->rec->blobs[i]->data.len))
			return -ENOSPC;
	return 0;
}

/* The device @name of the record. Return: NULL: @f says that there is none. */
static struct device *job_restore_device(const struct job *job, const char *name, struct fault *f)
{
	struct device *d = node_device(job->node, name);
	char list[300];

	if (d)
		return d;
	node_list_devices(job->node, list, sizeof(list));
	fault_set(
		f, FAULT_INVALID, "devices",
		"memory of job '%.64s' is on device %.48s, which this daemon does not have: it has "
		"%.250s; start it with that device",
		job->rec->name, name, list);
	return NULL;
}

static int job_restore_slab(struct job *job, const state_slab *s, int fd, struct slab **ret,
			    struct fault *f)
{
	struct device *d = job_restore_device(job, s->device, f);

	if (!d)
		return -ENODEV;
	if (fd < 0)
		return -EBADF;
	return slab_import(d, &job->quota, (enum mem_class)s->class_, s->bytes, job->rec->name,
			   s->id, fd, ret);
}

static int job_restore_place(struct job *job, uint32_t rank, struct fault *f)
{
	const char *name = job->rec->devices[rank];

	if (!*name)
		return 0;
	job->placed[rank] = job_restore_device(job, name, f);
	return job->placed[rank] ? 0 : -ENODEV;
}

/* What was being changed is copied back. A job's copy that is of some units does not have what was
 * written to others. */
static bool job_restore_rolls_back(const struct job *job)
{
	return job->rec->kept && (kept_at_commits(job) || !job->rec->altered);
}

int job_restore(struct jobs *jobs, state_job *rec, const int *fds, struct job **ret,
		struct fault *f)
{
	struct job *job = job_new(jobs, rec, f);
	int r = 0;

	if (!job)
		return f->code;
	job->mem.slabs = calloc(rec->n_slabs ? rec->n_slabs : 1, sizeof(struct slab *));
	for (size_t i = 0; job->mem.slabs && r == 0 && i < rec->n_slabs; i++) {
		r = job_restore_slab(job, rec->slabs[i], fds[i], &job->mem.slabs[i], f);
		job->mem.n_slabs += r == 0;
	}
	for (uint32_t i = 0; r == 0 && i < rec->world_size; i++)
		r = job_restore_place(job, i, f);
	if (f->code)
		; /* a device is missing */
	else if (!job->mem.slabs || r || job_restore_charge_blobs(job) < 0)
		fault_set(f, FAULT_EXHAUSTED, NULL,
			  "memory of job '%s' could not be taken over (%d)", rec->name, r);
	else if (job_restore_units(job, f) == 0 && publications_restore(job, f) == 0 &&
		 job_publish(job) < 0)
		fault_errno(f, -ENOMEM, "restoring a job");
	if (f->code) {
		publications_free(job);
		job_units_free(job);
		if (job->quota.by_class[MEM_CONTROL])
			quota_return(&job->quota, MEM_CONTROL, job->quota.by_class[MEM_CONTROL]);
		job->rec = NULL;
		job_free(job);
		return f->code;
	}
	/* everything that ran in the old daemon is over, and so is that epoch */
	job->rec->epoch++;
	job->life.crashed = true;
	base_committed(job);
	events_add(
		job, EVENTS_RESTORED, "%s",
		"from the previous daemon, with which earlier events and recorded ops have ended");
	if (rec->doubt && jobs->ops.restored)
		jobs->ops.restored(job);
	if (rec->torn || (rec->applying && !job_restore_rolls_back(job)))
		job_set_torn(job);
	rec->applying = false;
	kept_epoch_ended(job);
	job_tear(job);
	policy_begin(job);
	for (uint32_t i = 0; i < job->n_units; i++)
		job_journal_mark_unit(job, job->units[i]);
	job_journal_mark(job, JOB_JOURNAL_HEAD | JOB_JOURNAL_BLOBS | JOB_JOURNAL_SLABS);
	*ret = job;
	return 0;
}
