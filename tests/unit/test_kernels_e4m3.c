/*
 * Tensors of type e4m3: all variants of k_assemble, and the conversions of convert.h, against the values of the
 * 256 codes and the nearest of them, computed here in double.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "core/check.h"
#include "crc32c.h"
#include "fdcheck.h"
#include "kernels.h"
#include "random_case.h"

TestSuite(kernels_e4m3, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

enum { ELEMENTS = 80000, BLOCKS = 128, SCALES = 4096, NAN_CODE = 0x7f };

static const char *const variants[] = { "ref", "portable", "avx2", "avx512" };

/* Of a code without its sign. */
static double value_of(unsigned code)
{
	unsigned exponent = code >> 3, mantissa = code & 7;

	if (code == NAN_CODE)
		return NAN;
	return exponent ? ldexp(1 + mantissa / 8.0, (int)exponent - 7) : ldexp(mantissa / 8.0, -6);
}

/* The nearest one, of two the even one. */
static uint8_t code_of(float x)
{
	uint8_t sign = signbit(x) ? 0x80 : 0;
	double abs = fabs((double)x);
	unsigned lo = 0, hi = NAN_CODE - 1;

	if (isnan(x))
		return sign | NAN_CODE;
	if (abs >= value_of(hi))
		return (uint8_t)(sign | hi);
	while (hi - lo > 1) {
		unsigned middle = (lo + hi) / 2;

		*(value_of(middle) <= abs ? &lo : &hi) = middle;
	}
	if (abs - value_of(lo) == value_of(hi) - abs)
		return (uint8_t)(sign | (lo % 2 ? hi : lo));
	return (uint8_t)(sign | (abs - value_of(lo) < value_of(hi) - abs ? lo : hi));
}

/* A tensor that is made of @x alone, as one matrix, and its scales. */
struct made {
	float x[ELEMENTS];
	uint8_t codes[ELEMENTS + 64];
	float scale[SCALES];
	uint32_t amax[SCALES];
	struct k_assemble_scales scales;
	struct k_assemble_box boxes[2];
	struct k_assemble_tensor tensors[2]; /* and the scales */
	struct k_assemble_block blocks[BLOCKS], of_scales;
	unsigned n_blocks;
	uint32_t n, n_scales;
};

static struct made m __attribute__((aligned(64)));

/* @n elements, blocks of @each. */
static void begin(uint64_t n, uint32_t each)
{
	m.tensors[0] = (struct k_assemble_tensor){ .dst = m.codes,
						   .dst_dtype = DTYPE_E4M3,
						   .boxes = m.boxes,
						   .n_boxes = 1,
						   .scales = &m.scales };
	m.tensors[1] = (struct k_assemble_tensor){ .dst = m.scale,
						   .dst_dtype = DTYPE_FP32,
						   .scales = &m.scales };
	m.boxes[0] = (struct k_assemble_box){
		.src = m.x, .src_dtype = DTYPE_FP32, .n = { 1, 1, n }, .src_stride = { 0, 0, 1 }
	};
	m.n = (uint32_t)n;
	m.n_blocks = 0;
	for (uint64_t at = 0; at < n; at += each) {
		cr_assert_lt(m.n_blocks, BLOCKS);
		m.blocks[m.n_blocks++] =
			(struct k_assemble_block){ 0, (uint32_t)(n - at < each ? n - at : each),
						   at };
	}
}

static void set_tiles(uint64_t rows, uint64_t columns, uint64_t tile_rows, uint64_t tile_columns)
{
	uint64_t down = (rows + tile_rows - 1) / tile_rows;
	uint64_t across = (columns + tile_columns - 1) / tile_columns;

	m.scales = (struct k_assemble_scales){ m.amax, rows, columns, tile_rows, tile_columns };
	m.n_scales = (uint32_t)(m.n / (rows * columns) * down * across);
	cr_assert_leq(m.n_scales, SCALES);
	m.of_scales = (struct k_assemble_block){ 1, m.n_scales, 0 };
}

