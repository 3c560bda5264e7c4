#include "job/loading.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/folder.h"
#include "checkpoint/place.h"
#include "checkpoint/save.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "core/loopq.h"
#include "job/bufcopy.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/extents.h"
#include "job/kept.h"
#include "job/position.h"
#include "job/saving.h"
#include "job/upload.h"
#include "unit/runs.h"

/* Where one piece of the index goes to. */
struct loading_place {
	bool known;
	char *at;          /* in host memory: of a shard, or @blob; else NULL */
	uint64_t upload;   /* else: in the upload, one replica after the other */
	unsigned replicas; /* of them */
	uint8_t *blob;     /* owned: of a rank, until it is the job's */
	struct unit *unit; /* parameters: of this unit and tensor */
	uint32_t tensor;
	bool left_out; /* a buffer of a rank that the job does not have: not read */
};

/* A rank that was not there when the job was saved has the buffers of the first one that was. */
struct loading_copy {
	const char *from;
	char *to;
	uint64_t bytes;
};

enum loading_state {
	LOADING_OPENING,
	LOADING_MEMORY,   /* waits for that of the kept copy */
	LOADING_DRAINING, /* until nobody reads what the units had */
	LOADING_READING,
};

struct loading {
	struct job *job;
	uint8_t state;        /* enum loading_state */
	struct waiter waiter; /* MEMORY, DRAINING */
	char *path, *roots;   /* owned */
	uid_t uid;
	gid_t gid;
	bool has_step;
	uint64_t step;
	int fd; /* owned: of the checkpoint */
	struct index x;
	struct loading_place *places; /* owned: by piece */
	struct upload *upload;        /* owned: of what is not in host memory */
	uint32_t n_units;             /* that are loaded: others may be registered meanwhile */
	uint64_t charged;             /* to the job's quota, for blobs */
	struct loading_copy *copies;  /* owned */
	size_t n_copies;
	uint64_t bytes; /* that are read, of all of them */
	struct save_progress p;
	struct loading_report report;
	struct fault f;
	pthread_t thread;
	struct work ended;
	loading_cb done;
	void *userdata;
};

static void loading_free(struct loading *l)
{
	for (size_t i = 0; l->places && i < l->x.n_pieces; i++)
		free(l->places[i].blob);
	if (l->charged)
		quota_return(&l->job->quota, MEM_CONTROL, l->charged);
	free(l->places);
	upload_free(l->upload);
	free(l->copies);
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
	room = upload_room(l->upload);
	return loading_check_upload(l, upload_status(l->upload), f) ? NULL : room;
}

static int loading_put(void *arg, size_t piece, uint64_t offset, size_t bytes, struct fault *f)
{
	struct loading *l = arg;
	const struct loading_place *at = &l->places[piece];

	(void)f;
	if (!at->at)
		upload_put(l->upload, at->upload + offset, bytes, at->replicas,
			   index_piece_bytes(&l->x.pieces[piece]));
	return 0;
}

static bool loading_takes(void *arg, size_t piece)
{
	const struct loading *l = arg;

	return !l->places[piece].left_out;
}

static void *loading_read_main(void *arg)
{
	struct loading *l = arg;
	const struct save_sink sink = {
		.room = loading_room, .put = loading_put, .takes = loading_takes, .arg = l
	};

	/* the files are opened again, by name */
	if (place_become(l->uid, l->gid, &l->f) == 0)
		save_load(l->fd, &l->x, &sink, &l->p, &l->f);
	if (l->upload) {
		int status = upload_settle(l->upload);

		if (!l->f.code)
			loading_check_upload(l, status, &l->f);
	}
	if (l->f.code)
		place_tell(&l->f, l->path, l->step);
	for (size_t i = 0; !l->f.code && i < l->n_copies; i++)
		memcpy(l->copies[i].to, l->copies[i].from, l->copies[i].bytes);
	loopq_post(l->job->node->loopq, &l->ended, loading_on_read);
	return NULL;
}

/* ----------------------------------------------------------------------------- what is there */

static int loading_compare(const struct index_piece *p, const char *unit, const char *tensor,
			   enum index_array array)
{
	int r = strcmp(p->unit, unit);

	r = r ? r : strcmp(p->tensor, tensor);
	return r ? r : (p->array > array) - (p->array < array);
}

