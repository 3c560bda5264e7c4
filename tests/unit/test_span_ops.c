/* Ops over several nodes (spanfix.h) whose ranks must know more of each other than the fingerprint. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/ddp.h"
#include "spanfix.h"
#include "step/external.h"
#include "unit/runs.h"

TestSuite(span_ops, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

static void (*unit_changes)(state_unit *spec);

/* -- ddp */

enum { DDP_TENSORS = 5 };

static void of_ddp(state_unit *spec)
{
	static const uint64_t shapes[DDP_TENSORS - 1] = { 37, 64, 12, 300 };

	spanfix_replicated(spec);
	spec->reduce_profile = PROFILE_DDP;
	for (unsigned i = 0; i < ARRAY_SIZE(shapes); i++) {
		char name[16];
		state_tensor *t;

		snprintf(name, sizeof(name), "t%u", i);
		t = state_tensor_new(name, &shapes[i], 1);
		t->init_kind = FILL_UNIFORM;
		t->init_b = 1;
		CHECK(state_unit_add_tensor(spec, t) == 0);
	}
}

static void of_ddp_in_backward(state_unit *spec)
{
	of_ddp(spec);
	spec->optimizer->when = OPTIM_IN_BACKWARD;
}

static bool ddp_find_unused, ddp_static_graph;
static int ddp_sparse = -1;               /* the tensor with a sparse gradient; -1: none */
static uint64_t values_of[SPANFIX_RANKS]; /* buffers */

/* Of rank @rank in pass @pass, rising with both; some twice. Return: how many. */
static size_t rows_of(uint32_t rank, unsigned pass, int64_t *ret)
{
	size_t n = pass == 2 ? (rank == 0) : pass == 3 ? 0 : 2 * rank + 1 + pass;

	for (size_t i = 0; i < n; i++)
		ret[i] = (int64_t)((i * 7 + rank * 3) % 5 + pass);
	return n;
}

static Shardd__V1__SparseRows *sparse_rows(uint32_t rank, unsigned pass)
{
	static Shardd__V1__SparseRows kept[SPANFIX_RANKS];
	static int64_t rows[SPANFIX_RANKS][32];

	shardd__v1__sparse_rows__init(&kept[rank]);
	kept[rank].rows = rows[rank];
	kept[rank].n_rows = rows_of(rank, pass, rows[rank]);
	kept[rank].buffer = values_of[rank];
	return &kept[rank];
}

static void take_values(struct spanfix *w)
{
	ALL(w, nodefix_alloc(n, m, 4096, op));
	for (uint32_t r = 0; r < w->size; r++) {
		values_of[r] = w->ops[r].result.buffer;
		spanfix_fill(spanfix_result(w, r), r, 77);
	}
}

static int ddp_create(struct nodefix *n, struct member *m, uint64_t limit, struct nodefix_op *op)
{
	static Shardd__V1__DdpCreateRequest kept[SPANFIX_RANKS]; /* read until the op is over */
	static uint64_t limits[SPANFIX_RANKS][2];
	static Shardd__V1__DdpTensor sparse;
	static Shardd__V1__DdpTensor *list[] = { &sparse };
	Shardd__V1__DdpCreateRequest *r = &kept[m->rank];

	shardd__v1__ddp_create_request__init(r);
	limits[m->rank][0] = 100;
	limits[m->rank][1] = limit;
	r->units = &spanfix.unit;
	r->n_units = 1;
	r->bucket_limits = limits[m->rank];
	r->n_bucket_limits = 2;
	r->find_unused = ddp_find_unused;
	r->static_graph = ddp_static_graph;
	shardd__v1__ddp_tensor__init(&sparse);
	sparse.unit = spanfix.unit;
	sparse.tensor = (uint32_t)ddp_sparse;
	r->sparse = list;
	r->n_sparse = ddp_sparse >= 0;
	return nodefix_submit(n, m, "DdpCreate", &r->base, op);
}

static const struct ddp *ddp_of(const struct member *m)
{
	const struct ddp *d = m->job->ddps[0];

	CHECK(d && d->n == DDP_TENSORS);
	return d;
}

/* In pass @pass rank @rank does not use tensor @i; the third one has no user at all in some. */
static bool ddp_leaves_out(uint32_t rank, unsigned pass, uint32_t i)
{
	if (!ddp_find_unused && !ddp_static_graph)
		return false;
	if (ddp_static_graph)
		pass = 0;
	return (i == 2 && pass % 2 == 0) || (i == 4 && rank != 1) || (i == 1 && rank == 0);
}

