/* The order of the nodes of an epoch, call by call: tests/unit/test_order_explore.c has the interleavings. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "order/order.h"

TestSuite(order, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define NODES 3

struct node {
	struct order *o;
	uint32_t self;
	unsigned starts, fails, decides, ends;
	struct order_started started;
	struct fault fault;
	struct order_key failed;
};

static struct node nodes[NODES];
/* Links: messages in the order in which they were sent, all links together. */
static struct {
	uint32_t from, to;
	struct order_msg msg;
} wire[4096];
static unsigned n_wire, at_wire, sent;

static void on_send(void *userdata, uint32_t to, const struct order_msg *msg)
{
	struct node *n = userdata;
	uint8_t bytes[ORDER_MSG_MAX];
	size_t size = order_pack(msg, bytes);

	CHECK(n_wire < ARRAY_SIZE(wire));
	wire[n_wire].from = n->self;
	wire[n_wire].to = to;
	cr_assert_eq(order_unpack(bytes, size, &wire[n_wire++].msg), 0);
	sent++;
}

static void on_start(void *userdata, const struct order_started *s)
{
	struct node *n = userdata;

	n->starts++;
	n->started = *s;
}

static void on_fail(void *userdata, const struct order_key *key, const struct fault *fault)
{
	struct node *n = userdata;

	n->fails++;
	n->failed = *key;
	n->fault = *fault;
}

static void on_decide(void *userdata, const struct order_key *key)
{
	struct node *n = userdata;

	(void)key;
	n->decides++;
}

static void on_ended(void *userdata, const struct fault *fault)
{
	struct node *n = userdata;

	n->ends++;
	n->fault = *fault;
}

static void begin(uint32_t n_nodes, uint32_t max_ahead)
{
	static const char *const names[NODES] = { "left", "middle", "right" };
	static const struct order_ops ops = { on_send, on_start, on_fail, on_decide, on_ended };

	n_wire = at_wire = sent = 0;
	for (uint32_t i = 0; i < n_nodes; i++) {
		struct order_options o = { .n_nodes = n_nodes,
					   .self = i,
					   .names = names,
					   .max_ahead = max_ahead,
					   .max_recorded = 64,
					   .patience_us = 100 };

		nodes[i] = (struct node){ .self = i };
		cr_assert_eq(order_new(&o, &ops, &nodes[i], &nodes[i].o), 0);
	}
}

static void end(uint32_t n_nodes)
{
	for (uint32_t i = 0; i < n_nodes; i++)
		nodes[i].o = order_free(nodes[i].o);
}

static void deliver(void)
{
	for (; at_wire < n_wire; at_wire++)
		order_receive(nodes[wire[at_wire].to].o, wire[at_wire].from, &wire[at_wire].msg);
}

static struct order_print print_of(uint64_t what)
{
	struct order_print p = { .words = { what } };

	snprintf(p.text, sizeof(p.text), "Op %llu", (unsigned long long)what);
	return p;
}

static int announce(uint32_t node, uint32_t kind, uint32_t group, uint64_t number, uint32_t flags,
		    uint64_t what)
{
	struct order_print p = print_of(what);
	struct order_entry e = { .key = { kind, group, number },
				 .flags = flags,
				 .print = kind == ORDER_GATHER ? NULL : &p,
				 .rank = node + 4,
				 .pid = (int)node + 100 };

	return order_announce(nodes[node].o, &e);
}

static void collective(uint32_t node, uint64_t number, uint32_t flags, uint64_t what)
{
	cr_assert_eq(announce(node, ORDER_COLLECTIVE, 1, number, flags, what), 0);
}

