/* The exporter to OpenTelemetry: any allocation may fail while requests are packed, and nothing is left of them. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "failmalloc.h"
#include "fdcheck.h"
#include "otlp/otlp_headers.h"
#include "otlp/otlp_metrics.h"
#include "otlp/otlp_traces.h"

TestSuite(otlp_memory, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

#define SPANS 5000u /* more than a request has */

static const struct otlp_self self = { .service = "shardd",
				       .instance = "00",
				       .host = "node",
				       .version = "1",
				       .cluster = "c",
				       .pid = 7 };

static Shardd__V1__GetStatusResponse status;
static struct metrics_counts counts;
static struct otlp_span spans[SPANS];

static bool pack_traces(struct otlp_requests *ret)
{
	return otlp_traces_pack(spans, SPANS, &self, 0, ret);
}

static bool pack_metrics(struct otlp_requests *ret)
{
	return otlp_metrics_pack(&status, &counts, &self, 1, 2, ret);
}

/* @pack says that it has failed whenever it has. @step: not each of many allocations that are alike. */
static void fail_each(bool (*pack)(struct otlp_requests *ret), unsigned step)
{
	unsigned failed = 0;
	bool hit;

	for (unsigned n = 1;; n += n < 20 ? 1 : step) {
		struct otlp_requests r = OTLP_REQUESTS_NULL;
		bool well;

		failmalloc_in(n);
		well = pack(&r);
		hit = failmalloc_hit();
		failmalloc_in(0);
		cr_expect_eq(well, !hit, "allocation %u", n);
		cr_expect(!well || r.n > 0);
		otlp_requests_deinit(&r);
		if (!hit)
			break;
		failed++;
	}
	cr_expect_gt(failed, 10);
}

Test(otlp_memory, any_allocation_may_fail_while_traces_are_packed)
{
	for (unsigned i = 0; i < SPANS; i++)
		spans[i] =
			(struct otlp_span){ .kind = OTLP_SPAN_OP, .id = i + 1, .name = "Gather" };
	fail_each(pack_traces, 97);
}

Test(otlp_memory, any_allocation_may_fail_while_metrics_are_packed)
{
	shardd__v1__get_status_response__init(&status);
	counts.n_ops = 1;
	counts.ops[0].name = "Gather";
	counts.ops[0].stats.buckets[0] = 1;
	fail_each(pack_metrics, 1);
}

Test(otlp_memory, headers)
{
	struct otlp_headers h = OTLP_HEADERS_NULL;
	struct fault f = FAULT_NULL;

	failmalloc_in(1);
	cr_expect_eq(otlp_headers_parse("a: b", &h, &f), FAULT_EXHAUSTED);
	cr_expect(failmalloc_hit());
	failmalloc_in(0);
	cr_expect_eq(otlp_headers_parse("a: b", &h, &f), 0);
	cr_expect_eq(h.n, 1);
	otlp_headers_deinit(&h);
	otlp_headers_deinit(&h);
}
