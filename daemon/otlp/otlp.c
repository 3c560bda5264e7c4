#include "otlp/otlp.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/state.h"
#include "core/text.h"
#include "otlp/otlp_metrics.h"
#include "otlp/otlp_rpc.h"
#include "otlp/otlp_spans.h"
#include "otlp/otlp_traces.h"
#include "rpc/codec.h"

#define OTLP_MAGIC 0x4f544c50u

/* Of one request. */
#define OTLP_CALL_MS 10000u
/* After a request that failed: the first pause, unless the interval is shorter, and the longest. */
#define OTLP_PAUSE_FIRST_MS 1000u
#define OTLP_PAUSE_MOST_MS  60000u
#define OTLP_NEVER          UINT64_MAX
/* A collector that fails and works again all the time has its lines in the log this often. */
#define OTLP_LOG_US      (600 * UINT64_C(1000000))
#define OTLP_ERROR_BYTES 320u
#define OTLP_NO_TIME     "the daemon ends, and the collector has not answered"

/*
 * Of traces, and of metrics:
 *
 *   IDLE --due--> COLLECTING --its turn--> PACKING --packed--> SENDING --all sent, or given up--> IDLE
 *     '-----------due: spans------------------^                 |  ^
 *                                           may succeed later   v  |  the pause is over
 *                                                             RESTING
 */
enum otlp_state { OTLP_IDLE, OTLP_COLLECTING, OTLP_PACKING, OTLP_SENDING, OTLP_RESTING };

static const struct state_row otlp_states[] = {
	[OTLP_IDLE] = { "IDLE", STATE_TO(OTLP_COLLECTING) | STATE_TO(OTLP_PACKING) },
	[OTLP_COLLECTING] = { "COLLECTING", STATE_TO(OTLP_PACKING) | STATE_TO(OTLP_IDLE) },
	[OTLP_PACKING] = { "PACKING", STATE_TO(OTLP_SENDING) | STATE_TO(OTLP_IDLE) },
	[OTLP_SENDING] = { "SENDING",
			   STATE_TO(OTLP_SENDING) | STATE_TO(OTLP_RESTING) | STATE_TO(OTLP_IDLE) },
	[OTLP_RESTING] = { "RESTING", STATE_TO(OTLP_SENDING) | STATE_TO(OTLP_IDLE) },
};

struct otlp_counts {
	uint64_t sent, dropped, rejected; /* spans, or data points */
	uint64_t requests, failed;
};

struct otlp_signal {
	struct otlp *o;
	const char *what;   /* "traces", "metrics" */
	const char *method; /* of the collector */
	uint8_t state;      /* enum otlp_state */
	bool warned;        /* that a part was rejected */
	uint64_t due_us;    /* IDLE, RESTING: when it goes on; OTLP_NEVER */
	uv_work_t work;
	bool (*pack)(struct otlp_signal *sig); /* in the pool; false: no memory for all */
	bool packed;                           /* what it has returned */
	struct otlp_requests requests;
	struct user_charge memory; /* of them */
	struct otlp_call *call;    /* SENDING */
	bool cancelled;
	unsigned failures;         /* in a row */
	uint64_t failing_since_us; /* the first of them */
	bool told;                 /* the log has a line about them */
	uint64_t tell_us;          /* not before */
	struct otlp_counts counts;
	char error[OTLP_ERROR_BYTES]; /* the last of them; "": none */
};

/* What metrics are made of. */
struct otlp_collected {
	struct arena arena;
	Shardd__V1__GetStatusResponse status;
	struct metrics_counts *counts; /* in it */
	uint64_t unix_ns;
};

struct otlp {
	uint32_t magic;
	uv_loop_t *loop;
	struct otlp_sources sources;
	struct otlp_rpc *rpc;
	struct otlp_signal traces, metrics;
	struct otlp_spans spans;
	struct otlp_collected collected;
	struct status_turn turn;
	int64_t unix_us; /* of the spans that were taken */
	uv_timer_t timer;
	uint32_t interval_ms;
	uint64_t start_ns; /* of the daemon, since 1970 */
	struct user *user; /* a reference: the daemon's own */
	struct user_charge memory;
	struct otlp_self self;
	char *url, *cluster, *host; /* owned */
	char instance[2 * NODE_INSTANCE_BYTES + 1];
	bool stopping;
	uint64_t stop_until_us;
	char error[2 * OTLP_ERROR_BYTES + 32]; /* of both, for otlp_describe */
};

