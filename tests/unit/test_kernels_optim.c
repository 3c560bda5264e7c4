/* The optimizers and the fill of kernels/ref against models in double. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "kernels.h"
#include "random.h"

#define N     257
#define STEPS 100

static float p[N], g[N], m[N], v[N];
static double dp[N], dm[N], dv[N];

static void begin_state(void)
{
	struct k_fill a = { .dst = p, .seed = 7, .kind = FILL_NORMAL, .b = 1 };

	kernels_ref()->fill(&a, 0, N);
	memset(m, 0, sizeof(m));
	memset(v, 0, sizeof(v));
	memset(dm, 0, sizeof(dm));
	memset(dv, 0, sizeof(dv));
	for (size_t i = 0; i < N; i++)
		dp[i] = (double)p[i];
}

static void next_gradient(unsigned step)
{
	struct k_fill a = { .dst = g, .seed = 8, .stream = step, .kind = FILL_NORMAL, .b = 0.3 };

	kernels_ref()->fill(&a, 0, N);
}

/* Each step adds a few roundings of 2^-24 of the value, or of what it was made
 * from where that nearly cancels: hence the 1. Most of them even out. */
static void expect_close(const char *what, const float *got, const double *want, double bound)
{
	for (size_t i = 0; i < N; i++)
		cr_assert_leq(fabs((double)got[i] - want[i]), bound * (fabs(want[i]) + 1),
			      "%s[%zu] is %.9g, not %.9g", what, i, (double)got[i], want[i]);
}

static const struct adamw_set {
	double lr, b1, b2, eps, wd;
} adamw_sets[] = {
	{ 1e-3, 0.9, 0.999, 1e-8, 0.01 },
	{ 1e-2, 0.95, 0.99, 1e-6, 0 },
	{ 3e-4, 0.4, 0.9, 1e-8, 0.1 },
	{ 1e-1, 0, 0.5, 1e-3, 0.5 },
};

static struct k_adamw adamw_scalars(const struct adamw_set *s, int t)
{
	return (struct k_adamw){
		.p = p,
		.g = g,
		.m = m,
		.v = v,
		.decay = (float)(1 - s->lr * s->wd),
		.w1 = (float)(1 - s->b1),
		.b1 = (float)s->b1,
		.b2 = (float)s->b2,
		.w2 = (float)(1 - s->b2),
		.step_size = (float)(s->lr / (1 - pow(s->b1, t))),
		.sq = (float)sqrt(1 - pow(s->b2, t)),
		.eps = (float)s->eps,
	};
}

/* The published algorithm, in double. */
static void adamw_model(const struct adamw_set *s, int t)
{
	for (size_t i = 0; i < N; i++) {
		double gi = (double)g[i];

		dp[i] -= s->lr * s->wd * dp[i];
		dm[i] = s->b1 * dm[i] + (1 - s->b1) * gi;
		dv[i] = s->b2 * dv[i] + (1 - s->b2) * gi * gi;
		dp[i] -= s->lr * (dm[i] / (1 - pow(s->b1, t))) /
			 (sqrt(dv[i] / (1 - pow(s->b2, t))) + s->eps);
	}
}

Test(kernels_optim, adamw_follows_the_model, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	for (size_t s = 0; s < ARRAY_SIZE(adamw_sets); s++) {
		begin_state();
		for (int t = 1; t <= STEPS; t++) {
			struct k_adamw a = adamw_scalars(&adamw_sets[s], t);

			next_gradient((unsigned)t);
			kernels_ref()->adamw(&a, 0, N);
			adamw_model(&adamw_sets[s], t);
		}
		expect_close("m", m, dm, 1e-6);
		expect_close("v", v, dv, 1e-6);
		expect_close("p", p, dp, 5e-6);
	}
}

static struct k_adam adam_scalars(const struct adamw_set *s, int t)
{
	struct k_adamw w = adamw_scalars(s, t);

	return (struct k_adam){
		.p = p,
		.g = g,
		.m = m,
		.v = v,
		.wd = (float)s->wd,
		.w1 = w.w1,
		.b2 = w.b2,
		.w2 = w.w2,
		.step_size = w.step_size,
		.sq = w.sq,
		.eps = w.eps,
	};
}

