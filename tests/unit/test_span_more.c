/* Ops over several nodes (spanfix.h) that training does not need in each step: they give the bits of one
 * node. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "spanfix.h"
#include "unit/runs.h"

TestSuite(span_more, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

static void (*unit_changes)(state_unit *spec);
static uint64_t values_of[SPANFIX_RANKS]; /* buffers */

static void hybrid(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
}

static void hybrid_by_rows(state_unit *spec)
{
	hybrid(spec);
	spec->layout = LAYOUT_DIM0;
}

static void hybrid_in_bf16(state_unit *spec)
{
	hybrid(spec);
	spec->compute_dtype = DTYPE_BF16;
	spec->gradient_dtype = DTYPE_BF16;
	spec->reduce_dtype = DTYPE_BF16;
}

static void hybrid_in_backward(state_unit *spec)
{
	hybrid(spec);
	spec->optimizer->when = OPTIM_IN_BACKWARD;
}

/* On four devices each replica has two of its own. */
static void hybrid_of_four(state_unit *spec)
{
	hybrid(spec);
	spec->shard_ranks = 4;
}

static void hybrid_of_three_by_rows(state_unit *spec)
{
	hybrid_by_rows(spec);
	spec->shard_ranks = 3;
}

/* Averaged twice. */
static void hybrid_as_fsdp2(state_unit *spec)
{
	hybrid(spec);
	spec->reduce_profile = PROFILE_FSDP2;
}

static void hybrid_as_fsdp2_by_rows_in_bf16(state_unit *spec)
{
	hybrid_in_bf16(spec);
	spec->layout = LAYOUT_DIM0;
	spec->reduce_profile = PROFILE_FSDP2;
}

static void begin_unit(struct spanfix *w)
{
	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
}

static void end_step(struct spanfix *w, unsigned step)
{
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, step, 0, op));
	spanfix_gather_and_note(w);
}

/* -- replicas of shards */

static void script_hybrid(struct spanfix *w)
{
	begin_unit(w);
	for (unsigned s = 1; s <= 4; s++) {
		spanfix_fill_gradients(w, s);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		ALL(w, nodefix_clip(n, m, 0.01, op));
		end_step(w, s);
	}
}

/* Partial sums of each replica, added up by a last reduction. */
static void script_deferred(struct spanfix *w)
{
	begin_unit(w);
	for (unsigned s = 1; s <= 3; s++) {
		for (unsigned i = 0; i < 3; i++) {
			spanfix_fill_gradients(w, 10 * s + i);
			if (i < 2)
				ALL(w, nodefix_defer(n, m, u, op));
			else
				ALL(w, nodefix_reduce(n, m, u, false, op));
		}
		end_step(w, s);
	}
}

/* -- what reductions divide by, and what they add up before */

static int set_factors(struct nodefix *n, struct member *m, double pre, double post, bool sum,
		       struct nodefix_op *op)
{
	Shardd__V1__SetFactorsRequest r = SHARDD__V1__SET_FACTORS_REQUEST__INIT;

	r.unit = spanfix.unit;
	r.pre_divide = pre;
	r.post_divide = post;
	r.force_sum = sum;
	return nodefix_submit(n, m, "SetFactors", &r.base, op);
}

static void script_factors(struct spanfix *w)
{
	static const double of[][2] = { { 3, 7 }, { 1, 5 }, { 2.5, 1 } };

	begin_unit(w);
	for (unsigned s = 1; s <= 3; s++) {
		ALL(w, set_factors(n, m, of[s - 1][0], of[s - 1][1], false, op));
		spanfix_fill_gradients(w, s);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		end_step(w, s);
	}
}

static void script_accumulate(struct spanfix *w)
{
	begin_unit(w);
	for (unsigned s = 1; s <= 3; s++) {
		for (unsigned i = 0; i < s; i++) {
			spanfix_fill_gradients(w, 10 * s + i);
			ALL(w, nodefix_on_unit(n, m, "Accumulate", u, op));
		}
		spanfix_fill_gradients(w, 10 * s + 9);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		end_step(w, s);
	}
}

static int clip_value(struct nodefix *n, struct member *m, double value, struct nodefix_op *op)
{
	Shardd__V1__ClipGradValueRequest r = SHARDD__V1__CLIP_GRAD_VALUE_REQUEST__INIT;

	r.value = value;
	return nodefix_submit(n, m, "ClipGradValue", &r.base, op);
}

