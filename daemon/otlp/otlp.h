/*
 * The exporter to OpenTelemetry: metrics, and traces of sampled steps, by OTLP over gRPC to a collector.
 *
 * Metrics are collected in the loop at an interval, as for a scrape (http/http_data.c), in a turn of the daemon's own
 * user. Spans are noted when ops end (otlp_spans.h). A thread of libuv's pool packs both, and gRPC core sends them: of
 * each of the two at most one request at a time. Nothing waits for the collector. When it does not answer, metrics of
 * that time are left out, since sums go on; spans are tried again until it has failed for OTLP_GIVE_UP_S, and meanwhile
 * new ones find no place sooner or later, which is counted.
 */
#ifndef SHARDD_OTLP_OTLP_H
#define SHARDD_OTLP_OTLP_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "core/fault.h"
#include "core/loopq.h"
#include "http/metrics.h"
#include "otlp/otlp_headers.h"
#include "rpc/svc_status.h"

/* How long spans are tried again. When the collector has failed for longer, each batch is tried once. */
#define OTLP_GIVE_UP_S 300u

struct otlp;

struct otlp_options {
	const char *url;              /* copied */
	const char *ca;               /* copied; "": the machine's */
	struct otlp_headers *headers; /* taken */
	uint32_t interval_ms;
	uint32_t trace_every; /* 0: no traces */
	const char *cluster;  /* copied; "": none */
	const char *host;     /* copied: the name of this node */
};

/* What only the server knows. */
struct otlp_sources {
	struct svc_status *status; /* borrowed */
	void (*counts)(struct metrics_counts *ret, void *userdata);
	void *userdata;
};

/* Loop thread, as all functions here. Return: 0 or a fault code. A collector that is not there is no fault. */
int otlp_new(uv_loop_t *loop, struct loopq *loopq, const struct otlp_options *options,
	     const struct otlp_sources *sources, struct otlp **ret, struct fault *f);

/* From now on. */
void otlp_set_intervals(struct otlp *o, uint32_t interval_ms, uint32_t trace_every);
/* @h: taken. */
void otlp_set_headers(struct otlp *o, struct otlp_headers *h);

/* Into a reply. Borrowed until the next call. */
void otlp_describe(struct otlp *o, Shardd__V1__OtlpStatus *ret);

/* Nothing new is noted any more. What there is is sent, within @timeout_ms, unless the collector does not answer;
 * @with_metrics: and the metrics as they are now. NULL is allowed. */
void otlp_stop(struct otlp *o, uint32_t timeout_ms, bool with_metrics);
/* Is that over? The sources are not used any more then. To be asked again and again: it ends what takes too long. NULL is
 * allowed. */
bool otlp_stopped(struct otlp *o);
/* It has stopped. Memory is freed by the loop. NULL is allowed. Return: NULL. */
struct otlp *otlp_free(struct otlp *o);

#endif
