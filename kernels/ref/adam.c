#include "ref/ref.h"

#include <math.h>

static float lerp(float from, float to, float w)
{
	if (fabsf(w) < 0.5f)
		return fmaf(w, to - from, from);
	return fmaf(w - 1, to - from, to);
}

void ref_adam(const struct k_adam *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float g = a->wd == 0 ? a->g[i] : fmaf(a->p[i], a->wd, a->g[i]);
		float m = lerp(a->m[i], g, a->w1);
		float v = fmaf(a->w2 * g, g, a->v[i] * a->b2);
		float denom = sqrtf(v) / a->sq + a->eps;

		a->m[i] = m;
		a->v[i] = v;
		a->p[i] = a->p[i] - a->step_size * m / denom;
	}
}
