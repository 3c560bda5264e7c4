/*
 * The inputs of one piece are folded into an accumulator that stays in the
 * first-level cache; the result is written once.
 */
#include "host/host.h"

#include <math.h>

/* A division x/by. Where @exact, x*inverse has the same bits. */
struct divisor {
	float by;
	float inverse;
	bool exact;
};

/* A power of two whose inverse is an fp32 too: x/by and x*inverse are then the
 * same real number, and rounding it once gives the same result, subnormal or
 * not. (1 is one of them: x*1 is x.) */
static struct divisor divisor_from(float by)
{
	struct divisor d = { .by = by, .inverse = 1 / by };
	int exponent;

	d.exact = isfinite(by) && isfinite(d.inverse) && fabsf(frexpf(by, &exponent)) == 0.5f;
	return d;
}

static void set(float *restrict acc, const float *restrict x, size_t n, const struct divisor *d)
{
	float by = d->by, inverse = d->inverse;

	if (d->exact)
		for (size_t i = 0; i < n; i++)
			acc[i] = x[i] * inverse;
	else
		for (size_t i = 0; i < n; i++)
			acc[i] = x[i] / by;
}

static void add(float *restrict acc, const float *restrict x, size_t n, const struct divisor *d)
{
	float by = d->by, inverse = d->inverse;

	if (d->exact)
		for (size_t i = 0; i < n; i++)
			acc[i] += x[i] * inverse;
	else
		for (size_t i = 0; i < n; i++)
			acc[i] += x[i] / by;
}

static void finish(float *restrict out, const float *restrict acc, size_t n,
		   const struct divisor *post, bool accumulate)
{
	if (accumulate)
		add(out, acc, n, post);
	else
		set(out, acc, n, post);
}

static void piece(const struct k_reduce *a, const struct divisor *pre, const struct divisor *post,
		  size_t at, size_t n)
{
	float acc[HOST_PIECE], buf[HOST_PIECE];

	set(acc, host_load(buf, a->in[0], a->in_dtype, at, n), n, pre);
	for (unsigned j = 1; j < a->k; j++)
		add(acc, host_load(buf, a->in[j], a->in_dtype, at, n), n, pre);
	finish(a->out + at, acc, n, post, a->accumulate);
}

void HOST(reduce)(const struct k_reduce *a, size_t begin, size_t end)
{
	struct divisor pre = divisor_from(a->pre), post = divisor_from(a->post);

	for (size_t at = begin, n; at < end; at += n) {
		n = host_piece(at, end);
		piece(a, &pre, &post, at, n);
	}
}
