#include "host/host.h"

#include <math.h>

/* wd is 0: the gradient exactly, as g + 0*p is not when p is infinite or g is -0. The
 * loops differ in that and in the branch of the lerp only, see kernels.h. */
static inline void step(const struct k_adam *a, size_t begin, size_t end, bool small, bool decay)
{
	float *restrict p = a->p, *restrict m = a->m, *restrict v = a->v;
	const float *restrict g = a->g;
	const struct k_adam c = *a;
	const float w1 = small ? c.w1 : c.w1 - 1;

	for (size_t i = begin; i < end; i++) {
		float d = decay ? fmaf(p[i], c.wd, g[i]) : g[i];
		float mi = fmaf(w1, d - m[i], small ? m[i] : d);
		float vi = fmaf(c.w2 * d, d, v[i] * c.b2);
		float denom = sqrtf(vi) / c.sq + c.eps;

		m[i] = mi;
		v[i] = vi;
		p[i] = p[i] - c.step_size * mi / denom;
	}
}

void HOST(adam)(const struct k_adam *a, size_t begin, size_t end)
{
	bool small = fabsf(a->w1) < 0.5f;

	if (a->wd == 0)
		step(a, begin, end, small, false);
	else
		step(a, begin, end, small, true);
}
