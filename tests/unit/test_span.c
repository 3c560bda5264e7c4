/*
 * A job over several nodes (spanfix.h): training, and what ends an epoch. The ops that need more are in
 * test_span_ops.c.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/mesh.h"
#include "spanfix.h"
#include "step/shards.h"

TestSuite(span, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

/* --------------------------------------------------------------------- scripts */

static void note_norms(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_note(w, &NODEFIX_OUTCOME(shards_outcome, &w->ops[r])->total_norm,
			     sizeof(double));
}

static void train(struct spanfix *w, unsigned step)
{
	spanfix_gather_and_note(w);
	spanfix_fill_gradients(w, 2 * step);
	ALL(w, nodefix_on_unit(n, m, "Accumulate", u, op));
	spanfix_fill_gradients(w, 2 * step + 1);
	ALL(w, nodefix_reduce(n, m, u, false, op));
	ALL(w, nodefix_clip(n, m, 0.75, op));
	note_norms(w);
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, step, 0, op));
}

static void by_rows(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 }, frozen[] = { 5, 2 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->init_kind = FILL_UNIFORM;
	t->init_a = -1;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	t = state_tensor_new("frozen", frozen, 2);
	t->frozen = true;
	t->init_kind = FILL_UNIFORM;
	t->init_b = 2;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	spec->layout = LAYOUT_DIM0;
}

static void (*unit_changes)(state_unit *spec);

static void script_training(struct spanfix *w)
{
	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned s = 1; s <= 3; s++)
		train(w, s);
	spanfix_gather_and_note(w);
}

static uint64_t buffer_of(struct spanfix *w, uint32_t rank)
{
	return w->ops[rank].result.buffer;
}

static int all_reduce(struct nodefix *n, struct member *m, uint64_t buffer,
		      Shardd__V1__ReduceOp how, Shardd__V1__Dtype dtype, struct nodefix_op *op)
{
	Shardd__V1__AllReduceRequest r = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;

	r.buffer = buffer;
	r.count = 333;
	r.dtype = dtype;
	r.op = how;
	return nodefix_submit(n, m, "AllReduce", &r.base, op);
}

static int broadcast_from(struct nodefix *n, struct member *m, uint64_t buffer, uint32_t root,
			  struct nodefix_op *op)
{
	Shardd__V1__BroadcastRequest r = SHARDD__V1__BROADCAST_REQUEST__INIT;

	r.buffer = buffer;
	r.bytes = 1333;
	r.root = root;
	return nodefix_submit(n, m, "Broadcast", &r.base, op);
}

static void script_buffers(struct spanfix *w)
{
	static const Shardd__V1__ReduceOp how[] = { SHARDD__V1__REDUCE_OP__REDUCE_OP_SUM,
						    SHARDD__V1__REDUCE_OP__REDUCE_OP_AVG,
						    SHARDD__V1__REDUCE_OP__REDUCE_OP_MAX,
						    SHARDD__V1__REDUCE_OP__REDUCE_OP_MIN };
	struct region place[SPANFIX_RANKS];
	uint64_t buffers[SPANFIX_RANKS];

	spanfix_turn_until(w, spanfix_is_placed);
	ALL(w, nodefix_alloc(n, m, 4096, op));
	for (uint32_t r = 0; r < w->size; r++) {
		place[r] = *spanfix_result(w, r);
		buffers[r] = buffer_of(w, r);
	}
	for (unsigned i = 0; i < ARRAY_SIZE(how); i++) {
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_fill(&place[r], r, i);
		ALL(w, all_reduce(n, m, buffers[r], how[i], SHARDD__V1__DTYPE__DTYPE_FP32, op));
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_note(w, region_addr(&place[r]), place[r].bytes);
	}
	for (uint32_t root = 0; root < w->size; root++) {
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_fill(&place[r], r, root);
		ALL(w, broadcast_from(n, m, buffers[r], root, op));
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_note(w, region_addr(&place[r]), place[r].bytes);
	}
	ALL(w, nodefix_barrier(n, m, 0, op));
	ALL(w, nodefix_free(n, m, buffers[r], op));
}

