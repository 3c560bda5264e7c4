/*
 * The line for memory. A registration for which there is no room waits here, if its job may
 * (wait_for_memory_ms): one entry for each job, whatever number of its ranks wait.
 *
 *   WAITING --its turn, and there is room--> CALLED --it has the memory--> gone
 *      ^------------- no room after all ---------'
 *
 * The order: by priority; then jobs that have shards already, since they cannot go on without the
 * rest; then who has waited for ADMISSION_OLD_US, in the order in which they came; then the job whose
 * owner has fewest bytes of state; then who came first.
 *
 * While one waits, nobody behind it gets memory for shards on the devices that it asks for, so that
 * large jobs do not starve. One that only its owner's limits, or its own quota, keep back is passed
 * over. What can never be served is refused, also if it would close a ring of jobs that hold what the
 * others wait for. What running jobs take for gathered copies and gradients does not go through the line.
 * Loop thread only.
 */
#ifndef SHARDD_JOB_ADMISSION_H
#define SHARDD_JOB_ADMISSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/list.h"
#include "core/res.h"
#include "job/node.h"

#define ADMISSION_OLD_US (UINT64_C(600) * 1000000)

struct job;
struct jobs;

/* What a registration takes. */
struct admission_need {
	uint64_t bytes[NODE_MAX_DEVICES]; /* by device */
	uint64_t all;
	uint64_t slabs; /* at most */
};

/* A registration that may wait. Embedded in a request. */
struct admission_call {
	struct list link;     /* of its job's, until it has left */
	struct admission *of; /* valid while it is linked */
	struct admission_need need;
	uint64_t until_us; /* from its first wait on; 0: it has not waited */
	bool waits;        /* resume has not been called since */
	/* Ask again (registration_build), from the loop: then it waits again, or leaves. Must not do it at
	 * once. */
	void (*resume)(struct admission_call *c);
};

struct admission;

/* Where a job is in the line, for status. */
struct admission_place {
	uint32_t position; /* from 1 */
	uint32_t calls;    /* its ranks that wait */
	uint64_t bytes;    /* that it asks for */
	uint64_t since_us;
	uint64_t until_us; /* when the last of them gives up */
};

/* The whole line, and what has come of it since the daemon started. */
struct admission_counts {
	uint32_t jobs;
	uint64_t bytes;
	uint64_t admitted, given_up; /* jobs that got memory; calls that did not */
	uint64_t waited_us;          /* by those that got it */
};

void admission_call_init(struct admission_call *c, void (*resume)(struct admission_call *c));

/* Is nobody before @job in the way of @need? @ret_ahead: (optional) jobs that are. */
bool admission_lets(const struct job *job, const struct admission_need *need, uint32_t *ret_ahead);
/* Could waiting help: would @need fit if no job but those in the line had memory; and if not, would that
 * of somebody in it? */
bool admission_can_fit(const struct job *job, const struct admission_need *need);
/* @job has no room for @need: wait, with @c. RES_WAIT: c->resume follows. RES_FAILED: the job may not
 * wait, or @c has waited long enough, or there is no memory: the request fails. */
enum res admission_wait(struct admission_call *c, struct job *job,
			const struct admission_need *need);
/* Its registration has ended, however. Safe if it does not wait. */
void admission_leave(struct admission_call *c);
/* A registration of @job has got memory, with @c, which may be none that waited: others may find their units
 * there. */
void admission_served(struct admission_call *c, struct job *job);
/* All calls of @job ask again: its epoch has ended, say. */
void admission_recall(struct job *job);

/* Call those whose turn it is, or whose time is over. From jobs_tick. */
void admission_tick(struct jobs *jobs, uint64_t now_us);

/* Return: false: @job does not wait. */
bool admission_place(const struct job *job, struct admission_place *ret);
/* What is in its way, in a sentence; "": nothing. Of others only their number is told. */
void admission_why(const struct job *job, char *buf, size_t bytes);
void admission_counts(const struct node *node, struct admission_counts *ret);

#endif
