/*
 * Memory of a job's pools that outlives the daemon: the slabs of gradient and other buffers of its
 * ranks, of gradient shards, and of gathered copies. A successor has their pages as free memory of the
 * same pools, so that nobody makes, zeroes and maps them again. Their contents mean nothing, but for
 * a redo task, which reads gradient shards.
 *
 * All of it is spare: a slab that the store has no room for ends with the daemon, and so does one
 * whose process cannot be named.
 *
 * A slab that a trainer may write goes to the same process as the same rank, and to nobody else.
 * Until that process has joined, it is quarantined:
 *
 *   made --> in the rank's pool --rank ends--> quarantined --process is gone--> freed
 *                    |                              ^                |
 *               daemon dies                         |                |
 *                    '--process lives------> quarantined, lent ------'
 *                                              '--it joins as that rank--> in the rank's pool
 *
 * Without a journal all of this does nothing. Loop thread only.
 */
#ifndef SHARDD_JOB_POOLED_H
#define SHARDD_JOB_POOLED_H

#include "job/job_types.h"

struct member;

/* Of the job's pools but scratch: note each slab that they get. */
void pooled_begin(struct job *job);
/* No slab is left. */
void pooled_end(struct job *job);

/* Take over the slabs of the record. @fds: by index there, borrowed; -1: none; NULL: none at all. What
 * cannot be taken over is dropped from the record. Call it when the shards of all jobs are there. */
void pooled_restore(struct job *job, const int *fds);
/* A new member: the same for its pool, which has again what its process had as the same rank of an
 * earlier daemon. */
void pooled_join(struct member *m);

/* Is the memory of @r in the journal and in the store? */
bool pooled_outlives(const struct region *r);

/* The store may have room for slabs that had to wait. */
void jobs_pooled_retry(struct jobs *jobs);
/* Slabs that end with the daemon because the store had no room. */
uint32_t jobs_pooled_left_out(const struct jobs *jobs);

#endif
