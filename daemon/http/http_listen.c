#include "http/http_listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/hostport.h"
#include "core/log.h"
#include "core/text.h"

/* The pauses double: a daemon that ends has its address for a moment, another program for long. */
#define HTTP_LISTEN_RETRY_FIRST_MS 250u
#define HTTP_LISTEN_RETRY_MOST_MS  4000u
#define HTTP_LISTEN_PAUSE_MS       100u
#define HTTP_LISTEN_BACKLOG        128

static void http_listen_on_pause_over(uv_timer_t *timer);

/* Without descriptors, for one: it would be readable again at once. */
static void http_listen_pause(struct http_listen *l)
{
	for (unsigned i = 0; i < l->n_ends; i++)
		if (l->ends[i].open)
			uv_poll_stop(&l->ends[i].poll);
	uv_timer_start(&l->retry, http_listen_on_pause_over, HTTP_LISTEN_PAUSE_MS, 0);
}

static void http_listen_on_poll(uv_poll_t *poll, int status, int events)
{
	struct http_listen_end *end = poll->data;

	(void)events;
	for (unsigned i = 0; status == 0 && i < 16 && end->fd >= 0; i++) {
		int fd = accept4(end->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0)
			end->listen->fn(fd, end->listen->userdata);
		else if (errno == EAGAIN)
			return;
		else if (errno != EINTR && errno != ECONNABORTED)
			status = -errno;
	}
	if (status < 0)
		http_listen_pause(end->listen);
}

static void http_listen_on_pause_over(uv_timer_t *timer)
{
	struct http_listen *l = timer->data;

	for (unsigned i = 0; i < l->n_ends; i++)
		if (l->ends[i].open)
			uv_poll_start(&l->ends[i].poll, UV_READABLE, http_listen_on_poll);
}

/* @fd listens; it is taken. Return: 0 or negative errno. */
static int http_listen_add(struct http_listen *l, int fd)
{
	struct http_listen_end *end = &l->ends[l->n_ends];
	int r;

	*end = (struct http_listen_end){ .listen = l, .fd = fd };
	r = uv_poll_init(l->loop, &end->poll, fd);
	if (r < 0) {
		if (fd != l->file.fd)
			close(fd);
		return r;
	}
	end->poll.data = end;
	end->open = true;
	l->n_ends++;
	return uv_poll_start(&end->poll, UV_READABLE, http_listen_on_poll);
}

static int http_listen_bind(const struct sockaddr_storage *a, int *ret)
{
	_cleanup_(fd_closep) int fd =
		socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	const socklen_t bytes =
		a->ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
	const int on = 1;

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0)
		return -errno;
	if (a->ss_family == AF_INET6 &&
	    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on)) < 0)
		return -errno;
	if (bind(fd, (const struct sockaddr *)a, bytes) < 0 || listen(fd, HTTP_LISTEN_BACKLOG) < 0)
		return -errno;
	*ret = STEAL_FD(fd);
	return 0;
}

static void http_listen_close_ends(struct http_listen *l)
{
	for (unsigned i = 0; i < l->n_ends; i++) {
		struct http_listen_end *end = &l->ends[i];

		if (!end->open)
			continue;
		end->open = false;
		uv_close((uv_handle_t *)&end->poll, NULL);
		if (end->fd != l->file.fd)
			close(end->fd);
		end->fd = -1;
	}
	listen_socket_deinit(&l->file);
}

static void http_listen_set_port(struct sockaddr_storage *a, uint16_t port)
{
	if (a->ss_family == AF_INET)
		((struct sockaddr_in *)(void *)a)->sin_port = htons(port);
	else
		((struct sockaddr_in6 *)(void *)a)->sin6_port = htons(port);
}

static uint16_t http_listen_port_of(int fd)
{
	struct sockaddr_storage a;
	socklen_t n = sizeof(a);

	if (getsockname(fd, (struct sockaddr *)&a, &n) < 0)
		return 0;
	return ntohs(a.ss_family == AF_INET ? ((struct sockaddr_in *)(void *)&a)->sin_port
					    : ((struct sockaddr_in6 *)(void *)&a)->sin6_port);
}

