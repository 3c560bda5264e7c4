/*
 * Daemons that must not end while a test waits for something else. Every wait of the fixtures
 * looks here between two turns, so a crash fails the test at once and not after its deadline.
 */
#ifndef SHARDD_TESTS_DAEMONWATCH_H
#define SHARDD_TESTS_DAEMONWATCH_H

#include <sys/types.h>

/* @pid is a child of this process; @log: path of what it writes (copied). At most 16. */
void daemonwatch_add(pid_t pid, const char *log);

/* It may end from now on: the test told it to, or reaps it itself. Unknown pids are ignored. */
void daemonwatch_drop(pid_t pid);

/* Abort the test with its exit code or signal and the end of its log if one has ended.
 * Does not reap it. In a trainer (a forked child) it finds nothing. */
void daemonwatch_look(void);

/* Look, then sleep for @ms: one turn of a loop that waits for a condition. */
void daemonwatch_turn(int ms);

/* Write the last 16 KiB of @log to stderr. */
void daemonwatch_print_log(const char *log);

/* To stderr: name, kernel wait channel and system call of each thread of the process @pid, which
 * @what names. For a test whose process does not end. */
void daemonwatch_print_threads(pid_t pid, const char *what);

#endif
