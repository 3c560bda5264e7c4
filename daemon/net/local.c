/*
 *   NEW --hello--> BOUND --protocol broken--> ENDING --answer out, or time up--> CLOSED
 *    `--------------------protocol broken-------^
 *
 * local_close, the peer and its process lead to CLOSED from every state. Only the connection
 * reports the end.
 */
#include "net/local.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <uv.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/log.h"
#include "core/state.h"
#include "net/local_codec.h"
#include "net/local_out.h"
#include "rpc/status_map.h"

#define LOCAL_MAGIC 0x4c4f434cu

#ifndef SO_PASSPIDFD
#define SO_PASSPIDFD 76 /* Linux 6.5 */
#endif

enum state { LOCAL_NEW, LOCAL_BOUND, LOCAL_ENDING, LOCAL_CLOSED };

static const struct state_row local_states[] = {
	[LOCAL_NEW] = { "NEW",
			STATE_TO(LOCAL_BOUND) | STATE_TO(LOCAL_ENDING) | STATE_TO(LOCAL_CLOSED) },
	[LOCAL_BOUND] = { "BOUND", STATE_TO(LOCAL_ENDING) | STATE_TO(LOCAL_CLOSED) },
	[LOCAL_ENDING] = { "ENDING", STATE_TO(LOCAL_CLOSED) },
	[LOCAL_CLOSED] = { "CLOSED", 0 },
};

struct local {
	uint32_t magic;
	uint8_t state; /* enum state */
	struct conn *conn;
	const struct local_ops *ops;
	void *userdata;
	uint64_t frame_timeout_us;
	uv_poll_t poll;   /* on conn_fd */
	uv_timer_t timer; /* for the first frame, an incomplete frame, a last answer */
	unsigned n_handles;
	struct local_out out;
	struct user_charge unread; /* descriptors that were sent and may not have been received */
	struct list unread_link;   /* its user's unread */
	size_t n_in;
	uint8_t in[4 * SHD1_MAX_FRAME];
};

static void local_on_poll(uv_poll_t *poll, int status, int events);

static void local_state_move(struct local *l, enum state to)
{
	state_move(local_states, &l->state, (uint8_t)to);
}

/* Watch for the events that the state can use: an ending channel does not read any more. */
static void local_watch(struct local *l)
{
	int events = 0;

	if (l->state == LOCAL_NEW || l->state == LOCAL_BOUND)
		events |= UV_READABLE;
	if (l->state != LOCAL_CLOSED && l->out.n > 0)
		events |= UV_WRITABLE;
	if (events)
		uv_poll_start(&l->poll, events, local_on_poll);
	else
		uv_poll_stop(&l->poll);
}

void local_close(struct local *l)
{
	MAGIC_CHECK(l, LOCAL_MAGIC);
	if (l->state == LOCAL_CLOSED)
		return;
	local_state_move(l, LOCAL_CLOSED);
	local_watch(l);
	conn_close(l->conn);
}

static void local_on_timeout(uv_timer_t *timer)
{
	struct local *l = timer->data;

	MAGIC_CHECK(l, LOCAL_MAGIC);
	log_debug("net", "local channel closed conn=%llu reason=timeout",
		  (unsigned long long)conn_id(l->conn));
	local_close(l);
}

static void local_start_timer(struct local *l)
{
	uv_timer_start(&l->timer, local_on_timeout, (l->frame_timeout_us + 999) / 1000, 0);
}

/* ---------------------------------------------- descriptors on their way */

static void local_forget_unread(struct local *l)
{
	list_unlink(&l->unread_link);
	user_charge_deinit(&l->unread);
}

/* Has the peer received everything? The kernel tells only that nothing is left. */
static void local_look_unread(struct local *l)
{
	int bytes = 0;

	if (l->out.n == 0 && ioctl(conn_fd(l->conn), SIOCOUTQ, &bytes) == 0 && bytes == 0)
		local_forget_unread(l);
}

/* Check each channel of the user that has some: at most as many as the limit. */
static void local_look_all(struct user *u)
{
	struct local *l, *tmp;

	list_for_each (l, tmp, &u->unread, unread_link)
		local_look_unread(l);
}

/* Charge one more before it is sent. Descriptors that a client does not receive stay in the kernel,
 * which counts them against the daemon. Return: 0 or a fault code. */
static int local_charge_fd(struct local *l, struct fault *f)
{
	struct user *u = conn_account(l->conn);

	if (!u)
		return 0;
	local_look_unread(l);
	if (!user_has_room(u, USER_FDS, 1))
		local_look_all(u);
	if (l->unread.user)
		return user_charge_resize(&l->unread, l->unread.n + 1, f) ? (int)f->code : 0;
	if (user_charge(&l->unread, u, USER_FDS, 1, f))
		return f->code;
	list_append(&u->unread, &l->unread_link);
	return 0;
}

