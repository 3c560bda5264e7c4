#include "job/saving.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checkpoint/place.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/proc.h"
#include "core/state.h"
#include "job/events.h"
#include "job/saving_impl.h"
#include "op/recorder.h"

#define FILE_NAME "shard-00000.safetensors"
/* For each SAVE_CHUNK_BYTES. */
#define SAVING_YIELD_MS 8u

static const struct state_row saving_states[] = {
	[SAVING_WAITING] = { "WAITING", STATE_TO(SAVING_WRITING) | STATE_TO(SAVING_FAILED) },
	[SAVING_WRITING] = { "WRITING", STATE_TO(SAVING_DONE) | STATE_TO(SAVING_FAILED) },
	[SAVING_DONE] = { "DONE", 0 },
	[SAVING_FAILED] = { "FAILED", 0 },
};

const char *saving_state_name(enum saving_state s)
{
	return s < ARRAY_SIZE(saving_states) ? saving_states[s].name : "?";
}

bool saving_report(const struct job *job, struct saving_report *ret)
{
	const struct saving *s = job->checkpoints.saving;

	if (!s)
		return false;
	*ret = (struct saving_report){
		.state = (enum saving_state)s->state,
		.step = s->step,
		.as_left = s->as_left,
		.bytes = s->bytes,
		.written = atomic_load(&s->p.bytes),
		.copied = s->g ? generation_copied(s->g) : s->copied,
		.path = s->path,
		.why = s->f.text,
	};
	return true;
}

static bool saving_does_wait(const struct saving *s)
{
	return s && s->state == SAVING_WAITING;
}

bool saving_waits(const struct job *job)
{
	return saving_does_wait(job->checkpoints.saving) ||
	       saving_does_wait(job->checkpoints.memory);
}

static bool saving_goes_on(const struct saving *s)
{
	return s && (s->running || s->part.posted || s->state == SAVING_WAITING ||
		     s->state == SAVING_WRITING);
}

bool saving_is_busy(const struct job *job)
{
	return saving_goes_on(job->checkpoints.saving) || saving_is_replicating(job);
}

bool saving_is_replicating(const struct job *job)
{
	return saving_goes_on(job->checkpoints.memory);
}

/* --------------------------------------------------------------------------- its end */

void saving_drop(struct saving *s)
{
	draft_deinit(&s->draft);
	index_deinit(&s->x);
	s->buffers = bufcopy_unref(s->buffers);
	if (s->blobs)
		quota_return(&s->job->quota, MEM_CONTROL, s->blob_bytes);
	free(s->blobs);
	free(s->chunk);
	s->blobs = s->chunk = NULL;
	s->blob_bytes = 0;
}

/* Into memory they are copies for other nodes, made at each commit. */
static void saving_tell(const struct saving *s)
{
	if (s->memory)
		return;
	if (s->f.code)
		events_add(s->job, EVENTS_CHECKPOINT_FAILED, "%s", s->f.text);
	else
		events_add(s->job, EVENTS_CHECKPOINT, "step %llu", (unsigned long long)s->step);
	if (recorder.sink.checkpoint)
		recorder.sink.checkpoint(s->job,
					 &(struct recorder_checkpoint){ .step = s->step,
									.began_us = s->began_us,
									.ended_us = clock_now_us(),
									.bytes = s->bytes,
									.error = s->f.text },
					 recorder.sink.userdata);
}

void saving_finish(struct saving *s)
{
	struct saving_report r;
	saving_cb done = s->done;

	state_move(saving_states, &s->state, s->f.code ? SAVING_FAILED : SAVING_DONE);
	if (!s->memory)
		*(s->f.code ? &s->job->ops.counts.checkpoints_failed
			    : &s->job->ops.counts.checkpoints) += 1;
	saving_drop(s);
	saving_tell(s);
	if (!s->f.code && !s->job->life.deleted && !s->memory)
		job_saved(s->job, s->step);
	s->done = NULL;
	if (done && saving_report(s->job, &r))
		done(&r, s->f.code ? &s->f : NULL, s->userdata);
}

void saving_free(struct saving *s)
{
	CHECK(!s->running && !s->g && !s->replica);
	s->reader = reader_free(s->reader);
	free(s->part.crcs);
	free(s->specs);
	index_deinit(&s->x);
	free(s->path);
	free(s->roots);
	free(s);
}

void saving_forget(struct job *job)
{
	struct saving *s = job->checkpoints.saving;

	job->checkpoints.saving = NULL;
	if (s)
		saving_free(s);
}

void saving_forget_memory(struct job *job)
{
	struct saving *s = job->checkpoints.memory;

	job->checkpoints.memory = NULL;
	if (s)
		saving_free(s);
}

static void saving_on_changed(struct job *job)
{
	readers_go_on(job);
}

void saving_join(struct saving *s)
{
	pthread_join(s->thread, NULL);
	s->running = false;
}

