#include "top_sample.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "health.pb-c.h"

#define CALL_TIMEOUT_MS 5000u /* with_nodes may take one */
#define OPS_LIMIT       2048u /* records of ops that have ended, for one sample */

/* --------------------------------------------------------------------- asking */

enum { ASK_STATUS, ASK_OPS, ASK_HEALTH };

int top_ask_begin(struct rpc_client *rpc, char *job, struct top_ask *ret, struct shardd_error *err)
{
	Shardd__V1__GetStatusRequest status = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__OpsRequest ops = SHARDD__V1__OPS_REQUEST__INIT;
	Grpc__Health__V1__HealthCheckRequest health = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
	struct top_ask a = { .at_us = clock_now_us() };
	int r;

	status.with_nodes = true;
	ops.limit = OPS_LIMIT;
	if (job)
		status.job = ops.job = job;
	r = rpc_client_start(rpc, "/shardd.v1.StatusService/GetStatus", &status.base,
			     &shardd__v1__get_status_response__descriptor, false, CALL_TIMEOUT_MS,
			     &a.calls[ASK_STATUS], err);
	if (r == 0)
		r = rpc_client_start(rpc, "/shardd.v1.StatusService/Ops", &ops.base,
				     &shardd__v1__ops_response__descriptor, false, CALL_TIMEOUT_MS,
				     &a.calls[ASK_OPS], err);
	if (r == 0)
		r = rpc_client_start(rpc, "/grpc.health.v1.Health/Check", &health.base,
				     &grpc__health__v1__health_check_response__descriptor, false,
				     CALL_TIMEOUT_MS, &a.calls[ASK_HEALTH], err);
	if (r < 0)
		top_ask_deinit(&a);
	else
		*ret = a;
	return r;
}

bool top_ask_is_open(const struct top_ask *a)
{
	return a->calls[ASK_STATUS] != NULL;
}

bool top_ask_wait(struct top_ask *a, int timeout_ms)
{
	CHECK(top_ask_is_open(a));
	for (size_t i = 0; i < ARRAY_SIZE(a->calls); i++)
		if (!rpc_pending_wait(a->calls[i], timeout_ms))
			return false;
	return true;
}

void top_ask_deinit(struct top_ask *a)
{
	for (size_t i = 0; i < ARRAY_SIZE(a->calls); i++)
		rpc_pending_free(a->calls[i]);
	*a = TOP_ASK_NULL;
}

static void top_sample_name_health(struct top_sample *s, ProtobufCMessage *reply)
{
	const Grpc__Health__V1__HealthCheckResponse *h = (void *)reply;
	const ProtobufCEnumValue *name = protobuf_c_enum_descriptor_get_value(
		&grpc__health__v1__health_check_response__serving_status__descriptor,
		(int)h->status);

	snprintf(s->health, sizeof(s->health), "%s", name ? name->name : "UNKNOWN");
	protobuf_c_message_free_unpacked(reply, NULL);
}

int top_ask_take(struct top_ask *a, const struct top_sample *before, uint64_t window_us,
		 struct top_sample *ret, struct shardd_error *err)
{
	struct top_sample s = { .at_us = a->at_us };
	ProtobufCMessage *reply = NULL;
	int r = rpc_pending_result(a->calls[ASK_STATUS], &reply, err);

	if (r == 0) {
		s.status = (Shardd__V1__GetStatusResponse *)reply;
		r = rpc_pending_result(a->calls[ASK_OPS], &reply, err);
	}
	if (r == 0) {
		s.ops = (Shardd__V1__OpsResponse *)reply;
		r = rpc_pending_result(a->calls[ASK_HEALTH], &reply, err);
	}
	if (r == 0) {
		top_sample_name_health(&s, reply);
		r = top_sample_compute(&s, before, window_us);
		if (r < 0) {
			err->code = -r;
			snprintf(err->text, sizeof(err->text), "out of memory");
		}
	}
	if (r == 0)
		*ret = s;
	else
		top_sample_deinit(&s);
	return r;
}

/* ----------------------------------------------------------------------- waits */

/* A part of the time, in the daemon's microseconds. */
struct stretch {
	uint64_t from, to;
};

static int top_sample_by_begin(const void *a, const void *b)
{
	const struct stretch *x = a, *y = b;

	return x->from < y->from ? -1 : x->from > y->from;
}

/* How much of the time is in one of @n stretches at least. */
static uint64_t top_sample_union(struct stretch *all, size_t n)
{
	uint64_t sum = 0, end = 0;

	if (n)
		qsort(all, n, sizeof(*all), top_sample_by_begin);
	for (size_t i = 0; i < n; i++) {
		uint64_t from = all[i].from > end ? all[i].from : end;

		if (all[i].to > from)
			sum += all[i].to - from;
		end = all[i].to > end ? all[i].to : end;
	}
	return sum;
}

static bool top_sample_is_of(const Shardd__V1__OpRecord *o, const Shardd__V1__JobStatus *j)
{
	return o->job_number == j->number && o->uid == j->uid && strcmp(o->job, j->name) == 0;
}

/* Since when all ops of the job are known, of those that have ended: what was dropped has ended
 * before what was kept. */
static uint64_t top_sample_known_since(const Shardd__V1__OpsResponse *ops,
				       const Shardd__V1__JobStatus *j)
{
	uint64_t first = 0, first_of_all = 0;
	size_t ended = 0;

	for (size_t i = 0; i < ops->n_ops; i++) {
		const Shardd__V1__OpRecord *o = ops->ops[i];

		if (!o->finished_us)
			continue;
		if (!ended++ || o->finished_us < first_of_all)
			first_of_all = o->finished_us;
		if (top_sample_is_of(o, j) && (!first || o->finished_us < first))
			first = o->finished_us;
	}
	if (ended >= OPS_LIMIT && first < first_of_all)
		return first_of_all;
	return first;
}

