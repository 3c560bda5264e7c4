/*
 * Elastic: a job changes its number of ranks by itself, while its trainers stay.
 *
 * Processes are told apart by the numbers that they were started with: number @n of the @launched that
 * their launcher started. A job that has gone on with others than those has the numbers of its ranks in its
 * record, so that a process joins with the same arguments each time.
 *
 * A process that joins with a number that no rank has waits outside: a newcomer. When ranks are missing, and no other
 * has come for the job's join_grace_ms, those that are back and the newcomers become the ranks of the job,
 * in the order of their numbers (job/resize.h). While all ranks are there, newcomers are taken in at a
 * commit, or at a numbered Step in a job without commits: no step is made twice.
 *
 *   ranks are missing   --grace, or all that were started are there--> resize
 *   all are there, newcomers wait --grace, then the next commit--> resize
 *
 * Where all ranks of such a job have ended and are started again, they are newcomers, too, until all that
 * were started are there, or the grace is over: none of them finds itself in a job that changes once more.
 *
 * It is never smaller than min_ranks. Loop thread only.
 */
#ifndef SHARDD_JOB_ELASTIC_H
#define SHARDD_JOB_ELASTIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/fault.h"
#include "core/list.h"
#include "core/res.h"

struct device;
struct job;
struct job_joining;

/* A newcomer. Embedded in a request to join. */
struct elastic_newcomer {
	struct list link; /* in job.elastic, while it waits */
	uint32_t number;
	pid_t pid;
	struct device *device; /* that it asks for; NULL: any */
	uint64_t until_us;     /* it gives up; 0: never */
	bool taken;            /* the job has, or is about to have, a rank for it */
};

void elastic_newcomer_init(struct elastic_newcomer *n);
/* It waits no more. Safe if it does not. */
void elastic_newcomer_leave(struct elastic_newcomer *n);

/* Does a process that has a rank wait, too, to see who else comes? */
bool elastic_gathers(const struct job *job, const struct job_joining *how);
/* @number joins, and is no rank: it waits outside. @n: its own; it may wait already. RES_WAIT: wait for
 * job.settled, then join again. */
enum res elastic_wait(struct job *job, uint32_t number, const char *device, pid_t pid,
		      struct elastic_newcomer *n, struct fault *f);
/* A rank has joined. */
void elastic_joined(struct job *job);
/* A Commit is over; a Step is applied. */
void elastic_committed(struct job *job);
void elastic_stepped(struct job *job);
/* Call now and then. */
void elastic_tick(struct job *job, uint64_t now_us);
/* Does something of it come from the loop queue? Then the job must not be freed. */
bool elastic_is_posted(const struct job *job);

/* What is waited for, and what happens then, in words; "" for nothing. @ret_ms: until then; 0: that does
 * not depend on time. */
void elastic_describe(const struct job *job, char *buf, size_t bytes, uint64_t *ret_ms);

#endif