static void adam_model(const struct adamw_set *s, int t)
{
	for (size_t i = 0; i < N; i++) {
		double gi = (double)g[i] + s->wd * dp[i];

		dm[i] = s->b1 * dm[i] + (1 - s->b1) * gi;
		dv[i] = s->b2 * dv[i] + (1 - s->b2) * gi * gi;
		dp[i] -= s->lr * (dm[i] / (1 - pow(s->b1, t))) /
			 (sqrt(dv[i] / (1 - pow(s->b2, t))) + s->eps);
	}
}

Test(kernels_optim, adam_follows_the_model, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	for (size_t s = 0; s < ARRAY_SIZE(adamw_sets); s++) {
		begin_state();
		for (int t = 1; t <= STEPS; t++) {
			struct k_adam a = adam_scalars(&adamw_sets[s], t);

			next_gradient((unsigned)t);
			kernels_ref()->adam(&a, 0, N);
			adam_model(&adamw_sets[s], t);
		}
		expect_close("m", m, dm, 2e-6);
		expect_close("v", v, dv, 2e-6);
		expect_close("p", p, dp, 1e-5);
	}
}

/* Without decay there is no difference between the two. */
Test(kernels_optim, adam_without_decay_is_adamw, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	static float want_p[N], want_m[N], want_v[N];
	struct adamw_set set = adamw_sets[0];
	struct k_adam a;
	struct k_adamw w;

	set.wd = 0;
	begin_state();
	next_gradient(1);
	w = adamw_scalars(&set, 1);
	kernels_ref()->adamw(&w, 0, N);
	memcpy(want_p, p, sizeof(p));
	memcpy(want_m, m, sizeof(m));
	memcpy(want_v, v, sizeof(v));
	begin_state();
	a = adam_scalars(&set, 1);
	kernels_ref()->adam(&a, 0, N);
	cr_assert_arr_eq(p, want_p, sizeof(p));
	cr_assert_arr_eq(m, want_m, sizeof(m));
	cr_assert_arr_eq(v, want_v, sizeof(v));
}

/* -- amsgrad, maximize and the profiles --------------------------------------------- */

static float vx[N];
static double dx[N];

static struct k_adamw full_scalars(const struct adamw_set *s, int t)
{
	struct k_adamw a = adamw_scalars(s, t);

	a.vmax = vx;
	a.maximize = true;
	a.f64 = (struct k_adam_f64){ .decay = 1 - s->lr * s->wd,
				     .wd = s->wd,
				     .b1 = s->b1,
				     .w1 = 1 - s->b1,
				     .b2 = s->b2,
				     .w2 = 1 - s->b2,
				     .step_size = s->lr / (1 - pow(s->b1, t)),
				     .sq = sqrt(1 - pow(s->b2, t)),
				     .eps = s->eps };
	return a;
}

/* Both forms of decay; the gradient counts the other way. */
static void full_model(const struct adamw_set *s, int t, bool decoupled)
{
	for (size_t i = 0; i < N; i++) {
		double gi = -(double)g[i] + (decoupled ? 0 : s->wd * dp[i]);

		dp[i] -= decoupled ? s->lr * s->wd * dp[i] : 0;
		dm[i] = s->b1 * dm[i] + (1 - s->b1) * gi;
		dv[i] = s->b2 * dv[i] + (1 - s->b2) * gi * gi;
		dx[i] = fmax(dx[i], dv[i]);
		dp[i] -= s->lr * (dm[i] / (1 - pow(s->b1, t))) /
			 (sqrt(dx[i] / (1 - pow(s->b2, t))) + s->eps);
	}
}

static void full_step(const struct k_adamw *a, const struct adamw_set *s, bool decoupled)
{
	struct k_adam b = { .p = p,
			    .g = g,
			    .m = m,
			    .v = v,
			    .vmax = vx,
			    .wd = (float)s->wd,
			    .w1 = a->w1,
			    .b2 = a->b2,
			    .w2 = a->w2,
			    .step_size = a->step_size,
			    .sq = a->sq,
			    .eps = a->eps,
			    .profile = a->profile,
			    .maximize = true,
			    .tail_from = a->tail_from,
			    .f64 = a->f64 };

	if (decoupled)
		kernels_ref()->adamw(a, 0, N);
	else
		kernels_ref()->adam(&b, 0, N);
}

