/* Fetches of another node's bytes. What is no daemon: test_bulk_hostile.c. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bulkfix.h"
#include "certfix.h"
#include "core/clock.h"

#define MIB (UINT64_C(1) << 20)

TestSuite(bulk, .init = peerfix_begin, .fini = peerfix_end, .timeout = 120);

#define expect_text(text, part) \
	cr_expect(strstr((text), (part)), "'%s' does not say '%s'", (text), (part))

/* ------------------------------------------------------------------------------------- it works */

static void check_bytes(uint64_t size)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, size);
	bulkfix_begin(&g, a, b->at, "bytes", size);
	looprun_flag(&peerfix.run, &g.ended, 60);
	cr_assert_eq(g.f.code, 0, "%s", g.f.text);
	cr_expect_eq(g.bytes, size);
	cr_expect(bulkfix_same(o.source.fd, g.fd, size));
	cr_expect_eq(lseek(g.fd, 0, SEEK_END), (off_t)size);
	bulkfix_end(&g);
	bulkfix_close(&o);
	cr_expect_eq(o.opens, 1);
	cr_expect_str_eq(o.node, "a");
	cr_expect_str_eq(o.key, "bytes");
}

Test(bulk, a_byte)
{
	check_bytes(1);
}

Test(bulk, a_chunk)
{
	check_bytes(MIB);
}

Test(bulk, chunks_and_some_bytes)
{
	check_bytes(3 * MIB + 17);
}

Test(bulk, many_bytes)
{
	check_bytes(100 * MIB);
}

static bool all_ended(void *arg)
{
	const struct bulkfix_get *g = arg;

	for (unsigned i = 0; i < 8; i++)
		if (!g[i].done)
			return false;
	return true;
}

Test(bulk, several_at_once_and_a_link_beside)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_get g[8];
	struct bulkfix_owner o;

	b = bulkfix_server(&o, 16 * MIB);
	peerfix_link(a, b);
	for (unsigned i = 0; i < 8; i++)
		bulkfix_begin(&g[i], a, b->at, "bytes", 16 * MIB);
	for (uint64_t i = 0; i < 100; i++)
		peerfix_send(a->last, i, 100);
	looprun_until(&peerfix.run, all_ended, g, 60);
	for (unsigned i = 0; i < 8; i++) {
		cr_expect_eq(g[i].f.code, 0, "%s", g[i].f.text);
		cr_expect(bulkfix_same(o.source.fd, g[i].fd, 16 * MIB));
		bulkfix_end(&g[i]);
	}
	peerfix_await_messages(b, 100);
	cr_expect_eq(a->gones + b->gones, 0, "%s%s", a->why, b->why);
	bulkfix_close(&o);
}

Test(bulk, both_ways_and_again_when_the_connection_was_closed)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_get g;
	struct bulkfix_owner o;

	b = bulkfix_server(&o, 3 * MIB);
	for (unsigned i = 0; i < 3; i++) {
		bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
		bulkfix_end(&g);
		cr_expect_eq(g.f.code, 0, "%s", g.f.text);
		peerfix_turn(i == 0 ? 1200 : 0);
	}
	bulkfix_close(&o);
}

static bool has_some(void *arg)
{
	const struct bulkfix_get *g = arg;

	return bulk_bytes(g->x) >= 2 * MIB;
}

/* ----------------------------------------------------------------------------------- refusals */

Test(bulk, an_unknown_key)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, MIB);
	bulkfix_begin(&g, a, b->at, "nothing", o.source.size);
	bulkfix_refused(&g, FAULT_NOT_FOUND,
			"fetching 'nothing' of node 'b': there is no 'nothing'");
	cr_expect_eq(o.opens, 0);
	bulkfix_close(&o);
}

Test(bulk, more_than_there_is_or_less)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, MIB);
	bulkfix_begin(&g, a, b->at, "bytes", MIB + 1);
	bulkfix_refused(&g, FAULT_INVALID,
			"1048577 bytes are asked for; node 'b' has 1048576 bytes");
	bulkfix_begin(&g, a, b->at, "bytes", MIB - 1);
	bulkfix_refused(&g, FAULT_INVALID, "1048575 bytes are asked for");
	bulkfix_close(&o);
	cr_expect_eq(o.opens, 2);
}

Test(bulk, a_node_that_serves_nothing)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);
	struct bulkfix_get g;

	bulkfix_begin(&g, a, b->at, "bytes", 1);
	bulkfix_refused(&g, FAULT_UNAVAILABLE, "node 'b' has nothing to fetch yet");
}

Test(bulk, another_cluster)
{
	struct peers_options other = { .cluster = "other" };
	struct peerfix_node *a = peerfix_node("a", &other), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, MIB);
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	bulkfix_refused(&g, FAULT_DENIED,
			"node 'a' is of cluster 'other', node 'b' is of cluster 'test'");
	bulkfix_close(&o);
}

