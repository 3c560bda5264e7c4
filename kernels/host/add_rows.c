#include "host/factor.h"

#include <string.h>

static void add(float *restrict out, const float *restrict x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		out[i] += x[i];
}

/* Columns [at, at+n) of entry @e. */
static void piece(const struct k_add_rows *a, const struct factor *pre, uint64_t e, float *out,
		  size_t at, size_t n)
{
	float x[HOST_PIECE];
	const float *from = host_load(x, a->values, a->dtype, e * a->row_elements + at, n);

	if (from != x)
		memcpy(x, from, n * sizeof(*x));
	factor_apply(pre, x, n);
	add(out + at, x, n);
}

void HOST(add_rows)(const struct k_add_rows *a, size_t begin, size_t end)
{
	const struct factor pre = factor_from(&a->pre);

	for (uint64_t e = 0; e < a->n_rows; e++) {
		uint64_t row = (uint64_t)a->rows[e]; /* a negative one is above every limit */

		if (row < a->first_row || row >= a->row_limit)
			continue;
		for (size_t at = begin, n; at < end; at += n) {
			n = host_piece(at, end);
			piece(a, &pre, e, a->out + (row - a->first_row) * a->row_elements, at, n);
		}
	}
}
