/*
 * What outlives this daemon, and what the previous one has left: at the start, the jobs are made
 * from the journal and the slabs' descriptors; from then on, the keeper has all of them; at the
 * end, they are left to it. Without a keeper jobs end with the daemon. Loop thread only.
 */
#ifndef SHARDD_APP_SURVIVE_H
#define SHARDD_APP_SURVIVE_H

#include "app/inherited.h"
#include "job/job.h"
#include "store/journal.h"
#include "store/keeper.h"

struct survive {
	struct keeper keeper;
	struct journal *journal; /* owned; NULL: nothing outlives the daemon */
	struct redo *redo;       /* owned; NULL: no step can be completed by a successor */
	unsigned threads;        /* for that */
	struct jobs *jobs;       /* borrowed */
	uint32_t restored;       /* jobs */
	uint32_t completed;      /* of them, in the middle of a step */
	bool stale;              /* what kernels of the predecessor kept is not there */
	struct backend_mem *undo[NODE_MAX_DEVICES]; /* new, for the keeper; borrowed; NULL: none */
	uint32_t page;         /* number of the next page that a device leaves */
	bool lost;             /* the keeper has ended */
	uint64_t looked_us;    /* for that */
	bool behind;           /* the keeper could not take a slab: somebody waits for that */
	void (*hurry)(void *); /* call survive_tick soon */
	void *hurry_arg;
};

/* @hurry: asks for a survive_tick soon, from inside of any call. */
void survive_init(struct survive *s, struct jobs *jobs, void (*hurry)(void *), void *arg);
void survive_deinit(struct survive *s);

/* Look for a keeper, take over what @in has, and begin the journal. With the devices, before clients connect. On
 * failure nothing that was left is changed. Return: 0 or a fault code, with @f.field "journal" if
 * what was left cannot be read. */
int survive_start(struct survive *s, struct inherited *in, struct fault *f);

/* Do the jobs outlive this daemon? */
bool survive_outlives(const struct survive *s);

/* Tell the keeper what it was not told of yet, and those who wait for it to try again. */
void survive_tick(struct survive *s);
/* From here on memory that the keeper has is left as it is when it is freed. */
void survive_leave(struct survive *s);

#endif
