/* Fill a struct shardd_error, in one place, so every failure has a sentence. */
#ifndef SHARDD_CLIENT_ERROR_H
#define SHARDD_CLIENT_ERROR_H

#include <stdbool.h>

#include "shardd/shardd.h"

/* Fill @err. @field: the argument that is wrong, or NULL. @err: may be NULL.
 * Return: the code, negated. Any thread. */
int error_set(struct shardd_error *err, enum shardd_code code, const char *field, const char *fmt,
	      ...) __attribute__((format(printf, 4, 5)));

/* As error_set, for a failed system call: domain os; the text of the errno @native is
 * appended to the sentence. */
int error_os(struct shardd_error *err, enum shardd_code code, int native, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));

/* Does the error mean "not yet, try again": -SHARDD_DEADLINE_EXCEEDED with native EAGAIN? */
bool error_is_again(int r, const struct shardd_error *err);

/* The connection to the daemon has broken: UNAVAILABLE with native ECONNRESET. Return:
 * -SHARDD_UNAVAILABLE. */
int error_lost(struct shardd_error *err, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
bool error_is_lost(int r, const struct shardd_error *err);

/* As the daemon said it. @info: of shardd.pb-c.h. */
struct Shardd__V1__ErrorInfo;
void error_from_info(struct shardd_error *err, int code, const struct Shardd__V1__ErrorInfo *info);

/* No memory. Return: -SHARDD_RESOURCE_EXHAUSTED. */
int error_memory(struct shardd_error *err);

#endif
