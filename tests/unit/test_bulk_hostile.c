/* Fetches from what is no daemon, and what is no daemon that fetches. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bulkfix.h"
#include "crc32c.h"
#include "core/clock.h"
#include "rawsock.h"

#define MIB (UINT64_C(1) << 20)

TestSuite(bulk_hostile, .init = peerfix_begin, .fini = peerfix_end, .timeout = 120);

#define expect_text(text, part) \
	cr_expect(strstr((text), (part)), "'%s' does not say '%s'", (text), (part))

/* ---------------------------------------------------------------------- one that is no daemon */

/* A server of HTTP/2 that answers the one stream with what the test gives it. */
struct fake {
	int listens, fd;
	char at[32];
	uint8_t in[65536]; /* all that has come */
	size_t n;
	uint64_t sent; /* bytes of frames of data */
};

static void fake_begin(struct fake *x)
{
	struct sockaddr_in at = { .sin_family = AF_INET,
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t bytes = sizeof(at);

	*x = (struct fake){ .fd = -1, .listens = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0) };
	cr_assert_eq(bind(x->listens, (struct sockaddr *)&at, sizeof(at)), 0);
	cr_assert_eq(listen(x->listens, 8), 0);
	cr_assert_eq(getsockname(x->listens, (struct sockaddr *)&at, &bytes), 0);
	snprintf(x->at, sizeof(x->at), "127.0.0.1:%u", ntohs(at.sin_port));
}