static int ddp_on(struct nodefix *n, struct member *m, const char *type, struct nodefix_op *op)
{
	union {
		Shardd__V1__DdpForwardRequest forward;
		Shardd__V1__DdpFinishRequest finish;
	} r;

	if (strcmp(type, "DdpForward") == 0) {
		shardd__v1__ddp_forward_request__init(&r.forward);
		r.forward.ddp = ddp_of(m)->id;
		return nodefix_submit(n, m, type, &r.forward.base, op);
	}
	shardd__v1__ddp_finish_request__init(&r.finish);
	r.finish.ddp = ddp_of(m)->id;
	return nodefix_submit(n, m, type, &r.finish.base, op);
}

static int ddp_backward_of(struct nodefix *n, struct member *m, unsigned pass,
			   struct nodefix_op *op)
{
	static Shardd__V1__DdpBackwardRequest kept[SPANFIX_RANKS];
	static uint32_t unused[SPANFIX_RANKS][DDP_TENSORS];
	Shardd__V1__DdpBackwardRequest *r = &kept[m->rank];

	shardd__v1__ddp_backward_request__init(r);
	r->ddp = ddp_of(m)->id;
	r->unused = unused[m->rank];
	for (uint32_t i = 0; ddp_find_unused && i < DDP_TENSORS; i++)
		if (ddp_leaves_out(m->rank, pass, i))
			r->unused[r->n_unused++] = i;
	return nodefix_submit(n, m, "DdpBackward", &r->base, op);
}

/* Nothing, if the rank leaves it out: then its list is empty. */
static int ddp_ready_of(struct nodefix *n, struct member *m, unsigned pass, unsigned k,
			struct nodefix_op *op)
{
	static const uint32_t order[DDP_TENSORS] = { 3, 0, 4, 1, 2 }; /* of the first rank */
	static Shardd__V1__DdpReadyRequest kept[SPANFIX_RANKS];
	static uint32_t tensors[SPANFIX_RANKS];
	Shardd__V1__DdpReadyRequest *r = &kept[m->rank];

	shardd__v1__ddp_ready_request__init(r);
	tensors[m->rank] = m->rank ? k : order[k];
	r->ddp = ddp_of(m)->id;
	r->tensors = &tensors[m->rank];
	r->n_tensors = !ddp_leaves_out(m->rank, pass, tensors[m->rank]);
	if ((int)tensors[m->rank] == ddp_sparse)
		r->rows = sparse_rows(m->rank, pass);
	return nodefix_submit(n, m, "DdpReady", &r->base, op);
}

static float *ddp_gradient(const struct region *place, const struct member *m, uint32_t tensor,
			   struct region *ret)
{
	const struct ddp *d = ddp_of(m);
	const struct ddp_buckets *b = ddp_buckets_of(ddp_rank_of(d, m->rank));

	*ret = *place;
	ret->offset += b->offset[tensor];
	ret->bytes = d->tensors[tensor].elements * sizeof(float);
	return region_addr(ret);
}

static void ddp_pass(struct spanfix *w, unsigned pass)
{
	struct region place[SPANFIX_RANKS], at;

	ALL(w, ddp_on(n, m, "DdpForward", op));
	for (uint32_t k = 0; k < w->size; k++) {
		place[k] = *spanfix_result(w, k);
		for (uint32_t i = 0; i < DDP_TENSORS; i++) {
			if ((int)i == ddp_sparse)
				continue;
			(void)ddp_gradient(&place[k], w->members[k], i, &at);
			spanfix_fill(&at, k, pass * DDP_TENSORS + i);
		}
	}
	ALL(w, ddp_backward_of(n, m, pass, op));
	for (unsigned i = 0; i < DDP_TENSORS; i++)
		ALL(w, ddp_ready_of(n, m, pass, i, op));
	ALL(w, ddp_on(n, m, "DdpFinish", op));
	for (uint32_t k = 0; k < w->size; k++) {
		const struct ddp *d = ddp_of(w->members[k]);
		unsigned layout = ddp_rank_of(d, k)->layout;

		spanfix_note(w, d->untouched, d->n);
		spanfix_note(w, &layout, sizeof(layout));
		spanfix_note(w, d->layouts[layout].tensors, d->n * sizeof(uint32_t));
		for (uint32_t i = 0; i < DDP_TENSORS; i++)
			if (!ddp_leaves_out(k, pass, i) && (int)i != ddp_sparse)
				spanfix_note(w, ddp_gradient(&place[k], w->members[k], i, &at),
					     at.bytes);
	}
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, pass + 1, 0, op));
	spanfix_gather_and_note(w);
}

