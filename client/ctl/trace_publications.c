/*
 * Publications in a trace, each a process: lanes for its generations, with the time that they were made in; marks for
 * what was made, dropped, skipped, and failed; lanes for each reader; and counters.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "ctl/trace_events_impl.h"
#include "json/json.h"

typedef Shardd__V1__PublicationRecord trace_record;

#define KIND(name)   SHARDD__V1__PUBLICATION_RECORD_KIND__PUBLICATION_RECORD_KIND_##name
#define SOURCE(name) SHARDD__V1__LEASE_RECORD_SOURCE__LEASE_RECORD_SOURCE_##name

/* The records of one publication. */
struct trace_publication {
	trace_record **all;
	size_t n;
	uint64_t from;           /* what was over before is not shown */
	struct lane_span *spans; /* room for @n */
	trace_record **some;     /* the same */
};

/* One that goes on lasts until the time of the trace. */
static uint64_t trace_publications_end(const struct trace *t, const trace_record *r)
{
	return trace_events_later(r->began_us, r->ended_us ? r->ended_us : t->now);
}

static bool trace_publications_is_shown(const struct trace_publication *p, const trace_record *r)
{
	return !r->ended_us || r->ended_us >= p->from;
}

/* By job and publication, then by their beginning. Of jobs of one name the latest comes first. */
static int trace_publications_compare(const void *a, const void *b)
{
	const trace_record *x = *(trace_record *const *)a, *y = *(trace_record *const *)b;
	int name = x->uid != y->uid ? (x->uid < y->uid ? -1 : 1) : strcmp(x->job, y->job);

	if (name)
		return name;
	if (x->job_number != y->job_number)
		return x->job_number > y->job_number ? -1 : 1;
	name = strcmp(x->publication, y->publication);
	if (name)
		return name;
	return x->began_us < y->began_us ? -1 : x->began_us > y->began_us;
}

static bool trace_publications_same(const trace_record *a, const trace_record *b)
{
	return a->uid == b->uid && a->job_number == b->job_number && strcmp(a->job, b->job) == 0 &&
	       strcmp(a->publication, b->publication) == 0;
}

/* Into p->some: those of @kind that are shown. @pid: of this process; 0: any. Return: how many. */
static size_t trace_publications_choose(struct trace_publication *p,
					Shardd__V1__PublicationRecordKind kind, int pid)
{
	size_t n = 0;

	for (size_t i = 0; i < p->n; i++)
		if (p->all[i]->kind == kind && (!pid || p->all[i]->pid == pid) &&
		    trace_publications_is_shown(p, p->all[i]))
			p->some[n++] = p->all[i];
	return n;
}

/* Lanes called @text for p->some, @n of them. Return: the first one's number. */
static json_int_t trace_publications_lay(struct trace *t, struct trace_publication *p,
					 const char *text, size_t n)
{
	for (size_t i = 0; i < n; i++)
		p->spans[i] = (struct lane_span){ .begin = p->some[i]->began_us,
						  .end = trace_publications_end(t, p->some[i]) };
	return trace_events_lay(t, text, p->spans, n);
}

/* ------------------------------------------------------------------------ generations */

/* It made room, and nobody had leased it. */
static bool trace_publications_is_dropped(const trace_record *r)
{
	return r->kind == KIND(GENERATION) && r->made_us && r->ended_us && !r->was_used && !*r->why;
}

static json_t *trace_publications_generation_args(const trace_record *r)
{
	json_t *args =
		json_pack("{sI sI}", "number", (json_int_t)r->number, "step", (json_int_t)r->step);

	if (!args)
		return NULL;
	trace_events_set_number(args, "bytes", r->bytes);
	trace_events_set_number(args, "delta_bytes", r->delta_bytes);
	trace_events_set_text(args, "state",
			      trace_publications_is_dropped(r) ? "DROPPED"
			      : r->ended_us                    ? "OVER"
			      : r->made_us                     ? "READY"
							       : "MAKING");
	json_object_set_new(args, "leased", json_boolean(r->was_used));
	trace_events_set_text(args, "why", r->why);
	return args;
}

