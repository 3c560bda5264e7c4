#include "host/host.h"

#include "convert.h"

#include <math.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

/* The eight lanes of the definition are two vectors of four, for every vector width of the
 * processor: the compiler splits them. */
typedef double four_f64 __attribute__((vector_size(4 * sizeof(double))));
typedef float four_f32 __attribute__((vector_size(4 * sizeof(float))));

/* A square of a float is exact in a double: fused or not, the sum is rounded once. */
static void add_squares(four_f64 *sum, const float *x)
{
#if defined(__AVX2__) && defined(__FMA__)
	__m256d d = _mm256_cvtps_pd(_mm_loadu_ps(x));

	*sum = (four_f64)_mm256_fmadd_pd(d, d, (__m256d)*sum);
#else
	four_f32 f;
	four_f64 d;

	memcpy(&f, x, sizeof(f));
	d = __builtin_convertvector(f, four_f64);
	*sum += d * d;
#endif
}

/* The lanes in their order. */
static double add_lanes(const double *lane)
{
	double total = lane[0];

	for (int j = 1; j < 8; j++)
		total += lane[j];
	return total;
}

static double block_squares(const float *x, size_t n)
{
	four_f64 low = { 0 }, high = { 0 };
	double lane[8];
	size_t i = 0;

	for (; i + 8 <= n; i += 8) {
		add_squares(&low, x + i);
		add_squares(&high, x + i + 4);
	}
	memcpy(lane, &low, sizeof(low));
	memcpy(lane + 4, &high, sizeof(high));
	for (size_t j = 0; i + j < n; j++)
		lane[j] += (double)x[i + j] * (double)x[i + j];
	return add_lanes(lane);
}

/* Two whole blocks interleaved: every addition waits for the previous one in its block, so that one
 * block alone is slower than memory. */
static void two_blocks(const float *x, double *partial)
{
	const float *y = x + KERNEL_NORM_BLOCK;
	four_f64 sum[2][2] = { 0 };

#pragma GCC unroll 2
	for (size_t i = 0; i < KERNEL_NORM_BLOCK; i += 8) {
		add_squares(&sum[0][0], x + i);
		add_squares(&sum[0][1], x + i + 4);
		add_squares(&sum[1][0], y + i);
		add_squares(&sum[1][1], y + i + 4);
	}
	for (int j = 0; j < 2; j++) {
		double lane[8];

		memcpy(lane, sum[j], sizeof(lane));
		partial[j] = add_lanes(lane);
	}
}

/* Bits of |x| compare as the numbers do, and those of a NaN are above infinity's. */
static double block_max(const float *x, size_t n)
{
	int32_t max = 0;

	for (size_t i = 0; i < n; i++) {
		int32_t abs = (int32_t)(f32_bits(x[i]) & FP32_ABS);

		max = abs > max ? abs : max;
	}
	return (double)f32_from_bits((uint32_t)max);
}

/* Every element on its own: a power takes longer than anything else. */
static double block_power(const float *x, size_t n, double p)
{
	double lane[8] = { 0 };

	for (size_t i = 0; i < n; i++) {
		double abs = fabs((double)x[i]);

		lane[i % 8] += p == 1 ? abs : pow(abs, p);
	}
	return add_lanes(lane);
}

static double block(const float *x, size_t n, double p)
{
	if (isinf(p))
		return block_max(x, n);
	return p == 2 ? block_squares(x, n) : block_power(x, n, p);
}

void HOST(norm)(const struct k_norm *a, size_t begin, size_t end)
{
	size_t i = begin;

	for (; a->p == 2 && end - i >= 2 * KERNEL_NORM_BLOCK; i += 2 * KERNEL_NORM_BLOCK)
		two_blocks(a->x + i, &a->partial[i / KERNEL_NORM_BLOCK]);
	for (; i < end; i += KERNEL_NORM_BLOCK) {
		size_t n = end - i < KERNEL_NORM_BLOCK ? end - i : KERNEL_NORM_BLOCK;

		a->partial[i / KERNEL_NORM_BLOCK] = block(a->x + i, n, a->p);
	}
}
