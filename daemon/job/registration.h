/*
 * Registering units, a whole model at once: all of them or none. The check of the units can be cut
 * into pieces, with turns of the loop in between, during which the job does not contain them; then
 * all are built at once. One at a time in a job (CHECKed). Loop thread only.
 */
#ifndef SHARDD_JOB_REGISTRATION_H
#define SHARDD_JOB_REGISTRATION_H

#include "job/job.h"

struct registration;

/* Register units, all or none, in one piece: for tests. The daemon does it in pieces. @specs: records without parts; those that
 * become units are taken over (their pointer is set to NULL). @ret_ids: @n ids.
 * Return: 0, JOB_E_LATER (ranks are not placed yet, memory or communicators are being made:
 * nothing has changed), or a fault. */
int job_register(struct job *job, state_unit **specs, size_t n, uint32_t *ret_ids,
		 uint64_t *ret_charged, struct fault *f);

/* As job_register, but nothing is done yet. @specs, @ids: the caller's, until it is freed.
 * Return: 0 or -ENOMEM. */
int registration_new(struct job *job, state_unit **specs, size_t n, uint32_t *ids,
		     struct registration **ret);

/* Check further units, until @tensors tensors were checked. Return: 0 (that was the last one),
 * REGISTRATION_E_MORE, or a fault. */
enum { REGISTRATION_E_MORE = -1 };
int registration_check(struct registration *r, size_t tensors, struct fault *f);

/* After the last one: make the new ones. Return: as job_register. */
int registration_build(struct registration *r, uint64_t *ret_charged, struct fault *f);

/* NULL is allowed. */
void registration_free(struct registration *r);

#endif
