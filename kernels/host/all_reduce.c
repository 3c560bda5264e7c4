#include "host/host.h"

#include <string.h>

static void add(float *restrict acc, const float *restrict x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		acc[i] += x[i];
}

/* x != x: x is NaN. A NaN already in acc stays: no comparison with it is true. */
static void max(float *restrict acc, const float *restrict x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		acc[i] = ((x[i] > acc[i]) | (x[i] != x[i])) ? x[i] : acc[i];
}

static void min(float *restrict acc, const float *restrict x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		acc[i] = ((x[i] < acc[i]) | (x[i] != x[i])) ? x[i] : acc[i];
}

static void fold(enum reduce_op op, float *acc, const float *x, size_t n)
{
	if (op == REDUCE_MAX)
		max(acc, x, n);
	else if (op == REDUCE_MIN)
		min(acc, x, n);
	else
		add(acc, x, n);
}

static void divide(float *acc, size_t n, float by)
{
	for (size_t i = 0; i < n; i++)
		acc[i] /= by;
}

static void store(const struct k_all_reduce *a, size_t at, const float *acc, size_t n)
{
	if (a->dtype == DTYPE_FP32)
		memcpy((float *)a->out + at, acc, n * sizeof(*acc));
	else
		HOST(narrow)(a->out, a->dtype, at, acc, n);
}

/* All inputs are read before the output is written: it may be one of them. */
static void piece(const struct k_all_reduce *a, size_t at, size_t n)
{
	float acc[HOST_PIECE], buf[HOST_PIECE];
	const float *x = host_load(acc, a->in[0], a->dtype, at, n);

	if (x != acc)
		memcpy(acc, x, n * sizeof(*acc));
	for (unsigned j = 1; j < a->k; j++)
		fold(a->op, acc, host_load(buf, a->in[j], a->dtype, at, n), n);
	if (a->op == REDUCE_AVG)
		divide(acc, n, (float)a->k);
	store(a, at, acc, n);
}

void HOST(all_reduce)(const struct k_all_reduce *a, size_t begin, size_t end)
{
	for (size_t at = begin, n; at < end; at += n) {
		n = host_piece(at, end);
		piece(a, at, n);
	}
}