static void script_ddp(struct spanfix *w)
{
	spanfix_add_unit(w, 100, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	ALL(w, ddp_create(n, m, 400, op));
	for (unsigned pass = 0; pass < 4; pass++)
		ddp_pass(w, pass);
	for (uint32_t r = 0; r < w->size; r++)
		cr_expect_eq(ddp_rank_of(ddp_of(w->members[r]), r)->layout, !ddp_find_unused);
}

/* Its bucket is the last one in the first assignment, and the first one. */
static void script_ddp_sparse(struct spanfix *w)
{
	take_values(w);
	ddp_sparse = 0;
	script_ddp(w);
}

static void script_ddp_sparse_first(struct spanfix *w)
{
	take_values(w);
	ddp_sparse = 4;
	script_ddp(w);
}

static int reduce_sparse(struct nodefix *n, struct member *m, unsigned pass, struct nodefix_op *op)
{
	static Shardd__V1__ReduceSparseRequest kept[SPANFIX_RANKS];
	Shardd__V1__ReduceSparseRequest *r = &kept[m->rank];

	shardd__v1__reduce_sparse_request__init(r);
	r->unit = spanfix.unit;
	r->tensor = 1;
	r->rows = sparse_rows(m->rank, pass);
	return nodefix_submit(n, m, "ReduceSparse", &r->base, op);
}

static void with_rows(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
}

static void with_rows_in_bf16(state_unit *spec)
{
	with_rows(spec);
	spec->reduce_dtype = DTYPE_BF16;
}

static void with_rows_hybrid(state_unit *spec)
{
	with_rows(spec);
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
}

static void script_sparse(struct spanfix *w)
{
	spanfix_add_unit(w, 203, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	take_values(w);
	for (unsigned pass = 0; pass < 4; pass++) {
		ALL(w, reduce_sparse(n, m, pass, op));
		ALL(w, nodefix_step(n, m, op));
		ALL(w, nodefix_commit(n, m, pass + 1, 0, op));
		spanfix_gather_and_note(w);
	}
}

static void with_rows_as_fsdp2(state_unit *spec)
{
	with_rows_hybrid(spec);
	spec->reduce_profile = PROFILE_FSDP2;
}

static void script_ddp_unused(struct spanfix *w)
{
	ddp_find_unused = true;
	script_ddp(w);
}

static void script_ddp_static(struct spanfix *w)
{
	ddp_static_graph = true;
	script_ddp(w);
}

Test(span_ops, ddps_of_nodes_differ)
{
	struct spanfix *w = &spanfix;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 1 });
	spanfix_add_unit(w, 100, of_ddp);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	EACH(w, ddp_create(n, m, r == 2 ? 500 : 400, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 3; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_STATE);
		cr_expect(strstr(w->ops[r].fault.text, "DdpCreate"), "%s", w->ops[r].fault.text);
	}
	ALL(w, ddp_create(n, m, 400, op));
	ddp_pass(w, 0);
	spanfix_end(w);
	free(w->notes);
}

/* -- the trainers' own optimizers */

static void by_trainer(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	spec->optimizer->kind = OPTIM_NONE;
	spec->optimizer->when = OPTIM_BY_TRAINER;
}

static void by_trainer_replicated(state_unit *spec)
{
	by_trainer(spec);
	spanfix_replicated(spec);
}

static void by_trainer_in_rows(state_unit *spec)
{
	by_trainer(spec);
	spec->layout = LAYOUT_DIM0;
}

static void by_trainer_hybrid(state_unit *spec)
{
	by_trainer(spec);
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
}

static int next_shard(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__NextShardRequest r = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;

	return nodefix_submit(n, m, "NextShard", &r.base, op);
}

static void reduce_filled(struct spanfix *w, unsigned salt)
{
	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_fill(spanfix_result(w, r), r, salt);
	ALL(w, nodefix_reduce(n, m, u, false, op));
}

/* Each rank steps its share. */
static void step_shares(struct spanfix *w)
{
	ALL(w, next_shard(n, m, op));
	for (uint32_t r = 0; r < w->size; r++) {
		const struct external_outcome *o = NODEFIX_OUTCOME(external_outcome, &w->ops[r]);
		float *p = region_addr(spanfix_result(w, r));
		const float *g =
			(const float *)(const void *)((const char *)p + o->gradient_offset);

		spanfix_note(w, &o->elements, sizeof(o->elements));
		for (uint64_t i = 0; i < o->elements; i++)
			p[i] -= 0.1f * g[i];
		spanfix_note(w, p, o->elements * sizeof(*p));
	}
}

