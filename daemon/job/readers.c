#include "job/readers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/state.h"
#include "job/base.h"
#include "job/generation.h"
#include "job/job_journal.h"
#include "job/job_types.h"
#include "publish/making.h"

void readers_init(struct readers *all)
{
	*all = (struct readers){ 0 };
	list_init(&all->all);
	list_init(&all->waiting);
	list_init(&all->holds);
	condition_init(&all->writers, "readers to release the parameters");
	list_init(&all->makings);
	list_init(&all->publications);
	list_init(&all->of_base);
}

static const struct state_row reader_states[] = {
	[READER_IDLE] = { "IDLE", STATE_TO(READER_WAITING) },
	[READER_WAITING] = { "WAITING", STATE_TO(READER_HOLDS) | STATE_TO(READER_IDLE) },
	[READER_HOLDS] = { "HOLDS", STATE_TO(READER_IDLE) },
};

const char *reader_state_name(enum reader_state s)
{
	return s < ARRAY_SIZE(reader_states) ? reader_states[s].name : "?";
}

void readers_rewrite(struct job *job)
{
	job->readers.rewritten = true;
	if (job->rec->saved)
		job_journal_mark(job, JOB_JOURNAL_HEAD);
	job->rec->saved = false; /* no checkpoint has that */
}

uint64_t readers_generation(const struct job *job)
{
	return job->readers.changes + job->n_units;
}

/* ------------------------------------------------------------ may it be read? */

/* To be stepped in this backward pass, or its copies are not equal. */
static const struct unit *readers_unit_to_change(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->step == UNIT_STEP_DUE ||
		    job->units[i]->shards == UNIT_SHARDS_MIXED)
			return job->units[i];
	return NULL;
}

/* Has anything changed since the last commit? */
static bool readers_is_changed(const struct job *job)
{
	return job->rec->uncommitted_steps || job->readers.rewritten || job->step.mid ||
	       job->step.state == JOB_STEP_APPLYING || job->step.stepping;
}

/* Is anything about to change, so that a hold would keep it waiting? */
static bool readers_is_changing(const struct job *job)
{
	return job->step.state == JOB_STEP_PREPARED || job->readers.writing || job->rec->rollback ||
	       !condition_is_idle(&job->readers.writers) || readers_unit_to_change(job);
}

bool readers_may_hold(const struct job *job)
{
	return job->rec->has_commit && !job->life.torn && !readers_is_changed(job) &&
	       !readers_is_changing(job);
}

void readers_wait_for(const struct job *job, char *buf, size_t bytes)
{
	buf[0] = '\0';
	if (job->life.torn)
		snprintf(buf, bytes, "job '%s', which is TORN, to be initialised and committed",
			 job->rec->name);
	else if (!job->rec->has_commit)
		snprintf(buf, bytes, "the first commit of job '%s'", job->rec->name);
	else if (!readers_may_hold(job))
		snprintf(buf, bytes, "the commit that follows step %llu of job '%s'",
			 (unsigned long long)job->rec->step, job->rec->name);
}

void reader_wait_for(const struct reader *r, char *buf, size_t bytes)
{
	readers_wait_for(r->job, buf, bytes);
	if (!*buf && r->may)
		snprintf(buf, bytes,
			 "the next commit of job '%s': buffers of its units are copied in it",
			 r->job->rec->name);
}

/* ------------------------------------------------------------------- readers */

static void readers_become(struct reader *r, enum reader_state state)
{
	list_unlink(&r->turn);
	state_move(reader_states, &r->state, (uint8_t)state);
	r->since_us = clock_now_us();
}

static void readers_answer(struct reader *r, const struct fault *f)
{
	reader_cb granted = r->granted;

	r->granted = NULL;
	granted(r, f);
}

static void readers_refuse(struct reader *r, enum fault_code code, const char *why)
{
	struct fault f = FAULT_NULL;

	readers_become(r, READER_IDLE);
	fault_set(&f, code, NULL, "%s", why);
	readers_answer(r, &f);
}

