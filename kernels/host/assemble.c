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
#define TILE_ROWS 64u

/* Blocks of a group, at most. */
#define GROUP_BLOCKS 4u

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

/* Elements of a cache line. */
#define LINE_FLOATS 16u

/* Bytes of a row that are fetched ahead; by them the processor knows how it goes on. */
#define ROW_AHEAD 8192u

/* Rows of a part of a matrix's columns are apart. Behind a row's end the processor fetches what is not needed, and of
 * the next row nothing. Columns [begin, end) of that. Inlined: GCC leaves out the call of a function that only
 * prefetches. */
static inline __attribute__((always_inline)) void assemble_fetch_next(
	const struct k_assemble_box *x, uint64_t row, uint64_t begin, uint64_t end)
{
	size_t size = dtype_size(x->src_dtype);
	const char *next;

	if (x->src_stride[1] == x->n[2] || row + 1 == x->n[0] * x->n[1])
		return;
	next = assemble_source(x, row + 1, 0);
	end = end * size < ROW_AHEAD ? end * size : ROW_AHEAD;
	for (uint64_t i = begin * size; i < end; i += LINE_FLOATS * sizeof(float))
		__builtin_prefetch(next + i, 0, 2);
}

/* A row whose elements lie one after the other. */
static void assemble_plain_row(const struct assemble_rows *v, uint64_t row)
{
	uint64_t at = assemble_row_at(v->x, row), begin, end;

	assemble_columns(v, at, &begin, &end);
	assemble_fetch_next(v->x, row, begin, end);
	assemble_cast(v, at + begin, assemble_source(v->x, row, begin), v->x->src_dtype,
		      end - begin);
}

/* A tile of a box whose source lies by columns: rows [row, row + n_rows), columns [column, column + n_columns). Each
 * cache line of a column of the source is needed once: columns that are a power of two apart share one set of the
 * first-level cache, which has room for a few lines. */
struct assemble_tile {
	uint64_t row, column;
	uint32_t n_rows, n_columns;
};

/* Columns that are fetched ahead: more of those that share a set have no room in the second-level cache. */
#define TILE_AHEAD 16u

/* A square that is transposed in registers. */
#ifdef __AVX2__
#define SQUARE 8u
#else
#define SQUARE 4u
#endif
typedef float square_row __attribute__((vector_size(SQUARE * sizeof(float))));

/* Stage @apart of a transposition: rows that are so far apart exchange their elements that are. */
#ifdef __AVX2__
#define assemble_low(a, b, apart)                                                  \
	((apart) == 1   ? __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) \
	 : (apart) == 2 ? __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)  \
			: __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11))
#define assemble_high(a, b, apart)                                                  \
	((apart) == 1   ? __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15)  \
	 : (apart) == 2 ? __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15) \
			: __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#else
#define assemble_low(a, b, apart)                                 \
	((apart) == 1 ? __builtin_shufflevector(a, b, 0, 4, 2, 6) \
		      : __builtin_shufflevector(a, b, 0, 1, 4, 5))
#define assemble_high(a, b, apart)                                \
	((apart) == 1 ? __builtin_shufflevector(a, b, 1, 5, 3, 7) \
		      : __builtin_shufflevector(a, b, 2, 3, 6, 7))
#endif

static inline __attribute__((always_inline)) void assemble_exchange(square_row x[SQUARE],
								    unsigned apart)
{
	for (unsigned i = 0; i < SQUARE; i++) {
		square_row a = x[i], b;

		if (i & apart)
			continue;
		b = x[i + apart];
		x[i] = assemble_low(a, b, apart);
		x[i + apart] = assemble_high(a, b, apart);
	}
}

/* Columns of the source, @pitch elements apart, become rows, @to_pitch apart. */
static inline void assemble_square(float *to, uint32_t to_pitch, const float *src, uint64_t pitch)
{
	square_row x[SQUARE];

	for (unsigned i = 0; i < SQUARE; i++)
		memcpy(&x[i], src + i * pitch, sizeof(x[i]));
	for (unsigned apart = 1; apart < SQUARE; apart *= 2)
		assemble_exchange(x, apart);
	for (unsigned i = 0; i < SQUARE; i++)
		memcpy(to + (size_t)i * to_pitch, &x[i], sizeof(x[i]));
}

/* Elements of the tile from row @row and column @column on, one by one. @size: of an element. */
static inline __attribute__((always_inline)) void assemble_tile_rest(const struct assemble_tile *i,
								     size_t size, uint32_t row,
								     uint32_t column,
								     const char *src,
								     uint64_t pitch, char *ret)
{
	for (uint32_t k = column; k < i->n_columns; k++)
		for (uint32_t r = row; r < i->n_rows; r++)
			memcpy(ret + (r * i->n_columns + k) * size, src + (k * pitch + r) * size,
			       size);
}

/* SQUARE columns that are needed soon, if there are as many. */
static void assemble_tile_fetch(const float *src, uint64_t pitch, uint32_t n_rows)
{
	for (unsigned k = 0; k < SQUARE; k++)
		for (uint32_t r = 0; r < n_rows + LINE_FLOATS - 1; r += LINE_FLOATS)
			__builtin_prefetch(src + k * pitch + (r < n_rows ? r : n_rows - 1), 0, 2);
}

