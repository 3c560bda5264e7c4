/* The part that one node has in a checkpoint of a job with ranks on several. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "crc32c.h"
#include "checkpoint/parts.h"
#include "checkpoint/place.h"
#include "checkpoint/spool.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "job/restore.h"
#include "job/saving_impl.h"
#include "job/span.h"

int saving_part_ask(struct saving *s, const struct saving_options *o)
{
	struct job *job = s->job;

	s->part.stage = SAVING_PART_ASKED;
	if (!job->jobs->ops.across.save)
		return fault_set(&s->f, FAULT_UNIMPLEMENTED, NULL,
				 "job '%s' has ranks on several nodes, and this daemon is of none",
				 job->rec->name);
	return job->jobs->ops.across.save(job, o, &s->f);
}

bool saving_part_is_asked(const struct job *job)
{
	const struct saving *s = job->checkpoints.saving;

	return s && s->part.stage == SAVING_PART_ASKED && s->state == SAVING_WAITING;
}

/* ------------------------------------------------------------------------------ answers */

static void saving_part_say(struct saving *s, const struct saving_answer *a)
{
	s->part.stage = SAVING_PART_IDLE;
	if (s->part.answered)
		s->part.answered(s->job, a, s->part.userdata);
}

/* Of the phase that is over: s->f says how. */
static void saving_part_answer(struct saving *s)
{
	const struct fault f = s->f;

	saving_part_say(s, &(struct saving_answer){
				   .f = f.code ? &f : NULL,
				   .step = s->step,
				   .bytes = s->part.all_bytes ? s->part.all_bytes : s->bytes,
				   .tail = s->part.tail,
				   .crc = s->part.crc,
			   });
}

/* -------------------------------------------------------------------------- its end */

static void saving_part_on_ended(struct work *w);
static void *saving_part_main(void *arg);

/* Return: whether the thread runs. */
static bool saving_part_run(struct saving *s, enum saving_part_stage stage)
{
	int r;

	s->part.stage = (uint8_t)stage; /* the thread reads it */
	r = saving_start_thread(&s->thread, saving_part_main, s);
	s->running = r == 0;
	if (r)
		fault_errno(&s->f, r, "starting a thread for a checkpoint");
	return s->running;
}

static void saving_part_begin_phase(struct saving *s, enum saving_part_stage stage)
{
	CHECK(s->part.stage == SAVING_PART_IDLE && !s->running);
	if (s->f.code || !saving_part_run(s, stage))
		saving_part_answer(s);
}

/* Of a replica: the thread has written it, or not. */
static void saving_part_keep(struct saving *s)
{
	if (!s->replica)
		return;
	if (!s->f.code && s->replica->job && replica_is_whole(s->replica, &s->f) == 0) {
		s->part.tail = s->replica->bytes[REPLICA_TAIL];
		s->bytes = s->replica->bytes[REPLICA_TENSORS];
	} else {
		replica_drop(s->replica);
	}
	s->replica = replica_unref(s->replica);
}

/* Nothing runs any more. */
static void saving_part_over(struct saving *s)
{
	if (s->f.code && s->part.new.fd >= 0 &&
	    s->part.stage != SAVING_PART_DROP &&saving_part_run(s, SAVING_PART_DROP))
		return;
	saving_part_keep(s);
	s->part.fd = fd_close(s->part.fd);
	s->part.new.fd = fd_close(s->part.new.fd);
	s->part.dir = fd_close(s->part.dir);
	if (s->g)
		s->copied = generation_copied(s->g);
	s->g = generation_end(s->g);
	if (s->part.all_bytes)
		s->bytes = s->part.all_bytes;
	saving_finish(s);
	job_settle(s->job);
}

void saving_part_end(struct saving *s, uint64_t bytes, const struct fault *f)
{
	CHECK(s->part.stage);
	s->part.answered = NULL;
	s->part.all_bytes = bytes;
	if (f)
		s->part.why = *f;
	if (s->reader && s->reader->state == READER_WAITING)
		reader_give_up(s->reader);
	if (s->running || s->part.posted) {
		atomic_store(&s->p.cancel, true);
		return;
	}
	if (f)
		s->f = *f;
	saving_part_over(s);
}

void saving_part_refuse(struct job *job, const struct fault *f)
{
	if (saving_part_is_asked(job))
		saving_part_end(job->checkpoints.saving, 0, f);
}

