#include "job/pooled.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "job/job_journal.h"
#include "job/launched.h"
#include "job/member.h"

/* As in the record. */
enum pooled_kind { POOLED_RANK = 1, POOLED_GRADS = 2, POOLED_FULL = 3 };

static void pooled_count(struct pooled *p, enum pooled_store to)
{
	struct job *job = p->job;

	job->mem.pooled_waiting += (to == POOLED_WAITS) - (p->store == POOLED_WAITS);
	job->mem.pooled_left_out += (to == POOLED_LEFT_OUT) - (p->store == POOLED_LEFT_OUT);
	p->store = to;
}

/* @r: of slab_keep_pages. */
static void pooled_kept(struct pooled *p, int r)
{
	if (r == -ENOSPC && !p->job->mem.pooled_left_out)
		log_warn("job",
			 "the descriptor store is nearly full: gradient memory that is made from "
			 "here on ends with the daemon job=%s",
			 p->job->label);
	pooled_count(p, r == 0 ? POOLED_STORED : r == -EAGAIN ? POOLED_WAITS : POOLED_LEFT_OUT);
}

/* The last one takes its place. */
static void pooled_forget(struct job *job, uint32_t i)
{
	struct pooled *p = job->mem.pooled[i];

	CHECK(job->rec->n_pooled > i);
	job_journal_pooled_gone(job, p);
	state_job_drop_pooled(job->rec, i);
	job->mem.pooled[i] = job->mem.pooled[job->rec->n_pooled];
	job->mem.pooled[i]->at = i;
	pooled_count(p, POOLED_STORED);
	free(p);
}

static void pooled_on_gone(struct slab *s, void *arg)
{
	struct pooled *p = arg;

	s->gone = NULL;
	pooled_forget(p->job, p->at);
}

/* @p belongs to the last slab of the record. */
static void pooled_add(struct job *job, struct slab *s, struct pooled *p)
{
	p->job = job;
	p->slab = s;
	p->at = (uint32_t)job->rec->n_pooled - 1;
	job->mem.pooled[p->at] = p;
	s->gone = pooled_on_gone;
	s->gone_arg = p;
}

/* Return: 0 or -ENOMEM. */
static int pooled_make_room(struct job *job, size_t n)
{
	struct pooled **grown;
	uint32_t room;

	if (n <= job->mem.pooled_room)
		return 0;
	room = (uint32_t)(n + n / 2 + 16);
	grown = realloc(job->mem.pooled, room * sizeof(struct pooled *));
	if (!grown)
		return -ENOMEM;
	job->mem.pooled = grown;
	job->mem.pooled_room = room;
	return 0;
}

static bool pooled_is_on(const struct job *job)
{
	return job->jobs->journal && !job->rec->ipc && !job->life.deleted;
}

/* Without memory for it, it ends with the daemon. @m: whose process may write it; NULL: none may. */
static void pooled_note(struct job *job, struct slab *s, enum pooled_kind kind,
			const struct member *m)
{
	struct pooled *p = NULL;
	state_pooled *rec = NULL;
	int r;

	if (!pooled_is_on(job) || (m && !proc_began(m->proc)))
		return;
	r = slab_keep_pages(s);
	if (r == -EOPNOTSUPP)
		return;
	if (pooled_make_room(job, job->rec->n_pooled + 1) == 0)
		p = calloc(1, sizeof(*p));
	if (p)
		rec = state_job_add_pooled(job->rec, s);
	if (!rec) {
		free(p);
		return;
	}
	rec->kind = kind;
	if (m) {
		rec->rank = launched_number(job, m->rank);
		rec->pid = (uint32_t)proc_pid(m->proc);
		rec->began = proc_began(m->proc);
	}
	pooled_add(job, s, p);
	pooled_kept(p, r);
	job_journal_mark(job, JOB_JOURNAL_POOLED);
}

static void pooled_on_rank(void *owner, struct slab *s)
{
	struct member *m = owner;

	pooled_note(m->job, s, POOLED_RANK, m);
}

static void pooled_on_grads(void *owner, struct slab *s)
{
	pooled_note(owner, s, POOLED_GRADS, NULL);
}

static void pooled_on_full(void *owner, struct slab *s)
{
	pooled_note(owner, s, POOLED_FULL, NULL);
}

void pooled_begin(struct job *job)
{
	for (unsigned d = 0; d < job->node->n_devices; d++) {
		pool_on_grown(&job->mem.grads[d], pooled_on_grads, job);
		pool_on_grown(&job->mem.full[d], pooled_on_full, job);
	}
}

void pooled_end(struct job *job)
{
	CHECK(!job->rec || !job->rec->n_pooled);
	free(STEAL_PTR(job->mem.pooled));
	job->mem.pooled_room = 0;
}

/* ------------------------------------------------------------------- a successor */

static int pooled_import(struct job *job, const state_pooled *rec, int fd, struct slab **ret)
{
	struct device *d = node_device(job->node, rec->slab->device);
	enum mem_class class = rec->kind == POOLED_FULL ? MEM_FULL : MEM_GRAD;

	if (!d || fd < 0 || rec->kind < POOLED_RANK || rec->kind > POOLED_FULL ||
	    rec->slab->class_ != class)
		return -EINVAL;
	return slab_import(d, &job->quota, class, rec->slab->bytes, job->rec->name, rec->slab->id,
			   fd, ret);
}