static void script_by_trainer(struct spanfix *w)
{
	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned s = 1; s <= 6; s++) {
		reduce_filled(w, s);
		step_shares(w);
		ALL(w, nodefix_on_unit(n, m, "ShardDone", u, op));
		ALL(w, nodefix_step(n, m, op));
		ALL(w, nodefix_commit(n, m, s, 0, op));
		spanfix_gather_and_note(w);
	}
}

/* Rank 0 gathers what ranks of the other node have not stepped yet. */
static void script_early_gather(struct spanfix *w)
{
	static struct nodefix_op early;
	struct nodefix *first = spanfix_node_of(w, 0);

	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	reduce_filled(w, 1);
	step_shares(w);
	NODEFIX_OK(nodefix_on_unit(first, w->members[0], "ShardDone", spanfix_unit_of(w, 0),
				   &early),
		   &early);
	nodefix_on_unit(first, w->members[0], "Gather", spanfix_unit_of(w, 0), &early);
	for (unsigned i = 0; i < 100; i++)
		spanfix_turn(w);
	cr_expect(!early.over);
	for (uint32_t r = 1; r < w->size; r++) {
		w->ops[r] = (struct nodefix_op){ 0 };
		nodefix_on_unit(spanfix_node_of(w, r), w->members[r], "ShardDone",
				spanfix_unit_of(w, r), &w->ops[r]);
	}
	spanfix_all_ok(w, "ShardDone");
	while (!early.over)
		spanfix_turn(w);
	cr_assert_eq(early.fault.code, 0, "%s", early.fault.text);
	spanfix_note(w, region_addr(&early.result.place), early.result.place.bytes);
	NODEFIX_OK(nodefix_on_unit(first, w->members[0], "Release", spanfix_unit_of(w, 0), &early),
		   &early);
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, 1, 0, op));
	spanfix_gather_and_note(w);
}

static float params_of(struct spanfix *w, uint32_t rank)
{
	return *(float *)region_addr(&spanfix_unit_of(w, rank)->parts[0].params);
}

/* -- shards */

static int copy_shard(struct nodefix *n, struct member *m, bool gradient, bool write,
		      struct nodefix_op *op)
{
	Shardd__V1__CopyShardRequest r = SHARDD__V1__COPY_SHARD_REQUEST__INIT;
	struct unit *u = job_unit_by_id(m->job, spanfix.unit);
	struct unit_run run = { 0 };

	(void)unit_rank_run(u, m->rank, 0, &run);
	r.unit = u->id;
	r.elements = run.n;
	r.array = gradient ? SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_GRADIENT
			   : SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_PARAMETERS;
	r.write = write;
	r.buffer = values_of[m->rank];
	return nodefix_submit(n, m, "CopyShard", &r.base, op);
}

/* What ranks read of their shards where each replica has devices of its own; and nobody may write. */
static void script_read_shards(struct spanfix *w)
{
	struct region place[SPANFIX_RANKS];

	spanfix_add_unit(w, 203, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	take_values(w);
	for (uint32_t r = 0; r < w->size; r++)
		place[r] = *spanfix_result(w, r);
	reduce_filled(w, 1);
	for (unsigned gradient = 0; gradient < 2; gradient++) {
		ALL(w, copy_shard(n, m, gradient, false, op));
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_note(w, region_addr(&place[r]), place[r].bytes);
	}
	for (uint32_t r = 0; r < w->size; r++) {
		w->ops[r] = (struct nodefix_op){ 0 };
		(void)copy_shard(spanfix_node_of(w, r), w->members[r], r % 2, true, &w->ops[r]);
		cr_expect_eq(w->ops[r].fault.code, FAULT_UNIMPLEMENTED);
		cr_expect(strstr(w->ops[r].fault.text, "has devices of its own"), "%s",
			  w->ops[r].fault.text);
	}
}

/* What ranks read of their shards; gradients that they halve. */
static void script_shards(struct spanfix *w)
{
	struct region place[SPANFIX_RANKS];

	spanfix_add_unit(w, 203, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	take_values(w);
	for (uint32_t r = 0; r < w->size; r++)
		place[r] = *spanfix_result(w, r);
	ALL(w, copy_shard(n, m, false, false, op));
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_note(w, region_addr(&place[r]), place[r].bytes);
	reduce_filled(w, 1);
	ALL(w, copy_shard(n, m, true, false, op));
	for (uint32_t r = 0; r < w->size; r++) {
		float *p = region_addr(&place[r]);

		spanfix_note(w, p, place[r].bytes);
		for (unsigned i = 0; i < place[r].bytes / sizeof(*p); i++)
			p[i] /= 2;
	}
	ALL(w, copy_shard(n, m, true, true, op));
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, 1, 0, op));
	spanfix_gather_and_note(w);
}

