/* Ranks without inputs (JoinUneven) over several nodes (spanfix.h), which run out of them before others of
 * their node, or of other nodes. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/ddp.h"
#include "op/op_run.h"
#include "op/surrogate.h"
#include "spanfix.h"

TestSuite(span_uneven, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

enum { TENSORS = 4 };

static unsigned inputs[SPANFIX_RANKS]; /* passes in which a rank has some */
static struct nodefix_op joins[SPANFIX_RANKS];
static bool leaves_out, sparse, in_backward;
static uint64_t values_of[SPANFIX_RANKS];
static unsigned recorded_passes; /* even ones, before */

/* As EACH and ALL, of the ranks that have inputs in pass @p. */
#define SOME(w, p, call)                                                       \
	do {                                                                   \
		for (uint32_t r = 0; r < (w)->size; r++) {                     \
			struct nodefix *n = spanfix_node_of(w, r);             \
			struct unit *u = spanfix_unit_of(w, r);                \
			struct nodefix_op *op = &(w)->ops[r];                  \
			struct member *m = (w)->members[r];                    \
                                                                               \
			(void)u;                                               \
			*op = (struct nodefix_op){ .over = inputs[r] <= (p) }; \
			if (inputs[r] > (p))                                   \
				cr_assert_eq((call), 0, "%s", op->fault.text); \
		}                                                              \
	} while (0)
#define SOME_OK(w, p, call)               \
	do {                              \
		SOME(w, p, call);         \
		spanfix_all_ok(w, #call); \
	} while (0)

static int join_uneven(struct nodefix *n, struct member *m, uint32_t timeout_ms,
		       struct nodefix_op *op)
{
	Shardd__V1__JoinUnevenRequest r = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	*op = (struct nodefix_op){ .timeout_ms = timeout_ms };
	return nodefix_submit(n, m, "JoinUneven", &r.base, op);
}

static bool joins_are_over(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (!joins[r].over)
			return false;
	return true;
}

/* Those whose last pass this was. */
static void join_some(struct spanfix *w, unsigned pass)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (inputs[r] == pass)
			cr_assert_eq(join_uneven(spanfix_node_of(w, r), w->members[r], 0,
						 &joins[r]),
				     0, "%s", joins[r].fault.text);
}

/* All have joined. */
static void joined(struct spanfix *w, unsigned passes)
{
	uint32_t last = 0;

	spanfix_turn_until(w, joins_are_over);
	for (uint32_t r = 0; r < w->size; r++)
		last = inputs[r] == passes ? r : last;
	for (uint32_t r = 0; r < w->size; r++) {
		const struct join_args *a = (const void *)joins[r].args;

		cr_assert_eq(joins[r].fault.code, 0, "%s", joins[r].fault.text);
		spanfix_note(w, &a->surrogates, sizeof(a->surrogates));
		cr_expect_eq(a->last, last);
	}
}

/* -- buckets */

static void of_ddp(state_unit *spec)
{
	static const uint64_t shapes[TENSORS - 1][2] = { { 37, 3 }, { 64, 2 }, { 12, 5 } };
	state_buffer *mean = state_buffer_new("mean", (const uint64_t[]){ 9 }, 1);

	spanfix_replicated(spec);
	spec->reduce_profile = PROFILE_DDP;
	spec->optimizer->when = in_backward ? OPTIM_IN_BACKWARD : OPTIM_AT_STEP;
	for (unsigned i = 0; i < ARRAY_SIZE(shapes); i++) {
		char name[16];
		state_tensor *t;

		snprintf(name, sizeof(name), "t%u", i);
		t = state_tensor_new(name, shapes[i], 2);
		t->init_kind = FILL_UNIFORM;
		t->init_b = 1;
		CHECK(state_unit_add_tensor(spec, t) == 0);
	}
	mean->dtype = BUFFER_FP32;
	CHECK(state_unit_add_buffer(spec, mean) == 0);
}

