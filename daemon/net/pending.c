#include "net/pending.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "local_abi.h"

#define PENDING_MAGIC     0x50454e44u
#define PENDING_SET_MAGIC 0x50534554u

enum {
	HELLO_BYTES = 4,
	RECHECK_US = 20 * 1000,
	/* gRPC connections of one user: each costs the loop about 0.1 ms (docs/security.md) */
	GRPC_BURST = 512,
	GRPC_A_SECOND = 400,
	LOG_AGAIN_US = 60 * 1000000,
};

struct pending_uid {
	struct list link;
	uid_t uid;
	unsigned n;
	unsigned n_turns; /* of these: in the set's turns */
	uint64_t dry_us;  /* the tick at which it had no turn left */
};

struct pending {
	uint32_t magic;
	int fd;
	struct pending_set *set;
	struct pending_uid *uid;
	struct conn_place place;
	struct list link;         /* in waiting */
	struct list partial_link; /* in partial */
	struct list turn_link;    /* in turns: it has said hello */
	uint64_t since_us;
	uv_poll_t poll;
};

enum hello { HELLO_GRPC, HELLO_LOCAL, HELLO_MORE, HELLO_GARBAGE };

static enum hello pending_classify(const uint8_t *data, size_t n)
{
	const uint32_t local = SHD1_MAGIC;
	const char grpc[] = { 'P', 'R', 'I', ' ' }; /* of the HTTP/2 connection preface */

	if (memcmp(data, grpc, n) == 0)
		return n < HELLO_BYTES ? HELLO_MORE : HELLO_GRPC;
	if (memcmp(data, &local, n) == 0)
		return n < HELLO_BYTES ? HELLO_MORE : HELLO_LOCAL;
	return HELLO_GARBAGE;
}

static struct pending_uid *pending_uid_get(struct pending_set *set, uid_t uid)
{
	struct pending_uid *u, *tmp;

	list_for_each (u, tmp, &set->uids, link) {
		if (u->uid == uid)
			return u;
	}
	u = calloc(1, sizeof(*u));
	if (!u)
		return NULL;
	u->uid = uid;
	list_init(&u->link);
	list_append(&set->uids, &u->link);
	return u;
}

/* An entry lives as long as a connection of its uid waits. */
static void pending_uid_put(struct pending_uid *u)
{
	if (u->n > 0)
		return;
	list_unlink(&u->link);
	free(u);
}

static void pending_on_poll_closed(uv_handle_t *handle)
{
	struct pending *p = handle->data;

	MAGIC_CHECK(p, PENDING_MAGIC);
	p->magic = 0;
	free(p);
}

/* Take it out of the set. @place: receives its charges. Return: its descriptor, the caller's. */
static int pending_take(struct pending *p, struct conn_place *place)
{
	int fd = STEAL_FD(p->fd);

	CHECK(p->set->count > 0 && p->uid->n > 0);
	p->set->count--;
	p->uid->n--;
	p->uid->n_turns -= !list_empty(&p->turn_link);
	list_unlink(&p->turn_link);
	pending_uid_put(p->uid);
	*place = p->place;
	p->place = CONN_PLACE_NULL;
	list_unlink(&p->link);
	list_unlink(&p->partial_link);
	uv_close((uv_handle_t *)&p->poll, pending_on_poll_closed);
	return fd;
}

static void pending_end(struct pending *p)
{
	struct conn_place place;

	fd_close(pending_take(p, &place));
	conn_place_give(&place);
}

static void pending_drop(struct pending *p, const char *why)
{
	log_debug("net", "connection closed before its hello uid=%u reason=\"%s\"", p->uid->uid,
		  why);
	pending_end(p);
}

/* The set may be closed when this returns. */
static void pending_hand_out(struct pending *p, enum conn_protocol protocol)
{
	struct pending_set *set = p->set;
	struct conn_place place;
	int fd = pending_take(p, &place);

	set->hello(set, protocol, fd, &place);
	conn_place_give(&place);
}

static void pending_on_timer(uv_timer_t *timer);