/* No reader holds any more, and nothing is copied: resume the waiters. */
static void readers_let_writers(struct job *job)
{
	if (!list_empty(&job->readers.holds) || generation_is_copying(job) || making_reads(job) ||
	    job->kept.run || job->checkpoints.reads || condition_is_idle(&job->readers.writers))
		return;
	condition_signal(&job->readers.writers);
}

int reader_new(struct job *job, struct proc *proc, uint64_t session, struct reader **ret)
{
	struct reader *r = calloc(1, sizeof(*r));

	if (!r)
		return -ENOMEM;
	r->job = job;
	r->proc = proc ? proc_ref(proc) : NULL;
	r->session = session;
	r->since_us = clock_now_us();
	list_init(&r->link);
	list_init(&r->turn);
	list_append(&job->readers.all, &r->link);
	*ret = r;
	return 0;
}

struct reader *reader_free(struct reader *r)
{
	struct job *job;

	if (!r)
		return NULL;
	job = r->job;
	if (r->state == READER_WAITING)
		readers_refuse(r, FAULT_CANCELLED, "the session has ended");
	list_unlink(&r->turn);
	list_unlink(&r->link);
	proc_unref(r->proc);
	free(r);
	if (job)
		readers_let_writers(job);
	return NULL;
}

static int readers_check_hold(const struct reader *r, struct fault *f)
{
	if (!r->job)
		return fault_set(f, FAULT_NOT_FOUND, NULL, "the job was deleted");
	if (r->state != READER_IDLE)
		return fault_set(f, FAULT_STATE, NULL, "it has a hold, or waits for one");
	if (r->job->life.draining || r->job->jobs->draining)
		return fault_set(f, FAULT_UNAVAILABLE, NULL,
				 "job '%s' is draining: no reader may hold it", r->job->rec->name);
	return 0;
}

int reader_hold(struct reader *r, uint64_t deadline_us, reader_cb granted, void *userdata,
		struct fault *f)
{
	if (readers_check_hold(r, f))
		return f->code;
	readers_become(r, READER_WAITING);
	r->until_us = deadline_us;
	r->granted = granted;
	r->userdata = userdata;
	list_append(&r->job->readers.waiting, &r->turn);
	readers_grant(r->job);
	return 0;
}

void reader_give_up(struct reader *r)
{
	CHECK(r->state == READER_WAITING);
	r->granted = NULL;
	readers_become(r, READER_IDLE);
}

int reader_release(struct reader *r, struct fault *f)
{
	if (r->state != READER_HOLDS)
		return fault_set(f, FAULT_STATE, NULL, "it holds no step");
	readers_become(r, READER_IDLE);
	readers_let_writers(r->job);
	return 0;
}

/* The first one that waits for nothing else. */
static struct reader *readers_next(struct job *job)
{
	struct reader *r, *tmp;

	list_for_each (r, tmp, &job->readers.waiting, turn)
		if (!r->may || r->may(job))
			return r;
	return NULL;
}

void readers_grant(struct job *job)
{
	struct reader *r;

	if (list_empty(&job->readers.waiting) || !readers_may_hold(job))
		return;
	while ((r = readers_next(job))) {
		readers_become(r, READER_HOLDS);
		r->step = job->rec->step;
		list_append(&job->readers.holds, &r->turn);
		readers_answer(r, NULL);
	}
}

void readers_committed(struct job *job)
{
	job->readers.rewritten = false;
	job->readers.commits++;
	readers_grant(job);
}

/* ------------------------------------------------------------------- writers */

static enum res readers_let_change(struct job *job, enum job_change what)
{
	return job->jobs->ops.before_change ? job->jobs->ops.before_change(job, what) : RES_DONE;
}

/* Nobody reads them where they are. */
static bool readers_may_move(struct job *job)
{
	bool making = making_let(job) != RES_DONE; /* also beside a checkpoint: both hurry */
	return list_empty(&job->readers.holds) && generation_let(job) == RES_DONE && !making;
}

enum res readers_let(struct job *job, enum job_change what, struct waiter *w)
{
	if (readers_may_move(job) && readers_let_change(job, what) == RES_DONE)
		return RES_DONE;
	condition_wait(&job->readers.writers, w);
	return RES_WAIT;
}

