/* What the daemon says of its configuration while it runs: a broken file at SIGHUP, variables of
 * the environment that it does not know. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "failfix.h"

static char file[64];

static void write_config(const char *text)
{
	FILE *f = fopen(file, "we");

	cr_assert_not_null(f);
	fputs(text, f);
	fclose(f);
}

static void begin(void)
{
	static const char *args[] = { "--config", file, NULL };

	snprintf(file, sizeof(file), "/tmp/shardd-reload-%d.yaml", (int)getpid());
	write_config("log_level: info\njob_ttl_s: 1h\n");
	setenv("SHARDD_MEMORY_BYTE", "1GiB", 1);
	/* not SHARDD_JOB, which the fixture takes from the daemon */
	setenv("SHARDD_LIBRARY", "known", 1);
	failfix_begin(args);
}

static void end(void)
{
	unlink(file);
	failfix_end();
}

TestSuite(reload, .init = begin, .fini = end, .timeout = 60);

/* @words: not in the log yet. */
static void reload(const char *config, const char *words)
{
	cr_assert(!fail_logged(&trainfix, words), "'%s' is of an earlier reload", words);
	write_config(config);
	cr_assert_eq(kill(trainfix.pid, SIGHUP), 0);
	AWAIT(fail_logged(&trainfix, words), 20);
	daemonfix_check_alive(&trainfix);
}

static void expect_job_ttl(const char *name, const char *words)
{
	const char *const create[] = { "job", "create", name, "--world-size", "1", NULL };
	const char *const delete[] = { "job", "delete", name, NULL };

	cr_assert(!fail_logged(&trainfix, words));
	json_decref(daemonfix_ctl(&trainfix, create));
	AWAIT(fail_logged(&trainfix, words), 20);
	json_decref(daemonfix_ctl(&trainfix, delete));
}

Test(reload, a_broken_file_is_named_with_line_and_key_and_changes_nothing)
{
	char words[256];

	snprintf(words, sizeof(words), "key=job_ttl_s why=\"%s, line 2: ", file);
	reload("log_level: info\njob_ttl_s: many\n", words);
	snprintf(words, sizeof(words), "key=nonsense why=\"%s, line 3: ", file);
	reload("log_level: debug\njob_ttl_s: 2h\nnonsense: 1\n", words);
	reload("log_level: info\n  : [\n", "did not find expected key");     /* not YAML */
	reload("max_job_ttl_s: 10s\n", "key=job_ttl_s why=\"job_ttl_s is "); /* below job_ttl_s */
	expect_job_ttl("before", "ttl_s=3600");
	reload("job_ttl_s: 2h\n", "configuration reread");
	expect_job_ttl("after", "ttl_s=7200");
}

Test(reload, unknown_variables_are_named_at_start)
{
	AWAIT(fail_logged(&trainfix, "name=SHARDD_MEMORY_BYTE nearest=SHARDD_MEMORY_BYTES"), 20);
	cr_assert(!fail_logged(&trainfix, "name=SHARDD_LIBRARY"));
}
