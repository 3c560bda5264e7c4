#include "ref/ref.h"

#include <math.h>

static double term(float x, double p)
{
	double abs = fabs((double)x);

	return p == 1 ? abs : p == 2 ? abs * abs : pow(abs, p);
}

static double block_sum(const float *x, size_t n, double p)
{
	double lane[8] = { 0 };
	double sum;

	for (size_t i = 0; i < n; i++)
		lane[i % 8] += term(x[i], p);
	sum = lane[0];
	for (int j = 1; j < 8; j++)
		sum += lane[j];
	return sum;
}

static double block_max(const float *x, size_t n)
{
	float max = 0;

	for (size_t i = 0; i < n; i++) {
		float abs = fabsf(x[i]);

		max = abs > max || isnan(abs) ? abs : max;
	}
	return max;
}

void ref_norm(const struct k_norm *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i += KERNEL_NORM_BLOCK) {
		size_t n = end - i < KERNEL_NORM_BLOCK ? end - i : KERNEL_NORM_BLOCK;
		double *partial = &a->partial[i / KERNEL_NORM_BLOCK];

		*partial = isinf(a->p) ? block_max(a->x + i, n) : block_sum(a->x + i, n, a->p);
	}
}
