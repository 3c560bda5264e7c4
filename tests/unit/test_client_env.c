#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "env.h"
#include "fdcheck.h"

TestSuite(client_env, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

Test(client_env, the_socket_is_the_argument_or_the_variable_or_the_default)
{
	unsetenv("SHARDD_SOCKET");
	cr_expect_str_eq(env_socket(NULL), "/run/shardd/shardd.sock");
	setenv("SHARDD_SOCKET", "", 1);
	cr_expect_str_eq(env_socket(NULL), "/run/shardd/shardd.sock");
	setenv("SHARDD_SOCKET", "/a", 1);
	cr_expect_str_eq(env_socket(NULL), "/a");
	cr_expect_str_eq(env_socket("/b"), "/b");
}

Test(client_env, the_job_must_come_from_somewhere)
{
	struct shardd_error err = { 0 };
	const char *job = NULL;

	unsetenv("SHARDD_JOB");
	cr_expect_eq(env_job(NULL, &job, &err), -SHARDD_INVALID_ARGUMENT);
	cr_expect_not_null(strstr(err.text, "SHARDD_JOB"));
	cr_expect_null(job);
	setenv("SHARDD_JOB", "train", 1);
	cr_expect_eq(env_job(NULL, &job, &err), 0);
	cr_expect_str_eq(job, "train");
	cr_expect_eq(env_job("other", &job, &err), 0);
	cr_expect_str_eq(job, "other");
}

Test(client_env, numbers_that_are_none_are_refused_by_name)
{
	static const char *const bad[] = { "",    " 1",         "+1",
					   "-1",  "1x",         "0x1",
					   "1.0", "4294967295", "99999999999999999999" };
	struct shardd_error err;
	uint32_t n = 7;

	unsetenv("RANK");
	cr_expect_eq(env_number("RANK", UINT32_MAX - 1, &n, &err), -SHARDD_INVALID_ARGUMENT);
	cr_expect_str_eq(err.field, "RANK");
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		setenv("RANK", bad[i], 1);
		cr_expect_eq(env_number("RANK", UINT32_MAX - 1, &n, &err), -SHARDD_INVALID_ARGUMENT,
			     "\"%s\"", bad[i]);
		cr_expect_eq(err.code, SHARDD_INVALID_ARGUMENT);
		cr_expect_str_eq(err.field, "RANK");
	}
	cr_expect_eq(n, 7);
	cr_expect_eq(env_number("RANK", UINT32_MAX - 1, &n, NULL), -SHARDD_INVALID_ARGUMENT);
	setenv("RANK", "4294967294", 1);
	cr_expect_eq(env_number("RANK", UINT32_MAX - 1, &n, &err), 0);
	cr_expect_eq(n, UINT32_MAX - 1);
}
