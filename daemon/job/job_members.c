/* Members of a job: joining, leaving, dying, and the epochs that end with that. */
#include <errno.h>
#include <stdio.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "job/admission.h"
#include "job/base.h"
#include "job/across_write.h"
#include "job/elastic.h"
#include "job/events.h"
#include "job/history.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/kept.h"
#include "job/launched.h"
#include "job/pooled.h"
#include "job/position.h"
#include "job/resize.h"
#include "job/restore.h"
#include "job/span.h"

/* Before anything else ends with it: other nodes hear why first, and not of ops that are refused. */
static void job_members_end_span(struct job *job, const struct fault *fault)
{
	struct span *s = job->across.span;

	if (!s || s->over)
		return;
	s->over = true;
	s->ended = *fault;
	if (job->jobs->ops.across.ended)
		job->jobs->ops.across.ended(job, fault);
}

/* Other nodes may apply it, or commit it, or the store has. */
static bool job_members_keeps_step(const struct job *job)
{
	return (job_is_across(job) || job_is_alone(job)) &&
	       (job->step.doubt || job->step.committing);
}

static bool job_members_keeps_gradient(const struct job *job, const struct unit *u)
{
	return job->step.state != JOB_STEP_NONE && u->rec->group == job->step.group &&
	       (job->step.across || job_members_keeps_step(job));
}

void job_epoch_end(struct job *job, const struct fault *fault)
{
	job_members_end_span(job, fault);
	job->ops.counts.epochs_ended += job->joined > 0;
	if (job->jobs->ops.epoch_ends)
		job->jobs->ops.epoch_ends(job);
	job->jobs->ops.abort_ops(job, fault);
	if (job->joined)
		events_add(job, EVENTS_EPOCH_ENDED, "%s", fault->text);
	if (job->joined && job->jobs->ops.epoch_ended)
		job->jobs->ops.epoch_ended(job, fault);
	for (uint32_t i = 0; i < job->n_groups; i++)
		group_reset(job->groups[i], fault);
	job->rec->epoch++;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	if (job->step.state == JOB_STEP_PREPARED && !job_members_keeps_step(job)) {
		position_drop(job);
		job_step_move(job, JOB_STEP_NONE);
		job->step.abandoned = job->step.committing;
	}
	if (job->step.state == JOB_STEP_NONE &&
	    !job->step.doubt) /* else it is made whole, or ended */
		position_end_partial(job);
	job_drop_spare(job); /* members that have registered must join again */
	job->step.mid = false;
	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];

		u->has_gradient = u->has_gradient && job_members_keeps_gradient(job, u);
		u->turns.n = 0;
		u->turns.wanted = false;
		u->turns.given = 0;
		u->turns.leaves_out = false;
		u->factors = (struct unit_factors){ 0 };
		if (u->shards == UNIT_SHARDS_MIXED && u->step != UNIT_STEP_STEPPING) {
			u->rec->initialised = false; /* no copy is more correct than another */
			job_journal_mark_unit(job, u);
			job->readers.changes++;
		}
	}
	job->across.replaced = (struct unit_turns){ 0 };
	job_drop_partials(job);
	job_pass_end(job, NULL);
	job->mem.stray_gradients = true;
	job_give_stray_grads(job);
	admission_recall(job); /* those that wait look for the end of their epoch */
	readers_epoch_ended(job);
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		struct member *m = job->ranks[r];

		if (!m || m->state != MEMBER_JOINED)
			continue;
		member_state_move(m, MEMBER_STALE);
		m->ended = *fault;
		job->joined--;
		job->jobs->ops.event(m, JOB_EVENT_EPOCH_ENDED, fault->text);
	}
	if (!job->step.committing && !job->step.doubt) /* a commit may cover what has changed */
		kept_epoch_ended(job);
	kept_go_on(job);
	across_writes_end(job); /* what waits for it looks for the end of its epoch */
	if (job->step.gated)    /* what waits for that step is of this epoch */
		condition_signal(&job->step.applied);
	node_wake_later(
		job->node); /* registrations wait for communicators that it does not make any more */
}

/* The job resumes at its commits and has none: a restart that finds initialised units would begin with
 * what steps have made of them. */
static void job_members_uninitialise(struct job *job)
{
	log_warn("job",
		 "the epoch ended before the first commit: units must be initialised again "
		 "job=%s uncommitted=%llu",
		 job->label, (unsigned long long)job->rec->uncommitted_steps);
	for (uint32_t i = 0; i < job->n_units; i++) {
		job->units[i]->rec->initialised = false;
		job_journal_mark_unit(job, job->units[i]);
	}
	job->readers.changes++;
	position_reset(job);
}

