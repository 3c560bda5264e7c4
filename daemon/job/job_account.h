/* What a job costs, and what its account says when it refuses. Loop thread only. */
#ifndef SHARDD_JOB_JOB_ACCOUNT_H
#define SHARDD_JOB_JOB_ACCOUNT_H

#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

struct job;

/* Upper bound of the daemon's own bytes for a job of @units and @tensors: records, and each rank's
 * state of each unit. */
uint64_t job_own_bytes(const struct job *job, uint64_t units, uint64_t tensors);
/* The account refused a slab of @bytes. If the owner's limits were the reason, @f says so.
 * Return: 0, or a fault code. */
int job_owner_fault(const struct job *job, uint64_t bytes, struct fault *f);

/* Describe how much each job and class holds, for RESOURCE_EXHAUSTED texts. */
void job_holders(const struct job *job, char *buf, size_t bytes);

#endif
