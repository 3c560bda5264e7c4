#include "job/bufcopy.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/job.h"
#include "job/readers.h"

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
	struct slab *slab; /* owned ref */
	uint64_t bytes;
	uint64_t step;
	uint64_t epoch; /* in which it was begun */
	bool as_left;
	struct bufcopy_unit *units; /* owned: by number - 1 */
	uint32_t n_units;
	struct backend_task task;
	struct launch *launches; /* owned; NULL: it is made */
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

/* Are they where the daemon saves, and does it? */
static bool bufcopy_is_possible(const struct job *job)
{
	const struct device *d = &job->node->devices[0];
	const char *roots = job->node->checkpoint_roots;

	if (!roots || !*roots || backend_info(d->backend)->ordinal >= 0)
		return false;
	for (uint32_t i = 0; i < job->n_units; i++)
		for (uint32_t k = 0;
		     bufcopy_takes_part(job->units[i]) && k < bufcopy_members(job, job->units[i]);
		     k++)
			if (job->units[i]->buffers[k].slab->device != d)
				return false;
	return true;
}

int bufcopy_check(const struct job *job, struct fault *f)
{
	if (bufcopy_is_possible(job))
		return 0;
	return fault_set(
		f, FAULT_UNIMPLEMENTED, NULL,
		"units of job '%s' have buffers that are not in host memory on one device: "
		"the daemon does not save them",
		job->rec->name);
}

/* ------------------------------------------------------------------------ one copy */

struct bufcopy *bufcopy_ref(struct bufcopy *b)
{
	b->refs++;
	return b;
}

/* Memory of its size is needed again soon. */
static void bufcopy_give_slab(struct bufcopy *b)
{
	struct bufcopies *all = &b->job->checkpoints.buffers;

	if (!b->slab)
		return;
	if (!all->spare && b->bytes <= BUFCOPY_SMALL && !b->job->life.deleted)
		all->spare = b->slab;
	else
		slab_unref(b->slab);
	b->slab = NULL;
}

struct bufcopy *bufcopy_unref(struct bufcopy *b)
{
	if (!b || --b->refs)
		return NULL;
	bufcopy_give_slab(b);
	free(b->launches);
	free(b->units);
	free(b);
	return NULL;
}

/* Where they come to lie, and how many launches copy them. */
static size_t bufcopy_lay_out(struct bufcopy *b)
{
	size_t n = 0;

	for (uint32_t i = 0; i < b->n_units; i++) {
		const struct unit *u = b->job->units[i];
		struct bufcopy_unit *to = &b->units[i];

		if (!bufcopy_takes_part(u))
			continue;
		*to = (struct bufcopy_unit){ .at = b->bytes,
					     .bytes = unit_buffers_bytes(u->rec),
					     .members = bufcopy_members(b->job, u) };
		b->bytes += to->bytes * to->members;
		n += to->members;
	}
	return n;
}

static int bufcopy_take_memory(struct bufcopy *b)
{
	struct job *job = b->job;
	struct slab **spare = &job->checkpoints.buffers.spare;

	if (*spare && (*spare)->bytes >= b->bytes) {
		b->slab = *spare;
		*spare = NULL;
		return 0;
	}
	*spare = slab_unref(*spare);
	return slab_new(&job->node->devices[0], &job->quota, MEM_CONTROL, BACKEND_SHARE_FD,
			b->bytes, job->rec->name, -1, &b->slab);
}

static void bufcopy_fill_launches(struct bufcopy *b)
{
	char *to = backend_addr(b->slab->mem);

	for (uint32_t i = 0; i < b->n_units; i++)
		for (uint32_t k = 0; k < b->units[i].members; k++)
			b->launches[b->task.n_launches++] = (struct launch){
				.kind = LAUNCH_COPY,
				.n = b->units[i].bytes,
				.copy = { .dst = to + b->units[i].at + k * b->units[i].bytes,
					  .src = region_addr(&b->job->units[i]->buffers[k]) },
			};
}

/* Not begun yet, and without memory. @ret_n: of launches. Return: NULL without memory for that. */
static struct bufcopy *bufcopy_new(struct job *job, size_t *ret_n)
{
	struct bufcopy *b = calloc(1, sizeof(*b));

	if (!b)
		return NULL;
	b->refs = 1;
	b->job = job;
	b->step = job->rec->step;
	b->epoch = job->rec->epoch;
	b->n_units = job->n_units;
	b->units = calloc(job->n_units + 1, sizeof(*b->units));
	if (!b->units)
		return bufcopy_unref(b);
	*ret_n = bufcopy_lay_out(b);
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

static void bufcopy_on_copied(struct backend_task *task, int status)
{
	struct bufcopy *b = CONTAINER_OF(task, struct bufcopy, task);
	struct job *job = b->job;
	struct bufcopies *all = &job->checkpoints.buffers;
	bool as_left = b->as_left;

	free(b->launches);
	b->launches = NULL;
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
static bool bufcopy_start(struct bufcopy *b, size_t n)
{
	struct job *job = b->job;
	struct bufcopies *all = &job->checkpoints.buffers;

	b->launches = calloc(n + 1, sizeof(*b->launches));
	all->lacks = !b->launches || bufcopy_take_memory(b);
	if (all->lacks) {
		bufcopy_unref(b);
		return false;
	}
	bufcopy_fill_launches(b);
	all->next = b;
	all->runs = true;
	job->running++;
	b->task.launches = b->launches;
	b->task.sync = true;
	b->task.done = bufcopy_on_copied;
	b->task.owner = job_as_owner(job);
	backend_submit(job->node->devices[0].backend, &b->task);
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
	size_t n = 0;

	CHECK(!all->runs);
	all->next = bufcopy_unref(all->next);
	if (!bufcopy_has_buffers(job) || !bufcopy_is_possible(job))
		return RES_DONE;
	b = bufcopy_new(job, &n);
	all->lacks = !b;
	if (!b || (b->bytes > BUFCOPY_SMALL && !wanted)) {
		bufcopy_unref(b);
		return RES_DONE;
	}
	b->step = step;
	if (!bufcopy_start(b, n))
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
	size_t n = 0;
	struct bufcopy *b = bufcopy_new(job, &n);

	job->checkpoints.buffers.lacks = !b;
	if (!b)
		return;
	b->as_left = true;
	(void)bufcopy_start(b, n);
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
	all->spare = slab_unref(all->spare);
}

uint64_t bufcopy_evict(struct job *job)
{
	struct bufcopies *all = &job->checkpoints.buffers;
	uint64_t before = job->quota.used;

	if (all->last && all->last->refs == 1)
		all->last = bufcopy_unref(all->last);
	all->spare = slab_unref(all->spare);
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
	return backend_addr(b->slab->mem);
}

uint64_t bufcopy_bytes(const struct bufcopy *b)
{
	return b->bytes;
}
