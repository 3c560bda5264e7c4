#include "host/host.h"

#include <math.h>

/* The two loops differ in the branch of the lerp only, see kernels.h. */
static void step(const struct k_adamw *a, size_t begin, size_t end, bool small)
{
	float *restrict p = a->p, *restrict m = a->m, *restrict v = a->v;
	const float *restrict g = a->g;
	const struct k_adamw c = *a;
	const float w1 = small ? c.w1 : c.w1 - 1;

	for (size_t i = begin; i < end; i++) {
		float mi = fmaf(w1, g[i] - m[i], small ? m[i] : g[i]);
		float vi = fmaf(c.w2 * g[i], g[i], v[i] * c.b2);
		float denom = sqrtf(vi) / c.sq + c.eps;

		m[i] = mi;
		v[i] = vi;
		p[i] = p[i] * c.decay - c.step_size * mi / denom;
	}
}

void HOST(adamw)(const struct k_adamw *a, size_t begin, size_t end)
{
	if (fabsf(a->w1) < 0.5f)
		step(a, begin, end, true);
	else
		step(a, begin, end, false);
}
