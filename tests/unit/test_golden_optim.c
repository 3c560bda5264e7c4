/*
 * The optimizer kernels against torch.optim: tests/golden/optim.safetensors. Bit for bit, but
 * for what golden_optim.c says, and for p with MKL's square root. test_golden_state and
 * test_golden_steps compare what a daemon makes of the same.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden_optim.h"

enum { N = GOLDEN_OPTIM_N };

/* torch's fused kernels step one by one what is left behind whole vectors: of eight
 * elements, on the machine that made the vectors. */
#define VECTOR 8

struct run {
	struct golden_optim o;
	const struct kernels *k;
	unsigned steps; /* taken, skipped ones not */
	float p[N], g[N], m[N], v[N], vmax[N], buf[N];
	double travel[N]; /* how far p has come, steps added up */
};

static uint64_t tail_from(const struct run *r)
{
	return r->o.profile == K_FUSED ? N - N % VECTOR : UINT64_MAX;
}

/* Scalars as a caller computes them: in double, rounded once. */
static struct k_adam_f64 scalars(const struct run *r, double lr)
{
	double b1 = r->o.beta1, b2 = r->o.beta2, t = r->steps + 1;

	return (struct k_adam_f64){
		.decay = 1 - lr * r->o.weight_decay,
		.wd = r->o.weight_decay,
		.b1 = b1,
		.w1 = 1 - b1,
		.b2 = b2,
		.w2 = 1 - b2,
		.step_size = lr / (1 - pow(b1, t)),
		.sq = sqrt(1 - pow(b2, t)),
		.eps = r->o.eps,
	};
}

static void adamw_step(struct run *r, double lr)
{
	struct k_adam_f64 s = scalars(r, lr);
	struct k_adamw a = {
		.p = r->p,
		.g = r->g,
		.m = r->m,
		.v = r->v,
		.vmax = r->o.amsgrad ? r->vmax : NULL,
		.decay = (float)s.decay,
		.w1 = (float)s.w1,
		.b1 = (float)s.b1,
		.b2 = (float)s.b2,
		.w2 = (float)s.w2,
		.step_size = (float)s.step_size,
		.sq = (float)s.sq,
		.eps = (float)s.eps,
		.profile = r->o.profile,
		.maximize = r->o.maximize,
		.tail_from = tail_from(r),
		.f64 = s,
	};

	r->k->adamw(&a, 0, N);
}

static void adam_step(struct run *r, double lr)
{
	struct k_adam_f64 s = scalars(r, lr);
	struct k_adam a = {
		.p = r->p,
		.g = r->g,
		.m = r->m,
		.v = r->v,
		.vmax = r->o.amsgrad ? r->vmax : NULL,
		.wd = (float)s.wd,
		.w1 = (float)s.w1,
		.b2 = (float)s.b2,
		.w2 = (float)s.w2,
		.step_size = (float)s.step_size,
		.sq = (float)s.sq,
		.eps = (float)s.eps,
		.profile = r->o.profile,
		.maximize = r->o.maximize,
		.tail_from = tail_from(r),
		.f64 = s,
	};

	r->k->adam(&a, 0, N);
}

static void sgd_step(struct run *r, double lr)
{
	struct k_sgd a = {
		.p = r->p,
		.g = r->g,
		.buf = r->o.momentum != 0 ? r->buf : NULL,
		.lr = (float)lr,
		.wd = (float)r->o.weight_decay,
		.mu = (float)r->o.momentum,
		.dampening = r->o.dampening,
		.nesterov = r->o.nesterov,
		.first = r->steps == 0,
		.maximize = r->o.maximize,
		.profile = r->o.profile,
		.tail_from = tail_from(r),
	};

	r->k->sgd(&a, 0, N);
}

static void step(struct run *r, double lr)
{
	float before[N];

	memcpy(before, r->p, sizeof(before));
	if (golden_optim_is(&r->o, "sgd"))
		sgd_step(r, lr);
	else if (golden_optim_is(&r->o, "adam"))
		adam_step(r, lr);
	else
		adamw_step(r, lr);
	r->steps++;
	for (size_t i = 0; i < N; i++)
		r->travel[i] += fabs((double)r->p[i] - (double)before[i]);
}

/* ------------------------------------------------------------------ comparison */

static void expect(const struct run *r, const char *part, const float *got, unsigned i)
{
	char text[256];

	cr_assert(golden_optim_same(&r->o, part, got, i, text, sizeof(text)), "%s", text);
}

/* MKL's square root, off by one unit for one number in six, moves an update by at most
 * 2^-22 of itself and may make the subtraction from p round the other way, by 2^-23 of p;
 * both add up over the steps. Decay in the gradient (Adam) brings p back into m and v, so
 * that there only the size of the whole way bounds it. What is no number has no distance. */