/* The first piece of an array; the index is sorted. Return: n_pieces: there is none. */
static size_t loading_find(const struct index *x, const char *unit, const char *tensor,
			   enum index_array array)
{
	size_t lo = 0, hi = x->n_pieces;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (loading_compare(&x->pieces[mid], unit, tensor, array) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (lo < x->n_pieces && loading_compare(&x->pieces[lo], unit, tensor, array) == 0)
		return lo;
	return x->n_pieces;
}

/* What the job needs: @name of unit @u. */
static int loading_check_piece(struct loading *l, const struct unit *u, const char *name,
			       enum tensor_type type, const uint64_t *shape, size_t dims,
			       const struct index_piece *p)
{
	if (p->type != (uint8_t)type)
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "%s of tensor '%.100s' of unit '%.100s' is %s in the checkpoint "
				 "and %s in the job",
				 index_array_name((enum index_array)p->array), name, u->rec->name,
				 tensor_type_name((enum tensor_type)p->type),
				 tensor_type_name(type));
	if (p->dims != dims || (dims && memcmp(p->shape, shape, dims * sizeof(*p->shape)) != 0))
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "%s '%.100s' of unit '%.100s' has another shape in the "
				 "checkpoint than in the job",
				 p->array == INDEX_BUFFER ? "buffer" : "tensor", name,
				 u->rec->name);
	return 0;
}

/* Does the daemon's own address of the unit's one part do? */
static bool loading_is_in_place(const struct loading *l, const struct unit *u)
{
	return extents_in_place(l->job->node) && u->n_parts == 1;
}

/* What part @p has of elements [begin, end) of a tensor. */
static int loading_upload_run(struct loading *l, const struct unit *u, struct unit_part *p,
			      uint32_t t, unsigned array, uint64_t begin, uint64_t end)
{
	size_t size = dtype_size(unit_state_dtype(u->rec, array));
	struct unit_run run;
	uint64_t lo, hi;

	if (!unit_part_run(u, p, t, &run))
		return 0;
	lo = begin > run.first ? begin : run.first;
	hi = end < run.first + run.n ? end : run.first + run.n;
	if (lo >= hi)
		return 0;
	return upload_add(l->upload, p->device,
			  unit_state_at(u->rec, unit_state(p, array), array,
					run.at + lo - run.first),
			  (hi - lo) * size);
}

static int loading_need_upload(struct loading *l)
{
	if (!l->upload)
		l->upload = upload_new(l->job, SAVE_CHUNK_BYTES);
	return l->upload ? 0 : -ENOMEM;
}

/* All replicas, one after the other. */
static int loading_upload_piece(struct loading *l, const struct unit *u, uint32_t t, unsigned array,
				const struct index_piece *p, struct loading_place *ret)
{
	int r = loading_need_upload(l);

	ret->upload = l->upload ? upload_bytes(l->upload) : 0;
	ret->replicas = u->n_parts / u->spread;
	for (unsigned d = 0; r == 0 && d < u->n_parts; d++)
		r = loading_upload_run(l, u, &u->parts[d], t, array, p->begin,
				       p->begin + p->elements);
	return r ? fault_errno(&l->f, r, "loading a checkpoint") : 0;
}

static int loading_place_piece(struct loading *l, struct unit *u, uint32_t t, unsigned array,
			       size_t i)
{
	const state_tensor *rec = u->rec->tensors[t];
	const struct index_piece *p = &l->x.pieces[i];
	struct loading_place *place = &l->places[i];

	if (loading_check_piece(l, u, rec->name, saving_type(unit_state_dtype(u->rec, array)),
				rec->shape, rec->n_shape, p))
		return l->f.code;
	place->known = true;
	place->unit = array ? NULL : u;
	place->tensor = t;
	if (!loading_is_in_place(l, u))
		return loading_upload_piece(l, u, t, array, p, place);
	place->at = unit_state_at(u->rec, unit_state(&u->parts[0], array), array,
				  unit_tensor_full(u, &u->tensors[t]) + p->begin);
	return 0;
}

/* All pieces of one array. */
static int loading_place_array(struct loading *l, struct unit *u, uint32_t t, unsigned array)
{
	const state_tensor *rec = u->rec->tensors[t];
	enum index_array kind = saving_array(u->rec, array);
	size_t i = loading_find(&l->x, u->rec->name, rec->name, kind);

	if (i == l->x.n_pieces)
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "the checkpoint has no %s of tensor '%.100s' of unit '%.100s', "
				 "which the job needs",
				 index_array_name(kind), rec->name, u->rec->name);
	for (; !l->f.code && i < l->x.n_pieces &&
	       loading_compare(&l->x.pieces[i], u->rec->name, rec->name, kind) == 0;
	     i++)
		loading_place_piece(l, u, t, array, i);
	return l->f.code;
}

