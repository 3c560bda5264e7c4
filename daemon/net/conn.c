/*
 *   open --hang-up | process gone | conn_close--> closing --handle closed--> told, freed
 *
 * There is one handle, the watch on a duplicate of the socket (libuv allows one
 * watch for a descriptor, and the socket's own number belongs to the code that reads from it). Its
 * close callback comes once and from the loop, and so does the news.
 */
#include "net/conn.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <uv.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "net/admit.h"

#define CONN_MAGIC 0x434f4e4eu

struct conn {
	uint32_t magic;
	uint64_t id;
	enum conn_protocol protocol;
	int fd;       /* the socket */
	int watch_fd; /* its duplicate, what @poll watches */
	uv_poll_t poll;
	struct proc *proc; /* one reference */
	struct proc_watch gone;
	struct conn_place place;
	bool closing;
	bool leave_shutdown; /* to the next layer */
	void *user;
	conn_closed_cb fn;
	void *userdata;
	conn_ridden_cb ridden_fn;
	void *ridden_data;
};

int conn_place_take(struct conn_place *p, struct user *u, struct fault *f)
{
	int r = user_charge(&p->open, u, USER_CONNECTIONS, 1, f);

	if (r)
		return r;
	r = user_charge(&p->unattached, u, USER_UNATTACHED, 1, f);
	if (r)
		user_charge_deinit(&p->open);
	return r;
}

void conn_place_give(struct conn_place *p)
{
	user_charge_deinit(&p->unattached);
	user_charge_deinit(&p->open);
}

static void conn_on_handle_closed(uv_handle_t *handle)
{
	struct conn *c = handle->data;

	MAGIC_CHECK(c, CONN_MAGIC);
	CHECK(c->closing);
	if (c->fn)
		c->fn(c, c->userdata);
	fd_close(c->watch_fd);
	fd_close(c->fd);
	proc_unref(c->proc);
	conn_place_give(&c->place);
	c->magic = 0;
	free(c);
}

void conn_close(struct conn *c)
{
	MAGIC_CHECK(c, CONN_MAGIC);
	if (c->closing)
		return;
	c->closing = true;
	/* Other code may hold a duplicate: only a shutdown affects all duplicates. */
	if (!c->leave_shutdown)
		shutdown(c->fd, SHUT_RDWR);
	list_unlink(&c->gone.link);
	uv_close((uv_handle_t *)&c->poll, conn_on_handle_closed);
}

/* UV_DISCONNECT is also reported when the peer shut down only its writing half: a client that will
 * send nothing more counts as gone. Errors of the watch end it as well. */
static void conn_on_hangup(uv_poll_t *poll, int status, int events)
{
	struct conn *c = poll->data;

	(void)status;
	(void)events;
	MAGIC_CHECK(c, CONN_MAGIC);
	conn_close(c);
}

static void conn_on_proc_gone(struct proc_watch *watch)
{
	struct conn *c = CONTAINER_OF(watch, struct conn, gone);

	MAGIC_CHECK(c, CONN_MAGIC);
	conn_close(c);
}

static int conn_watch_hangup(struct conn *c, uv_loop_t *loop)
{
	int r;

	c->watch_fd = fcntl(c->fd, F_DUPFD_CLOEXEC, 3);
	if (c->watch_fd < 0)
		return -errno;
	r = uv_poll_init(loop, &c->poll, c->watch_fd);
	if (r < 0) {
		c->watch_fd = fd_close(c->watch_fd);
		return r;
	}
	c->poll.data = c;
	r = uv_poll_start(&c->poll, UV_DISCONNECT, conn_on_hangup);
	CHECK(r == 0);
	return 0;
}

int conn_new(uv_loop_t *loop, enum conn_protocol protocol, int fd, struct proc *proc,
	     struct conn **ret)
{
	static uint64_t last_id;
	struct conn *c = calloc(1, sizeof(*c));
	int r;

	if (!c) {
		fd_close(fd);
		return -ENOMEM;
	}
	*c = (struct conn){ .magic = CONN_MAGIC, .protocol = protocol, .fd = fd };
	r = conn_watch_hangup(c, loop);
	if (r < 0) {
		fd_close(fd);
		free(c);
		return r;
	}
	c->id = ++last_id;
	c->proc = proc_ref(proc);
	list_init(&c->gone.link);
	proc_watch(proc, &c->gone, conn_on_proc_gone);
	*ret = c;
	return 0;
}

void conn_set_place(struct conn *c, struct conn_place *p)
{
	MAGIC_CHECK(c, CONN_MAGIC);
	CHECK(!c->place.open.user);
	c->place = *p;
	*p = CONN_PLACE_NULL;
}

struct user *conn_account(const struct conn *c)
{
	return c->place.open.user;
}

void conn_attached(struct conn *c)
{
	MAGIC_CHECK(c, CONN_MAGIC);
	user_charge_deinit(&c->place.unattached);
}

void conn_leave_shutdown(struct conn *c)
{
	MAGIC_CHECK(c, CONN_MAGIC);
	c->leave_shutdown = true;
}

uint64_t conn_id(const struct conn *c)
{
	return c->id;
}

enum conn_protocol conn_protocol(const struct conn *c)
{
	return c->protocol;
}

struct proc *conn_proc(struct conn *c)
{
	return c->proc;
}

int conn_fd(const struct conn *c)
{
	return c->fd;
}

gid_t *conn_groups(struct conn *c, size_t *ret_n)
{
	const struct ucred cred = { .uid = proc_uid(c->proc), .gid = proc_gid(c->proc) };

	return admit_groups(c->fd, &cred, ret_n);
}

void conn_set_user(struct conn *c, void *user)
{
	c->user = user;
	if (user && c->ridden_fn)
		c->ridden_fn(c, c->ridden_data);
}

void conn_on_ridden(struct conn *c, conn_ridden_cb fn, void *userdata)
{
	MAGIC_CHECK(c, CONN_MAGIC);
	c->ridden_fn = fn;
	c->ridden_data = userdata;
}

void *conn_user(const struct conn *c)
{
	return c->user;
}

void conn_on_closed(struct conn *c, conn_closed_cb fn, void *userdata)
{
	MAGIC_CHECK(c, CONN_MAGIC);
	c->fn = fn;
	c->userdata = userdata;
}

bool conn_hung_up(const struct conn *c)
{
	struct pollfd p = { .fd = c->watch_fd, .events = POLLRDHUP };

	return c->closing || (poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)));
}
