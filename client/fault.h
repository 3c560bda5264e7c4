/*
 * Faults that the library can explain: the process's handler of SIGSEGV.
 *
 * A module that knows memory which may fault registers an explainer. The first one that knows the
 * address gives a line, which the handler writes to standard error. Then the handler does what the
 * process had set for SIGSEGV before. An
 * explainer runs in the signal handler, without a lock.
 */
#ifndef SHARDD_CLIENT_FAULT_H
#define SHARDD_CLIENT_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum fault_access { FAULT_READ, FAULT_WRITE, FAULT_ANY }; /* any: the processor does not say */

/* A sentence, put together in a signal handler. Not terminated. */
struct fault_text {
	char text[1024];
	size_t n;
};

/* "read of 0x", "write to 0x", "access to 0x". Static string. */
const char *fault_verb(enum fault_access access);
void fault_add(struct fault_text *t, const char *s);
/* @base: 10 or 16. */
void fault_add_number(struct fault_text *t, uint64_t x, unsigned base);

/* What the handler does with a fault. */
enum fault_answer {
	FAULT_UNKNOWN,   /* ask the next explainer */
	FAULT_EXPLAINED, /* say it, and go on as if there were no handler */
	FAULT_REPAIRED,  /* say it, and execute the instruction again */
};

/* Return: what @t says about the access to @at. */
typedef enum fault_answer (*fault_explainer)(uintptr_t at, enum fault_access access,
					     struct fault_text *t);

/* Ask @explain from now on, and install the handler if it is not yet. Once for each explainer, at
 * most four. Any thread. */
void fault_begin(fault_explainer explain);

#endif
