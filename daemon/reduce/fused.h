/*
 * A Reduce whose last kernel steps the unit. Loop thread only.
 */
#ifndef SHARDD_REDUCE_FUSED_H
#define SHARDD_REDUCE_FUSED_H

#include "work/coll.h"

struct unit_run;

/* gradient_of(c)->fused: may it be so? @c has its run, and perhaps the room for the optimizer's launches. */
void fused_plan(struct coll *c);

/* All it needs is there: it begins. */
void fused_begin(struct coll *c);

/* The last kernel of part @d comes. Return: false: it must not step any more, and there is no
 * gradient to be had. */
bool fused_ready(struct coll *c, unsigned d);

/* @r, which is of @span of the part, and the steps of its elements. */
void fused_launches(struct coll *c, unsigned d, const struct unit_run *span,
		    const struct k_reduce *r);

/* At the end of the Reduce; and if it has ended without that. */
void fused_end(struct coll *c);
void fused_failed(struct coll *c);

#endif
