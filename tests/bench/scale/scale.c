#include "scale.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "cluster/cluster_impl.h"
#include "coord/coord_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "job/group.h"
#include "nodefix.h"

enum { SCALE_COLLECTIVES = 4, SCALE_RECORD_STEPS = 40 };
/* That the clock of all moves on with each round: so little that nothing is done because of time. */
enum { SCALE_ROUND_US = 1 };

struct scale_node {
	struct nodefix n;
	struct cluster *cluster;
	struct job *job;
	struct member *m;
	struct nodefix_op op;
	uint64_t buffer; /* of its collectives; 0: none yet */
	bool stopped;
};

struct scale {
	unsigned n;
	struct coord_fake *store;
	struct scale_node *nodes;
	struct scale_counts members;
	uint64_t step, now_us;
};

static struct scale *the_scale;

/* ------------------------------------------------------------------ whose turn it is */

static struct {
	bool leader, arrived;
	uint64_t began_ns;
	int64_t memory;
} turn;

static uint64_t scale_cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int64_t scale_memory(void)
{
	struct mallinfo2 m = mallinfo2();

	return (int64_t)(m.uordblks + m.hblkhd);
}

static void scale_enter(unsigned node, bool arrived)
{
	the_cluster = the_scale->nodes[node].cluster;
	turn.leader = node == 0;
	turn.arrived = arrived;
	if (!turn.leader)
		return;
	turn.memory = scale_memory();
	turn.began_ns = scale_cpu_ns();
}

static void scale_leave(void)
{
	uint64_t took;

	the_cluster = NULL;
	if (!turn.leader)
		return;
	took = scale_cpu_ns() - turn.began_ns;
	scale_counts.leader_memory += scale_memory() - turn.memory;
	if (!turn.arrived) {
		scale_counts.turns_ns += took;
		return;
	}
	scale_counts.leader_ns += took;
	scale_counts.slowest_ns = took > scale_counts.slowest_ns ? took : scale_counts.slowest_ns;
}

/* One turn of each loop, and what the links hold then. */
static void scale_round(struct scale *s)
{
	s->now_us += SCALE_ROUND_US;
	clock_fake(s->now_us);
	for (unsigned i = 0; i < s->n; i++) {
		scale_enter(i, false);
		nodefix_turn(&s->nodes[i].n);
		if (s->nodes[i].n.node.nodes_engine)
			scale_engine_look(s->nodes[i].n.node.nodes_engine);
		scale_leave();
	}
	while (scale_net_deliver())
		;
}

static void scale_rounds_until(struct scale *s, bool (*done)(struct scale *s), const char *what)
{
	time_t end = time(NULL) + 600;

	while (!done(s)) {
		scale_round(s);
		if (time(NULL) < end)
			continue;
		fprintf(stderr, "scale: %s: not within 600 s: node 0: %s\n", what,
			s->nodes[0].job
				? cluster_find(s->nodes[0].cluster, s->nodes[0].job->label)->why
				: s->nodes[0].cluster->why);
		abort();
	}
}

/* --------------------------------------------------------- what is asked of the store */

__typeof__(coord_txn) __real_coord_txn, __wrap_coord_txn;
__typeof__(coord_grant) __real_coord_grant, __wrap_coord_grant;
__typeof__(coord_watch_begin) __real_coord_watch_begin, __wrap_coord_watch_begin;

int __wrap_coord_txn(struct coord *c, struct coord_call *call, const struct coord_txn *txn,
		     uint32_t timeout_ms)
{
	uint64_t bytes = txn->read ? strlen(txn->read) : 0;

	for (size_t i = 0; i < txn->n_conds; i++)
		bytes += strlen(txn->conds[i].key);
	for (size_t i = 0; i < txn->n_changes; i++)
		bytes += strlen(txn->changes[i].key) + txn->changes[i].bytes;
	scale_counts.txns++;
	scale_counts.store_bytes += bytes;
	if (bytes > scale_counts.largest_txn)
		scale_counts.largest_txn = bytes;
	return __real_coord_txn(c, call, txn, timeout_ms);
}

int __wrap_coord_grant(struct coord *c, struct coord_call *call, int64_t ttl_s, uint32_t timeout_ms)
{
	scale_counts.grants++;
	return __real_coord_grant(c, call, ttl_s, timeout_ms);
}

int __wrap_coord_watch_begin(struct coord *c, struct coord_watch *w, const char *prefix,
			     int64_t from)
{
	scale_counts.watches++;
	scale_counts.store_bytes += strlen(prefix);
	return __real_coord_watch_begin(c, w, prefix, from);
}

/* ------------------------------------------------------------------ the nodes */

