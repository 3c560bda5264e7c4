/*
 * A job in the journal (store/journal.h): what changes its record marks the part that has changed,
 * and what is marked is written as one entry before anybody is told of it: before the answer to a
 * request, and before kernels change in place what a successor would go on from.
 *
 * Without a journal, all of this does nothing; nor for a job whose memory is shared as CUDA IPC
 * handles, since that does not outlive the daemon. Loop thread only.
 */
#ifndef SHARDD_JOB_JOB_JOURNAL_H
#define SHARDD_JOB_JOB_JOURNAL_H

#include <stddef.h>

#include "job/job_types.h"
#include "store/change.h"

/* Parts of a job's record. */
enum job_journal_part {
	JOB_JOURNAL_HEAD = 1, /* all but the following */
	JOB_JOURNAL_PROGRESS = 2,
	JOB_JOURNAL_BLOBS = 4,
	JOB_JOURNAL_UNITS = 8, /* those that are marked */
	JOB_JOURNAL_SLABS = 16,
	JOB_JOURNAL_POOLED = 32, /* those that are not saved, and those that are gone */
	JOB_JOURNAL_DOUBT = 64,
};

void job_journal_init(struct job *job);
void job_journal_deinit(struct job *job);

/* @parts (of enum job_journal_part) have changed. */
void job_journal_mark(struct job *job, unsigned parts);
/* The record of @u has changed. */
void job_journal_mark_unit(struct job *job, struct unit *u);
/* All of the number of steps of @u that has changed (unit_stepped). */
void job_journal_mark_steps(struct job *job, struct unit *u);

/* @p is about to go. */
void job_journal_pooled_gone(struct job *job, const struct pooled *p);

/* Write what is marked. */
void job_journal_write_now(struct job *job);
static inline void job_journal_write(struct job *job)
{
	if (job->unsaved.parts)
		job_journal_write_now(job);
}
void jobs_journal_write(struct jobs *jobs);
/* The launches of @t make hold what the record says: write both as one entry. */
void job_redo_begin(struct job *job, struct redo_task *t);
/* Take memory for an entry of @bytes beside what has a fixed size. Return: 0 or -ENOMEM. */
int job_journal_reserve(struct job *job, size_t bytes);
/* The job was deleted. */
void job_journal_gone(struct job *job);

/* All jobs as they are, as a new base. Return: 0 or -ENOMEM: the journal is as it was. */
int jobs_journal_base(struct jobs *jobs);
/* Write what is marked, and a new base if the journal has become long or incomplete. */
void jobs_journal_tick(struct jobs *jobs);

#endif
