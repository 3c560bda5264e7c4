/*
 * Blocks of type e4m3, which are in the second-level cache in fp32, piece by piece: a piece is of one row and
 * one tile, so that its loop is a plain one over neighbours.
 */
#include "convert.h"
#include "host/host.h"

#include <string.h>

/* Elements [at, at + n) of the block. */
struct e4m3_piece {
	uint32_t at, n;
	uint32_t *amax; /* of their tile */
};

/* From piece to piece of a block. */
struct e4m3_walk {
	const struct k_assemble_scales *s;
	uint32_t left;        /* elements of the block */
	uint64_t row, column; /* of the next piece; rows of all matrices together */
	uint32_t *amax;       /* of the first tile of the row */
	uint64_t across;      /* tiles */
	struct e4m3_piece piece;
};

static uint64_t e4m3_tiles(uint64_t n, uint64_t each)
{
	return (n + each - 1) / each;
}

/* @row: of all matrices together. */
static void e4m3_begin_row(struct e4m3_walk *w, uint64_t row)
{
	const struct k_assemble_scales *s = w->s;
	uint64_t down = e4m3_tiles(s->rows, s->tile_rows);

	w->row = row;
	w->amax = s->amax + (row / s->rows * down + row % s->rows / s->tile_rows) * w->across;
}

static struct e4m3_walk e4m3_walk(const struct k_assemble_scales *s,
				  const struct k_assemble_block *b)
{
	struct e4m3_walk w = { .s = s,
			       .left = b->n,
			       .column = b->first % s->columns,
			       .across = e4m3_tiles(s->columns, s->tile_columns) };

	e4m3_begin_row(&w, b->first / s->columns);
	return w;
}

static bool e4m3_next(struct e4m3_walk *w)
{
	const struct k_assemble_scales *s = w->s;
	uint64_t tile, end;

	w->left -= w->piece.n;
	w->column += w->piece.n;
	if (!w->left)
		return false;
	if (w->column == s->columns) {
		w->column = 0;
		e4m3_begin_row(w, w->row + 1);
	}
	tile = w->column / s->tile_columns;
	end = s->columns - tile * s->tile_columns < s->tile_columns ? s->columns
								    : (tile + 1) * s->tile_columns;
	w->piece.at += w->piece.n;
	w->piece.n = end - w->column < w->left ? (uint32_t)(end - w->column) : w->left;
	w->piece.amax = w->amax + tile;
	return true;
}

static uint32_t e4m3_max(const float *x, uint32_t n)
{
	uint32_t max = 0;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t abs = f32_bits(x[i]) & FP32_ABS;

		max = abs > max ? abs : max;
	}
	return max;
}

/* Other threads raise it, too. */
static void e4m3_raise(uint32_t *amax, uint32_t by)
{
	uint32_t now = __atomic_load_n(amax, __ATOMIC_RELAXED);

	while (now < by && !__atomic_compare_exchange_n(amax, &now, by, false, __ATOMIC_RELAXED,
							__ATOMIC_RELAXED))
		;
}

void HOST(e4m3_measure)(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			const float *x)
{
	struct e4m3_walk w = e4m3_walk(t->scales, b);

	while (e4m3_next(&w))
		e4m3_raise(w.piece.amax, e4m3_max(x + w.piece.at, w.piece.n));
}

static void e4m3_divide(uint8_t *restrict to, const float *restrict x, float scale, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		to[i] = e4m3_divided(x[i], scale);
}

/* Codes go through a small buffer, so that @to may be @x: they end up in front of what is still to be read. */
void HOST(e4m3_make)(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
		     const float *x, uint8_t *to)
{
	struct e4m3_walk w = e4m3_walk(t->scales, b);
	uint8_t some[HOST_PIECE];

	while (e4m3_next(&w)) {
		float scale = e4m3_scale(*w.piece.amax);

		for (uint32_t i = 0, n; i < w.piece.n; i += n) {
			n = (uint32_t)host_piece(i, w.piece.n);
			e4m3_divide(some, x + w.piece.at + i, scale, n);
			memcpy(to + w.piece.at + i, some, n);
		}
	}
}