static void script_clip_value(struct spanfix *w)
{
	begin_unit(w);
	for (unsigned s = 1; s <= 3; s++) {
		spanfix_fill_gradients(w, s);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		ALL(w, clip_value(n, m, 0.1, op));
		end_step(w, s);
	}
}

/* -- whole copies of each rank's own */

static int summon(struct nodefix *n, struct member *m, uint32_t state, struct nodefix_op *op)
{
	Shardd__V1__SummonFullRequest r = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;

	r.unit = spanfix.unit;
	r.state = state;
	return nodefix_submit(n, m, "SummonFull", &r.base, op);
}

static int give_back(struct nodefix *n, struct member *m, bool write, struct nodefix_op *op)
{
	Shardd__V1__ReturnFullRequest r = SHARDD__V1__RETURN_FULL_REQUEST__INIT;

	r.unit = spanfix.unit;
	r.write = write;
	return nodefix_submit(n, m, "ReturnFull", &r.base, op);
}

/* Each rank changes its copy, and its own shard of that counts. */
static void summon_and_change(struct spanfix *w, uint32_t state, bool write)
{
	ALL(w, summon(n, m, state, op));
	spanfix_note_results(w);
	for (uint32_t r = 0; write && r < w->size; r++) {
		float *p = region_addr(spanfix_result(w, r));

		/* replicas must be given the same */
		for (uint64_t i = 0; i < spanfix_result(w, r)->bytes / sizeof(*p); i++)
			p[i] = p[i] * 2 + 0.25f * (float)(i % 5);
	}
	ALL(w, give_back(n, m, write, op));
}

static void script_summon(struct spanfix *w)
{
	begin_unit(w);
	for (unsigned s = 1; s <= 3; s++) {
		summon_and_change(w, 0, s == 2);
		summon_and_change(w, 1, s == 3);
		spanfix_fill_gradients(w, s);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		end_step(w, s);
	}
}

static bool second_rank_is_over(struct spanfix *w)
{
	return w->ops[1].over;
}

/* What node 0 writes back is in its device's queue, and not executed, when a rank of node 1 has its answer and wants
 * to gather. Node 0 used to take part in the gather at once, in another queue, with what was there before. */
Test(span_more, a_gather_of_another_node_waits_until_a_write_is_executed)
{
	struct spanfix *w = &spanfix;
	struct fault f = FAULT_NULL;
	const float *got;

	spanfix_queues = true;
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1 });
	begin_unit(w);
	ALL(w, summon(n, m, 0, op));
	for (uint32_t r = 0; r < w->size; r++)
		nodefix_write(spanfix_result(w, r), 3);
	cr_assert_eq(member_link(w->members[0], &f), RES_DONE, "%s", f.text);
	for (uint32_t r = 0; r < w->size; r++) {
		w->ops[r] = (struct nodefix_op){ .after = !r }; /* its stream, which is late */
		give_back(&w->nodes[r], w->members[r], true, &w->ops[r]);
	}
	spanfix_turn_until(w, second_rank_is_over);
	cr_assert_eq(w->ops[1].fault.code, 0, "%s", w->ops[1].fault.text);
	cr_assert(!w->ops[0].over);
	w->ops[1] = (struct nodefix_op){ 0 };
	nodefix_on_unit(&w->nodes[1], w->members[1], "Gather", spanfix_unit_of(w, 1), &w->ops[1]);
	for (unsigned i = 0; i < 50; i++)
		spanfix_turn(w);
	cr_expect(!unit_is_copying(spanfix_unit_of(w, 0)));
	*(uint64_t *)backend_addr(member_signals_slab(w->members[0])->mem) = 1;
	backend_fake_look(w->nodes[0].node.devices[0].backend);
	spanfix_all_ok(w, "ReturnFull, Gather");
	got = region_addr(spanfix_result(w, 1));
	for (unsigned i = 0; i < 1003; i++)
		cr_assert_eq(got[i], 3, "element %u is %g", i, (double)got[i]);
	ALL(w, nodefix_on_unit(n, m, "Release", u, op));
	spanfix_queues = false;
	spanfix_end(w);
	free(w->notes);
}

