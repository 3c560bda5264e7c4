/* Shared by registration.c, job_units.c and job_restore.c. */
#ifndef SHARDD_JOB_UNITS_IMPL_H
#define SHARDD_JOB_UNITS_IMPL_H

#include "job/job.h"

/* Index of the device on which the buffers of @rank are. */
unsigned job_device_of(const struct job *job, uint32_t rank);

/* Make room for @units more. Return: 0 or -ENOMEM. */
int job_units_grow(struct job *job, size_t units);
/* The number is a dropped unit's. */
void job_note_dropped(struct job *job, uint32_t number);
/* Up to @most numbers of dropped units that may be used again, ascending. Return: how many. They stay
 * noted until job_forget_dropped, which forgets those that are used. */
uint32_t job_take_dropped(const struct job *job, uint32_t *ret, uint32_t most);
void job_forget_dropped(struct job *job);

/* Resolve the aliases of the units from @first on. Return: 0 or a fault code. */
int job_units_resolve_aliases(struct job *job, uint32_t first, struct fault *f);

#endif