static int ddp_create(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__DdpCreateRequest r = SHARDD__V1__DDP_CREATE_REQUEST__INIT;
	Shardd__V1__DdpTensor t = SHARDD__V1__DDP_TENSOR__INIT, *list[] = { &t };
	uint64_t limits[] = { 100, 400 };

	r.units = &spanfix.unit;
	r.n_units = 1;
	r.bucket_limits = limits;
	r.n_bucket_limits = 2;
	r.find_unused = leaves_out;
	t.unit = spanfix.unit;
	t.tensor = 1;
	r.sparse = list;
	r.n_sparse = sparse;
	return nodefix_submit(n, m, "DdpCreate", &r.base, op);
}

static const struct ddp *ddp_of(const struct member *m)
{
	const struct ddp *d = m->job->ddps[0];

	CHECK(d && d->n == TENSORS);
	return d;
}

static int ddp_on(struct nodefix *n, struct member *m, const char *type, struct nodefix_op *op)
{
	Shardd__V1__DdpForwardRequest forward = SHARDD__V1__DDP_FORWARD_REQUEST__INIT;
	Shardd__V1__DdpFinishRequest finish = SHARDD__V1__DDP_FINISH_REQUEST__INIT;

	forward.ddp = finish.ddp = ddp_of(m)->id;
	return nodefix_submit(n, m, type,
			      strcmp(type, "DdpForward") == 0 ? &forward.base : &finish.base, op);
}

static bool is_left_out(uint32_t rank, unsigned pass, uint32_t tensor)
{
	return leaves_out && (tensor == 2 || (tensor == 3 && (rank + pass) % 2));
}

static int ddp_backward_of(struct nodefix *n, struct member *m, unsigned pass,
			   struct nodefix_op *op)
{
	Shardd__V1__DdpBackwardRequest r = SHARDD__V1__DDP_BACKWARD_REQUEST__INIT;
	uint32_t unused[TENSORS];

	r.ddp = ddp_of(m)->id;
	r.unused = unused;
	for (uint32_t i = 0; i < TENSORS; i++)
		if (is_left_out(m->rank, pass, i))
			unused[r.n_unused++] = i;
	return nodefix_submit(n, m, "DdpBackward", &r.base, op);
}

static int ddp_ready_of(struct nodefix *n, struct member *m, unsigned pass, unsigned k,
			struct nodefix_op *op)
{
	static const uint32_t order[TENSORS] = { 3, 0, 1, 2 };
	Shardd__V1__DdpReadyRequest r = SHARDD__V1__DDP_READY_REQUEST__INIT;
	Shardd__V1__SparseRows rows = SHARDD__V1__SPARSE_ROWS__INIT;
	int64_t numbers[] = { 3, (int64_t)(5 + m->rank), 9 };
	uint32_t tensor = m->rank ? k : order[k];

	rows.rows = numbers;
	rows.n_rows = ARRAY_SIZE(numbers);
	rows.buffer = values_of[m->rank];
	r.ddp = ddp_of(m)->id;
	r.tensors = &tensor;
	r.n_tensors = !is_left_out(m->rank, pass, tensor);
	r.rows = sparse && tensor == 1 ? &rows : NULL;
	return nodefix_submit(n, m, "DdpReady", &r.base, op);
}

static int broadcast_buffers(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__BroadcastBuffersRequest r = SHARDD__V1__BROADCAST_BUFFERS_REQUEST__INIT;

	r.unit = spanfix.unit;
	return nodefix_submit(n, m, "BroadcastBuffers", &r.base, op);
}

/* Each its own, before those of one rank come. */
static void fill_buffers(struct spanfix *w, unsigned pass)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (inputs[r] > pass)
			spanfix_fill(&spanfix_unit_of(w, r)->buffers[r], r, pass);
}

static void fill_gradients(struct spanfix *w, unsigned pass, struct region *place)
{
	for (uint32_t r = 0; r < w->size; r++) {
		const struct ddp *d = ddp_of(w->members[r]);
		const struct ddp_buckets *b = ddp_buckets_of(ddp_rank_of(d, r));

		if (inputs[r] <= pass)
			continue;
		place[r] = *spanfix_result(w, r);
		for (uint32_t i = 0; i < TENSORS; i++) {
			struct region at = place[r];

			at.offset += b->offset[i];
			at.bytes = d->tensors[i].elements * sizeof(float);
			if (!d->tensors[i].sparse)
				spanfix_fill(&at, r, pass * TENSORS + i);
		}
	}
}

