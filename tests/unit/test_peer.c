/* Links between nodes: life, order, silence, limits. TLS: test_peer_tls.c; others than nodes:
 * test_peer_hostile.c. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/clock.h"
#include "peer/peer_impl.h"
#include "peerfix.h"
#include "stopped.h"

#define MOST 10000u

TestSuite(peer, .init = peerfix_begin, .fini = peerfix_end, .timeout = 120);
/* These begin by themselves, after a fork. */
TestSuite(peer_process, .timeout = 120);

#define expect_text(text, part) \
	cr_expect(strstr((text), (part)), "'%s' does not say '%s'", (text), (part))

Test(peer, a_link_is_up_on_both_ends)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_link(a, b);
	cr_expect_str_eq(peer_name(a->last), "b");
	cr_expect_str_eq(peer_name(b->last), "a");
	cr_expect_arr_eq(a->last->instance, b->o.instance, PEER_INSTANCE_BYTES);
	cr_expect_arr_eq(b->last->instance, a->o.instance, PEER_INSTANCE_BYTES);
	cr_expect(peer_is_dialled(a->last));
	cr_expect_not(peer_is_dialled(b->last));
	peerfix_turn(2 * PEER_SILENCE_US / 1000);
	cr_expect_eq(a->gones + b->gones, 0, "pings keep it: %s%s", a->why, b->why);
}

Test(peer, each_of_two_may_dial_the_other)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_link(a, b);
	peerfix_link(b, a);
	peerfix_turn(200);
	cr_expect_eq(a->gones + b->gones, 0, "%s%s", a->why, b->why);
}

Test(peer, messages_come_in_order)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_link(a, b);
	for (uint64_t i = 0; i < MOST; i++) {
		peerfix_send(a->last, i, i % 700);
		peerfix_send(b->last, i, i % 300);
	}
	cr_expect_eq(a->messages + b->messages, 0, "called from inside");
	peerfix_await_messages(b, MOST);
	peerfix_await_messages(a, MOST);
	cr_expect_not(a->disordered);
	cr_expect_not(b->disordered);
	cr_expect_eq(a->gones + b->gones, 0, "%s%s", a->why, b->why);
}

Test(peer, a_large_message_is_carried_and_one_that_is_too_large_ends_the_link)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_link(a, b);
	peerfix_send(a->last, 0, PEER_MESSAGE_BYTES - 64);
	peerfix_await_messages(b, 1);
	peerfix_send(a->last, 1, PEER_MESSAGE_BYTES);
	cr_expect_eq(a->gones, 0, "called from inside");
	peerfix_await_gone(a, 1);
	expect_text(a->why, "must not have more than 4194304");
	peerfix_await_gone(b, 1);
	expect_text(b->why, "node 'a' has ended the link: a message for node 'b' has 4194");
}

Test(peer, a_node_that_takes_nothing_ends_the_link)
{
	struct peers_options o = { .max_queued = 65536 };
	struct peerfix_node *a = peerfix_node("a", &o), *b = peerfix_node("b", NULL);

	peerfix_link(a, b);
	for (uint64_t i = 0; i < 100; i++)
		peerfix_send(a->last, i, 1000);
	cr_expect_eq(a->gones, 0, "called from inside");
	peerfix_await_gone(a, 1);
	expect_text(a->why, "node 'b' does not take its messages");
	expect_text(a->why, "the limit is 65536");
	peerfix_await_gone(b, 1);
	expect_text(b->why, "does not take its messages");
	cr_expect_not(b->disordered);
}

Test(peer, either_end_may_end_it_and_says_why)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_link(a, b);
	peer_end(a->last, "the job is over");
	peer_end(a->last, "again");
	peerfix_send(a->last, 0, 8);
	cr_expect_eq(a->gones, 0, "called from inside");
	peerfix_await_gone(a, 1);
	peerfix_await_gone(b, 1);
	cr_expect_str_eq(a->why, "the job is over");
	cr_expect_str_eq(b->why, "node 'a' has ended the link: the job is over");
	peerfix_link(a, b);
	peer_end(b->last, "the job is\nover");
	peerfix_await_gone(b, 2);
	peerfix_await_gone(a, 2);
	cr_expect_str_eq(b->why, "the job is?over");
	expect_text(a->why, "has ended the link: the job is?over");
	cr_expect_eq(b->messages, 0);
}