/* -- other layouts, and units that go */

static void two_tensors(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->frozen = true;
	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
}

static void two_tensors_replicated(state_unit *spec)
{
	two_tensors(spec);
	spanfix_replicated(spec);
}

static void two_tensors_hybrid(state_unit *spec)
{
	two_tensors(spec);
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 2;
}

static int convert(struct nodefix *n, struct member *m, Shardd__V1__Layout layout,
		   Shardd__V1__Strategy strategy, bool unfreeze, struct nodefix_op *op)
{
	static const uint32_t tensor = 1;
	Shardd__V1__ConvertUnitsRequest r = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;

	r.units = &spanfix.unit;
	r.n_units = 1;
	r.layout = layout;
	r.strategy = strategy;
	r.shard_ranks = strategy == SHARDD__V1__STRATEGY__STRATEGY_HYBRID ? 2 : 0;
	r.unfreeze = (uint32_t *)&tensor;
	r.n_unfreeze = unfreeze;
	return nodefix_submit(n, m, "ConvertUnits", &r.base, op);
}

static void train(struct spanfix *w, unsigned step)
{
	reduce_filled(w, step);
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, step, 0, op));
	spanfix_gather_and_note(w);
}

static void script_convert(struct spanfix *w)
{
	static const struct {
		Shardd__V1__Layout layout;
		Shardd__V1__Strategy strategy;
	} to[] = {
		{ SHARDD__V1__LAYOUT__LAYOUT_DIM0, 0 },
		{ SHARDD__V1__LAYOUT__LAYOUT_DIM0, SHARDD__V1__STRATEGY__STRATEGY_REPLICATE },
		{ SHARDD__V1__LAYOUT__LAYOUT_FLAT, SHARDD__V1__STRATEGY__STRATEGY_SHARD },
		{ SHARDD__V1__LAYOUT__LAYOUT_FLAT, 0 },
		{ SHARDD__V1__LAYOUT__LAYOUT_FLAT, SHARDD__V1__STRATEGY__STRATEGY_HYBRID },
		{ SHARDD__V1__LAYOUT__LAYOUT_DIM0, SHARDD__V1__STRATEGY__STRATEGY_HYBRID },
		{ SHARDD__V1__LAYOUT__LAYOUT_DIM0, SHARDD__V1__STRATEGY__STRATEGY_REPLICATE },
	};
	/* replicas of two ranks need an even number */
	unsigned many = w->size % 2 ? 4 : ARRAY_SIZE(to);

	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	train(w, 1);
	for (unsigned i = 0; i < many; i++) {
		ALL(w, convert(n, m, to[i].layout, to[i].strategy, i == 1, op));
		spanfix_gather_and_note(w);
		train(w, i + 2);
	}
}

/* A rank of the other node has it gathered: nothing changes anywhere, and the epoch goes on. */
Test(span_ops, what_one_node_cannot_convert_fails_on_all)
{
	struct spanfix *w = &spanfix;
	static struct nodefix_op held;
	struct nodefix *last;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 1 });
	spanfix_add_unit(w, 1003, two_tensors_replicated);
	last = spanfix_node_of(w, 2);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	NODEFIX_OK(nodefix_on_unit(last, w->members[2], "Gather", spanfix_unit_of(w, 2), &held),
		   &held);
	EACH(w, convert(n, m, SHARDD__V1__LAYOUT__LAYOUT_DIM0, 0, false, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 3; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_STATE);
		cr_expect(strstr(w->ops[r].fault.text, "on node node1: unit 'u' is gathered"), "%s",
			  w->ops[r].fault.text);
		cr_expect_eq(spanfix_unit_of(w, r)->rec->layout, LAYOUT_FLAT);
	}
	NODEFIX_OK(nodefix_on_unit(last, w->members[2], "Release", spanfix_unit_of(w, 2), &held),
		   &held);
	train(w, 1);
	spanfix_end(w);
	free(w->notes);
}

