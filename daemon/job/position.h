/*
 * At which step of the training the parameters of a job are, and which blobs belong to it.
 *
 * A commit says a number. A Step may say its own, with a blob of each rank; both take effect when
 * the step is applied. A Step without a number moves on by one, if the job's numbers have done so
 * before: a commit after n such Steps was n above the number before it (or was n, if it is the first
 * one). Otherwise nobody knows what the next commit would have been, and a job that loses a trainer
 * between the two is TORN (job_tear).
 *
 * A Step that drops its gradients and has no number may count or not: after it the position is known
 * only while the parameters are those of the last number, or from the next number on. In a job with
 * units of groups that are stepped, only from a commit until the next Step.
 *
 * With optimizers in backward some units are stepped before the others. Until all are, the
 * parameters are those of no step: rec->partial. A loss then rolls the units back to the step before
 * (job/kept.h).
 *
 * Loop thread. All of it is in the record and the journal.
 */
#ifndef SHARDD_JOB_POSITION_H
#define SHARDD_JOB_POSITION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "store/state.h"

struct job;

/* What one rank says of a Step. */
struct position_mark {
	uint64_t number;
	bool charged;  /* @blob, to the job's quota */
	uint8_t *blob; /* owned */
	size_t bytes;
};

/* @blob: copied; at most JOB_MAX_BLOB bytes, 0: the rank's blob stays. @ret: ended by
 * position_mark_free. Return: 0 or -fault code in @f. */
int position_mark_new(uint64_t number, const void *blob, size_t bytes, struct position_mark **ret,
		      struct fault *f);
/* NULL is allowed. */
void position_mark_free(struct job *job, struct position_mark *m);

/* Is @number above all that was there? */
int position_check_step(const struct job *job, uint64_t number, struct fault *f);
/* Is @number that of the parameters, if a Step has said it, and above the last commit? */
int position_check_commit(const struct job *job, uint64_t number, struct fault *f);

/* A Step is prepared. @marks: one per rank of the job, NULL: none; each becomes the job's. Return: 0
 * or -ENOMEM: then nothing has changed. */
int position_prepare(struct job *job, struct position_mark **marks);
/* It has taken effect, if only to drop gradients (@skipped). At most once until the next
 * position_prepare. */
void position_stepped(struct job *job, bool skipped);
/* It never will. */
void position_drop(struct job *job);

/* Parameters or state were written by something that is no step: they are those of no step, until one
 * says its number, or a commit. */
void position_altered(struct job *job);

/* Some units have been stepped, and the others not yet. */
void position_begin_partial(struct job *job);
/* That pass ends here, as it is, unless it is rolled back. */
void position_end_partial(struct job *job);

void position_committed(struct job *job, uint64_t number);
/* The parameters are those of the last commit again. */
void position_rolled_back(struct job *job);
/* The units that had made a step in progress are those of the step before it again; with units of
 * groups, those of the last commit. */
void position_rolled_back_step(struct job *job);
/* The parameters are new: nothing was committed. */
void position_reset(struct job *job);

/* The step of the parameters. Return: false: there is none, or nobody knows. */
bool position_of(const state_job *rec, uint64_t *ret);

#endif