static void trace_publications_generations(struct trace *t, struct trace_publication *p)
{
	size_t n = trace_publications_choose(p, KIND(GENERATION), 0);
	json_int_t first = trace_publications_lay(t, p, "generations", n);

	for (size_t i = 0; i < n; i++) {
		const trace_record *r = p->some[i];
		json_int_t lane = first + (json_int_t)p->spans[i].lane;
		uint64_t end = trace_publications_end(t, r);
		char text[64];

		snprintf(text, sizeof(text), "generation %" PRIu64, r->number);
		trace_events_slice(t, lane, "generation", text, r->began_us, end,
				   trace_publications_generation_args(r));
		trace_events_phase(t, lane, "make", r->began_us, r->made_us ? r->made_us : end);
	}
}

/* ------------------------------------------------------------------------------ marks */

static void trace_publications_mark(struct trace *t, const struct trace_publication *p,
				    json_int_t lane, const char *text, uint64_t at,
				    const trace_record *r, const char *why)
{
	json_t *args;

	if (at < p->from)
		return;
	args = json_pack("{sI}", "step", (json_int_t)r->step);
	if (args) {
		trace_events_set_number(args, "number", r->number);
		trace_events_set_text(args, "why", why);
	}
	trace_events_instant(t, lane, "publication", text, at, args);
}

static void trace_publications_marks_of(struct trace *t, const struct trace_publication *p,
					json_int_t lane, const trace_record *r)
{
	if (r->kind == KIND(SKIPPED))
		trace_publications_mark(t, p, lane, "skipped", r->began_us, r, r->why);
	if (r->kind == KIND(FAILED))
		trace_publications_mark(t, p, lane, "failed", r->began_us, r, r->why);
	if (r->kind == KIND(GENERATION) && r->made_us)
		trace_publications_mark(t, p, lane, "made", r->made_us, r, "");
	if (trace_publications_is_dropped(r))
		trace_publications_mark(t, p, lane, "dropped", r->ended_us, r,
					"it made room, and nobody had leased it");
}

static void trace_publications_marks(struct trace *t, const struct trace_publication *p)
{
	json_int_t lane = trace_events_new_lane(t, "made, dropped, skipped, failed");

	for (size_t i = 0; i < p->n; i++)
		trace_publications_marks_of(t, p, lane, p->all[i]);
}

/* ---------------------------------------------------------------------------- readers */

static const char *trace_publications_source(const trace_record *r)
{
	switch (r->source) {
	case SOURCE(CALL):
		return "a call";
	case SOURCE(STREAM):
		return "a stream";
	case SOURCE(BOARD):
		return "the board: the times are those of the daemon's looks";
	case SOURCE(BETWEEN_LOOKS):
		return "the board: some time between two looks";
	default:
		return "";
	}
}

static json_t *trace_publications_reader_args(const trace_record *r)
{
	json_t *args = json_pack("{si sI}", "pid", r->pid, "session", (json_int_t)r->session);

	if (!args)
		return NULL;
	trace_events_set_number(args, "number", r->number);
	if (r->kind == KIND(LEASE))
		trace_events_set_number(args, "step", r->step);
	trace_events_set_text(args, "by", trace_publications_source(r));
	return args;
}

/* Slices of @kind of one process, in lanes called @text. */
static void trace_publications_of_reader(struct trace *t, struct trace_publication *p, int pid,
					 Shardd__V1__PublicationRecordKind kind, const char *text)
{
	size_t n = trace_publications_choose(p, kind, pid);
	json_int_t first = trace_publications_lay(t, p, text, n);
	char name[64] = "reader";

	for (size_t i = 0; i < n; i++) {
		const trace_record *r = p->some[i];

		if (kind == KIND(LEASE))
			snprintf(name, sizeof(name), "generation %" PRIu64, r->number);
		trace_events_slice(t, first + (json_int_t)p->spans[i].lane,
				   kind == KIND(LEASE) ? "lease" : "reader", name, r->began_us,
				   trace_publications_end(t, r), trace_publications_reader_args(r));
	}
}

