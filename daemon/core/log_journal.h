/*
 * The systemd journal as the output of the log, by its native protocol
 * (https://systemd.io/JOURNAL_NATIVE_PROTOCOL): a datagram for each message, with a field for each of its values.
 * No state, any thread.
 */
#ifndef SHARDD_CORE_LOG_JOURNAL_H
#define SHARDD_CORE_LOG_JOURNAL_H

#define LOG_JOURNAL_SOCKET "/run/systemd/journal/socket"

/* Where the journal takes messages, if standard error is a stream of it (JOURNAL_STREAM), as systemd makes it for a
 * service. Return: NULL: it is not. */
const char *log_journal_socket(void);

/* Connect to the journal at @path. Return: a descriptor, which takes one message with each write, or negative errno. */
int log_journal_open(const char *path);

#endif
