/* The metrics (http/metrics.h) as OTLP: sums since the start of the daemon, the job or the rank, gauges, and histograms, with the same names,
 * labels and values as in the text for Prometheus. */
#ifndef SHARDD_OTLP_OTLP_METRICS_H
#define SHARDD_OTLP_OTLP_METRICS_H

#include "http/metrics.h"
#include "otlp/otlp_pack.h"

/* Of one Metric; further ones are in another one of its name. */
#define OTLP_METRIC_POINTS 1024u

/* @start_ns, @now_ns: since 1970: of the daemon's start, and when @s was collected. Any thread. Return: false: no memory;
 * @ret has a part. */
bool otlp_metrics_pack(const Shardd__V1__GetStatusResponse *s, const struct metrics_counts *counts,
		       const struct otlp_self *self, uint64_t start_ns, uint64_t now_ns,
		       struct otlp_requests *ret);
/* The unit of a metric of this name, as OpenTelemetry writes it: "By", "s", or "": a number. */
const char *otlp_metrics_unit(const char *name);

#endif