static bool fake_accepted(void *arg)
{
	struct fake *x = arg;

	x->fd = accept4(x->listens, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	return x->fd >= 0;
}

static uint32_t fake_u32(const uint8_t *at)
{
	return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* What the frames behind the preface say: the kinds that there were (bits), and how much may be sent on the
 * connection, and on the stream, in all. */
static unsigned fake_look(struct fake *x, uint64_t ret[2])
{
	ssize_t r = recv(x->fd, x->in + x->n, sizeof(x->in) - x->n, 0);
	unsigned kinds = 0;

	ret[0] = ret[1] = 65535;
	x->n += r > 0 ? (size_t)r : 0;
	for (size_t at = 24, bytes; at + 9 <= x->n; at += 9 + bytes) {
		const uint8_t *f = x->in + at;

		bytes = fake_u32(f) >> 8;
		if (at + 9 + bytes > x->n)
			break;
		kinds |= 1u << f[3];
		if (f[3] == H2_WINDOW)
			ret[fake_u32(f + 5) != 0] += fake_u32(f + 9);
		for (size_t i = 0; f[3] == H2_SETTINGS && i + 6 <= bytes; i += 6)
			if (f[9 + i] == 0 && f[10 + i] == 4) /* of a stream, at first */
				ret[1] += (uint64_t)fake_u32(f + 11 + i) - 65535;
	}
	return kinds;
}

static bool fake_asked(void *arg)
{
	uint64_t windows[2];

	return fake_look(arg, windows) & 1u << H2_HEADERS;
}

#define FAKE_FRAME 16384u

static bool fake_may_send(void *arg)
{
	struct fake *x = arg;
	uint64_t windows[2], most = x->sent + FAKE_FRAME;

	fake_look(x, windows);
	return most <= windows[0] && most <= windows[1];
}

/* Wait for the stream, and begin the answer. */
static void fake_answer(struct fake *x)
{
	/* :status 200, content-type application/grpc */
	static const char block[] = "\x88\x0f\x10\x10"
				    "application/grpc";

	fcntl(x->listens, F_SETFL, O_NONBLOCK);
	looprun_until(&peerfix.run, fake_accepted, x, 30);
	rawsock_h2_frame(x->fd, H2_SETTINGS, 0, 0, NULL, 0);
	looprun_until(&peerfix.run, fake_asked, x, 30);
	rawsock_h2_frame(x->fd, H2_HEADERS, H2_END_HEADERS, 1, block, sizeof(block) - 1);
}

/* A message. */
static void fake_bytes(struct fake *x, const uint8_t *data, size_t bytes)
{
	uint8_t *all = calloc(1, bytes + 5);

	cr_assert(all);
	for (unsigned i = 0; i < 4; i++)
		all[1 + i] = (uint8_t)(bytes >> (24 - 8 * i));
	memcpy(all + 5, data, bytes);
	bytes += 5;
	for (size_t at = 0; at < bytes; at += FAKE_FRAME) {
		size_t n = bytes - at < FAKE_FRAME ? bytes - at : FAKE_FRAME;

		looprun_until(&peerfix.run, fake_may_send, x, 30);
		rawsock_h2_frame(x->fd, H2_DATA, 0, 1, all + at, n);
		x->sent += n;
	}
	free(all);
}

/* @bytes bytes from @offset on. */
static void fake_chunk(struct fake *x, bool first, uint64_t total, uint64_t offset, uint64_t bytes,
		       uint32_t flip)
{
	Shardd__V1__FetchChunk m = SHARDD__V1__FETCH_CHUNK__INIT;
	Shardd__V1__PeerHello h = SHARDD__V1__PEER_HELLO__INIT;
	uint8_t *data = calloc(1, bytes + 1), *packed;

	cr_assert(data);
	data[0] = 7;
	h.node = (char *)"b";
	h.cluster = (char *)"test";
	h.protocol = 1;
	h.instance = (ProtobufCBinaryData){ 16, (uint8_t *)"0123456789abcdef" };
	m.hello = first ? &h : NULL;
	m.total = total;
	m.offset = offset;
	m.data = (ProtobufCBinaryData){ bytes, data };
	m.crc = crc32c_add(0, data, bytes) ^ flip;
	packed = malloc(shardd__v1__fetch_chunk__get_packed_size(&m));
	cr_assert(packed);
	fake_bytes(x, packed, shardd__v1__fetch_chunk__pack(&m, packed));
	free(packed);
	free(data);
}

static void fake_end(struct fake *x)
{
	close(x->fd);
	close(x->listens);
}

struct bad {
	const char *part;
	uint64_t bytes, total; /* asked for; said to be */
	uint64_t first, offset,
		second; /* bytes of the first chunk; the second one; without @two there is
					 * none */
	bool hello, two;
	uint32_t flip;
};

Test(bulk_hostile, chunks_that_are_wrong)
{
	static const struct bad cases[] = {
		{ "have another checksum (CRC-32C)", 100, 100, 100, 0, 0, true, false, 1 },
		{ "the first chunk does not say", 100, 100, 100, 0, 0, false, false, 0 },
		{ "wants to send 150 bytes instead of 200", 200, 150, 150, 0, 0, true, false, 0 },
		{ "a chunk begins at byte 1048575; byte 1048576 is", MIB + 100, MIB + 100, MIB,
		  MIB - 1, 100, true, true, 0 },
		{ "a chunk begins at byte 1048577; byte 1048576 is", MIB + 100, MIB + 100, MIB,
		  MIB + 1, 99, true, true, 0 },
		{ "a chunk has 101 bytes behind 0 of 100", 100, 100, 101, 0, 0, true, false, 0 },
		{ "a chunk has 1 bytes behind 0 of 300; 300", 300, 300, 1, 0, 0, true, false, 0 },
		{ "a chunk has 0 bytes behind 0 of 300", 300, 300, 0, 0, 0, true, false, 0 },
		{ "a chunk has 1 bytes behind 0 of 2097152; 1048576", 2 * MIB, 2 * MIB, 1, 0, 0,
		  true, false, 0 },
		{ "a chunk has 99 bytes behind 1048576 of 1048676", MIB + 100, MIB + 100, MIB, MIB,
		  99, true, true, 0 },
		{ "a chunk has 0 bytes behind 100 of 100", 100, 100, 100, 100, 0, true, true, 0 },
	};
	struct peerfix_node *a = peerfix_node("a", NULL);

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		const struct bad *c = &cases[i];
		struct fake x;
		struct bulkfix_get g;

		fake_begin(&x);
		bulkfix_begin(&g, a, x.at, "bytes", c->bytes);
		fake_answer(&x);
		fake_chunk(&x, c->hello, c->total, 0, c->first, c->flip);
		if (c->two)
			fake_chunk(&x, false, 0, c->offset, c->second, 0);
		bulkfix_end(&g);
		cr_expect_eq(g.f.code, FAULT_ABORTED, "%s", g.f.text);
		expect_text(g.f.text, "fetching 'bytes' of node 'b': ");
		expect_text(g.f.text, c->part);
		cr_expect_eq(g.bytes, c->two ? c->first : 0);
		fake_end(&x);
	}
}

Test(bulk_hostile, what_is_no_chunk)
{
	static const char *const cases[] = { "\x7a\x05"
					     "abc",
					     "\xff\xff\xff",
					     "\x0a\x7f"
					     "a",
					     "\x7a\x01"
					     "ab",
					     "\x23"
					     "abcd" };
	struct peerfix_node *a = peerfix_node("a", NULL);

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct fake x;
		struct bulkfix_get g;

		fake_begin(&x);
		bulkfix_begin(&g, a, x.at, "bytes", 100);
		fake_answer(&x);
		fake_bytes(&x, (const uint8_t *)cases[i], strlen(cases[i]));
		bulkfix_refused(&g, FAULT_ABORTED, "has sent what is no chunk");
		fake_end(&x);
	}
}

