/* Replicas that the nodes of a job make together (cluster/round.h). */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "job/replica.h"
#include "job/saving_impl.h"
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
	char names[SPANFIX_NODES][SPAN_NAME_BYTES] = { "node0", "node1", "node2", "node3" };

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

/* ---------------------------------------------------------------- jobs that are deleted meanwhile */

static bool part_is_being_written(struct spanfix *w)
{
	(void)w;
	return roundfix_turn() || spanfix.jobs[1]->checkpoints.memory->running;
}

static bool parts_are_written(struct spanfix *w)
{
	(void)w;
	return roundfix_turn() || (roundfix.copies[0] && roundfix.copies[1]);
}

static bool jobs_are_gone(struct spanfix *w)
{
	bool none = true;

	roundfix_turn();
	for (unsigned i = 0; i < w->n_nodes; i++)
		none = none && !roundfix.rounds[i] && list_empty(&w->nodes[i].jobs.zombies);
	return none;
}

/* All ranks are killed. */
static void drop_ranks(void)
{
	struct spanfix *w = &spanfix;

	spanfix_epoch_ends(w, "a rank was killed");
	for (unsigned i = 0; i < w->n_nodes; i++)
		while (w->nodes[i].n_members)
			nodefix_drop(&w->nodes[i], w->nodes[i].members[0], "was killed");
}

/* As a call does it. */
static void delete_job(unsigned node)
{
	struct fault f = FAULT_NULL;

	saving_cancel(spanfix.jobs[node]);
	cr_assert_eq(job_delete(spanfix.jobs[node], false, NULL, &f), 0, "%s", f.text);
}

/* A part of it is under way, which is all that keeps the job. */
static void end_part(unsigned node)
{
	struct job *job = spanfix.jobs[node];

	cr_assert(saving_is_replicating(job));
	cr_assert_eq(job->members, 1); /* its ranks hold it, until its memory goes */
	saving_tick(job);
	cr_assert(!list_empty(&spanfix.nodes[node].jobs.zombies), "it is freed under its caller");
}

/* On node @first before the other one, while replicas are made: in a phase in which a thread writes, or in one in which
 * nothing runs on the node. The daemon ends the part in its tick then; that freed the job, and the tick went on with
 * it. */
static void deleted(unsigned first, bool (*phase)(struct spanfix *w))
{
	struct spanfix *w = &spanfix;

	roundfix_begin(WORLD(1, 1), true, 0);
	roundfix_train(1);
	replicate(2);
	roundfix_step(3, false);
	roundfix.waits = true;
	begin_replicas(3);
	spanfix_turn_until(w, phase);
	drop_ranks();
	delete_job(first);
	end_part(first);
	delete_job(1 - first);
	spanfix_turn_until(w, jobs_are_gone);
	for (unsigned i = 0; i < 2; i++)
		w->jobs[i] = nodefix_job(&w->nodes[i], "job", w->size, 0);
	roundfix_end();
}

Test(span_replicas, of_a_job_that_is_deleted_while_they_are_written)
{
	deleted(0, part_is_being_written);
	deleted(1, part_is_being_written);
}

Test(span_replicas, of_a_job_that_is_deleted_while_copies_are_taken)
{
	deleted(0, parts_are_written);
	deleted(1, parts_are_written);
}
