/* What words become, by the forms of verbs. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "ctl/complete.h"
#include "fdcheck.h"

TestSuite(ctl_complete, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

static const struct ctl_verb verbs[] = {
	{ "look", "[JOB] [-n N]", "look at it", NULL, NULL },
	{ "lock", "", "lock it", NULL, NULL },
	{ "file", "in|out", "move files", NULL,
	  "  file in FILE|- DIR [--how slow|fast]\n"
	  "          [--both|--none] [--rate BYTES | --all]\n"
	  "  file out JOB off\n" },
	{ "start", "-n N -- CMD...", "start it", NULL, "  start -n N [--min M] -- CMD...\n" },
};

/* As if there were two. */
static void jobs(const char *socket, const char *typed, FILE *out)
{
	static const char *const names[] = { "first", "second" };

	if (socket)
		fprintf(out, "of %s\n", socket);
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (strncmp(names[i], typed, strlen(typed)) == 0)
			fprintf(out, "%s\n", names[i]);
}

Test(ctl_complete, words_become_what_the_forms_say)
{
	static const struct {
		const char *words[8];
		const char *expected;
	} rows[] = {
		{ { "" }, "look\tlook at it\nlock\tlock it\nfile\tmove files\nstart\tstart it\n" },
		{ { NULL },
		  "look\tlook at it\nlock\tlock it\nfile\tmove files\nstart\tstart it\n" },
		{ { "lo" }, "look\tlook at it\nlock\tlock it\n" },
		{ { "--js" }, "--json\n" },
		{ { "--json", "fi" }, "file\tmove files\n" },
		{ { "--socket", "" }, ":file\n" },
		{ { "nonsense", "" }, "" },
		{ { "lock", "" }, "" },
		{ { "look", "" }, "first\nsecond\n" },
		{ { "look", "s" }, "second\n" },
		{ { "--socket", "/s", "look", "" }, "first\nof /s\nsecond\n" },
		{ { "--socket=/s", "look", "s" }, "of /s\nsecond\n" },
		{ { "look", "-" }, "--help\n-n\n" },
		{ { "look", "-n", "" }, "" },
		{ { "look", "-n", "3", "f" }, "first\n" },
		{ { "look", "first", "" }, "-n\n" },
		{ { "file", "" }, "in\nout\n" },
		{ { "file", "i" }, "in\n" },
		{ { "file", "in", "" }, ":file\n" },
		{ { "file", "in", "-", "" }, ":dir\n" },
		{ { "file", "in", "--how", "" }, "fast\nslow\n" },
		{ { "file", "in", "--how=slow", "a", "" }, ":dir\n" },
		{ { "file", "in", "a", "b", "--" },
		  "--all\n--both\n--help\n--how\n--none\n--rate\n" },
		{ { "file", "in", "--both", "a", "" }, ":dir\n" },
		{ { "file", "in", "--rate", "5", "a", "" }, ":dir\n" },
		{ { "file", "in", "a", "--all", "" }, ":dir\n" },
		{ { "file", "out", "" }, "first\nsecond\n" },
		{ { "file", "out", "first", "" }, "off\n" },
		{ { "file", "out", "--" }, "--help\n" },
		{ { "file", "other", "" }, "" },
		{ { "start", "" }, "--\n--min\n-n\n" },
		{ { "start", "-n", "2", "--", "" }, ":command\n" },
		{ { "start", "-n", "2", "--", "sh", "-" }, ":file\n" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		char *words[8], *text = NULL;
		size_t bytes = 0, n = 0;
		FILE *f = open_memstream(&text, &bytes);

		cr_assert_not_null(f);
		for (; rows[i].words[n]; n++)
			words[n] = strdup(rows[i].words[n]);
		complete_print(verbs, ARRAY_SIZE(verbs), words, n, jobs, f);
		fclose(f);
		cr_expect_str_eq(text, rows[i].expected, "row %zu: %s", i, text);
		free(text);
		while (n > 0)
			free(words[--n]);
	}
}