static void note_gradients(struct spanfix *w, unsigned pass, const struct region *place)
{
	for (uint32_t r = 0; r < w->size; r++) {
		const struct ddp *d = ddp_of(w->members[r]);
		const struct ddp_buckets *b = ddp_buckets_of(ddp_rank_of(d, r));
		unsigned layout = ddp_rank_of(d, r)->layout;

		if (inputs[r] <= pass)
			continue;
		spanfix_note(w, &layout, sizeof(layout));
		spanfix_note(w, d->untouched, d->n);
		spanfix_note(w, region_addr(&spanfix_unit_of(w, r)->buffers[r]), 36);
		for (uint32_t i = 0; i < TENSORS; i++)
			if (!d->tensors[i].sparse && !is_left_out(r, pass, i))
				spanfix_note(w, (char *)region_addr(&place[r]) + b->offset[i],
					     d->tensors[i].elements * sizeof(float));
	}
}

static void ddp_pass(struct spanfix *w, unsigned pass)
{
	struct region place[SPANFIX_RANKS];

	fill_buffers(w, pass);
	SOME_OK(w, pass, broadcast_buffers(n, m, op));
	SOME_OK(w, pass, ddp_on(n, m, "DdpForward", op));
	fill_gradients(w, pass, place);
	SOME_OK(w, pass, ddp_backward_of(n, m, pass, op));
	for (unsigned i = 0; i < TENSORS; i++)
		SOME_OK(w, pass, ddp_ready_of(n, m, pass, i, op));
	SOME_OK(w, pass, ddp_on(n, m, "DdpFinish", op));
	note_gradients(w, pass, place);
	if (!in_backward)
		SOME_OK(w, pass, nodefix_clip(n, m, 0.5, op));
	SOME_OK(w, pass, nodefix_barrier(n, m, 0, op));
	SOME_OK(w, pass, nodefix_step(n, m, op));
}

static unsigned most_inputs(const struct spanfix *w)
{
	unsigned most = 0;

	for (uint32_t r = 0; r < w->size; r++)
		most = inputs[r] > most ? inputs[r] : most;
	return most;
}

static void begin_ddp(struct spanfix *w)
{
	spanfix_add_unit(w, 100, of_ddp);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	ALL(w, nodefix_alloc(n, m, 4096, op));
	for (uint32_t r = 0; r < w->size; r++) {
		values_of[r] = w->ops[r].result.buffer;
		spanfix_fill(spanfix_result(w, r), r, 77);
	}
	ALL(w, ddp_create(n, m, op));
}

/* Some passes of all, then those of @inputs, and all go on together; twice. */
static void script_ddp(struct spanfix *w)
{
	unsigned own[SPANFIX_RANKS], step = 0, most = most_inputs(w);

	CHECK(most > 0);
	memcpy(own, inputs, sizeof(own));
	begin_ddp(w);
	for (unsigned round = 0; round < 2; round++) {
		for (unsigned i = 0; i < recorded_passes; i++) {
			for (uint32_t r = 0; r < w->size; r++)
				inputs[r] = most + 1;
			ddp_pass(w, i % most);
			step++;
			ALL(w, nodefix_commit(n, m, step, 0, op));
		}
		if (w->spans && recorded_passes)
			cr_expect(spanfix_is_recorded(w));
		memcpy(inputs, own, sizeof(own));
		join_some(w, 0);
		for (unsigned pass = 0; pass < most; pass++) {
			ddp_pass(w, pass);
			join_some(w, pass + 1);
		}
		joined(w, most);
		step++;
		ALL(w, nodefix_commit(n, m, step, 0, op));
		spanfix_gather_and_note(w);
	}
}

/* -- reductions of whole units */

static void of_reduce(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	spanfix_replicated(spec);
	spec->reduce_profile = PROFILE_DDP;
}

