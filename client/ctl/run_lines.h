/*
 * What a child writes, line by line, with a prefix: lines of several children do
 * not run into each other. One thread.
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

/* Read once and write what is complete. At the end of the pipe it is closed. */
void run_lines_pump(struct run_lines *l);

/* Read what is still there, write it, a last line without an end too, and close.
 * Safe twice. */
void run_lines_finish(struct run_lines *l);

#endif
