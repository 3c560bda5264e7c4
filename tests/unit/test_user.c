#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "core/user.h"
#include "fdcheck.h"

#define TEST(name) Test(user, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)

enum { ALICE = 10001, BOB = 10002, ML = 20001, BIG = 20002 };

/* 4 sessions, 1000 bytes, everything else without a limit. */
static void users_begin(struct users *us, const struct user_override *o, size_t n)
{
	struct user_limits limits = { .overrides = o, .n_overrides = n };

	limits.most[USER_SESSIONS] = 4;
	limits.most[USER_MEMORY] = 1000;
	users_init(us);
	cr_assert_eq(users_configure(us, &limits), 0);
}

TEST(one_account_for_each_user)
{
	struct users us;
	struct user *a, *again, *b;

	users_begin(&us, NULL, 0);
	a = users_get(&us, ALICE, NULL, 0);
	b = users_get(&us, ALICE + USERS_BUCKETS, NULL, 0); /* of the same bucket */
	again = users_get(&us, ALICE, NULL, 0);
	cr_expect_eq(a, again);
	cr_expect_neq(a, b);
	cr_expect_eq(us.count, 2);
	user_unref(again);
	user_unref(b);
	cr_expect_eq(us.count, 1);
	cr_expect_eq(users_find(&us, ALICE), a);
	cr_expect_null(users_find(&us, BOB));
	user_unref(a);
	cr_expect_null(users_find(&us, ALICE));
	users_deinit(&us);
	users_deinit(&us);
}

TEST(a_full_account_says_which_limit_and_what_to_do)
{
	struct user_charge c[4] = { USER_CHARGE_NULL }, more = USER_CHARGE_NULL;
	struct fault f = FAULT_NULL;
	struct users us;
	struct user *a;

	users_begin(&us, NULL, 0);
	a = users_get(&us, ALICE, NULL, 0);
	for (unsigned i = 0; i < 4; i++)
		cr_assert_eq(user_charge(&c[i], a, USER_SESSIONS, 1, &f), 0);
	cr_assert_eq(user_charge(&more, a, USER_SESSIONS, 1, &f), USER_E_LIMIT);
	cr_expect_null(more.user);
	cr_expect_eq(f.code, FAULT_EXHAUSTED);
	cr_expect_str_eq(f.text,
			 "user 10001 has 4 sessions, which is the limit (max_sessions_per_user): "
			 "end some (shardctl sessions lists them), or raise the limit in "
			 "shardd.yaml");
	cr_expect_eq(a->refused[USER_SESSIONS], 1);
	cr_expect_eq(us.refused[USER_SESSIONS], 1);
	user_charge_deinit(&c[0]);
	cr_expect_eq(user_charge(&more, a, USER_SESSIONS, 1, NULL), 0);
	user_charge_deinit(&more);
	for (unsigned i = 0; i < 4; i++)
		user_charge_deinit(&c[i]);
	cr_expect_eq(a->used[USER_SESSIONS], 0);
	cr_expect_eq(a->peak[USER_SESSIONS], 4);
	user_unref(a);
	users_deinit(&us);
}

TEST(bytes_grow_and_shrink_in_one_charge)
{
	struct user_charge c = USER_CHARGE_NULL;
	struct fault f = FAULT_NULL;
	struct users us;
	struct user *a;

	users_begin(&us, NULL, 0);
	a = users_get(&us, ALICE, NULL, 0);
	cr_assert_eq(user_charge(&c, a, USER_MEMORY, 600, &f), 0);
	cr_assert_eq(user_charge_resize(&c, 1001, &f), USER_E_LIMIT);
	cr_expect_str_eq(f.text,
			 "user 10001 has 600 bytes of the daemon's own memory and asks for 401 "
			 "more: the limit is 1000 (max_daemon_bytes_per_user): end sessions or "
			 "delete jobs (shardctl sessions, shardctl jobs), or raise the limit in "
			 "shardd.yaml");
	cr_expect_eq(a->used[USER_MEMORY], 600);
	cr_expect_eq(user_charge_resize(&c, 1000, NULL), 0);
	cr_expect_not(user_has_room(a, USER_MEMORY, 1));
	cr_expect_eq(user_charge_resize(&c, 1, NULL), 0);
	cr_expect(user_has_room(a, USER_MEMORY, 999));
	/* a sum that overflows is no way past a limit */
	cr_expect_not(user_has_room(a, USER_MEMORY, UINT64_MAX));
	user_charge_deinit(&c);
	user_unref(a);
	users_deinit(&us);
}

