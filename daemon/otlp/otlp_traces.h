/* Spans (otlp_spans.h) as OTLP. */
#ifndef SHARDD_OTLP_OTLP_TRACES_H
#define SHARDD_OTLP_OTLP_TRACES_H

#include "otlp/otlp_pack.h"
#include "otlp/otlp_spans.h"

/* @unix_us: what has to be added to their times for microseconds since 1970. Any thread. Return: false: no memory;
 * @ret has a part. */
bool otlp_traces_pack(const struct otlp_span *spans, size_t n, const struct otlp_self *self,
		      int64_t unix_us, struct otlp_requests *ret);

#endif
