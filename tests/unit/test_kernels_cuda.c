/*
 * The CUDA kernels without a device: their arithmetic (kernels/cuda/element.h) against
 * kernels/ref, bit for bit, on numbers of every kind; the kernels as a whole, compiled for
 * the host (tests/gpu/emulated), with the cases of tests/gpu/kernel_test; and what the host
 * must know of them: names, launches, the image.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "convert.h"
#include "core/check.h"
#include "cuda_kernels.h"
#include "element.h"
#include "fdcheck.h"
#include "kernels.h"
#include "longform.h"

#ifdef SHARDD_EMULATED
#include "kernel_cases.h"
#endif

#define N       (longform_cut() ? 2500 : 20000)
#define MAX_K   5
#define OPTIONS .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60

static const uint32_t specials[] = {
	0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001,
	0x7fbfffff, 0x00000001, 0x80000001, 0x007fffff, 0x00400000, 0x00800000, 0x7f7fffff,
	0xff7fffff, 0x7f7f8000, 0x3f800000, 0xbf800000, 0x3f7fffff, 0x3f800001,
};

static uint64_t state = 88172645463325252u;

static uint64_t random_next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state >> 16;
}

/* A third plain numbers, a third of any size, a quarter special, the rest of any bits. */
static float random_f32(void)
{
	uint64_t r = random_next(), bits = random_next();

	if (r % 12 < 4)
		return (float)((double)(bits & 0xffffff) * 0x1p-21 - 4);
	if (r % 12 < 8)
		return ldexpf((float)((double)(bits & 0xffffff) * 0x1p-23 - 1),
			      (int)(bits >> 24) % 300 - 150);
	if (r % 12 < 11)
		return f32_from_bits(specials[bits % ARRAY_SIZE(specials)]);
	return f32_from_bits((uint32_t)bits);
}

static bool same(float a, float b)
{
	return f32_bits(a) == f32_bits(b) || (a != a && b != b);
}

static float pick(const float *list, size_t n)
{
	return list[random_next() % n];
}

static const float factors[] = { 1,         2,    0.5f,     -4,        3,        0.7f,
				 1e30f,     0,    0x1p126f, 0x1p-126f, 0x1p127f, 0x1p-127f,
				 0x1p-149f, 1536, INFINITY, NAN,       7 };

Test(kernels_cuda, division_is_the_definitions, OPTIONS)
{
	for (size_t f = 0; f < ARRAY_SIZE(factors); f++) {
		struct el_divisor d = el_divisor(factors[f]);

		for (int i = 0; i < N; i++) {
			float x = random_f32();

			cr_assert(same(el_divide(x, d, d.exact), x / factors[f]), "%a / %a",
				  (double)x, (double)factors[f]);
			cr_assert(same(el_divide(x, d, false), x / factors[f]));
		}
	}
}

/* The shortcut is taken where it counts: powers of two. */
Test(kernels_cuda, powers_of_two_multiply, OPTIONS)
{
	for (int e = -126; e <= 127; e++) {
		cr_assert(el_divisor(ldexpf(1, e)).exact, "2^%d", e);
		cr_assert(el_divisor(ldexpf(-1, e)).exact);
		cr_assert_not(el_divisor(ldexpf(1.5f, e)).exact);
	}
	cr_assert_not(el_divisor(0).exact);
	cr_assert_not(el_divisor(INFINITY).exact);
	cr_assert_not(el_divisor(NAN).exact);
}

static float reduce_element(const struct k_reduce *a, const float x[], float old)
{
	struct cuda_factor by[2] = { { a->pre.how, a->pre.dtype, a->pre.value },
				     { a->post.how, a->post.dtype, a->post.value } };
	struct el_divisor pre = el_factor(by[0]), post = el_factor(by[1]);
	float t = EL_SUM_NOTHING;

	for (unsigned j = 0; j < a->k; j++) {
		float y = el_round(a->sum_dtype, el_apply(by[0], pre, x[j]));

		t = el_round(a->sum_dtype, el_sum(t, y));
	}
	t = el_apply(by[1], post, t);
	return el_round(a->out_dtype, el_accumulate(a->accumulate, old, t));
}

static enum dtype any_dtype(void)
{
	return (enum dtype)(DTYPE_FP32 + random_next() % 3);
}

static struct k_factor any_factor(void)
{
	return (struct k_factor){ (enum k_factor_how)(random_next() % 3), any_dtype(),
				  pick(factors, ARRAY_SIZE(factors)) };
}

