/*
 * A block is put together in a buffer that stays in the second-level cache, in any order. Its checksum is
 * made there, and its bytes go past the caches to their place: so that memory is read once, written once,
 * and not read before it is written.
 */
#include "convert.h"
#include "crc32c.h"
#include "host/host.h"
#include "host/lanes.h"

#include <string.h>

/* Columns of a tile of a transposed box: their cache lines stay in the first-level cache. */
#define TILE 64u

/* Rows of the box @x that lie in elements [first, first + n) of the tensor. */
struct assemble_rows {
	const struct k_assemble_box *x;
	uint64_t first, n;
	char *to; /* of element @first */
	enum dtype dtype;
};

static uint64_t assemble_row_at(const struct k_assemble_box *x, uint64_t row)
{
	return x->at + row / x->n[1] * x->dst_stride[0] + row % x->n[1] * x->dst_stride[1];
}

/* The first row that ends behind @first. */
static uint64_t assemble_first_row(const struct k_assemble_box *x, uint64_t first)
{
	uint64_t lo = 0, hi = x->n[0] * x->n[1];

	while (lo < hi) {
		uint64_t middle = lo + (hi - lo) / 2;

		if (assemble_row_at(x, middle) + x->n[2] > first)
			hi = middle;
		else
			lo = middle + 1;
	}
	return lo;
}

/* Columns [*ret_begin, *ret_end) of the row that begins at @at are in the block. */
static void assemble_columns(const struct assemble_rows *v, uint64_t at, uint64_t *ret_begin,
			     uint64_t *ret_end)
{
	uint64_t end = v->first + v->n;

	*ret_begin = at < v->first ? v->first - at : 0;
	*ret_end = end - at < v->x->n[2] ? end - at : v->x->n[2];
}

static const void *assemble_source(const struct k_assemble_box *x, uint64_t row, uint64_t column)
{
	uint64_t at = row / x->n[1] * x->src_stride[0] + row % x->n[1] * x->src_stride[1] +
		      column * x->src_stride[2];

	return (const char *)x->src + at * dtype_size(x->src_dtype);
}

static void assemble_cast(const struct assemble_rows *v, uint64_t at, const void *src,
			  enum dtype src_dtype, uint64_t n)
{
	struct k_cast a = { .dst = v->to + (at - v->first) * dtype_size(v->dtype),
			    .src = src,
			    .dst_dtype = v->dtype,
			    .src_dtype = src_dtype };

	HOST(cast)(&a, 0, n);
}

/* A row whose elements lie one after the other. */
static void assemble_plain_row(const struct assemble_rows *v, uint64_t row)
{
	uint64_t at = assemble_row_at(v->x, row), begin, end;

	assemble_columns(v, at, &begin, &end);
	assemble_cast(v, at + begin, assemble_source(v->x, row, begin), v->x->src_dtype,
		      end - begin);
}

static void assemble_collect(void *ret, const struct k_assemble_box *x, uint64_t row,
			     uint64_t column, uint64_t n)
{
	const char *src = assemble_source(x, row, column);
	size_t size = dtype_size(x->src_dtype);

	for (uint64_t i = 0; i < n && size == sizeof(uint32_t); i++)
		memcpy((uint32_t *)ret + i, src + i * x->src_stride[2] * size, sizeof(uint32_t));
	for (uint64_t i = 0; i < n && size == sizeof(uint16_t); i++)
		memcpy((uint16_t *)ret + i, src + i * x->src_stride[2] * size, sizeof(uint16_t));
}

/* The part of a row that lies in columns [column, column + TILE). */
static void assemble_tile_row(const struct assemble_rows *v, uint64_t row, uint64_t column)
{
	uint64_t at = assemble_row_at(v->x, row), begin, end;
	float piece[TILE];

	assemble_columns(v, at, &begin, &end);
	begin = begin < column ? column : begin;
	end = end < column + TILE ? end : column + TILE;
	if (begin >= end)
		return;
	assemble_collect(piece, v->x, row, begin, end - begin);
	assemble_cast(v, at + begin, piece, v->x->src_dtype, end - begin);
}

