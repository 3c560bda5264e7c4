/*
 * What is in doubt when the epoch of a job over several nodes has ended: a commit that was announced, a step
 * that is prepared. It takes effect on all nodes or on none.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "job/position.h"
#include "op/op_run.h"
#include "spanfix.h"
#include "step/doubt.h"

TestSuite(doubt, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

/* All of step @step but the commit. Then @deaf nodes hear no more that anything takes effect. */
static void train_up_to_commit(struct spanfix *w, unsigned step, unsigned deaf)
{
	spanfix_gather_and_note(w);
	spanfix_fill_gradients(w, step);
	ALL(w, nodefix_reduce(n, m, u, false, op));
	ALL(w, nodefix_clip(n, m, 0.75, op));
	w->deaf = deaf;
	ALL(w, nodefix_step(n, m, op));
}

static void train(struct spanfix *w, unsigned step)
{
	train_up_to_commit(w, step, 0);
	ALL(w, nodefix_commit(n, m, step, 0, op));
}

/* Train @n steps without interruption, and gather. Return: the bytes that were noted; the caller's. */
static unsigned char *plain_training(const unsigned *ranks, void (*change)(state_unit *spec),
				     unsigned steps, size_t *ret)
{
	struct spanfix *w = &spanfix;

	spanfix_begin(w, true, ranks);
	spanfix_add_unit(w, 1003, change);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned step = 1; step <= steps; step++)
		train(w, step);
	w->n_notes = 0;
	spanfix_gather_and_note(w);
	spanfix_end(w);
	*ret = w->n_notes;
	return w->notes;
}

static void expect_parameters(struct spanfix *w, const unsigned char *want, size_t n_want)
{
	w->n_notes = 0;
	spanfix_gather_and_note(w);
	cr_assert_eq(w->n_notes, n_want);
	cr_expect(memcmp(w->notes, want, n_want) == 0, "the parameters are others");
}

/* Step 3 is the last one. @want: freed. */
static void train_to_the_end(struct spanfix *w, unsigned char *want, size_t n_want)
{
	train(w, 3);
	expect_parameters(w, want, n_want);
	spanfix_end(w);
	free(w->notes);
	free(want);
}

static void resolve(struct spanfix *w, const struct doubt_ruling *r)
{
	spanfix_turn_until(w, spanfix_is_idle);
	for (unsigned i = 0; i < w->n_nodes; i++)
		doubt_resolve(w->jobs[i], r);
	spanfix_turn_until(w, spanfix_is_idle);
	for (unsigned i = 0; i < w->n_nodes; i++)
		cr_expect(!w->jobs[i]->step.doubt);
}

static bool here_is_over(struct spanfix *w)
{
	return w->ops[0].over;
}

static void few_turns(struct spanfix *w)
{
	for (unsigned i = 0; i < 100; i++) {
		spanfix_turn_orders(w);
		for (unsigned k = 0; k < w->n_nodes; k++)
			nodefix_turn(&w->nodes[k]);
	}
}

static void begin_doubt(struct spanfix *w, void (*change)(state_unit *spec), uint32_t resume)
{
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 2 });
	for (unsigned i = 0; resume && i < w->n_nodes; i++)
		w->jobs[i]->rec->resume = resume;
	spanfix_add_unit(w, 1003, change);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	train(w, 1);
}

static const unsigned doubt_ranks[SPANFIX_NODES] = { 1, 2 };

