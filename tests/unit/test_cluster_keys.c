/*
 * Where members of communicators meet, between the nodes of an epoch (cluster/cluster_keys.c): what the leader sends
 * whom, how often, and what it refuses. Links are replaced: what is sent is packed, as on a link, and kept.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "looprun.h"

#define NODES 4
#define MOST  64 /* messages that are kept */

/* A node's end of things. Node 0 leads. */
static struct end {
	struct cluster cluster;
	struct cluster_job job;
	struct cluster_link link; /* to the leader */
	struct peer *peers[NODES];
} nodes[NODES];

static struct looprun run;

/* Of a link, only the address counts: that of node @i, as others see it. */
static char links[NODES];

static struct peer *link_of(unsigned i)
{
	return (struct peer *)&links[i];
}

static struct sent {
	unsigned to;
	Shardd__V1__PeerMessage *m;
} sent[MOST];
static unsigned n_sent;
static size_t largest; /* bytes of a message */
static struct peer *ended;
static char ended_why[256];

void __wrap_peer_send(struct peer *p, const Shardd__V1__PeerMessage *m);
void __wrap_peer_end(struct peer *p, const char *why);

void __wrap_peer_send(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	size_t bytes = shardd__v1__peer_message__get_packed_size(m);
	uint8_t *packed = malloc(bytes);

	CHECK(packed && n_sent < MOST);
	shardd__v1__peer_message__pack(m, packed);
	sent[n_sent].to = (unsigned)((char *)p - links);
	sent[n_sent++].m = shardd__v1__peer_message__unpack(NULL, bytes, packed);
	largest = bytes > largest ? bytes : largest;
	free(packed);
}

void __wrap_peer_end(struct peer *p, const char *why)
{
	ended = p;
	snprintf(ended_why, sizeof(ended_why), "%s", why);
}

static void forget_sent(void)
{
	while (n_sent > 0)
		shardd__v1__peer_message__free_unpacked(sent[--n_sent].m, NULL);
}

static void begin_node(unsigned i)
{
	static const struct rendezvous_ops ops = { .set = cluster_keys_set,
						   .get = cluster_keys_get,
						   .give = cluster_keys_give_here };
	struct end *w = &nodes[i];

	*w = (struct end){ .job = { .label = "0/j" } };
	list_init(&w->cluster.all);
	list_init(&w->job.link);
	list_append(&w->cluster.all, &w->job.link);
	w->job.c = &w->cluster;
	w->job.epoch.number = 7;
	w->job.epoch.incarnation = 0xabc;
	w->job.epoch.n_nodes = NODES;
	w->job.epoch.self = i;
	if (i == 0) {
		for (unsigned k = 1; k < NODES; k++)
			w->peers[k] = link_of(k);
		w->job.epoch.peers = w->peers;
	} else {
		w->link = (struct cluster_link){ .peer = link_of(0), .up = true };
		w->job.follows = &w->link;
	}
	cr_assert_eq(rendezvous_new(&run.queue, &ops, &w->cluster, &w->cluster.rendezvous), 0);
}

static void setup(void)
{
	looprun_init(&run);
	for (unsigned i = 0; i < NODES; i++)
		begin_node(i);
	ended = NULL;
	largest = 0;
}

static void teardown(void)
{
	forget_sent();
	loopq_drain(&run.queue);
	for (unsigned i = 0; i < NODES; i++)
		nodes[i].cluster.rendezvous = rendezvous_free(nodes[i].cluster.rendezvous);
	looprun_deinit(&run);
}

TestSuite(cluster_keys, .init = setup, .fini = teardown, .timeout = 60);

/* Hand out what is sent, and what is sent because of it. Return: messages. */
static unsigned deliver(void)
{
	unsigned n = 0;

	do {
		struct sent now[MOST];
		unsigned k = n_sent;

		memcpy(now, sent, sizeof(now));
		n_sent = 0;
		for (unsigned i = 0; i < k; i++) {
			/* to node 0 come only those of the one whose turn it was: see tell */
			cluster_on_key(&nodes[now[i].to].job, link_of(0), now[i].m->job);
			shardd__v1__peer_message__free_unpacked(now[i].m, NULL);
		}
		n += k;
	} while (n_sent > 0);
	return n;
}

/* What threads of node @i have asked goes to the leader. Return: messages. */
static unsigned tell(unsigned i)
{
	unsigned n;

	loopq_drain(&run.queue);
	n = n_sent;
	for (unsigned k = 0; k < n; k++) {
		struct sent s = sent[0];

		cr_assert_eq(s.to, 0);
		memmove(sent, sent + 1, (--n_sent) * sizeof(sent[0]));
		cluster_on_key(&nodes[0].job, link_of(i), s.m->job);
		shardd__v1__peer_message__free_unpacked(s.m, NULL);
	}
	return n;
}

static char prefix[] = "0/j/0000000000000abc/7/g";