static int from_root(struct nodefix *n, struct member *m, const struct unit *u, uint32_t root,
		     uint64_t buffer, struct nodefix_op *op)
{
	Shardd__V1__InitialiseRequest r = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__FromRank from = SHARDD__V1__FROM_RANK__INIT;

	from.root = root;
	r.unit = u->id;
	r.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
	r.broadcast = &from;
	r.buffer = m->rank == root ? buffer : 0;
	return nodefix_submit(n, m, "Initialise", &r.base, op);
}

/* From each root in turn, then each rank's own; and each time what is there is summoned. */
static void script_initialise(struct spanfix *w)
{
	uint64_t buffers[SPANFIX_RANKS];

	spanfix_add_unit(w, 517, unit_changes);
	ALL(w, nodefix_alloc(n, m, 8192, op));
	for (uint32_t r = 0; r < w->size; r++) {
		spanfix_fill(spanfix_result(w, r), r, 3);
		buffers[r] = buffer_of(w, r);
	}
	for (uint32_t root = 0; root < w->size; root++) {
		ALL(w, from_root(n, m, u, root, buffers[r], op));
		spanfix_gather_and_note(w);
	}
	ALL(w, nodefix_own(n, m, u, buffers[r], op));
	spanfix_gather_and_note(w);
	ALL(w, nodefix_on_unit(n, m, "SummonFull", u, op));
	spanfix_note_results(w);
	ALL(w, nodefix_on_unit(n, m, "ReturnFull", u, op));
	ALL(w, nodefix_free(n, m, buffers[r], op));
}

static int unscale(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__UnscaleRequest r = SHARDD__V1__UNSCALE_REQUEST__INIT;

	r.inv_scale = 0.25;
	return nodefix_submit(n, m, "Unscale", &r.base, op);
}

/* One rank's gradient has an infinity in what another node has: all ranks must know. */
static void script_found_inf(struct spanfix *w)
{
	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned inf = 0; inf < 2; inf++) {
		spanfix_fill_gradients(w, inf);
		if (inf)
			((float *)region_addr(spanfix_result(w, 0)))[1002] = INFINITY;
		ALL(w, nodefix_reduce(n, m, u, false, op));
		ALL(w, unscale(n, m, op));
		for (uint32_t r = 0; r < w->size; r++) {
			bool found = NODEFIX_OUTCOME(shards_outcome, &w->ops[r])->found_inf;

			cr_expect_eq(found, inf > 0, "rank %u", r);
		}
		ALL(w, nodefix_clip(n, m, 0.75, op));
		note_norms(w);
		ALL(w, nodefix_step(n, m, op));
		ALL(w, nodefix_commit(n, m, inf + 1, 0, op));
	}
	spanfix_gather_and_note(w);
}

/* -- what ends an epoch */

/* The other node does nothing but send and receive. */
static void turn_first_node(struct spanfix *w)
{
	for (unsigned i = 0; i < 100; i++) {
		nodefix_turn(&w->nodes[0]);
		spanfix_turn_orders(w);
	}
}

static void all_aborted(struct spanfix *w, const char *why)
{
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < w->size; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_ABORTED, "rank %u: %s: %s", r,
			     fault_code_name(w->ops[r].fault.code), w->ops[r].fault.text);
		cr_expect(strstr(w->ops[r].fault.text, why), "rank %u: %s", r,
			  w->ops[r].fault.text);
	}
}

/* One node alone has started the reduction: it waits for the other's data. */
Test(span, an_epoch_ends_while_a_collective_waits_for_another_node)
{
	struct spanfix *w = &spanfix;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 1 });
	spanfix_add_unit(w, 1003, NULL);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	train(w, 1);
	spanfix_fill_gradients(w, 5);
	backend_fake_hold(w->nodes[1].node.devices[0].backend, true);
	EACH(w, nodefix_reduce(n, m, u, false, op));
	turn_first_node(w);
	cr_expect(w->ops[0].op && !w->ops[0].over);
	spanfix_epoch_ends(w, "node node1 is gone");
	backend_fake_hold(w->nodes[1].node.devices[0].backend, false);
	backend_fake_release(w->nodes[1].node.devices[0].backend, false);
	all_aborted(w, "node node1 is gone");
	spanfix_next_epoch(w, "job/100");
	train(w, 2);
	spanfix_gather_and_note(w);
	spanfix_end(w);
	free(w->notes);
}

