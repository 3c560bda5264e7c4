#include "app/telemetry.h"

#include <string.h>

#include "core/log.h"

/* How long the daemon's end may take for it. */
#define TELEMETRY_LAST_MS 1000u
/* The same before a handover: trainers wait for the successor. */
#define TELEMETRY_HANDOVER_MS 100u

int telemetry_start(struct telemetry *t, uv_loop_t *loop, struct loopq *loopq,
		    const struct config *c, struct svc_status *status, struct web *web,
		    struct fault *f)
{
	const struct otlp_sources sources = { .status = status,
					      .counts = web_count,
					      .userdata = web };
	struct otlp_headers headers = OTLP_HEADERS_NULL;
	struct fault ignored = FAULT_NULL;
	char host[NAME_BYTES] = "";

	if (!*c->otlp.url)
		return 0;
	if (config_otlp_headers(c, &headers, f))
		return (int)f->code;
	if (config_node_name(c, host, &ignored) && gethostname(host, sizeof(host) - 1) < 0)
		host[0] = '\0';
	return otlp_new(loop, loopq,
			&(struct otlp_options){ .url = c->otlp.url,
						.ca = c->otlp.ca,
						.headers = &headers,
						.interval_ms = c->otlp.interval_ms,
						.trace_every = c->otlp.trace_every,
						.cluster = config_store(c) == CONFIG_STORE_NONE
								   ? ""
								   : c->coord.cluster,
						.host = host },
			&sources, &t->otlp, f);
}

void telemetry_reconfigure(struct telemetry *t, const struct config *c)
{
	struct otlp_headers headers = OTLP_HEADERS_NULL;
	struct fault f = FAULT_NULL;

	if (!t->otlp)
		return;
	otlp_set_intervals(t->otlp, c->otlp.interval_ms, c->otlp.trace_every);
	if (config_otlp_headers(c, &headers, &f))
		log_error("otlp", "the headers are unchanged why=\"%s\"", f.text);
	else
		otlp_set_headers(t->otlp, &headers);
}

void telemetry_fill(const struct telemetry *t, struct arena *a,
		    Shardd__V1__GetStatusResponse *reply)
{
	Shardd__V1__OtlpStatus **o;

	if (!t->otlp)
		return;
	o = STATUS_MESSAGES(a, 1, OtlpStatus, otlp_status);
	if (!o)
		return;
	otlp_describe(t->otlp, o[0]);
	o[0]->endpoint = status_text(a, o[0]->endpoint);
	o[0]->error = status_text(a, o[0]->error);
	reply->otlp = o[0];
}

void telemetry_stop(struct telemetry *t, bool for_good)
{
	otlp_stop(t->otlp, for_good ? TELEMETRY_LAST_MS : TELEMETRY_HANDOVER_MS, for_good);
}

bool telemetry_stopped(struct telemetry *t)
{
	return otlp_stopped(t->otlp);
}

void telemetry_end(struct telemetry *t)
{
	t->otlp = otlp_free(t->otlp);
}
