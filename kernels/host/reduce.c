/*
 * If everything is rounded to fp32, and there are few inputs, all is one loop (fold.c). Else the
 * inputs of one piece are folded into an accumulator that stays in the first-level cache, and the
 * result is written once; every rounding to another type is a pass of its own over the cached
 * piece.
 */
#include "host/reduce.h"

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

/* The plain fold, of as many inputs at once as one loop reads. */
static void fold_streams(const struct host_reduce *p, float *acc, size_t at, size_t n)
{
	struct fold f = {
		.to = acc, .dtype = p->a->in_dtype, .at = at, .n = n, .pre = p->pre, .post = 1
	};

	for (unsigned j = 0; j < p->a->k; j += f.k) {
		f.in = p->a->in + j;
		f.k = p->a->k - j < FOLD_INPUTS ? p->a->k - j : FOLD_INPUTS;
		f.go_on = j > 0;
		HOST(fold)(&f);
	}
}

static void fold_plain(const struct host_reduce *p, float *acc, size_t at, size_t n)
{
	const struct k_reduce *a = p->a;
	float buf[HOST_PIECE];

	set(acc, host_load(buf, a->in[0], a->in_dtype, at, n), n, &p->pre);
	for (unsigned j = 1; j < a->k; j++)
		add(acc, host_load(buf, a->in[j], a->in_dtype, at, n), n, &p->pre);
}

/* Input @j, as it is added. */
static void term(const struct host_reduce *p, float *to, unsigned j, size_t at, size_t n)
{
	const struct k_reduce *a = p->a;
	const float *x = host_load(to, a->in[j], a->in_dtype, at, n);

	if (x != to)
		memcpy(to, x, n * sizeof(*to));
	factor_apply(&p->pre, to, n);
	HOST(round)(to, a->sum_dtype, n);
}

static void fold_rounded(const struct host_reduce *p, float *acc, size_t at, size_t n)
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

static void finish_plain(const struct host_reduce *p, void *to, const float *acc, size_t n)
{
	if (p->a->accumulate)
		add(to, acc, n, &p->post);
	else
		set(to, acc, n, &p->post);
}

/* The same addition for every type: t is the second operand. */
static void finish_rounded(const struct host_reduce *p, void *to, float *acc, size_t n)
{
	const struct k_reduce *a = p->a;
	float buf[HOST_PIECE];

	factor_apply(&p->post, acc, n);
	if (a->accumulate) {
		const float *old = host_load(buf, to, a->out_dtype, 0, n);

		for (size_t i = 0; i < n; i++)
			acc[i] = old[i] + acc[i];
	}
	if (a->out_dtype == DTYPE_FP32)
		memcpy(to, acc, n * sizeof(*acc));
	else
		HOST(narrow)(to, a->out_dtype, 0, acc, n);
}

static void piece(const struct host_reduce *p, void *to, size_t at, size_t n)
{
	float acc[HOST_PIECE];

	if (p->plain_fold && p->known)
		fold_streams(p, acc, at, n);
	else if (p->plain_fold)
		fold_plain(p, acc, at, n);
	else
		fold_rounded(p, acc, at, n);
	if (p->plain_finish)
		finish_plain(p, to, acc, n);
	else
		finish_rounded(p, to, acc, n);
}

/* All of it in one loop? */
static bool is_one_fold(const struct host_reduce *p)
{
	return p->plain_fold && p->plain_finish && p->known && p->post.exact &&
	       p->a->k <= FOLD_INPUTS;
}

static void one_fold(const struct host_reduce *p, float *to, size_t at, size_t n)
{
	const struct fold f = { .to = to,
				.in = p->a->in,
				.k = p->a->k,
				.dtype = p->a->in_dtype,
				.at = at,
				.n = n,
				.pre = p->pre,
				.post = p->post.inverse,
				.add = p->a->accumulate,
				.stream = p->a->stream };

	HOST(fold)(&f);
}

void HOST(reduce_begin)(struct host_reduce *p, const struct k_reduce *a)
{
	*p = (struct host_reduce){ .a = a,
				   .pre = factor_from(&a->pre),
				   .post = factor_from(&a->post) };
	p->plain_fold = a->sum_dtype == DTYPE_FP32 && p->pre.dtype == DTYPE_FP32;
	p->plain_finish = a->out_dtype == DTYPE_FP32 && p->post.dtype == DTYPE_FP32;
	p->known = HOST(fold_knows)(a->in_dtype);
	p->one = is_one_fold(p);
}

void HOST(reduce_block)(const struct host_reduce *p, void *to, size_t at, size_t n)
{
	size_t size = dtype_size(p->a->out_dtype);

	if (p->one)
		one_fold(p, to, at, n);
	for (size_t done = 0, m; done < n && !p->one; done += m) {
		m = host_piece(done, n);
		piece(p, (char *)to + done * size, at + done, m);
	}
}

void HOST(reduce)(const struct k_reduce *a, size_t begin, size_t end)
{
	struct host_reduce p;

	HOST(reduce_begin)(&p, a);
	if (begin < end)
		HOST(reduce_block)
	(&p, (char *)a->out + begin * dtype_size(a->out_dtype), begin, end - begin);
}
