#include "app/web.h"

#include <string.h>
#include <time.h>

#include "core/log.h"
#include "core/text.h"
#include "ring/rings.h"
#include "rpc/rpc_server.h"

static bool web_is_healthy(void *userdata)
{
	const struct web *w = userdata;

	return w->healthy(w->userdata);
}

static bool web_accepts_work(void *userdata)
{
	const struct web *w = userdata;

	return !w->jobs->draining && !w->jobs->cordon.on;
}

void web_count(struct metrics_counts *ret, void *userdata)
{
	const struct web *w = userdata;
	const struct op_stats *stats;
	struct rings_counts rings;
	uint64_t calls, failed;
	const char *name;

	rings_count(w->rings, &rings);
	*ret = (struct metrics_counts){ .started_unix_us = w->started_unix_us,
					.ring_submissions = rings.submissions,
					.ring_completions = rings.completions,
					.ring_wakes = rings.wakes };
	for (; ret->n_ops < METRICS_MAX_KINDS && (name = op_stats_at(ret->n_ops, &stats));
	     ret->n_ops++) {
		ret->ops[ret->n_ops].name = name;
		ret->ops[ret->n_ops].stats = *stats;
	}
	for (; ret->n_methods < METRICS_MAX_METHODS &&
	       (name = rpc_server_method_at(w->rpc, ret->n_methods, &calls, &failed));
	     ret->n_methods++) {
		text_copy(ret->methods[ret->n_methods].path,
			  sizeof(ret->methods[ret->n_methods].path), name);
		ret->methods[ret->n_methods].calls = calls;
		ret->methods[ret->n_methods].failed = failed;
	}
}

static struct http_admission web_admission_of(const struct config *c)
{
	return (struct http_admission){ .uids = c->allow.uids,
					.n_uids = c->allow.n_uids,
					.gids = c->allow.gids,
					.n_gids = c->allow.n_gids };
}

int web_start(struct web *w, uv_loop_t *loop, const struct config *c, struct svc_status *status,
	      struct fault *f)
{
	const struct http_sources sources = { .status = status,
					      .healthy = web_is_healthy,
					      .accepts_work = web_accepts_work,
					      .counts = web_count,
					      .userdata = w };
	char token[CONFIG_SECRET_BYTES];
	struct timespec now;
	int r;

	if (!*c->http.address)
		return 0;
	clock_gettime(CLOCK_REALTIME, &now);
	w->started_unix_us = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
	if (config_http_token(c, token, f))
		return (int)f->code;
	r = http_new(loop,
		     &(struct http_options){ .address = c->http.address,
					     .socket_mode = c->socket_mode,
					     .socket_group = c->socket_group,
					     .token = token,
					     .admission = web_admission_of(c) },
		     &sources, &w->http, f);
	explicit_bzero(token, sizeof(token));
	return r;
}

void web_reconfigure(struct web *w, const struct config *c)
{
	const struct http_admission admission = web_admission_of(c);
	char token[CONFIG_SECRET_BYTES] = "";
	struct fault f = FAULT_NULL;

	if (!w->http)
		return;
	if (http_set_admission(w->http, &admission) < 0)
		log_error("http", "no memory: who may connect is unchanged");
	if (config_http_token(c, token, &f) || http_set_token(w->http, token) < 0)
		log_error("http", "the token is unchanged why=\"%s\"",
			  f.code ? f.text : "no memory");
	explicit_bzero(token, sizeof(token));
}

void web_fill(const struct web *w, struct arena *a, Shardd__V1__GetStatusResponse *reply)
{
	Shardd__V1__HttpStatus **h, now = SHARDD__V1__HTTP_STATUS__INIT;

	if (!w->http)
		return;
	h = STATUS_MESSAGES(a, 1, HttpStatus, http_status);
	if (!h)
		return;
	http_describe(w->http, &now);
	reply->http = h[0];
	h[0]->address = status_text(a, now.address);
	h[0]->error = status_text(a, now.error);
	h[0]->requests = now.requests;
	h[0]->refused = now.refused;
}