uint64_t saving_part_written(const struct saving *s)
{
	return atomic_load(&s->p.bytes);
}

static void saving_part_on_ended(struct work *w)
{
	struct saving *s = CONTAINER_OF(w, struct saving, ended);
	bool wrote = s->part.stage == SAVING_PART_WRITE;

	saving_join(s);
	if (wrote) {
		s->copied = generation_copied(s->g);
		s->g = generation_end(s->g);
		saving_drop(s);
		saving_part_keep(s);
	}
	if (s->prune.code)
		log_warn("job", "old checkpoints not removed job=%s path=%s why=\"%s\"",
			 s->job->label, s->path, s->prune.text);
	s->prune = FAULT_NULL;
	if (s->part.answered) {
		saving_part_answer(s);
		return;
	}
	if (s->part.why.code)
		s->f = s->part.why;
	saving_part_over(s);
}

void saving_part_tick(struct saving *s)
{
	bool busy = s->state == SAVING_WAITING || s->state == SAVING_WRITING;

	if (s->reader && s->reader->state == READER_IDLE)
		s->reader = reader_free(s->reader);
	if (!busy || s->running || s->part.posted || !atomic_load(&s->p.cancel) || s->f.code)
		return;
	if (s->g && generation_lost(s->g))
		saving_lost(s, generation_lost(s->g), &s->f);
	else
		fault_set(&s->f, FAULT_CANCELLED, NULL, "the checkpoint was cancelled");
	if (s->part.answered)
		saving_part_answer(s);
	else if (!s->memory && s->job->jobs->ops.across.give_up)
		s->job->jobs->ops.across.give_up(s->job, false);
}

/* -------------------------------------------------------------------------- its begin */

/* A generation is open at most, of a replica that has ended for the others, perhaps. */
static int saving_part_check_generation(const struct job *job, struct fault *f)
{
	if (!job->generation && !saving_is_replicating(job))
		return 0;
	return fault_set(f, FAULT_ABORTED, NULL,
			 "a replica of job '%s' is being made: wait for its end", job->rec->name);
}

/* Into memory. Return: 0 or a fault code. */
static int saving_part_check_memory(const struct job *job, struct fault *f)
{
	if (!saving_is_busy(job) && !job->life.resize)
		return saving_part_check_generation(job, f);
	return fault_set(f, FAULT_STATE, NULL,
			 "a checkpoint or a replica of job '%s' is being made, or it is being "
			 "resized: wait for its end",
			 job->rec->name);
}

/* Nobody here has asked for it. Return: NULL: @f is filled. */
static struct saving *saving_part_new(struct job *job, const struct saving_options *o,
				      struct fault *f)
{
	struct saving *s;

	if (o->memory ? saving_part_check_memory(job, f) : saving_check(job, o, f))
		return NULL;
	s = saving_new(job, o);
	if (!s) {
		fault_errno(f, -ENOMEM, "beginning a checkpoint");
		return NULL;
	}
	if (o->memory) {
		saving_forget_memory(job);
		job->checkpoints.memory = s;
	} else {
		saving_forget(job);
		job->checkpoints.saving = s;
	}
	return s;
}

struct saving *saving_part_begin(struct job *job, const struct saving_options *o, unsigned self,
				 unsigned parts, saving_part_cb answered, void *userdata,
				 struct fault *f)
{
	struct saving *s = job->checkpoints.saving;

	if (!o->memory && saving_part_check_generation(job, f))
		return NULL;
	if (o->memory || !saving_part_is_asked(job))
		s = saving_part_new(job, o, f);
	if (!s)
		return NULL;
	s->part.stage = SAVING_PART_IDLE;
	s->part.self = self;
	s->part.parts = parts;
	s->part.answered = answered;
	s->part.userdata = userdata;
	return s;
}

/* ------------------------------------------------------------------------------ freeze */

/* Can it be of this commit? */
static bool saving_part_may_freeze(struct job *job, const struct saving_part *p)
{
	const state_job *rec = job->rec;

	if (p->now ? p->has_after && rec->step != p->after : p->has_after && rec->step <= p->after)
		return false;
	return bufcopy_is_ready(job);
}

/* Of the reader. */
static bool saving_part_may(struct job *job)
{
	return saving_part_may_freeze(job, &job->checkpoints.saving->part);
}

