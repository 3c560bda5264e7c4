/*
 * Resize: a job gets another world size, and its state stays.
 *
 * It happens between epochs, while no rank is in the job. The units are laid out for the new number of
 * ranks, as those of a job of that size would be. A unit whose tensors stay where they are keeps its
 * memory; the others get new memory, and their tensors are copied there. Then the job becomes one of the
 * new size, in one entry of the journal: whoever reads the journal finds the old job or the new one.
 *
 *   WAITING --no rank is there, nothing runs--> MEMORY --> COPYING --> over
 *      '------------------- refused, or too late -------------------^
 *
 * While it lasts, ranks that join wait. The parameters, the optimizer state, the commit, the step and
 * the blobs of the ranks that remain are what they were; factors of reductions follow the unit's
 * profile; the buffers of a new rank are copies of rank 0's. Groups other than the world go: ranks make
 * them again. Loop thread only.
 */
#ifndef SHARDD_JOB_RESIZE_H
#define SHARDD_JOB_RESIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"

struct device;
struct job;

struct resize_report {
	uint32_t from, to; /* world sizes */
	uint64_t moved;    /* bytes that were copied */
	uint32_t in_place; /* units that kept their memory */
	uint32_t left_out; /* blobs of ranks that there are no more */
};

/* The end, called once; @f: NULL: the job has the new size. */
typedef void (*resize_cb)(const struct resize_report *r, const struct fault *f, void *userdata);

/* Begin one. @wait_us: how long it waits for ranks that are still in the job; 0: it is refused then.
 * @done: (optional) not before this returns. Return: 0 or a fault code. */
int resize_begin(struct job *job, uint32_t world, uint64_t wait_us, resize_cb done, void *userdata,
		 struct fault *f);
#define RESIZE_NEW UINT32_MAX

/* Ranks that are in the job stay, and get new numbers. The arrays are by new rank, and copied. */
struct resize_plan {
	uint32_t world;
	const uint32_t *from;          /* the present rank that it is, or RESIZE_NEW */
	const uint32_t *numbers;       /* as which its process was started (job/elastic.h) */
	struct device *const *devices; /* of a new one; NULL: as the daemon chooses */
	uint32_t launched;             /* how many were started */
	const struct fault *told;      /* what ends the epoch */
};

/* Begin one with ranks in the job. The epoch ends, and they join again, which waits for the end of the
 * resize; what they held of the job's units is gone. Ranks that are in the job and not in the plan have
 * to join again. The rest is as with resize_begin. */
int resize_begin_staying(struct job *job, const struct resize_plan *plan, resize_cb done,
			 void *userdata, struct fault *f);
/* Do not wait for ranks that are still in the job any more. */
void resize_hurry(struct job *job);
/* The job was deleted. */
void resize_cancel(struct job *job);

/* Is one under way? Then ranks that join wait for job.settled. */
bool resize_is_busy(const struct job *job);
/* Go on if what it waits for is there. Call whenever something of the job is over, and now and then. */
void resize_go_on(struct job *job);

#endif