/* -- bytes, for sessions without mappings */

static int write_bytes(struct nodefix *n, struct member *m, uint64_t buffer, struct nodefix_op *op)
{
	Shardd__V1__WriteBytesRequest r = SHARDD__V1__WRITE_BYTES_REQUEST__INIT;
	float values[50];

	for (unsigned i = 0; i < ARRAY_SIZE(values); i++)
		values[i] = (float)((i * 7 + m->rank * 3) % 11) / 7;
	r.memory_case = buffer ? SHARDD__V1__WRITE_BYTES_REQUEST__MEMORY_BUFFER
			       : SHARDD__V1__WRITE_BYTES_REQUEST__MEMORY_GRADIENT;
	if (buffer)
		r.buffer = buffer;
	else
		r.gradient = spanfix.unit;
	r.offset = 40;
	r.data.data = (uint8_t *)values;
	r.data.len = sizeof(values);
	return nodefix_submit(n, m, "WriteBytes", &r.base, op);
}

static int read_bytes(struct nodefix *n, struct member *m, bool gathered, uint64_t buffer,
		      struct nodefix_op *op)
{
	Shardd__V1__ReadBytesRequest r = SHARDD__V1__READ_BYTES_REQUEST__INIT;

	r.memory_case = gathered ? SHARDD__V1__READ_BYTES_REQUEST__MEMORY_GATHERED
				 : SHARDD__V1__READ_BYTES_REQUEST__MEMORY_BUFFER;
	if (gathered)
		r.gathered = spanfix.unit;
	else
		r.buffer = buffer;
	r.offset = 400; /* of the gathered ones: across the border of shards, too */
	r.bytes = 3000;
	return nodefix_submit(n, m, "ReadBytes", &r.base, op);
}

/* What the replies of the last ReadBytes have. */
static void note_read(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++) {
		Shardd__V1__ReadBytesResponse *reply = shardd__v1__read_bytes_response__unpack(
			NULL, w->ops[r].reply_bytes - 1, w->ops[r].reply);

		cr_assert(reply && reply->data.len == 3000);
		spanfix_note(w, reply->data.data, reply->data.len);
		shardd__v1__read_bytes_response__free_unpacked(reply, NULL);
	}
}

static void script_bytes_of_buffers(struct spanfix *w)
{
	ALL(w, nodefix_alloc(n, m, 4096, op));
	for (uint32_t r = 0; r < w->size; r++) {
		values_of[r] = w->ops[r].result.buffer;
		spanfix_fill(spanfix_result(w, r), r, 77);
	}
	ALL(w, write_bytes(n, m, values_of[r], op));
	ALL(w, read_bytes(n, m, false, values_of[r], op));
	note_read(w);
}

static void script_bytes(struct spanfix *w)
{
	begin_unit(w);
	script_bytes_of_buffers(w);
	spanfix_fill_gradients(w, 1);
	ALL(w, write_bytes(n, m, 0, op));
	ALL(w, nodefix_reduce(n, m, u, false, op));
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, 1, 0, op));
	ALL(w, nodefix_on_unit(n, m, "Gather", u, op));
	ALL(w, read_bytes(n, m, true, 0, op));
	note_read(w);
	ALL(w, nodefix_on_unit(n, m, "Release", u, op));
}

/* -- shards that ranks write by themselves */

static int copy_shard(struct nodefix *n, struct member *m, bool write, struct nodefix_op *op)
{
	Shardd__V1__CopyShardRequest r = SHARDD__V1__COPY_SHARD_REQUEST__INIT;
	struct unit_run run = { 0 };
	struct unit *u = job_unit_by_id(m->job, spanfix.unit);
	uint32_t index = 0;

	CHECK(group_index(m->job->groups[u->rec->group], m->rank, &index));
	(void)unit_rank_run(u, index, 0, &run);
	r.unit = u->id;
	r.elements = run.n;
	r.array = SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_PARAMETERS;
	r.write = write;
	r.buffer = values_of[m->rank];
	return nodefix_submit(n, m, "CopyShard", &r.base, op);
}