static void scale_node_begin(struct scale *s, unsigned i, enum scale_way way)
{
	struct scale_node *w = &s->nodes[i];
	char name[32], at[32];
	struct cluster_options o = {
		.node = name, .advertise = at, .peers = { .cluster = "scale" }, .schedules = true
	};
	struct coord *coord = NULL;
	struct fault f = FAULT_NULL;

	snprintf(name, sizeof(name), "node-%04u", i);
	snprintf(at, sizeof(at), "10.0.%u.%u:%u", i / 256, i % 256, i);
	nodefix_begin(&w->n, &(struct nodefix_options){ .beside = i > 0 });
	w->n.node.limits.max_units_per_job = 1000;
	cluster_set_slots(&w->n.jobs.ops);
	CHECK(scale_engine_new(&w->n.run.queue, way, &w->n.node.nodes_engine) == 0);
	CHECK(coord_fake_open(s->store, &w->n.run.queue, &coord) == 0);
	the_cluster = NULL;
	CHECK(cluster_new(&w->n.run.loop, &w->n.run.queue, &w->n.jobs, coord, &o, &w->cluster,
			  &f) == 0);
	the_cluster = NULL;
}

/* And follow their keys: that begins with a tick, by the time of the machine. */
static bool scale_are_members(struct scale *s)
{
	for (unsigned i = 0; i < s->n; i++)
		if (s->nodes[i].cluster->member.state != MEMBERSHIP_IN ||
		    !s->nodes[i].cluster->member.own.watch.impl)
			return false;
	return true;
}

static void scale_count(void)
{
	scale_counts = (struct scale_counts){ 0 };
}

/* Loops, pidfds and what wakes loops: about ten descriptors each. */
static void scale_allow_descriptors(unsigned n)
{
	struct rlimit r;

	CHECK(getrlimit(RLIMIT_NOFILE, &r) == 0);
	if (r.rlim_cur >= 64 + 16 * n)
		return;
	r.rlim_cur = r.rlim_max < 64 + 16 * n ? r.rlim_max : 64 + 16 * n;
	CHECK(setrlimit(RLIMIT_NOFILE, &r) == 0);
}

struct scale *scale_new(unsigned n, enum scale_way way)
{
	struct scale *s = calloc(1, sizeof(*s));

	CHECK(s && n >= 2 && n <= SCALE_MOST && !the_scale);
	scale_allow_descriptors(n);
	s->n = n;
	s->nodes = calloc(n, sizeof(*s->nodes));
	s->now_us = clock_now_us();
	clock_fake(s->now_us);
	CHECK(s->nodes && coord_fake_new(&s->store) == 0);
	the_scale = s;
	scale_count();
	scale_net_begin(n, scale_enter, scale_leave);
	for (unsigned i = 0; i < n; i++)
		scale_node_begin(s, i, way);
	scale_rounds_until(s, scale_are_members, "becoming members");
	s->members = scale_counts;
	return s;
}

static void scale_on_stopped(void *userdata)
{
	((struct scale_node *)userdata)->stopped = true;
}

static bool scale_have_stopped(struct scale *s)
{
	for (unsigned i = 0; i < s->n; i++)
		if (!s->nodes[i].stopped)
			return false;
	return true;
}

struct scale *scale_free(struct scale *s)
{
	for (unsigned i = 0; i < s->n; i++) {
		struct scale_node *w = &s->nodes[i];

		scale_enter(i, false);
		if (w->m)
			nodefix_drop(&w->n, w->m, "the run is over");
		cluster_stop(w->cluster, scale_on_stopped, w);
		scale_leave();
	}
	scale_rounds_until(s, scale_have_stopped, "stopping");
	for (unsigned i = s->n; i-- > 0;) {
		s->nodes[i].cluster = cluster_free(s->nodes[i].cluster);
		nodefix_end(&s->nodes[i].n);
	}
	scale_net_end();
	coord_fake_free(s->store);
	the_scale = NULL;
	free(s->nodes);
	free(s);
	return NULL;
}

struct scale_counts scale_members(const struct scale *s)
{
	return s->members;
}

/* ------------------------------------------------------------------ the phases */

static struct cluster_job *scale_job_of(const struct scale_node *w)
{
	return w->job ? cluster_find(w->cluster, w->job->label) : NULL;
}

static bool scale_leads(struct scale *s)
{
	const struct cluster_job *cj = scale_job_of(&s->nodes[0]);

	return cj && cj->state == CLUSTER_LEADS && cj->dials.key.watch.impl;
}

static void scale_try_join(struct scale *s, unsigned i)
{
	struct scale_node *w = &s->nodes[i];
	struct member *m = NULL;
	struct fault f = FAULT_NULL;
	enum res r;

	scale_enter(i, false);
	if (!w->job)
		w->job = nodefix_job(&w->n, "large", s->n, 8 << 20);
	r = nodefix_try_join(&w->n, w->job, i, NULL, NULL, &m, &f);
	scale_leave();
	if (r == RES_FAILED)
		fprintf(stderr, "scale: node %u: %s\n", i, f.text);
	CHECK(r != RES_FAILED);
	w->m = r == RES_DONE ? m : NULL;
}