/* Consumes @fd. */
static void local_answer(struct local *l, const struct shd1_header *h, int fd)
{
	int r = local_out_put(&l->out, conn_fd(l->conn), h, fd);

	if (r == 0)
		return;
	log_debug("net", "local channel closed conn=%llu reason=\"%s\"",
		  (unsigned long long)conn_id(l->conn),
		  r == LOCAL_OUT_E_FULL ? "answers are not read" : strerror(-r));
	local_close(l);
}

static void local_answer_error(struct local *l, uint32_t tag, bool fatal, const struct fault *f)
{
	struct shd1_error e;

	local_codec_error(&e, tag, (uint32_t)status_map_code(f->code), fatal, f);
	local_answer(l, &e.h, -1);
}

/* Send the last answer and end: when it is sent, or after the time of one frame. */
static void local_end(struct local *l, uint32_t tag, const struct fault *f)
{
	log_info("net", "local channel ended conn=%llu pid=%d reason=\"%s\"",
		 (unsigned long long)conn_id(l->conn), (int)proc_pid(conn_proc(l->conn)), f->text);
	local_answer_error(l, tag, true, f);
	if (l->state == LOCAL_CLOSED)
		return;
	local_state_move(l, LOCAL_ENDING);
	local_start_timer(l);
	if (l->out.n == 0)
		local_close(l);
}

static void local_on_hello(struct local *l, const struct shd1_hello *hello)
{
	struct shd1_welcome w = { .h = { SHD1_MAGIC, SHD1_WELCOME, sizeof(w), hello->h.tag, 0 },
				  .version = SHD1_VERSION };
	struct fault f = FAULT_NULL;

	if (l->state != LOCAL_NEW) {
		fault_set(&f, FAULT_STATE, NULL, "the channel has already sent HELLO");
		local_end(l, hello->h.tag, &f);
		return;
	}
	if (l->ops->hello(l, hello->token, l->userdata, &w.session, &f)) {
		local_end(l, hello->h.tag, &f);
		return;
	}
	if (l->state == LOCAL_CLOSED)
		return;
	local_state_move(l, LOCAL_BOUND);
	local_answer(l, &w.h, -1);
}

/* Is the channel bound to a session? If not, end it. */
static bool local_check_bound(struct local *l, const struct shd1_header *h)
{
	struct fault f = FAULT_NULL;

	if (l->state == LOCAL_BOUND)
		return true;
	fault_set(&f, FAULT_STATE, NULL, "the first frame must be HELLO");
	local_end(l, h->tag, &f);
	return false;
}

static void local_on_get_slab(struct local *l, const struct shd1_get_slab *g)
{
	struct shd1_slab s = { .h = { SHD1_MAGIC, SHD1_SLAB, sizeof(s), g->h.tag, 0 },
			       .slab = g->slab };
	struct local_slab slab = { .fd = -1 };
	struct fault f = FAULT_NULL;

	if (!local_check_bound(l, &g->h))
		return;
	if (local_charge_fd(l, &f) || l->ops->get_slab(l, g->slab, l->userdata, &slab, &f)) {
		if (l->state != LOCAL_CLOSED)
			local_answer_error(l, g->h.tag, false, &f);
		return;
	}
	CHECK(slab.fd >= 0);
	s.writable = slab.writable;
	s.lasts = slab.lasts;
	s.pages = slab.pages;
	s.bytes = slab.bytes;
	if (l->state != LOCAL_CLOSED)
		local_answer(l, &s.h, slab.fd);
	else
		fd_close(slab.fd);
}

static void local_on_get_ring(struct local *l, const struct shd1_get_ring *g)
{
	struct shd1_ring s = { .h = { SHD1_MAGIC, SHD1_RING, sizeof(s), g->h.tag, 0 },
			       .part = g->part };
	_cleanup_(fd_closep) int fd = -1;
	struct fault f = FAULT_NULL;

	if (!local_check_bound(l, &g->h))
		return;
	if (local_charge_fd(l, &f) ||
	    l->ops->get_ring(l, g->part, l->userdata, &fd, &s.bytes, &f)) {
		if (l->state != LOCAL_CLOSED)
			local_answer_error(l, g->h.tag, false, &f);
		return;
	}
	CHECK(fd >= 0);
	if (l->state != LOCAL_CLOSED)
		local_answer(l, &s.h, STEAL_FD(fd));
}

/* An incomplete frame has the same time limit as the first frame, counted from its first byte;
 * sending it in small pieces does not extend it. @progress: a frame was completed. */
static void local_time_rest(struct local *l, bool progress)
{
	if (l->state == LOCAL_NEW || l->state == LOCAL_ENDING || l->state == LOCAL_CLOSED)
		return;
	if (l->n_in == 0)
		uv_timer_stop(&l->timer);
	else if (progress || !uv_is_active((uv_handle_t *)&l->timer))
		local_start_timer(l);
}