Test(order, starts_when_all_have_announced)
{
	begin(3, 8);
	collective(1, 1, 0, 7);
	collective(0, 1, 0, 7);
	deliver();
	cr_assert_eq(nodes[0].starts + nodes[1].starts + nodes[2].starts, 0);
	collective(2, 1, 0, 7);
	deliver();
	for (int i = 0; i < 3; i++) {
		cr_assert_eq(nodes[i].starts, 1);
		cr_assert_eq(nodes[i].started.position, 1);
		cr_assert_eq(nodes[i].started.fingerprint, nodes[0].started.fingerprint);
	}
	cr_assert_eq(sent, 4, "one announcement of each other node, one start to each");
	end(3);
}

Test(order, one_node_orders_without_messages)
{
	begin(1, 8);
	collective(0, 1, 0, 7);
	cr_assert_eq(announce(0, ORDER_GATHER, 5, 1, 0, 0), 0);
	cr_assert_eq(nodes[0].starts, 2);
	cr_assert_eq(sent, 0);
	end(1);
}

Test(order, different_ops_fail_with_both_in_the_text)
{
	begin(2, 8);
	collective(0, 3, 0, 7);
	collective(1, 3, 0, 8);
	deliver();
	for (int i = 0; i < 2; i++) {
		cr_assert_eq(nodes[i].fails, 1);
		cr_assert_eq(nodes[i].fault.code, FAULT_STATE);
		cr_assert_str_eq(nodes[i].fault.text,
				 "ops differ at number 3: rank 4 (pid 100) on node left asks for "
				 "Op 7, rank 5 (pid 101) on node middle for Op 8");
	}
	end(2);
}

Test(order, who_comes_late_to_a_refused_op_gets_the_reason)
{
	struct order_print p = print_of(7);
	struct order_entry e = { .key = { ORDER_COLLECTIVE, 1, 1 }, .print = &p };
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_EXHAUSTED, NULL, "no memory for a copy");
	begin(3, 8);
	collective(1, 1, 0, 7);
	cr_assert_eq(order_refuse(nodes[2].o, &e, &f), 0);
	cr_assert_eq(nodes[2].fails, 0, "the leader has not heard of it");
	deliver();
	cr_assert_eq(nodes[1].fails, 1);
	cr_assert_eq(nodes[2].fails, 1);
	collective(0, 1, 0, 7);
	cr_assert_eq(nodes[0].fails, 1);
	for (int i = 0; i < 3; i++) {
		cr_assert_eq(nodes[i].fault.code, FAULT_EXHAUSTED);
		cr_assert_str_eq(nodes[i].fault.text, "no memory for a copy");
	}
	end(3);
}

/* A node whose rank has died refuses the op at its next number, and does not know that it is a commit. The
 * leader ended the epoch then, with a text about decisions in place of the reason. */
Test(order, a_node_may_refuse_a_decision_without_knowing_that_it_is_one)
{
	struct order_print none = { 0 };
	struct order_entry e = { .print = &none };
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "rank 3 is gone");
	begin(2, 8);
	for (uint32_t number = 1; number <= 2; number++) {
		e.key = (struct order_key){ ORDER_COLLECTIVE, 1, number };
		if (number == 1)
			collective(0, number, ORDER_DECISION | ORDER_MARK, 7);
		cr_assert_eq(order_refuse(nodes[1].o, &e, &f), 0);
		deliver();
		if (number == 2)
			collective(0, number, ORDER_DECISION | ORDER_MARK, 7);
		deliver();
		cr_assert_eq(nodes[0].fails, number);
		cr_assert_str_eq(nodes[0].fault.text, "rank 3 is gone");
		cr_assert_eq(nodes[0].decides + nodes[0].starts + nodes[1].starts, 0);
	}
	end(2);
}

