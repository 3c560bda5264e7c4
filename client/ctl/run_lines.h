/*
 * Pass on a child's output line by line with a prefix, so lines of several children
 * do not mix. One thread.
 */
#ifndef SHARDD_CTL_RUN_LINES_H
#define SHARDD_CTL_RUN_LINES_H

#include <stdbool.h>
#include <stddef.h>

#define RUN_LINE_MAX 65536u /* longer lines are broken */

struct run_lines {
	int from;           /* read end of a pipe, non-blocking; -1: ended */
	int to;             /* borrowed */
	const char *prefix; /* borrowed */
	size_t have;        /* bytes of a line that is not complete */
	char line[RUN_LINE_MAX];
};

/* @from: consumed. */
void run_lines_init(struct run_lines *l, int from, int to, const char *prefix);

/* Read once and write the complete lines. Closes the pipe at its end. */
void run_lines_pump(struct run_lines *l);

/* Read and write what is left, including an incomplete last line, and close. Safe
 * twice. */
void run_lines_finish(struct run_lines *l);

#endif
