/* Fetches of another node's bytes. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "certfix.h"
#include "checkpoint/crc32c.h"
#include "core/clock.h"
#include "core/memfile.h"
#include "peer/bulk.h"
#include "peerfix.h"
#include "rawsock.h"

#define MIB     (UINT64_C(1) << 20)
#define IDLE_US 20000000u
#define MANY    70u

TestSuite(bulk, .init = peerfix_begin, .fini = peerfix_end, .timeout = 120);

#define expect_text(text, part) \
	cr_expect(strstr((text), (part)), "'%s' does not say '%s'", (text), (part))

/* What a node serves: "bytes"; everything else is not there. */
struct owner {
	struct bulk_source source;
	unsigned opens, closes;
	char node[64], key[BULK_KEY_BYTES + 1];
};

static int on_open(void *userdata, const char *node, const char *key, struct bulk_source *ret,
		   struct fault *f)
{
	struct owner *o = userdata;

	snprintf(o->node, sizeof(o->node), "%s", node);
	snprintf(o->key, sizeof(o->key), "%s", key);
	if (strcmp(key, "bytes") != 0)
		return fault_set(f, FAULT_NOT_FOUND, "peer", "there is no '%s' here", key);
	*ret = o->source;
	o->opens++;
	return 0;
}

static void on_close(void *userdata, struct bulk_source *source)
{
	struct owner *o = userdata;

	cr_expect_eq(source->fd, o->source.fd);
	o->closes++;
}

static const struct bulk_ops owner_ops = { on_open, on_close };

/* A file of @bytes; its words count. */
static int file_new(uint64_t bytes, bool filled)
{
	uint64_t *at, words = (bytes + 7) / 8;
	int fd;

	cr_assert_eq(memfile_new("bulk", &fd), 0);
	cr_assert_eq(ftruncate(fd, (off_t)(words * 8)), 0);
	if (filled && words) {
		at = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		cr_assert_neq(at, MAP_FAILED);
		for (uint64_t i = 0; i < words; i++)
			at[i] = i * UINT64_C(0x9e3779b97f4a7c15) + 1;
		munmap(at, words * 8);
	}
	cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
	return fd;
}

/* Are @bytes of @a from @from on those of @b from @to on? */
static bool file_same(int a, uint64_t from, int b, uint64_t to, uint64_t bytes)
{
	uint8_t *x = malloc(MIB), *y = malloc(MIB);
	bool same = true;

	cr_assert(x && y);
	for (uint64_t i = 0; same && i < bytes; i += MIB) {
		size_t n = bytes - i < MIB ? (size_t)(bytes - i) : MIB;

		same = pread(a, x, n, (off_t)(from + i)) == (ssize_t)n &&
		       pread(b, y, n, (off_t)(to + i)) == (ssize_t)n && memcmp(x, y, n) == 0;
	}
	free(x);
	free(y);
	return same;
}

/* A node that serves a file of @bytes. */
static struct peerfix_node *server_new(struct owner *o, uint64_t bytes)
{
	struct peerfix_node *n = peerfix_node("b", NULL);

	*o = (struct owner){ .source = { .fd = file_new(bytes, true), .size = bytes } };
	bulk_serve(n->ps, &owner_ops, o);
	return n;
}

/* What has come of a fetch. */
struct get {
	struct bulk_fetch *x;
	int fd;
	unsigned done;
	struct fault f;
	uint64_t bytes;
	bool ended; /* done, for looprun_flag */
};

static void on_done(void *userdata, const struct fault *f, uint64_t bytes)
{
	struct get *g = userdata;

	g->done++;
	g->ended = true;
	g->f = f ? *f : FAULT_NULL;
	g->bytes = bytes;
}

static void get_begin(struct get *g, struct peerfix_node *from, const char *at, const char *key,
		      uint64_t offset, uint64_t bytes)
{
	struct bulk_want w = { .node = "b",
			       .address = at,
			       .key = key,
			       .offset = offset,
			       .bytes = bytes,
			       .fd_offset = 24,
			       .idle_us = IDLE_US };
	struct fault f = FAULT_NULL;

	*g = (struct get){ .fd = file_new(0, false) };
	w.fd = g->fd;
	cr_assert_eq(bulk_fetch(from->ps, &w, on_done, g, &g->x, &f), 0, "%s", f.text);
	cr_expect_eq(g->done, 0, "called from inside");
}