static void take_values(struct spanfix *w, struct region *place)
{
	ALL(w, nodefix_alloc(n, m, 8192, op));
	for (uint32_t r = 0; r < w->size; r++) {
		values_of[r] = w->ops[r].result.buffer;
		place[r] = *spanfix_result(w, r);
		spanfix_fill(&place[r], r, 5);
	}
}

static void script_write_shards(struct spanfix *w)
{
	struct region place[SPANFIX_RANKS];

	begin_unit(w);
	take_values(w, place);
	spanfix_gather_and_note(w); /* copies that stay */
	ALL(w, copy_shard(n, m, true, op));
	spanfix_gather_and_note(w);
	for (unsigned s = 1; s <= 6; s++) { /* the same in each step: a schedule, too */
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_fill(&place[r], r, 10 + s);
		ALL(w, copy_shard(n, m, true, op));
		spanfix_fill_gradients(w, s);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		end_step(w, s);
		ALL(w, copy_shard(n, m, false, op));
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_note(w, region_addr(&place[r]), place[r].bytes);
	}
}

static void gather_alone(struct spanfix *w, uint32_t r)
{
	static const char *const calls[] = { "Gather", "Release" };

	for (unsigned i = 0; i < 2; i++) {
		w->ops[r] = (struct nodefix_op){ 0 };
		nodefix_on_unit(spanfix_node_of(w, r), w->members[r], calls[i],
				spanfix_unit_of(w, r), &w->ops[r]);
		spanfix_all_ok(w, calls[i]);
		if (!i)
			spanfix_note(w, region_addr(spanfix_result(w, r)),
				     spanfix_result(w, r)->bytes);
	}
}

/* One rank writes, and one of another node, which has a copy from before, is the first to gather. */
static void script_write_one_shard(struct spanfix *w)
{
	struct region place[SPANFIX_RANKS];

	begin_unit(w);
	take_values(w, place);
	for (uint32_t r = 0; r < w->size; r++) {
		spanfix_gather_and_note(w);
		w->ops[r] = (struct nodefix_op){ 0 };
		copy_shard(spanfix_node_of(w, r), w->members[r], true, &w->ops[r]);
		spanfix_all_ok(w, "CopyShard");
		gather_alone(w, (r + w->size / 2) % w->size);
	}
	spanfix_gather_and_note(w);
	ALL(w, nodefix_commit(n, m, 1, 0, op));
}

static void write_is_refused(struct spanfix *w, const char *why)
{
	w->ops[0] = (struct nodefix_op){ 0 };
	copy_shard(&w->nodes[0], w->members[0], true, &w->ops[0]);
	spanfix_turn_until(w, spanfix_ops_are_over);
	cr_expect_eq(w->ops[0].fault.code, FAULT_STATE, "%s", w->ops[0].fault.text);
	cr_expect(strstr(w->ops[0].fault.text, why), "%s", w->ops[0].fault.text);
}

static bool nobody_writes(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (spanfix_unit_of(w, r)->shard_writes)
			return false;
	return true;
}

/* A rank of the other node has the unit gathered: nothing is written, and the epoch goes on. */
Test(span_more, a_shard_is_not_written_while_another_node_has_it_gathered)
{
	struct spanfix *w = &spanfix;
	struct region place[SPANFIX_RANKS];
	static struct nodefix_op held;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1, 1 });
	unit_changes = spanfix_in_bf16;
	begin_unit(w);
	take_values(w, place);
	for (unsigned i = 0; i < 2; i++) {
		ALL(w, nodefix_on_unit(n, m, "Gather", u, op));
		for (uint32_t r = 0; r < 2; r++)
			NODEFIX_OK(nodefix_on_unit(&w->nodes[r], w->members[r], "Release",
						   spanfix_unit_of(w, r), &w->ops[r]),
				   &w->ops[r]);
		write_is_refused(w, "is still gathered by 1 ranks on node node2");
		NODEFIX_OK(nodefix_on_unit(&w->nodes[2], w->members[2], "Release",
					   spanfix_unit_of(w, 2), &held),
			   &held);
		spanfix_turn_until(w, nobody_writes); /* the other nodes hear of it later */
		ALL(w, copy_shard(n, m, true, op));
		spanfix_gather_and_note(w);
	}
	spanfix_end(w);
	free(w->notes);
}