static int drop(struct nodefix *n, struct member *m, struct nodefix_op *op)
{
	Shardd__V1__DropUnitsRequest r = SHARDD__V1__DROP_UNITS_REQUEST__INIT;

	r.units = &spanfix.unit;
	r.n_units = 1;
	return nodefix_submit(n, m, "DropUnits", &r.base, op);
}

/* Another one of that name takes its place. */
static void script_drop(struct spanfix *w)
{
	for (unsigned i = 0; i < 3; i++) {
		spanfix_add_unit(w, 1003 + i, unit_changes);
		ALL(w, nodefix_seed(n, m, u, 7, op));
		train(w, 2 * i + 1);
		train(w, 2 * i + 2);
		ALL(w, drop(n, m, op));
	}
}

static void give_shards_back(struct spanfix *w)
{
	reduce_filled(w, 1);
	step_shares(w);
	ALL(w, nodefix_on_unit(n, m, "ShardDone", u, op));
}

static void begin_on_the_way(struct spanfix *w, bool kept)
{
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 1, 1 });
	spanfix_add_unit(w, 1003, by_trainer_replicated);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned i = 0; !kept && i < w->n_nodes; i++) {
		w->jobs[i]->rec->resume = JOB_RESUME_NO_COPY;
		nodefix_wrote(&w->nodes[i]);
	}
	ALL(w, nodefix_commit(n, m, 1, 0, op));
}

/* What all have given back is on its way to the copies of the other node. @kept: there is a copy of the
 * commit. */
static void ends_on_the_way(bool kept)
{
	struct spanfix *w = &spanfix;
	float before;

	begin_on_the_way(w, kept);
	before = params_of(w, 0);
	give_shards_back(w);
	cr_assert_eq(spanfix_unit_of(w, 0)->step, UNIT_STEP_STEPPING);
	spanfix_epoch_ends(w, "node node1 is gone");
	spanfix_next_epoch(w, "job/100");
	for (uint32_t r = 0; r < 2; r++) {
		cr_expect_not(w->jobs[r]->life.torn);
		cr_expect_eq(spanfix_unit_of(w, r)->rec->initialised, kept);
		if (kept)
			cr_expect_eq(params_of(w, r), before);
	}
	if (!kept)
		ALL(w, nodefix_seed(n, m, u, 7, op));
	give_shards_back(w);
	ALL(w, nodefix_step(n, m, op));
	ALL(w, nodefix_commit(n, m, 2, 0, op));
	spanfix_gather_and_note(w);
	spanfix_end(w);
	free(w->notes);
}

Test(span_ops, an_epoch_ends_while_shards_are_brought_to_other_nodes)
{
	ends_on_the_way(true);
}

Test(span_ops, an_epoch_ends_while_shards_are_brought_to_other_nodes_and_nothing_is_kept)
{
	ends_on_the_way(false);
}

/* -- sums in rank order */

static void in_rows(state_unit *spec)
{
	const uint64_t shape[] = { 37, 3 };
	state_tensor *t = state_tensor_new("rows", shape, 2);

	t->init_kind = FILL_UNIFORM;
	t->init_b = 1;
	CHECK(state_unit_add_tensor(spec, t) == 0);
	spec->layout = LAYOUT_DIM0;
}

static void in_rows_of_bf16(state_unit *spec)
{
	in_rows(spec);
	spec->compute_dtype = DTYPE_BF16;
	spec->gradient_dtype = DTYPE_BF16;
	spec->reduce_dtype = DTYPE_BF16;
}

static void in_rows_hybrid_of_four(state_unit *spec)
{
	in_rows(spec);
	spec->strategy = STRATEGY_HYBRID;
	spec->shard_ranks = 4;
}

static void script_by_ranks(struct spanfix *w)
{
	spanfix_add_unit(w, 1003, unit_changes);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	for (unsigned s = 1; s <= 3; s++)
		train(w, s);
}

static int all_reduce(struct nodefix *n, struct member *m, Shardd__V1__ReduceOp how,
		      Shardd__V1__Dtype dtype, struct nodefix_op *op)
{
	Shardd__V1__AllReduceRequest r = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;

	r.buffer = values_of[m->rank];
	r.count = 333;
	r.dtype = dtype;
	r.op = how;
	return nodefix_submit(n, m, "AllReduce", &r.base, op);
}

