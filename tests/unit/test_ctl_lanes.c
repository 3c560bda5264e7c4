/* Spans side by side: none hides another, and no lane more than it takes. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "core/check.h"
#include "ctl/lanes.h"
#include "fdcheck.h"

TestSuite(ctl_lanes, .timeout = 30, .init = fdcheck_begin, .fini = fdcheck_end);

static void expect(struct lane_span *spans, size_t n, const size_t *lanes, size_t used)
{
	size_t got;

	cr_assert_eq(lanes_lay(spans, n, &got), 0);
	cr_expect_eq(got, used, "%zu lanes, not %zu", got, used);
	for (size_t i = 0; i < n; i++)
		cr_expect_eq(spans[i].lane, lanes[i], "span %zu is in lane %zu", i, spans[i].lane);
}

Test(ctl_lanes, what_follows_shares_a_lane)
{
	struct lane_span spans[] = { { 0, 10, 9 }, { 10, 20, 9 }, { 25, 25, 9 }, { 25, 30, 9 } };

	expect(spans, ARRAY_SIZE(spans), (const size_t[]){ 0, 0, 0, 0 }, 1);
}

Test(ctl_lanes, what_overlaps_does_not)
{
	struct lane_span spans[] = { { 0, 100, 0 }, { 0, 10, 0 },  { 5, 6, 0 },
				     { 10, 20, 0 }, { 99, 99, 0 }, { 100, 101, 0 } };

	expect(spans, ARRAY_SIZE(spans), (const size_t[]){ 0, 1, 2, 1, 1, 0 }, 3);
}

Test(ctl_lanes, of_nothing_there_are_none)
{
	size_t used = 5;

	cr_assert_eq(lanes_lay(NULL, 0, &used), 0);
	cr_expect_eq(used, 0);
}

static int by_begin(const void *a, const void *b)
{
	const struct lane_span *x = a, *y = b;

	return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Most spans that are under way at one time: those lanes are needed in any case. */
static size_t most_at_once(const struct lane_span *spans, size_t n)
{
	size_t most = 0;

	for (size_t i = 0; i < n; i++) {
		size_t here = 0;

		for (size_t j = 0; j <= i; j++)
			here += spans[j].end > spans[i].begin;
		most = here > most ? here : most;
	}
	return most;
}

Test(ctl_lanes, random_spans_lie_apart_in_as_few_lanes_as_there_can_be)
{
	enum { N = 200, ROUNDS = 50 };
	struct lane_span spans[N];
	unsigned seed = 1;
	size_t used;

	for (unsigned round = 0; round < ROUNDS; round++) {
		for (size_t i = 0; i < N; i++) {
			spans[i].begin = (uint64_t)rand_r(&seed) % 1000;
			spans[i].end =
				spans[i].begin + 1 + (uint64_t)rand_r(&seed) % (1 + round * 4);
		}
		qsort(spans, N, sizeof(spans[0]), by_begin);
		cr_assert_eq(lanes_lay(spans, N, &used), 0);
		cr_expect_eq(used, most_at_once(spans, N), "round %u", round);
		for (size_t i = 0; i < N; i++)
			for (size_t j = 0; j < i; j++)
				cr_assert(spans[i].lane != spans[j].lane ||
						  spans[j].end <= spans[i].begin,
					  "round %u: %zu and %zu", round, i, j);
	}
}
