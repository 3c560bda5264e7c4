#include "ctl/trace_events.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "json/json.h"
#include "ctl/lanes.h"
#include "ctl/trace_events_impl.h"

uint64_t trace_events_later(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

/* -------------------------------------------------------------------- events */

/* @args: consumed. */
static void trace_events_add(struct trace *t, json_t *event, json_t *args)
{
	if (!event || !args || json_object_set(event, "args", args) < 0 ||
	    json_array_append(t->events, event) < 0)
		t->failed = true;
	json_decref(args);
	json_decref(event);
}

/* What a process or lane is called. */
static void trace_events_name(struct trace *t, const char *what, json_int_t lane, const char *text)
{
	trace_events_add(t,
			 json_pack("{ss ss sI sI}", "ph", "M", "name", what, "pid", t->process,
				   "tid", lane),
			 json_pack("{so}", "name", json_from_text(text)));
}

void trace_events_new_process(struct trace *t, const char *text)
{
	t->process++;
	trace_events_name(t, "process_name", 0, text);
}

json_int_t trace_events_new_lane(struct trace *t, const char *text)
{
	t->lane++;
	trace_events_name(t, "thread_name", t->lane, text);
	trace_events_add(t,
			 json_pack("{ss ss sI sI}", "ph", "M", "name", "thread_sort_index", "pid",
				   t->process, "tid", t->lane),
			 json_pack("{sI}", "sort_index", t->lane));
	return t->lane;
}

void trace_events_slice(struct trace *t, json_int_t lane, const char *category, const char *text,
			uint64_t begin, uint64_t end, json_t *args)
{
	trace_events_add(t,
			 json_pack("{ss ss so sI sI sI sI}", "ph", "X", "cat", category, "name",
				   json_from_text(text), "pid", t->process, "tid", lane, "ts",
				   (json_int_t)begin, "dur", (json_int_t)(end - begin)),
			 args);
}

void trace_events_phase(struct trace *t, json_int_t lane, const char *text, uint64_t begin,
			uint64_t end)
{
	if (begin < end)
		trace_events_slice(t, lane, "phase", text, begin, end, json_object());
}

void trace_events_instant(struct trace *t, json_int_t lane, const char *category, const char *text,
			  uint64_t at, json_t *args)
{
	trace_events_add(t,
			 json_pack("{ss ss ss so sI sI sI}", "ph", "i", "s", "t", "cat", category,
				   "name", json_from_text(text), "pid", t->process, "tid", lane,
				   "ts", (json_int_t)at),
			 args);
}

void trace_events_counter(struct trace *t, const char *text, const char *unit, uint64_t at,
			  uint64_t value)
{
	trace_events_add(t,
			 json_pack("{ss ss sI sI}", "ph", "C", "name", text, "pid", t->process,
				   "ts", (json_int_t)at),
			 json_pack("{sI}", unit, (json_int_t)value));
}

void trace_events_set_number(json_t *args, const char *key, uint64_t n)
{
	if (n)
		json_object_set_new(args, key, json_integer((json_int_t)n));
}

void trace_events_set_text(json_t *args, const char *key, const char *text)
{
	if (*text)
		json_object_set_new(args, key, json_from_text(text));
}

/* "Gather layer.0". */
static void trace_events_title(char *buf, size_t bytes, const char *op, const char *unit)
{
	snprintf(buf, bytes, "%s%s%s", op, *unit ? " " : "", unit);
}

/* --------------------------------------------------------------------- lanes */

json_int_t trace_events_lay(struct trace *t, const char *text, struct lane_span *spans, size_t n)
{
	json_int_t first = t->lane + 1;
	char more[160];
	size_t lanes;

	if (lanes_lay(spans, n, &lanes) < 0) {
		t->failed = true;
		return first;
	}
	for (size_t i = 0; i < lanes; i++) {
		snprintf(more, sizeof(more), i ? "%s (%zu)" : "%s", text, i + 1);
		trace_events_new_lane(t, more);
	}
	return first;
}

/* ----------------------------------------------------------------------- ops */

static uint64_t trace_events_op_end(const struct trace *t, const Shardd__V1__OpRecord *o)
{
	return trace_events_later(o->announced_us, o->finished_us ? o->finished_us : t->now);
}

/* By job and rank, in the order in which they came. Of jobs of one name the latest comes first. */
static int trace_events_compare_ops(const void *a, const void *b)
{
	const Shardd__V1__OpRecord *x = *(Shardd__V1__OpRecord *const *)a,
				   *y = *(Shardd__V1__OpRecord *const *)b;
	int job = x->uid != y->uid ? (x->uid < y->uid ? -1 : 1) : strcmp(x->job, y->job);

	if (job)
		return job;
	if (x->job_number != y->job_number)
		return x->job_number > y->job_number ? -1 : 1;
	if (x->rank != y->rank)
		return x->rank < y->rank ? -1 : 1;
	return x->id < y->id ? -1 : x->id > y->id;
}

static bool trace_events_same_name(const Shardd__V1__OpRecord *a, const Shardd__V1__OpRecord *b)
{
	return a->uid == b->uid && strcmp(a->job, b->job) == 0;
}

static bool trace_events_same_job(const Shardd__V1__OpRecord *a, const Shardd__V1__OpRecord *b)
{
	return a->job_number == b->job_number && trace_events_same_name(a, b);
}

static bool trace_events_same_rank(const Shardd__V1__OpRecord *a, const Shardd__V1__OpRecord *b)
{
	return a->rank == b->rank && trace_events_same_job(a, b);
}

static json_t *trace_events_op_args(const Shardd__V1__OpRecord *o)
{
	json_t *args = json_pack("{sI sI sI si}", "id", (json_int_t)o->id, "seq",
				 (json_int_t)o->seq, "epoch", (json_int_t)o->epoch, "pid", o->pid);

	if (!args)
		return NULL;
	trace_events_set_number(args, "number", o->number);
	trace_events_set_number(args, "bytes", o->bytes);
	trace_events_set_number(args, "step", o->step);
	trace_events_set_text(args, "group", o->group);
	trace_events_set_text(args, "state",
			      json_state(&shardd__v1__op_state__descriptor, o->state));
	trace_events_set_text(args, "fault", o->error);
	trace_events_set_text(args, "waits_for", o->waits_for);
	return args;
}

/* The op with what it waited for, and its run. */
static void trace_events_op_slice(struct trace *t, json_int_t lane, const Shardd__V1__OpRecord *o)
{
	uint64_t end = trace_events_op_end(t, o), active = o->active_us, started = o->started_us;
	char text[160];

	trace_events_title(text, sizeof(text), o->op, o->unit);
	trace_events_slice(t, lane, "op", text, o->announced_us, end, trace_events_op_args(o));
	if (!active)
		active = started ? started : end;
	if (!started)
		started = end;
	trace_events_phase(t, lane, "deps", o->announced_us, active);
	trace_events_phase(t, lane, o->number ? "peers" : "blocked", active, started);
	trace_events_phase(t, lane, "run", started, end);
}

/* The time between two ops of one process. The record does not say whether the process waited for
 * the first op; it did not if the op ended after the next one was submitted. */
static void trace_events_trainer_slice(struct trace *t, json_int_t lane,
				       const Shardd__V1__OpRecord *o,
				       const Shardd__V1__OpRecord *next)
{
	bool over = o->finished_us && o->finished_us <= next->announced_us;
	uint64_t begin = over ? o->finished_us : o->announced_us;

	if (o->pid == next->pid && begin < next->announced_us)
		trace_events_slice(t, lane, "trainer", "trainer", begin, next->announced_us,
				   json_pack("{si}", "pid", o->pid));
}

static void trace_events_rank_lanes(struct trace *t, Shardd__V1__OpRecord **ops,
				    struct lane_span *spans, size_t n)
{
	json_int_t trainer, first;
	char text[64];

	snprintf(text, sizeof(text), "rank %u trainer", ops[0]->rank);
	trainer = trace_events_new_lane(t, text);
	for (size_t i = 0; i + 1 < n; i++)
		trace_events_trainer_slice(t, trainer, ops[i], ops[i + 1]);
	for (size_t i = 0; i < n; i++)
		spans[i] = (struct lane_span){ .begin = ops[i]->announced_us,
					       .end = trace_events_op_end(t, ops[i]) };
	snprintf(text, sizeof(text), "rank %u", ops[0]->rank);
	first = trace_events_lay(t, text, spans, n);
	for (size_t i = 0; i < n; i++)
		trace_events_op_slice(t, first + (json_int_t)spans[i].lane, ops[i]);
}

static void trace_events_add_ops(struct trace *t, Shardd__V1__OpRecord **ops,
				 struct lane_span *spans, size_t n)
{
	char text[CTL_JOB_MAX + 32], job[CTL_JOB_MAX];

	qsort(ops, n, sizeof(ops[0]), trace_events_compare_ops);
	for (size_t i = 0, same; i < n; i += same) {
		for (same = 1; i + same < n && trace_events_same_rank(ops[i], ops[i + same]);)
			same++;
		ctl_job_text(ops[i]->uid, ops[i]->job, job);
		snprintf(text, sizeof(text), "job %s%s", job,
			 i && trace_events_same_name(ops[i], ops[i - 1]) &&
					 !trace_events_same_job(ops[i], ops[i - 1])
				 ? " (an earlier one)"
				 : "");
		if (!i || !trace_events_same_job(ops[i], ops[i - 1]))
			trace_events_new_process(t, text);
		trace_events_rank_lanes(t, &ops[i], spans, same);
	}
}

/* ------------------------------------------------------------------- devices */

static uint64_t trace_events_device_end(const struct trace *t, const Shardd__V1__DeviceRecord *d)
{
	return trace_events_later(d->submitted_us, d->ended_us ? d->ended_us : t->now);
}

static bool trace_events_same_queue(const Shardd__V1__DeviceRecord *a,
				    const Shardd__V1__DeviceRecord *b)
{
	return strcmp(a->device, b->device) == 0 && strcmp(a->queue, b->queue) == 0;
}

/* By queue, in the order in which they were submitted. */
static int trace_events_compare_devices(const void *a, const void *b)
{
	const Shardd__V1__DeviceRecord *x = *(Shardd__V1__DeviceRecord *const *)a,
				       *y = *(Shardd__V1__DeviceRecord *const *)b;
	int device = strcmp(x->device, y->device), queue = strcmp(y->queue, x->queue);

	if (device || queue)
		return device ? device : queue;
	return x->id < y->id ? -1 : x->id > y->id;
}

static json_t *trace_events_device_args(const Shardd__V1__DeviceRecord *d)
{
	char job[CTL_JOB_MAX];
	json_t *args = json_pack("{sI sI sI}", "id", (json_int_t)d->id, "epoch",
				 (json_int_t)d->epoch, "kernels", (json_int_t)d->kernels);

	if (!args)
		return NULL;
	ctl_job_text(d->uid, d->job, job);
	trace_events_set_text(args, "job", job);
	trace_events_set_number(args, "number", d->number);
	trace_events_set_number(args, "bytes", d->bytes);
	trace_events_set_text(args, "state", !d->ended_us ? "RUN" : *d->error ? "FAILED" : "DONE");
	trace_events_set_text(args, "fault", d->error);
	return args;
}

static void trace_events_device_slice(struct trace *t, json_int_t lane,
				      const Shardd__V1__DeviceRecord *d)
{
	uint64_t end = trace_events_device_end(t, d);
	char text[160];

	trace_events_title(text, sizeof(text), d->op, d->unit);
	trace_events_slice(t, lane, "device", text, d->submitted_us, end,
			   trace_events_device_args(d));
	if (!d->began_us)
		return; /* not known: a GPU does not report it */
	trace_events_phase(t, lane, "queue", d->submitted_us, d->began_us);
	trace_events_phase(t, lane, "run", d->began_us, end);
}

static void trace_events_queue_lanes(struct trace *t, Shardd__V1__DeviceRecord **devices,
				     struct lane_span *spans, size_t n)
{
	json_int_t first;
	char text[96];

	for (size_t i = 0; i < n; i++)
		spans[i] = (struct lane_span){ .begin = devices[i]->submitted_us,
					       .end = trace_events_device_end(t, devices[i]) };
	snprintf(text, sizeof(text), "%s %s", devices[0]->device, devices[0]->queue);
	first = trace_events_lay(t, text, spans, n);
	for (size_t i = 0; i < n; i++)
		trace_events_device_slice(t, first + (json_int_t)spans[i].lane, devices[i]);
}

static void trace_events_add_devices(struct trace *t, Shardd__V1__DeviceRecord **devices,
				     struct lane_span *spans, size_t n)
{
	qsort(devices, n, sizeof(devices[0]), trace_events_compare_devices);
	if (n)
		trace_events_new_process(t, "shardd");
	for (size_t i = 0, same; i < n; i += same) {
		for (same = 1;
		     i + same < n && trace_events_same_queue(devices[i], devices[i + same]);)
			same++;
		trace_events_queue_lanes(t, &devices[i], spans, same);
	}
}

/* -------------------------------------------------------------------- limits */

static bool trace_events_is_pending(uint64_t end)
{
	return !end;
}

/* Those that are pending come first. Return: how many others there are. */
static size_t trace_events_ended(const Shardd__V1__OpsResponse *reply)
{
	size_t n = 0;

	for (size_t i = 0; i < reply->n_ops; i++)
		n += !trace_events_is_pending(reply->ops[i]->finished_us);
	return n;
}

/* Those that are wanted: what is pending, and of the last ones what was not over by @from. Return: how
 * many. */
static size_t trace_events_choose_ops(const Shardd__V1__OpsResponse *reply, uint64_t last,
				      uint64_t from, Shardd__V1__OpRecord **ret)
{
	size_t first = last && trace_events_ended(reply) > last ? reply->n_ops - last : 0, n = 0;

	for (size_t i = 0; i < reply->n_ops; i++)
		if (trace_events_is_pending(reply->ops[i]->finished_us) ||
		    (i >= first && reply->ops[i]->finished_us >= from))
			ret[n++] = reply->ops[i];
	return n;
}

static size_t trace_events_choose_devices(const Shardd__V1__OpsResponse *reply, uint64_t from,
					  Shardd__V1__DeviceRecord **ret)
{
	size_t n = 0;

	for (size_t i = 0; i < reply->n_devices; i++)
		if (trace_events_is_pending(reply->devices[i]->ended_us) ||
		    reply->devices[i]->ended_us >= from)
			ret[n++] = reply->devices[i];
	return n;
}

/* What the limits say of the time: the present less the seconds, or the first of the last. */
static uint64_t trace_events_from_of(const Shardd__V1__OpsResponse *reply,
				     const struct trace_limits *limits)
{
	uint64_t now = reply->now_us, from = 0;

	if (limits->seconds && limits->seconds <= now / 1000000u)
		from = now - limits->seconds * 1000000u;
	if (limits->last && limits->last < trace_events_ended(reply))
		from = trace_events_later(from,
					  reply->ops[reply->n_ops - limits->last]->announced_us);
	return from;
}

static json_t *trace_events_document(struct trace *t)
{
	json_t *j =
		json_pack("{ss so s{ss sI}}", "displayTimeUnit", "ms", "traceEvents", t->events,
			  "otherData", "source", "shardctl trace", "now_us", (json_int_t)t->now);

	t->events = NULL; /* taken, in any case */
	return j;
}

json_t *trace_events(const Shardd__V1__OpsResponse *reply, const struct trace_limits *limits)
{
	size_t most = reply->n_ops > reply->n_devices ? reply->n_ops : reply->n_devices;
	_cleanup_(freep) struct lane_span *spans = calloc(most + 1, sizeof(*spans));
	_cleanup_(freep) Shardd__V1__OpRecord **ops = calloc(reply->n_ops + 1, sizeof(*ops));
	_cleanup_(freep) Shardd__V1__DeviceRecord **devices =
		calloc(reply->n_devices + 1, sizeof(*devices));
	struct trace t = { .events = json_array(), .now = reply->now_us };
	uint64_t from = trace_events_from_of(reply, limits);

	if (!t.events || !spans || !ops || !devices) {
		json_decref(t.events);
		return NULL;
	}
	trace_events_add_ops(&t, ops, spans,
			     trace_events_choose_ops(reply, limits->last, from, ops));
	trace_events_add_devices(&t, devices, spans,
				 trace_events_choose_devices(reply, from, devices));
	trace_publications_add(&t, reply, from);
	if (!t.failed)
		return trace_events_document(&t);
	json_decref(t.events);
	return NULL;
}