/* The rank that waits to write gets the reason, and gathers go on afterwards. */
Test(span_more, an_epoch_ends_while_a_shard_waits_to_be_written)
{
	struct spanfix *w = &spanfix;
	struct region place[SPANFIX_RANKS];

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1 });
	begin_unit(w);
	take_values(w, place);
	w->ops[1] = (struct nodefix_op){ 0 };
	copy_shard(&w->nodes[1], w->members[1], true, &w->ops[1]);
	nodefix_turn(&w->nodes[1]);
	cr_assert(!w->ops[1].over);
	spanfix_turn_orders(w);
	spanfix_epoch_ends(w, "node node0 is gone");
	cr_assert(w->ops[1].over);
	cr_expect_eq(w->ops[1].fault.code, FAULT_ABORTED);
	spanfix_next_epoch(w, "job/100");
	for (uint32_t r = 0; r < 2; r++)
		cr_expect_eq(spanfix_unit_of(w, r)->shard_writes, 0);
	take_values(w, place);
	ALL(w, copy_shard(n, m, true, op));
	spanfix_gather_and_note(w);
	spanfix_end(w);
	free(w->notes);
}

/* On each node a gather is the next one in line, and waits. */
static void turns_wait_for_a_write(struct spanfix *w)
{
	w->ops[1] = w->ops[2] = (struct nodefix_op){ 0 };
	copy_shard(&w->nodes[1], w->members[1], true, &w->ops[1]);
	nodefix_on_unit(&w->nodes[2], w->members[2], "Gather", spanfix_unit_of(w, 2), &w->ops[2]);
	spanfix_turn_orders(w); /* node 0 hears of the write, and starts the gather */
	spanfix_turn_orders(w); /* the others do, too */
}

/* Gathers that all nodes have started wait for a write that was asked for before. When the epoch ends they end with
 * it: one used to begin in an epoch without communicators, fail, and end it a second time, with
 * a reason of its own, from within the first. */
Test(span_more, an_epoch_ends_once_while_a_gather_waits_for_a_write)
{
	struct spanfix *w = &spanfix;
	struct region place[SPANFIX_RANKS];

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1, 1 });
	unit_changes = spanfix_in_bf16;
	begin_unit(w);
	take_values(w, place);
	turns_wait_for_a_write(w);
	for (uint32_t r = 0; r < 3; r++) {
		cr_assert_eq(spanfix_unit_of(w, r)->turns.in_line, 1);
		cr_assert_eq(spanfix_unit_of(w, r)->shard_writes, 1);
	}
	spanfix_epoch_ends(w, "node node2 is gone");
	for (uint32_t r = 0; r < 3; r++) {
		cr_expect_eq(w->jobs[r]->rec->epoch, 2, "epoch %llu on node %u",
			     (unsigned long long)w->jobs[r]->rec->epoch, r);
		cr_expect_str_eq(w->members[r]->ended.text, "node node2 is gone");
		cr_expect_eq(spanfix_unit_of(w, r)->turns.in_line, 0);
		cr_expect_eq(spanfix_unit_of(w, r)->shard_writes, 0);
		cr_expect(!unit_is_copying(spanfix_unit_of(w, r)));
	}
	spanfix_next_epoch(w, "job/100");
	take_values(w, place);
	ALL(w, copy_shard(n, m, true, op));
	spanfix_gather_and_note(w);
	spanfix_end(w);
	free(w->notes);
}

/* Its ranks have left a node whose line has a gather: that is the last thing that runs, and the job used to be freed
 * at its end, in the middle of the deletion. */
Test(span_more, a_job_is_deleted_while_a_gather_waits_for_a_write)
{
	struct spanfix *w = &spanfix;
	struct region place[SPANFIX_RANKS];
	struct fault f = FAULT_NULL;
	bool freed;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1, 1 });
	unit_changes = spanfix_in_bf16;
	begin_unit(w);
	take_values(w, place);
	cr_assert_eq(job_leave(w->members[0], &freed, &f), RES_DONE, "%s", f.text);
	nodefix_drop(&w->nodes[0], w->members[0], "has left");
	turns_wait_for_a_write(w);
	cr_assert_eq(w->jobs[0]->running, 1);
	cr_assert_eq(w->jobs[0]->members, 1); /* its ranks alone hold it */
	cr_assert_eq(job_delete(w->jobs[0], false, NULL, &f), 0, "%s", f.text);
	nodefix_turns(&w->nodes[0]);
	cr_expect(list_empty(&w->nodes[0].jobs.zombies));
	w->jobs[0] = nodefix_job(&w->nodes[0], "job", w->size, 0);
	spanfix_epoch_ends(w, "the job was deleted");
	spanfix_end(w);
	free(w->notes);
}

