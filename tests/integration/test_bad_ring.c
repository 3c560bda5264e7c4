/* Rings of a real daemon whose other end does what it should not: its own session ends, or
 * what it asked for is refused, and nobody else notices. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "failfix.h"
#include "fdcheck.h"
#include "local_abi.h"
#include "rawcall.h"
#include "rawsock.h"
#include "ring_abi.h"
#include "methods.h"
#include "trainfix.h"
#include "witness.h"

TestSuite(bad_ring, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

enum { OK = 0, INVALID_ARGUMENT = 3, FAILED_PRECONDITION = 9, UNIMPLEMENTED = 12 };

/* A client that writes into its ring as it likes. */
struct raw_ring {
	struct rpc_client *rpc;
	int channel, memory_fd, event_fd;
	struct ring_shared *s;
	struct ring_entry *sq, *cq;
	uint32_t tail, head; /* of sq, of cq */
};

/* A frame with a descriptor, or an error: -1. */
static int ask_part(int channel, uint32_t part, uint64_t *ret_bytes)
{
	struct shd1_get_ring get = { .h = { SHD1_MAGIC, SHD1_GET_RING, sizeof(get), 5, 0 },
				     .part = part };
	union {
		struct cmsghdr h;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	union {
		struct shd1_header h;
		struct shd1_ring ring;
		struct shd1_error error;
	} in = { 0 };
	struct iovec iov = { &in, sizeof(in) };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	struct cmsghdr *passed;
	int fd = -1;

	rawsock_send(channel, &get, sizeof(get));
	TRAINER_CHECK(recvmsg(channel, &msg, MSG_CMSG_CLOEXEC) > 0);
	if (in.h.type == SHD1_ERROR) {
		TRAINER_CHECK(!in.error.fatal && in.error.text[0]);
		return -1;
	}
	passed = CMSG_FIRSTHDR(&msg);
	TRAINER_CHECK(in.h.type == SHD1_RING && in.ring.part == part && passed);
	if (passed)
		memcpy(&fd, CMSG_DATA(passed), sizeof(fd));
	*ret_bytes = in.ring.bytes;
	return fd;
}

static int bound_channel(struct rpc_client *c, const char *socket)
{
	Shardd__V1__AttachRequest r = SHARDD__V1__ATTACH_REQUEST__INIT;
	struct shd1_hello hello = { .h = { SHD1_MAGIC, SHD1_HELLO, sizeof(hello), 7, 0 },
				    .version = SHD1_VERSION };
	Shardd__V1__AttachResponse *reply;
	struct shd1_welcome w;
	int fd = rawsock_connect(socket);

	r.protocol = 1;
	reply = raw_must(c, "Attach", &r.base);
	TRAINER_CHECK(reply->token.len == sizeof(hello.token) && reply->ring == RING_VERSION);
	memcpy(hello.token, reply->token.data, sizeof(hello.token));
	shardd__v1__attach_response__free_unpacked(reply, NULL);
	rawsock_send(fd, &hello, sizeof(hello));
	TRAINER_CHECK(rawsock_read(fd, &w, sizeof(w), 10) && w.h.type == SHD1_WELCOME);
	return fd;
}

static struct raw_ring ring_begin(const char *socket)
{
	struct raw_ring r = { .rpc = raw_connect(socket) };
	uint64_t bytes = 0, none;

	r.channel = bound_channel(r.rpc, socket);
	r.memory_fd = ask_part(r.channel, SHD1_RING_MEMORY, &bytes);
	r.event_fd = ask_part(r.channel, SHD1_RING_EVENT, &none);
	TRAINER_CHECK(r.memory_fd >= 0 && r.event_fd >= 0);
	r.s = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, r.memory_fd, 0);
	TRAINER_CHECK(r.s != MAP_FAILED && r.s->magic == RING_MAGIC && r.s->bytes == bytes);
	r.sq = (struct ring_entry *)((char *)r.s + r.s->sq);
	r.cq = (struct ring_entry *)((char *)r.s + r.s->cq);
	return r;
}

