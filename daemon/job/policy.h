/*
 * The policy of a job's checkpoints: when the daemon makes one by itself. Each commit asks whether one
 * is due; it is made of that commit, in the background (job/saving.h). While the one before is being
 * written the next one stays due. What fails is in the log and in status; the job trains on. Loop
 * thread.
 */
#ifndef SHARDD_JOB_POLICY_H
#define SHARDD_JOB_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "store/state.h"

struct job;

/* Replace the job's policy by a copy of @c; NULL: none. It counts from the last commit, and from now,
 * on. Return: 0 or a fault code. */
int policy_set(struct job *job, const state_checkpoints *c, struct fault *f);
/* The record has it: it counts from the last commit, and from now, on. */
void policy_begin(struct job *job);
/* Will a checkpoint be due, if @step is committed now? */
bool policy_will_be_due(const struct job *job, uint64_t step);
/* A commit has taken effect. */
void policy_committed(struct job *job);
/* Of a job with ranks on several nodes, at the one that leads it: all of them are about to commit @step. */
void policy_committing(struct job *job, uint64_t step);
/* The policy that was set on another node, whose roots are its own: as policy_set, unchecked. */
int policy_take(struct job *job, const state_checkpoints *c, struct fault *f);
/* Equal policies, equal words; 0: none. */
uint64_t policy_hash(const state_checkpoints *c);

#endif
