/*
 * A reduction and the step on what it gives, block by block: the gradient is written to a
 * block on the stack, which stays in the first-level cache until the optimizer has read it.
 * The blocks are so short that the processor computes one while it fetches the next, and all arrays
 * are read sequentially. Values that are the same for all blocks are computed once.
 */
#include "host/reduce.h"
#include "step.h"

#include <string.h>

#define BLOCK 1024
/* Inputs of fp32: a block is shorter, and while the optimizer computes so many elements, the same
 * of the next block's inputs are fetched. Inputs of 16 bits arrive in time without this. */
#define BLOCK_FP32 512
#define PART       128

/* The step of the next elements. */
struct optimizer {
	bool is_sgd;
	struct k_sgd sgd;
	struct adam_step adam;
};

static struct optimizer optimizer_of(const struct k_step *s, size_t begin)
{
	struct optimizer o = { .is_sgd = s->kind == K_STEP_SGD };

	if (o.is_sgd)
		o.sgd = s->sgd;
	else
		o.adam = s->kind == K_STEP_ADAMW ? adam_step_of_adamw(&s->adamw)
						 : adam_step_of_adam(&s->adam);
	k_sgd_at(&o.sgd, begin, NULL);
	adam_step_at(&o.adam, begin, NULL);
	return o;
}

/* The next @n elements, with their gradients at @g. */
static void step(struct optimizer *o, size_t n, const float *g)
{
	o->sgd.g = g;
	o->adam.g = g;
	if (o->is_sgd) {
		HOST(sgd)(&o->sgd, 0, n);
		k_sgd_at(&o->sgd, n, NULL);
	} else {
		HOST(adam_step)(&o->adam, 0, n);
		adam_step_at(&o->adam, n, NULL);
	}
}

static void fetch(const struct k_reduce *r, size_t at, size_t n)
{
	for (unsigned j = 0; j < r->k; j++)
		for (size_t i = 0; i < n; i += 64 / sizeof(float))
			__builtin_prefetch((const float *)r->in[j] + at + i);
}

/* Inputs from @at on are the next block's; there are @next of them. */
static void step_parts(struct optimizer *o, size_t n, const float *g, const struct k_reduce *r,
		       size_t at, size_t next)
{
	for (size_t i = 0, part; i < n; i += part) {
		part = n - i < PART ? n - i : PART;
		if (i + part <= next)
			fetch(r, at + i, part);
		step(o, part, g + i);
	}
}

static void step_block(struct optimizer *o, size_t n, const float *g, const struct k_reduce *r,
		       size_t at, size_t next)
{
	if (r->in_dtype == DTYPE_FP32)
		step_parts(o, n, g, r, at, next);
	else
		step(o, n, g);
}

void HOST(reduce_step)(const struct k_reduce_step *a, size_t begin, size_t end)
{
	const size_t block = a->reduce.in_dtype == DTYPE_FP32 ? BLOCK_FP32 : BLOCK;
	struct optimizer o = optimizer_of(&a->step, begin);
	const float *shard = a->reduce.out;
	struct host_reduce reduce;
	float g[BLOCK];

	HOST(reduce_begin)(&reduce, &a->reduce);
	for (size_t i = begin, n; i < end; i += n) {
		size_t at = a->first + i;

		n = end - i < block ? end - i : block;
		if (a->reduce.accumulate)
			memcpy(g, shard + at, n * sizeof(*g));
		HOST(reduce_block)(&reduce, g, at, n);
		step_block(&o, n, g, &a->reduce, at + n, end - i - n);
	}
}
