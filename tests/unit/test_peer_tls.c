/* Links between nodes with certificates. */
#include <criterion/criterion.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "certfix.h"
#include "core/clock.h"
#include "peerfix.h"

static struct certfix certs;
static char paths[16][160];
static unsigned n_paths;

static void begin(void)
{
	certfix_begin(&certs);
	certfix_ca(&certs, "ca");
	peerfix_begin();
}

static void end(void)
{
	peerfix_end();
	certfix_end(&certs);
}

TestSuite(peer_tls, .init = begin, .fini = end, .timeout = 120);

#define expect_text(text, part) \
	cr_expect(strstr((text), (part)), "'%s' does not say '%s'", (text), (part))

static const char *path(const char *name, const char *kind)
{
	char file[64];

	cr_assert_lt(n_paths, 16);
	snprintf(file, sizeof(file), "%s%s", name, kind);
	return certfix_path(&certs, file, paths[n_paths++], sizeof(paths[0]));
}

/* Node @name with the certificate @cert of @ca. */
static struct peerfix_node *node(const char *name, const char *ca, const char *cert)
{
	struct peers_options o = { .ca = path(ca, ".pem"),
				   .cert = path(cert, ".pem"),
				   .key = path(cert, ".key"),
				   .reload_s = 1,
				   .listen = "127.0.0.1:0" };

	return peerfix_node(name, &o);
}

Test(peer_tls, nodes_with_certificates_have_links)
{
	struct peerfix_node *a, *b;

	certfix_cert(&certs, "ca", "a", "DNS:a");
	certfix_cert(&certs, "ca", "b", "DNS:x.example,DNS:b,IP:10.0.0.1");
	a = node("a", "ca", "a");
	b = node("b", "ca", "b");
	peerfix_link(a, b);
	peerfix_link(b, a);
	for (uint64_t i = 0; i < 1000; i++)
		peerfix_send(a->last, i, 1000);
	peerfix_await_messages(b, 1000);
	cr_expect_not(b->disordered);
	cr_expect_eq(a->gones + b->gones, 0);
}

Test(peer_tls, the_dialled_one_must_have_its_name)
{
	struct peerfix_node *a, *b, *c;

	certfix_cert(&certs, "ca", "a", "DNS:a");
	certfix_cert(&certs, "ca", "b", "DNS:c,DNS:*.b,URI:b"); /* its common name does not count */
	certfix_cert(&certs, "ca", "c", "");
	a = node("a", "ca", "a");
	b = node("b", "ca", "b");
	c = node("c", "ca", "c");
	peerfix_connect(a, "b", b->at);
	peerfix_await_gone(a, 1);
	expect_text(a->why,
		    "its certificate has the DNS names 'c', '*.b': 'b' must be one of them");
	peerfix_connect(a, "c", c->at);
	peerfix_await_gone(a, 2);
	expect_text(a->why, "'c' must be one of them");
	cr_expect_eq(a->ups + b->ups + c->ups, 0);
}

Test(peer_tls, the_one_that_dials_must_have_its_name)
{
	struct peerfix_node *a, *b;

	certfix_cert(&certs, "ca", "a", "DNS:c,DNS:aa");
	certfix_cert(&certs, "ca", "b", "DNS:b");
	a = node("a", "ca", "a");
	b = node("b", "ca", "b");
	peerfix_connect(a, "b", b->at);
	peerfix_await_gone(a, 1);
	expect_text(a->why, "node 'a' has a certificate with the DNS names 'c', 'aa'");
	expect_text(b->refused, "node 'a' has a certificate with the DNS names 'c', 'aa'");
	cr_expect_eq(a->ups + b->ups, 0);
}