static void get_end(struct get *g)
{
	looprun_flag(&peerfix.run, &g->ended, 60);
	cr_expect_eq(g->done, 1);
	close(g->fd);
}

static bool closed_all(void *arg)
{
	const struct owner *o = arg;

	return o->opens == o->closes;
}

static void owner_end(struct owner *o)
{
	looprun_until(&peerfix.run, closed_all, o, 30);
	close(o->source.fd);
}

/* ------------------------------------------------------------------------------------- it works */

/* Fetch @bytes of @size; 0: up to the end. */
static void check_range(uint64_t size, uint64_t offset, uint64_t bytes)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	uint64_t all = bytes ? bytes : size - offset;
	struct owner o;
	struct get g;

	b = server_new(&o, size);
	get_begin(&g, a, b->at, "bytes", offset, bytes);
	looprun_flag(&peerfix.run, &g.ended, 60);
	cr_assert_eq(g.f.code, 0, "%s", g.f.text);
	cr_expect_eq(g.bytes, all);
	cr_expect(file_same(o.source.fd, offset, g.fd, 24, all));
	cr_expect_eq(lseek(g.fd, 0, SEEK_END), all ? (off_t)all + 24 : 0);
	get_end(&g);
	owner_end(&o);
	cr_expect_eq(o.opens, 1);
	cr_expect_str_eq(o.node, "a");
	cr_expect_str_eq(o.key, "bytes");
}

Test(bulk, no_byte)
{
	check_range(0, 0, 0);
}

Test(bulk, no_byte_at_the_end)
{
	check_range(MIB, MIB, 0);
}

Test(bulk, a_byte)
{
	check_range(1, 0, 1);
}

Test(bulk, a_chunk)
{
	check_range(MIB, 0, 0);
}

Test(bulk, a_range)
{
	check_range(5 * MIB + 17, MIB - 3, 3 * MIB + 5);
}

Test(bulk, many_bytes)
{
	check_range(100 * MIB, 0, 0);
}

static bool all_ended(void *arg)
{
	const struct get *g = arg;

	for (unsigned i = 0; i < 8; i++)
		if (!g[i].done)
			return false;
	return true;
}

Test(bulk, several_at_once_and_a_link_beside)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct get g[8];
	struct owner o;

	b = server_new(&o, 16 * MIB);
	peerfix_link(a, b);
	for (unsigned i = 0; i < 8; i++)
		get_begin(&g[i], a, b->at, "bytes", i * MIB, 8 * MIB);
	for (uint64_t i = 0; i < 100; i++)
		peerfix_send(a->last, i, 100);
	looprun_until(&peerfix.run, all_ended, g, 60);
	for (unsigned i = 0; i < 8; i++) {
		cr_expect_eq(g[i].f.code, 0, "%s", g[i].f.text);
		cr_expect(file_same(o.source.fd, i * MIB, g[i].fd, 24, 8 * MIB));
		get_end(&g[i]);
	}
	peerfix_await_messages(b, 100);
	cr_expect_eq(a->gones + b->gones, 0, "%s%s", a->why, b->why);
	owner_end(&o);
}

Test(bulk, both_ways_and_again_when_the_connection_was_closed)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct get g;
	struct owner o;

	b = server_new(&o, 3 * MIB);
	for (unsigned i = 0; i < 3; i++) {
		get_begin(&g, a, b->at, "bytes", 0, 0);
		get_end(&g);
		cr_expect_eq(g.f.code, 0, "%s", g.f.text);
		peerfix_turn(i == 0 ? 1200 : 0);
	}
	owner_end(&o);
}

static bool has_some(void *arg)
{
	const struct get *g = arg;

	return bulk_bytes(g->x) >= 2 * MIB;
}