Test(bulk, another_node_at_the_address)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *c = peerfix_node("c", NULL);
	struct bulkfix_get g;

	bulkfix_begin(&g, a, c->at, "bytes", 1);
	bulkfix_refused(&g, FAULT_DENIED, "this is node 'c'; node 'a' asks for node 'b'");
}

Test(bulk, nobody_there)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);
	struct bulkfix_get g;

	peerfix_close(b);
	bulkfix_begin(&g, a, b->at, "bytes", 1);
	bulkfix_refused(&g, FAULT_UNAVAILABLE, "Connection refused");
	bulkfix_begin(&g, a, b->at, "bytes", 1);
	bulkfix_refused(&g, FAULT_UNAVAILABLE, "Connection refused");
}

Test(bulk, only_allowed_nodes)
{
	const char *const names[] = { "c" };
	struct peers_options o = { .allowed = names, .n_allowed = 1 };
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", &o);
	struct bulkfix_get g;

	bulkfix_begin(&g, a, b->at, "bytes", 1);
	bulkfix_refused(&g, FAULT_DENIED,
			"node 'a' is not among the nodes that may connect to node 'b'");
}

Test(bulk, bad_arguments)
{
	static const struct {
		const char *node, *address, *key, *part;
		uint64_t bytes;
		enum fault_code code;
	} cases[] = {
		{ "a", "127.0.0.1:1", "k", "to itself", 1, FAULT_INVALID },
		{ "b", "127.0.0.1", "k", "HOST:PORT", 1, FAULT_INVALID },
		{ "b", "192.0.2.1:7", "k", "not an address of loopback", 1, FAULT_DENIED },
		{ "b", "127.0.0.1:1", "", "not a key", 1, FAULT_INVALID },
		{ "b", "127.0.0.1:1", "k\n", "not a key", 1, FAULT_INVALID },
		{ "b", "127.0.0.1:1", "k", "0 bytes are none", 0, FAULT_INVALID },
		{ "b", "127.0.0.1:1", "k", "than a file can have", UINT64_C(1) << 63,
		  FAULT_INVALID },
	};
	struct peerfix_node *a = peerfix_node("a", NULL);

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct bulk_want w = { .node = cases[i].node,
				       .address = cases[i].address,
				       .key = cases[i].key,
				       .bytes = cases[i].bytes,
				       .idle_us = BULKFIX_IDLE_US };
		struct fault f = FAULT_NULL;
		struct bulk_fetch *x;

		cr_expect_eq(bulk_fetch(a->ps, &w, (void *)abort, NULL, &x, &f), (int)cases[i].code,
			     "%zu: %s", i, f.text);
		expect_text(f.text, cases[i].part);
	}
}

Test(bulk, more_fetches_than_a_node_may_have)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulk_want w = {
		.node = "b", .key = "bytes", .bytes = 1, .idle_us = BULKFIX_IDLE_US
	};
	struct bulkfix_get *g = calloc(BULK_MAX_FETCHES, sizeof(*g));
	struct fault f = FAULT_NULL;
	struct bulk_fetch *x;
	struct bulkfix_owner o;

	cr_assert(g);
	b = bulkfix_server(&o, 2 * MIB);
	w.address = b->at;
	for (unsigned i = 0; i < BULK_MAX_FETCHES; i++)
		bulkfix_begin(&g[i], a, b->at, "bytes", o.source.size);
	cr_expect_eq(bulk_fetch(a->ps, &w, (void *)abort, NULL, &x, &f), FAULT_EXHAUSTED);
	expect_text(f.text, "there are 64 fetches");
	for (unsigned i = 0; i < BULK_MAX_FETCHES; i++) {
		bulkfix_end(&g[i]); /* it serves fewer of one node */
		cr_expect(!g[i].f.code || g[i].f.code == FAULT_EXHAUSTED, "%s", g[i].f.text);
	}
	free(g);
	bulkfix_close(&o);
}

/* ------------------------------------------------------------------------------- it ends early */

Test(bulk, the_one_that_fetches_cancels)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, BULKFIX_ENDLESS);
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	looprun_until(&peerfix.run, has_some, &g, 30);
	bulk_cancel(g.x);
	bulk_cancel(g.x);
	cr_expect_eq(g.done, 0, "called from inside");
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_CANCELLED);
	cr_expect_geq(g.bytes, 2 * MIB);
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	bulk_cancel(g.x);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_CANCELLED);
	bulkfix_close(&o);
}

Test(bulk, the_one_that_has_them_drops_them)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, BULKFIX_ENDLESS);
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	looprun_until(&peerfix.run, has_some, &g, 30);
	o.dropped = true;
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_ABORTED, "%s", g.f.text);
	expect_text(g.f.text, "of node 'b': node 'b' does not keep it any more");
	bulkfix_close(&o);
}

