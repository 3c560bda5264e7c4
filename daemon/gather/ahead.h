/*
 * Gathers that are begun before they are asked for: by the lists of SetPrefetch, or, for a
 * rank without any, in the order that its last step had (job/prefetch.h). Only copies: where
 * a gather hands out the shards there is nothing to begin. They never make an op fail or wait:
 * without memory, or with max_inflight_gathers under way, they are skipped; and what nobody
 * has come for goes when memory is needed. Loop thread only.
 */
#ifndef SHARDD_GATHER_AHEAD_H
#define SHARDD_GATHER_AHEAD_H

#include "op/op.h"

/* A Gather or BeginPass looks for its copy; what it is counted as is decided the first time. */
void ahead_asked(struct op *op);
/* It has it: note the use, and begin what comes after it. */
void ahead_used(struct op *op);
/* A pass has ended, which may have made room: what comes next, if it is not begun yet. */
void ahead_next(const struct op *op);

#endif
