#include "app/survive.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "backend/redo.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "job/history.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/pooled.h"
#include "step/doubt.h"
#include "store/change.h"

/* At the start nothing else waits: the keeper has so long to read a message. */
#define SURVIVE_KEEPER_MS 10000
/* How often to look whether it is there. */
#define SURVIVE_LOOK_US 1000000u

/* That part of the places is for shards alone. */
#define SURVIVE_SHARDS_PART 4

static int survive_on_slab(void *arg, uint32_t id, int fd, bool spare)
{
	struct survive *s = arg;
	char name[KEEPER_NAME_MAX + 1];
	int r;

	if (s->lost)
		return 0; /* it is like any other memory */
	if (spare && keeper_room(&s->keeper) <= s->keeper.most / SURVIVE_SHARDS_PART)
		return -ENOSPC;
	inherited_slab_name(id, name);
	r = keeper_add(&s->keeper, name, fd);
	if (r == -EAGAIN) {
		s->behind = true;
		s->hurry(s->hurry_arg);
	}
	return r;
}

static void survive_on_drop(void *arg, uint32_t id)
{
	struct survive *s = arg;
	char name[KEEPER_NAME_MAX + 1];

	inherited_slab_name(id, name);
	keeper_drop(&s->keeper, name);
	s->hurry(s->hurry_arg);
}

void survive_init(struct survive *s, struct jobs *jobs, void (*hurry)(void *), void *arg)
{
	*s = (struct survive){ .jobs = jobs, .hurry = hurry, .hurry_arg = arg };
	s->keeper = KEEPER_NULL(s->keeper);
}

void survive_deinit(struct survive *s)
{
	s->jobs->journal = NULL;
	s->jobs->redo = NULL;
	s->journal = journal_free(s->journal);
	s->redo = redo_free(s->redo);
	keeper_deinit(&s->keeper);
}

/* ------------------------------------------------------------- what was left */

/* Slabs of pools may be missing. They stay in @in until they are a job's. */
static void survive_look_for_pooled(const state_job *rec, const struct inherited *in, int *fds,
				    uint32_t *ids)
{
	for (size_t i = 0; i < rec->n_pooled; i++) {
		ids[i] = rec->pooled[i]->slab->id;
		fds[i] = inherited_find_slab(in, ids[i]);
	}
}

/* What the job has not taken over is dropped from the store, with the rest of @in. */
static void survive_take_pooled(struct survive *s, struct inherited *in, const uint32_t *ids,
				size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const struct slab *slab = slab_find(&s->jobs->node->devices[0], ids[i]);

		if (slab && slab->stored)
			fd_close(inherited_slab(in, ids[i]));
	}
}

static int survive_take_slabs(const state_job *rec, struct inherited *in, int *fds, struct fault *f)
{
	for (size_t i = 0; i < rec->n_slabs; i++) {
		fds[i] = inherited_slab(in, rec->slabs[i]->id);
		if (fds[i] < 0)
			return fault_set(
				f, FAULT_INVALID, "journal",
				"slab %u of job '%.64s', %llu bytes, is in the journal, but "
				"the previous daemon's keeper has not passed it",
				rec->slabs[i]->id, rec->name,
				(unsigned long long)rec->slabs[i]->bytes);
	}
	return 0;
}

static void *survive_redo_addr(void *arg, struct redo_place place, uint64_t bytes)
{
	struct survive *s = arg;
	struct slab *slab = slab_find(&s->jobs->node->devices[0], place.slab);

	if (!slab || place.offset > slab->bytes || bytes > slab->bytes - place.offset)
		return NULL;
	return (char *)backend_addr(slab->mem) + place.offset;
}

static struct backend *survive_redo_backend(void *arg, struct redo_place place)
{
	struct survive *s = arg;
	struct slab *slab = slab_find(&s->jobs->node->devices[0], place.slab);

	return slab ? slab->device->backend : NULL;
}

static bool survive_numbers_redo(const struct survive *s)
{
	return backend_numbers_redo(s->jobs->node->devices[0].backend);
}

static void survive_give_step_up(struct job *job, const char *why)
{
	log_error("server", "job=%s: a step was half applied and cannot be completed: %s",
		  job->label, why);
	job->rec->redo = 0;
	if (!job->rec->kept) /* else the committed state is copied back over it */
		job_set_torn(job);
}

