#include "host/host.h"

/* Columns [from, from+n) of one row: a cast. */
static void row(const struct k_pack *a, size_t i, size_t from, size_t n)
{
	size_t to_at = i * a->dst_stride + from, from_at = i * a->src_stride + from;
	struct k_cast part = {
		.dst = (char *)a->dst + to_at * dtype_size(a->dst_dtype),
		.src = (const char *)a->src + from_at * dtype_size(a->src_dtype),
		.dst_dtype = a->dst_dtype,
		.src_dtype = a->src_dtype,
	};

	HOST(cast)(&part, 0, n);
}

void HOST(pack)(const struct k_pack *a, size_t begin, size_t end)
{
	for (size_t e = begin, n; e < end; e += n) {
		size_t column = e % a->row_elements;

		n = a->row_elements - column;
		n = n < end - e ? n : end - e;
		row(a, e / a->row_elements, column, n);
	}
}
