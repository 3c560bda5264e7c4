/* Does the journal say what the jobs are? */
#ifndef SHARDD_TESTS_JOURNALFIX_H
#define SHARDD_TESTS_JOURNALFIX_H

#include "job/job.h"
#include "store/journal.h"

/* A journal of @jobs from here on; the caller's, journal_free after the jobs. */
struct journal *journalfix_begin(struct jobs *jobs);

/* Fails the test unless a successor that read the journal now would get every job as its record is,
 * bit for bit. What is marked is written before. */
void journalfix_check(struct jobs *jobs);

#endif