Test(bulk, a_limit_of_bytes_a_second)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	uint64_t began = clock_now_us();
	struct owner o;
	struct get g;

	b = server_new(&o, 4 * MIB);
	o.source.bytes_per_s = 10 * MIB;
	get_begin(&g, a, b->at, "bytes", 0, 0);
	looprun_until(&peerfix.run, has_some, &g, 30);
	cr_expect_eq(bulk_total(g.x), 4 * MIB);
	get_end(&g);
	cr_expect_eq(g.f.code, 0, "%s", g.f.text);
	cr_expect_geq(clock_now_us() - began, 300000u, "three chunks wait 100 ms each");
	owner_end(&o);
}

/* ----------------------------------------------------------------------------------- refusals */

static void check_refused(struct get *g, enum fault_code code, const char *part)
{
	get_end(g);
	cr_expect_eq(g->f.code, code, "%s: %s", fault_code_name(g->f.code), g->f.text);
	expect_text(g->f.text, "of node 'b': ");
	expect_text(g->f.text, part);
	cr_expect_eq(g->bytes, 0);
}

Test(bulk, an_unknown_key)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct owner o;
	struct get g;

	b = server_new(&o, MIB);
	get_begin(&g, a, b->at, "nothing", 0, 0);
	check_refused(&g, FAULT_NOT_FOUND, "fetching 'nothing' of node 'b': there is no 'nothing'");
	cr_expect_eq(o.opens, 0);
	owner_end(&o);
}

Test(bulk, more_than_there_is)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct owner o;
	struct get g;

	b = server_new(&o, MIB);
	get_begin(&g, a, b->at, "bytes", 10, MIB);
	check_refused(&g, FAULT_INVALID,
		      "1048576 bytes from byte 10 on are asked for; node 'b' has 1048576 bytes");
	get_begin(&g, a, b->at, "bytes", MIB + 1, 0);
	check_refused(&g, FAULT_INVALID, "from byte 1048577 on are asked for");
	owner_end(&o);
	cr_expect_eq(o.opens, 2);
}

Test(bulk, a_node_that_serves_nothing)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);
	struct get g;

	get_begin(&g, a, b->at, "bytes", 0, 0);
	check_refused(&g, FAULT_UNAVAILABLE, "node 'b' has nothing to fetch yet");
}

Test(bulk, another_cluster)
{
	struct peers_options other = { .cluster = "other" };
	struct peerfix_node *a = peerfix_node("a", &other), *b;
	struct owner o;
	struct get g;

	b = server_new(&o, MIB);
	get_begin(&g, a, b->at, "bytes", 0, 0);
	check_refused(&g, FAULT_DENIED,
		      "node 'a' is of cluster 'other', node 'b' is of cluster 'test'");
	owner_end(&o);
}

Test(bulk, another_node_at_the_address)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *c = peerfix_node("c", NULL);
	struct get g;

	get_begin(&g, a, c->at, "bytes", 0, 0);
	check_refused(&g, FAULT_DENIED, "this is node 'c'; node 'a' asks for node 'b'");
}

Test(bulk, nobody_there)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);
	struct get g;

	peerfix_close(b);
	get_begin(&g, a, b->at, "bytes", 0, 0);
	check_refused(&g, FAULT_UNAVAILABLE, "Connection refused");
	get_begin(&g, a, b->at, "bytes", 0, 0);
	check_refused(&g, FAULT_UNAVAILABLE, "Connection refused");
}

Test(bulk, only_allowed_nodes)
{
	const char *const names[] = { "c" };
	struct peers_options o = { .allowed = names, .n_allowed = 1 };
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", &o);
	struct get g;

	get_begin(&g, a, b->at, "bytes", 0, 0);
	check_refused(&g, FAULT_DENIED,
		      "node 'a' is not among the nodes that may connect to node 'b'");
}