static int reduce_sparse(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__ReduceSparseRequest r = SHARDD__V1__REDUCE_SPARSE_REQUEST__INIT;
	Shardd__V1__SparseRows rows = SHARDD__V1__SPARSE_ROWS__INIT;
	int64_t numbers[] = { 3, (int64_t)(5 + m->rank), 9 };

	rows.rows = numbers;
	rows.n_rows = ARRAY_SIZE(numbers);
	rows.buffer = values_of[m->rank];
	r.unit = spanfix.unit;
	r.tensor = 1;
	r.rows = &rows;
	return nodefix_submit(n, m, "ReduceSparse", &r.base, op);
}

static int numbered_step(struct nodefix *n, struct member *m, uint64_t number,
			 struct nodefix_op *op)
{
	Shardd__V1__StepRequest r = SHARDD__V1__STEP_REQUEST__INIT;
	uint8_t blob[] = { (uint8_t)m->rank, 7 };

	r.optional_step_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_STEP_STEP;
	r.step = number;
	r.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
	r.lr = 0.25 / (double)number;
	r.blob.data = blob;
	r.blob.len = sizeof(blob);
	return nodefix_submit(n, m, "Step", &r.base, op);
}

static void reduce_pass(struct spanfix *w, unsigned pass)
{
	SOME_OK(w, pass, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < w->size; r++)
		if (inputs[r] > pass)
			spanfix_fill(spanfix_result(w, r), r, pass);
	SOME_OK(w, pass, nodefix_reduce(n, m, u, false, op));
	SOME_OK(w, pass, reduce_sparse(n, m, op));
	SOME_OK(w, pass, nodefix_clip(n, m, 0.5, op));
	SOME_OK(w, pass, numbered_step(n, m, pass + 1, op));
}

static void script_reduce(struct spanfix *w)
{
	unsigned most = most_inputs(w);

	spanfix_add_unit(w, 100, of_reduce);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	ALL(w, nodefix_alloc(n, m, 4096, op));
	for (uint32_t r = 0; r < w->size; r++) {
		values_of[r] = w->ops[r].result.buffer;
		spanfix_fill(spanfix_result(w, r), r, 77);
	}
	join_some(w, 0);
	for (unsigned pass = 0; pass < most; pass++) {
		reduce_pass(w, pass);
		join_some(w, pass + 1);
	}
	joined(w, most);
	ALL(w, nodefix_barrier(n, m, 0, op));
	spanfix_gather_and_note(w);
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_note(w, &w->jobs[spanfix_home(w, r)]->rec->anchor, sizeof(uint64_t));
	ALL(w, nodefix_commit(n, m, most, 0, op));
	spanfix_gather_and_note(w);
}

static void run(void (*script)(struct spanfix *w), const unsigned *ranks, const unsigned *of_ranks)
{
	memcpy(inputs, of_ranks, sizeof(inputs));
	spanfix_run(script, ranks);
}

#define UNEVEN_TEST(name, nodes, ...)                                        \
	Test(span_uneven, name)                                              \
	{                                                                    \
		run(script_ddp, (const unsigned[SPANFIX_NODES])BRACES nodes, \
		    (const unsigned[SPANFIX_RANKS]){ __VA_ARGS__ });         \
	}
#define BRACES(...)         \
	{                   \
		__VA_ARGS__ \
	}

/* Each node is once the first without inputs, the leader (node 0) among them. */
UNEVEN_TEST(the_leader_is_first_on_1_1, (1, 1), 1, 3)
UNEVEN_TEST(the_other_is_first_on_1_1, (1, 1), 3, 1)
UNEVEN_TEST(one_rank_is_without_on_2_2, (2, 2), 3, 1, 3, 2)
UNEVEN_TEST(a_node_is_without_on_2_2, (2, 2), 1, 2, 4, 3)
UNEVEN_TEST(the_leader_is_first_on_1_2_3, (1, 2, 3), 1, 3, 2, 4, 3, 3)
UNEVEN_TEST(the_last_is_first_on_1_2_3, (1, 2, 3), 3, 2, 4, 1, 1, 2)
UNEVEN_TEST(some_have_none_at_all_on_1_2_3, (1, 2, 3), 2, 0, 0, 1, 3, 0)
UNEVEN_TEST(all_have_as_many_on_1_2_3, (1, 2, 3), 2, 2, 2, 2, 2, 2)

