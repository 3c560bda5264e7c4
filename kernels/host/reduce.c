/*
 * The inputs of one piece are folded into an accumulator that stays in the
 * first-level cache; the result is written once. Where all is fp32 the loops are one for
 * each input; every rounding to another type is a pass of its own over the cached piece.
 */
#include "host/factor.h"

#include <string.h>

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

struct plan {
	const struct k_reduce *a;
	size_t base; /* element of the inputs that is out's first */
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
	factor_apply(&p->pre, to, n);
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
	float *out = (float *)p->a->out + (at - p->base);

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

	at -= p->base;
	factor_apply(&p->post, acc, n);
	if (a->accumulate) {
		const float *old = host_load(buf, a->out, a->out_dtype, at, n);

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

static struct plan plan_of(const struct k_reduce *a)
{
	struct plan p = { .a = a, .pre = factor_from(&a->pre), .post = factor_from(&a->post) };

	p.plain_fold = a->sum_dtype == DTYPE_FP32 && p.pre.dtype == DTYPE_FP32;
	p.plain_finish = a->out_dtype == DTYPE_FP32 && p.post.dtype == DTYPE_FP32;
	return p;
}

static void pieces(const struct plan *p, size_t begin, size_t end)
{
	for (size_t at = begin, n; at < end; at += n) {
		n = host_piece(at, end);
		piece(p, at, n);
	}
}

void HOST(reduce)(const struct k_reduce *a, size_t begin, size_t end)
{
	struct plan p = plan_of(a);

	pieces(&p, begin, end);
}

/* In place in a copy of what it is added to. */
void HOST(reduce_to)(const struct k_reduce *a, float *to, size_t at, size_t n)
{
	struct k_reduce there = *a;
	struct plan p;

	if (a->accumulate)
		memcpy(to, (const float *)a->out + at, n * sizeof(*to));
	there.out = to;
	p = plan_of(&there);
	p.base = at;
	pieces(&p, at, at + n);
}
