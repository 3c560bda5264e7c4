/* What shardctl top computes of two samples, and how it fits a window. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "ctl/top_frame.h"
#include "ctl/width.h"
#include "fdcheck.h"

TestSuite(ctl_top, .timeout = 60, .init = fdcheck_begin, .fini = fdcheck_end);

enum { JOBS = 3, RANKS = 2, OPS = 16, S = 1000000 };

/* A daemon with three jobs of two ranks each. */
struct told {
	Shardd__V1__GetStatusResponse status;
	Shardd__V1__OpsResponse ops;
	Shardd__V1__JobStatus jobs[JOBS], *all_jobs[JOBS];
	Shardd__V1__RankStatus ranks[JOBS][RANKS], *all_ranks[JOBS][RANKS];
	Shardd__V1__OpRecord records[OPS], *all_records[OPS];
	struct top_sample s;
};

static void begin(struct told *t, uint64_t now_us)
{
	static const char *const names[JOBS] = { "c", "a", "b" };

	*t = (struct told){ .status = SHARDD__V1__GET_STATUS_RESPONSE__INIT,
			    .ops = SHARDD__V1__OPS_RESPONSE__INIT };
	for (size_t i = 0; i < JOBS; i++) {
		shardd__v1__job_status__init(&t->jobs[i]);
		t->jobs[i].name = (char *)names[i];
		t->jobs[i].world_size = RANKS;
		t->jobs[i].has_commit = true;
		t->jobs[i].ranks = t->all_ranks[i];
		t->jobs[i].n_ranks = RANKS;
		for (uint32_t k = 0; k < RANKS; k++) {
			shardd__v1__rank_status__init(&t->ranks[i][k]);
			t->ranks[i][k].rank = k;
			t->ranks[i][k].session = 1;
			t->ranks[i][k].state = SHARDD__V1__RANK_STATE__RANK_STATE_JOINED;
			t->all_ranks[i][k] = &t->ranks[i][k];
		}
		t->all_jobs[i] = &t->jobs[i];
	}
	t->status.jobs = t->all_jobs;
	t->status.n_jobs = JOBS;
	t->ops.ops = t->all_records;
	t->ops.now_us = now_us;
	t->s = (struct top_sample){ .status = &t->status, .ops = &t->ops, .at_us = now_us + 1 };
}

/* Times of an op of job c: 0: not yet. */
static void op(struct told *t, uint32_t rank, uint64_t active, uint64_t started, uint64_t finished)
{
	Shardd__V1__OpRecord *o = &t->records[t->ops.n_ops];

	shardd__v1__op_record__init(o);
	o->job = (char *)"c";
	o->rank = rank;
	o->active_us = active;
	o->started_us = started;
	o->finished_us = finished;
	t->all_records[t->ops.n_ops++] = o;
}

static void compute(struct told *t, const struct top_sample *before)
{
	static const struct top_sample none = { 0 };

	cr_assert_eq(top_sample_compute(&t->s, before ? before : &none, 2 * S), 0);
}

static void end(struct told *t)
{
	t->s.status = NULL; /* not of the heap */
	t->s.ops = NULL;
	top_sample_deinit(&t->s);
}

Test(ctl_top, the_share_is_the_time_in_which_an_op_waits)
{
	struct told t;

	begin(&t, 10 * S);
	op(&t, 0, 1 * S, 1 * S, 2 * S);     /* all since then are known */
	op(&t, 0, 7 * S, 8500000, 9 * S);   /* half a second of it is in the window */
	op(&t, 0, 8200000, 8400000, 9 * S); /* at the same time: counts once */
	op(&t, 0, 9 * S, 0, 0);             /* waits still */
	op(&t, 1, 0, 0, 0);                 /* not its turn: earlier ops of the same rank are */
	op(&t, 1, 8 * S, 8 * S, 0);         /* runs */
	compute(&t, NULL);
	cr_expect_float_eq(t.s.jobs[0].ranks[0].wait, 0.75, 1e-9);
	cr_expect_float_eq(t.s.jobs[0].ranks[1].wait, 0, 1e-9);
	cr_expect_float_eq(t.s.jobs[0].wait, 0.375, 1e-9);
	end(&t);
}

/* They counted as those of the job that has its name now. */
Test(ctl_top, ops_of_an_earlier_job_of_that_name_do_not_count)
{
	struct told t;

	begin(&t, 10 * S);
	op(&t, 0, 1 * S, 1 * S, 2 * S);
	op(&t, 0, 8 * S, 9 * S, 9 * S);
	t.records[1].job_number = 1;
	compute(&t, NULL);
	cr_expect_float_eq(t.s.jobs[0].ranks[0].wait, 0, 1e-9);
	end(&t);
}

Test(ctl_top, time_before_the_oldest_record_is_not_known)
{
	struct told t;

	begin(&t, 10 * S);
	op(&t, 0, 9 * S, 9 * S, 9500000); /* the oldest that is kept: what came before is lost */
	op(&t, 0, 9500000, 9750000, 9800000);
	compute(&t, NULL);
	cr_expect_float_eq(t.s.jobs[0].ranks[0].wait, 0.5, 1e-9);
	end(&t);
}

