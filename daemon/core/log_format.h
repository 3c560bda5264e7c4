/*
 * The format of a log line: text or JSON, clean UTF-8 without control characters, never longer than
 * LOG_LINE_MAX. No state, any thread.
 */
#ifndef SHARDD_CORE_LOG_FORMAT_H
#define SHARDD_CORE_LOG_FORMAT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#include "core/log_level.h"

/* PIPE_BUF: a pipe takes such a line whole or not at all. */
#define LOG_LINE_MAX 4096
/* Bytes of one message; JSON makes at most two and a third times that of it. */
#define LOG_MESSAGE_MAX 1600
/* Of log_format_priority. */
#define LOG_PRIORITY_BYTES 3

struct log_record {
	struct timespec time; /* CLOCK_REALTIME */
	enum log_level level;
	const char *topic;   /* borrowed */
	const char *message; /* borrowed, cleaned by log_clean */
};

/* Print into @buf, cut at LOG_MESSAGE_MAX with "..." and clean.
 * @buf: LOG_MESSAGE_MAX bytes. */
void log_message(char *buf, const char *fmt, va_list ap) __attribute__((format(printf, 2, 0)));

/* Replace control characters and what is not UTF-8 by '?', in place. */
void log_clean(char *text);

/* Write the line, newline included, not terminated by 0.
 * @buf: LOG_LINE_MAX bytes. Return: its length. */
size_t log_format_text(char *buf, const struct log_record *r);

/* "<4>topic message\n": the priority of syslog(3) for the journal, which has the time itself. */
size_t log_format_prefixed(char *buf, const struct log_record *r);

/* A message in the journal's native protocol: PRIORITY, SYSLOG_IDENTIFIER, SHARDD_TOPIC, MESSAGE (with the topic), and
 * each of the key=value pairs at its end as SHARDD_KEY. */
size_t log_format_journal(char *buf, const struct log_record *r);

/* <3>, <4>, <6> or <7>: the priority of syslog(3). */
const char *log_format_priority(enum log_level level);

/* The same as one JSON object: time, level, topic, message, and the key=value
 * pairs at the message's end as an object "fields" of strings. */
size_t log_format_json(char *buf, const struct log_record *r);

#endif