static bool has_one(void *arg)
{
	const struct bulkfix_get *g = arg;

	return bulk_bytes(g->x) == MIB;
}

Test(bulk_hostile, one_that_dies_in_the_middle)
{
	struct peerfix_node *a = peerfix_node("a", NULL);
	struct fake x;
	struct bulkfix_get g;

	fake_begin(&x);
	bulkfix_begin(&g, a, x.at, "bytes", 2 * MIB);
	fake_answer(&x);
	fake_chunk(&x, true, 2 * MIB, 0, MIB, 0);
	looprun_until(&peerfix.run, has_one, &g, 30);
	fake_end(&x);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE, "%s", g.f.text);
	expect_text(g.f.text, "node 'b' was lost behind 1048576 of 2097152 bytes");
	cr_expect_eq(g.bytes, MIB);
}

/* The status is that all went well. */
Test(bulk_hostile, one_that_ends_too_early)
{
	static const char trailers[] = "\x00\x0bgrpc-status\x01"
				       "0";
	struct peerfix_node *a = peerfix_node("a", NULL);
	struct fake x;
	struct bulkfix_get g;

	fake_begin(&x);
	bulkfix_begin(&g, a, x.at, "bytes", 2 * MIB);
	fake_answer(&x);
	fake_chunk(&x, true, 2 * MIB, 0, MIB, 0);
	rawsock_h2_frame(x.fd, H2_HEADERS, H2_END_HEADERS | H2_END_STREAM, 1, trailers,
			 sizeof(trailers) - 1);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_ABORTED, "%s", g.f.text);
	expect_text(g.f.text, "node 'b' has ended it behind 1048576 of 2097152 bytes");
	fake_end(&x);
}

Test(bulk_hostile, one_that_stalls)
{
	struct peerfix_node *a = peerfix_node("a", NULL);
	struct fault f = FAULT_NULL;
	struct bulk_want w = { .node = "b", .key = "bytes", .bytes = 2 * MIB, .idle_us = 300000 };
	struct bulkfix_get g = { .fd = bulkfix_file(0, false) };
	uint64_t began = clock_now_us();
	struct fake x;

	fake_begin(&x);
	w.address = x.at;
	w.fd = g.fd;
	cr_assert_eq(bulk_fetch(a->ps, &w, bulkfix_on_done, &g, &g.x, &f), 0);
	fake_answer(&x);
	fake_chunk(&x, true, 2 * MIB, 0, MIB, 0);
	looprun_flag(&peerfix.run, &g.ended, 30);
	cr_expect_eq(g.f.code, FAULT_DEADLINE, "%s", g.f.text);
	expect_text(g.f.text, "fetching 'bytes' of node 'b': it has sent nothing for 0.30 s");
	cr_expect_geq(clock_now_us() - began, 300000u);
	bulkfix_end(&g);
	fake_end(&x);
}

