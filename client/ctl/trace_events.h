/*
 * The flight recorder as a trace in the Chrome trace event format, which chrome://tracing
 * and Perfetto show. It has a process for each job, with lanes for each rank: its ops, and what its
 * trainer does between them; a process for the devices, with lanes for each queue; and a process for
 * each publication, with lanes for its generations and readers, marks, and counters. Slices
 * of one lane follow each other or are nested. Any thread.
 */
#ifndef SHARDD_CTL_TRACE_EVENTS_H
#define SHARDD_CTL_TRACE_EVENTS_H

#include <jansson.h>
#include <stdint.h>

#include "status.pb-c.h"

struct trace_limits {
	uint64_t last;    /* ops, and what devices did since the first of them; 0: all */
	uint64_t seconds; /* what was still going on so long ago, and later; 0: all */
};

/* @reply: with all records that there are. Return: a new reference, NULL without memory. */
json_t *trace_events(const Shardd__V1__OpsResponse *reply, const struct trace_limits *limits);

#endif