static void saving_on_ended(struct work *w)
{
	struct saving *s = CONTAINER_OF(w, struct saving, ended);

	saving_join(s);
	s->copied = generation_copied(s->g);
	if (s->prune.code)
		log_warn("job", "old checkpoints not removed job=%s path=%s why=\"%s\"",
			 s->job->label, s->path, s->prune.text);
	s->g = generation_end(s->g);
	saving_finish(s);
}

/* ------------------------------------------------------------------------- the thread */

void saving_lost(const struct saving *s, int why, struct fault *f)
{
	if (why == -ENOMEM)
		fault_set(f, FAULT_EXHAUSTED, NULL,
			  "the trainers changed what was not written yet, and job '%s' has no "
			  "memory for its copy: raise its quota or memory_bytes, or write faster",
			  s->job->rec->name);
	else
		fault_set(f, FAULT_INTERNAL, NULL,
			  "a device failed while it copied the state of job '%s' (%s): shardctl "
			  "status shows which one, and why",
			  s->job->rec->name, strerror(-why));
}

/* Training comes first: the processors and the memory are those of the job's ops while such run, but
 * for so long only that the checkpoint goes on beside a job that never rests. A lower priority would
 * not do: a thread that has it holds up the end of a daemon that is killed. */
static void saving_yield(const struct saving *s)
{
	const struct timespec ms = { .tv_nsec = 1000000 };

	for (unsigned i = 0; i < SAVING_YIELD_MS && atomic_load(&s->job->running); i++)
		(void)nanosleep(&ms, NULL);
}

const void *saving_data(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f)
{
	struct saving *s = arg;
	const struct index_piece *p = &s->x.pieces[piece];
	int r;

	if (p->array == INDEX_BLOB)
		return s->blobs + p->source + offset;
	if (p->array == INDEX_BUFFER)
		return bufcopy_data(s->buffers) + p->source + offset;
	saving_yield(s);
	r = generation_read(s->g, p->source + offset, s->chunk, bytes);
	if (r == 0)
		return s->chunk;
	saving_lost(s, r, f);
	return NULL;
}

int saving_make_index(struct saving *s, const char *name)
{
	if (index_add_file(&s->x, name, &s->f) || draft_finish(&s->draft, &s->x, &s->f))
		return s->f.code;
	s->x.created_unix_s = (uint64_t)time(NULL);
	return 0;
}

static void *saving_main(void *arg)
{
	struct saving *s = arg;
	size_t removed, left;
	int dir = -1;

	if (saving_make_index(s, FILE_NAME) == 0 && place_become(s->uid, s->gid, &s->f) == 0)
		dir = place_open(s->roots, s->path, &s->f);
	if (dir >= 0) {
		if (save_write(dir, &s->x, &s->o, saving_data, s, &s->p, &s->f) == 0 && s->keep)
			folder_prune(dir, s->keep, &removed, &left, &s->prune);
		fd_close(dir);
		if (s->f.code)
			place_tell(&s->f, s->path, s->step);
	}
	if (s->f.code == FAULT_CANCELLED && generation_lost(s->g)) {
		int why = generation_lost(s->g);

		s->f = FAULT_NULL; /* saving_tick has cancelled it */
		saving_lost(s, why, &s->f);
	}
	index_deinit(&s->x); /* which takes long, if it is */
	loopq_post(s->job->node->loopq, &s->ended, saving_on_ended);
	return NULL;
}

/* ------------------------------------------------------------------------------ its begin */

int saving_start_thread(pthread_t *ret, void *(*run)(void *), void *arg)
{
	sigset_t all, old;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = -pthread_create(ret, NULL, run, arg);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return r;
}

int saving_freeze(struct saving *s)
{
	struct job *job = s->job;

	s->g = generation_new(job, job->node->loopq, saving_on_changed);
	s->chunk = malloc(SAVE_CHUNK_BYTES);
	if (!s->g || !s->chunk)
		return fault_errno(&s->f, -ENOMEM, "beginning a checkpoint");
	if (saving_list(s))
		return s->f.code;
	if (generation_open(s->g) < 0)
		return fault_errno(&s->f, -ENOMEM, "beginning a checkpoint");
	return 0;
}

void saving_is_written(struct saving *s)
{
	state_move(saving_states, &s->state, SAVING_WRITING);
	if (s->memory)
		return;
	s->job->checkpoints.step = s->step;
	s->job->checkpoints.us = clock_now_us();
}

static int saving_start(struct saving *s)
{
	int r;

	if (saving_freeze(s))
		return s->f.code;
	r = saving_start_thread(&s->thread, saving_main, s);
	if (r)
		return fault_errno(&s->f, r, "starting a thread for a checkpoint");
	s->running = true;
	saving_is_written(s);
	return 0;
}

/* A replica is made of one job at a time with a checkpoint. */
static bool saving_may_begin(struct job *job)
{
	return !saving_is_replicating(job) && bufcopy_is_ready(job);
}

