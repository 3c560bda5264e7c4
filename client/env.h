/* Arguments from a trainer's environment, where the caller gives none. */
#ifndef SHARDD_CLIENT_ENV_H
#define SHARDD_CLIENT_ENV_H

#include <stdbool.h>
#include <stdint.h>

#include "shardd/shardd.h"

#define ENV_DEFAULT_SOCKET "/run/shardd/shardd.sock"

/* @given if it is set, else $SHARDD_SOCKET, else the default. Borrowed. */
const char *env_socket(const char *given);

/* SHARDD_RING=off: everything goes over gRPC. */
bool env_no_ring(void);

/* @given if it is not NULL, else $SHARDD_JOB.
 * Return: 0 or -SHARDD_INVALID_ARGUMENT (neither is set). */
int env_job(const char *given, const char **ret, struct shardd_error *err);

/* The decimal number in $@name, which must be at most @max.
 * Return: 0 or -SHARDD_INVALID_ARGUMENT naming the variable and its value. */
int env_number(const char *name, uint32_t max, uint32_t *ret, struct shardd_error *err);

/* The same of a number from -@most to @most. */
int env_signed(const char *name, int32_t most, int32_t *ret, struct shardd_error *err);

/* Warn on standard error, once per process, of SHARDD_ variables that no part of shardd reads.
 * @who: the prefix of the warning. Any thread. */
void env_warn(const char *who);

#endif