static void assemble_box(const struct assemble_rows *v)
{
	const struct k_assemble_box *x = v->x;
	uint64_t from = assemble_first_row(x, v->first),
		 to = assemble_first_row(x, v->first + v->n);

	/* the last one may begin inside the block, and end behind it */
	if (to < x->n[0] * x->n[1] && assemble_row_at(x, to) < v->first + v->n)
		to++;
	for (uint64_t row = from; row < to && x->src_stride[2] == 1; row++)
		assemble_plain_row(v, row);
	for (uint64_t c = 0; c < x->n[2] && x->src_stride[2] != 1; c += TILE)
		for (uint64_t row = from; row < to; row++)
			assemble_tile_row(v, row, c);
}

/* To a tensor's place, which begins at a multiple of a vector, unless a test does otherwise. */
static void assemble_store(char *dst, const char *from, size_t bytes)
{
	size_t whole = (uintptr_t)dst % sizeof(lanes) ? 0 : bytes / sizeof(lanes) * sizeof(lanes);

	lanes_stream_all(dst, from, whole);
	memcpy(dst + whole, from + whole, bytes - whole);
}

static void assemble_boxes(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			   enum dtype dtype, char *room)
{
	if (t->gaps)
		memset(room, 0, b->n * dtype_size(dtype));
	for (unsigned i = 0; i < t->n_boxes; i++) {
		struct assemble_rows v = { &t->boxes[i], b->first, b->n, room, dtype };

		assemble_box(&v);
	}
}

static void assemble_scales(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			    float *room)
{
	for (uint32_t i = 0; i < b->n; i++)
		room[i] = e4m3_scale(t->scales->amax[b->first + i]);
}

static void assemble_make(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			  char *room)
{
	bool e4m3 = t->dst_dtype == DTYPE_E4M3;

	if (t->scales && !e4m3)
		assemble_scales(t, b, (float *)(void *)room);
	else
		assemble_boxes(t, b, e4m3 ? DTYPE_FP32 : t->dst_dtype, room);
	if (e4m3)
		HOST(e4m3_make)(t, b, (const float *)(const void *)room, (uint8_t *)room);
}

/* The passes before scales are known. */
static void assemble_prepare(const struct k_assemble *a, const struct k_assemble_block *b)
{
	const struct k_assemble_tensor *t = &a->tensors[b->tensor];
	char room[KERNEL_ASSEMBLE_BYTES] __attribute__((aligned(64)));

	if (a->pass == K_ASSEMBLE_CLEAR) {
		memset(t->scales->amax + b->first, 0, b->n * sizeof(*t->scales->amax));
		return;
	}
	assemble_boxes(t, b, DTYPE_FP32, room);
	HOST(e4m3_measure)(t, b, (const float *)(const void *)room);
}

static uint32_t assemble_block(const struct k_assemble *a, size_t e)
{
	const struct k_assemble_block *b = &a->blocks[e];
	const struct k_assemble_tensor *t = &a->tensors[b->tensor];
	char room[KERNEL_ASSEMBLE_BYTES] __attribute__((aligned(64)));
	size_t size = dtype_size(t->dst_dtype), bytes = b->n * size;
	char *dst = k_assemble_dst(a, t);

	assemble_make(t, b, room);
	assemble_store(dst + b->first * size, room, bytes);
	if (a->delta) {
		const char *base = a->delta->base + (dst - a->delta->made);

		HOST(delta_block)(a->delta, e, room, base + b->first * size, b->n, size);
	}
	return a->crc ? crc32c_add(0, room, bytes) : 0;
}

void HOST(assemble)(const struct k_assemble *a, size_t begin, size_t end)
{
	for (size_t e = begin; e < end && a->pass != K_ASSEMBLE_MAKE; e++)
		assemble_prepare(a, &a->blocks[e]);
	for (size_t e = begin; e < end && a->pass == K_ASSEMBLE_MAKE; e++) {
		uint32_t crc = assemble_block(a, e);

		if (a->crc)
			a->crc[e] = crc;
	}
	lanes_fence();
}
