/* Ask the other nodes of jobs what their ranks do, before a status is made of what they say (cluster_ask). Loop thread
 * only. */
#ifndef SHARDD_RPC_STATUS_SURVEY_H
#define SHARDD_RPC_STATUS_SURVEY_H

#include "rpc/status_fill.h"

struct status_survey;

/* All jobs that @scope shows. @done: within a second; the survey is freed before. Return: NULL: there is nothing to
 * wait for, or no memory, and what is not known is marked in the status. */
struct status_survey *status_survey_begin(struct jobs *jobs, const struct status_scope *scope,
					  void (*done)(void *userdata), void *userdata);
/* @done is not called. */
void status_survey_cancel(struct status_survey *s);

#endif
