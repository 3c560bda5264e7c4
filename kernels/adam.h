/* AdamW and Adam as one step, for kernels/ref and kernels/host. */
#ifndef SHARDD_KERNELS_ADAM_H
#define SHARDD_KERNELS_ADAM_H

#include "kernels.h"
#include "undo.h"

struct adam_step {
	float *p, *m, *v, *vmax;
	const float *g;
	bool decoupled, maximize, f64;
	float decay, wd, w1, b2, w2, step_size, sq, eps;
	const struct k_adam_f64 *d;
	uint64_t tail_from;
	struct k_undo *undo;
};

/* The common fields of k_adamw and k_adam. */
#define ADAM_STEP_OF(a)                                                                            \
	.p = (a)->p, .m = (a)->m, .v = (a)->v, .vmax = (a)->vmax, .g = (a)->g,                     \
	.maximize = (a)->maximize, .f64 = (a)->profile == K_REFERENCE_F64, .w1 = (a)->w1,          \
	.b2 = (a)->b2, .w2 = (a)->w2, .step_size = (a)->step_size, .sq = (a)->sq, .eps = (a)->eps, \
	.d = &(a)->f64, .tail_from = (a)->profile == K_FUSED ? (a)->tail_from : UINT64_MAX,        \
	.undo = (a)->undo

static inline struct adam_step adam_step_of_adamw(const struct k_adamw *a)
{
	return (struct adam_step){ ADAM_STEP_OF(a), .decoupled = true, .decay = a->decay };
}

static inline struct adam_step adam_step_of_adam(const struct k_adam *a)
{
	return (struct adam_step){ ADAM_STEP_OF(a), .wd = a->wd };
}

/* Elements [@i, @i + @n) are changed after this. */
static inline __attribute__((always_inline)) void adam_step_save(const struct adam_step *s,
								 size_t i, size_t n, bool max)
{
	float *const arrays[] = { s->p, s->m, s->v, s->vmax };

	k_undo_save(s->undo, arrays, max ? 4 : 3, i, n);
}

#endif