static struct comm_exchange exchange_of(unsigned member, unsigned size, const void *value,
					size_t bytes, void *all)
{
	return (struct comm_exchange){ .key = prefix,
				       .size = size,
				       .member = member,
				       .bytes = bytes,
				       .value = value,
				       .all = all };
}

static int exchange(unsigned node, struct comm_exchange *x)
{
	const struct comm_store s = rendezvous_store(nodes[node].cluster.rendezvous);

	return s.exchange(s.userdata, x, 0);
}

/* A message of node @from arrives at the leader. */
static void arrives(unsigned from, unsigned members, unsigned first, const void *values,
		    size_t bytes)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobExchange e = SHARDD__V1__JOB_EXCHANGE__INIT;

	e.key = "g";
	e.members = members;
	e.first = first;
	e.values = (ProtobufCBinaryData){ bytes, (uint8_t *)values };
	m.epoch = 7;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_EXCHANGE;
	m.exchange = &e;
	cluster_on_key(&nodes[0].job, link_of(from), &m);
}

/* The members of nodes 1 to 3, or of 0 to 3: one message there, one back. */
Test(cluster_keys, members_exchange_with_one_message_there_and_one_back)
{
	for (unsigned first = 0; first < 2; first++) {
		char all[NODES][16] = { "" };
		struct comm_exchange x[NODES];
		char value[NODES][3];
		unsigned there = 0;

		prefix[sizeof(prefix) - 2] = (char)('g' + first);
		for (unsigned i = first; i < NODES; i++) {
			snprintf(value[i], sizeof(value[i]), "v%u", i);
			x[i] = exchange_of(i - first, NODES - first, value[i], 2, all[i]);
			cr_assert_eq(exchange(i, &x[i]), -ETIMEDOUT);
			there += tell(i);
			if (i < NODES - 1)
				cr_assert_eq(n_sent, 0);
		}
		cr_assert_eq(there, NODES - 1);
		cr_assert_eq(n_sent, NODES - 1);
		cr_assert_eq(deliver(), NODES - 1);
		for (unsigned i = first; i < NODES; i++) {
			cr_assert_eq(exchange(i, &x[i]), 0, "node %u", i);
			cr_assert_str_eq(all[i], first ? "v1v2v3" : "v0v1v2v3");
		}
	}
	prefix[sizeof(prefix) - 2] = 'g';
	cr_assert_null(ended);
}

/* More than one message has room for. */
Test(cluster_keys, many_values_come_in_parts)
{
	enum { MEMBERS = 300, BYTES = 4096, PART = 256 * 1024 };
	const unsigned parts = (MEMBERS * BYTES + PART - 1) / PART;
	static uint8_t values[MEMBERS][BYTES], all[MEMBERS][BYTES];
	struct comm_exchange x = exchange_of(0, MEMBERS, values[0], BYTES, all);

	for (unsigned i = 0; i < MEMBERS; i++)
		memset(values[i], (int)i, BYTES), values[i][0] = (uint8_t)(i >> 8);
	cr_assert_eq(exchange(2, &x), -ETIMEDOUT);
	cr_assert_eq(tell(2), 1);
	for (unsigned i = 1; i < MEMBERS; i++) /* all others are on node 1 */
		arrives(1, MEMBERS, i, values[i], BYTES);
	cr_assert_eq(n_sent, 2 * parts);
	cr_assert_lt(largest, PART + 200);
	deliver();
	cr_assert_eq(exchange(2, &x), 0);
	cr_assert_eq(memcmp(all, values, sizeof(all)), 0);
}

Test(cluster_keys, the_leader_says_who_is_missing)
{
	char all[16];
	struct comm_exchange x0 = exchange_of(0, 4, "v0", 2, all);
	struct comm_exchange x3 = exchange_of(3, 4, "v3", 2, all);

	cr_assert_eq(exchange(0, &x0), -ETIMEDOUT);
	cr_assert_eq(tell(0), 0);
	cr_assert_eq(exchange(3, &x3), -ETIMEDOUT);
	cr_assert_eq(tell(3), 1);
	arrives(1, 4, 1, "v1", 2);
	cr_assert_eq(n_sent, 0);
	x3.late = true;
	cr_assert_eq(exchange(3, &x3), -ETIMEDOUT);
	cr_assert_eq(x3.missing, -1);
	cr_assert_eq(tell(3), 1);
	cr_assert_eq(deliver(), 1);
	cr_assert_eq(exchange(3, &x3), -ETIMEDOUT);
	cr_assert_eq(x3.missing, 2);
	x0.late = true; /* the leader's own */
	cr_assert_eq(exchange(0, &x0), -ETIMEDOUT);
	cr_assert_eq(tell(0), 0);
	cr_assert_eq(exchange(0, &x0), -ETIMEDOUT);
	cr_assert_eq(x0.missing, 2);
	cr_assert_null(ended);
}

