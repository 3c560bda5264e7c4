#include "top_frame.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/format.h"
#include "ctl/width.h"

#define LOW_LINES      10u /* with fewer there is one line of header */
#define MIN_BOTH       6u  /* for jobs and ranks */
#define TINY_LINES     5u  /* and with fewer no help line */
#define MAX_BAR        30u
#define SENTENCE_LINES 3u
#define LONG_WAIT_US   1000000u /* all ranks of a job that trains wait for moments */

static const char *const sort_names[] = { "name", "state", "step", "rate", "wait", "memory" };

const char *top_frame_sort_name(unsigned sort)
{
	return sort < ARRAY_SIZE(sort_names) ? sort_names[sort] : NULL;
}

/* --------------------------------------------------------------------- sorting */

static enum top_sort top_frame_sort_now;

static int top_frame_by_number(double a, double b)
{
	return a > b ? -1 : a < b;
}

static uint64_t top_frame_step(const struct top_job *j)
{
	return j->status->optional_applied_step_case ? j->status->applied_step : j->status->step;
}

/* The largest first, but names from A on, and those that stall before all states. */
static int top_frame_by_sort(const struct top_job *a, const struct top_job *b)
{
	switch (top_frame_sort_now) {
	case TOP_BY_STATE:
		if (!a->status->stall != !b->status->stall)
			return a->status->stall ? -1 : 1;
		return (int)b->status->state - (int)a->status->state;
	case TOP_BY_STEP:
		return top_frame_by_number((double)top_frame_step(a), (double)top_frame_step(b));
	case TOP_BY_RATE:
		return top_frame_by_number(a->steps, b->steps);
	case TOP_BY_WAIT:
		return top_frame_by_number(a->wait, b->wait);
	case TOP_BY_MEMORY:
		return top_frame_by_number((double)a->status->used_bytes,
					   (double)b->status->used_bytes);
	case TOP_BY_NAME:
		break;
	}
	return 0;
}

static int top_frame_by_look(const void *a, const void *b)
{
	const struct top_job *x = a, *y = b;
	int r = top_frame_by_sort(x, y);

	if (!r)
		r = strcmp(x->status->name, y->status->name);
	return r ? r : x->status->uid < y->status->uid ? -1 : x->status->uid > y->status->uid;
}

static void top_frame_note(const struct top_sample *s, struct top_look *l)
{
	const Shardd__V1__JobStatus *j = s->jobs[l->chosen].status;

	l->uid = j->uid;
	snprintf(l->job, sizeof(l->job), "%s", j->name);
}

void top_frame_arrange(struct top_sample *s, struct top_look *l)
{
	top_frame_sort_now = l->sort;
	if (!s->n_jobs)
		return;
	qsort(s->jobs, s->n_jobs, sizeof(*s->jobs), top_frame_by_look);
	for (size_t i = 0; i < s->n_jobs && *l->job; i++) {
		if (s->jobs[i].status->uid == l->uid &&
		    strcmp(s->jobs[i].status->name, l->job) == 0) {
			l->chosen = i;
			return;
		}
	}
	if (l->chosen >= s->n_jobs)
		l->chosen = s->n_jobs - 1;
	l->first_rank = 0;
	top_frame_note(s, l);
}

void top_frame_choose(const struct top_sample *s, struct top_look *l, int by)
{
	long to = (long)l->chosen + by;

	if (!s->n_jobs)
		return;
	to = to < 0 ? 0 : to >= (long)s->n_jobs ? (long)s->n_jobs - 1 : to;
	if (to != (long)l->chosen)
		l->first_rank = 0;
	l->chosen = (size_t)to;
	top_frame_note(s, l);
}

/* ----------------------------------------------------------------------- lines */

static void top_frame_take(struct top_frame *f, enum top_style style, char *text)
{
	size_t room = f->room ? f->room * 2 : 64;
	struct top_line *bigger = NULL;

	if (text && f->n == f->room) {
		bigger = realloc(f->all, room * sizeof(*bigger));
		if (bigger) {
			f->all = bigger;
			f->room = room;
		}
	}
	if (!text || f->n == f->room) {
		free(text);
		f->failed = true;
		return;
	}
	f->all[f->n++] = (struct top_line){ text, style };
}

