/* A rank that opens a job with state of an earlier run: what it asked for decides. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/clock.h"
#include "fdcheck.h"
#include "job/job.h"
#include "nodefix.h"

#define OWNER 12345u

static struct nodefix n;
static struct job *job;

static void test_existing_begin(void)
{
	const struct job_spec spec = {
		.name = "a", .world_size = 2, .lifetime = JOB_KEEP, .ttl_s = 77, .op_timeout_ms = 99
	};
	struct fault f = FAULT_NULL;

	fdcheck_begin();
	nodefix_begin(&n, NULL);
	cr_assert_eq(job_open(&n.jobs, &spec, OWNER, 7, &job, NULL, &f), 0, "%s", f.text);
}

static void test_existing_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define EXISTING_TEST(name)                                                  \
	Test(job_existing, name, .timeout = 60, .init = test_existing_begin, \
	     .fini = test_existing_end)

/* Return: what job_open said; the job is in @ret_found. */
static int open_again(enum job_on_existing want, const char *run, struct job **ret_found,
		      struct fault *f)
{
	const struct job_spec spec = {
		.name = "a", .world_size = 2, .on_existing = want, .run = run
	};

	*f = FAULT_NULL;
	*ret_found = NULL;
	return job_open(&n.jobs, &spec, OWNER, 7, ret_found, NULL, f);
}

static void expect_found(enum job_on_existing want, const char *run)
{
	struct job *found;
	struct fault f;

	cr_expect_eq(open_again(want, run, &found, &f), 0, "%s", f.text);
	cr_expect_eq(found, job);
}

static void expect_refused(enum job_on_existing want, const char *run, const char *words)
{
	struct job *found;
	struct fault f;

	cr_expect_eq(open_again(want, run, &found, &f), FAULT_STATE);
	cr_expect_str_eq(f.field, "on_existing");
	cr_expect(strstr(f.text, words), "\"%s\" is not in \"%s\"", words, f.text);
	cr_expect_null(found);
}

static struct member *join(uint32_t rank, const char *run)
{
	struct member *m = nodefix_join(&n, job, rank);

	job_existing_joined(job, run);
	return m;
}

static void commit_step(uint64_t step)
{
	job->rec->has_commit = true;
	job->rec->step = step;
	job->rec->committed_unix_s = 86400;
	nodefix_wrote(&n);
}

EXISTING_TEST(a_job_without_state_is_found_in_any_case)
{
	expect_found(0, NULL);
	expect_found(JOB_RESUME, "one");
	expect_found(JOB_ERROR, NULL);
}

EXISTING_TEST(committed_state_is_resumed_only_if_that_was_asked_for)
{
	commit_step(5);
	expect_found(0, "two");
	expect_found(JOB_RESUME, "two");
	expect_refused(
		JOB_ERROR, "two",
		"job 'a' has state of an earlier run: step 5, committed 1970-01-02 00:00:00 UTC, "
		"by trainers that are gone");
	job->rec->uncommitted_steps = 3;
	nodefix_wrote(&n);
	expect_refused(JOB_ERROR, NULL, "UTC and 3 steps after it, by");
}

EXISTING_TEST(so_is_an_initialised_unit_without_a_commit)
{
	struct member *m = join(0, "one");
	struct unit *u = nodefix_register(job, nodefix_spec("w", 8));

	expect_found(JOB_ERROR, "one");
	nodefix_drop(&n, m, "gone");
	expect_found(JOB_ERROR, NULL);
	u->rec->initialised = true;
	job->rec->uncommitted_steps = 2;
	expect_refused(JOB_ERROR, "two", "2 steps, none of them committed, by rank 0 (pid ");
	expect_refused(JOB_ERROR, "two", ") of run one");
	u->rec->initialised = false;
	nodefix_wrote(&n);
}

EXISTING_TEST(a_rank_of_the_same_run_goes_on)
{
	struct member *m = join(0, "one");

	commit_step(5);
	expect_found(JOB_ERROR, "one");
	expect_found(JOB_FRESH, "one");
	nodefix_drop(&n, m, "killed");
	expect_found(JOB_ERROR, "one");
	expect_refused(JOB_ERROR, "two", "of run one");
}

/* Ranks of one run start at different times: the later ones find the first. */
EXISTING_TEST(ranks_without_a_run_belong_to_the_trainers_that_are_there)
{
	(void)join(0, "");
	commit_step(5);
	expect_found(JOB_ERROR, NULL);
	expect_found(JOB_FRESH, NULL);
	expect_found(JOB_ERROR, "one");
}

EXISTING_TEST(trainers_of_another_run_are_named)
{
	(void)join(0, "one");
	expect_refused(JOB_ERROR, "two",
		       "job 'a' has 1 trainers of another run, such as rank 0 (pid ");
	expect_refused(
		JOB_FRESH, "two",
		"job 'a' cannot be created again while it has 1 trainers, such as rank 0 (pid ");
}

/* The second rank of another run must not make the state its run's while the first one is there. */
EXISTING_TEST(the_run_changes_with_the_first_rank_only)
{
	struct member *m = join(0, "one");

	(void)join(1, "two");
	cr_expect_str_eq(job->rec->run, "one");
	nodefix_drop(&n, m, "gone");
	nodefix_drop(&n, n.members[1], "gone");
	(void)join(0, "two");
	cr_expect_str_eq(job->rec->run, "two");
}

EXISTING_TEST(a_fresh_job_takes_the_place_and_the_settings)
{
	struct job *found;
	struct fault f;

	commit_step(5);
	cr_assert_eq(open_again(JOB_FRESH, "two", &found, &f), 0, "%s", f.text);
	cr_expect_eq(n.jobs.count, 1);
	cr_expect_not(found->rec->has_commit);
	cr_expect_eq(found->rec->lifetime, JOB_KEEP);
	cr_expect_eq(found->rec->ttl_s, 77);
	cr_expect_eq(found->rec->op_timeout_ms, 99);
}

/* Loading a base with --replace deleted a job that had trained, and had the same name. */
EXISTING_TEST(a_base_does_not_take_the_place_of_a_job_nor_a_job_its_own)
{
	struct job_spec spec = {
		.name = "a", .world_size = 1, .lifetime = JOB_BASE, .on_existing = JOB_FRESH
	};
	struct job *found = NULL;
	struct fault f = FAULT_NULL;

	commit_step(5);
	cr_expect_eq(job_open(&n.jobs, &spec, OWNER, 7, &found, NULL, &f), FAULT_STATE);
	cr_expect(strstr(f.text, "job 'a' is no base, and would be deleted for a base"), "%s",
		  f.text);
	cr_expect(job->rec->has_commit);
	job->rec->lifetime = JOB_BASE;
	nodefix_wrote(&n);
	cr_expect_eq(open_again(JOB_FRESH, "two", &found, &f), FAULT_STATE);
	cr_expect(strstr(f.text, "job 'a' is a base, and would be deleted for a job"), "%s",
		  f.text);
	cr_expect(job->rec->has_commit);
	cr_expect_eq(n.jobs.count, 1);
}
