/* Jobs: making, finding, taking over. */
#include "job/job.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/state.h"
#include "job/cordon.h"
#include "job/events.h"
#include "job/history.h"
#include "job/job_impl.h"
#include "job/job_journal.h"
#include "job/launched.h"
#include "job/pooled.h"
#include "job/policy_spec.h"
#include "job/position.h"
#include "job/span.h"

#define JOB_MAGIC 0x4a4f4221u

void jobs_init(struct jobs *jobs, struct node *node, const struct job_ops *ops)
{
	*jobs = (struct jobs){ .node = node, .ops = *ops, .names = HTAB_NULL };
	list_init(&jobs->all);
	list_init(&jobs->zombies);
	list_init(&jobs->unsaved);
}

static const struct state_row job_step_states[] = {
	[JOB_STEP_NONE] = { "NONE", STATE_TO(JOB_STEP_PREPARED) },
	[JOB_STEP_PREPARED] = { "PREPARED", STATE_TO(JOB_STEP_APPLYING) | STATE_TO(JOB_STEP_NONE) },
	[JOB_STEP_APPLYING] = { "APPLYING", STATE_TO(JOB_STEP_NONE) },
};

void job_step_move(struct job *job, enum job_step_state to)
{
	state_move(job_step_states, &job->step.state, (uint8_t)to);
}

struct job *job_free(struct job *job)
{
	if (!job)
		return NULL;
	MAGIC_CHECK(job, JOB_MAGIC);
	CHECK(!job->members && !job->running && !job->quota.used);
	CHECK(list_empty(&job->registrations) && list_empty(&job->readers.all));
	CHECK(list_empty(&job->readers.of_base));
	CHECK(!job->elastic.turn && list_empty(&job->elastic.newcomers));
	CHECK(condition_is_idle(&job->readers.writers));
	for (uint32_t i = 0; i < job->n_groups; i++)
		group_free(job->groups[i]);
	list_unlink(&job->link);
	job_journal_deinit(job);
	pooled_end(job);
	step_rates_clear(&job->step.rates);
	position_drop(job);
	htab_deinit(&job->unit_names);
	free(job->groups);
	free(job->ranks);
	free(job->placed);
	span_free(job->across.span);
	free(job->across.left);
	state_job_free(job->rec);
	user_charge_deinit(&job->memory);
	user_charge_deinit(&job->owner);
	job->magic = 0;
	free(job);
	return NULL;
}

void job_free_zombie(struct job *job)
{
	CHECK(job->life.deleted);
	job_free(job);
}

/* Append the run-time group for the last group of the record. */
int job_add_group(struct job *job)
{
	struct group **grown = realloc(job->groups, (job->n_groups + 1) * sizeof(*grown));

	if (!grown)
		return -ENOMEM;
	job->groups = grown;
	if (group_new(job, job->n_groups, job->rec->groups[job->n_groups], job->jobs->ops.complete,
		      job->jobs->ops.failed, &grown[job->n_groups]) < 0)
		return -ENOMEM;
	job->n_groups++;
	return 0;
}

/* With one device its account is the parent of the job's account. With several, a slab also charges
 * its device. */
static void job_open_accounts(struct job *job)
{
	struct node *node = job->node;

	quota_init(&job->quota, node->n_devices == 1 ? &node->devices[0].quota : NULL,
		   job->rec->quota_bytes);
	job->quota.user = job->owner.user;
	for (unsigned d = 0; d < node->n_devices; d++) {
		pool_init(&job->mem.full[d], &node->devices[d], &job->quota, MEM_FULL,
			  job_share(job), job->rec->name, -1);
		pool_init(&job->mem.scratch[d], &node->devices[d], &job->quota, MEM_FULL,
			  BACKEND_SHARE_FD, job->rec->name, -1);
		pool_init(&job->mem.grads[d], &node->devices[d], &job->quota, MEM_GRAD,
			  BACKEND_SHARE_FD, job->rec->name, -1);
	}
	pooled_begin(job);
}

/* Its owner pays. Return: 0 or a fault code. */
static int job_charge(struct job *job, struct fault *f)
{
	struct user *u = users_get(&job->jobs->node->users, job->rec->uid, NULL, 0);

	if (!u)
		return fault_errno(f, -ENOMEM, "making a job");
	if (user_charge(&job->owner, u, USER_JOBS, 1, f) == 0)
		(void)user_charge(&job->memory, u, USER_MEMORY, job_own_bytes(job, 0, 0), f);
	user_unref(u);
	return f->code;
}