static void full_run(const struct adamw_set *s, enum k_profile profile, bool decoupled)
{
	begin_state();
	memset(vx, 0, sizeof(vx));
	memset(dx, 0, sizeof(dx));
	for (int t = 1; t <= STEPS; t++) {
		struct k_adamw a = full_scalars(s, t);

		next_gradient((unsigned)t);
		a.profile = profile;
		a.tail_from = N / 2;
		full_step(&a, s, decoupled);
		full_model(s, t, decoupled);
	}
	expect_close("m", m, dm, 2e-6);
	expect_close("v", v, dv, 2e-6);
	expect_close("vmax", vx, dx, 2e-6);
	expect_close("p", p, dp, 1e-5);
}

Test(kernels_optim, profiles_with_amsgrad_and_maximize_follow_the_model, .init = fdcheck_begin,
     .fini = fdcheck_end, .timeout = 60)
{
	for (size_t s = 0; s < ARRAY_SIZE(adamw_sets); s++)
		for (unsigned profile = 0; profile < _K_PROFILE_N; profile++) {
			full_run(&adamw_sets[s], profile, true);
			full_run(&adamw_sets[s], profile, false);
		}
}

static float fused(double a, double b, double c)
{
	return fmaf((float)a, (float)b, (float)c);
}

/* Where the profiles differ: in v, by which product was rounded. */
Test(kernels_optim, fused_tail_rounds_the_other_product, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	struct k_adamw a = adamw_scalars(&adamw_sets[1], 3);
	unsigned differ = 0;

	begin_state();
	next_gradient(1);
	for (size_t i = 0; i < N; i++)
		v[i] = p[i] * p[i];
	a.profile = K_FUSED;
	a.tail_from = N - 100;
	for (size_t i = 0; i < N; i++)
		dv[i] = (double)v[i];
	kernels_ref()->adamw(&a, 0, N);
	for (size_t i = 0; i < N; i++) {
		float w2g = a.w2 * g[i], old = (float)dv[i];
		float body = fused((double)w2g, (double)g[i], (double)(old * a.b2));
		float tail = fused((double)old, (double)a.b2, (double)(w2g * g[i]));

		cr_assert_eq(v[i], i < N - 100 ? body : tail, "%zu", i);
		differ += body != tail;
	}
	cr_assert_gt(differ, 5);
}

/* One step, against the formulas in double: every array is the model's, rounded once. */
Test(kernels_optim, reference_f64_rounds_once, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	struct k_adamw a = full_scalars(&adamw_sets[0], 7);
	const struct k_adam_f64 *d = &a.f64;

	begin_state();
	next_gradient(1);
	for (size_t i = 0; i < N; i++) {
		m[i] = p[N - 1 - i] / 3;
		v[i] = p[i] * p[i];
		vx[i] = i % 2 ? v[i] * 2 : 0;
	}
	a.profile = K_REFERENCE_F64;
	a.maximize = false;
	for (size_t i = 0; i < N; i++) {
		double gi = (double)g[i], mi = fma(d->w1, gi - (double)m[i], (double)m[i]);
		double vi = fma(d->w2 * gi, gi, d->b2 * (double)v[i]), xi = fmax(vi, (double)vx[i]);
		double change = d->step_size * mi / (sqrt(xi) / d->sq + d->eps);
		float want = (float)((double)p[i] * d->decay - change);

		kernels_ref()->adamw(&a, i, i + 1);
		cr_assert_eq(m[i], (float)mi, "m[%zu] is %a, not %a", i, (double)m[i],
			     (double)(float)mi);
		cr_assert_eq(v[i], (float)vi, "v[%zu]", i);
		cr_assert_eq(vx[i], (float)xi, "vmax[%zu]", i);
		cr_assert_eq(p[i], want, "p[%zu]", i);
	}
}

/* A NaN stays in vmax; the loop for the tail leaves it out, as std::max does. */
Test(kernels_optim, amsgrad_and_nan, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	float one[2] = { 1, 1 }, grad[2] = { NAN, NAN }, mm[2] = { 0 }, vv[2] = { 0 };
	float max[2] = { 4, 4 };
	struct k_adamw a = adamw_scalars(&adamw_sets[0], 1);

	a.p = one, a.g = grad, a.m = mm, a.v = vv, a.vmax = max;
	a.profile = K_FUSED;
	a.tail_from = 1;
	kernels_ref()->adamw(&a, 0, 2);
	cr_expect(isnan(max[0]));
	cr_expect_eq(max[1], 4);
	cr_expect(isnan(one[0]) && isnan(one[1]));
	grad[0] = 1;
	vv[0] = 1;
	kernels_ref()->adamw(&a, 0, 1);
	cr_expect(isnan(max[0]), "a number does not cover it up");
}