static void pending_arm(struct pending_set *set)
{
	uint64_t now = clock_now_us(), at;

	if (set->count == 0) {
		uv_timer_stop(&set->timer);
		return;
	}
	at = list_first(&set->waiting, struct pending, link)->since_us + set->timeout_us;
	if ((!list_empty(&set->partial) || !list_empty(&set->turns)) && set->recheck_at_us < at)
		at = set->recheck_at_us;
	uv_timer_start(&set->timer, pending_on_timer, at > now ? (at - now + 999) / 1000 : 1, 0);
}

static void pending_on_readable(uv_poll_t *poll, int status, int events);

/* Put @p into @list. The bytes stay in the socket, so it stays readable: polling on would wake the
 * loop all the time. The timer checks again. */
static void pending_park(struct pending *p, struct list *list, struct list *link)
{
	struct pending_set *set = p->set;

	uv_poll_start(&p->poll, UV_DISCONNECT, pending_on_readable);
	if (list_empty(&set->partial) && list_empty(&set->turns))
		set->recheck_at_us = clock_now_us() + RECHECK_US;
	list_append(list, link);
	pending_arm(set);
}

static bool pending_has_turn(struct pending_set *set, const struct pending_uid *u, uint64_t now)
{
	uint64_t skipped;

	return pace_take(&set->grpc, u->uid, now, &skipped);
}

static void pending_wait_turn(struct pending *p, uint64_t now)
{
	struct pending_set *set = p->set;

	if (!set->told_us || now - set->told_us >= LOG_AGAIN_US) {
		log_write(LOG_WARN, "net",
			  "gRPC connections wait their turn uid=%u at_once=%u per_second=%u",
			  p->uid->uid, GRPC_BURST, GRPC_A_SECOND);
		set->told_us = now;
	}
	p->uid->n_turns++;
	pending_park(p, &set->turns, &p->turn_link);
}

/* A client that opens many gRPC connections in a short time gets them one after the other, in the
 * order in which they said hello. */
static void pending_take_turn(struct pending *p)
{
	uint64_t now = clock_now_us();

	if (p->uid->n_turns || !pending_has_turn(p->set, p->uid, now))
		pending_wait_turn(p, now);
	else
		pending_hand_out(p, CONN_GRPC);
}

/* The first in turns whose user has one. Return: NULL: none has. */
static struct pending *pending_next_turn(struct pending_set *set, uint64_t now)
{
	struct pending *p, *tmp;

	list_for_each (p, tmp, &set->turns, turn_link) {
		if (p->uid->dry_us == now)
			continue;
		if (pending_has_turn(set, p->uid, now))
			return p;
		p->uid->dry_us = now;
	}
	return NULL;
}

/* Return: false: the set was closed. */
static bool pending_give_turns(struct pending_set *set, uint64_t now)
{
	struct pending *p;

	while ((p = pending_next_turn(set, now))) {
		pending_hand_out(p, CONN_GRPC);
		if (set->closed)
			return false;
	}
	return true;
}

static void pending_on_readable(uv_poll_t *poll, int status, int events)
{
	struct pending *p = poll->data;
	uint8_t data[HELLO_BYTES];
	enum hello hello;
	ssize_t n;

	MAGIC_CHECK(p, PENDING_MAGIC);
	if (status < 0 || !(events & UV_READABLE)) {
		pending_drop(p, "hung up");
		return;
	}
	n = recv(p->fd, data, sizeof(data), MSG_PEEK | MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		pending_drop(p, "hung up");
		return;
	}
	hello = pending_classify(data, (size_t)n);
	if (hello == HELLO_GARBAGE)
		pending_drop(p, "neither HTTP/2 nor SHD1");
	else if (hello == HELLO_MORE)
		pending_park(p, &p->set->partial, &p->partial_link);
	else if (hello == HELLO_GRPC)
		pending_take_turn(p);
	else
		pending_hand_out(p, CONN_LOCAL);
}

static void pending_drop_overdue(struct pending_set *set, uint64_t now)
{
	while (!list_empty(&set->waiting)) {
		struct pending *p = list_first(&set->waiting, struct pending, link);

		if (now < p->since_us + set->timeout_us)
			return;
		pending_drop(p, list_empty(&p->turn_link) ? "hello timeout"
							  : "no turn within the hello timeout");
	}
}

