/*
 * k_assemble: all variants against an expectation that is computed element by element here, from the meaning
 * of a box, and by their definition in kernels/ref.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "crc32c.h"
#include "fdcheck.h"
#include "kernels.h"
#include "random_case.h"

TestSuite(kernels_assemble, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

enum { SOURCES = 3, SOURCE_ELEMENTS = 300000, ELEMENTS = 400000, BLOCKS = 64 };

static const char *const variants[] = { "ref", "portable", "avx2", "avx512" };

static char sources[SOURCES][SOURCE_ELEMENTS * sizeof(float)] __attribute__((aligned(64)));
static char out[ELEMENTS * sizeof(float) + 64] __attribute__((aligned(64)));
static char want[ELEMENTS * sizeof(float)] __attribute__((aligned(64)));

/* Ordinary values of each type, and some that are not. */
static void fill_sources(void)
{
	uint64_t state = 1;

	for (unsigned s = 0; s < SOURCES; s++)
		for (unsigned i = 0; i < SOURCE_ELEMENTS; i++) {
			uint32_t bits = random_below(&state, UINT32_MAX);

			memcpy(sources[s] + i * sizeof(float), &bits, sizeof(bits));
		}
}

/* A tensor of two dimensions, rows x columns, whose parts come from boxes; and the blocks of it. */
struct view {
	struct k_assemble_box boxes[SOURCES];
	struct k_assemble_tensor t;
	struct k_assemble_block blocks[BLOCKS];
	unsigned n_blocks;
	uint64_t elements;
};

static void cut(struct view *v, uint64_t elements, uint32_t each)
{
	v->elements = elements;
	v->n_blocks = 0;
	for (uint64_t at = 0; at < elements; at += each) {
		cr_assert_lt(v->n_blocks, BLOCKS);
		v->blocks[v->n_blocks++] = (struct k_assemble_block){
			0, (uint32_t)(elements - at < each ? elements - at : each), at
		};
	}
}

/* The bits of one element, converted by the definition of a cast. */
static void put(const struct k_assemble_tensor *t, uint64_t to, const struct k_assemble_box *x,
		uint64_t from)
{
	struct k_cast a = { .dst = want + to * dtype_size(t->dst_dtype),
			    .src = (const char *)x->src + from * dtype_size(x->src_dtype),
			    .dst_dtype = t->dst_dtype,
			    .src_dtype = x->src_dtype };

	kernels_ref()->cast(&a, 0, 1);
}

static void expect(const struct view *v)
{
	memset(want, 0, sizeof(want));
	for (unsigned b = 0; b < v->t.n_boxes; b++) {
		const struct k_assemble_box *x = &v->boxes[b];
		uint64_t n = x->n[0] * x->n[1] * x->n[2];

		for (uint64_t e = 0; e < n; e++) {
			uint64_t k = e % x->n[2], j = e / x->n[2] % x->n[1];
			uint64_t i = e / x->n[2] / x->n[1];

			put(&v->t, x->at + i * x->dst_stride[0] + j * x->dst_stride[1] + k, x,
			    i * x->src_stride[0] + j * x->src_stride[1] + k * x->src_stride[2]);
		}
	}
}

/* NaN compares by being one. */
static bool same(enum dtype t, const char *a, const char *b, uint64_t elements)
{
	if (!memcmp(a, b, elements * dtype_size(t)))
		return true;
	for (uint64_t i = 0; i < elements; i++) {
		float x, y;
		struct k_cast one = { &x, a + i * dtype_size(t), DTYPE_FP32, t, false };
		struct k_cast two = { &y, b + i * dtype_size(t), DTYPE_FP32, t, false };

		kernels_ref()->cast(&one, 0, 1);
		kernels_ref()->cast(&two, 0, 1);
		if (memcmp(&x, &y, sizeof(x)) != 0 && (x == x || y == y))
			return false;
	}
	return true;
}