Test(span_uneven, what_no_rank_uses_on_1_2_3)
{
	leaves_out = true;
	run(script_ddp, (const unsigned[SPANFIX_NODES]){ 1, 2, 3 },
	    (const unsigned[SPANFIX_RANKS]){ 1, 3, 2, 4, 3, 3 });
}

Test(span_uneven, sparse_gradients_on_1_2_3)
{
	sparse = true;
	run(script_ddp, (const unsigned[SPANFIX_NODES]){ 1, 2, 3 },
	    (const unsigned[SPANFIX_RANKS]){ 1, 2, 3, 1, 4, 2 });
}

Test(span_uneven, steps_in_backward_on_2_2)
{
	in_backward = true;
	run(script_ddp, (const unsigned[SPANFIX_NODES]){ 2, 2 },
	    (const unsigned[SPANFIX_RANKS]){ 1, 2, 4, 3 });
}

/* The others follow a recorded step when ranks run out of inputs. */
Test(span_uneven, in_a_recorded_step_on_1_2_3)
{
	recorded_passes = 8;
	run(script_ddp, (const unsigned[SPANFIX_NODES]){ 1, 2, 3 },
	    (const unsigned[SPANFIX_RANKS]){ 1, 3, 2, 4, 3, 3 });
}

Test(span_uneven, reductions_and_numbered_steps_on_1_2_3)
{
	run(script_reduce, (const unsigned[SPANFIX_NODES]){ 1, 2, 3 },
	    (const unsigned[SPANFIX_RANKS]){ 1, 3, 2, 4, 3, 3 });
}

/* -- what goes wrong */

static void begin(struct spanfix *w)
{
	static const unsigned none[SPANFIX_RANKS] = { 0, 1, 1 };

	memcpy(inputs, none, sizeof(inputs));
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 2 });
	begin_ddp(w);
	join_some(w, 0);
}

static void refused(struct spanfix *w, const char *why)
{
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 1; r < 3; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_STATE, "%s", w->ops[r].fault.text);
		cr_expect(strstr(w->ops[r].fault.text, why), "%s", w->ops[r].fault.text);
	}
}

/* The numbers of all are equal afterwards. */
Test(span_uneven, what_a_node_without_inputs_cannot_do_is_refused)
{
	struct spanfix *w = &spanfix;

	begin(w);
	SOME_OK(w, 0, nodefix_barrier(n, m, 0, op));
	SOME(w, 0, nodefix_all_reduce(n, m, values_of[r], 9, op));
	refused(w, "AllReduce: rank 0");
	SOME(w, 0, nodefix_commit(n, m, 1, 0, op));
	refused(w, "no more inputs");
	ddp_pass(w, 0);
	join_some(w, 1);
	joined(w, 1);
	ALL(w, nodefix_all_reduce(n, m, values_of[r], 9, op));
	ALL(w, nodefix_commit(n, m, 1, 0, op));
	spanfix_gather_and_note(w);
	spanfix_end(w);
	free(w->notes);
}

/* One of its ops fails on a rank with inputs: those without have no part in its number. */
Test(span_uneven, a_collective_that_fails_elsewhere_is_passed_over)
{
	struct spanfix *w = &spanfix;

	begin(w);
	SOME(w, 0, r == 1 ? nodefix_barrier(n, m, 0, op) : nodefix_clip(n, m, 0.5, op));
	refused(w, "ops differ");
	SOME_OK(w, 0, nodefix_barrier(n, m, 0, op));
	join_some(w, 1);
	joined(w, 1);
	ALL(w, nodefix_barrier(n, m, 0, op));
	spanfix_end(w);
	free(w->notes);
}

