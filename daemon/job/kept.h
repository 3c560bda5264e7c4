/*
 * The kept copy of the committed state, of jobs that resume at their commits (JOB_RESUME_COMMITTED).
 *
 * Before the first change after a commit, the parameters and the optimizer state of all units are
 * copied to memory of the job. An epoch that has ended after such changes is rolled back: all is
 * copied back, and a rank that joins waits for that.
 *
 *   rec->kept:     the copy is that of the last commit, and the state may differ from it
 *   rec->rollback: it must be copied back before anybody joins
 *
 * Both are in the journal before the bytes follow, so that a successor of a daemon that dies at any
 * time finds the committed state in the one place or the other. A step that is recorded together with
 * its commit, and that a successor can complete, needs no copy (job->step.covered).
 *
 * The copy of a unit is one region on each of its devices: the parameters, then the arrays of
 * optimizer state. Loop thread only.
 */
#ifndef SHARDD_JOB_KEPT_H
#define SHARDD_JOB_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/res.h"

struct job;
struct unit;

/* Does the job resume at its commits? */
bool kept_is_on(const struct job *job);
/* Bytes of memory that the copies of all its units need, without rounding. */
uint64_t kept_bytes(const struct job *job);
/* Take the memory that units have no copy of yet. Return: 0, SLAB_E_*, or negative errno: then some
 * have none. */
int kept_reserve(struct job *job);

/* job_ops.before_change: may parameters and optimizer state be changed? RES_WAIT: they are being copied, or there is no
 * memory to do so yet; readers_go_on follows. */
enum res kept_let(struct job *job);

/* A commit has taken effect: the copy is not that of the last commit any more. */
void kept_committed(struct job *job);
/* The state is that of the last commit, laid out otherwise: there is nothing to roll back. The copy of
 * @u, whose arrays are others now, goes. */
void kept_forget(struct job *job, struct unit *u);

/* An epoch has ended: what has changed since the last commit is rolled back, as soon as nothing of the
 * job runs any more (kept_go_on). */
void kept_epoch_ended(struct job *job);
/* Must a rank that joins wait? */
bool kept_is_rolling_back(const struct job *job);
/* Begin what can begin. Call whenever something of the job is over, and now and then. */
void kept_go_on(struct job *job);

#endif