/* The record says what holds after the step that the previous daemon was applying, if the redo file
 * has it still. */
static void survive_repair_step(struct survive *s, struct job *job)
{
	struct fault f = FAULT_NULL;

	if (!job->rec->redo)
		return;
	if (s->stale)
		survive_give_step_up(job, "the previous daemon's keeper has not passed what the "
					  "kernels kept, or it was another version, or the devices "
					  "are others");
	else if (!s->redo)
		survive_give_step_up(job, "the previous daemon's keeper has not passed the redo "
					  "file, or this daemon has no threads for it");
	else if (!redo_has(s->redo, job->rec->redo))
		job->rec->redo = 0;
	else if (survive_numbers_redo(s)
			 ? redo_device_repair(s->redo, job->rec->redo, survive_redo_addr,
					      survive_redo_backend, s, &f)
			 : redo_repair(s->redo, job->rec->redo, kernels_host(), survive_redo_addr,
				       s, &f))
		survive_give_step_up(job, f.text);
}

static void survive_complete_step(struct survive *s, struct job *job)
{
	uint64_t number = job->rec->redo, began = clock_now_us();
	struct fault f = FAULT_NULL;

	if (!number)
		return;
	if (survive_numbers_redo(s) ? redo_device_complete(s->redo, number, survive_redo_addr,
							   survive_redo_backend, s, &f)
				    : redo_complete(s->redo, number, kernels_host(), s->threads,
						    survive_redo_addr, s, &f)) {
		survive_give_step_up(job, f.text);
		return;
	}
	job->rec->redo = 0;
	s->completed++;
	log_info("server", "step completed job=%s us=%llu", job->label,
		 (unsigned long long)(clock_now_us() - began));
}

/* So many cells take some milliseconds. */
#define SURVIVE_CELLS 256u

/* jobs.redo_some. The slot behind those of the worker threads is the loop's. */
static int survive_redo_some(struct jobs *jobs, uint64_t number, bool *ret_left, struct fault *f)
{
	struct survive *s = jobs->redo_arg;

	return redo_complete_some(s->redo, number, kernels_host(), s->threads - 1, SURVIVE_CELLS,
				  survive_redo_addr, s, ret_left, f);
}

/* jobs.redo_take */
static int survive_redo_take(struct jobs *jobs, uint64_t number, struct redo_task **ret,
			     struct launch **ret_launches, struct fault *f)
{
	struct survive *s = jobs->redo_arg;

	return redo_take(s->redo, number, survive_redo_addr, s, ret, ret_launches, f);
}

/* Takes the record. */
static int survive_restore_job(struct survive *s, state_job **rec, struct inherited *in,
			       struct fault *f)
{
	size_t n = (*rec)->n_slabs;
	_cleanup_(freep) int *fds = malloc((n + 1) * sizeof(*fds));
	struct job *job = NULL;

	if (!fds)
		return fault_errno(f, -ENOMEM, "restoring jobs");
	for (size_t i = 0; i < n; i++)
		fds[i] = -1;
	if (survive_take_slabs(*rec, in, fds, f) == 0 &&
	    job_restore(s->jobs, *rec, fds, &job, f) == 0)
		*rec = NULL;
	for (size_t i = 0; i < n; i++)
		fd_close(fds[i]); /* the job has its own */
	if (f->code)
		return f->code;
	s->restored++;
	return 0;
}

static void survive_restore_pooled(struct survive *s, struct job *job, struct inherited *in)
{
	size_t n = job->rec->n_pooled;
	_cleanup_(freep) int *fds = malloc((n + 1) * sizeof(*fds));
	_cleanup_(freep) uint32_t *ids = malloc((n + 1) * sizeof(*ids));

	if (!fds || !ids) {
		pooled_restore(job, NULL);
		return;
	}
	survive_look_for_pooled(job->rec, in, fds, ids);
	pooled_restore(job, fds);
	survive_take_pooled(s, in, ids, n);
}

/* When all jobs have their shards: what is spare of one takes no memory of another. @all: false: the daemon
 * does not start. */
