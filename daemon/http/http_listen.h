/*
 * Where HTTP is listened for: all addresses of HOST:PORT, or unix:PATH. An address that is in use is tried again every
 * few seconds: a daemon that comes back to its jobs must not end because of it. Loop thread only; a host name
 * is resolved once, at the start, which blocks. If it is not found, nothing is listened for until a restart.
 */
#ifndef SHARDD_HTTP_HTTP_LISTEN_H
#define SHARDD_HTTP_HTTP_LISTEN_H

#include <sys/socket.h>
#include <uv.h>

#include "core/fault.h"
#include "core/hostport.h"
#include "core/http_address.h"
#include "net/listen_socket.h"

#define HTTP_LISTEN_MAX 4u

struct http_listen;

/* @fd: non-blocking, the callee's. */
typedef void (*http_listen_cb)(int fd, void *userdata);

struct http_listen_end {
	struct http_listen *listen;
	uv_poll_t poll;
	int fd;    /* -1: not listening */
	bool open; /* poll is */
};

struct http_listen {
	uv_loop_t *loop;
	const char *address; /* borrowed */
	unsigned mode;       /* of a unix socket's file */
	const char *group;   /* of the same; borrowed */
	http_listen_cb fn;
	void *userdata;
	uv_timer_t retry;
	unsigned retry_ms; /* until the next try */
	bool open;
	/* of TCP: resolved at the start; the port is that of the first one, in place of 0 */
	struct sockaddr_storage addresses[HTTP_LISTEN_MAX];
	unsigned n_addresses;
	struct http_listen_end ends[HTTP_LISTEN_MAX];
	unsigned n_ends;
	struct listen_socket file; /* of a unix socket */
	char bound[HOSTPORT_TEXT_BYTES +
		   512]; /* @address, with the port that was free in place of port 0 */
	char why[256];   /* it does not listen; "": it does */
};

/* Begin. @l: address (http_address_check), mode, group, fn, userdata and loop are set. */
void http_listen_start(struct http_listen *l);
/* @l must stay until the loop has closed its handles: @l->loop's next turn. Safe if it was not begun, and twice. */
void http_listen_stop(struct http_listen *l);

#endif
