/*
 * The kernels of a Reduce that step its unit (reduce/fused.h): the optimizer's launches of a part, each
 * of which takes the gradient from the reduction. Loop thread only.
 */
#ifndef SHARDD_REDUCE_FUSED_STEPS_H
#define SHARDD_REDUCE_FUSED_STEPS_H

#include <stdbool.h>

struct coll;
struct k_reduce;
struct launch;
struct unit_run;

/* All zero: none. */
struct fused_steps {
	struct launch *launches; /* owned: of the part at work */
	unsigned n, room;
};

/* Make room for the launches of any part of c->unit. Return: 0 or -ENOMEM. */
int fused_steps_init(struct fused_steps *s, const struct coll *c);
/* Safe to call twice. */
void fused_steps_deinit(struct fused_steps *s);

/* Has the epoch in which @c began not ended? */
bool fused_steps_in_time(const struct coll *c);

/* The last kernel of part @d comes. Return: false: it must not step any more, and there is no
 * gradient to be had. */
bool fused_steps_begin(struct fused_steps *s, struct coll *c, unsigned d);

/* @r, which is of @span of the part, and the steps of its elements. */
void fused_steps_launch(const struct fused_steps *s, struct coll *c, unsigned d,
			const struct unit_run *span, const struct k_reduce *r);

#endif
