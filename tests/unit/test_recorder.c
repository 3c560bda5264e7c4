/* The flight recorder: a ring of the last ops. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"

TestSuite(recorder, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

Test(recorder, keeps_the_last_ones_in_their_order)
{
	cr_assert_eq(recorder_init(3), 0);
	cr_expect_null(recorder_at(0));
	for (uint64_t id = 1; id <= 7; id++) {
		struct record *r = recorder_add();

		cr_assert_eq(r->id, id);
		r->seq = id * 10;
		for (size_t i = 0; i < (id < 3 ? id : 3); i++)
			cr_assert_eq(recorder_at(i)->id, (id < 3 ? 1 : id - 2) + i);
		cr_assert_null(recorder_at(id < 3 ? id : 3));
	}
	cr_expect_null(recorder_find(4), "overwritten");
	cr_expect_eq(recorder_find(5)->seq, 50);
	cr_expect_eq(recorder_find(7)->seq, 70);
	cr_expect_null(recorder_find(0));
	cr_expect_null(recorder_find(8));
	recorder_deinit();
	recorder_deinit();
}

Test(recorder, of_size_0_keeps_nothing)
{
	cr_assert_eq(recorder_init(0), 0);
	cr_expect_null(recorder_add());
	cr_expect_null(recorder_find(1));
	cr_expect_null(recorder_at(0));
	recorder_deinit();
}

static const struct record *newest(void)
{
	return recorder_find(recorder.next_id - 1);
}

Test(recorder, an_op_is_written_when_it_comes_and_when_it_ends)
{
	struct nodefix n;
	struct nodefix_op a = { 0 }, b = { .timeout_ms = 50 };
	struct member *m[2];
	struct job *job;

	nodefix_begin(&n, NULL);
	clock_fake(5000000);
	job = nodefix_job(&n, "training", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	nodefix_barrier(&n, m[1], 0, &b);
	cr_expect_eq(newest()->op, b.op);
	cr_expect_str_eq(newest()->name, "Barrier");
	cr_expect_str_eq(newest()->job, "training");
	cr_expect_str_eq(newest()->group, "world");
	cr_expect_str_eq(newest()->unit, "");
	cr_expect_eq(newest()->rank, 1);
	cr_expect_eq(newest()->pid, getpid());
	cr_expect_eq(newest()->epoch, 1);
	cr_expect_eq(newest()->announced_us, 5000000);
	cr_expect_eq(newest()->finished_us, 0);
	clock_fake(5060000);
	ops_tick(&n.jobs, clock_now_us(), 0);
	cr_assert(b.over);
	cr_expect_null(newest()->op);
	cr_expect_eq(newest()->started_us, 0);
	cr_expect_eq(newest()->finished_us, 5060000);
	cr_expect_eq(newest()->number, 1);
	cr_expect_eq(strncmp(newest()->error, "DEADLINE_EXCEEDED: ", 19), 0, "%s", newest()->error);
	nodefix_barrier(&n, m[0], 0, &a); /* that slot has failed */
	cr_expect_eq(strncmp(newest()->error, "DEADLINE_EXCEEDED: ", 19), 0);
	NODEFIX_OK(nodefix_alloc(&n, m[0], 100, &a), &a);
	cr_expect_str_eq(newest()->name, "AllocBuffer");
	cr_expect_eq(newest()->started_us, 5060000);
	cr_expect_str_eq(newest()->error, "");
	nodefix_end(&n);
}

/* More ops under way than the recorder has records: the oldest are forgotten, and
 * their end is written nowhere. */
Test(recorder, a_pending_op_whose_record_was_overwritten_ends_in_peace)
{
	const struct nodefix_options o = { .recorder = 2 };
	struct nodefix_op ops[6] = { 0 }, peer[6] = { 0 };
	struct member *m[2];
	struct nodefix n;
	struct job *job;

	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	for (unsigned i = 0; i < 6; i++)
		nodefix_barrier(&n, m[0], 0, &ops[i]);
	cr_expect_eq(recorder_at(0)->id, 5);
	cr_expect_eq(recorder_at(0)->op, ops[4].op);
	for (unsigned i = 0; i < 6; i++)
		nodefix_barrier(&n, m[1], 0, &peer[i]);
	for (unsigned i = 0; i < 6; i++) {
		nodefix_ok(&ops[i], "Barrier");
		nodefix_ok(&peer[i], "Barrier");
	}
	for (size_t i = 0; recorder_at(i); i++)
		cr_expect_null(recorder_at(i)->op);
	nodefix_end(&n);
}
