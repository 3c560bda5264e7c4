/* The recorder of the order in which units are used. */
#include <criterion/criterion.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/prefetch.h"

static struct quota quota;
static struct prefetch p;

static void test_prefetch_begin(void)
{
	fdcheck_begin();
	quota_init(&quota, NULL, 0);
	prefetch_init(&p, &quota);
}

static void test_prefetch_end(void)
{
	prefetch_deinit(&p);
	prefetch_deinit(&p);
	cr_expect_eq(quota.used, 0);
	fdcheck_end();
}

TestSuite(prefetch, .init = test_prefetch_begin, .fini = test_prefetch_end, .timeout = 60);

/* Uses by letter, a step to its end. Return: how many were expected. */
static unsigned use(const char *letters)
{
	unsigned expected = 0;

	for (; *letters; letters++)
		expected += prefetch_used(&p, prefetch_use_of((uint32_t)*letters, 1));
	return expected;
}

static char next(void)
{
	return (char)prefetch_unit(prefetch_next(&p));
}

Test(prefetch, a_use_is_a_unit_and_what_for)
{
	cr_expect_neq(prefetch_use_of(1, 0), prefetch_use_of(1, 1));
	cr_expect_neq(prefetch_use_of(1, 3), prefetch_use_of(2, 3));
	cr_expect_eq(prefetch_unit(prefetch_use_of((1u << 30) - 1, 3)), (1u << 30) - 1);
}

Test(prefetch, what_was_recorded_is_foretold_in_the_next_step)
{
	cr_expect_eq(use("abccba"), 0);
	cr_expect_eq(next(), '\0', "not in the first step");
	prefetch_step(&p);
	cr_expect_eq(p.mode, PREFETCH_FOLLOWING);
	for (unsigned step = 0; step < 3; step++) {
		for (const char *at = "abccba"; *at; at++) {
			cr_expect_eq(next(), *at);
			cr_expect(prefetch_used(&p, prefetch_use_of((uint32_t)*at, 1)));
		}
		cr_expect_eq(next(), '\0', "nothing comes after the last one");
		prefetch_step(&p);
		prefetch_step(&p); /* a second end of the same step */
	}
	cr_expect_eq(p.deviations, 0);
}

Test(prefetch, the_same_unit_for_something_else_is_another_use)
{
	prefetch_used(&p, prefetch_use_of(1, 1));
	prefetch_step(&p);
	cr_expect_not(prefetch_used(&p, prefetch_use_of(1, 2)));
	cr_expect_eq(p.deviations, 1);
}

Test(prefetch, a_deviation_switches_it_off_for_the_rest_of_the_step)
{
	use("abcde");
	prefetch_step(&p);
	cr_expect_eq(use("abx"), 2);
	cr_expect_eq(p.mode, PREFETCH_RECORDING);
	cr_expect_eq(next(), '\0');
	cr_expect_eq(use("de"), 0, "not even what was right before");
	prefetch_step(&p);
	cr_expect_eq(use("abxde"), 5, "the whole of the step that deviated");
	cr_expect_eq(p.deviations, 1);
}

Test(prefetch, shorter_longer_and_empty_steps)
{
	use("abcd");
	prefetch_step(&p);
	use("ab");
	prefetch_step(&p);
	cr_expect_eq(p.deviations, 1);
	cr_expect_eq(use("ab"), 2);
	cr_expect_eq(next(), '\0');
	cr_expect_eq(use("c"), 0, "longer");
	prefetch_step(&p);
	cr_expect_eq(p.deviations, 2);
	prefetch_step(&p); /* nothing at all: no step */
	cr_expect_eq(use("abc"), 3);
}

Test(prefetch, a_step_that_is_too_long_is_not_learned)
{
	for (unsigned i = 0; i <= PREFETCH_MAX; i++)
		prefetch_used(&p, prefetch_use_of(i + 1, 0));
	cr_expect_eq(p.mode, PREFETCH_OFF);
	cr_expect_eq(quota.used, 0, "and costs nothing");
	prefetch_step(&p);
	cr_expect_eq(p.mode, PREFETCH_RECORDING);
	use("ab");
	prefetch_step(&p);
	cr_expect_eq(use("ab"), 2);
}

Test(prefetch, nor_one_that_the_account_cannot_pay_for)
{
	quota.limit = 600; /* 128 uses, not 256 */
	for (unsigned i = 0; i < 64; i++)
		prefetch_used(&p, prefetch_use_of(i + 1, 0));
	cr_expect_eq(quota.used, 0, "so many are free");
	for (unsigned i = 0; i < 64; i++)
		prefetch_used(&p, prefetch_use_of(i + 1, 0));
	cr_expect_eq(p.mode, PREFETCH_RECORDING);
	cr_expect_eq(quota.by_class[MEM_CONTROL], 512);
	use("a");
	cr_expect_eq(p.mode, PREFETCH_OFF);
	cr_expect_eq(quota.used, 0);
}

Test(prefetch, a_step_that_is_broken_off_begins_again)
{
	use("ab");
	prefetch_restart(&p);
	cr_expect_eq(use("cd"), 0);
	prefetch_step(&p);
	cr_expect_eq(use("c"), 1, "of the whole step only");
	prefetch_restart(&p);
	cr_expect_eq(use("cd"), 2, "what was learned is kept");
}
