/* kernels/ref, the definition, against formulas that share no code with it. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "kernels.h"
#include "random.h"

/* A binary format: digits of the significand, exponent of the smallest normal
 * number, largest finite number. */
struct format {
	enum dtype dtype;
	int digits;
	int min_exp;
	double max;
};

static const struct format formats[] = {
	{ DTYPE_BF16, 8, -126, 0x1.fep127 },
	{ DTYPE_FP16, 11, -14, 65504 },
};

static float widen(enum dtype t, uint16_t h)
{
	float f;
	struct k_cast a = { &f, &h, DTYPE_FP32, t, false };

	kernels_ref()->cast(&a, 0, 1);
	return f;
}

static uint16_t narrow(enum dtype t, float f)
{
	uint16_t h;
	struct k_cast a = { &h, &f, t, DTYPE_FP32, false };

	kernels_ref()->cast(&a, 0, 1);
	return h;
}

/* The value of a pattern, by the definition of a binary format. */
static double pattern_value(const struct format *f, unsigned h)
{
	unsigned fraction_bits = (unsigned)f->digits - 1;
	unsigned exp = (h & 0x7fff) >> fraction_bits;
	unsigned fraction = h & ((1u << fraction_bits) - 1);
	unsigned top = (0x8000u >> fraction_bits) - 1;
	double v;

	if (exp == top)
		v = fraction ? NAN : INFINITY;
	else if (exp == 0)
		v = ldexp(fraction, f->min_exp - (int)fraction_bits);
	else
		v = ldexp((1u << fraction_bits) + fraction,
			  (int)exp - 1 + f->min_exp - (int)fraction_bits);
	return h & 0x8000 ? -v : v;
}

/* Nearest number of a format, ties to even, by rounding a scaled double. */
static double rounded(const struct format *f, double x)
{
	int exp = x == 0 ? 0 : ilogb(x);
	int unit = (exp < f->min_exp ? f->min_exp : exp) - f->digits + 1;
	double r = ldexp(nearbyint(ldexp(x, -unit)), unit);

	return fabs(r) > f->max ? copysign(INFINITY, x) : r;
}

static bool same(float a, float b)
{
	return memcmp(&a, &b, sizeof(a)) == 0 || (a != a && b != b);
}

Test(kernels_ref, widening_is_the_value, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30)
{
	for (size_t i = 0; i < ARRAY_SIZE(formats); i++)
		for (unsigned h = 0; h < 65536; h++) {
			float f = widen(formats[i].dtype, (uint16_t)h);

			cr_assert(same(f, (float)pattern_value(&formats[i], h)), "%s %04x is %a",
				  dtype_name(formats[i].dtype), h, (double)f);
			if (f == f)
				cr_assert_eq(narrow(formats[i].dtype, f), h);
			else
				cr_assert(isnan(
					widen(formats[i].dtype, narrow(formats[i].dtype, f))));
		}
}

static void check_narrow(const struct format *f, float x)
{
	float got = widen(f->dtype, narrow(f->dtype, x));

	cr_assert(same(got, (float)rounded(f, (double)x)), "%a to %s gives %a", (double)x,
		  dtype_name(f->dtype), (double)got);
}

/* Every number, every midpoint between two, and the fp32 numbers next to these. */
Test(kernels_ref, narrowing_rounds_to_even, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 60)
{
	for (size_t i = 0; i < ARRAY_SIZE(formats); i++)
		for (unsigned h = 0; h < 65536; h++) {
			double here = pattern_value(&formats[i], h);
			double next = pattern_value(&formats[i], (h + 1) & 0xffff);
			float middle = (float)((here + next) / 2);

			if (!isfinite(here))
				continue;
			if (!isfinite(next)) /* half a unit above the largest */
				middle = (float)(here * (1 + ldexp(1, -formats[i].digits - 1)));
			check_narrow(&formats[i], (float)here);
			check_narrow(&formats[i], nextafterf((float)here, INFINITY));
			check_narrow(&formats[i], nextafterf((float)here, -INFINITY));
			check_narrow(&formats[i], middle);
			check_narrow(&formats[i], nextafterf(middle, INFINITY));
			check_narrow(&formats[i], nextafterf(middle, -INFINITY));
		}
}

