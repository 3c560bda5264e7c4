/*
 * Whose turn it is: tasks of several users and jobs that share the host's threads.
 *
 * Users share by weight, counted in bytes; the jobs of a user share evenly. The next piece goes to
 * the user that has received least for its weight since there was another user to share with; of
 * that user's jobs, to the one that has received least; of that job's tasks, to the oldest. A new
 * user starts at the lowest count, so that idle time gives no credit, and goes first at a tie: a
 * small task waits only for the pieces that run now, one per thread.
 *
 * Exact for FAIR_USERS users and FAIR_JOBS jobs of each at a time; more share a place. Nothing
 * is allocated. It has no thread and no lock; the caller does the locking.
 */
#ifndef SHARDD_BACKEND_HOST_FAIR_H
#define SHARDD_BACKEND_HOST_FAIR_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "core/list.h"

#define FAIR_USERS 64u
#define FAIR_JOBS  16u

/* The tasks of one job, or of one user. */
struct fair_share {
	struct list link;  /* in its parent's active ones, the newest first */
	struct list tasks; /* of a job: struct fair_task, oldest first */
	struct list jobs;  /* of a user: struct fair_share */
	uint32_t id;
	uint32_t weight;
	uint64_t served; /* bytes, times BACKEND_WEIGHT / weight */
};

struct fair_task {
	struct list link; /* share->tasks */
	struct fair_share *user;
	struct fair_share *job;
};

struct fair {
	struct list users; /* of struct fair_share, with tasks, the newest first */
	unsigned active;   /* jobs with tasks, of all users */
	struct fair_share user[FAIR_USERS];
	struct fair_share job[FAIR_USERS][FAIR_JOBS];
};

void fair_init(struct fair *f);

/* Add @t as its owner's newest task. */
void fair_add(struct fair *f, struct fair_task *t, struct backend_owner owner);
/* Remove @t: no piece of it is left to start. Safe to call twice. */
void fair_remove(struct fair *f, struct fair_task *t);

/* The task whose turn it is. Return: NULL if there are no tasks. */
struct fair_task *fair_next(const struct fair *f);
/* Count @bytes of work for the owner of @t. */
void fair_served(struct fair_task *t, uint64_t bytes);

/* Are there tasks of several jobs? */
static inline bool fair_shared(const struct fair *f)
{
	return f->active > 1;
}

#endif
