/*
 * What shardctl --json prints of a status, verb by verb, and what the daemon answers at /api/v1. Each returns a new
 * reference, or NULL without memory. Any thread.
 */
#ifndef SHARDD_JSON_STATUS_JSON_H
#define SHARDD_JSON_STATUS_JSON_H

#include <jansson.h>

#include "status.pb-c.h"

/* All of it but what was not asked for. */
json_t *status_json_status(const Shardd__V1__GetStatusResponse *s);
/* One list of it alone: {KEY: [...]}. */
json_t *status_json_list(const Shardd__V1__GetStatusResponse *s, const char *key);
/* Usage and limits; null: there is no limit. */
json_t *status_json_users(const Shardd__V1__GetStatusResponse *s);
/* @holders: processes that keep freed memory; the reference is taken. NULL: nobody has looked. */
json_t *status_json_memory(const Shardd__V1__GetStatusResponse *s, json_t *holders);
/* Of one job. */
json_t *status_json_units(const Shardd__V1__JobStatus *job);
/* Of all jobs: {"publications": [...]}, each with its job's uid and name, "job". */
json_t *status_json_publications(const Shardd__V1__GetStatusResponse *s);
/* Jobs that stall: a list. */
json_t *status_json_stalls(const Shardd__V1__GetStatusResponse *s);

#endif