static void hybrid(state_unit *spec)
{
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
}

/* The same where each replica has two nodes: those of one wait for those of the other. */
Test(span, an_epoch_ends_while_replicas_wait_for_each_other)
{
	struct spanfix *w = &spanfix;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1, 1, 1 });
	spanfix_add_unit(w, 1003, hybrid);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	train(w, 1);
	spanfix_fill_gradients(w, 5);
	backend_fake_hold(w->nodes[3].node.devices[0].backend, true);
	EACH(w, nodefix_reduce(n, m, u, false, op));
	turn_first_node(w);
	cr_expect(w->ops[0].op && !w->ops[0].over);
	spanfix_epoch_ends(w, "node node3 is gone");
	backend_fake_hold(w->nodes[3].node.devices[0].backend, false);
	backend_fake_release(w->nodes[3].node.devices[0].backend, false);
	all_aborted(w, "node node3 is gone");
	spanfix_next_epoch(w, "job/100");
	train(w, 2);
	spanfix_gather_and_note(w);
	spanfix_end(w);
	free(w->notes);
}

/* A communicator of two of four nodes breaks by itself: the job hears which node it was, and all go on. */
static void two_nodes_lose_contact(enum mesh_way way, const char *what)
{
	struct spanfix *w = &spanfix;
	struct mesh *mesh;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1, 1, 1 });
	spanfix_add_unit(w, 1003, hybrid);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	train(w, 1);
	mesh = mesh_find(w->jobs[1]->groups[0], spanfix_unit_of(w, 1));
	cr_assert(mesh_is_ready(mesh, MESH_SETS) && mesh_is_ready(mesh, MESH_LIKE));
	cr_assert_eq(mesh->n[way], 1);
	jobs_comm_broke(w->jobs[1]->jobs, mesh->comms[way][0].nc, "member 1 has left");
	cr_expect(strstr(w->members[1]->ended.text, what), "%s", w->members[1]->ended.text);
	cr_expect_not(mesh_is_ready(mesh, MESH_SETS) || mesh_is_ready(mesh, MESH_LIKE));
	spanfix_epoch_ends(w, "node node1 has ended it");
	spanfix_next_epoch(w, "job/200");
	train(w, 2);
	spanfix_end(w);
	free(w->notes);
}

Test(span, nodes_of_a_replica_lose_contact)
{
	two_nodes_lose_contact(MESH_SETS, "contact with node node1: member 1 has left");
}

Test(span, nodes_of_different_replicas_lose_contact)
{
	two_nodes_lose_contact(MESH_LIKE, "contact with node node3: member 1 has left");
}

/* What is wanted, or stands in line, is of its epoch. */
Test(span, an_epoch_ends_while_gathers_and_collectives_stand_in_line)
{
	struct spanfix *w = &spanfix;
	static struct nodefix_op gathers[SPANFIX_RANKS], barriers[SPANFIX_RANKS];

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1 });
	spanfix_add_unit(w, 1003, spanfix_in_bf16);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	spanfix_fill_gradients(w, 5);
	backend_fake_hold(w->nodes[1].node.devices[0].backend, true);
	EACH(w, nodefix_reduce(n, m, u, false, op));
	for (uint32_t r = 0; r < 2; r++) {
		cr_assert_eq(nodefix_barrier(spanfix_node_of(w, r), w->members[r], 0, &barriers[r]),
			     0);
		cr_assert_eq(nodefix_on_unit(spanfix_node_of(w, r), w->members[r], "Gather",
					     spanfix_unit_of(w, r), &gathers[r]),
			     0);
	}
	turn_first_node(w);
	spanfix_epoch_ends(w, "node node1 is gone");
	backend_fake_hold(w->nodes[1].node.devices[0].backend, false);
	backend_fake_release(w->nodes[1].node.devices[0].backend, false);
	all_aborted(w, "node node1 is gone");
	memcpy(w->ops, gathers, sizeof(gathers));
	spanfix_turn_until(w, spanfix_is_idle);
	for (uint32_t r = 0; r < 2; r++) {
		cr_expect(gathers[r].over);
		cr_expect_eq(gathers[r].fault.code, FAULT_ABORTED);
		cr_expect(barriers[r].over);
		cr_expect_eq(barriers[r].fault.code, FAULT_ABORTED);
	}
	spanfix_next_epoch(w, "job/100");
	train(w, 1);
	spanfix_end(w);
	free(w->notes);
}

