#include "job/loading.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/folder.h"
#include "checkpoint/place.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/loopq.h"
#include "job/bufcopy.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/loading_impl.h"
#include "job/position.h"
#include "job/replica.h"
#include "job/saving.h"
#include "job/span.h"
#include "publish/publication.h"

/* So long it waits for what runs for ops. */
#define LOADING_OPS_US 30000000u

/* Forget where all of it goes to. */
static void loading_unplace(struct loading *l)
{
	for (size_t i = 0; l->places && i < l->x.n_pieces; i++)
		free(l->places[i].blob);
	if (l->charged)
		quota_return(&l->job->quota, MEM_CONTROL, l->charged);
	l->charged = 0;
	free(l->places);
	l->places = NULL;
	l->upload = upload_free(l->upload);
	free(l->copies);
	l->copies = NULL;
	l->n_copies = 0;
	free(l->runs);
	l->runs = NULL;
	l->n_runs = l->runs_room = 0;
	free(l->chunk);
	l->chunk = NULL;
	l->bytes = 0;
	l->report = (struct loading_report){ 0 };
}

static void loading_free(struct loading *l)
{
	loading_unplace(l);
	index_deinit(&l->x);
	fd_close(l->fd);
	free(l->path);
	free(l->roots);
	free(l);
}

/* It is over. May free the job. */
static void loading_finish(struct loading *l)
{
	struct job *job = l->job;

	waiter_leave(&l->waiter);
	job->checkpoints.loading = NULL;
	job->checkpoints.reads = false;
	if (l->f.code)
		log_warn("job", "checkpoint not loaded job=%s path=%s why=\"%s\"", job->label,
			 l->path, l->f.text);
	if (l->done)
		l->done(&l->report, l->f.code ? &l->f : NULL, l->userdata);
	loading_free(l);
	readers_go_on(job);
	job_ran(job);
}

/* ------------------------------------------------------------------------- the thread */

static int loading_newest(int dir, struct loading *l)
{
	_cleanup_(freep) uint64_t *steps = NULL;
	size_t n = 0;

	if (folder_list(dir, &steps, &n, &l->f))
		return l->f.code;
	if (!n)
		return fault_set(&l->f, FAULT_NOT_FOUND, NULL, "there is no checkpoint in '%.200s'",
				 l->path);
	l->step = steps[n - 1];
	return 0;
}

static void loading_on_opened(struct work *w);
static void loading_on_read(struct work *w);

static void *loading_open_main(void *arg)
{
	struct loading *l = arg;
	_cleanup_(fd_closep) int dir = -1;

	if (place_become(l->uid, l->gid, &l->f) == 0)
		dir = place_open(l->roots, l->path, &l->f);
	if (dir >= 0 && (l->has_step || loading_newest(dir, l) == 0))
		l->fd = folder_open(dir, l->step, &l->f);
	if (l->fd >= 0 && save_read(l->fd, &l->x, &l->f))
		place_tell(&l->f, l->path, l->step);
	loopq_post(l->job->node->loopq, &l->ended, loading_on_opened);
	return NULL;
}

static int loading_check_upload(struct loading *l, int status, struct fault *f)
{
	if (!status)
		return 0;
	if (status == -ENOMEM)
		return fault_errno(f, status, "copying a checkpoint to a device");
	return fault_set(f, FAULT_INTERNAL, NULL,
			 "a device failed while the checkpoint was copied to job '%s' (%s): "
			 "shardctl status shows which one, and why",
			 l->job->rec->name, strerror(-status));
}

static void *loading_room(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f)
{
	struct loading *l = arg;
	void *room = l->places[piece].at;

	(void)bytes;
	if (room)
		return (char *)room + offset;
	if (l->places[piece].runs)
		return l->chunk;
	room = upload_room(l->upload);
	return loading_check_upload(l, upload_status(l->upload), f) ? NULL : room;
}

/* Bytes [offset, offset + bytes) of the piece are in the chunk. */
static int loading_put_run(struct loading *l, const struct loading_run *run, uint64_t offset,
			   size_t bytes, struct fault *f)
{
	uint64_t lo = run->begin > offset ? run->begin : offset;
	uint64_t end = run->begin + run->bytes;
	uint64_t hi = end < offset + bytes ? end : offset + bytes;
	char *room = run->to ? run->to + (lo - run->begin) : NULL;

	if (lo >= hi)
		return 0;
	if (!run->to)
		room = upload_room(l->upload);
	memcpy(room, l->chunk + (lo - offset), hi - lo);
	if (run->to)
		return 0;
	upload_put(l->upload, run->upload + lo - run->begin, hi - lo, 1, 0);
	return loading_check_upload(l, upload_status(l->upload), f);
}