static void survive_restore_all_pooled(struct survive *s, struct inherited *in, bool all)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &s->jobs->all, link)
		if (all)
			survive_restore_pooled(s, job, in);
		else
			pooled_restore(job, NULL);
}

/* Trainers of the previous daemon find the same instance. */
static int survive_restore_node(struct survive *s, const state_all *all, struct fault *f)
{
	struct node *node = s->jobs->node;

	if (all->instance.len != sizeof(node->instance))
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal of the previous daemon is damaged: its instance id "
				 "has %zu bytes",
				 all->instance.len);
	memcpy(node->instance, all->instance.data, sizeof(node->instance));
	node->started_unix_s = all->started_unix_s;
	if (all->cordon)
		s->jobs->cordon =
			(struct jobs_cordon){ true, all->cordon->uid, all->cordon->unix_s };
	if (node->devices[0].table->next < all->next_slab)
		node->devices[0].table->next = all->next_slab;
	return 0;
}

static void survive_complete_steps(struct survive *s)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &s->jobs->all, link)
		survive_repair_step(s, job);
	list_for_each (job, tmp, &s->jobs->all, link) {
		survive_complete_step(s, job);
		log_info("server", "job restored job=%s step=%llu committed=%s torn=%s bytes=%llu",
			 job->label, (unsigned long long)job->rec->step,
			 job->rec->has_commit ? "yes" : "no", job->life.torn ? "yes" : "no",
			 (unsigned long long)job->quota.used);
		kept_go_on(job);
	}
}

static int survive_restore(struct survive *s, struct inherited *in, struct fault *f)
{
	state_all *all = NULL;

	for (unsigned i = 0; i < JOURNAL_FILES; i++)
		if (in->journal[i] < 0)
			return fault_set(f, FAULT_INVALID, "journal",
					 "the previous daemon's keeper has passed %zu slabs, but "
					 "not file %u of the journal",
					 in->n_slabs, i);
	if (journal_open(in->journal, &s->journal, f) || change_read(s->journal, &all, f) ||
	    (in->redo >= 0 && s->threads && redo_open(in->redo, s->threads, &s->redo, f)))
		return f->code;
	if (state_check(all, f) == 0)
		survive_restore_node(s, all, f);
	for (size_t i = 0; !f->code && i < all->n_jobs; i++)
		survive_restore_job(s, &all->jobs[i], in, f);
	state_free(all);
	survive_restore_all_pooled(s, in, !f->code);
	if (!f->code)
		survive_complete_steps(s);
	return f->code;
}

/* Slabs that are in no job: the previous daemon ended before it had noted, or freed, them; or they are
 * spare and nobody's. Their memory is free when the last descriptor is closed. */
static void survive_drop_rest(struct survive *s, struct inherited *in)
{
	for (size_t i = 0; i < in->n_slabs; i++) {
		if (in->slabs[i].fd < 0)
			continue;
		survive_on_drop(s, in->slabs[i].id);
		in->slabs[i].fd = fd_close(in->slabs[i].fd);
	}
	keeper_tick(&s->keeper);
}

/* -------------------------------------------------------------- the devices' own */

static const char *survive_device_name(const struct survive *s, unsigned d)
{
	return backend_lasting_name(s->jobs->node->devices[d].backend);
}

static struct backend *survive_find_backend(const struct survive *s, uint64_t key)
{
	for (unsigned d = 0; d < s->jobs->node->n_devices; d++)
		if (inherited_device_key(survive_device_name(s, d)) == key)
			return s->jobs->node->devices[d].backend;
	return NULL;
}

/* Streams of trainers that wait for a predecessor: nobody else would end that. Its page is not needed
 * afterwards. One of a device that is not here has no trainers' streams that we could serve. */
static void survive_release_page(struct survive *s, struct inherited_page *p)
{
	struct backend *b = survive_find_backend(s, p->device);
	char name[KEEPER_NAME_MAX + 1];
	int r = b && p->kind == INHERITED_READY ? backend_release(b, p->fd) : 0;

	if (r)
		log_error(
			"server",
			"streams that wait for the previous daemon could not be released: trainers "
			"that have them have to be started again device=%s error=%d",
			backend_info(b)->id, r);
	inherited_page_name(p, name);
	keeper_drop(&s->keeper, name);
	p->fd = fd_close(p->fd);
}

