/*
 * The interface of the process to its environment: descriptors, limits, the service manager's
 * socket and notifications. Loop thread only.
 */
#ifndef SHARDD_PROCESS_H
#define SHARDD_PROCESS_H

#include <stdint.h>

#include "core/fault.h"

#define START_STOP_S 10u

/* Open /dev/null in place of a missing descriptor 0, 1 or 2, so that no socket
 * ever gets such a number; ignore SIGPIPE; raise the soft limit of descriptors to
 * the hard one. Before anything is opened. Return: 0 or negative errno. */
int process_prepare(void);

/* Until process_start_end, SIGTERM and SIGINT are noted, and end the process if the start is not
 * over START_STOP_S later; the loop does not run yet, so nothing else could do it. */
void process_start_begin(void);
/* Restore the previous signal handling. A signal that was noted is raised again. */
void process_start_end(void);

/* End the process with @sentence unless process_deadline_over is called within START_STOP_S: for
 * calls into libraries that may hang. */
void process_deadline(const char *sentence);
void process_deadline_over(void);

/* Watchdog interval of the service manager; 0: no watchdog. */
uint64_t process_watchdog_us(void);

/* READY=1; RELOADING=1 with the time; STOPPING=1; WATCHDOG=1. No-ops without a
 * service manager. */
void process_notify_ready(void);
void process_notify_reloading(void);
void process_notify_stopping(void);
void process_notify_alive(void);

/* To shardd-holder: the end that follows is for good, no daemon takes over. */
void process_notify_for_good(void);

/* STATUS=@text. */
void process_notify_status(const char *text);

#endif
