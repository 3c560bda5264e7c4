#include "channel.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"

void channel_init(struct channel *c)
{
	*c = (struct channel){ .fd = -1, .in_fd = -1 };
	snprintf(c->why, sizeof(c->why), "it was never opened");
}

void channel_deinit(struct channel *c)
{
	c->fd = fd_close(c->fd);
	c->in_fd = fd_close(c->in_fd);
	c->arrived = false;
}

void channel_installed(struct channel *c)
{
	CHECK(c->arrived);
	c->in_fd = fd_close(c->in_fd);
	c->arrived = false;
}

static int channel_closed(const struct channel *c, struct shardd_error *err)
{
	if (c->forwarded)
		return error_set(
			err, SHARDD_FAILED_PRECONDITION, NULL,
			"the daemon's socket is forwarded: no descriptors come through it, so "
			"its memory cannot be mapped here; generations of publications can "
			"be fetched (shardd_publication_fetch)");
	return error_lost(err, "the local channel to the daemon is closed: %s", c->why);
}

/* The stream is of no use any more: what was mapped stays, nothing new comes. */
static int channel_broken(struct channel *c, const char *why, struct shardd_error *err)
{
	c->fd = fd_close(c->fd);
	c->in_fd = fd_close(c->in_fd);
	c->waiting = false;
	c->arrived = false;
	c->have = 0;
	snprintf(c->why, sizeof(c->why), "%s", why);
	return channel_closed(c, err);
}

int channel_again(struct shardd_error *err)
{
	error_set(err, SHARDD_DEADLINE_EXCEEDED, NULL, "still waiting for the local channel");
	if (err)
		err->native = EAGAIN;
	return -SHARDD_DEADLINE_EXCEEDED;
}

static int channel_send_frame(struct channel *c, struct shd1_header *h, uint16_t type,
			      uint16_t bytes, struct shardd_error *err)
{
	ssize_t n;

	*h = (struct shd1_header){ SHD1_MAGIC, type, bytes, ++c->tag, 0 };
	do {
		n = send(c->fd, h, bytes, MSG_NOSIGNAL);
	} while (n < 0 && errno == EINTR);
	/* A few bytes go at once or not at all, unless the daemon stopped reading. */
	if (n != (ssize_t)bytes)
		return channel_broken(c, n < 0 ? strerrordesc_np(errno) : "a frame is truncated",
				      err);
	c->waiting = true;
	return 0;
}

/* Keep the first descriptor that arrived; close any other. */
static void channel_take_fds(struct channel *c, struct msghdr *msg)
{
	for (struct cmsghdr *h = CMSG_FIRSTHDR(msg); h; h = CMSG_NXTHDR(msg, h)) {
		size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		int fd;

		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < n; i++) {
			memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(fd));
			fd_close(c->in_fd);
			c->in_fd = fd;
		}
	}
}

/* Read on in the frame under way. Return: 1 (complete), 0 (no more there yet), or
 * a negative shardd_code. */