Test(bulk, the_one_that_has_them_is_closed)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, BULKFIX_ENDLESS);
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	looprun_until(&peerfix.run, has_some, &g, 30);
	peerfix_close(b);
	cr_expect_eq(o.closes, 1);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE, "%s", g.f.text);
	expect_text(g.f.text, "fetching 'bytes' of node 'b': node 'b' was lost behind ");
	cr_expect_geq(g.bytes, 2 * MIB);
	bulkfix_close(&o);
}

Test(bulk, the_one_that_fetches_is_closed)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, BULKFIX_ENDLESS);
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	looprun_until(&peerfix.run, has_some, &g, 30);
	peerfix_close(a);
	cr_expect_eq(g.done, 1);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE);
	expect_text(g.f.text, "this daemon ends");
	bulkfix_end(&g);
	bulkfix_close(&o);
}

/* Each moment of a fetch's begin. */
Test(bulk, both_are_closed_at_any_time)
{
	for (unsigned i = 0; i < 20; i++) {
		struct peerfix_node *a = peerfix_node("a", NULL), *b;
		uint64_t until;
		struct bulkfix_owner o;
		struct bulkfix_get g;

		b = bulkfix_server(&o, 8 * MIB);
		bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
		until = clock_now_us() + 300 * i;
		while (clock_now_us() < until)
			uv_run(&peerfix.run.loop, UV_RUN_NOWAIT);
		peerfix_close(i % 2 ? a : b);
		peerfix_close(i % 2 ? b : a);
		bulkfix_end(&g);
		bulkfix_close(&o);
		memset(peerfix.nodes, 0, sizeof(peerfix.nodes));
	}
}

Test(bulk, a_file_that_became_shorter)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulkfix_owner o;
	struct bulkfix_get g;

	b = bulkfix_server(&o, MIB);
	o.source.size = 4 * MIB;
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_INTERNAL, "%s", g.f.text);
	expect_text(g.f.text, "node 'b' cannot read byte 1048576: there are fewer bytes");
	bulkfix_close(&o);
}

Test(bulk, a_file_that_takes_no_more)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct bulk_want w = {
		.node = "b", .key = "bytes", .bytes = 4 * MIB, .idle_us = BULKFIX_IDLE_US
	};
	struct bulkfix_get g = { .fd = bulkfix_file(10, true) };
	struct fault f = FAULT_NULL;
	struct bulkfix_owner o;

	b = bulkfix_server(&o, 4 * MIB);
	w.address = b->at;
	w.fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	cr_assert(w.fd >= 0);
	cr_assert_eq(bulk_fetch(a->ps, &w, bulkfix_on_done, &g, &g.x, &f), 0);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_INTERNAL, "%s", g.f.text);
	expect_text(g.f.text, "writing what came: Bad file descriptor");
	close(w.fd);
	bulkfix_close(&o);
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
	struct bulkfix_owner o = { .source = { .fd = bulkfix_file(9 * MIB, true),
					       .size = 9 * MIB } };
	struct bulkfix_get g;

	bulk_serve(b->ps, &bulkfix_ops, &o);
	bulkfix_begin(&g, a, b->at, "bytes", o.source.size);
	looprun_flag(&peerfix.run, &g.ended, 60);
	cr_expect_eq(g.f.code, 0, "%s", g.f.text);
	cr_expect(bulkfix_same(o.source.fd, g.fd, 9 * MIB));
	bulkfix_end(&g);
	bulkfix_close(&o);
}

Test(bulk_tls, the_one_that_is_asked_must_have_its_name)
{
	struct peerfix_node *a = tls_node("a", "DNS:a"), *b = tls_node("b", "DNS:x");
	struct bulkfix_get g;

	bulkfix_begin(&g, a, b->at, "bytes", 1);
	bulkfix_refused(&g, FAULT_UNAVAILABLE,
			"its certificate has the DNS names 'x': 'b' must be one of them");
}

Test(bulk_tls, the_one_that_asks_must_have_its_name)
{
	struct peerfix_node *a = tls_node("a", "DNS:x"), *b = tls_node("b", "DNS:b");
	struct bulkfix_get g;

	bulkfix_begin(&g, a, b->at, "bytes", 1);
	bulkfix_refused(&g, FAULT_DENIED, "node 'a' has a certificate with the DNS names 'x'");
}

Test(bulk_tls, one_without_certificates)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = tls_node("b", "DNS:b");
	struct bulkfix_get g;

	bulkfix_begin(&g, a, b->at, "bytes", 1);
	bulkfix_end(&g);
	cr_expect_eq(g.f.code, FAULT_UNAVAILABLE, "%s", g.f.text);
}