static const struct {
	enum dtype dtype;
	float x;
	uint16_t want;
} narrowed[] = {
	{ DTYPE_FP16, 65519.996f, 0x7bff },   { DTYPE_FP16, 65520, 0x7c00 },
	{ DTYPE_FP16, -1e10f, 0xfc00 },       { DTYPE_FP16, 0x1p-25f, 0 },
	{ DTYPE_FP16, 0x1.000002p-25f, 1 },   { DTYPE_FP16, -0x1p-30f, 0x8000 },
	{ DTYPE_FP16, 0x1.ffcp-15f, 0x0400 }, { DTYPE_FP16, 1 + 0x1p-11f, 0x3c00 },
	{ DTYPE_FP16, 1 + 0x3p-11f, 0x3c02 }, { DTYPE_BF16, 1 + 0x1p-8f, 0x3f80 },
	{ DTYPE_BF16, 1 + 0x3p-8f, 0x3f82 },  { DTYPE_BF16, 0x1.fffffep127f, 0x7f80 },
	{ DTYPE_BF16, 0x1p-149f, 0 },         { DTYPE_BF16, 0x1.8p-134f, 1 },
	{ DTYPE_BF16, -INFINITY, 0xff80 },    { DTYPE_BF16, -0.0f, 0x8000 },
};

Test(kernels_ref, narrowing_by_hand, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	for (size_t i = 0; i < ARRAY_SIZE(narrowed); i++)
		cr_expect_eq(narrow(narrowed[i].dtype, narrowed[i].x), narrowed[i].want,
			     "row %zu: %04x", i, narrow(narrowed[i].dtype, narrowed[i].x));
}

/* clang 14 has the type on x86 only with AVX512-FP16. */
#if defined(__FLT16_MANT_DIG__) && !defined(__clang__)
Test(kernels_ref, fp16_equals_the_compilers, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 60)
{
	for (uint64_t u = 0; u < UINT32_MAX; u += 911) {
		uint32_t bits = (uint32_t)u;
		uint16_t want;
		_Float16 h;
		float f;

		memcpy(&f, &bits, sizeof(f));
		h = (_Float16)f;
		memcpy(&want, &h, sizeof(want));
		if (f == f)
			cr_assert_eq(narrow(DTYPE_FP16, f), want, "%a", (double)f);
	}
}
#endif

/* Six ranks: pre 4, post 1.5. Columns: a plain one; one whose sum depends on the
 * order; one with fractions that need rounding; infinity; subnormal. */
static const float ranks[6][5] = {
	{ 1, 4e8f, 1, 1, 0x1p-149f },  { 2, 4, 2, INFINITY, 0x1p-148f },
	{ 3, -4e8f, 4, 2, 0x3p-148f }, { 4, 4, 8, 3, 0 },
	{ 5, 8, 16, -1, 0x1p-149f },   { 6, -16, 0.5f, 0, 0x1p-147f },
};

Test(kernels_ref, reduce_by_hand, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	/* 21/4/1.5; 1e8+1 is 1e8, then 1 + 2 - 4 = -1, by 1.5; 31.5/4/1.5; subnormals by
	 * 4: 1/4, 2/4 go to 0, 6/4 to 2, 1/4 to 0, 4/4 to 1: 3 by 1.5 is 2 units */
	static const float want[5] = { 3.5f, -0.6666667f, 5.25f, INFINITY, 0x1p-148f };
	const void *in[6];
	float out[5] = { 10, 1, -5.25f, 1, 0x1p-148f };
	struct k_reduce a = { .out = out,
			      .in = in,
			      .k = 6,
			      .in_dtype = DTYPE_FP32,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = k_divide_by(4, DTYPE_FP32),
			      .post = k_divide_by(1.5f, DTYPE_FP32),
			      .accumulate = true };

	for (unsigned j = 0; j < 6; j++)
		in[j] = ranks[j];
	kernels_ref()->reduce(&a, 0, 5);
	cr_expect_eq(out[0], 13.5f);
	cr_expect_eq(out[1], 0.3333333f);
	cr_expect_eq(out[2], 0);
	cr_expect_eq(out[4], 0x1p-147f);
	a.accumulate = false;
	kernels_ref()->reduce(&a, 0, 5);
	for (unsigned i = 0; i < 5; i++)
		cr_expect_eq(out[i], want[i], "column %u: %a", i, (double)out[i]);
}

