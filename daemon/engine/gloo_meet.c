#include "engine/gloo_meet.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "engine/engine.h"
#include "engine/gloo_card.h"

#define GLOO_MEET_MAGIC  "SHDGLOO1"
#define GLOO_MEET_SLICE  100 /* ms of a wait, to see that it is stopped */
#define GLOO_MEET_LATE   500 /* ms, to find out who is missing */
#define GLOO_MEET_AGAIN  50  /* ms from a failed call to the next one */
#define GLOO_MEET_ACCEPT 64  /* connections accepted before others are looked at */

/* A network that drops everything: data that nobody has acknowledged for so long end the connection, and
 * one without data is probed. So does a window that stays closed for so long; Gloo's thread reads always, and
 * sends data only to who waits for them. */
#define GLOO_MEET_SILENCE_MS 10000
#define GLOO_MEET_IDLE_S     5
#define GLOO_MEET_PROBE_S    1

/* What the member above sends first, and the answer of the one below. */
struct gloo_meet_hello {
	char magic[8];
	uint32_t from, to; /* members; network order */
	uint8_t token[GLOO_CARD_TOKEN];
};

static_assert(sizeof(struct gloo_meet_hello) == 48, "no padding");

/* A connection on which a greeting is expected. */
struct gloo_meet_line {
	int fd; /* -1: none */
	unsigned got;
	struct gloo_meet_hello hello; /* @got bytes of it */
};

/* A call to a member below. */
struct gloo_meet_call {
	struct gloo_meet_line line;
	bool connected;
	uint64_t again_us; /* without a connection: when to call */
	int error;         /* of the last call; 0: none failed */
};

struct gloo_meet {
	const struct gloo_meet_options *o;
	uint64_t end_us;
	int listener;
	uint8_t *cards; /* of all members */
	int *fds;       /* of members that have come; -1 */
	int missing;
	struct gloo_meet_line guests[GLOO_MEET_GUESTS]; /* the oldest first */
	unsigned n_guests;
	struct gloo_meet_call *calls; /* to member i below */
	struct pollfd *polled;        /* the listener, guests, calls */
	char *why;
	size_t why_bytes;
};

__attribute__((format(printf, 3, 4))) static int gloo_meet_fail(struct gloo_meet *m, int r,
								const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(m->why, m->why_bytes, format, args);
	va_end(args);
	return r;
}

static const uint8_t *gloo_meet_card(const struct gloo_meet *m, int member)
{
	return m->cards + (size_t)member * GLOO_CARD_BYTES;
}

static bool gloo_meet_is_late(const struct gloo_meet *m)
{
	return clock_now_us() >= m->end_us;
}

/* Of a listener: its connections, too. */
static int gloo_meet_limit_silence(int fd)
{
	const struct {
		int level, name, value;
	} options[] = { { SOL_SOCKET, SO_KEEPALIVE, 1 },
			{ IPPROTO_TCP, TCP_KEEPIDLE, GLOO_MEET_IDLE_S },
			{ IPPROTO_TCP, TCP_KEEPINTVL, GLOO_MEET_PROBE_S },
			{ IPPROTO_TCP, TCP_USER_TIMEOUT, GLOO_MEET_SILENCE_MS } };

	for (size_t i = 0; i < ARRAY_SIZE(options); i++)
		if (setsockopt(fd, options[i].level, options[i].name, &options[i].value,
			       sizeof(options[i].value)) < 0)
			return -1;
	return 0;
}

/* --------------------------------------------------------------------- the cards */

