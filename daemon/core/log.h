/*
 * Structured log: one line per message, `time level topic message key=value...`, or one JSON object
 * per line. Lines are handed to a writer thread, so that a full disk or a stuck pipe never holds up
 * the caller; what does not fit its queue is counted as dropped. Only server, net and rpc log;
 * folders below return.
 */
#ifndef SHARDD_CORE_LOG_H
#define SHARDD_CORE_LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "core/log_level.h"

struct log_options {
	enum log_level level;
	bool json;
	const char *path; /* append to this file; NULL or "": stderr */
	/* Standard error is the systemd journal, which takes messages here (log_journal_socket); NULL: it
	 * is not. Without @path: each message goes there with its priority and fields; as @json, or if
	 * it does not take them, to standard error as a line with its priority and without the time. */
	const char *journal;
};

/* Open the output and start the writer. Once, before other threads.
 * Return: 0 or negative errno (the path cannot be opened). */
int log_open(const struct log_options *options);

/* May this process append to @path (NULL or "": it may), or make it? Nothing is made. Return: 0 or negative
 * errno. */
int log_check_path(const char *path);

/* Apply level and format, reopen the path (log rotation). Loop thread.
 * Return: 0 or negative errno; on error the old output stays. */
int log_reopen(const struct log_options *options);

/* Write out what is queued, for at most a second, and stop the writer. */
void log_close(void);

/* @topic: the folder that logs. @fmt: the message, then key=value pairs; values
 * with blanks are quoted by the caller ("%s" in quotes is fine). Control
 * characters are replaced. Any thread, never blocks. */
void log_write(enum log_level level, const char *topic, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

#define log_error(...) log_write(LOG_ERROR, __VA_ARGS__)
#define log_warn(...)  log_write(LOG_WARN, __VA_ARGS__)
#define log_info(...)  log_write(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_write(LOG_DEBUG, __VA_ARGS__)

/* Lines lost since log_open: queue full, or the output refused them. Any thread. */
uint64_t log_dropped(void);

#endif
