/* A sum of inputs in fp32, used by reduce.c. */
#ifndef SHARDD_KERNELS_HOST_FOLD_H
#define SHARDD_KERNELS_HOST_FOLD_H

#include "host/factor.h"

/* Inputs that one loop reads: a processor can prefetch about this many arrays at once. */
#define FOLD_INPUTS 8u

/* to[i] = [to[i] +] ([to[i] +] pre(in_0[at + i]) + pre(in_1[at + i]) + ...) * post, from the
 * left; what is in brackets: @add, @go_on (not both). */
struct fold {
	float *to;
	const void *const *in;
	unsigned k; /* 1 to FOLD_INPUTS */
	enum dtype dtype;
	size_t at, n;
	struct factor pre; /* in fp32 */
	float post;
	bool go_on, add;
	bool stream; /* past the caches */
};

void HOST(fold)(const struct fold *f);
bool HOST(fold_knows)(enum dtype t);

#endif
