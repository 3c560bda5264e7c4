#include "host/host.h"
#include "undo.h"

#include <math.h>

/* wd is 0: d is g exactly, as g + 0*p is not when p is infinite or g is -0. */
static inline float decayed(const struct k_sgd *a, float g, float p)
{
	return a->wd == 0 ? g : fmaf(p, a->wd, g);
}

static inline void save(const struct k_sgd *a, size_t i, size_t n)
{
	float *const arrays[] = { a->p, a->buf };

	k_undo_save(a->undo, arrays, a->mu == 0 ? 1 : 2, i, n);
}

static void plain(const struct k_sgd *a, size_t begin, size_t end)
{
	const struct k_sgd c = *a;
	const float sign = c.maximize ? -1 : 1;
	float *restrict p = a->p;
	const float *restrict g = a->g;

	for (size_t i = begin; i < end; i++)
		p[i] = fmaf(decayed(&c, sign * g[i], p[i]), -c.lr, p[i]);
}

static inline __attribute__((always_inline)) void momentum(const struct k_sgd *a, size_t begin,
							   size_t end, bool tail)
{
	const struct k_sgd c = *a;
	const float sign = c.maximize ? -1 : 1, w = (float)(1 - c.dampening);
	float *restrict p = a->p, *restrict buf = a->buf;
	const float *restrict g = a->g;

	for (size_t i = begin; i < end; i++) {
		float d = decayed(&c, sign * g[i], p[i]);
		float b = c.first ? d
			  : tail  ? fmaf(buf[i], c.mu, d * w)
				  : fmaf(d, w, c.mu * buf[i]);

		buf[i] = b;
		p[i] = fmaf(c.nesterov ? fmaf(b, c.mu, d) : b, -c.lr, p[i]);
	}
}

static void range(const struct k_sgd *a, size_t begin, size_t end)
{
	size_t middle = a->profile == K_FUSED && a->tail_from < end ? a->tail_from : end;

	if (a->mu == 0) {
		plain(a, begin, end);
		return;
	}
	middle = begin < middle ? middle : begin;
	momentum(a, begin, middle, false);
	momentum(a, middle, end, true);
}

void HOST(sgd)(const struct k_sgd *a, size_t begin, size_t end)
{
	if (!a->undo) {
		range(a, begin, end);
		return;
	}
	for (size_t next; begin < end; begin = next) {
		next = end - begin < K_UNDO_BLOCK ? end : begin + K_UNDO_BLOCK;
		save(a, begin, next - begin);
		range(a, begin, next);
	}
}
