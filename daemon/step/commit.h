/*
 * A commit that has begun: the step, and the blob of each rank of this node. It is recorded once, together
 * with the step that it commits if it waits for that. Loop thread only.
 */
#ifndef SHARDD_STEP_COMMIT_H
#define SHARDD_STEP_COMMIT_H

#include <stdint.h>

#include "core/fault.h"
#include "core/res.h"

struct job;
struct position_mark;

struct commit {
	uint64_t step;
	struct position_mark **marks; /* by rank, owned; NULL: that rank is on another node */
};

/* Of job @job, without marks. Return: NULL: no memory. */
struct commit *commit_new(const struct job *job, uint64_t step);
/* @mark is taken. */
void commit_add(struct commit *c, uint32_t rank, struct position_mark *mark);
/* NULL is allowed. Return: NULL. */
struct commit *commit_free(struct job *job, struct commit *c);

/* Take what a commit needs to take effect: room for blobs, and for the copy of the state that a job that
 * resumes at its commits goes back to. RES_WAIT: memory comes later: wait for the node. */
enum res commit_reserve(struct job *job, struct fault *f);
/* May the ranks here say that they are ready for one, which nobody can refuse after that? Return: 0 or a
 * fault code. */
int commit_check(struct job *job, struct fault *f);
/* It takes effect as soon as the prepared step is applied: apply_wait, then commit_end. @c is taken. */
void commit_begin(struct job *job, struct commit *c);
/* Put step and blobs into the record, if that was not done and nothing is in the way. */
void commit_record(struct job *job);
/* The prepared step is applied, or was abandoned (@ret_abandoned). RES_DONE: the commit has taken effect. */
enum res commit_end(struct job *job, bool *ret_abandoned, struct fault *f);

/* Of a Commit that has not begun, and that is announced: op_commit.c. Return: its step. */
struct op;
uint64_t op_commit_step(const struct op *op);
/* Its blob, borrowed. */
struct position_mark *op_commit_mark(const struct op *op);
/* The same, and it is the caller's. */
struct position_mark *op_commit_take(struct op *op);

#endif