/* 5/3 and 5*(1/3) differ in fp32; nothing is divided where a factor is 1. */
Test(kernels_ref, reduce_divides_truly, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	static const uint16_t five = 0x40a0; /* bf16 */
	const void *in[1] = { &five };
	float out = 0;
	struct k_reduce a = { .out = &out,
			      .in = in,
			      .k = 1,
			      .in_dtype = DTYPE_BF16,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = k_divide_by(3, DTYPE_FP32) };

	kernels_ref()->reduce(&a, 0, 1);
	cr_expect_eq(out, 1.66666663f);
	cr_expect_neq(out, 5 * (1 / 3.0f));
	a.post = a.pre;
	a.pre = k_divide_by(1, DTYPE_FP32);
	cr_expect_eq(a.pre.how, K_FACTOR_NONE);
	kernels_ref()->reduce(&a, 0, 1);
	cr_expect_eq(out, 1.66666663f);
}

/* An fp32 operation is one in double, rounded: with 53 digits the second rounding of a
 * sum, a product or a quotient of numbers of 24 changes nothing. */
static double to(enum dtype t, double x)
{
	for (size_t i = 0; i < ARRAY_SIZE(formats); i++)
		if (formats[i].dtype == t && isfinite(x))
			return rounded(&formats[i], (double)(float)x);
	return (double)(float)x;
}

static double factored(const struct k_factor *f, double x)
{
	if (f->how == K_FACTOR_NONE)
		return x;
	x = to(f->dtype, x);
	return to(f->dtype, f->how == K_FACTOR_DIV ? x / (double)f->value : x * (double)f->value);
}

static double reduced(const struct k_reduce *a, const double *x, double old)
{
	double t = to(a->sum_dtype, factored(&a->pre, x[0]));

	for (unsigned j = 1; j < a->k; j++)
		t = to(a->sum_dtype, t + to(a->sum_dtype, factored(&a->pre, x[j])));
	t = factored(&a->post, t);
	return to(a->out_dtype, a->accumulate ? (double)(float)(old + t) : t);
}

/* A number of @t that is neither too large for fp16 nor of few digits. */
static double put_number(void *at, enum dtype t, unsigned i)
{
	float f = sinf((float)i * 1.7f) * powf(2, (float)(i * 7 % 31) - 18), back;
	struct k_cast in = { at, &f, t, DTYPE_FP32, false };
	struct k_cast out = { &back, at, DTYPE_FP32, t, false };

	kernels_ref()->cast(&in, 0, 1);
	kernels_ref()->cast(&out, 0, 1);
	return (double)back;
}

static const struct k_factor reduce_factors[] = {
	{ K_FACTOR_NONE, DTYPE_NONE, 0 },    { K_FACTOR_DIV, DTYPE_FP32, 3 },
	{ K_FACTOR_DIV, DTYPE_BF16, 3 },     { K_FACTOR_DIV, DTYPE_FP16, 1.5f },
	{ K_FACTOR_MUL, DTYPE_FP32, 0.1f },  { K_FACTOR_MUL, DTYPE_BF16, 0.3f },
	{ K_FACTOR_MUL, DTYPE_FP16, 0.01f },
};

