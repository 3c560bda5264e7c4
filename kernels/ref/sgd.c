#include "ref/ref.h"
#include "undo.h"

#include <math.h>

static float momentum(const struct k_sgd *a, size_t i, float d)
{
	float w = (float)(1 - a->dampening);

	if (a->first)
		return d;
	if (a->profile == K_FUSED && i >= a->tail_from)
		return fmaf(a->buf[i], a->mu, d * w);
	return fmaf(d, w, a->mu * a->buf[i]);
}

void ref_sgd(const struct k_sgd *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float g = a->maximize ? -a->g[i] : a->g[i];
		float d = a->wd == 0 ? g : fmaf(a->p[i], a->wd, g);
		float *const arrays[] = { a->p, a->buf };

		if (a->undo)
			k_undo_save(a->undo, arrays, a->mu != 0 ? 2 : 1, i, 1);
		if (a->mu != 0) {
			a->buf[i] = momentum(a, i, d);
			d = a->nesterov ? fmaf(a->buf[i], a->mu, d) : a->buf[i];
		}
		a->p[i] = fmaf(d, -a->lr, a->p[i]);
	}
}
