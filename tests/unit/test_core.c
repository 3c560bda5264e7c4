/* The small parts of core: fault, quota, list, clock, name. */
#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <string.h>

#include "core/clock.h"
#include "core/fault.h"
#include "core/list.h"
#include "core/name.h"
#include "core/quota.h"
#include "fdcheck.h"

#define TEST(suite, name) \
	Test(suite, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)

TEST(fault, set_fills_code_field_and_text)
{
	struct fault f = FAULT_NULL;

	cr_assert_eq(fault_set(&f, FAULT_INVALID, "unit.name", "%s has %d", "it", 7),
		     FAULT_INVALID);
	cr_assert_eq(f.code, FAULT_INVALID);
	cr_assert_str_eq(f.field, "unit.name");
	cr_assert_str_eq(f.text, "it has 7");
}

TEST(fault, the_first_cause_stays)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "first");
	cr_assert_eq(fault_set(&f, FAULT_INVALID, "x", "second"), FAULT_ABORTED);
	cr_assert_eq(fault_errno(&f, -ENOMEM, "third"), FAULT_ABORTED);
	cr_assert_str_eq(f.text, "first");
	cr_assert_str_eq(f.field, "");
}

TEST(fault, long_text_is_cut)
{
	struct fault f = FAULT_NULL;
	char text[2000];

	memset(text, 'a', sizeof(text));
	text[sizeof(text) - 1] = '\0';
	fault_set(&f, FAULT_INVALID, text, "%s", text);
	cr_assert_eq(strlen(f.text), sizeof(f.text) - 1);
	cr_assert_eq(strlen(f.field), sizeof(f.field) - 1);
}

TEST(fault, errno_becomes_exhausted_or_internal)
{
	static const struct {
		int e;
		enum fault_code code;
	} cases[] = {
		{ ENOMEM, FAULT_EXHAUSTED }, { ENOSPC, FAULT_EXHAUSTED },
		{ EMFILE, FAULT_EXHAUSTED }, { ENFILE, FAULT_EXHAUSTED },
		{ EIO, FAULT_INTERNAL },     { EPERM, FAULT_INTERNAL },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct fault f = FAULT_NULL;

		cr_assert_eq(fault_errno(&f, -cases[i].e, "mmap"), (int)cases[i].code);
		cr_assert_eq(f.domain, FAULT_DOMAIN_OS);
		cr_assert_eq(f.native, cases[i].e);
		cr_assert(strstr(f.text, "mmap: ") == f.text && strlen(f.text) > 6);
	}
}

TEST(fault, every_code_and_domain_has_its_own_name)
{
	for (int i = 0; i < _FAULT_N; i++)
		for (int j = 0; j < i; j++)
			cr_assert_str_neq(fault_code_name((enum fault_code)i),
					  fault_code_name((enum fault_code)j));
	cr_assert_str_eq(fault_code_name(_FAULT_N), "?");
	cr_assert_str_eq(fault_domain_name(FAULT_DOMAIN_NCCL), "nccl");
	cr_assert_str_eq(fault_domain_name(_FAULT_DOMAIN_N), "?");
}

TEST(quota, charges_this_account_and_all_above)
{
	struct quota device, job;

	quota_init(&device, NULL, 1000);
	quota_init(&job, &device, 600);
	cr_assert_eq(quota_charge(&job, MEM_SHARD, 500), 0);
	cr_assert_eq(job.used, 500);
	cr_assert_eq(device.by_class[MEM_SHARD], 500);
	cr_assert_eq(quota_left(&job), 100);
	cr_assert_eq(quota_left(&device), 500);
	quota_return(&job, MEM_SHARD, 500);
	cr_assert_eq(device.used, 0);
}

