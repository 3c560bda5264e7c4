/* A k_factor as the loops apply it. */
#ifndef SHARDD_KERNELS_HOST_FACTOR_H
#define SHARDD_KERNELS_HOST_FACTOR_H

#include "host/host.h"

#include <math.h>

/* If @exact, multiplying by @inverse gives the result of the factor. */
struct factor {
	float by;
	float inverse;
	bool exact;
	enum dtype dtype; /* to which both sides are rounded; fp32: to none */
};

/* A power of two whose inverse is an fp32 too: x/by and x*inverse are then the
 * same real number, and rounding it once gives the same result, subnormal or
 * not. */
static inline struct factor factor_from(const struct k_factor *k)
{
	struct factor f = { .by = 1, .inverse = 1, .exact = true, .dtype = DTYPE_FP32 };
	int exponent;

	if (k->how == K_FACTOR_NONE)
		return f;
	f.dtype = k->dtype;
	f.by = k->value;
	f.inverse = k->how == K_FACTOR_MUL ? k->value : 1 / k->value;
	if (k->how == K_FACTOR_DIV)
		f.exact = isfinite(f.by) && isfinite(f.inverse) &&
			  fabsf(frexpf(f.by, &exponent)) == 0.5f;
	return f;
}

/* In place. */
static inline void factor_apply(const struct factor *f, float *x, size_t n)
{
	float by = f->by, inverse = f->inverse;

	HOST(round)(x, f->dtype, n);
	if (!f->exact)
		for (size_t i = 0; i < n; i++)
			x[i] /= by;
	else if (inverse != 1)
		for (size_t i = 0; i < n; i++)
			x[i] *= inverse;
	HOST(round)(x, f->dtype, n);
}

#endif
