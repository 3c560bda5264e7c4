/* What the daemon says of its configuration while it runs: a broken file at SIGHUP, variables of
 * the environment that it does not know; and limits that reach open connections. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "failfix.h"
#include "rawsock.h"

static char file[64];

static void write_config(const char *text)
{
	FILE *f = fopen(file, "we");

	cr_assert_not_null(f);
	fputs(text, f);
	fclose(f);
}

static void test_reload_begin(void)
{
	static const char *args[] = { "--config", file, NULL };

	snprintf(file, sizeof(file), "/tmp/shardd-reload-%d.yaml", (int)getpid());
	write_config("log_level: info\njob_ttl_s: 1h\n");
	setenv("SHARDD_MEMORY_BYTE", "1GiB", 1);
	/* not SHARDD_JOB, which the fixture takes from the daemon */
	setenv("SHARDD_LIBRARY", "known", 1);
	failfix_begin(args);
}

static void test_reload_end(void)
{
	unlink(file);
	failfix_end();
}

TestSuite(reload, .init = test_reload_begin, .fini = test_reload_end, .timeout = 60);

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

/* ------------------------------------------------ limits of open connections */

enum { PIECE = 16384, PIECES = 3 };

/* What this user's gRPC connections have in messages that are not complete. */
static uint64_t message_bytes(void)
{
	static const char *const args[] = { "users", NULL };
	json_t *all = daemonfix_ctl(&trainfix, args), *user, *k;
	uint64_t used = 0;
	size_t i, j;

	json_array_foreach(json_object_get(all, "users"), i, user)
	{
		if ((uid_t)json_integer_value(json_object_get(user, "uid")) != getuid())
			continue;
		json_array_foreach(json_object_get(user, "usage"), j, k)
		{
			if (strcmp(json_string_value(json_object_get(k, "name")), "message_bytes"))
				continue;
			used = (uint64_t)json_integer_value(json_object_get(k, "used"));
		}
	}
	json_decref(all);
	return used;
}

/* A connection that sends the beginning of a message of 1 MiB, within HTTP/2's first window. */
static int begin_message(void)
{
	static uint8_t piece[PIECE];
	int fd = rawsock_connect(trainfix.socket);

	cr_assert_geq(fd, 0);
	rawsock_h2_begin(fd);
	cr_assert(rawsock_h2_headers(fd, 1, "/shardd.v1.JobService/Join"));
	for (unsigned i = 0; i < PIECES; i++) {
		memcpy(piece, i ? "\0\0\0\0\0" : "\0\0\x10\0\0", 5);
		cr_assert(rawsock_h2_frame(fd, H2_DATA, 0, 1, piece, PIECE));
	}
	return fd;
}

static void reload_message_limit(const char *limit)
{
	char config[256];

	snprintf(config, sizeof(config),
		 "grpc_unattached_bytes: 1MiB\ngrpc_message_timeout_ms: 50s\n"
		 "user_limits: [\"%u:max_message_bytes=%s\"]\n",
		 (unsigned)getuid(), limit);
	write_config(config);
	cr_assert_eq(kill(trainfix.pid, SIGHUP), 0);
}

/* Of two connections of a user one sends, whatever the limit is; the other waits until the limit of
 * the open connections is raised. */
Test(reload, a_higher_limit_lets_a_connection_go_on_that_waits)
{
	int first, second;

	reload_message_limit("20KiB");
	AWAIT(fail_logged(&trainfix, "configuration reread"), 20);
	first = begin_message();
	AWAIT(message_bytes() == PIECES * PIECE, 20);
	second = begin_message();
	for (unsigned i = 0; i < 5; i++)
		cr_assert_eq(message_bytes(), PIECES * PIECE);
	reload_message_limit("1MiB");
	AWAIT(message_bytes() == 2 * PIECES * PIECE, 20);
	close(first);
	close(second);
	AWAIT(message_bytes() == 0, 20);
}
