/* Arguments of shardctl's verbs that are answered without a daemon. */
#include <criterion/criterion.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "ctl/ctl.h"
#include "fdcheck.h"

TestSuite(ctl_arguments, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

enum { MAX_ARGUMENTS = 10 };

static int count(char *const *argv)
{
	int n = 0;

	while (argv[n])
		n++;
	return n;
}

/* No verb here is to call anybody. */
static int run(int (*verb)(struct ctl *ctl, int argc, char **argv), const char *const *words)
{
	struct ctl ctl = { .socket = "/nonexistent/s" };
	char *argv[MAX_ARGUMENTS + 1] = { 0 };
	int r;

	for (int i = 0; words[i] && i < MAX_ARGUMENTS; i++)
		argv[i] = strdup(words[i]);
	optind = 0;
	r = verb(&ctl, count(argv), argv);
	cr_expect_null(ctl.rpc);
	for (int i = 0; i < MAX_ARGUMENTS; i++)
		free(argv[i]);
	return r;
}

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

Test(ctl_arguments, run_explains_itself)
{
	cr_expect_eq(run(ctl_run, WORDS("run", "--help")), CTL_OK);
	cr_expect_eq(run(ctl_run, WORDS("run", "-h")), CTL_OK);
	cr_expect_eq(run(ctl_run, WORDS("run", "-n", "2", "--help", "--", "true")), CTL_OK);
}

Test(ctl_arguments, run_starts_as_many_as_a_job_may_have)
{
	cr_expect_eq(run(ctl_run, WORDS("run", "-n", "1025", "--", "true")), CTL_USAGE);
	cr_expect_eq(run(ctl_run, WORDS("run", "-n", "0", "--", "true")), CTL_USAGE);
}

Test(ctl_arguments, a_trace_goes_to_one_file)
{
	cr_expect_eq(run(ctl_trace, WORDS("trace")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "job")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o", "")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o", "f", "--all", "a")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o", "f", "--last", "0")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o", "f", "--last", "many")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o", "f", "--seconds", "-1")), CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o", "f", "--seconds", "4294967296")),
		     CTL_USAGE);
	cr_expect_eq(run(ctl_trace, WORDS("trace", "-o", "f", "--nonsense")), CTL_USAGE);
}

Test(ctl_arguments, a_job_is_kept_or_ephemeral)
{
	static const char *const both[][2] = { { "--keep", "--ephemeral" },
					       { "--ephemeral", "--keep" } };

	for (size_t i = 0; i < ARRAY_SIZE(both); i++)
		cr_expect_eq(run(ctl_job, WORDS("job", "create", "a", "--world-size", "1",
						both[i][0], both[i][1])),
			     CTL_USAGE);
	/* said twice is no contradiction: what is wrong then is something else */
	cr_expect_eq(run(ctl_job, WORDS("job", "create", "--keep", "--keep", "a")), CTL_USAGE,
		     "the world size is missing");
}

/* An option that changes nothing is not taken in silence. */
Test(ctl_arguments, a_plan_with_clipping_steps_in_backward)
{
	cr_expect_eq(run(ctl_plan, WORDS("plan", "--params", "7B", "--ranks", "8", "--optimizer",
					 "adamw", "--clip")),
		     CTL_USAGE);
	cr_expect_neq(run(ctl_plan, WORDS("plan", "--params", "7B", "--ranks", "8", "--optimizer",
					  "adamw", "--in-backward", "--clip")),
		      CTL_USAGE);
}