bool readers_begin_move(struct job *job, struct waiter *w, bool *writes)
{
	if (*writes)
		return true;
	if (waiter_on(w))
		return false;
	if (!readers_may_move(job)) {
		condition_wait(&job->readers.writers, w);
		return false;
	}
	*writes = true;
	job->readers.writing++;
	return true;
}

void readers_go_on(struct job *job)
{
	readers_let_writers(job);
}

void readers_holding(const struct job *job, char *buf, size_t bytes)
{
	const struct reader *r;
	unsigned others = 0;
	char more[32] = "";

	buf[0] = '\0';
	if (list_empty(&job->readers.holds)) {
		if (generation_is_copying(job))
			snprintf(buf, bytes, "the copy of what a checkpoint has not written yet");
		else if (making_reads(job))
			snprintf(buf, bytes, "the rest of a generation that is published");
		else
			snprintf(buf, bytes, "%s",
				 job->checkpoints.reads ? "a checkpoint that is being loaded"
				 : job->kept.run        ? "the copy that it may be rolled back to"
				 : job->kept.wanted     ? "memory for the copy that it may be "
							  "rolled back to"
							: "");
		return;
	}
	for (const struct list *l = job->readers.holds.next->next; l != &job->readers.holds;
	     l = l->next)
		others++;
	if (others)
		snprintf(more, sizeof(more), " and %u others", others);
	r = list_first(&job->readers.holds, struct reader, turn);
	snprintf(buf, bytes, "a checkpoint (pid %d%s), which begins with step %llu",
		 r->proc ? (int)proc_pid(r->proc) : 0, more, (unsigned long long)r->step);
}

/* ------------------------------------------------------------ what happens to it */

void readers_epoch_ended(struct job *job)
{
	/* not now: those that are resumed end, and the end of the epoch is not complete yet */
	job->readers.look_again = !condition_is_idle(&job->readers.writers);
}

static void readers_end_all(struct job *job, enum fault_code code, const char *why)
{
	struct reader *r, *tmp;

	list_for_each (r, tmp, &job->readers.holds, turn)
		readers_become(r, READER_IDLE);
	while (!list_empty(&job->readers.waiting))
		readers_refuse(list_first(&job->readers.waiting, struct reader, turn), code, why);
}

void readers_drain(struct job *job)
{
	char why[JOB_NAME_MAX + 32];

	snprintf(why, sizeof(why), "job '%s' is draining", job->rec->name);
	readers_end_all(job, FAULT_UNAVAILABLE, why);
	readers_let_writers(job);
}

void readers_lose_job(struct job *job)
{
	char why[JOB_NAME_MAX + 32];

	snprintf(why, sizeof(why), "job '%s' was deleted", job->rec->name);
	readers_end_all(job, FAULT_NOT_FOUND, why);
	while (!list_empty(&job->readers.all)) {
		struct reader *r = list_first(&job->readers.all, struct reader, link);

		list_unlink(&r->link);
		r->job = NULL;
	}
	while (!list_empty(&job->readers.of_base))
		base_reader_free(list_first(&job->readers.of_base, struct base_reader, link));
}

static void readers_end_waits(struct job *job, uint64_t now_us)
{
	struct reader *r, *tmp;
	char waits[256], why[300];

	list_for_each (r, tmp, &job->readers.waiting, turn) {
		if (r->until_us > now_us)
			continue;
		reader_wait_for(r, waits, sizeof(waits));
		snprintf(why, sizeof(why), "timed out waiting for %s", waits);
		readers_refuse(r, FAULT_DEADLINE, why);
	}
}

void readers_tick(struct job *job, uint64_t now_us)
{
	bool again = job->readers.look_again;

	readers_grant(job);
	readers_end_waits(job, now_us);
	job->readers.look_again = false;
	if (condition_is_idle(&job->readers.writers))
		return;
	if (again)
		condition_signal(&job->readers.writers);
	else
		readers_let_writers(job);
}
