#include "table.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/width.h"

#define GAP          2u /* between columns, and where that is too much */
#define NARROW_GAP   1u
#define MIN_TEXT     8u /* what is left of a text, and of a sentence, at least */
#define MIN_SENTENCE 24u

struct cell {
	char *text; /* owned */
	size_t width;
	enum table_color color;
};

struct table {
	const struct table_column *columns;
	size_t n;
	size_t *widths; /* of the columns, with nothing cut */
	bool *told;     /* a cell of the column is not "-" */
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
	t->told = calloc(n, sizeof(*t->told));
	if (!t->widths || !t->told) {
		table_free(t);
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
	free(t->told);
	free(t);
}

size_t table_rows(const struct table *t)
{
	return t->count / t->n;
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
	cell.width = width_clean(cell.text);
	column = t->count % t->n;
	if (cell.width > t->widths[column])
		t->widths[column] = cell.width;
	t->told[column] = t->told[column] || (*cell.text && strcmp(cell.text, "-") != 0);
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

/* ----------------------------------------------------------- what fits where */

/* Some columns of a table, and how wide each is: no wider than its widest cell. */
struct part {
	size_t *columns;
	size_t *widths; /* of these */
	size_t n;
	size_t room; /* for all of them; 0: no limit */
	size_t gap;
	bool briefly; /* without columns that say nothing */
};

static bool table_is(const struct table *t, size_t column, enum table_kind kind)
{
	return (t->columns[column].kind & ~(unsigned)TABLE_KEY) == (unsigned)kind;
}

static bool table_is_key(const struct table *t, size_t column)
{
	bool any = false;

	for (size_t i = 0; i < t->n; i++)
		any = any || t->columns[i].kind & TABLE_KEY;
	return any ? t->columns[column].kind & TABLE_KEY : column == 0;
}

/* How narrow it may be. A title is never cut. */
static size_t table_least(const struct table *t, size_t column)
{
	size_t title = strlen(t->columns[column].title), wide = t->widths[column];
	size_t least = table_is(t, column, TABLE_SENTENCE) ? MIN_SENTENCE : MIN_TEXT;

	if (table_is(t, column, TABLE_NUMBER))
		return wide;
	least = least < title ? title : least;
	return least < wide ? least : wide;
}

/* Columns of a line that has the columns of @p at their narrowest. */
static size_t table_narrowest(const struct table *t, const struct part *p)
{
	size_t sum = p->n ? (p->n - 1) * p->gap : 0;

	for (size_t i = 0; i < p->n; i++)
		sum += table_least(t, p->columns[i]);
	return sum;
}

/* Take the keys, and the columns from @first on, as many as fit into @room, but one at least.
 * Return: the first one of the next part. */
static size_t table_fill_part(const struct table *t, size_t first, struct part *p)
{
	size_t keys;

	p->n = 0;
	for (size_t i = 0; i < t->n; i++)
		if (table_is_key(t, i))
			p->columns[p->n++] = i;
	keys = p->n;
	for (; first < t->n; first++) {
		if (table_is_key(t, first) || (p->briefly && !t->told[first]))
			continue;
		p->columns[p->n++] = first;
		if (p->room && p->n > keys + 1 && table_narrowest(t, p) > p->room) {
			p->n--;
			break;
		}
	}
	return first;
}

static int table_by_number(const void *a, const void *b)
{
	size_t x = *(const size_t *)a, y = *(const size_t *)b;

	return x < y ? -1 : x > y;
}

/* Narrow the widest column, again and again, until the line fits. */
static void table_narrow(const struct table *t, struct part *p)
{
	size_t sum = (p->n - 1) * p->gap;

	for (size_t i = 0; i < p->n; i++)
		sum += p->widths[i] = t->widths[p->columns[i]];
	while (p->room && sum > p->room) {
		size_t widest = p->n;

		for (size_t i = 0; i < p->n; i++)
			if (p->widths[i] > table_least(t, p->columns[i]) &&
			    (widest == p->n || p->widths[i] >= p->widths[widest]))
				widest = i;
		if (widest == p->n)
			return; /* not even so: the terminal breaks the line */
		p->widths[widest]--;
		sum--;
	}
}

/* ------------------------------------------------------------------ printing */

/* One line of a cell. Return: where its next one begins. */
static const char *table_print_line(const struct table *t, const struct part *p, size_t i,
				    const char *text, const char *start, FILE *out)
{
	size_t width = p->widths[i], used = width_of(text);
	bool sentence = table_is(t, p->columns[i], TABLE_SENTENCE);
	bool right = table_is(t, p->columns[i], TABLE_NUMBER);
	const char *rest = text + strlen(text), *end = *start && *text ? "\033[0m" : "";

	if (right && used < width)
		fprintf(out, "%*s", (int)(width - used), "");
	fputs(*text ? start : "", out);
	if (sentence && used > width) {
		size_t bytes = width_line(text, width, &rest);

		fwrite(text, 1, bytes, out);
		used = width_of(text) - width_of(text + bytes);
	} else if (!right && used > width) {
		used = width_print_cut(text, width, out);
	} else {
		fputs(text, out);
	}
	fputs(end, out);
	/* No blanks at the end of a line. */
	if (!right && i + 1 < p->n && used < width)
		fprintf(out, "%*s", (int)(width - used), "");
	return rest;
}

/* A row: as many lines as its longest sentence needs. @texts: a cell each; used up. */
static void table_print_row(const struct table *t, const struct part *p, const char **texts,
			    const enum table_color *colors, bool bold, unsigned indent, FILE *out)
{
	bool more = true;

	while (more) {
		size_t last = p->n;

		/* nothing behind the last text, which may be in the first column */
		while (last > 1 && !*texts[last - 1])
			last--;
		more = false;
		fprintf(out, "%*s", (int)indent, "");
		for (size_t i = 0; i < last; i++) {
			struct part here = *p;
			const char *start = bold     ? "\033[1m"
					    : colors ? table_start_of(colors[i])
						     : "";

			fprintf(out, "%*s", i ? (int)p->gap : 0, "");
			here.n = last;
			texts[i] = table_print_line(t, &here, i, texts[i], start, out);
			more = more || *texts[i];
		}
		for (size_t i = last; i < p->n; i++)
			texts[i] = "";
		fputc('\n', out);
	}
}

struct print {
	FILE *out;
	unsigned indent;
	bool color;
	const char **texts; /* of one row */
	enum table_color *colors;
};

static void table_print_part(const struct table *t, const struct part *p, const struct print *to)
{
	for (size_t i = 0; i < p->n; i++)
		to->texts[i] = t->columns[p->columns[i]].title;
	table_print_row(t, p, to->texts, NULL, to->color, to->indent, to->out);
	for (size_t row = 0; row < t->count; row += t->n) {
		for (size_t i = 0; i < p->n; i++) {
			to->texts[i] = t->cells[row + p->columns[i]].text;
			to->colors[i] = t->cells[row + p->columns[i]].color;
		}
		table_print_row(t, p, to->texts, to->color ? to->colors : NULL, false, to->indent,
				to->out);
	}
}

int table_print(const struct table *t, FILE *out, unsigned indent, bool color, size_t width)
{
	_cleanup_(freep) size_t *columns = calloc(t->n, sizeof(*columns));
	_cleanup_(freep) size_t *widths = calloc(t->n, sizeof(*widths));
	_cleanup_(freep) const char **texts = calloc(t->n, sizeof(*texts));
	_cleanup_(freep) enum table_color *colors = calloc(t->n, sizeof(*colors));
	struct print to = { out, indent, color, texts, colors };
	struct part p = { columns, widths, 0, width > indent ? width - indent : 0, GAP, false };

	CHECK(t->failed || t->count % t->n == 0);
	if (t->failed || !columns || !widths || !texts || !colors)
		return -ENOMEM;
	if (table_fill_part(t, 0, &p) < t->n) {
		p.briefly = true;
		p.gap = table_fill_part(t, 0, &p) < t->n ? NARROW_GAP : GAP;
	}
	for (size_t next = 0, first = 0; next < t->n; first = next) {
		next = table_fill_part(t, first, &p);
		qsort(columns, p.n, sizeof(*columns), table_by_number);
		table_narrow(t, &p);
		fputs(first ? "\n" : "", out);
		table_print_part(t, &p, &to);
	}
	return 0;
}