/* Return: false: there is no such host. */
static bool http_listen_resolve(struct http_listen *l)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE };
	struct addrinfo *all = NULL;
	struct hostport h;
	char port[16];
	int r;

	CHECK(hostport_parse_any(l->address, &h));
	snprintf(port, sizeof(port), "%u", h.port);
	r = getaddrinfo(h.host, port, &hints, &all);
	if (r != 0) {
		snprintf(l->why, sizeof(l->why), "%.180s: %s", l->address, gai_strerror(r));
		return false;
	}
	for (struct addrinfo *a = all; a && l->n_addresses < HTTP_LISTEN_MAX; a = a->ai_next)
		if (a->ai_family == AF_INET || a->ai_family == AF_INET6)
			memcpy(&l->addresses[l->n_addresses++], a->ai_addr, a->ai_addrlen);
	freeaddrinfo(all);
	return true;
}

/* Return: 0: on one at least; or negative errno. A machine without IPv6 has no ::1. */
static int http_listen_tcp(struct http_listen *l)
{
	struct hostport h;
	int r = -EADDRNOTAVAIL;

	CHECK(hostport_parse_any(l->address, &h));
	for (unsigned i = 0; i < l->n_addresses; i++) {
		int fd = -1, bound;

		http_listen_set_port(&l->addresses[i], h.port);
		bound = http_listen_bind(&l->addresses[i], &fd);
		if (bound == 0) {
			h.port = http_listen_port_of(fd); /* in place of 0, for all of them */
			bound = http_listen_add(l, fd);
		}
		if (l->n_ends == 0 || bound == 0 || bound == -EADDRINUSE)
			r = bound;
		if (bound == -EADDRINUSE)
			break;
	}
	hostport_format(h.host, h.port, l->bound);
	if (r < 0)
		snprintf(l->why, sizeof(l->why), "%.128s: %s%s", l->address, strerror(-r),
			 r == -EAFNOSUPPORT ? "; a service of systemd needs shardd-http.conf" : "");
	return r;
}

static int http_listen_unix(struct http_listen *l, const char *path, struct fault *f)
{
	if (listen_socket_bind(&l->file, path, l->mode, l->group, f))
		return -EADDRINUSE;
	text_copy(l->bound, sizeof(l->bound), l->address);
	return http_listen_add(l, l->file.fd);
}

/* Ends of an earlier try are still closing while their handles are: so there is one slot for each try. */
static int http_listen_try(struct http_listen *l, struct fault *f)
{
	const char *path = http_address_path(l->address);
	int r;

	l->n_ends = 0;
	l->why[0] = '\0';
	r = path ? http_listen_unix(l, path, f) : http_listen_tcp(l);
	if (r == 0)
		return 0;
	if (f->code)
		text_copy(l->why, sizeof(l->why), f->text);
	http_listen_close_ends(l);
	return r;
}

static void http_listen_on_retry(uv_timer_t *timer)
{
	struct http_listen *l = timer->data;
	struct fault f = FAULT_NULL;

	if (http_listen_try(l, &f) == 0) {
		log_info("http", "listening address=%s", l->bound);
		return;
	}
	uv_timer_start(&l->retry, http_listen_on_retry, l->retry_ms, 0);
	if (l->retry_ms < HTTP_LISTEN_RETRY_MOST_MS)
		l->retry_ms *= 2;
}

void http_listen_start(struct http_listen *l)
{
	l->file = LISTEN_SOCKET_NULL;
	uv_timer_init(l->loop, &l->retry);
	l->retry.data = l;
	l->retry_ms = HTTP_LISTEN_RETRY_FIRST_MS;
	l->open = true;
	if (!http_address_path(l->address) && !http_listen_resolve(l)) {
		log_error("http", "not listening until a restart why=\"%s\"", l->why);
		return;
	}
	http_listen_on_retry(&l->retry);
	if (*l->why)
		log_error("http", "not listening, another try follows why=\"%s\"", l->why);
}

void http_listen_stop(struct http_listen *l)
{
	if (!l->open)
		return;
	l->open = false;
	http_listen_close_ends(l);
	uv_close((uv_handle_t *)&l->retry, NULL);
}