void job_tear(struct job *job)
{
	const state_job *rec = job->rec;
	uint64_t step;

	job->kept.asks_torn = false;
	if (job->step.doubt) /* its end asks again */
		return;
	if (job->step.committing || !rec->uncommitted_steps || rec->allow_torn || rec->torn)
		return;
	if (job->step.state == JOB_STEP_APPLYING) /* its end asks again */
		return;
	if (kept_at_commits(job)) {
		if (!rec->has_commit)
			job_members_uninitialise(job);
		return;
	}
	job->kept.asks_torn = kept_goes_back(job);
	if (job->kept.asks_torn)
		return;
	if ((rec->has_commit || rec->anchored) && !position_of(rec, &step))
		job_set_torn(job);
}

void job_set_torn(struct job *job)
{
	job->life.torn = true;
	job->rec->torn = true;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	for (uint32_t i = 0; i < job->n_units; i++)
		job->units[i]->torn = true;
}

void job_count_uncommitted(struct job *job)
{
	job->rec->uncommitted_steps++;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}

void job_change_begin(struct job *job)
{
	if (job->life.changing++)
		return;
	job->rec->applying = true;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	job_journal_write(job);
}

void job_change_end(struct job *job)
{
	CHECK(job->life.changing > 0);
	if (--job->life.changing)
		return;
	job->rec->applying = false;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
}

static int job_members_check_rank_free(const struct job *job, uint32_t rank,
				       const struct member *again, struct fault *f)
{
	const struct member *there = job->ranks[rank];

	if (!there || there == again || there->state == MEMBER_LEFT || there->state == MEMBER_DEAD)
		return 0;
	return fault_set(f, FAULT_STATE, NULL, "rank %u of job '%s' is taken by pid %d",
			 launched_number(job, rank), job->rec->name, member_pid(there));
}

static int job_members_check_draining(const struct job *job, struct fault *f)
{
	if (job->life.draining || job->jobs->draining)
		return fault_set(f, FAULT_UNAVAILABLE, NULL,
				 "job '%s' is draining: no rank may join", job->rec->name);
	return base_check_change(job, "no rank may join", f);
}

static int job_members_check_join(const struct job *job, uint32_t rank, const struct member *again,
				  struct fault *f)
{
	if (again && again->rank != rank)
		return fault_set(f, FAULT_STATE, NULL,
				 "this session is rank %u of job '%s' and cannot become rank %u",
				 launched_number(job, again->rank), job->rec->name,
				 launched_number(job, rank));
	return job_members_check_draining(job, f) ||
			       job_members_check_rank_free(job, rank, again, f)
		       ? (int)f->code
		       : 0;
}

/* A newcomer's numbering would not match that of the present members. */
static void job_members_end_epoch_for_newcomer(struct job *job, uint32_t rank, pid_t pid)
{
	struct fault f = FAULT_NULL;
	char node[JOB_ON_NODE_BYTES];

	fault_set(&f, FAULT_ABORTED, NULL,
		  "rank %u (pid %d) of job '%s'%s has joined again: epoch %llu has ended, join "
		  "again",
		  rank, (int)pid, job->rec->name, job_on_node(job, node),
		  (unsigned long long)job->rec->epoch);
	job_epoch_end(job, &f);
}

static void job_members_count_in(struct job *job, struct member *m, bool was_present)
{
	if (was_present)
		member_state_move(m, MEMBER_JOINED);
	m->epoch = job->rec->epoch;
	m->next_seq = 1;
	m->last.op = "join";
	m->last.unit[0] = '\0';
	m->last.ended_us = 0;
	m->ended = FAULT_NULL;
	job->joined++;
	job->present += !was_present;
	job->life.idle_since_us = 0;
}

static void job_members_tell_join(const struct member *m)
{
	const struct job *job = m->job;
	uint32_t here = span_ranks_here(job->across.span, job->rec->world_size);

	events_add_rank(m, EVENTS_JOINED, "%u of %u ranks", job->joined, here);
	if (job->joined == here)
		events_add(job, EVENTS_FORMED, "all %u ranks are in epoch %llu", here,
			   (unsigned long long)job->rec->epoch);
}

/* A newcomer's numbers start at 1: that matches only an epoch in which no process has been that
 * rank. */
static bool job_members_needs_new_epoch(const struct job *job, uint32_t rank)
{
	return job->ranks[rank] && job->ranks[rank]->epoch == job->rec->epoch;
}

/* Changes are of an epoch that has ended, or whose ranks have left. */
void job_roll_back(struct job *job)
{
	if (job->joined || job->step.committing || job->step.doubt)
		return;
	if (kept_at_commits(job))
		job_tear(job);
	kept_epoch_ended(job);
	kept_go_on(job);
}

/* Ops that @rank began in an earlier epoch may still run, even if it was another process then. */
static bool job_members_is_busy(const struct job *job, uint32_t rank)
{
	const struct member *before = job->ranks[rank];

	return job->step.committing || job->step.state == JOB_STEP_APPLYING || job->step.stepping ||
	       kept_is_rolling_back(job) || (before && before->pending);
}

