/* Elastic jobs that take ranks in: when, which numbers these have, and who is refused. The fixture compares
 * the journal with the records at the end of each test. */
#include "elasticfix.h"
#include "fdcheck.h"

TestSuite(elastic_grow, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

Test(elastic_grow, takes_a_rank_in_at_a_commit)
{
	float was[ELEMENTS], is[ELEMENTS];
	struct fixture x;
	struct unit *u = shrunk(&x);

	waits(&x, 2);
	expect_words(&x, "rank 2 (pid ");
	expect_words(&x, ") waits to join, grows to 4 at the next commit");
	advance(&x, 10 * GRACE_MS);
	expect_world(&x, 3);
	cr_expect_eq(x.p[0].m->state, MEMBER_JOINED, "nobody is disturbed before a commit");
	step(&x, u, 2);
	expect_world(&x, 4);
	memcpy(was, nodefix_params(u), sizeof(was));
	cr_expect(strstr(x.n.events.text,
			 "goes on with 4 ranks (3 before), 1 of which has joined now: "
			 "join again"),
		  "%s", x.n.events.text);
	cr_expect_eq(x.job->rec->step, 2);
	cr_expect_eq(blob_of(&x, 1), 11);
	cr_expect_eq(blob_of(&x, 2), 0);
	cr_expect_eq(blob_of(&x, 3), 13);
	expect_sound(&x);
	for (uint32_t i = 0; i < 4; i++)
		join(&x, i, i);
	memcpy(is, nodefix_params(u), sizeof(is));
	cr_expect_arr_eq(is, was, sizeof(was));
	step(&x, u, 3);
	cr_expect_eq(blob_of(&x, 2), 12);
	end(&x);
}

/* Not all that were started are there: others may come. */
Test(elastic_grow, takes_several_in_at_once)
{
	struct fixture x;
	struct unit *u;

	begin(&x);
	u = make_unit(&x, nodefix_spec("u", ELEMENTS));
	waits(&x, 5);
	step(&x, u, 1);
	expect_world(&x, 5);
	for (uint32_t i = 0; i < 4; i++)
		join(&x, i, i);
	join(&x, 5, 4);
	cr_expect_eq(x.job->rec->launched, 4);
	dies(&x, 0);
	for (uint32_t i = 1; i < 4; i++)
		join(&x, i, i);
	join(&x, 5, 4);
	advance(&x, GRACE_MS);
	expect_world(&x, 4);
	for (uint32_t i = 1; i < 4; i++)
		join(&x, i, i - 1);
	join(&x, 5, 3);
	waits(&x, 6);
	step(&x, u, 2);
	expect_world(&x, 4);
	waits(&x, 7);
	advance(&x, GRACE_MS);
	step(&x, u, 3);
	expect_world(&x, 6);
	cr_expect_eq(blob_of(&x, 3), 15);
	for (uint32_t i = 1; i < 4; i++)
		join(&x, i, i - 1);
	for (uint32_t i = 5; i < 8; i++)
		join(&x, i, i - 2);
	step(&x, u, 4);
	expect_sound(&x);
	end(&x);
}

/* Nobody trains, since ranks are missing: nothing is lost if it grows at once. */
Test(elastic_grow, takes_a_rank_in_while_others_are_missing)
{
	struct fixture x;

	(void)shrunk(&x);
	dies(&x, 1);
	join(&x, 0, 0);
	join(&x, 3, 2);
	waits(&x, 2);
	expect_words(&x,
		     "waits to join; waiting for 1 of 3 ranks (1), goes on with other 3 in 5.0 s");
	advance(&x, GRACE_MS);
	expect_world(&x, 3);
	join(&x, 0, 0);
	join(&x, 2, 1);
	join(&x, 3, 2);
	waits(&x, 1);
	dies(&x, 0);
	join(&x, 2, 1);
	join(&x, 3, 2);
	/* all that were started are there: no other is waited for */
	join(&x, 0, 0);
	advance(&x, 1);
	expect_world(&x, 3);
	end(&x);
}

/* All have ended. A process that is started again does not find itself in a job that changes once more:
 * that would end some programs, which would be started again, and so on. */
Test(elastic_grow, all_that_are_started_again_wait_for_each_other)
{
	struct fixture x;
	struct unit *u = shrunk(&x);

	for (uint32_t i = 0; i < 4; i++)
		if (i != 2)
			dies(&x, i);
	waits(&x, 3);
	waits(&x, 0);
	waits(&x, 2);
	advance(&x, 1);
	expect_world(&x, 3);
	expect_words(&x, "waiting for 1 of 4 ranks (1), goes on with other 3 in 5.0 s");
	waits(&x, 1);
	advance(&x, 1); /* all are there: no other is waited for */
	expect_world(&x, 4);
	cr_expect_eq(x.job->rec->n_numbers, 0);
	for (uint32_t i = 0; i < 4; i++)
		join(&x, i, i);
	cr_expect_eq(blob_of(&x, 3), 13);
	cr_expect_eq(blob_of(&x, 1), 11);
	step(&x, u, 2);
	end(&x);
}

Test(elastic_grow, some_that_are_started_again_go_on_after_the_grace)
{
	struct fixture x;
	struct unit *u = shrunk(&x);

	for (uint32_t i = 0; i < 4; i++)
		if (i != 2)
			dies(&x, i);
	waits(&x, 0);
	waits(&x, 3);
	advance(&x, GRACE_MS - 1);
	expect_world(&x, 3);
	advance(&x, 1);
	expect_world(&x, 2);
	join(&x, 0, 0);
	join(&x, 3, 1);
	cr_expect_eq(blob_of(&x, 1), 13);
	advance(&x, 10 * GRACE_MS);
	expect_world(&x, 2);
	step(&x, u, 2);
	end(&x);
}

/* They have lost the daemon only, and have their places. */
Test(elastic_grow, ranks_that_return_do_not_wait)
{
	struct fixture x;

	(void)shrunk(&x);
	for (uint32_t i = 0; i < 4; i++)
		if (i != 2)
			dies(&x, i);
	waits(&x, 1);
	x.returns = true;
	join(&x, 0, 0);
	x.returns = false;
	advance(&x, 1);
	join(&x, 1, 1); /* since others are there */
	join(&x, 3, 2);
	advance(&x, 10 * GRACE_MS);
	expect_world(&x, 3);
	end(&x);
}

Test(elastic_grow, grows_at_numbered_steps_without_commits)
{
	struct fixture x;

	(void)shrunk(&x);
	x.job->rec->has_commit = false;
	x.job->rec->anchored = true;
	nodefix_wrote(&x.n);
	waits(&x, 2);
	elastic_stepped(x.job);
	nodefix_turns(&x.n);
	expect_world(&x, 4);
	end(&x);
}

Test(elastic_grow, does_not_grow_when_the_step_is_not_known)
{
	struct fixture x;

	(void)shrunk(&x);
	waits(&x, 2);
	x.job->rec->uncommitted_steps = 1;
	nodefix_wrote(&x.n);
	elastic_committed(x.job);
	nodefix_turns(&x.n);
	expect_world(&x, 3);
	cr_expect_eq(x.p[0].m->state, MEMBER_JOINED);
	end(&x);
}

/* A client that joins and goes, again and again, does not hold the others up. */
Test(elastic_grow, a_newcomer_that_gives_up_changes_nothing)
{
	struct fixture x;
	struct unit *u = shrunk(&x);

	for (unsigned i = 0; i < 3; i++) {
		waits(&x, 2);
		elastic_newcomer_leave(&x.p[2].newcomer);
		step(&x, u, 2 + i);
		expect_world(&x, 3);
	}
	expect_words(&x, "");
	end(&x);
}

/* Nor does one whose process fails whenever it starts, while a rank is missing. */
Test(elastic_grow, a_newcomer_that_comes_and_goes_is_not_waited_for)
{
	struct fixture x;
	unsigned came = 0;
	uint32_t rank;

	(void)shrunk(&x);
	dies(&x, 0);
	join(&x, 1, 1);
	join(&x, 3, 2);
	for (; launched_rank(x.job, 0, &rank) && came < 10 * MOST; came++) {
		waits(&x, 2);
		advance(&x, GRACE_MS - 1000);
		elastic_newcomer_leave(&x.p[2].newcomer);
		advance(&x, 1);
	}
	cr_expect_leq(came, 2 * MOST, "%u times", came);
	expect_sound(&x);
	end(&x);
}

Test(elastic_grow, newcomers_are_refused_what_others_have)
{
	struct elastic_newcomer other;
	struct fault f = FAULT_NULL;
	struct fixture x;

	(void)shrunk(&x);
	waits(&x, 2);
	waits(&x, 2);
	elastic_newcomer_init(&other);
	cr_expect_eq(elastic_wait(x.job, 2, "", 77, &other, &f), RES_FAILED);
	cr_expect(strstr(f.text, "rank 2 of job 'job' is taken by pid"), "%s", f.text);
	f = FAULT_NULL;
	cr_expect_eq(elastic_wait(x.job, 8, "", 77, &other, &f), RES_FAILED);
	cr_expect(strstr(f.text, "rank 8 is out of range (0..7)"), "%s", f.text);
	f = FAULT_NULL;
	cr_expect_eq(elastic_wait(x.job, 5, "cuda:9", 77, &other, &f), RES_FAILED);
	cr_expect(strstr(f.text, "there is no device 'cuda:9'"), "%s", f.text);
	elastic_newcomer_leave(&other);
	x.launched = 3;
	refused(&x, 2, FAULT_STATE, "job 'job' has world size 4, not 3");
	x.launched = 4;
	end(&x);
}

/* Its number is another process's by now. */
Test(elastic_grow, a_number_that_was_given_away_is_refused)
{
	struct member *late;
	struct fixture x;
	struct fault f = FAULT_NULL;
	struct unit *u;

	begin(&x);
	u = make_unit(&x, nodefix_spec("u", ELEMENTS));
	step(&x, u, 1);
	dies(&x, 3);
	late = x.p[2].m;
	join(&x, 0, 0);
	join(&x, 1, 1);
	advance(&x, GRACE_MS);
	join(&x, 0, 0);
	join(&x, 1, 1);
	x.p[2].m = NULL; /* another process of that number */
	waits(&x, 2);
	advance(&x, GRACE_MS);
	step(&x, u, 2);
	expect_world(&x, 3);
	join(&x, 2, 2);
	cr_expect_eq(nodefix_try_join(&x.n, x.job, 2, NULL, late, &late, &f), RES_FAILED);
	cr_expect(strstr(f.text, "rank 2 of job 'job' is taken by pid"), "%s", f.text);
	end(&x);
}

Test(elastic_grow, a_rank_cannot_become_another_by_itself)
{
	struct fault f = FAULT_NULL;
	struct fixture x;
	struct member *m;

	(void)shrunk(&x);
	cr_expect_eq(nodefix_try_join(&x.n, x.job, 0, NULL, x.p[1].m, &m, &f), RES_FAILED);
	cr_expect(strstr(f.text, "this session is rank 1 of job 'job' and cannot become rank 0"),
		  "%s", f.text);
	f = FAULT_NULL;
	cr_expect_eq(nodefix_try_join(&x.n, x.job, 2, NULL, x.p[3].m, &m, &f), RES_FAILED);
	cr_expect(strstr(f.text, "this session is rank 3 of job 'job' and cannot become rank 2"),
		  "%s", f.text);
	end(&x);
}

Test(elastic_grow, newcomers_do_not_wait_for_ever)
{
	struct fixture x;

	setup(&x, &(struct job_spec){ .min_ranks = 2, .op_timeout_ms = 9000 }, 1);
	waits(&x, 4);
	advance(&x, 8999);
	waits(&x, 4);
	advance(&x, 1);
	refused(&x, 4, FAULT_DEADLINE,
		"rank 4 has waited 9000 ms (op_timeout_ms) to be taken into job 'job': rank 4 "
		"(pid ");
	end(&x);
}

Test(elastic_grow, who_waits_is_told_that_the_job_was_deleted)
{
	struct fault f = FAULT_NULL;
	struct fixture x;

	(void)shrunk(&x);
	waits(&x, 2);
	elastic_newcomer_leave(&x.p[2].newcomer); /* as its call does when it ends with that */
	elastic_committed(x.job);
	cr_expect_eq(job_delete(x.job, true, NULL, &f), 0, "%s", f.text);
	nodefix_turns(&x.n);
	end(&x);
}
