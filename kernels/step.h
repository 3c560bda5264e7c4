/* An optimizer step that starts at one of its elements: for code that cuts a step into blocks. */
#ifndef SHARDD_KERNELS_STEP_H
#define SHARDD_KERNELS_STEP_H

#include "adam.h"

/* The start of the tail of a fused step, counted from element @by. */
static inline uint64_t k_tail_at(uint64_t tail_from, uint64_t by)
{
	if (tail_from == UINT64_MAX)
		return tail_from;
	return tail_from > by ? tail_from - by : 0;
}

/* @array from its element @by on; NULL stays NULL. */
static inline float *k_from(float *array, uint64_t by)
{
	return array ? array + by : NULL;
}

/* Of struct k_adamw, struct k_adam and struct adam_step. */
#define K_ADAM_AT(a, by, from)                                  \
	do {                                                    \
		(a)->p = k_from((a)->p, by);                    \
		(a)->g = (from);                                \
		(a)->m = k_from((a)->m, by);                    \
		(a)->v = k_from((a)->v, by);                    \
		(a)->vmax = k_from((a)->vmax, by);              \
		(a)->tail_from = k_tail_at((a)->tail_from, by); \
	} while (0)

static inline void adam_step_at(struct adam_step *s, uint64_t by, const float *g)
{
	K_ADAM_AT(s, by, g);
}

static inline void k_sgd_at(struct k_sgd *s, uint64_t by, const float *g)
{
	s->p = k_from(s->p, by);
	s->g = g;
	s->buf = k_from(s->buf, by);
	s->tail_from = k_tail_at(s->tail_from, by);
}

/* Elements of @s from @by on; their gradients are at @g. */
static inline struct k_step k_step_at(const struct k_step *s, uint64_t by, const float *g)
{
	struct k_step r = *s;

	if (r.kind == K_STEP_ADAMW)
		K_ADAM_AT(&r.adamw, by, g);
	else if (r.kind == K_STEP_ADAM)
		K_ADAM_AT(&r.adam, by, g);
	else
		k_sgd_at(&r.sgd, by, g);
	return r;
}

#endif