TEST(one_user_does_not_use_up_what_another_has)
{
	struct user_charge c[5] = { USER_CHARGE_NULL };
	struct users us;
	struct user *a, *b;

	users_begin(&us, NULL, 0);
	a = users_get(&us, ALICE, NULL, 0);
	b = users_get(&us, BOB, NULL, 0);
	cr_assert_eq(user_charge(&c[0], a, USER_SESSIONS, 4, NULL), 0);
	cr_expect_eq(user_charge(&c[1], b, USER_SESSIONS, 4, NULL), 0);
	cr_expect_eq(user_charge(&c[2], a, USER_JOBS, 1u << 30, NULL), 0);
	for (unsigned i = 0; i < 5; i++)
		user_charge_deinit(&c[i]);
	user_unref(a);
	user_unref(b);
	users_deinit(&us);
}

/* What a limit of a full account is called when it is not the default. */
static void expect_limit(struct users *us, uid_t uid, const gid_t *gids, size_t n, uint64_t most,
			 const char *text)
{
	struct user_charge c = USER_CHARGE_NULL, more = USER_CHARGE_NULL;
	struct user *u = users_get(us, uid, gids, n);
	struct fault f = FAULT_NULL;

	cr_assert_eq(user_charge(&c, u, USER_SESSIONS, most, &f), 0, "%s", f.text);
	cr_assert_eq(user_charge(&more, u, USER_SESSIONS, 1, &f), USER_E_LIMIT);
	cr_expect(strstr(f.text, text), "'%s' is not in: %s", text, f.text);
	user_charge_deinit(&c);
	user_unref(u);
}

TEST(an_override_for_the_user_comes_before_groups_and_groups_before_the_default)
{
	static const struct user_override o[] = {
		{ true, false, ML, USER_SESSIONS, 20 },
		{ true, false, BIG, USER_SESSIONS, 30 },
		{ false, false, ALICE, USER_SESSIONS, 7 },
		{ false, false, ALICE, USER_JOBS, 1 },
	};
	static const gid_t both[] = { 5, ML, BIG }, ml[] = { ML }, other[] = { 5 };
	struct users us;

	users_begin(&us, o, ARRAY_SIZE(o));
	expect_limit(&us, ALICE, both, 3, 7, "'10001:max_sessions' of user_limits");
	expect_limit(&us, BOB, both, 3, 30, "'@20002:max_sessions' of user_limits");
	expect_limit(&us, BOB, ml, 1, 20, "'@20001:max_sessions' of user_limits");
	expect_limit(&us, BOB, other, 1, 4, "max_sessions_per_user");
	users_deinit(&us);
}

static void expect_weight(struct users *us, uid_t uid, const gid_t *gids, size_t n, uint32_t weight)
{
	struct user *u = users_get(us, uid, gids, n);

	cr_expect_eq(u->worker_weight, weight, "uid %u: %u", uid, u->worker_weight);
	user_unref(u);
}

