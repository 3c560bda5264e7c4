/* Shared by job.c and job_restore.c: the making of a job around its record. Loop thread only. */
#ifndef SHARDD_JOB_IMPL_H
#define SHARDD_JOB_IMPL_H

#include "job/job.h"

/* A job around @rec, with its groups; nothing else yet. Takes @rec on success. Return: NULL with
 * @f. */
struct job *job_new(struct jobs *jobs, state_job *rec, struct fault *f);

/* Make it known by its name. Return: 0 or -ENOMEM. */
int job_publish(struct job *job);

/* Free a job without members, running work and charges, and its record. Return: NULL. */
struct job *job_free(struct job *job);

#endif
