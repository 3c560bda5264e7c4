/*
 * A table of texts, printed with aligned columns.
 *
 * Cells are added from left to right, row by row. Control characters are removed from foreign
 * texts (names of jobs, units, programs), so no name can reprogram the terminal.
 *
 * Within a limit of columns the widest texts are cut in the middle, and sentences wrap. Numbers stay
 * whole. If that is not enough, columns that have "-" in every row are left out, and the gaps between
 * columns get narrow; then the table is printed in parts, one below the other, with the key columns
 * in each of them. So nothing that is known is left out. Any thread, one at a time.
 */
#ifndef SHARDD_CTL_TABLE_H
#define SHARDD_CTL_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

enum table_kind {
	TABLE_TEXT = 0,     /* on the left; may be cut */
	TABLE_NUMBER = 1,   /* on the right; stays whole */
	TABLE_SENTENCE = 2, /* on the left; continues on the next line */
	TABLE_KEY = 4,      /* beside one of these: in every part. Without any: the first column */
};

struct table_column {
	const char *title;
	unsigned kind; /* enum table_kind; false and true are a text and a number */
};

enum table_color { TABLE_PLAIN, TABLE_GOOD, TABLE_WARN, TABLE_BAD };

struct table;

/* @columns: borrowed. Return: NULL without memory; else table_free. */
struct table *table_new(const struct table_column *columns, size_t n);
void table_free(struct table *t);

/* Add the next cell. table_print reports a lack of memory. */
void table_cell(struct table *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void table_color_cell(struct table *t, enum table_color color, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* Rows that are complete. */
size_t table_rows(const struct table *t);

/* Print @indent blanks before each line; titles bold with @color. @width: columns of a line, with
 * the indent; 0: no limit. Return: 0 or -ENOMEM (a cell could not be kept). */
int table_print(const struct table *t, FILE *out, unsigned indent, bool color, size_t width);

static inline void table_freep(struct table **t)
{
	table_free(*t);
	*t = NULL;
}

#endif