static void script_all_reduce_by_ranks(struct spanfix *w)
{
	struct region place[SPANFIX_RANKS];

	spanfix_turn_until(w, spanfix_is_placed);
	take_values(w);
	for (uint32_t r = 0; r < w->size; r++)
		place[r] = *spanfix_result(w, r);
	for (unsigned i = 0; i < 3; i++) {
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_fill(&place[r], r, i);
		ALL(w, all_reduce(n, m,
				  i ? SHARDD__V1__REDUCE_OP__REDUCE_OP_AVG
				    : SHARDD__V1__REDUCE_OP__REDUCE_OP_SUM,
				  i == 2 ? SHARDD__V1__DTYPE__DTYPE_BF16
					 : SHARDD__V1__DTYPE__DTYPE_FP32,
				  op));
		for (uint32_t r = 0; r < w->size; r++)
			spanfix_note(w, region_addr(&place[r]), place[r].bytes);
	}
}

#define RANKS_TEST(name, script, change, ...)                                        \
	Test(span_ops, name)                                                         \
	{                                                                            \
		unit_changes = change;                                               \
		spanfix_by_ranks = true;                                             \
		spanfix_run(script, (const unsigned[SPANFIX_NODES]){ __VA_ARGS__ }); \
	}

RANKS_TEST(by_ranks_on_2_2, script_by_ranks, NULL, 2, 2)
RANKS_TEST(by_ranks_on_1_2_3, script_by_ranks, NULL, 1, 2, 3)
RANKS_TEST(by_ranks_in_rows_on_1_2_3, script_by_ranks, in_rows, 1, 2, 3)
RANKS_TEST(by_ranks_in_rows_of_bf16_on_2_2, script_by_ranks, in_rows_of_bf16, 2, 2)
RANKS_TEST(by_ranks_replicated_on_3_2, script_by_ranks, spanfix_replicated, 3, 2)
RANKS_TEST(sets_by_ranks_on_1_1_1_1, script_by_ranks, with_rows_hybrid, 1, 1, 1, 1)
RANKS_TEST(sets_as_fsdp2_by_ranks_on_1_1_1_1, script_by_ranks, with_rows_as_fsdp2, 1, 1, 1, 1)
RANKS_TEST(sets_in_rows_by_ranks_on_2_2_2_2, script_by_ranks, in_rows_hybrid_of_four, 2, 2, 2, 2)
RANKS_TEST(all_reduce_by_ranks_on_1_2_3, script_all_reduce_by_ranks, NULL, 1, 2, 3)
RANKS_TEST(ddp_by_ranks_on_1_2_3, script_ddp, of_ddp, 1, 2, 3)
RANKS_TEST(ddp_unused_by_ranks_on_2_3, script_ddp_unused, of_ddp, 2, 3)

/* A node that adds in another order than the others would go another way than they. */
Test(span_ops, nodes_want_sums_in_different_orders)
{
	struct spanfix *w = &spanfix;

	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 1 });
	w->nodes[1].node.order_ranks = true;
	spanfix_add_unit(w, 1003, NULL);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	EACH(w, nodefix_reduce(n, m, u, false, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 3; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_STATE);
		cr_expect(strstr(w->ops[r].fault.text, "with order: ranks"), "%s",
			  w->ops[r].fault.text);
	}
	w->nodes[1].node.order_ranks = false;
	train(w, 1);
	spanfix_end(w);
	free(w->notes);
}

/* Replicas of two ranks each are summed by themselves: refused, and the epoch goes on. */
Test(span_ops, sums_in_rank_order_that_are_not_possible)
{
	struct spanfix *w = &spanfix;

	spanfix_by_ranks = true;
	spanfix_begin(w, true, (const unsigned[SPANFIX_NODES]){ 2, 2 });
	spanfix_add_unit(w, 1003, with_rows_hybrid);
	ALL(w, nodefix_seed(n, m, u, 7, op));
	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	EACH(w, nodefix_defer(n, m, u, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 4; r++) {
		cr_expect_eq(w->ops[r].fault.code, FAULT_UNIMPLEMENTED, "%s", w->ops[r].fault.text);
		cr_expect(strstr(w->ops[r].fault.text, "set order: devices"), "%s",
			  w->ops[r].fault.text);
		cr_expect_eq(w->members[r]->state, MEMBER_JOINED);
	}
	take_values(w);
	EACH(w, reduce_sparse(n, m, 0, op));
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < 4; r++)
		cr_expect_eq(w->ops[r].fault.code, FAULT_UNIMPLEMENTED, "%s", w->ops[r].fault.text);
	spanfix_end(w);
	free(w->notes);
}