static void otlp_signal_move(struct otlp_signal *sig, enum otlp_state to)
{
	state_move(otlp_states, &sig->state, (uint8_t)to);
}

/* ----------------------------------------------------------------------------- when it goes on */

static void otlp_on_timer(uv_timer_t *timer);

static bool otlp_signal_waits(const struct otlp_signal *sig)
{
	return (sig->state == OTLP_IDLE || sig->state == OTLP_RESTING) && sig->due_us != OTLP_NEVER;
}

static void otlp_arm(struct otlp *o)
{
	const struct otlp_signal *const all[] = { &o->traces, &o->metrics };
	uint64_t now = clock_now_us(), at = OTLP_NEVER;

	for (size_t i = 0; i < ARRAY_SIZE(all); i++)
		if (otlp_signal_waits(all[i]) && all[i]->due_us < at)
			at = all[i]->due_us;
	if (at == OTLP_NEVER || o->stopping)
		uv_timer_stop(&o->timer);
	else
		uv_timer_start(&o->timer, otlp_on_timer, at > now ? (at - now + 999) / 1000 : 0, 0);
}

/* Of the nodes that a collector has left alone not all come back at once: up to a quarter longer. */
static uint64_t otlp_pause_us(const struct otlp_signal *sig)
{
	uint64_t ms = sig->o->interval_ms < OTLP_PAUSE_FIRST_MS ? sig->o->interval_ms
								: OTLP_PAUSE_FIRST_MS;
	const unsigned doubled = sig->failures < 10 ? sig->failures - 1 : 9;

	ms <<= doubled;
	ms = ms < OTLP_PAUSE_MOST_MS ? ms : OTLP_PAUSE_MOST_MS;
	return ms * (1000u + clock_now_us() % 250u);
}

/* Nothing of it is left to be sent. */
static void otlp_signal_end(struct otlp_signal *sig)
{
	otlp_requests_deinit(&sig->requests);
	user_charge_deinit(&sig->memory);
	if (sig == &sig->o->traces)
		otlp_spans_given(&sig->o->spans);
	otlp_signal_move(sig, OTLP_IDLE);
}

static void otlp_signal_drop(struct otlp_signal *sig)
{
	for (size_t i = sig->requests.at; i < sig->requests.n; i++)
		sig->counts.dropped += sig->requests.list[i].n;
	otlp_signal_end(sig);
}

static void otlp_signal_set_due(struct otlp_signal *sig, uint64_t in_us)
{
	const uint64_t now = clock_now_us();

	sig->due_us = now + in_us;
	if (sig->due_us < now)
		sig->due_us = OTLP_NEVER;
}

/* After a time of success: the next interval. After a failure: not before the pause is over. */
static void otlp_signal_rest(struct otlp_signal *sig)
{
	uint64_t us = (uint64_t)sig->o->interval_ms * 1000u;
	uint64_t pause = sig->failures ? otlp_pause_us(sig) : 0;

	otlp_signal_set_due(sig, pause > us ? pause : us);
}

/* Not later than it was to be: each reload of the configuration comes here. */
static void otlp_signal_reschedule(struct otlp_signal *sig)
{
	const uint64_t before = sig->due_us;

	if (sig->state != OTLP_IDLE)
		return;
	otlp_signal_rest(sig);
	if (before && before < sig->due_us)
		sig->due_us = before;
}

/* --------------------------------------------------------------------------------- failures */

static void otlp_signal_tell(struct otlp_signal *sig, uint64_t now)
{
	log_warn("otlp", "the collector does not take %s otlp=%s failed=%llu of=%llu why=\"%s\"",
		 sig->what, sig->o->url, (unsigned long long)sig->counts.failed,
		 (unsigned long long)sig->counts.requests, sig->error);
	sig->told = true;
	sig->tell_us = now + OTLP_LOG_US;
}

static void otlp_signal_failed(struct otlp_signal *sig, const char *status, const char *why)
{
	const uint64_t now = clock_now_us();

	snprintf(sig->error, sizeof(sig->error), "%s: %.280s", status, why);
	codec_clean_text(sig->error); /* it may be cut within a character */
	if (!sig->failures++)
		sig->failing_since_us = now;
	if (!sig->told && now >= sig->tell_us)
		otlp_signal_tell(sig, now);
}