Test(peer, one_that_was_never_up_may_be_ended)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peer_end(peerfix_connect(a, "b", b->at), "it is not needed");
	peerfix_await_gone(a, 1);
	cr_expect_str_eq(a->why, "it is not needed");
	peerfix_turn(200);
	cr_expect_eq(a->ups, 0);
	cr_expect_eq(a->gones, 1);
}

/* ----------------------------------------------------------------------------------- refusals */

Test(peer, another_name_is_refused)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_connect(a, "c", b->at);
	peerfix_await_gone(a, 1);
	expect_text(a->why, "is 'b'; 'c' is expected there");
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "is 'b'; 'c' is expected there");
	cr_expect_eq(a->ups + b->ups, 0);
	cr_expect_eq(b->gones, 0);
}

Test(peer, another_cluster_is_refused)
{
	struct peers_options o = { .cluster = "other" };
	struct peerfix_node *a = peerfix_node("a", &o), *b = peerfix_node("b", NULL);

	peerfix_connect(a, "b", b->at);
	peerfix_await_gone(a, 1);
	expect_text(a->why, "node 'a' is of cluster 'other', node 'b' is of cluster 'test'");
	cr_expect_eq(b->refusals, 1);
	expect_text(b->refused, "of cluster 'other'");
	cr_expect_eq(a->ups + b->ups, 0);
}

Test(peer, two_nodes_of_one_name_are_refused)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("a", NULL);

	peerfix_connect(a, "b", b->at);
	peerfix_await_gone(a, 1);
	expect_text(a->why, "have the name 'a'");
}

Test(peer, only_allowed_nodes_connect)
{
	const char *const names[] = { "x", "c" };
	struct peers_options o = { .allowed = names, .n_allowed = 2 };
	struct peerfix_node *b = peerfix_node("b", &o), *a = peerfix_node("a", NULL),
			    *c = peerfix_node("c", NULL);
	struct fault f = FAULT_NULL;
	struct peer *p;

	peerfix_connect(a, "b", b->at);
	peerfix_await_gone(a, 1);
	expect_text(a->why, "node 'a' is not among the nodes that may connect to node 'b'");
	peerfix_link(c, b);
	cr_expect_eq(peers_connect(b->ps, "a", a->at, &p, &f), FAULT_DENIED);
	expect_text(f.text, "'a' is not among the nodes");
}

Test(peer, nobody_listens)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_close(b);
	peerfix_connect(a, "b", b->at);
	cr_expect_eq(a->gones, 0, "called from inside");
	peerfix_await_gone(a, 1);
	expect_text(a->why, "node 'b' cannot be reached at 127.0.0.1:");
	expect_text(a->why, "Connection refused");
}

Test(peer, bad_options_are_refused)
{
	static const struct {
		const char *listen, *node, *cluster, *part;
		enum fault_code code;
	} cases[] = {
		{ "0.0.0.0:0", "a", "c", "not an address of loopback", FAULT_DENIED },
		{ "[::]:0", "a", "c", "not an address of loopback", FAULT_DENIED },
		{ "some.node:0", "a", "c", "not an address of loopback", FAULT_DENIED },
		{ "127.0.0.1", "a", "c", "write HOST:PORT", FAULT_INVALID },
		{ "127.0.0.1:65536", "a", "c", "from 0 to 65535", FAULT_INVALID },
		{ "127.0.0.1:-1", "a", "c", "write HOST:PORT", FAULT_INVALID },
		{ "::1:7", "a", "c", "write HOST:PORT", FAULT_INVALID },
		{ ":7", "a", "c", "write HOST:PORT", FAULT_INVALID },
		{ "a?b:7", "a", "c", "write HOST:PORT", FAULT_INVALID },
		{ "127.0.0.1:0", "a/b", "c", "not a valid node name", FAULT_INVALID },
		{ "127.0.0.1:0", "", "c", "not a valid node name", FAULT_INVALID },
		{ "127.0.0.1:0", "a", "", "not a valid cluster name", FAULT_INVALID },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct peers_options o = { .listen = cases[i].listen,
					   .node = cases[i].node,
					   .cluster = cases[i].cluster };
		struct fault f = FAULT_NULL;
		const struct peers_ops ops = { (void *)abort, (void *)abort, (void *)abort, NULL };
		struct peers *ps;

		cr_expect_eq(peers_new(&peerfix.run.queue, &o, &ops, NULL, &ps, &f),
			     (int)cases[i].code, "%s: %s", cases[i].listen, f.text);
		expect_text(f.text, cases[i].part);
	}
}

