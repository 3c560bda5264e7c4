/* What the exporter to OpenTelemetry sends: requests and their limits, attributes, metrics of many. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "otlp/otlp_headers.h"
#include "otlp/otlp_metrics.h"
#include "otlp/otlp_traces.h"

TestSuite(otlp, .timeout = 60, .init = fdcheck_begin, .fini = fdcheck_end);

static const struct otlp_self self = { .service = "shardd",
				       .instance = "00",
				       .host = "node",
				       .version = "1",
				       .cluster = "",
				       .pid = 7 };

/* Of a request, with all items of its one scope. */
static Shardd__Otlp__V1__ExportRequest *test_otlp_unpack(const struct otlp_request *r)
{
	Shardd__Otlp__V1__ExportRequest *m =
		shardd__otlp__v1__export_request__unpack(NULL, r->bytes, r->data);

	cr_assert(m);
	cr_assert_eq(m->n_resources, 1);
	cr_assert_eq(m->resources[0]->n_scopes, 1);
	return m;
}

static size_t test_otlp_items(const struct otlp_request *r)
{
	Shardd__Otlp__V1__ExportRequest *m = test_otlp_unpack(r);
	size_t n = m->resources[0]->scopes[0]->n_items;

	protobuf_c_message_free_unpacked(&m->base, NULL);
	return n;
}

static struct otlp_span *test_otlp_spans(size_t n, size_t error_bytes)
{
	struct otlp_span *spans = calloc(n, sizeof(*spans));

	cr_assert(spans);
	for (size_t i = 0; i < n; i++) {
		spans[i] = (struct otlp_span){ .kind = OTLP_SPAN_OP,
					       .id = i + 1,
					       .parent = 9,
					       .began_us = 10,
					       .ended_us = 20,
					       .name = "Gather" };
		memset(spans[i].error, 'x', error_bytes);
	}
	return spans;
}

Test(otlp, requests_are_cut_before_they_are_too_long)
{
	const size_t n = 3 * OTLP_REQUEST_ITEMS + 5;
	struct otlp_span *spans = test_otlp_spans(n, 150);
	struct otlp_requests r = OTLP_REQUESTS_NULL;
	uint64_t sum = 0, bytes = 0;

	cr_assert(otlp_traces_pack(spans, n, &self, 0, &r));
	cr_expect_gt(r.n, 3);
	for (size_t i = 0; i < r.n; i++) {
		cr_expect_leq(r.list[i].bytes, OTLP_REQUEST_BYTES + 1024);
		cr_expect_eq(test_otlp_items(&r.list[i]), r.list[i].n);
		sum += r.list[i].n;
		bytes += r.list[i].bytes;
	}
	cr_expect_eq(sum, n);
	cr_expect_eq(bytes, r.bytes);
	otlp_requests_deinit(&r);
	otlp_requests_deinit(&r); /* safe twice */
	free(spans);
}

Test(otlp, few_items_are_one_request_and_none_are_none)
{
	struct otlp_span *spans = test_otlp_spans(3, 0);
	struct otlp_requests r = OTLP_REQUESTS_NULL;

	cr_assert(otlp_traces_pack(spans, 0, &self, 0, &r));
	cr_expect_eq(r.n, 0);
	cr_assert(otlp_traces_pack(spans, 3, &self, 0, &r));
	cr_expect_eq(r.n, 1);
	cr_expect_eq(r.list[0].n, 3);
	otlp_requests_deinit(&r);
	free(spans);
}

/* An item is copied into its request, however long it is. */
Test(otlp, an_item_that_is_too_long_is_alone)
{
	Shardd__Otlp__V1__SpanStatus item = SHARDD__OTLP__V1__SPAN_STATUS__INIT;
	struct otlp_requests r = OTLP_REQUESTS_NULL;
	struct otlp_packer p;
	char *text = calloc(1, OTLP_REQUEST_BYTES + 100);

	cr_assert(text);
	memset(text, 'x', OTLP_REQUEST_BYTES + 99);
	otlp_packer_init(&p, &self, &r);
	item.message = (char *)"short";
	otlp_packer_add(&p, &item.base, 1);
	item.message = text;
	otlp_packer_add(&p, &item.base, 1);
	item.message = (char *)"short";
	otlp_packer_add(&p, &item.base, 1);
	cr_assert(otlp_packer_end(&p));
	cr_assert_eq(r.n, 3);
	cr_expect_gt(r.list[1].bytes, OTLP_REQUEST_BYTES);
	cr_expect_eq(r.list[2].n, 1);
	otlp_requests_deinit(&r);
	free(text);
}