Test(bulk, bad_arguments)
{
	static const struct {
		const char *node, *address, *key, *part;
		uint64_t offset, bytes, fd_offset;
		enum fault_code code;
	} cases[] = {
		{ "a", "127.0.0.1:1", "k", "to itself", 0, 0, 0, FAULT_INVALID },
		{ "b", "127.0.0.1", "k", "HOST:PORT", 0, 0, 0, FAULT_INVALID },
		{ "b", "192.0.2.1:7", "k", "not an address of loopback", 0, 0, 0, FAULT_DENIED },
		{ "b", "127.0.0.1:1", "", "not a key", 0, 0, 0, FAULT_INVALID },
		{ "b", "127.0.0.1:1", "k\n", "not a key", 0, 0, 0, FAULT_INVALID },
		{ "b", "127.0.0.1:1", "k", "than a file can have", INT64_MAX, 1, 0, FAULT_INVALID },
		{ "b", "127.0.0.1:1", "k", "than a file can have", 0, 1, INT64_MAX, FAULT_INVALID },
	};
	struct peerfix_node *a = peerfix_node("a", NULL);

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct bulk_want w = { .node = cases[i].node,
				       .address = cases[i].address,
				       .key = cases[i].key,
				       .offset = cases[i].offset,
				       .bytes = cases[i].bytes,
				       .fd_offset = cases[i].fd_offset,
				       .idle_us = IDLE_US };
		struct fault f = FAULT_NULL;
		struct bulk_fetch *x;

		cr_expect_eq(bulk_fetch(a->ps, &w, (void *)abort, NULL, &x, &f), (int)cases[i].code,
			     "%zu: %s", i, f.text);
		expect_text(f.text, cases[i].part);
	}
}

static bool some_refused(void *arg)
{
	const struct get *g = arg;

	for (unsigned i = 0; i < MANY; i++)
		if (g[i].done)
			return true;
	return false;
}

static bool opened_all(void *arg)
{
	return ((const struct owner *)arg)->opens == BULK_MAX_SERVED;
}

/* Two nodes fetch: one alone may not begin so many. */
Test(bulk, more_streams_than_are_served)
{
	struct peerfix_node *nodes[2] = { peerfix_node("a", NULL), peerfix_node("c", NULL) }, *b;
	struct get *g = calloc(MANY, sizeof(*g));
	unsigned refused = 0;
	struct owner o;

	cr_assert(g);
	b = server_new(&o, 2 * MIB);
	o.source.bytes_per_s = 100; /* hours */
	for (unsigned i = 0; i < BULK_MAX_SERVED; i++)
		get_begin(&g[i], nodes[i % 2], b->at, "bytes", 0, 0);
	looprun_until(&peerfix.run, opened_all, &o, 30);
	for (unsigned i = BULK_MAX_SERVED; i < MANY; i++)
		get_begin(&g[i], nodes[i % 2], b->at, "bytes", 0, 0);
	looprun_until(&peerfix.run, some_refused, g, 30);
	for (unsigned i = 0; i < MANY; i++)
		if (g[i].done) {
			cr_expect_eq(g[i].f.code, FAULT_EXHAUSTED);
			expect_text(g[i].f.text, "node 'b' serves 64 fetches, the limit");
			refused++;
		}
	cr_expect_geq(refused, 1);
	for (unsigned i = 0; i < MANY; i++) {
		if (!g[i].done)
			bulk_cancel(g[i].x);
		get_end(&g[i]);
	}
	owner_end(&o);
	cr_expect_eq(o.opens, BULK_MAX_SERVED);
	get_begin(g, nodes[0], b->at, "nothing", 0, 0);
	check_refused(g, FAULT_NOT_FOUND, "there is no 'nothing'");
	free(g);
}

Test(bulk, more_fetches_than_a_node_may_have)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulk_want w = { .node = "b", .key = "bytes", .fd = 0, .idle_us = IDLE_US };
	struct get *g = calloc(BULK_MAX_FETCHES, sizeof(*g));
	struct fault f = FAULT_NULL;
	struct bulk_fetch *x;
	struct owner o;

	cr_assert(g);
	b = server_new(&o, 2 * MIB);
	w.address = b->at;
	for (unsigned i = 0; i < BULK_MAX_FETCHES; i++)
		get_begin(&g[i], a, b->at, "bytes", 0, 0);
	cr_expect_eq(bulk_fetch(a->ps, &w, (void *)abort, NULL, &x, &f), FAULT_EXHAUSTED);
	expect_text(f.text, "there are 64 fetches");
	for (unsigned i = 0; i < BULK_MAX_FETCHES; i++) {
		get_end(&g[i]);
		cr_expect_eq(g[i].f.code, 0, "%s", g[i].f.text);
	}
	free(g);
	owner_end(&o);
}

/* ------------------------------------------------------------------------------- it ends early */