/* All passes. */
static void make(const struct kernels *k)
{
	uint32_t crc[BLOCKS], crc_of_scales;
	struct k_assemble a = { .tensors = m.tensors, .blocks = m.blocks, .crc = crc };
	struct k_assemble scales = { .tensors = m.tensors,
				     .blocks = &m.of_scales,
				     .crc = &crc_of_scales };

	memset(m.codes, 0x5a, sizeof(m.codes));
	memset(m.amax, 0x5a, sizeof(m.amax));
	scales.pass = K_ASSEMBLE_CLEAR;
	k->assemble(&scales, 0, 1);
	a.pass = K_ASSEMBLE_MEASURE;
	/* in two parts, the later one first */
	k->assemble(&a, m.n_blocks / 2, m.n_blocks);
	k->assemble(&a, 0, m.n_blocks / 2);
	cr_assert_eq(m.codes[0], 0x5a, "%s: what is measured is not made", k->name);
	a.pass = scales.pass = K_ASSEMBLE_MAKE;
	k->assemble(&a, m.n_blocks / 2, m.n_blocks);
	k->assemble(&scales, 0, 1);
	k->assemble(&a, 0, m.n_blocks / 2);
	cr_assert_eq(m.codes[m.n], 0x5a, "%s: written behind its end", k->name);
	for (unsigned i = 0; i < m.n_blocks; i++)
		cr_assert_eq(crc[i], crc32c_add(0, m.codes + m.blocks[i].first, m.blocks[i].n));
	cr_assert_eq(crc_of_scales, crc32c_add(0, m.scale, m.n_scales * sizeof(float)));
}

/* ------------------------------------------------------------------------ conversions */

Test(kernels_e4m3, every_code_has_its_value_and_comes_back)
{
	for (unsigned code = 0; code < 256; code++) {
		double value = value_of(code & 0x7f);
		float x = e4m3_to_f32((uint8_t)code);

		if ((code & 0x7f) == NAN_CODE)
			cr_assert(isnan(x));
		else
			cr_assert(x == (code & 0x80 ? -value : value), "%02x: %g", code, (double)x);
		cr_assert_eq(signbit(x) != 0, code >> 7);
		cr_assert_eq(e4m3_from_f32(x), code);
	}
}

/* Each code, what lies in the middle of two, and its neighbours in fp32; more than fits. */
static uint32_t list_of_edges(float *to)
{
	static const float rest[] = { 448.5f,   463.9f,   464,      480,       1e9f,
				      INFINITY, 0x1p-10f, 0x1p-11f, 0x1p-126f, 0x1p-149f };
	uint32_t n = 0;

	for (unsigned code = 0; code + 1 < NAN_CODE; code++) {
		float a = (float)value_of(code), b = (float)value_of(code + 1),
		      middle = (a + b) / 2;
		const float all[] = { a,      nextafterf(a, b),      nextafterf(middle, a),
				      middle, nextafterf(middle, b), nextafterf(b, a),
				      b };

		memcpy(to + n, all, sizeof(all));
		n += ARRAY_SIZE(all);
	}
	memcpy(to + n, rest, sizeof(rest));
	n += ARRAY_SIZE(rest);
	to[n++] = NAN;
	for (uint32_t i = 0; i < n; i++)
		to[n + i] = -to[i];
	return 2 * n;
}

