#include "ref/ref.h"

/* Entry @e in columns [begin, end). */
static void add_row(const struct k_add_rows *a, uint64_t e, size_t begin, size_t end)
{
	uint64_t row = (uint64_t)a->rows[e]; /* a negative one is above every limit */
	uint64_t from = e * a->row_elements, to = (row - a->first_row) * a->row_elements;

	if (row < a->first_row || row >= a->row_limit)
		return;
	for (size_t c = begin; c < end; c++)
		a->out[to + c] += ref_factor(&a->pre, ref_load(a->values, a->dtype, from + c));
}

void ref_add_rows(const struct k_add_rows *a, size_t begin, size_t end)
{
	for (uint64_t e = 0; e < a->n_rows; e++)
		add_row(a, e, begin, end);
}
