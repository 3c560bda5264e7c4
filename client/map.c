#include "map.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"

#define CHANNEL_TIMEOUT_MS 10000

void map_init(struct map *m)
{
	*m = (struct map){ .fd = -1, .in_fd = -1 };
	pthread_mutex_init(&m->lock, NULL);
	snprintf(m->why, sizeof(m->why), "it was never opened");
}

void map_deinit(struct map *m)
{
	m->fd = fd_close(m->fd);
	m->in_fd = fd_close(m->in_fd);
	for (size_t i = 0; i < m->count; i++)
		munmap(m->items[i].base, m->items[i].bytes);
	free(STEAL_PTR(m->items));
	m->count = 0;
	m->room = 0;
}

/* ------------------------------------------------------------- the channel */

static int channel_closed(const struct map *m, struct shardd_error *err)
{
	return error_set(err, SHARDD_UNAVAILABLE, NULL,
			 "the local channel to the daemon is closed: %s", m->why);
}

/* The stream is of no use any more: what was mapped stays, nothing new comes. */
static int channel_broken(struct map *m, const char *why, struct shardd_error *err)
{
	m->fd = fd_close(m->fd);
	m->in_fd = fd_close(m->in_fd);
	m->waiting = false;
	m->have = 0;
	snprintf(m->why, sizeof(m->why), "%s", why);
	return channel_closed(m, err);
}

static int again(struct shardd_error *err)
{
	error_set(err, SHARDD_DEADLINE_EXCEEDED, NULL, "still waiting for the local channel");
	if (err)
		err->native = EAGAIN;
	return -SHARDD_DEADLINE_EXCEEDED;
}

static int send_frame(struct map *m, struct shd1_header *h, uint16_t type, uint16_t bytes,
		      struct shardd_error *err)
{
	ssize_t n;

	*h = (struct shd1_header){ SHD1_MAGIC, type, bytes, ++m->tag, 0 };
	do {
		n = send(m->fd, h, bytes, MSG_NOSIGNAL);
	} while (n < 0 && errno == EINTR);
	/* A few bytes go at once or not at all, unless the daemon stopped reading. */
	if (n != (ssize_t)bytes)
		return channel_broken(m, n < 0 ? strerrordesc_np(errno) : "a frame was cut", err);
	m->waiting = true;
	return 0;
}

/* Keep the one descriptor that came; a second one is nobody's. */
static void take_fds(struct map *m, struct msghdr *msg)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		int fd;

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < n; i++) {
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			fd_close(m->in_fd);
			m->in_fd = fd;
		}
	}
}

/* Read on in the frame under way. Return: 1 (complete), 0 (no more there yet), or
 * a negative shardd_code. */
