#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "ctl/table.h"
#include "fdcheck.h"

TestSuite(ctl_table, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

static const struct table_column columns[] = { { "NAME", false },
					       { "N", true },
					       { "TEXT", false } };

/* What is printed; free() it. */
static char *print(const struct table *t, unsigned indent, bool color)
{
	char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	cr_assert_not_null(f);
	cr_assert_eq(table_print(t, f, indent, color), 0);
	fclose(f);
	return text;
}

static void row(struct table *t, const char *name, int n, const char *text)
{
	table_cell(t, "%s", name);
	table_cell(t, "%d", n);
	table_cell(t, "%s", text);
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