/* One line, cut at its end: what matters comes first. */
static void top_frame_add(struct top_frame *f, const struct top_look *l, enum top_style style,
			  const char *fmt, ...) __attribute__((format(printf, 4, 5)));

static void top_frame_add(struct top_frame *f, const struct top_look *l, enum top_style style,
			  const char *fmt, ...)
{
	const char *rest;
	va_list ap;
	char *text;
	int n;

	va_start(ap, fmt);
	n = vasprintf(&text, fmt, ap);
	va_end(ap);
	if (n < 0) {
		f->failed = true;
		return;
	}
	width_clean(text);
	if (l->columns && width_of(text) > l->columns)
		text[width_line(text, l->columns, &rest)] = '\0';
	top_frame_take(f, style, text);
}

/* A sentence, on @lines lines at most. */
static void top_frame_add_sentence(struct top_frame *f, const struct top_look *l,
				   enum top_style style, const char *name, const char *text,
				   size_t lines)
{
	_cleanup_(freep) char *all = NULL;
	const char *rest;

	if (asprintf(&all, "%s%s%s", name, *text ? ": " : "", text) < 0) {
		all = NULL;
		f->failed = true;
		return;
	}
	width_clean(all);
	for (const char *at = all; lines-- > 0 && *at; at = rest) {
		size_t bytes = l->columns && lines ? width_line(at, l->columns, &rest) : strlen(at);

		rest = l->columns && lines ? rest : at + bytes;
		top_frame_add(f, l, style, "%.*s", (int)bytes, at);
	}
}

/* Lines of text that were printed, each with the style of its row. */
static void top_frame_add_text(struct top_frame *f, char *text, const enum top_style *styles,
			       size_t first, size_t n)
{
	size_t line = 0;

	/* an empty line ends the columns that fit: those behind it are for wider windows */
	for (char *at = text, *end; *at && *at != '\n'; at = end + 1, line++) {
		end = strchr(at, '\n');
		if (!end)
			break;
		*end = '\0';
		if (line == 0)
			top_frame_take(f, TOP_TITLE, strdup(at));
		else if (line > first && line <= first + n)
			top_frame_take(f, styles[line - 1], strdup(at));
	}
}

/* Rows @first to @first + @n of a table, below its titles. */
static void top_frame_add_table(struct top_frame *f, const struct top_look *l,
				const struct table *t, const enum top_style *styles, size_t first,
				size_t n)
{
	_cleanup_(freep) char *text = NULL;
	size_t bytes = 0;
	FILE *out = t ? open_memstream(&text, &bytes) : NULL;
	int r = out ? table_print(t, out, 0, false, l->columns) : -ENOMEM;

	if (out && fclose(out) != 0)
		r = -ENOMEM;
	if (r < 0)
		f->failed = true;
	else
		top_frame_add_text(f, text, styles, first, n);
}

/* ---------------------------------------------------------------------- header */

/* "[|||||     ] " */
static void top_frame_bar(const struct top_look *l, uint64_t used, uint64_t all, char *text,
			  size_t bytes)
{
	size_t width = l->columns && l->columns < 44 + MAX_BAR ? l->columns - 44 : MAX_BAR;
	size_t full = all ? (size_t)((double)used / (double)all * (double)width + 0.5) : 0;

	*text = '\0';
	if (l->columns && l->columns < 50)
		return;
	CHECK(width + 4 < bytes);
	full = full < width ? full : width;
	memset(text, ' ', width + 3);
	memset(text + 1, '|', full);
	text[0] = '[';
	text[width + 1] = ']';
	text[width + 3] = '\0';
}

static void top_frame_add_node(struct top_frame *f, const struct top_look *l,
			       const struct top_sample *s)
{
	const Shardd__V1__GetStatusResponse *r = s->status;
	bool serves = strcmp(s->health, "SERVING") == 0;

	top_frame_add(f, l, serves ? TOP_HEAD : TOP_BAD, "%s%s%s shardd %s%s%s, pid %d, up %s",
		      s->health, r->draining ? " (draining)" : "", r->cordon ? " (cordoned)" : "",
		      r->version, r->cluster ? " on node " : "", r->cluster ? r->cluster->node : "",
		      r->pid, format_seconds(r->uptime_s).text);
}