static int loading_put(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f)
{
	struct loading *l = arg;
	const struct loading_place *at = &l->places[piece];

	for (uint32_t i = 0; i < at->runs; i++)
		if (loading_put_run(l, &l->runs[at->first_run + i], offset, bytes, f))
			return f->code;
	if (!at->at && !at->runs)
		upload_put(l->upload, at->upload + offset, bytes, at->replicas,
			   index_piece_bytes(&l->x.pieces[piece]));
	return 0;
}

static bool loading_takes(void *arg, size_t piece)
{
	const struct loading *l = arg;

	return !l->places[piece].left_out && index_piece_bytes(&l->x.pieces[piece]);
}

static void *loading_read_main(void *arg)
{
	struct loading *l = arg;
	const struct save_sink sink = {
		.room = loading_room, .put = loading_put, .takes = loading_takes, .arg = l
	};

	/* the files are opened again, by name; those in memory are the daemon's own */
	if (l->in_memory || place_become(l->uid, l->gid, &l->f) == 0)
		save_load(l->fd, &l->x, &sink, &l->p, &l->f);
	if (l->upload) {
		int status = upload_settle(l->upload);

		if (!l->f.code)
			loading_check_upload(l, status, &l->f);
	}
	if (l->f.code && !l->in_memory)
		place_tell(&l->f, l->path, l->step);
	for (size_t i = 0; !l->f.code && i < l->n_copies; i++)
		memcpy(l->copies[i].to, l->copies[i].from, l->copies[i].bytes);
	loopq_post(l->job->node->loopq, &l->ended, loading_on_read);
	return NULL;
}

/* ------------------------------------------------------------------------- may it be loaded? */

static bool loading_has_stepped(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (!job->units[i]->rec->dropped && job->units[i]->rec->optimizer->steps)
			return true;
	return false;
}

/* It is for a job that has nothing to lose. */
static int loading_check_fresh(const struct job *job, struct fault *f)
{
	const state_job *rec = job->rec;
	char step[40] = "steps that were not committed";

	if (rec->torn || (!rec->has_commit && !rec->anchored && !loading_has_stepped(job)))
		return 0;
	if (rec->has_commit)
		snprintf(step, sizeof(step), "step %llu", (unsigned long long)rec->step);
	return fault_set(
		f, FAULT_STATE, NULL,
		"job '%s' has state of its own, %s: load the checkpoint into a new job, or "
		"delete this one first",
		rec->name, step);
}

static int loading_check_unit(const struct unit *u, struct fault *f)
{
	if (!u->gathered_ranks && !u->summoned_ranks && !u->copy_reads && !u->shard_writes &&
	    !unit_is_copying(u))
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "unit '%.100s' is in use by %u ranks: release it before the checkpoint is "
			 "loaded",
			 u->rec->name, u->gathered_ranks + u->summoned_ranks);
}

/* Does anybody use the parameters, beside what runs for ops that have been answered? */
static bool loading_is_busy(const struct job *job)
{
	return job->step.state != JOB_STEP_NONE || job->step.committing || job->step.stepping ||
	       job->generation || making_is_busy(job) || saving_is_busy(job) ||
	       !list_empty(&job->readers.holds) || job->kept.run || kept_is_rolling_back(job) ||
	       job->life.resize;
}

static int loading_check_there(const struct job *job, struct fault *f)
{
	if (!job->life.deleted)
		return 0;
	return fault_set(f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
}

static int loading_check(const struct job *job, struct fault *f)
{
	uint32_t units = 0;

	if (loading_check_there(job, f) || loading_check_fresh(job, f))
		return f->code;
	if (loading_is_busy(job))
		return fault_set(f, FAULT_STATE, NULL,
				 "a step, a reader or a checkpoint of job '%s' uses its "
				 "parameters: wait for its end",
				 job->rec->name);
	for (uint32_t i = 0; i < job->n_units; i++) {
		if (job->units[i]->rec->dropped)
			continue;
		units++;
		if (loading_check_unit(job->units[i], f))
			return f->code;
	}
	if (units)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "job '%s' has no units: its trainers register them, then the checkpoint "
			 "can be loaded",
			 job->rec->name);
}

/* ------------------------------------------------------------------------------ its course */