Test(ctl_top, ranks_of_other_nodes_have_no_share)
{
	struct told t;

	begin(&t, 10 * S);
	t.ranks[0][1].session = 0;
	op(&t, 0, 9 * S, 0, 0);
	compute(&t, NULL);
	cr_expect_float_eq(t.s.jobs[0].ranks[1].wait, TOP_UNKNOWN, 0);
	cr_expect_float_eq(t.s.jobs[0].wait, 0.5, 1e-9, "the mean of the others");
	end(&t);
}

Test(ctl_top, rates_are_those_between_two_samples)
{
	struct told t, next;

	begin(&t, 10 * S);
	begin(&next, 14 * S);
	t.jobs[0].step = 100;
	next.jobs[0].step = 110;
	t.jobs[0].ops_total = 1000;
	next.jobs[0].ops_total = 1400;
	t.jobs[1].step = 7;
	next.jobs[1].step = 3; /* it went back */
	compute(&t, NULL);
	cr_expect_float_eq(t.s.jobs[0].steps, TOP_UNKNOWN, 0);
	compute(&next, &t.s);
	cr_expect_float_eq(next.s.jobs[0].steps, 2.5, 1e-9);
	cr_expect_float_eq(next.s.jobs[0].ops, 100, 1e-9);
	cr_expect_float_eq(next.s.jobs[1].steps, TOP_UNKNOWN, 0);
	end(&next);
	begin(&next, 2 * S); /* another daemon: its time has begun again */
	next.jobs[0].step = 1000;
	compute(&next, &t.s);
	cr_expect_float_eq(next.s.jobs[0].steps, TOP_UNKNOWN, 0);
	end(&next);
	end(&t);
}

static const char *name_at(const struct told *t, size_t i)
{
	return t->s.jobs[i].status->name;
}

Test(ctl_top, the_chosen_job_stays_chosen_in_another_order)
{
	struct top_look l = { .sort = TOP_BY_NAME };
	struct told t;

	begin(&t, 10 * S);
	t.jobs[2].used_bytes = 5;
	compute(&t, NULL);
	top_frame_arrange(&t.s, &l);
	cr_expect_str_eq(name_at(&t, 0), "a");
	cr_expect_str_eq(l.job, "a");
	top_frame_choose(&t.s, &l, 5);
	cr_expect_str_eq(l.job, "c");
	l.sort = TOP_BY_MEMORY;
	top_frame_arrange(&t.s, &l);
	cr_expect_str_eq(name_at(&t, 0), "b");
	cr_expect_str_eq(l.job, "c");
	cr_expect_eq(l.chosen, 2);
	t.jobs[0].name = (char *)"other"; /* it is gone: its place is chosen */
	top_frame_arrange(&t.s, &l);
	cr_expect_str_eq(l.job, "other");
	end(&t);
}

/* A frame of @lines and @columns, both more than 0. */
static void check_size(struct told *t, struct top_look *l, size_t columns, size_t lines)
{
	struct top_frame f;

	l->columns = columns;
	l->lines = lines;
	cr_assert_eq(top_frame_make(&t->s, l, &f), 0);
	cr_assert_leq(f.n, lines, "%zu lines in %zu", f.n, lines);
	/* of tables a column of text is not narrower than eight */
	for (size_t i = 0; i < f.n && columns >= 20; i++)
		cr_assert_leq(width_of(f.all[i].text), columns, "%s", f.all[i].text);
	top_frame_deinit(&f);
}

Test(ctl_top, every_window_gets_what_fits)
{
	Shardd__V1__StallStatus stall = SHARDD__V1__STALL_STATUS__INIT;
	struct top_look l = { .sort = TOP_BY_STATE };
	struct told t;

	begin(&t, 10 * S);
	stall.text = (char *)"rank 1 (pid 4711, stopped) has not begun Reduce of hidden1";
	t.jobs[1].stall = &stall;
	t.jobs[2].name = (char *)"a-name-that-is-longer-than-many-windows-are-wide-and-goes-on";
	compute(&t, NULL);
	top_frame_arrange(&t.s, &l);
	cr_expect_str_eq(l.job, "a", "jobs that stall come first");
	for (int way = 0; way < 4; way++) {
		l.help = way == 1;
		snprintf(l.trouble, sizeof(l.trouble), "%s", way == 2 ? "no answer, alas" : "");
		for (size_t columns = 1; columns < 140; columns += columns < 20 ? 1 : 7)
			for (size_t lines = 1; lines < 40; lines++)
				check_size(&t, &l, columns, lines);
	}
	end(&t);
}

Test(ctl_top, without_a_sample_there_is_only_what_is_in_the_way)
{
	struct told t = { 0 };
	struct top_look l = { .trouble = "no answer" };

	check_size(&t, &l, 40, 10);
}