Test(kernels_e4m3, rounds_to_the_nearest_and_to_even)
{
	uint32_t n = list_of_edges(m.x);

	begin(n, 1000);
	set_tiles(1, n, 1, n);
	cr_assert_eq(code_of((float)(value_of(2) + value_of(3)) / 2), 2, "ties are even");
	for (uint32_t i = 0; i < n; i++)
		cr_assert_eq(e4m3_from_f32(m.x[i]), code_of(m.x[i]), "%a", (double)m.x[i]);
	for (size_t v = 0; v < ARRAY_SIZE(variants); v++) {
		const struct kernels *k = kernels_named(variants[v]);
		struct k_assemble a = { .tensors = m.tensors, .blocks = m.blocks };

		if (!k)
			continue;
		m.amax[0] = f32_bits(E4M3_MAX); /* a scale of 1 */
		k->assemble(&a, 0, m.n_blocks);
		for (uint32_t i = 0; i < n; i++)
			cr_assert_eq(m.codes[i], code_of(m.x[i]), "%s: %a gives %02x, not %02x",
				     k->name, (double)m.x[i], m.codes[i], code_of(m.x[i]));
	}
}

/* ------------------------------------------------------------------------------ tiles */

static uint32_t tile_of(uint64_t e)
{
	const struct k_assemble_scales *s = &m.scales;
	uint64_t matrix = e / (s->rows * s->columns), in = e % (s->rows * s->columns);
	uint64_t down = (s->rows + s->tile_rows - 1) / s->tile_rows;
	uint64_t across = (s->columns + s->tile_columns - 1) / s->tile_columns;

	return (uint32_t)(matrix * down * across + in / s->columns / s->tile_rows * across +
			  in % s->columns / s->tile_columns);
}

/* What the elements @x, in the order of the tensor, become. */
static void expect(const struct kernels *k, const float *x, const char *what)
{
	static float max[SCALES];

	memset(max, 0, sizeof(max));
	for (uint32_t i = 0; i < m.n; i++)
		max[tile_of(i)] = fmaxf(max[tile_of(i)], fabsf(x[i]));
	for (uint32_t s = 0; s < m.n_scales; s++)
		max[s] = max[s] == 0 ? 1 : max[s] / 448;
	cr_assert_arr_eq(m.scale, max, m.n_scales * sizeof(float), "%s: %s", k->name, what);
	for (uint32_t i = 0; i < m.n; i++)
		cr_assert_eq(m.codes[i], code_of(x[i] / max[tile_of(i)]), "%s: %s: element %u",
			     k->name, what, i);
}

static void fill(float *x, uint32_t n, uint64_t *state)
{
	for (uint32_t i = 0; i < n; i++)
		x[i] = ldexpf((float)random_below(state, 1u << 24) - (1 << 23),
			      (int)random_below(state, 20) - 40);
}

/* Matrices, tiles that are not whole, and blocks that end anywhere, all by lot. */
Test(kernels_e4m3, tiles_drawn_by_lot)
{
	uint64_t state = 3;

	for (unsigned i = 0; i < 120; i++) {
		uint64_t rows = 1 + random_below(&state, 60),
			 columns = 1 + random_below(&state, 300);
		uint64_t matrices = 1 + random_below(&state, 3), n = rows * columns * matrices;
		char what[96];

		begin(n, (uint32_t)(n / (1 + random_below(&state, BLOCKS - 2)) + 1));
		set_tiles(rows, columns, 1 + random_below(&state, 70),
			  i % 3 ? 7 + random_below(&state, 140) : columns + i);
		fill(m.x, m.n, &state);
		if (i % 4 == 0)
			memset(m.x, 0, columns * sizeof(float));
		snprintf(what, sizeof(what), "%ux%ux%u in %ux%u", (unsigned)matrices,
			 (unsigned)rows, (unsigned)columns, (unsigned)m.scales.tile_rows,
			 (unsigned)m.scales.tile_columns);
		for (size_t v = 0; v < ARRAY_SIZE(variants); v++) {
			const struct kernels *k = kernels_named(variants[v]);

			if (!k)
				continue;
			make(k);
			expect(k, m.x, what);
		}
	}
}