Test(peer, plaintext_is_for_loopback)
{
	struct peers_options o = { .insecure = true, .listen = "0.0.0.0:0" };
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", &o);
	struct fault f = FAULT_NULL;
	struct peer *p;

	cr_expect_eq(peers_connect(a->ps, "b", "192.0.2.1:7", &p, &f), FAULT_DENIED);
	expect_text(f.text, "192.0.2.1:7 is not an address of loopback");
	f = FAULT_NULL;
	cr_expect_eq(peers_connect(a->ps, "b", "127.0.0.1:0", &p, &f), FAULT_INVALID);
	expect_text(f.text, "from 1 to 65535");
	f = FAULT_NULL;
	cr_expect_eq(peers_connect(a->ps, "b/", b->at, &p, &f), FAULT_INVALID);
	f = FAULT_NULL;
	cr_expect_eq(peers_connect(a->ps, "a", b->at, &p, &f), FAULT_INVALID);
	peerfix_link(a, b);
}

Test(peer, an_address_may_be_of_ipv6)
{
	struct peers_options o = { .listen = "[::1]:0", .cluster = "other" };
	struct peerfix_node *a = peerfix_node("a", NULL), *b;
	struct fault f = FAULT_NULL;
	struct peers *probe;
	char at[32];
	const struct peers_ops ops = { (void *)abort, (void *)abort, (void *)abort, NULL };

	o.node = "probe";
	if (peers_new(&peerfix.run.queue, &o, &ops, NULL, &probe, &f))
		cr_skip_test("this machine has no loopback of IPv6");
	peers_close(probe, NULL, NULL);
	o.cluster = NULL;
	b = peerfix_node("b", &o);
	snprintf(at, sizeof(at), "[::1]:%u", peers_port(b->ps));
	peerfix_connect(a, "b", at);
	peerfix_await_up(a, 1);
	peerfix_connect(a, "c", at);
	peerfix_await_refused(b, 1);
	expect_text(b->refused, "has ended the link");
}

Test(peer, an_address_that_is_taken_is_a_fault)
{
	struct peerfix_node *a = peerfix_node("a", NULL);
	struct peers_options o = a->o;
	const struct peers_ops ops = { (void *)abort, (void *)abort, (void *)abort, NULL };
	struct fault f = FAULT_NULL;
	struct peers *ps;

	o.listen = a->at;
	cr_expect_eq(peers_new(&peerfix.run.queue, &o, &ops, NULL, &ps, &f), FAULT_INTERNAL);
	expect_text(f.text, a->at);
	expect_text(f.text, "Address already in use");
}

Test(peer, there_is_a_limit_of_links)
{
	struct peers_options o = { .max_links = 2 };
	struct peerfix_node *a = peerfix_node("a", &o), *b = peerfix_node("b", NULL),
			    *c = peerfix_node("c", NULL), *d = peerfix_node("d", NULL);
	struct fault f = FAULT_NULL;
	struct peer *p;

	peerfix_link(b, a);
	peerfix_link(a, c);
	peerfix_connect(d, "a", a->at);
	peerfix_await_gone(d, 1);
	expect_text(d->why, "node 'a' has 2 links, its limit");
	cr_expect_eq(peers_connect(a->ps, "d", d->at, &p, &f), FAULT_EXHAUSTED);
	expect_text(f.text, "there are 2 links");
	peer_end(b->last, "it is not needed");
	peerfix_await_gone(a, 1);
	peerfix_turn(100);
	peerfix_link(d, a);
}