/* The output as fp32, whatever it is in memory. */
static float reduce_ref(struct k_reduce *a, float old)
{
	uint32_t memory = 0;
	struct k_cast in = { &memory, &old, a->out_dtype, DTYPE_FP32, false };
	struct k_cast out = { &old, &memory, DTYPE_FP32, a->out_dtype, false };

	a->out = &memory;
	kernels_ref()->cast(&in, 0, 1);
	kernels_ref()->reduce(a, 0, 1);
	kernels_ref()->cast(&out, 0, 1);
	return old;
}

Test(kernels_cuda, reduce_equals_ref, OPTIONS)
{
	for (int i = 0; i < 8 * N; i++) {
		float x[MAX_K], old, want, got;
		const void *in[MAX_K];
		struct k_reduce a = { .in = in,
				      .k = 1 + (unsigned)(random_next() % MAX_K),
				      .in_dtype = DTYPE_FP32,
				      .out_dtype = any_dtype(),
				      .sum_dtype = any_dtype(),
				      .pre = any_factor(),
				      .post = any_factor(),
				      .accumulate = random_next() % 2 };

		for (unsigned j = 0; j < MAX_K; j++) {
			x[j] = random_f32();
			in[j] = &x[j];
		}
		old = el_round(a.out_dtype, random_f32());
		got = reduce_element(&a, x, old);
		want = reduce_ref(&a, old);
		cr_assert(same(got, want), "k %u, pre %d %a, post %d %a: %a, not %a", a.k,
			  (int)a.pre.how, (double)a.pre.value, (int)a.post.how,
			  (double)a.post.value, (double)got, (double)want);
	}
}

Test(kernels_cuda, all_reduce_equals_ref, OPTIONS)
{
	for (int i = 0; i < 4 * N; i++) {
		float x[MAX_K], want, got;
		const void *in[MAX_K];
		struct k_all_reduce a = { .out = &want,
					  .in = in,
					  .k = 1 + (unsigned)(random_next() % MAX_K),
					  .dtype = DTYPE_FP32,
					  .op = REDUCE_SUM + (unsigned)i % 4 };
		struct el_divisor by = el_divisor(a.op == REDUCE_AVG ? (float)a.k : 1.0f);

		for (unsigned j = 0; j < MAX_K; j++) {
			x[j] = random_f32();
			in[j] = &x[j];
		}
		got = el_fold_nothing(a.op);
		for (unsigned j = 0; j < a.k; j++)
			got = el_fold(a.op, got, x[j]);
		got = el_divide(got, by, by.exact);
		kernels_ref()->all_reduce(&a, 0, 1);
		cr_assert(same(got, want), "op %d of %u: %a, not %a", (int)a.op, a.k, (double)got,
			  (double)want);
	}
}

static const float weights[] = { 0.1f, 0.001f, 0.5f, 0.7f, 1, 0, 0.49999997f, -0.6f };
static const float decays[] = { 0, 0.01f, 0.5f, 1e-20f };

static void expect_state(const char *what, const float got[3], const float want[3])
{
	for (int j = 0; j < 3; j++)
		cr_assert(same(got[j], want[j]), "%s: %d is %a, not %a", what, j, (double)got[j],
			  (double)want[j]);
}

/* p, m, v; v negative too: what its root gives is part of the definition. */
Test(kernels_cuda, adamw_equals_ref, OPTIONS)
{
	for (int i = 0; i < N; i++) {
		float want[3] = { random_f32(), random_f32(), random_f32() }, got[3];
		float g = random_f32();
		struct cuda_adamw c = { .decay = 1 - pick(decays, ARRAY_SIZE(decays)),
					.w1 = pick(weights, ARRAY_SIZE(weights)),
					.b2 = 0.999f,
					.w2 = 0.001f,
					.step_size = random_f32(),
					.sq = 0.0316f,
					.eps = i % 2 ? 1e-8f : random_f32() };
		struct k_adamw a = { .p = &want[0],
				     .g = &g,
				     .m = &want[1],
				     .v = &want[2],
				     .decay = c.decay,
				     .w1 = c.w1,
				     .b2 = c.b2,
				     .w2 = c.w2,
				     .step_size = c.step_size,
				     .sq = c.sq,
				     .eps = c.eps };

		memcpy(got, want, sizeof(got));
		el_adamw(&c, &got[0], g, &got[1], &got[2]);
		kernels_ref()->adamw(&a, 0, 1);
		expect_state("adamw", got, want);
	}
}