static const struct sgd_set {
	double lr, wd, mu;
	bool nesterov;
	double dampening;
	bool maximize;
} sgd_sets[] = {
	{ 0.1, 0, 0, false, 0, false },       { 0.1, 0.01, 0, false, 0, false },
	{ 0.01, 0, 0.9, false, 0, false },    { 0.01, 0.1, 0.9, false, 0, false },
	{ 0.01, 0.1, 0.9, true, 0, false },   { 0.01, 0.1, 0.9, false, 0.3, false },
	{ 0.01, 0.1, 0.9, false, 0.5, true }, { 0.01, 0.1, 0, false, 0, true },
};

static void sgd_model(const struct sgd_set *s, bool first)
{
	for (size_t i = 0; i < N; i++) {
		double d = (s->maximize ? -1 : 1) * (double)g[i] + s->wd * dp[i];

		if (s->mu != 0) {
			dm[i] = first ? d : s->mu * dm[i] + (1 - s->dampening) * d;
			d = s->nesterov ? d + s->mu * dm[i] : dm[i];
		}
		dp[i] -= s->lr * d;
	}
}

Test(kernels_optim, sgd_follows_the_model, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	for (size_t s = 0; s < ARRAY_SIZE(sgd_sets); s++) {
		const struct sgd_set *set = &sgd_sets[s];

		begin_state();
		for (unsigned t = 1; t <= STEPS; t++) {
			struct k_sgd a = { .p = p,
					   .g = g,
					   .buf = set->mu != 0 ? m : NULL,
					   .lr = (float)set->lr,
					   .wd = (float)set->wd,
					   .mu = (float)set->mu,
					   .nesterov = set->nesterov,
					   .first = t == 1,
					   .maximize = set->maximize,
					   .dampening = set->dampening,
					   .profile = t % 3,
					   .tail_from = N / 2 };

			next_gradient(t);
			kernels_ref()->sgd(&a, 0, N);
			sgd_model(set, t == 1);
		}
		expect_close("p", p, dp, 5e-6);
		if (set->mu != 0)
			expect_close("buf", m, dm, 5e-6);
	}
}

/* The buffer is not read in the first step, and not written without momentum. */
Test(kernels_optim, sgd_buffer, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	float x = 1, grad = 2, b = NAN;
	struct k_sgd a = { .p = &x, .g = &grad, .buf = &b, .lr = 0.5f, .mu = 0.5f, .first = true };

	kernels_ref()->sgd(&a, 0, 1);
	cr_expect_eq(b, 2);
	cr_expect_eq(x, 0);
	a.first = false;
	kernels_ref()->sgd(&a, 0, 1);
	cr_expect_eq(b, 3);
	cr_expect_eq(x, -1.5f);
	a.mu = 0;
	kernels_ref()->sgd(&a, 0, 1);
	cr_expect_eq(b, 3);
	cr_expect_eq(x, -2.5f);
}

