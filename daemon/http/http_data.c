/*
 * What is asked of jobs: other nodes are asked first if need be, then the request waits for its user's turn, the loop
 * collects messages in an arena, and a thread of the pool makes a text of them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "health.pb-c.h"
#include "http/http_impl.h"
#include "http/metrics_text.h"
#include "json/json.h"
#include "json/status_json.h"
#include "rpc/status_fill.h"
#include "rpc/svc_events.h"

/* ------------------------------------------------------------------- in the loop */

static int http_data_collect_status(struct http_request *r, bool units, bool slabs)
{
	const struct status_query q = { .scope = r->scope,
					.with_units = units,
					.with_slabs = slabs };

	r->status = (Shardd__V1__GetStatusResponse)SHARDD__V1__GET_STATUS_RESPONSE__INIT;
	svc_status_fill(r->http->sources.status, &q, &r->arena, &r->status);
	return 0;
}

static int http_data_collect(struct http_request *r, struct fault *f)
{
	(void)f;
	return http_data_collect_status(r, false, false);
}

static int http_data_collect_units(struct http_request *r, struct fault *f)
{
	(void)f;
	return http_data_collect_status(r, !r->params.no_units, false);
}

static int http_data_collect_one(struct http_request *r, struct fault *f)
{
	if (!r->params.job)
		return fault_set(f, FAULT_INVALID, "job", "%s needs the parameter job",
				 r->route->path);
	return http_data_collect_status(r, true, false);
}

static int http_data_collect_slabs(struct http_request *r, struct fault *f)
{
	(void)f;
	return http_data_collect_status(r, false, true);
}

static int http_data_collect_ops(struct http_request *r, struct fault *f)
{
	(void)f;
	r->ops = (Shardd__V1__OpsResponse)SHARDD__V1__OPS_RESPONSE__INIT;
	svc_status_fill_ops(r->http->sources.status, &r->scope, (uint32_t)r->params.limit, false,
			    &r->arena, &r->ops);
	return 0;
}

static int http_data_collect_history(struct http_request *r, struct fault *f)
{
	Shardd__V1__HistoryRequest q = SHARDD__V1__HISTORY_REQUEST__INIT;
	struct job_ref ref = { 0 };

	q.limit = (uint32_t)r->params.limit;
	r->history = (Shardd__V1__HistoryResponse)SHARDD__V1__HISTORY_RESPONSE__INIT;
	if (r->params.job && job_ref_parse(r->params.job, "job", &ref, f))
		return (int)f->code;
	status_fill_history(&r->arena, &r->scope, r->params.job ? &ref : NULL, &q, &r->history);
	return 0;
}

static int http_data_collect_events(struct http_request *r, struct fault *f)
{
	Shardd__V1__EventsRequest q = SHARDD__V1__EVENTS_REQUEST__INIT;

	q.limit = (uint32_t)r->params.limit;
	q.after = r->params.after;
	q.run = r->params.run;
	q.job = (char *)(uintptr_t)(r->params.job ? r->params.job : "");
	r->events = (Shardd__V1__EventsResponse)SHARDD__V1__EVENTS_RESPONSE__INIT;
	return svc_events_list(&r->arena, &r->scope, &q, &r->events, f);
}

static int http_data_collect_metrics(struct http_request *r, struct fault *f)
{
	(void)f;
	r->counts = arena_take(&r->arena, sizeof(*r->counts));
	if (r->counts)
		r->http->sources.counts(r->counts, r->http->sources.userdata);
	return http_data_collect_status(r, false, false);
}

/* ------------------------------------------------------------------- in the pool */

/* @j: taken. */
static char *http_data_dump(json_t *j, size_t *ret_bytes)
{
	char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;

	json_decref(j);
	*ret_bytes = text ? strlen(text) : 0;
	return text;
}

static char *http_data_format_status(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(status_json_status(&r->status), ret_bytes);
}

static char *http_data_format_jobs(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(status_json_list(&r->status, "jobs"), ret_bytes);
}