Test(span_uneven, other_ways_to_join_are_refused)
{
	struct spanfix *w = &spanfix;
	Shardd__V1__JoinUnevenRequest how = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	begin(w);
	how.divide_by_active = true;
	nodefix_submit(&w->nodes[1], w->members[1], "JoinUneven", &how.base, &w->ops[1]);
	cr_assert(w->ops[1].over);
	cr_expect_eq(w->ops[1].fault.code, FAULT_UNIMPLEMENTED);
	cr_expect(strstr(w->ops[1].fault.text, "divide_by_active is not possible"), "%s",
		  w->ops[1].fault.text);
	how.divide_by_active = false;
	how.error_if_uneven = true;
	nodefix_submit(&w->nodes[1], w->members[1], "JoinUneven", &how.base, &w->ops[1]);
	cr_assert(w->ops[1].over);
	cr_expect_eq(w->ops[1].fault.code, FAULT_UNIMPLEMENTED);
	SOME_OK(w, 0, nodefix_barrier(n, m, 0, op));
	join_some(w, 1);
	joined(w, 1);
	spanfix_end(w);
	free(w->notes);
}

/* What its node has told the others does not hold any more: nobody goes on. */
Test(span_uneven, a_rank_that_gives_up_ends_the_epoch)
{
	struct spanfix *w = &spanfix;

	begin(w);
	SOME_OK(w, 0, nodefix_barrier(n, m, 0, op));
	op_cancel(joins[0].op, FAULT_CANCELLED, "the caller has gone");
	cr_assert(joins[0].over);
	cr_expect_eq(joins[0].fault.code, FAULT_CANCELLED);
	cr_expect(w->jobs[0]->across.span->over);
	cr_expect(strstr(w->jobs[0]->across.span->ended.text, "rank 0"), "%s",
		  w->jobs[0]->across.span->ended.text);
	cr_expect(strstr(w->jobs[0]->across.span->ended.text, "has given up JoinUneven"));
	spanfix_epoch_ends(w, "as node 0 has said");
	spanfix_next_epoch(w, "job/100");
	ALL(w, nodefix_barrier(n, m, 0, op));
	spanfix_end(w);
	free(w->notes);
}

/* One that waits behind it has no part in that: it used to end the epoch, too. */
Test(span_uneven, a_call_that_gives_up_before_its_turn_changes_nothing)
{
	struct spanfix *w = &spanfix;
	static struct nodefix_op behind;

	begin(w);
	SOME_OK(w, 0, nodefix_barrier(n, m, 0, op));
	cr_assert(w->jobs[0]->groups[0]->across.told);
	cr_assert_eq(join_uneven(&w->nodes[0], w->members[0], 0, &behind), 0);
	op_cancel(behind.op, FAULT_CANCELLED, "the caller has gone");
	cr_assert(behind.over);
	cr_expect_eq(behind.fault.code, FAULT_CANCELLED);
	cr_expect(!w->jobs[0]->across.span->over, "%s", w->jobs[0]->across.span->ended.text);
	SOME_OK(w, 0, nodefix_barrier(n, m, 0, op));
	join_some(w, 1);
	joined(w, 1);
	ALL(w, nodefix_barrier(n, m, 0, op));
	spanfix_end(w);
	free(w->notes);
}

/* -- ranks that join again before the first time is over on another node */

static void join_again(struct spanfix *w, uint32_t rank)
{
	cr_assert_eq(join_uneven(spanfix_node_of(w, rank), w->members[rank], 0, &joins[rank]), 0);
}

static void reduce_of(struct spanfix *w, uint32_t rank)
{
	static struct nodefix_op buffers[SPANFIX_RANKS];

	buffers[rank] = w->ops[rank] = (struct nodefix_op){ 0 };
	cr_assert_eq(nodefix_on_unit(spanfix_node_of(w, rank), w->members[rank], "GradientBuffer",
				     spanfix_unit_of(w, rank), &buffers[rank]),
		     0);
	cr_assert_eq(nodefix_reduce(spanfix_node_of(w, rank), w->members[rank],
				    spanfix_unit_of(w, rank), false, &w->ops[rank]),
		     0);
}

/* What the last node has begun with the others. */
static unsigned last_in_flight(const struct spanfix *w)
{
	const struct node_comm *nc = w->jobs[w->n_nodes - 1]->groups[0]->nc;
	unsigned n = 0;

	for (unsigned q = 0; q < _BACKEND_Q_N; q++)
		n += nc->comm[q] ? comm_in_flight(nc->comm[q]) : 0;
	return n;
}

