/*
 * How the parts of a trace write their events: trace_events.c has the ops and the devices, trace_publications.c the
 * publications. Any thread.
 */
#ifndef SHARDD_CTL_TRACE_EVENTS_IMPL_H
#define SHARDD_CTL_TRACE_EVENTS_IMPL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ctl/lanes.h"
#include "status.pb-c.h"

/* Perfetto takes threads of one number in two processes for the same: numbers are given out
 * once. */
struct trace {
	json_t *events;
	uint64_t now;
	json_int_t process; /* the present one; 0: none yet */
	json_int_t lane;    /* the last that was given out */
	bool failed;        /* no memory */
};

/* Return: the later time. */
uint64_t trace_events_later(uint64_t a, uint64_t b);

/* Those that follow are of this process, and have lanes with larger numbers. */
void trace_events_new_process(struct trace *t, const char *text);
/* Lanes are shown in the order of their numbers. Return: its number. */
json_int_t trace_events_new_lane(struct trace *t, const char *text);
/* @spans of records that share the lanes called @text. Return: the first lane's number; the
 * others follow it. */
json_int_t trace_events_lay(struct trace *t, const char *text, struct lane_span *spans, size_t n);

/* @args: consumed. */
void trace_events_slice(struct trace *t, json_int_t lane, const char *category, const char *text,
			uint64_t begin, uint64_t end, json_t *args);
/* A part of the slice before. None if it has no length. */
void trace_events_phase(struct trace *t, json_int_t lane, const char *text, uint64_t begin,
			uint64_t end);
/* Something that happened at one time. @args: consumed. */
void trace_events_instant(struct trace *t, json_int_t lane, const char *category, const char *text,
			  uint64_t at, json_t *args);
/* The counter @text of the process has @value from then on. @unit: of it. */
void trace_events_counter(struct trace *t, const char *text, const char *unit, uint64_t at,
			  uint64_t value);

/* Into arguments; nothing if it is 0, or empty. */
void trace_events_set_number(json_t *args, const char *key, uint64_t n);
void trace_events_set_text(json_t *args, const char *key, const char *text);

/* Publications, each a process: what was not over by @from. */
void trace_publications_add(struct trace *t, const Shardd__V1__OpsResponse *reply, uint64_t from);

#endif