/* A stream that the test begins at @n by hand, from 127.0.0.@host. Return: its socket. */
static int raw_stream_from(struct peerfix_node *n, unsigned host)
{
	struct sockaddr_in from = { .sin_family = AF_INET,
				    .sin_addr.s_addr = htonl(0x7f000000 + host) };
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
				  .sin_port = htons(peers_port(n->ps)) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	cr_assert_eq(bind(fd, (struct sockaddr *)&from, sizeof(from)), 0);
	cr_assert_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
	rawsock_h2_begin(fd);
	cr_assert(rawsock_h2_headers(fd, 1, "/shardd.v1.PeerService/Fetch"));
	return fd;
}

static int raw_stream(struct peerfix_node *n)
{
	return raw_stream_from(n, 1);
}

/* What the node says in the end. It has closed neither stream nor connection before. */
struct said {
	int fd;
	const char *part;
	size_t n;
	char text[65536];
};

static bool raw_said(void *arg)
{
	struct said *x = arg;
	ssize_t r;

	while ((r = recv(x->fd, x->text + x->n, sizeof(x->text) - x->n, MSG_DONTWAIT)) > 0) {
		x->n += (size_t)r;
		if (memmem(x->text, x->n, x->part, strlen(x->part)))
			return true;
		if (x->n > sizeof(x->text) / 2) { /* the begin is not looked for */
			memmove(x->text, x->text + x->n - 1024, 1024);
			x->n = 1024;
		}
	}
	return false;
}

static void raw_await(int fd, const char *part)
{
	struct said *x = calloc(1, sizeof(*x));

	cr_assert(x);
	x->fd = fd;
	x->part = part;
	looprun_until(&peerfix.run, raw_said, x, 30);
	free(x);
	close(fd);
}

/* Of node @node. */
static void raw_request(int fd, const char *node, const char *key)
{
	Shardd__V1__FetchRequest m = SHARDD__V1__FETCH_REQUEST__INIT;
	Shardd__V1__PeerHello h = SHARDD__V1__PEER_HELLO__INIT;
	uint8_t frame[2048] = { 0 };
	size_t n;

	h.node = (char *)node;
	h.cluster = (char *)"test";
	h.protocol = 1;
	h.instance = (ProtobufCBinaryData){ 16, (uint8_t *)"0123456789abcdef" };
	m.hello = &h;
	m.to = (char *)"b";
	m.key = (char *)key;
	m.bytes = 10 * MIB;
	n = shardd__v1__fetch_request__pack(&m, frame + 5);
	frame[3] = (uint8_t)(n >> 8);
	frame[4] = (uint8_t)n;
	rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, frame, n + 5);
}

/* @us pass for @n, in steps in which it looks. */
static void pass(struct peerfix_node *n, uint64_t us)
{
	uint64_t now = clock_now_us();

	peerfix.held = true;
	for (uint64_t until = now + us; now < until;) {
		now += 200000;
		clock_fake(now);
		peers_tick(n->ps, now);
	}
}

struct opens {
	const struct bulkfix_owner *o;
	unsigned wanted;
};

static bool opened_all(void *arg)
{
	const struct opens *x = arg;

	return x->o->opens == x->wanted;
}

/* Streams @from to @to, of node @node, which takes nothing. */
static void raw_streams(struct peerfix_node *n, const struct bulkfix_owner *o, int *fds,
			unsigned from, unsigned to, const char *node)
{
	struct opens x = { o, o->opens + to - from };

	for (unsigned i = from; i < to; i++) {
		fds[i] = raw_stream(n);
		raw_request(fds[i], node, "bytes");
	}
	looprun_until(&peerfix.run, opened_all, &x, 30);
}

static bool closed_all(void *arg)
{
	const struct bulkfix_owner *o = arg;

	return o->opens == o->closes;
}

static void raw_end(struct bulkfix_owner *o, const int *fds, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		close(fds[i]);
	looprun_until(&peerfix.run, closed_all, o, 30);
}

