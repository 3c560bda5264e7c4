#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "ctl/table.h"
#include "fdcheck.h"

TestSuite(ctl_table, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

static const struct table_column columns[] = { { "NAME", false },
					       { "N", true },
					       { "TEXT", TABLE_SENTENCE } };

/* What is printed; free() it. */
static char *print_within(const struct table *t, unsigned indent, bool color, size_t width)
{
	char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	cr_assert_not_null(f);
	cr_assert_eq(table_print(t, f, indent, color, width), 0);
	fclose(f);
	return text;
}

static char *print(const struct table *t, unsigned indent, bool color)
{
	return print_within(t, indent, color, 0);
}

static void row(struct table *t, const char *name, int n, const char *text)
{
	table_cell(t, "%s", name);
	table_cell(t, "%d", n);
	table_cell(t, "%s", text);
}

static void row_of_two(struct table *t, const char *name, int n)
{
	table_cell(t, "%s", name);
	table_cell(t, "%d", n);
}

static void expect(struct table *t, unsigned indent, bool color, const char *expected)
{
	char *text = print(t, indent, color);

	cr_expect_str_eq(text, expected);
	free(text);
	table_free(t);
}

Test(ctl_table, columns_are_as_wide_as_their_widest_cell)
{
	struct table *t = table_new(columns, ARRAY_SIZE(columns));

	row(t, "a", 12345, "x");
	row(t, "longer", 6, "long text");
	cr_expect_eq(table_rows(t), 2);
	expect(t, 0, false,
	       "NAME        N  TEXT\n"
	       "a       12345  x\n"
	       "longer      6  long text\n");
}

Test(ctl_table, a_table_without_rows_has_titles)
{
	expect(table_new(columns, ARRAY_SIZE(columns)), 2, false, "  NAME  N  TEXT\n");
}

Test(ctl_table, utf8_counts_characters_and_control_bytes_are_replaced)
{
	struct table *t = table_new(columns, ARRAY_SIZE(columns));

	row(t, "\xc3\xa9t\xc3\xa9s", 1, "\033[2Jx\n\x7f");
	row(t, "abcd", 2, "y");
	expect(t, 0, false,
	       "NAME  N  TEXT\n"
	       "\xc3\xa9t\xc3\xa9s  1  ?[2Jx??\n"
	       "abcd  2  y\n");
}

Test(ctl_table, colours_do_not_move_columns)
{
	struct table *t = table_new(columns, ARRAY_SIZE(columns));

	table_color_cell(t, TABLE_BAD, "bad");
	table_cell(t, "1");
	table_cell(t, "x");
	expect(t, 0, true,
	       "\033[1mNAME\033[0m  \033[1mN\033[0m  \033[1mTEXT\033[0m\n"
	       "\033[31mbad\033[0m   1  x\n");
}

Test(ctl_table, many_rows_are_kept)
{
	struct table *t = table_new(columns, ARRAY_SIZE(columns));
	char *text;
	size_t lines = 0;

	for (int i = 0; i < 1000; i++)
		row(t, "name", i, "text");
	cr_expect_eq(table_rows(t), 1000);
	text = print(t, 0, false);
	for (const char *c = text; *c; c++)
		lines += *c == '\n';
	cr_expect_eq(lines, 1001);
	free(text);
	table_free(t);
}

/* ------------------------------------------------------- within so many columns */

static void expect_within(struct table *t, size_t width, const char *expected)
{
	char *text = print_within(t, 0, false, width);

	cr_expect_str_eq(text, expected, "not\n%sbut\n%s", expected, text);
	free(text);
	table_free(t);
}

Test(ctl_table, a_limit_cuts_names_in_the_middle_and_wraps_sentences)
{
	struct table *t = table_new(columns, ARRAY_SIZE(columns));

	row(t, "transformer.block.17.attention", 123456789,
	    "it waits for rank 3, which has not begun");
	row(t, "b", 1, "/a/path/that/is/longer/than/its/column");
	expect_within(t, 50,
		      "NAME                   N  TEXT\n"
		      "trans...ntion  123456789  it waits for rank 3,\n"
		      "                          which has not begun\n"
		      "b                      1  /a/path/that/is/longer/t\n"
		      "                          han/its/column\n");
}

Test(ctl_table, what_fits_is_not_cut)
{
	struct table *t = table_new(columns, ARRAY_SIZE(columns));

	row(t, "transformer", 123, "it waits for rank 3, which has not begun");
	expect_within(t, 58,
		      "NAME           N  TEXT\n"
		      "transformer  123  it waits for rank 3, which has not begun\n");
}

Test(ctl_table, where_numbers_do_not_fit_the_table_has_parts_with_the_keys)
{
	static const struct table_column keys[] = { { "NAME", TABLE_TEXT },
						    { "ID", TABLE_KEY | TABLE_NUMBER },
						    { "FIRST", TABLE_NUMBER },
						    { "SECOND", TABLE_NUMBER } };
	struct table *t = table_new(keys, ARRAY_SIZE(keys));

	table_cell(t, "a-name-that-is-long");
	table_cell(t, "7");
	table_cell(t, "11111111111");
	table_cell(t, "22222222222");
	expect_within(t, 30,
		      "NAME            ID       FIRST\n"
		      "a-name...s-long  7 11111111111\n"
		      "\n"
		      "ID      SECOND\n"
		      " 7 22222222222\n");
}

Test(ctl_table, where_it_does_not_fit_columns_that_say_nothing_are_left_out)
{
	static const struct table_column four[] = { { "NAME", TABLE_TEXT },
						    { "NEVER KNOWN", TABLE_NUMBER },
						    { "KNOWN ONCE", TABLE_NUMBER },
						    { "WHY", TABLE_SENTENCE } };
	static const char whole[] = "NAME  NEVER KNOWN  KNOWN ONCE  WHY\n"
				    "a               -           -  -\n"
				    "b               -          12  -\n";
	struct table *t = table_new(four, ARRAY_SIZE(four));
	char *text;

	for (int i = 0; i < 2; i++) {
		table_cell(t, "%c", 'a' + i);
		table_cell(t, "-");
		table_cell(t, i ? "12" : "-");
		table_cell(t, "-");
	}
	text = print_within(t, 0, false, 40);
	cr_expect_str_eq(text, whole);
	free(text);
	expect_within(t, 20,
		      "NAME  KNOWN ONCE\n"
		      "a              -\n"
		      "b             12\n");
}

Test(ctl_table, columns_are_those_of_characters_also_where_it_cuts)
{
	static const struct table_column two[] = { { "NAME", TABLE_TEXT }, { "N", true } };
	struct table *t = table_new(two, ARRAY_SIZE(two));

	/* two columns each; an accent that combines has none */
	row_of_two(t, "\xe6\x97\xa5\xe6\x97\xa5\xe6\x97\xa5\xe6\x97\xa5\xe6\x97\xa5\xe6\x97\xa5",
		   1);
	row_of_two(t, "e\xcc\x81", 2);
	expect_within(t, 12,
		      "NAME       N\n"
		      "\xe6\x97\xa5...\xe6\x97\xa5\xe6\x97\xa5  1\n"
		      "e\xcc\x81          2\n");
}

Test(ctl_table, nothing_foreign_steers_the_terminal)
{
	struct table *t = table_new(columns, ARRAY_SIZE(columns));

	/* a C1 control, a mark that turns the direction, and bytes that are no UTF-8 */
	row(t, "\xc2\x9b[2Jx", 1,
	    "\xe2\x80\xaey \xff\xc3"
	    "z");
	expect(t, 0, false,
	       "NAME   N  TEXT\n"
	       "?[2Jx  1  ?y ??z\n");
}