#define SPAN_TEST(name, script, change, ...)                                         \
	Test(span_ops, name)                                                         \
	{                                                                            \
		unit_changes = change;                                               \
		spanfix_run(script, (const unsigned[SPANFIX_NODES]){ __VA_ARGS__ }); \
	}

SPAN_TEST(by_trainer_on_1_1, script_by_trainer, by_trainer, 1, 1)
SPAN_TEST(by_trainer_on_1_2_3, script_by_trainer, by_trainer, 1, 2, 3)
SPAN_TEST(by_trainer_in_rows_on_2_1, script_by_trainer, by_trainer_in_rows, 2, 1)
SPAN_TEST(by_trainer_replicated_on_1_2_3, script_by_trainer, by_trainer_replicated, 1, 2, 3)
SPAN_TEST(by_trainer_hybrid_on_2_2, script_by_trainer, by_trainer_hybrid, 2, 2)
SPAN_TEST(by_trainer_gathers_early_on_1_2, script_early_gather, by_trainer, 1, 2)
SPAN_TEST(by_trainer_replicated_gathers_early_on_2_1, script_early_gather, by_trainer_replicated, 2,
	  1)
SPAN_TEST(by_trainer_sets_on_1_1_1_1, script_by_trainer, by_trainer_hybrid, 1, 1, 1, 1)
SPAN_TEST(by_trainer_sets_gather_early_on_1_1_1_1, script_early_gather, by_trainer_hybrid, 1, 1, 1,
	  1)
SPAN_TEST(sparse_on_1_1, script_sparse, with_rows, 1, 1)
SPAN_TEST(sparse_on_1_2_3, script_sparse, with_rows, 1, 2, 3)
SPAN_TEST(sparse_in_bf16_on_1_2_3, script_sparse, with_rows_in_bf16, 1, 2, 3)
SPAN_TEST(sparse_hybrid_on_2_2, script_sparse, with_rows_hybrid, 2, 2)
SPAN_TEST(sparse_hybrid_on_1_3, script_sparse, with_rows_hybrid, 1, 3)
SPAN_TEST(sparse_sets_on_1_1_1_1, script_sparse, with_rows_hybrid, 1, 1, 1, 1)
SPAN_TEST(sparse_sets_as_fsdp2_on_1_1_1_1, script_sparse, with_rows_as_fsdp2, 1, 1, 1, 1)
SPAN_TEST(ddp_sparse_on_1_2_3, script_ddp_sparse, of_ddp, 1, 2, 3)
SPAN_TEST(ddp_sparse_first_on_2_1, script_ddp_sparse_first, of_ddp, 2, 1)
SPAN_TEST(shards_on_1_1, script_shards, NULL, 1, 1)
SPAN_TEST(shards_on_2_2, script_shards, NULL, 2, 2)
SPAN_TEST(shards_of_sets_on_1_1_1_1, script_read_shards, with_rows_hybrid, 1, 1, 1, 1)
SPAN_TEST(convert_on_1_1_1_1, script_convert, two_tensors, 1, 1, 1, 1)
SPAN_TEST(convert_sets_on_1_1_1_1, script_convert, two_tensors_hybrid, 1, 1, 1, 1)
SPAN_TEST(drop_sets_on_1_1_1_1, script_drop, two_tensors_hybrid, 1, 1, 1, 1)
SPAN_TEST(convert_on_1_2, script_convert, two_tensors, 1, 2)
SPAN_TEST(convert_on_1_2_3, script_convert, two_tensors, 1, 2, 3)
SPAN_TEST(drop_on_2_1, script_drop, two_tensors, 2, 1)
SPAN_TEST(drop_replicated_on_1_1, script_drop, two_tensors_replicated, 1, 1)
SPAN_TEST(ddp_on_1_2, script_ddp, of_ddp, 1, 2)
SPAN_TEST(ddp_on_1_2_3, script_ddp, of_ddp, 1, 2, 3)
SPAN_TEST(ddp_in_backward_on_2_2, script_ddp, of_ddp_in_backward, 2, 2)
SPAN_TEST(ddp_unused_on_1_2, script_ddp_unused, of_ddp, 1, 2)
SPAN_TEST(ddp_unused_on_2_2, script_ddp_unused, of_ddp, 2, 2)
SPAN_TEST(ddp_static_on_1_2, script_ddp_static, of_ddp, 1, 2)
