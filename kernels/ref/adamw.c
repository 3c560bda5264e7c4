#include "ref/ref.h"

#include <math.h>

static float lerp(float from, float to, float w)
{
	if (fabsf(w) < 0.5f)
		return fmaf(w, to - from, from);
	return fmaf(w - 1, to - from, to);
}

void ref_adamw(const struct k_adamw *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float g = a->g[i];
		float p = a->p[i] * a->decay;
		float m = lerp(a->m[i], g, a->w1);
		float v = fmaf(a->w2 * g, g, a->v[i] * a->b2);
		float denom = sqrtf(v) / a->sq + a->eps;

		a->m[i] = m;
		a->v[i] = v;
		a->p[i] = p - a->step_size * m / denom;
	}
}