static void fetch_all(struct peerfix_node *from, struct peerfix_node *to)
{
	struct bulkfix_get g;

	bulkfix_begin(&g, from, to->at, "bytes", 10 * MIB);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, 0, "%s", g.f.text);
}

/* The window of its stream is 64 KiB, and it does not make it larger. */
Test(bulk_hostile, one_that_takes_nothing)
{
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, 10 * MIB);
	int fd;

	raw_streams(b, &o, &fd, 0, 1, "a");
	peerfix_turn(200);
	pass(b, BULK_STALL_US - 2000000);
	cr_expect_eq(o.closes, 0);
	pass(b, 3000000);
	clock_real();
	raw_await(fd, "has taken nothing for 30 s");
	bulkfix_close(&o);
}

static bool ticked(void *arg)
{
	uint64_t *n = arg;

	return ++*n > 50;
}

/* It took all places. */
Test(bulk_hostile, one_that_begins_too_many_streams)
{
	int fds[BULK_MAX_OF_NODE + 1];
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, 10 * MIB), *c = peerfix_node("c", NULL);

	raw_streams(b, &o, fds, 0, BULK_MAX_OF_NODE, "a");
	fds[BULK_MAX_OF_NODE] = raw_stream(b);
	raw_request(fds[BULK_MAX_OF_NODE], "a", "bytes");
	raw_await(fds[BULK_MAX_OF_NODE], "serves 16 fetches of node 'a', the limit");
	fetch_all(c, b);
	raw_end(&o, fds, BULK_MAX_OF_NODE);
	bulkfix_close(&o);
}

Test(bulk_hostile, more_streams_than_are_served)
{
	static const char *const names[] = { "n0", "n1", "n2", "n3" };
	int fds[BULK_MAX_SERVED];
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, 10 * MIB), *c = peerfix_node("c", NULL);
	struct bulkfix_get g;

	for (unsigned i = 0; i < BULK_MAX_SERVED; i += BULK_MAX_OF_NODE)
		raw_streams(b, &o, fds, i, i + BULK_MAX_OF_NODE, names[i / BULK_MAX_OF_NODE]);
	bulkfix_begin(&g, c, b->at, "bytes", 10 * MIB);
	bulkfix_refused(&g, FAULT_EXHAUSTED, "node 'b' serves 64 fetches, the limit");
	raw_end(&o, fds, BULK_MAX_SERVED);
	fetch_all(c, b);
	bulkfix_close(&o);
}

/* Streams that ask for nothing. */
struct silent {
	int fds[BULK_MAX_SILENT];
	bool refused[BULK_MAX_SILENT];
	unsigned n, wanted; /* so many of them must be refused, with this text */
	const char *part;
};

/* Those that are refused are closed. */
static bool silent_refused(void *arg)
{
	struct silent *x = arg;
	unsigned n = 0;
	char text[4096];

	for (unsigned i = 0; i < x->n; i++) {
		ssize_t r = x->refused[i] ? 0 : recv(x->fds[i], text, sizeof(text), MSG_DONTWAIT);

		if (r > 0 && memmem(text, (size_t)r, x->part, strlen(x->part))) {
			x->refused[i] = true;
			close(x->fds[i]);
		}
		n += x->refused[i];
	}
	cr_assert_leq(n, x->wanted);
	return n == x->wanted;
}

/* @n of them from 127.0.0.@host, of which @refused are refused. */
static void silent_begin(struct silent *x, struct peerfix_node *to, unsigned host, unsigned n,
			 unsigned refused)
{
	*x = (struct silent){ .n = n,
			      .wanted = refused,
			      .part = "have not said what they want, the limit of one" };
	for (unsigned i = 0; i < n; i++)
		x->fds[i] = raw_stream_from(to, host);
	looprun_until(&peerfix.run, silent_refused, x, 30);
}

static void silent_end(struct silent *x)
{
	for (unsigned i = 0; i < x->n; i++)
		if (!x->refused[i])
			close(x->fds[i]);
}

