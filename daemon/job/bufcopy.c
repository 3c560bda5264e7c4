#include "job/bufcopy.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/extents.h"
#include "job/job.h"
#include "job/readers.h"
#include "job/staging.h"

/* Up to here every commit makes one. */
#define BUFCOPY_SMALL (UINT64_C(16) << 20)

/* The buffers of one unit. */
struct bufcopy_unit {
	uint64_t at;    /* in the copy: those of the first member */
	uint64_t bytes; /* of each member; 0: there are none */
	uint32_t members;
};

struct bufcopy {
	unsigned refs;
	struct job *job;
	struct bufcopy_memory memory; /* owned */
	uint64_t bytes;
	uint64_t step;
	uint64_t epoch; /* in which it was begun */
	bool as_left;
	struct bufcopy_unit *units; /* owned: by number - 1 */
	uint32_t n_units;
	struct extents from;
	struct extents_copy copy;
};

static bool bufcopy_takes_part(const struct unit *u)
{
	return u->buffers && !u->rec->dropped;
}

bool bufcopy_has_buffers(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (bufcopy_takes_part(job->units[i]))
			return true;
	return false;
}

static uint32_t bufcopy_members(const struct job *job, const struct unit *u)
{
	return group_size(job->groups[u->rec->group]);
}

/* Does the daemon save? */
static bool bufcopy_is_possible(const struct job *job)
{
	const char *roots = job->node->checkpoint_roots;

	return roots && *roots;
}

bool bufcopy_needs_streams(const struct job *job)
{
	return !extents_in_place(job->node) && bufcopy_is_possible(job) && bufcopy_has_buffers(job);
}

/* -------------------------------------------------------------------------- its memory */

static void bufcopy_free_memory(struct job *job, struct bufcopy_memory *m)
{
	slab_unref(m->slab);
	staging_give(job, m->staged, m->bytes);
	*m = (struct bufcopy_memory){ 0 };
}

static char *bufcopy_at_host(const struct bufcopy *b)
{
	return b->memory.slab ? backend_addr(b->memory.slab->mem) : b->memory.staged;
}

static bool bufcopy_has_memory(const struct bufcopy_memory *m)
{
	return m->slab || m->staged;
}

/* Memory of its size is needed again soon. */
static void bufcopy_give_memory(struct bufcopy *b)
{
	struct bufcopy_memory *spare = &b->job->checkpoints.buffers.spare;

	if (!bufcopy_has_memory(&b->memory) || bufcopy_has_memory(spare) ||
	    b->bytes > BUFCOPY_SMALL || b->job->life.deleted) {
		bufcopy_free_memory(b->job, &b->memory);
		return;
	}
	*spare = b->memory;
	b->memory = (struct bufcopy_memory){ 0 };
}

static int bufcopy_take_memory(struct bufcopy *b)
{
	struct job *job = b->job;
	struct bufcopy_memory *spare = &job->checkpoints.buffers.spare;
	struct bufcopy_memory *m = &b->memory;

	if (bufcopy_has_memory(spare) && spare->bytes >= b->bytes) {
		*m = *spare;
		*spare = (struct bufcopy_memory){ 0 };
		return 0;
	}
	bufcopy_free_memory(job, spare);
	m->bytes = b->bytes;
	if (!extents_in_place(job->node))
		return staging_take(job, m->bytes, &m->staged);
	return slab_new(&job->node->devices[0], &job->quota, MEM_CONTROL, BACKEND_SHARE_FD,
			m->bytes, job->rec->name, -1, &m->slab);
}

/* ------------------------------------------------------------------------ one copy */

struct bufcopy *bufcopy_ref(struct bufcopy *b)
{
	b->refs++;
	return b;
}

struct bufcopy *bufcopy_unref(struct bufcopy *b)
{
	if (!b || --b->refs)
		return NULL;
	bufcopy_give_memory(b);
	extents_copy_deinit(&b->copy);
	extents_deinit(&b->from);
	free(b->units);
	free(b);
	return NULL;
}

/* Where they come to lie. */
static int bufcopy_lay_out(struct bufcopy *b)
{
	int r = 0;

	for (uint32_t i = 0; i < b->n_units; i++) {
		const struct unit *u = b->job->units[i];
		struct bufcopy_unit *to = &b->units[i];
		uint64_t at;

		if (!bufcopy_takes_part(u))
			continue;
		*to = (struct bufcopy_unit){ .at = b->bytes,
					     .bytes = unit_buffers_bytes(u->rec),
					     .members = bufcopy_members(b->job, u) };
		b->bytes += to->bytes * to->members;
		for (uint32_t k = 0; r == 0 && k < to->members; k++)
			r = extents_add(&b->from, u->buffers[k].slab->device,
					region_addr(&u->buffers[k]), to->bytes, &at);
	}
	return r;
}

static void bufcopy_on_copied(struct extents_copy *copy, int status);

/* Not begun yet, and without memory. Return: NULL without memory for that. */
static struct bufcopy *bufcopy_new(struct job *job)
{
	struct bufcopy *b = calloc(1, sizeof(*b));

	if (!b)
		return NULL;
	b->refs = 1;
	b->job = job;
	b->step = job->rec->step;
	b->epoch = job->rec->epoch;
	b->n_units = job->n_units;
	extents_copy_init(&b->copy, job, bufcopy_on_copied);
	b->units = calloc(job->n_units + 1, sizeof(*b->units));
	if (!b->units || bufcopy_lay_out(b) < 0)
		return bufcopy_unref(b);
	return b;
}

/* ------------------------------------------------------------------------ making it */