static void otlp_signal_succeeded(struct otlp_signal *sig)
{
	const uint64_t dropped =
		sig->counts.dropped + (sig == &sig->o->traces ? sig->o->spans.n_dropped : 0);

	if (sig->told)
		log_info("otlp", "the collector takes %s again otlp=%s after_ms=%llu dropped=%llu",
			 sig->what, sig->o->url,
			 (unsigned long long)((clock_now_us() - sig->failing_since_us) / 1000),
			 (unsigned long long)dropped);
	sig->told = false;
	sig->failures = 0;
	sig->error[0] = '\0';
}

/* ---------------------------------------------------------------------------------- sending */

static void otlp_signal_send(struct otlp_signal *sig);
static void otlp_tick(struct otlp *o);

/* What was not taken is not sent again. */
static void otlp_signal_count_answer(struct otlp_signal *sig, const struct otlp_answer *a)
{
	const struct otlp_request *r = &sig->requests.list[sig->requests.at];
	uint64_t rejected = a->rejected > 0 ? (uint64_t)a->rejected : 0;

	rejected = rejected < r->n ? rejected : r->n;
	sig->counts.sent += r->n - rejected;
	sig->counts.rejected += rejected;
	if (!*a->warning && !rejected)
		return;
	log_write(sig->warned ? LOG_DEBUG : LOG_WARN, "otlp",
		  "the collector has not taken all %s rejected=%llu of=%llu why=\"%.200s\"",
		  sig->what, (unsigned long long)rejected, (unsigned long long)r->n, a->warning);
	sig->warned = true;
}

static void otlp_signal_refused(struct otlp_signal *sig, const struct otlp_answer *a)
{
	const uint64_t most = OTLP_GIVE_UP_S * UINT64_C(1000000), pause = otlp_pause_us(sig);
	const uint64_t wait = a->wait_ms * 1000u < most ? a->wait_ms * 1000u : most;
	const bool gives_up = clock_now_us() - sig->failing_since_us > most;

	if (!a->again || gives_up || sig->o->stopping || sig == &sig->o->metrics) {
		otlp_signal_drop(sig);
		otlp_signal_rest(sig);
		if (sig->due_us < clock_now_us() + wait)
			otlp_signal_set_due(sig, wait);
		return;
	}
	otlp_signal_set_due(sig, wait > pause ? wait : pause);
	otlp_signal_move(sig, OTLP_RESTING);
}

static void otlp_signal_on_answer(const struct otlp_answer *a, void *userdata)
{
	struct otlp_signal *sig = userdata;

	MAGIC_CHECK(sig->o, OTLP_MAGIC);
	sig->call = NULL;
	sig->counts.requests++;
	if (a->status) {
		sig->counts.failed++;
		otlp_signal_failed(sig, otlp_rpc_status_name(a->status),
				   sig->cancelled ? OTLP_NO_TIME : a->why);
		otlp_signal_refused(sig, a);
	} else {
		otlp_signal_succeeded(sig);
		otlp_signal_count_answer(sig, a);
		sig->requests.at++;
		otlp_signal_send(sig);
	}
	otlp_tick(sig->o);
}

static uint32_t otlp_call_ms(const struct otlp *o)
{
	const uint64_t now = clock_now_us();
	uint64_t left;

	if (!o->stopping)
		return OTLP_CALL_MS;
	left = o->stop_until_us > now ? (o->stop_until_us - now) / 1000 : 0;
	return left < OTLP_CALL_MS ? (uint32_t)left + 1 : OTLP_CALL_MS;
}

/* The next request, if there is one. */
static void otlp_signal_send(struct otlp_signal *sig)
{
	struct otlp_requests *all = &sig->requests;
	const struct otlp_request *r;

	if (all->at == all->n) {
		otlp_signal_end(sig);
		return;
	}
	r = &all->list[all->at];
	otlp_signal_move(sig, OTLP_SENDING);
	sig->cancelled = false;
	sig->call = otlp_rpc_call(sig->o->rpc, sig->method, r->data, r->bytes, otlp_call_ms(sig->o),
				  otlp_signal_on_answer, sig);
	if (sig->call)
		return;
	otlp_signal_failed(sig, "RESOURCE_EXHAUSTED", "the daemon has no memory for the request");
	otlp_signal_drop(sig);
}

/* ---------------------------------------------------------------------------------- packing */

