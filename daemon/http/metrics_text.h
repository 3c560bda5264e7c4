/* The metrics in the text format of Prometheus (0.0.4). */
#ifndef SHARDD_HTTP_METRICS_TEXT_H
#define SHARDD_HTTP_METRICS_TEXT_H

#include "http/metrics.h"

/* Of what is in @s. Return: malloc'ed, the caller's; NULL without memory. Any thread. */
char *metrics_text_format(const Shardd__V1__GetStatusResponse *s,
			  const struct metrics_counts *counts, size_t *ret_bytes);

#endif
