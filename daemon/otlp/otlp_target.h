/* Where a collector of OpenTelemetry is, as people write it: http://HOST:PORT or https://HOST:PORT. Any thread. */
#ifndef SHARDD_OTLP_OTLP_TARGET_H
#define SHARDD_OTLP_OTLP_TARGET_H

#include <stdbool.h>

#include "core/fault.h"
#include "core/hostport.h"

struct otlp_target {
	bool tls;
	struct hostport at;
};

/* Return: 0, or FAULT_INVALID about the key otlp. */
int otlp_target_parse(const char *url, struct otlp_target *ret, struct fault *f);

/* May secrets be sent there? Not in clear to another machine. */
static inline bool otlp_target_is_safe(const struct otlp_target *t)
{
	return t->tls || hostport_is_loopback(t->at.host);
}

#endif