static void otlp_work(uv_work_t *work)
{
	struct otlp_signal *sig = work->data;

	sig->packed = sig->pack(sig);
}

static void otlp_worked(uv_work_t *work, int status)
{
	struct otlp_signal *sig = work->data;
	struct fault f = FAULT_NULL;

	(void)status;
	MAGIC_CHECK(sig->o, OTLP_MAGIC);
	if (sig == &sig->o->metrics)
		arena_free(&sig->o->collected.arena);
	if (!sig->packed)
		fault_set(&f, FAULT_EXHAUSTED, NULL, "the daemon has no memory for the request");
	else
		user_charge(&sig->memory, sig->o->user, USER_MEMORY, sig->requests.bytes, &f);
	if (f.code) {
		otlp_signal_failed(sig, "RESOURCE_EXHAUSTED", f.text);
		if (!sig->packed) /* what is missing there is dropped, too */
			otlp_requests_deinit(&sig->requests);
		if (!sig->packed && sig == &sig->o->traces)
			sig->counts.dropped += sig->o->spans.n_taken;
		otlp_signal_drop(sig);
	} else {
		otlp_signal_send(sig);
	}
	otlp_tick(sig->o);
}

static void otlp_signal_pack(struct otlp_signal *sig)
{
	otlp_signal_move(sig, OTLP_PACKING);
	sig->work.data = sig;
	CHECK(uv_queue_work(sig->o->loop, &sig->work, otlp_work, otlp_worked) == 0);
}

static bool otlp_pack_traces(struct otlp_signal *sig)
{
	const struct otlp *o = sig->o;

	return otlp_traces_pack(o->spans.taken, o->spans.n_taken, &o->self, o->unix_us,
				&sig->requests);
}

static bool otlp_pack_metrics(struct otlp_signal *sig)
{
	const struct otlp_collected *c = &sig->o->collected;

	return otlp_metrics_pack(&c->status, c->counts, &sig->o->self, sig->o->start_ns, c->unix_ns,
				 &sig->requests);
}

/* ------------------------------------------------------------------------------- collecting */

/* As an observer sees it. */
static void otlp_collect(struct otlp *o)
{
	const struct status_query q = { .scope = { .uid = geteuid(), .sees_all = true } };
	struct otlp_collected *c = &o->collected;

	c->status = (Shardd__V1__GetStatusResponse)SHARDD__V1__GET_STATUS_RESPONSE__INIT;
	c->unix_ns = clock_unix_us() * 1000u;
	c->counts = arena_take(&c->arena, sizeof(*c->counts));
	if (c->counts)
		o->sources.counts(c->counts, o->sources.userdata);
	svc_status_fill(o->sources.status, &q, &c->arena, &c->status);
}

static void otlp_on_turn(struct status_turn *turn)
{
	struct otlp *o = CONTAINER_OF(turn, struct otlp, turn);
	struct otlp_signal *sig = &o->metrics;

	otlp_collect(o);
	if (!o->collected.arena.failed) {
		otlp_signal_pack(sig);
		return;
	}
	arena_free(&o->collected.arena);
	otlp_signal_failed(sig, "RESOURCE_EXHAUSTED", "the daemon has no memory for the status");
	otlp_signal_end(sig);
	otlp_arm(o);
}

static void otlp_begin_metrics(struct otlp *o)
{
	otlp_signal_move(&o->metrics, OTLP_COLLECTING);
	otlp_signal_rest(&o->metrics);
	status_turns_run(&o->sources.status->turns, o->user, &o->turn, otlp_on_turn);
}

static void otlp_begin_traces(struct otlp *o)
{
	otlp_signal_rest(&o->traces);
	otlp_spans_end_steps(&o->spans, o->stopping);
	if (!otlp_spans_take(&o->spans))
		return;
	o->unix_us = (int64_t)clock_unix_us() - (int64_t)clock_now_us();
	otlp_signal_pack(&o->traces);
}

/* ------------------------------------------------------------------------------------- time */

static void otlp_tick_signal(struct otlp_signal *sig, uint64_t now)
{
	if (!otlp_signal_waits(sig) || sig->due_us > now)
		return;
	if (sig->state == OTLP_RESTING)
		otlp_signal_send(sig);
	else if (sig == &sig->o->traces)
		otlp_begin_traces(sig->o);
	else
		otlp_begin_metrics(sig->o);
}