TEST(a_weight_is_the_users_or_the_largest_of_its_groups_or_the_default)
{
	static const struct user_override o[] = {
		{ true, false, ML, USER_WORKER_WEIGHT, 200 },
		{ true, false, BIG, USER_WORKER_WEIGHT, 50 },
		{ false, false, ALICE, USER_WORKER_WEIGHT, 10 },
		{ false, false, 0, USER_JOBS, 1 },
	};
	static const gid_t both[] = { 5, ML, BIG }, big[] = { BIG };
	struct users us;

	users_begin(&us, o, ARRAY_SIZE(o));
	expect_weight(&us, ALICE, both, 3, 10);
	expect_weight(&us, BOB, both, 3, 200);
	expect_weight(&us, BOB, big, 1, 50);
	expect_weight(&us, BOB + 1, NULL, 0, USER_WEIGHT_DEFAULT);
	expect_weight(&us, 0, NULL, 0, USER_WEIGHT_DEFAULT);
	users_deinit(&us);
}

TEST(no_limit_is_more_generous_than_any)
{
	static const struct user_override o[] = {
		{ true, false, ML, USER_SESSIONS, 0 },
		{ true, false, BIG, USER_SESSIONS, 30 },
	};
	static const gid_t both[] = { BIG, ML };
	struct user_charge c = USER_CHARGE_NULL;
	struct users us;
	struct user *u;

	users_begin(&us, o, ARRAY_SIZE(o));
	u = users_get(&us, BOB, both, 2);
	cr_expect_eq(user_charge(&c, u, USER_SESSIONS, 1u << 20, NULL), 0);
	user_charge_deinit(&c);
	user_unref(u);
	users_deinit(&us);
}

TEST(root_and_the_daemons_own_user_have_the_limits_that_name_them)
{
	const struct user_override o[] = {
		{ false, false, geteuid(), USER_JOBS, 2 },
		{ true, false, 0, USER_SESSIONS, 1 },
	};
	static const gid_t gids[] = { 0 };
	struct user_charge c = USER_CHARGE_NULL;
	struct fault f = FAULT_NULL;
	struct users us;
	struct user *u;

	users_begin(&us, o, ARRAY_SIZE(o));
	u = users_get(&us, geteuid(), gids, 1);
	cr_expect_eq(user_charge(&c, u, USER_SESSIONS, 1000, NULL), 0);
	user_charge_deinit(&c);
	cr_expect_eq(user_charge(&c, u, USER_JOBS, 3, &f), USER_E_LIMIT);
	user_unref(u);
	users_deinit(&us);
}

TEST(new_limits_hold_at_once_and_take_nothing_away)
{
	struct user_charge c = USER_CHARGE_NULL, more = USER_CHARGE_NULL;
	struct user_limits limits = { .n_overrides = 0 };
	struct fault f = FAULT_NULL;
	struct users us;
	struct user *u;

	users_begin(&us, NULL, 0);
	u = users_get(&us, ALICE, NULL, 0);
	cr_assert_eq(user_charge(&c, u, USER_SESSIONS, 4, NULL), 0);
	limits.most[USER_SESSIONS] = 2;
	cr_assert_eq(users_configure(&us, &limits), 0);
	cr_expect_eq(u->used[USER_SESSIONS], 4);
	cr_expect_eq(user_charge(&more, u, USER_SESSIONS, 1, &f), USER_E_LIMIT);
	cr_expect(strstr(f.text, "has 4 sessions and asks for 1 more: the limit is 2"), "%s",
		  f.text);
	limits.most[USER_SESSIONS] = 5;
	cr_assert_eq(users_configure(&us, &limits), 0);
	cr_expect_eq(user_charge(&more, u, USER_SESSIONS, 1, NULL), 0);
	user_charge_deinit(&more);
	user_charge_deinit(&c);
	user_unref(u);
	users_deinit(&us);
}

TEST(a_charge_keeps_its_account)
{
	struct user_charge c = USER_CHARGE_NULL;
	struct users us;
	struct user *u;

	users_begin(&us, NULL, 0);
	u = users_get(&us, ALICE, NULL, 0);
	cr_assert_eq(user_charge(&c, u, USER_JOBS, 1, NULL), 0);
	user_unref(u);
	cr_expect_eq(users_find(&us, ALICE), u);
	user_charge_deinit(&c);
	user_charge_deinit(&c);
	cr_expect_null(users_find(&us, ALICE));
	users_deinit(&us);
}

