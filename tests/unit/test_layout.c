/* Layout: shards, padding, and the divide factors, against numbers worked out by hand
 * or taken from the projects whose rules these are. */
#include <criterion/criterion.h>
#include <stddef.h>

#include "core/check.h"
#include "fdcheck.h"
#include "unit/layout.h"

TestSuite(layout, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

Test(layout, divide_factors_are_fairscales)
{
	static const struct {
		uint32_t ranks;
		double pre, post;
	} golden[] = {
		{ 1, 1, 1 },     { 2, 2, 1 },     { 3, 2, 1.5 },    { 4, 2, 2 },
		{ 5, 2, 2.5 },   { 6, 4, 1.5 },   { 7, 2, 3.5 },    { 8, 4, 2 },
		{ 10, 4, 2.5 },  { 12, 4, 3 },    { 16, 4, 4 },     { 20, 8, 2.5 },
		{ 24, 8, 3 },    { 32, 8, 4 },    { 48, 8, 6 },     { 64, 8, 8 },
		{ 72, 16, 4.5 }, { 96, 16, 6 },   { 100, 8, 12.5 }, { 128, 16, 8 },
		{ 256, 16, 16 }, { 512, 32, 16 }, { 1024, 32, 32 }, { 4096, 64, 64 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(golden); i++) {
		double pre = 0, post = 0;

		layout_divide_factors(golden[i].ranks, &pre, &post);
		cr_expect_eq(pre, golden[i].pre, "W=%u: pre is %g", golden[i].ranks, pre);
		cr_expect_eq(post, golden[i].post, "W=%u: post is %g", golden[i].ranks, post);
	}
}

Test(layout, five_elements_on_four_ranks_are_2_2_1_0)
{
	static const uint64_t owned[] = { 2, 2, 1, 0 };
	struct layout l;

	cr_assert(layout_flat(5, 4, 1, &l));
	cr_expect_eq(l.elements, 5);
	cr_expect_eq(l.shard_elements, 2);
	cr_expect_eq(l.padded, 8);
	cr_expect_eq(l.ranks, 4);
	for (uint32_t r = 0; r < 4; r++) {
		cr_expect_eq(layout_begin(&l, r), 2 * r);
		cr_expect_eq(layout_owned(&l, r), owned[r], "rank %u", r);
	}
}

/* fairscale: torch.chunk of the flat parameter, the last one padded (multiple 1). XLA:
 * every shard rounded up to 128 elements. */
Test(layout, shards_of_fairscale_and_xla)
{
	static const struct {
		uint64_t n;
		uint32_t ranks, multiple;
		uint64_t shard, last; /* owned by the last rank */
	} cases[] = {
		{ 10, 4, 1, 3, 1 },
		{ 12, 4, 1, 3, 3 },
		{ 1, 4, 1, 1, 0 },
		{ 9, 4, 1, 3, 0 },
		{ 1000003, 8, 1, 125001, 124996 },
		{ 1000, 4, 128, 256, 232 },
		{ 5, 4, 128, 128, 0 },
		{ 512, 4, 128, 128, 128 },
		{ 513, 4, 128, 256, 0 },
		{ 120, 1, 128, 128, 120 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct layout l;

		cr_assert(layout_flat(cases[i].n, cases[i].ranks, cases[i].multiple, &l));
		cr_expect_eq(l.shard_elements, cases[i].shard, "case %zu", i);
		cr_expect_eq(l.padded, cases[i].shard * cases[i].ranks, "case %zu", i);
		cr_expect_eq(layout_owned(&l, cases[i].ranks - 1), cases[i].last, "case %zu", i);
	}
}

/* Whatever the numbers: every element belongs to exactly one rank, shards are equal,
 * and the padding is less than one shard multiple a rank. */
Test(layout, every_element_has_one_owner)
{
	for (uint64_t n = 1; n < 200; n += 7)
		for (uint32_t ranks = 1; ranks < 20; ranks++)
			for (uint32_t multiple = 1; multiple < 40; multiple += 3) {
				struct layout l;
				uint64_t sum = 0;

				cr_assert(layout_flat(n, ranks, multiple, &l));
				for (uint32_t r = 0; r < ranks; r++) {
					uint64_t owned = layout_owned(&l, r);

					cr_assert(!owned || layout_begin(&l, r) == sum);
					sum += owned;
				}
				cr_assert_eq(sum, n);
				cr_assert_eq(l.shard_elements % multiple, 0);
				cr_assert_lt(l.padded - n, (uint64_t)multiple * ranks + ranks);
			}
}

Test(layout, what_does_not_fit_is_refused)
{
	struct layout l = { .elements = 7 };

	cr_expect_not(layout_flat(0, 4, 1, &l));
	cr_expect_not(layout_flat(4, 0, 1, &l));
	cr_expect_not(layout_flat(4, 4, 0, &l));
	cr_expect_not(layout_flat(LAYOUT_MAX_ELEMENTS + 1, 1, 1, &l));
	cr_expect_not(layout_flat(UINT64_MAX, 4, 1, &l));
	cr_expect_not(layout_flat(LAYOUT_MAX_ELEMENTS, 3, 1, &l)); /* padded over the limit */
	cr_expect_not(layout_flat(1, UINT32_MAX, UINT32_MAX, &l));
	cr_expect_eq(l.elements, 7, "it was written to");
	cr_expect(layout_flat(LAYOUT_MAX_ELEMENTS, 4, 1, &l));
	cr_expect_eq(l.padded, LAYOUT_MAX_ELEMENTS);
}

Test(layout, products_of_shapes)
{
	static const uint64_t ok[] = { 3, 4, 5 }, zero[] = { 3, 0 };
	static const uint64_t large[] = { UINT64_C(1) << 24, UINT64_C(1) << 24 };
	static const uint64_t over[] = { UINT64_C(1) << 40, UINT64_C(1) << 40, 1 };
	uint64_t n = 0;

	cr_expect(layout_numel(ok, 3, &n));
	cr_expect_eq(n, 60);
	cr_expect(layout_numel(NULL, 0, &n), "a scalar has one element");
	cr_expect_eq(n, 1);
	cr_expect(layout_numel(large, 2, &n));
	cr_expect_eq(n, LAYOUT_MAX_ELEMENTS);
	cr_expect_not(layout_numel(zero, 2, &n));
	cr_expect_not(layout_numel(over, 3, &n));
	cr_expect_not(layout_numel((const uint64_t[]){ UINT64_MAX }, 1, &n));
	cr_expect_eq(n, LAYOUT_MAX_ELEMENTS, "it was written to");
}

Test(layout, strides_without_gaps)
{
	static const uint64_t shape[] = { 2, 3, 4, 5 };
	static const struct {
		uint64_t strides[4];
		bool dense, plain;
	} cases[] = {
		{ { 60, 20, 5, 1 }, true, true },
		{ { 60, 1, 15, 3 }, true, false }, /* channels_last */
		{ { 1, 2, 6, 24 }, true, false },
		{ { 60, 20, 5, 2 }, false, false }, /* a gap */
		{ { 120, 20, 5, 1 }, false, false },
		{ { 60, 20, 5, 5 }, false, false }, /* two in one place */
		{ { 60, 20, 5, 0 }, false, false },
	};
	bool plain;

	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
		cr_expect_eq(layout_dense(shape, cases[i].strides, 4, &plain), cases[i].dense,
			     "case %u", i);
		cr_expect(!cases[i].dense || plain == cases[i].plain, "case %u", i);
	}
	/* of one element: whatever they say */
	cr_expect(layout_dense((const uint64_t[]){ 1, 7 }, (const uint64_t[]){ 99, 1 }, 2, &plain));
	cr_expect(plain);
	cr_expect(layout_dense(NULL, NULL, 0, &plain) && plain);
}

/* On @devices devices, each rank on that of the list; replicas of @shard ranks. */
struct sets_case {
	uint16_t device_of[8];
	uint32_t ranks, shard;
	unsigned devices;
	bool sets;
	unsigned spread;
};

Test(layout, replicas_have_sets_of_devices_where_they_do_not_mix)
{
	static const struct sets_case cases[] = {
		{ { 0, 1, 2, 3 }, 4, 2, 4, true, 2 },
		{ { 0, 0, 1, 1, 2, 2, 3, 3 }, 8, 4, 4, true, 2 },
		{ { 0, 1, 1, 2, 2, 3 }, 6, 3, 4, true, 2 }, /* of three ranks on two devices */
		{ { 0, 1, 2, 3, 4, 5 }, 6, 2, 6, true, 2 },
		{ { 0, 1, 2, 3, 4, 5 }, 6, 3, 6, true, 3 },
		{ { 0, 1, 2, 3 }, 4, 4, 4, false, 4 },             /* one replica */
		{ { 0, 1, 2, 3 }, 4, 1, 4, false, 1 },             /* whole copies */
		{ { 0, 0, 1, 1 }, 4, 2, 2, false, 1 },             /* the same */
		{ { 0, 1, 0, 1 }, 4, 2, 2, false, 1 },             /* the same */
		{ { 0, 0, 1, 2 }, 4, 2, 3, false, 3 },             /* three devices for two */
		{ { 0, 1, 2, 3, 0, 1, 2, 3 }, 8, 4, 4, false, 4 }, /* each has ranks on all */
		{ { 0, 0, 0, 1, 2, 3, 3, 3 }, 8, 4, 4, true, 2 },
		{ { 0, 0, 1, 1, 1, 2, 3, 3 }, 8, 4, 4, false, 4 }, /* both have some on one */
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		const struct sets_case *c = &cases[i];
		struct layout l = { .ranks = c->shard, .replicas = c->ranks / c->shard };

		l.sets = layout_has_sets(c->device_of, c->ranks, c->shard, c->devices);
		cr_expect_eq(l.sets, c->sets, "case %zu", i);
		cr_expect_eq(layout_spread(&l, c->devices), c->spread, "case %zu", i);
	}
}