/* Node 1 has not heard of the commit of step 2, which node 0 has made. */
static void commit_in_doubt(uint32_t resume, bool decided, bool gathered)
{
	struct doubt_ruling ruling = { .has_commit = true, .step = decided ? 2 : 1, .epoch = 1 };
	struct spanfix *w = &spanfix;
	unsigned char *want;
	size_t n_want;

	want = plain_training(doubt_ranks, NULL, 3, &n_want);
	begin_doubt(w, NULL, resume);
	train_up_to_commit(w, 2, gathered ? 0 : 2);
	if (gathered)
		spanfix_gather_and_note(w); /* so that it is applied */
	w->deaf = decided ? 2 : 3;
	EACH(w, nodefix_commit(n, m, 2, 5 + m->rank, op));
	if (decided)
		spanfix_turn_until(w, here_is_over);
	few_turns(w);
	cr_expect_eq(w->ops[0].over, decided);
	cr_expect(!w->ops[1].over);
	spanfix_epoch_ends(w, "node node0 is gone");
	cr_expect_eq(w->ops[1].fault.code, FAULT_ABORTED);
	cr_expect(w->jobs[1]->step.doubt);
	resolve(w, &ruling);
	w->deaf = 0;
	for (unsigned i = 0; i < 2; i++) {
		uint64_t at;

		cr_expect_eq(w->jobs[i]->rec->step, decided ? 2 : 1);
		if (resume == JOB_RESUME_COMMITTED || !gathered)
			cr_expect(position_of(w->jobs[i]->rec, &at) && at == (decided ? 2u : 1u));
		else
			cr_expect(position_of(w->jobs[i]->rec, &at) && at == 2);
		cr_expect_eq(state_job_blob(w->jobs[i]->rec, 2 * i)->data.len,
			     decided ? 5 + 2 * i : 0);
	}
	spanfix_next_epoch(w, "job/100");
	if (!decided && (resume == JOB_RESUME_COMMITTED || !gathered))
		train(w, 2);
	train_to_the_end(w, want, n_want);
}

Test(doubt, a_commit_that_was_decided_is_completed)
{
	commit_in_doubt(0, true, false);
}

Test(doubt, a_commit_that_was_not_decided_is_dropped)
{
	commit_in_doubt(0, false, false);
}

Test(doubt, a_commit_of_an_applied_step_is_completed)
{
	commit_in_doubt(0, true, true);
}

Test(doubt, a_commit_of_an_applied_step_is_dropped)
{
	commit_in_doubt(0, false, true);
}

Test(doubt, a_commit_is_completed_where_the_job_goes_back_to_commits)
{
	commit_in_doubt(JOB_RESUME_COMMITTED, true, false);
	commit_in_doubt(JOB_RESUME_COMMITTED, true, true);
}

Test(doubt, a_commit_is_dropped_where_the_job_goes_back_to_commits)
{
	commit_in_doubt(JOB_RESUME_COMMITTED, false, false);
	commit_in_doubt(JOB_RESUME_COMMITTED, false, true);
}

/* Node 0 has applied a step without a commit; node 1 has it prepared, and has not heard that all have. */
static void step_in_doubt(void (*change)(state_unit *spec), bool applied)
{
	struct doubt_ruling ruling = { .has_commit = true, .step = 1, .epoch = 1 };
	struct spanfix *w = &spanfix;
	struct job_step_id step;
	unsigned char *want;
	size_t n_want;

	want = plain_training(doubt_ranks, change, 3, &n_want);
	begin_doubt(w, change, 0);
	train_up_to_commit(w, 2, applied ? 2 : 3);
	cr_assert_eq(nodefix_on_unit(spanfix_node_of(w, 0), w->members[0], "Gather",
				     spanfix_unit_of(w, 0), &w->ops[0]),
		     0);
	few_turns(w);
	cr_expect(!w->ops[0].over);
	spanfix_epoch_ends(w, "node node0 is gone");
	spanfix_turn_until(w, spanfix_is_idle);
	for (unsigned i = 0; i < 2; i++) {
		struct job_step_id id = w->jobs[1]->step.id;

		const state_applied *a = state_job_applied(w->jobs[i]->rec, id.group);

		cr_expect_eq(a && a->number == id.number, i == 0 && applied);
		cr_expect_eq(w->jobs[i]->step.doubt != NULL, i == 1 || !applied);
	}
	step = w->jobs[1]->step.id;
	ruling.n_applied = applied;
	ruling.applied = &step;
	resolve(w, &ruling);
	w->deaf = 0;
	for (unsigned i = 0; i < 2; i++) {
		uint64_t at;

		cr_expect(position_of(w->jobs[i]->rec, &at) && at == 1u + applied);
	}
	spanfix_next_epoch(w, "job/100");
	if (applied)
		ALL(w, nodefix_commit(n, m, 2, 0, op));
	else
		train(w, 2);
	train_to_the_end(w, want, n_want);
}

