#include "ref/ref.h"

#include <math.h>

static float lerp(float from, float to, float w)
{
	if (fabsf(w) < 0.5f)
		return fmaf(w, to - from, from);
	return fmaf(w - 1, to - from, to);
}

static double lerp64(double from, double to, double w)
{
	if (fabs(w) < 0.5)
		return fma(w, to - from, from);
	return fma(w - 1, to - from, to);
}

/* The second moment that the update divides by. */
static float max_of(const struct adam_step *s, size_t i, bool tail)
{
	float v = s->v[i];

	if (!s->vmax)
		return v;
	if (v > s->vmax[i] || (!tail && isnan(v)))
		s->vmax[i] = v;
	return s->vmax[i];
}

static void element(const struct adam_step *s, size_t i)
{
	bool tail = i >= s->tail_from;
	float g = s->maximize ? -s->g[i] : s->g[i];
	float p = s->decoupled ? s->p[i] * s->decay : s->p[i];

	if (!s->decoupled && s->wd != 0)
		g = fmaf(p, s->wd, g);
	s->m[i] = lerp(s->m[i], g, s->w1);
	s->v[i] = tail ? fmaf(s->v[i], s->b2, s->w2 * g * g) : fmaf(s->w2 * g, g, s->v[i] * s->b2);
	s->p[i] = p - s->step_size * s->m[i] / (sqrtf(max_of(s, i, tail)) / s->sq + s->eps);
}

static void element_f64(const struct adam_step *s, size_t i)
{
	const struct k_adam_f64 *d = s->d;
	double g = s->maximize ? -(double)s->g[i] : (double)s->g[i];
	double p = s->decoupled ? (double)s->p[i] * d->decay : (double)s->p[i];
	double m, v;

	if (!s->decoupled && d->wd != 0)
		g = fma(p, d->wd, g);
	m = lerp64((double)s->m[i], g, d->w1);
	v = fma(d->w2 * g, g, (double)s->v[i] * d->b2);
	s->m[i] = (float)m;
	s->v[i] = (float)v;
	if (s->vmax) {
		double old = (double)s->vmax[i];

		v = v > old || isnan(v) ? v : old;
		s->vmax[i] = (float)v;
	}
	s->p[i] = (float)(p - d->step_size * m / (sqrt(v) / d->sq + d->eps));
}

void ref_adam_step(const struct adam_step *s, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		if (s->undo)
			adam_step_save(s, i, 1, s->vmax);
		if (s->f64)
			element_f64(s, i);
		else
			element(s, i);
	}
}

void ref_adam(const struct k_adam *a, size_t begin, size_t end)
{
	struct adam_step s = adam_step_of_adam(a);

	ref_adam_step(&s, begin, end);
}