Test(bulk, the_one_that_fetches_cancels)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct owner o;
	struct get g;

	b = server_new(&o, 64 * MIB);
	o.source.bytes_per_s = 20 * MIB;
	get_begin(&g, a, b->at, "bytes", 0, 0);
	looprun_until(&peerfix.run, has_some, &g, 30);
	bulk_cancel(g.x);
	bulk_cancel(g.x);
	cr_expect_eq(g.done, 0, "called from inside");
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_CANCELLED);
	cr_expect_geq(g.bytes, 2 * MIB);
	get_begin(&g, a, b->at, "bytes", 0, 0);
	bulk_cancel(g.x);
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_CANCELLED);
	owner_end(&o);
}

Test(bulk, the_one_that_has_them_is_closed)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct owner o;
	struct get g;

	b = server_new(&o, 64 * MIB);
	o.source.bytes_per_s = 20 * MIB;
	get_begin(&g, a, b->at, "bytes", 0, 0);
	looprun_until(&peerfix.run, has_some, &g, 30);
	peerfix_close(b);
	cr_expect_eq(o.closes, 1);
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE, "%s", g.f.text);
	expect_text(g.f.text, "fetching 'bytes' of node 'b': node 'b' was lost behind ");
	cr_expect_geq(g.bytes, 2 * MIB);
	owner_end(&o);
}

Test(bulk, the_one_that_fetches_is_closed)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct owner o;
	struct get g;

	b = server_new(&o, 64 * MIB);
	o.source.bytes_per_s = 20 * MIB;
	get_begin(&g, a, b->at, "bytes", 0, 0);
	looprun_until(&peerfix.run, has_some, &g, 30);
	peerfix_close(a);
	cr_expect_eq(g.done, 1);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE);
	expect_text(g.f.text, "this daemon ends");
	get_end(&g);
	owner_end(&o);
}

/* Each moment of a fetch's begin. */
Test(bulk, both_are_closed_at_any_time)
{
	for (unsigned i = 0; i < 20; i++) {
		struct peerfix_node *a = peerfix_node("a", NULL), *b;
		uint64_t until;
		struct owner o;
		struct get g;

		b = server_new(&o, 8 * MIB);
		get_begin(&g, a, b->at, "bytes", 0, 0);
		until = clock_now_us() + 300 * i;
		while (clock_now_us() < until)
			uv_run(&peerfix.run.loop, UV_RUN_NOWAIT);
		peerfix_close(i % 2 ? a : b);
		peerfix_close(i % 2 ? b : a);
		get_end(&g);
		owner_end(&o);
		memset(peerfix.nodes, 0, sizeof(peerfix.nodes));
	}
}

Test(bulk, a_file_that_became_shorter)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct owner o;
	struct get g;

	b = server_new(&o, MIB);
	o.source.size = 4 * MIB;
	get_begin(&g, a, b->at, "bytes", 0, 0);
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_INTERNAL, "%s", g.f.text);
	expect_text(g.f.text, "node 'b' cannot read byte 1048576: there are fewer bytes");
	owner_end(&o);
}

Test(bulk, a_file_that_takes_no_more)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulk_want w = { .node = "b", .key = "bytes", .idle_us = IDLE_US };
	struct get g = { .fd = file_new(10, true) };
	struct fault f = FAULT_NULL;
	struct owner o;

	b = server_new(&o, 4 * MIB);
	w.address = b->at;
	w.fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	cr_assert(w.fd >= 0);
	cr_assert_eq(bulk_fetch(a->ps, &w, on_done, &g, &g.x, &f), 0);
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_INTERNAL, "%s", g.f.text);
	expect_text(g.f.text, "writing what came: Bad file descriptor");
	close(w.fd);
	owner_end(&o);
}

/* ---------------------------------------------------------------------- one that is no daemon */

