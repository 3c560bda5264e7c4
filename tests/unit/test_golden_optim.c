/*
 * The optimizer kernels against torch.optim: tests/golden/optim.safetensors, which
 * make_optim.py writes and describes. Bit for bit, but for p with MKL's square root and what
 * expect_near and ignore_sign_of_zero say.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden.h"

#define MAX_N 64

/* torch's fused kernels step one by one what is left behind whole vectors: of eight
 * elements, on the machine that made the vectors. */
#define VECTOR 8

struct run {
	const struct safetensors *f;
	const char *name, *about;
	const struct kernels *k;
	size_t n;
	unsigned steps; /* taken, skipped ones not */
	enum k_profile profile;
	float p[MAX_N], g[MAX_N], m[MAX_N], v[MAX_N], vmax[MAX_N], buf[MAX_N];
	double travel[MAX_N]; /* how far p has come, steps added up */
};

/* The learning rate of step @i: the i-th of "a:b:c". */
static double lr_at(const struct run *r, unsigned i)
{
	char text[128], *at = text, *end;

	golden_text(r->about, "lr", text, sizeof(text));
	while (i--) {
		at = strchr(at, ':');
		cr_assert_not_null(at, "%s", r->name);
		at++;
	}
	double lr = strtod(at, &end);

	cr_assert(end != at && (*end == ':' || !*end), "%s", r->name);
	return lr;
}

static double number(const struct run *r, const char *key)
{
	return golden_number(r->about, key);
}

static uint64_t tail_from(const struct run *r)
{
	return r->profile == K_FUSED ? r->n - r->n % VECTOR : UINT64_MAX;
}

/* Scalars as a caller computes them: in double, rounded once. */
static struct k_adam_f64 scalars(const struct run *r, double lr)
{
	double b1 = number(r, "beta1"), b2 = number(r, "beta2"), t = r->steps + 1;

	return (struct k_adam_f64){
		.decay = 1 - lr * number(r, "weight_decay"),
		.wd = number(r, "weight_decay"),
		.b1 = b1,
		.w1 = 1 - b1,
		.b2 = b2,
		.w2 = 1 - b2,
		.step_size = lr / (1 - pow(b1, t)),
		.sq = sqrt(1 - pow(b2, t)),
		.eps = number(r, "eps"),
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
		.vmax = number(r, "amsgrad") != 0 ? r->vmax : NULL,
		.decay = (float)s.decay,
		.w1 = (float)s.w1,
		.b1 = (float)s.b1,
		.b2 = (float)s.b2,
		.w2 = (float)s.w2,
		.step_size = (float)s.step_size,
		.sq = (float)s.sq,
		.eps = (float)s.eps,
		.profile = r->profile,
		.maximize = number(r, "maximize") != 0,
		.tail_from = tail_from(r),
		.f64 = s,
	};

	r->k->adamw(&a, 0, r->n);
}

static void adam_step(struct run *r, double lr)
{
	struct k_adam_f64 s = scalars(r, lr);
	struct k_adam a = {
		.p = r->p,
		.g = r->g,
		.m = r->m,
		.v = r->v,
		.vmax = number(r, "amsgrad") != 0 ? r->vmax : NULL,
		.wd = (float)s.wd,
		.w1 = (float)s.w1,
		.b2 = (float)s.b2,
		.w2 = (float)s.w2,
		.step_size = (float)s.step_size,
		.sq = (float)s.sq,
		.eps = (float)s.eps,
		.profile = r->profile,
		.maximize = number(r, "maximize") != 0,
		.tail_from = tail_from(r),
		.f64 = s,
	};

	r->k->adam(&a, 0, r->n);
}

static void sgd_step(struct run *r, double lr)
{
	struct k_sgd a = {
		.p = r->p,
		.g = r->g,
		.buf = number(r, "momentum") != 0 ? r->buf : NULL,
		.lr = (float)lr,
		.wd = (float)number(r, "weight_decay"),
		.mu = (float)number(r, "momentum"),
		.dampening = number(r, "dampening"),
		.nesterov = number(r, "nesterov") != 0,
		.first = r->steps == 0,
		.maximize = number(r, "maximize") != 0,
		.profile = r->profile,
		.tail_from = tail_from(r),
	};

	r->k->sgd(&a, 0, r->n);
}

static void step(struct run *r, double lr)
{
	float before[MAX_N];

	memcpy(before, r->p, sizeof(before));
	if (golden_is(r->about, "optimizer", "sgd"))
		sgd_step(r, lr);
	else if (golden_is(r->about, "optimizer", "adam"))
		adam_step(r, lr);
	else
		adamw_step(r, lr);
	r->steps++;
	for (size_t i = 0; i < r->n; i++)
		r->travel[i] += fabs((double)r->p[i] - (double)before[i]);
}

/* ------------------------------------------------------------------ comparison */

/* Row @i of a tensor [step, element] of the case. */
static const float *row(const struct run *r, const char *part, unsigned i)
{
	struct safetensors_tensor t = golden_part(r->f, r->name, part);

	cr_assert(t.dtype == DTYPE_FP32 && t.dims == 2 && t.shape[1] == r->n && i < t.shape[0]);
	return (const float *)t.data + i * r->n;
}

/* In double torch interpolates m, we add two products: what is rounded to fp32 may be the
 * next number, and again after each step. */
static void expect_near(const struct run *r, const char *part, const float *got, unsigned i)
{
	const float *want = row(r, part, i);

	for (size_t e = 0; e < r->n; e++)
		cr_assert_leq(fabs((double)got[e] - (double)want[e]),
			      (i + 1) * (0x1p-23 * fabs((double)want[e]) + 0x1p-149),
			      "%s: %s[%zu] after step %u is %a, not %a", r->name, part, e, i + 1,
			      (double)got[e], (double)want[e]);
}

