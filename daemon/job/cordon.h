/*
 * A cordon: the daemon admits no new jobs, and jobs that exist train on. A successor that takes the
 * jobs over takes it over, too. Loop thread only.
 */
#ifndef SHARDD_JOB_CORDON_H
#define SHARDD_JOB_CORDON_H

#include "job/job_types.h"

/* @on: by @uid, now. Without a change, what was said first stays. Return: 0, or FAULT_EXHAUSTED:
 * the journal could not be written, and nothing has changed. */
int cordon_set(struct jobs *jobs, bool on, uid_t uid, struct fault *f);

/* May a job be made? Return: 0 or FAULT_UNAVAILABLE. */
int cordon_check(const struct jobs *jobs, struct fault *f);

#endif