/* From here on the job has neither its former state nor the new one. */
void loading_empty(struct job *job)
{
	position_reset(job);
	for (uint32_t i = 0; i < job->n_units; i++) {
		job->units[i]->rec->initialised = false;
		job_journal_mark_unit(job, job->units[i]);
	}
	job->readers.changes++;
	job_journal_write(job);
}

static enum res loading_get_kept(struct loading *l)
{
	struct job *job = l->job;
	int r = kept_reserve(job);

	if (r == SLAB_E_LATER) {
		condition_wait(&job->node->changed, &l->waiter);
		return RES_WAIT;
	}
	if (r == 0)
		return RES_DONE;
	fault_set(&l->f, FAULT_EXHAUSTED, NULL,
		  "job '%s' has no memory for the copy that it may be rolled back to (resume %s), "
		  "%llu bytes: raise its quota",
		  job->rec->name, job_resume_word(job->rec), (unsigned long long)kept_bytes(job));
	return RES_FAILED;
}

static enum res loading_get_buffers(struct loading *l)
{
	int r = l->upload ? upload_begin(l->upload) : 0;

	if (r == 0)
		return RES_DONE;
	fault_set(&l->f, FAULT_EXHAUSTED, NULL,
		  "there is no memory to copy a checkpoint to the devices of job '%s': %s",
		  l->job->rec->name,
		  r == -EDQUOT ? "raise its quota" : "the machine has none left");
	return RES_FAILED;
}

/* Ranks have their answers before all that devices do for these ops is over, so that ranks which wait for
 * all their ops still come too early. Each op has a deadline of its own. */
static enum res loading_await_ops(struct loading *l)
{
	struct job *job = l->job;

	if (l->in_memory || job->running <= 1) { /* 1: this */
		l->awaits_us = 0;
		return RES_DONE;
	}
	if (!l->awaits_us)
		l->awaits_us = clock_now_us();
	if (clock_now_us() - l->awaits_us < LOADING_OPS_US) {
		condition_wait(&job->settled, &l->waiter);
		return RES_WAIT;
	}
	fault_set(
		&l->f, FAULT_STATE, NULL,
		"ops of job '%s' ran for all of %u s in which the load waited for their end: load "
		"the checkpoint while no rank starts ops",
		job->rec->name, LOADING_OPS_US / 1000000);
	return RES_FAILED;
}

/* All that can fail before anything changes. The job may have changed while this has waited. */
static enum res loading_prepare(struct loading *l)
{
	if (!l->f.code && atomic_load(&l->p.cancel) && !l->job->life.deleted)
		fault_set(&l->f, FAULT_CANCELLED, NULL, "reading the checkpoint was cancelled");
	if (l->f.code ||
	    (l->in_memory ? loading_check_there(l->job, &l->f) : loading_check(l->job, &l->f)))
		return RES_FAILED;
	RES_TRY(loading_await_ops(l));
	RES_TRY(loading_get_kept(l));
	if (loading_place_all(l))
		return RES_FAILED;
	return loading_get_buffers(l);
}

static enum res loading_drain(struct loading *l)
{
	struct job *job = l->job;
	enum res r = job->jobs->ops.drain ? job->jobs->ops.drain(job, &l->waiter) : RES_DONE;

	if (r == RES_FAILED)
		fault_errno(&l->f, -ENOMEM, "beginning to load a checkpoint");
	return r;
}

static enum res loading_start_reading(struct loading *l)
{
	int r = saving_start_thread(&l->thread, loading_read_main, l);

	l->runs_thread = r == 0;
	if (r)
		fault_errno(&l->f, r, "starting a thread to load a checkpoint");
	return r ? RES_FAILED : RES_WAIT;
}

static enum res loading_tick(struct loading *l)
{
	struct job *job = l->job;

