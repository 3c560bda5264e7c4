#include "job/policy.h"

#include <errno.h>

#include "core/clock.h"
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
	if (state_job_set_checkpoints(job->rec, c) < 0)
		return fault_errno(f, -ENOMEM, "setting the policy of checkpoints");
	policy_begin(job);
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	job_journal_write(job);
	return 0;
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
	const struct job *job = userdata; /* lives until its checkpoint is over */

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

void policy_committed(struct job *job)
{
	const state_checkpoints *c = job->rec->checkpoints;
	struct proc *proc = policy_proc(job);
	struct fault f = FAULT_NULL;

	if (!c || !proc || !policy_will_be_due(job, job->rec->step) || saving_is_busy(job) ||
	    job->generation)
		return;
	policy_begin(job); /* also if it fails: the next one is tried after the same time */
	if (saving_begin(job, proc,
			 &(struct saving_options){ .path = c->path,
						   .bytes_per_s = c->bytes_per_s,
						   .deadline_us = UINT64_MAX,
						   .keep = c->keep },
			 policy_on_over, job, &f))
		log_warn("job", "checkpoint_failed job=%s step=%llu path=%s code=%s why=\"%s\"",
			 job->label, (unsigned long long)job->rec->step, c->path,
			 fault_code_name(f.code), f.text);
}