Test(span, a_mismatch_between_nodes_fails_for_all)
{
	struct spanfix *w = &spanfix;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 1 });
	spanfix_add_unit(w, 1003, NULL);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (uint32_t r = 0; r < 3; r++) {
		w->ops[r] = (struct nodefix_op){ 0 };
		cr_assert_eq(nodefix_clip(spanfix_node_of(w, r), w->members[r], r == 2 ? 1.0 : 2.0,
					  &w->ops[r]),
			     0);
	}
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 3; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_STATE);
		cr_expect(strstr(w->ops[r].fault.text, "ClipGradNorm to 1"), "%s",
			  w->ops[r].fault.text);
	}
	train(w, 1);
	spanfix_end(w);
	free(w->notes);
}

/* A tensor that no rank has used keeps its value; one that a single rank has used does not. */
static void two_tensors(state_unit *spec)
{
	const uint64_t n = 501;
	state_tensor *t = state_tensor_new("second", &n, 1);

	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
}

/* All ranks use it, then none, then one, then the last one only, and all again. */
static void script_unused(struct spanfix *w)
{
	static const uint32_t second = 1;
	const uint32_t used[][2] = {
		{ 0, w->size }, { 0, 0 }, { 0, 1 }, { w->size - 1, w->size }, { 0, w->size }
	};

	spanfix_add_unit(w, 502, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (uint32_t i = 0; i < ARRAY_SIZE(used); i++) {
		spanfix_fill_gradients(w, i);
		ALL(w, m->rank >= used[i][0] && m->rank < used[i][1]
			       ? nodefix_reduce(n, m, u, false, op)
			       : nodefix_leave_out(n, m, u, &second, op));
		ALL(w, nodefix_step(n, m, op));
		ALL(w, nodefix_commit(n, m, i + 1, 0, op));
		spanfix_gather_and_note(w);
	}
}

/* Reductions of several small units, which come right behind each other. */
static void script_small_units(struct spanfix *w)
{
	enum { UNITS = 5 };
	uint32_t units[UNITS];
	static struct nodefix_op ops[UNITS][SPANFIX_RANKS];

	for (unsigned i = 0; i < UNITS; i++) {
		const char name[] = { (char)('a' + i), '\0' };

		spanfix_add_named_unit(w, name, 101 + 7 * i, unit_changes);
		units[i] = w->unit;
		ALL(w, nodefix_seed(n, m, u, i, op));
	}
	for (unsigned s = 1; s <= 5; s++) {
		for (unsigned i = 0; i < UNITS; i++) {
			w->unit = units[i];
			spanfix_fill_gradients(w, s + i);
		}
		for (unsigned i = 0; i < UNITS; i++)
			for (uint32_t r = 0; r < w->size; r++) {
				struct nodefix *n = spanfix_node_of(w, r);
				struct unit *u =
					job_unit_by_id(w->jobs[spanfix_home(w, r)], units[i]);

				ops[i][r] = (struct nodefix_op){ 0 };
				cr_assert_eq(nodefix_reduce(n, w->members[r], u, false, &ops[i][r]),
					     0);
			}
		for (unsigned i = 0; i < UNITS; i++) {
			memcpy(w->ops, ops[i], sizeof(ops[i]));
			while (!spanfix_ops_are_over(w)) {
				spanfix_turn(w);
				memcpy(w->ops, ops[i], sizeof(ops[i]));
			}
			spanfix_all_ok(w, "Reduce");
		}
		ALL(w, nodefix_clip(n, m, 0.75, op));
		note_norms(w);
		ALL(w, nodefix_step(n, m, op));
		ALL(w, nodefix_commit(n, m, s, 0, op));
		for (unsigned i = 0; i < UNITS; i++) {
			w->unit = units[i];
			spanfix_gather_and_note(w);
		}
	}
}

/* -- steps that repeat */

/* Steps of the job; the first one takes no part in what repeats. */
static void repeat(struct spanfix *w, unsigned from, unsigned to)
{
	for (unsigned s = from; s <= to; s++)
		train(w, s);
}

static void expect_recorded(struct spanfix *w, bool recorded)
{
	if (w->spans)
		cr_expect_eq(spanfix_is_recorded(w), recorded, "step %llu",
			     (unsigned long long)w->jobs[0]->rec->step);
}

static void script_repeated(struct spanfix *w)
{
	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	repeat(w, 1, 3);
	expect_recorded(w, true);
	repeat(w, 4, 8);
	expect_recorded(w, true);
	for (unsigned i = 0; i < w->n_nodes; i++)
		if (w->spans)
			cr_expect_geq(w->started[i], 5 * 4, "node %u started %u by itself", i,
				      w->started[i]);
	spanfix_gather_and_note(w);
}

/* All ranks do a barrier more, and a copy is made for nobody's step: the schedule ends, and begins again when
 * steps have repeated. */
static void script_other_ops(struct spanfix *w)
{
	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	repeat(w, 1, 4);
	expect_recorded(w, true);
	ALL(w, nodefix_barrier(n, m, 0, op));
	spanfix_gather_and_note(w);
	ALL(w, nodefix_barrier(n, m, 0, op));
	expect_recorded(w, false);
	repeat(w, 5, 10);
	expect_recorded(w, true);
	spanfix_gather_and_note(w);
}

/* One rank evaluates by itself, and asks for what is the last of a step first. */
static void script_evaluation(struct spanfix *w)
{
	uint32_t first, second;

	spanfix_add_unit(w, 1003, unit_changes);
	first = w->unit;
	ALL(w, nodefix_seed(n, m, u, 7, op));
	spanfix_add_named_unit(w, "v", 517, unit_changes);
	second = w->unit;
	ALL(w, nodefix_seed(n, m, u, 9, op));
	for (unsigned s = 1; s <= 12; s++) {
		if (s == 6) {
			expect_recorded(w, true);
			w->unit = second;
			for (uint32_t r = 1; r < w->size; r++)
				w->ops[r] = (struct nodefix_op){ .over = true };
			w->ops[0] = (struct nodefix_op){ 0 };
			cr_assert_eq(nodefix_on_unit(spanfix_node_of(w, 0), w->members[0], "Gather",
						     spanfix_unit_of(w, 0), &w->ops[0]),
				     0);
			spanfix_all_ok(w, "Gather of one rank");
			spanfix_note(w, region_addr(spanfix_result(w, 0)),
				     spanfix_result(w, 0)->bytes);
			expect_recorded(w, false);
			cr_assert_eq(nodefix_on_unit(spanfix_node_of(w, 0), w->members[0],
						     "Release", spanfix_unit_of(w, 0), &w->ops[0]),
				     0);
			spanfix_all_ok(w, "Release of one rank");
		}
		w->unit = first;
		spanfix_gather_and_note(w);
		w->unit = second;
		train(w, s);
	}
	expect_recorded(w, true);
}

/* A rank does something else than before, and the others do what they did: other nodes have begun that. */
Test(span, nodes_that_leave_a_schedule_in_different_directions_end_the_epoch)
{
	struct spanfix *w = &spanfix;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 2 });
	spanfix_add_unit(w, 1003, NULL);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	repeat(w, 1, 4);
	expect_recorded(w, true);
	spanfix_gather_and_note(w);
	spanfix_fill_gradients(w, 1);
	EACH(w, m->rank ? nodefix_reduce(n, m, u, false, op) : nodefix_barrier(n, m, 0, op));
	all_aborted(w, "ops differ at number");
	spanfix_next_epoch(w, "job/100");
	repeat(w, 5, 8);
	expect_recorded(w, true);
	spanfix_gather_and_note(w);
	spanfix_end(w);
	free(w->notes);
}