static int read_frame(struct map *m, struct shardd_error *err)
{
	union {
		char bytes[CMSG_SPACE(4 * sizeof(int))];
		struct cmsghdr align;
	} control;

	for (;;) {
		size_t want = m->have < sizeof(m->in.h) ? sizeof(m->in.h) : m->in.h.bytes;
		struct iovec iov = { m->in.bytes + m->have, want - m->have };
		struct msghdr msg = { .msg_iov = &iov,
				      .msg_iovlen = 1,
				      .msg_control = control.bytes,
				      .msg_controllen = sizeof(control.bytes) };
		ssize_t n;

		if (m->have >= sizeof(m->in.h) && m->have == want)
			return 1;
		n = recvmsg(m->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return 0;
		if (n <= 0)
			return channel_broken(
				m, n < 0 ? strerrordesc_np(errno) : "the daemon closed it", err);
		take_fds(m, &msg);
		m->have += (size_t)n;
		if (m->have == sizeof(m->in.h) &&
		    (m->in.h.magic != SHD1_MAGIC || m->in.h.bytes < sizeof(m->in.h) ||
		     m->in.h.bytes > SHD1_MAX_FRAME))
			return channel_broken(m, "the daemon sent no SHD1 frame", err);
	}
}

/* Wait for the answer that is due. @deadline: of clock_now_us.
 * Return: 0 (it is in m->in), -SHARDD_DEADLINE_EXCEEDED with native EAGAIN, or
 * another negative shardd_code. */
static int await_frame(struct map *m, uint64_t deadline, struct shardd_error *err)
{
	for (;;) {
		struct pollfd p = { .fd = m->fd, .events = POLLIN };
		int r = read_frame(m, err);
		uint64_t now;

		if (r < 0)
			return r;
		if (r > 0)
			break;
		now = clock_now_us();
		if (now >= deadline)
			return again(err);
		poll(&p, 1, (int)((deadline - now + 999) / 1000));
	}
	m->have = 0;
	m->waiting = false;
	if (m->in.h.tag != m->tag)
		return channel_broken(m, "an answer came to a question that was not asked", err);
	return 0;
}

/* The frame in m->in is an SHD1_ERROR: say so. */
static int error_frame(struct map *m, struct shardd_error *err)
{
	struct shd1_error *e = &m->in.error;
	int code = e->code && e->code <= 16 ? (int)e->code : SHARDD_UNKNOWN;

	e->text[sizeof(e->text) - 1] = 0;
	if (e->fatal)
		channel_broken(m, e->text, err);
	return error_set(err, (enum shardd_code)code, NULL, "local channel: %s", e->text);
}

static bool frame_is(const struct map *m, uint16_t type, size_t bytes)
{
	return m->in.h.type == type && m->in.h.bytes == bytes;
}

static int channel_connect(const char *path, int *ret, struct shardd_error *err)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	struct timeval tv = { .tv_sec = CHANNEL_TIMEOUT_MS / 1000 };
	_cleanup_(fd_closep) int fd = -1;

	if (strlen(path) >= sizeof(sa.sun_path))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "socket",
				 "the socket path has %zu bytes, %zu are allowed", strlen(path),
				 sizeof(sa.sun_path) - 1);
	strcpy(sa.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return error_os(err, SHARDD_INTERNAL, errno, "cannot make a socket");
	/* It also limits connect, which waits while the daemon's queue is full. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
	if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
		return error_os(err, SHARDD_UNAVAILABLE, errno, "cannot connect to %s", path);
	*ret = STEAL_FD(fd);
	return 0;
}

int map_open(struct map *m, const char *path, const uint8_t token[SHD1_TOKEN_BYTES],
	     uint64_t session, struct shardd_error *err)
{
	struct shd1_hello hello = { .version = SHD1_VERSION };
	struct shardd_error scratch;
	int r;

	CHECK(m->fd < 0);
	err = err ? err : &scratch;
	memcpy(hello.token, token, sizeof(hello.token));
	r = channel_connect(path, &m->fd, err);
	if (r < 0)
		return r;
	r = send_frame(m, &hello.h, SHD1_HELLO, sizeof(hello), err);
	if (r < 0)
		return r;
	r = await_frame(m, clock_now_us() + CHANNEL_TIMEOUT_MS * 1000u, err);
	if (r < 0)
		return r;
	if (frame_is(m, SHD1_ERROR, sizeof(m->in.error)))
		return error_frame(m, err);
	if (!frame_is(m, SHD1_WELCOME, sizeof(m->in.welcome)) || m->in.welcome.session != session)
		return channel_broken(m, "the daemon did not say WELCOME to this session", err);
	return 0;
}

/* ------------------------------------------------------------------- slabs */

/* Where @slab is among the items, or where it belongs. */
static size_t position(const struct map *m, uint32_t slab)
{
	size_t low = 0;
	size_t high = m->count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (m->items[middle].slab < slab)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static struct mapping *find(struct map *m, uint32_t slab)
{
	size_t i = position(m, slab);

	return i < m->count && m->items[i].slab == slab ? &m->items[i] : NULL;
}

static int make_room(struct map *m, struct shardd_error *err)
{
	size_t room = m->room ? m->room * 2 : 16;
	struct mapping *bigger;

	if (m->count < m->room)
		return 0;
	bigger = realloc(m->items, room * sizeof(*bigger));
	if (!bigger)
		return error_memory(err);
	m->items = bigger;
	m->room = room;
	return 0;
}

/* Map the slab whose frame is in m->in and whose descriptor is m->in_fd. */
static int install(struct map *m, struct shardd_error *err)
{
	const struct shd1_slab *s = &m->in.slab;
	_cleanup_(fd_closep) int fd = STEAL_FD(m->in_fd);
	int protection = PROT_READ | (s->writable ? PROT_WRITE : 0);
	struct stat st;
	void *base;
	size_t at = position(m, s->slab);
	int r = make_room(m, err);

	if (r < 0)
		return r;
	/* Behind the end of the file every access would be a SIGBUS. */
	if (fd < 0 || fstat(fd, &st) < 0 || !s->bytes || (uint64_t)st.st_size < s->bytes)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "slab %u came without its %llu bytes of memory", s->slab,
				 (unsigned long long)s->bytes);
	base = mmap(NULL, s->bytes, protection, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno,
				"cannot map slab %u of %llu bytes", s->slab,
				(unsigned long long)s->bytes);
	memmove(m->items + at + 1, m->items + at, (m->count - at) * sizeof(*m->items));
	m->items[at] = (struct mapping){ s->slab, s->writable != 0, base, s->bytes };
	m->count++;
	return 0;
}

/* Take part in the exchange until @slab is mapped. Locked. */
static int fetch(struct map *m, uint32_t slab, uint64_t deadline, struct shardd_error *err)
{
	while (!find(m, slab)) {
		struct shd1_get_slab get = { .slab = slab };
		int r = 0;

		if (m->fd < 0)
			return channel_closed(m, err);
		if (!m->waiting) {
			m->asked = slab;
			r = send_frame(m, &get.h, SHD1_GET_SLAB, sizeof(get), err);
		}
		if (r == 0)
			r = await_frame(m, deadline, err);
		if (r < 0)
			return r;
		if (frame_is(m, SHD1_ERROR, sizeof(m->in.error)))
			r = error_frame(m, err);
		else if (frame_is(m, SHD1_SLAB, sizeof(m->in.slab)) && m->in.slab.slab == m->asked)
			r = install(m, err);
		else
			return channel_broken(m, "the daemon answered with another frame", err);
		/* What went wrong with another thread's slab it will be told itself. */
		if (r < 0 && m->asked == slab)
			return r;
	}
	return 0;
}

static int lock(struct map *m, int timeout_ms, struct shardd_error *err)
{
	if (timeout_ms == 0)
		return pthread_mutex_trylock(&m->lock) == 0 ? 0 : again(err);
	pthread_mutex_lock(&m->lock);
	return 0;
}

static int address(struct map *m, const struct map_place *p, void **ret, struct shardd_error *err)
{
	const struct mapping *found = find(m, p->slab);

	CHECK(found);
	if (p->offset > found->bytes || p->bytes > found->bytes - p->offset)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon placed %llu bytes at %llu in slab %u, which has %llu",
				 (unsigned long long)p->bytes, (unsigned long long)p->offset,
				 p->slab, (unsigned long long)found->bytes);
	if (p->writable && !found->writable)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon placed a buffer to be written in slab %u, which it "
				 "handed out read-only",
				 p->slab);
	*ret = found->base + p->offset;
	return 0;
}

int map_address(struct map *m, const struct map_place *p, int timeout_ms, void **ret,
		struct shardd_error *err)
{
	bool whole = timeout_ms < 0 || timeout_ms >= CHANNEL_TIMEOUT_MS;
	uint64_t limit = (uint64_t)(whole ? CHANNEL_TIMEOUT_MS : timeout_ms) * 1000u;
	struct shardd_error scratch;
	int r;

	err = err ? err : &scratch;
	r = lock(m, timeout_ms, err);
	if (r < 0)
		return r;
	r = fetch(m, p->slab, clock_now_us() + limit, err);
	if (r == -SHARDD_DEADLINE_EXCEEDED && err->native == EAGAIN && whole)
		r = error_set(err, SHARDD_UNAVAILABLE, NULL,
			      "the daemon did not hand over slab %u within %d s", p->slab,
			      CHANNEL_TIMEOUT_MS / 1000);
	if (r == 0)
		r = address(m, p, ret, err);
	pthread_mutex_unlock(&m->lock);
	return r;
}
