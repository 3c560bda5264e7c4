/* Connections, who asks, and what is answered at once; http_data.c has the rest. */
#include "http/http.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/hostport.h"
#include "core/log.h"
#include "http/http_impl.h"
#include "json/json.h"
#include "rpc/status_map.h"

#define HTTP_MAGIC 0x68747470u

/* Connections at once; and of one user, or from one address. */
#define HTTP_MAX_CONNS     128u
#define HTTP_MAX_CONNS_PER 32u
/* Of users that are not known: not all of them, so that users of this machine have room. */
#define HTTP_MAX_STRANGERS (HTTP_MAX_CONNS / 2)
/* Seconds without a byte after which one is closed. */
#define HTTP_IDLE_S 15u
/* The longest that a request may take, to its answer's last byte. */
#define HTTP_REQUEST_US 60000000u
#define HTTP_SWEEP_US   1000000u
/* A run of libmicrohttpd that takes less is followed by the next one at once; else the pause is this many times what
 * it took. What jobs are asked for has turns of its own. */
#define HTTP_FREE_US 200u
#define HTTP_PAUSE   4u
/* For the headers of a request, and its answer's. */
#define HTTP_CONN_BYTES 32768u

static const struct header {
	const char *name, *value;
} http_headers[] = {
	/* Everything that the page needs comes from here; nothing else may be loaded, and nobody may frame it. */
	{ "Content-Security-Policy",
	  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
	  "'self' data:; "
	  "base-uri 'none'; form-action 'none'; frame-ancestors 'none'" },
	{ "X-Content-Type-Options", "nosniff" },
	{ "Referrer-Policy", "no-referrer" },
	{ "Cross-Origin-Resource-Policy", "same-origin" },
	{ "Cache-Control", "no-store" },
};

/* --------------------------------------------------------------------- the loop */

static void http_run(struct http *h);

static void http_on_poll(uv_poll_t *poll, int status, int events);

static void http_on_timer(uv_timer_t *timer)
{
	struct http *h = timer->data;

	if (h->rest_until_us) {
		h->rest_until_us = 0;
		uv_poll_start(&h->poll, UV_READABLE, http_on_poll);
	}
	http_run(h);
}

static void http_on_poll(uv_poll_t *poll, int status, int events)
{
	(void)status;
	(void)events;
	http_run(poll->data);
}

/* What does not come to an end: headers, bodies, answers that nobody reads. libmicrohttpd sees the closed socket. */
static void http_sweep(struct http *h, uint64_t now)
{
	struct http_conn *c, *tmp;

	if (now - h->swept_us < HTTP_SWEEP_US)
		return;
	h->swept_us = now;
	list_for_each (c, tmp, &h->conns, link) {
		const uint64_t since = c->request ? c->request->began_us : c->since_us;

		if (c->mhd && (!c->request || !c->request->suspended) &&
		    now - since > (c->request ? HTTP_REQUEST_US : HTTP_IDLE_S * 1000000ull))
			shutdown(c->fd, SHUT_RDWR);
	}
}

static void http_arm(struct http *h, uint64_t now)
{
	MHD_UNSIGNED_LONG_LONG ms;

	/* not at once: a timer that is due at once would keep the loop from everything else */
	if (h->rest_until_us > now)
		uv_timer_start(&h->timer, http_on_timer, (h->rest_until_us - now + 999) / 1000, 0);
	else if (h->again)
		uv_timer_start(&h->timer, http_on_timer, 1, 0);
	else if (MHD_get_timeout(h->mhd, &ms) == MHD_YES)
		uv_timer_start(&h->timer, http_on_timer, ms ? ms : 1, 0);
	else
		uv_timer_stop(&h->timer);
}

