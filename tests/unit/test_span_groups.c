/* Groups over several nodes (spanfix.h) whose order goes from one node to another and back. Such a group was
 * refused, with a shortage of memory as the reason, on the nodes with ranks that were not side by side. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "job/group.h"
#include "spanfix.h"

TestSuite(span_groups, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

/* Ranks in this order, as many as the job has. */
static const uint32_t orders[][6] = { { 0, 2, 1, 3 }, { 3, 0, 2, 1 }, { 5, 0, 3, 1, 4, 2 } };
static const uint32_t *order;
static void (*unit_changes)(state_unit *spec);

static void in_group(state_unit *spec)
{
	spec->group = 1;
	if (unit_changes)
		unit_changes(spec);
}

static void in_pairs(state_unit *spec)
{
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
}

static void in_pairs_by_rows(state_unit *spec)
{
	in_pairs(spec);
	spec->layout = LAYOUT_DIM0;
}

static int step(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__StepRequest r = SHARDD__V1__STEP_REQUEST__INIT;

	r.group = 1;
	return nodefix_submit(n, m, "Step", &r.base, op);
}

static int change_copy(struct nodefix *n, struct member *m, bool ends, struct nodefix_op *op)
{
	Shardd__V1__SummonFullRequest summon = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;
	Shardd__V1__ReturnFullRequest back = SHARDD__V1__RETURN_FULL_REQUEST__INIT;

	summon.unit = back.unit = spanfix.unit;
	back.write = true;
	return ends ? nodefix_submit(n, m, "ReturnFull", &back.base, op)
		    : nodefix_submit(n, m, "SummonFull", &summon.base, op);
}

static int broadcast(struct nodefix *n, struct member *m, uint64_t buffer, uint32_t root,
		     struct nodefix_op *op)
{
	Shardd__V1__BroadcastRequest r = SHARDD__V1__BROADCAST_REQUEST__INIT;

	r.group = 1;
	r.buffer = buffer;
	r.bytes = 400;
	r.root = root;
	return nodefix_submit(n, m, "Broadcast", &r.base, op);
}

static void begin_group(struct spanfix *w)
{
	for (unsigned i = 0; i < spanfix_homes(w); i++) {
		struct fault f = FAULT_NULL;
		struct group *g;

		cr_assert_eq(job_group(w->jobs[i], "mixed", order, w->size, &g, &f), 0, "%s",
			     f.text);
	}
	spanfix_add_unit(w, 1003, in_group);
	ALL(w, nodefix_seed(n, m, u, 7, op));
}

/* From each rank in turn: a node shows its own buffers to all others. */
static void broadcast_from_all(struct spanfix *w)
{
	uint64_t buffers[SPANFIX_RANKS];
	struct region place[SPANFIX_RANKS];

	ALL(w, nodefix_alloc(n, m, 4096, op));
	for (uint32_t r = 0; r < w->size; r++) {
		buffers[r] = w->ops[r].result.buffer;
		place[r] = *spanfix_result(w, r);
	}
	for (uint32_t root = 0; root < w->size; root++) {
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_fill(&place[r], r, root);
		ALL(w, broadcast(n, m, buffers[r], root, op));
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_note(w, region_addr(&place[r]), place[r].bytes);
	}
}

static void script_train(struct spanfix *w)
{
	begin_group(w);
	for (unsigned s = 1; s <= 3; s++) {
		spanfix_fill_gradients(w, s);
		ALL(w, nodefix_on_unit(n, m, "Accumulate", u, op));
		spanfix_fill_gradients(w, s + 10);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		ALL(w, step(n, m, op));
		ALL(w, nodefix_commit(n, m, s, 0, op));
		spanfix_gather_and_note(w);
		ALL(w, change_copy(n, m, false, op));
		spanfix_note_results(w);
		for (uint32_t r = 0; r < w->size; r++) /* replicas must be given the same */
			spanfix_fill(spanfix_result(w, r), unit_changes ? 0 : r, s);
		ALL(w, change_copy(n, m, true, op));
		spanfix_gather_and_note(w);
	}
	broadcast_from_all(w);
}

/* The numbers of its devices are the same on all nodes, and those of a node consecutive. */
Test(span_groups, devices_of_a_node_have_consecutive_numbers)
{
	struct spanfix *w = &spanfix;

	order = orders[2];
	unit_changes = NULL;
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 2, 3 });
	begin_group(w);
	for (unsigned i = 0; i < 3; i++) {
		const struct group *g = w->jobs[i]->groups[1];
		uint32_t here;

		cr_expect_eq(g->all_devices, 3);
		cr_expect_eq(g->n_devices, 1);
		cr_expect_eq(g->here, i + 1);
		for (uint32_t k = 0; k < 6; k++) {
			unsigned node = order[k] == 0 ? 0 : order[k] < 3 ? 1 : 2;

			cr_expect_eq(group_is_here(g, k, &here), node == i);
			if (node == i)
				cr_expect_eq(group_member_here(g, here), k);
			cr_expect_eq(group_device_number(g, k), (node + 1) % 3);
		}
	}
	spanfix_end(w);
	free(w->notes);
}

/* Sums in rank order would go over a node twice: that is refused, and the epoch goes on. */
Test(span_groups, sums_in_rank_order_are_refused)
{
	struct spanfix *w = &spanfix;

	order = orders[0];
	unit_changes = NULL;
	spanfix_by_ranks = true;
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 2 });
	begin_group(w);
	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	EACH(w, nodefix_reduce(n, m, u, false, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 4; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_UNIMPLEMENTED, "%s", w->ops[r].fault.text);
		cr_expect(strstr(w->ops[r].fault.text, "set order: devices"), "%s",
			  w->ops[r].fault.text);
		cr_expect_eq(w->members[r]->state, MEMBER_JOINED);
	}
	spanfix_end(w);
	free(w->notes);
}

#define SPAN_TEST(name, which, change, ...)                                                \
	Test(span_groups, name)                                                            \
	{                                                                                  \
		order = orders[which];                                                     \
		unit_changes = change;                                                     \
		spanfix_run(script_train, (const unsigned[SPANFIX_NODES]){ __VA_ARGS__ }); \
	}

SPAN_TEST(shards_on_2_2, 0, NULL, 2, 2)
SPAN_TEST(shards_that_begin_elsewhere_on_2_2, 1, NULL, 2, 2)
SPAN_TEST(shards_on_1_2_3, 2, NULL, 1, 2, 3)
SPAN_TEST(replicas_on_2_2, 0, spanfix_replicated, 2, 2)
SPAN_TEST(replicas_on_1_2_3, 2, spanfix_replicated, 1, 2, 3)
SPAN_TEST(pairs_on_2_2, 0, in_pairs, 2, 2)
SPAN_TEST(pairs_by_rows_on_1_2_3, 2, in_pairs_by_rows, 1, 2, 3)