/* What a node sends is not taken for something else. */
Test(span, data_of_another_place_in_the_order_is_refused)
{
	struct spanfix *w = &spanfix;

	/* the other one closes its connections, too, which may be noticed before why it does */
	spanfix_reason_ms = 100;
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1 });
	spanfix_add_unit(w, 1003, NULL);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	train(w, 1);
	w->astray = 2;
	spanfix_fill_gradients(w, 1);
	EACH(w, nodefix_reduce(n, m, u, false, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 2; r++)
		cr_expect_eq(w->ops[r].fault.code, FAULT_ABORTED, "%s", w->ops[r].fault.text);
	cr_expect(strstr(w->ops[0].fault.text, "another place of the order") ||
			  strstr(w->ops[1].fault.text, "another place of the order"),
		  "%s; %s", w->ops[0].fault.text, w->ops[1].fault.text);
	spanfix_end(w);
	free(w->notes);
}

static void hybrid_by_rows(state_unit *spec)
{
	by_rows(spec);
	hybrid(spec);
}

#define SPAN_TEST(name, script, change, ...)                                         \
	Test(span, name)                                                             \
	{                                                                            \
		unit_changes = change;                                               \
		spanfix_run(script, (const unsigned[SPANFIX_NODES]){ __VA_ARGS__ }); \
	}