static void check_reduced(struct k_reduce *a, unsigned seed)
{
	uint32_t x[4], out = 0;
	const void *in[4] = { &x[0], &x[1], &x[2], &x[3] };
	double values[4], old = put_number(&out, a->out_dtype, seed + 5), want;
	float got;
	struct k_cast wide = { &got, &out, DTYPE_FP32, a->out_dtype, false };

	a->in = in;
	a->out = &out;
	for (unsigned j = 0; j < 4; j++)
		values[j] = put_number(&x[j], a->in_dtype, seed + j);
	want = reduced(a, values, old);
	kernels_ref()->reduce(a, 0, 1);
	kernels_ref()->cast(&wide, 0, 1);
	cr_assert(same(got, (float)want), "%s in %s to %s, pre %d %s %a, post %d %s %a: %a, not %a",
		  dtype_name(a->in_dtype), dtype_name(a->sum_dtype), dtype_name(a->out_dtype),
		  a->pre.how, dtype_name(a->pre.dtype), (double)a->pre.value, a->post.how,
		  dtype_name(a->post.dtype), (double)a->post.value, (double)got, want);
}

/* All types and factors with each other. */
Test(kernels_ref, reduce_rounds_where_it_says, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 60)
{
	const unsigned n = ARRAY_SIZE(reduce_factors);

	for (unsigned types = 0; types < 27; types++)
		for (unsigned f = 0; f < n * n * 2; f++)
			for (unsigned i = 0; i < 40; i++) {
				struct k_reduce a = { .k = 1 + i % 4,
						      .in_dtype = 1 + types % 3,
						      .sum_dtype = 1 + types / 3 % 3,
						      .out_dtype = 1 + types / 9,
						      .pre = reduce_factors[f % n],
						      .post = reduce_factors[f / n % n],
						      .accumulate = f >= n * n };

				check_reduced(&a, i * 13 + f);
			}
}

static const struct {
	enum reduce_op op;
	float x[3];
	float want;
} folds[] = {
	{ REDUCE_SUM, { 1e8f, 1, -1e8f }, 0 },
	{ REDUCE_SUM, { 1e8f, -1e8f, 1 }, 1 },
	{ REDUCE_AVG, { 1, 2, 2 }, 1.66666663f },
	{ REDUCE_MAX, { 1, 3, 2 }, 3 },
	{ REDUCE_MIN, { 1, -3, 2 }, -3 },
	{ REDUCE_MAX, { NAN, 3, 2 }, NAN },
	{ REDUCE_MAX, { 1, NAN, 2 }, NAN },
	{ REDUCE_MIN, { 1, 2, NAN }, NAN },
	{ REDUCE_MIN, { NAN, -INFINITY, 1 }, NAN },
	{ REDUCE_MAX, { -0.0f, 0.0f, -0.0f }, -0.0f },
	{ REDUCE_MIN, { 0.0f, -0.0f, 0.0f }, 0.0f },
	{ REDUCE_MAX, { -INFINITY, -1, -2 }, -1 },
	{ REDUCE_SUM, { INFINITY, -INFINITY, 1 }, NAN },
};

Test(kernels_ref, all_reduce_by_hand, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	for (size_t i = 0; i < ARRAY_SIZE(folds); i++) {
		const float *x = folds[i].x;
		const void *in[3] = { &x[0], &x[1], &x[2] };
		float out = 99;
		struct k_all_reduce a = {
			.out = &out, .in = in, .k = 3, .dtype = DTYPE_FP32, .op = folds[i].op
		};

		kernels_ref()->all_reduce(&a, 0, 1);
		cr_expect(same(out, folds[i].want), "row %zu: %a", i, (double)out);
	}
}

/* Summed in fp32, narrowed once: in bf16 256 + 1 + 1 would stay 256. */
Test(kernels_ref, all_reduce_narrows_once, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 10)
{
	uint16_t x[3] = { narrow(DTYPE_BF16, 256), narrow(DTYPE_BF16, 1), narrow(DTYPE_BF16, 1) };
	const void *in[3] = { &x[0], &x[1], &x[2] };
	struct k_all_reduce a = {
		.out = &x[1], .in = in, .k = 3, .dtype = DTYPE_BF16, .op = REDUCE_SUM
	};

	kernels_ref()->all_reduce(&a, 0, 1);
	cr_expect_eq(widen(DTYPE_BF16, x[1]), 258);
}

