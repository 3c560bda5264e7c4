#include "job/kept.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/log.h"
#include "job/generation.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/position.h"

/* One copy under way, from or to the kept regions. */
struct kept {
	struct job *job;
	bool back; /* to the units */
	unsigned pending;
	int status;
	struct kept_part {
		struct backend_task task;
		struct kept *kept;
		struct launch *launches; /* owned */
	} parts[NODE_MAX_DEVICES];
};

bool kept_is_on(const struct job *job)
{
	return job->rec->resume == JOB_RESUME_COMMITTED;
}

bool kept_is_rolling_back(const struct job *job)
{
	return job->rec->rollback;
}

/* -------------------------------------------------------------------- memory */

static uint64_t kept_part_bytes(const struct unit *u, struct unit_part *p)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i <= unit_state_arrays(u->rec); i++)
		bytes += unit_state(p, i)->bytes;
	return bytes;
}

static bool kept_has_region(const struct unit_part *p)
{
	return p->kept.slab;
}

static uint64_t kept_sum(const struct job *job, bool missing, uint64_t *by_device)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];

		for (unsigned d = 0; !u->rec->dropped && d < u->n_parts; d++) {
			uint64_t bytes = kept_part_bytes(u, &u->parts[d]);

			if (missing && kept_has_region(&u->parts[d]))
				continue;
			if (by_device)
				by_device[u->parts[d].device->index] += bytes;
			sum += bytes;
		}
	}
	return sum;
}

uint64_t kept_bytes(const struct job *job)
{
	return kept_sum(job, false, NULL);
}

/* In the units and in their records. Return: 0 or -ENOMEM: those that have one keep it. */
static int kept_place(struct job *job, struct slab *const *slabs)
{
	uint64_t at[NODE_MAX_DEVICES] = { 0 };

	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];

		for (unsigned d = 0; !u->rec->dropped && d < u->n_parts; d++) {
			struct unit_part *p = &u->parts[d];
			unsigned on = p->device->index;
			struct region r = { slabs[on], at[on], kept_part_bytes(u, p) };

			if (kept_has_region(p) || !slabs[on])
				continue;
			if (state_region_set(&u->rec->parts[d]->kept, &r) < 0)
				return -ENOMEM;
			p->kept = r;
			at[on] += r.bytes;
			job_journal_mark_unit(job, u);
		}
	}
	return 0;
}

static int kept_take_one(struct job *job, struct device *d, uint64_t bytes, struct slab **ret)
{
	int r = slab_new(d, &job->quota, MEM_SHARD, job_share(job), bytes, job->rec->name, -1, ret);

	while (slab_is_short(r) && job_evict(job, UINT64_MAX))
		r = slab_new(d, &job->quota, MEM_SHARD, job_share(job), bytes, job->rec->name, -1,
			     ret);
	return r;
}

/* Of all devices at once; those that are there are used also if others are not. */
static int kept_take(struct job *job, const uint64_t *bytes, struct slab **slabs)
{
	bool later = false;
	int r = 0;

	for (unsigned d = 0; r == 0 && d < job->node->n_devices; d++)
		if (bytes[d])
			r = slab_note_later(kept_take_one(job, &job->node->devices[d], bytes[d],
							  &slabs[d]),
					    &later);
	return r || !later ? r : SLAB_E_LATER;
}

static int kept_add(struct job *job, struct slab *const *slabs)
{
	struct slab *all[NODE_MAX_DEVICES];
	size_t n = 0;

	for (unsigned d = 0; d < job->node->n_devices; d++)
		if (slabs[d])
			all[n++] = slabs[d];
	return job_add_slabs(job, all, n) < 0 ? -ENOMEM : kept_place(job, slabs);
}

int kept_reserve(struct job *job)
{
	struct slab *slabs[NODE_MAX_DEVICES] = { NULL };
	uint64_t bytes[NODE_MAX_DEVICES] = { 0 };
	int r;

	if (!kept_is_on(job) || !kept_sum(job, true, bytes))
		return 0;
	r = kept_take(job, bytes, slabs);
	if ((r == 0 || r == SLAB_E_LATER) && kept_add(job, slabs) < 0)
		r = -ENOMEM;
	for (unsigned d = 0; d < job->node->n_devices; d++)
		slab_unref(slabs[d]);
	return r;
}

void kept_forget(struct job *job, struct unit *u)
{
	job->rec->kept = job->rec->rollback = false;
	for (unsigned d = 0; d < u->n_parts; d++) {
		u->parts[d].kept = REGION_NULL;
		state_region_free(&u->rec->parts[d]->kept);
	}
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	job_journal_mark_unit(job, u);
}

/* ------------------------------------------------------------------- copying */

static struct kept *kept_free(struct kept *k)
{
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		free(k->parts[d].launches);
	free(k);
	return NULL;
}

/* Of a unit that was registered, or not initialised, when the copy was made there is nothing. */
static bool kept_takes_part(const struct kept *k, const struct unit *u)
{
	return !u->rec->dropped && u->rec->n_parts &&
	       (k->back ? u->rec->kept_initialised : u->rec->initialised);
}