static void assemble_tile_read_f32(const struct assemble_tile *i, const float *src, uint64_t pitch,
				   float *ret)
{
	uint32_t rows = i->n_rows / SQUARE * SQUARE, columns = i->n_columns / SQUARE * SQUARE;

	for (uint32_t k = 0; k < columns; k += SQUARE) {
		assemble_tile_fetch(src + (k + TILE_AHEAD) * pitch, pitch, i->n_rows);
		for (uint32_t r = 0; r < rows; r += SQUARE)
			assemble_square(ret + r * i->n_columns + k, i->n_columns,
					src + k * pitch + r, pitch);
		for (uint32_t j = k; j < k + SQUARE; j++)
			for (uint32_t r = rows; r < i->n_rows; r++)
				ret[r * i->n_columns + j] = src[j * pitch + r];
	}
	assemble_tile_rest(i, sizeof(*src), 0, columns, (const char *)src, pitch, (char *)ret);
}

/* @ret: row by row. */
static void assemble_tile_read(const struct assemble_rows *v, const struct assemble_tile *i,
			       char *ret)
{
	const char *src = assemble_source(v->x, i->row, i->column);
	uint64_t pitch = v->x->src_stride[2];

	if (dtype_size(v->x->src_dtype) == sizeof(float))
		assemble_tile_read_f32(i, (const float *)(const void *)src, pitch,
				       (float *)(void *)ret);
	else
		assemble_tile_rest(i, sizeof(uint16_t), 0, 0, src, pitch, ret);
}

/* What is in the block of row @r of the tile, whose elements are at @from. */
static void assemble_tile_row(const struct assemble_rows *v, const struct assemble_tile *i,
			      uint32_t r, const char *from, size_t size)
{
	uint64_t at = assemble_row_at(v->x, i->row + r), begin, end;

	assemble_columns(v, at, &begin, &end);
	begin = begin < i->column ? i->column : begin;
	end = end < i->column + i->n_columns ? end : i->column + i->n_columns;
	if (begin < end)
		memcpy(v->to + (at + begin - v->first) * size, from + (begin - i->column) * size,
		       (end - begin) * size);
}