/* A handler of libmicrohttpd must not call it again, and all of HTTP gets a fifth of the loop's time at most. */
static void http_run(struct http *h)
{
	uint64_t began = clock_now_us(), took;

	MAGIC_CHECK(h, HTTP_MAGIC);
	if (h->closing)
		return;
	if (h->running || began < h->rest_until_us) {
		h->again = true;
		return;
	}
	h->running = true;
	h->again = false;
	h->collected_us = 0;
	MHD_run(h->mhd);
	h->running = false;
	took = clock_now_us() - began;
	took -= h->collected_us < took ? h->collected_us : took;
	http_sweep(h, clock_now_us());
	if (took > HTTP_FREE_US) {
		h->rest_until_us = clock_now_us() + took * HTTP_PAUSE;
		uv_poll_stop(&h->poll);
	}
	http_arm(h, clock_now_us());
}

/* ------------------------------------------------------------------ connections */

static bool http_is_same(const struct http_peer *a, const struct http_peer *b)
{
	if (a->known != b->known)
		return false;
	return a->known ? a->uid == b->uid : strcmp(a->address, b->address) == 0;
}

static bool http_has_room(const struct http *h, const struct http_peer *peer)
{
	struct http_conn *c, *tmp;
	unsigned n = 0;

	list_for_each (c, tmp, (struct list *)&h->conns, link)
		n += http_is_same(&c->peer, peer);
	return h->n_conns < HTTP_MAX_CONNS && n < HTTP_MAX_CONNS_PER &&
	       (peer->known || h->n_strangers < HTTP_MAX_STRANGERS);
}

static void http_conn_free(struct http_conn *c)
{
	CHECK(c->http->n_conns > 0 && c->http->n_strangers >= !c->peer.known);
	c->http->n_conns--;
	c->http->n_strangers -= !c->peer.known;
	list_unlink(&c->link);
	user_charge_deinit(&c->charge);
	user_unref(c->user);
	free(c);
}

/* As a connection to the socket would be. Of TCP no groups are known, so only allow_uids admits there. */
static bool http_is_admitted(const struct http *h, int fd, const struct http_peer *peer)
{
	const struct ucred cred = { .uid = peer->uid, .gid = peer->gid };

	return peer->known && (admit_peer(&h->admit, fd, &cred) ||
			       svc_status_is_observer(h->sources.status, peer->uid));
}

static struct http_conn *http_conn_new(struct http *h, int fd, const struct http_peer *peer)
{
	struct http_conn *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->http = h;
	c->fd = fd;
	c->peer = *peer;
	list_init(&c->link);
	list_append(&h->conns, &c->link);
	h->n_conns++;
	h->n_strangers += !peer->known;
	c->since_us = clock_now_us();
	c->admitted = http_is_admitted(h, fd, peer);
	c->user = users_get(&h->sources.status->jobs->node->users,
			    peer->known ? peer->uid : geteuid(), NULL, 0);
	if (!c->user || user_charge(&c->charge, c->user, USER_CONNECTIONS, 1, NULL)) {
		http_conn_free(c);
		return NULL;
	}
	return c;
}

/* One that has not started. */
static struct http_conn *http_find_conn(struct http *h, int fd)
{
	struct http_conn *c, *tmp;

	list_for_each (c, tmp, &h->conns, link)
		if (c->fd == fd && !c->mhd)
			return c;
	return NULL;
}

static void http_on_conn(void *cls, struct MHD_Connection *connection, void **context,
			 enum MHD_ConnectionNotificationCode code)
{
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);

	if (code == MHD_CONNECTION_NOTIFY_STARTED) {
		struct http_conn *c = info ? http_find_conn(cls, info->connect_fd) : NULL;

		if (c)
			c->mhd = connection;
		*context = c;
		return;
	}
	if (*context)
		http_conn_free(*context);
	*context = NULL;
}

/* It is counted, and said once a second: who is refused sees only that the connection ends. */
static void http_refuse(struct http *h, const struct http_peer *peer, const char *why)
{
	const uint64_t now = clock_now_us();

	h->refused++;
	if (h->refused_us && now - h->refused_us < HTTP_SWEEP_US)
		return;
	h->refused_us = now;
	log_warn("http", "connection refused peer=%s uid=%d open=%u why=\"%s\"",
		 peer->is_unix ? "unix" : peer->address, peer->known ? (int)peer->uid : -1,
		 h->n_conns, why);
}