struct job *job_new(struct jobs *jobs, state_job *rec, struct fault *f)
{
	struct job *job = calloc(1, sizeof(*job));

	if (!job) {
		fault_errno(f, -ENOMEM, "making a job");
		return NULL;
	}
	job->magic = JOB_MAGIC;
	job->jobs = jobs;
	job->node = jobs->node;
	job->number = ++jobs->last_number ? jobs->last_number : ++jobs->last_number;
	job->unit_names = HTAB_NULL;
	list_init(&job->copies.idle);
	list_init(&job->copies.turns);
	list_init(&job->copies.drains);
	condition_init(&job->step.applied, "a step that is being applied");
	condition_init(&job->settled, "ops of an earlier epoch");
	list_init(&job->across.line);
	list_init(&job->across.writes);
	list_init(&job->across.replicas);
	list_init(&job->waiting_tasks);
	list_init(&job->registrations);
	readers_init(&job->readers);
	list_init(&job->elastic.newcomers);
	condition_init(&job->checkpoints.buffers.made, "the copy of the job's buffers");
	list_init(&job->link);
	job_journal_init(job);
	job->life.idle_since_us = clock_now_us();
	job->ops.counts.since_unix_us = clock_unix_us();
	job->ranks = calloc(rec->world_size, sizeof(struct member *));
	job->placed = calloc(rec->world_size, sizeof(struct device *));
	job->rec = rec;
	rec->number = job->number;
	job_label(rec->uid, rec->name, job->label);
	if (job_charge(job, f)) {
		job->rec = NULL;
		return job_free(job);
	}
	job_open_accounts(job);
	if (*rec->span && span_parse(rec->span, &job->across.span, f)) {
		job->rec = NULL;
		return job_free(job);
	}
	job->across.elastic = job->across.span && rec->join_grace_ms;
	while (job->ranks && job->placed && job->n_groups < rec->n_groups)
		if (job_add_group(job) < 0)
			break;
	if (!job->ranks || !job->placed || job->n_groups < rec->n_groups) {
		job->rec = NULL;
		fault_errno(f, -ENOMEM, "making a job");
		return job_free(job);
	}
	return job;
}

int job_publish(struct job *job)
{
	if (htab_add(&job->jobs->names, job->label, job) < 0)
		return -ENOMEM;
	list_append(&job->jobs->all, &job->link);
	job->jobs->count++;
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	job_journal_write(job);
	return 0;
}

static int job_add_world(state_job *rec)
{
	uint32_t *ranks = calloc(rec->world_size, sizeof(*ranks));
	state_group *g;

	if (!ranks)
		return -ENOMEM;
	for (uint32_t i = 0; i < rec->world_size; i++)
		ranks[i] = i;
	g = state_group_new("world", ranks, rec->world_size);
	free(ranks);
	if (g && state_job_add_group(rec, g) == 0)
		return 0;
	state_group_free(g);
	return -ENOMEM;
}

static state_job *job_rec_from_spec(const struct node_limits *l, const struct job_spec *spec,
				    const char *name, uid_t uid, gid_t gid)
{
	state_job *rec = state_job_new(name, spec->world_size);

	if (!rec)
		return NULL;
	rec->uid = uid;
	rec->gid = gid;
	rec->lifetime = spec->lifetime ? spec->lifetime : JOB_EPHEMERAL;
	rec->quota_bytes = spec->quota_bytes ? spec->quota_bytes : l->job_quota_bytes;
	rec->ttl_s = spec->ttl_s ? spec->ttl_s : l->job_ttl_s;
	rec->op_timeout_ms = spec->op_timeout_ms ? spec->op_timeout_ms : l->op_timeout_ms;
	rec->allow_torn = spec->allow_torn;
	rec->resume = spec->resume ? spec->resume : JOB_RESUME_APPLIED;
	rec->min_ranks = spec->min_ranks;
	rec->max_ranks = spec->max_ranks;
	rec->join_grace_ms = spec->join_grace_ms;
	rec->priority = spec->priority;
	rec->wait_for_memory_ms = spec->wait_for_memory_ms;
	rec->ipc = spec->ipc;
	rec->is_private = spec->is_private;
	rec->created_unix_s = (uint64_t)time(NULL);
	if (state_job_set_checkpoints(rec, spec->checkpoints) < 0 ||
	    state_job_set_said_checkpoints(rec, spec->checkpoints) < 0 || job_add_world(rec) < 0) {
		state_job_free(rec);
		return NULL;
	}
	return rec;
}

