/*
 * The HTTP server: metrics, the status as JSON, probes, and a page that shows it. Read-only: only GET and HEAD.
 *
 * libmicrohttpd parses and sends, in the loop, by its epoll descriptor. What is asked for is collected in the loop
 * (rpc/svc_status.h), in turns as calls of the same user (rpc/status_turns.h), and made a text of in a thread of
 * libuv's pool.
 *
 * A client sees what shardctl would show to it: by the uid at the other end of a unix socket, or of a connection
 * from this machine. Observers, and clients that show the token, see all that the daemon's user would. Others
 * get 401, but for the probes and the page itself, which tell nothing of jobs.
 */
#ifndef SHARDD_HTTP_HTTP_H
#define SHARDD_HTTP_HTTP_H

#include <stdbool.h>
#include <sys/types.h>
#include <uv.h>

#include "core/fault.h"
#include "http/metrics.h"
#include "rpc/svc_status.h"

struct http;

/* The users and groups that may use the daemon, as at its socket (net/admit.h); copied. */
struct http_admission {
	const uid_t *uids;
	size_t n_uids;
	const gid_t *gids;
	size_t n_gids;
};

struct http_options {
	const char *address;  /* copied: HOST:PORT or unix:PATH */
	unsigned socket_mode; /* of a unix socket's file */
	const char *socket_group;
	const char *token; /* copied; "": there is none */
	struct http_admission admission;
};

/* What only the server knows. All get @userdata. */
struct http_sources {
	struct svc_status *status;            /* borrowed */
	bool (*healthy)(void *userdata);      /* do its threads respond? */
	bool (*accepts_work)(void *userdata); /* it does not drain, and has no cordon */
	void (*counts)(struct metrics_counts *ret, void *userdata);
	void *userdata;
};

/* Loop thread, as all functions here. Return: 0 or a fault code. An address in use is no fault: it is tried again. */
int http_new(uv_loop_t *loop, const struct http_options *options,
	     const struct http_sources *sources, struct http **ret, struct fault *f);

/* For requests from now on. Return: 0, or -ENOMEM: nothing changed. */
int http_set_token(struct http *h, const char *token);
/* For connections from now on. The same. */
int http_set_admission(struct http *h, const struct http_admission *a);

/* Into a reply. Borrowed until the next call. */
void http_describe(const struct http *h, Shardd__V1__HttpStatus *ret);

/* End all connections; the sources are not used any more. Memory is freed by the loop. NULL is allowed. Return:
 * NULL. */
struct http *http_close(struct http *h);

#endif
