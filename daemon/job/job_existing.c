/* What a rank that brings a model of its own finds in a job: state of an earlier run must not become
 * that model's unless the rank has asked for it. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/log.h"
#include "core/text.h"
#include "job/base.h"
#include "job/job.h"
#include "job/job_journal.h"

#define JOB_EXISTING_WHO_BYTES 160u

static bool job_existing_has_state(const struct job *job)
{
	if (job->rec->has_commit)
		return true;
	for (size_t i = 0; i < job->rec->n_units; i++)
		if (job->rec->units[i]->initialised)
			return true;
	return false;
}

/* Is the rank a part of the run that made the state, perhaps started again? Trainers that are in
 * the job say so, too, if one of the runs is not known. */
static bool job_existing_is_of_run(const struct job *job, const char *run)
{
	if (*run && *job->rec->run)
		return strcmp(run, job->rec->run) == 0;
	return job->present > 0;
}

static void job_existing_time(uint64_t unix_s, char *buf, size_t bytes)
{
	time_t when = (time_t)unix_s;
	struct tm tm;

	text_copy(buf, bytes, "?");
	if (gmtime_r(&when, &tm))
		strftime(buf, bytes, "%Y-%m-%d %H:%M:%S UTC", &tm);
}

/* Describe the maker of the state: the last process of the first rank that has one, and its run. */
static void job_existing_who(const struct job *job, char *buf, size_t bytes)
{
	const char *run = job->rec->run;
	uint32_t r = 0;

	while (r < job->rec->world_size && !job->ranks[r])
		r++;
	if (r < job->rec->world_size)
		snprintf(buf, bytes, "rank %u (pid %d)%s%s", r, member_pid(job->ranks[r]),
			 *run ? " of run " : "", run);
	else
		snprintf(buf, bytes, "trainers that are gone");
}

static int job_existing_refuse(const struct job *job, struct fault *f)
{
	unsigned long long steps = job->rec->uncommitted_steps;
	char who[JOB_EXISTING_WHO_BYTES], when[32], more[64] = "";

	job_existing_who(job, who, sizeof(who));
	if (!job->rec->has_commit)
		return fault_set(f, FAULT_STATE, "on_existing",
				 "job '%s' has state of an earlier run: %llu steps, none of them "
				 "committed, by %s",
				 job->rec->name, steps, who);
	job_existing_time(job->rec->committed_unix_s, when, sizeof(when));
	if (steps)
		snprintf(more, sizeof(more), " and %llu steps after it", steps);
	return fault_set(f, FAULT_STATE, "on_existing",
			 "job '%s' has state of an earlier run: step %llu, committed %s%s, by %s",
			 job->rec->name, (unsigned long long)job->rec->step, when, more, who);
}

static int job_existing_refuse_run(const struct job *job, struct fault *f)
{
	char who[JOB_EXISTING_WHO_BYTES];

	job_existing_who(job, who, sizeof(who));
	return fault_set(f, FAULT_STATE, "on_existing",
			 "job '%s' has %u trainers of another run, such as %s", job->rec->name,
			 job->present, who);
}

static int job_existing_refuse_fresh(const struct job *job, struct fault *f)
{
	char who[JOB_EXISTING_WHO_BYTES];

	job_existing_who(job, who, sizeof(who));
	return fault_set(f, FAULT_STATE, "on_existing",
			 "job '%s' cannot be created again while it has %u trainers, such as %s: "
			 "end them",
			 job->rec->name, job->present, who);
}

/* A base is not created in the place of a job that trains, nor the other way round: whoever asks for one does not know
 * of the other, whose parameters would be lost. */
static int job_existing_check_kind(const struct job *job, const struct job_spec *spec,
				   struct fault *f)
{
	bool base = job->rec->lifetime == JOB_BASE;

	if (base == (spec->lifetime == JOB_BASE))
		return 0;
	return fault_set(f, FAULT_STATE, "on_existing",
			 "job '%s' is %s, and would be deleted for %s of the same name: name "
			 "another one, or delete it first (shardctl job delete)",
			 job->rec->name, base ? "a base" : "no base",
			 base ? "a job that trains" : "a base");
}

/* The job that is created in its place has the same settings. */
static void job_existing_inherit(const struct job *job, struct job_spec *spec)
{
	const state_job *rec = job->rec;

	spec->lifetime = spec->lifetime ? spec->lifetime : (enum job_lifetime)rec->lifetime;
	spec->quota_bytes = spec->quota_bytes ? spec->quota_bytes : rec->quota_bytes;
	spec->ttl_s = spec->ttl_s ? spec->ttl_s : rec->ttl_s;
	spec->op_timeout_ms = spec->op_timeout_ms ? spec->op_timeout_ms : rec->op_timeout_ms;
	spec->priority = spec->priority ? spec->priority : rec->priority;
	spec->wait_for_memory_ms =
		spec->wait_for_memory_ms ? spec->wait_for_memory_ms : rec->wait_for_memory_ms;
	spec->is_private = spec->is_private || rec->is_private;
	spec->checkpoints = spec->checkpoints ? spec->checkpoints : rec->checkpoints;
	spec->resume = spec->resume ? spec->resume : (enum job_resume)rec->resume;
	if (!spec->max_ranks && spec->world_size >= rec->min_ranks &&
	    spec->world_size <= rec->max_ranks) {
		spec->min_ranks = rec->min_ranks;
		spec->max_ranks = rec->max_ranks;
		spec->join_grace_ms = rec->join_grace_ms;
	}
}

int job_existing_check(const struct job *job, struct job_spec *spec, bool *ret_replace,
		       struct fault *f)
{
	enum job_on_existing want = spec->on_existing ? spec->on_existing : JOB_RESUME;

	*ret_replace = false;
	if (want == JOB_RESUME || job_existing_is_of_run(job, spec->run ? spec->run : ""))
		return 0;
	if (want == JOB_ERROR && job_existing_has_state(job))
		return job_existing_refuse(job, f);
	if (want == JOB_ERROR)
		return job->present ? job_existing_refuse_run(job, f) : 0;
	CHECK(want == JOB_FRESH);
	if (job->present)
		return job_existing_refuse_fresh(job, f);
	if (job_existing_check_kind(job, spec, f) || base_check_delete(job, false, f))
		return f->code;
	job_existing_inherit(job, spec);
	*ret_replace = true;
	return 0;
}

void job_existing_joined(struct job *job, const char *run)
{
	if (job->present != 1 || strcmp(job->rec->run, run) == 0)
		return;
	if (state_job_set_run(job->rec, run) < 0)
		log_warn("job", "no memory to note the run job=%s", job->label);
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	job_journal_write(job);
}