/* As the trainers have left them: nobody has come meanwhile, who may have written. */
static void bufcopy_take_as_left(struct job *job)
{
	struct bufcopies *all = &job->checkpoints.buffers;

	if (all->next && !job->present && all->next->epoch == job->rec->epoch) {
		bufcopy_unref(all->last);
		all->last = all->next;
		all->next = NULL;
	}
	all->next = bufcopy_unref(all->next);
}

static void bufcopy_on_copied(struct extents_copy *copy, int status)
{
	struct bufcopy *b = CONTAINER_OF(copy, struct bufcopy, copy);
	struct job *job = b->job;
	struct bufcopies *all = &job->checkpoints.buffers;
	bool as_left = b->as_left;

	extents_copy_deinit(copy);
	extents_deinit(&b->from);
	all->runs = false;
	all->lacks = status != 0; /* the device tells what is wrong by its other work */
	if (status)
		all->next = bufcopy_unref(all->next);
	if (as_left)
		bufcopy_take_as_left(job);
	condition_signal(&all->made);
	job_ran(job);
}

/* Return: does it run? */
static bool bufcopy_start(struct bufcopy *b)
{
	struct job *job = b->job;
	struct bufcopies *all = &job->checkpoints.buffers;

	all->lacks =
		bufcopy_take_memory(b) || extents_copy_add(&b->copy, &b->from, 0, b->bytes,
							   EXTENTS_OUT, bufcopy_at_host(b)) < 0;
	if (all->lacks) {
		bufcopy_unref(b);
		return false;
	}
	all->next = b;
	all->runs = true;
	job->running++;
	extents_copy_submit(&b->copy);
	return true;
}

enum res bufcopy_settle(struct job *job, struct waiter *w)
{
	if (!job->checkpoints.buffers.runs)
		return RES_DONE;
	condition_wait(&job->checkpoints.buffers.made, w);
	return RES_WAIT;
}

enum res bufcopy_begin(struct job *job, uint64_t step, bool wanted, struct waiter *w)
{
	struct bufcopies *all = &job->checkpoints.buffers;
	struct bufcopy *b;

	CHECK(!all->runs);
	all->next = bufcopy_unref(all->next);
	if (!bufcopy_has_buffers(job) || !bufcopy_is_possible(job))
		return RES_DONE;
	b = bufcopy_new(job);
	all->lacks = !b;
	if (!b || (b->bytes > BUFCOPY_SMALL && !wanted)) {
		bufcopy_unref(b);
		return RES_DONE;
	}
	b->step = step;
	if (!bufcopy_start(b))
		return RES_DONE;
	condition_wait(&all->made, w);
	return RES_WAIT;
}

void bufcopy_committed(struct job *job)
{
	struct bufcopies *all = &job->checkpoints.buffers;

	CHECK(!all->runs);
	bufcopy_unref(all->last);
	all->last = all->next;
	all->next = NULL;
}

/* --------------------------------------------------------------------------- using it */

/* Has it all buffers of the last commit, as the units are now? */
static bool bufcopy_is_of_now(const struct bufcopy *b)
{
	const struct job *job = b->job;

	if (!job->rec->has_commit || b->step != job->rec->step)
		return false;
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		if (!bufcopy_takes_part(u))
			continue;
		if (i >= b->n_units || b->units[i].bytes != unit_buffers_bytes(u->rec) ||
		    b->units[i].members != bufcopy_members(job, u))
			return false;
	}
	return true;
}

static void bufcopy_begin_as_left(struct job *job)
{
	struct bufcopy *b = bufcopy_new(job);

	job->checkpoints.buffers.lacks = !b;
	if (!b)
		return;
	b->as_left = true;
	(void)bufcopy_start(b);
}

bool bufcopy_is_ready(struct job *job)
{
	struct bufcopies *all = &job->checkpoints.buffers;

	if (!bufcopy_has_buffers(job) || !bufcopy_is_possible(job) ||
	    (all->last && bufcopy_is_of_now(all->last)))
		return true;
	if (!all->runs && !all->lacks && !job->present && !job->running)
		bufcopy_begin_as_left(job);
	return all->lacks;
}

void bufcopy_retry(struct job *job)
{
	job->checkpoints.buffers.lacks = false;
}

struct bufcopy *bufcopy_take(const struct job *job)
{
	struct bufcopy *b = job->checkpoints.buffers.last;

	return b && bufcopy_is_of_now(b) ? bufcopy_ref(b) : NULL;
}

void bufcopy_forget(struct job *job)
{
	struct bufcopies *all = &job->checkpoints.buffers;

	all->last = bufcopy_unref(all->last);
	if (!all->runs)
		all->next = bufcopy_unref(all->next);
	bufcopy_free_memory(job, &all->spare);
}

uint64_t bufcopy_evict(struct job *job)
{
	struct bufcopies *all = &job->checkpoints.buffers;
	uint64_t before = job->quota.used;

	if (all->last && all->last->refs == 1)
		all->last = bufcopy_unref(all->last);
	bufcopy_free_memory(job, &all->spare);
	return before - job->quota.used;
}

bool bufcopy_is_as_left(const struct bufcopy *b)
{
	return b->as_left;
}

uint64_t bufcopy_at(const struct bufcopy *b, const struct unit *u, uint32_t index)
{
	const struct bufcopy_unit *at = &b->units[u->id - 1];

	CHECK(u->id <= b->n_units && index < at->members);
	return at->at + index * at->bytes;
}

const char *bufcopy_data(const struct bufcopy *b)
{
	return bufcopy_at_host(b);
}

uint64_t bufcopy_bytes(const struct bufcopy *b)
{
	return b->bytes;
}
