/*
 * Adam and AdamW. The loops differ in the branch of the lerp, in the place of the weight decay and
 * in amsgrad; the few elements of a fused step's tail decide at run time.
 */
#include "host/host.h"

#include <math.h>

enum decay { DECAY_NONE, DECAY_GRADIENT, DECAY_PARAM };

static inline float lerp(float from, float to, float w, bool small)
{
	return small ? fmaf(w, to - from, from) : fmaf(w - 1, to - from, to);
}

/* wd is 0: the gradient exactly, as g + 0*p is not when p is infinite or g is -0. */
static inline __attribute__((always_inline)) void elements(const struct adam_step *s, size_t begin,
							   size_t end, enum decay decay, bool small,
							   bool max)
{
	float *restrict p = s->p, *restrict m = s->m, *restrict v = s->v, *restrict x = s->vmax;
	const float *restrict g = s->g;
	const struct adam_step c = *s;
	const float sign = c.maximize ? -1 : 1;

	for (size_t i = begin; i < end; i++) {
		float pi = decay == DECAY_PARAM ? p[i] * c.decay : p[i], gi = sign * g[i];
		float d = decay == DECAY_GRADIENT ? fmaf(pi, c.wd, gi) : gi;
		float mi = lerp(m[i], d, c.w1, small);
		float vi = fmaf(c.w2 * d, d, v[i] * c.b2);
		float xi = vi;

		if (max) {
			xi = ((vi > x[i]) | (vi != vi)) ? vi : x[i];
			x[i] = xi;
		}
		m[i] = mi;
		v[i] = vi;
		p[i] = pi - c.step_size * mi / (sqrtf(xi) / c.sq + c.eps);
	}
}

static inline size_t block_end(size_t begin, size_t end)
{
	return end - begin < K_UNDO_BLOCK ? end : begin + K_UNDO_BLOCK;
}

/* A copy of @s of our own and a constant number of elements: what is the same for all blocks stays in
 * registers from one to the next. */
static inline __attribute__((always_inline)) void loop_blocks(const struct adam_step *s,
							      size_t begin, size_t end,
							      enum decay decay, bool small,
							      bool max)
{
	const struct adam_step c = *s;

	for (; end - begin >= K_UNDO_BLOCK; begin += K_UNDO_BLOCK) {
		adam_step_save(&c, begin, K_UNDO_BLOCK, max);
		elements(&c, begin, begin + K_UNDO_BLOCK, decay, small, max);
	}
	if (begin < end) {
		adam_step_save(&c, begin, end - begin, max);
		elements(&c, begin, end, decay, small, max);
	}
}

static inline __attribute__((always_inline)) void loop(const struct adam_step *s, size_t begin,
						       size_t end, enum decay decay, bool small,
						       bool max)
{
	if (s->undo)
		loop_blocks(s, begin, end, decay, small, max);
	else
		elements(s, begin, end, decay, small, max);
}

static inline __attribute__((always_inline)) void loop_decay(const struct adam_step *s,
							     size_t begin, size_t end, bool small,
							     bool max)
{
	if (s->decoupled)
		loop(s, begin, end, DECAY_PARAM, small, max);
	else if (s->wd != 0)
		loop(s, begin, end, DECAY_GRADIENT, small, max);
	else
		loop(s, begin, end, DECAY_NONE, small, max);
}

static void body(const struct adam_step *s, size_t begin, size_t end)
{
	bool small = fabsf(s->w1) < 0.5f;

	if (s->vmax && small)
		loop_decay(s, begin, end, true, true);
	else if (s->vmax)
		loop_decay(s, begin, end, false, true);
	else if (small)
		loop_decay(s, begin, end, true, false);
	else
		loop_decay(s, begin, end, false, false);
}

static void tail(const struct adam_step *s, size_t begin, size_t end)
{
	bool small = fabsf(s->w1) < 0.5f;

	for (size_t i = begin; i < end; i++) {
		float p = s->decoupled ? s->p[i] * s->decay : s->p[i];
		float g = s->maximize ? -s->g[i] : s->g[i], v;

		if (s->undo)
			adam_step_save(s, i, 1, s->vmax);
		if (!s->decoupled && s->wd != 0)
			g = fmaf(p, s->wd, g);
		s->m[i] = lerp(s->m[i], g, s->w1, small);
		v = fmaf(s->v[i], s->b2, s->w2 * g * g);
		s->v[i] = v;
		if (s->vmax) {
			v = v > s->vmax[i] ? v : s->vmax[i];
			s->vmax[i] = v;
		}
		s->p[i] = p - s->step_size * s->m[i] / (sqrtf(v) / s->sq + s->eps);
	}
}

static inline __attribute__((always_inline)) void elements_f64(const struct adam_step *s,
							       size_t begin, size_t end, bool max)
{
	float *restrict p = s->p, *restrict m = s->m, *restrict v = s->v, *restrict x = s->vmax;
	const float *restrict g = s->g;
	const struct k_adam_f64 c = *s->d;
	const double decay = s->decoupled ? c.decay : 1, sign = s->maximize ? -1 : 1;
	const bool l2 = !s->decoupled && c.wd != 0, small = fabs(c.w1) < 0.5;
	const double w = small ? c.w1 : c.w1 - 1;

	for (size_t i = begin; i < end; i++) {
		double pi = (double)p[i] * decay, gi = sign * (double)g[i];
		double d = l2 ? fma(pi, c.wd, gi) : gi, old_m = (double)m[i];
		double mi = fma(w, d - old_m, small ? old_m : d);
		double vi = fma(c.w2 * d, d, (double)v[i] * c.b2);

		m[i] = (float)mi;
		v[i] = (float)vi;
		if (max) {
			double old = (double)x[i];

			vi = ((vi > old) | (vi != vi)) ? vi : old;
			x[i] = (float)vi;
		}
		p[i] = (float)(pi - c.step_size * mi / (sqrt(vi) / c.sq + c.eps));
	}
}

static inline __attribute__((always_inline)) void loop_f64(const struct adam_step *s, size_t begin,
							   size_t end, bool max)
{
	if (!s->undo) {
		elements_f64(s, begin, end, max);
		return;
	}
	for (size_t next; begin < end; begin = next) {
		next = block_end(begin, end);
		adam_step_save(s, begin, next - begin, max);
		elements_f64(s, begin, next, max);
	}
}

void HOST(adam_step)(const struct adam_step *s, size_t begin, size_t end)
{
	size_t middle = end < s->tail_from ? end : s->tail_from;

	if (s->f64 && s->vmax) {
		loop_f64(s, begin, end, true);
	} else if (s->f64) {
		loop_f64(s, begin, end, false);
	} else {
		middle = begin < middle ? middle : begin;
		body(s, begin, middle);
		tail(s, middle, end);
	}
}

void HOST(adam)(const struct k_adam *a, size_t begin, size_t end)
{
	struct adam_step s = adam_step_of_adam(a);

	HOST(adam_step)(&s, begin, end);
}