static unsigned job_jobs_of(const struct jobs *jobs, uid_t uid)
{
	struct job *job, *tmp;
	unsigned n = 0;

	list_for_each (job, tmp, &jobs->all, link)
		n += job->rec->uid == uid;
	return n;
}

/* @uid: who says so. */
static int job_check_priority(const struct jobs *jobs, int32_t priority, uid_t uid, struct fault *f)
{
	const struct user *u = users_find(&jobs->node->users, uid);
	int32_t most = u ? u->priority : user_is_admin(uid) ? USER_PRIORITY_MAX : 0;

	if (priority <= most)
		return 0;
	return fault_set(f, FAULT_DENIED, "job.priority",
			 "job.priority %d is too high: the limit of user %u is %d (priority in "
			 "user_limits, shardd.yaml)",
			 priority, (unsigned)uid, most);
}

/* May there be a base like that on this node? */
static int job_check_base(const struct node *node, const struct job_spec *spec, struct fault *f)
{
	const struct backend_info *info = backend_info(node->devices[0].backend);

	if (spec->lifetime != JOB_BASE)
		return 0;
	if (spec->world_size != 1 || spec->max_ranks)
		return fault_set(f, FAULT_INVALID, "job.world_size",
				 "job.world_size is %u: a base has one rank, which loads it",
				 spec->world_size);
	if (info->ordinal < 0)
		return 0;
	return fault_set(f, FAULT_UNIMPLEMENTED, "job.lifetime",
			 "a base is read in host memory, and this daemon's is %s", info->id);
}

/* May one be created, of @others at most? */
static int job_check_new(const struct jobs *jobs, const struct job_spec *spec, unsigned others,
			 uid_t uid, struct fault *f)
{
	const struct node_limits *l = &jobs->node->limits;

	if (jobs->draining)
		return fault_set(f, FAULT_UNAVAILABLE, NULL, "the daemon is draining: no new jobs");
	if (cordon_check(jobs, f))
		return f->code;
	if (others >= l->max_jobs)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "there are %u jobs, %u of them yours, which is the limit "
				 "(max_jobs): delete one, or raise the limit in shardd.yaml",
				 jobs->count, job_jobs_of(jobs, uid));
	if (spec->world_size > l->max_world_size)
		return fault_set(f, FAULT_INVALID, "job.world_size",
				 "job.world_size %u is out of range (1..%u, max_world_size)",
				 spec->world_size, l->max_world_size);
	if (l->job_quota_bytes && spec->quota_bytes > l->job_quota_bytes)
		return fault_set(
			f, FAULT_INVALID, "job.quota_bytes",
			"job.quota_bytes %llu is too large: the limit is %llu (job_quota_bytes)",
			(unsigned long long)spec->quota_bytes,
			(unsigned long long)l->job_quota_bytes);
	if (l->max_job_ttl_s && spec->ttl_s > l->max_job_ttl_s)
		return fault_set(f, FAULT_INVALID, "job.ttl_s",
				 "job.ttl_s %u is too large: the limit is %u (max_job_ttl_s); 0 "
				 "means %u (job_ttl_s)",
				 spec->ttl_s, l->max_job_ttl_s, l->job_ttl_s);
	if (spec->wait_for_memory_ms > l->max_wait_for_memory_ms)
		return fault_set(f, FAULT_INVALID, "job.wait_for_memory_ms",
				 "job.wait_for_memory_ms %u is too large: the limit is %u "
				 "(max_wait_for_memory_ms)",
				 spec->wait_for_memory_ms, l->max_wait_for_memory_ms);
	if (spec->checkpoints && policy_spec_check(jobs->node, spec->checkpoints, f))
		return f->code;
	if (job_check_base(jobs->node, spec, f))
		return f->code;
	if (spec->ipc && backend_info(jobs->node->devices[0].backend)->ordinal < 0)
		return fault_set(f, FAULT_INVALID, "job.ipc",
				 "job.ipc is set, but memory of %s has no CUDA IPC handle",
				 backend_info(jobs->node->devices[0].backend)->id);
	return 0;
}

