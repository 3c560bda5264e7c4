#include "ref/ref.h"

/* Equal types: the bits, NaN payload and all. */
static void copy_bits(const struct k_cast *a, size_t begin, size_t end)
{
	size_t size = dtype_size(a->src_dtype);
	struct k_copy c = { a->dst, a->src };

	ref_copy(&c, begin * size, end * size);
}

void ref_cast(const struct k_cast *a, size_t begin, size_t end)
{
	if (a->src_dtype == a->dst_dtype) {
		copy_bits(a, begin, end);
		return;
	}
	for (size_t i = begin; i < end; i++)
		ref_store(a->dst, a->dst_dtype, i, ref_load(a->src, a->src_dtype, i));
}