static void ring_end(struct raw_ring *r)
{
	munmap(r->s, r->s->bytes);
	close(r->memory_fd);
	close(r->event_fd);
	close(r->channel);
	rpc_client_close(r->rpc);
}

static void wake(const struct raw_ring *r)
{
	const uint64_t one = 1;

	TRAINER_CHECK(write(r->event_fd, &one, sizeof(one)) == sizeof(one));
}

static void put(struct raw_ring *r, uint16_t op, uint32_t bytes, const void *data)
{
	struct ring_entry *e = &r->sq[r->tail % r->s->entries];

	*e = (struct ring_entry){ .tag = r->tail, .op = op, .bytes = bytes };
	if (data)
		memcpy(e->data, data, bytes);
	atomic_store(&r->s->sq_tail, ++r->tail);
}

/* The next completion, which stays unread for the daemon. */
static struct ring_entry next(struct raw_ring *r)
{
	TRAINER_AWAIT(atomic_load(&r->s->cq_tail) != r->head, 20);
	return r->cq[r->head++ % r->s->entries];
}

static void expect(struct raw_ring *r, uint16_t code)
{
	struct ring_entry e = next(r);

	if (e.code != code)
		fprintf(stderr, "tag %llu: code %u instead of %u\n", (unsigned long long)e.tag,
			e.code, code);
	TRAINER_CHECK(e.code == code && e.tag == r->head - 1);
	TRAINER_CHECK(!code == !e.bytes);
	atomic_store(&r->s->cq_head, r->head);
}

static void expect_turned_out(struct raw_ring *r)
{
	TRAINER_CHECK(rawsock_closed(r->channel, 10));
	TRAINER_AWAIT(atomic_load(&r->s->closed) == 1, 20);
}

/* ------------------------------------------------------------------ cancels */

/* All ops with one tag, all bits set, and an event for each: ends in no time and harms no other. */
static int cancels_all(const struct trainer *t)
{
	struct raw_ring r = ring_begin(t->socket);

	for (unsigned i = 0; i < 3 * r.s->entries; i++) {
		for (unsigned k = 0; k < ARRAY_SIZE(r.s->cancels); k++)
			atomic_store(&r.s->cancels[k], UINT64_MAX);
		if (i < r.s->entries)
			put(&r, i % 2 ? 12 : RING_NOP, 0, NULL);
		r.sq[(r.tail - 1) % r.s->entries].tag = i % 3 ? 0 : UINT64_MAX;
		wake(&r);
	}
	TRAINER_AWAIT(atomic_load(&r.s->cq_tail) == r.s->entries, 20);
	ring_end(&r);
	return 0;
}

Test(bad_ring, cancels_of_everything)
{
	witness_trainer(NULL, "none", cancels_all, 60);
}

/* ------------------------------------------------------------------ what is refused */

static int refused(const struct trainer *t)
{
	struct raw_ring r;
	struct rpc_client *other = raw_connect(t->socket);
	int channel = bound_channel(other, t->socket);
	uint64_t bytes;

	/* no events before the memory, no part that is none */
	TRAINER_CHECK(ask_part(channel, SHD1_RING_EVENT, &bytes) < 0);
	TRAINER_CHECK(ask_part(channel, 9, &bytes) < 0);
	close(channel);
	rpc_client_close(other);

	r = ring_begin(t->socket);
	TRAINER_CHECK(ask_part(r.channel, SHD1_RING_MEMORY, &bytes) < 0);
	put(&r, RING_NOP, 0, NULL);
	for (unsigned i = 0; i < ARRAY_SIZE(r.s->cancels); i++) /* of no op */
		atomic_store(&r.s->cancels[i], UINT64_MAX);
	put(&r, 65534, 0, NULL);
	put(&r, 1, 0, NULL); /* Attach: no op */
	put(&r, 12, 3, "\xff\xff\xff");
	put(&r, 12, 0, NULL); /* Gather, but it is in no job */
	wake(&r);
	expect(&r, OK);
	expect(&r, UNIMPLEMENTED);
	expect(&r, UNIMPLEMENTED);
	expect(&r, INVALID_ARGUMENT);
	expect(&r, FAILED_PRECONDITION);
	/* the memory stays what it is */
	TRAINER_CHECK(ftruncate(r.memory_fd, 0) < 0 && ftruncate(r.memory_fd, 1 << 30) < 0);
	ring_end(&r);
	return 0;
}