	switch ((enum loading_state)l->state) {
	case LOADING_OPENING:
		l->state = LOADING_MEMORY;
		fallthrough;
	case LOADING_MEMORY:
		RES_TRY(loading_prepare(l));
		if (l->part.on && !l->part.reads) {
			loading_unplace(l); /* units may come and go until it is read */
			l->state = LOADING_PLACED;
			return RES_DONE;
		}
		loading_empty(job);
		job->checkpoints.reads = true;
		l->state = LOADING_DRAINING;
		RES_TRY(loading_drain(l)); /* is not asked again */
		fallthrough;
	case LOADING_DRAINING:
		l->state = LOADING_READING;
		return loading_start_reading(l);
	case LOADING_ASKED:
	case LOADING_PLACED:
	case LOADING_READING:
	case LOADING_READ:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void loading_part_over(struct loading *l);

/* Of a phase that is over. */
static void loading_part_answer(struct loading *l)
{
	const struct fault f = l->f;

	if (l->part.over)
		loading_part_over(l);
	else
		l->part.answered(l->job,
				 &(struct loading_answer){ .f = f.code ? &f : NULL,
							   .step = l->x.step,
							   .crc = l->x.crc,
							   .bytes = l->report.bytes },
				 l->part.userdata);
}

static void loading_go_on(struct loading *l)
{
	enum res r = loading_tick(l);

	if (r == RES_FAILED && !l->part.on) {
		loading_finish(l);
	} else if (r == RES_FAILED) {
		l->state = LOADING_READ;
		loading_part_answer(l);
	} else if (r == RES_DONE && l->state == LOADING_PLACED) {
		loading_part_answer(l);
	}
}

static void loading_on_resumed(struct waiter *w)
{
	loading_go_on(CONTAINER_OF(w, struct loading, waiter));
}

static void loading_on_opened(struct work *w)
{
	struct loading *l = CONTAINER_OF(w, struct loading, ended);

	pthread_join(l->thread, NULL);
	l->runs_thread = false;
	if (l->part.over)
		loading_part_over(l);
	else
		loading_go_on(l);
}

/* The steps of a unit are those of the tensor that has made most; the others have missed some. */
static void loading_take_steps(struct loading *l)
{
	for (size_t i = 0; i < l->x.n_pieces; i++) {
		const struct loading_place *at = &l->places[i];
		state_optimizer *o = at->unit ? at->unit->rec->optimizer : NULL;

		if (o && l->x.pieces[i].steps > o->steps)
			o->steps = l->x.pieces[i].steps;
	}
	for (size_t i = 0; i < l->x.n_pieces; i++) {
		const struct loading_place *at = &l->places[i];

		if (at->unit && !at->unit->tensors[at->tensor].frozen)
			at->unit->rec->tensors[at->tensor]->missed =
				at->unit->rec->optimizer->steps - l->x.pieces[i].steps;
	}
}

static void loading_take_unit(struct job *job, struct unit *u)
{
	u->rec->initialised = true;
	u->torn = u->has_gradient = u->has_partials = u->some_lack = false;
	unit_forget_steps(u);
	u->version++;
	if (job->jobs->ops.rolled_back)
		job->jobs->ops.rolled_back(job, u);
	job_journal_mark_unit(job, u);
}

static int loading_take_blobs(struct loading *l)
{
	for (size_t i = 0; i < l->x.n_pieces; i++) {
		const struct index_piece *p = &l->x.pieces[i];
		struct loading_place *at = &l->places[i];

		if (!at->blob || p->rank >= l->job->rec->world_size)
			continue;
		if (state_job_set_blob(l->job->rec, p->rank, at->blob, p->elements, l->x.step) < 0)
			return fault_errno(&l->f, -ENOMEM, "loading a blob");
		at->blob = NULL; /* the record's, as is its charge */
		l->charged -= p->elements;
	}
	return 0;
}

/* What was in memory alone is in no checkpoint. Of a later step there may be one: the job comes to that step
 * again, on another way. */
static void loading_take_saved(const struct loading *l)
{
	state_job *rec = l->job->rec;

	if (!l->in_memory)
		replica_forget(l->job); /* of another state */
	rec->saved = l->in_memory ? rec->saved && rec->saved_step <= rec->step : true;
	if (!l->in_memory)
		rec->saved_step = rec->step;
}

/* The job has the commit of the checkpoint. */
static void loading_take(struct loading *l)
{
	struct job *job = l->job;
	state_job *rec = job->rec;

	for (uint32_t i = 0; i < l->n_units; i++)
		if (!job->units[i]->rec->dropped)
			loading_take_unit(job, job->units[i]);
	loading_take_steps(l);
	job->life.torn = false;
	rec->torn = false;
	rec->has_commit = true;
	rec->step = l->x.step;
	rec->committed_unix_s = l->x.created_unix_s;
	rec->uncommitted_steps = 0;
	position_committed(job, rec->step);
	kept_committed(job);
	loading_take_saved(l);
	bufcopy_forget(job);
	job->mem.stale_partials = job->mem.stray_gradients = true;
	job->readers.changes++;
	job_journal_mark(job, JOB_JOURNAL_HEAD | JOB_JOURNAL_BLOBS);
	job_journal_write(job);
}

/* Its ranks have joined before there was a step. */
static void loading_end_epoch(struct job *job)
{
	struct fault f = FAULT_NULL;

	if (!job->joined)
		return;
	fault_set(&f, FAULT_ABORTED, NULL,
		  "a checkpoint of step %llu was loaded into job '%s': epoch %llu has ended, join "
		  "again",
		  (unsigned long long)job->rec->step, job->rec->name,
		  (unsigned long long)job->rec->epoch);
	job_epoch_end(job, &f);
}

/* All of it is read. */
static void loading_complete(struct loading *l)
{
	struct job *job = l->job;

	if (!l->f.code && job->life.deleted)
		fault_set(&l->f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	if (!l->f.code && loading_take_blobs(l) == 0) {
		loading_take(l);
		log_info("job",
			 "checkpoint loaded job=%s step=%llu path=%s bytes=%llu buffers_missing=%u",
			 job->label, (unsigned long long)job->rec->step, l->path,
			 (unsigned long long)l->report.bytes, l->report.buffers_missing);
		readers_committed(job);
		publications_committed(job);
		loading_end_epoch(job);
	}
	loading_finish(l);
}

static void loading_on_read(struct work *w)
{
	struct loading *l = CONTAINER_OF(w, struct loading, ended);

	pthread_join(l->thread, NULL);
	l->runs_thread = false;
	l->report.step = l->x.step;
	l->report.world_size = l->x.world_size;
	l->report.bytes = atomic_load(&l->p.bytes);
	if (!l->part.on) {
		loading_complete(l);
		return;
	}
	l->state = LOADING_READ;
	loading_part_answer(l);
}

/* The nodes have agreed on how it ends, and nothing of it runs here. */
static void loading_part_over(struct loading *l)
{
	if (l->part.why.code)
		l->f = l->part.why;
	if (l->f.code) {
		loading_finish(l);
		return;
	}
	l->report.bytes = l->part.all_bytes;
	loading_complete(l);
}

void loading_part_end(struct job *job, uint64_t bytes, const struct fault *f)
{
	struct loading *l = job->checkpoints.loading;

	CHECK(l && (l->part.on || l->state == LOADING_ASKED));
	CHECK(f || l->state == LOADING_READ);
	l->part.over = true;
	l->part.all_bytes = bytes;
	if (f)
		l->part.why = *f;
	if (l->runs_thread || l->state == LOADING_DRAINING)
		atomic_store(&l->p.cancel, true);
	else
		loading_part_over(l);
}

static struct loading *loading_new(struct job *job, const struct loading_options *o)
{
	struct loading *l = calloc(1, sizeof(*l));

	if (!l)
		return NULL;
	l->job = job;
	l->fd = -1;
	waiter_init(&l->waiter, loading_on_resumed);
	l->uid = (uid_t)job->rec->uid;
	l->gid = (gid_t)job->rec->gid;
	l->has_step = o->has_step;
	l->step = o->step;
	l->path = strdup(o->path);
	l->roots = strdup(job->node->checkpoint_roots ? job->node->checkpoint_roots : "");
	if (l->path && l->roots)
		return l;
	loading_free(l);
	return NULL;
}

/* Return: 0 or a fault code: it may not be loaded. */
static int loading_may(struct job *job, const struct loading_options *o, struct fault *f)
{
	const char *roots = job->node->checkpoint_roots, *at;
	size_t n;

	if (job->checkpoints.loading)
		return fault_set(f, FAULT_STATE, NULL,
				 "a checkpoint is being loaded into job '%s' already",
				 job->rec->name);
	if (job->life.restore)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is being restored from other nodes' memory: wait for "
				 "its end",
				 job->rec->name);
	if (place_find(roots ? roots : "", o->path, &at, &n, f))
		return f->code;
	job->running++; /* it counts as one of the job's ops */
	if (loading_check(job, f))
		job->running--;
	return f->code;
}

static int loading_open(struct loading *l)
{
	int r;

	l->state = LOADING_OPENING;
	r = saving_start_thread(&l->thread, loading_open_main, l);

	l->runs_thread = r == 0;
	return r ? fault_errno(&l->f, r, "beginning to load a checkpoint") : 0;
}

static int loading_ask(struct loading *l, const struct loading_options *o)
{
	struct job *job = l->job;

	l->state = LOADING_ASKED;
	if (!job->jobs->ops.across.load)
		return fault_set(&l->f, FAULT_UNIMPLEMENTED, NULL,
				 "job '%s' has ranks on several nodes, and this daemon is of none",
				 job->rec->name);
	return job->jobs->ops.across.load(job, o, &l->f);
}

int loading_begin(struct job *job, const struct loading_options *o, loading_cb done, void *userdata,
		  struct fault *f)
{
	struct loading *l;

	if (loading_may(job, o, f))
		return f->code;
	l = loading_new(job, o);
	if (l) {
		job->checkpoints.loading = l;
		l->done = done;
		l->userdata = userdata;
		*f = (job_is_across(job) ? loading_ask(l, o) : loading_open(l)) ? l->f : FAULT_NULL;
	} else {
		fault_errno(f, -ENOMEM, "beginning to load a checkpoint");
	}
	if (!f->code)
		return 0;
	job->checkpoints.loading = NULL;
	job->running--;
	if (l)
		loading_free(l);
	return f->code;
}

static void loading_on_posted(struct work *w)
{
	loading_go_on(CONTAINER_OF(w, struct loading, ended));
}

int loading_begin_memory(struct job *job, const struct loading_memory *m, loading_cb done,
			 void *userdata, struct fault *f)
{
	const struct loading_options o = { .path = "memory", .has_step = true, .step = m->x->step };
	struct loading *l = loading_new(job, &o);

	CHECK(!job->checkpoints.loading && !job->joined);
	if (!l)
		return fault_errno(f, -ENOMEM, "beginning to restore a job");
	l->in_memory = true;
	l->memory = *m;
	l->x = *m->x;
	*m->x = INDEX_NULL;
	l->done = done;
	l->userdata = userdata;
	l->state = LOADING_OPENING;
	job->checkpoints.loading = l;
	job->running++;
	loopq_post(job->node->loopq, &l->ended, loading_on_posted);
	return 0;
}

bool loading_part_is_asked(const struct job *job)
{
	return job->checkpoints.loading && job->checkpoints.loading->state == LOADING_ASKED;
}

int loading_part_open(struct job *job, const struct loading_options *o, loading_part_cb answered,
		      void *userdata, struct fault *f)
{
	struct loading *l = loading_part_is_asked(job) ? job->checkpoints.loading : NULL;

	if (!l) {
		if (loading_may(job, o, f))
			return f->code;
		l = loading_new(job, o);
		if (!l) {
			job->running--;
			return fault_errno(f, -ENOMEM, "beginning to load a checkpoint");
		}
		job->checkpoints.loading = l;
	}
	l->part.on = true;
	l->part.answered = answered;
	l->part.userdata = userdata;
	l->has_step = o->has_step;
	l->step = o->step;
	if (loading_open(l)) {
		l->state = LOADING_READ;
		loading_part_answer(l);
	}
	return 0;
}

void loading_part_read(struct job *job)
{
	struct loading *l = job->checkpoints.loading;

	CHECK(l && l->part.on);
	if (l->state != LOADING_PLACED) { /* it has failed, and has said so */
		return;
	}
	l->part.reads = true;
	l->state = LOADING_MEMORY;
	loading_go_on(l);
}

bool loading_progress(const struct job *job, struct loading_progress *ret)
{
	const struct loading *l = job->checkpoints.loading;

	if (!l)
		return false;
	*ret = (struct loading_progress){ .path = l->path };
	if (job->checkpoints.reads) /* else the thread still looks for it */
		*ret = (struct loading_progress){ .path = l->path,
						  .reads = true,
						  .step = l->x.step,
						  .bytes = l->bytes,
						  .done = atomic_load(&l->p.bytes) };
	return true;
}

void loading_cancel(struct job *job)
{
	struct loading *l = job->checkpoints.loading;

	if (!l)
		return;
	atomic_store(&l->p.cancel, true);
	if ((l->part.on || l->state == LOADING_ASKED) && !l->part.over) {
		if (!l->runs_thread && l->state != LOADING_DRAINING &&
		    job->jobs->ops.across.give_up)
			job->jobs->ops.across.give_up(job, true);
		return; /* else it ends when the thread does */
	}
	if (l->state != LOADING_MEMORY || !waiter_on(&l->waiter))
		return;
	waiter_leave(&l->waiter);
	loopq_post(job->node->loopq, &l->ended, loading_on_posted);
}

enum res loading_let(struct job *job, enum job_change what)
{
	return job->checkpoints.reads ? RES_WAIT : kept_let(job, what);
}