TEST(quota, remembers_the_most)
{
	struct quota device, job;

	quota_init(&device, NULL, 1000);
	quota_init(&job, &device, 0);
	cr_assert_eq(quota_charge(&job, MEM_SHARD, 300), 0);
	cr_assert_eq(quota_charge(&job, MEM_GRAD, 400), 0);
	quota_return(&job, MEM_GRAD, 400);
	cr_assert_eq(quota_charge(&job, MEM_GRAD, 900), QUOTA_E_LIMIT);
	cr_assert_eq(quota_charge(&job, MEM_FULL, 100), 0);
	cr_assert_eq(quota_charge(&job, MEM_FULL, 600), 0);
	quota_undo(&job, MEM_FULL, 600); /* there was no memory: it never was */
	cr_assert_eq(quota_peak_used(&job), 700);
	cr_assert_eq(quota_peak_used(&device), 700);
	cr_assert_eq(quota_peak(&job, MEM_SHARD), 300);
	cr_assert_eq(quota_peak(&job, MEM_GRAD), 400);
	cr_assert_eq(quota_peak(&job, MEM_FULL), 100);
}

TEST(quota, refuses_whole_or_not_at_all)
{
	struct quota device, a, b;

	quota_init(&device, NULL, 1000);
	quota_init(&a, &device, 0);
	quota_init(&b, &device, 300);
	cr_assert_eq(quota_charge(&a, MEM_FULL, 900), 0);
	cr_assert_eq(quota_left(&b), 100);
	cr_assert_eq(quota_charge(&b, MEM_GRAD, 101), QUOTA_E_LIMIT);
	cr_assert_eq(b.used, 0);
	cr_assert_eq(device.used, 900);
	cr_assert_eq(quota_charge(&b, MEM_GRAD, 100), 0);
	cr_assert_eq(quota_left(&a), 0);
}

TEST(quota, huge_amounts_do_not_wrap)
{
	struct quota q;

	quota_init(&q, NULL, 100);
	cr_assert_eq(quota_charge(&q, MEM_SHARD, 50), 0);
	cr_assert_eq(quota_charge(&q, MEM_SHARD, UINT64_MAX), QUOTA_E_LIMIT);
	cr_assert_eq(quota_charge(&q, MEM_SHARD, UINT64_MAX - 49), QUOTA_E_LIMIT);
	cr_assert_eq(q.used, 50);
}

TEST(quota, a_limit_below_what_is_used_leaves_nothing)
{
	struct quota q;

	quota_init(&q, NULL, 100);
	cr_assert_eq(quota_charge(&q, MEM_SHARD, 80), 0);
	q.limit = 50;
	cr_assert_eq(quota_left(&q), 0);
	cr_assert_eq(quota_charge(&q, MEM_SHARD, 1), QUOTA_E_LIMIT);
	quota_return(&q, MEM_SHARD, 80);
	cr_assert_eq(quota_left(&q), 50);
}

TEST(quota, classes_have_names)
{
	cr_assert_str_eq(mem_class_name(MEM_SHARD), "shard");
	cr_assert_str_eq(mem_class_name(MEM_FULL), "full");
	cr_assert_str_eq(mem_class_name(MEM_GRAD), "grad");
	cr_assert_str_eq(mem_class_name(MEM_CONTROL), "control");
	cr_assert_str_eq(mem_class_name(_MEM_N), "?");
}

Test(quota, returning_more_than_was_charged_ends_the_process, .signal = SIGABRT, .timeout = 10)
{
	struct quota q;

	quota_init(&q, NULL, 0);
	quota_charge(&q, MEM_SHARD, 10);
	quota_return(&q, MEM_FULL, 10);
}

struct item {
	struct list link;
	int number;
};

static int sum(struct list *head, int *ret_n)
{
	struct item *i, *tmp;
	int total = 0;

	*ret_n = 0;
	list_for_each (i, tmp, head, link) {
		total = total * 10 + i->number;
		(*ret_n)++;
	}
	return total;
}

TEST(list, keeps_order_and_unlinks)
{
	struct list head = LIST_INIT(head);
	struct item items[3] = { { .number = 1 }, { .number = 2 }, { .number = 3 } };
	int n;

	cr_assert(list_empty(&head));
	for (int i = 0; i < 3; i++) {
		list_init(&items[i].link);
		list_append(&head, &items[i].link);
	}
	cr_assert_eq(sum(&head, &n), 123);
	list_unlink(&items[1].link);
	cr_assert_eq(sum(&head, &n), 13);
	list_unlink(&items[1].link);
	cr_assert_eq(sum(&head, &n), 13);
	list_append(&head, &items[1].link);
	cr_assert_eq(sum(&head, &n), 132);
	cr_assert_eq(list_first(&head, struct item, link)->number, 1);
}