Test(peer_tls, another_ca_is_refused)
{
	struct peerfix_node *a, *b, *c;

	certfix_ca(&certs, "other");
	certfix_cert(&certs, "ca", "a", "DNS:a");
	certfix_cert(&certs, "other", "b", "DNS:b");
	certfix_cert(&certs, "other", "c", "DNS:c");
	a = node("a", "ca", "a");
	b = node("b", "other", "b");
	c = node("c", "ca", "c"); /* trusts the others, and has no certificate of their CA */
	peerfix_connect(a, "b", b->at);
	peerfix_connect(b, "a", a->at);
	peerfix_connect(c, "a", a->at);
	peerfix_await_gone(a, 1);
	peerfix_await_gone(b, 1);
	peerfix_await_gone(c, 1);
	expect_text(a->why, "node 'b' cannot be reached");
	expect_text(a->why, "its certificate must be signed by peer_ca of this node");
	expect_text(b->why, "node 'a' cannot be reached");
	expect_text(c->why, "node 'a' cannot be reached");
	cr_expect_eq(a->ups + b->ups + c->ups, 0);
	cr_log_info("%s", a->why);
	cr_log_info("%s", b->why);
	cr_log_info("%s", c->why);
}

Test(peer_tls, plaintext_and_certificates_do_not_mix)
{
	struct peerfix_node *a, *b = peerfix_node("b", NULL);

	certfix_cert(&certs, "ca", "a", "DNS:a");
	a = node("a", "ca", "a");
	peerfix_connect(a, "b", b->at);
	peerfix_connect(b, "a", a->at);
	peerfix_await_gone(a, 1);
	peerfix_await_gone(b, 1);
	cr_expect_eq(a->ups + b->ups, 0);
	expect_text(a->why, "it has no certificate, and this node has one");
	cr_log_info("%s", a->why);
	cr_log_info("%s", b->why);
}

Test(peer_tls, only_allowed_nodes_connect)
{
	const char *const names[] = { "c" };
	struct peers_options o = { .allowed = names, .n_allowed = 1 };
	struct peerfix_node *a, *b;

	certfix_cert(&certs, "ca", "a", "DNS:a");
	certfix_cert(&certs, "ca", "b", "DNS:b");
	a = node("a", "ca", "a");
	o.ca = path("ca", ".pem");
	o.cert = path("b", ".pem");
	o.key = path("b", ".key");
	b = peerfix_node("b", &o);
	peerfix_connect(a, "b", b->at);
	peerfix_await_gone(a, 1);
	expect_text(a->why, "node 'a' is not among the nodes that may connect to node 'b'");
}

/* ------------------------------------------------------------------------ without a certificate */

static char *read_file(const char *at)
{
	FILE *f = fopen(at, "re");
	char *text = calloc(1, 65536);

	cr_assert(f && text);
	cr_assert_gt(fread(text, 1, 65535, f), 0);
	fclose(f);
	return text;
}

/* One call of a client that trusts the CA and shows nothing. Return: its status. */
static grpc_status_code call_without(const char *at, const char *name)
{
	char *ca = read_file(path("ca", ".pem")), *why;
	grpc_channel_credentials *creds = grpc_ssl_credentials_create(ca, NULL, NULL, NULL);
	grpc_arg arg = { GRPC_ARG_STRING,
			 (char *)GRPC_SSL_TARGET_NAME_OVERRIDE_ARG,
			 { .string = (char *)name } };
	grpc_channel_args args = { 1, &arg };
	grpc_completion_queue *cq = grpc_completion_queue_create_for_pluck(NULL);
	grpc_channel *channel = grpc_channel_create(at, creds, &args);
	gpr_timespec until =
		gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(20, GPR_TIMESPAN));
	grpc_call *call = grpc_channel_create_call(
		channel, NULL, GRPC_PROPAGATE_DEFAULTS, cq,
		grpc_slice_from_static_string("/shardd.v1.PeerService/Link"), NULL, until, NULL);
	grpc_status_code status = GRPC_STATUS_OK;
	grpc_slice details = grpc_empty_slice();
	grpc_metadata_array trailing;
	grpc_op ops[] = {
		{ .op = GRPC_OP_SEND_INITIAL_METADATA },
		{ .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
		  .data.recv_status_on_client = { .trailing_metadata = &trailing,
						  .status = &status,
						  .status_details = &details } },
	};

	grpc_metadata_array_init(&trailing);
	cr_assert_eq(grpc_call_start_batch(call, ops, 2, ops, NULL), GRPC_CALL_OK);
	grpc_completion_queue_pluck(cq, ops, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
	why = grpc_slice_to_c_string(details);
	cr_log_info("%s", why);
	gpr_free(why);
	grpc_slice_unref(details);
	grpc_metadata_array_destroy(&trailing);
	grpc_call_unref(call);
	grpc_channel_destroy(channel);
	grpc_channel_credentials_release(creds);
	grpc_completion_queue_shutdown(cq);
	grpc_completion_queue_destroy(cq);
	free(ca);
	return status;
}