/* Two sources of different types, one of them transposed, rows of padding below, tiles over all three. */
Test(kernels_e4m3, joined_transposed_and_padded)
{
	enum { COLUMNS = 150, UPPER = 70, LOWER = 90, ROWS = 192 };
	static uint16_t half[LOWER * COLUMNS];
	static float want[ROWS * COLUMNS];
	uint64_t state = 4;

	fill(m.x, UPPER * COLUMNS, &state);
	begin(ROWS * COLUMNS, 9999);
	set_tiles(ROWS, COLUMNS, 128, 128);
	for (uint32_t i = 0; i < UPPER * COLUMNS; i++)
		want[i % UPPER * COLUMNS + i / UPPER] = m.x[i];
	for (uint32_t i = 0; i < LOWER * COLUMNS; i++) {
		half[i] = bf16_from_f32((float)random_below(&state, 1000) - 500);
		want[UPPER * COLUMNS + i] = bf16_to_f32(half[i]);
	}
	m.tensors[0].gaps = true;
	m.tensors[0].n_boxes = 2;
	m.boxes[0] =
		(struct k_assemble_box){ m.x, DTYPE_FP32,    { 1, UPPER, COLUMNS }, { 0, 1, UPPER },
					 0,   { 0, COLUMNS } };
	m.boxes[1] =
		(struct k_assemble_box){ half,        DTYPE_BF16,      { 1, 1, LOWER * COLUMNS },
					 { 0, 0, 1 }, UPPER * COLUMNS, { 0, 0 } };
	for (size_t v = 0; v < ARRAY_SIZE(variants); v++) {
		const struct kernels *k = kernels_named(variants[v]);

		if (!k)
			continue;
		make(k);
		expect(k, want, "joined");
	}
}

/* A NaN makes its tile NaN, an infinity makes its tile 0 but for itself; other tiles know nothing of it. What is
 * too small for a scale is 0. */
Test(kernels_e4m3, tiles_with_values_that_are_none)
{
	static const float specials[] = { NAN, -NAN, INFINITY, -INFINITY, 0x1p-149f, 0x1p-141f };
	enum { TILE = 100 };

	begin(7 * TILE, 333);
	set_tiles(1, 7 * TILE, 1, TILE);
	for (uint32_t i = 0; i < m.n; i++)
		m.x[i] = i / TILE < 4 || i / TILE == 6 ? -448 : 0;
	for (uint32_t s = 0; s < ARRAY_SIZE(specials); s++)
		m.x[s * TILE + 50] = specials[s];
	for (size_t v = 0; v < ARRAY_SIZE(variants); v++) {
		const struct kernels *k = kernels_named(variants[v]);

		if (!k)
			continue;
		make(k);
		cr_assert(isnan(m.scale[0]) && isnan(m.scale[1]), "%s", k->name);
		cr_assert(isinf(m.scale[2]) && isinf(m.scale[3]), "%s", k->name);
		cr_assert_eq(m.scale[4], 1, "%s: a scale of 0 is none", k->name);
		cr_assert_eq(m.scale[5], 0x1p-141f / 448, "%s", k->name);
		cr_assert_eq(m.scale[6], 1, "%s", k->name);
		for (uint32_t i = 0; i < 2 * TILE; i++)
			cr_assert_eq(m.codes[i] & 0x7f, NAN_CODE, "%s: %u", k->name, i);
		for (uint32_t i = 2 * TILE; i < 4 * TILE; i++)
			cr_assert_eq(m.codes[i] & 0x7f, i % TILE == 50 ? NAN_CODE : 0);
		cr_assert_eq(m.codes[2 * TILE + 50], NAN_CODE);
		cr_assert_eq(m.codes[3 * TILE + 50], 0x80 | NAN_CODE);
		for (uint32_t i = 4 * TILE; i < 5 * TILE; i++)
			cr_assert_eq(m.codes[i], 0);
		for (uint32_t i = 5 * TILE; i < 6 * TILE; i++)
			cr_assert_eq(m.codes[i] != 0, i % TILE == 50);
		for (uint32_t i = 6 * TILE; i < 7 * TILE; i++)
			cr_assert_eq(m.codes[i], 0xfe);
	}
}