/* The known answers published with Philox4x32-10. */
static const struct {
	uint64_t seed, group, stream;
	uint32_t want[4];
} philox[] = {
	{ 0, 0, 0, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
	{ UINT64_MAX, UINT64_MAX, UINT64_MAX, { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
	{ 0x299f31d0a4093822,
	  0x85a308d3243f6a88,
	  0x0370734413198a2e,
	  { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
};

Test(kernels_optim, philox_known_answers, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	for (size_t i = 0; i < ARRAY_SIZE(philox); i++) {
		struct k_fill a = { .seed = philox[i].seed, .stream = philox[i].stream };
		uint32_t w[4];

		random_words(a.seed, a.stream, philox[i].group, w);
		cr_expect_arr_eq(w, philox[i].want, sizeof(w), "row %zu", i);
	}
}

/* The written-out functions against the C library's, ends included. */
Test(kernels_optim, log_and_turn, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	for (uint64_t i = 0; i <= UINT32_MAX; i += i < 1000 || i > 0xfffffc00u ? 1 : 65521) {
		uint32_t w = (uint32_t)i;
		double want = log(((double)w + 0.5) * 0x1p-32), c, s;
		double angle = (double)w * 0x1.921fb54442d18p-30;

		cr_assert_leq(fabs(random_log(w) / want - 1), 2e-15, "%u", w);
		random_turn(w, &c, &s);
		cr_assert_leq(fabs(c - cos(angle)), 2e-15, "%u", w);
		cr_assert_leq(fabs(s - sin(angle)), 2e-15, "%u", w);
	}
}

#define FILLED 1000003u

/* Mean of (x - center)^power. */
static double moment(const float *x, double center, int power)
{
	double sum = 0;

	for (size_t i = 0; i < FILLED; i++)
		sum += pow((double)x[i] - center, power);
	return sum / FILLED;
}

Test(kernels_optim, fill_uniform, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30)
{
	_cleanup_(freep) float *x = calloc(FILLED, sizeof(*x));
	struct k_fill a = {
		.dst = x, .seed = 42, .stream = 3, .kind = FILL_UNIFORM, .a = -2, .b = 6
	};
	float low = 99, high = -99;

	kernels_ref()->fill(&a, 0, FILLED);
	for (size_t i = 0; i < FILLED; i++) {
		low = fminf(low, x[i]);
		high = fmaxf(high, x[i]);
	}
	cr_expect(low >= -2 && low < -1.9999f, "%f", (double)low);
	cr_expect(high <= 6 && high > 5.9999f, "%f", (double)high);
	/* five standard errors: deviation 8/sqrt(12), of the square 64/sqrt(180) */
	cr_expect_float_eq(moment(x, 0, 1), 2, 5 * 2.31e-3);
	cr_expect_float_eq(moment(x, 2, 2), 64.0 / 12, 5 * 4.78e-3);
}

Test(kernels_optim, fill_normal, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30)
{
	_cleanup_(freep) float *x = calloc(FILLED, sizeof(*x));
	struct k_fill a = { .dst = x, .seed = 43, .stream = 4, .kind = FILL_NORMAL, .b = 1 };
	double both = 0;

	kernels_ref()->fill(&a, 0, FILLED);
	/* five standard errors: 1, sqrt(2), sqrt(15), sqrt(96), each times 1e-3 */
	cr_expect_float_eq(moment(x, 0, 1), 0, 5e-3);
	cr_expect_float_eq(moment(x, 0, 2), 1, 7.1e-3);
	cr_expect_float_eq(moment(x, 0, 3), 0, 19.4e-3);
	cr_expect_float_eq(moment(x, 0, 4), 3, 49e-3);
	for (size_t i = 0; i + 1 < FILLED; i++)
		both += (double)x[i] * (double)x[i + 1];
	cr_expect_float_eq(both / FILLED, 0, 5e-3, "neighbours depend on each other");
}

static unsigned equal_elements(const float *x, const float *y, size_t n)
{
	unsigned equal = 0;

	for (size_t i = 0; i < n; i++)
		equal += x[i] == y[i];
	return equal;
}

/* A tensor that is made in parts, by first or by ranges, is the same tensor;
 * another seed or stream is another. */
Test(kernels_optim, fill_depends_on_the_index_only, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 10)
{
	float whole[101], part[101];
	struct k_fill a = { .dst = whole, .seed = 5, .stream = 6, .kind = FILL_NORMAL, .b = 1 };

	kernels_ref()->fill(&a, 0, 101);
	a.dst = part;
	for (size_t at = 0; at < 101; at += 7) {
		a.dst = part + at;
		a.first = at;
		kernels_ref()->fill(&a, 0, 101 - at < 7 ? 101 - at : 7);
	}
	cr_expect_arr_eq(whole, part, sizeof(whole));
	a = (struct k_fill){ .dst = part, .seed = 5, .stream = 7, .kind = FILL_NORMAL, .b = 1 };
	kernels_ref()->fill(&a, 0, 101);
	cr_expect_lt(equal_elements(whole, part, 101), 3);
	a.seed = 6;
	a.stream = 6;
	kernels_ref()->fill(&a, 0, 101);
	cr_expect_lt(equal_elements(whole, part, 101), 3);
}