static bool job_members_is_present(const struct member *m)
{
	return m->state == MEMBER_JOINED || m->state == MEMBER_STALE;
}

static void job_members_replace_member(struct job *job, struct member *m)
{
	member_unref(job->ranks[m->rank]);
	job->ranks[m->rank] = member_ref(m);
}

static int job_members_check_channel(const struct job *job, const struct job_joining *how,
				     struct fault *f)
{
	if (!how->no_channel || job->rec->ipc)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "job '%s' shares its memory as descriptors: a trainer without a local "
			 "channel can join only a job created with CUDA IPC handles",
			 job->rec->name);
}

/* @how is of a job of that size, as this one was or is going to be. */
static int job_members_check_world(const struct job *job, const struct job_joining *how,
				   struct fault *f)
{
	uint32_t world = launched_world(job);

	if (!how->world_size || how->world_size == world)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "job '%s' has world size %u, not %u: it was resized meanwhile, or could "
			 "not be (%s)",
			 job->rec->name, world, how->world_size,
			 *job->ops.last_error ? job->ops.last_error : "no op has failed");
}

/* No rank has its number. */
static enum res job_members_wait_outside(struct job *job, const struct job_joining *how, pid_t pid,
					 const struct member *again, struct fault *f)
{
	if (again)
		return res_of(
			fault_set(f, FAULT_STATE, NULL,
				  "this session is rank %u of job '%s' and cannot become rank "
				  "%u",
				  launched_number(job, again->rank), job->rec->name, how->rank));
	if (job_members_check_draining(job, f) || job_members_check_channel(job, how, f))
		return RES_FAILED;
	return elastic_wait(job, how->rank, how->device, pid, how->newcomer, f);
}

/* The same of a job that has ranks on other nodes: their leader takes it in. */
static enum res job_members_wait_across(struct job *job, const struct job_joining *how,
					const struct member *again, struct fault *f)
{
	enum res r;

	if (again)
		return res_of(
			fault_set(f, FAULT_STATE, NULL,
				  "this session is rank %u of job '%s' and cannot become rank %u",
				  launched_number(job, again->rank), job->rec->name, how->rank));
	if (how->rank >= job->rec->max_ranks)
		return res_of(fault_set(f, FAULT_INVALID, "rank", "rank %u is out of range (0..%u)",
					how->rank, job->rec->max_ranks - 1));
	if (job_members_check_draining(job, f) || job_members_check_channel(job, how, f))
		return RES_FAILED;
	r = job->jobs->ops.may_join ? job->jobs->ops.may_join(job, how->rank, f) : RES_DONE;
	if (r != RES_DONE) /* an epoch that has it has a rank for it */
		return r;
	return res_of(
		fault_set(f, FAULT_UNAVAILABLE, NULL,
			  "this daemon is not in a cluster any more, and job '%s' has ranks on "
			  "other nodes",
			  job->rec->name));
}

enum res job_join(struct job *job, const struct job_joining *how, struct proc *proc,
		  uint64_t session, struct member *again, struct member **ret, struct fault *f)
{
	/* a process that has left comes back as a new member: its pool was freed when it left */
	struct member *m =
		again && again->job == job && job_members_is_present(again) ? again : NULL;
	bool was_present = m;
	uint32_t rank;

	if (resize_is_busy(job) || restore_is_busy(job))
		return RES_WAIT;
	if (job_members_check_world(job, how, f))
		return RES_FAILED;
	if (!launched_rank(job, how->rank, &rank) && job->across.elastic)
		return job_members_wait_across(job, how, m, f);
	if (!launched_rank(job, how->rank, &rank) ||
	    (!job->across.elastic && elastic_gathers(job, how)))
		return job_members_wait_outside(job, how, proc_pid(proc), m, f);
	if (how->newcomer)
		elastic_newcomer_leave(how->newcomer);
	if (job_members_check_join(job, rank, m, f) || job_members_check_channel(job, how, f) ||
	    job_place(job, rank, how, f))
		return RES_FAILED;
	if (m && m->device != job->placed[rank])
		return res_of(fault_set(
			f, FAULT_STATE, NULL,
			"this session is on %s as rank %u and cannot move to another device: "
			"leave first",
			backend_info(m->device->backend)->id, rank));
	if (!job->present && job->jobs->ops.leaves)
		RES_TRY(job->jobs->ops.leaves(job));
	if (!job->rec->epoch)
		job->rec->epoch = 1;
	job_journal_mark(job, JOB_JOURNAL_PROGRESS);
	if (job_members_needs_new_epoch(job, rank))
		job_members_end_epoch_for_newcomer(job, rank, proc_pid(proc));
	job_roll_back(job);
	if (job_members_is_busy(job, rank))
		return RES_WAIT;
	if (job->jobs->ops.may_join)
		RES_TRY(job->jobs->ops.may_join(job, how->rank, f));
	if (m)
		member_reset(m);
	else if (member_new(job, rank, proc, session, &m) < 0)
		return res_of(fault_errno(f, -ENOMEM, "joining a job"));
	if (!was_present) {
		job_members_replace_member(job, m);
		pooled_join(m);
	}
	job_members_count_in(job, m, was_present);
	job_members_tell_join(m);
	elastic_joined(job);
	job_journal_write(job);
	node_wake(job->node); /* those that waited for this rank's place */
	*ret = m;
	return RES_DONE;
}

