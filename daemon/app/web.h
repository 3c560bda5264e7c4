/* The HTTP server as part of the daemon: its options from the configuration, and what it is told of the rest. Loop
 * thread only. */
#ifndef SHARDD_WEB_H
#define SHARDD_WEB_H

#include "config/config.h"
#include "http/http.h"

struct rings;
struct rpc_server;

struct web {
	struct http *http;       /* NULL: there is none */
	const struct jobs *jobs; /* borrowed, as the rest */
	const struct rings *rings;
	const struct rpc_server *rpc;
	uint64_t started_unix_us;        /* this process, not the first that had its jobs */
	bool (*healthy)(void *userdata); /* do the other threads respond? */
	void *userdata;
};

/* Begin, if the key http is set. @w: all but http is set. Return: 0 or a fault code. */
int web_start(struct web *w, uv_loop_t *loop, const struct config *c, struct svc_status *status,
	      struct fault *f);
/* Other values of the keys that may change while it runs. */
void web_reconfigure(struct web *w, const struct config *c);
/* As http_sources.counts, of @web. */
void web_count(struct metrics_counts *ret, void *web);
/* As svc_status_sources.exports. */
void web_fill(const struct web *w, struct arena *a, Shardd__V1__GetStatusResponse *reply);

#endif
