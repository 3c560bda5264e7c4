#include "net/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "net/admit.h"
#include "net/listen_socket.h"
#include "net/pending.h"

#define LISTENER_MAGIC 0x4c53544eu

enum {
	ACCEPT_BATCH = 64,       /* for one wake-up: a flood must not starve the loop */
	PAUSE_MS = 100,          /* after an accept that will fail again at once */
	DENIED_MAX = 32,         /* uids remembered as logged */
	LOG_AGAIN_US = 60000000, /* interval of log lines about the same limit */
};

struct listener {
	uint32_t magic;
	uv_loop_t *loop;
	listener_conn_cb fn;
	void *userdata;
	struct listen_socket socket;
	struct admit admit;
	struct pending_set pending;
	struct users *users;      /* borrowed; NULL: nobody pays */
	unsigned max_connections; /* 0: no limit */
	unsigned reserved;        /* of these */
	unsigned handed_out;      /* connections that were passed to fn and have not ended */
	int reserve;              /* given up to accept and refuse when descriptors run out */
	uv_poll_t poll;
	uv_timer_t pause;   /* runs while accepting is paused */
	unsigned n_handles; /* open ones, counted down while closing */
	uid_t denied[DENIED_MAX];
	unsigned n_denied;
	uint64_t limit_logged_us; /* 0: never */
	uint64_t shortage_logged_us;
};

static bool listener_log_due(uint64_t *last_us)
{
	uint64_t now = clock_now_us();

	if (*last_us && now - *last_us < LOG_AGAIN_US)
		return false;
	*last_us = now;
	return true;
}

static void listener_log_denied(struct listener *l, const struct ucred *cred)
{
	enum log_level level = LOG_DEBUG;
	unsigned i = 0;

	while (i < l->n_denied && l->denied[i] != cred->uid)
		i++;
	if (i == l->n_denied && i < DENIED_MAX) {
		l->denied[l->n_denied++] = cred->uid;
		level = LOG_WARN;
	}
	log_write(level, "net", "connection denied uid=%u gid=%u pid=%d", cred->uid, cred->gid,
		  cred->pid);
}

static void listener_log_limit(struct listener *l, const char *limit, const struct ucred *cred)
{
	log_write(listener_log_due(&l->limit_logged_us) ? LOG_WARN : LOG_DEBUG, "net",
		  "connection refused limit=%s uid=%u pid=%d connections=%u", limit, cred->uid,
		  (int)cred->pid, listener_connections(l));
}

static void listener_log_shortage(struct listener *l, int negative_errno, const char *what)
{
	log_write(listener_log_due(&l->shortage_logged_us) ? LOG_WARN : LOG_DEBUG, "net",
		  "connection lost call=%s error=\"%s\" connections=%u", what,
		  uv_strerror(negative_errno), listener_connections(l));
}

static void listener_on_hello(struct pending_set *set, enum conn_protocol protocol, int fd,
			      struct conn_place *place)
{
	struct listener *l = CONTAINER_OF(set, struct listener, pending);
	struct proc *proc = NULL;
	struct conn *c = NULL;
	int r;

	MAGIC_CHECK(l, LISTENER_MAGIC);
	r = proc_new_peer(l->loop, fd, &proc);
	if (r < 0)
		fd_close(fd);
	else
		r = conn_new(l->loop, protocol, fd, proc, &c);
	proc_unref(proc); /* the connection has its own */
	if (r < 0) {
		listener_log_shortage(l, r, proc ? "conn_new" : "pidfd_open");
		return;
	}
	conn_set_place(c, place);
	l->handed_out++;
	/* Last: the callee may close the listener. */
	l->fn(c, l->userdata);
}

/* Is there room for @u? The last places are reserved for administrators of the daemon; half of them
 * also for the channels of processes that have attached. */
static bool listener_is_full(const struct listener *l, const struct ucred *cred,
			     const struct user *u)
{
	unsigned half = l->max_connections / 2;
	unsigned reserved = l->reserved < half ? l->reserved : half;

	if (!l->max_connections)
		return false;
	if (!l->users || user_is_admin(cred->uid))
		reserved = 0;
	else if (u && u->channels_due > u->used[USER_UNATTACHED])
		reserved /= 2;
	return listener_connections(l) >= l->max_connections - reserved;
}

static struct user *listener_user(const struct listener *l, int fd, const struct ucred *cred)
{
	size_t n = 0;
	_cleanup_(freep) gid_t *gids = l->users ? admit_groups(fd, cred, &n) : NULL;