/* torch interpolates the elements behind whole pairs of vectors one by one, there by
 * subtracting where elsewhere it adds the opposite: with beta1 0 the product is a zero, so
 * that of a gradient of -0 the sign of m differs, and of a p that is -0. Nothing else can. */
static void ignore_sign_of_zero(const struct run *r, const char *part, float *got, unsigned i)
{
	const float *want = row(r, part, i);

	if (golden_is(r->about, "optimizer", "sgd") || number(r, "beta1") != 0 ||
	    r->profile != K_EAGER_SINGLE)
		return;
	for (size_t e = r->n - r->n % (2 * VECTOR); e < r->n; e++)
		if (got[e] == 0 && want[e] == 0)
			got[e] = want[e];
}

static void expect(const struct run *r, const char *part, const float *got, unsigned i)
{
	char what[256];
	float x[MAX_N];

	if (!golden_has(r->f, r->name, part))
		return;
	if (r->profile == K_REFERENCE_F64) {
		expect_near(r, part, got, i);
		return;
	}
	memcpy(x, got, sizeof(x));
	ignore_sign_of_zero(r, part, x, i);
	snprintf(what, sizeof(what), "%s: %s after step %u", r->name, part, i + 1);
	golden_expect(what, x, row(r, part, i), DTYPE_FP32, r->n);
}

/* MKL's square root, off by one unit for one number in six, moves an update by at most
 * 2^-22 of itself and may make the subtraction from p round the other way, by 2^-23 of p;
 * both add up over the steps. Decay in the gradient (Adam) brings p back into m and v, so
 * that there only the size of the whole way bounds it. */
static void expect_native(const struct run *r, unsigned i)
{
	const float *native;

	if (!golden_has(r->f, r->name, "native"))
		return;
	native = row(r, "native", i);
	for (size_t e = 0; e < r->n; e++) {
		double diff = fabs((double)r->p[e] - (double)native[e]);
		double bound = (i + 1) * 0x1p-22 * (fabs((double)r->p[e]) + r->travel[e]);

		cr_assert_leq(diff, bound + 0x1p-149, "%s: p[%zu] after step %u is %a, torch's %a",
			      r->name, e, i + 1, (double)r->p[e], (double)native[e]);
	}
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

static float number_at(const struct run *r, const char *part, unsigned i)
{
	struct safetensors_tensor t = golden_part(r->f, r->name, part);

	cr_assert(t.dims == 1 && i < t.shape[0]);
	return golden_at(t.data, t.dtype, i);
}

/* The scaler multiplies by the inverse, rounded from double; the fused optimizer divides, and
 * leaves the gradient alone if the step is skipped. Return: is it? */
static bool unscale(struct run *r, unsigned i)
{
	float scale = number_at(r, "scale", i), found = 0, before[MAX_N];
	struct k_unscale a = { r->g, (float)(1.0 / (double)scale), &found };

	memcpy(before, r->g, sizeof(before));
	r->k->unscale(&a, 0, r->n);
	cr_assert_eq(found, number_at(r, "found", i), "%s: step %u", r->name, i + 1);
	for (size_t e = 0; r->profile == K_FUSED && e < r->n; e++)
		r->g[e] = found != 0 ? before[e] : before[e] / scale;
	expect(r, "unscaled", r->g, i);
	return found != 0;
}

static void start(struct run *r)
{
	struct safetensors_tensor p = golden_tensor(r->f, "in/p");

	cr_assert(p.dtype == DTYPE_FP32 && p.elements <= MAX_N);
	r->n = p.elements;
	memcpy(r->p, p.data, r->n * sizeof(float));
	r->profile = golden_is(r->about, "form", "fused") ? K_FUSED
		     : golden_is(r->about, "form", "f64") ? K_REFERENCE_F64
							  : K_EAGER_SINGLE;
}

static void check(const struct safetensors *f, const struct kernels *k, const char *name,
		  const char *about)
{
	_cleanup_(freep) struct run *r = calloc(1, sizeof(*r));
	struct safetensors_tensor g = golden_tensor(f, "in/g");
	bool scaled = golden_number(about, "scaler") != 0;

	cr_assert_not_null(r);
	r->f = f;
	r->name = name;
	r->about = about;
	r->k = k;
	start(r);
	cr_assert(g.dims == 2 && g.shape[0] == 5 && g.shape[1] == r->n);
	for (unsigned i = 0; i < g.shape[0]; i++) {
		bool skip = false;

		memcpy(r->g, scaled ? row(r, "g", i) : (const float *)g.data + i * r->n,
		       r->n * sizeof(float));
		if (scaled)
			skip = unscale(r, i);
		if (!skip)
			step(r, lr_at(r, i));
		expect_state(r, i);
		if (scaled && number_at(r, "t", i) >= 0)
			cr_assert_eq(number_at(r, "t", i), (float)r->steps, "%s", name);
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
		check(f, kernels_ref(), name, about);
		check(f, kernels_host(), name, about);
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

GOLDEN_OPTIM(adamw, single, 17)
GOLDEN_OPTIM(adamw, fused, 17)
GOLDEN_OPTIM(adamw, f64, 4)
GOLDEN_OPTIM(adam, single, 16)
GOLDEN_OPTIM(adam, fused, 16)
GOLDEN_OPTIM(adam, f64, 4)
GOLDEN_OPTIM(sgd, single, 15)
GOLDEN_OPTIM(sgd, fused, 14)