/* Those whose epoch runs ask again, and are in it. */
static bool scale_have_joined(struct scale *s)
{
	bool all = true;

	for (unsigned i = 0; i < s->n; i++) {
		const struct cluster_job *cj = scale_job_of(&s->nodes[i]);

		if (!s->nodes[i].m && cj && cj->epoch.number)
			scale_try_join(s, i);
		all = all && s->nodes[i].m;
	}
	return all;
}

struct scale_counts scale_join(struct scale *s)
{
	scale_count();
	scale_try_join(s, 0);
	scale_rounds_until(s, scale_leads, "leading");
	for (unsigned i = 1; i < s->n; i++)
		scale_try_join(s, i);
	scale_rounds_until(s, scale_have_joined, "joining");
	return scale_counts;
}

static bool scale_ops_are_over(struct scale *s)
{
	for (unsigned i = 0; i < s->n; i++)
		if (!s->nodes[i].op.over)
			return false;
	return true;
}

/* A sum of 16 bytes of each rank. A Barrier would not do: nodes wait for each other in one. */
static void scale_all_reduce(struct scale_node *w)
{
	struct nodefix_op op = { 0 };

	if (!w->buffer) {
		NODEFIX_OK(nodefix_alloc(&w->n, w->m, 16, &op), &op);
		w->buffer = op.result.buffer;
	}
	nodefix_all_reduce(&w->n, w->m, w->buffer, 4, &w->op);
}

static void scale_op(struct scale *s, bool commit)
{
	s->step += commit;
	for (unsigned i = 0; i < s->n; i++) {
		struct scale_node *w = &s->nodes[i];

		w->op = (struct nodefix_op){ 0 };
		scale_enter(i, false);
		if (commit)
			nodefix_commit(&w->n, w->m, s->step, 0, &w->op);
		else
			scale_all_reduce(w);
		scale_leave();
	}
	scale_rounds_until(s, scale_ops_are_over, commit ? "a commit" : "a sum");
	for (unsigned i = 0; i < s->n; i++) {
		if (s->nodes[i].op.fault.code)
			fprintf(stderr, "scale: node %u: %s\n", i, s->nodes[i].op.fault.text);
		CHECK(!s->nodes[i].op.fault.code);
	}
}

struct scale_counts scale_collective(struct scale *s)
{
	scale_count();
	scale_op(s, false);
	return scale_counts;
}

/* What an op that moves data does first. */
static bool scale_have_met(struct scale *s)
{
	bool all = true;

	for (unsigned i = 0; i < s->n; i++) {
		struct group *world = s->nodes[i].job->groups[0];
		struct fault f = FAULT_NULL;
		enum res r;

		scale_enter(i, false);
		r = group_place(world, &f);
		r = r == RES_DONE ? group_comms(world, &f) : r;
		scale_leave();
		if (r == RES_FAILED)
			fprintf(stderr, "scale: node %u: %s\n", i, f.text);
		CHECK(r != RES_FAILED);
		all = all && r == RES_DONE;
	}
	return all;
}

struct scale_counts scale_meet(struct scale *s)
{
	scale_count();
	scale_rounds_until(s, scale_have_met, "meeting");
	return scale_counts;
}

struct scale_counts scale_commit(struct scale *s)
{
	scale_count();
	scale_op(s, true);
	return scale_counts;
}

struct scale_counts scale_step(struct scale *s)
{
	scale_count();
	for (unsigned i = 0; i < SCALE_COLLECTIVES; i++)
		scale_op(s, false);
	scale_op(s, true);
	return scale_counts;
}

bool scale_is_recorded(const struct scale *s)
{
	for (unsigned i = 0; i < s->n; i++) {
		const struct cluster_job *cj = scale_job_of(&s->nodes[i]);

		if (!cj || !cj->epoch.order || !order_is_recorded(cj->epoch.order))
			return false;
	}
	return true;
}

unsigned scale_record(struct scale *s)
{
	for (unsigned i = 1; i <= SCALE_RECORD_STEPS; i++) {
		(void)scale_step(s);
		if (scale_is_recorded(s))
			return i;
	}
	return 0;
}

static bool scale_has_ended(struct scale *s)
{
	for (unsigned i = 0; i < s->n; i++) {
		const struct cluster_job *cj = scale_job_of(&s->nodes[i]);

		if (cj && cj->epoch.number)
			return false;
	}
	return true;
}

struct scale_counts scale_end(struct scale *s)
{
	struct scale_node *last = &s->nodes[s->n - 1];

	scale_count();
	scale_enter(s->n - 1, false);
	nodefix_drop(&last->n, last->m, "was killed");
	last->m = NULL;
	scale_leave();
	scale_rounds_until(s, scale_has_ended, "the end of the epoch");
	return scale_counts;
}
