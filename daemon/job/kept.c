#include "job/kept.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/fnv.h"
#include "core/log.h"
#include "job/generation.h"
#include "publish/making.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/position.h"

/* One copy under way, from or to the kept regions. */
struct kept {
	struct job *job;
	uint64_t epoch; /* in which it began */
	uint64_t print; /* of the units then: of those that take part */
	bool back;      /* to the units */
	unsigned pending;
	int status;
	struct kept_part {
		struct backend_task task;
		struct kept *kept;
		struct launch *launches; /* owned */
	} parts[NODE_MAX_DEVICES];
};

bool kept_at_commits(const struct job *job)
{
	return job->rec->resume == JOB_RESUME_COMMITTED;
}

/* Is the copy that of a step, of the units that make it early? Records of older daemons say nothing. */
static bool kept_at_steps(const struct job *job)
{
	return !kept_at_commits(job) && job->rec->resume != JOB_RESUME_NO_COPY;
}

bool kept_takes(const struct job *job, const state_unit *rec, const struct layout *l)
{
	return kept_at_steps(job) && unit_steps_early(rec) && l->shard_elements;
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

/* Is there a copy of the unit, or is there to be one? */
static bool kept_concerns(const struct job *job, const struct unit *u)
{
	return !u->rec->dropped && (kept_at_commits(job) || kept_takes(job, u->rec, &u->layout));
}

static uint64_t kept_sum(const struct job *job, bool missing, uint64_t *by_device)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];

		for (unsigned d = 0; kept_concerns(job, u) && d < u->n_parts; d++) {
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

		for (unsigned d = 0; kept_concerns(job, u) && d < u->n_parts; d++) {
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
	return job_evict_later(job, r);
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

	if (!kept_sum(job, true, bytes))
		return 0;
	r = kept_take(job, bytes, slabs);
	if ((r == 0 || r == SLAB_E_LATER) && kept_add(job, slabs) < 0)
		r = -ENOMEM;
	for (unsigned d = 0; d < job->node->n_devices; d++)
		slab_unref(slabs[d]);
	return r;
}

void kept_moved(struct job *job, struct unit *u, const struct unit *fresh)
{
	job->rec->kept = job->rec->rollback = false;
	for (unsigned d = 0; d < u->n_parts; d++)
		u->parts[d].kept = fresh->parts[d].kept;
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
	return !u->rec->dropped && u->rec->n_parts && kept_has_region(&u->parts[0]) &&
	       (k->back ? u->rec->kept_initialised : u->rec->initialised);
}

static uint64_t kept_print(const struct kept *k)
{
	uint64_t hash = FNV_BEGIN;

	for (uint32_t i = 0; i < k->job->n_units; i++) {
		const struct unit *u = k->job->units[i];

		if (kept_takes_part(k, u))
			hash = fnv_add(fnv_add(hash, u->id), u->version);
	}
	return hash;
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
	k->epoch = job->rec->epoch;
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
	k->print = kept_print(k);
	return k;
}

/* Is it of use still? What was committed may be gone meanwhile; a step ends with its epoch. An Initialise
 * that was allowed before may have ended: then who waits asks for another one. */
static bool kept_is_wanted(const struct kept *k)
{
	const state_job *rec = k->job->rec;

	if (rec->torn || k->print != kept_print(k))
		return false;
	return kept_at_commits(k->job) ? rec->has_commit : k->epoch == rec->epoch;
}

/* Every byte of it is there: from here on the state may differ from it. */
static void kept_is_made(struct kept *k)
{
	struct job *job = k->job;

	if (!kept_is_wanted(k))
		return;
	job_journal_write(job); /* a reader of the journal takes the units as they are there */
	state_job_keep(job->rec);
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	job_journal_write(job);
}

static void kept_unit_is_back(struct job *job, struct unit *u)
{
	if (u->rec->dropped || (!kept_at_commits(job) && !kept_has_region(&u->parts[0])))
		return;
	u->version++;
	u->some_lack = false;
	if (job->jobs->ops.rolled_back)
		job->jobs->ops.rolled_back(job, u);
	job_journal_mark_unit(job, u);
}

static void kept_say(const struct job *job)
{
	uint64_t step;

	if (position_of(job->rec, &step))
		log_info("job", "rolled back job=%s step=%llu epoch=%llu", job->label,
			 (unsigned long long)step, (unsigned long long)job->rec->epoch);
	else
		log_info("job", "rolled back job=%s step=unknown epoch=%llu", job->label,
			 (unsigned long long)job->rec->epoch);
}

static void kept_is_back(struct job *job)
{
	bool commits = kept_at_commits(job);

	state_job_roll_back(job->rec, commits);
	if (commits)
		position_rolled_back(job);
	else
		position_rolled_back_step(job);
	for (uint32_t i = 0; i < job->n_units; i++)
		kept_unit_is_back(job, job->units[i]);
	if (commits)
		job->readers.rewritten = false;
	job->readers.changes++;
	if (job->kept.asks_torn)
		job_tear(job); /* at an applied step, but nobody may know which one */
	job_journal_write(job);
	kept_say(job);
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
		kept_is_made(k);
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

/* Units of a job that an older daemon has registered may have no memory for it. */
static bool kept_goes_without(struct job *job, int r)
{
	if (!kept_at_steps(job) || !slab_is_short(r))
		return false;
	log_warn("job",
		 "no memory for the copy that a step in backward is rolled back to: a loss in the "
		 "middle of a step leaves the job TORN job=%s bytes=%llu",
		 job->label, (unsigned long long)kept_bytes(job));
	job->kept.wanted = false;
	job->kept.without = true;
	return true;
}

/* The journal says before the first byte of it changes that the last copy is of no use. */
static enum res kept_make(struct job *job)
{
	int r = kept_reserve(job);

	if (kept_goes_without(job, r))
		return RES_DONE;
	job_journal_write(job);
	job->kept.wanted = r != 0 || !kept_start(job, false);
	return RES_WAIT;
}

static bool kept_is_needed(const struct job *job, enum job_change what)
{
	if (job->rec->kept)
		return false;
	if (kept_at_commits(job))
		return job->rec->has_commit && !job->step.covered;
	return kept_at_steps(job) && what == JOB_CHANGE_EARLY && !job->kept.without;
}

enum res kept_let(struct job *job, enum job_change what)
{
	if (job->kept.run)
		return RES_WAIT;
	return kept_is_needed(job, what) ? kept_make(job) : RES_DONE;
}

void kept_committed(struct job *job)
{
	CHECK(!job->rec->rollback);
	job->rec->kept = false;
}

void kept_applies(struct job *job, struct unit *const *units, unsigned n)
{
	bool all = true;

	for (unsigned i = 0; i < n; i++)
		all = all && kept_has_region(&units[i]->parts[0]);
	if (!job->rec->kept || kept_at_commits(job))
		return;
	if (all) {
		position_begin_partial(job); /* a successor that finds it under way rolls it back */
		return;
	}
	job->rec->kept = false;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}

/* ------------------------------------------------------------------- the way back */

bool kept_goes_back(const struct job *job)
{
	const state_job *rec = job->rec;

	return rec->kept && kept_at_steps(job) &&
	       (rec->partial || rec->uncommitted_steps != rec->kept_uncommitted);
}

/* A prepared step that is being applied makes the step whole; whoever ends it asks again. */
void kept_epoch_ended(struct job *job)
{
	job->kept.wanted = false;
	if (job->step.doubt) /* its end asks again */
		return;
	if (!job->rec->kept || job->rec->rollback || job->rec->torn || job->life.deleted)
		return;
	if (kept_at_steps(job) && job->step.state == JOB_STEP_APPLYING)
		return;
	job->rec->rollback = kept_at_commits(job) || kept_goes_back(job);
	job->rec->kept = job->rec->rollback; /* it may have been made and not needed */
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
	if (job->rec->rollback && kept_may_roll_back(job) && generation_let(job) == RES_DONE &&
	    making_let(job) == RES_DONE)
		(void)kept_start(job, true);
	else if (job->kept.wanted && !job->kept.run && !job->life.deleted &&
		 kept_make(job) == RES_DONE)
		readers_go_on(job);
}
