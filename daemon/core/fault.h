/*
 * A fault: why a request was refused or ended early, in words for a person.
 *
 * Filled once, by the code that knows most; passed up unchanged to rpc/, which alone knows wire
 * status. A fault is plain data, may be copied, owns nothing.
 */
#ifndef SHARDD_CORE_FAULT_H
#define SHARDD_CORE_FAULT_H

#include <stdbool.h>
#include <stdint.h>

enum fault_code {
	FAULT_NONE = 0,
	FAULT_INVALID, /* a field's value is not allowed; @field names it */
	FAULT_STATE,   /* not possible in the present state, which the text describes */
	FAULT_NOT_FOUND,
	FAULT_DENIED,    /* belongs to another user */
	FAULT_EXHAUSTED, /* quota, memory, a limit */
	FAULT_ABORTED,   /* a peer died or left, the epoch ended: join again */
	FAULT_DEADLINE,
	FAULT_CANCELLED,     /* by the caller */
	FAULT_UNAVAILABLE,   /* the daemon is shutting down */
	FAULT_UNIMPLEMENTED, /* no such method */
	FAULT_LOST,          /* the caller's state is gone: the daemon was restarted */
	FAULT_INTERNAL,      /* the system refused us something; native holds errno */
	_FAULT_N,
};

enum fault_domain {
	FAULT_DOMAIN_SHARDD = 0,
	FAULT_DOMAIN_OS,
	FAULT_DOMAIN_CUDA,
	FAULT_DOMAIN_NCCL,
	_FAULT_DOMAIN_N,
};

struct fault {
	enum fault_code code;
	enum fault_domain domain;
	int native;     /* errno and the like; 0: none */
	char field[96]; /* FAULT_INVALID: path of the message field */
	char text[512]; /* one sentence */
};

#define FAULT_NULL ((struct fault){ .code = FAULT_NONE })

/* Fill @f, unless it is filled already: the first cause stays.
 * @field: name of the offending field, or NULL.
 * Return: @code, so that `return fault_set(...)` reads well. Any thread. */
int fault_set(struct fault *f, enum fault_code code, const char *field, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));

/* FAULT_INTERNAL from a negative errno: "<what>: <strerror>". -ENOMEM, -ENOSPC,
 * -EMFILE and -ENFILE become FAULT_EXHAUSTED.
 * Return: the code set. Any thread. */
int fault_errno(struct fault *f, int negative_errno, const char *what);

/* INVALID, CANCELLED... for logs and status. Return: static string. */
const char *fault_code_name(enum fault_code code);
const char *fault_domain_name(enum fault_domain domain);

#endif
