/* A reduction in the form that its loops use, for code that runs it block by block. */
#ifndef SHARDD_KERNELS_HOST_REDUCE_H
#define SHARDD_KERNELS_HOST_REDUCE_H

#include "host/fold.h"

struct host_reduce {
	const struct k_reduce *a; /* borrowed */
	struct factor pre, post;
	bool plain_fold, plain_finish; /* in fp32 throughout */
	bool known;                    /* fold.c knows the inputs' type */
	bool one;                      /* and does all of it */
};

void HOST(reduce_begin)(struct host_reduce *p, const struct k_reduce *a);
/* Elements [at, at+n) of the inputs, to @to, which is read first if the reduction
 * accumulates; out itself is not touched. */
void HOST(reduce_block)(const struct host_reduce *p, void *to, size_t at, size_t n);

#endif