static void survive_release_streams(struct survive *s, struct inherited *in)
{
	for (size_t i = 0; i < in->n_pages; i++) {
		if (s->page <= in->pages[i].number)
			s->page = in->pages[i].number + 1;
		if (in->pages[i].fd >= 0) /* else it is in use again */
			survive_release_page(s, &in->pages[i]);
	}
}

static int survive_keep(struct survive *s, const char *name, int fd, struct fault *f);

static int survive_keep_page(struct survive *s, enum inherited_kind kind, unsigned d,
			     struct backend_mem *mem, struct fault *f)
{
	struct inherited_page p = { kind, inherited_device_key(survive_device_name(s, d)),
				    s->page++, -1 };
	_cleanup_(fd_closep) int fd = -1;
	char name[KEEPER_NAME_MAX + 1];
	int r = backend_export(s->jobs->node->devices[d].backend, mem, true, &fd);

	if (r < 0)
		return fault_errno(f, r, "leaving memory of a device with the keeper");
	inherited_page_name(&p, name);
	return survive_keep(s, name, fd, f);
}

/* Before a trainer can wait for its words, and before a step is applied. */
static int survive_keep_pages(struct survive *s, unsigned d, struct fault *f)
{
	struct backend *b = s->jobs->node->devices[d].backend;

	/* events of a process that has ended hold nobody up */
	if (backend_info(b)->order == BACKEND_ORDER_TIMELINE)
		survive_keep_page(s, INHERITED_READY, d, backend_ready(b), f);
	if (!f->code && s->undo[d])
		survive_keep_page(s, INHERITED_UNDO, d, s->undo[d], f);
	return f->code;
}

static int survive_begin_devices(struct survive *s, struct inherited *in, struct fault *f)
{
	survive_release_streams(s, in);
	for (unsigned d = 0; !f->code && d < s->jobs->node->n_devices; d++)
		survive_keep_pages(s, d, f);
	return f->code;
}

/* ------------------------------------------------------------------ the start */

static int survive_keep(struct survive *s, const char *name, int fd, struct fault *f)
{
	uint64_t until = clock_now_us() + SURVIVE_KEEPER_MS * UINT64_C(1000);
	int r;

	do {
		r = keeper_add(&s->keeper, name, fd);
		if (r == -EAGAIN)
			poll(NULL, 0, 10);
	} while (r == -EAGAIN && clock_now_us() < until);
	return r < 0 ? fault_errno(f, r, "leaving the journal with the keeper") : 0;
}

static int survive_keep_journal(struct survive *s, unsigned file, struct fault *f)
{
	char name[KEEPER_NAME_MAX + 1];

	inherited_journal_name(file, name);
	return survive_keep(s, name, journal_fd(s->journal, file), f);
}

/* The keeper gets it with a base, so that a successor can read it from the beginning. */
static int survive_new_journal(struct survive *s, struct fault *f)
{
	int r = journal_new(&s->journal);

	if (r < 0)
		return fault_errno(f, r, "making the journal");
	s->jobs->journal = s->journal;
	if (jobs_journal_base(s->jobs) < 0)
		return fault_errno(f, -ENOMEM, "writing the journal");
	for (unsigned i = 0; !f->code && i < JOURNAL_FILES; i++)
		survive_keep_journal(s, i, f);
	return f->code;
}

/* What is in doubt and was not begun. Return: how many there are, the first @room of them in @ret. */
static size_t survive_doubts(const struct survive *s, uint64_t *ret, size_t room)
{
	struct job *job, *tmp;
	size_t n = 0;

	list_for_each (job, tmp, &s->jobs->all, link) {
		if (!job->rec->doubt || !job->rec->doubt->redo)
			continue;
		if (n < room)
			ret[n] = job->rec->doubt->redo;
		n++;
	}
	return n;
}

static void survive_keep_doubts(struct survive *s)
{
	size_t n = survive_doubts(s, NULL, 0);
	_cleanup_(freep) uint64_t *numbers = malloc((n + 1) * sizeof(*numbers));

	if (numbers && !s->stale)
		redo_keep(s->redo, numbers, survive_doubts(s, numbers, n));
	else
		redo_clear(s->redo);
}

