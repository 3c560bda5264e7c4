/* From samples to figures, and from figures to lines. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* The smallest value that at least @part of all are not above. @values: sorted. */
static double quantile(const double *values, size_t n, double part)
{
	size_t at = (size_t)(part * (double)n);

	if ((double)at < part * (double)n)
		at++; /* rounded up: the rank of the value, counted from 1 */
	return values[at > 0 ? at - 1 : 0];
}

static double median(const double *values, size_t n)
{
	return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* @us, @ran: @n values each; consumed. */
static void figures_set(struct figures *f, double *us, double *ran, size_t n)
{
	qsort(us, n, sizeof(*us), compare);
	qsort(ran, n, sizeof(*ran), compare);
	f->n = (unsigned)n;
	f->p50_us = median(us, n);
	f->p99_us = quantile(us, n, 0.99);
	f->ran_us = median(ran, n);
	free(us);
	free(ran);
}

static double *room(size_t n)
{
	double *values = calloc(n, sizeof(*values));

	if (!values) {
		fputs("shardd-bench: no memory for the figures\n", stderr);
		exit(1);
	}
	return values;
}

static const struct sample *sample_of(const struct crew *crew, unsigned series, unsigned member,
				      unsigned i)
{
	size_t members = crew->ranks + crew->helpers;

	return &crew->sample[(series * members + member) * crew->repeat + i];
}

void figures_collective(struct figures *f, const struct crew *crew, unsigned series)
{
	double *us = room(crew->repeat), *ran = room(crew->repeat);

	for (unsigned i = 0; i < crew->repeat; i++) {
		uint64_t begin = UINT64_MAX, end = 0;

		for (unsigned r = 0; r < crew->ranks; r++) {
			const struct sample *s = sample_of(crew, series, r, i);

			begin = s->begin_ns < begin ? s->begin_ns : begin;
			end = s->end_ns > end ? s->end_ns : end;
			if (r == 0 || (double)s->ran_us > ran[i])
				ran[i] = (double)s->ran_us;
		}
		us[i] = (double)(end - begin) / 1e3;
	}
	figures_set(f, us, ran, crew->repeat);
}

void figures_calls(struct figures *f, const struct crew *crew, unsigned series, unsigned first,
		   unsigned n)
{
	size_t calls = (size_t)n * crew->repeat;
	double *us = room(calls), *ran = room(calls);

	for (size_t k = 0; k < calls; k++) {
		const struct sample *s =
			sample_of(crew, series, first + (unsigned)(k / crew->repeat),
				  (unsigned)(k % crew->repeat));

		us[k] = (double)(s->end_ns - s->begin_ns) / 1e3;
		ran[k] = (double)s->ran_us;
	}
	figures_set(f, us, ran, calls);
}

void figures_series(struct figures *f, const struct crew *crew, unsigned series, unsigned n_series,
		    unsigned member)
{
	size_t calls = (size_t)n_series * crew->repeat;
	double *us = room(calls), *ran = room(calls);

	for (size_t k = 0; k < calls; k++) {
		const struct sample *s = sample_of(crew, series + (unsigned)(k / crew->repeat),
						   member, (unsigned)(k % crew->repeat));

		us[k] = (double)(s->end_ns - s->begin_ns) / 1e3;
		ran[k] = (double)s->ran_us;
	}
	figures_set(f, us, ran, calls);
}

void figures_traffic(struct figures *f, double bytes, double limit)
{
	f->traffic = bytes;
	f->gb_per_s = bytes / f->p50_us / 1e3;
	f->limit = limit;
	f->ratio = limit > 0 ? f->gb_per_s / limit : -1;
}

/* ------------------------------------------------------------------ output */

static void json_number(const char *key, double value)
{
	if (value < 0)
		printf(", \"%s\": null", key);
	else
		printf(", \"%s\": %.4g", key, value);
}

static void json_time(const char *key, double us)
{
	if (us < 0)
		printf(", \"%s\": null", key);
	else
		printf(", \"%s\": %.1f", key, us);
}

static void json_line(const struct figures *f)
{
	bool timed = !f->has_memory && f->p50_us > 0;

	printf("{\"case\": \"%s\", \"ranks\": %u", f->name, f->ranks);
	if (f->bytes)
		printf(", \"bytes\": %llu", (unsigned long long)f->bytes);
	else
		printf(", \"bytes\": null");
	if (f->dtype)
		printf(", \"dtype\": \"%s\"", f->dtype);
	else
		printf(", \"dtype\": null");
	if (f->units)
		printf(", \"units\": %u", f->units);
	printf(", \"n\": %u", f->n);
	json_time("p50_us", timed ? f->p50_us : -1);
	json_time("p99_us", timed ? f->p99_us : -1);
	json_time("ran_us", f->ran_us);
	if (f->traffic >= 0)
		printf(", \"traffic_bytes\": %.0f", f->traffic);
	json_number("gb_per_s", f->gb_per_s);
	json_number("limit_gb_per_s", f->limit);
	json_number("ratio_to_limit", f->ratio);
	if (f->has_memory)
		printf(", \"held_bytes\": %llu, \"formula_bytes\": %llu, "
		       "\"overhead_percent\": %.3f",
		       (unsigned long long)f->held, (unsigned long long)f->formula,
		       f->overhead_percent);
	puts("}");
}

static void size_text(char *text, size_t size, uint64_t bytes)
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
	double value = (double)bytes;
	size_t u = 0;

	while (value >= 1024 && u < 4) {
		value /= 1024;
		u++;
	}
	snprintf(text, size, value == (double)(uint64_t)value ? "%.0f %s" : "%.2f %s", value,
		 units[u]);
}