/* -- a barrier */

/* In a recorded step, too, in which nodes start other collectives by themselves. */
Test(span_more, a_barrier_waits_for_the_other_nodes)
{
	struct spanfix *w = &spanfix;
	static struct nodefix_op first;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 2 });
	begin_unit(w);
	for (unsigned s = 1; s <= 8; s++) {
		ALL(w, nodefix_barrier(n, m, 0, op));
		spanfix_fill_gradients(w, s);
		ALL(w, nodefix_reduce(n, m, u, false, op));
		end_step(w, s);
	}
	cr_assert(spanfix_is_recorded(w));
	cr_assert_eq(nodefix_barrier(&w->nodes[0], w->members[0], 0, &first), 0);
	for (unsigned i = 0; i < 50; i++)
		spanfix_turn(w);
	cr_expect(!first.over);
	for (uint32_t r = 1; r < 3; r++) {
		w->ops[r] = (struct nodefix_op){ 0 };
		nodefix_barrier(&w->nodes[1], w->members[r], 0, &w->ops[r]);
	}
	spanfix_all_ok(w, "Barrier");
	while (!first.over)
		spanfix_turn(w);
	cr_expect_eq(first.fault.code, 0, "%s", first.fault.text);
	spanfix_end(w);
	free(w->notes);
}

/* -- the same units everywhere? */

static int verify(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__VerifyModelRequest r = SHARDD__V1__VERIFY_MODEL_REQUEST__INIT;

	return nodefix_submit(n, m, "VerifyModel", &r.base, op);
}

/* What RegisterUnits notes of a rank. */
static void note_registered(struct member *m, uint32_t unit)
{
	uint32_t *grown = realloc(m->registered, (m->n_registered + 1) * sizeof(*grown));

	CHECK(grown);
	m->registered = grown;
	m->registered[m->n_registered++] = unit;
}

Test(span_more, models_that_differ_between_nodes)
{
	struct spanfix *w = &spanfix;
	uint32_t first;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 1 });
	spanfix_add_named_unit(w, "a", 100, NULL);
	first = w->unit;
	spanfix_add_named_unit(w, "b", 100, NULL);
	for (uint32_t r = 0; r < 3; r++)
		note_registered(w->members[r], first);
	ALL(w, verify(n, m, op));
	for (uint32_t r = 0; r < 2; r++)
		note_registered(w->members[r], w->unit);
	EACH(w, verify(n, m, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 3; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_STATE, "%s", w->ops[r].fault.text);
		cr_expect(strstr(w->ops[r].fault.text, "VerifyModel"), "%s", w->ops[r].fault.text);
	}
	note_registered(w->members[2], w->unit);
	ALL(w, verify(n, m, op));
	spanfix_end(w);
	free(w->notes);
}

#define SPAN_TEST(name, script, change, ...)                                         \
	Test(span_more, name)                                                        \
	{                                                                            \
		unit_changes = change;                                               \
		spanfix_run(script, (const unsigned[SPANFIX_NODES]){ __VA_ARGS__ }); \
	}

