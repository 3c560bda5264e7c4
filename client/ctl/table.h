/*
 * A table of texts, printed with aligned columns.
 *
 * Cells are added from left to right, row by row. Control bytes are removed from foreign
 * texts (names of jobs, units, programs), so no name can reprogram the terminal.
 * Any thread, one at a time.
 */
#ifndef SHARDD_CTL_TABLE_H
#define SHARDD_CTL_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

struct table_column {
	const char *title;
	bool right; /* numbers: aligned to the right */
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

/* Print @indent blanks before each line; titles bold with @color.
 * Return: 0 or -ENOMEM (a cell could not be kept). */
int table_print(const struct table *t, FILE *out, unsigned indent, bool color);

static inline void table_freep(struct table **t)
{
	table_free(*t);
	*t = NULL;
}

#endif