/* A server of HTTP/2 that answers the one stream with what the test gives it. */
struct fake {
	int listens, fd;
	char at[32];
	uint8_t in[65536];
	size_t n;
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

/* There is a frame of headers behind the preface. */
static bool fake_asked(void *arg)
{
	struct fake *x = arg;
	ssize_t r = recv(x->fd, x->in + x->n, sizeof(x->in) - x->n, 0);

	x->n += r > 0 ? (size_t)r : 0;
	for (size_t at = 24; at + 9 <= x->n;) {
		if (x->in[at + 3] == H2_HEADERS)
			return true;
		at += 9u + ((size_t)x->in[at] << 16 | x->in[at + 1] << 8 | x->in[at + 2]);
	}
	return false;
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

static void fake_bytes(struct fake *x, const uint8_t *data, size_t bytes)
{
	uint8_t frame[2048] = { 0, 0, 0, (uint8_t)(bytes >> 8), (uint8_t)bytes };

	cr_assert_leq(bytes, sizeof(frame) - 5);
	memcpy(frame + 5, data, bytes);
	rawsock_h2_frame(x->fd, H2_DATA, 0, 1, frame, bytes + 5);
}

/* 100 bytes from @offset on. */
static void fake_chunk(struct fake *x, bool first, uint64_t total, uint64_t offset, uint32_t flip)
{
	Shardd__V1__FetchChunk m = SHARDD__V1__FETCH_CHUNK__INIT;
	Shardd__V1__PeerHello h = SHARDD__V1__PEER_HELLO__INIT;
	uint8_t data[100] = { 7 }, packed[1024];

	h.node = (char *)"b";
	h.cluster = (char *)"test";
	h.protocol = 1;
	h.instance = (ProtobufCBinaryData){ 16, (uint8_t *)"0123456789abcdef" };
	m.hello = first ? &h : NULL;
	m.total = total;
	m.offset = offset;
	m.data = (ProtobufCBinaryData){ sizeof(data), data };
	m.crc = crc32c_add(0, data, sizeof(data)) ^ flip;
	fake_bytes(x, packed, shardd__v1__fetch_chunk__pack(&m, packed));
}

static void fake_end(struct fake *x)
{
	close(x->fd);
	close(x->listens);
}

struct bad {
	const char *part;
	enum fault_code code;
	uint64_t bytes, total, offset; /* of those asked for; of the second chunk */
	uint32_t flip;
	bool first, second; /* the first chunk has a hello; and there is a second one */
};

Test(bulk, chunks_that_are_wrong)
{
	static const struct bad cases[] = {
		{ "have another checksum (CRC-32C)", FAULT_ABORTED, 100, 0, 0, 1, true, false },
		{ "the first chunk does not say", FAULT_ABORTED, 0, 0, 0, 0, false, false },
		{ "a chunk begins at byte 99; byte 100 is", FAULT_ABORTED, 0, 0, 99, 0, true,
		  true },
		{ "a chunk begins at byte 200; byte 100 is", FAULT_ABORTED, 0, 0, 200, 0, true,
		  true },
		{ "a chunk has 100 bytes behind 100 of 150", FAULT_ABORTED, 150, 150, 100, 0, true,
		  true },
		{ "wants to send 150 bytes instead of 200", FAULT_ABORTED, 200, 150, 0, 0, true,
		  false },
	};
	struct peerfix_node *a = peerfix_node("a", NULL);

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		const struct bad *c = &cases[i];
		struct fake x;
		struct get g;

		fake_begin(&x);
		get_begin(&g, a, x.at, "bytes", 0, c->bytes);
		fake_answer(&x);
		fake_chunk(&x, c->first,
			   c->total   ? c->total
			   : c->bytes ? c->bytes
				      : 300,
			   0, c->flip);
		if (c->second)
			fake_chunk(&x, false, 0, c->offset, 0);
		get_end(&g);
		cr_expect_eq(g.f.code, c->code, "%s", g.f.text);
		expect_text(g.f.text, "fetching 'bytes' of node 'b': ");
		expect_text(g.f.text, c->part);
		cr_expect_eq(g.bytes, c->second ? 100 : 0);
		fake_end(&x);
	}
}

Test(bulk, what_is_no_chunk)
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
		struct get g;

		fake_begin(&x);
		get_begin(&g, a, x.at, "bytes", 0, 0);
		fake_answer(&x);
		fake_bytes(&x, (const uint8_t *)cases[i], strlen(cases[i]));
		check_refused(&g, FAULT_ABORTED, "has sent what is no chunk");
		fake_end(&x);
	}
}