TEST(nobody_pays_where_there_is_no_account)
{
	struct user_charge c = USER_CHARGE_NULL;

	cr_expect_eq(user_charge(&c, NULL, USER_JOBS, 1, NULL), 0);
	cr_expect_eq(user_charge_resize(&c, 1u << 30, NULL), 0);
	user_charge_deinit(&c);
}

TEST(every_account_is_visited_once)
{
	struct user *u[200], *at;
	struct users us;
	unsigned n = 0;

	users_begin(&us, NULL, 0);
	cr_expect_null(users_next(&us, NULL));
	for (unsigned i = 0; i < ARRAY_SIZE(u); i++)
		u[i] = users_get(&us, 1000 + 3 * i, NULL, 0);
	for (at = users_next(&us, NULL); at; at = users_next(&us, at))
		n++;
	cr_expect_eq(n, ARRAY_SIZE(u));
	for (unsigned i = 0; i < ARRAY_SIZE(u); i++)
		user_unref(u[i]);
	users_deinit(&us);
}

TEST(a_priority_is_0_the_users_or_the_highest_of_its_groups)
{
	static const struct user_override o[] = {
		{ true, false, ML, USER_PRIORITY, 20 },
		{ true, false, BIG, USER_PRIORITY, 0 },
		{ false, false, ALICE, USER_PRIORITY, 7 },
	};
	static const gid_t both[] = { 5, ML, BIG };
	struct user *alice, *bob, *other, *root;
	struct users us;

	users_begin(&us, o, ARRAY_SIZE(o));
	alice = users_get(&us, ALICE, both, 3);
	bob = users_get(&us, BOB, both, 3);
	other = users_get(&us, BOB + 1, NULL, 0);
	root = users_get(&us, 0, NULL, 0);
	cr_expect_eq(alice->priority, 7);
	cr_expect_eq(bob->priority, 20);
	cr_expect_eq(other->priority, 0);
	cr_expect_eq(root->priority, USER_PRIORITY_MAX);
	user_unref(alice);
	user_unref(bob);
	user_unref(other);
	user_unref(root);
	users_deinit(&us);
}

/* -------------------------------------------------------------------- groups */

static const struct user_override user_team[] = {
	{ true, true, ML, USER_SESSIONS, 5 },
	{ true, false, BIG, USER_JOBS, 3 },
};

TEST(a_total_is_of_all_members_together)
{
	static const gid_t ml[] = { ML };
	struct user_charge a = USER_CHARGE_NULL, b = USER_CHARGE_NULL, more = USER_CHARGE_NULL;
	struct user *alice, *bob, *stranger;
	struct fault f = FAULT_NULL;
	struct users us;

	users_begin(&us, user_team, ARRAY_SIZE(user_team));
	alice = users_get(&us, ALICE, ml, 1);
	bob = users_get(&us, BOB, ml, 1);
	stranger = users_get(&us, BOB + 1, NULL, 0);
	cr_expect_eq(us.n_groups, 2);
	cr_expect_eq(us.groups[0].members, 2);
	cr_assert_eq(user_charge(&a, alice, USER_SESSIONS, 3, &f), 0);
	cr_expect_eq(user_left(bob, USER_SESSIONS), 2, "the group's, not its own 4");
	cr_assert_eq(user_charge(&b, bob, USER_SESSIONS, 3, &f), USER_E_LIMIT);
	cr_expect_str_eq(f.text,
			 "the members of group 20001 have 3 sessions together and one asks for 3 "
			 "more: the limit is 5 ('@20001:total_sessions' of user_limits): end some "
			 "(shardctl sessions lists them), or raise the limit in shardd.yaml");
	cr_expect_eq(us.groups[0].refused[USER_SESSIONS], 1);
	cr_assert_eq(user_charge(&b, bob, USER_SESSIONS, 2, &f), 0);
	cr_expect_eq(us.groups[0].used[USER_SESSIONS], 5);
	cr_assert_eq(user_charge(&more, stranger, USER_SESSIONS, 4, &f), 0, "it is in no group");
	user_charge_deinit(&more);
	user_charge_deinit(&a);
	cr_expect_eq(us.groups[0].used[USER_SESSIONS], 2);
	cr_expect_eq(us.groups[0].peak[USER_SESSIONS], 5);
	user_charge_deinit(&b);
	user_unref(alice);
	user_unref(bob);
	user_unref(stranger);
	cr_expect_eq(us.groups[0].members, 0);
	users_deinit(&us);
}