/* The eight lanes, one after the other. */
static double naive_squares(const float *x, size_t n)
{
	double total = 0;

	for (size_t j = 0; j < 8; j++) {
		double lane = 0;

		for (size_t i = j; i < n; i += 8)
			lane += (double)x[i] * (double)x[i];
		total = j ? total + lane : lane;
	}
	return total;
}

Test(kernels_ref, norm_lanes, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	const size_t n = 2 * KERNEL_NORM_BLOCK + 1003;
	_cleanup_(freep) float *x = calloc(n, sizeof(*x));
	double partial[4] = { -1, -1, -1, -1 };
	struct k_norm a = { x, partial, 2 };

	for (size_t i = 0; i < n; i++)
		x[i] = sinf((float)i) * powf(10, (float)(i % 13) - 6);
	kernels_ref()->norm(&a, 0, n);
	for (size_t b = 0; b < 3; b++) {
		size_t at = b * KERNEL_NORM_BLOCK;
		size_t len = b < 2 ? KERNEL_NORM_BLOCK : 1003;

		cr_expect_eq(partial[b], naive_squares(x + at, len), "block %zu", b);
	}
	cr_expect_eq(partial[3], -1, "written past the last block");
	a.p = INFINITY;
	x[5] = -1e9f;
	x[KERNEL_NORM_BLOCK + 7] = -INFINITY;
	x[2 * KERNEL_NORM_BLOCK] = NAN;
	kernels_ref()->norm(&a, 0, n);
	cr_expect_eq(partial[0], 1e9);
	cr_expect_eq(partial[1], INFINITY);
	cr_expect(isnan(partial[2]));
}

/* Two blocks of few different numbers: how often each occurs says what the sum is. */
Test(kernels_ref, norm_powers, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	static const double powers[] = { 1, 3, 0.5, 4 };
	const size_t n = KERNEL_NORM_BLOCK + 8;
	_cleanup_(freep) float *x = calloc(n, sizeof(*x));
	double partial[2];

	for (size_t i = 0; i < n; i++)
		x[i] = i % 2 ? -4 : 0.25f;
	for (size_t i = 0; i < ARRAY_SIZE(powers); i++) {
		struct k_norm a = { x, partial, powers[i] };
		double pair = exp2(2 * powers[i]) + exp2(-2 * powers[i]);

		kernels_ref()->norm(&a, 0, n);
		cr_expect_float_eq(partial[0], KERNEL_NORM_BLOCK / 2 * pair, 1e-9 * partial[0]);
		cr_expect_float_eq(partial[1], 4 * pair, 1e-12 * pair);
	}
	x[3] = NAN;
	kernels_ref()->norm(&(struct k_norm){ x, partial, 1 }, 0, n);
	cr_expect(isnan(partial[0]));
	cr_expect_eq(partial[1], 4 * 4.25);
	x[3] = -INFINITY;
	kernels_ref()->norm(&(struct k_norm){ x, partial, 3 }, 0, n);
	cr_expect_eq(partial[0], INFINITY);
}

Test(kernels_ref, clamp_by_hand, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	float x[] = { -3, -1, -0.5f, -0.0f, 2, 7, INFINITY, -INFINITY, NAN };
	static const float want[] = { -1, -1, -0.5f, -0.0f, 2, 2, 2, -1, NAN };

	kernels_ref()->clamp(&(struct k_clamp){ x, -1, 2 }, 0, ARRAY_SIZE(x));
	for (size_t i = 0; i < ARRAY_SIZE(x); i++)
		cr_expect(same(x[i], want[i]), "%zu: %a", i, (double)x[i]);
	x[0] = 0;
	kernels_ref()->clamp(&(struct k_clamp){ x, 3, -3 }, 0, 1);
	cr_expect_eq(x[0], -3);
}