	return l->users ? users_get(l->users, cred->uid, gids, n) : NULL;
}

static void listener_log_user_limit(struct listener *l, const struct ucred *cred,
				    const struct fault *f)
{
	log_write(listener_log_due(&l->limit_logged_us) ? LOG_WARN : LOG_DEBUG, "net",
		  "connection refused uid=%u pid=%d reason=\"%s\"", cred->uid, (int)cred->pid,
		  f->text);
}

/* Room is there, or the socket is closed. @fd: consumed. */
static void listener_let_in(struct listener *l, int fd, const struct ucred *cred, struct user *u)
{
	struct conn_place place = CONN_PLACE_NULL;
	struct fault f = FAULT_NULL;
	int r;

	if (listener_is_full(l, cred, u)) {
		listener_log_limit(l, "max_connections", cred);
		fd_close(fd);
		return;
	}
	if (conn_place_take(&place, u, &f)) {
		listener_log_user_limit(l, cred, &f);
		fd_close(fd);
		return;
	}
	r = pending_add(&l->pending, fd, cred->uid, &place);
	if (r == PENDING_E_LIMIT)
		listener_log_limit(l, "pending_per_uid", cred);
	else if (r < 0)
		listener_log_shortage(l, r, "poll");
}

/* A new socket: check the peer's credentials and the room. Consumes @fd. */
static void listener_take(struct listener *l, int fd)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);
	struct user *u;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0) {
		listener_log_shortage(l, -errno, "getsockopt");
		fd_close(fd);
		return;
	}
	if (!admit_peer(&l->admit, fd, &cred)) {
		listener_log_denied(l, &cred);
		fd_close(fd);
		return;
	}
	u = listener_user(l, fd, &cred);
	if (l->users && !u) {
		listener_log_shortage(l, -ENOMEM, "users_get");
		fd_close(fd);
		return;
	}
	listener_let_in(l, fd, &cred, u);
	user_unref(u);
}

static int listener_open_reserve(void)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

static void listener_on_acceptable(uv_poll_t *poll, int status, int events);

static void listener_on_pause_over(uv_timer_t *timer)
{
	struct listener *l = timer->data;

	MAGIC_CHECK(l, LISTENER_MAGIC);
	if (l->reserve < 0)
		l->reserve = listener_open_reserve();
	uv_poll_start(&l->poll, UV_READABLE, listener_on_acceptable);
}

/* Clients stay in the backlog. The socket stays readable, so stop polling it. */
static void listener_pause_accept(struct listener *l)
{
	uv_poll_stop(&l->poll);
	uv_timer_start(&l->pause, listener_on_pause_over, PAUSE_MS, 0);
}

