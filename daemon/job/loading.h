/*
 * Loading: the state of a checkpoint becomes that of a job whose units are registered.
 *
 * A thread with the ids of the job's owner reads the index; on the loop its tensors are looked up in
 * the job's units by their names; the thread reads their data into the shards and compares checksums.
 * Tensors are whole in the daemon's memory, so that world size, layout and strategy of the job that
 * was saved do not matter. Before the first byte is written the units count as not initialised, so
 * that whatever ends it, nobody finds a part of the state. At its end the job has the commit of the
 * checkpoint, and its epoch ends: ranks that are in it join again.
 *
 *   OPENING --> MEMORY --all tensors have their places--> DRAINING --nobody reads them--> READING --> over
 *      '-----------'------------- refused ------------------------------------------------------------^
 *
 * From DRAINING on, what would change parameters waits (loading_let). The thread reads into host memory
 * where it is, and what is on GPUs into buffers that are copied there (job/upload.h). Loop thread.
 */
#ifndef SHARDD_JOB_LOADING_H
#define SHARDD_JOB_LOADING_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/res.h"
#include "job/job_types.h"

struct job;

/* What was loaded. */
struct loading_report {
	uint64_t step;
	uint64_t bytes;            /* of tensors and blobs */
	uint32_t world_size;       /* of the job that was saved */
	uint32_t left_out;         /* blobs of ranks that this job does not have */
	uint32_t buffers_left_out; /* the same of buffers */
	/* The checkpoint has none: so many of the job's buffers are as they were before. */
	uint32_t buffers_missing;
};

/* The end, called once; @f: NULL: it was loaded. */
typedef void (*loading_cb)(const struct loading_report *r, const struct fault *f, void *userdata);

struct loading_options {
	const char *path; /* absolute, below one of the node's checkpoint_roots */
	bool has_step;    /* else the newest one */
	uint64_t step;
};

/* -- of a job with ranks on several nodes (cluster/round.h): each node reads what it has. Phase by phase:
 * open --> read --> end */

/* The end of a phase. */
struct loading_answer {
	const struct fault *f; /* NULL: it is done; else it has failed, for good */
	uint64_t step;         /* of the checkpoint */
	uint32_t crc;          /* open: of its index */
	uint64_t bytes;        /* read: that were */
};
/* May be called inside the function that begins the phase; also without one, if it fails meanwhile. */
typedef void (*loading_part_cb)(struct job *job, const struct loading_answer *a, void *userdata);

/* Find it, and a place for what this node has of it; nothing changes yet. What somebody here has asked for
 * is used, if there is such. Return: 0 or a fault code. */
int loading_part_open(struct job *job, const struct loading_options *o, loading_part_cb answered,
		      void *userdata, struct fault *f);
/* Read it: what the job had is gone. */
void loading_part_read(struct job *job);
/* It is over: all nodes have read it (@f is NULL; @bytes: all of them), and it is the job's; or why not.
 * Also of one that was only asked for. May free the job. */
void loading_part_end(struct job *job, uint64_t bytes, const struct fault *f);
/* Does one wait that somebody here has asked for, and that has not begun? */
bool loading_part_is_asked(const struct job *job);

/* Begin one. @done: not before this returns. Return: 0 or a fault code. */
int loading_begin(struct job *job, const struct loading_options *o, loading_cb done, void *userdata,
		  struct fault *f);
/* -- from memory (job/restore.h) */

struct index;

struct loading_memory {
	struct index
		*x; /* taken, and empty then: whole, its files in memory (checkpoint/parts.h) */
	/* Is it a unit of a group that has no rank here? */
	bool (*is_elsewhere)(void *arg, const char *unit);
	void *arg; /* of that; until the end */
};

/* What the job has is replaced. No rank is in it, nothing of it runs, and the caller sees to it that this
 * stays so. Else as loading_begin; what has failed before the first byte was written has changed
 * nothing. */
int loading_begin_memory(struct job *job, const struct loading_memory *m, loading_cb done,
			 void *userdata, struct fault *f);
/* From here on the job has no state, until something is loaded. */
void loading_empty(struct job *job);

/* What status says of one that is under way. */
struct loading_progress {
	const char *path; /* borrowed */
	bool reads;       /* READING, else OPENING: what follows is not known yet */
	uint64_t step;
	uint64_t bytes; /* to be read */
	uint64_t done;  /* of them */
};

/* Return: false: there is none. */
bool loading_progress(const struct job *job, struct loading_progress *ret);
/* Nobody wants it any more: end it, soon. */
void loading_cancel(struct job *job);

/* job_ops.before_change: kept_let, and not while a checkpoint is being read. */
enum res loading_let(struct job *job, enum job_change what);

#endif
