#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/args.h"
#include "core/cleanup.h"
#include "fdcheck.h"

#define TEST(name) Test(args, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)

#define WORDS_MAX 16

/* A command line in memory that may be written to. */
struct line {
	char text[512];
	char *argv[WORDS_MAX + 1];
	int argc;
};

static void split(struct line *l, const char *text)
{
	*l = (struct line){ .argc = 0 };
	snprintf(l->text, sizeof(l->text), "shardd %s", text);
	for (char *save = NULL, *word = strtok_r(l->text, " ", &save); word;
	     word = strtok_r(NULL, " ", &save)) {
		cr_assert_lt(l->argc, WORDS_MAX);
		l->argv[l->argc++] = word;
	}
}

static int parse(struct args *a, struct line *l, const char *text, struct fault *f)
{
	split(l, text);
	*f = FAULT_NULL;
	return args_parse(a, l->argc, l->argv, f);
}

TEST(flags_select_what_is_done)
{
	static const struct {
		const char *text;
		enum args_action action;
	} cases[] = {
		{ "", ARGS_RUN },
		{ "--socket /a", ARGS_RUN },
		{ "--check-config", ARGS_CHECK_CONFIG },
		{ "--print-config --socket /a", ARGS_PRINT_CONFIG },
		{ "--example-config", ARGS_EXAMPLE_CONFIG },
		{ "--version", ARGS_VERSION },
		{ "--help", ARGS_HELP },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct args a = ARGS_NULL;
		struct fault f;
		struct line l;

		cr_assert_eq(parse(&a, &l, cases[i].text, &f), 0, "%s", f.text);
		cr_assert_eq(a.action, cases[i].action, "%s", cases[i].text);
		args_deinit(&a);
		args_deinit(&a);
	}
}

TEST(wrong_lines_are_refused_and_named)
{
	static const struct {
		const char *text, *names;
	} cases[] = {
		{ "--bogus", "--bogus" },
		{ "-x", "-x" },
		{ "word", "'word'" },
		{ "--socket", "--socket" },
		{ "--version=3", "--version=3" },
		{ "--set threads", "'threads'" },
		{ "--set =5", "'=5'" },
		{ "--c x", "--c" },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct args a = ARGS_NULL;
		struct fault f;
		struct line l;

		cr_assert_eq(parse(&a, &l, cases[i].text, &f), FAULT_INVALID, "%s", cases[i].text);
		cr_assert_not_null(strstr(f.text, cases[i].names), "%s", f.text);
		args_deinit(&a);
	}
}

/* Each source over the one before it, seen by what each leaves alone. */
TEST(defaults_then_file_then_environment_then_flags)
{
	char path[] = "/tmp/shardd-args-XXXXXX", text[256];
	static const char yaml[] = "max_jobs: 10\nthreads: 10\nmax_connections: 10\n";
	struct args a = ARGS_NULL;
	struct config c;
	struct fault f;
	struct line l;
	int fd = mkstemp(path);

	cr_assert_eq(write(fd, yaml, strlen(yaml)), (ssize_t)strlen(yaml));
	close(fd);
	setenv("SHARDD_THREADS", "20", 1);
	setenv("SHARDD_MAX_CONNECTIONS", "20", 1);
	snprintf(text, sizeof(text),
		 "--set max_connections=5 --config %s --set max_connections=30 --socket /s", path);
	cr_assert_eq(parse(&a, &l, text, &f), 0, "%s", f.text);
	/* twice: a reload reads the same command line again */
	for (int i = 0; i < 2; i++) {
		cr_assert_eq(args_config(&a, &c, &f), 0, "%s", f.text);
		cr_assert_eq(c.max_inflight_ops, 1024);
		cr_assert_eq(c.max_jobs, 10);
		cr_assert_eq(c.threads, 20);
		cr_assert_eq(c.max_connections, 30);
		cr_assert_str_eq(c.socket, "/s");
	}
	args_deinit(&a);
	unlink(path);
}

TEST(a_wrong_source_leaves_the_configuration_alone)
{
	static const char *const lines[] = {
		"--set threads=x",
		"--set nokey=1",
		"--backend rocm",
		"--config /nonexistent/shardd.yaml",
		"--set memory_bytes=1MiB --set job_quota_bytes=2MiB",
	};

	for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
		struct config c = { .threads = 77 };
		struct args a = ARGS_NULL;
		struct fault f;
		struct line l;

		cr_assert_eq(parse(&a, &l, lines[i], &f), 0, "%s", f.text);
		cr_assert_neq(args_config(&a, &c, &f), 0, "%s", lines[i]);
		cr_assert_gt(strlen(f.text), 10);
		cr_assert_eq(c.threads, 77);
		args_deinit(&a);
	}
}

TEST(a_value_may_hold_equals_signs)
{
	struct args a = ARGS_NULL;
	struct config c;
	struct fault f;
	struct line l;

	cr_assert_eq(parse(&a, &l, "--set socket=/tmp/a=b", &f), 0);
	cr_assert_eq(args_config(&a, &c, &f), 0, "%s", f.text);
	cr_assert_str_eq(c.socket, "/tmp/a=b");
	args_deinit(&a);
}
