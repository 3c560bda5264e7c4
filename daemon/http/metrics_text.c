#include "http/metrics_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"

struct metrics_text {
	struct metrics_writer writer; /* first */
	FILE *out;
	const char *name; /* of the present family */
};

static void metrics_text_family(struct metrics_writer *w, const struct metrics_family *f)
{
	static const char *const types[] = { "gauge", "counter", "histogram" };
	struct metrics_text *t = (struct metrics_text *)w;

	t->name = f->name;
	fprintf(t->out, "# HELP %s %s\n# TYPE %s %s\n", f->name, f->help, f->name, types[f->kind]);
}

/* In a label, '\\', '"' and new lines are escaped; what is no ASCII may be half a character, and is not shown. */
static void metrics_text_escaped(FILE *out, const char *s)
{
	for (; *s; s++)
		if (*s == '\n')
			fputs("\\n", out);
		else if (*s == '"' || *s == '\\')
			fprintf(out, "\\%c", *s);
		else
			fputc((unsigned char)*s < 0x80 ? *s : '?', out);
}

/* "name_bucket{op="Gather",le="1"}"; @le: NULL: it has none. */
static void metrics_text_begin(struct metrics_text *t, const char *part,
			       const struct metrics_sample *s, const char *le)
{
	const char *before = "{";

	fprintf(t->out, "%s%s", t->name, part);
	for (size_t i = 0; i < s->n_labels; i++, before = ",") {
		fprintf(t->out, "%s%s=\"", before, s->labels[i].name);
		metrics_text_escaped(t->out, s->labels[i].value);
		fputc('"', t->out);
	}
	if (le)
		fprintf(t->out, "%sle=\"%s\"", before, le);
	fputs(s->n_labels || le ? "} " : " ", t->out);
}

static void metrics_text_value(struct metrics_text *t, uint64_t value, bool micros)
{
	if (micros)
		fprintf(t->out, "%" PRIu64 ".%06" PRIu64 "\n", value / METRICS_US_PER_S,
			value % METRICS_US_PER_S);
	else
		fprintf(t->out, "%" PRIu64 "\n", value);
}

static void metrics_text_histogram(struct metrics_text *t, const struct metrics_sample *s)
{
	uint64_t n = 0;
	char le[32];

	for (size_t i = 0; i < OP_STATS_BUCKETS; i++) {
		n += s->stats->buckets[i];
		if (i < OP_STATS_BUCKETS - 1)
			snprintf(le, sizeof(le), "%g",
				 (double)op_stats_bounds[i] / METRICS_US_PER_S);
		metrics_text_begin(t, "_bucket", s, i < OP_STATS_BUCKETS - 1 ? le : "+Inf");
		metrics_text_value(t, n, false);
	}
	metrics_text_begin(t, "_sum", s, NULL);
	metrics_text_value(t, s->stats->us, true);
	metrics_text_begin(t, "_count", s, NULL);
	metrics_text_value(t, n, false);
}

static void metrics_text_sample(struct metrics_writer *w, const struct metrics_sample *s)
{
	struct metrics_text *t = (struct metrics_text *)w;

	if (s->stats) {
		metrics_text_histogram(t, s);
		return;
	}
	metrics_text_begin(t, "", s, NULL);
	metrics_text_value(t, s->value, s->micros);
}

char *metrics_text_format(const Shardd__V1__GetStatusResponse *s,
			  const struct metrics_counts *counts, size_t *ret_bytes)
{
	struct metrics_text t = { .writer = { .family = metrics_text_family,
					      .sample = metrics_text_sample } };
	char *text = NULL;
	bool failed;

	t.out = open_memstream(&text, ret_bytes);
	if (!t.out)
		return NULL;
	metrics_walk(s, counts, &t.writer);
	failed = ferror(t.out);
	if (fclose(t.out) != 0 || failed) {
		free(text);
		return NULL;
	}
	return text;
}