static void http_on_accept(int fd, void *userdata)
{
	struct http *h = userdata;
	struct sockaddr_storage room = { .ss_family = AF_UNIX };
	socklen_t n = sizeof(room);
	struct http_peer peer;
	struct http_conn *c;
	bool has_room;

	http_peer_find(fd, &peer);
	has_room = http_has_room(h, &peer);
	c = has_room ? http_conn_new(h, fd, &peer) : NULL;
	if (!c) {
		http_refuse(h, &peer,
			    has_room ? "max_connections_per_user, or no memory"
				     : "too many are open, of all or of this user or address");
		close(fd);
		return;
	}
	if (getpeername(fd, (struct sockaddr *)&room, &n) < 0)
		n = sizeof(room.ss_family);
	/* it closes the socket if it does not take it */
	if (MHD_add_connection(h->mhd, fd, (struct sockaddr *)&room, n) != MHD_YES) {
		c = http_find_conn(h, fd);
		if (c)
			http_conn_free(c);
		http_refuse(h, &peer, "libmicrohttpd does not take it");
	}
	http_run(h);
}

/* --------------------------------------------------------------------- answers */

enum MHD_Result http_answer(struct http_request *r, unsigned code, const char *type,
			    const void *body, size_t bytes)
{
	/* the body of data lives as long as the request */
	struct MHD_Response *response = MHD_create_response_from_buffer(
		bytes, (void *)(uintptr_t)body,
		body == r->body ? MHD_RESPMEM_PERSISTENT : MHD_RESPMEM_MUST_COPY);
	enum MHD_Result ok;

	if (!response)
		return MHD_NO;
	r->http->answered++;
	r->http->refused += code >= 400;
	MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
	for (size_t i = 0; i < ARRAY_SIZE(http_headers); i++)
		MHD_add_response_header(response, http_headers[i].name, http_headers[i].value);
	if (code == MHD_HTTP_UNAUTHORIZED)
		MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE,
					"Bearer realm=\"shardd\"");
	if (code == MHD_HTTP_METHOD_NOT_ALLOWED)
		MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
	ok = MHD_queue_response(r->c, code, response);
	MHD_destroy_response(response);
	return ok;
}

unsigned http_code_of(enum fault_code code)
{
	switch (code) {
	case FAULT_INVALID:
		return MHD_HTTP_BAD_REQUEST;
	case FAULT_DENIED:
		return MHD_HTTP_FORBIDDEN;
	case FAULT_NOT_FOUND:
		return MHD_HTTP_NOT_FOUND;
	case FAULT_EXHAUSTED:
		return MHD_HTTP_SERVICE_UNAVAILABLE;
	default:
		return MHD_HTTP_INTERNAL_SERVER_ERROR;
	}
}

char *http_error_text(const char *name, const char *text)
{
	_cleanup_(json_freep) json_t *j =
		json_pack("{s:s, s:o}", "code", name, "message", json_from_text(text));

	return j ? json_dumps(j, JSON_COMPACT) : NULL;
}

static enum MHD_Result http_answer_error(struct http_request *r, unsigned code, const char *name,
					 const char *text)
{
	_cleanup_(freep) char *body = http_error_text(name, text);

	return body ? http_answer(r, code, HTTP_TYPE_JSON, body, strlen(body)) : MHD_NO;
}

static enum MHD_Result http_answer_probe(struct http_request *r, bool ok, const char *why)
{
	const char *text = ok ? "ok\n" : why;

	return http_answer(r, ok ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, "text/plain", text,
			   strlen(text));
}

static enum MHD_Result http_answer_health(struct http_request *r)
{
	return http_answer_probe(r, r->http->sources.healthy(r->http->sources.userdata),
				 "a thread of the daemon does not respond\n");
}

