/*
 * A reduction and the step on what it gives, block by block: the gradient is written to a
 * block on the stack, which stays in the caches until the optimizer has read it.
 */
#include "host/host.h"

#include "step.h"

/* Elements: long enough that each array is read in a row, short enough for the first-level
 * cache to have the gradient together with what it is made of. */
#define BLOCK (2 * HOST_PIECE)

static void step(const struct k_step *s, size_t n)
{
	if (s->kind == K_STEP_ADAMW)
		HOST(adamw)(&s->adamw, 0, n);
	else if (s->kind == K_STEP_ADAM)
		HOST(adam)(&s->adam, 0, n);
	else
		HOST(sgd)(&s->sgd, 0, n);
}

void HOST(reduce_step)(const struct k_reduce_step *a, size_t begin, size_t end)
{
	float gradient[BLOCK];

	for (size_t at = begin, n; at < end; at += n) {
		struct k_step part = k_step_at(&a->step, at, gradient);

		n = end - at < BLOCK ? end - at : BLOCK;
		HOST(reduce_to)(&a->reduce, gradient, a->first + at, n);
		step(&part, n);
	}
}