static void top_frame_add_memory(struct top_frame *f, const struct top_look *l,
				 const struct top_sample *s)
{
	uint64_t used = 0, all = 0;
	char bar[MAX_BAR + 8];

	for (size_t i = 0; i < s->status->n_devices; i++) {
		used += s->status->devices[i]->used_bytes;
		all += s->status->devices[i]->capacity_bytes;
	}
	top_frame_bar(l, used, all, bar, sizeof(bar));
	top_frame_add(f, l, TOP_HEAD, "memory %s%s, %s of %s", bar, format_percent(used, all).text,
		      format_bytes(used).text, format_bytes(all).text);
}

static void top_frame_add_counts(struct top_frame *f, const struct top_look *l,
				 const struct top_sample *s)
{
	unsigned stalled = 0, trainers = 0;
	char ops[48] = "", stalls[32] = "";

	for (size_t i = 0; i < s->status->n_jobs; i++)
		stalled += s->status->jobs[i]->stall != NULL;
	for (size_t i = 0; i < s->status->n_sessions; i++)
		trainers += s->status->sessions[i]->rank >= 0;
	if (s->ops_s >= 0)
		snprintf(ops, sizeof(ops), ", %.0f ops/s", s->ops_s);
	if (stalled)
		snprintf(stalls, sizeof(stalls), " (%u STALLED)", stalled);
	top_frame_add(f, l, stalled ? TOP_BAD : TOP_HEAD, "%zu job%s%s, %u trainer%s%s",
		      s->status->n_jobs, s->status->n_jobs == 1 ? "" : "s", stalls, trainers,
		      trainers == 1 ? "" : "s", ops);
}

/* ------------------------------------------------------------------------ jobs */

static void top_frame_share_cell(struct table *t, double share)
{
	if (share < 0)
		table_cell(t, "-");
	else
		table_cell(t, "%.0f%%", 100 * share);
}

static void top_frame_rate_cell(struct table *t, double rate)
{
	if (rate < 0)
		table_cell(t, "-");
	else
		table_cell(t, "%.*f", rate < 9.995 ? 2 : rate < 99.95 ? 1 : 0, rate);
}

static unsigned top_frame_joined(const Shardd__V1__JobStatus *j)
{
	unsigned n = 0;

	for (size_t i = 0; i < j->n_ranks; i++)
		n += j->ranks[i]->state == SHARDD__V1__RANK_STATE__RANK_STATE_JOINED;
	return n;
}

/* The columns that matter most come first: a narrow window has no others. */
static struct table *top_frame_jobs(const struct top_sample *s)
{
	static const struct table_column columns[] = {
		{ "JOB", TABLE_KEY | TABLE_TEXT }, { "STATE", TABLE_TEXT },
		{ "STEP", TABLE_NUMBER },          { "STEP/S", TABLE_NUMBER },
		{ "WAIT", TABLE_NUMBER },          { "MEMORY", TABLE_NUMBER },
		{ "RANKS", TABLE_NUMBER },         { "OPS/S", TABLE_NUMBER },
		{ "EPOCH", TABLE_NUMBER },
	};
	struct table *t = table_new(columns, ARRAY_SIZE(columns));

	for (size_t i = 0; t && i < s->n_jobs; i++) {
		const struct top_job *j = &s->jobs[i];

		ctl_job_cell(t, j->status->uid, j->status->name);
		ctl_job_state_cell(t, j->status);
		ctl_step_cell(t, j->status);
		top_frame_rate_cell(t, j->steps);
		top_frame_share_cell(t, j->wait);
		table_cell(t, "%s", format_bytes(j->status->used_bytes).text);
		table_cell(t, "%u/%u", top_frame_joined(j->status), j->status->world_size);
		top_frame_rate_cell(t, j->ops);
		table_cell(t, "%llu", (unsigned long long)j->status->epoch);
	}
	return t;
}