static int loading_place_unit(struct loading *l, struct unit *u)
{
	for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
		unsigned arrays = u->tensors[t].frozen ? 0 : unit_state_arrays(u->rec);

		if (u->tensors[t].alias)
			continue;
		if (u->rec->tensors[t]->n_strides)
			return fault_set(&l->f, FAULT_UNIMPLEMENTED, NULL,
					 "tensor '%.100s' of unit '%.100s' has strides; "
					 "checkpoints hold only tensors whose dimensions are in "
					 "order",
					 u->rec->tensors[t]->name, u->rec->name);
		for (unsigned i = 0; i <= arrays; i++)
			if (loading_place_array(l, u, t, i))
				return l->f.code;
	}
	return 0;
}

/* ---------------------------------------------------------------------------- buffers */

static bool loading_has_buffers(const struct index *x)
{
	for (size_t i = 0; i < x->n_pieces; i++)
		if (x->pieces[i].array == INDEX_BUFFER)
			return true;
	return false;
}

static int loading_add_copy(struct loading *l, const struct loading_copy *copy)
{
	struct loading_copy *more = reallocarray(l->copies, l->n_copies + 1, sizeof(*l->copies));

	if (!more)
		return fault_errno(&l->f, -ENOMEM, "loading a checkpoint");
	l->copies = more;
	l->copies[l->n_copies++] = *copy;
	return 0;
}

/* The pieces of a buffer, which are in the order of ranks. */
struct loading_buffer {
	const struct unit *unit;
	size_t first, end;
	uint64_t offset; /* in each rank's memory */
};

/* Is piece @i what member @k gets? That of its rank; a rank that was not there when the job was saved gets
 * what the first one has. */
static bool loading_is_buffer_of(const struct loading *l, const struct loading_buffer *b, size_t i,
				 uint32_t k)
{
	uint32_t rank = l->job->groups[b->unit->rec->group]->rec->ranks[k];
	const struct index_piece *all = l->x.pieces;

	if (all[i].rank == rank)
		return true;
	if (all[i].rank != all[b->first].rank)
		return false;
	for (size_t n = b->first; n < b->end; n++)
		if (all[n].rank == rank)
			return false;
	return true;
}

/* One more place of a piece: @offset in the buffers at @r. */
static int loading_add_buffer(struct loading *l, const struct region *r, uint64_t offset,
			      uint64_t bytes, struct loading_place *place)
{
	char *to = (char *)region_addr(r) + offset;

	if (extents_in_place(l->job->node)) {
		if (place->at)
			return loading_add_copy(l, &(struct loading_copy){ place->at, to, bytes });
		place->at = to;
		return 0;
	}
	place->replicas++;
	if (loading_need_upload(l) < 0 || upload_add(l->upload, r->slab->device, to, bytes) < 0)
		return fault_errno(&l->f, -ENOMEM, "loading a checkpoint");
	return 0;
}

static int loading_place_buffer_piece(struct loading *l, const struct loading_buffer *b, size_t i)
{
	const struct index_piece *p = &l->x.pieces[i];
	struct loading_place *place = &l->places[i];
	uint64_t at = b->offset + p->begin * tensor_type_bytes((enum tensor_type)p->type);

	place->known = place->left_out = true;
	place->upload = l->upload ? upload_bytes(l->upload) : 0;
	for (uint32_t k = 0; k < group_size(l->job->groups[b->unit->rec->group]); k++) {
		if (!loading_is_buffer_of(l, b, i, k))
			continue;
		place->left_out = false;
		if (loading_add_buffer(l, &b->unit->buffers[k], at, index_piece_bytes(p), place))
			return l->f.code;
	}
	l->report.buffers_left_out += place->left_out;
	return 0;
}

