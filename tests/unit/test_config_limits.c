/* Limits of single users and groups, from text. */
#include <criterion/criterion.h>
#include <string.h>

#include "config/config.h"
#include "core/check.h"
#include "fdcheck.h"

#define TEST(name) Test(config_limits, name, .init = fdcheck_begin, .fini = fdcheck_end)

static int set(struct config *c, const char *key, const char *value)
{
	struct fault f = FAULT_NULL;

	return config_set(c, key, value, &f);
}

TEST(limits_of_users_take_names_numbers_and_groups)
{
	struct user_limits limits;
	struct config c;

	config_default(&c);
	cr_assert_eq(set(&c, "user_limits",
			 "root:max_sessions=7, @root:max_state_bytes=2GiB,1000:max_jobs=0,"
			 "@7:worker_weight=300,@7:total_jobs=9,@7:priority=0,1000:priority=100"),
		     0);
	cr_assert_eq(set(&c, "max_ops_per_user", "5"), 0);
	config_user_limits(&c, &limits);
	cr_assert_eq(limits.n_overrides, 7);
	cr_expect_eq(limits.overrides[3].kind, USER_WORKER_WEIGHT);
	cr_expect_eq(limits.overrides[3].most, 300);
	cr_expect(limits.overrides[4].total);
	cr_expect_eq(limits.overrides[4].kind, USER_JOBS);
	cr_expect_eq(limits.overrides[5].kind, USER_PRIORITY);
	cr_expect_eq(limits.overrides[5].most, 0);
	cr_expect_eq(limits.overrides[6].most, 100);
	cr_expect_not(limits.overrides[6].total);
	cr_expect_eq(limits.overrides[0].id, 0);
	cr_expect_not(limits.overrides[0].group);
	cr_expect_eq(limits.overrides[0].kind, USER_SESSIONS);
	cr_expect_eq(limits.overrides[0].most, 7);
	cr_expect(limits.overrides[1].group);
	cr_expect_eq(limits.overrides[1].kind, USER_STATE);
	cr_expect_eq(limits.overrides[1].most, 2ull << 30);
	cr_expect_eq(limits.overrides[2].id, 1000);
	cr_expect_eq(limits.overrides[2].most, 0);
	cr_expect_eq(limits.most[USER_OPS], 5);
	cr_expect_eq(limits.most[USER_STATE], 0);
	cr_expect_eq(limits.most[USER_STATUS_CALLS], 8);
}

TEST(every_default_limit_of_a_user_has_its_key)
{
	struct user_limits limits;
	struct config c;

	config_default(&c);
	for (unsigned k = 0; k < _USER_KINDS; k++) {
		cr_assert_eq(set(&c, user_kind_key(k), "77"), 0, "%s", user_kind_key(k));
		config_user_limits(&c, &limits);
		cr_expect_eq(limits.most[k], 77, "%s", user_kind_key(k));
	}
}

TEST(a_wrong_limit_of_a_user_says_what_is_wrong)
{
	static const struct {
		const char *value, *why;
	} cases[] = {
		{ "root", "no ':' with a '='" },
		{ "root:max_jobs", "no ':' with a '='" },
		{ "max_jobs=5", "no ':' with a '='" },
		{ ":max_jobs=5", "no such user" },
		{ "@:max_jobs=5", "no such group" },
		{ "nobody-of-that-name:max_jobs=5", "no such user" },
		{ "@no-such-group:max_jobs=5", "no such group" },
		{ "4294967295:max_jobs=5", "no such user" },
		{ "root:jobs=5", "no such limit" },
		{ "root:max_job=5", "no such limit" },
		{ "root:max_jobs=", "a whole number" },
		{ "root:max_jobs=-1", "a whole number" },
		{ "root:max_jobs=5GiB", "a whole number" },
		{ "root:max_jobs=5,0:max_jobs=6", "the same limit" },
		{ "root:worker_weight=0", "from 1 to 10000" },
		{ "root:worker_weight=10001", "from 1 to 10000" },
		{ "root:max_worker_weight=5", "no such limit" },
		{ "root:total_jobs=5", "a limit of a group" },
		{ "@root:total_ops=5", "no total of these" },
		{ "@root:total_priority=5", "no such limit" },
		{ "@root:total_jobs=1,@root:total_jobs=2", "the same limit" },
		{ "root:priority=101", "from 0 to 100" },
		{ "root:priority=-1", "from 0 to 100" },
	};
	struct config c;

	config_default(&c);
	cr_assert_eq(set(&c, "user_limits", "1:max_jobs=1"), 0);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct fault f = FAULT_NULL;

		cr_expect_eq(config_set(&c, "user_limits", cases[i].value, &f), FAULT_INVALID, "%s",
			     cases[i].value);
		cr_expect(strstr(f.text, cases[i].why), "%s: %s", cases[i].value, f.text);
	}
	cr_expect_eq(c.per_user.n_limits, 1);
}