Test(kernels_cuda, adam_equals_ref, OPTIONS)
{
	for (int i = 0; i < N; i++) {
		float want[3] = { random_f32(), random_f32(), random_f32() }, got[3];
		float g = random_f32();
		struct cuda_adam c = { .wd = pick(decays, ARRAY_SIZE(decays)),
				       .w1 = pick(weights, ARRAY_SIZE(weights)),
				       .b2 = 0.95f,
				       .w2 = 0.05f,
				       .step_size = random_f32(),
				       .sq = 0.25f,
				       .eps = i % 2 ? 1e-8f : random_f32() };
		struct k_adam a = { .p = &want[0],
				    .g = &g,
				    .m = &want[1],
				    .v = &want[2],
				    .wd = c.wd,
				    .w1 = c.w1,
				    .b2 = c.b2,
				    .w2 = c.w2,
				    .step_size = c.step_size,
				    .sq = c.sq,
				    .eps = c.eps };

		memcpy(got, want, sizeof(got));
		el_adam(&c, &got[0], g, &got[1], &got[2]);
		kernels_ref()->adam(&a, 0, 1);
		expect_state("adam", got, want);
	}
}

/* Amsgrad, maximize, the tail, either decay: by the bits of @i. */
Test(kernels_cuda, adam_any_equals_ref, OPTIONS)
{
	for (int i = 0; i < 4 * N; i++) {
		float want[4] = { random_f32(), random_f32(), random_f32(), random_f32() }, got[4];
		float g = random_f32();
		struct cuda_adam_any c = { .vmax = i & 1,
					   .decay = 1 - pick(decays, ARRAY_SIZE(decays)),
					   .wd = pick(decays, ARRAY_SIZE(decays)),
					   .w1 = pick(weights, ARRAY_SIZE(weights)),
					   .b2 = 0.95f,
					   .w2 = 0.05f,
					   .step_size = random_f32(),
					   .sq = 0.25f,
					   .eps = 1e-8f,
					   .decoupled = (i & 2) != 0,
					   .maximize = (i & 4) != 0 };
		struct k_adam a = { .p = &want[0],
				    .g = &g,
				    .m = &want[1],
				    .v = &want[2],
				    .wd = c.wd,
				    .w1 = c.w1,
				    .b2 = c.b2,
				    .w2 = c.w2,
				    .step_size = c.step_size,
				    .sq = c.sq,
				    .eps = c.eps,
				    .vmax = c.vmax ? &want[3] : NULL,
				    .profile = i & 8 ? K_FUSED : K_FOREACH,
				    .maximize = c.maximize };
		struct k_adamw w = { .p = &want[0],
				     .g = &g,
				     .m = &want[1],
				     .v = &want[2],
				     .decay = c.decay,
				     .w1 = c.w1,
				     .b2 = c.b2,
				     .w2 = c.w2,
				     .step_size = c.step_size,
				     .sq = c.sq,
				     .eps = c.eps,
				     .vmax = a.vmax,
				     .profile = a.profile,
				     .maximize = c.maximize };

		memcpy(got, want, sizeof(got));
		el_adam_any(&c, &got[0], g, &got[1], &got[2], &got[3], i & 8);
		if (c.decoupled)
			kernels_ref()->adamw(&w, 0, 1);
		else
			kernels_ref()->adam(&a, 0, 1);
		expect_state("adam", got, want);
		cr_assert(same(got[3], want[3]));
	}
}

Test(kernels_cuda, adam_f64_equals_ref, OPTIONS)
{
	for (int i = 0; i < 4 * N; i++) {
		float want[4] = { random_f32(), random_f32(), random_f32(), random_f32() }, got[4];
		float g = random_f32();
		struct cuda_adam_f64 c = { .vmax = i & 1,
					   .decay = 0.999,
					   .wd = i % 3 ? 0.01 : 0,
					   .w1 = i % 5 ? 1 - 0.9 : 0.7,
					   .b2 = 0.999,
					   .w2 = 1 - 0.999,
					   .step_size = 0.1,
					   .sq = 0.03,
					   .eps = 1e-8,
					   .decoupled = (i & 2) != 0,
					   .maximize = (i & 4) != 0 };
		const struct k_adam_f64 f64 = { c.decay, c.wd,        0.9,  c.w1, c.b2,
						c.w2,    c.step_size, c.sq, c.eps };
		struct k_adam a = { .p = &want[0],
				    .g = &g,
				    .m = &want[1],
				    .v = &want[2],
				    .vmax = c.vmax ? &want[3] : NULL,
				    .profile = K_REFERENCE_F64,
				    .maximize = c.maximize,
				    .f64 = f64 };
		struct k_adamw w = { .p = &want[0],
				     .g = &g,
				     .m = &want[1],
				     .v = &want[2],
				     .vmax = a.vmax,
				     .profile = K_REFERENCE_F64,
				     .maximize = c.maximize,
				     .f64 = f64 };

		memcpy(got, want, sizeof(got));
		el_adam_f64(&c, &got[0], g, &got[1], &got[2], &got[3]);
		if (c.decoupled)
			kernels_ref()->adamw(&w, 0, 1);
		else
			kernels_ref()->adam(&a, 0, 1);
		expect_state("adam in double", got, want);
		cr_assert(same(got[3], want[3]));
	}
}