/* @old: what it replaces, which is deleted when nothing but memory can fail any more; NULL: none. */
static int job_make(struct jobs *jobs, const struct job_spec *spec, const char *name, uid_t uid,
		    gid_t gid, struct job *old, struct job **ret, struct fault *f)
{
	state_job *rec;
	struct job *job;

	if (job_check_new(jobs, spec, jobs->count - (old ? 1 : 0), uid, f))
		return f->code;
	rec = job_rec_from_spec(&jobs->node->limits, spec, name, uid, gid);
	job = rec ? job_new(jobs, rec, f) : NULL;
	if (!job && f->code) {
		state_job_free(rec);
		return f->code;
	}
	if (!job) {
		state_job_free(rec);
		return fault_errno(f, -ENOMEM, "making a job");
	}
	if (old)
		old->life.why = HISTORY_REPLACED;
	if (old && job_delete(old, false, NULL, f)) {
		old->life.why = 0;
		job_free(job);
		return f->code;
	}
	if (job_publish(job) < 0) {
		job_free(job);
		return fault_errno(f, -ENOMEM, "making a job");
	}
	job->checkpoints.us = clock_now_us(); /* its policy counts from now on */
	events_add(job, EVENTS_CREATED, "%u ranks, %s", rec->world_size,
		   job_lifetime_word(rec->lifetime));
	*ret = job;
	return 0;
}

/* Records of older daemons have none. */
static enum job_resume job_resume_of(const state_job *rec)
{
	return rec->resume ? (enum job_resume)rec->resume : JOB_RESUME_APPLIED;
}

const char *job_lifetime_word(uint32_t lifetime)
{
	static const char *const words[] = {
		[JOB_EPHEMERAL] = "EPHEMERAL",
		[JOB_KEEP] = "KEEP",
		[JOB_BASE] = "BASE",
	};

	return lifetime < ARRAY_SIZE(words) && words[lifetime] ? words[lifetime] : "EPHEMERAL";
}

const char *job_resume_word(const state_job *rec)
{
	static const char *const words[] = {
		[JOB_RESUME_APPLIED] = "APPLIED",
		[JOB_RESUME_COMMITTED] = "COMMITTED",
		[JOB_RESUME_NO_COPY] = "NO_COPY",
	};
	enum job_resume r = job_resume_of(rec);

	return r < ARRAY_SIZE(words) && words[r] ? words[r] : "?";
}

static const char *job_resume_name(enum job_resume r)
{
	static const char *const names[] = {
		[JOB_RESUME_APPLIED] = "applied step",
		[JOB_RESUME_COMMITTED] = "commit",
		[JOB_RESUME_NO_COPY] = "applied step without a copy (NO_COPY)",
	};

	return r < ARRAY_SIZE(names) && names[r] ? names[r] : "?";
}

static int job_check_elastic(const struct job *job, const struct job_spec *spec, struct fault *f)
{
	const state_job *rec = job->rec;

	if (!spec->max_ranks)
		return 0;
	if (!rec->max_ranks)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is not elastic: its first trainer decides that "
				 "(min_ranks, max_ranks)",
				 rec->name);
	if (spec->min_ranks != rec->min_ranks || spec->max_ranks != rec->max_ranks)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is elastic from %u to %u ranks, not %u to %u", rec->name,
				 rec->min_ranks, rec->max_ranks, spec->min_ranks, spec->max_ranks);
	if (spec->join_grace_ms == rec->join_grace_ms)
		return 0;
	return fault_set(
		f, FAULT_STATE, NULL,
		"job '%s' has a join_grace_ms of %u, not %u: its first trainer decides that "
		"(0: it does not change its size by itself)",
		rec->name, rec->join_grace_ms, spec->join_grace_ms);
}

/* May ranks that join give the job that size? */
static bool job_is_elastic_to(const struct job *job, uint32_t world)
{
	const state_job *rec = job->rec;

	return rec->max_ranks && world >= rec->min_ranks && world <= rec->max_ranks;
}

/* Where it has gone on with another number of ranks, it is still of those that were started. */
static int job_check_world_size(const struct job *job, const struct job_spec *spec, struct fault *f)
{
	uint32_t launched = launched_world(job);
	char now[64] = "";

	if (spec->world_size == launched ||
	    (spec->resizes && job_is_elastic_to(job, spec->world_size)))
		return 0;
	if (launched != job->rec->world_size)
		snprintf(now, sizeof(now), " (%u ranks are in it now)", job->rec->world_size);
	return fault_set(
		f, FAULT_STATE, NULL,
		"job '%s' has world size %u, not %u%s: start as many ranks, change its size "
		"(shardctl job resize), name another job, or delete it (shardctl job "
		"delete)",
		job->rec->name, launched, spec->world_size, now);
}