/* They took all places for fetches, 5 s each, and could be begun again and again. */
Test(bulk_hostile, streams_that_ask_for_nothing_take_no_place)
{
	static const char *const names[] = { "n0", "n1", "n2", "n3" };
	int fds[BULK_MAX_SERVED];
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, 10 * MIB), *c = peerfix_node("c", NULL);
	struct silent x;

	silent_begin(&x, b, 2, BULK_MAX_SILENT, BULK_MAX_SILENT - BULK_MAX_OF_HOST);
	fetch_all(c, b);
	for (unsigned i = 0; i < BULK_MAX_SERVED; i += BULK_MAX_OF_NODE)
		raw_streams(b, &o, fds, i, i + BULK_MAX_OF_NODE, names[i / BULK_MAX_OF_NODE]);
	silent_end(&x);
	raw_end(&o, fds, BULK_MAX_SERVED);
	bulkfix_close(&o);
}

/* Of four hosts: one more of a fifth one is refused, until they have been silent for too long. */
Test(bulk_hostile, more_streams_that_ask_for_nothing_than_there_may_be)
{
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, 10 * MIB), *c = peerfix_node("c", NULL);
	struct silent x[BULK_MAX_SILENT / BULK_MAX_OF_HOST];
	uint64_t turns = 0;
	int fd;

	for (unsigned i = 0; i < BULK_MAX_SILENT / BULK_MAX_OF_HOST; i++)
		silent_begin(&x[i], b, 2 + i, BULK_MAX_OF_HOST + 1, 1);
	fd = raw_stream(b);
	raw_await(fd, "64 streams have not said what they want, the limit at node 'b'");
	pass(b, PEER_GREET_US + 1000000);
	looprun_until(&peerfix.run, ticked, &turns, 30);
	clock_real();
	peerfix.held = false;
	fetch_all(c, b);
	for (unsigned i = 0; i < BULK_MAX_SILENT / BULK_MAX_OF_HOST; i++)
		silent_end(&x[i]);
	bulkfix_close(&o);
}

/* They stayed here for as long as it took one chunk in 30 s. */
Test(bulk_hostile, one_that_takes_nothing_of_what_is_dropped)
{
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, 10 * MIB);
	int fd;

	raw_streams(b, &o, &fd, 0, 1, "a");
	peerfix_turn(200);
	cr_expect_eq(o.closes, 0);
	o.dropped = true;
	raw_await(fd, "node 'b' does not keep it any more");
	bulkfix_close(&o);
	cr_expect_eq(o.closes, 1);
}

Test(bulk_hostile, one_that_asks_for_nothing)
{
	uint64_t turns = 0;
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, MIB);
	int fd = raw_stream(b);

	peerfix_turn(200);
	pass(b, PEER_GREET_US + 1000000);
	looprun_until(&peerfix.run, ticked, &turns, 30);
	clock_real();
	raw_await(fd, "has not said what it wants within 5 s");
	bulkfix_close(&o);
}

Test(bulk_hostile, requests_that_are_wrong)
{
	static const struct {
		const char *request, *part;
	} cases[] = {
		{ "", "has sent what is no request" },
		{ "\xff\xff", "has sent what is no request" },
		{ "\x0a\x02\x08\x07", "says no name that a node may have" },
		{ "\x0a\x05\x08\x07\x1a\x01m", "node 'm' has version 7" },
	};
	struct bulkfix_owner o;
	struct peerfix_node *b = bulkfix_server(&o, MIB);
	int fd;

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		size_t n = strlen(cases[i].request);
		uint8_t frame[64] = { 0, 0, 0, 0, (uint8_t)n };

		fd = raw_stream(b);
		memcpy(frame + 5, cases[i].request, n);
		rawsock_h2_frame(fd, H2_DATA, H2_END_STREAM, 1, frame, n + 5);
		raw_await(fd, cases[i].part);
	}
	fd = raw_stream(b);
	raw_request(fd, "a", "k\n");
	raw_await(fd, "'k?' is not a key");
	cr_expect_eq(o.opens, 0);
	bulkfix_close(&o);
}
