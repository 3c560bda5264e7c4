/* Boxes that are cut where pieces of their source end: each element is in one part, with its place. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "publish/cut.h"
#include "random_case.h"

TestSuite(cut, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

static uint64_t state = 20;

enum { CASES = 3000, MOST = 9, PLACES = 4096 };

/* Of each place of the destination, the source's element; UINT64_MAX: none. */
static void fill(const struct view_box *x, uint64_t *places)
{
	for (uint64_t i = 0; i < x->n[0]; i++)
		for (uint64_t j = 0; j < x->n[1]; j++)
			for (uint64_t k = 0; k < x->n[2]; k++) {
				uint64_t at =
					x->at + i * x->dst_stride[0] + j * x->dst_stride[1] + k;

				cr_assert_lt(at, PLACES);
				cr_assert_eq(places[at], UINT64_MAX, "place %llu is filled twice",
					     (unsigned long long)at);
				places[at] = x->from + i * x->src_stride[0] + j * x->src_stride[1] +
					     k * x->src_stride[2];
			}
}

/* A part of a tensor of three dimensions, which are in any order in the source. */
static struct view_box random_box(uint64_t *elements)
{
	static const unsigned orders[6][3] = { { 0, 1, 2 }, { 0, 2, 1 }, { 1, 0, 2 },
					       { 1, 2, 0 }, { 2, 0, 1 }, { 2, 1, 0 } };
	const unsigned *order = orders[random_below(&state, 6)];
	struct view_box x = { .at = random_below(&state, 5) };
	uint64_t size[3], stride = 1;

	for (unsigned d = 0; d < 3; d++)
		size[d] = 1 + random_below(&state, MOST);
	for (unsigned d = 3; d-- > 0;) {
		x.src_stride[order[d]] = stride;
		stride *= size[order[d]];
	}
	for (unsigned d = 0; d < 3; d++) {
		x.n[d] = 1 + random_below(&state, (uint32_t)size[d]);
		x.from += random_below(&state, (uint32_t)(size[d] - x.n[d] + 1)) * x.src_stride[d];
	}
	x.dst_stride[1] = x.n[2] + random_below(&state, 3);
	x.dst_stride[0] = x.n[1] * x.dst_stride[1] + random_below(&state, 3);
	*elements = stride;
	return x;
}

Test(cut, each_element_is_in_one_part)
{
	static uint64_t whole[PLACES], parts[PLACES];

	for (unsigned n = 0; n < CASES; n++) {
		uint64_t elements, first = 0;
		struct view_box x = random_box(&elements);
		struct cut_boxes cut = CUT_BOXES_NULL;

		memset(whole, 0xff, sizeof(whole));
		memset(parts, 0xff, sizeof(parts));
		fill(&x, whole);
		while (first < elements) {
			uint64_t piece = 1 + random_below(&state, (uint32_t)(elements - first));
			uint32_t before = cut.n;

			cr_assert_eq(cut_append(&cut, &x, first, piece), 0);
			cr_assert_leq(cut.n - before, 7);
			for (uint32_t i = before; i < cut.n; i++) {
				const struct view_box *b = &cut.all[i];
				uint64_t last = b->from;

				for (unsigned d = 0; d < 3; d++)
					last += (b->n[d] - 1) * b->src_stride[d];
				cr_assert(b->from >= first && last < first + piece);
			}
			first += piece;
		}
		for (uint32_t i = 0; i < cut.n; i++)
			fill(&cut.all[i], parts);
		cr_assert_arr_eq(whole, parts, sizeof(whole));
		cut_deinit(&cut);
	}
}
