/* Members, on the fake store and on a real etcd. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "coord/coord_impl.h"
#include "coord/membership.h"
#include "core/check.h"
#include "core/clock.h"
#include "etcdfix.h"
#include "fdcheck.h"
#include "looprun.h"
#include "stopped.h"

#define NODES 3
#define TTL_S 10

static struct looprun run;
static struct coord_fake *fake;
static struct etcdfix etcd;
static uint64_t later_us; /* added to the clock that members see */

static struct node {
	struct membership m; /* first: membership_ops get it */
	struct coord *c;
	unsigned joined, outs;
	char why[200];
} nodes[NODES];

static struct node *node_of(struct membership *m)
{
	return CONTAINER_OF(m, struct node, m);
}

static void on_joined(struct membership *m)
{
	node_of(m)->joined++;
}

static void on_out(struct membership *m, const char *why)
{
	struct node *n = node_of(m);

	n->outs++;
	snprintf(n->why, sizeof(n->why), "%s", why);
}

static const struct membership_ops ops = { on_joined, on_out };

static void open_etcd(struct coord **ret)
{
	const char *endpoints[] = { etcd.client };
	struct coord_options o = { .endpoints = endpoints, .n_endpoints = 1, .prefix = "/test/" };
	struct fault f = FAULT_NULL;

	cr_assert_eq(coord_etcd_new(&run.queue, &o, ret, &f), 0, "%s", f.text);
}

static void begin_fake(void)
{
	fdcheck_begin();
	looprun_init(&run);
	cr_assert_eq(coord_fake_new(&fake), 0);
	for (unsigned i = 0; i < NODES; i++)
		cr_assert_eq(coord_fake_open(fake, &run.queue, &nodes[i].c), 0);
}

static void begin_etcd(void)
{
	etcdfix_begin(&etcd);
	looprun_init(&run);
	for (unsigned i = 0; i < NODES; i++)
		open_etcd(&nodes[i].c);
}

static void end(void)
{
	for (unsigned i = 0; i < NODES; i++) {
		membership_end(&nodes[i].m);
		membership_end(&nodes[i].m);
		coord_close(nodes[i].c);
	}
	looprun_deinit(&run);
	if (fake)
		coord_fake_free(fake);
	if (fake)
		fdcheck_end();
	else
		etcdfix_end(&etcd);
}

TestSuite(membership_fake, .init = begin_fake, .fini = end, .timeout = 60);
TestSuite(membership_etcd, .init = begin_etcd, .fini = end, .timeout = 60);

static void turn(void)
{
	for (unsigned i = 0; i < NODES; i++)
		membership_tick(&nodes[i].m, clock_now_us() + later_us);
	uv_run(&run.loop, UV_RUN_NOWAIT);
}