static int gloo_meet_listen(struct gloo_meet *m)
{
	struct sockaddr_storage address;
	socklen_t bytes = sizeof(address);
	uint8_t *card = m->cards + (size_t)m->o->rank * GLOO_CARD_BYTES;
	int r;

	m->listener =
		socket(m->o->address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (m->listener < 0 || gloo_meet_limit_silence(m->listener) < 0 ||
	    bind(m->listener, m->o->address, m->o->address_bytes) < 0 ||
	    listen(m->listener, SOMAXCONN) < 0 ||
	    getsockname(m->listener, (struct sockaddr *)&address, &bytes) < 0)
		return gloo_meet_fail(m, -errno, "there is no port to listen on: %s",
				      strerror(errno));
	r = gloo_card_make(card, m->o->size, &address);
	return r ? gloo_meet_fail(m, r, "no secret can be made: %s", strerror(-r)) : 0;
}

/* Return: 0, -ETIMEDOUT: who is missing was asked for, or another negative errno. */
static int gloo_meet_exchange(struct gloo_meet *m, struct comm_exchange *x)
{
	const struct comm_store *store = m->o->store;
	int r = -ETIMEDOUT;

	while (r == -ETIMEDOUT && !x->late) {
		if (m->o->stopped(m->o->userdata))
			return -ECANCELED;
		x->late = gloo_meet_is_late(m);
		r = store->exchange(store->userdata, x, x->late ? GLOO_MEET_LATE : GLOO_MEET_SLICE);
	}
	return r;
}

static int gloo_meet_not_exchanged(struct gloo_meet *m, int r, const struct comm_exchange *x)
{
	switch (r) {
	case -ECANCELED:
		return r;
	case -ETIMEDOUT:
		if (x->missing < 0)
			return gloo_meet_fail(m, r,
					      "not all members published their addresses in time");
		return gloo_meet_fail(m, r, "member %d did not publish its address in time",
				      x->missing);
	case -EPROTO:
		return gloo_meet_fail(m, r,
				      "the members do not agree on how many they are; here: %d",
				      m->o->size);
	case -EEXIST:
		return gloo_meet_fail(m, r, "another process has published an address as member %d",
				      m->o->rank);
	default:
		return gloo_meet_fail(m, r, "the addresses cannot be exchanged: %s", strerror(-r));
	}
}

static int gloo_meet_look_up(struct gloo_meet *m)
{
	uint8_t own[GLOO_CARD_BYTES];
	struct comm_exchange x = { .key = m->o->prefix,
				   .size = (unsigned)m->o->size,
				   .member = (unsigned)m->o->rank,
				   .bytes = sizeof(own),
				   .value = own,
				   .all = m->cards,
				   .missing = -1 };
	int r;

	memcpy(own, gloo_meet_card(m, m->o->rank), sizeof(own));
	r = gloo_meet_exchange(m, &x);
	if (r)
		return gloo_meet_not_exchanged(m, r, &x);
	for (int i = 0; i < m->o->size; i++)
		if (!gloo_card_check(gloo_meet_card(m, i), m->o->size))
			return gloo_meet_fail(m, -EBADMSG, "the address of member %d is malformed",
					      i);
	return 0;
}

/* ------------------------------------------------------------------------ greetings */

static bool gloo_meet_say(const struct gloo_meet *m, int fd, int to)
{
	struct gloo_meet_hello hello = { .from = htonl((uint32_t)m->o->rank),
					 .to = htonl((uint32_t)to) };

	memcpy(hello.magic, GLOO_MEET_MAGIC, sizeof(hello.magic));
	if (gloo_card_token(gloo_meet_card(m, to), m->o->rank, hello.token))
		return false;
	/* nothing else is in the socket's buffer, so it has room */
	return send(fd, &hello, sizeof(hello), MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(hello);
}

/* Not a byte more is read: what follows is Gloo's.
 * Return: 1: it is complete; 0: not yet; or negative errno: the connection is of no use. */
static int gloo_meet_hear(struct gloo_meet_line *l)
{
	ssize_t got =
		recv(l->fd, (char *)&l->hello + l->got, sizeof(l->hello) - l->got, MSG_DONTWAIT);

	if (got < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	if (got == 0)
		return -ECONNRESET;
	l->got += (unsigned)got;
	return l->got == sizeof(l->hello);
}

/* Return: the member that it is from, or -1: a stranger. */
static int gloo_meet_know(const struct gloo_meet *m, const struct gloo_meet_hello *hello)
{
	const uint32_t from = ntohl(hello->from);
	uint8_t token[GLOO_CARD_TOKEN];

	if (memcmp(hello->magic, GLOO_MEET_MAGIC, sizeof(hello->magic)) != 0 ||
	    hello->to != htonl((uint32_t)m->o->rank) || from >= (uint32_t)m->o->size ||
	    from == (uint32_t)m->o->rank)
		return -1;
	if (gloo_card_token(gloo_meet_card(m, m->o->rank), (int)from, token) ||
	    !gloo_card_is_token(hello->token, token))
		return -1;
	return (int)from;
}

static void gloo_meet_take(struct gloo_meet *m, int member, int fd)
{
	CHECK(m->fds[member] < 0);
	m->fds[member] = fd;
	m->missing--;
}

/* --------------------------------------------------------------------------- guests */

static void gloo_meet_forget(struct gloo_meet *m, unsigned i)
{
	memmove(&m->guests[i], &m->guests[i + 1], (m->n_guests - i - 1) * sizeof(m->guests[0]));
	m->n_guests--;
}

/* Return: whether it is still a guest. */
static bool gloo_meet_serve(struct gloo_meet *m, unsigned i)
{
	struct gloo_meet_line *l = &m->guests[i];
	int r = gloo_meet_hear(l), from;

	if (r == 0)
		return true;
	from = r > 0 ? gloo_meet_know(m, &l->hello) : -1;
	if (from > m->o->rank && m->fds[from] < 0 && gloo_meet_say(m, l->fd, from))
		gloo_meet_take(m, from, STEAL_FD(l->fd));
	fd_close(l->fd);
	gloo_meet_forget(m, i);
	return false;
}

static void gloo_meet_drop_oldest(struct gloo_meet *m)
{
	if (m->n_guests == 0)
		return;
	fd_close(m->guests[0].fd);
	gloo_meet_forget(m, 0);
}

/* Return: whether there may be more. */
static bool gloo_meet_accept(struct gloo_meet *m)
{
	int fd = accept4(m->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

	if (fd < 0) {
		if (errno == EMFILE || errno == ENFILE)
			gloo_meet_drop_oldest(m);
		return errno == ECONNABORTED || errno == EINTR;
	}
	if (m->n_guests == GLOO_MEET_GUESTS)
		gloo_meet_drop_oldest(m);
	m->guests[m->n_guests++] = (struct gloo_meet_line){ .fd = fd };
	gloo_meet_serve(m, m->n_guests - 1);
	return true;
}

/* ---------------------------------------------------------------------------- calls */

static void gloo_meet_call_again(struct gloo_meet_call *c, int error)
{
	c->line.fd = fd_close(c->line.fd);
	c->again_us = clock_now_us() + GLOO_MEET_AGAIN * 1000;
	c->error = error;
}

static void gloo_meet_call(struct gloo_meet *m, int member)
{
	struct gloo_meet_call *c = &m->calls[member];
	struct sockaddr_storage address;
	socklen_t bytes = gloo_card_address(gloo_meet_card(m, member), &address);

	c->connected = false;
	c->line = (struct gloo_meet_line){
		.fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)
	};
	if (c->line.fd < 0 || gloo_meet_limit_silence(c->line.fd) < 0 ||
	    (connect(c->line.fd, (struct sockaddr *)&address, bytes) < 0 && errno != EINPROGRESS))
		gloo_meet_call_again(c, errno);
}

static int gloo_meet_call_error(const struct gloo_meet_call *c)
{
	socklen_t bytes = sizeof(int);
	int error = 0;

	return getsockopt(c->line.fd, SOL_SOCKET, SO_ERROR, &error, &bytes) < 0 ? errno : error;
}

/* Return: 0: goes on; 1: answered; or negative errno. */
static int gloo_meet_call_step(struct gloo_meet *m, struct gloo_meet_call *c, int member)
{
	int r;

	if (!c->connected) {
		r = gloo_meet_call_error(c);
		if (r)
			return -r;
		c->connected = true;
		return gloo_meet_say(m, c->line.fd, member) ? 0 : -ECONNRESET;
	}
	r = gloo_meet_hear(&c->line);
	if (r <= 0)
		return r;
	return gloo_meet_know(m, &c->line.hello) == member ? 1 : -EPROTO;
}

static void gloo_meet_serve_call(struct gloo_meet *m, int member)
{
	struct gloo_meet_call *c = &m->calls[member];
	int r = gloo_meet_call_step(m, c, member);

	if (r > 0)
		gloo_meet_take(m, member, STEAL_FD(c->line.fd));
	else if (r < 0)
		gloo_meet_call_again(c, -r);
}

static bool gloo_meet_must_call(const struct gloo_meet *m, int member, uint64_t now_us)
{
	return m->fds[member] < 0 && m->calls[member].line.fd < 0 &&
	       now_us >= m->calls[member].again_us;
}

static void gloo_meet_call_all(struct gloo_meet *m)
{
	uint64_t now_us = clock_now_us();

	for (int i = 0; i < m->o->rank; i++)
		if (gloo_meet_must_call(m, i, now_us))
			gloo_meet_call(m, i);
}

/* ----------------------------------------------------------------------------- turns */

/* Return: entries. Those of members that have come, or are not called just now, are empty. */
static nfds_t gloo_meet_fill(struct gloo_meet *m)
{
	struct pollfd *p = m->polled;

	*p++ = (struct pollfd){ .fd = m->listener, .events = POLLIN };
	for (unsigned i = 0; i < m->n_guests; i++)
		*p++ = (struct pollfd){ .fd = m->guests[i].fd, .events = POLLIN };
	for (int i = 0; i < m->o->rank; i++)
		*p++ = (struct pollfd){ .fd = m->calls[i].line.fd,
					.events = m->calls[i].connected ? POLLIN : POLLOUT };
	return (nfds_t)(p - m->polled);
}

static void gloo_meet_turn(struct gloo_meet *m)
{
	const unsigned n_guests = m->n_guests;

	if (poll(m->polled, gloo_meet_fill(m), GLOO_MEET_AGAIN) <= 0)
		return;
	for (int i = 0; i < m->o->rank; i++)
		if (m->polled[1 + n_guests + (unsigned)i].revents)
			gloo_meet_serve_call(m, i);
	for (unsigned i = n_guests; i-- > 0;) /* who leaves moves only those behind it */
		if (m->polled[1 + i].revents)
			gloo_meet_serve(m, i);
	for (unsigned i = 0; m->polled[0].revents && i < GLOO_MEET_ACCEPT; i++)
		if (!gloo_meet_accept(m))
			break;
}

/* Somebody is missing. */
static int gloo_meet_name_missing(struct gloo_meet *m)
{
	int i = 0;

	while (i == m->o->rank || m->fds[i] >= 0)
		i++;
	if (i > m->o->rank)
		return gloo_meet_fail(m, -ETIMEDOUT, "member %d did not connect in time", i);
	return gloo_meet_fail(m, -ETIMEDOUT, "member %d cannot be reached: %s", i,
			      m->calls[i].error ? strerror(m->calls[i].error)
						: "it does not answer");
}

static int gloo_meet_all(struct gloo_meet *m)
{
	int r = gloo_meet_listen(m);

	if (r == 0)
		r = gloo_meet_look_up(m);
	while (r == 0 && m->missing > 0) {
		gloo_meet_call_all(m);
		gloo_meet_turn(m);
		if (m->o->stopped(m->o->userdata))
			r = -ECANCELED;
		else if (m->missing > 0 && gloo_meet_is_late(m))
			r = gloo_meet_name_missing(m);
	}
	return r;
}

/* -------------------------------------------------------------------------- the whole */

static bool gloo_meet_init(struct gloo_meet *m)
{
	const size_t n = (size_t)m->o->size;

	m->cards = calloc(n, GLOO_CARD_BYTES);
	m->fds = malloc(n * sizeof(*m->fds));
	m->calls = calloc(n, sizeof(*m->calls));
	m->polled = calloc(1 + GLOO_MEET_GUESTS + n, sizeof(*m->polled));
	if (!m->cards || !m->fds || !m->calls || !m->polled)
		return false;
	for (size_t i = 0; i < n; i++)
		m->fds[i] = m->calls[i].line.fd = -1;
	return true;
}

static void gloo_meet_deinit(struct gloo_meet *m)
{
	fd_close(m->listener);
	while (m->n_guests > 0)
		gloo_meet_drop_oldest(m);
	for (int i = 0; m->fds && i < m->o->size; i++)
		fd_close(m->fds[i]);
	for (int i = 0; m->calls && i < m->o->size; i++)
		fd_close(m->calls[i].line.fd);
	free(m->cards);
	free(m->fds);
	free(m->calls);
	free(m->polled);
}

int gloo_meet(const struct gloo_meet_options *options, int *ret_fds, char *why, size_t why_bytes)
{
	struct gloo_meet m = { .o = options,
			       .end_us = clock_now_us() + options->timeout_ms * 1000ull,
			       .listener = -1,
			       .missing = options->size - 1,
			       .why = why,
			       .why_bytes = why_bytes };
	int r = -ENOMEM;

	CHECK(options->size > 1 && options->rank >= 0 && options->rank < options->size);
	if (gloo_meet_init(&m))
		r = gloo_meet_all(&m);
	else
		gloo_meet_fail(&m, r, "no memory");
	if (r == 0)
		for (int i = 0; i < options->size; i++)
			ret_fds[i] = STEAL_FD(m.fds[i]);
	gloo_meet_deinit(&m);
	return r;
}