static bool saving_part_may_memory(struct job *job)
{
	return saving_part_may_freeze(job, &job->checkpoints.memory->part);
}

/* Not from inside the reader's callback: it may be asked to freeze again. */
static void saving_part_on_granted(struct work *w)
{
	struct saving *s = CONTAINER_OF(w, struct saving, part.granted);

	s->part.posted = false;
	if (s->part.answered) {
		saving_part_answer(s);
		return;
	}
	if (s->part.why.code)
		s->f = s->part.why;
	saving_part_over(s);
}

/* Of a replica: the units as they are at this commit. */
static int saving_part_note_specs(struct saving *s)
{
	if (!s->memory)
		return 0;
	free(s->specs);
	s->specs = restore_pack_specs(s->job, &s->specs_bytes);
	return s->specs ? 0 : fault_errno(&s->f, -ENOMEM, "making a replica");
}

void saving_part_granted(struct saving *s, const struct fault *f)
{
	if (s->part.stage != SAVING_PART_FREEZE || s->part.posted)
		return;
	if (f)
		s->f = *f;
	else if (saving_freeze(s) || saving_part_note_specs(s))
		s->g = generation_end(s->g);
	s->part.posted = true;
	loopq_post(s->job->node->loopq, &s->part.granted, saving_part_on_granted);
}

/* What was frozen before is not wanted. */
static void saving_part_thaw(struct saving *s)
{
	s->g = generation_end(s->g);
	saving_drop(s);
	s->bytes = 0;
}

/* Nobody is there who could change them: the copy of their buffers is all that it may wait for. */
static bool saving_part_is_still(const struct job *job)
{
	char waits[256];

	readers_wait_for(job, waits, sizeof(waits));
	return !job->present && !*waits;
}

void saving_part_freeze(struct saving *s, const struct saving_freeze_how *how)
{
	CHECK(s->part.stage == SAVING_PART_IDLE && s->state == SAVING_WAITING && !s->running);
	if (s->reader && s->reader->state == READER_WAITING)
		reader_give_up(s->reader);
	s->reader = reader_free(s->reader);
	saving_part_thaw(s);
	s->part.now = how->now;
	s->part.has_after = how->has_after;
	s->part.after = how->after;
	s->part.stage = SAVING_PART_FREEZE;
	if (s->f.code || saving_wait(s, NULL, how->deadline_us,
				     s->memory ? saving_part_may_memory : saving_part_may)) {
		saving_part_answer(s);
		return;
	}
	if (s->part.stage != SAVING_PART_FREEZE || s->part.posted || !how->now ||
	    saving_part_is_still(s->job))
		return;
	reader_give_up(s->reader);
	saving_part_say(s, &(struct saving_answer){ .later = true });
}

/* A leader that has heard that this node has nothing frozen may go on all the same. */
static bool saving_part_has_frozen(struct saving *s)
{
	if (!s->g && !s->f.code)
		fault_set(&s->f, FAULT_STATE, NULL,
			  "the node that leads job '%s' has gone on without this node, which has "
			  "nothing frozen to write",
			  s->job->rec->name);
	return !s->f.code;
}

/* ------------------------------------------------------------------------- the folder */

void saving_part_make(struct saving *s, uint64_t owner, uint64_t nonce)
{
	if (saving_part_has_frozen(s))
		saving_is_written(s);
	s->part.begins = true;
	s->part.owner = owner;
	s->part.nonce = nonce;
	saving_part_begin_phase(s, SAVING_PART_SEE);
}

const char *saving_part_name(const struct saving *s)
{
	return s->part.name;
}

void saving_part_see(struct saving *s, const char *name, uint64_t nonce)
{
	if (saving_part_has_frozen(s))
		saving_is_written(s);
	snprintf(s->part.name, sizeof(s->part.name), "%s", name);
	s->part.nonce = nonce;
	saving_part_begin_phase(s, SAVING_PART_SEE);
}

/* The thread. */
static void saving_part_find(struct saving *s)
{
	struct saving_part *p = &s->part;

	p->dir = place_open(s->roots, s->path, &s->f);
	if (p->dir < 0)
		return;
	if (!p->begins) {
		p->fd = parts_see(p->dir, p->name, p->nonce, &s->f);
		return;
	}
	if (parts_begin(p->dir, s->step, p->owner, p->nonce, &p->new, &s->f) == 0)
		snprintf(p->name, sizeof(p->name), "%s", p->new.name);
}

