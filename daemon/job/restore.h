/*
 * Restoring: a job goes back to a step whose state other nodes have in their memory, between two epochs.
 *
 * Each node writes its part of a checkpoint into memory, as it would write it into a folder
 * (checkpoint/parts.h), and other nodes fetch copies of it. This is what one node does with them: from
 * here on its ranks are where a span says, and its units have the state of the parts, or nothing. The
 * nodes do not talk to each other: each one restores itself.
 *
 *   READING --the parts are whole--> WAITING --nothing of the job runs--> DRAINING --> LAYING_OUT --> LOADING
 *      '------- refused --------------'----------------------------------------'-------- failed ---------'
 *
 * Until DRAINING nothing has changed. Then the job has no state: its units are not initialised, and
 * there is no commit. Units that it does not have are registered, those that the parts do not have are
 * dropped. If ranks are elsewhere than its memory, or the world has another size, all its units get new
 * memory, and keep their numbers; with another size groups other than the world go, and there may be no
 * units of such. A job without units that has just been made gets them all. At the end the job has the
 * commit of the parts, with the blobs of its ranks. What fails leaves a job without state, and says why.
 *
 * If the daemon dies meanwhile, its journal has the old job, one without state, or the new one. Ranks that
 * join wait. What is in doubt is dropped. Loop thread only.
 */
#ifndef SHARDD_JOB_RESTORE_H
#define SHARDD_JOB_RESTORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

struct job;
struct span;

/* One part of a checkpoint, in memory. */
struct restore_part {
	int fd; /* borrowed: the tensors, as PARTS_FILE; -1: nothing of it is needed here */
	const char *index; /* borrowed: the text of its index */
	size_t index_bytes;
};

/* All that is borrowed is so until the end. */
struct restore_options {
	uint64_t step;
	/* Where the ranks are from here on; span->world is the world size. Taken, also after an error; of
	 * restore_needs: borrowed. */
	struct span *span;
	/* In the order of the nodes that have written them, all of them; the array is copied. */
	const struct restore_part *parts;
	unsigned n_parts;
	const uint8_t
		*specs; /* borrowed until restore_begin returns: restore_pack_specs of any node */
	size_t specs_bytes;
	/* Of an elastic job: as how many ranks it was started, and by rank, as which of them; borrowed until
	 * restore_begin returns. Blobs, buffers and processes follow these numbers. NULL: it is not elastic. */
	uint32_t launched;
	const uint32_t *numbers;
};

/* The end, called once, not before restore_begin returns. @f: NULL: it is restored. */
typedef void (*restore_cb)(struct job *job, const struct fault *f, void *userdata);

/* Begin one, of a job in which no rank is joined. Ranks that are STALE stay under their numbers if these are on
 * this node still; what they held of the job's units is gone. Return: 0 or a fault code: STATE (ranks are
 * joined, or something else is under way), INVALID (units cannot be laid out like this), EXHAUSTED. */
int restore_begin(struct job *job, const struct restore_options *o, restore_cb done, void *userdata,
		  struct fault *f);
/* End it, soon, with CANCELLED; or, of a job that is deleted, with NOT_FOUND. */
void restore_cancel(struct job *job);

/* Is one under way? Then ranks that join wait for job.settled. */
bool restore_is_busy(const struct job *job);
/* What it waits for: a name for status and logs. "": nothing, or there is none. Static string. */
const char *restore_waits_for(const struct job *job);
/* Go on if what it waits for is there. Call whenever something of the job is over, and now and then. */
void restore_go_on(struct job *job);

/* The records of the job's groups and units, packed. Return: malloc'ed, the caller's; NULL without
 * memory. */
uint8_t *restore_pack_specs(const struct job *job, size_t *ret_bytes);

/* Of which parts does this node need data, with its ranks where @o says? Before they are fetched: the
 * descriptors are not looked at. It reads all indexes, which takes some microseconds a tensor.
 * @ret_needed: by part. Return: 0 or a fault code: LOST (they are not whole), INVALID. */
int restore_needs(struct job *job, const struct restore_options *o, bool *ret_needed,
		  struct fault *f);

#endif
