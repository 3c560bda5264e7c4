/*
 * A Reduce whose last kernel steps the unit. Loop thread only.
 */
#ifndef SHARDD_REDUCE_FUSED_H
#define SHARDD_REDUCE_FUSED_H

#include "work/coll.h"

/* gradient_of(c)->fused: may it be so? @c has its run, and perhaps the room for the optimizer's launches. */
void fused_plan(struct coll *c);

/* All it needs is there: it begins. */
void fused_begin(struct coll *c);

/* At the end of the Reduce; and if it has ended without that. */
void fused_end(struct coll *c);
void fused_failed(struct coll *c);

#endif
