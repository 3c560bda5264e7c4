/* Jobs that stall (op/stall.h), and what holds them up. */
#ifndef SHARDD_RPC_STATUS_STALL_H
#define SHARDD_RPC_STATUS_STALL_H

#include "rpc/arena.h"
#include "status.pb-c.h"

struct job;

/* j->stall, after all else of @j. */
void status_fill_stall(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j);

typedef void (*status_stall_cb)(struct job *job, const char *text);

/* @told is called with one sentence: now or, if other nodes have to be asked, within a second, and only if the job
 * still stalls, and not of a collective that all nodes have begun. @told keeps it in job->ops.stalled. Loop thread
 * only. */
void status_stall_ask(struct job *job, status_stall_cb told);

#endif