Test(order, a_gather_starts_for_whoever_asks_and_once)
{
	begin(3, 8);
	cr_assert_eq(announce(1, ORDER_GATHER, 5, 1, 0, 0), 0);
	cr_assert_eq(announce(2, ORDER_GATHER, 5, 1, 0, 0), 0);
	cr_assert_eq(announce(2, ORDER_GATHER, 5, 1, 0, 0), 0, "it waits already");
	deliver();
	for (int i = 0; i < 3; i++)
		cr_assert_eq(nodes[i].starts, 1);
	cr_assert_eq(announce(0, ORDER_GATHER, 5, 1, 0, 0), ORDER_E_STARTED);
	cr_assert_eq(announce(0, ORDER_GATHER, 5, 2, 0, 0), 0);
	deliver();
	cr_assert_eq(nodes[2].starts, 2);
	end(3);
}

Test(order, no_more_than_max_ahead_wait)
{
	begin(2, 2);
	collective(1, 1, 0, 7);
	collective(1, 2, 0, 7);
	cr_assert_eq(announce(1, ORDER_COLLECTIVE, 1, 3, 0, 7), ORDER_E_AHEAD);
	collective(0, 1, 0, 7);
	deliver();
	collective(1, 3, 0, 7);
	deliver();
	cr_assert_eq(nodes[1].starts, 1);
	cr_assert_eq(nodes[0].ends + nodes[1].ends, 0);
	end(2);
}

Test(order, a_decision_lies_between_the_last_announcement_and_the_start)
{
	struct order_key key = { ORDER_COLLECTIVE, 1, 1 };

	begin(2, 8);
	collective(0, 1, ORDER_DECISION, 7);
	collective(1, 1, ORDER_DECISION, 7);
	deliver();
	cr_assert_eq(nodes[0].decides, 1);
	cr_assert_eq(nodes[0].starts + nodes[1].starts, 0);
	collective(0, 2, 0, 7); /* others go on meanwhile */
	collective(1, 2, 0, 7);
	deliver();
	cr_assert_eq(nodes[1].started.key.number, 2);
	order_decided(nodes[0].o, &key, true, NULL);
	deliver();
	cr_assert_eq(nodes[1].started.key.number, 1);
	cr_assert_eq(nodes[1].started.position, 2);
	end(2);
}

static void step(uint64_t s)
{
	for (uint32_t i = 0; i < 2; i++) {
		collective(i, 3 * s + 1, 0, 7);
		collective(i, 3 * s + 2, 0, 8);
		collective(i, 3 * s + 3, ORDER_MARK, 9);
	}
	deliver();
	for (uint32_t i = 0; i < 2; i++) {
		cr_assert_eq(nodes[i].starts, 3 * s + 3);
		cr_assert_eq(nodes[i].started.position, 3 * s + 3);
		cr_assert_eq(nodes[i].started.fingerprint, nodes[0].started.fingerprint);
	}
}

Test(order, a_step_that_repeats_needs_messages_for_its_mark_only)
{
	unsigned before;

	begin(2, 8);
	for (uint64_t s = 0; s < 3; s++)
		step(s);
	before = sent;
	cr_assert(order_is_recorded(nodes[0].o) && order_is_recorded(nodes[1].o));
	for (uint64_t s = 3; s < 10; s++)
		step(s);
	cr_assert_eq(sent - before, 7 * 2, "an announcement and a start of each mark");
	end(2);
}

/* Both have followed the schedule, and one of them has started something else nevertheless. */
Test(order, what_nodes_have_started_in_a_schedule_is_compared_at_its_mark)
{
	unsigned chains = 0;

	begin(2, 8);
	for (uint64_t s = 0; s < 5; s++)
		step(s);
	for (unsigned i = 0; i < n_wire; i++)
		chains += wire[i].msg.n_chains;
	cr_assert_gt(chains, 0);
	n_wire = at_wire = 0;
	for (uint32_t i = 0; i < 2; i++) {
		collective(i, 16, 0, 7);
		collective(i, 17, 0, 8);
		collective(i, 18, ORDER_MARK, 9);
	}
	for (unsigned i = 0; i < n_wire; i++)
		if (wire[i].from == 1 && wire[i].msg.n_chains)
			wire[i].msg.chains[0].value ^= 1;
	deliver();
	cr_expect_eq(nodes[0].ends, 1);
	cr_expect(strstr(nodes[0].fault.text, "left and middle started different operations"), "%s",
		  nodes[0].fault.text);
	end(2);
}

