/* Which rank is late, from records that are made up. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "core/check.h"
#include "ctl/late.h"
#include "fdcheck.h"

TestSuite(ctl_late, .timeout = 30, .init = fdcheck_begin, .fini = fdcheck_end);

enum { MOST = 4096, RANKS_MOST = 8, PERIOD_US = 1000 };

struct log {
	Shardd__V1__OpRecord records[MOST];
	Shardd__V1__OpRecord *pointers[MOST];
	Shardd__V1__OpsResponse reply;
};

static struct log *log_new(void)
{
	struct log *l = calloc(1, sizeof(*l));

	cr_assert(l);
	shardd__v1__ops_response__init(&l->reply);
	l->reply.ops = l->pointers;
	return l;
}

static void log_add(struct log *l, const char *op, uint64_t number, uint32_t rank, uint64_t us)
{
	Shardd__V1__OpRecord *o = &l->records[l->reply.n_ops];

	cr_assert_lt(l->reply.n_ops, MOST);
	shardd__v1__op_record__init(o);
	o->id = l->reply.n_ops + 1;
	o->op = (char *)op;
	o->group = (char *)"world";
	o->epoch = 1;
	o->number = number ? number + 1 : 0; /* number 1 is of its own kind, and 0 is none */
	o->rank = rank;
	o->pid = 100 + (int)rank;
	o->announced_us = us;
	o->state = SHARDD__V1__OP_STATE__OP_STATE_DONE;
	l->pointers[l->reply.n_ops++] = o;
}

/* The collective @number of @n ranks, @late[rank] after it began. */
static void log_meet(struct log *l, const char *op, uint64_t number, const uint64_t *late,
		     uint32_t n)
{
	for (uint32_t r = 0; r < n; r++)
		log_add(l, op, number, r, number * PERIOD_US + late[r]);
}

struct row {
	const char *what;
	uint32_t ranks;
	uint64_t even[RANKS_MOST], odd[RANKS_MOST]; /* of collectives of even and odd numbers */
	enum late_verdict verdict;
	uint32_t rank; /* that comes first */
	uint64_t last, median, worst, waited;
};

static void check_row(const struct row *w)
{
	struct log *l = log_new();
	struct late late;

	for (uint64_t n = 1; n <= 100; n++)
		log_meet(l, "Reduce", n, n % 2 ? w->odd : w->even, w->ranks);
	cr_assert_eq(late_find(&l->reply, 0, &late), 0);
	cr_expect_eq(late.verdict, w->verdict, "%s: verdict %d", w->what, late.verdict);
	cr_assert_eq(late.n, w->ranks, "%s", w->what);
	cr_expect_eq(late.collectives, 100, "%s", w->what);
	cr_expect_eq(late.ranks[0].rank, w->rank, "%s: rank %u", w->what, late.ranks[0].rank);
	cr_expect_eq(late.ranks[0].pid, 100 + (int)w->rank, "%s", w->what);
	cr_expect_eq(late.ranks[0].last, w->last, "%s: %zu", w->what, late.ranks[0].last);
	cr_expect_eq(late.ranks[0].median_us, w->median, "%s: %zu", w->what,
		     late.ranks[0].median_us);
	cr_expect_eq(late.ranks[0].worst_us, w->worst, "%s", w->what);
	cr_expect_eq(late.ranks[0].waited_us, w->waited, "%s: %zu", w->what,
		     late.ranks[0].waited_us);
	late_deinit(&late);
	free(l);
}