static bool has_both(void *arg)
{
	const struct get *g = arg;

	return bulk_bytes(g->x) == 200;
}

Test(bulk, one_that_dies_in_the_middle)
{
	struct peerfix_node *a = peerfix_node("a", NULL);
	struct fake x;
	struct get g;

	fake_begin(&x);
	get_begin(&g, a, x.at, "bytes", 0, 1000);
	fake_answer(&x);
	fake_chunk(&x, true, 1000, 0, 0);
	fake_chunk(&x, false, 0, 100, 0);
	looprun_until(&peerfix.run, has_both, &g, 30);
	fake_end(&x);
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE, "%s", g.f.text);
	expect_text(g.f.text, "node 'b' was lost behind 200 of 1000 bytes");
	cr_expect_eq(g.bytes, 200);
}

/* The status is that all went well. */
Test(bulk, one_that_ends_too_early)
{
	static const char trailers[] = "\x00\x0bgrpc-status\x01"
				       "0";
	struct peerfix_node *a = peerfix_node("a", NULL);
	struct fake x;
	struct get g;

	fake_begin(&x);
	get_begin(&g, a, x.at, "bytes", 0, 1000);
	fake_answer(&x);
	fake_chunk(&x, true, 1000, 0, 0);
	rawsock_h2_frame(x.fd, H2_HEADERS, H2_END_HEADERS | H2_END_STREAM, 1, trailers,
			 sizeof(trailers) - 1);
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_ABORTED, "%s", g.f.text);
	expect_text(g.f.text, "node 'b' has ended it behind 100 of 1000 bytes");
	fake_end(&x);
}

Test(bulk, one_that_stalls)
{
	struct peerfix_node *a = peerfix_node("a", NULL);
	struct fault f = FAULT_NULL;
	struct bulk_want w = { .node = "b", .key = "bytes", .idle_us = 300000 };
	struct get g = { .fd = file_new(0, false) };
	uint64_t began = clock_now_us();
	struct fake x;

	fake_begin(&x);
	w.address = x.at;
	w.fd = g.fd;
	cr_assert_eq(bulk_fetch(a->ps, &w, on_done, &g, &g.x, &f), 0);
	fake_answer(&x);
	fake_chunk(&x, true, 1000, 0, 0);
	looprun_flag(&peerfix.run, &g.ended, 30);
	cr_expect_eq(g.f.code, FAULT_DEADLINE, "%s", g.f.text);
	expect_text(g.f.text, "fetching 'bytes' of node 'b': it has sent nothing for 0.30 s");
	cr_expect_geq(clock_now_us() - began, 300000u);
	get_end(&g);
	fake_end(&x);
}