/* One buffer of all ranks. @offset: in each one's memory. */
static int loading_place_buffer(struct loading *l, const struct unit *u, const state_buffer *rec,
				uint64_t offset)
{
	enum tensor_type type = saving_buffer_type(rec->dtype);
	size_t first = loading_find(&l->x, u->rec->name, rec->name, INDEX_BUFFER);
	struct loading_buffer b = { u, first, first, offset };

	if (first == l->x.n_pieces)
		return fault_set(
			&l->f, FAULT_STATE, NULL,
			"the checkpoint has no buffer '%.100s' of unit '%.100s', which the "
			"job needs",
			rec->name, u->rec->name);
	for (; b.end < l->x.n_pieces &&
	       loading_compare(&l->x.pieces[b.end], u->rec->name, rec->name, INDEX_BUFFER) == 0;
	     b.end++)
		if (loading_check_piece(l, u, rec->name, type, rec->shape, rec->n_shape,
					&l->x.pieces[b.end]))
			return l->f.code;
	for (size_t i = first; i < b.end; i++)
		if (loading_place_buffer_piece(l, &b, i))
			return l->f.code;
	return 0;
}

static int loading_place_buffers(struct loading *l, const struct unit *u)
{
	uint64_t offset = 0;

	if (!u->buffers)
		return 0;
	if (!loading_has_buffers(&l->x)) { /* as all of shardd's first checkpoints */
		l->report.buffers_missing += (uint32_t)u->rec->n_buffers;
		return 0;
	}
	for (size_t i = 0; !l->f.code && i < u->rec->n_buffers; i++) {
		loading_place_buffer(l, u, u->rec->buffers[i], offset);
		offset = unit_buffer_next(u->rec, i, offset);
	}
	return l->f.code;
}

/* ------------------------------------------------------------------------------- the rest */

static int loading_place_blob(struct loading *l, size_t i)
{
	const struct index_piece *p = &l->x.pieces[i];
	uint64_t bytes = index_piece_bytes(p);
	struct job *job = l->job;

	if (bytes > JOB_MAX_BLOB)
		return fault_set(&l->f, FAULT_STATE, NULL,
				 "the blob of rank %u has %llu bytes; the maximum is %u", p->rank,
				 (unsigned long long)bytes, JOB_MAX_BLOB);
	if (quota_charge(&job->quota, MEM_CONTROL, bytes))
		return fault_set(
			&l->f, FAULT_EXHAUSTED, NULL,
			"job '%s' has no memory for the blob of rank %u, %llu bytes: raise "
			"its quota",
			job->rec->name, p->rank, (unsigned long long)bytes);
	l->charged += bytes;
	l->places[i].blob = malloc(bytes ? bytes : 1);
	l->places[i].at = (char *)l->places[i].blob;
	l->places[i].known = true;
	l->report.left_out += p->rank >= job->rec->world_size;
	return l->places[i].blob ? 0 : fault_errno(&l->f, -ENOMEM, "loading a blob");
}

/* What nothing of the job has asked for. */
static int loading_place_rest(struct loading *l)
{
	for (size_t i = 0; !l->f.code && i < l->x.n_pieces; i++) {
		const struct index_piece *p = &l->x.pieces[i];

		if (l->places[i].known)
			continue;
		if (p->array == INDEX_BLOB)
			loading_place_blob(l, i);
		else
			fault_set(
				&l->f, FAULT_STATE, NULL,
				"the checkpoint has %s of tensor '%.100s' of unit '%.100s', which "
				"the job does not have: register the units and optimizers that "
				"were saved",
				index_array_name((enum index_array)p->array), p->tensor, p->unit);
	}
	return l->f.code;
}

