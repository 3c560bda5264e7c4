/*
 * A job is restored from parts in memory (job/restore.h). What it has then is compared with what it had, with what it
 * would have without an interruption, and with what a checkpoint gives in a fresh job.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/loading.h"
#include "restorefix.h"

TestSuite(span_restore, .init = restorefix_begin_suite, .fini = restorefix_end_suite,
	  .timeout = 120);

static void blobs_are_there(unsigned old_ranks)
{
	for (uint32_t r = 0; r < spanfix.size && r < old_ranks; r++) {
		const state_blob *b = state_job_blob(spanfix.jobs[restorefix_home(r)]->rec, r);

		cr_assert(b, "rank %u", r);
		cr_expect_eq(b->data.len, 8 + r);
	}
}

/* What the steps from 1 to @steps make. */
static struct restorefix_parts uninterrupted(const unsigned *ranks, unsigned steps, bool hybrids,
					     bool pairs)
{
	struct restorefix_parts p;

	restorefix_begin(ranks);
	restorefix.hybrid = hybrids;
	restorefix.pair = pairs;
	restorefix_add_units();
	restorefix_train(1, steps);
	p = restorefix_take(NULL);
	spanfix_end(&spanfix);
	return p;
}

/* Lose nodes (bits) after a step, go back to the commit before it, train on. @stay: with the same processes, but
 * for those of lost nodes. */
static void in_place(const unsigned *ranks, unsigned lost, bool stay, bool hybrids, bool pairs)
{
	/* gradients that the test writes are not ordered with the tasks of such devices */
	bool by_devices = spanfix_queues;
	struct restorefix_parts want = uninterrupted(ranks, 5, hybrids, pairs), at3, is3, is5;
	uint32_t ids[2];

	restorefix_begin(ranks);
	restorefix.hybrid = hybrids;
	restorefix.pair = pairs;
	restorefix_add_units();
	restorefix_train(1, 3);
	at3 = restorefix_take(NULL);
	restorefix_step(4);
	ids[0] = restorefix_unit_of(0, "sgd")->id;
	restorefix_use("copies");
	ALL(&spanfix, nodefix_on_unit(n, m, "Gather", u, op)); /* held when it ends */
	restorefix_epoch_ends();
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		if (lost >> i & 1)
			restorefix_lose(i);
	restorefix_all(&at3);
	blobs_are_there(spanfix.size);
	ids[1] = restorefix_unit_of(0, "sgd")->id;
	cr_expect_eq(ids[0], ids[1]);
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		cr_expect(!spanfix.jobs[i]->rec->saved, "it is in no checkpoint");
	for (unsigned i = 0; !stay && i < spanfix.n_nodes; i++)
		restorefix_drop_members(i);
	if (!stay) { /* the buffers are as they were left */
		is3 = restorefix_take(NULL);
		restorefix_same(&at3, &is3, spanfix.size);
		restorefix_free(&is3);
	}
	restorefix_next_epoch();
	restorefix_train(4, 5);
	is5 = restorefix_take(NULL);
	if (!by_devices)
		restorefix_same(&want, &is5, spanfix.size);
	restorefix_end();
	restorefix_free(&want);
	restorefix_free(&at3);
	restorefix_free(&is5);
}

Test(span_restore, goes_back_where_all_is_there)
{
	in_place(WORLD(2, 1), 0, true, false, false);
}

Test(span_restore, fills_a_node_that_has_nothing)
{
	in_place(WORLD(2, 1), 2, false, false, false);
}

Test(span_restore, fills_the_first_of_three_nodes)
{
	in_place(WORLD(1, 2, 1), 1, true, false, false);
}

Test(span_restore, fills_all_nodes)
{
	in_place(WORLD(1, 1, 1), 7, false, false, false);
}

Test(span_restore, of_hybrid_units)
{
	in_place(WORLD(2, 2), 2, true, true, false);
}

Test(span_restore, of_units_whose_replicas_have_two_nodes_each)
{
	in_place(WORLD(1, 1, 1, 1), 4, true, true, false);
}

Test(span_restore, of_units_whose_replicas_have_two_nodes_each_on_all_nodes)
{
	in_place(WORLD(1, 1, 1, 1), 15, false, true, false);
}

Test(span_restore, of_units_of_groups)
{
	in_place(WORLD(1, 1, 1), 1, false, false, true);
}

Test(span_restore, of_units_of_groups_on_a_node_without_them)
{
	in_place(WORLD(1, 1, 1), 2, false, false, true);
}

Test(span_restore, by_way_of_devices)
{
	spanfix_queues = true;
	in_place(WORLD(2, 1), 2, false, false, false);
}

/* ------------------------------------------------------------------------- another world */