Test(kernels_cuda, clamp_and_unscale_equal_ref, OPTIONS)
{
	for (int i = 0; i < N; i++) {
		float want = random_f32(), x = want, hi = fabsf(random_f32()), found = 0;
		struct k_clamp a = { &want, -hi, hi };
		struct k_unscale u = { &want, i % 2 ? 1 : random_f32(), &found };

		if (hi == hi) {
			x = el_clamp(x, a.lo, a.hi);
			kernels_ref()->clamp(&a, 0, 1);
			cr_assert(same(x, want));
		}
		want = x = random_f32();
		kernels_ref()->unscale(&u, 0, 1);
		cr_assert_eq(el_not_finite(DTYPE_FP32, f32_bits(x)), found != 0);
		cr_assert(same(el_unscale(x, u.inv), want));
	}
}

Test(kernels_cuda, sgd_equals_ref, OPTIONS)
{
	for (int i = 0; i < N; i++) {
		float want[3] = { random_f32(), random_f32(), 0 }, got[3];
		float g = random_f32();
		struct cuda_sgd c = { .lr = random_f32(),
				      .wd = pick(decays, ARRAY_SIZE(decays)),
				      .mu = i % 3 ? 0.9f : 0,
				      .w = i % 5 ? 1 - pick(decays, ARRAY_SIZE(decays)) : 1,
				      .nesterov = random_next() % 2,
				      .first = random_next() % 2,
				      .maximize = random_next() % 2 };
		struct k_sgd a = { .p = &want[0],
				   .g = &g,
				   .buf = &want[1],
				   .lr = c.lr,
				   .wd = c.wd,
				   .mu = c.mu,
				   .nesterov = c.nesterov,
				   .first = c.first,
				   .maximize = c.maximize,
				   .dampening = 1 - (double)c.w,
				   .profile = i % 2 ? K_FUSED : K_FOREACH };

		memcpy(got, want, sizeof(got));
		el_sgd(&c, &got[0], g, &got[1], i % 2);
		kernels_ref()->sgd(&a, 0, 1);
		expect_state("sgd", got, want);
	}
}

Test(kernels_cuda, scale_equals_ref, OPTIONS)
{
	for (int i = 0; i < N; i++) {
		float want = random_f32(), factor = random_f32(), got = el_scale(want, factor);
		struct k_scale a = { &want, factor, NULL };

		kernels_ref()->scale(&a, 0, 1);
		cr_assert(same(got, want));
	}
}

/* One lane of ref: the same additions in the same order. */
Test(kernels_cuda, squares_round_as_refs, OPTIONS)
{
	static float x[8 * 1000];
	double want, got = 0;
	struct k_norm a = { x, &want, 2 };

	for (size_t i = 0; i < ARRAY_SIZE(x); i += 8) {
		x[i] = random_f32();
		x[i] = isfinite(x[i]) ? x[i] : 3;
		got = el_add_square(got, x[i]);
	}
	kernels_ref()->norm(&a, 0, ARRAY_SIZE(x));
	cr_assert_eq(got, want);
	cr_assert_gt(got, 0);
}

static void expect_max(const float *x, size_t n)
{
	double want, got;
	uint32_t max = 0;
	struct k_norm a = { x, &want, INFINITY };

	for (size_t i = 0; i < n; i++)
		max = el_max_abs(max, x[i]);
	got = (double)f32_from_bits(max);
	kernels_ref()->norm(&a, 0, n);
	cr_assert(got == want || (got != got && want != want), "%a, not %a", got, want);
}

Test(kernels_cuda, maxima_are_refs, OPTIONS)
{
	float x[3];

	for (int i = 0; i < N; i++) {
		for (int j = 0; j < 3; j++)
			x[j] = random_f32();
		expect_max(x, 3);
	}
}

Test(kernels_cuda, not_finite_is_refs, OPTIONS)
{
	float found;
	struct k_found_inf a = { .found = &found };

	for (unsigned t = DTYPE_FP32; t < _DTYPE_N; t++)
		for (uint32_t h = 0; h < 65536; h++) {
			uint32_t bits = t == DTYPE_FP32 ? h << 16 | (h & 1) : h;

			found = 0;
			a.x = &bits;
			a.dtype = t;
			kernels_ref()->found_inf(&a, 0, 1);
			cr_assert_eq(el_not_finite(t, bits), found != 0, "%s %x",
				     dtype_name(a.dtype), bits);
		}
}

