/* What is counted of ops that have ended. */
#include <criterion/criterion.h>
#include <string.h>

#include "fdcheck.h"
#include "op/op.h"
#include "op/op_stats.h"

#define TEST(name) Test(op_stats, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)

static const struct op_stats *stats_of(const struct op_type *type)
{
	const struct op_stats *s;

	for (size_t i = 0; op_stats_at(i, &s); i++)
		if (op_table[i] == type)
			return s;
	cr_assert(false, "the type is not in op_table");
	return NULL;
}

static void count(const struct op_type *type, uint64_t took_us, bool fails)
{
	struct op op = {
		.type = type, .announced_us = 1000, .active_us = 1000, .started_us = 1000
	};

	op.fault.code = fails ? FAULT_ABORTED : FAULT_NONE;
	op_stats_count(&op, 1000 + took_us);
}

static uint64_t total(const struct op_stats *s)
{
	uint64_t n = 0;

	for (size_t i = 0; i < OP_STATS_BUCKETS; i++)
		n += s->buckets[i];
	return n;
}

TEST(each_bound_belongs_to_the_bucket_below_it)
{
	const struct op_stats *s = stats_of(op_table[0]);

	for (size_t i = 0; i < OP_STATS_BUCKETS - 1; i++) {
		struct op_stats before = *s;

		count(op_table[0], op_stats_bounds[i], false);
		cr_assert_eq(s->buckets[i], before.buckets[i] + 1, "bound %zu", i);
		count(op_table[0], op_stats_bounds[i] + 1, false);
		cr_assert_eq(s->buckets[i + 1], before.buckets[i + 1] + 1, "behind bound %zu", i);
	}
	count(op_table[0], 0, false);
	cr_assert_eq(total(s), 2 * (OP_STATS_BUCKETS - 1) + 1);
}

/* Every time from 0 on falls into the first bucket whose bound is not below it. */
TEST(no_time_falls_into_another_bucket)
{
	const struct op_stats *s = stats_of(op_table[1]);

	for (uint64_t us = 0; us < 2000; us++) {
		struct op_stats before = *s;
		size_t i = 0;

		while (i < OP_STATS_BUCKETS - 1 && us > op_stats_bounds[i])
			i++;
		count(op_table[1], us, false);
		cr_assert_eq(s->buckets[i], before.buckets[i] + 1, "%llu us",
			     (unsigned long long)us);
	}
	count(op_table[1], UINT64_MAX - 1000, false);
	cr_assert_eq(s->buckets[OP_STATS_BUCKETS - 1], 1);
}

TEST(kinds_are_counted_apart)
{
	for (size_t i = 0; op_table[i]; i++)
		for (size_t n = 0; n <= i; n++)
			count(op_table[i], 5, n == 0);
	for (size_t i = 0; op_table[i]; i++) {
		cr_assert_eq(total(stats_of(op_table[i])), i + 1);
		cr_assert_eq(stats_of(op_table[i])->failed, 1);
		cr_assert_eq(stats_of(op_table[i])->us, 5 * (i + 1));
	}
}

TEST(times_are_those_of_its_life)
{
	const struct op_stats *s = stats_of(op_table[0]);
	struct op op = {
		.type = op_table[0], .announced_us = 100, .active_us = 130, .started_us = 200
	};

	op_stats_count(&op, 300);
	cr_assert_eq(s->us, 200);
	cr_assert_eq(s->deps_us, 30);
	cr_assert_eq(s->wait_us, 70);
	/* one that never began waited until its end */
	op = (struct op){ .type = op_table[0], .announced_us = 100, .active_us = 130 };
	op_stats_count(&op, 300);
	cr_assert_eq(s->deps_us, 60);
	cr_assert_eq(s->wait_us, 70 + 170);
	/* and one that never had its turn waited for that */
	op = (struct op){ .type = op_table[0], .announced_us = 100 };
	op_stats_count(&op, 300);
	cr_assert_eq(s->deps_us, 260);
	cr_assert_eq(s->wait_us, 70 + 170);
}

TEST(a_type_of_nobody_is_not_counted)
{
	static const struct op_type unknown = { .name = "Unknown" };
	const struct op_stats *s;

	count(&unknown, 5, false);
	for (size_t i = 0; op_stats_at(i, &s); i++)
		cr_assert_eq(total(s), 0);
}
