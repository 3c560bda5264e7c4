/*
 * Copies of the buffers of a job's units, for its checkpoints.
 *
 * Trainers write their buffers at any time. So a checkpoint takes them from a copy that is made in a
 * Commit: when all ranks have reached it, and before any of them is answered. If that commit takes
 * effect, the copy is of it. Small ones are copied by every commit, so that a checkpoint can begin
 * after it; others only by a commit that a checkpoint waits for.
 *
 * A job that has no such copy (a daemon that was restarted does not, nor does one that was resized)
 * has one made as soon as no trainer is in it: then it is of the buffers as the trainers have left
 * them, which is how the next ones find them, and says so.
 *
 * Copies are in host memory, and only where the daemon makes checkpoints. Those of buffers on GPUs are
 * made by the main queues, behind the streams that the Commit comes after. Loop thread.
 */
#ifndef SHARDD_JOB_BUFCOPY_H
#define SHARDD_JOB_BUFCOPY_H

#include <stdbool.h>
#include <stdint.h>

#include "core/res.h"

struct bufcopy;
struct job;
struct unit;
struct waiter;

/* Has a unit of the job buffers? */
bool bufcopy_has_buffers(const struct job *job);
/* On GPUs: a Commit first waits for the streams that its ranks have named: they write the buffers. */
bool bufcopy_needs_streams(const struct job *job);
/* For a Commit whose ranks have all come: RES_WAIT while a copy is being made. */
enum res bufcopy_settle(struct job *job, struct waiter *w);
/* After that: make the copy of the commit of @step, if it is small or @wanted. RES_WAIT: it is being
 * made, and @w is resumed when it is over. Without memory there is none, and the commit goes on. */
enum res bufcopy_begin(struct job *job, uint64_t step, bool wanted, struct waiter *w);
/* The commit has taken effect. */
void bufcopy_committed(struct job *job);
/* Can a checkpoint of the last commit begin, as far as buffers go? If not, it can later: at the next
 * commit, or when the copy is made that this begins. True also if there was no memory for one. */
bool bufcopy_is_ready(struct job *job);
/* Try again for memory. */
void bufcopy_retry(struct job *job);
/* The copy of the last commit. Return: a reference; NULL: there is none. */
struct bufcopy *bufcopy_take(const struct job *job);
/* Drop all of them: the buffers are others now, or nothing runs and the job ends. */
void bufcopy_forget(struct job *job);
/* Other memory is needed. Return: bytes that were given back. */
uint64_t bufcopy_evict(struct job *job);

struct bufcopy *bufcopy_ref(struct bufcopy *b);
/* NULL is allowed. Return: NULL. */
struct bufcopy *bufcopy_unref(struct bufcopy *b);
/* Is it of what the trainers have left, and not of a commit? */
bool bufcopy_is_as_left(const struct bufcopy *b);
/* Where the buffers of member @index of @u's group begin in it: bytes from its beginning. */
uint64_t bufcopy_at(const struct bufcopy *b, const struct unit *u, uint32_t index);
/* Its memory. It does not change. */
const char *bufcopy_data(const struct bufcopy *b);
/* Of all its buffers. */
uint64_t bufcopy_bytes(const struct bufcopy *b);

#endif
