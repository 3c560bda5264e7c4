/* Replicas that the nodes of a job make together (cluster/round.h). */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "job/replica.h"
#include "job/saving.h"
#include "roundfix.h"

TestSuite(span_replicas, .init = roundfix_begin_suite, .fini = roundfix_end_suite, .timeout = 120);

static bool replicas_are_over(struct spanfix *w)
{
	return roundfix_turn() || (roundfix.is_over && roundfix_is_idle(w));
}

/* The leader begins a round of the next commit, which then is made: that of @step. */
static void begin_replicas(uint64_t step_number)
{
	const struct saving_options save = {
		.path = "", .deadline_us = UINT64_MAX, .next = true, .memory = true
	};
	struct round_options o = { .ops = &roundfix_ops,
				   .id = ROUNDFIX_ID,
				   .save = &save,
				   .n = spanfix.n_nodes,
				   .self = roundfix.leader,
				   .leader = roundfix.leader };
	char names[SPANFIX_NODES][SPAN_NAME_BYTES] = { "node0", "node1", "node2" };

	roundfix.is_over = false;
	roundfix.rounds[roundfix.leader] = round_lead(spanfix.jobs[roundfix.leader], &o, names, 99);
	CHECK(roundfix.rounds[roundfix.leader]);
	roundfix_turn(); /* it begins, and the others hear of it */
	roundfix_turn();
	ALL(&spanfix, nodefix_commit(n, m, step_number, 8 + m->rank, op));
	roundfix.last_step = step_number;
}

static void replicate(uint64_t step_number)
{
	roundfix_step((unsigned)step_number, false);
	begin_replicas(step_number);
	spanfix_turn_until(&spanfix, replicas_are_over);
}

/* Each node has its part, and that of the node before it, of this step and of no other one. */
static void expect_replicas(uint64_t step_number)
{
	for (unsigned i = 0; i < spanfix.n_nodes; i++) {
		struct job *job = spanfix.jobs[i];
		unsigned before = (i + spanfix.n_nodes - 1) % spanfix.n_nodes, all = 0;
		const struct replica_id own = roundfix_replica_of(i, step_number, i),
					copy = roundfix_replica_of(i, step_number, before);
		struct replica *a = replica_find(job, &own), *b = replica_find(job, &copy), *r,
			       *tmp;

		cr_assert(a && b && a->complete && b->complete, "node %u", i);
		list_for_each (r, tmp, &job->across.replicas, link)
			all++;
		cr_expect_eq(all, 2);
	}
}

/* Return: the step of the last complete ones of @node. */
static uint64_t replicas_complete(unsigned node)
{
	uint64_t step_number, bytes;

	cr_expect(replica_report(spanfix.jobs[node], &step_number, &bytes));
	return step_number;
}

static uint64_t control_bytes(unsigned node)
{
	return spanfix.jobs[node]->quota.by_class[MEM_CONTROL];
}

Test(span_replicas, are_on_two_nodes)
{
	roundfix_begin(WORLD(1, 2, 1), true, 1);
	roundfix_train(2);
	replicate(3);
	cr_expect_eq(roundfix.ended.code, 0, "%s", roundfix.ended.text);
	expect_replicas(3);
	replicate(4);
	expect_replicas(4);
	for (unsigned i = 0; i < 3; i++)
		replica_forget(spanfix.jobs[i]);
	replicate(5);
	expect_replicas(5);
	roundfix_end();
}

/* The job trains on. */
Test(span_replicas, without_memory_are_refused)
{
	uint64_t limit;

	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	replicate(2);
	expect_replicas(2);
	limit = spanfix.jobs[1]->quota.limit;
	spanfix.jobs[1]->quota.limit = spanfix.jobs[1]->quota.used + 1024;
	replicate(3);
	cr_expect_eq(roundfix.ended.code, FAULT_EXHAUSTED);
	cr_expect(strstr(roundfix.ended.text, "node node1: ") &&
			  strstr(roundfix.ended.text, "set replicas to 0"),
		  "%s", roundfix.ended.text);
	spanfix.jobs[1]->quota.limit = limit;
	replicate(4);
	cr_expect_eq(roundfix.ended.code, 0, "%s", roundfix.ended.text);
	expect_replicas(4);
	roundfix_end();
}

/* The leader says that the copies are complete, and this node has not taken its own yet. */
Test(span_replicas, a_node_without_its_copy_has_no_complete_replicas)
{
	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	replicate(2);
	roundfix_step(3, false);
	roundfix.ends_at = SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_COPY;
	roundfix.ends = 1 + 1;
	begin_replicas(3);
	spanfix_turn_until(&spanfix, roundfix_has_told_the_end);
	cr_expect_eq(roundfix.followed.code, FAULT_INTERNAL, "%s", roundfix.followed.text);
	cr_expect_eq(replicas_complete(1), 2);
	roundfix_lose(0);
	memset(roundfix.dead, 0, sizeof(roundfix.dead));
	memset(roundfix.copies, 0, sizeof(roundfix.copies));
	replicate(4);
	expect_replicas(4);
	roundfix_end();
}

/* A node dies in a phase: what was complete before stays, and the account has no more than that. */
static void replicas_die(uint8_t phase, unsigned node)
{
	uint64_t before[3];

	roundfix_begin(WORLD(1, 1, 1), true, 0);
	roundfix_train(1);
	replicate(2);
	for (unsigned i = 0; i < 3; i++)
		before[i] = control_bytes(i);
	roundfix.dies_at = phase;
	roundfix.dies = (uint8_t)(1 + node);
	roundfix_step(3, false);
	begin_replicas(3);
	spanfix_turn_until(&spanfix, replicas_are_over);
	cr_expect_neq(roundfix.ended.code, 0);
	for (unsigned i = 0; i < 3; i++) {
		const struct replica_id own = roundfix_replica_of(i, 2, i);

		cr_expect(replica_find(spanfix.jobs[i], &own));
	}
	memset(roundfix.dead, 0, sizeof(roundfix.dead));
	memset(roundfix.copies, 0, sizeof(roundfix.copies));
	replicate(4);
	cr_expect_eq(roundfix.ended.code, 0, "%s", roundfix.ended.text);
	expect_replicas(4);
	for (unsigned i = 0; i < 3; i++)
		cr_expect_eq(control_bytes(i), before[i]);
	roundfix_end();
}

#define WRITE SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_WRITE
#define COPY  SHARDD__V1__JOB_ROUND_WHAT__JOB_ROUND_WHAT_COPY
#define REPLICAS_DIE(name, phase, node)    \
	Test(span_replicas, of_##name)     \
	{                                  \
		replicas_die(phase, node); \
	}
REPLICAS_DIE(a_node_that_dies_writing, WRITE, 1)
REPLICAS_DIE(a_leader_that_dies_writing, WRITE, 0)
REPLICAS_DIE(a_node_that_dies_copying, COPY, 2)
REPLICAS_DIE(a_leader_that_dies_copying, COPY, 0)