/* Within the reader's hold. */
static void saving_on_granted(struct reader *r, const struct fault *f)
{
	struct saving *s = r->userdata;
	struct fault unheld = FAULT_NULL;

	if (s->part.stage)
		saving_part_granted(s, f);
	else if (f)
		s->f = *f;
	else if (saving_start(s))
		s->g = generation_end(s->g);
	if (!f)
		CHECK(reader_release(r, &unheld) == 0);
	/* saving_tick ends one that could not begin: the caller of this goes through the readers */
}

int saving_wait(struct saving *s, struct proc *proc, uint64_t deadline_us,
		bool (*may)(struct job *job))
{
	if (reader_new(s->job, proc, 0, &s->reader) < 0)
		return fault_errno(&s->f, -ENOMEM, "beginning a checkpoint");
	s->reader->may = may;
	bufcopy_retry(s->job);
	return reader_hold(s->reader, deadline_us, saving_on_granted, s, &s->f);
}

int saving_check(const struct job *job, const struct saving_options *o, struct fault *f)
{
	const char *roots = job->node->checkpoint_roots, *at;
	size_t n;

	if (place_find(roots ? roots : "", o->path, &at, &n, f))
		return f->code;
	if (job->life.resize)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is being resized: wait for the end of that",
				 job->rec->name);
	if (saving_goes_on(job->checkpoints.saving) ||
	    (job->generation && !saving_is_replicating(job)))
		return fault_set(
			f, FAULT_STATE, NULL,
			"a checkpoint of job '%s' is being made, in '%.200s': wait for its "
			"end (shardctl status shows how far it is)",
			job->rec->name,
			job->checkpoints.saving ? job->checkpoints.saving->path : "?");
	return 0;
}

struct saving *saving_new(struct job *job, const struct saving_options *o)
{
	struct saving *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	s->job = job;
	s->memory = o->memory;
	s->layout = o->layout;
	s->epoch = o->epoch;
	s->began_us = clock_now_us();
	s->o.bytes_per_s = o->bytes_per_s;
	s->keep = o->keep;
	s->uid = (uid_t)job->rec->uid;
	s->gid = (gid_t)job->rec->gid;
	s->part.new = FOLDER_NEW_NULL;
	s->part.dir = s->part.fd = -1;
	s->path = strdup(o->path);
	s->roots = strdup(job->node->checkpoint_roots ? job->node->checkpoint_roots : "");
	if (s->path && s->roots)
		return s;
	saving_free(s);
	return NULL;
}

int saving_begin(struct job *job, struct proc *proc, const struct saving_options *o, saving_cb done,
		 void *userdata, struct fault *f)
{
	struct saving *s;

	if (saving_check(job, o, f))
		return f->code;
	saving_tick(job); /* one that failed has told its caller */
	s = saving_new(job, o);
	if (!s)
		return fault_errno(f, -ENOMEM, "beginning a checkpoint");
	saving_forget(job);
	job->checkpoints.saving = s;
	s->done = done;
	s->userdata = userdata;
	if (job_is_across(job) ? saving_part_ask(s, o)
			       : saving_wait(s, proc, o->deadline_us, saving_may_begin)) {
		*f = s->f;
		saving_forget(job);
	}
	return f->code;
}

void saving_cancel(struct job *job)
{
	struct saving *all[] = { job->checkpoints.saving, job->checkpoints.memory };

	for (size_t i = 0; i < ARRAY_SIZE(all); i++)
		if (all[i])
			atomic_store(&all[i]->p.cancel, true);
}

static void saving_tick_memory(struct job *job)
{
	struct saving *s = job->checkpoints.memory;

	if (s && !saving_goes_on(s)) {
		saving_forget_memory(job);
		readers_go_on(job); /* a checkpoint may wait for its end */
		return;
	}
	if (!s)
		return;
	if (s->g && generation_lost(s->g))
		atomic_store(&s->p.cancel, true);
	saving_part_tick(s); /* which may end it */
}

void saving_tick(struct job *job)
{
	struct saving *s = job->checkpoints.saving;

	generation_tick(job);
	saving_tick_memory(job);
	if (s && s->g && generation_lost(s->g))
		atomic_store(&s->p.cancel, true);
	if (s && s->part.stage)
		saving_part_tick(s);
	if (!s || s->part.stage || !s->reader || s->reader->state != READER_IDLE)
		return;
	s->reader = reader_free(s->reader);
	if (s->state == SAVING_WAITING)
		saving_finish(s);
}

void saving_leave(struct job *job, void *userdata)
{
	struct saving *s = job->checkpoints.saving;

	if (!s || !s->done || s->userdata != userdata || s->state != SAVING_WAITING)
		return;
	if (s->part.stage && job->jobs->ops.across.give_up)
		job->jobs->ops.across.give_up(job, false);
	if (s->part.stage || s->reader->state != READER_WAITING)
		return;
	reader_give_up(s->reader);
	fault_set(&s->f, FAULT_CANCELLED, NULL, "the caller has given up before it began");
}
