/* The exporter to OpenTelemetry as part of the daemon: its options from the configuration, and what it is told of the
 * rest. Loop thread only. */
#ifndef SHARDD_TELEMETRY_H
#define SHARDD_TELEMETRY_H

#include "app/web.h"
#include "config/config.h"
#include "otlp/otlp.h"

struct telemetry {
	struct otlp *otlp; /* NULL: there is none */
};

/* Begin, if the key otlp is set. @web: borrowed: what it counts. Return: 0 or a fault code. */
int telemetry_start(struct telemetry *t, uv_loop_t *loop, struct loopq *loopq,
		    const struct config *c, struct svc_status *status, struct web *web,
		    struct fault *f);
/* Other values of the keys that may change while it runs. */
void telemetry_reconfigure(struct telemetry *t, const struct config *c);
/* As svc_status_sources.exports. */
void telemetry_fill(const struct telemetry *t, struct arena *a,
		    Shardd__V1__GetStatusResponse *reply);

/* Send what there is, for a short time. @for_good: no successor takes over, which would wait for it. */
void telemetry_stop(struct telemetry *t, bool for_good);
/* Is that over? */
bool telemetry_stopped(struct telemetry *t);
/* Safe twice. */
void telemetry_end(struct telemetry *t);

#endif