Test(bad_ring, what_makes_no_sense_is_answered)
{
	witness_trainer(NULL, "none", refused, 60);
}

/* ------------------------------------------------------------------ what ends a session */

static int too_many(const struct trainer *t)
{
	struct raw_ring r = ring_begin(t->socket);

	atomic_store(&r.s->sq_tail, r.s->entries + 1);
	wake(&r);
	expect_turned_out(&r);
	ring_end(&r);
	return 0;
}

static int too_long(const struct trainer *t)
{
	struct raw_ring r = ring_begin(t->socket);

	put(&r, 12, RING_LONG_BYTES + 1, NULL);
	wake(&r);
	expect_turned_out(&r);
	ring_end(&r);
	return 0;
}

/* Completions are read that were never there. */
static int read_ahead(const struct trainer *t)
{
	struct raw_ring r = ring_begin(t->socket);

	atomic_store(&r.s->cq_head, 7);
	put(&r, RING_NOP, 0, NULL);
	wake(&r);
	expect_turned_out(&r);
	ring_end(&r);
	return 0;
}

Test(bad_ring, more_than_there_is_room_for)
{
	witness_trainer(NULL, "none", too_many, 60);
}

Test(bad_ring, longer_than_an_entry_can_be)
{
	witness_trainer(NULL, "none", too_long, 60);
}

Test(bad_ring, completions_read_before_they_are_there)
{
	witness_trainer(NULL, "none", read_ahead, 60);
}

/* ------------------------------------------------------------------ what costs nobody */

static void ask_status(struct raw_ring *r)
{
	Shardd__V1__GetStatusRequest ask = SHARDD__V1__GET_STATUS_REQUEST__INIT;

	shardd__v1__get_status_response__free_unpacked(
		raw_must(r->rpc, "Status/GetStatus", &ask.base), NULL);
}

/* The daemon takes what it has room for, and goes on when there is some. */
static int never_reads(const struct trainer *t)
{
	struct raw_ring r = ring_begin(t->socket);
	uint32_t n = r.s->entries;

	for (uint32_t i = 0; i < n; i++)
		put(&r, RING_NOP, 0, NULL);
	wake(&r);
	TRAINER_AWAIT(atomic_load(&r.s->cq_tail) == n, 20);
	for (uint32_t i = 0; i < n; i++)
		put(&r, RING_NOP, 0, NULL);
	wake(&r);
	/* the loop has seen the event when it has answered what came after it */
	for (unsigned i = 0; i < 2; i++)
		ask_status(&r);
	TRAINER_CHECK(atomic_load(&r.s->cq_tail) == n && atomic_load(&r.s->sq_head) == n);
	for (uint32_t i = 0; i < n; i++)
		expect(&r, OK);
	wake(&r);
	for (uint32_t i = 0; i < n; i++)
		expect(&r, OK);
	ring_end(&r);
	return 0;
}

Test(bad_ring, completions_that_nobody_reads)
{
	witness_trainer(NULL, "none", never_reads, 60);
}

/* The file of the events is the daemon's too: who makes it blocking and reads what woke the
 * daemon must not stop it. */
static int steals_events(const struct trainer *t)
{
	struct raw_ring r = ring_begin(t->socket);
	uint64_t end = clock_now_us() + 500000, count;
	unsigned n = 0;

	while (clock_now_us() < end) {
		for (unsigned i = 0; i < 100; i++) {
			wake(&r);
			TRAINER_CHECK(fcntl(r.event_fd, F_SETFL, O_NONBLOCK) == 0);
			(void)!read(r.event_fd, &count, sizeof(count));
			TRAINER_CHECK(fcntl(r.event_fd, F_SETFL, 0) == 0);
		}
		ask_status(&r);
		n++;
	}
	TRAINER_CHECK(n > 0);
	put(&r, RING_NOP, 0, NULL);
	wake(&r);
	expect(&r, OK);
	ring_end(&r);
	return 0;
}

