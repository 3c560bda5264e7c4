/*
 * The metrics of the daemon: one table of families and what each is filled from. A writer gets them one by one:
 * as text for Prometheus (metrics_text.h), or for a collector of OpenTelemetry (otlp/otlp_metrics.h). docs/metrics.md
 * lists the names. Labels are names that exist now, and the tables of ops, methods and resources, so their number
 * is bounded by what is there.
 */
#ifndef SHARDD_HTTP_METRICS_H
#define SHARDD_HTTP_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "op/op_stats.h"
#include "status.pb-c.h"

#define METRICS_MAX_KINDS   64u
#define METRICS_MAX_METHODS 96u
#define METRICS_US_PER_S    1000000u

/* What the status does not have, copied in the loop. */
struct metrics_counts {
	uint64_t started_unix_us; /* this process */
	struct {
		const char *name; /* static */
		struct op_stats stats;
	} ops[METRICS_MAX_KINDS];
	size_t n_ops;
	struct {
		char path[96]; /* cut */
		uint64_t calls, failed;
	} methods[METRICS_MAX_METHODS];
	size_t n_methods;
	uint64_t ring_submissions, ring_completions, ring_wakes;
};

enum metrics_kind { METRICS_GAUGE, METRICS_COUNTER, METRICS_HISTOGRAM };

struct metrics_family {
	const char *name; /* static, as @help */
	enum metrics_kind kind;
	const char *help; /* a sentence */
};

struct metrics_label {
	const char *name;  /* static */
	const char *value; /* may be text that a client has chosen */
};

/* One value of the family that was begun last. */
struct metrics_sample {
	const struct metrics_label *labels;
	size_t n_labels;
	uint64_t value;
	bool micros;                  /* it is in microseconds, and its family in seconds */
	uint64_t since_unix_us;       /* of a counter: when it was 0; 0: at the daemon's start */
	const struct op_stats *stats; /* of a histogram, in place of the value */
};

/* What writes them. Both are called with what is borrowed until they return. */
struct metrics_writer {
	/* A family begins: its samples follow, perhaps none. */
	void (*family)(struct metrics_writer *w, const struct metrics_family *f);
	void (*sample)(struct metrics_writer *w, const struct metrics_sample *s);
	uint64_t since_unix_us; /* the walk's: of the next samples */
};

/* All families of what is in @s. Any thread. */
void metrics_walk(const Shardd__V1__GetStatusResponse *s, const struct metrics_counts *counts,
		  struct metrics_writer *out);

#endif