/* A stream that the test begins at @n by hand. Return: its socket. */
static int raw_stream(struct peerfix_node *n)
{
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
				  .sin_port = htons(peers_port(n->ps)) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	cr_assert_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
	rawsock_h2_begin(fd);
	cr_assert(rawsock_h2_headers(fd, 1, "/shardd.v1.PeerService/Fetch"));
	return fd;
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

static void raw_request(int fd, const char *key)
{
	Shardd__V1__FetchRequest m = SHARDD__V1__FETCH_REQUEST__INIT;
	Shardd__V1__PeerHello h = SHARDD__V1__PEER_HELLO__INIT;
	uint8_t frame[2048] = { 0 };
	size_t n;

	h.node = (char *)"a";
	h.cluster = (char *)"test";
	h.protocol = 1;
	h.instance = (ProtobufCBinaryData){ 16, (uint8_t *)"0123456789abcdef" };
	m.hello = &h;
	m.to = (char *)"b";
	m.key = (char *)key;
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

static bool opened(void *arg)
{
	return ((const struct owner *)arg)->opens == 1;
}

/* The window of its stream is 64 KiB, and it does not make it larger. */
Test(bulk, one_that_takes_nothing)
{
	struct owner o;
	struct peerfix_node *b = server_new(&o, 10 * MIB);
	int fd = raw_stream(b);

	raw_request(fd, "bytes");
	looprun_until(&peerfix.run, opened, &o, 30);
	peerfix_turn(200);
	pass(b, BULK_STALL_US - 2000000);
	cr_expect_eq(o.closes, 0);
	pass(b, 3000000);
	clock_real();
	raw_await(fd, "has taken nothing for 30 s");
	owner_end(&o);
}

static bool ticked(void *arg)
{
	uint64_t *n = arg;

	return ++*n > 50;
}

Test(bulk, one_that_asks_for_nothing)
{
	uint64_t turns = 0;
	struct owner o;
	struct peerfix_node *b = server_new(&o, MIB);
	int fd = raw_stream(b);

	peerfix_turn(200);
	pass(b, PEER_GREET_US + 1000000);
	looprun_until(&peerfix.run, ticked, &turns, 30);
	clock_real();
	raw_await(fd, "has not said what it wants within 5 s");
	owner_end(&o);
}

Test(bulk, requests_that_are_wrong)
{
	static const struct {
		const char *request, *part;
	} cases[] = {
		{ "", "has sent what is no request" },
		{ "\xff\xff", "has sent what is no request" },
		{ "\x0a\x02\x08\x07", "says no name that a node may have" },
		{ "\x0a\x05\x08\x07\x1a\x01m", "node 'm' has version 7" },
	};
	struct owner o;
	struct peerfix_node *b = server_new(&o, MIB);
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
	raw_request(fd, "k\n");
	raw_await(fd, "'k?' is not a key");
	cr_expect_eq(o.opens, 0);
	owner_end(&o);
}

/* ------------------------------------------------------------------------- certificates */

static struct certfix certs;
static char paths[8][160];
static unsigned n_paths;

static void tls_begin(void)
{
	certfix_begin(&certs);
	certfix_ca(&certs, "ca");
	peerfix_begin();
}

static void tls_end(void)
{
	peerfix_end();
	certfix_end(&certs);
}

TestSuite(bulk_tls, .init = tls_begin, .fini = tls_end, .timeout = 120);

static const char *path(const char *name, const char *kind)
{
	char file[64];

	cr_assert_lt(n_paths, 8);
	snprintf(file, sizeof(file), "%s%s", name, kind);
	return certfix_path(&certs, file, paths[n_paths++], sizeof(paths[0]));
}

/* Node @name with a certificate for @alternative. */
static struct peerfix_node *tls_node(const char *name, const char *alternative)
{
	struct peers_options o = { .ca = path("ca", ".pem"),
				   .cert = path(name, ".pem"),
				   .key = path(name, ".key"),
				   .listen = "127.0.0.1:0" };

	certfix_cert(&certs, "ca", name, alternative);
	return peerfix_node(name, &o);
}

Test(bulk_tls, with_certificates)
{
	struct peerfix_node *a = tls_node("a", "DNS:a"), *b = tls_node("b", "DNS:b");
	struct owner o = { .source = { .fd = file_new(9 * MIB, true), .size = 9 * MIB } };
	struct get g;

	bulk_serve(b->ps, &owner_ops, &o);
	get_begin(&g, a, b->at, "bytes", 0, 0);
	looprun_flag(&peerfix.run, &g.ended, 60);
	cr_expect_eq(g.f.code, 0, "%s", g.f.text);
	cr_expect(file_same(o.source.fd, 0, g.fd, 24, 9 * MIB));
	get_end(&g);
	owner_end(&o);
}

Test(bulk_tls, the_one_that_is_asked_must_have_its_name)
{
	struct peerfix_node *a = tls_node("a", "DNS:a"), *b = tls_node("b", "DNS:x");
	struct get g;

	get_begin(&g, a, b->at, "bytes", 0, 0);
	check_refused(&g, FAULT_UNAVAILABLE,
		      "its certificate has the DNS names 'x': 'b' must be one of them");
}

Test(bulk_tls, the_one_that_asks_must_have_its_name)
{
	struct peerfix_node *a = tls_node("a", "DNS:x"), *b = tls_node("b", "DNS:b");
	struct get g;

	get_begin(&g, a, b->at, "bytes", 0, 0);
	check_refused(&g, FAULT_DENIED, "node 'a' has a certificate with the DNS names 'x'");
}

Test(bulk_tls, one_without_certificates)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = tls_node("b", "DNS:b");
	struct get g;

	get_begin(&g, a, b->at, "bytes", 0, 0);
	get_end(&g);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE, "%s", g.f.text);
}