/* From its turn to its start it waits for other ranks, for memory or for devices. */
static bool top_sample_stretch(const Shardd__V1__OpRecord *o, uint64_t since, uint64_t now,
			       struct stretch *ret)
{
	uint64_t end = o->started_us ? o->started_us : o->finished_us ? o->finished_us : now;

	*ret = (struct stretch){ o->active_us > since ? o->active_us : since,
				 end < now ? end : now };
	return o->active_us && ret->to > ret->from;
}

static void top_sample_wait_of_job(const struct top_sample *s, struct top_job *j, uint64_t since,
				   struct stretch *room)
{
	uint64_t now = s->ops->now_us, known = top_sample_known_since(s->ops, j->status);
	double sum = 0;
	size_t n_here = 0;

	since = known > since ? known : since;
	if (since >= now)
		return;
	for (size_t k = 0; k < j->status->n_ranks; k++) {
		const Shardd__V1__RankStatus *r = j->ranks[k].status;
		size_t n = 0;

		/* the recorder knows ops of this daemon's sessions only */
		if (!r->session || r->state != SHARDD__V1__RANK_STATE__RANK_STATE_JOINED)
			continue;
		for (size_t i = 0; i < s->ops->n_ops; i++)
			if (s->ops->ops[i]->rank == r->rank &&
			    top_sample_is_of(s->ops->ops[i], j->status))
				n += top_sample_stretch(s->ops->ops[i], since, now, &room[n]);
		j->ranks[k].wait = (double)top_sample_union(room, n) / (double)(now - since);
		sum += j->ranks[k].wait;
		n_here++;
	}
	if (n_here)
		j->wait = sum / (double)n_here;
}

/* ----------------------------------------------------------------------- rates */

static const Shardd__V1__JobStatus *top_sample_find(const struct top_sample *s,
						    const Shardd__V1__JobStatus *j)
{
	for (size_t i = 0; s->status && i < s->status->n_jobs; i++)
		if (s->status->jobs[i]->uid == j->uid &&
		    strcmp(s->status->jobs[i]->name, j->name) == 0)
			return s->status->jobs[i];
	return NULL;
}

/* @seconds: 0: not known. Of a number that has become less, nothing is known. */
static double top_sample_rate(uint64_t before, uint64_t now, double seconds)
{
	return seconds > 0 && now >= before ? (double)(now - before) / seconds : TOP_UNKNOWN;
}

static uint64_t top_sample_step(const Shardd__V1__JobStatus *j)
{
	return j->optional_applied_step_case ? j->applied_step : j->step;
}

static void top_sample_rates_of_job(struct top_job *j, const struct top_sample *before,
				    double seconds)
{
	const Shardd__V1__JobStatus *old = top_sample_find(before, j->status);

	j->steps = j->ops = TOP_UNKNOWN;
	if (!old)
		return;
	j->steps = top_sample_rate(top_sample_step(old), top_sample_step(j->status), seconds);
	j->ops = top_sample_rate(old->ops_total, j->status->ops_total, seconds);
}

static int top_sample_add_job(struct top_sample *s, const Shardd__V1__JobStatus *status)
{
	struct top_job *j = &s->jobs[s->n_jobs++];

	*j = (struct top_job){ .status = status, .wait = TOP_UNKNOWN };
	j->ranks = calloc(status->n_ranks + 1, sizeof(*j->ranks));
	if (!j->ranks)
		return -SHARDD_RESOURCE_EXHAUSTED;
	for (size_t i = 0; i < status->n_ranks; i++)
		j->ranks[i] = (struct top_rank){ status->ranks[i], TOP_UNKNOWN };
	return 0;
}

/* The daemon, or the one that has its jobs: its clock begins with it. */
static bool top_sample_is_same(const struct top_sample *before, const struct top_sample *s)
{
	return before->status && before->status->pid == s->status->pid &&
	       before->ops->now_us < s->ops->now_us && before->at_us < s->at_us;
}

int top_sample_compute(struct top_sample *s, const struct top_sample *before, uint64_t window_us)
{
	static const struct top_sample none = { 0 };
	bool same = top_sample_is_same(before, s);
	uint64_t now = s->ops->now_us, since = now > window_us ? now - window_us : 0;
	double seconds = same ? (double)(now - before->ops->now_us) / 1e6 : 0;
	struct stretch *room = calloc(s->ops->n_ops + 1, sizeof(*room));
	int r = 0;

	s->jobs = calloc(s->status->n_jobs + 1, sizeof(*s->jobs));
	s->ops_s = same ? 0 : TOP_UNKNOWN;
	if (!s->jobs || !room)
		r = -SHARDD_RESOURCE_EXHAUSTED;
	for (size_t i = 0; r == 0 && i < s->status->n_jobs; i++) {
		r = top_sample_add_job(s, s->status->jobs[i]);
		if (r < 0)
			break;
		top_sample_rates_of_job(&s->jobs[i], same ? before : &none, seconds);
		top_sample_wait_of_job(s, &s->jobs[i], same ? before->ops->now_us : since, room);
		if (s->jobs[i].ops > 0)
			s->ops_s += s->jobs[i].ops;
	}
	free(room);
	return r;
}

void top_sample_deinit(struct top_sample *s)
{
	for (size_t i = 0; i < s->n_jobs; i++)
		free(s->jobs[i].ranks);
	free(s->jobs);
	if (s->status)
		shardd__v1__get_status_response__free_unpacked(s->status, NULL);
	if (s->ops)
		shardd__v1__ops_response__free_unpacked(s->ops, NULL);
	*s = TOP_SAMPLE_NULL;
}
