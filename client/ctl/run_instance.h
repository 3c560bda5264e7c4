/*
 * Track which run of the daemon has the state of the trainers' job. A restarted daemon has none of
 * it, and a restarted trainer must not begin at step 0 there. One thread.
 */
#ifndef SHARDD_CTL_RUN_INSTANCE_H
#define SHARDD_CTL_RUN_INSTANCE_H

#include <stdbool.h>
#include <stdint.h>

#define RUN_INSTANCE_MAX 33

/* Ask the daemon at @socket, without waiting for one that does not listen. @ret: 32 hexadecimal
 * digits. @ret_started: when it started, seconds since 1970. Return: was there an answer? */
bool run_instance_ask(const char *socket, char ret[RUN_INSTANCE_MAX], uint64_t *ret_started);

/* Is the daemon at @socket another run than @known? If so, print an error for job @job. False if
 * the daemon does not answer: the trainer then gets the error itself. */
bool run_instance_lost(const char *socket, const char *known, const char *job);

/* Does the daemon at @socket have @job? @if_unknown: what is said if it does not answer. */
bool run_instance_has_job(const char *socket, const char *job, bool if_unknown);

#endif