static void assemble_tile(const struct assemble_rows *v, const struct assemble_tile *i)
{
	char read[TILE * TILE_ROWS * sizeof(float)] __attribute__((aligned(64)));
	char cast[TILE * TILE_ROWS * sizeof(float)] __attribute__((aligned(64)));
	struct k_cast a = {
		.dst = cast, .src = read, .dst_dtype = v->dtype, .src_dtype = v->x->src_dtype
	};
	size_t size = dtype_size(v->dtype);
	const char *made = v->dtype == a.src_dtype ? read : cast;

	assemble_tile_read(v, i, read);
	if (made == cast)
		HOST(cast)(&a, 0, (size_t)i->n_rows * i->n_columns);
	for (uint32_t r = 0; r < i->n_rows; r++)
		assemble_tile_row(v, i, r, made + (size_t)r * i->n_columns * size, size);
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

/* What the boxes are put together as. */
static enum dtype assemble_room_dtype(const struct k_assemble_tensor *t)
{
	return t->dst_dtype == DTYPE_E4M3 ? DTYPE_FP32 : t->dst_dtype;
}

static void assemble_make(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			  char *room)
{
	bool e4m3 = t->dst_dtype == DTYPE_E4M3;

	if (t->scales && !e4m3)
		assemble_scales(t, b, (float *)(void *)room);
	else
		assemble_boxes(t, b, assemble_room_dtype(t), room);
	if (e4m3)
		HOST(e4m3_make)(t, b, (const float *)(const void *)room, (uint8_t *)room);
}

/* Is a source of the tensor read by columns? */
static bool assemble_is_by_columns(const struct k_assemble_tensor *t)
{
	for (unsigned i = 0; i < t->n_boxes; i++)
		if (t->boxes[i].src_stride[2] != 1)
			return true;
	return false;
}

/* Blocks that are put together at a time, from @e on. A block of a tensor whose source is read by columns has few of
 * its rows, and so needs a few elements of each column: blocks that follow each other share the cache lines, and the
 * entries of the page table. */
static uint32_t assemble_group(const struct k_assemble *a, size_t e, size_t end)
{
	const struct k_assemble_block *b = &a->blocks[e];
	uint32_t n = 1;

	if (!assemble_is_by_columns(&a->tensors[b->tensor]))
		return 1;
	while (n < GROUP_BLOCKS && e + n < end && b[n].tensor == b->tensor &&
	       b[n].first == b[n - 1].first + b[n - 1].n)
		n++;
	return n;
}

/* @n blocks as one. */
static struct k_assemble_block assemble_joined(const struct k_assemble_block *b, uint32_t n)
{
	struct k_assemble_block ret = b[0];

	for (uint32_t i = 1; i < n; i++)
		ret.n += b[i].n;
	return ret;
}

/* Elements that are made at a time. Rows come in pieces that stay in the first-level cache (e4m3 as fp32, of which it is
 * made), whose bytes the checksum takes in whole lanes. What is read by columns comes as a whole. */
static uint32_t assemble_each(const struct k_assemble_tensor *t)
{
	if (t->n_boxes > PIECE_BOXES || assemble_is_by_columns(t))
		return GROUP_BLOCKS * KERNEL_ASSEMBLE_BYTES;
	return PIECE_BYTES / (uint32_t)dtype_size(assemble_room_dtype(t));
}

/* The next elements of the block @b, from @at on. */
static struct k_assemble_block assemble_piece(const struct k_assemble_block *b, uint32_t at,
					      uint32_t each)
{
	return (struct k_assemble_block){ .tensor = b->tensor,
					  .n = b->n - at < each ? b->n - at : each,
					  .first = b->first + at };
}

static void assemble_measure(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			     char *room)
{
	for (uint32_t at = 0, each = assemble_each(t); at < b->n; at += each) {
		struct k_assemble_block piece = assemble_piece(b, at, each);

		assemble_boxes(t, &piece, DTYPE_FP32, room);
		HOST(e4m3_measure)(t, &piece, (const float *)(const void *)room);
	}
}

/* What is done with a block: its checksum, and how it differs from the base of a delta. */
struct assemble_end {
	char *dst;
	const char *base; /* NULL: of no delta */
	size_t size;      /* of an element */
	struct delta_changes changes;
	uint32_t crc;
};

static void assemble_begin(const struct k_assemble *a, const struct k_assemble_block *b,
			   struct assemble_end *ret)
{
	const struct k_assemble_tensor *t = &a->tensors[b->tensor];

	ret->size = dtype_size(t->dst_dtype);
	ret->dst = k_assemble_dst(a, t) + b->first * ret->size;
	ret->base = a->delta ? a->delta->base + (ret->dst - a->delta->made) : NULL;
	ret->changes.n = 0;
	ret->crc = 0;
}

/* @n elements at @made are the block's from @at on. */
static void assemble_take(const struct k_assemble *a, struct assemble_end *x, const char *made,
			  uint32_t at, uint32_t n)
{
	size_t size = x->size;

	assemble_store(x->dst + at * size, made, n * size);
	if (x->base)
		HOST(delta_compare)(&x->changes, made, x->base + at * size, at, n, size);
	if (a->crc)
		x->crc = crc32c_add(x->crc, made, n * size);
}

/* The whole block is at @made. */
static void assemble_finish(const struct k_assemble *a, size_t e, const struct assemble_end *x,
			    const char *made)
{
	if (x->base)
		HOST(delta_write)(a->delta, e, &x->changes, made, a->blocks[e].n, x->size);
	if (a->crc)
		a->crc[e] = x->crc;
}

/* A block, piece by piece. */
static void assemble_block(const struct k_assemble *a, size_t e, char *room)
{
	const struct k_assemble_block *b = &a->blocks[e];
	const struct k_assemble_tensor *t = &a->tensors[b->tensor];
	struct assemble_end x;

	assemble_begin(a, b, &x);
	for (uint32_t at = 0, each = assemble_each(t); at < b->n; at += each) {
		struct k_assemble_block piece = assemble_piece(b, at, each);
		char *made = room + at * x.size;

		assemble_make(t, &piece, made);
		assemble_take(a, &x, made, at, piece.n);
	}
	assemble_finish(a, e, &x, room);
}

/* Blocks [e, e + n), put together as one. */
static void assemble_blocks(const struct k_assemble *a, size_t e, uint32_t n, char *room)
{
	const struct k_assemble_block all = assemble_joined(&a->blocks[e], n);

	assemble_make(&a->tensors[all.tensor], &all, room);
	for (uint32_t i = 0; i < n; i++) {
		const struct k_assemble_block *b = &a->blocks[e + i];
		struct assemble_end x;

		assemble_begin(a, b, &x);
		assemble_take(a, &x, room, 0, b->n);
		assemble_finish(a, e + i, &x, room);
		room += b->n * x.size;
	}
}

void HOST(assemble)(const struct k_assemble *a, size_t begin, size_t end)
{
	char room[GROUP_BLOCKS * KERNEL_ASSEMBLE_BYTES] __attribute__((aligned(64)));

	for (size_t e = begin; e < end;) {
		const struct k_assemble_block *b = &a->blocks[e];
		const struct k_assemble_tensor *t = &a->tensors[b->tensor];
		uint32_t n = a->pass == K_ASSEMBLE_CLEAR ? 1 : assemble_group(a, e, end);
		const struct k_assemble_block all = assemble_joined(b, n);

		if (a->pass == K_ASSEMBLE_CLEAR)
			memset(t->scales->amax + b->first, 0, b->n * sizeof(*t->scales->amax));
		else if (a->pass == K_ASSEMBLE_MEASURE)
			assemble_measure(t, &all, room);
		else if (n > 1)
			assemble_blocks(a, e, n, room);
		else
			assemble_block(a, e, room);
		e += n;
	}
	lanes_fence();
}