static bool is_native(const struct run *r, float native, unsigned i, size_t e)
{
	double diff = fabs((double)r->p[e] - (double)native);
	double bound = (i + 1) * 0x1p-22 * (fabs((double)r->p[e]) + r->travel[e]);

	if (!isfinite(native))
		return isnan(native) ? isnan(r->p[e]) : r->p[e] == native;
	return isfinite(r->p[e]) && diff <= bound + 0x1p-149;
}

static void expect_native(const struct run *r, unsigned i)
{
	const float *native = golden_optim_row(&r->o, "native", i);

	for (size_t e = 0; native && e < N; e++)
		cr_assert(is_native(r, native[e], i, e),
			  "%s: p[%zu] after step %u is %a, torch's %a", r->o.name, e, i + 1,
			  (double)r->p[e], (double)native[e]);
}

static void expect_state(const struct run *r, unsigned i)
{
	expect(r, "m", r->m, i);
	expect(r, "v", r->v, i);
	expect(r, "vmax", r->vmax, i);
	expect(r, "buf", r->buf, i);
	expect(r, "p", r->p, i);
	expect_native(r, i);
}

/* The scaler multiplies by the inverse, rounded from double. Return: is an element infinite? */
static bool multiply(struct run *r, float scale)
{
	float found = 0;
	struct k_unscale a = { r->g, (float)(1.0 / (double)scale), &found };

	r->k->unscale(&a, 0, N);
	return found != 0;
}

/* The fused optimizer divides, and leaves the gradient alone if the step is skipped. Nobody
 * but this has a use for that: who unscales here calls Unscale, as in torch unscale_. */
static bool divide(struct run *r, float scale)
{
	bool found = false;

	for (size_t e = 0; e < N; e++)
		found = found || !isfinite(r->g[e]);
	for (size_t e = 0; !found && e < N; e++)
		r->g[e] /= scale;
	return found;
}

/* Return: is the step to be skipped? */
static bool unscale(struct run *r, unsigned i)
{
	float scale = golden_optim_number(&r->o, "scale", i);
	bool found = golden_optim_divides(&r->o) ? divide(r, scale) : multiply(r, scale);

	cr_assert_eq(found, golden_optim_number(&r->o, "found", i) != 0, "%s: step %u", r->o.name,
		     i + 1);
	expect(r, "unscaled", r->g, i);
	return found;
}

static void test_golden_optim_check(const struct safetensors *f, const struct kernels *k,
				    const char *name, const char *about)
{
	_cleanup_(freep) struct run *r = calloc(1, sizeof(*r));

	cr_assert_not_null(r);
	r->k = k;
	golden_optim_read(&r->o, f, name, about);
	memcpy(r->p, r->o.start, sizeof(r->p));
	for (unsigned i = 0; i < GOLDEN_OPTIM_STEPS; i++) {
		memcpy(r->g, golden_optim_gradients(&r->o, i), sizeof(r->g));
		if (!r->o.scaler || !unscale(r, i))
			step(r, r->o.lr[i]);
		expect_state(r, i);
		if (r->o.scaler && golden_optim_number(&r->o, "t", i) >= 0)
			cr_assert_eq(golden_optim_number(&r->o, "t", i), (float)r->steps, "%s",
				     name);
	}
}

static void check_cases(const char *optimizer, const char *form, unsigned least)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("optim.safetensors");
	const char *name, *about;
	void *iter = NULL;
	unsigned cases = 0;

	while (safetensors_next(f, &iter, &name, &about)) {
		if (!golden_is(about, "optimizer", optimizer) || !golden_is(about, "form", form))
			continue;
		test_golden_optim_check(f, kernels_ref(), name, about);
		test_golden_optim_check(f, kernels_host(), name, about);
		cases++;
	}
	cr_assert_geq(cases, least, "%u cases of %s %s", cases, optimizer, form);
}

#define GOLDEN_OPTIM(optimizer, form, least)                                               \
	Test(golden_optim, optimizer##_##form, .init = fdcheck_begin, .fini = fdcheck_end, \
	     .timeout = 60)                                                                \
	{                                                                                  \
		check_cases(#optimizer, #form, least);                                     \
	}

GOLDEN_OPTIM(adamw, single, 20)
GOLDEN_OPTIM(adamw, fused, 21)
GOLDEN_OPTIM(adamw, f64, 5)
GOLDEN_OPTIM(adam, single, 19)
GOLDEN_OPTIM(adam, fused, 19)
GOLDEN_OPTIM(adam, f64, 5)
GOLDEN_OPTIM(sgd, single, 18)
GOLDEN_OPTIM(sgd, fused, 17)