static char *http_data_format_sessions(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(status_json_list(&r->status, "sessions"), ret_bytes);
}

static char *http_data_format_users(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(status_json_users(&r->status), ret_bytes);
}

static char *http_data_format_memory(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(status_json_memory(&r->status, NULL), ret_bytes);
}

static char *http_data_format_units(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(status_json_units(r->status.jobs[0]), ret_bytes);
}

static char *http_data_format_ops(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(json_from_message(&r->ops.base), ret_bytes);
}

static char *http_data_format_history(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(json_from_message(&r->history.base), ret_bytes);
}

static char *http_data_format_events(struct http_request *r, size_t *ret_bytes)
{
	return http_data_dump(json_from_message(&r->events.base), ret_bytes);
}

static char *http_data_format_health(struct http_request *r, size_t *ret_bytes)
{
	Grpc__Health__V1__HealthCheckResponse health =
		GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
	json_t *j;

	health.status =
		r->status.draining
			? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
			: GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
	j = json_from_message(&health.base);
	if (j)
		json_object_set_new(j, "stalls", status_json_stalls(&r->status));
	return http_data_dump(j, ret_bytes);
}

static char *http_data_format_metrics(struct http_request *r, size_t *ret_bytes)
{
	return metrics_text_format(&r->status, r->counts, ret_bytes);
}

static const struct http_route http_data_routes[] = {
	{ "/metrics", "text/plain; version=0.0.4; charset=utf-8",
	  .collect = http_data_collect_metrics, .format = http_data_format_metrics },
	{ "/api/v1/status", HTTP_TYPE_JSON, .params = HTTP_PARAM_JOB | HTTP_PARAM_UNITS,
	  .collect = http_data_collect_units, .format = http_data_format_status,
	  .with_nodes = true },
	{ "/api/v1/jobs", HTTP_TYPE_JSON, .params = HTTP_PARAM_JOB | HTTP_PARAM_UNITS,
	  .collect = http_data_collect_units, .format = http_data_format_jobs },
	{ "/api/v1/blame", HTTP_TYPE_JSON, .params = HTTP_PARAM_JOB, .collect = http_data_collect,
	  .format = http_data_format_jobs, .with_nodes = true },
	{ "/api/v1/health", HTTP_TYPE_JSON, .collect = http_data_collect,
	  .format = http_data_format_health },
	{ "/api/v1/memory", HTTP_TYPE_JSON, .collect = http_data_collect_slabs,
	  .format = http_data_format_memory },
	{ "/api/v1/units", HTTP_TYPE_JSON, .params = HTTP_PARAM_JOB,
	  .collect = http_data_collect_one, .format = http_data_format_units },
	{ "/api/v1/sessions", HTTP_TYPE_JSON, .collect = http_data_collect,
	  .format = http_data_format_sessions },
	{ "/api/v1/users", HTTP_TYPE_JSON, .collect = http_data_collect,
	  .format = http_data_format_users },
	{ "/api/v1/history", HTTP_TYPE_JSON, .params = HTTP_PARAM_JOB | HTTP_PARAM_LIMIT,
	  .collect = http_data_collect_history, .format = http_data_format_history, .past = true },
	{ "/api/v1/events", HTTP_TYPE_JSON,
	  .params = HTTP_PARAM_JOB | HTTP_PARAM_LIMIT | HTTP_PARAM_AFTER | HTTP_PARAM_RUN,
	  .collect = http_data_collect_events, .format = http_data_format_events, .past = true },
	{ "/api/v1/ops", HTTP_TYPE_JSON, .params = HTTP_PARAM_JOB | HTTP_PARAM_LIMIT,
	  .collect = http_data_collect_ops, .format = http_data_format_ops },
};

const struct http_route *http_data_find(const char *path)
{
	for (size_t i = 0; i < ARRAY_SIZE(http_data_routes); i++)
		if (strcmp(path, http_data_routes[i].path) == 0)
			return &http_data_routes[i];
	return NULL;
}