static void on_load_answer(struct job *job, const struct loading_answer *a, void *userdata)
{
	(void)job, (void)userdata;
	cr_assert(!a->f, "%s", a->f ? a->f->text : "");
	restorefix.answers++;
}

/* The checkpoint in @path, in a job that has just been made. */
static void load_fresh(const unsigned *ranks, const char *path, bool hybrids)
{
	const struct loading_options o = { .path = path };
	struct spanfix *w = &spanfix;
	struct fault f = FAULT_NULL;

	restorefix_begin(ranks);
	restorefix.hybrid = hybrids;
	restorefix.unseeded = true;
	restorefix_add_units();
	for (unsigned i = 0; i < w->n_nodes; i++)
		cr_assert_eq(loading_part_open(w->jobs[i], &o, on_load_answer, NULL, &f), 0, "%s",
			     f.text);
	restorefix_await(w->n_nodes);
	for (unsigned i = 0; i < w->n_nodes; i++)
		loading_part_read(w->jobs[i]);
	restorefix_await(w->n_nodes);
	for (unsigned i = 0; i < w->n_nodes; i++)
		loading_part_end(w->jobs[i], 0, NULL);
	restorefix_epoch_ends();
	restorefix_next_epoch();
}

static void elsewhere(const unsigned *from, const unsigned *to, bool hybrids, bool stay)
{
	bool by_devices = spanfix_queues; /* as in in_place */
	struct restorefix_parts at3, is3, want, is5;
	uint32_t ranks = 0, common, ids[2];
	char path[96];

	snprintf(path, sizeof(path), "%s/a", restorefix_root);
	restorefix_begin(from);
	restorefix.hybrid = hybrids;
	restorefix_add_units();
	restorefix_train(1, 3);
	at3 = restorefix_take(path);
	restorefix_step(4);
	ids[0] = restorefix_unit_of(0, "sgd")->id;
	restorefix_use("copies");
	ALL(&spanfix, nodefix_on_unit(n, m, "Gather", u, op)); /* held when it ends */
	restorefix_epoch_ends();
	ranks = spanfix.size;
	restorefix_move_to(to, stay);
	common = ranks < spanfix.size ? ranks : spanfix.size;
	restorefix_all(&at3);
	blobs_are_there(ranks);
	ids[1] = restorefix_unit_of(0, "sgd")->id;
	cr_expect_eq(ids[0], ids[1]);
	if (!stay) { /* as in in_place */
		is3 = restorefix_take(NULL);
		restorefix_same(&at3, &is3, common);
		restorefix_free(&is3);
	}
	restorefix_next_epoch();
	restorefix_train(4, 5);
	is5 = restorefix_take(NULL);
	spanfix_end(&spanfix);
	load_fresh(to, path, hybrids);
	restorefix_train(4, 5);
	want = restorefix_take(NULL);
	if (!by_devices)
		restorefix_same(&want, &is5, spanfix.size);
	restorefix_end();
	restorefix_free(&want);
	restorefix_free(&at3);
	restorefix_free(&is5);
}

Test(span_restore, goes_on_without_a_node)
{
	elsewhere(WORLD(1, 2, 1), WORLD(1, 2), false, false);
}

Test(span_restore, goes_on_with_another_node)
{
	elsewhere(WORLD(2, 1), WORLD(2, 1, 1), false, false);
}

Test(span_restore, goes_on_with_ranks_elsewhere)
{
	elsewhere(WORLD(2, 1, 1), WORLD(1, 3), false, false);
}

Test(span_restore, goes_on_on_one_node)
{
	elsewhere(WORLD(1, 2), WORLD(1), false, false);
}

Test(span_restore, goes_on_with_hybrid_units)
{
	elsewhere(WORLD(2, 2), WORLD(2, 2, 2), true, false);
}

Test(span_restore, goes_on_with_two_nodes_for_each_replica)
{
	elsewhere(WORLD(2, 2), WORLD(1, 1, 1, 1), true, false);
}

Test(span_restore, goes_on_without_two_nodes_for_each_replica)
{
	elsewhere(WORLD(1, 1, 1, 1), WORLD(2, 2), true, false);
}

Test(span_restore, goes_on_elsewhere_by_way_of_devices)
{
	spanfix_queues = true;
	elsewhere(WORLD(1, 2, 1), WORLD(2, 1), false, false);
}

/* Those whose numbers are of this node still. */
Test(span_restore, goes_on_with_the_processes_that_are_left)
{
	elsewhere(WORLD(2, 1), WORLD(2), false, true);
}

Test(span_restore, goes_on_with_some_of_the_processes)
{
	elsewhere(WORLD(2, 2, 1), WORLD(1, 2), false, true);
}