static enum MHD_Result http_answer_ready(struct http_request *r)
{
	return http_answer_probe(r, r->http->sources.accepts_work(r->http->sources.userdata),
				 "the daemon admits no new jobs\n");
}

static const struct http_route http_probes[] = {
	{ "/healthz", "text/plain", .open = true, .answer = http_answer_health },
	{ "/readyz", "text/plain", .open = true, .answer = http_answer_ready },
};

static const struct http_route *http_find_route(const char *path)
{
	const struct http_route *route;

	for (size_t i = 0; i < ARRAY_SIZE(http_probes); i++)
		if (strcmp(path, http_probes[i].path) == 0)
			return &http_probes[i];
	route = http_page_find(path);
	return route ? route : http_data_find(path);
}

/* ------------------------------------------------------------------- who asks */

/* Return: NULL: it shows none. */
static const char *http_token_of(struct http_request *r)
{
	const char *value =
		MHD_lookup_connection_value(r->c, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);

	return value && strncasecmp(value, "Bearer ", 7) == 0 ? value + 7 : value ? "" : NULL;
}

static bool http_is_token(const struct http *h, const char *text)
{
	const size_t n = strlen(h->token);

	return n && strlen(text) == n && CRYPTO_memcmp(text, h->token, n) == 0;
}

/* A page of somebody else whose name leads to this machine would be read by the browser as ours. Such a page has a
 * name: an address, localhost and the configured name cannot be made to lead elsewhere. */
