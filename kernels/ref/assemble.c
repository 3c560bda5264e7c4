#include "convert.h"
#include "crc32c.h"
#include "ref/ref.h"

#include <string.h>

/* Elements of row (i, j) that lie in [first, first + n) of the tensor. @to: of element first. */
static void ref_assemble_row(const struct k_assemble_block *b, const struct k_assemble_box *x,
			     uint64_t i, uint64_t j, char *to, enum dtype dtype)
{
	uint64_t row = x->at + i * x->dst_stride[0] + j * x->dst_stride[1];
	uint64_t from = i * x->src_stride[0] + j * x->src_stride[1];

	for (uint64_t k = row < b->first ? b->first - row : 0;
	     k < x->n[2] && row + k < b->first + b->n; k++) {
		struct k_cast one = { .dst = to + (row + k - b->first) * dtype_size(dtype),
				      .src = (const char *)x->src +
					     (from + k * x->src_stride[2]) *
						     dtype_size(x->src_dtype),
				      .dst_dtype = dtype,
				      .src_dtype = x->src_dtype };

		ref_cast(&one, 0, 1);
	}
}

static void ref_assemble_boxes(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			       char *to, enum dtype dtype)
{
	if (t->gaps)
		memset(to, 0, b->n * dtype_size(dtype));
	for (unsigned i = 0; i < t->n_boxes; i++)
		for (uint64_t r = 0; r < t->boxes[i].n[0] * t->boxes[i].n[1]; r++)
			ref_assemble_row(b, &t->boxes[i], r / t->boxes[i].n[1],
					 r % t->boxes[i].n[1], to, dtype);
}

/* Of element @e of the tensor. */
static uint32_t *ref_assemble_amax(const struct k_assemble_scales *s, uint64_t e)
{
	uint64_t down = (s->rows + s->tile_rows - 1) / s->tile_rows;
	uint64_t across = (s->columns + s->tile_columns - 1) / s->tile_columns;
	uint64_t row = e / s->columns % s->rows, column = e % s->columns;
	uint64_t matrix = e / s->columns / s->rows;

	return &s->amax[(matrix * down + row / s->tile_rows) * across + column / s->tile_columns];
}

static void ref_assemble_raise(uint32_t *amax, uint32_t by)
{
	uint32_t now = __atomic_load_n(amax, __ATOMIC_RELAXED);

	while (now < by && !__atomic_compare_exchange_n(amax, &now, by, false, __ATOMIC_RELAXED,
							__ATOMIC_RELAXED))
		;
}

/* @to: of the block's first element; NULL: its tiles are measured. */
static void ref_assemble_e4m3(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			      uint8_t *to)
{
	float x[KERNEL_ASSEMBLE_BYTES / sizeof(float)];

	ref_assemble_boxes(t, b, (char *)x, DTYPE_FP32);
	for (uint32_t i = 0; i < b->n; i++) {
		uint32_t *amax = ref_assemble_amax(t->scales, b->first + i);

		if (to)
			to[i] = e4m3_divided(x[i], e4m3_scale(*amax));
		else
			ref_assemble_raise(amax, f32_bits(x[i]) & FP32_ABS);
	}
}

static void ref_assemble_scales(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
				float *to)
{
	for (uint32_t i = 0; i < b->n; i++)
		to[i] = e4m3_scale(t->scales->amax[b->first + i]);
}

static void ref_assemble_make(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			      char *to)
{
	if (t->dst_dtype == DTYPE_E4M3)
		ref_assemble_e4m3(t, b, (uint8_t *)to);
	else if (t->scales)
		ref_assemble_scales(t, b, (float *)to);
	else
		ref_assemble_boxes(t, b, to, t->dst_dtype);
}

/* Append @bytes at @from to what is at @to. Return: its end. */
static char *ref_delta_append(char *to, const void *from, size_t bytes)
{
	memcpy(to, from, bytes);
	return to + bytes;
}

static void ref_delta_write(const char *block, const char *base, uint32_t n, size_t size,
			    uint32_t changed, char *to)
{
	char *values = to + k_delta_padded(changed * sizeof(uint16_t));

	if (k_delta_is_dense(changed, n, size)) {
		memcpy(to, block, n * size);
		return;
	}
	for (uint32_t i = 0; i < n; i++)
		if (memcmp(block + i * size, base + i * size, size) != 0) {
			uint16_t position = (uint16_t)i;

			to = ref_delta_append(to, &position, sizeof(position));
			values = ref_delta_append(values, block + i * size, size);
		}
}

static void ref_delta(const struct k_delta *d, size_t e, const char *block, const char *base,
		      uint32_t n, size_t size)
{
	struct k_delta_block *ret = &d->blocks[e];
	uint64_t at, bytes;

	*ret = (struct k_delta_block){ .at = KERNEL_DELTA_NONE };
	for (uint32_t i = 0; i < n; i++)
		ret->changed += memcmp(block + i * size, base + i * size, size) != 0;
	ret->dense = k_delta_is_dense(ret->changed, n, size);
	bytes = k_delta_bytes(ret->changed, n, size);
	at = __atomic_fetch_add(d->used, bytes, __ATOMIC_RELAXED);
	if (at > d->room || bytes > d->room - at)
		return;
	ret->at = at;
	memset(d->out + at, 0, bytes);
	ref_delta_write(block, base, n, size, ret->changed, d->out + at);
	ret->crc = crc32c_add(0, d->out + at, bytes);
}

void ref_assemble(const struct k_assemble *a, size_t begin, size_t end)
{
	for (size_t e = begin; e < end; e++) {
		const struct k_assemble_block *b = &a->blocks[e];
		const struct k_assemble_tensor *t = &a->tensors[b->tensor];
		size_t size = dtype_size(t->dst_dtype);
		char *dst = k_assemble_dst(a, t) + b->first * size;

		if (a->pass == K_ASSEMBLE_CLEAR)
			memset(t->scales->amax + b->first, 0, b->n * sizeof(uint32_t));
		if (a->pass == K_ASSEMBLE_MEASURE)
			ref_assemble_e4m3(t, b, NULL);
		if (a->pass != K_ASSEMBLE_MAKE)
			continue;
		ref_assemble_make(t, b, dst);
		if (a->delta)
			ref_delta(a->delta, e, dst, a->delta->base + (dst - a->delta->made), b->n,
				  size);
		if (a->crc)
			a->crc[e] = crc32c_add(0, dst, b->n * size);
	}
}