TEST(list, walk_may_unlink_where_it_stands)
{
	struct list head = LIST_INIT(head);
	struct item items[4], *i, *tmp;
	int n;

	for (int k = 0; k < 4; k++) {
		items[k].number = k + 1;
		list_init(&items[k].link);
		list_append(&head, &items[k].link);
	}
	list_for_each (i, tmp, &head, link)
		if (i->number % 2)
			list_unlink(&i->link);
	cr_assert_eq(sum(&head, &n), 24);
	list_for_each (i, tmp, &head, link)
		list_unlink(&i->link);
	cr_assert(list_empty(&head));
}

Test(list, appending_a_linked_item_ends_the_process, .signal = SIGABRT, .timeout = 10)
{
	struct list head = LIST_INIT(head);
	struct item a = { .number = 1 };

	list_init(&a.link);
	list_append(&head, &a.link);
	list_append(&head, &a.link);
}

TEST(clock, never_goes_back)
{
	uint64_t last = clock_now_us();

	cr_assert_gt(last, 0);
	for (int i = 0; i < 1000; i++) {
		uint64_t now = clock_now_us();

		cr_assert_geq(now, last);
		last = now;
	}
}

TEST(clock, can_be_stepped)
{
	clock_fake(5000000);
	cr_assert_eq(clock_now_us(), 5000000);
	clock_fake(5000001);
	cr_assert_eq(clock_now_us(), 5000001);
	clock_real();
	cr_assert_neq(clock_now_us(), 5000001);
}

TEST(clock, says_the_time_to_wait_until)
{
	struct timespec before, until, after;

	for (unsigned ms = 0; ms < 4000; ms += 333) {
		int64_t lead;

		clock_gettime(CLOCK_MONOTONIC, &before);
		until = clock_in(ms);
		clock_gettime(CLOCK_MONOTONIC, &after);
		cr_assert(until.tv_nsec >= 0 && until.tv_nsec < 1000000000);
		lead = (until.tv_sec - before.tv_sec) * INT64_C(1000000000) + until.tv_nsec -
		       before.tv_nsec;
		cr_expect_geq(lead, ms * INT64_C(1000000));
		lead = (until.tv_sec - after.tv_sec) * INT64_C(1000000000) + until.tv_nsec -
		       after.tv_nsec;
		cr_expect_leq(lead, ms * INT64_C(1000000));
	}
}

TEST(quota, without_limit_huge_amounts_do_not_wrap_either)
{
	struct quota q;

	quota_init(&q, NULL, 0);
	cr_assert_eq(quota_charge(&q, MEM_SHARD, UINT64_MAX - 10), 0);
	cr_assert_eq(quota_charge(&q, MEM_SHARD, 11), QUOTA_E_LIMIT);
	cr_assert_eq(q.used, UINT64_MAX - 10);
}

TEST(name, is_of_letters_digits_and_three_signs)
{
	char text[NAME_BYTES + 1];

	cr_expect(name_is_good("a"));
	cr_expect(name_is_good("Node_1.rack-2"));
	cr_expect_not(name_is_good(""));
	cr_expect_not(name_is_good("a/b"));
	cr_expect_not(name_is_good("a b"));
	cr_expect_not(name_is_good("a\n"));
	memset(text, 'a', sizeof(text));
	text[NAME_BYTES - 1] = '\0';
	cr_expect(name_is_good(text));
	text[NAME_BYTES - 1] = 'a';
	text[NAME_BYTES] = '\0';
	cr_expect_not(name_is_good(text));
}

/* What a letter is does not depend on where a node is. */
TEST(name, has_no_letters_of_a_locale)
{
	for (int c = 128; c < 256; c++) {
		const char text[] = { 'n', (char)c, '\0' };

		cr_expect_not(name_is_good(text), "byte %d", c);
	}
}