/* @shift: bytes that the tensor begins behind a vector. */
static void check_variant(const struct kernels *k, struct view *v, unsigned shift, const char *what)
{
	uint64_t bytes = v->elements * dtype_size(v->t.dst_dtype);
	uint32_t crc[BLOCKS];
	struct k_assemble a = { .tensors = &v->t, .blocks = v->blocks, .crc = crc };

	memset(out, 0x5a, sizeof(out));
	v->t.dst = out + shift;
	/* in two parts, the later one first */
	k->assemble(&a, v->n_blocks / 2, v->n_blocks);
	k->assemble(&a, 0, v->n_blocks / 2);
	cr_assert(same(v->t.dst_dtype, out + shift, want, v->elements), "%s: %s", k->name, what);
	cr_assert_eq(out[shift + bytes], 0x5a, "%s: %s: written behind its end", k->name, what);
	for (unsigned i = 0; i < v->n_blocks; i++) {
		size_t size = dtype_size(v->t.dst_dtype);

		cr_assert_eq(crc[i],
			     crc32c_add(0, out + shift + v->blocks[i].first * size,
					v->blocks[i].n * size),
			     "%s: %s: checksum of block %u", k->name, what, i);
	}
	a.crc = NULL;
	memset(out, 0x5a, sizeof(out));
	k->assemble(&a, 0, v->n_blocks);
	cr_assert(same(v->t.dst_dtype, out + shift, want, v->elements));
}

static void check(struct view *v, const char *what)
{
	v->t.boxes = v->boxes;
	expect(v);
	for (size_t i = 0; i < ARRAY_SIZE(variants); i++) {
		const struct kernels *k = kernels_named(variants[i]);

		if (!k)
			continue;
		check_variant(k, v, 0, what);
		check_variant(k, v, 4, what);
	}
}

static const enum dtype types[] = { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };

/* Each type into each: a tensor as it is, in blocks whose ends are in its rows. */
Test(kernels_assemble, casts_as_a_cast_does)
{
	fill_sources();
	for (unsigned i = 0; i < 9; i++) {
		struct view v = { .t = { .dst_dtype = types[i / 3], .n_boxes = 1 } };

		v.boxes[0] = (struct k_assemble_box){
			sources[0], types[i % 3], { 1, 1, 100003 }, { 0, 0, 1 }, 0, { 0, 0 }
		};
		cut(&v, 100003, 32768);
		check(&v, "whole");
	}
}

/* q, k and v one below the other, and side by side: rows of one come between those of the others. */
Test(kernels_assemble, joins_rows_and_columns)
{
	static const uint64_t rows[SOURCES] = { 96, 32, 33 };
	const uint64_t columns = 517;

	fill_sources();
	for (unsigned side = 0; side < 2; side++) {
		struct view v = { .t = { .dst_dtype = DTYPE_BF16, .n_boxes = SOURCES } };
		uint64_t all = 0, at = 0;

		for (unsigned i = 0; i < SOURCES; i++)
			all += rows[i];
		for (unsigned i = 0; i < SOURCES; i++) {
			/* side: the sources are columns x rows[i] */
			uint64_t n = side ? columns : rows[i], wide = side ? rows[i] : columns;

			v.boxes[i] = (struct k_assemble_box){ sources[i],
							      DTYPE_FP32,
							      { 1, n, wide },
							      { 0, wide, 1 },
							      side ? at : at * columns,
							      { 0, side ? all : columns } };
			at += rows[i];
		}
		cut(&v, all * columns, 3001);
		check(&v, side ? "side by side" : "one below the other");
	}
}

/* A slice by columns, transposed, and padded: what no box covers is 0. */
Test(kernels_assemble, transposes_slices_and_pads)
{
	const uint64_t rows = 301, columns = 257; /* of the source */

	fill_sources();
	for (unsigned i = 0; i < 9; i++) {
		struct view v = { .t = { .dst_dtype = types[i / 3], .n_boxes = 1, .gaps = true } };
		/* columns [64, 203) of it become rows, each padded to 384 */
		v.boxes[0] = (struct k_assemble_box){ sources[1] + 64 * dtype_size(types[i % 3]),
						      types[i % 3],
						      { 1, 139, rows },
						      { 0, 1, columns },
						      5 * 384,
						      { 0, 384 } };
		cut(&v, 150 * 384, 1999);
		check(&v, "transposed");
		cut(&v, 150 * 384, 32768); /* many rows in a block */
		check(&v, "transposed");
	}
}