/* What has a connection, and says nothing: the kernel of a node that is stopped. */
Test(peer, one_that_does_not_answer_is_gone_in_time)
{
	struct sockaddr_in at = { .sin_family = AF_INET,
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct peerfix_node *a = peerfix_node("a", NULL);
	socklen_t bytes = sizeof(at);
	char text[32];

	cr_assert_eq(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
	cr_assert_eq(listen(fd, 8), 0);
	cr_assert_eq(getsockname(fd, (struct sockaddr *)&at, &bytes), 0);
	snprintf(text, sizeof(text), "127.0.0.1:%u", ntohs(at.sin_port));
	for (unsigned i = 0; i < 5; i++)
		peerfix_connect(a, "b", text);
	peerfix_await_gone(a, 5);
	cr_log_info("%s", a->why);
	expect_text(a->why, "node 'b' ");
	close(fd);
}

static void note(void *flag)
{
	*(bool *)flag = true;
}

/* gRPC core lost the descriptor of a connection whose channel was destroyed just when it was made. */
Test(peer, one_that_ends_while_it_connects_leaves_nothing)
{
	struct peers_options o = { .listen = "127.0.0.1:0", .cluster = "test", .node = "z" };
	const struct peers_ops ops = { (void *)abort, (void *)abort, (void *)abort, NULL };
	struct peerfix_node *b = peerfix_node("b", NULL);

	for (unsigned i = 0; i < 100; i++) {
		uint64_t until = clock_now_us() + 20 * i;
		struct fault f = FAULT_NULL;
		bool closed = false;
		struct peers *ps;
		struct peer *p;

		cr_assert_eq(peers_new(&peerfix.run.queue, &o, &ops, NULL, &ps, &f), 0);
		cr_assert_eq(peers_connect(ps, "b", b->at, &p, &f), 0);
		while (clock_now_us() < until)
			;
		peers_close(ps, note, &closed);
		looprun_flag(&peerfix.run, &closed, 30);
	}
}

/* --------------------------------------------------------------------------- a node comes again */

Test(peer, a_newer_daemon_replaces_the_older_one)
{
	struct peers_options o = { .instance = "newer" };
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL),
			    *newer = peerfix_node("b", &o);

	peerfix_link(b, a);
	peerfix_link(a, b);
	peerfix_link(newer, a);
	cr_expect_eq(a->gones, 2);
	cr_expect_str_eq(a->why, "a newer daemon of node 'b' has connected");
	cr_assert(a->last);
	cr_expect_arr_eq(a->last->instance, newer->o.instance, PEER_INSTANCE_BYTES);
	peerfix_await_gone(b, 2);
	expect_text(b->why, "a newer daemon of node 'b' has connected");
	peerfix_turn(100);
	cr_expect_eq(newer->gones, 0, "%s", newer->why);
}

Test(peer, one_that_connects_again_replaces_its_link)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);

	peerfix_link(a, b);
	peerfix_link(b, a);
	peerfix_link(b, a);
	peerfix_await_gone(a, 1);
	peerfix_await_gone(b, 1);
	expect_text(a->why, "node '");
	expect_text(a->why, "has connected again");
	cr_assert(a->last);
	peerfix_send(a->last, 0, 8);
	peerfix_await_messages(b, 1);
	peerfix_turn(100);
	cr_expect_eq(a->gones, 1, "the link that the other end dialled stays: %s", a->why);
}

/* --------------------------------------------------------------------------------------- time */

/* Without a turn of the loop nothing is received. */
static void pass(struct peerfix_node *n, uint64_t *now, uint64_t us, uint64_t step)
{
	for (uint64_t until = *now + us; *now < until;) {
		*now += step;
		clock_fake(*now);
		peers_tick(n->ps, *now);
	}
}

Test(peer, silence_ends_a_link)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);
	uint64_t now;

	peerfix_link(a, b);
	peerfix.held = true;
	now = clock_now_us();
	pass(a, &now, PEER_SILENCE_US - 300000, 50000);
	cr_expect_eq(a->gones, 0);
	pass(a, &now, 400000, 50000);
	cr_expect_eq(a->gones, 0, "called from inside");
	clock_real();
	peerfix_await_gone(a, 1);
	cr_expect_str_eq(a->why, "node 'b' has not answered for 1.25 s");
	peerfix_await_gone(b, 1);
}

