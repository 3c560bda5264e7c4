#include "crc32c.h"
#include "ref/ref.h"

#include <string.h>

/* Elements of row (i, j) that lie in [first, first + n) of the tensor. */
static void ref_assemble_row(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			     const struct k_assemble_box *x, uint64_t i, uint64_t j)
{
	uint64_t row = x->at + i * x->dst_stride[0] + j * x->dst_stride[1];
	uint64_t from = i * x->src_stride[0] + j * x->src_stride[1];

	for (uint64_t k = row < b->first ? b->first - row : 0;
	     k < x->n[2] && row + k < b->first + b->n; k++) {
		struct k_cast one = { .dst = (char *)t->dst + (row + k) * dtype_size(t->dst_dtype),
				      .src = (const char *)x->src +
					     (from + k * x->src_stride[2]) *
						     dtype_size(x->src_dtype),
				      .dst_dtype = t->dst_dtype,
				      .src_dtype = x->src_dtype };

		ref_cast(&one, 0, 1);
	}
}

void ref_assemble(const struct k_assemble *a, size_t begin, size_t end)
{
	for (size_t e = begin; e < end; e++) {
		const struct k_assemble_block *b = &a->blocks[e];
		const struct k_assemble_tensor *t = &a->tensors[b->tensor];
		size_t size = dtype_size(t->dst_dtype);
		char *dst = (char *)t->dst + b->first * size;

		if (t->gaps)
			memset(dst, 0, b->n * size);
		for (unsigned i = 0; i < t->n_boxes; i++)
			for (uint64_t r = 0; r < t->boxes[i].n[0] * t->boxes[i].n[1]; r++)
				ref_assemble_row(t, b, &t->boxes[i], r / t->boxes[i].n[1],
						 r % t->boxes[i].n[1]);
		if (a->crc)
			a->crc[e] = crc32c_add(0, dst, b->n * size);
	}
}