static int channel_read_frame(struct channel *c, struct shardd_error *err)
{
	union {
		char bytes[CMSG_SPACE(4 * sizeof(int))];
		struct cmsghdr align;
	} control;

	for (;;) {
		size_t want = c->have < sizeof(c->in.h) ? sizeof(c->in.h) : c->in.h.bytes;
		struct iovec iov = { c->in.bytes + c->have, want - c->have };
		struct msghdr msg = { .msg_iov = &iov,
				      .msg_iovlen = 1,
				      .msg_control = control.bytes,
				      .msg_controllen = sizeof(control.bytes) };
		ssize_t n;

		if (c->have >= sizeof(c->in.h) && c->have == want)
			return 1;
		n = recvmsg(c->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return 0;
		if (n <= 0)
			return channel_broken(
				c, n < 0 ? strerrordesc_np(errno) : "the daemon closed it", err);
		channel_take_fds(c, &msg);
		c->have += (size_t)n;
		if (c->have == sizeof(c->in.h) &&
		    (c->in.h.magic != SHD1_MAGIC || c->in.h.bytes < sizeof(c->in.h) ||
		     c->in.h.bytes > SHD1_MAX_FRAME))
			return channel_broken(c, "the daemon sent no SHD1 frame", err);
	}
}

/* Wait for the answer that is due. @deadline: of clock_now_us.
 * Return: 0 (it is in c->in), -SHARDD_DEADLINE_EXCEEDED with native EAGAIN, or
 * another negative shardd_code. */
static int channel_await_frame(struct channel *c, uint64_t deadline, struct shardd_error *err)
{
	for (;;) {
		struct pollfd p = { .fd = c->fd, .events = POLLIN };
		int r = channel_read_frame(c, err);
		uint64_t now;

		if (r < 0)
			return r;
		if (r > 0)
			break;
		now = clock_now_us();
		if (now >= deadline)
			return channel_again(err);
		poll(&p, 1, (int)((deadline - now + 999) / 1000));
	}
	c->have = 0;
	c->waiting = false;
	if (c->in.h.tag != c->tag)
		return channel_broken(c, "an answer does not belong to a request", err);
	return 0;
}

/* The frame in c->in is an SHD1_ERROR: say so. */
static int channel_error_frame(struct channel *c, struct shardd_error *err)
{
	struct shd1_error *e = &c->in.error;
	int code = e->code && e->code <= 16 ? (int)e->code : SHARDD_UNKNOWN;

	e->text[sizeof(e->text) - 1] = 0;
	if (e->fatal)
		channel_broken(c, e->text, err);
	return error_set(err, (enum shardd_code)code, NULL, "local channel: %s", e->text);
}

/* The frame in c->in is an SHD1_ERROR, the answer to HELLO. A daemon that does not know the token, which Attach
 * has just given us, is a successor of the one that did: as if that one had closed the connection. */
static int channel_refused(struct channel *c, struct shardd_error *err)
{
	if (c->in.error.code != SHARDD_PERMISSION_DENIED)
		return channel_error_frame(c, err);
	c->in.error.text[sizeof(c->in.error.text) - 1] = 0;
	return channel_broken(c, c->in.error.text, err);
}

static bool channel_frame_is(const struct channel *c, uint16_t type, size_t bytes)
{
	return c->in.h.type == type && c->in.h.bytes == bytes;
}

static int channel_connect_to(const char *path, int *ret, struct shardd_error *err)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	struct timeval tv = { .tv_sec = CHANNEL_TIMEOUT_MS / 1000 };
	_cleanup_(fd_closep) int fd = -1;

	if (strlen(path) >= sizeof(sa.sun_path))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "socket",
				 "the socket path has %zu bytes; the maximum is %zu", strlen(path),
				 sizeof(sa.sun_path) - 1);
	strcpy(sa.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return error_os(err, SHARDD_INTERNAL, errno, "cannot create a socket");
	/* It also limits connect, which waits while the daemon's queue is full. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
	if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
		return error_os(err, SHARDD_UNAVAILABLE, errno, "cannot connect to %s", path);
	*ret = STEAL_FD(fd);
	return 0;
}

int channel_open(struct channel *c, const char *path, const uint8_t token[SHD1_TOKEN_BYTES],
		 uint64_t session, struct shardd_error *err)
{
	struct shd1_hello hello = { .version = SHD1_VERSION };
	int r;

	CHECK(c->fd < 0);
	memcpy(hello.token, token, sizeof(hello.token));
	r = channel_connect_to(path, &c->fd, err);
	if (r < 0)
		return r;
	r = channel_send_frame(c, &hello.h, SHD1_HELLO, sizeof(hello), err);
	if (r < 0)
		return r;
	r = channel_await_frame(c, clock_now_us() + CHANNEL_TIMEOUT_MS * 1000u, err);
	if (r < 0)
		return r;
	if (channel_frame_is(c, SHD1_ERROR, sizeof(c->in.error)))
		return channel_refused(c, err);
	if (!channel_frame_is(c, SHD1_WELCOME, sizeof(c->in.welcome)) ||
	    c->in.welcome.session != session)
		return channel_broken(
			c, "the daemon did not answer HELLO with WELCOME for this session", err);
	return 0;
}

int channel_exchange(struct channel *c, uint32_t slab, uint64_t deadline, struct shardd_error *err)
{
	struct shd1_get_slab get = { .slab = slab };
	int r = 0;

	if (c->fd < 0)
		return channel_closed(c, err);
	if (!c->waiting) {
		c->asked = slab;
		r = channel_send_frame(c, &get.h, SHD1_GET_SLAB, sizeof(get), err);
	}
	if (r == 0)
		r = channel_await_frame(c, deadline, err);
	if (r < 0)
		return r;
	if (channel_frame_is(c, SHD1_ERROR, sizeof(c->in.error)))
		return channel_error_frame(c, err);
	if (!channel_frame_is(c, SHD1_SLAB, sizeof(c->in.slab)) || c->in.slab.slab != c->asked)
		return channel_broken(c, "the daemon answered with an unexpected frame", err);
	c->arrived = true;
	return 0;
}

int channel_ring(struct channel *c, uint32_t part, int *ret_fd, uint64_t *ret_bytes,
		 struct shardd_error *err)
{
	struct shd1_get_ring get = { .part = part };
	int r;

	CHECK(!c->waiting && !c->arrived);
	if (c->fd < 0)
		return channel_closed(c, err);
	r = channel_send_frame(c, &get.h, SHD1_GET_RING, sizeof(get), err);
	if (r == 0)
		r = channel_await_frame(c, clock_now_us() + CHANNEL_TIMEOUT_MS * 1000u, err);
	if (r < 0)
		return r;
	if (channel_frame_is(c, SHD1_ERROR, sizeof(c->in.error)))
		return channel_error_frame(c, err);
	if (!channel_frame_is(c, SHD1_RING, sizeof(c->in.ring)) || c->in.ring.part != part)
		return channel_broken(c, "the daemon answered with an unexpected frame", err);
	c->forwarded = c->in_fd < 0;
	if (c->forwarded)
		return channel_broken(c, "the socket is forwarded", err);
	*ret_bytes = c->in.ring.bytes;
	*ret_fd = STEAL_FD(c->in_fd);
	return 0;
}
