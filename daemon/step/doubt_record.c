#include "step/doubt_record.h"

#include <stdlib.h>

#include "job/job.h"
#include "job/job_journal.h"

void doubt_record_clear(struct job *job)
{
	if (!job->rec->doubt)
		return;
	state_doubt_free(job->rec->doubt);
	job->rec->doubt = NULL;
	job_journal_mark(job, JOB_JOURNAL_DOUBT);
}

void doubt_record_applied(struct job *job)
{
	state_doubt *d = job->rec->doubt;

	if (!d || !d->prepared)
		return;
	if (!d->has_commit) {
		doubt_record_clear(job);
		return;
	}
	d->prepared = false;
	d->redo = 0;
	d->n_units = 0;
	job_journal_mark(job, JOB_JOURNAL_DOUBT);
}

/* The record's, of this epoch. Return: NULL: no memory. */
state_doubt *doubt_record_get(struct job *job)
{
	state_doubt *d = job->rec->doubt;

	if (d && d->epoch == job->rec->epoch)
		return d;
	doubt_record_clear(job);
	d = state_doubt_new();
	if (d)
		d->epoch = job->rec->epoch;
	job->rec->doubt = d;
	return d;
}