Test(cluster_keys, a_node_that_contradicts_others_loses_its_link)
{
	arrives(1, 3, 0, "v0", 2);
	arrives(1, 3, 0, "v0", 2); /* asks who is missing */
	cr_assert_null(ended);
	cr_assert_eq(n_sent, 1);
	arrives(2, 3, 0, "vx", 2);
	cr_assert_eq(ended, link_of(2));
	cr_assert_not_null(strstr(ended_why, "contradicts"), "%s", ended_why);
	for (unsigned i = 0; i < 4; i++) {
		ended = NULL;
		arrives(3, i == 0 ? 4 : 3, i == 1 ? 3 : 1, "v1v", i == 2 ? 3 : i == 3 ? 0 : 2);
		cr_assert_eq(ended, link_of(3), "%u", i);
	}
	cr_assert_eq(n_sent, 1);
}

/* Of another epoch, or of a node without a part in this one. */
Test(cluster_keys, what_has_no_part_in_the_epoch_is_dropped)
{
	char stranger;

	nodes[0].job.epoch.number = 8;
	arrives(1, 1, 0, "v0", 2);
	nodes[0].job.epoch.number = 7;
	nodes[0].peers[2] = (struct peer *)&stranger;
	arrives(2, 1, 0, "v0", 2);
	cr_assert_eq(n_sent, 0);
	cr_assert_null(ended);
	cr_assert_not(rendezvous_is_known(nodes[0].cluster.rendezvous, prefix));
	arrives(1, 1, 0, "v0", 2);
	cr_assert(rendezvous_is_known(nodes[0].cluster.rendezvous, prefix));
}

/* A message set or get of node 1. */
static void key_arrives(bool get, const char *name, size_t bytes)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobKey k = SHARDD__V1__JOB_KEY__INIT;
	static uint8_t value[1 << 20];

	k.key = (char *)name;
	k.value = (ProtobufCBinaryData){ bytes, value };
	m.epoch = 7;
	m.body_case = get ? SHARDD__V1__JOB_MESSAGE__BODY_GET : SHARDD__V1__JOB_MESSAGE__BODY_SET;
	m.set = &k; /* or get */
	cluster_on_key(&nodes[0].job, link_of(1), &m);
}

Test(cluster_keys, a_key_goes_to_those_that_ask_before_or_after_it_is_set)
{
	const struct comm_store s2 = rendezvous_store(nodes[2].cluster.rendezvous);
	const struct comm_store s3 = rendezvous_store(nodes[3].cluster.rendezvous);
	char value[8];

	cr_assert_eq(s2.get(s2.userdata, prefix, 0, value, sizeof(value)), -ETIMEDOUT);
	cr_assert_eq(tell(2), 1);
	cr_assert_eq(n_sent, 0);
	key_arrives(false, "g", 3);
	cr_assert_eq(n_sent, 1);
	cr_assert_eq(sent[0].to, 2);
	deliver();
	cr_assert_eq(s2.get(s2.userdata, prefix, 0, value, sizeof(value)), 3);
	cr_assert_eq(s3.get(s3.userdata, prefix, 0, value, sizeof(value)), -ETIMEDOUT);
	cr_assert_eq(tell(3), 1);
	cr_assert_eq(n_sent, 1);
	cr_assert_eq(sent[0].to, 3);
	deliver();
	cr_assert_eq(s3.get(s3.userdata, prefix, 0, value, sizeof(value)), 3);
}

/* What a node can make the leader keep is bounded, whatever it sends. */
Test(cluster_keys, a_node_that_sends_without_end_loses_its_link)
{
	enum { LIMIT = 128 << 20, WAY = 3 };
	static uint8_t value[4096];

	for (unsigned way = 0; way < WAY; way++) {
		uint64_t at_least = 0; /* that the leader keeps */

		teardown();
		setup();
		for (unsigned i = 0; !ended; i++) {
			char name[280];

			cr_assert_leq(at_least, LIMIT);
			if (way == 0) {
				snprintf(name, sizeof(name), "k%u", i);
				key_arrives(false, name, sizeof(value) * 32);
				at_least += sizeof(value) * 32;
			} else if (way == 1) {
				snprintf(name, sizeof(name), "wanted");
				key_arrives(true, name, 0);
				at_least += 32; /* a waiter */
			} else {
				Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
				Shardd__V1__JobExchange e = SHARDD__V1__JOB_EXCHANGE__INIT;

				snprintf(name, sizeof(name), "x%u", i);
				e.key = name;
				e.members = 1024;
				e.values = (ProtobufCBinaryData){ sizeof(value), value };
				m.epoch = 7;
				m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_EXCHANGE;
				m.exchange = &e;
				cluster_on_key(&nodes[0].job, link_of(1), &m);
				at_least += 1024 * sizeof(value);
			}
		}
		cr_assert_eq(ended, link_of(1));
		cr_assert_not_null(strstr(ended_why, "128 MiB"), "%s", ended_why);
		cr_assert_gt(at_least, LIMIT / 4, "way %u", way);
	}
}