Test(kernels_cuda, names_are_the_kernels, OPTIONS)
{
	for (unsigned i = 0; i < _CUDA_FN_N; i++) {
		cr_assert_eq(strncmp(cuda_fn_name(i), "shardd_", 7), 0);
		for (unsigned j = 0; j < i; j++)
			cr_assert_str_neq(cuda_fn_name(i), cuda_fn_name(j));
	}
}

static bool has_one_turn(enum cuda_fn fn)
{
	return fn == CUDA_FN_CAST || (fn >= CUDA_FN_ADAMW && fn <= CUDA_FN_SGD) ||
	       fn == CUDA_FN_SCALE || fn == CUDA_FN_CLAMP || fn == CUDA_FN_UNSCALE;
}

/* Never none, and never one that would find nothing to do. Those that take several turns, or have memory
 * of their own, are never more than fit. */
Test(kernels_cuda, launches_fit_the_device, OPTIONS)
{
	for (unsigned fn = 0; fn < _CUDA_FN_N; fn++) {
		cr_assert_eq(cuda_fn_blocks(fn, 0, 132, 4), 1);
		cr_assert_eq(cuda_fn_blocks(fn, 1, 132, 4), 1);
		cr_assert_eq(cuda_fn_blocks(fn, UINT64_MAX, 132, 4),
			     has_one_turn(fn) ? INT32_MAX : 528);
		for (uint64_t n = 1; n < 1u << 22; n = n * 3 + 1) {
			unsigned blocks = cuda_fn_blocks(fn, n, 132, 4);

			/* of ASSEMBLE, n counts blocks */
			cr_assert_leq((blocks - 1) * (uint64_t)(fn == CUDA_FN_ASSEMBLE
									? 1
									: cuda_fn_threads(fn)),
				      n);
			cr_assert_geq(cuda_fn_blocks(fn, 2 * n, 132, 4), blocks);
		}
	}
	cr_assert_eq(cuda_fn_blocks(CUDA_FN_NORM, UINT64_MAX, 1000, 8), CUDA_NORM_PARTIALS);
}

/* A fat binary, by its magic number. */
Test(kernels_cuda, image_is_there_if_built, OPTIONS)
{
	uint64_t bytes = 77;
	const void *image = cuda_kernels_image(&bytes);
#ifdef SHARDD_CUDA
	uint32_t magic;

	cr_assert_not_null(image);
	cr_assert_eq((uintptr_t)image % 8, 0);
	cr_assert_gt(bytes, 10000);
	memcpy(&magic, image, sizeof(magic));
	cr_assert_eq(magic, 0xba55ed50);
#else
	cr_assert_null(image);
	cr_assert_eq(bytes, 0);
#endif
}

#ifdef SHARDD_EMULATED
static void run_group(const struct group *g)
{
	static struct tester t;

	t.group = g->name;
	t.passed = 0;
	device_open(&t.device, 0);
	bed_open(&t.bed, &t.device, (size_t)64 << 20);
	g->run(&t);
	bed_close(&t.bed);
	device_close(&t.device);
	cr_assert_eq(t.failed, 0, "%s: %u of %u cases", g->name, t.failed, t.passed + t.failed);
	cr_assert_gt(t.passed, 0);
}

/* Every fourth group, so that the tests take about as long as each other. SPIN's is left
 * out: the timer that it reads is not there. A million elements take too long; 65537 are
 * several turns of every block, too, and are left out with the address sanitizer: 4097 have every
 * place before and behind the whole vectors. */
static void run_quarter(unsigned quarter)
{
	n_case_sizes -= longform_cut() ? 2 : 1;
	for (unsigned i = 0; i < n_groups_move; i++)
		if (i % 4 == quarter)
			run_group(&groups_move[i]);
	for (unsigned i = 0; i < n_groups_math; i++)
		if (i % 4 == quarter && strcmp(groups_math[i].name, "spin") != 0)
			run_group(&groups_math[i]);
}

#define QUARTER .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 170

Test(kernels_cuda, code_equals_ref_1, QUARTER)
{
	run_quarter(0);
}

Test(kernels_cuda, code_equals_ref_2, QUARTER)
{
	run_quarter(1);
}

Test(kernels_cuda, code_equals_ref_3, QUARTER)
{
	run_quarter(2);
}

Test(kernels_cuda, code_equals_ref_4, QUARTER)
{
	run_quarter(3);
}
#endif