/* @room: lines, with the titles; 0: no limit. */
static void top_frame_add_jobs(struct top_frame *f, const struct top_look *l,
			       const struct top_sample *s, size_t room)
{
	_cleanup_(freep) enum top_style *styles = calloc(s->n_jobs + 1, sizeof(*styles));
	_cleanup_(table_freep) struct table *t = top_frame_jobs(s);
	size_t rows = room ? room - 1 : s->n_jobs, first = 0;

	if (!styles) {
		f->failed = true;
		return;
	}
	for (size_t i = 0; i < s->n_jobs; i++)
		styles[i] = s->jobs[i].status->stall ? TOP_BAD : TOP_TEXT;
	if (s->n_jobs && !l->all)
		styles[l->chosen] = TOP_CHOSEN;
	if (l->chosen >= rows)
		first = l->chosen - rows + 1;
	top_frame_add_table(f, l, t, styles, first, rows);
}

/* ----------------------------------------------------------------------- ranks */

static void top_frame_rank_row(struct table *t, const struct top_rank *rank, bool with_node)
{
	const Shardd__V1__RankStatus *r = rank->status;
	uint64_t us = *r->op ? r->op_us : r->idle_us;

	table_cell(t, "%u", r->rank);
	top_frame_share_cell(t, rank->wait);
	table_cell(t, "%s", *r->process_state ? r->process_state : "-");
	if (r->pid > 0)
		table_cell(t, "%d", r->pid);
	else
		table_cell(t, "-");
	if (r->state == SHARDD__V1__RANK_STATE__RANK_STATE_JOINED)
		table_cell(t, "%s", *r->op ? r->op : "-");
	else
		table_cell(t, "%s", json_state(&shardd__v1__rank_state__descriptor, r->state));
	table_cell(t, "%s", us ? format_us(us).text : "-");
	table_cell(t, "%s", *r->op_on ? r->op_on : "-");
	table_cell(t, "%s", *r->op_waits_for ? r->op_waits_for : "-");
	if (with_node)
		table_cell(t, "%s", *r->node ? r->node : "-");
}

static struct table *top_frame_ranks(const struct top_job *j)
{
	static const struct table_column columns[] = {
		{ "RANK", TABLE_KEY | TABLE_NUMBER },
		{ "WAIT", TABLE_NUMBER },
		{ "PROC", TABLE_TEXT },
		{ "PID", TABLE_NUMBER },
		{ "OP", TABLE_TEXT },
		{ "FOR", TABLE_NUMBER },
		{ "ON", TABLE_TEXT },
		{ "WAITS FOR", TABLE_TEXT },
		{ "NODE", TABLE_TEXT },
	};
	bool nodes = j->status->n_nodes > 0;
	struct table *t = table_new(columns, ARRAY_SIZE(columns) - !nodes);

	for (size_t i = 0; t && i < j->status->n_ranks; i++)
		top_frame_rank_row(t, &j->ranks[i], nodes);
	return t;
}

/* What holds the job up, in one sentence; "": nothing does for long. */
static const char *top_frame_blame(const Shardd__V1__JobStatus *j)
{
	if (j->stall)
		return j->stall->text;
	if (*j->waits)
		return j->waits;
	if (j->memory_wait)
		return j->memory_wait->why;
	return j->n_blame && j->blame[0]->wait_us >= LONG_WAIT_US ? j->blame[0]->text : "";
}

/* @room: lines for all of it; 0: no limit. */
static void top_frame_add_ranks(struct top_frame *f, const struct top_look *l,
				const struct top_job *j, size_t room)
{
	_cleanup_(freep) enum top_style *styles = calloc(j->status->n_ranks + 1, sizeof(*styles));
	_cleanup_(table_freep) struct table *t = top_frame_ranks(j);
	const char *blame = top_frame_blame(j->status);
	size_t n = j->status->n_ranks, first = l->first_rank, before;
	char name[CTL_JOB_MAX];

	if (room && room < 3)
		return;
	if (!styles) {
		f->failed = true;
		return;
	}
	for (size_t i = 0; i < n; i++) /* stopped processes */
		styles[i] =
			strcmp(j->ranks[i].status->process_state, "T") == 0 ? TOP_BAD : TOP_TEXT;
	ctl_job_text(j->status->uid, j->status->name, name);
	before = f->n;
	top_frame_add_sentence(f, l, j->status->stall ? TOP_BAD : TOP_HEAD, name, blame,
			       room && room < 4 * SENTENCE_LINES ? 1 : SENTENCE_LINES);
	room = room ? room - (f->n - before) - 1 : n;
	if (first + room > n)
		first = n > room ? n - room : 0;
	top_frame_add_table(f, l, t, styles, first, room);
}