/* The process that @rec names, if it lives. Most slabs are of the same process as the one before. */
static struct proc *pooled_find_proc(struct job *job, const state_pooled *rec, struct proc *before)
{
	struct proc *p = NULL;

	if (!rec->pid || !rec->began)
		return NULL;
	if (before && (uint32_t)proc_pid(before) == rec->pid && proc_began(before) == rec->began)
		return proc_ref(before);
	if (proc_new_pid(job->node->loop, (pid_t)rec->pid, job->rec->uid, job->rec->gid, &p) < 0)
		return NULL;
	return proc_began(p) == rec->began ? p : proc_unref(p);
}

static struct pool *pooled_pool_of(struct job *job, const state_pooled *rec, const struct slab *s)
{
	unsigned d = s->device->index;

	return rec->kind == POOLED_FULL ? &job->mem.full[d] : &job->mem.grads[d];
}

/* Consumes the reference on its slab, and with it perhaps @p. */
static void pooled_place(struct job *job, struct pooled *p, struct proc *proc)
{
	const state_pooled *rec = job->rec->pooled[p->at];
	struct slab *s = p->slab;
	uint32_t rank;

	if (rec->kind != POOLED_RANK) {
		(void)pool_adopt(pooled_pool_of(job, rec, s), s); /* else it is freed */
	} else {
		p->lent = true;
		s->owner_rank = launched_rank(job, rec->rank, &rank) ? (int)rank : -1;
		if (proc)
			(void)quarantine_slab(&job->node->quarantine, proc, s);
	}
	slab_unref(s);
}

/* The record at @i goes: @fds stay beside the others. */
static void pooled_drop_record(struct job *job, int *fds, size_t i)
{
	state_job_drop_pooled(job->rec, i);
	fds[i] = fds[job->rec->n_pooled];
}

/* Make objects of the records. What has none is gone from the record. */
static void pooled_import_all(struct job *job, int *fds)
{
	size_t i = 0;

	while (i < job->rec->n_pooled) {
		struct pooled *p = calloc(1, sizeof(*p));
		struct slab *s = NULL;

		if (!p || pooled_import(job, job->rec->pooled[i], fds[i], &s) < 0) {
			free(p);
			pooled_drop_record(job, fds, i);
			continue;
		}
		s->exported = job->rec->pooled[i]->kind != POOLED_GRADS; /* perhaps */
		*p = (struct pooled){ .job = job, .slab = s, .at = (uint32_t)i };
		s->gone = pooled_on_gone;
		s->gone_arg = p;
		job->mem.pooled[i++] = p;
	}
}

static void pooled_drop_all(struct job *job)
{
	while (job->rec->n_pooled)
		state_job_drop_pooled(job->rec, job->rec->n_pooled - 1);
}

void pooled_restore(struct job *job, const int *fds)
{
	size_t n = job->rec->n_pooled;
	_cleanup_(freep) int *own = n ? malloc(n * sizeof(*own)) : NULL;
	struct proc *proc = NULL;

	if (!n)
		return;
	if (!fds || !own || pooled_make_room(job, n) < 0) {
		pooled_drop_all(job);
		return;
	}
	for (size_t i = 0; i < n; i++)
		own[i] = fds[i];
	pooled_import_all(job, own);
	/* from the end on: one that goes is replaced by one that was looked at */
	for (size_t i = job->rec->n_pooled; i-- > 0;) {
		struct proc *next = pooled_find_proc(job, job->rec->pooled[i], proc);

		pooled_place(job, job->mem.pooled[i], next);
		proc_unref(proc);
		proc = next;
	}
	proc_unref(proc);
}

static bool pooled_is_of(const struct pooled *p, const struct member *m)
{
	const state_pooled *rec = p->job->rec->pooled[p->at];

	return p->lent && rec->rank == launched_number(p->job, m->rank) &&
	       p->slab->device == m->device && rec->pid == (uint32_t)proc_pid(m->proc) &&
	       rec->began == proc_began(m->proc);
}

void pooled_join(struct member *m)
{
	struct job *job = m->job;

	pool_on_grown(&m->pool, pooled_on_rank, m);
	for (size_t i = job->rec->n_pooled; job->mem.pooled && i-- > 0;) {
		struct pooled *p = job->mem.pooled[i];

		if (!pooled_is_of(p, m) || pool_adopt(&m->pool, p->slab) < 0)
			continue;
		p->lent = false;
		quarantine_release(&job->node->quarantine, p->slab);
	}
}

/* ------------------------------------------------------------------------- store */

bool pooled_outlives(const struct region *r)
{
	return r->slab->stored && (r->slab->class == MEM_SHARD || r->slab->gone != NULL);
}

void jobs_pooled_retry(struct jobs *jobs)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &jobs->all, link)
		for (size_t i = 0; job->mem.pooled_waiting && i < job->rec->n_pooled; i++)
			if (job->mem.pooled[i]->store == POOLED_WAITS)
				pooled_kept(job->mem.pooled[i],
					    slab_keep_pages(job->mem.pooled[i]->slab));
}

uint32_t jobs_pooled_left_out(const struct jobs *jobs)
{
	const struct job *job, *tmp;
	uint32_t n = 0;

	list_for_each (job, tmp, &jobs->all, link)
		n += job->mem.pooled_left_out;
	return n;
}