Test(peer_tls, a_client_without_a_certificate_has_no_stream)
{
	struct peerfix_node *a;

	certfix_cert(&certs, "ca", "a", "DNS:a");
	a = node("a", "ca", "a");
	cr_expect_eq(call_without(a->at, "a"), GRPC_STATUS_UNAVAILABLE);
	peerfix_turn(100);
	cr_expect_eq(a->refusals, 0, "%s", a->refused);
}

/* ------------------------------------------------------------------------------- new certificates */

/* Until @from can link to @to, or cannot any more: files are looked at once a second. */
static void link_until(struct peerfix_node *from, struct peerfix_node *to, bool good)
{
	uint64_t until = clock_now_us() + 30000000;
	bool was_good;

	do {
		unsigned ups = from->ups, gones = from->gones;
		struct peer *p = peerfix_connect(from, to->o.node, to->at);

		while (from->ups == ups && from->gones == gones)
			peerfix_turn(20);
		was_good = from->ups > ups;
		if (was_good && !good)
			peer_end(p, "it is not needed");
		peerfix_turn(200);
		cr_assert_lt(clock_now_us(), until, "the files are not read again: %s", from->why);
	} while (was_good != good);
}

Test(peer_tls, new_files_are_read)
{
	struct peerfix_node *a, *b;

	certfix_cert(&certs, "ca", "a", "DNS:a");
	certfix_cert(&certs, "ca", "b", "DNS:wrong");
	a = node("a", "ca", "a");
	b = node("b", "ca", "b");
	peerfix_connect(a, "b", b->at);
	peerfix_await_gone(a, 1);
	certfix_cert(&certs, "ca", "b", "DNS:b");
	link_until(a, b, true);
	/* another CA, which has not signed what the other one still has */
	certfix_ca(&certs, "ca");
	certfix_cert(&certs, "ca", "a", "DNS:a");
	link_until(b, a, false);
	certfix_cert(&certs, "ca", "b", "DNS:b");
	link_until(b, a, true);
}

Test(peer_tls, bad_files_are_a_fault)
{
	const struct peers_ops ops = { (void *)abort, (void *)abort, (void *)abort, NULL };
	struct peers_options o = { .listen = "127.0.0.1:0", .cluster = "test", .node = "a" };
	struct fault f = FAULT_NULL;
	struct peers *ps;

	certfix_cert(&certs, "ca", "a", "DNS:a");
	o.ca = path("ca", ".pem");
	o.cert = path("a", ".pem");
	cr_expect_eq(peers_new(&peerfix.run.queue, &o, &ops, NULL, &ps, &f), FAULT_INVALID);
	expect_text(f.text, "the key of this node is missing");
	f = FAULT_NULL;
	o.key = path("none", ".key");
	cr_expect_eq(peers_new(&peerfix.run.queue, &o, &ops, NULL, &ps, &f), FAULT_INVALID);
	expect_text(f.text, "none.key', which cannot be read: No such file");
	f = FAULT_NULL;
	o.key = "/dev/null";
	cr_expect_eq(peers_new(&peerfix.run.queue, &o, &ops, NULL, &ps, &f), FAULT_INVALID);
	expect_text(f.text, "'/dev/null', which has no text in PEM form");
}