TEST(a_users_own_limit_is_told_before_that_of_its_group)
{
	static const gid_t ml[] = { ML };
	struct user_charge c = USER_CHARGE_NULL;
	struct fault f = FAULT_NULL;
	struct users us;
	struct user *u;

	users_begin(&us, user_team, ARRAY_SIZE(user_team));
	u = users_get(&us, ALICE, ml, 1);
	cr_assert_eq(user_charge(&c, u, USER_SESSIONS, 6, &f), USER_E_LIMIT);
	cr_expect(strstr(f.text, "max_sessions_per_user"), "%s", f.text);
	cr_expect_eq(us.groups[0].refused[USER_SESSIONS], 0);
	user_unref(u);
	users_deinit(&us);
}

/* A process with other groups, in a container say, does not take the user out of a total. */
TEST(a_user_stays_in_the_groups_that_its_connections_had)
{
	static const gid_t ml[] = { ML }, big[] = { BIG };
	struct user_charge c = USER_CHARGE_NULL;
	struct user_limits limits = { .overrides = user_team, .n_overrides = 1 };
	struct fault f = FAULT_NULL;
	struct users us;
	struct user *u;

	users_begin(&us, user_team, ARRAY_SIZE(user_team));
	u = users_get(&us, ALICE, ml, 1);
	cr_assert_eq(user_charge(&c, u, USER_STATE, 1000, &f), 0);
	cr_expect_eq(us.groups[0].used[USER_STATE], 1000, "counted without a total");
	user_unref(users_get(&us, ALICE, big, 1));
	cr_expect_eq(us.groups[0].used[USER_STATE], 1000);
	cr_expect_eq(us.groups[0].members, 1);
	cr_expect_eq(us.groups[1].used[USER_STATE], 1000);
	cr_assert_eq(users_configure(&us, &limits), 0);
	cr_expect_eq(us.n_groups, 1);
	cr_expect_eq(us.groups[0].used[USER_STATE], 1000);
	cr_expect_eq(us.groups[0].members, 1, "it has been in it, though it is not now");
	cr_expect_eq(us.groups[0].peak[USER_STATE], 1000, "a peak outlives a new configuration");
	user_unref(users_get(&us, ALICE, ml, 1));
	cr_expect_eq(us.groups[0].used[USER_STATE], 1000, "once");
	user_charge_deinit(&c);
	cr_expect_eq(us.groups[0].used[USER_STATE], 0);
	user_unref(u);
	cr_expect_eq(us.groups[0].members, 0);
	users_deinit(&us);
}

TEST(administrators_are_in_no_group)
{
	static const gid_t ml[] = { ML };
	struct user_charge c = USER_CHARGE_NULL;
	struct fault f = FAULT_NULL;
	struct users us;
	struct user *root;

	users_begin(&us, user_team, ARRAY_SIZE(user_team));
	root = users_get(&us, 0, ml, 1);
	cr_assert_eq(user_charge(&c, root, USER_SESSIONS, 6, &f), 0);
	cr_expect_eq(us.groups[0].members, 0);
	cr_expect_eq(us.groups[0].used[USER_SESSIONS], 0);
	user_charge_deinit(&c);
	user_unref(root);
	users_deinit(&us);
}