static int job_check_same(const struct job *job, const struct job_spec *spec, struct fault *f)
{
	if (job_check_world_size(job, spec, f) || job_check_elastic(job, spec, f))
		return f->code;
	if (spec->lifetime && spec->lifetime != (enum job_lifetime)job->rec->lifetime)
		return fault_set(f, FAULT_STATE, NULL, "job '%s' has lifetime %s, not %s",
				 job->rec->name, job_lifetime_word(job->rec->lifetime),
				 job_lifetime_word(spec->lifetime));
	if (spec->quota_bytes && spec->quota_bytes != job->rec->quota_bytes)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' has a quota of %llu bytes, not %llu", job->rec->name,
				 (unsigned long long)job->rec->quota_bytes,
				 (unsigned long long)spec->quota_bytes);
	if (spec->resume && spec->resume != job_resume_of(job->rec))
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' resumes at its last %s, not at its last %s: its first "
				 "trainer decides that",
				 job->rec->name, job_resume_name(job_resume_of(job->rec)),
				 job_resume_name(spec->resume));
	if (spec->checkpoints && policy_spec_check_same(job->rec, spec->checkpoints, f))
		return f->code;
	if (spec->ipc && !job->rec->ipc)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' shares its memory as descriptors, not as CUDA IPC "
				 "handles: its first trainer decides that",
				 job->rec->name);
	if (spec->priority && spec->priority != job->rec->priority)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' has priority %d, not %d: its first trainer decides that",
				 job->rec->name, job->rec->priority, spec->priority);
	if (spec->wait_for_memory_ms && spec->wait_for_memory_ms != job->rec->wait_for_memory_ms)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' has a wait_for_memory_ms of %u, not %u: its first "
				 "trainer decides that",
				 job->rec->name, job->rec->wait_for_memory_ms,
				 spec->wait_for_memory_ms);
	if (spec->is_private && !job->rec->is_private)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' is not private: its first trainer decided that; delete "
				 "the job to create it as a private one",
				 job->rec->name);
	return 0;
}

/* No state of an earlier run of the daemon exists: a trainer that continues from such state must
 * not silently start again at step 0. */
static int job_check_instance(const struct node *node, const struct job_spec *spec, struct fault *f)
{
	time_t started = (time_t)node->started_unix_s;
	char when[32] = "?";
	struct tm tm;

	if (!spec->instance || memcmp(spec->instance, node->instance, sizeof(node->instance)) == 0)
		return 0;
	if (gmtime_r(&started, &tm))
		strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S UTC", &tm);
	return fault_set(
		f, FAULT_LOST, NULL,
		"the daemon was restarted at %s: the state of job '%.75s' is gone; restore a "
		"checkpoint, or start the whole run again from step 0. If other nodes have copies "
		"of it (replicas: 1), start the ranks here with SHARDD_INSTANCE=any",
		when, spec->name);
}

int job_open(struct jobs *jobs, const struct job_spec *spec, uid_t uid, gid_t gid, struct job **ret,
	     bool *ret_created, struct fault *f)
{
	char label[JOB_LABEL_MAX + 1];
	bool created, replace = false, others = false; /* created for another user */
	struct job_spec own = *spec;
	struct job *job = NULL;
	struct job_ref ref;
	int r;

	if (job_ref_parse(spec->name, "job.name", &ref, f) ||
	    job_check_instance(jobs->node, spec, f))
		return f->code;
	if (ref.has_uid && ref.uid != uid) {
		job_label(ref.uid, ref.name, label);
		if (job_is_admin(uid) && !htab_find(&jobs->names, label) && !spec->gid)
			return fault_set(f, FAULT_NOT_FOUND, NULL,
					 "there is no job '%s': user %u can create it, or "
					 "'shardctl job create --user'",
					 label, (unsigned)ref.uid);
		others = job_is_admin(uid) && !htab_find(&jobs->names, label);
		if (!others &&
		    (job_find(jobs, spec->name, uid, &job, f) || job_check_open(job, uid, f)))
			return f->code;
		if (spec->on_existing == JOB_FRESH)
			return fault_set(f, FAULT_DENIED, "on_existing",
					 "only user %u, who owns job '%s', can create it again",
					 (unsigned)ref.uid, label);
	} else {
		job_label(uid, ref.name, label);
		job = htab_find(&jobs->names, label);
	}
	if (job && own.on_existing != JOB_FRESH && job_check_same(job, &own, f))
		return f->code;
	if (job && job_existing_check(job, &own, &replace, f))
		return f->code;
	created = !job || replace;
	if (created && job_check_priority(jobs, spec->priority, uid, f))
		return f->code;
	if (created)
		r = job_make(jobs, &own, ref.name, others ? ref.uid : uid, others ? spec->gid : gid,
			     job, &job, f);
	else
		r = job_check_same(job, &own, f);
	if (r == 0)
		*ret = job;
	if (r == 0 && ret_created)
		*ret_created = created;
	return r;
}
