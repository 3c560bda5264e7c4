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
	setenv("SHARDD_JOB", "known", 1);
	failfix_begin(args);
}

static void end(void)
{
	unlink(file);
	failfix_end();
}

TestSuite(reload, .init = begin, .fini = end, .timeout = 60);

static void reload(const char *config, const char *words)
{
	write_config(config);
	cr_assert_eq(kill(trainfix.pid, SIGHUP), 0);
	AWAIT(fail_logged(&trainfix, words), 20);
	daemonfix_check_alive(&trainfix);
}

Test(reload, a_broken_file_is_named_with_line_and_key_and_changes_nothing)
{
	static const char *const create[] = { "job", "create", "j", "--world-size", "1", NULL };
	static const char *const delete[] = { "job", "delete", "j", NULL };
	char words[256];

	snprintf(words, sizeof(words), "key=job_ttl_s why=\"%s, line 2: ", file);
	reload("log_level: info\njob_ttl_s: many\n", words);
	snprintf(words, sizeof(words), "key=nonsense why=\"%s, line 3: ", file);
	reload("log_level: debug\njob_ttl_s: 2h\nnonsense: 1\n", words);
	snprintf(words, sizeof(words), "why=\"%s, line 2: ", file);
	reload("log_level: info\n  : [\n", words);
	snprintf(words, sizeof(words), "key=job_ttl_s why=\"");
	reload("max_job_ttl_s: 10s\n", words); /* below job_ttl_s */
	json_decref(daemonfix_ctl(&trainfix, create));
	AWAIT(fail_logged(&trainfix, "job created"), 20);
	AWAIT(fail_logged(&trainfix, "ttl_s=3600"), 20);
	json_decref(daemonfix_ctl(&trainfix, delete));
	reload("job_ttl_s: 2h\n", "configuration reread");
}

Test(reload, unknown_variables_are_named_at_start)
{
	AWAIT(fail_logged(&trainfix, "name=SHARDD_MEMORY_BYTE nearest=SHARDD_MEMORY_BYTES"), 20);
	cr_assert(!fail_logged(&trainfix, "name=SHARDD_JOB"));
}