static int trace_publications_compare_pids(const void *a, const void *b)
{
	const int x = *(const int *)a, y = *(const int *)b;

	return x < y ? -1 : x > y;
}

/* A process of each reader: while it may read by the board, and what it has leased. */
static void trace_publications_readers(struct trace *t, struct trace_publication *p)
{
	_cleanup_(freep) int *pids = calloc(p->n + 1, sizeof(*pids));
	char text[64];
	size_t n = 0;

	for (size_t i = 0; pids && i < p->n; i++)
		if (p->all[i]->pid && trace_publications_is_shown(p, p->all[i]))
			pids[n++] = p->all[i]->pid;
	if (!pids) {
		t->failed = true;
		return;
	}
	qsort(pids, n, sizeof(*pids), trace_publications_compare_pids);
	for (size_t i = 0; i < n; i++) {
		if (i && pids[i] == pids[i - 1])
			continue;
		snprintf(text, sizeof(text), "process %d reader", pids[i]);
		trace_publications_of_reader(t, p, pids[i], KIND(READER), text);
		snprintf(text, sizeof(text), "process %d leases", pids[i]);
		trace_publications_of_reader(t, p, pids[i], KIND(LEASE), text);
	}
}

/* --------------------------------------------------------------------------- counters */

/* A change at a time. */
struct trace_change {
	uint64_t at;
	uint64_t step;      /* LAG: the job's, or of the newest generation */
	bool is_generation; /* LAG: the latter */
	int by;             /* the others: 1 or -1 */
};

/* What was made of a commit was made later. */
static int trace_publications_compare_changes(const void *a, const void *b)
{
	const struct trace_change *x = a, *y = b;

	if (x->at != y->at)
		return x->at < y->at ? -1 : 1;
	return (int)x->is_generation - (int)y->is_generation;
}

/* How many there are at a time. What was over before p->from counts, and is not shown. */
static void trace_publications_show_number(struct trace *t, const struct trace_publication *p,
					   const char *text, struct trace_change *all, size_t n)
{
	int64_t value = 0;

	qsort(all, n, sizeof(*all), trace_publications_compare_changes);
	for (size_t i = 0; i < n; i++) {
		value += all[i].by;
		if (i + 1 < n && (all[i + 1].at == all[i].at || all[i + 1].at <= p->from))
			continue;
		trace_events_counter(t, text, text, trace_events_later(all[i].at, p->from),
				     value > 0 ? (uint64_t)value : 0);
	}
}

/* Records of @kind. When a lease was, that no look has seen, is not known. */
static void trace_publications_number(struct trace *t, const struct trace_publication *p,
				      const char *text, Shardd__V1__PublicationRecordKind kind)
{
	_cleanup_(freep) struct trace_change *all = calloc(2 * p->n + 1, sizeof(*all));
	size_t n = 0;

	for (size_t i = 0; all && i < p->n; i++) {
		const trace_record *r = p->all[i];

		if (r->kind != kind || r->source == SOURCE(BETWEEN_LOOKS))
			continue;
		all[n++] = (struct trace_change){ .at = r->began_us, .by = 1 };
		if (r->ended_us)
			all[n++] = (struct trace_change){ .at = r->ended_us, .by = -1 };
	}
	if (all)
		trace_publications_show_number(t, p, text, all, n);
	else
		t->failed = true;
}

static bool trace_publications_is_op_of(const trace_record *r, const Shardd__V1__OpRecord *o)
{
	return o->step && o->finished_us && o->uid == r->uid && o->job_number == r->job_number &&
	       strcmp(o->job, r->job) == 0;
}

/* What is known of the job's step, and of that of the newest generation. */
static size_t trace_publications_steps(const struct trace_publication *p,
				       const Shardd__V1__OpsResponse *reply,
				       struct trace_change *to)
{
	size_t n = 0;

