/*
 * The kept copy of a job's state, which the job is rolled back to when an epoch ends after changes that
 * nobody could go on from.
 *
 * JOB_RESUME_COMMITTED: of all units. Before the first change after a commit, their parameters and
 * optimizer state are copied to memory of the job; the copy is that of the last commit until the next
 * one. Its memory is taken at a commit.
 *
 * JOB_RESUME_APPLIED: of the units that make a step before the Step (unit_steps_early). Before the
 * first of them does, they are copied; the copy is that of the last applied step until the step is
 * whole. With units of groups, whose steps nobody can number, until the next commit. Its memory is
 * taken when such units are registered.
 *
 *   rec->kept:     the copy is valid, and the state may differ from it
 *   rec->rollback: it must be copied back before anybody joins
 *
 * Both are in the journal before the bytes follow, so that a successor of a daemon that dies at any
 * time finds the state in the one place or the other. A step that is recorded together with its commit,
 * and that a successor can complete, needs no copy (job->step.covered).
 *
 * The copy of a unit is one region on each of its devices: the parameters, then the arrays of
 * optimizer state. Loop thread only.
 */
#ifndef SHARDD_JOB_KEPT_H
#define SHARDD_JOB_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/res.h"
#include "job/job_types.h"

/* Does the job resume at its commits? */
bool kept_at_commits(const struct job *job);
/* Will a unit of that record and layout have a copy from its registration on? */
bool kept_takes(const struct job *job, const state_unit *rec, const struct layout *l);
/* Bytes of memory that the copies of all its units need, without rounding. */
uint64_t kept_bytes(const struct job *job);
/* Take the memory that units have no copy of yet. Return: 0, SLAB_E_*, or negative errno: then some
 * have none. */
int kept_reserve(struct job *job);

/* job_ops.before_change: may parameters and optimizer state be changed? RES_WAIT: they are being copied, or there is no
 * memory to do so yet; readers_go_on follows. */
enum res kept_let(struct job *job, enum job_change what);

/* A commit has taken effect: what is in the units is what a loss leaves. */
void kept_committed(struct job *job);
/* A prepared step begins to change @units: the copy has all of them, or is of no use from here on. */
void kept_applies(struct job *job, struct unit *const *units, unsigned n);
/* @u is laid out otherwise: nothing is rolled back to the copy of before. That of @u has the place of
 * @fresh's, or none. */
void kept_moved(struct job *job, struct unit *u, const struct unit *fresh);

/* Has the step in progress changed units, so that the end of the epoch rolls them back to the step
 * before it? Not of a job that resumes at its commits. */
bool kept_goes_back(const struct job *job);
/* An epoch has ended: what has changed is rolled back, as soon as nothing of the job runs any more
 * (kept_go_on). */
void kept_epoch_ended(struct job *job);
/* Must a rank that joins wait? */
bool kept_is_rolling_back(const struct job *job);
/* Begin what can begin. Call whenever something of the job is over, and now and then. */
void kept_go_on(struct job *job);

#endif
