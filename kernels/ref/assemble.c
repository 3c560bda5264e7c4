#include "crc32c.h"
#include "ref/ref.h"

#include <string.h>

/* One element of a box, if it lies in [first, first + n). */
static void ref_assemble_element(const struct k_assemble_tensor *t,
				 const struct k_assemble_block *b, const struct k_assemble_box *x,
				 const uint64_t at[3])
{
	uint64_t to = x->at + at[0] * x->dst_stride[0] + at[1] * x->dst_stride[1] + at[2];
	uint64_t from = 0;
	struct k_cast one = { .dst_dtype = t->dst_dtype, .src_dtype = x->src_dtype };

	if (to < b->first || to - b->first >= b->n)
		return;
	for (unsigned d = 0; d < 3; d++)
		from += at[d] * x->src_stride[d];
	one.dst = (char *)t->dst + to * dtype_size(t->dst_dtype);
	one.src = (const char *)x->src + from * dtype_size(x->src_dtype);
	ref_cast(&one, 0, 1);
}

static void ref_assemble_box(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			     const struct k_assemble_box *x)
{
	uint64_t at[3];

	for (at[0] = 0; at[0] < x->n[0]; at[0]++)
		for (at[1] = 0; at[1] < x->n[1]; at[1]++)
			for (at[2] = 0; at[2] < x->n[2]; at[2]++)
				ref_assemble_element(t, b, x, at);
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
			ref_assemble_box(t, b, &t->boxes[i]);
		if (a->crc)
			a->crc[e] = crc32c_add(0, dst, b->n * size);
	}
}