Test(kernels_ref, unscale_looks_before_it_multiplies, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 10)
{
	float x[] = { 1, -2, FLT_MAX }, found = 0;
	struct k_unscale a = { x, 4, &found };

	kernels_ref()->unscale(&a, 0, 3);
	cr_expect_eq(found, 0, "what overflows in the product was finite");
	cr_expect_eq(x[1], -8);
	cr_expect_eq(x[2], INFINITY);
	a.inv = 0;
	kernels_ref()->unscale(&a, 0, 2);
	cr_expect_eq(found, 0);
	kernels_ref()->unscale(&a, 2, 3);
	cr_expect_eq(found, 1);
	cr_expect(isnan(x[2]), "inf * 0");
	found = 0;
	a.inv = 1;
	kernels_ref()->unscale(&a, 0, 3);
	cr_expect_eq(found, 1);
}

/* Two columns; the table's rows 3 to 5 are here. Row 4 comes three times, and the order
 * shows: 1e8 + 1 - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1. */
Test(kernels_ref, add_rows_by_hand, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)
{
	static const int64_t rows[] = { 4, 2, 3, 4, -4, 6, 4, INT64_MIN };
	static const float values[8][2] = { { 1e8f, 1e8f }, { 9, 9 },         { 1, 2 },
					    { 1, -1e8f },   { 9, 9 },         { 9, 9 },
					    { -1e8f, 1 },   { NAN, INFINITY } };
	float out[3][2] = { { 10, 20 }, { 0, 0 }, { 5, 6 } };
	struct k_add_rows a = { .out = &out[0][0],
				.row_elements = 2,
				.rows = rows,
				.n_rows = 8,
				.values = values,
				.dtype = DTYPE_FP32,
				.first_row = 3,
				.row_limit = 6 };

	kernels_ref()->add_rows(&a, 0, 1);
	cr_expect_eq(out[0][0], 11);
	cr_expect_eq(out[1][0], 0);
	cr_expect_eq(out[0][1], 20, "only column 0 was asked for");
	a.pre = k_divide_by(2, DTYPE_BF16);
	kernels_ref()->add_rows(&a, 1, 2);
	cr_expect_eq(out[0][1], 21);
	cr_expect_eq(out[1][1], 0.5f);
	cr_expect_eq(out[2][0], 5);
	cr_expect_eq(out[2][1], 6);
}

/* Every pattern of the 16-bit types; of fp32 what is around infinity. */
Test(kernels_ref, found_inf_is_what_is_not_finite, .init = fdcheck_begin, .fini = fdcheck_end,
     .timeout = 20)
{
	static const float numbers[] = { 0, FLT_MAX, -FLT_MAX, INFINITY, -INFINITY, NAN, 1e-45f };
	float found;
	struct k_found_inf a = { .found = &found, .dtype = DTYPE_FP32 };

	for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
		a.x = &numbers[i];
		found = -7;
		kernels_ref()->found_inf(&a, 0, 1);
		cr_assert_eq(found, isfinite(numbers[i]) ? -7 : 1, "%g", (double)numbers[i]);
	}
	for (size_t f = 0; f < ARRAY_SIZE(formats); f++)
		for (unsigned h = 0; h < 65536; h++) {
			uint16_t x = (uint16_t)h;

			a.x = &x;
			a.dtype = formats[f].dtype;
			found = -7;
			kernels_ref()->found_inf(&a, 0, 1);
			cr_assert_eq(found, isfinite(pattern_value(&formats[f], h)) ? -7 : 1);
		}
}

/* Three rows of four, five apart in the input and six in the output. */
Test(kernels_ref, pack_moves_rows, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	float src[15], dst[18];
	struct k_pack a = { dst, src, 4, 6, 5, DTYPE_FP32, DTYPE_FP32 };

	for (int i = 0; i < 15; i++)
		src[i] = (float)i;
	for (int i = 0; i < 18; i++)
		dst[i] = -1;
	kernels_ref()->pack(&a, 1, 11);
	for (int i = 0; i < 18; i++) {
		int row = i / 6, column = i % 6, e = row * 4 + column;
		bool moved = column < 4 && e >= 1 && e < 11;

		cr_assert_eq(dst[i], moved ? (float)(row * 5 + column) : -1, "at %d", i);
	}
}
