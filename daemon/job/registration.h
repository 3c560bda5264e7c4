/*
 * Registering units, a whole model at once: all of them or none. The check of the units can be cut
 * into pieces, with turns of the loop in between, during which the job does not contain them; then
 * all are built at once. One at a time in a job (CHECKed). Loop thread only.
 */
#ifndef SHARDD_JOB_REGISTRATION_H
#define SHARDD_JOB_REGISTRATION_H

#include "job/job.h"

struct admission_call;
struct registration;

/* Begin; nothing is done yet. @specs: @n records without parts; those that become units are taken
 * over (their pointer is set to NULL). @ids: gets @n ids. Both are the caller's, until it is freed.
 * Return: 0 or -ENOMEM. */
int registration_new(struct job *job, state_unit **specs, size_t n, uint32_t *ids,
		     struct registration **ret);

/* Before the first check: no epoch runs, so communicators are not asked for. @numbers: (optional, borrowed) of
 * dropped units, ascending, for the first @n of the specs, which are all new; the others get what comes. */
void registration_between_epochs(struct registration *r, const uint32_t *numbers, uint32_t n);

/* Before the first check: it waits for memory in the line, and goes before nobody there (job/admission.h).
 * @line: borrowed. Without this it fails where there is no memory. */
void registration_may_wait(struct registration *r, struct admission_call *line);

/* Check further units, until @tensors tensors were checked. Return: 0 or a fault code. */
int registration_check(struct registration *r, size_t tensors, struct fault *f);

/* Was the last one checked? */
bool registration_is_checked(const struct registration *r);

/* After the last one: make the new ones. RES_WAIT: nothing has changed: if line->waits, there is no memory, and
 * line->resume follows; else ranks are not placed yet, memory or communicators are being made: wait for
 * node.changed. Then register again. After RES_FAILED job_drop_spare has been called. */
enum res registration_build(struct registration *r, uint64_t *ret_charged, struct fault *f);

/* NULL is allowed. */
void registration_free(struct registration *r);

#endif
