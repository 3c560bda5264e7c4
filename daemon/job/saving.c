#include "job/saving.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checkpoint/draft.h"
#include "checkpoint/folder.h"
#include "checkpoint/place.h"
#include "checkpoint/save.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/proc.h"
#include "core/state.h"
#include "job/bufcopy.h"
#include "job/generation.h"
#include "job/job.h"
#include "job/readers.h"
#include "unit/runs.h"

#define FILE_NAME "shard-00000.safetensors"
/* For each SAVE_CHUNK_BYTES. */
#define SAVING_YIELD_MS 8u

struct saving {
	struct job *job;
	uint8_t state;      /* enum saving_state */
	bool running;       /* the thread has not ended */
	char *path, *roots; /* owned */
	uid_t uid;
	gid_t gid;
	struct reader *reader; /* owned: until it is granted or refused */
	struct generation *g;  /* owned, while it is WRITING */
	uint64_t copied;
	uint64_t step;
	struct draft draft; /* what the thread makes the index of */
	struct index x;     /* the thread's */
	char *blobs;        /* owned: copies, one after the other */
	uint64_t blob_bytes;
	struct bufcopy *buffers; /* owned ref; NULL: the job has none */
	bool as_left;            /* these are not of the commit */
	uint64_t bytes;          /* of all tensors */
	struct save_options o;
	uint32_t keep;
	struct fault prune; /* what was not removed is no fault of the checkpoint */
	struct save_progress p;
	char *chunk; /* owned: what is being written */
	struct fault f;
	pthread_t thread;
	struct work ended;
	saving_cb done; /* NULL: it was called */
	void *userdata;
};

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

bool saving_waits(const struct job *job)
{
	return job->checkpoints.saving && job->checkpoints.saving->state == SAVING_WAITING;
}

bool saving_is_busy(const struct job *job)
{
	return job->checkpoints.saving && (job->checkpoints.saving->running ||
					   job->checkpoints.saving->state == SAVING_WAITING);
}

/* --------------------------------------------------------------------------- its end */

/* What only the making of it needs. */
static void saving_drop(struct saving *s)
{
	draft_deinit(&s->draft);
	s->buffers = bufcopy_unref(s->buffers);
	if (s->blobs)
		quota_return(&s->job->quota, MEM_CONTROL, s->blob_bytes);
	free(s->blobs);
	free(s->chunk);
	s->blobs = s->chunk = NULL;
}

static void saving_finish(struct saving *s)
{
	struct saving_report r;
	saving_cb done = s->done;

	state_move(saving_states, &s->state, s->f.code ? SAVING_FAILED : SAVING_DONE);
	saving_drop(s);
	if (!s->f.code && !s->job->life.deleted)
		job_saved(s->job, s->step);
	s->done = NULL;
	if (done && saving_report(s->job, &r))
		done(&r, s->f.code ? &s->f : NULL, s->userdata);
}