/* Before a new redo file has numbers of its own. */
static void survive_lose_doubts(struct survive *s)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &s->jobs->all, link)
		if (job->rec->doubt && job->rec->doubt->redo &&
		    (!s->redo || !redo_has(s->redo, job->rec->doubt->redo)))
			doubt_lost(job);
}

/* With the journal's new base no other task of the predecessor counts any more. */
static int survive_begin_redo(struct survive *s, struct fault *f)
{
	int r;

	if (s->redo)
		survive_keep_doubts(s);
	survive_lose_doubts(s);
	if (s->redo || !s->threads)
		return 0;
	r = redo_new(s->threads, &s->redo);
	if (r < 0)
		return fault_errno(f, r, "making the redo file");
	return survive_keep(s, INHERITED_REDO, redo_fd(s->redo), f);
}

/* Jobs go on without it. */
static void survive_keep_history(struct survive *s, struct inherited *in)
{
	struct fault f = FAULT_NULL;

	if (history_fd() < 0)
		return; /* it is there still */
	if (in->history >= 0)
		keeper_drop(&s->keeper, INHERITED_HISTORY);
	if (survive_keep(s, INHERITED_HISTORY, history_fd(), &f))
		log_warn("server", "the history of jobs ends with this daemon: %s", f.text);
}

/* The store is there from here on: what was restored is in it already. */
static int survive_begin(struct survive *s, struct fault *f)
{
	s->jobs->journal = s->journal;
	s->jobs->node->devices[0].table->store =
		(struct slab_store){ survive_on_slab, survive_on_drop, s };
	if (jobs_journal_base(s->jobs) < 0)
		return fault_errno(f, -ENOMEM, "writing the journal");
	if (survive_begin_redo(s, f))
		return f->code;
	s->jobs->redo = s->redo;
	if (s->redo && survive_numbers_redo(s))
		s->jobs->redo_take = survive_redo_take;
	else if (s->redo)
		s->jobs->redo_some = survive_redo_some;
	s->jobs->redo_arg = s;
	return 0;
}

/* What the kernels of the predecessor kept, or memory of this daemon's own. A page that cannot be used
 * leaves the keeper with the others that are not needed. */
static int survive_open_undo(struct survive *s, struct inherited *in, unsigned d, struct fault *f)
{
	struct backend *b = s->jobs->node->devices[d].backend;
	uint64_t key = inherited_device_key(survive_device_name(s, d));
	struct inherited_page *page = NULL;
	struct backend_mem *mem = NULL;
	int r = -ESTALE;

	for (size_t i = 0; i < in->n_pages && !page; i++)
		if (in->pages[i].kind == INHERITED_UNDO && in->pages[i].device == key)
			page = &in->pages[i];
	if (page)
		r = backend_redo_open(b, page->fd, &mem);
	if (r == 0)
		page->fd = fd_close(page->fd); /* it stays with the keeper */
	if (r == -ESTALE) {
		s->stale |= inherited_has_state(in);
		r = backend_redo_open(b, -1, &mem);
		s->undo[d] = mem;
	}
	if (r == BACKEND_E_FULL) {
		log_warn("server",
			 "no memory for what kernels keep: if the daemon dies while a step is "
			 "applied, its job is TORN device=%s",
			 backend_info(b)->id);
		return 0;
	}
	return r ? fault_errno(f, r, "taking memory of a device for what its kernels keep") : 0;
}

/* On devices whose backend notes how far a step is. A device's kernels have no threads here, so the
 * redo file needs no more than one slot. */
static int survive_open_redo(struct survive *s, struct inherited *in, struct fault *f)
{
	const struct backend_info *info = backend_info(s->jobs->node->devices[0].backend);

	for (unsigned d = 0; !f->code && survive_numbers_redo(s) && d < s->jobs->node->n_devices;
	     d++)
		survive_open_undo(s, in, d, f);
	s->threads = !info->redoes ? 0 : survive_numbers_redo(s) ? 1 : info->threads + 1;
	return f->code;
}

/* A daemon that died in its first start, before it had a job, has left a part of the journal. */
static bool survive_is_beginning(const struct inherited *in)
{
	return !in->n_slabs && !inherited_has_journal(in);
}