Test(bad_ring, events_that_are_stolen)
{
	witness_trainer(NULL, "none", steals_events, 60);
}

/* ------------------------------------------------------------------ what it costs */

static uint64_t own_bytes(struct rpc_client *c)
{
	Shardd__V1__GetStatusRequest r = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	Shardd__V1__GetStatusResponse *s = raw_must(c, "Status/GetStatus", &r.base);
	uint64_t used = 0;

	for (size_t i = 0; i < s->n_users; i++)
		for (size_t k = 0; s->users[i]->uid == geteuid() && k < s->users[i]->n_usage; k++)
			if (strcmp(s->users[i]->usage[k]->name, "daemon_bytes") == 0)
				used = s->users[i]->usage[k]->used;
	shardd__v1__get_status_response__free_unpacked(s, NULL);
	return used;
}

static uint16_t number_of(const char *method)
{
	const struct method *m = methods_find(method);

	TRAINER_CHECK(m && m->carried);
	return m->number;
}

static void put_long(struct raw_ring *r, uint16_t op, const ProtobufCMessage *m)
{
	uint8_t *at = (uint8_t *)r->s + r->s->sq_long +
		      (size_t)(r->tail % r->s->entries) * RING_LONG_BYTES;
	size_t n = protobuf_c_message_get_packed_size(m);

	TRAINER_CHECK(n > RING_SHORT_BYTES && n <= RING_LONG_BYTES);
	protobuf_c_message_pack(m, at);
	put(r, op, (uint32_t)n, NULL);
}

/* A few bytes in the ring take many when they are unpacked; an op that waits keeps them. */
static int waits_with_large_requests(const struct trainer *t)
{
	enum { OPS = 100, POINTS = 400 };
	Shardd__V1__BarrierRequest b = SHARDD__V1__BARRIER_REQUEST__INIT;
	Shardd__V1__OpHeader header = SHARDD__V1__OP_HEADER__INIT;
	Shardd__V1__StreamPoint point = SHARDD__V1__STREAM_POINT__INIT, *points[POINTS];
	struct raw_ring r = ring_begin(t->socket);
	struct rpc_client *c = raw_connect(t->socket);
	uint16_t op = number_of("Barrier");
	uint64_t before;

	raw_join(r.rpc, "waits", 0, 1, false);
	for (unsigned i = 0; i < POINTS; i++)
		points[i] = &point;
	header.after = points;
	header.n_after = POINTS;
	b.header = &header;
	before = own_bytes(c);
	for (unsigned i = 0; i < OPS; i++) {
		header.seq = i + 2; /* and 1 never comes */
		put_long(&r, op, &b.base);
	}
	wake(&r);
	TRAINER_AWAIT(own_bytes(c) >= before + OPS * POINTS * sizeof(point), 20);
	ring_end(&r);
	TRAINER_AWAIT(own_bytes(c) < before, 20);
	rpc_client_close(c);
	return 0;
}

Test(bad_ring, requests_that_wait_are_their_users)
{
	witness_trainer(NULL, "none", waits_with_large_requests, 60);
}

/* Anything anywhere, with a job joined, again and again. */
static int scribbles(const struct trainer *t)
{
	unsigned random = 12345;

	for (unsigned turn = 0; turn < 40; turn++) {
		struct raw_ring r = ring_begin(t->socket);
		uint32_t *words = (uint32_t *)r.s;
		uint64_t n = r.s->bytes / sizeof(*words), bytes = r.s->bytes;

		raw_join(r.rpc, "scribble", 0, 1, false);
		for (unsigned i = 0; i < 2000; i++) {
			random = random * 1664525u + 1013904223u;
			words[i % 3 && n ? random % n : random % 128] =
				i % 2 ? random : random % 64; /* indices that may be right */
			if (i % 16 == 0)
				atomic_fetch_add(&r.s->sq_tail, 1);
			if (i % 50 == 0)
				wake(&r);
		}
		r.s->bytes = bytes;
		ring_end(&r);
	}
	return 0;
}

Test(bad_ring, anything_anywhere)
{
	witness_trainer(NULL, "scribble", scribbles, 100);
}