/* Replicas within nodes and devices, and across them: shard inside a node, replicate across. */
SPAN_TEST(hybrid_on_2_2, script_hybrid, hybrid, 2, 2)
SPAN_TEST(hybrid_on_1_1, script_hybrid, hybrid, 1, 1)
SPAN_TEST(hybrid_on_1_2_3, script_hybrid, hybrid, 1, 2, 3)
SPAN_TEST(hybrid_by_rows_on_2_4, script_hybrid, hybrid_by_rows, 2, 4)
SPAN_TEST(hybrid_in_bf16_on_2_2, script_hybrid, hybrid_in_bf16, 2, 2)
SPAN_TEST(hybrid_in_bf16_on_1_2_3, script_hybrid, hybrid_in_bf16, 1, 2, 3)
SPAN_TEST(hybrid_in_backward_on_2_2, script_deferred, hybrid_in_backward, 2, 2)
/* Replicas that have two nodes each, of four, and those whose nodes have different numbers of ranks. */
SPAN_TEST(sets_on_1_1_1_1, script_hybrid, hybrid, 1, 1, 1, 1)
SPAN_TEST(sets_on_2_2_2_2, script_hybrid, hybrid_of_four, 2, 2, 2, 2)
SPAN_TEST(sets_by_rows_on_1_2_2_1, script_hybrid, hybrid_of_three_by_rows, 1, 2, 2, 1)
SPAN_TEST(sets_in_bf16_on_1_1_1_1, script_hybrid, hybrid_in_bf16, 1, 1, 1, 1)
SPAN_TEST(sets_in_backward_on_1_1_1_1, script_deferred, hybrid_in_backward, 1, 1, 1, 1)
SPAN_TEST(sets_as_fsdp2_on_1_1_1_1, script_deferred, hybrid_as_fsdp2, 1, 1, 1, 1)
SPAN_TEST(sets_as_fsdp2_by_rows_on_1_1_1_1, script_accumulate, hybrid_as_fsdp2_by_rows_in_bf16, 1,
	  1, 1, 1)
SPAN_TEST(deferred_sets_on_2_2_2_2, script_deferred, hybrid_of_four, 2, 2, 2, 2)
SPAN_TEST(factors_of_sets_on_1_1_1_1, script_factors, hybrid, 1, 1, 1, 1)
SPAN_TEST(clip_value_of_sets_on_1_1_1_1, script_clip_value, hybrid, 1, 1, 1, 1)
SPAN_TEST(summon_sets_on_1_1_1_1, script_summon, hybrid_by_rows, 1, 1, 1, 1)
SPAN_TEST(bytes_of_sets_on_1_1_1_1, script_bytes, hybrid, 1, 1, 1, 1)
SPAN_TEST(deferred_on_2_2, script_deferred, hybrid, 2, 2)
SPAN_TEST(deferred_on_1_2_3, script_deferred, hybrid, 1, 2, 3)
SPAN_TEST(deferred_replicas_on_1_2_3, script_deferred, spanfix_replicated, 1, 2, 3)
SPAN_TEST(factors_on_2_2, script_factors, NULL, 2, 2)
SPAN_TEST(factors_on_1_2_3, script_factors, NULL, 1, 2, 3)
SPAN_TEST(factors_of_hybrids_on_2_2, script_factors, hybrid, 2, 2)
SPAN_TEST(accumulate_on_2_2, script_accumulate, NULL, 2, 2)
SPAN_TEST(accumulate_on_1_2_3, script_accumulate, spanfix_in_bf16, 1, 2, 3)
SPAN_TEST(accumulate_for_hybrids_on_1_2_3, script_accumulate, hybrid_in_bf16, 1, 2, 3)
SPAN_TEST(clip_value_on_2_2, script_clip_value, NULL, 2, 2)
SPAN_TEST(clip_value_on_1_2_3, script_clip_value, hybrid, 1, 2, 3)
SPAN_TEST(summon_on_1_1, script_summon, NULL, 1, 1)
SPAN_TEST(summon_on_1_2_3, script_summon, NULL, 1, 2, 3)
SPAN_TEST(summon_hybrids_on_2_2, script_summon, hybrid_by_rows, 2, 2)
SPAN_TEST(summon_replicas_on_1_2, script_summon, spanfix_replicated, 1, 2)
SPAN_TEST(bytes_on_2_2, script_bytes, NULL, 2, 2)
SPAN_TEST(bytes_on_1_2_3, script_bytes, NULL, 1, 2, 3)
SPAN_TEST(write_shards_on_1_1, script_write_shards, NULL, 1, 1)
SPAN_TEST(write_shards_on_2_2, script_write_shards, spanfix_in_bf16, 2, 2)
SPAN_TEST(write_shards_on_1_1_1, script_write_shards, spanfix_in_bf16, 1, 1, 1)
SPAN_TEST(write_one_shard_on_2_2, script_write_one_shard, NULL, 2, 2)
SPAN_TEST(write_one_shard_on_1_1_1, script_write_one_shard, spanfix_in_bf16, 1, 1, 1)