	for (size_t i = 0; i < reply->n_ops; i++)
		if (trace_publications_is_op_of(p->all[0], reply->ops[i]))
			to[n++] = (struct trace_change){ .at = reply->ops[i]->finished_us,
							 .step = reply->ops[i]->step };
	for (size_t i = 0; i < p->n; i++) {
		const trace_record *r = p->all[i];

		if (r->kind != KIND(GENERATION) && r->kind != KIND(SKIPPED) &&
		    r->kind != KIND(FAILED))
			continue;
		to[n++] = (struct trace_change){ .at = r->began_us, .step = r->step };
		if (r->made_us)
			to[n++] = (struct trace_change){ .at = r->made_us,
							 .step = r->step,
							 .is_generation = true };
	}
	return n;
}

/* How far the job is ahead of the newest generation. */
static void trace_publications_lag(struct trace *t, const struct trace_publication *p,
				   const Shardd__V1__OpsResponse *reply)
{
	_cleanup_(freep) struct trace_change *all =
		calloc(reply->n_ops + 2 * p->n + 1, sizeof(*all));
	uint64_t job = 0, generation = 0, shown = UINT64_MAX;
	size_t n = all ? trace_publications_steps(p, reply, all) : 0;

	if (!all)
		t->failed = true;
	else
		qsort(all, n, sizeof(*all), trace_publications_compare_changes);
	for (size_t i = 0; i < n; i++) {
		uint64_t lag;

		if (all[i].is_generation)
			generation = all[i].step;
		else
			job = all[i].step;
		lag = job > generation ? job - generation : 0;
		if (!generation || lag == shown ||
		    (i + 1 < n && (all[i + 1].at == all[i].at || all[i + 1].at <= p->from)))
			continue;
		trace_events_counter(t, "lag", "steps", trace_events_later(all[i].at, p->from),
				     lag);
		shown = lag;
	}
}

/* ------------------------------------------------------------------------ all of them */

static void trace_publications_add_one(struct trace *t, struct trace_publication *p,
				       const Shardd__V1__OpsResponse *reply)
{
	char text[CTL_JOB_MAX + 128], job[CTL_JOB_MAX];
	size_t shown = 0;

	for (size_t i = 0; i < p->n; i++)
		shown += trace_publications_is_shown(p, p->all[i]);
	if (!shown)
		return;
	ctl_job_text(p->all[0]->uid, p->all[0]->job, job);
	snprintf(text, sizeof(text), "publication %s of job %s", p->all[0]->publication, job);
	trace_events_new_process(t, text);
	trace_publications_marks(t, p);
	trace_publications_generations(t, p);
	trace_publications_readers(t, p);
	trace_publications_lag(t, p, reply);
	trace_publications_number(t, p, "leases", KIND(LEASE));
	trace_publications_number(t, p, "readers", KIND(READER));
}

void trace_publications_add(struct trace *t, const Shardd__V1__OpsResponse *reply, uint64_t from)
{
	const size_t n = reply->n_publications;
	_cleanup_(freep) trace_record **all = calloc(n + 1, sizeof(*all));
	_cleanup_(freep) trace_record **some = calloc(n + 1, sizeof(*some));
	_cleanup_(freep) struct lane_span *spans = calloc(n + 1, sizeof(*spans));

	if (!all || !some || !spans) {
		t->failed = true;
		return;
	}
	if (n)
		memcpy(all, reply->publications, n * sizeof(*all));
	qsort(all, n, sizeof(*all), trace_publications_compare);
	for (size_t i = 0, same; i < n; i += same) {
		struct trace_publication p = {
			.all = &all[i], .from = from, .spans = spans, .some = some
		};

		for (same = 1; i + same < n && trace_publications_same(all[i], all[i + same]);)
			same++;
		p.n = same;
		trace_publications_add_one(t, &p, reply);
	}
}