/* Those that sent a part: readable at once, if bytes are there already; on_readable decides. */
static void pending_look_again(struct pending_set *set)
{
	while (!list_empty(&set->partial)) {
		struct pending *p = list_first(&set->partial, struct pending, partial_link);

		list_unlink(&p->partial_link);
		uv_poll_start(&p->poll, UV_READABLE | UV_DISCONNECT, pending_on_readable);
	}
}

static void pending_on_timer(uv_timer_t *timer)
{
	struct pending_set *set = timer->data;
	uint64_t now = clock_now_us();

	MAGIC_CHECK(set, PENDING_SET_MAGIC);
	pending_drop_overdue(set, now);
	if (now >= set->recheck_at_us) {
		set->recheck_at_us = now + RECHECK_US;
		pending_look_again(set);
		if (!pending_give_turns(set, now))
			return;
	}
	pending_arm(set);
}

void pending_init(struct pending_set *set, uv_loop_t *loop, pending_hello_cb hello)
{
	*set = (struct pending_set){ .magic = PENDING_SET_MAGIC, .loop = loop, .hello = hello };
	set->grpc = (struct pace){ .burst = GRPC_BURST, .a_second = GRPC_A_SECOND };
	list_init(&set->waiting);
	list_init(&set->partial);
	list_init(&set->turns);
	list_init(&set->uids);
	uv_timer_init(loop, &set->timer);
	set->timer.data = set;
}

void pending_limits(struct pending_set *set, unsigned max_per_uid, uint64_t timeout_us)
{
	set->max_per_uid = max_per_uid;
	set->timeout_us = timeout_us;
	pending_arm(set);
}

/* Return: 0 or negative errno; @fd is taken only with 0. */
static int pending_add_watched(struct pending_set *set, int fd, struct pending_uid *uid,
			       struct conn_place *place)
{
	_cleanup_(freep) struct pending *p = calloc(1, sizeof(*p));
	int r;

	if (!p)
		return -ENOMEM;
	r = uv_poll_init(set->loop, &p->poll, fd);
	if (r < 0)
		return r;
	p->magic = PENDING_MAGIC;
	p->fd = fd;
	p->set = set;
	p->uid = uid;
	p->place = *place;
	*place = CONN_PLACE_NULL;
	p->since_us = clock_now_us();
	p->poll.data = p;
	list_init(&p->link);
	list_init(&p->partial_link);
	list_init(&p->turn_link);
	list_append(&set->waiting, &p->link);
	r = uv_poll_start(&p->poll, UV_READABLE, pending_on_readable);
	CHECK(r == 0);
	p = NULL;
	return 0;
}

int pending_add(struct pending_set *set, int fd, uid_t uid, struct conn_place *place)
{
	struct pending_uid *u = pending_uid_get(set, uid);
	int r = -ENOMEM;

	MAGIC_CHECK(set, PENDING_SET_MAGIC);
	if (u && set->max_per_uid > 0 && u->n >= set->max_per_uid)
		r = PENDING_E_LIMIT;
	else if (u)
		r = pending_add_watched(set, fd, u, place);
	if (r) {
		fd_close(fd);
		conn_place_give(place);
		if (u)
			pending_uid_put(u);
		return r;
	}
	u->n++;
	/* A later one is never due before those that wait already. */
	if (set->count++ == 0)
		pending_arm(set);
	return 0;
}

static void pending_on_timer_closed(uv_handle_t *handle)
{
	struct pending_set *set = handle->data;

	MAGIC_CHECK(set, PENDING_SET_MAGIC);
	set->magic = 0;
	set->closed(set);
}

void pending_close(struct pending_set *set, pending_closed_cb closed)
{
	MAGIC_CHECK(set, PENDING_SET_MAGIC);
	while (!list_empty(&set->waiting))
		pending_end(list_first(&set->waiting, struct pending, link));
	CHECK(set->count == 0 && list_empty(&set->uids));
	set->closed = closed;
	uv_close((uv_handle_t *)&set->timer, pending_on_timer_closed);
}