static bool http_is_our_host(struct http_request *r)
{
	const char *host = MHD_lookup_connection_value(r->c, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
	char name[HOSTPORT_HOST_BYTES];
	struct hostport own;

	if (r->conn->peer.is_unix || !host)
		return true;
	if (!hostport_parse_host(host, name))
		return false;
	return hostport_is_numeric(name) || strcasecmp(name, "localhost") == 0 ||
	       (hostport_parse_any(r->http->address, &own) && strcasecmp(name, own.host) == 0);
}

static unsigned http_admit_token(struct http_request *r, const char *token, struct fault *f)
{
	if (http_is_token(r->http, token)) {
		r->scope = (struct status_scope){ .uid = (uid_t)-1, .sees_all = true };
		return 0;
	}
	fault_set(f, FAULT_DENIED, "Authorization",
		  *r->http->token ? "the token is not the one of http_token_file"
				  : "a token is shown, and http_token_file is not set");
	return MHD_HTTP_UNAUTHORIZED;
}

/* Whose view it gets. A token shows all, and no page of somebody else can show it. Return: 0, or a status of HTTP. */
static unsigned http_admit(struct http_request *r, struct fault *f)
{
	const char *token = http_token_of(r);
	const struct http_peer *peer = &r->conn->peer;

	if (token)
		return http_admit_token(r, token, f);
	if (!peer->known) {
		fault_set(f, FAULT_DENIED, "Authorization",
			  "the request is not from this machine; it must show the token of "
			  "http_token_file: Authorization: Bearer TOKEN");
		return MHD_HTTP_UNAUTHORIZED;
	}
	if (!r->conn->admitted)
		fault_set(
			f, FAULT_DENIED, NULL,
			"user %u may not use this daemon (allow_uids, allow_gids, observer_uids)%s",
			(unsigned)peer->uid,
			peer->is_unix ? "" : "; groups are known at http: unix:PATH only");
	else if (!http_is_our_host(r))
		fault_set(
			f, FAULT_DENIED, NULL,
			"the Host header is not the name in the key http, localhost or an address");
	r->scope = svc_status_scope_of(r->http->sources.status, peer->uid);
	return f->code ? MHD_HTTP_FORBIDDEN : 0;
}

/* -------------------------------------------------------------------- requests */

static const struct {
	const char *name;
	unsigned bit;
} http_params[] = {
	{ "job", HTTP_PARAM_JOB },     { "limit", HTTP_PARAM_LIMIT }, { "units", HTTP_PARAM_UNITS },
	{ "after", HTTP_PARAM_AFTER }, { "run", HTTP_PARAM_RUN },
};

static int http_set_number(const char *key, const char *value, uint64_t max, uint64_t *ret,
			   struct fault *f)
{
	char *end;
	unsigned long long n;

	errno = 0;
	n = strtoull(value, &end, 10);
	if (*value < '0' || *value > '9' || *end || errno || n > max)
		return fault_set(f, FAULT_INVALID, key,
				 "%s is '%.40s'; it must be a number up to %llu", key, value,
				 (unsigned long long)max);
	*ret = n;
	return 0;
}

static int http_set_units(struct http_request *r, const char *value, struct fault *f)
{
	if (strcmp(value, "no") != 0 && strcmp(value, "yes") != 0)
		return fault_set(f, FAULT_INVALID, "units",
				 "units is '%.40s'; it must be yes or no", value);
	r->params.no_units = *value == 'n';
	return 0;
}

/* Return: 0, or FAULT_INVALID, which names those that the path has. */
static int http_refuse_param(const struct http_request *r, const char *key, struct fault *f)
{
	char names[64] = "";
	size_t n = 0;

	for (size_t i = 0; i < ARRAY_SIZE(http_params); i++)
		if (r->route->params & http_params[i].bit)
			n += (size_t)snprintf(names + n, sizeof(names) - n, "%s%s",
					      n ? ", " : "; it has ", http_params[i].name);
	return fault_set(f, FAULT_INVALID, NULL, "%s has no parameter '%.40s'%s", r->route->path,
			 key, names);
}

static int http_set_param(struct http_request *r, const char *key, const char *value,
			  struct fault *f)
{
	unsigned bit = 0;

	for (size_t i = 0; i < ARRAY_SIZE(http_params); i++)
		bit |= strcmp(key, http_params[i].name) == 0 ? http_params[i].bit : 0;
	if (!(r->route->params & bit))
		return http_refuse_param(r, key, f);
	if (!value || !*value)
		return fault_set(f, FAULT_INVALID, key, "the parameter %s has no value", key);
	if (r->params.seen & bit)
		return fault_set(f, FAULT_INVALID, key, "the parameter %s is there twice", key);
	r->params.seen |= bit;
	if (bit == HTTP_PARAM_LIMIT)
		return http_set_number(key, value, 1000000, &r->params.limit, f);
	if (bit == HTTP_PARAM_AFTER)
		return http_set_number(key, value, UINT64_MAX, &r->params.after, f);
	if (bit == HTTP_PARAM_RUN)
		return http_set_number(key, value, UINT64_MAX, &r->params.run, f);
	if (bit == HTTP_PARAM_UNITS)
		return http_set_units(r, value, f);
	r->params.job = value;
	return 0;
}

struct http_params_fault {
	struct http_request *r;
	struct fault *f;
};

static enum MHD_Result http_on_param(void *cls, enum MHD_ValueKind kind, const char *key,
				     const char *value)
{
	struct http_params_fault *p = cls;

	(void)kind;
	return http_set_param(p->r, key, value, p->f) ? MHD_NO : MHD_YES;
}

static enum MHD_Result http_begin(struct http_request *r, const char *path, const char *method)
{
	struct fault f = FAULT_NULL;
	struct http_params_fault p = { r, &f };
	unsigned code;

	if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
		return http_answer_error(r, MHD_HTTP_METHOD_NOT_ALLOWED, "UNIMPLEMENTED",
					 "the server only reads: GET and HEAD");
	r->route = http_find_route(path);
	if (!r->route)
		return http_answer_error(
			r, MHD_HTTP_NOT_FOUND, "NOT_FOUND",
			"there is no such path; / is the page, /metrics and /api/v1/status "
			"are for programs");
	code = r->route->open ? 0 : http_admit(r, &f);
	if (code)
		return http_answer_error(r, code,
					 code == MHD_HTTP_UNAUTHORIZED ? "UNAUTHENTICATED"
								       : "PERMISSION_DENIED",
					 f.text);
	MHD_get_connection_values(r->c, MHD_GET_ARGUMENT_KIND, http_on_param, &p);
	if (f.code)
		return http_answer_error(r, http_code_of(f.code), fault_code_name(f.code), f.text);
	if (r->route->answer)
		return r->route->answer(r);
	http_data_begin(r);
	return MHD_YES;
}

static struct http_request *http_request_new(struct http *h, struct MHD_Connection *c)
{
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
	struct http_request *r = calloc(1, sizeof(*r));

	if (!r || !info || !info->socket_context) {
		free(r);
		return NULL;
	}
	r->http = h;
	r->c = c;
	r->conn = info->socket_context;
	r->code = MHD_HTTP_OK;
	r->began_us = clock_now_us();
	r->conn->request = r;
	list_init(&r->turn.link);
	list_init(&r->link);
	list_append(&h->requests, &r->link);
	return r;
}

void http_request_free(struct http_request *r)
{
	CHECK(!r->in_pool && !r->call.user && !r->memory.user);
	list_unlink(&r->link);
	arena_free(&r->arena);
	free(r->body);
	free(r);
}

static enum MHD_Result http_on_request(void *cls, struct MHD_Connection *c, const char *path,
				       const char *method, const char *version, const char *upload,
				       size_t *upload_bytes, void **context)
{
	struct http_request *r = *context;

	(void)version;
	(void)upload;
	if (!r) { /* the headers are there, and a body may follow */
		*context = http_request_new(cls, c);
		return *context ? MHD_YES : MHD_NO;
	}
	if (*upload_bytes)
		return MHD_NO; /* nothing here takes one */
	if (r->ready)
		return http_answer(r, r->code,
				   r->code == MHD_HTTP_OK ? r->route->type : HTTP_TYPE_JSON,
				   r->body, r->bytes);
	return http_begin(r, path, method);
}

static void http_on_completed(void *cls, struct MHD_Connection *c, void **context,
			      enum MHD_RequestTerminationCode code)
{
	struct http_request *r = *context;

	(void)cls;
	(void)c;
	(void)code;
	*context = NULL;
	if (!r)
		return;
	r->conn->since_us = clock_now_us();
	r->conn->request = NULL;
	r->c = NULL;
	r->conn = NULL;
	http_data_cancel(r);
	user_charge_deinit(&r->call); /* the pool may have it longer than there are accounts */
	user_charge_deinit(&r->memory);
	if (!r->in_pool)
		http_request_free(r);
}

void http_resume(struct http_request *r)
{
	struct http *h = r->http;

	if (r->suspended) {
		r->suspended = false;
		MHD_resume_connection(r->c);
	}
	http_run(h);
}

/* ---------------------------------------------------------------- begin and end */

static void http_log_line(void *cls, const char *format, va_list ap)
{
	char text[256];

	(void)cls;
	vsnprintf(text, sizeof(text), format, ap);
	text[strcspn(text, "\n")] = '\0';
	log_debug("http", "libmicrohttpd=\"%s\"", text);
}

/* A text would end at a 0: what has one stays as it is, and is found nowhere. */
static size_t http_unescape(void *cls, struct MHD_Connection *c, char *s)
{
	(void)cls;
	(void)c;
	return strstr(s, "%00") ? strlen(s) : MHD_http_unescape(s);
}

static int http_start_daemon(struct http *h, struct fault *f)
{
	const union MHD_DaemonInfo *info;

	h->mhd =
		MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET |
					 MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG,
				 0, NULL, NULL, http_on_request, h, MHD_OPTION_EXTERNAL_LOGGER,
				 http_log_line, NULL, MHD_OPTION_CONNECTION_LIMIT, HTTP_MAX_CONNS,
				 MHD_OPTION_CONNECTION_TIMEOUT, HTTP_IDLE_S,
				 MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_CONN_BYTES,
				 MHD_OPTION_NOTIFY_CONNECTION, http_on_conn, h,
				 MHD_OPTION_NOTIFY_COMPLETED, http_on_completed, NULL,
				 MHD_OPTION_UNESCAPE_CALLBACK, http_unescape, NULL, MHD_OPTION_END);
	info = h->mhd ? MHD_get_daemon_info(h->mhd, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
	if (!info)
		return fault_errno(f, -ENOMEM, "starting the HTTP server");
	CHECK(uv_poll_init(h->loop, &h->poll, info->epoll_fd) == 0);
	h->poll.data = h;
	uv_timer_init(h->loop, &h->timer);
	h->timer.data = h;
	return 0;
}

int http_set_token(struct http *h, const char *token)
{
	char *copy = strdup(token);

	if (!copy)
		return -ENOMEM;
	if (h->token)
		OPENSSL_cleanse(h->token, strlen(h->token));
	free(h->token);
	h->token = copy;
	return 0;
}

int http_set_admission(struct http *h, const struct http_admission *a)
{
	return admit_set(&h->admit, a->uids, a->n_uids, a->gids, a->n_gids);
}

static void http_free(struct http *h)
{
	if (h->token)
		OPENSSL_cleanse(h->token, strlen(h->token));
	free(h->token);
	free(h->address);
	free(h->group);
	admit_deinit(&h->admit);
	free(h);
}

int http_new(uv_loop_t *loop, const struct http_options *options,
	     const struct http_sources *sources, struct http **ret, struct fault *f)
{
	struct http *h = calloc(1, sizeof(*h));

	if (!h)
		return fault_errno(f, -ENOMEM, "starting the HTTP server");
	h->magic = HTTP_MAGIC;
	h->loop = loop;
	h->sources = *sources;
	list_init(&h->conns);
	list_init(&h->requests);
	h->address = strdup(options->address);
	h->group = strdup(options->socket_group);
	if (!h->address || !h->group || http_set_token(h, options->token) < 0 ||
	    http_set_admission(h, &options->admission) < 0) {
		http_free(h);
		return fault_errno(f, -ENOMEM, "starting the HTTP server");
	}
	if (http_address_check(h->address, f) || http_start_daemon(h, f)) {
		if (h->mhd)
			MHD_stop_daemon(h->mhd);
		http_free(h);
		return (int)f->code;
	}
	uv_poll_start(&h->poll, UV_READABLE, http_on_poll);
	h->listen = (struct http_listen){ .loop = loop,
					  .address = h->address,
					  .mode = options->socket_mode,
					  .group = h->group,
					  .fn = http_on_accept,
					  .userdata = h };
	http_listen_start(&h->listen);
	*ret = h;
	return 0;
}

void http_describe(const struct http *h, Shardd__V1__HttpStatus *ret)
{
	ret->address = (char *)(*h->listen.bound ? h->listen.bound : h->address);
	ret->error = (char *)h->listen.why;
	ret->requests = h->answered;
	ret->refused = h->refused;
}

/* After the handles that were closed before it, and when the pool has nothing of it any more. */
static void http_on_closed(uv_handle_t *handle)
{
	http_free(handle->data);
}

static void http_on_last_timer(uv_timer_t *timer)
{
	struct http *h = timer->data;

	if (h->in_pool)
		uv_timer_start(timer, http_on_last_timer, 1, 0);
	else
		uv_close((uv_handle_t *)timer, http_on_closed);
}

struct http *http_close(struct http *h)
{
	struct http_request *r, *tmp;

	if (!h)
		return NULL;
	MAGIC_CHECK(h, HTTP_MAGIC);
	h->closing = true;
	http_listen_stop(&h->listen);
	uv_close((uv_handle_t *)&h->poll, NULL);
	list_for_each (r, tmp, &h->requests, link) {
		http_data_cancel(r);
		if (r->suspended)
			MHD_resume_connection(r->c);
		r->suspended = false;
	}
	MHD_stop_daemon(h->mhd);
	h->mhd = NULL;
	CHECK(h->n_conns == 0);
	uv_timer_start(&h->timer, http_on_last_timer, 1, 0);
	return NULL;
}
