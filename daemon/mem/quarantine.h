/*
 * Quarantine: memory whose user died or left is not used again before that
 * process is proven gone (pidfd), since until then it may still write there.
 *
 * The bytes stay charged to the same account. Loop thread only.
 */
#ifndef SHARDD_MEM_QUARANTINE_H
#define SHARDD_MEM_QUARANTINE_H

#include "core/proc.h"
#include "mem/slab.h"

struct quarantine {
	struct list entries;
	uint64_t bytes;
};

void quarantine_init(struct quarantine *q);

/* Give everything back now; for the end of the daemon, when no client is left that reuse could
 * harm. */
void quarantine_deinit(struct quarantine *q);

/* Keep a reference on @s until @p is gone: a slab of a member that died or left, or of a
 * deleted job, that a living process has mapped. Nothing is kept if it is gone already.
 * Return: 0 or -ENOMEM. */
int quarantine_slab(struct quarantine *q, struct proc *p, struct slab *s);

/* @s goes back to the process that it waits for: wait no longer. */
void quarantine_release(struct quarantine *q, struct slab *s);

#endif
