/*
 * The line of a job that spans nodes: what the leader has started, in that order, the same on all nodes
 * (docs/nodes.md). The first one runs. The second one runs, too, from the moment on at which the first
 * has made its first operation between nodes, unless it wants to be the first. Loop thread only.
 */
#ifndef SHARDD_JOB_LINE_H
#define SHARDD_JOB_LINE_H

#include <stdbool.h>

#include "core/list.h"

struct job;

/* Embedded by what stands in line. */
struct line_item {
	struct list link; /* job->across.line; line_item_init */
	struct job *job;
	void (*go_on)(
		struct line_item *i); /* it may begin; or it is the first now, and had begun */
	bool first;                   /* it begins only when it is the first */
	bool has_begun;
	bool has_talked; /* it has made an operation between nodes */
};

void line_item_init(struct line_item *i);
/* Go to the end of the line. go_on is called later, or before this returns. */
void line_enter(struct line_item *i, struct job *job, bool first,
		void (*go_on)(struct line_item *i));
bool line_is_in(const struct line_item *i);
bool line_is_first(const struct line_item *i);
/* It makes its first operation. */
void line_talked(struct line_item *i);
/* The next ones go on. Safe twice. */
void line_leave(struct line_item *i);

#endif
