/*
 * The inputs of one piece are folded into an accumulator that stays in the
 * first-level cache; the result is written once. Where all is fp32 the loops are one for
 * each input; every rounding to another type is a pass of its own over the cached piece.
 */
#include "host/host.h"

#include <math.h>
#include <string.h>

/* A factor. Where @exact, multiplying by @inverse is what it does. */
struct factor {
	float by;
	float inverse;
	bool exact;
	enum dtype dtype; /* to which both sides are rounded; fp32: to none */
};

/* A power of two whose inverse is an fp32 too: x/by and x*inverse are then the
 * same real number, and rounding it once gives the same result, subnormal or
 * not. */
static struct factor factor_from(const struct k_factor *k)
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

static void set(float *restrict acc, const float *restrict x, size_t n, const struct factor *d)
{
	float by = d->by, inverse = d->inverse;

	if (d->exact)
		for (size_t i = 0; i < n; i++)
			acc[i] = x[i] * inverse;
	else
		for (size_t i = 0; i < n; i++)
			acc[i] = x[i] / by;
}

static void add(float *restrict acc, const float *restrict x, size_t n, const struct factor *d)
{
	float by = d->by, inverse = d->inverse;

	if (d->exact)
		for (size_t i = 0; i < n; i++)
			acc[i] += x[i] * inverse;
	else
		for (size_t i = 0; i < n; i++)
			acc[i] += x[i] / by;
}

/* In place. */
static void apply(float *x, size_t n, const struct factor *d)
{
	float by = d->by, inverse = d->inverse;

	HOST(round)(x, d->dtype, n);
	if (!d->exact)
		for (size_t i = 0; i < n; i++)
			x[i] /= by;
	else if (inverse != 1)
		for (size_t i = 0; i < n; i++)
			x[i] *= inverse;
	HOST(round)(x, d->dtype, n);
}

struct plan {
	const struct k_reduce *a;
	struct factor pre, post;
	bool plain_fold, plain_finish; /* in fp32 throughout */
};

static void fold_plain(const struct plan *p, float *acc, size_t at, size_t n)
{
	const struct k_reduce *a = p->a;
	float buf[HOST_PIECE];

	set(acc, host_load(buf, a->in[0], a->in_dtype, at, n), n, &p->pre);
	for (unsigned j = 1; j < a->k; j++)
		add(acc, host_load(buf, a->in[j], a->in_dtype, at, n), n, &p->pre);
}

/* Input @j, as it is added. */
static void term(const struct plan *p, float *to, unsigned j, size_t at, size_t n)
{
	const struct k_reduce *a = p->a;
	const float *x = host_load(to, a->in[j], a->in_dtype, at, n);

	if (x != to)
		memcpy(to, x, n * sizeof(*to));
	apply(to, n, &p->pre);
	HOST(round)(to, a->sum_dtype, n);
}

static void fold_rounded(const struct plan *p, float *acc, size_t at, size_t n)
{
	const struct k_reduce *a = p->a;
	float buf[HOST_PIECE];

	term(p, acc, 0, at, n);
	for (unsigned j = 1; j < a->k; j++) {
		term(p, buf, j, at, n);
		for (size_t i = 0; i < n; i++)
			acc[i] += buf[i];
		HOST(round)(acc, a->sum_dtype, n);
	}
}

static void finish_plain(const struct plan *p, const float *acc, size_t at, size_t n)
{
	float *out = (float *)p->a->out + at;

	if (p->a->accumulate)
		add(out, acc, n, &p->post);
	else
		set(out, acc, n, &p->post);
}

/* The same addition for every type: t comes second. */
static void finish_rounded(const struct plan *p, float *acc, size_t at, size_t n)
{
	const struct k_reduce *a = p->a;
	float buf[HOST_PIECE];

	apply(acc, n, &p->post);
	if (a->accumulate) {
		const float *old = host_load(buf, a->out, a->out_dtype, at, n);

		HOST(round)(acc, a->out_dtype, n);
		for (size_t i = 0; i < n; i++)
			acc[i] = old[i] + acc[i];
	}
	if (a->out_dtype == DTYPE_FP32)
		memcpy((float *)a->out + at, acc, n * sizeof(*acc));
	else
		HOST(narrow)(a->out, a->out_dtype, at, acc, n);
}

static void piece(const struct plan *p, size_t at, size_t n)
{
	float acc[HOST_PIECE];

	if (p->plain_fold)
		fold_plain(p, acc, at, n);
	else
		fold_rounded(p, acc, at, n);
	if (p->plain_finish)
		finish_plain(p, acc, at, n);
	else
		finish_rounded(p, acc, at, n);
}

void HOST(reduce)(const struct k_reduce *a, size_t begin, size_t end)
{
	struct plan p = { .a = a, .pre = factor_from(&a->pre), .post = factor_from(&a->post) };

	p.plain_fold = a->sum_dtype == DTYPE_FP32 && p.pre.dtype == DTYPE_FP32;
	p.plain_finish = a->out_dtype == DTYPE_FP32 && p.post.dtype == DTYPE_FP32;
	for (size_t at = begin, n; at < end; at += n) {
		n = host_piece(at, end);
		piece(&p, at, n);
	}
}