/* A step of node 0 alone with the mark and collectives at two numbers. */
static void irregular_step(uint64_t mark, uint64_t a, uint64_t b)
{
	cr_assert_eq(announce(0, ORDER_COLLECTIVE, 1, a, 0, 7), 0);
	cr_assert_eq(announce(0, ORDER_COLLECTIVE, 1, b, 0, 7), 0);
	cr_assert_eq(announce(0, ORDER_COLLECTIVE, 2, mark, ORDER_MARK, 9), 0);
}

/* Where a schedule would foretell one number twice, or another one than comes, there is none. */
Test(order, numbers_that_do_not_grow_regularly_are_not_recorded)
{
	begin(1, 8);
	irregular_step(1, 10, 11);
	irregular_step(2, 20, 21);
	irregular_step(3, 30, 32);
	cr_assert(!order_is_recorded(nodes[0].o));
	irregular_step(4, 40, 42);
	cr_assert(order_is_recorded(nodes[0].o));
	end(1);

	begin(1, 8);
	irregular_step(1, 1, 5); /* and then 3 and 7, 5 and 9 */
	irregular_step(2, 11, 15);
	irregular_step(3, 13, 17);
	cr_assert(!order_is_recorded(nodes[0].o));
	end(1);
}

Test(order, what_a_part_of_the_nodes_decides_is_not_recorded)
{
	struct order_nodes part = { { 3 } };
	struct order_print p = print_of(5);
	struct order_entry e = { .flags = ORDER_DECISION, .nodes = &part, .print = &p };

	begin(3, 8);
	for (uint64_t s = 1; s <= 6; s++) {
		struct order_key key = { ORDER_COLLECTIVE, 2, s };

		e.key = key;
		for (uint32_t i = 0; i < 2; i++)
			cr_assert_eq(order_announce(nodes[i].o, &e), 0);
		deliver();
		order_decided(nodes[0].o, &key, true, NULL);
		for (uint32_t i = 0; i < 3; i++)
			collective(i, s, ORDER_MARK, 9);
		deliver();
		cr_assert(!order_is_recorded(nodes[0].o));
	}
	cr_assert_eq(nodes[1].starts, 12);
	cr_assert_eq(nodes[2].starts, 6);
	end(3);
}

/* Gathers that this node has asked for before it asked for what comes later are waited for, so that a node that
 * does the same as the others does not run ahead of its ranks. */
Test(order, a_recorded_gather_waits_for_the_ranks_that_ask_for_it)
{
	begin(2, 8);
	for (uint64_t s = 1; s <= 3; s++) {
		cr_assert_eq(announce(0, ORDER_GATHER, 5, s, 0, 0), 0);
		deliver();
		cr_assert_eq(announce(1, ORDER_GATHER, 5, s, 0, 0), ORDER_E_STARTED);
		collective(0, s, ORDER_MARK, 9);
		collective(1, s, ORDER_MARK, 9);
		deliver();
	}
	cr_assert(order_is_recorded(nodes[1].o));
	cr_assert_eq(nodes[1].starts, 6, "the gather of the next step is not asked for");
	cr_assert_eq(announce(1, ORDER_GATHER, 5, 4, 0, 0), 0);
	cr_assert_eq(nodes[1].starts, 7);
	cr_assert_eq(nodes[0].starts, 6);
	end(2);
}

