/*
 * A making: the masters of a job become the tensors of a generation, in one pass. It runs while the
 * trainers go on, a few blocks at a time, so that their ops come in between. Before something changes
 * masters (readers_let asks making_let), the rest is done at once: that is all that trainers wait for.
 * Several makings of a job may run, one for each publication.
 *
 * On a GPU all blocks are one launch, in the order of the device's queue. What changes masters on the same device
 * comes behind it there and needs not wait for it: only until it is in the queue. Masters on other devices are
 * read over the bus, and stay as they are until that has been executed. Loop thread only.
 */
#ifndef SHARDD_PUBLISH_MAKING_H
#define SHARDD_PUBLISH_MAKING_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "core/list.h"
#include "core/res.h"
#include "job/node.h"

#define MAKING_PASSES 3u
#define MAKING_FENCES NODE_MAX_DEVICES

/* Steps of a making in the memory of a GPU; in that of the host there are only passes. */
enum making_at {
	MAKING_FENCE, /* what other devices were given before is executed, one device after the other */
	MAKING_TABLES, /* are copied to the device, the first time */
	MAKING_USED,   /* of a delta becomes 0 */
	MAKING_PASS,
	MAKING_CRC,    /* is copied from it */
	MAKING_DELTAS, /* so is what is known of a delta, */
	MAKING_TAKEN,
	MAKING_CHANGES, /* and it */
	MAKING_END,
};

struct job;
struct making;
struct tables;

/* So many tasks are submitted at a time: the threads have the next one when they are done with one. On a GPU one. */
#define MAKING_TASKS 2u

struct making_task {
	struct making *m;
	bool runs;
	struct k_delta part; /* of the making's delta, for the blocks of the launch */
	struct launch launch;
	struct backend_task task;
};

/* It is over; masters are not read any more. @status: 0, -ECANCELED, or the negative errno of a device.
 * Operations that wait to write are resumed by the callee (readers_go_on). */
typedef void (*making_cb)(struct making *m, int status);

/* Embedded by its owner. */
struct making {
	struct list link; /* job->readers.makings, from begin to end */
	struct job *job;  /* borrowed */
	struct backend *backend;
	const struct k_assemble_tensor *tensors; /* borrowed until it is over, as are the blocks */
	/* By pass, in this order: what is cleared, what is measured, and all blocks. */
	struct making_pass {
		enum k_assemble_pass pass;
		const struct k_assemble_block *blocks;
		uint32_t n;
	} passes[MAKING_PASSES];
	uint32_t *crc;    /* by block */
	unsigned at_pass; /* of them, from which ... */
	uint32_t next;    /* ... this block was not begun yet */
	uint64_t moves;
	uintptr_t base;                        /* of what is made: added to dst of the tensors */
	const struct k_delta *delta;           /* borrowed, in the host's memory; NULL: none */
	struct tables *tables;                 /* borrowed: on the device; NULL: on the host */
	struct backend *fences[MAKING_FENCES]; /* of other devices that have masters */
	unsigned n_fences, fenced;
	uint8_t at;   /* enum making_at */
	bool ordered; /* masters may be written: that comes behind it */
	bool hurries; /* somebody waits to write */
	bool cancelled;
	int status; /* of the first task that failed */
	making_cb done;
	void (*orders)(struct making *m); /* (optional) on a GPU: masters may be written */
	/* (optional) @task is about to be submitted */
	void (*submits)(struct making *m, struct backend_task *task);
	struct making_task tasks[MAKING_TASKS];
	unsigned running; /* of them */
};

/* Begin it: @m has what is described above, the rest is set here. @done follows, not from here. */
void making_begin(struct making *m);
/* End it soon; @done follows, not from here. */
void making_cancel(struct making *m);

/* May masters of the job be written? RES_WAIT: not yet; making_cb comes. */
enum res making_let(struct job *job);
/* Would what writes them now, in the order of the devices, be read? */
bool making_reads(const struct job *job);
/* Is any under way? */
bool making_is_busy(const struct job *job);

#endif
