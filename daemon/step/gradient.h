/*
 * The state of collectives that make a gradient: Reduce, ReduceSparse, DdpBucket. Loop thread only.
 */
#ifndef SHARDD_STEP_GRADIENT_H
#define SHARDD_STEP_GRADIENT_H

#include "step/shards.h"
#include "work/coll.h"

/* Does the last kernel of a Reduce step the unit (reduce/fused.c)? */
enum fused {
	FUSED_NOT,
	FUSED_WANTED,
	FUSED_BEGUN,  /* nobody may read the parameters from here on */
	FUSED_STEPPED /* the kernel was submitted */
};

/* What becomes of the gradient of a collective that makes one: the first member of its own state. */
struct gradient_state {
	struct shards_state shards;
	bool more;     /* of this unit more is to come in this pass */
	bool external; /* its shards are for the trainers' optimizers */
	bool begun;    /* they are promised to them */
	enum fused fused;
	unsigned arrive_stage; /* backward_arrive_tick's */
};

static inline struct gradient_state *gradient_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct gradient_state));
}

#endif