static void saving_free(struct saving *s)
{
	CHECK(!s->running && !s->g);
	s->reader = reader_free(s->reader);
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

static void saving_on_changed(struct job *job)
{
	readers_go_on(job);
}

static void saving_on_ended(struct work *w)
{
	struct saving *s = CONTAINER_OF(w, struct saving, ended);

	pthread_join(s->thread, NULL);
	s->running = false;
	s->copied = generation_copied(s->g);
	if (s->prune.code)
		log_warn("job", "old checkpoints not removed job=%s path=%s why=\"%s\"",
			 s->job->label, s->path, s->prune.text);
	s->g = generation_end(s->g);
	saving_finish(s);
}

/* ------------------------------------------------------------------------- the thread */

static void saving_lost(const struct saving *s, int why, struct fault *f)
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

static const void *saving_data(void *arg, size_t piece, uint64_t offset, size_t bytes,
			       struct fault *f)
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

static int saving_make_index(struct saving *s)
{
	if (index_add_file(&s->x, FILE_NAME, &s->f) || draft_finish(&s->draft, &s->x, &s->f))
		return s->f.code;
	s->x.created_unix_s = (uint64_t)time(NULL);
	return 0;
}

static void *saving_main(void *arg)
{
	struct saving *s = arg;
	size_t removed, left;
	int dir = -1;

	if (saving_make_index(s) == 0 && place_become(s->uid, s->gid, &s->f) == 0)
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

/* --------------------------------------------------------------------------- its contents */

enum tensor_type saving_type(enum dtype t)
{
	static const enum tensor_type types[_DTYPE_N] = {
		[DTYPE_FP32] = TENSOR_FP32, [DTYPE_BF16] = TENSOR_BF16, [DTYPE_FP16] = TENSOR_FP16
	};

	CHECK(t < _DTYPE_N && types[t]);
	return types[t];
}

enum tensor_type saving_buffer_type(uint32_t t)
{
	static const enum tensor_type types[_BUFFER_DTYPE_N] = {
		[BUFFER_FP32] = TENSOR_FP32,   [BUFFER_BF16] = TENSOR_BF16,
		[BUFFER_FP16] = TENSOR_FP16,   [BUFFER_FP64] = TENSOR_FP64,
		[BUFFER_INT64] = TENSOR_INT64, [BUFFER_INT32] = TENSOR_INT32,
		[BUFFER_UINT8] = TENSOR_UINT8,
	};

	CHECK(t < _BUFFER_DTYPE_N);
	return t ? types[t] : TENSOR_FP32;
}

enum index_array saving_array(const state_unit *rec, unsigned i)
{
	static const enum index_array adam[] = { INDEX_PARAM, INDEX_EXP_AVG, INDEX_EXP_AVG_SQ,
						 INDEX_MAX_EXP_AVG_SQ };

	if (rec->optimizer->kind == OPTIM_SGD && i)
		return INDEX_MOMENTUM_BUFFER;
	return adam[i];
}

/* The thread makes the index of what is noted here: there may be many thousands of tensors. */
static int saving_note(struct saving *s, const struct index_piece *p)
{
	if (draft_add(&s->draft, p) < 0)
		return fault_errno(&s->f, -ENOMEM, "listing a job's tensors");
	s->bytes += index_piece_bytes(p);
	return 0;
}

/* An array of a tensor, whole, from the parts of the first replica. @source: of the first byte. */
static int saving_add_array(struct saving *s, const struct unit *u, uint32_t t, unsigned array,
			    uint64_t *source)
{
	size_t size = dtype_size(unit_state_dtype(u->rec, array));
	uint64_t at, elements = 0;
	struct unit_run run;

	for (unsigned d = 0; d < u->spread; d++) {
		struct unit_part *p = &u->parts[d];

		if (!unit_part_run(u, p, t, &run))
			continue;
		CHECK(run.first == elements);
		if (generation_add(s->g, p->device,
				   unit_state_at(u->rec, unit_state(p, array), array, run.at),
				   run.n * size, &at) < 0)
			return fault_errno(&s->f, -ENOMEM, "listing a job's tensors");
		*source = elements ? *source : at;
		elements += run.n;
	}
	CHECK(elements == u->tensors[t].elements);
	return 0;
}

static int saving_list_array(struct saving *s, const struct unit *u, uint32_t t, unsigned array)
{
	const struct unit_tensor *ut = &u->tensors[t];
	const state_tensor *rec = u->rec->tensors[t];
	struct index_piece p = { .unit = u->rec->name,
				 .tensor = rec->name,
				 .array = (uint8_t)saving_array(u->rec, array),
				 .type = (uint8_t)saving_type(unit_state_dtype(u->rec, array)),
				 .dims = (uint32_t)rec->n_shape,
				 .shape = rec->shape,
				 .elements = ut->elements,
				 .steps = array || ut->frozen ? 0 : unit_steps(u, t) };

	if (saving_add_array(s, u, t, array, &p.source))
		return s->f.code;
	return saving_note(s, &p);
}

/* Its arrays whose elements have @size bytes. */
static int saving_list_tensor(struct saving *s, const struct unit *u, uint32_t t, size_t size)
{
	unsigned arrays = u->tensors[t].frozen ? 0 : unit_state_arrays(u->rec);

	for (unsigned i = 0; !u->tensors[t].alias && i <= arrays; i++)
		if (dtype_size(unit_state_dtype(u->rec, i)) == size &&
		    saving_list_array(s, u, t, i))
			return s->f.code;
	return 0;
}

/* A unit, and its tensors, in the order of their names. */
struct saving_unit {
	const struct unit *u;
	uint32_t *tensors; /* owned */
};

static int saving_compare_tensors(const void *a, const void *b, void *unit)
{
	const struct unit *u = unit;

	return strcmp(u->rec->tensors[*(const uint32_t *)a]->name,
		      u->rec->tensors[*(const uint32_t *)b]->name);
}

static int saving_compare_units(const void *a, const void *b)
{
	const struct saving_unit *x = a, *y = b;

	return strcmp(x->u->rec->name, y->u->rec->name);
}

static int saving_sort_tensors(struct saving_unit *su, struct unit *u)
{
	su->u = u;
	su->tensors = calloc(u->rec->n_tensors + 1, sizeof(*su->tensors));
	for (uint32_t t = 0; su->tensors && t < u->rec->n_tensors; t++)
		su->tensors[t] = t;
	if (!su->tensors)
		return -ENOMEM;
	qsort_r(su->tensors, u->rec->n_tensors, sizeof(*su->tensors), saving_compare_tensors, u);
	return 0;
}

static void saving_free_units(struct saving_unit *all, size_t n)
{
	for (size_t i = 0; all && i < n; i++)
		free(all[i].tensors);
	free(all);
}

/* The job's units. @ret: the caller's, saving_free_units, also after an error. */
static int saving_sort_units(const struct job *job, struct saving_unit **ret, size_t *ret_n)
{
	*ret_n = 0;
	*ret = calloc((size_t)job->n_units + 1, sizeof(**ret));
	for (uint32_t i = 0; *ret && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped &&
		    saving_sort_tensors(&(*ret)[(*ret_n)++], job->units[i]) < 0)
			return -ENOMEM;
	if (!*ret)
		return -ENOMEM;
	qsort(*ret, *ret_n, sizeof(**ret), saving_compare_units);
	return 0;
}

/* In the order in which they are written (save_write), so that what was copied for the writing thread
 * is soon read. */
static int saving_list_units(struct saving *s)
{
	struct saving_unit *all;
	size_t n;

	if (saving_sort_units(s->job, &all, &n) < 0)
		fault_errno(&s->f, -ENOMEM, "listing a job's tensors");
	for (size_t size = sizeof(float); !s->f.code && size; size /= 2)
		for (size_t i = 0; i < n; i++)
			for (uint32_t t = 0; !s->f.code && t < all[i].u->rec->n_tensors; t++)
				saving_list_tensor(s, all[i].u, all[i].tensors[t], size);
	saving_free_units(all, n);
	return s->f.code;
}

/* All buffers of member @index of the unit's group. */
static int saving_list_buffers_of(struct saving *s, const struct unit *u, uint32_t index)
{
	uint64_t at = bufcopy_at(s->buffers, u, index), offset = 0;
	const struct group *g = s->job->groups[u->rec->group];

	for (size_t i = 0; !s->f.code && i < u->rec->n_buffers; i++) {
		const state_buffer *b = u->rec->buffers[i];
		struct index_piece p = { .unit = u->rec->name,
					 .tensor = b->name,
					 .array = INDEX_BUFFER,
					 .type = (uint8_t)saving_buffer_type(b->dtype),
					 .rank = g->rec->ranks[index],
					 .dims = (uint32_t)b->n_shape,
					 .shape = b->shape,
					 .source = at + offset };

		p.elements = unit_buffer_bytes(b) / tensor_type_bytes(saving_buffer_type(b->dtype));
		offset = unit_buffer_next(u->rec, i, offset);
		saving_note(s, &p);
	}
	return s->f.code;
}

/* As they were at the commit: the trainers may write to them just now. */
static int saving_list_buffers(struct saving *s)
{
	const struct job *job = s->job;

	if (!bufcopy_has_buffers(job))
		return 0;
	s->buffers = bufcopy_take(job);
	if (!s->buffers)
		return fault_set(
			&s->f, FAULT_EXHAUSTED, NULL,
			"job '%s' has no memory for a copy of its units' buffers: raise its "
			"quota",
			job->rec->name);
	s->as_left = bufcopy_is_as_left(s->buffers);
	for (uint32_t i = 0; i < job->n_units; i++)
		for (uint32_t k = 0; job->units[i]->buffers && !job->units[i]->rec->dropped &&
				     k < group_size(job->groups[job->units[i]->rec->group]);
		     k++)
			if (saving_list_buffers_of(s, job->units[i], k))
				return s->f.code;
	return 0;
}

static int saving_list_blob(struct saving *s, uint32_t rank, const state_blob *b)
{
	uint64_t shape[1] = { b->data.len };
	struct index_piece p = { .unit = (char *)(uintptr_t) "",
				 .tensor = (char *)(uintptr_t) "",
				 .array = INDEX_BLOB,
				 .type = TENSOR_UINT8,
				 .rank = rank,
				 .dims = 1,
				 .shape = shape,
				 .elements = b->data.len,
				 .source = s->blob_bytes };

	memcpy(s->blobs + s->blob_bytes, b->data.data, b->data.len);
	s->blob_bytes += b->data.len;
	return saving_note(s, &p);
}

static int saving_list_blobs(struct saving *s)
{
	const state_job *rec = s->job->rec;
	uint64_t bytes = 0;

	for (uint32_t r = 0; r < rec->world_size; r++)
		bytes += state_job_blob(rec, r) ? state_job_blob(rec, r)->data.len : 0;
	if (!bytes)
		return 0;
	if (quota_charge(&s->job->quota, MEM_CONTROL, bytes))
		return fault_set(
			&s->f, FAULT_EXHAUSTED, NULL,
			"job '%s' has no memory for a copy of its blobs, %llu bytes: raise "
			"its quota",
			rec->name, (unsigned long long)bytes);
	s->blobs = malloc(bytes);
	if (!s->blobs) {
		quota_return(&s->job->quota, MEM_CONTROL, bytes);
		return fault_errno(&s->f, -ENOMEM, "copying a job's blobs");
	}
	for (uint32_t r = 0; !s->f.code && r < rec->world_size; r++)
		if (state_job_blob(rec, r) && state_job_blob(rec, r)->data.len)
			saving_list_blob(s, r, state_job_blob(rec, r));
	/* what was charged is what is returned, also if the list is not complete */
	s->blob_bytes = bytes;
	return s->f.code;
}

static int saving_check_unit(const struct unit *u, struct fault *f)
{
	const state_unit *rec = u->rec;

	if (!rec->initialised || u->torn)
		return fault_set(
			f, FAULT_STATE, NULL,
			"unit '%.100s' is not initialised: its parameters are undefined, so "
			"there is nothing to save",
			rec->name);
	for (size_t i = 0; i < rec->n_tensors; i++)
		if (rec->tensors[i]->n_strides)
			return fault_set(
				f, FAULT_UNIMPLEMENTED, NULL,
				"tensor '%.100s' of unit '%.100s' has strides; checkpoints "
				"hold only tensors whose dimensions are in order",
				rec->tensors[i]->name, rec->name);
	return 0;
}

static int saving_list(struct saving *s)
{
	struct job *job = s->job;

	s->step = job->rec->step;
	if (index_init(&s->x, job->rec->name, s->step, job->rec->world_size, &s->f))
		return s->f.code;
	for (uint32_t i = 0; !s->f.code && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped)
			saving_check_unit(job->units[i], &s->f);
	if (!s->f.code && saving_list_units(s) == 0 && !s->draft.n)
		fault_set(&s->f, FAULT_STATE, NULL,
			  "job '%s' has no units: there is nothing to save", job->rec->name);
	if (s->f.code || saving_list_buffers(s))
		return s->f.code;
	return saving_list_blobs(s);
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

static int saving_start(struct saving *s)
{
	struct job *job = s->job;
	int r;

	s->g = generation_new(job, job->node->loopq, saving_on_changed);
	s->chunk = malloc(SAVE_CHUNK_BYTES);
	if (!s->g || !s->chunk)
		return fault_errno(&s->f, -ENOMEM, "beginning a checkpoint");
	if (saving_list(s))
		return s->f.code;
	if (generation_open(s->g) < 0)
		return fault_errno(&s->f, -ENOMEM, "beginning a checkpoint");
	r = saving_start_thread(&s->thread, saving_main, s);
	if (r)
		return fault_errno(&s->f, r, "starting a thread for a checkpoint");
	s->running = true;
	state_move(saving_states, &s->state, SAVING_WRITING);
	job->checkpoints.step = s->step;
	job->checkpoints.us = clock_now_us();
	return 0;
}

/* Within the reader's hold. */
static void saving_on_granted(struct reader *r, const struct fault *f)
{
	struct saving *s = r->userdata;
	struct fault unheld = FAULT_NULL;

	if (f)
		s->f = *f;
	else if (saving_start(s))
		s->g = generation_end(s->g);
	if (!f)
		CHECK(reader_release(r, &unheld) == 0);
	/* saving_tick ends one that could not begin: the caller of this goes through the readers */
}

static int saving_check(const struct job *job, const struct saving_options *o, struct fault *f)
{
	const char *roots = job->node->checkpoint_roots, *at;
	size_t n;

	if (place_find(roots ? roots : "", o->path, &at, &n, f))
		return f->code;
	if (job->life.resize)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is being resized: wait for the end of that",
				 job->rec->name);
	if (job->generation || saving_is_busy(job))
		return fault_set(
			f, FAULT_STATE, NULL,
			"a checkpoint of job '%s' is being made, in '%.200s': wait for its "
			"end (shardctl status shows how far it is)",
			job->rec->name,
			job->checkpoints.saving ? job->checkpoints.saving->path : "?");
	return 0;
}

static struct saving *saving_new(struct job *job, const struct saving_options *o)
{
	struct saving *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	s->job = job;
	s->o.bytes_per_s = o->bytes_per_s;
	s->keep = o->keep;
	s->uid = (uid_t)job->rec->uid;
	s->gid = (gid_t)job->rec->gid;
	s->path = strdup(o->path);
	s->roots = strdup(job->node->checkpoint_roots);
	if (s->path && s->roots)
		return s;
	saving_free(s);
	return NULL;
}

int saving_begin(struct job *job, struct proc *proc, const struct saving_options *o, saving_cb done,
		 void *userdata, struct fault *f)
{
	struct saving *s;

	if (job_check_here(job, "saving a checkpoint", f) || saving_check(job, o, f))
		return f->code;
	saving_tick(job); /* one that failed has told its caller */
	s = saving_new(job, o);
	if (!s || reader_new(job, proc, 0, &s->reader) < 0) {
		if (s)
			saving_free(s);
		return fault_errno(f, -ENOMEM, "beginning a checkpoint");
	}
	saving_forget(job);
	job->checkpoints.saving = s;
	s->done = done;
	s->userdata = userdata;
	s->reader->may = bufcopy_is_ready;
	bufcopy_retry(job);
	if (reader_hold(s->reader, 0, o->deadline_us, saving_on_granted, s, f))
		saving_forget(job);
	return f->code;
}

void saving_cancel(struct job *job)
{
	if (job->checkpoints.saving)
		atomic_store(&job->checkpoints.saving->p.cancel, true);
}

void saving_tick(struct job *job)
{
	struct saving *s = job->checkpoints.saving;

	generation_tick(job);
	if (s && s->g && generation_lost(s->g))
		saving_cancel(job);
	if (!s || !s->reader || s->reader->state != READER_IDLE)
		return;
	s->reader = reader_free(s->reader);
	if (s->state == SAVING_WAITING)
		saving_finish(s);
}

void saving_leave(struct job *job, void *userdata)
{
	struct saving *s = job->checkpoints.saving;

	if (!s || !s->done || s->userdata != userdata || s->state != SAVING_WAITING ||
	    s->reader->state != READER_WAITING)
		return;
	reader_give_up(s->reader);
	fault_set(&s->f, FAULT_CANCELLED, NULL, "the caller has given up before it began");
}