#define TURN_UNTIL(cond)                                                         \
	do {                                                                     \
		uint64_t until_ = clock_now_us() + 20000000u;                    \
		while (!(cond)) {                                                \
			cr_assert(clock_now_us() < until_, "not so: %s", #cond); \
			turn();                                                  \
		}                                                                \
	} while (0)

static void join_at(unsigned i, const char *name, const char *at)
{
	cr_assert_eq(membership_join(&nodes[i].m, nodes[i].c, name, at, strlen(at), TTL_S, &ops),
		     0);
}

static void join(unsigned i, const char *name)
{
	char at[] = "node-0";

	at[5] += (char)i;
	join_at(i, name, at);
}

static void join_all(void)
{
	static const char *const names[] = { "a", "b", "c" };

	for (unsigned i = 0; i < NODES; i++)
		join(i, names[i]);
	TURN_UNTIL(nodes[0].joined && nodes[1].joined && nodes[2].joined);
}

#define TEST_BOTH(name)                \
	static void both_##name(void); \
	Test(membership_fake, name)    \
	{                              \
		both_##name();         \
	}                              \
	Test(membership_etcd, name)    \
	{                              \
		both_##name();         \
	}                              \
	static void both_##name(void)

TEST_BOTH(a_name_is_one_nodes)
{
	join(0, "a");
	TURN_UNTIL(nodes[0].joined);
	join(1, "a");
	TURN_UNTIL(nodes[1].outs);
	cr_expect(strstr(nodes[1].why, "another node is a member by the name 'a'"), "%s",
		  nodes[1].why);
	cr_expect_eq(nodes[1].joined, 0);
	cr_expect_eq(nodes[0].outs, 0);
	membership_leave(&nodes[0].m);
	TURN_UNTIL(nodes[0].outs);
	cr_expect_str_eq(nodes[0].why, "it has left");
	join(1, "a");
	TURN_UNTIL(nodes[1].joined);
}

/* One that was killed has left its key, and its lease lives for a while. */
TEST_BOTH(a_daemon_that_begins_again_at_its_address_has_its_name)
{
	uint64_t began;

	join_at(0, "a", "host:1");
	TURN_UNTIL(nodes[0].joined);
	began = clock_now_us();
	membership_end(&nodes[0].m);
	join_at(1, "a", "host:1");
	TURN_UNTIL(nodes[1].joined);
	cr_expect_eq(nodes[1].outs, 0);
	cr_expect_lt(clock_now_us() - began, (uint64_t)TTL_S * 1000000);
}

/* Both were members, for ever. */
TEST_BOTH(of_two_daemons_with_one_name_and_address_the_later_one_stays)
{
	uint64_t began;

	join_at(0, "a", "host:1");
	TURN_UNTIL(nodes[0].joined);
	began = clock_now_us();
	join_at(1, "a", "host:1");
	TURN_UNTIL(nodes[1].joined);
	TURN_UNTIL(nodes[0].outs);
	cr_expect_lt(clock_now_us() - began, (uint64_t)TTL_S * 1000000 / 3, "before it asks");
	cr_expect(strstr(nodes[0].why, "another daemon has joined by the name 'a' and the same"),
		  "%s", nodes[0].why);
	join_at(0, "a", "host:1");
	TURN_UNTIL(nodes[0].outs == 2);
	cr_expect(strstr(nodes[0].why, "another node is a member by the name 'a'"), "%s",
		  nodes[0].why);
	cr_expect_eq(nodes[1].outs, 0);
	membership_leave(&nodes[1].m);
	TURN_UNTIL(nodes[1].outs);
	join_at(0, "a", "host:1");
	TURN_UNTIL(nodes[0].joined == 2);
}

static bool answered;

static void on_answer(struct coord_call *call, const struct coord_reply *r)
{
	(void)call;
	cr_expect_eq(r->status, COORD_OK);
	answered = true;
}

static void change(const struct coord_change *to)
{
	const struct coord_txn t = { .changes = to, .n_changes = 1 };
	static struct coord_call call;

	call = (struct coord_call){ .done = on_answer };
	answered = false;
	cr_assert_eq(coord_txn(nodes[2].c, &call, &t, 2000), 0);
	TURN_UNTIL(answered);
}

/* The later one removes the key, and is slow to make its own: who looked in between did not say who it was. */
TEST_BOTH(who_has_taken_a_name_is_said_though_its_key_comes_late)
{
	join_at(0, "a", "host:1");
	TURN_UNTIL(nodes[0].joined);
	change(&(struct coord_change){ .key = "members/a", .remove = true });
	TURN_UNTIL(nodes[0].m.missed);
	cr_expect_eq(nodes[0].outs, 0);
	nodes[0].m.again_us += 60000000; /* on a busy machine, too */
	change(&(struct coord_change){ .key = "members/a", .value = "host:1", .bytes = 6 });
	TURN_UNTIL(nodes[0].outs);
	cr_expect(strstr(nodes[0].why, "another daemon has joined by the name 'a' and the same"),
		  "%s", nodes[0].why);
}

TEST_BOTH(a_name_that_nobody_has_taken_is_gone)
{
	join_at(0, "a", "host:1");
	TURN_UNTIL(nodes[0].joined);
	change(&(struct coord_change){ .key = "members/a", .remove = true });
	TURN_UNTIL(nodes[0].outs);
	cr_expect_str_eq(nodes[0].why, "the key of node 'a' is no longer in the store");
}

TEST_BOTH(names_that_are_no_names_are_refused)
{
	char longest[NAME_BYTES + 1];

	memset(longest, 'x', sizeof(longest) - 1);
	longest[sizeof(longest) - 1] = 0;
	cr_expect_eq(membership_join(&nodes[0].m, nodes[0].c, "", "", 0, TTL_S, &ops), -EINVAL);
	cr_expect_eq(membership_join(&nodes[0].m, nodes[0].c, "a/b", "", 0, TTL_S, &ops), -EINVAL);
	cr_expect_eq(membership_join(&nodes[0].m, nodes[0].c, longest, "", 0, TTL_S, &ops),
		     -EINVAL);
}

/* ----------------------------------------------------------------------------- the fake one */

/* The store has made it a member, and nobody has heard of it. */
Test(membership_fake, joins_though_the_answer_was_lost)
{
	join(0, "a");
	TURN_UNTIL(nodes[0].m.state == MEMBERSHIP_JOINING || nodes[0].m.lease);
	if (nodes[0].m.state != MEMBERSHIP_IN) {
		coord_cancel(&nodes[0].m.call);
		nodes[0].m.again_us = 0;
		coord_fake_fate(nodes[0].c, COORD_FAKE_LOST_AFTER);
		turn();
		coord_fake_fate(nodes[0].c, COORD_FAKE_ANSWERED);
		coord_fake_lose(nodes[0].c);
	}
	TURN_UNTIL(nodes[0].joined);
	cr_expect_eq(nodes[0].outs, 0);
}

/* It does not wait for the store to tell it. */
Test(membership_fake, is_out_when_the_store_has_not_answered_for_the_time_of_the_lease)
{
	struct node *first = &nodes[0];

	join_all();
	coord_fake_fate(first->c, COORD_FAKE_LOST_BEFORE);
	for (uint64_t ms = 0; ms < TTL_S * 1000; ms += 500) {
		cr_expect_eq(first->outs, 0, "after %llu ms", (unsigned long long)ms);
		coord_fake_pass(fake, 500);
		later_us += 500000;
		for (unsigned i = 0; i < 4; i++)
			turn();
		coord_fake_lose(first->c);
	}
	TURN_UNTIL(first->outs);
	for (unsigned i = 0; i < NODES; i++)
		cr_expect_eq(nodes[i].outs, &nodes[i] == first);
	coord_fake_lose(first->c);
	coord_fake_fate(first->c, COORD_FAKE_ANSWERED);
	turn();
}

Test(membership_fake, is_out_when_its_lease_has_gone)
{
	join(0, "a");
	TURN_UNTIL(nodes[0].joined);
	coord_fake_pass(fake, TTL_S * 1000);
	later_us += TTL_S * 1000000 / 2; /* it keeps the lease, and finds out */
	TURN_UNTIL(nodes[0].outs);
	cr_expect(strstr(nodes[0].why, "lease has ended"), "%s", nodes[0].why);
	join(0, "a");
	TURN_UNTIL(nodes[0].joined == 2);
}

/* ------------------------------------------------------------------------------ a real etcd */

Test(membership_etcd, members_stay_when_etcd_is_killed_and_comes_back)
{
	join_all();
	etcdfix_kill(&etcd);
	for (uint64_t until = clock_now_us() + 1000000; clock_now_us() < until;)
		turn();
	etcdfix_again(&etcd);
	for (uint64_t until = clock_now_us() + (TTL_S + 2) * 1000000; clock_now_us() < until;)
		turn();
	for (unsigned i = 0; i < NODES; i++)
		cr_expect_eq(nodes[i].outs, 0, "%s", nodes[i].why);
}

Test(membership_etcd, is_out_when_etcd_hangs_for_longer_than_the_lease)
{
	join(0, "a");
	TURN_UNTIL(nodes[0].joined);
	stopped_stop(etcd.pid);
	TURN_UNTIL(nodes[0].outs);
	kill(etcd.pid, SIGCONT);
	cr_expect(*nodes[0].why);
	join(0, "a");
	TURN_UNTIL(nodes[0].joined == 2 || nodes[0].outs == 2);
}
