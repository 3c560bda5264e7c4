/*
 * kernels/ref against PyTorch on the CPU: the vectors of tests/golden, which
 * make_golden.py writes and describes.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "convert.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "kernels.h"

#define MAX_N 1024

static FILE *golden_open(const char *name)
{
	char path[1024];
	FILE *f;

	snprintf(path, sizeof(path), "%s/tests/golden/%s", SHARDD_SOURCE_DIR, name);
	f = fopen(path, "r");
	cr_assert_not_null(f, "%s", path);
	return f;
}

static unsigned read_number(FILE *f)
{
	unsigned n = 0;

	cr_assert_eq(fscanf(f, "%u", &n), 1);
	return n;
}

static double read_setting(FILE *f)
{
	double d = 0;

	cr_assert_eq(fscanf(f, "%lf", &d), 1);
	return d;
}

static uint32_t read_word(FILE *f)
{
	uint32_t u = 0;

	cr_assert_eq(fscanf(f, "%" SCNx32, &u), 1);
	return u;
}

static void read_f32(FILE *f, float *x, unsigned n)
{
	cr_assert_leq(n, MAX_N);
	for (unsigned i = 0; i < n; i++)
		x[i] = f32_from_bits(read_word(f));
}

/* Distance in units in the last place, across zero too. */
static uint32_t ulps(float a, float b)
{
	int64_t x = f32_bits(a) & FP32_ABS, y = f32_bits(b) & FP32_ABS;

	x = signbit(a) ? -x : x;
	y = signbit(b) ? -y : y;
	return (uint32_t)(x < y ? y - x : x - y);
}

static void expect_bits(const char *what, const float *got, const float *want, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		cr_assert_eq(f32_bits(got[i]), f32_bits(want[i]), "%s[%u] is %a, not %a", what, i,
			     (double)got[i], (double)want[i]);
}

struct adam_case {
	bool decoupled; /* AdamW */
	unsigned n, steps;
	double lr, b1, b2, eps, wd;
	float p[MAX_N], m[MAX_N], v[MAX_N], g[MAX_N];
	float native[MAX_N]; /* p by torch's own sqrt */
};

/* The scalars as a caller computes them: in double, rounded once. */
static void adamw_step(struct adam_case *c, unsigned t)
{
	struct k_adamw a = {
		.p = c->p,
		.g = c->g,
		.m = c->m,
		.v = c->v,
		.decay = (float)(1 - c->lr * c->wd),
		.w1 = (float)(1 - c->b1),
		.b1 = (float)c->b1,
		.b2 = (float)c->b2,
		.w2 = (float)(1 - c->b2),
		.step_size = (float)(c->lr / (1 - pow(c->b1, t))),
		.sq = (float)sqrt(1 - pow(c->b2, t)),
		.eps = (float)c->eps,
	};

	kernels_ref()->adamw(&a, 0, c->n);
}

static void adam_step(struct adam_case *c, unsigned t)
{
	struct k_adam a = {
		.p = c->p,
		.g = c->g,
		.m = c->m,
		.v = c->v,
		.wd = (float)c->wd,
		.w1 = (float)(1 - c->b1),
		.b2 = (float)c->b2,
		.w2 = (float)(1 - c->b2),
		.step_size = (float)(c->lr / (1 - pow(c->b1, t))),
		.sq = (float)sqrt(1 - pow(c->b2, t)),
		.eps = (float)c->eps,
	};

	kernels_ref()->adam(&a, 0, c->n);
}

/* torch takes its square roots from MKL on x86, which are one unit off for one
 * number in six. That moves an update by at most 2^-22 of itself, and may make the
 * subtraction from p round the other way, by 2^-23 of p; both add up over the
 * steps. */
static void expect_native(const struct adam_case *c, unsigned t, double *travel)
{
	for (unsigned i = 0; i < c->n; i++) {
		double diff = fabs((double)c->p[i] - (double)c->native[i]);
		double bound = t * 0x1p-22 * (fabs((double)c->p[i]) + travel[i]);

		cr_assert_leq(diff, bound, "step %u: p[%u] is %a, torch's %a", t, i,
			      (double)c->p[i], (double)c->native[i]);
	}
}

static void adam_check_step(FILE *f, struct adam_case *c, unsigned t, double *travel)
{
	float want[MAX_N], before[MAX_N];

	memcpy(before, c->p, sizeof(before));
	read_f32(f, c->g, c->n);
	if (c->decoupled)
		adamw_step(c, t);
	else
		adam_step(c, t);
	read_f32(f, want, c->n);
	expect_bits("m", c->m, want, c->n);
	read_f32(f, want, c->n);
	expect_bits("v", c->v, want, c->n);
	read_f32(f, want, c->n);
	expect_bits("p", c->p, want, c->n);
	read_f32(f, c->native, c->n);
	for (unsigned i = 0; i < c->n; i++)
		travel[i] += fabs((double)c->p[i] - (double)before[i]);
	expect_native(c, t, travel);
}

static void adam_check_case(FILE *f, bool decoupled, unsigned n, unsigned steps)
{
	struct adam_case c = { .decoupled = decoupled, .n = n, .steps = steps };
	double travel[MAX_N] = { 0 };

	c.lr = read_setting(f);
	c.b1 = read_setting(f);
	c.b2 = read_setting(f);
	c.eps = read_setting(f);
	c.wd = read_setting(f);
	read_f32(f, c.p, n);
	for (unsigned t = 1; t <= steps; t++)
		adam_check_step(f, &c, t, travel);
}