Test(ctl_late, who_is_late)
{
	static const struct row rows[] = {
		{ "one of four",
		  4,
		  { 0, 1, 2, 300 },
		  { 2, 1, 0, 200 },
		  LATE_ONE,
		  3,
		  100,
		  199,
		  299,
		  100 * 249 },
		{ "one of two", 2, { 300, 0 }, { 300, 0 }, LATE_ONE, 0, 100, 300, 300, 30000 },
		/* three that are on time, and one that is early */
		{ "an early one",
		  4,
		  { 0, 301, 300, 302 },
		  { 0, 301, 300, 302 },
		  LATE_NONE,
		  3,
		  100,
		  2,
		  2,
		  200 },
		{ "in turn", 2, { 300, 0 }, { 0, 301 }, LATE_MANY, 1, 50, 301, 301, 15050 },
		{ "in half of them", 2, { 300, 0 }, { 0, 10 }, LATE_ONE, 0, 50, 300, 300, 15000 },
		{ "a little", 3, { 0, 0, 20 }, { 0, 0, 20 }, LATE_NONE, 2, 100, 20, 20, 2000 },
		{ "at the same time", 3, { 5, 5, 5 }, { 7, 7, 7 }, LATE_NONE, 0, 0, 0, 0, 0 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
		check_row(&rows[i]);
}

/* A rank that was started 10 s after the others used to be the late one, for as long as that was recorded. */
Test(ctl_late, the_first_collective_of_an_epoch_waits_for_joins)
{
	static const uint64_t none[] = { 0, 0 }, joins[] = { 0, 10000000 };
	struct log *l = log_new();
	struct late late;

	for (uint32_t epoch = 1; epoch <= 2; epoch++)
		for (uint64_t n = 1; n <= 20; n++) {
			log_meet(l, "Reduce", n, n > 1 ? none : joins, 2);
			for (unsigned i = 1; i <= 2; i++) {
				l->records[l->reply.n_ops - i].epoch = epoch;
				l->records[l->reply.n_ops - i].number = n;
			}
		}
	cr_assert_eq(late_find(&l->reply, 0, &late), 0);
	cr_expect_eq(late.verdict, LATE_NONE);
	cr_expect_eq(late.collectives, 38);
	cr_expect_eq(late.incomplete, 0);
	cr_expect_eq(late.waited_us, 0);
	late_deinit(&late);
	free(l);
}

Test(ctl_late, the_last_steps_alone)
{
	static const uint64_t late1[] = { 0, 300 }, late0[] = { 300, 0 }, none[] = { 0, 0 };
	struct log *l = log_new();
	struct late late;

	for (uint64_t n = 1; n <= 40; n += 2) {
		log_meet(l, "Reduce", n, n <= 30 ? late1 : late0, 2);
		log_meet(l, "Commit", n + 1, none, 2);
	}
	cr_assert_eq(late_find(&l->reply, 0, &late), 0);
	cr_expect_eq(late.steps, 20);
	cr_expect_eq(late.collectives, 40);
	cr_expect_eq(late.ranks[0].rank, 1);
	late_deinit(&late);
	cr_assert_eq(late_find(&l->reply, 5, &late), 0);
	cr_expect_eq(late.steps, 5);
	cr_expect_eq(late.collectives, 10, "%zu", late.collectives);
	cr_expect_eq(late.ranks[0].rank, 0);
	cr_expect_eq(late.waited_us, 5 * 300, "%zu", late.waited_us);
	cr_expect_eq(late.verdict, LATE_ONE);
	late_deinit(&late);
	cr_assert_eq(late_find(&l->reply, 99, &late), 0);
	cr_expect_eq(late.steps, 20);
	late_deinit(&late);
	free(l);
}

/* Rank 0 announces ten at once, and rank 1 comes a second later: a second is waited, not ten. */
Test(ctl_late, time_counts_once)
{
	struct log *l = log_new();
	struct late late;

	for (uint64_t n = 1; n <= 10; n++) {
		log_add(l, "Reduce", n, 0, 1000 + n);
		log_add(l, "Reduce", n, 1, 1001000 + n);
	}
	cr_assert_eq(late_find(&l->reply, 0, &late), 0);
	cr_expect_eq(late.ranks[0].rank, 1);
	cr_expect_eq(late.ranks[0].last, 10);
	cr_expect_eq(late.ranks[0].median_us, 1000000);
	cr_expect_eq(late.waited_us, 1000009, "%zu", late.waited_us);
	cr_expect_leq(late.waited_us, late.span_us);
	late_deinit(&late);
	free(l);
}

Test(ctl_late, p95_is_above_95_of_100)
{
	struct log *l = log_new();
	struct late late;

	for (uint64_t n = 1; n <= 100; n++)
		log_meet(l, "Reduce", n, (const uint64_t[]){ 0, n }, 2);
	cr_assert_eq(late_find(&l->reply, 0, &late), 0);
	cr_expect_eq(late.ranks[0].median_us, 50);
	cr_expect_eq(late.ranks[0].p95_us, 95);
	cr_expect_eq(late.ranks[0].worst_us, 100);
	late_deinit(&late);
	free(l);
}

/* Not those that failed, are pending, have lost a record, are no collectives, or are of an earlier job. */
Test(ctl_late, only_whole_collectives_count)
{
	static const uint64_t late1[] = { 0, 300 };
	struct log *l = log_new();
	struct late late;

	log_meet(l, "Reduce", 1, late1, 2);
	log_meet(l, "Reduce", 2, late1, 2);
	log_add(l, "Reduce", 3, 0, 3000);
	log_meet(l, "Reduce", 4, late1, 2);
	l->records[l->reply.n_ops - 1].state = SHARDD__V1__OP_STATE__OP_STATE_FAILED;
	log_meet(l, "Reduce", 5, late1, 2);
	l->records[l->reply.n_ops - 1].state = SHARDD__V1__OP_STATE__OP_STATE_WAIT;
	log_meet(l, "Gather", 0, (const uint64_t[]){ 0, 900 }, 2);
	log_meet(l, "Reduce", 1, (const uint64_t[]){ 50000, 50300 }, 2); /* another job */
	cr_assert_eq(late_find(&l->reply, 0, &late), 0);
	cr_expect_eq(late.collectives, 2, "%zu", late.collectives);
	cr_expect_eq(late.incomplete, 3, "%zu", late.incomplete);
	cr_expect_eq(late.ranks[0].rank, 1);
	cr_expect_eq(late.ranks[0].worst_us, 300);
	cr_expect_eq(late.steps, 0);
	late_deinit(&late);
	free(l);
}

Test(ctl_late, of_nothing_nothing_is_known)
{
	struct log *l = log_new();
	struct late late;

	cr_assert_eq(late_find(&l->reply, 3, &late), 0);
	cr_expect_eq(late.verdict, LATE_UNKNOWN);
	late_deinit(&late);
	for (uint64_t n = 1; n <= 3; n++)
		log_add(l, "Commit", n, 0, n * 1000);
	cr_assert_eq(late_find(&l->reply, 0, &late), 0);
	cr_expect_eq(late.verdict, LATE_UNKNOWN, "one rank alone is never late");
	cr_expect_eq(late.n, 0);
	cr_expect_eq(late.steps, 3);
	late_deinit(&late);
	free(l);
}