/* "-" for what has no meaning. */
static const char *cell(char *text, size_t size, const char *format, double value)
{
	if (value < 0)
		return "-";
	snprintf(text, size, format, value);
	return text;
}

static void table_line(const struct figures *f)
{
	char bytes[32] = "-", p50[32], p99[32], ran[32], gb[32], limit[32], ratio[32];
	bool timed = !f->has_memory && f->p50_us > 0;

	if (f->bytes)
		size_text(bytes, sizeof(bytes), f->bytes);
	printf("%-22s %5u %9s %5s %6u %11s %11s %10s %7s %7s %6s\n", f->name, f->ranks, bytes,
	       f->dtype ? f->dtype : "-", f->n,
	       cell(p50, sizeof(p50), "%.1f", timed ? f->p50_us : -1),
	       cell(p99, sizeof(p99), "%.1f", timed ? f->p99_us : -1),
	       cell(ran, sizeof(ran), "%.0f", f->ran_us), cell(gb, sizeof(gb), "%.2f", f->gb_per_s),
	       cell(limit, sizeof(limit), "%.2f", f->limit),
	       cell(ratio, sizeof(ratio), "%.3f", f->ratio));
	if (f->has_memory)
		printf("    held %llu bytes, formula %llu, overhead %.3f %%\n",
		       (unsigned long long)f->held, (unsigned long long)f->formula,
		       f->overhead_percent);
}

void figures_report(const struct bench *b, const struct figures *f)
{
	static bool titled;

	if (!b->o.json && !titled)
		printf("%-22s %5s %9s %5s %6s %11s %11s %10s %7s %7s %6s\n", "CASE", "RANKS",
		       "BYTES", "DTYPE", "N", "P50 us", "P99 us", "RAN us", "GB/s", "LIMIT",
		       "RATIO");
	titled = true;
	if (b->o.json)
		json_line(f);
	else
		table_line(f);
	fflush(stdout);
}

int figures_turns(struct bench *b, struct crew *crew, trainer_fn fn, const char *const *names,
		  unsigned n)
{
	int r = crew ? 0 : -1;

	for (unsigned turn = 0; r == 0 && turn <= crew->repeat; turn++) {
		crew->turn = turn;
		r = crew_run(crew, fn);
	}
	for (unsigned k = 0; k < n && r == 0; k++) {
		struct figures f = FIGURES_NULL;

		f.name = names[k];
		f.ranks = 1;
		f.bytes = b->o.bytes;
		f.dtype = "fp32";
		figures_calls(&f, crew, k, 0, 1);
		f.ran_us = -1;
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