/* ------------------------------------------------------------------------ the way */

static void http_data_fail(struct http_request *r, const struct fault *f)
{
	r->body = http_error_text(fault_code_name(f->code), f->text);
	r->bytes = r->body ? strlen(r->body) : 0;
	r->code = http_code_of(f->code);
	r->ready = true;
	http_resume(r);
}

static void http_data_work(uv_work_t *work)
{
	struct http_request *r = work->data;

	r->body = r->route->format(r, &r->bytes);
}

static void http_data_worked(uv_work_t *work, int status)
{
	struct http_request *r = work->data;
	struct fault f = FAULT_NULL;

	(void)status;
	CHECK(r->http->in_pool > 0);
	r->http->in_pool--;
	r->in_pool = false;
	arena_free(&r->arena);
	if (!r->c) {
		http_request_free(r);
	} else if (r->body && user_charge(&r->memory, r->conn->user, USER_MEMORY, r->bytes, &f)) {
		free(r->body);
		http_data_fail(r, &f);
	} else if (!r->body) {
		fault_set(&f, FAULT_EXHAUSTED, NULL, "no memory for the answer");
		http_data_fail(r, &f);
	} else {
		r->ready = true;
		http_resume(r);
	}
}

/* Jobs come and go while other nodes are asked. */
static int http_data_find_job(struct http_request *r, struct fault *f)
{
	struct job *job = NULL;

	if (r->params.job && !r->route->past &&
	    job_find_seen(r->http->sources.status->jobs, r->params.job, r->scope.uid,
			  r->scope.sees_all, &job, f))
		return (int)f->code;
	r->scope.job = job;
	return 0;
}

static int http_data_take(struct http_request *r, struct fault *f)
{
	const uint64_t began = clock_now_us();
	uint64_t took;

	if (http_data_find_job(r, f) || r->route->collect(r, f))
		return (int)f->code;
	if (r->arena.failed)
		return fault_set(f, FAULT_EXHAUSTED, NULL, "no memory for the answer");
	took = clock_now_us() - began;
	r->http->collected_us += took;
	/* how long the loop was busy with it: tests/bench/scrape reads this */
	log_debug("http", "collected path=%s us=%llu", r->route->path, (unsigned long long)took);
	return 0;
}

static void http_data_on_turn(struct status_turn *turn)
{
	struct http_request *r = CONTAINER_OF(turn, struct http_request, turn);
	struct fault f = FAULT_NULL;

	if (http_data_take(r, &f)) {
		arena_free(&r->arena);
		http_data_fail(r, &f);
		return;
	}
	r->work.data = r;
	r->in_pool = true;
	r->http->in_pool++;
	CHECK(uv_queue_work(r->http->loop, &r->work, http_data_work, http_data_worked) == 0);
}

static void http_data_wait_for_turn(struct http_request *r)
{
	status_turns_run(&r->http->sources.status->turns, r->conn->user, &r->turn,
			 http_data_on_turn);
}

static void http_data_on_told(void *userdata)
{
	struct http_request *r = userdata;

	r->survey = NULL;
	http_data_wait_for_turn(r);
}

void http_data_begin(struct http_request *r)
{
	struct fault f = FAULT_NULL;

	r->suspended = true;
	MHD_suspend_connection(r->c);
	if (user_charge(&r->call, r->conn->user, USER_STATUS_CALLS, 1, &f)) {
		http_data_fail(r, &f);
		return;
	}
	r->scope.with_nodes = r->route->with_nodes;
	if (r->route->with_nodes && http_data_find_job(r, &f) == 0)
		r->survey = status_survey_begin(r->http->sources.status->jobs, &r->scope,
						http_data_on_told, r);
	if (!r->survey)
		http_data_wait_for_turn(r);
}

void http_data_cancel(struct http_request *r)
{
	status_turn_cancel(&r->turn);
	if (r->survey)
		status_survey_cancel(r->survey);
	r->survey = NULL;
}