/* Three loops: the middle dimension of three is cut, and joined with another one's. */
Test(kernels_assemble, cuts_a_middle_dimension)
{
	struct view v = { .t = { .dst_dtype = DTYPE_FP16, .n_boxes = 2 } };
	const uint64_t a = 7, b = 20,
		       c = 31; /* of both; [*, 3:11, *] of one, [*, 0:4, *] of the other */

	fill_sources();
	v.boxes[0] = (struct k_assemble_box){ sources[0] + 3 * c * sizeof(float),
					      DTYPE_FP32,
					      { a, 8, c },
					      { b * c, c, 1 },
					      0,
					      { 12 * c, c } };
	v.boxes[1] = (struct k_assemble_box){ sources[2],      DTYPE_FP32, { a, 4, c },
					      { b * c, c, 1 }, 8 * c,      { 12 * c, c } };
	cut(&v, a * 12 * c, 101);
	check(&v, "middle");
}

/* 0, infinities, subnormal numbers and NaN of every type, where a drawn source begins. */
static void put_special(char *at, enum dtype type)
{
	static const uint32_t words[] = {
		0,          0x80000000, 0x7f800000, 0xff800000, 1,
		0x007fffff, 0x7f800001, 0x7fc00000, 0x477fefff, 0x33000001
	};
	static const uint16_t halves[] = { 0,      0x8000, 0x7c00, 0xfc00, 1,
					   0x03ff, 0x7c01, 0x7f80, 0x7f81, 0x7fff };

	memcpy(at, type == DTYPE_FP32 ? (const void *)words : halves,
	       ARRAY_SIZE(words) * dtype_size(type));
}

/* A box drawn by lot: loops in any order in the source, gaps in the tensor, any beginning. */
static void draw(struct view *v, uint64_t *state)
{
	enum dtype from = types[random_below(state, 3)];
	struct k_assemble_box *x = &v->boxes[0];
	unsigned outer = random_below(state, 3), used = 0;
	uint64_t stride = 1;
	char *src =
		sources[random_below(state, SOURCES)] + random_below(state, 40) * dtype_size(from);

	*v = (struct view){
		.t = { .dst_dtype = types[random_below(state, 3)], .n_boxes = 1, .gaps = true }
	};
	*x = (struct k_assemble_box){ .src = src, .src_dtype = from };
	put_special(src, from);
	for (unsigned d = 0; d < 3; d++)
		x->n[d] = 1 + (random_below(state, 4) ? random_below(state, d == 2 ? 150 : 12) : 0);
	/* from the fastest loop of the source on */
	for (unsigned i = 0; i < 3; i++) {
		unsigned d = i == 0 ? 2 - outer : (2 - outer + i) % 3;

		used |= 1u << d;
		x->src_stride[d] = stride;
		stride = stride * x->n[d] + random_below(state, 3);
	}
	CHECK(used == 7);
	x->dst_stride[1] = x->n[2] + random_below(state, 5);
	x->dst_stride[0] = x->n[1] * x->dst_stride[1] + random_below(state, 70);
	x->at = random_below(state, 90);
	v->elements = x->at + x->n[0] * x->dst_stride[0] + random_below(state, 40);
}

/* One element and more, with tails of every length, in blocks that end anywhere. */
Test(kernels_assemble, boxes_drawn_by_lot)
{
	uint64_t state = 7;

	fill_sources();
	for (unsigned i = 0; i < 150; i++) {
		struct view v;
		uint32_t each;
		char what[32];

		draw(&v, &state);
		each = 1 + random_below(&state, v.elements < 32768 ? (uint32_t)v.elements : 32768);
		if (v.elements / each >= BLOCKS - 1)
			each = (uint32_t)(v.elements / (BLOCKS - 1)) + 1;
		cut(&v, v.elements, each);
		snprintf(what, sizeof(what), "case %u", i);
		check(&v, what);
	}
}

/* ------------------------------------------------------------------------------- deltas */

enum { DELTA_ELEMENTS = 200003 };

