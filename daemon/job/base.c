#include "job/base.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "mem/pool.h"
#include "mem/slab.h"
#include "unit/unit.h"

static bool base_is(const struct job *job)
{
	return job->rec->lifetime == JOB_BASE;
}

bool base_is_complete(const struct job *job)
{
	return base_is(job) && job->rec->has_commit;
}

/* Sessions that read it; @ret_pid: of one of them. */
static unsigned base_count_readers(const struct job *job, int *ret_pid)
{
	const struct base_reader *r, *tmp;
	unsigned n = 0;

	list_for_each (r, tmp, (struct list *)(uintptr_t)&job->readers.of_base, link) {
		*ret_pid = r->pid;
		n++;
	}
	return n;
}

static bool base_is_mapped(const struct job *job)
{
	for (uint32_t i = 0; i < job->mem.n_slabs; i++)
		if (backend_is_held(job->mem.slabs[i]->device->backend, job->mem.slabs[i]->mem))
			return true;
	return false;
}

bool base_is_used(const struct job *job)
{
	return base_is_complete(job) && (!list_empty(&job->readers.of_base) || base_is_mapped(job));
}

int base_check_change(const struct job *job, const char *what, struct fault *f)
{
	if (!base_is_complete(job))
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "job '%s' is a base, which was loaded and is only read: %s; delete it, or "
			 "load another one under another name",
			 job->rec->name, what);
}

int base_check_delete(const struct job *job, bool force, struct fault *f)
{
	char who[64] = "processes that have it mapped";
	int pid = 0;
	unsigned n;

	if (force || !base_is_used(job))
		return 0;
	n = base_count_readers(job, &pid);
	if (n)
		snprintf(who, sizeof(who), "%u reader%s, such as pid %d", n, n == 1 ? "" : "s",
			 pid);
	return fault_set(f, FAULT_STATE, NULL,
			 "base '%s' is used by %s: end them first, or force the deletion: then its "
			 "memory stays, charged, until they have ended",
			 job->rec->name, who);
}

void base_committed(struct job *job)
{
	if (!base_is_complete(job))
		return;
	for (unsigned d = 0; d < job->node->n_devices; d++) { /* that loading it has needed */
		(void)pool_trim(&job->mem.full[d], UINT64_MAX);
		(void)pool_trim(&job->mem.scratch[d], UINT64_MAX);
	}
	for (uint32_t i = 0; i < job->mem.n_slabs; i++)
		slab_last(job->mem.slabs[i]);
}

int base_check_read(const struct job *job, struct fault *f)
{
	if (!base_is(job))
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is no base, and its parameters may change: load a base "
				 "with python -m shardd.load, or publish the job's generations",
				 job->rec->name);
	if (!job->rec->has_commit)
		return fault_set(
			f, FAULT_STATE, NULL,
			"base '%s' is not loaded yet: it is complete with the commit of its "
			"loader (python -m shardd.load)",
			job->rec->name);
	for (uint32_t i = 0; i < job->n_units; i++)
		if (!job->units[i]->rec->dropped && !job->units[i]->n_parts)
			return fault_set(
				f, FAULT_STATE, NULL,
				"base '%s' is in the memory of another node: load one here",
				job->rec->name);
	return 0;
}

struct base_reader *base_reader_new(struct job *job, uint64_t session, int pid)
{
	struct base_reader *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	CHECK(base_is_complete(job));
	r->job = job;
	r->session = session;
	r->pid = pid;
	list_init(&r->link);
	list_init(&r->held);
	list_append(&job->readers.of_base, &r->link);
	return r;
}

void base_reader_free(struct base_reader *r)
{
	list_unlink(&r->held);
	list_unlink(&r->link);
	free(r);
}

struct slab *base_slab(const struct job *job, uint32_t id)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];
		struct slab *s = u->rec->dropped ? NULL : u->parts[0].params.slab;

		if (s && s->id == id)
			return s->writable ? NULL : s;
	}
	return NULL;
}
