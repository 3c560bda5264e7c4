/* What is said of the policy of a job's checkpoints (job/policy.h), by its owner or its trainers. Loop
 * thread. */
#ifndef SHARDD_JOB_POLICY_SPEC_H
#define SHARDD_JOB_POLICY_SPEC_H

#include "core/fault.h"
#include "store/state.h"

struct node;

/* Can the daemon of @node follow @c? Return: 0 or a fault code. */
int policy_spec_check(const struct node *node, const state_checkpoints *c, struct fault *f);
/* A trainer says @c; the job's first one has said what @rec has. What the owner has set since does
 * not matter. Return: 0, or FAULT_STATE: another policy. */
int policy_spec_check_same(const state_job *rec, const state_checkpoints *c, struct fault *f);

#endif
