/*
 * The node that has the bytes.
 *
 *   ARMED --a stream--> ASKED --its request is accepted--> OPEN --> the end
 *                       ASKED --refused, late--> ENDED         --> the end
 *                                                          OPEN --fails, stalls--> ENDED --> the end
 *
 * The loop checks who asks, and its owner opens what is behind the key. A stream takes one of the places for
 * fetches only then: one that never asks must not keep others from fetching. From then on the hands read a
 * chunk while core sends the one before it: two chunks of memory a stream. When core has nothing of it any
 * more the loop closes it.
 */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "peer/bulk_impl.h"

#define BULK_SERVE_MAGIC 0x73727665u
#define BULK_SERVE_ARMED 4u /* streams that are awaited at once */

enum bulk_state { BULK_ARMED, BULK_ASKED, BULK_OPEN, BULK_ENDED };

struct bulk_stream {
	uint32_t magic;
	atomic_uint refs;
	struct list link; /* b->served */
	struct peers *ps;
	enum bulk_state state;
	char at[PEER_PLACE_BYTES];
	char node[NAME_BYTES];
	struct bulk_source source;
	bool opened; /* its owner has */
	struct bulk_watch watch;
	struct work arrived, asked, over; /* on the loop */

	/* Core's. */
	grpc_call *call;
	gpr_timespec deadline;
	grpc_metadata_array initial;
	grpc_byte_buffer *payload;
	int cancelled;
	struct bulk_tag tags[6]; /* enum bulk_serve_tag */
	bool came;               /* what armed has brought */

	Shardd__V1__FetchRequest *request; /* the hands', then the loop's */

	/* The hands'. */
	pthread_mutex_t mu;
	uint64_t next;                    /* byte to read */
	grpc_byte_buffer *ready, *moving; /* waits to be sent; core sends it */

	atomic_bool waits;          /* core has a chunk that the other node has not taken */
	atomic_uint_least64_t sent; /* chunks that core has taken */
};

enum bulk_serve_tag {
	BULK_SERVE_ARRIVED,
	BULK_SERVE_REQUEST,
	BULK_SERVE_CLOSED,
	BULK_SERVE_BEGUN,
	BULK_SERVE_SENT,
	BULK_SERVE_STATUS
};

static void bulk_serve_move(struct bulk_stream *s, enum bulk_state state)
{
	s->ps->bulk->n_silent += state == BULK_ASKED;
	s->ps->bulk->n_silent -= s->state == BULK_ASKED;
	s->state = state;
}

/* ---------------------------------------------------------------------------------- the end */

static void bulk_serve_free(struct bulk_stream *s)
{
	struct peers *ps = s->ps;

	bulk_serve_move(s, BULK_ENDED);
	ps->bulk->n_open -= s->opened;
	list_unlink(&s->link);
	CHECK(!s->moving);
	if (s->call)
		grpc_call_unref(s->call);
	if (s->payload)
		grpc_byte_buffer_destroy(s->payload);
	if (s->ready)
		grpc_byte_buffer_destroy(s->ready);
	if (s->request)
		shardd__v1__fetch_request__free_unpacked(s->request, NULL);
	grpc_metadata_array_destroy(&s->initial);
	pthread_mutex_destroy(&s->mu);
	s->magic = 0;
	free(s);
	peers_drop(ps);
}

static void bulk_serve_on_over(struct work *w)
{
	struct bulk_stream *s = CONTAINER_OF(w, struct bulk_stream, over);
	struct bulk *b = s->ps->bulk;

	MAGIC_CHECK(s, BULK_SERVE_MAGIC);
	if (s->opened)
		b->ops->close(b->userdata, &s->source);
	bulk_serve_free(s);
}

/* Any thread; @s is the loop's then, if it was the last one. */
static void bulk_serve_unref(struct bulk_stream *s)
{
	if (atomic_fetch_sub(&s->refs, 1) == 1)
		loopq_post(s->ps->loopq, &s->over, bulk_serve_on_over);
}

static void bulk_serve_submit(struct bulk_stream *s, enum bulk_serve_tag tag, const grpc_op *ops,
			      size_t n)
{
	bulk_hands_submit(&s->tags[tag], &s->refs, s->call, ops, n);
}