/* ---------------------------------------------------------------------------- the files */

/* A replica: room for it. */
static void saving_part_make_replica(struct saving *s)
{
	struct job *job = s->job;
	const struct replica_id id = { s->step, s->layout, s->part.self, s->part.parts };
	struct replica *r;

	replica_tidy(job);
	if (replica_new(job, &id, s->bytes + s->specs_bytes, &r, &s->f) == 0) {
		r->epoch = s->epoch;
		s->replica = replica_ref(r);
	}
	saving_is_written(s);
}

void saving_part_write(struct saving *s)
{
	if (saving_part_has_frozen(s) && s->memory)
		saving_part_make_replica(s);
	saving_part_begin_phase(s, SAVING_PART_WRITE);
}

/* Of a replica: its two files. */
static void saving_part_write_memory(struct saving *s)
{
	struct replica *r = s->replica;
	_cleanup_(freep) char *text = NULL;
	struct spool *tail = NULL;
	uint64_t index_bytes;

	if (save_write_memory(r->fds[REPLICA_TENSORS], &s->x, &s->o, saving_data, s, &s->p,
			      &s->f) ||
	    index_encode(&s->x, &text, &s->f) ||
	    spool_open_memory(r->fds[REPLICA_TAIL], "the tail of a replica", &tail, &s->f))
		return;
	index_bytes = strlen(text);
	if (spool_add(tail, text, index_bytes, &s->f) == 0 &&
	    spool_add(tail, s->specs, s->specs_bytes, &s->f) == 0)
		spool_add(tail, &index_bytes, sizeof(index_bytes), &s->f);
	spool_free(tail);
	s->part.crc = crc32c_add(0, text, index_bytes);
}

static void saving_part_write_files(struct saving *s)
{
	int fd = s->part.begins ? s->part.new.fd : s->part.fd;
	char name[64];

	snprintf(name, sizeof(name), PARTS_FILE, s->part.self);
	if (saving_make_index(s, name) == 0 && s->memory)
		saving_part_write_memory(s);
	else if (!s->f.code)
		parts_write(fd, &s->x, s->part.self, &s->o, saving_data, s, &s->p, &s->part.crc,
			    &s->f);
	if (s->f.code == FAULT_CANCELLED && generation_lost(s->g)) {
		int why = generation_lost(s->g);

		s->f = FAULT_NULL; /* saving_tick has cancelled it */
		saving_lost(s, why, &s->f);
	}
	index_deinit(&s->x); /* which takes long, if it is */
}

void saving_part_complete(struct saving *s, const uint32_t *crcs)
{
	s->part.crcs = malloc(s->part.parts * sizeof(*crcs));
	if (!s->part.crcs)
		fault_errno(&s->f, -ENOMEM, "completing a checkpoint");
	else
		memcpy(s->part.crcs, crcs, s->part.parts * sizeof(*crcs));
	saving_part_begin_phase(s, SAVING_PART_COMPLETE);
}

static void saving_part_join(struct saving *s)
{
	const state_job *rec = s->job->rec;
	struct index x = INDEX_NULL;
	size_t removed, left;

	if (index_init(&x, rec->name, s->step, rec->world_size, &s->f) == 0 &&
	    parts_complete(&s->part.new, &x, s->part.crcs, s->part.parts, &s->part.all_bytes,
			   &s->f) == 0 &&
	    s->keep)
		folder_prune(s->part.dir, s->keep, &removed, &left, &s->prune);
	index_deinit(&x);
}

static void *saving_part_main(void *arg)
{
	struct saving *s = arg;
	struct fault dropped = FAULT_NULL;

	if (s->part.stage == SAVING_PART_DROP) {
		if (place_become(s->uid, s->gid, &dropped) == 0)
			folder_abandon(&s->part.new);
	} else if (s->memory || place_become(s->uid, s->gid, &s->f) == 0) {
		if (s->part.stage == SAVING_PART_SEE)
			saving_part_find(s);
		else if (s->part.stage == SAVING_PART_WRITE)
			saving_part_write_files(s);
		else
			saving_part_join(s);
	}
	loopq_post(s->job->node->loopq, &s->ended, saving_part_on_ended);
	return NULL;
}