Test(order, a_recorded_gather_of_others_starts_in_its_place)
{
	begin(2, 8);
	for (uint64_t s = 1; s <= 3; s++) {
		for (uint32_t i = 0; i < 2; i++)
			collective(i, 2 * s - 1, 0, 7);
		deliver();
		cr_assert_eq(announce(0, ORDER_GATHER, 5, s, 0, 0), 0);
		for (uint32_t i = 0; i < 2; i++)
			collective(i, 2 * s, ORDER_MARK, 9);
		deliver();
	}
	cr_assert(order_is_recorded(nodes[1].o));
	collective(1, 7, 0, 7);
	cr_assert_eq(nodes[1].started.key.kind, ORDER_GATHER);
	cr_assert_eq(nodes[1].started.key.number, 4);
	collective(0, 7, 0, 7);
	cr_assert_eq(nodes[0].started.key.kind, ORDER_COLLECTIVE);
	end(2);
}

/* A rank elsewhere needs the gather now, whatever the ranks of this node do. */
Test(order, a_gather_that_is_not_over_in_time_stops_the_schedule)
{
	begin(2, 8);
	for (uint64_t s = 1; s <= 4; s++) {
		cr_assert_eq(announce(0, ORDER_GATHER, 5, s, 0, 0), 0);
		deliver();
		if (s == 4)
			break;
		announce(1, ORDER_GATHER, 5, s, 0, 0);
		collective(0, s, ORDER_MARK, 9);
		collective(1, s, ORDER_MARK, 9);
		deliver();
	}
	cr_assert_eq(nodes[0].starts, 7);
	cr_assert_eq(nodes[1].starts, 6);
	order_tick(nodes[0].o, 100);
	deliver();
	cr_assert_eq(nodes[1].starts, 7);
	cr_assert(!order_is_recorded(nodes[1].o));
	end(2);
}

/* Ranks of this node did not ask for it in the recorded step, and do now. Nobody noticed that they waited. */
Test(order, a_started_gather_that_is_asked_for_stops_the_schedule)
{
	const struct order_key gather = { ORDER_GATHER, 5, 4 };

	begin(2, 8);
	for (uint64_t s = 1; s <= 3; s++) {
		for (uint32_t i = 0; i < 2; i++)
			collective(i, 2 * s - 1, 0, 7);
		deliver();
		cr_assert_eq(announce(0, ORDER_GATHER, 5, s, 0, 0), 0);
		for (uint32_t i = 0; i < 2; i++)
			collective(i, 2 * s, ORDER_MARK, 9);
		deliver();
	}
	collective(1, 7, 0, 7);
	cr_assert_eq(nodes[1].started.key.number, 4);
	order_tick(nodes[1].o, 1000);
	deliver();
	cr_assert(order_is_recorded(nodes[1].o), "nobody waits for it");
	order_asked(nodes[1].o, &gather);
	order_tick(nodes[1].o, 1099);
	deliver();
	cr_assert(order_is_recorded(nodes[1].o));
	order_tick(nodes[1].o, 1100);
	deliver();
	cr_assert(!order_is_recorded(nodes[1].o));
	end(2);
}

Test(order, a_new_op_stops_the_schedule_and_is_ordered)
{
	begin(2, 8);
	for (uint64_t s = 0; s < 4; s++)
		step(s);
	for (uint32_t i = 0; i < 2; i++)
		cr_assert_eq(announce(i, ORDER_COLLECTIVE, 2, 1, 0, 5), 0);
	deliver();
	cr_assert(!order_is_recorded(nodes[0].o) && !order_is_recorded(nodes[1].o));
	for (uint32_t i = 0; i < 2; i++) {
		cr_assert_eq(nodes[i].started.key.group, 2);
		cr_assert_eq(nodes[i].started.position, 13);
	}
	end(2);
}

Test(order, what_has_to_wait_too_long_stops_the_schedule)
{
	begin(2, 8);
	for (uint64_t s = 0; s < 4; s++)
		step(s);
	for (uint32_t i = 0; i < 2; i++) /* the first one does not come */
		collective(i, 14, 0, 8);
	order_tick(nodes[1].o, 99);
	deliver();
	cr_assert(order_is_recorded(nodes[1].o));
	order_tick(nodes[1].o, 100);
	deliver();
	cr_assert(!order_is_recorded(nodes[1].o));
	cr_assert_eq(nodes[0].started.key.number, 14);
	cr_assert_eq(nodes[1].started.key.number, 14);
	end(2);
}

