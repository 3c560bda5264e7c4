#include "job/cordon.h"

#include <errno.h>
#include <time.h>

#include "job/job_journal.h"

int cordon_set(struct jobs *jobs, bool on, uid_t uid, struct fault *f)
{
	struct jobs_cordon before = jobs->cordon;

	if (on == before.on)
		return 0;
	jobs->cordon = (struct jobs_cordon){ .on = on };
	if (on) {
		jobs->cordon.uid = uid;
		jobs->cordon.unix_s = (uint64_t)time(NULL);
	}
	if (!jobs->journal || jobs_journal_base(jobs) == 0)
		return 0;
	jobs->cordon = before;
	return fault_errno(f, -ENOMEM, "writing the journal");
}

int cordon_check(const struct jobs *jobs, struct fault *f)
{
	time_t since = (time_t)jobs->cordon.unix_s;
	char when[32] = "?";
	struct tm tm;

	if (!jobs->cordon.on)
		return 0;
	if (gmtime_r(&since, &tm))
		strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S UTC", &tm);
	return fault_set(f, FAULT_UNAVAILABLE, NULL,
			 "the daemon is cordoned (by uid %u at %s): it admits no new jobs, and "
			 "those that exist train on; an administrator ends this with shardctl "
			 "uncordon",
			 jobs->cordon.uid, when);
}
