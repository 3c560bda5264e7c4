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

enum { MANY = 4 * SHARES_USERS };

static size_t add_to_many(struct record *all, uint64_t id, uint32_t uid)
{
	size_t at = shares_place(all, sizeof(*all), MANY, uid);

	cr_assert_lt(at, MANY);
	all[at].head = (struct shares_head){ .id = id, .uid = uid };
	return at;
}

/* Each with one record: the oldest of those that are counted, the first in the array beside the newcomer. */
Test(shares, of_more_users_than_are_counted_the_rest_stays)
{
	static struct record all[MANY];
	enum { COUNTED = SHARES_USERS - 1 };

	for (uint64_t id = 1; id <= MANY; id++)
		cr_assert_eq(add_to_many(all, id, (uint32_t)id), id - 1);
	for (uint64_t id = MANY + 1; id <= 4 * MANY; id++)
		cr_assert_eq(add_to_many(all, id, (uint32_t)id), (id - MANY - 1) % COUNTED);
	for (unsigned i = COUNTED; i < MANY; i++)
		cr_expect_eq(all[i].head.id, i + 1);
}

/* Nobody knows that one of the rest has most of all. */
Test(shares, a_user_who_is_not_counted_is_replaced_last)
{
	static struct record all[MANY];
	uint64_t id = 1;
	size_t at;

	for (uint32_t uid = 1; uid <= SHARES_USERS; uid++)
		add_to_many(all, id++, uid);
	while (id <= MANY)
		add_to_many(all, id++, 1000);
	for (uint32_t uid = 1; uid <= SHARES_USERS; uid++)
		cr_expect_eq(add_to_many(all, id++, uid), uid - 1, "its own is the only one");
	/* a counted user who has two loses one to a user who has one */
	all[MANY - 1].head.uid = 2;
	at = add_to_many(all, id++, 1);
	cr_expect_eq(at, MANY - 1, "%zu", at);
	for (unsigned i = SHARES_USERS; i < MANY - 1; i++)
		cr_expect_eq(all[i].head.uid, 1000);
}