/* More spans may have come than fit into one batch. */
static void otlp_tick_last(struct otlp *o)
{
	if (o->traces.state == OTLP_IDLE && o->spans.n_filling && !o->traces.failures &&
	    clock_now_us() < o->stop_until_us)
		otlp_begin_traces(o);
}

static void otlp_tick(struct otlp *o)
{
	const uint64_t now = clock_now_us();

	if (o->stopping) {
		otlp_tick_last(o);
		return;
	}
	otlp_tick_signal(&o->traces, now);
	otlp_tick_signal(&o->metrics, now);
	otlp_arm(o);
}

static void otlp_on_timer(uv_timer_t *timer)
{
	otlp_tick(timer->data);
}

/* From the middle of an op: they are taken in a turn of the loop of their own. */
static void otlp_on_half_full(void *userdata)
{
	struct otlp *o = userdata;

	if (o->traces.state != OTLP_IDLE || o->traces.failures || !o->traces.due_us)
		return;
	o->traces.due_us = 0;
	otlp_arm(o);
}

/* ------------------------------------------------------------------------------------- life */

void otlp_set_intervals(struct otlp *o, uint32_t interval_ms, uint32_t trace_every)
{
	MAGIC_CHECK(o, OTLP_MAGIC);
	o->interval_ms = interval_ms;
	otlp_spans_sample(&o->spans, trace_every);
	otlp_signal_reschedule(&o->traces);
	otlp_signal_reschedule(&o->metrics);
	otlp_arm(o);
}

void otlp_set_headers(struct otlp *o, struct otlp_headers *h)
{
	MAGIC_CHECK(o, OTLP_MAGIC);
	otlp_rpc_set_headers(o->rpc, h);
}

static void otlp_release(struct otlp *o)
{
	o->rpc = otlp_rpc_free(o->rpc);
	otlp_spans_deinit(&o->spans);
	user_charge_deinit(&o->memory);
	o->user = user_unref(o->user);
	free(o->url);
	free(o->cluster);
	free(o->host);
	o->url = o->cluster = o->host = NULL;
}

static int otlp_account(struct otlp *o, struct users *users, struct fault *f)
{
	o->user = users_get(users, geteuid(), NULL, 0);
	if (!o->user)
		return fault_errno(f, -ENOMEM, "starting the exporter to OpenTelemetry");
	return user_charge(&o->memory, o->user, USER_MEMORY,
			   sizeof(*o) + 2 * OTLP_SPANS * sizeof(struct otlp_span), f)
		       ? (int)f->code
		       : 0;
}

static int otlp_connect(struct otlp *o, struct loopq *loopq, const struct otlp_options *options,
			struct fault *f)
{
	struct otlp_target target;

	if (otlp_target_parse(options->url, &target, f) ||
	    otlp_rpc_new(loopq, &target, *options->ca ? options->ca : NULL, &o->rpc, f))
		return (int)f->code;
	otlp_rpc_set_headers(o->rpc, options->headers);
	return 0;
}

static int otlp_fill(struct otlp *o, const struct otlp_options *options, struct fault *f)
{
	const struct jobs *jobs = o->sources.status->jobs;

	o->url = strdup(options->url);
	o->cluster = strdup(options->cluster);
	o->host = strdup(options->host);
	if (!o->url || !o->cluster || !o->host ||
	    otlp_spans_init(&o->spans, jobs, otlp_on_half_full, o) < 0)
		return fault_errno(f, -ENOMEM, "starting the exporter to OpenTelemetry");
	node_instance_text(jobs->node, o->instance);
	o->self = (struct otlp_self){ .service = "shardd",
				      .version = SHARDD_VERSION,
				      .instance = o->instance,
				      .host = o->host,
				      .cluster = o->cluster,
				      .pid = (int)getpid() };
	o->start_ns = (clock_unix_us() - (clock_now_us() - jobs->node->started_us)) * 1000u;
	return otlp_account(o, &jobs->node->users, f);
}

