#include "ref/ref.h"

#include <math.h>

void ref_sgd(const struct k_sgd *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float d = a->wd == 0 ? a->g[i] : fmaf(a->p[i], a->wd, a->g[i]);

		if (a->mu != 0) {
			float buf = a->first ? d : a->mu * a->buf[i] + d;

			a->buf[i] = buf;
			d = a->nesterov ? fmaf(buf, a->mu, d) : buf;
		}
		a->p[i] = fmaf(d, -a->lr, a->p[i]);
	}
}
