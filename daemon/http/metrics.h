/*
 * The status of the daemon in the text format of Prometheus (0.0.4): docs/metrics.md lists the names. Labels are
 * names that exist now, and the tables of ops, methods and resources, so their number is bounded by what is there.
 */
#ifndef SHARDD_HTTP_METRICS_H
#define SHARDD_HTTP_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "op/op_stats.h"
#include "status.pb-c.h"

#define METRICS_MAX_KINDS   64u
#define METRICS_MAX_METHODS 96u

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

/* Of what is in @s. Return: malloc'ed, the caller's; NULL without memory. Any thread. */
char *metrics_format(const Shardd__V1__GetStatusResponse *s, const struct metrics_counts *counts,
		     size_t *ret_bytes);

#endif