static void kept_add_launches(struct kept *k, const struct unit *u, struct unit_part *p)
{
	struct kept_part *part = &k->parts[p->device->index];
	char *kept = region_addr(&p->kept);

	for (unsigned i = 0; i <= unit_state_arrays(u->rec); i++) {
		const struct region *r = unit_state(p, i);
		void *live = r->bytes ? region_addr(r) : NULL;

		if (r->bytes)
			part->launches[part->task.n_launches++] = (struct launch){
				.kind = LAUNCH_COPY,
				.n = r->bytes,
				.copy = { .dst = k->back ? live : kept,
					  .src = k->back ? kept : live },
			};
		kept += r->bytes;
	}
}

static struct kept *kept_new(struct job *job, bool back)
{
	struct kept *k = calloc(1, sizeof(*k));
	size_t most = (size_t)job->n_units * (1 + UNIT_MAX_STATES) + 1;

	if (!k)
		return NULL;
	k->job = job;
	k->back = back;
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		k->parts[d].kept = k;
		k->parts[d].launches = calloc(most, sizeof(struct launch));
		if (!k->parts[d].launches)
			return kept_free(k);
	}
	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];

		for (unsigned d = 0; kept_takes_part(k, u) && d < u->n_parts; d++)
			kept_add_launches(k, u, &u->parts[d]);
	}
	return k;
}

/* Every byte of it is there: from here on the state may differ from it. */
static void kept_is_made(struct job *job)
{
	if (!job->rec->has_commit || job->rec->torn) /* what was committed is gone meanwhile */
		return;
	job_journal_write(job); /* a reader of the journal takes the units as they are there */
	state_job_keep(job->rec);
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	job_journal_write(job);
}

static void kept_is_back(struct job *job)
{
	state_job_roll_back(job->rec);
	position_rolled_back(job);
	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];

		if (u->rec->dropped)
			continue;
		u->version++;
		u->some_lack = false;
		if (job->jobs->ops.rolled_back)
			job->jobs->ops.rolled_back(job, u);
		job_journal_mark_unit(job, u);
	}
	job->readers.rewritten = false;
	job->readers.changes++;
	job_journal_write(job);
	log_info("job", "rolled back job=%s step=%llu epoch=%llu", job->label,
		 (unsigned long long)job->rec->step, (unsigned long long)job->rec->epoch);
}

static void kept_done(struct kept *k)
{
	struct job *job = k->job;
	int status = k->status;

	job->kept.run = NULL;
	if (status && k->back) {
		job->rec->kept = job->rec->rollback = false;
		job_set_torn(job);
	} else if (k->back) {
		kept_is_back(job);
	} else if (status == 0) {
		kept_is_made(job);
	} else {
		job->kept.wanted = true; /* the device tells what is wrong by its other work */
	}
	kept_free(k);
	readers_go_on(job);
	job_ran(job);
}

static void kept_on_copied(struct backend_task *task, int status)
{
	struct kept *k = CONTAINER_OF(task, struct kept_part, task)->kept;

	k->status = k->status ? k->status : status;
	CHECK(k->pending > 0);
	if (--k->pending == 0)
		kept_done(k);
}

/* With nothing to copy it still ends from the loop. */
static void kept_submit(struct kept *k)
{
	struct job *job = k->job;
	unsigned n = job->node->n_devices, none = 0;

	for (unsigned d = 0; d < n; d++)
		none += k->parts[d].task.n_launches == 0;
	k->pending = none == n ? 1 : n - none;
	for (unsigned d = 0; d < n; d++) {
		struct kept_part *p = &k->parts[d];

		if (!p->task.n_launches && !(none == n && d == 0))
			continue;
		p->task.launches = p->launches;
		p->task.sync = true;
		p->task.done = kept_on_copied;
		p->task.owner = job_as_owner(job);
		backend_submit(job->node->devices[d].backend, &p->task);
	}
}

/* Return: does it run? */
static bool kept_start(struct job *job, bool back)
{
	job->kept.run = kept_new(job, back);
	if (!job->kept.run)
		return false;
	job->running++;
	kept_submit(job->kept.run);
	return true;
}

/* ------------------------------------------------------------- before a change */

static void kept_make(struct job *job)
{
	job->kept.wanted = kept_reserve(job) != 0 || !kept_start(job, false);
}

enum res kept_let(struct job *job)
{
	if (job->kept.run)
		return RES_WAIT;
	if (!kept_is_on(job) || !job->rec->has_commit || job->rec->kept || job->step.covered)
		return RES_DONE;
	kept_make(job);
	return RES_WAIT;
}

void kept_committed(struct job *job)
{
	CHECK(!job->rec->rollback);
	job->rec->kept = false;
}

/* ------------------------------------------------------------------- the way back */

void kept_epoch_ended(struct job *job)
{
	job->kept.wanted = false;
	if (!job->rec->kept || job->rec->rollback || job->rec->torn || job->life.deleted)
		return;
	job->rec->rollback = true;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}

/* Nothing of an epoch that has ended still runs, and no rank has joined since. */
static bool kept_may_roll_back(const struct job *job)
{
	if (job->running || job->step.committing || job->step.stepping ||
	    job->step.state != JOB_STEP_NONE)
		return false;
	return !job->joined && !job->kept.run && !job->life.deleted;
}

void kept_go_on(struct job *job)
{
	if (job->rec->rollback && kept_may_roll_back(job) && generation_let(job) == RES_DONE)
		(void)kept_start(job, true);
	else if (job->kept.wanted && !job->kept.run && !job->life.deleted)
		kept_make(job);
}
