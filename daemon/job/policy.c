#include "job/policy.h"

#include <errno.h>

#include "core/clock.h"
#include "core/fnv.h"
#include "core/log.h"
#include "job/job.h"
#include "job/job_journal.h"
#include "job/policy_spec.h"
#include "job/saving.h"

void policy_begin(struct job *job)
{
	job->checkpoints.step = job->rec->step;
	job->checkpoints.us = clock_now_us();
}

int policy_set(struct job *job, const state_checkpoints *c, struct fault *f)
{
	if (c && policy_spec_check(job->node, c, f))
		return f->code;
	if (policy_take(job, c, f))
		return f->code;
	if (job->jobs->ops.across.policy)
		job->jobs->ops.across.policy(job);
	return 0;
}

int policy_take(struct job *job, const state_checkpoints *c, struct fault *f)
{
	if (state_job_set_checkpoints(job->rec, c) < 0)
		return fault_errno(f, -ENOMEM, "setting the policy of checkpoints");
	policy_begin(job);
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	job_journal_write(job);
	return 0;
}

uint64_t policy_hash(const state_checkpoints *c)
{
	uint64_t h = FNV_BEGIN;

	if (!c)
		return 0;
	for (const char *at = c->path; *at; at++)
		h = fnv_add(h, (unsigned char)*at);
	h = fnv_add(h, c->every_steps);
	h = fnv_add(h, c->every_s);
	h = fnv_add(h, c->keep);
	return fnv_add(h, c->bytes_per_s) | 1;
}

bool policy_will_be_due(const struct job *job, uint64_t step)
{
	const state_checkpoints *c = job->rec->checkpoints;
	uint64_t last = job->checkpoints.step;

	if (!c)
		return false;
	if (c->every_steps && step / c->every_steps > last / c->every_steps)
		return true;
	return c->every_s && clock_now_us() - job->checkpoints.us >= c->every_s * UINT64_C(1000000);
}

static void policy_on_over(const struct saving_report *r, const struct fault *f, void *userdata)
{
	struct job *job = userdata; /* lives until its checkpoint is over */

	if (f && f->code == FAULT_ABORTED) /* nodes have lost each other: the next commit is due */
		job->checkpoints.step = job->checkpoints.us = 0;
	if (f)
		log_warn("job", "checkpoint_failed job=%s step=%llu path=%s code=%s why=\"%s\"",
			 job->label, (unsigned long long)r->step, r->path, fault_code_name(f->code),
			 f->text);
	else
		log_info("job", "checkpoint job=%s step=%llu path=%s bytes=%llu copied=%llu",
			 job->label, (unsigned long long)r->step, r->path,
			 (unsigned long long)r->bytes, (unsigned long long)r->copied);
}

/* For what holds the parameters until all is listed. */
static struct proc *policy_proc(const struct job *job)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			return job->ranks[r]->proc;
	return NULL;
}

/* @step: the last commit, or, @next, the one that is about to be made. */
static void policy_save(struct job *job, uint64_t step, bool next)
{
	const state_checkpoints *c = job->rec->checkpoints;
	struct proc *proc = policy_proc(job);
	struct fault f = FAULT_NULL;

	if (!c || !proc || !policy_will_be_due(job, step) || saving_is_busy(job) || job->generation)
		return;
	job->checkpoints.step = step; /* also if it fails: the next one is tried as much later */
	job->checkpoints.us = clock_now_us();
	if (saving_begin(job, proc,
			 &(struct saving_options){ .path = c->path,
						   .bytes_per_s = c->bytes_per_s,
						   .deadline_us = UINT64_MAX,
						   .keep = c->keep,
						   .next = next },
			 policy_on_over, job, &f))
		log_warn("job", "checkpoint_failed job=%s step=%llu path=%s code=%s why=\"%s\"",
			 job->label, (unsigned long long)step, c->path, fault_code_name(f.code),
			 f.text);
}

void policy_committed(struct job *job)
{
	if (!job_is_across(job))
		policy_save(job, job->rec->step, false);
}

void policy_committing(struct job *job, uint64_t step)
{
	bool due = policy_will_be_due(job, step);
	bool replicates =
		job->jobs->ops.across.replicate && job->jobs->ops.across.replicate(job, due);

	if (!replicates && job_is_across(job)) /* else when it is committed */
		policy_save(job, step, true);
}