Test(doubt, a_step_that_another_node_has_applied_is_applied)
{
	step_in_doubt(NULL, true);
}

Test(doubt, a_step_that_no_node_has_applied_is_dropped)
{
	step_in_doubt(NULL, false);
}

Test(doubt, a_step_in_doubt_of_bf16_parameters_is_applied)
{
	step_in_doubt(spanfix_in_bf16, true);
}

static bool is_broken(struct spanfix *w)
{
	return w->broken.code;
}

/* The deadline of one rank's Commit passes while the store decides it: the epoch ends, and what becomes of it is
 * known in the next one. */
static void commit_is_given_up(bool decided, unsigned rank)
{
	const struct doubt_ruling ruling = { .has_commit = true,
					     .step = decided ? 2 : 1,
					     .epoch = 1 };
	struct spanfix *w = &spanfix;

	begin_doubt(w, NULL, 0);
	train_up_to_commit(w, 2, 0);
	w->undecided = true;
	EACH(w, nodefix_commit(n, m, 2, 5 + m->rank, op));
	few_turns(w);
	op_cancel(w->ops[rank].op, FAULT_DEADLINE, "its time is over");
	op_cancel(w->ops[rank].op, FAULT_CANCELLED, "it is given up twice");
	spanfix_turn_until(w, is_broken);
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < w->size; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_ABORTED);
		cr_expect(strstr(w->ops[r].fault.text, "its time is over"), "%s",
			  w->ops[r].fault.text);
	}
	w->undecided = false;
	resolve(w, &ruling);
	for (unsigned i = 0; i < 2; i++)
		cr_expect_eq(w->jobs[i]->rec->step, decided ? 2 : 1);
	cr_expect_eq(state_job_blob(w->jobs[1]->rec, 2)->data.len, decided ? 7 : 0);
	spanfix_next_epoch(w, "job/100");
	train(w, 3);
	spanfix_end(w);
	free(w->notes);
}

Test(doubt, a_commit_that_is_given_up_while_it_is_decided)
{
	for (unsigned rank = 0; rank < 3; rank++) {
		commit_is_given_up(true, rank);
		commit_is_given_up(false, rank);
	}
}

/* Nothing is decided yet: it fails for all, and the epoch goes on. */
Test(doubt, a_commit_that_is_given_up_before_all_are_ready_fails)
{
	struct spanfix *w = &spanfix;

	begin_doubt(w, NULL, 0);
	train_up_to_commit(w, 2, 0);
	for (uint32_t r = 0; r < 2; r++) /* the other rank of node 1 has not come */
		cr_assert_eq(nodefix_commit(spanfix_node_of(w, r), w->members[r], 2, 0, &w->ops[r]),
			     0);
	few_turns(w);
	op_cancel(w->ops[0].op, FAULT_DEADLINE, "its time is over");
	few_turns(w);
	cr_assert_eq(nodefix_commit(spanfix_node_of(w, 2), w->members[2], 2, 0, &w->ops[2]), 0);
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < w->size; r++)
		cr_expect_eq(w->ops[r].fault.code, FAULT_DEADLINE, "%s", w->ops[r].fault.text);
	cr_expect(!w->broken.code);
	ALL(w, nodefix_commit(n, m, 2, 0, op));
	train(w, 3);
	spanfix_end(w);
	free(w->notes);
}

/* The job is deleted, or its daemon ends, with a step in doubt. */
Test(doubt, a_doubt_ends_with_its_job)
{
	struct spanfix *w = &spanfix;

	begin_doubt(w, NULL, 0);
	train_up_to_commit(w, 2, 3);
	EACH(w, nodefix_commit(n, m, 2, 5, op));
	few_turns(w);
	spanfix_epoch_ends(w, "node node0 is gone");
	spanfix_turn_until(w, spanfix_ops_are_over);
	cr_expect(w->jobs[0]->step.doubt && w->jobs[1]->step.doubt);
	spanfix_end(w);
	free(w->notes);
}