static void assert_ended(uint32_t node, const char *text)
{
	cr_assert_eq(nodes[node].ends, 1);
	cr_assert(strstr(nodes[node].fault.text, text), "\"%s\" is not in \"%s\"", text,
		  nodes[node].fault.text);
	cr_assert_eq(announce(node, ORDER_COLLECTIVE, 1, 99, 0, 7), ORDER_E_ENDED);
}

Test(order, what_no_node_may_send_ends_the_epoch)
{
	struct order_msg start = { .type = ORDER_MSG_START,
				   .flags = ORDER_MSG_ALL,
				   .key = { ORDER_COLLECTIVE, 1, 1 },
				   .position = 1 };
	struct order_msg m = { .type = ORDER_MSG_ANNOUNCE,
			       .flags = ORDER_MSG_ALL,
			       .key = { ORDER_COLLECTIVE, 1, 1 } };
	struct order_msg stop = { .type = ORDER_MSG_STOP };
	struct order_msg other = m;

	begin(3, 2);
	order_receive(nodes[1].o, 0, &start);
	assert_ended(1, "node left sent a start of what was not announced");
	order_receive(nodes[2].o, 1, &start);
	assert_ended(2, "node middle sent what only the leader may send");
	order_receive(nodes[0].o, 1, &m);
	order_receive(nodes[0].o, 1, &m);
	assert_ended(0, "node middle sent the announcement of an operation twice");
	end(3);

	begin(3, 2);
	order_receive(nodes[1].o, 2, &m);
	assert_ended(1, "what only the leader may get");
	order_receive(nodes[2].o, 0, &stop);
	assert_ended(2, "a stop without a schedule");
	other.flags = 0;
	order_nodes_add(&other.nodes, 5);
	order_receive(nodes[0].o, 1, &other);
	assert_ended(0, "a set of nodes that do not exist");
	end(3);

	begin(3, 2);
	for (uint64_t i = 1; i <= 3; i++) {
		m.key.number = i;
		order_receive(nodes[0].o, 2, &m);
	}
	assert_ended(0, "node right sent more operations than may wait");
	end(3);
}

Test(order, after_the_end_nothing_is_called)
{
	begin(2, 8);
	collective(1, 1, 0, 7);
	collective(0, 1, 0, 7);
	order_end(nodes[1].o);
	deliver();
	order_tick(nodes[1].o, 1000);
	order_done(nodes[1].o, 1);
	cr_assert_eq(nodes[0].starts, 1);
	cr_assert_eq(nodes[1].starts + nodes[1].fails + nodes[1].ends, 0);
	end(2);
}

static uint64_t random_next(uint64_t *x)
{
	*x ^= *x << 13;
	*x ^= *x >> 7;
	*x ^= *x << 17;
	return *x >> 8;
}

static void random_msg(uint64_t *x, struct order_msg *m)
{
	*m = (struct order_msg){ .type = (uint8_t)(1 + random_next(x) % (_ORDER_MSG_N - 1)),
				 .phase = (uint32_t)(random_next(x) % 3),
				 .key = { (uint32_t)(1 + random_next(x) % 3),
					  (uint32_t)(random_next(x) % 3), random_next(x) % 4 },
				 .rank = (uint32_t)random_next(x),
				 .pid = (int32_t)random_next(x),
				 .position = random_next(x) % 8,
				 .hash = random_next(x),
				 .n = (uint32_t)random_next(x) % 5 };
	m->flags = (uint8_t)(random_next(x) % 32);
	m->n_chains = random_next(x) % (ORDER_MSG_CHAINS + 1);
	for (uint32_t i = 0; i < m->n_chains; i++)
		m->chains[i] = (struct order_chain){ random_next(x), random_next(x) };
	for (uint32_t i = 0; i < 3; i++)
		if (random_next(x) % 2)
			order_nodes_add(&m->nodes, i);
	for (unsigned i = 0; i < 8; i++)
		m->print.words[i] = random_next(x) % 2;
	snprintf(m->print.text, sizeof(m->print.text), "Op %u", (unsigned)random_next(x) % 1000);
	fault_set(&m->fault, FAULT_ABORTED, NULL, "the reason %u", (unsigned)random_next(x) % 9);
}