SPAN_TEST(training_on_1_1, script_training, NULL, 1, 1)
SPAN_TEST(training_on_2_2, script_training, NULL, 2, 2)
SPAN_TEST(training_on_1_2_3, script_training, NULL, 1, 2, 3)
SPAN_TEST(training_in_bf16_on_3_1, script_training, spanfix_in_bf16, 3, 1)
SPAN_TEST(training_by_rows_on_2_2, script_training, by_rows, 2, 2)
SPAN_TEST(training_by_rows_on_1_2_3, script_training, by_rows, 1, 2, 3)
SPAN_TEST(training_replicas_on_1_2, script_training, spanfix_replicated, 1, 2)
SPAN_TEST(training_sets_on_1_1_1_1, script_training, hybrid, 1, 1, 1, 1)
SPAN_TEST(training_sets_by_rows_on_1_1_1_1, script_training, hybrid_by_rows, 1, 1, 1, 1)
SPAN_TEST(repeated_sets_on_1_1_1_1, script_repeated, hybrid, 1, 1, 1, 1)
SPAN_TEST(initialise_sets_on_1_1_1_1, script_initialise, hybrid_by_rows, 1, 1, 1, 1)
SPAN_TEST(small_sets_on_1_1_1_1, script_small_units, hybrid, 1, 1, 1, 1)
SPAN_TEST(found_inf_in_sets_on_1_1_1_1, script_found_inf, hybrid, 1, 1, 1, 1)
SPAN_TEST(repeated_on_2_2, script_repeated, NULL, 2, 2)
SPAN_TEST(repeated_in_bf16_on_1_2_3, script_repeated, spanfix_in_bf16, 1, 2, 3)
SPAN_TEST(repeated_replicas_on_1_2, script_repeated, spanfix_replicated, 1, 2)
SPAN_TEST(other_ops_than_recorded_on_1_2_3, script_other_ops, spanfix_in_bf16, 1, 2, 3)
SPAN_TEST(evaluation_on_2_1, script_evaluation, spanfix_in_bf16, 2, 1)
SPAN_TEST(buffers_on_1_2_3, script_buffers, NULL, 1, 2, 3)
SPAN_TEST(initialise_on_1_2_3, script_initialise, NULL, 1, 2, 3)
SPAN_TEST(initialise_by_rows_on_2_1, script_initialise, by_rows, 2, 1)
SPAN_TEST(initialise_replicas_on_2_1, script_initialise, spanfix_replicated, 2, 1)
SPAN_TEST(unused_on_1_2, script_unused, two_tensors, 1, 2)
SPAN_TEST(unused_on_2_2, script_unused, two_tensors, 2, 2)
SPAN_TEST(small_units_on_1_2_3, script_small_units, NULL, 1, 2, 3)
SPAN_TEST(small_replicas_on_2_1, script_small_units, spanfix_replicated, 2, 1)
SPAN_TEST(found_inf_on_2_2, script_found_inf, NULL, 2, 2)
SPAN_TEST(found_inf_by_rows_on_1_2_3, script_found_inf, by_rows, 1, 2, 3)
