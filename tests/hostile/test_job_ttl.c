/* How long memory is kept without trainers: jobs cannot ask for ever, and what crashed before its
 * first commit goes soon. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "failfix.h"

static void test_job_ttl_begin(void)
{
	static const char *const args[] = { "--set", "uncommitted_ttl_s=1s",
					    "--set", "max_job_ttl_s=2h",
					    "--set", "job_ttl_s=1h",
					    NULL };

	failfix_begin(args);
}

TestSuite(job_ttl, .init = test_job_ttl_begin, .fini = failfix_end, .timeout = 120);

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

struct how {
	enum shardd_lifetime lifetime;
	bool commits;
};

/* Join, perhaps commit, and end without leaving. */
static int crashes(const struct trainer *t)
{
	const struct how *how = t->arg;
	shardd_client *c = train_connect(t);

	train_join_as(c, t, how->lifetime);
	train_zero_unit(c, "u", 100, NULL);
	if (how->commits)
		TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	shardd_close(c);
	return 0;
}

static void crash(const char *job, enum shardd_lifetime lifetime, bool commits)
{
	struct how how = { lifetime, commits };

	cr_assert_eq(trainer_wait(trainer_start(&trainfix, job, 0, 1, crashes, &how), 30), 0);
}

/* They were all kept for job_ttl_s, a day. */
Test(job_ttl, what_crashed_before_its_first_commit_goes)
{
	crash("kept", SHARDD_KEEP, false);
	crash("committed", SHARDD_EPHEMERAL, true);
	crash("crashed", SHARDD_EPHEMERAL, false);
	AWAIT(!fail_has_job(&trainfix, "crashed"), 20);
	AWAIT(fail_logged(&trainfix, "job expired job="), 20);
	/* one that crashed before the others are asked for is gone by now, so they have had the time */
	crash("again", SHARDD_EPHEMERAL, false);
	AWAIT(!fail_has_job(&trainfix, "again"), 20);
	cr_assert(fail_job_is(&trainfix, "committed", "IDLE"));
	cr_assert(fail_job_is(&trainfix, "kept", "IDLE"));
	json_decref(daemonfix_ctl(&trainfix, WORDS("job", "delete", "committed")));
	json_decref(daemonfix_ctl(&trainfix, WORDS("job", "delete", "kept")));
}

Test(job_ttl, a_longer_time_than_max_job_ttl_s_is_refused)
{
	char out[1024];

	cr_assert_eq(daemonfix_ctl_text(&trainfix,
					WORDS("job", "create", "long", "--world-size", "1", "--ttl",
					      "7201"),
					out, sizeof(out)),
		     1);
	cr_assert(strstr(out, "the limit is 7200 (max_job_ttl_s)"), "%s", out);
	cr_assert(!fail_has_job(&trainfix, "long"));
	cr_assert_eq(daemonfix_ctl_text(&trainfix,
					WORDS("job", "create", "long", "--world-size", "1", "--ttl",
					      "7200"),
					out, sizeof(out)),
		     0, "%s", out);
	json_decref(daemonfix_ctl(&trainfix, WORDS("job", "delete", "long")));
}
