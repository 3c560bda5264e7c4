#include "table.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"

#define GAP "  "

struct cell {
	char *text; /* owned */
	size_t width;
	enum table_color color;
};

struct table {
	const struct table_column *columns;
	size_t n;
	size_t *widths; /* of the columns */
	struct cell *cells;
	size_t count;
	size_t room;
	bool failed; /* a cell is missing */
};

struct table *table_new(const struct table_column *columns, size_t n)
{
	struct table *t = calloc(1, sizeof(*t));

	CHECK(n > 0);
	if (!t)
		return NULL;
	t->columns = columns;
	t->n = n;
	t->widths = calloc(n, sizeof(*t->widths));
	if (!t->widths) {
		free(t);
		return NULL;
	}
	for (size_t i = 0; i < n; i++)
		t->widths[i] = strlen(columns[i].title);
	return t;
}

void table_free(struct table *t)
{
	if (!t)
		return;
	for (size_t i = 0; i < t->count; i++)
		free(t->cells[i].text);
	free(t->cells);
	free(t->widths);
	free(t);
}

size_t table_rows(const struct table *t)
{
	return t->count / t->n;
}

/* Replace control bytes. Return: columns on the terminal, one per character of
 * UTF-8. */
static size_t table_clean(char *text)
{
	size_t width = 0;

	for (; *text; text++) {
		unsigned char c = (unsigned char)*text;

		if (c < 0x20 || c == 0x7f)
			*text = '?';
		width += (c & 0xc0) != 0x80;
	}
	return width;
}

static bool table_make_room(struct table *t)
{
	size_t room = t->room ? t->room * 2 : 64;
	struct cell *bigger;

	if (t->count < t->room)
		return true;
	bigger = realloc(t->cells, room * sizeof(*bigger));
	if (!bigger)
		return false;
	t->cells = bigger;
	t->room = room;
	return true;
}

static void table_add(struct table *t, enum table_color color, const char *fmt, va_list ap)
{
	struct cell cell = { .color = color };
	size_t column;

	if (t->failed || !table_make_room(t) || vasprintf(&cell.text, fmt, ap) < 0) {
		t->failed = true;
		return;
	}
	cell.width = table_clean(cell.text);
	column = t->count % t->n;
	if (cell.width > t->widths[column])
		t->widths[column] = cell.width;
	t->cells[t->count++] = cell;
}

void table_cell(struct table *t, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	table_add(t, TABLE_PLAIN, fmt, ap);
	va_end(ap);
}

void table_color_cell(struct table *t, enum table_color color, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	table_add(t, color, fmt, ap);
	va_end(ap);
}

static void table_print_cell(const struct table *t, size_t column, const struct cell *cell,
			     const char *start, FILE *out)
{
	int pad = (int)(t->widths[column] - cell->width);
	bool right = t->columns[column].right;
	bool last = column + 1 == t->n;

	if (column)
		fputs(GAP, out);
	fprintf(out, "%*s%s%s%s", right ? pad : 0, "", start, cell->text, *start ? "\033[0m" : "");
	/* No blanks at the end of a line. */
	if (!right && !last)
		fprintf(out, "%*s", pad, "");
}

static const char *table_start_of(enum table_color color)
{
	switch (color) {
	case TABLE_GOOD:
		return "\033[32m";
	case TABLE_WARN:
		return "\033[33m";
	case TABLE_BAD:
		return "\033[31m";
	case TABLE_PLAIN:
		break;
	}
	return "";
}

static void table_print_titles(const struct table *t, FILE *out, unsigned indent, bool color)
{
	fprintf(out, "%*s", (int)indent, "");
	for (size_t i = 0; i < t->n; i++) {
		struct cell title = { (char *)t->columns[i].title, strlen(t->columns[i].title),
				      TABLE_PLAIN };

		table_print_cell(t, i, &title, color ? "\033[1m" : "", out);
	}
	fputc('\n', out);
}

int table_print(const struct table *t, FILE *out, unsigned indent, bool color)
{
	CHECK(t->failed || t->count % t->n == 0);
	if (t->failed)
		return -ENOMEM;
	table_print_titles(t, out, indent, color);
	for (size_t i = 0; i < t->count; i++) {
		if (i % t->n == 0)
			fprintf(out, "%*s", (int)indent, "");
		table_print_cell(t, i % t->n, &t->cells[i],
				 color ? table_start_of(t->cells[i].color) : "", out);
		if (i % t->n == t->n - 1)
			fputc('\n', out);
	}
	return 0;
}