void job_join_given_up(struct job *job, uint32_t number)
{
	uint32_t rank;

	if (job->jobs->ops.gave_up && (job->across.elastic || launched_rank(job, number, &rank)))
		job->jobs->ops.gave_up(job, number);
}

static void job_members_leave_common(struct member *m, enum member_state state)
{
	struct job *job = m->job;

	CHECK(job_members_is_present(m));
	job->joined -= m->state == MEMBER_JOINED;
	job->present--;
	member_state_move(m, state);
	member_retire(m);
	if (job->present)
		return;
	job->life.idle_since_us = clock_now_us();
	job->life.crashed = state == MEMBER_DEAD;
	job->life.draining = false; /* done: the next trainers may continue from the last commit */
}

/* Other nodes have ranks in its epoch: it ends when those have left, too. */
static bool job_members_is_across(const struct job *job)
{
	const struct span *s = job->across.span;

	return s && !s->over && s->n_nodes > 1;
}

enum res job_leave(struct member *m, bool *ret_freed, struct fault *f)
{
	struct job *job = m->job;
	bool joined = m->state == MEMBER_JOINED;

	*ret_freed = false;
	if (m->pending)
		return res_of(fault_set(
			f, FAULT_STATE, NULL,
			"rank %u of job '%s' has %u ops in progress: wait for them, then leave",
			m->rank, job->rec->name, m->pending));
	if (m->executing)
		return RES_WAIT;
	events_add_rank(m, EVENTS_LEFT, "%s", "");
	job_members_leave_common(m, MEMBER_LEFT);
	for (uint32_t i = 0; joined && i < job->n_groups; i++)
		job_group_left(job->groups[i], m);
	if (joined && job_members_is_across(job) && job->jobs->ops.across.rank_left)
		job->jobs->ops.across.rank_left(job, m);
	if (!job->present && job_members_is_across(job)) {
		if (job->jobs->ops.across.left)
			job->jobs->ops.across.left(job);
	} else if (!job->present && job->rec->lifetime == JOB_EPHEMERAL && !job->life.deleted) {
		struct fault none = FAULT_NULL;

		job->life.why = HISTORY_FINISHED;
		*ret_freed = job_delete(job, false, NULL, &none) == 0;
	}
	return RES_DONE;
}

void job_lost(struct member *m, const char *why)
{
	struct job *job = m->job;
	struct fault f = FAULT_NULL;
	char node[JOB_ON_NODE_BYTES];

	if (!job_members_is_present(m))
		return;
	fault_set(&f, FAULT_ABORTED, NULL,
		  "rank %u (pid %d) of job '%s'%s %s (its last op: %s%s%s): epoch %llu has ended, "
		  "join again",
		  m->rank, member_pid(m), job->rec->name, job_on_node(job, node), why, m->last.op,
		  m->last.unit[0] ? " of unit " : "", m->last.unit,
		  (unsigned long long)job->rec->epoch);
	events_add_rank(m, EVENTS_DIED, "%s; its last op was %s%s%s", why, m->last.op,
			m->last.unit[0] ? " of unit " : "", m->last.unit);
	if (job->jobs->ops.epoch_ends)
		job->jobs->ops.epoch_ends(job); /* what is in doubt is not torn */
	job_tear(job);
	job_epoch_end(job, &f);
	job->ops.counts.deaths++;
	job_members_leave_common(m, MEMBER_DEAD);
}

void job_leave_out(struct member *m, const struct fault *why)
{
	CHECK(m->state == MEMBER_STALE);
	job_members_leave_common(m, MEMBER_DEAD);
	m->ended = *why;
}

uint32_t job_drain(struct job *job)
{
	uint32_t told = 0;

	job->life.draining = job->present > 0;
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		struct member *m = job->ranks[r];

		if (!m || (m->state != MEMBER_JOINED && m->state != MEMBER_STALE))
			continue;
		job->jobs->ops.event(m, JOB_EVENT_DRAIN, "commit and leave");
		told++;
	}
	readers_drain(job);
	events_add(job, EVENTS_DRAIN, "%u trainers are told to commit and leave", told);
	return told;
}
