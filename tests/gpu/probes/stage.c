/* The report: figures and sentences of one probe. */
#include "stage.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void pause_ms(unsigned ms)
{
	struct timespec ts = { .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 };

	nanosleep(&ts, NULL);
}

void stage_step(struct stage *s, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vsnprintf(s->step, sizeof(s->step), fmt, args);
	va_end(args);
}

static struct figure *new_figure(struct stage *s, const char *name)
{
	struct figure *f = &s->figures[s->n_figures];

	if (s->n_figures + 1 < STAGE_MAX_FIGURES)
		s->n_figures++;
	*f = (struct figure){ 0 };
	snprintf(f->name, sizeof(f->name), "%s", name);
	return f;
}

void stage_number(struct stage *s, const char *name, const char *unit, double value)
{
	struct figure *f = new_figure(s, name);

	snprintf(f->unit, sizeof(f->unit), "%s", unit);
	f->value = value;
}

void stage_text(struct stage *s, const char *name, const char *fmt, ...)
{
	struct figure *f = new_figure(s, name);
	va_list args;

	va_start(args, fmt);
	vsnprintf(f->text, sizeof(f->text), fmt, args);
	va_end(args);
}

static void append(struct stage *s, const char *fmt, va_list args)
{
	size_t n = strlen(s->answer);

	if (n > 0 && n + 1 < sizeof(s->answer))
		s->answer[n++] = ' ';
	vsnprintf(s->answer + n, sizeof(s->answer) - n, fmt, args);
}

void stage_answer(struct stage *s, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	append(s, fmt, args);
	va_end(args);
}

static _Noreturn void stage_end(struct stage *s, enum stage_state state, const char *fmt,
				va_list args)
{
	append(s, fmt, args);
	s->state = state;
	_exit(0);
}

void stage_fail(struct stage *s, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	stage_end(s, STAGE_FAILED, fmt, args);
}

void stage_skip(struct stage *s, const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	stage_end(s, STAGE_SKIPPED, fmt, args);
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double stage_quantile(double *values, size_t n, double part)
{
	size_t at = (size_t)(part * (double)n);

	qsort(values, n, sizeof(*values), compare);
	return values[at < n ? at : n - 1];
}

void stage_times(struct stage *s, const char *name, double *us, size_t n)
{
	char text[56];

	snprintf(text, sizeof(text), "%s_median", name);
	stage_number(s, text, "us", stage_quantile(us, n, 0.5));
	snprintf(text, sizeof(text), "%s_p99", name);
	stage_number(s, text, "us", stage_quantile(us, n, 0.99));
}