/* A collector refuses a whole request for one text that is no UTF-8. */
Test(otlp, texts_are_utf8)
{
	struct otlp_span *spans = test_otlp_spans(1, 0);
	struct otlp_requests r = OTLP_REQUESTS_NULL;
	Shardd__Otlp__V1__ExportRequest *m;
	Shardd__Otlp__V1__Span *span;
	const ProtobufCBinaryData *item;

	strcpy(spans[0].unit, "caf\xc3\xa9 \xc3");
	strcpy(spans[0].error, "bad \xff\x01");
	cr_assert(otlp_traces_pack(spans, 1, &self, 5, &r));
	m = test_otlp_unpack(&r.list[0]);
	item = &m->resources[0]->scopes[0]->items[0];
	span = shardd__otlp__v1__span__unpack(NULL, item->len, item->data);
	cr_assert(span);
	cr_expect_str_eq(span->status->message, "bad ??");
	cr_expect_eq(span->status->code, 2);
	cr_expect_eq(span->start_time_unix_nano, 15000);
	cr_expect_eq(span->end_time_unix_nano, 25000);
	cr_expect_eq(span->span_id.len, 8);
	cr_expect_eq(span->parent_span_id.len, 8);
	for (size_t i = 0; i < span->n_attributes; i++)
		if (strcmp(span->attributes[i]->key, "shardd.unit") == 0)
			cr_expect_str_eq(span->attributes[i]->value->string_value, "caf\xc3\xa9 ?");
	protobuf_c_message_free_unpacked(&span->base, NULL);
	protobuf_c_message_free_unpacked(&m->base, NULL);
	otlp_requests_deinit(&r);
	free(spans);
}

/* Whether they are whole or the last word alone, and without end if asterisks are a value. */
Test(otlp, headers_are_hidden_in_texts)
{
	static const char *const rows[][3] = {
		{ "Bearer abcd", "no Bearer abcd, abcd", "no ***********, ****" },
		{ "****", "a ***** b", "a ***** b" },
		{ "abc", "abc and abcabc", "abc and abcabc" }, /* too short for a secret */
		{ "abcabc", "xabcabcabc", "x******abc" },
		{ "", "", "" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		char text[64];

		snprintf(text, sizeof(text), "%s", rows[i][1]);
		otlp_headers_hide(rows[i][0], text);
		cr_expect_str_eq(text, rows[i][2], "%s", rows[i][0]);
	}
}

Test(otlp, units_follow_the_names)
{
	static const char *const rows[][2] = {
		{ "shardd_job_used_bytes", "By" },     { "shardd_job_stalled_seconds_total", "s" },
		{ "shardd_op_duration_seconds", "s" }, { "shardd_jobs", "" },
		{ "shardd_bytes_of_it", "" },          { "shardd_rpc_calls_total", "" }
	};

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
		cr_expect_str_eq(otlp_metrics_unit(rows[i][0]), rows[i][1], "%s", rows[i][0]);
}

/* ----------------------------------------------------------------------------- many jobs */

#define JOBS 5000u

struct counted {
	uint64_t points, of_step; /* all; those of one metric */
	size_t most;              /* of a Metric */
};

static void test_otlp_count(const struct otlp_request *r, struct counted *ret)
{
	Shardd__Otlp__V1__ExportRequest *m = test_otlp_unpack(r);
	const Shardd__Otlp__V1__ScopeItems *all = m->resources[0]->scopes[0];

	for (size_t i = 0; i < all->n_items; i++) {
		Shardd__Otlp__V1__Metric *metric = shardd__otlp__v1__metric__unpack(
			NULL, all->items[i].len, all->items[i].data);
		size_t n;

		cr_assert(metric);
		n = metric->data_case == SHARDD__OTLP__V1__METRIC__DATA_GAUGE
			    ? metric->gauge->n_data_points
			    : metric->sum->n_data_points;
		cr_expect_gt(n, 0, "%s", metric->name);
		ret->points += n;
		ret->most = n > ret->most ? n : ret->most;
		ret->of_step += strcmp(metric->name, "shardd_job_step") == 0 ? n : 0;
		protobuf_c_message_free_unpacked(&metric->base, NULL);
	}
	protobuf_c_message_free_unpacked(&m->base, NULL);
}

Test(otlp, metrics_of_many_jobs_are_several_requests)
{
	Shardd__V1__GetStatusResponse s = SHARDD__V1__GET_STATUS_RESPONSE__INIT;
	Shardd__V1__JobStatus *jobs = calloc(JOBS, sizeof(*jobs)),
			      **list = calloc(JOBS, sizeof(*list));
	Shardd__V1__RankStatus rank = SHARDD__V1__RANK_STATUS__INIT, *ranks[] = { &rank };
	struct metrics_counts *counts = calloc(1, sizeof(*counts));
	struct otlp_requests r = OTLP_REQUESTS_NULL;
	struct counted seen = { 0 };
	uint64_t said = 0;

	cr_assert(jobs && list && counts);
	for (unsigned i = 0; i < JOBS; i++) {
		shardd__v1__job_status__init(&jobs[i]);
		jobs[i].name = (char *)"job";
		jobs[i].ranks = ranks;
		jobs[i].n_ranks = 1;
		list[i] = &jobs[i];
	}
	s.jobs = list;
	s.n_jobs = JOBS;
	cr_assert(otlp_metrics_pack(&s, counts, &self, 1, 2, &r));
	cr_expect_gt(r.n, 5);
	for (size_t i = 0; i < r.n; i++) {
		cr_expect_leq(r.list[i].bytes, OTLP_REQUEST_BYTES + 4096);
		test_otlp_count(&r.list[i], &seen);
		said += r.list[i].n;
	}
	cr_expect_eq(seen.points, said);
	cr_expect_eq(seen.of_step, JOBS);
	cr_expect_eq(seen.most, OTLP_METRIC_POINTS);
	otlp_requests_deinit(&r);
	free(counts);
	free(list);
	free(jobs);
}