static void survive_forget_beginning(struct survive *s, struct inherited *in)
{
	char name[KEEPER_NAME_MAX + 1];

	for (size_t i = 0; i < in->n_pages; i++) {
		inherited_page_name(&in->pages[i], name);
		keeper_has(&s->keeper, 1);
		keeper_drop(&s->keeper, name);
		in->pages[i].fd = fd_close(in->pages[i].fd);
	}
	in->n_pages = 0;

	for (unsigned i = 0; i < JOURNAL_FILES; i++) {
		if (in->journal[i] < 0)
			continue;
		inherited_journal_name(i, name);
		keeper_has(&s->keeper, 1);
		keeper_drop(&s->keeper, name);
		in->journal[i] = fd_close(in->journal[i]);
	}
	if (in->redo < 0)
		return;
	keeper_has(&s->keeper, 1);
	keeper_drop(&s->keeper, INHERITED_REDO);
	in->redo = fd_close(in->redo);
}

int survive_start(struct survive *s, struct inherited *in, struct fault *f)
{
	uint64_t began = clock_now_us();
	bool left = inherited_has_state(in);
	int r = keeper_init(&s->keeper);

	if (r < 0)
		return fault_errno(f, r, "opening NOTIFY_SOCKET");
	if (!keeper_is_there(&s->keeper) && !left) {
		log_info("server", "jobs end with the daemon: it was started without a descriptor "
				   "store (FDSTORE and NOTIFY_SOCKET are not set)");
		return 0;
	}
	if (!keeper_is_there(&s->keeper))
		return fault_set(
			f, FAULT_INVALID, "journal",
			"state of a previous daemon was passed, but there is no descriptor "
			"store to leave it with (FDSTORE and NOTIFY_SOCKET are not set)");
	if (left && survive_is_beginning(in)) {
		survive_forget_beginning(s, in);
		left = false;
	}
	if (survive_open_redo(s, in, f))
		return f->code;
	keeper_has(&s->keeper, (uint32_t)in->n_pages + (in->history >= 0));
	if (left)
		keeper_has(&s->keeper, (uint32_t)in->n_slabs + JOURNAL_FILES + (in->redo >= 0));
	if (left ? survive_restore(s, in, f) : survive_new_journal(s, f))
		return f->code;
	if (survive_begin(s, f) || survive_begin_devices(s, in, f))
		return f->code;
	survive_keep_history(s, in);
	survive_drop_rest(s, in);
	if (left)
		log_info("server",
			 "state of the previous daemon restored jobs=%u completed=%u us=%llu",
			 s->restored, s->completed, (unsigned long long)(clock_now_us() - began));
	return 0;
}

bool survive_outlives(const struct survive *s)
{
	return s->journal && !s->lost;
}

static void survive_look_for_keeper(struct survive *s)
{
	uint64_t now = clock_now_us();

	if (s->lost || now - s->looked_us < SURVIVE_LOOK_US)
		return;
	s->looked_us = now;
	if (!keeper_has_ended(&s->keeper))
		return;
	log_error("server",
		  "what kept the jobs (NOTIFY_SOCKET) has ended: from now on they end with "
		  "this daemon; drain it, and start it again with shardd-holder");
	s->lost = true;
	s->jobs->keeper_lost = true;
}

void survive_tick(struct survive *s)
{
	bool behind = s->behind;

	survive_look_for_keeper(s);
	keeper_tick(&s->keeper);
	if (behind && list_empty(&s->keeper.drops)) {
		s->behind = false;
		jobs_pooled_retry(s->jobs);
		node_wake(s->jobs->node); /* who gets no room again says so */
	} else if (behind) {
		s->hurry(s->hurry_arg);
	}
}

void survive_leave(struct survive *s)
{
	struct node *node = s->jobs->node;

	jobs_journal_tick(s->jobs);
	keeper_tick(&s->keeper);
	s->jobs->journal = NULL;
	s->jobs->redo = NULL;
	if (node->n_devices)
		node->devices[0].table->store = (struct slab_store){ 0 };
	for (unsigned d = 0; d < node->n_devices; d++)
		slabs_leave(&node->devices[d]);
}