static int loading_place_all(struct loading *l)
{
	struct job *job = l->job;

	l->places = calloc(l->x.n_pieces + 1, sizeof(*l->places));
	if (!l->places)
		return fault_errno(&l->f, -ENOMEM, "loading a checkpoint");
	l->n_units = job->n_units;
	for (uint32_t i = 0; !l->f.code && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped && loading_place_unit(l, job->units[i]) == 0)
			loading_place_buffers(l, job->units[i]);
	if (l->f.code || loading_place_rest(l))
		return l->f.code;
	for (size_t i = 0; i < l->x.n_pieces; i++)
		l->bytes += l->places[i].left_out ? 0 : index_piece_bytes(&l->x.pieces[i]);
	return 0;
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

/* Does anything of the job run, beside this? */
static bool loading_is_busy(const struct job *job)
{
	return job->running > 1 || job->step.state != JOB_STEP_NONE || job->step.committing ||
	       job->step.stepping || job->generation || saving_is_busy(job) ||
	       !list_empty(&job->readers.holds) || job->kept.run || kept_is_rolling_back(job) ||
	       job->life.resize;
}

static int loading_check(const struct job *job, struct fault *f)
{
	uint32_t units = 0;

	if (job->life.deleted)
		return fault_set(f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	if (loading_check_fresh(job, f))
		return f->code;
	if (loading_is_busy(job))
		return fault_set(f, FAULT_STATE, NULL,
				 "ops of job '%s' run, or a reader or a checkpoint uses its "
				 "parameters: wait for their end",
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
static void loading_empty(struct job *job)
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

/* All that can fail before anything changes. The job may have changed while this has waited. */
static enum res loading_prepare(struct loading *l)
{
	if (!l->f.code && atomic_load(&l->p.cancel) && !l->job->life.deleted)
		fault_set(&l->f, FAULT_CANCELLED, NULL, "reading the checkpoint was cancelled");
	if (l->f.code || loading_check(l->job, &l->f))
		return RES_FAILED;
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
		loading_empty(job);
		job->checkpoints.reads = true;
		l->state = LOADING_DRAINING;
		RES_TRY(loading_drain(l)); /* is not asked again */
		fallthrough;
	case LOADING_DRAINING:
		l->state = LOADING_READING;
		return loading_start_reading(l);
	case LOADING_READING:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void loading_go_on(struct loading *l)
{
	if (loading_tick(l) == RES_FAILED)
		loading_finish(l);
}

static void loading_on_resumed(struct waiter *w)
{
	loading_go_on(CONTAINER_OF(w, struct loading, waiter));
}

static void loading_on_opened(struct work *w)
{
	struct loading *l = CONTAINER_OF(w, struct loading, ended);

	pthread_join(l->thread, NULL);
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
	rec->saved = true;
	rec->saved_step = rec->step;
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

static void loading_on_read(struct work *w)
{
	struct loading *l = CONTAINER_OF(w, struct loading, ended);
	struct job *job = l->job;

	pthread_join(l->thread, NULL);
	l->report.step = l->x.step;
	l->report.world_size = l->x.world_size;
	l->report.bytes = atomic_load(&l->p.bytes);
	if (!l->f.code && job->life.deleted)
		fault_set(&l->f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	if (!l->f.code && loading_take_blobs(l) == 0) {
		loading_take(l);
		log_info("job",
			 "checkpoint loaded job=%s step=%llu path=%s bytes=%llu buffers_missing=%u",
			 job->label, (unsigned long long)job->rec->step, l->path,
			 (unsigned long long)l->report.bytes, l->report.buffers_missing);
		readers_committed(job);
		loading_end_epoch(job);
	}
	loading_finish(l);
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

int loading_begin(struct job *job, const struct loading_options *o, loading_cb done, void *userdata,
		  struct fault *f)
{
	const char *roots = job->node->checkpoint_roots, *at;
	struct loading *l;
	size_t n;
	int r;

	if (job_check_here(job, "loading a checkpoint", f))
		return f->code;
	if (job->checkpoints.loading)
		return fault_set(f, FAULT_STATE, NULL,
				 "a checkpoint is being loaded into job '%s' already",
				 job->rec->name);
	if (place_find(roots ? roots : "", o->path, &at, &n, f))
		return f->code;
	job->running++; /* it counts as one of the job's ops */
	if (loading_check(job, f)) {
		job->running--;
		return f->code;
	}
	l = loading_new(job, o);
	r = l ? saving_start_thread(&l->thread, loading_open_main, l) : -ENOMEM;
	if (r) {
		job->running--;
		if (l)
			loading_free(l);
		return fault_errno(f, r, "beginning to load a checkpoint");
	}
	l->done = done;
	l->userdata = userdata;
	job->checkpoints.loading = l;
	return 0;
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

static void loading_on_cancelled(struct work *w)
{
	loading_go_on(CONTAINER_OF(w, struct loading, ended));
}

void loading_cancel(struct job *job)
{
	struct loading *l = job->checkpoints.loading;

	if (!l)
		return;
	atomic_store(&l->p.cancel, true);
	if (l->state != LOADING_MEMORY || !waiter_on(&l->waiter))
		return;
	waiter_leave(&l->waiter);
	loopq_post(job->node->loopq, &l->ended, loading_on_cancelled);
}

enum res loading_let(struct job *job, enum job_change what)
{
	return job->checkpoints.reads ? RES_WAIT : kept_let(job, what);
}