Test(peer, a_loop_that_was_blocked_blames_nobody)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL);
	uint64_t now;

	peerfix_link(a, b);
	peerfix.held = true;
	now = clock_now_us();
	pass(a, &now, 100000, 50000);
	pass(a, &now, 5000000, 5000000);
	pass(a, &now, 600000, 50000);
	pass(b, &now, 10000000, 10000000);
	peerfix.held = false;
	clock_real();
	peerfix_turn(1000);
	cr_expect_eq(a->gones + b->gones, 0, "%s%s", a->why, b->why);
}

static void begin_with(pid_t *pid, char *at, struct peerfix_node **ret)
{
	*pid = peerfix_fork("far", at);
	peerfix_begin();
	*ret = peerfix_node("near", NULL);
	peerfix_connect(*ret, "far", at);
	peerfix_await_messages(*ret, 3);
}

Test(peer_process, a_node_that_is_killed_is_gone_at_once)
{
	struct peerfix_node *n;
	uint64_t began;
	char at[32];
	pid_t pid;

	begin_with(&pid, at, &n);
	began = clock_now_us();
	peerfix_reap(pid);
	peerfix_await_gone(n, 1);
	cr_expect_lt(clock_now_us() - began, 5000000u);
	expect_text(n->why, "the connection to node 'far' is closed");
	cr_expect_not(n->disordered);
	peerfix_end();
}

Test(peer_process, a_node_that_is_stopped_is_gone_after_a_time)
{
	struct peerfix_node *n;
	uint64_t began;
	char at[32];
	pid_t pid;

	begin_with(&pid, at, &n);
	peerfix_await_messages(n, n->messages + 1);
	stopped_stop(pid);
	began = clock_now_us();
	peerfix_await_gone(n, 1);
	cr_expect_gt(clock_now_us() - began, 1000000u);
	cr_expect_lt(clock_now_us() - began, 5000000u); /* silence_ends_a_link is exact */
	cr_expect_str_eq(n->why, "node 'far' has not answered for 1.25 s");
	peerfix_reap(pid);
	peerfix_end();
}

/* -------------------------------------------------------------------------------------- the end */

Test(peer, after_the_end_nothing_is_told)
{
	struct peerfix_node *a = peerfix_node("a", NULL), *b = peerfix_node("b", NULL),
			    *c = peerfix_node("c", NULL);

	peerfix_link(a, b);
	peerfix_link(c, a);
	peerfix_connect(a, "c", c->at);
	peerfix_send(a->last, 0, 1000000);
	peer_end(peerfix_connect(a, "b", b->at), "it is not needed");
	peerfix_close(a);
	cr_expect_eq(a->gones, 0);
	peerfix_await_gone(b, 1);
	peerfix_await_gone(c, 1);
	cr_expect_eq(a->gones, 0);
}

static struct peers *closes;

static void close_on_gone(void *userdata, struct peer *p, const char *why)
{
	(void)p;
	(void)why;
	peers_close(closes, NULL, NULL);
	*(bool *)userdata = true;
}

Test(peer, it_may_be_closed_in_a_callback)
{
	struct peers_options o = { .listen = "127.0.0.1:0", .cluster = "test", .node = "z" };
	const struct peers_ops ops = { (void *)abort, (void *)abort, close_on_gone, NULL };
	struct peerfix_node *b = peerfix_node("b", NULL);
	struct fault f = FAULT_NULL;
	struct peer *p;
	bool gone = false;

	cr_assert_eq(peers_new(&peerfix.run.queue, &o, &ops, &gone, &closes, &f), 0, "%s", f.text);
	cr_assert_eq(peers_connect(closes, "y", b->at, &p, &f), 0);
	cr_assert_eq(peers_connect(closes, "x", b->at, &p, &f), 0);
	looprun_flag(&peerfix.run, &gone, 30);
	peerfix_turn(300);
}