int otlp_new(uv_loop_t *loop, struct loopq *loopq, const struct otlp_options *options,
	     const struct otlp_sources *sources, struct otlp **ret, struct fault *f)
{
	struct otlp *o = calloc(1, sizeof(*o));

	if (!o) {
		otlp_headers_deinit(options->headers);
		return fault_errno(f, -ENOMEM, "starting the exporter to OpenTelemetry");
	}
	o->magic = OTLP_MAGIC;
	o->loop = loop;
	o->sources = *sources;
	list_init(&o->turn.link);
	o->traces = (struct otlp_signal){
		.o = o,
		.what = "traces",
		.method = "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
		.pack = otlp_pack_traces
	};
	o->metrics = (struct otlp_signal){
		.o = o,
		.what = "metrics",
		.method = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
		.pack = otlp_pack_metrics
	};
	if (otlp_fill(o, options, f) || otlp_connect(o, loopq, options, f)) {
		otlp_headers_deinit(options->headers);
		otlp_release(o);
		free(o);
		return (int)f->code;
	}
	uv_timer_init(loop, &o->timer);
	o->timer.data = o;
	otlp_set_intervals(o, options->interval_ms, options->trace_every);
	*ret = o;
	return 0;
}

/* Which of both fails: many collectors take traces alone. */
static const char *otlp_error(struct otlp *o)
{
	const char *t = o->traces.error, *m = o->metrics.error;

	if (!*t && !*m)
		return "";
	if (strcmp(t, m) == 0)
		snprintf(o->error, sizeof(o->error), "traces and metrics: %s", t);
	else
		snprintf(o->error, sizeof(o->error), "%s%s%s%s%s", *t ? "traces: " : "", t,
			 *t && *m ? "; " : "", *m ? "metrics: " : "", m);
	return o->error;
}

void otlp_describe(struct otlp *o, Shardd__V1__OtlpStatus *ret)
{
	const struct otlp_counts *t = &o->traces.counts, *m = &o->metrics.counts;

	ret->endpoint = o->url;
	ret->error = (char *)(uintptr_t)otlp_error(o);
	ret->trace_every = o->spans.every;
	ret->spans_sent = t->sent;
	ret->spans_dropped = t->dropped + o->spans.n_dropped;
	ret->spans_rejected = t->rejected;
	ret->points_sent = m->sent;
	ret->points_dropped = m->dropped;
	ret->points_rejected = m->rejected;
	ret->requests = t->requests + m->requests;
	ret->requests_failed = t->failed + m->failed;
}

/* -------------------------------------------------------------------------------------- end */

void otlp_stop(struct otlp *o, uint32_t timeout_ms, bool with_metrics)
{
	if (!o || o->stopping)
		return;
	MAGIC_CHECK(o, OTLP_MAGIC);
	o->stopping = true;
	o->stop_until_us = clock_now_us() + (uint64_t)timeout_ms * 1000u;
	otlp_spans_sample(&o->spans, 0);
	otlp_spans_end_steps(&o->spans, true);
	uv_timer_stop(&o->timer);
	if (o->traces.state == OTLP_RESTING)
		otlp_signal_drop(&o->traces);
	if (o->metrics.state == OTLP_COLLECTING) {
		status_turn_cancel(&o->turn);
		otlp_signal_end(&o->metrics);
	}
	if (with_metrics && o->metrics.state == OTLP_IDLE && !o->metrics.failures) {
		otlp_signal_move(&o->metrics, OTLP_COLLECTING);
		otlp_on_turn(&o->turn);
	}
	otlp_tick_last(o);
}

static void otlp_cancel_late(struct otlp_signal *sig)
{
	if (sig->state != OTLP_SENDING || sig->cancelled || clock_now_us() < sig->o->stop_until_us)
		return;
	sig->cancelled = true;
	otlp_call_cancel(sig->call);
}

bool otlp_stopped(struct otlp *o)
{
	if (!o)
		return true;
	CHECK(o->stopping);
	otlp_cancel_late(&o->traces);
	otlp_cancel_late(&o->metrics);
	return o->traces.state == OTLP_IDLE && o->metrics.state == OTLP_IDLE;
}

static void otlp_on_closed(uv_handle_t *handle)
{
	free(handle->data);
}

struct otlp *otlp_free(struct otlp *o)
{
	uint64_t lost;

	if (!o)
		return NULL;
	CHECK(otlp_stopped(o));
	lost = o->traces.counts.dropped + o->spans.n_dropped + o->spans.n_filling;
	if (lost)
		log_info("otlp", "spans that the collector has not got n=%llu",
			 (unsigned long long)lost);
	otlp_release(o);
	o->magic = 0;
	uv_close((uv_handle_t *)&o->timer, otlp_on_closed);
	return NULL;
}
