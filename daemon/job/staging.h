/*
 * Staging: memory of the machine for bytes of a job that lie on GPUs. The job's account pays for it,
 * that of the GPU does not; and it is not more than the machine and the daemon's control group have.
 * Loop thread; any thread may use the memory.
 */
#ifndef SHARDD_JOB_STAGING_H
#define SHARDD_JOB_STAGING_H

#include <stdint.h>

struct job;

/* @ret: not filled. Return: 0, -EDQUOT (the job or its user has no room), or -ENOMEM. */
int staging_take(struct job *job, uint64_t bytes, void **ret);
/* NULL is allowed. Return: NULL. */
void *staging_give(struct job *job, void *at, uint64_t bytes);

#endif