Test(order, a_message_is_what_it_was_once_it_is_read)
{
	uint64_t x = 99;
	unsigned good = 0;

	for (int i = 0; i < 20000; i++) {
		uint8_t bytes[ORDER_MSG_MAX], again[ORDER_MSG_MAX];
		struct order_msg m, read;
		size_t n;

		random_msg(&x, &m);
		n = order_pack(&m, bytes);
		cr_assert_leq(n, ORDER_MSG_MAX);
		for (size_t k = 0; k < n; k++)
			cr_assert_eq(order_unpack(bytes, k, &read), ORDER_E_MALFORMED);
		if (order_unpack(bytes, n, &read))
			continue; /* flags that this type does not have */
		good++;
		cr_assert_eq(order_pack(&read, again), n);
		cr_assert_arr_eq(again, bytes, n);
	}
	cr_assert_gt(good, 1000);
}

Test(order, the_longest_message_fits)
{
	struct order_msg m = { .type = ORDER_MSG_REFUSE, .key = { ORDER_APPLY, 1, 1 } }, read;
	uint8_t bytes[ORDER_MSG_MAX];
	size_t n;

	memset(&m.nodes, 0xff, sizeof(m.nodes));
	m.fault.code = FAULT_ABORTED;
	memset(m.fault.text, 'x', sizeof(m.fault.text) - 1);
	n = order_pack(&m, bytes);
	cr_assert_eq(order_unpack(bytes, n, &read), 0);
	cr_assert_str_eq(read.fault.text, m.fault.text);
	cr_assert_arr_eq(&read.nodes, &m.nodes, sizeof(m.nodes));
	bytes[0]++;
	cr_assert_eq(order_unpack(bytes, n, &read), ORDER_E_MALFORMED, "another version");
}

/* Bytes changed at random, to a node in each state: it lives, or its epoch ends with a reason. */
Test(order, broken_peers_end_the_epoch_at_most)
{
	uint64_t x = 7;
	unsigned ends = 0;

	for (int i = 0; i < 3000; i++) {
		begin(2, 8);
		for (uint64_t s = 0; s < (uint64_t)i % 5; s++)
			step(s);
		for (int k = 0; k < 20; k++) {
			uint32_t to = random_next(&x) % 2;
			uint8_t bytes[ORDER_MSG_MAX];
			struct order_msg m;
			size_t n;

			random_msg(&x, &m);
			n = order_pack(&m, bytes);
			bytes[random_next(&x) % n] ^= (uint8_t)(1 << random_next(&x) % 8);
			if (order_unpack(bytes, n, &m) == 0)
				order_receive(nodes[to].o, 1 - to, &m);
			if (random_next(&x) % 4 == 0)
				announce(to, ORDER_COLLECTIVE, 5, (uint64_t)k + 1, 0, 7);
			order_tick(nodes[to].o, (uint64_t)k * 50);
		}
		for (uint32_t k = 0; k < 2; k++) {
			cr_assert_leq(nodes[k].ends, 1);
			cr_assert(!nodes[k].ends || nodes[k].fault.text[0]);
			ends += nodes[k].ends;
		}
		end(2);
	}
	cr_assert_gt(ends, 1000);
}
