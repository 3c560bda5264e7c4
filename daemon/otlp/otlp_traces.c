#include "otlp/otlp_traces.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "rpc/codec.h"

#define OTLP_TRACES_ID_BYTES 8u
/* SPAN_KIND_INTERNAL */
#define OTLP_TRACES_INTERNAL 1
/* STATUS_CODE_ERROR */
#define OTLP_TRACES_ERROR 2
/* The most attributes of a span. */
#define OTLP_TRACES_ATTRIBUTES 12u

/* What a message of a span points to. */
struct otlp_traces_parts {
	uint8_t id[OTLP_TRACES_ID_BYTES], parent[OTLP_TRACES_ID_BYTES];
	char name[32], error[192];
	Shardd__Otlp__V1__SpanStatus status;
	Shardd__Otlp__V1__SpanEvent events[2], *all_events[2];
};

static uint64_t otlp_traces_unix_ns(uint64_t us, int64_t unix_us)
{
	return (us + (uint64_t)unix_us) * 1000u;
}

static ProtobufCBinaryData otlp_traces_id(uint64_t id, uint8_t to[OTLP_TRACES_ID_BYTES])
{
	memcpy(to, &id, OTLP_TRACES_ID_BYTES);
	return (ProtobufCBinaryData){ .data = to, .len = OTLP_TRACES_ID_BYTES };
}

static void otlp_traces_fill_op(const struct otlp_span *s, struct otlp_attributes *a)
{
	otlp_attributes_number(a, "shardd.rank", s->rank);
	otlp_attributes_number(a, "shardd.pid", s->pid);
	if (*s->unit)
		otlp_attributes_text(a, "shardd.unit", s->unit);
	if (*s->group)
		otlp_attributes_text(a, "shardd.group", s->group);
	if (s->number)
		otlp_attributes_number(a, "shardd.number", (int64_t)s->number);
	if (s->last_rank)
		otlp_attributes_number(a, "shardd.last_rank", s->last_rank - 1);
}

static void otlp_traces_fill_step(const struct otlp_span *s, struct otlp_attributes *a)
{
	otlp_attributes_bool(a, "shardd.committed", s->committed);
	otlp_attributes_number(a, "shardd.ops", s->ops);
	otlp_attributes_number(a, "shardd.ops_failed", s->failed);
}

static void otlp_traces_fill(const struct otlp_span *s, struct otlp_attributes *a)
{
	otlp_attributes_text(a, "shardd.job", s->job);
	otlp_attributes_number(a, "shardd.uid", s->uid);
	otlp_attributes_number(a, "shardd.step", (int64_t)s->step);
	otlp_attributes_number(a, "shardd.epoch", (int64_t)s->epoch);
	if (s->bytes)
		otlp_attributes_number(a, "shardd.bytes", (int64_t)s->bytes);
	if (s->kind == OTLP_SPAN_OP)
		otlp_traces_fill_op(s, a);
	else if (s->kind == OTLP_SPAN_STEP)
		otlp_traces_fill_step(s, a);
}

/* When an op had its turn, and when all that it waited for was there. */
static void otlp_traces_add_event(struct otlp_traces_parts *p, Shardd__Otlp__V1__Span *to,
				  const char *name, uint64_t us, int64_t unix_us)
{
	Shardd__Otlp__V1__SpanEvent *e = &p->events[to->n_events];

	if (!us)
		return;
	CHECK(to->n_events < ARRAY_SIZE(p->events));
	shardd__otlp__v1__span_event__init(e);
	e->time_unix_nano = otlp_traces_unix_ns(us, unix_us);
	e->name = (char *)(uintptr_t)name;
	p->all_events[to->n_events++] = e;
	to->events = p->all_events;
}

static void otlp_traces_set_status(const struct otlp_span *s, struct otlp_traces_parts *p,
				   Shardd__Otlp__V1__Span *to)
{
	if (s->kind == OTLP_SPAN_STEP && s->failed)
		snprintf(p->error, sizeof(p->error), "%" PRIu32 " of %" PRIu32 " ops failed",
			 s->failed, s->ops);
	else
		snprintf(p->error, sizeof(p->error), "%s", s->error);
	if (!*p->error)
		return;
	codec_clean_text(p->error);
	shardd__otlp__v1__span_status__init(&p->status);
	p->status.code = OTLP_TRACES_ERROR;
	p->status.message = p->error;
	to->status = &p->status;
}

static void otlp_traces_set_name(const struct otlp_span *s, struct otlp_traces_parts *p,
				 Shardd__Otlp__V1__Span *to)
{
	if (s->kind == OTLP_SPAN_STEP)
		snprintf(p->name, sizeof(p->name), "step %" PRIu64, s->step);
	to->name = s->kind == OTLP_SPAN_STEP ? p->name : (char *)(uintptr_t)s->name;
}

static void otlp_traces_add(struct otlp_packer *packer, const struct otlp_span *s, int64_t unix_us)
{
	Shardd__Otlp__V1__Span to = SHARDD__OTLP__V1__SPAN__INIT;
	struct arena arena = ARENA_NULL;
	struct otlp_traces_parts p = { .error = "" };
	struct otlp_attributes a;

	to.trace_id = (ProtobufCBinaryData){ .data = (uint8_t *)(uintptr_t)s->trace,
					     .len = OTLP_TRACE_BYTES };
	to.span_id = otlp_traces_id(s->id, p.id);
	if (s->parent)
		to.parent_span_id = otlp_traces_id(s->parent, p.parent);
	to.kind = OTLP_TRACES_INTERNAL;
	to.start_time_unix_nano = otlp_traces_unix_ns(s->began_us, unix_us);
	to.end_time_unix_nano = otlp_traces_unix_ns(s->ended_us, unix_us);
	otlp_traces_set_name(s, &p, &to);
	otlp_traces_set_status(s, &p, &to);
	otlp_traces_add_event(&p, &to, "turn", s->active_us, unix_us);
	otlp_traces_add_event(&p, &to, "start", s->started_us, unix_us);
	otlp_attributes_init(&a, &arena, OTLP_TRACES_ATTRIBUTES);
	otlp_traces_fill(s, &a);
	to.attributes = a.list;
	to.n_attributes = a.n;
	if (arena.failed)
		packer->failed = true;
	else
		otlp_packer_add(packer, &to.base, 1);
	arena_free(&arena);
}

bool otlp_traces_pack(const struct otlp_span *spans, size_t n, const struct otlp_self *self,
		      int64_t unix_us, struct otlp_requests *ret)
{
	struct otlp_packer packer;

	otlp_packer_init(&packer, self, ret);
	for (size_t i = 0; i < n; i++)
		otlp_traces_add(&packer, &spans[i], unix_us);
	return otlp_packer_end(&packer);
}