/* Bit for bit with correctly rounded square roots, close with torch's own. */
static void adam_check_file(const char *name, bool decoupled)
{
	_cleanup_(fclosep) FILE *f = golden_open(name);
	unsigned cases = read_number(f), n = read_number(f), steps = read_number(f);

	cr_assert_geq(cases, 5);
	for (unsigned c = 0; c < cases; c++)
		adam_check_case(f, decoupled, n, steps);
}

Test(golden, adamw, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	adam_check_file("adamw.txt", true);
}

Test(golden, adam, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	adam_check_file("adam.txt", false);
}

static void sgd_check_case(FILE *f, unsigned n, unsigned steps)
{
	float p[MAX_N], g[MAX_N], buf[MAX_N], want[MAX_N];
	struct k_sgd a = { .p = p, .g = g };

	a.lr = (float)read_setting(f);
	a.mu = (float)read_setting(f);
	a.wd = (float)read_setting(f);
	a.nesterov = read_number(f);
	a.buf = a.mu != 0 ? buf : NULL;
	read_f32(f, p, n);
	for (unsigned t = 1; t <= steps; t++) {
		read_f32(f, g, n);
		a.first = t == 1;
		kernels_ref()->sgd(&a, 0, n);
		read_f32(f, want, n);
		expect_bits("buf", a.buf ? buf : p, want, n);
		read_f32(f, want, n);
		expect_bits("p", p, want, n);
	}
}

/* Bit for bit. */
Test(golden, sgd, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(fclosep) FILE *f = golden_open("sgd.txt");
	unsigned cases = read_number(f), n = read_number(f), steps = read_number(f);

	cr_assert_geq(cases, 6);
	for (unsigned c = 0; c < cases; c++)
		sgd_check_case(f, n, steps);
}

static uint16_t narrowed(float x, enum dtype t)
{
	uint16_t h;
	struct k_cast a = { &h, &x, t, DTYPE_FP32, false };

	kernels_ref()->cast(&a, 0, 1);
	return h;
}

static float widened(uint16_t h, enum dtype t)
{
	float x;
	struct k_cast a = { &x, &h, DTYPE_FP32, t, false };

	kernels_ref()->cast(&a, 0, 1);
	return x;
}

static void expect_widened(uint16_t h, enum dtype t, uint32_t want)
{
	float x = widened(h, t), y = f32_from_bits(want);

	cr_assert(f32_bits(x) == want || (x != x && y != y), "%s %04x", dtype_name(t), h);
}

/* Bit for bit; NaN to NaN. */
Test(golden, cast, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(fclosep) FILE *f = golden_open("cast.txt");
	unsigned n = read_number(f);

	cr_assert_geq(n, 1000);
	for (unsigned i = 0; i < n; i++) {
		float x = f32_from_bits(read_word(f));

		cr_assert_eq(narrowed(x, DTYPE_BF16), read_word(f), "%a to bf16", (double)x);
		cr_assert_eq(narrowed(x, DTYPE_FP16), read_word(f), "%a to fp16", (double)x);
	}
	n = read_number(f);
	cr_assert_geq(n, 1000);
	for (unsigned i = 0; i < n; i++) {
		uint16_t h = (uint16_t)read_word(f);

		expect_widened(h, DTYPE_BF16, read_word(f));
		expect_widened(h, DTYPE_FP16, read_word(f));
	}
}

static float norm_of(const float *x, unsigned n, bool inf)
{
	double partial[1];
	struct k_norm a = { x, partial, inf ? INFINITY : 2 };

	cr_assert_leq(n, KERNEL_NORM_BLOCK);
	kernels_ref()->norm(&a, 0, n);
	return (float)(inf ? partial[0] : sqrt(partial[0]));
}

static void clip_check_case(FILE *f)
{
	float g[MAX_N], want[MAX_N], total, coef, got;
	unsigned n = read_number(f), clipped;
	bool inf = read_number(f);
	float max_norm = (float)read_setting(f);
	struct k_scale scale = { .x = g };

	read_f32(f, &total, 1);
	read_f32(f, &coef, 1);
	clipped = read_number(f);
	read_f32(f, g, n);
	read_f32(f, want, n);
	got = norm_of(g, n, inf);
	/* torch sums squares in fp32 and rounds a norm per tensor and per rank */
	cr_assert_leq(ulps(got, total), inf ? 0 : 4, "norm %a, torch's %a", (double)got,
		      (double)total);
	got = max_norm / (got + 1e-6f);
	cr_assert_leq(ulps(got, coef), inf ? 0 : 6, "factor %a, torch's %a", (double)got,
		      (double)coef);
	cr_assert_eq(got < 1, clipped);
	scale.factor = coef;
	if (clipped)
		kernels_ref()->scale(&scale, 0, n);
	expect_bits("gradient", g, want, n);
}

/* fairscale's rule: the norm and the factor within a few units, the maximum and
 * the scaled gradients bit for bit. */
Test(golden, clip, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(fclosep) FILE *f = golden_open("clip.txt");
	unsigned cases = read_number(f);

	cr_assert_geq(cases, 5);
	for (unsigned c = 0; c < cases; c++)
		clip_check_case(f);
}
