/*
 * What a hundred daemons of one job say to each other, against ten: each phase costs so many messages for
 * each node, and no more of the store. docs/scaling.md has the figures up to a thousand nodes.
 */
#include <criterion/criterion.h>
#include <stdio.h>

#include "bench/scale/scale.h"

TestSuite(scale, .timeout = 170);

/* The address sanitizer has no memory for a thousand daemons in a process. */
#ifdef __SANITIZE_ADDRESS__
#define MANY_NODES 200
#else
#define MANY_NODES 1000
#endif

static void check(const char *phase, unsigned n, const struct scale_counts *c, uint64_t a_node,
		  uint64_t txns)
{
	fprintf(stderr, "# %4u nodes, %s: %llu messages, %llu bytes, %llu transactions\n", n, phase,
		(unsigned long long)c->messages, (unsigned long long)c->bytes,
		(unsigned long long)c->txns);
	cr_expect_leq(c->messages, a_node * n, "%s with %u nodes: %llu messages", phase, n,
		      (unsigned long long)c->messages);
	cr_expect_leq(c->txns, txns, "%s with %u nodes: %llu transactions", phase, n,
		      (unsigned long long)c->txns);
	/* all links are the leader's */
	cr_expect_eq(c->to_leader + c->from_leader, c->messages);
}

/* Without schedules and with one. */
static void steps(struct scale *s, unsigned n)
{
	struct scale_counts c = scale_collective(s);

	cr_expect_eq(c.messages, 2 * (n - 1)); /* one there, one back */
	check("a collective", n, &c, 2, 0);
	c = scale_commit(s);
	cr_expect_eq(c.messages, 2 * (n - 1));
	check("a commit", n, &c, 2, 1);
	cr_expect_gt(scale_record(s), 0, "%u nodes: no schedule is followed", n);
	c = scale_step(s);
	cr_expect_eq(c.messages, 2 * (n - 1)); /* the commit's alone */
	check("a recorded step", n, &c, 2, 1);
	cr_expect(scale_is_recorded(s));
}

static void all_phases(unsigned n)
{
	struct scale *s = scale_new(n, SCALE_AT_ONCE);
	struct scale_counts c = scale_members(s);

	cr_expect_eq(c.messages, 0);
	cr_expect_eq(c.grants, n);
	check("members", n, &c, 0, 2 * n);
	cr_expect_eq(c.txns, 2 * n, "each joins, and reads the key that it watches from then on");
	c = scale_join(s);
	/* each node tells its rank, and is told the epoch */
	check("join and begin", n, &c, 2, n + 3);
	cr_expect_leq(c.bytes, (uint64_t)n * (64 * n + 200)); /* each is told of all others */
	steps(s, n);
	c = scale_end(s);
	check("end", n, &c, 2, 3);
	scale_free(s);
}

Test(scale, of_two_nodes)
{
	all_phases(2);
}

Test(scale, of_ten_nodes)
{
	all_phases(10);
}

Test(scale, of_a_hundred_nodes)
{
	all_phases(100);
}

/* Two communicators, by keys: each node tells its version, asks for the id, and is told it. */
Test(scale, members_of_communicators_meet_by_keys)
{
	enum { NODES = 50, COMMS = 2 };
	struct scale *s = scale_new(NODES, SCALE_NCCL);
	struct scale_counts c;

	(void)scale_join(s);
	c = scale_meet(s);
	cr_expect_eq(c.to_leader, COMMS * 2 * (NODES - 1), "%llu", (unsigned long long)c.to_leader);
	cr_expect_eq(c.from_leader, COMMS * (NODES - 1), "%llu", (unsigned long long)c.from_leader);
	scale_free(s);
}

/* Two communicators: of each, each node sends the leader its card, and gets those of all at once. */
static void meet_with_cards(unsigned n)
{
	enum { COMMS = 2 };
	struct scale *s = scale_new(n, SCALE_GLOO);
	struct scale_counts c;

	c = scale_join(s);
	cr_expect_eq(c.messages, 2 * (n - 1), "%u nodes join", n);
	c = scale_meet(s);
	fprintf(stderr, "# %4u nodes meet: %llu messages, %llu bytes\n", n,
		(unsigned long long)c.messages, (unsigned long long)c.bytes);
	cr_expect_eq(c.to_leader, COMMS * (n - 1), "%u nodes: %llu messages to the leader", n,
		     (unsigned long long)c.to_leader);
	cr_expect_eq(c.from_leader, COMMS * (n - 1), "%u nodes: %llu messages of the leader", n,
		     (unsigned long long)c.from_leader);
	cr_expect_eq(c.messages, c.to_leader + c.from_leader);
	/* a card has 48 bytes; keys and the like */
	cr_expect_leq(c.bytes, (uint64_t)COMMS * n * (48 * n + 400));
	scale_free(s);
}

Test(scale, members_of_communicators_meet_with_a_message_there_and_one_back)
{
	meet_with_cards(2);
	meet_with_cards(20);
}

Test(scale, members_on_many_nodes_meet_with_a_message_there_and_one_back)
{
	meet_with_cards(MANY_NODES);
}