static void local_handle_frames(struct local *l)
{
	struct fault f = FAULT_NULL;
	union local_frame frame;
	size_t at = 0, size;
	enum res r = RES_WAIT;

	while (l->state == LOCAL_NEW || l->state == LOCAL_BOUND) {
		r = local_codec_next(l->in + at, l->n_in - at, &frame, &size, &f);
		if (r != RES_DONE)
			break;
		at += size;
		if (frame.h.type == SHD1_HELLO)
			local_on_hello(l, &frame.hello);
		else if (frame.h.type == SHD1_GET_RING)
			local_on_get_ring(l, &frame.get_ring);
		else
			local_on_get_slab(l, &frame.get_slab);
	}
	l->n_in -= at;
	memmove(l->in, l->in + at, l->n_in);
	if (r == RES_FAILED)
		local_end(l, 0, &f);
	local_time_rest(l, at > 0);
}

/* No room for control messages: the kernel drops descriptors that are sent along, and sets a flag.
 * They never become ours. */
static ssize_t local_read_some(struct local *l, int *ret_flags)
{
	struct iovec iov = { l->in + l->n_in, sizeof(l->in) - l->n_in };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t n;

	CHECK(iov.iov_len > 0);
	n = recvmsg(conn_fd(l->conn), &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	*ret_flags = msg.msg_flags;
	return n < 0 ? -errno : n;
}

static void local_on_readable(struct local *l)
{
	int flags;
	ssize_t n = local_read_some(l, &flags);

	if (n == -EAGAIN || n == -EINTR)
		return;
	if (n <= 0) {
		local_close(l);
		return;
	}
	if (flags & MSG_CTRUNC) {
		struct fault f = FAULT_NULL;

		fault_set(&f, FAULT_INVALID, NULL, "a client must not send descriptors");
		local_end(l, 0, &f);
		return;
	}
	l->n_in += (size_t)n;
	local_handle_frames(l);
}

static void local_on_writable(struct local *l)
{
	if (local_out_flush(&l->out, conn_fd(l->conn)) < 0)
		local_close(l);
	else if (l->state == LOCAL_ENDING && l->out.n == 0)
		local_close(l);
}

static void local_on_poll(uv_poll_t *poll, int status, int events)
{
	struct local *l = poll->data;

	MAGIC_CHECK(l, LOCAL_MAGIC);
	if (status < 0) {
		local_close(l);
		return;
	}
	if (events & UV_WRITABLE)
		local_on_writable(l);
	if ((events & UV_READABLE) && (l->state == LOCAL_NEW || l->state == LOCAL_BOUND))
		local_on_readable(l);
	local_watch(l);
}

static void local_on_handle_closed(uv_handle_t *handle)
{
	struct local *l = handle->data;

	MAGIC_CHECK(l, LOCAL_MAGIC);
	if (--l->n_handles > 0)
		return;
	l->magic = 0;
	free(l);
}

static void local_on_conn_closed(struct conn *c, void *userdata)
{
	struct local *l = userdata;

	MAGIC_CHECK(l, LOCAL_MAGIC);
	CHECK(c == l->conn);
	if (l->state != LOCAL_CLOSED)
		local_state_move(l, LOCAL_CLOSED);
	l->ops->closed(l, l->userdata);
	local_forget_unread(l);
	l->conn = NULL;
	local_out_deinit(&l->out);
	/* The poll before the connection closes its descriptor. */
	uv_close((uv_handle_t *)&l->poll, local_on_handle_closed);
	uv_close((uv_handle_t *)&l->timer, local_on_handle_closed);
}

/* Connections may inherit these options from a listening socket of systemd. Then each message would
 * carry control data, and MSG_CTRUNC would mean nothing. */
static void local_clear_passing(int fd)
{
	const int options[] = { SO_PASSCRED, SO_PASSSEC, SO_PASSPIDFD };
	const int off = 0;

	for (size_t i = 0; i < ARRAY_SIZE(options); i++)
		setsockopt(fd, SOL_SOCKET, options[i], &off, sizeof(off));
}

int local_new(uv_loop_t *loop, struct conn *c, const struct local_ops *ops, void *userdata,
	      uint64_t frame_timeout_us, struct local **ret)
{
	struct local *l = calloc(1, sizeof(*l));
	int r;

	CHECK(conn_protocol(c) == CONN_LOCAL);
	if (!l) {
		conn_close(c);
		return -ENOMEM;
	}
	r = uv_poll_init(loop, &l->poll, conn_fd(c));
	if (r < 0) {
		free(l);
		conn_close(c);
		return r;
	}
	uv_timer_init(loop, &l->timer);
	l->magic = LOCAL_MAGIC;
	l->conn = c;
	l->ops = ops;
	l->userdata = userdata;
	l->frame_timeout_us = frame_timeout_us;
	l->n_handles = 2;
	l->poll.data = l;
	l->timer.data = l;
	local_out_init(&l->out);
	list_init(&l->unread_link);
	local_clear_passing(conn_fd(c));
	conn_on_closed(c, local_on_conn_closed, l);
	local_start_timer(l);
	local_watch(l);
	*ret = l;
	return 0;
}

struct conn *local_conn(struct local *l)
{
	return l->conn;
}