/* ---------------------------------------------------------------------------------- the hands */

/* Any thread: the other node gets the status. */
static void bulk_serve_fail(struct bulk_stream *s, enum fault_code code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

static void bulk_serve_fail(struct bulk_stream *s, enum fault_code code, const char *fmt, ...)
{
	char why[PEER_WHY_BYTES];
	va_list args;

	va_start(args, fmt);
	vsnprintf(why, sizeof(why), fmt, args);
	va_end(args);
	peer_hello_clean(why);
	grpc_call_cancel_with_status(s->call, bulk_hands_status(code), why, NULL);
}

/* Return: 0 or negative errno. */
static int bulk_serve_pread(int fd, uint8_t *to, size_t bytes, uint64_t at)
{
	while (bytes) {
		ssize_t n = pread(fd, to, bytes, (off_t)at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -ENODATA;
		to += n;
		at += (uint64_t)n;
		bytes -= (size_t)n;
	}
	return 0;
}

/* Make the next chunk ready, if there is one. Return: 0 or negative errno. */
static int bulk_serve_read(struct bulk_stream *s)
{
	uint64_t left = s->source.size - s->next;
	size_t bytes = left < BULK_CHUNK_BYTES ? (size_t)left : BULK_CHUNK_BYTES;
	Shardd__V1__PeerHello hello;
	grpc_slice data;
	int r;

	if (s->ready || !bytes)
		return 0;
	data = grpc_slice_malloc(bytes);
	r = bulk_serve_pread(s->source.fd, GRPC_SLICE_START_PTR(data), bytes, s->next);
	if (r) {
		grpc_slice_unref(data);
		return r;
	}
	peer_hello_fill(s->ps, &hello);
	s->ready = bulk_wire_pack(s->next ? NULL : &hello, s->next ? 0 : s->source.size, s->next,
				  data);
	s->next += bytes;
	return 0;
}

static void bulk_serve_send(struct bulk_stream *s)
{
	grpc_op op = { .op = GRPC_OP_SEND_MESSAGE };

	s->moving = s->ready;
	s->ready = NULL;
	op.data.send_message.send_message = s->moving;
	atomic_store(&s->waits, true);
	bulk_serve_submit(s, BULK_SERVE_SENT, &op, 1);
}

static void bulk_serve_finish(struct bulk_stream *s)
{
	grpc_op op = { .op = GRPC_OP_SEND_STATUS_FROM_SERVER,
		       .data.send_status_from_server.status = GRPC_STATUS_OK };

	bulk_serve_submit(s, BULK_SERVE_STATUS, &op, 1);
}

/* Nothing is moving: the next one, or the end. */
static void bulk_serve_go_on(struct bulk_stream *s)
{
	int r = bulk_serve_read(s);

	if (r == 0 && !s->ready) {
		bulk_serve_finish(s);
		return;
	}
	if (r == 0) {
		bulk_serve_send(s);
		r = bulk_serve_read(s);
	}
	if (r)
		bulk_serve_fail(s, FAULT_INTERNAL, "node '%s' cannot read byte %llu: %s",
				s->ps->node, (unsigned long long)s->next,
				r == -ENODATA ? "there are fewer bytes" : strerror(-r));
}

static void bulk_serve_on_begun(void *stream, bool ok)
{
	struct bulk_stream *s = stream;

	MAGIC_CHECK(s, BULK_SERVE_MAGIC);
	pthread_mutex_lock(&s->mu);
	if (ok)
		bulk_serve_go_on(s);
	pthread_mutex_unlock(&s->mu);
	bulk_serve_unref(s);
}

static void bulk_serve_on_sent(void *stream, bool ok)
{
	struct bulk_stream *s = stream;

	MAGIC_CHECK(s, BULK_SERVE_MAGIC);
	pthread_mutex_lock(&s->mu);
	grpc_byte_buffer_destroy(s->moving);
	s->moving = NULL;
	atomic_store(&s->waits, false);
	atomic_fetch_add(&s->sent, 1);
	if (ok)
		bulk_serve_go_on(s);
	pthread_mutex_unlock(&s->mu);
	bulk_serve_unref(s);
}

/* The status is sent, or the stream has ended, in whatever way. */
static void bulk_serve_on_other(void *stream, bool ok)
{
	(void)ok;
	bulk_serve_unref(stream);
}

/* --------------------------------------------------------------------------------- the request */

/* In the loop: it ends without a byte. */
static void bulk_serve_refuse(struct bulk_stream *s, enum fault_code code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

static void bulk_serve_refuse(struct bulk_stream *s, enum fault_code code, const char *fmt, ...)
{
	char why[PEER_WHY_BYTES];
	va_list args;

	va_start(args, fmt);
	vsnprintf(why, sizeof(why), fmt, args);
	va_end(args);
	bulk_serve_move(s, BULK_ENDED);
	bulk_serve_fail(s, code, "%s", why);
}

/* May the other node have what it asks for? Return: false: it is refused. */
static bool bulk_serve_check(struct bulk_stream *s, const Shardd__V1__FetchRequest *m)
{
	const struct peers *ps = s->ps;
	char why[PEER_WHY_BYTES];

	if (!m || !m->hello)
		bulk_serve_refuse(s, FAULT_INVALID, "the node at %s has sent what is no request",
				  s->at);
	else if (peer_hello_check_call(ps, s->call, s->at, NULL, m->hello, why, sizeof(why)))
		bulk_serve_refuse(s, FAULT_DENIED, "%s", why);
	else if (strcmp(m->to, ps->node) != 0)
		bulk_serve_refuse(s, FAULT_DENIED,
				  "this is node '%s'; node '%s' asks for node '%.100s': correct "
				  "the address of that",
				  ps->node, m->hello->node, m->to);
	else if (!bulk_hands_key_is_good(m->key))
		bulk_serve_refuse(s, FAULT_INVALID,
				  "'%.100s' is not a key: use 1 to %u bytes of printable ASCII",
				  m->key, BULK_KEY_BYTES);
	else
		return true;
	return false;
}

/* Does it know how many there are? Return: false: it is refused. */
static bool bulk_serve_fits(struct bulk_stream *s, const Shardd__V1__FetchRequest *m)
{
	uint64_t size = s->source.size;

	if (m->bytes == size && size)
		return true;
	bulk_serve_refuse(s, FAULT_INVALID, "%llu bytes are asked for; node '%s' has %llu bytes",
			  (unsigned long long)m->bytes, s->ps->node, (unsigned long long)size);
	return false;
}

/* Those of @node that have something open. */
static unsigned bulk_serve_count(struct bulk *b, const char *node)
{
	struct bulk_stream *s, *tmp;
	unsigned n = 0;

	list_for_each (s, tmp, &b->served, link)
		n += s->opened && strcmp(s->node, node) == 0;
	return n;
}

/* Is there a place for one more of its node? Return: false: it is refused. */
static bool bulk_serve_has_place(struct bulk_stream *s)
{
	struct bulk *b = s->ps->bulk;

	if (b->n_open >= BULK_MAX_SERVED)
		bulk_serve_refuse(s, FAULT_EXHAUSTED,
				  "node '%s' serves %u fetches, the limit: try again later",
				  s->ps->node, BULK_MAX_SERVED);
	else if (bulk_serve_count(b, s->node) >= BULK_MAX_OF_NODE)
		bulk_serve_refuse(s, FAULT_EXHAUSTED,
				  "node '%s' serves %u fetches of node '%s', the limit of one: try "
				  "again later",
				  s->ps->node, BULK_MAX_OF_NODE, s->node);
	else
		return true;
	return false;
}

static bool bulk_serve_open(struct bulk_stream *s, const Shardd__V1__FetchRequest *m)
{
	struct bulk *b = s->ps->bulk;
	struct fault f = FAULT_NULL;

	text_copy(s->node, sizeof(s->node), m->hello->node);
	if (!b->ops) {
		bulk_serve_refuse(s, FAULT_UNAVAILABLE, "node '%s' has nothing to fetch yet",
				  s->ps->node);
	} else if (!bulk_serve_has_place(s)) {
		return false;
	} else if (b->ops->open(b->userdata, s->node, m->key, &s->source, &f)) {
		bulk_serve_refuse(s, f.code, "%.380s", f.text);
	} else {
		CHECK(s->source.fd >= 0 && s->source.size <= INT64_MAX);
		s->opened = true;
		b->n_open++;
		return bulk_serve_fits(s, m);
	}
	return false;
}

static void bulk_serve_on_asked(struct work *w)
{
	struct bulk_stream *s = CONTAINER_OF(w, struct bulk_stream, asked);
	grpc_op op = { .op = GRPC_OP_SEND_INITIAL_METADATA };

	MAGIC_CHECK(s, BULK_SERVE_MAGIC);
	if (s->state == BULK_ASKED && !s->ps->closing && bulk_serve_check(s, s->request)) {
		pthread_mutex_lock(&s->mu); /* what is set is seen by the hands */
		if (bulk_serve_open(s, s->request)) {
			bulk_serve_move(s, BULK_OPEN);
			s->watch.seen_us = clock_now_us();
			bulk_serve_submit(s, BULK_SERVE_BEGUN, &op, 1);
		}
		pthread_mutex_unlock(&s->mu);
	}
	bulk_serve_unref(s);
}

/* On a hand. */
static void bulk_serve_on_request(void *stream, bool ok)
{
	struct bulk_stream *s = stream;

	s->request = ok ? bulk_wire_request(s->payload) : NULL;
	loopq_post(s->ps->loopq, &s->asked, bulk_serve_on_asked);
}

/* --------------------------------------------------------------------------------- the stream */

/* Of an address with its port: the bytes before that. */
static size_t bulk_serve_host(const char *at)
{
	const char *port = strrchr(at, ':');

	return port ? (size_t)(port - at) : strlen(at);
}

/* Those from the host of @at that have not asked yet. */
static unsigned bulk_serve_count_silent(struct bulk *b, const char *at)
{
	size_t bytes = bulk_serve_host(at);
	struct bulk_stream *s, *tmp;
	unsigned n = 0;

	list_for_each (s, tmp, &b->served, link)
		n += s->state == BULK_ASKED && bulk_serve_host(s->at) == bytes &&
		     memcmp(s->at, at, bytes) == 0;
	return n;
}

/* Is there room for it until it asks? If not it is refused. */
static void bulk_serve_admit(struct bulk_stream *s)
{
	struct bulk *b = s->ps->bulk;

	if (bulk_serve_count_silent(b, s->at) > BULK_MAX_OF_HOST)
		bulk_serve_refuse(s, FAULT_EXHAUSTED,
				  "%u streams from the host of %s have not said what they want, "
				  "the limit of one at node '%s': try again later",
				  BULK_MAX_OF_HOST, s->at, s->ps->node);
	else if (b->n_silent > BULK_MAX_SILENT)
		bulk_serve_refuse(s, FAULT_EXHAUSTED,
				  "%u streams have not said what they want, the limit at node "
				  "'%s': try again later",
				  BULK_MAX_SILENT, s->ps->node);
}

static void bulk_serve_begin(struct bulk_stream *s)
{
	struct bulk *b = s->ps->bulk;
	grpc_op last = { .op = GRPC_OP_RECV_CLOSE_ON_SERVER,
			 .data.recv_close_on_server.cancelled = &s->cancelled };
	grpc_op first = { .op = GRPC_OP_RECV_MESSAGE,
			  .data.recv_message.recv_message = &s->payload };

	bulk_serve_move(s, BULK_ASKED);
	s->watch.seen_us = clock_now_us();
	peer_server_address(s->call, s->at);
	list_append(&b->served, &s->link);
	bulk_serve_submit(s, BULK_SERVE_CLOSED, &last, 1);
	bulk_serve_submit(s, BULK_SERVE_REQUEST, &first, 1);
	bulk_serve_admit(s);
}

static void bulk_serve_on_arrived(struct work *w)
{
	struct bulk_stream *s = CONTAINER_OF(w, struct bulk_stream, arrived);
	struct bulk *b = s->ps->bulk;

	MAGIC_CHECK(s, BULK_SERVE_MAGIC);
	b->n_armed--;
	if (!s->came || s->ps->closing) { /* nothing more comes */
		bulk_serve_free(s);
		return;
	}
	bulk_serve_arm(b);
	bulk_serve_begin(s);
	bulk_serve_unref(s);
}

/* On a hand. */
static void bulk_serve_on_stream(void *stream, bool ok)
{
	struct bulk_stream *s = stream;

	s->came = ok;
	loopq_post(s->ps->loopq, &s->arrived, bulk_serve_on_arrived);
}

static void (*const bulk_serve_fns[])(void *stream, bool ok) = {
	[BULK_SERVE_ARRIVED] = bulk_serve_on_stream, [BULK_SERVE_REQUEST] = bulk_serve_on_request,
	[BULK_SERVE_CLOSED] = bulk_serve_on_other,   [BULK_SERVE_BEGUN] = bulk_serve_on_begun,
	[BULK_SERVE_SENT] = bulk_serve_on_sent,      [BULK_SERVE_STATUS] = bulk_serve_on_other,
};

/* Return: false: no memory. */
static bool bulk_serve_arm_one(struct bulk *b)
{
	struct bulk_stream *s = calloc(1, sizeof(*s));

	if (!s)
		return false;
	s->magic = BULK_SERVE_MAGIC;
	s->ps = b->ps;
	s->refs = 1; /* until it has begun */
	list_init(&s->link);
	pthread_mutex_init(&s->mu, NULL);
	grpc_metadata_array_init(&s->initial);
	for (size_t i = 0; i < ARRAY_SIZE(bulk_serve_fns); i++)
		s->tags[i] = (struct bulk_tag){ bulk_serve_fns[i], s };
	peers_hold(b->ps);
	b->n_armed++;
	CHECK(grpc_server_request_registered_call(b->ps->server, b->method, &s->call, &s->deadline,
						  &s->initial, NULL, b->cq, b->cq,
						  &s->tags[BULK_SERVE_ARRIVED]) == GRPC_CALL_OK);
	return true;
}

void bulk_serve_arm(struct bulk *b)
{
	while (b->n_armed < BULK_SERVE_ARMED && bulk_serve_arm_one(b))
		;
}

/* -------------------------------------------------------------------------------- the owner */

void bulk_serve(struct peers *ps, const struct bulk_ops *ops, void *userdata)
{
	struct bulk *b = ps->bulk;

	CHECK(!b->ops && ops->open && ops->keeps && ops->close);
	b->ops = ops;
	b->userdata = userdata;
}

static void bulk_serve_tick_one(struct bulk_stream *s, uint64_t now_us, uint64_t blocked_us)
{
	const struct bulk *b = s->ps->bulk;
	uint64_t silent =
		bulk_hands_silent_us(&s->watch, atomic_load(&s->sent), now_us, blocked_us);

	if (s->state == BULK_ASKED && silent >= PEER_GREET_US)
		bulk_serve_refuse(s, FAULT_DEADLINE,
				  "the node at %s has not said what it wants within %u s", s->at,
				  PEER_GREET_US / 1000000);
	else if (s->state == BULK_OPEN && !b->ops->keeps(b->userdata, &s->source))
		bulk_serve_refuse(s, FAULT_ABORTED, "node '%s' does not keep it any more",
				  s->ps->node);
	else if (s->state == BULK_OPEN && !atomic_load(&s->waits))
		s->watch.seen_us = now_us; /* this node holds it up */
	else if (s->state == BULK_OPEN && silent >= BULK_STALL_US)
		bulk_serve_refuse(s, FAULT_ABORTED, "node '%s' at %s has taken nothing for %u s",
				  s->node, s->at, (unsigned)(BULK_STALL_US / 1000000));
}

void bulk_serve_tick(struct bulk *b, uint64_t now_us, uint64_t blocked_us)
{
	struct bulk_stream *s, *tmp;

	list_for_each (s, tmp, &b->served, link)
		bulk_serve_tick_one(s, now_us, blocked_us);
}

void bulk_serve_close(struct bulk *b)
{
	struct bulk_stream *s, *tmp;

	list_for_each (s, tmp, &b->served, link)
		bulk_serve_refuse(s, FAULT_UNAVAILABLE, "the daemon of node '%s' ends",
				  s->ps->node);
}
