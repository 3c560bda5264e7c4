/* core/pace: how often something is said on behalf of a user. */
#include <criterion/criterion.h>

#include "core/pace.h"
#include "fdcheck.h"

enum { BURST = 100 };

#define PACE_TEST(name) Test(pace, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)

enum { ALICE = 1000, BOB = 1001 };

PACE_TEST(a_loop_is_cut_and_counted)
{
	struct pace p = { .burst = BURST, .a_second = 10 };
	uint64_t skipped = 7;

	for (unsigned i = 0; i < BURST; i++) {
		cr_assert(pace_take(&p, ALICE, 1000, &skipped));
		cr_assert_eq(skipped, 0);
	}
	for (unsigned i = 0; i < 50; i++)
		cr_assert(!pace_take(&p, ALICE, 1000, &skipped));
	cr_assert(pace_take(&p, ALICE, 1000 + 1000000, &skipped));
	cr_assert_eq(skipped, 50);
	cr_assert(pace_take(&p, ALICE, 1000 + 1000000, &skipped));
	cr_assert_eq(skipped, 0, "told once");
}

PACE_TEST(one_user_does_not_take_another_ones_lines)
{
	struct pace p = { .burst = BURST, .a_second = 10 };
	uint64_t skipped;

	for (unsigned i = 0; i < 10 * BURST; i++)
		pace_take(&p, ALICE, 1000, &skipped);
	cr_assert(!pace_take(&p, ALICE, 1000, &skipped));
	cr_assert(pace_take(&p, BOB, 1000, &skipped));
}

PACE_TEST(more_users_than_entries_are_served)
{
	struct pace p = { .burst = BURST, .a_second = 10 };
	uint64_t skipped;

	for (unsigned i = 0; i < 10 * PACE_USERS; i++)
		cr_assert(pace_take(&p, i, 1000 + i, &skipped));
}

PACE_TEST(no_more_than_a_burst_is_saved_up)
{
	struct pace p = { .burst = BURST, .a_second = 10 };
	uint64_t skipped;
	unsigned n = 0;

	cr_assert(pace_take(&p, ALICE, 1000, &skipped));
	while (pace_take(&p, ALICE, 1000 + 3600ull * 1000000u, &skipped))
		n++;
	cr_assert_eq(n, BURST);
}
