#include "ref/ref.h"

/* One element, by the operation that defines conversions. */
void ref_pack(const struct k_pack *a, size_t begin, size_t end)
{
	for (size_t e = begin; e < end; e++) {
		size_t row = e / a->row_elements, column = e % a->row_elements;
		size_t from = row * a->src_stride + column, to = row * a->dst_stride + column;
		struct k_cast one = {
			.dst = (char *)a->dst + to * dtype_size(a->dst_dtype),
			.src = (const char *)a->src + from * dtype_size(a->src_dtype),
			.dst_dtype = a->dst_dtype,
			.src_dtype = a->src_dtype,
		};

		ref_cast(&one, 0, 1);
	}
}
