/* Which record gives its place to a new one. */
#include <criterion/criterion.h>

#include "core/shares.h"
#include "fdcheck.h"

TestSuite(shares, .timeout = 30, .init = fdcheck_begin, .fini = fdcheck_end);

enum { PLACES = 8 };

struct record {
	struct shares_head head;
	char rest[24];
};

static size_t add(struct record *all, uint64_t id, uint32_t uid)
{
	size_t at = shares_place(all, sizeof(*all), PLACES, uid);

	cr_assert_lt(at, PLACES);
	all[at].head = (struct shares_head){ .id = id, .uid = uid };
	return at;
}

static unsigned count(const struct record *all, uint32_t uid)
{
	unsigned n = 0;

	for (unsigned i = 0; i < PLACES; i++)
		n += all[i].head.id && all[i].head.uid == uid;
	return n;
}

Test(shares, one_user_has_all_and_loses_the_oldest)
{
	struct record all[PLACES] = { 0 };

	for (uint64_t id = 1; id <= 3 * PLACES; id++)
		add(all, id, 7);
	for (unsigned i = 0; i < PLACES; i++)
		cr_expect_gt(all[i].head.id, 2 * PLACES);
}

Test(shares, many_records_push_out_nobody_else)
{
	struct record all[PLACES] = { 0 };

	add(all, 1, 1);
	add(all, 2, 2);
	for (uint64_t id = 3; id < 1000; id++)
		add(all, id, 3);
	cr_expect_eq(count(all, 1), 1);
	cr_expect_eq(count(all, 2), 1);
	for (uint64_t id = 1000; id < 2000; id++)
		add(all, id, 1);
	cr_expect_eq(count(all, 2), 1);
	cr_expect_eq(count(all, 1) + count(all, 3), PLACES - 1);
	cr_expect_geq(count(all, 1), 3);
	cr_expect_geq(count(all, 3), 3);
}

Test(shares, a_newcomer_finds_a_place)
{
	struct record all[PLACES] = { 0 };

	for (uint64_t id = 1; id <= PLACES; id++)
		add(all, id, (uint32_t)id);
	add(all, 100, 99); /* nobody has more than it: its own, which it has none of */
	cr_expect_eq(count(all, 99), 1);
}

/* More users than are counted: places are found, and none is outside. */
Test(shares, more_users_than_are_counted)
{
	static struct record all[4 * SHARES_USERS];

	for (uint64_t id = 1; id <= 16 * SHARES_USERS; id++) {
		size_t at = shares_place(all, sizeof(*all), 4 * SHARES_USERS, (uint32_t)id);

		cr_assert_lt(at, 4 * SHARES_USERS);
		all[at].head = (struct shares_head){ .id = id, .uid = (uint32_t)id };
	}
}