/* What the changes of @b make of @to, which is the base's block of @n elements. */
static void apply(const struct k_delta_block *b, const char *out_of, uint32_t n, size_t size,
		  char *to)
{
	const char *at = out_of + b->at;
	uint64_t values = b->dense ? 0 : k_delta_padded(b->changed * sizeof(uint16_t));
	uint32_t count = b->dense ? n : b->changed, before = 0;

	cr_assert_eq(crc32c_add(0, at, k_delta_bytes(b->changed, n, size)), b->crc);
	for (uint32_t i = 0; i < count; i++) {
		uint16_t position = (uint16_t)i;

		if (!b->dense) {
			memcpy(&position, at + i * sizeof(position), sizeof(position));
			cr_assert(i == 0 || position > before, "positions ascend");
			cr_assert_neq(memcmp(to + position * size, at + values + i * size, size),
				      0);
			before = position;
		}
		cr_assert_lt(position, n);
		memcpy(to + position * size, at + values + i * size, size);
	}
}

static void check_delta(const struct kernels *k, enum dtype type, unsigned percent)
{
	static char base[DELTA_ELEMENTS * sizeof(float)],
		changes[2 * DELTA_ELEMENTS * sizeof(float)] __attribute__((aligned(8)));
	struct k_assemble_box box = { sources[0],  type, { 1, 1, DELTA_ELEMENTS },
				      { 0, 0, 1 }, 0,    { 0, 0 } };
	struct view v = { .t = { .dst = out, .dst_dtype = type, .boxes = &box, .n_boxes = 1 } };
	size_t size = dtype_size(type);
	struct k_delta_block blocks[BLOCKS];
	uint64_t used = 0, state = percent + 1, changed = 0, counted = 0;
	struct k_delta delta = { base, out, changes, sizeof(changes), &used, blocks };
	struct k_assemble a = { .tensors = &v.t, .blocks = v.blocks, .delta = &delta };

	cr_assert(size);
	cut(&v, DELTA_ELEMENTS, (uint32_t)(KERNEL_ASSEMBLE_BYTES / size) - 3);
	memcpy(base, sources[0], DELTA_ELEMENTS * size);
	for (uint32_t i = 0; i < DELTA_ELEMENTS; i++)
		if (random_below(&state, 100) < percent) {
			base[i * size + i % size] ^= 1 << i % 8;
			changed++;
		}
	memset(changes, 0x5a, sizeof(changes));
	/* casts of a type to itself keep every bit but those of some NaN: compare with what was made */
	k->assemble(&a, 0, v.n_blocks);
	for (unsigned i = 0; i < v.n_blocks; i++) {
		apply(&blocks[i], changes, v.blocks[i].n, size, base + v.blocks[i].first * size);
		counted += blocks[i].changed;
	}
	cr_assert_arr_eq(base, out, DELTA_ELEMENTS * size);
	cr_assert_eq(counted, changed, "%s: %llu of %llu", k->name, (unsigned long long)counted,
		     (unsigned long long)changed);
	cr_assert_eq((uint8_t)changes[used], 0x5a);
	if (percent == 2)
		cr_assert_leq(used, DELTA_ELEMENTS * size * 5 / 100);
	/* without room for all: what fits is right, the rest is said to be missing */
	memcpy(base, sources[1], DELTA_ELEMENTS * size);
	memset(changes, 0x5a, sizeof(changes));
	used = 0;
	delta.room = 100000;
	k->assemble(&a, 0, v.n_blocks);
	cr_assert_eq((uint8_t)changes[delta.room], 0x5a);
	cr_assert_gt(used, delta.room);
	cr_assert_eq(blocks[v.n_blocks - 1].at, KERNEL_DELTA_NONE);
}

/* Finite values, so that a cast to their own type keeps their bits. */
static void fill_finite(void)
{
	uint64_t state = 1;

	for (unsigned s = 0; s < SOURCES; s++)
		for (unsigned i = 0; i < SOURCE_ELEMENTS; i++) {
			uint32_t bits = random_below(&state, UINT32_MAX) & 0x3fff3fff;

			memcpy(sources[s] + i * sizeof(float), &bits, sizeof(bits));
		}
}

Test(kernels_assemble, a_delta_has_what_differs)
{
	static const unsigned percents[] = { 0, 2, 40, 100 };

	fill_finite();
	for (size_t i = 0; i < ARRAY_SIZE(variants); i++) {
		const struct kernels *k = kernels_named(variants[i]);

		for (unsigned t = 0; k && t < 3; t++)
			for (unsigned c = 0; c < ARRAY_SIZE(percents); c++)
				check_delta(k, types[t], percents[c]);
	}
}
