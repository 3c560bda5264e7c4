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

/* Columns and rows of a tile of a transposed box. */
#define TILE      64u
#define TILE_ROWS 32u
/* Columns of the source that are fetched ahead, to the second-level cache: those that are a power of two apart share
 * a few sets there, too, so that more of them would push each other out before they are read. */
#define TILE_AHEAD 16u
#define LINE_BYTES 64u

/* Bytes and boxes of a piece. */
#define PIECE_BYTES 6144u
#define PIECE_BOXES 8u

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

/* A tile of a box whose source lies by columns: rows [row, row + n_rows), columns [column, column + n_columns). The
 * source of a column is read as a whole into a scratch, so that each of its cache lines is needed once: columns that
 * are a power of two apart share one set of the first-level cache, which has room for a few lines. */
struct assemble_tile {
	uint64_t row, column;
	uint32_t n_rows, n_columns;
};

/* Elements from one column of the scratch to the next: odd, so that a row's lie in different sets. */
#define TILE_PITCH (TILE_ROWS + 1u)

static inline __attribute__((always_inline)) void assemble_tile_read(const struct assemble_rows *v,
								     const struct assemble_tile *i,
								     size_t size, char *scratch)
{
	const char *src = assemble_source(v->x, i->row, i->column);
	uint64_t pitch = v->x->src_stride[2] * size;

	for (uint32_t k = 0; k < i->n_columns; k++) {
		for (uint32_t at = 0; at < i->n_rows * size; at += LINE_BYTES)
			__builtin_prefetch(src + (k + TILE_AHEAD) * pitch + at, 0, 2);
		memcpy(scratch + k * TILE_PITCH * size, src + k * pitch, i->n_rows * size);
	}
}

static inline __attribute__((always_inline)) void assemble_tile_row(const char *scratch, uint32_t n,
								    size_t size, char *ret)
{
	for (uint32_t k = 0; k < n; k++)
		memcpy(ret + k * size, scratch + k * TILE_PITCH * size, size);
}

static inline __attribute__((always_inline)) void assemble_tile_rows(const struct assemble_rows *v,
								     const struct assemble_tile *i,
								     size_t size)
{
	char scratch[TILE * TILE_PITCH * sizeof(float)], row[TILE * sizeof(float)];

	assemble_tile_read(v, i, size, scratch);
	for (uint32_t r = 0; r < i->n_rows; r++) {
		uint64_t at = assemble_row_at(v->x, i->row + r), begin, end;

		assemble_columns(v, at, &begin, &end);
		begin = begin < i->column ? i->column : begin;
		end = end < i->column + i->n_columns ? end : i->column + i->n_columns;
		if (begin >= end)
			continue;
		assemble_tile_row(scratch + (r + (begin - i->column) * TILE_PITCH) * size,
				  (uint32_t)(end - begin), size, row);
		assemble_cast(v, at + begin, row, v->x->src_dtype, end - begin);
	}
}

static void assemble_tile(const struct assemble_rows *v, const struct assemble_tile *i)
{
	if (dtype_size(v->x->src_dtype) == sizeof(float))
		assemble_tile_rows(v, i, sizeof(float));
	else
		assemble_tile_rows(v, i, sizeof(uint16_t));
}

static uint32_t assemble_least(uint64_t left, uint32_t most)
{
	return left < most ? (uint32_t)left : most;
}

/* Rows [from, to), tile by tile. Rows of one tile are neighbours in the source: of one matrix, and one behind the
 * other there. */
static void assemble_tiles(const struct assemble_rows *v, uint64_t from, uint64_t to)
{
	const struct k_assemble_box *x = v->x;
	uint32_t most = x->src_stride[1] == 1 ? TILE_ROWS : 1;
	struct assemble_tile i;

	for (i.row = from; i.row < to; i.row += i.n_rows) {
		uint64_t left = x->n[1] - i.row % x->n[1];

		i.n_rows = assemble_least(left < to - i.row ? left : to - i.row, most);
		for (i.column = 0; i.column < x->n[2]; i.column += i.n_columns) {
			i.n_columns = assemble_least(x->n[2] - i.column, TILE);
			assemble_tile(v, &i);
		}
	}
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
	if (x->src_stride[2] != 1)
		assemble_tiles(v, from, to);
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

/* Elements that are made at a time. Rows come in pieces that stay in the first-level cache, whose bytes the checksum
 * takes in whole lanes. What is transposed comes as a whole: its source is read by columns. */
static uint32_t assemble_each(const struct k_assemble_tensor *t)
{
	for (unsigned i = 0; i < t->n_boxes; i++)
		if (t->boxes[i].src_stride[2] != 1 || i == PIECE_BOXES)
			return KERNEL_ASSEMBLE_BYTES;
	return PIECE_BYTES / (uint32_t)dtype_size(t->dst_dtype);
}

/* The next elements of the block @b, from @at on. */
static struct k_assemble_block assemble_piece(const struct k_assemble_block *b, uint32_t at,
					      uint32_t each)
{
	return (struct k_assemble_block){ .tensor = b->tensor,
					  .n = b->n - at < each ? b->n - at : each,
					  .first = b->first + at };
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
	for (uint32_t at = 0, each = assemble_each(t); at < b->n; at += each) {
		struct k_assemble_block piece = assemble_piece(b, at, each);

		assemble_boxes(t, &piece, DTYPE_FP32, room);
		HOST(e4m3_measure)(t, &piece, (const float *)(const void *)room);
	}
}

/* A block and how it differs from the base of a delta. */
static uint32_t assemble_block(const struct k_assemble *a, size_t e)
{
	const struct k_assemble_block *b = &a->blocks[e];
	const struct k_assemble_tensor *t = &a->tensors[b->tensor];
	char room[KERNEL_ASSEMBLE_BYTES] __attribute__((aligned(64)));
	size_t size = dtype_size(t->dst_dtype);
	char *dst = k_assemble_dst(a, t) + b->first * size;
	const char *base = a->delta ? a->delta->base + (dst - a->delta->made) : NULL;
	struct delta_changes changes;
	uint32_t crc = 0;

	changes.n = 0;
	for (uint32_t at = 0, each = assemble_each(t); at < b->n; at += each) {
		struct k_assemble_block piece = assemble_piece(b, at, each);
		char *made = room + at * size;

		assemble_make(t, &piece, made);
		assemble_store(dst + at * size, made, piece.n * size);
		if (base)
			HOST(delta_compare)(&changes, made, base + at * size, at, piece.n, size);
		if (a->crc)
			crc = crc32c_add(crc, made, piece.n * size);
	}
	if (base)
		HOST(delta_write)(a->delta, e, &changes, room, b->n, size);
	return crc;
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