static void turn_others(struct spanfix *w)
{
	const struct timespec pause = { 0, 100000 };

	for (unsigned i = 0; i + 1 < w->n_nodes; i++)
		nodefix_turn(&w->nodes[i]);
	spanfix_turn_orders(w);
	nanosleep(&pause, NULL);
}

/* A rank on each node. All but the last one have come to the end of a Reduce, in which the last one has a
 * surrogate, and to the end of JoinUneven. On the last node the Reduce is under way, and the messages about
 * what is over have not arrived. */
static void begin_with_a_late_node(struct spanfix *w, const unsigned *ranks)
{
	uint32_t last;

	spanfix_begin(w, true, ranks);
	last = w->size - 1;
	spanfix_add_unit(w, 100, of_reduce);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	join_again(w, last);
	spanfix_turn_orders(w);
	for (uint32_t r = 0; r < last; r++)
		backend_fake_hold(w->nodes[r].node.devices[0].backend, true);
	for (uint32_t r = 0; r < last; r++)
		reduce_of(w, r);
	while (!last_in_flight(w)) { /* it waits for the others */
		spanfix_turn_orders(w);
		nodefix_turn(&w->nodes[last]);
	}
	w->held = last + 1;
	for (uint32_t r = 0; r < last; r++)
		backend_fake_hold(w->nodes[r].node.devices[0].backend, false);
	for (uint32_t r = 0; r < last; r++)
		while (!w->ops[r].over)
			turn_others(w);
	for (uint32_t r = 0; r < last; r++)
		join_again(w, r);
	for (uint32_t r = 0; r < last; r++)
		while (!joins[r].over)
			turn_others(w);
	cr_assert_eq(last_in_flight(w), 1);
	cr_assert(!joins[last].over);
}

/* Then each rank does the same. */
static void end_with_all(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (joins[r].over)
			join_again(w, r);
	spanfix_turn_until(w, joins_are_over);
	for (uint32_t r = 0; r < w->size; r++)
		cr_expect_eq(joins[r].fault.code, 0, "%s", joins[r].fault.text);
	ALL(w, nodefix_barrier(n, m, 0, op));
	spanfix_end(w);
}

static void the_late_one_had_one_surrogate(struct spanfix *w)
{
	const struct nodefix_op *join = &joins[w->size - 1];

	while (!join->over)
		spanfix_turn(w);
	cr_expect_eq(join->fault.code, 0, "%s", join->fault.text);
	cr_expect_eq(((const struct join_args *)(const void *)join->args)->surrogates, 1);
}

/* A node that heard twice that the ranks of another one have no more inputs used to end its link. */
Test(span_uneven, a_node_joins_again_before_another_one_is_done)
{
	struct spanfix *w = &spanfix;

	begin_with_a_late_node(w, (const unsigned[SPANFIX_NODES]){ 1, 1 });
	join_again(w, 0);
	cr_assert(!joins[0].over);
	w->held = 0;
	spanfix_turn_orders(w);
	the_late_one_had_one_surrogate(w);
	cr_expect(!joins[0].over); /* the late one has inputs again */
	end_with_all(w);
}

/* A node used to have surrogates in what others did after all had joined. */
Test(span_uneven, a_node_has_no_part_in_what_comes_after_all_have_joined)
{
	struct spanfix *w = &spanfix;

	begin_with_a_late_node(w, (const unsigned[SPANFIX_NODES]){ 1, 1, 1 });
	join_again(w, 0);
	for (unsigned i = 0; i < 20; i++) /* node 1 hears of it */
		turn_others(w);
	reduce_of(w, 1);
	for (unsigned i = 0; i < 20; i++) /* and says what its rank asks for */
		turn_others(w);
	cr_assert(!joins[0].over && !w->ops[1].over);
	w->held = 0;
	spanfix_turn_orders(w);
	the_late_one_had_one_surrogate(w);
	w->ops[0].over = true;
	reduce_of(w, 2);
	spanfix_all_ok(w, "Reduce");
	end_with_all(w);
}