/* ----------------------------------------------------------------- all of it */

static void top_frame_add_help(struct top_frame *f, const struct top_look *l)
{
	static const char *const lines[] = {
		"up, down  choose a job (also k, j)",
		"page up, page down  more of its ranks",
		"n  sort by name",
		"a  sort by state",
		"t  sort by step",
		"r  sort by step rate",
		"w  sort by waiting share",
		"m  sort by memory",
		"space  ask the daemon now",
		"h  back",
		"q  quit",
	};

	for (size_t i = 0; i < ARRAY_SIZE(lines); i++)
		top_frame_add(f, l, TOP_TEXT, "%s", lines[i]);
}

static void top_frame_add_blank(struct top_frame *f)
{
	top_frame_take(f, TOP_TEXT, strdup(""));
}

/* Lines that are left up to the end of the window; @keep of these are for something else. 0: none
 * are. */
static size_t top_frame_left(const struct top_frame *f, const struct top_look *l, size_t keep)
{
	return l->lines > f->n + keep ? l->lines - f->n - keep : 0;
}

/* Jobs take what they need, but half of the window at most; ranks take the rest. */
static void top_frame_add_body(struct top_frame *f, const struct top_look *l,
			       const struct top_sample *s, size_t below)
{
	size_t left = top_frame_left(f, l, below), jobs = s->n_jobs + 1;

	if (!s->n_jobs) {
		if (!l->lines || left)
			top_frame_add(f, l, TOP_TEXT, "no jobs");
		return;
	}
	if (l->lines && left < 2)
		return;
	if (l->lines && left < MIN_BOTH)
		jobs = left;
	else if (l->lines && jobs > left / 2)
		jobs = left / 2;
	top_frame_add_jobs(f, l, s, l->lines ? jobs : 0);
	for (size_t i = 0; i < s->n_jobs; i++) {
		if (!l->all && i != l->chosen)
			continue;
		if (!l->lines || top_frame_left(f, l, below) > 3)
			top_frame_add_blank(f);
		left = top_frame_left(f, l, below);
		if (!l->lines || left)
			top_frame_add_ranks(f, l, &s->jobs[i], l->lines ? left : 0);
	}
}

static void top_frame_add_header(struct top_frame *f, const struct top_look *l,
				 const struct top_sample *s)
{
	bool low = l->lines && l->lines < LOW_LINES;

	if (*l->trouble)
		top_frame_add_sentence(f, l, TOP_BAD, l->trouble, "", low ? 1 : SENTENCE_LINES);
	if (!s->status || (low && *l->trouble))
		return;
	top_frame_add_node(f, l, s);
	if (low)
		return;
	top_frame_add_memory(f, l, s);
	top_frame_add_counts(f, l, s);
	top_frame_add_blank(f);
}

int top_frame_make(const struct top_sample *s, const struct top_look *l, struct top_frame *f)
{
	size_t below = l->lines >= TINY_LINES;

	*f = TOP_FRAME_NULL;
	top_frame_add_header(f, l, s);
	if (l->help)
		top_frame_add_help(f, l);
	else if (s->status)
		top_frame_add_body(f, l, s, below);
	while (f->n && l->lines && f->n > l->lines - below)
		free(f->all[--f->n].text);
	while (below && f->n < l->lines - 1 && !f->failed)
		top_frame_add_blank(f);
	if (below)
		top_frame_add(f, l, TOP_HELP,
			      "q quit  h help  up/down job  sort by %s: n a t r w m",
			      sort_names[l->sort]);
	return f->failed ? -ENOMEM : 0;
}

void top_frame_deinit(struct top_frame *f)
{
	for (size_t i = 0; i < f->n; i++)
		free(f->all[i].text);
	free(f->all);
	*f = TOP_FRAME_NULL;
}