static int listener_accept_one(struct listener *l)
{
	int fd = accept4(l->socket.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

/* No descriptor is left: use the reserve to accept one client and close it, so that it sees a
 * refusal instead of a hang. Return: whether to accept more. */
static bool listener_shed(struct listener *l)
{
	int fd;

	if (l->reserve < 0) {
		listener_pause_accept(l);
		return false;
	}
	l->reserve = fd_close(l->reserve);
	fd = listener_accept_one(l);
	if (fd >= 0)
		fd_close(fd);
	l->reserve = listener_open_reserve();
	if (l->reserve >= 0)
		return fd >= 0; /* else no client waited: EMFILE comes before EAGAIN */
	listener_pause_accept(l);
	return false;
}

/* Return: whether to accept more. */
static bool listener_accept_failed(struct listener *l, int r)
{
	switch (r) {
	case -EAGAIN:
		return false;
	case -EINTR:
	case -ECONNABORTED:
		return true;
	case -EMFILE:
	case -ENFILE:
		listener_log_shortage(l, r, "accept");
		return listener_shed(l);
	default: /* no memory, or a refusal of a security module */
		listener_log_shortage(l, r, "accept");
		listener_pause_accept(l);
		return false;
	}
}

static void listener_on_acceptable(uv_poll_t *poll, int status, int events)
{
	struct listener *l = poll->data;

	(void)status;
	(void)events;
	MAGIC_CHECK(l, LISTENER_MAGIC);
	for (int i = 0; i < ACCEPT_BATCH; i++) {
		int r = listener_accept_one(l);

		if (r >= 0)
			listener_take(l, r);
		else if (!listener_accept_failed(l, r))
			return;
	}
}

static int listener_open_socket(struct listener *l, const struct listener_options *o,
				struct fault *f)
{
	if (o->inherited_fd >= 0)
		return listen_socket_inherit(&l->socket, o->inherited_fd, f);
	return listen_socket_bind(&l->socket, o->path, o->mode, o->group, f);
}

/* The parts that have no handle in the loop. */
static void listener_release(struct listener *l)
{
	listen_socket_deinit(&l->socket);
	admit_deinit(&l->admit);
	l->reserve = fd_close(l->reserve);
}

static int listener_open_all(struct listener *l, const struct listener_options *o, struct fault *f)
{
	int r = admit_set(&l->admit, o->allow_uids, o->n_allow_uids, o->allow_gids,
			  o->n_allow_gids);

	if (r < 0)
		return fault_errno(f, r, "the listener");
	l->reserve = listener_open_reserve();
	if (l->reserve < 0)
		return fault_errno(f, l->reserve, "/dev/null");
	r = listener_open_socket(l, o, f);
	if (r)
		return r;
	r = uv_poll_init(l->loop, &l->poll, l->socket.fd);
	if (r < 0) {
		if (o->inherited_fd >= 0)
			l->socket.fd = -1; /* still the caller's */
		return fault_errno(f, r, "the listening socket");
	}
	return 0;
}

static void listener_start(struct listener *l, const struct listener_options *o)
{
	int r;

	l->max_connections = o->max_connections;
	l->reserved = o->reserved;
	l->users = o->users;
	pending_init(&l->pending, l->loop, listener_on_hello);
	pending_limits(&l->pending, o->max_pending_per_uid, o->hello_timeout_us);
	uv_timer_init(l->loop, &l->pause);
	l->pause.data = l;
	l->poll.data = l;
	l->n_handles = 3; /* poll, pause, pending */
	r = uv_poll_start(&l->poll, UV_READABLE, listener_on_acceptable);
	CHECK(r == 0);
}

int listener_new(uv_loop_t *loop, const struct listener_options *options, listener_conn_cb fn,
		 void *userdata, struct listener **ret, struct fault *f)
{
	struct listener *l = calloc(1, sizeof(*l));
	int r;

	if (!l)
		return fault_errno(f, -ENOMEM, "the listener");
	*l = (struct listener){ .magic = LISTENER_MAGIC,
				.loop = loop,
				.fn = fn,
				.userdata = userdata,
				.reserve = -1,
				.socket = LISTEN_SOCKET_NULL };
	r = listener_open_all(l, options, f);
	if (r) {
		listener_release(l);
		free(l);
		return r;
	}
	listener_start(l, options);
	*ret = l;
	return 0;
}

void listener_reconfigure(struct listener *l, const struct listener_options *o)
{
	int r;

	MAGIC_CHECK(l, LISTENER_MAGIC);
	r = admit_set(&l->admit, o->allow_uids, o->n_allow_uids, o->allow_gids, o->n_allow_gids);
	if (r < 0)
		log_error(
			"net",
			"no memory: the lists of users and groups that may connect are unchanged");
	l->n_denied = 0;
	l->max_connections = o->max_connections;
	l->reserved = o->reserved;
	pending_limits(&l->pending, o->max_pending_per_uid, o->hello_timeout_us);
}

unsigned listener_connections(const struct listener *l)
{
	return l->handed_out + l->pending.count;
}

void listener_conn_ended(struct listener *l)
{
	if (!l)
		return;
	MAGIC_CHECK(l, LISTENER_MAGIC);
	CHECK(l->handed_out > 0);
	l->handed_out--;
}

static void listener_handle_closed(struct listener *l)
{
	MAGIC_CHECK(l, LISTENER_MAGIC);
	CHECK(l->n_handles > 0);
	if (--l->n_handles > 0)
		return;
	l->magic = 0;
	free(l);
}

static void listener_on_handle_closed(uv_handle_t *handle)
{
	listener_handle_closed(handle->data);
}

static void listener_on_pending_closed(struct pending_set *set)
{
	listener_handle_closed(CONTAINER_OF(set, struct listener, pending));
}

struct listener *listener_close(struct listener *l)
{
	if (!l)
		return NULL;
	MAGIC_CHECK(l, LISTENER_MAGIC);
	uv_close((uv_handle_t *)&l->poll, listener_on_handle_closed);
	uv_close((uv_handle_t *)&l->pause, listener_on_handle_closed);
	pending_close(&l->pending, listener_on_pending_closed);
	listener_release(l);
	return NULL;
}
