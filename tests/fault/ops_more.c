/* Ddps, uneven inputs, the trainer's own optimizer and passes, for test_ops.c. */
#include <criterion/criterion.h>

#include "core/check.h"
#include "ops.h"

UNIT_OP(gradient_more, "GradientBuffer", more)
UNIT_OP(reduce_more, "Reduce", more)
UNIT_OP(shard_done, "ShardDone", more)

static int seed_more(struct world *w, unsigned r)
{
	return nodefix_seed(&w->n, w->m[r], w->more, 1, &w->op[r]);
}

static void register_more_of(struct world *w, state_unit *spec)
{
	w->more = nodefix_register(w->job, spec);
	MUST(w, seed_more);
}

/* Without failures: each rank whose op failed alone, once more. What it says is in words. */
static void again(struct world *w, submit_fn submit)
{
	for (unsigned r = 0; r < RANKS; r++) {
		if (!w->op[r].fault.code)
			continue;
		submit(w, r);
		nodefix_turns(&w->n);
		cr_assert(!w->op[r].fault.code || w->op[r].fault.text[0]);
	}
}

/* -- a ddp: a dense tensor and a sparse one */

static void with_replica(struct world *w)
{
	static const uint64_t shape[] = { 4, 3 };
	state_unit *spec = nodefix_spec("replica", 5);
	state_tensor *rows = state_tensor_new("rows", shape, 2);

	CHECK(rows && state_unit_add_tensor(spec, rows) == 0);
	spec->strategy = STRATEGY_REPLICATE;
	spec->reduce_profile = PROFILE_DDP;
	register_more_of(w, spec);
}

static int verify(struct world *w, unsigned r)
{
	Shardd__V1__VerifyModelRequest m = SHARDD__V1__VERIFY_MODEL_REQUEST__INIT;

	return nodefix_submit(&w->n, w->m[r], "VerifyModel", &m.base, &w->op[r]);
}

/* What a request points to is read until its op is over. */
static int ddp_create(struct world *w, unsigned r)
{
	static Shardd__V1__DdpCreateRequest m[RANKS];
	static Shardd__V1__DdpTensor sparse, *list[] = { &sparse };
	static uint64_t limits[] = { 8, 100 };
	static uint32_t unit;

	unit = w->more->id;
	shardd__v1__ddp_tensor__init(&sparse);
	sparse.unit = unit;
	sparse.tensor = 1;
	m[r] = (Shardd__V1__DdpCreateRequest)SHARDD__V1__DDP_CREATE_REQUEST__INIT;
	m[r].units = &unit;
	m[r].sparse = list;
	m[r].bucket_limits = limits;
	m[r].n_units = m[r].n_sparse = 1;
	m[r].n_bucket_limits = 2;
	return nodefix_submit(&w->n, w->m[r], "DdpCreate", &m[r].base, &w->op[r]);
}

/* The newest. */
static uint32_t ddp_of(const struct world *w)
{
	uint32_t id = JOB_MAX_DDPS;

	while (id && !w->job->ddps[id - 1])
		id--;
	return id;
}

#define DDP_OP(name, Name, lower, UPPER)                                             \
	static int name(struct world *w, unsigned r)                                 \
	{                                                                            \
		Shardd__V1__##Name##Request m = SHARDD__V1__##UPPER##_REQUEST__INIT; \
                                                                                     \
		m.ddp = ddp_of(w);                                                   \
		return nodefix_submit(&w->n, w->m[r], #Name, &m.base, &w->op[r]);    \
	}
DDP_OP(ddp_forward_op, DdpForward, forward, DDP_FORWARD)
DDP_OP(ddp_backward_op, DdpBackward, backward, DDP_BACKWARD)
DDP_OP(ddp_finish_op, DdpFinish, finish, DDP_FINISH)

static Shardd__V1__SparseRows two_rows(const struct world *w, unsigned r)
{
	static int64_t rows[] = { 2, 0 };
	Shardd__V1__SparseRows m = SHARDD__V1__SPARSE_ROWS__INIT;

	m.rows = rows;
	m.n_rows = 2;
	m.buffer = w->buffer[r].result.buffer;
	return m;
}

static int ready(struct world *w, unsigned r, uint32_t tensor)
{
	static Shardd__V1__DdpReadyRequest m[RANKS];
	static Shardd__V1__SparseRows rows[RANKS];
	static uint32_t tensors[] = { 0, 1 };

	rows[r] = two_rows(w, r);
	m[r] = (Shardd__V1__DdpReadyRequest)SHARDD__V1__DDP_READY_REQUEST__INIT;
	m[r].ddp = ddp_of(w);
	m[r].tensors = &tensors[tensor];
	m[r].n_tensors = 1;
	m[r].rows = tensor ? &rows[r] : NULL;
	return nodefix_submit(&w->n, w->m[r], "DdpReady", &m[r].base, &w->op[r]);
}

static int ready_dense(struct world *w, unsigned r)
{
	return ready(w, r, 0);
}

static int ready_rows(struct world *w, unsigned r)
{
	return ready(w, r, 1);
}

static int reduce_sparse(struct world *w, unsigned r)
{
	static Shardd__V1__ReduceSparseRequest m[RANKS];
	static Shardd__V1__SparseRows rows[RANKS];

	rows[r] = two_rows(w, r);
	m[r] = (Shardd__V1__ReduceSparseRequest)SHARDD__V1__REDUCE_SPARSE_REQUEST__INIT;
	m[r].unit = w->more->id;
	m[r].tensor = 1;
	m[r].rows = &rows[r];
	return nodefix_submit(&w->n, w->m[r], "ReduceSparse", &m[r].base, &w->op[r]);
}

static void with_ddp(struct world *w)
{
	with_replica(w);
	MUST(w, ddp_create);
}

static void with_forward(struct world *w)
{
	with_ddp(w);
	MUST(w, ddp_forward_op);
}

static void with_backward(struct world *w)
{
	with_forward(w);
	MUST(w, ddp_backward_op);
}

/* Buckets go in the order of the tensors, from the last. */
static void with_rows_ready(struct world *w)
{
	with_backward(w);
	MUST(w, ready_rows);
}

static void with_all_ready(struct world *w)
{
	with_rows_ready(w);
	MUST(w, ready_dense);
}

/* In the order of the first one, for which buckets are made again. */
static void with_a_pass(struct world *w)
{
	with_all_ready(w);
	MUST(w, ddp_finish_op);
}

/* The buckets of both ranks are reduced, or say why not when the pass ends. */
static void end_pass_of_ddp(struct world *w, submit_fn submit)
{
	again(w, submit);
	if (submit == ready_rows)
		MUST(w, ready_dense);
	w->fault = FAULT_NULL;
	ops_on_both(w, ddp_finish_op);
	cr_assert(!w->fault.code || w->fault.text[0]);
	cr_assert(w->fault.code != FAULT_INVALID && w->fault.code != FAULT_NOT_FOUND, "%s",
		  w->fault.text);
}

static void mend_rows(struct world *w)
{
	end_pass_of_ddp(w, ready_rows);
}

static void mend_dense(struct world *w)
{
	end_pass_of_ddp(w, ready_dense);
}

static void mend_finish(struct world *w)
{
	again(w, ddp_finish_op);
}

/* -- no more inputs */

static int join_uneven(struct world *w, unsigned r)
{
	Shardd__V1__JoinUnevenRequest m = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	return nodefix_submit(&w->n, w->m[r], "JoinUneven", &m.base, &w->op[r]);
}

int ops_join_even(struct world *w, unsigned r)
{
	Shardd__V1__JoinUnevenRequest m = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	m.error_if_uneven = true;
	return nodefix_submit(&w->n, w->m[r], "JoinUneven", &m.base, &w->op[r]);
}

/* Rank 1 has one input more. */
static void barrier_first(struct world *w, unsigned r)
{
	if (r && !w->barrier.over && !w->barrier.op && !w->barrier.submitted)
		nodefix_barrier(&w->n, w->m[1], 0, &w->barrier);
}

static int join_with_surrogates(struct world *w, unsigned r)
{
	barrier_first(w, r);
	return join_uneven(w, r);
}

/* -- the trainer's own optimizer */

static void with_own(struct world *w)
{
	state_unit *spec = nodefix_spec("own", 1000);

	spec->optimizer->kind = OPTIM_NONE;
	spec->optimizer->when = OPTIM_BY_TRAINER;
	register_more_of(w, spec);
	MUST(w, gradient_more);
	MUST(w, reduce_more);
}

static int next_shard(struct world *w, unsigned r)
{
	Shardd__V1__NextShardRequest m = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;

	return nodefix_submit(&w->n, w->m[r], "NextShard", &m.base, &w->op[r]);
}

static void with_shard(struct world *w)
{
	with_own(w);
	MUST(w, next_shard);
}

static void mend_done(struct world *w)
{
	again(w, shard_done);
}

static void mend_next(struct world *w)
{
	again(w, next_shard);
	MUST(w, shard_done);
}

/* -- passes and policies */

static void with_guarded(struct world *w)
{
	state_unit *spec = nodefix_spec("guarded", 1000);

	spec->guarded = true;
	spec->compute_dtype = DTYPE_BF16;
	register_more_of(w, spec);
}

#define PASS_OP(name, Name, UPPER, which)                                            \
	static int name(struct world *w, unsigned r)                                 \
	{                                                                            \
		Shardd__V1__##Name##Request m = SHARDD__V1__##UPPER##_REQUEST__INIT; \
                                                                                     \
		m.unit = w->more->id;                                                \
		m.pass = SHARDD__V1__PASS__PASS_##which;                             \
		return nodefix_submit(&w->n, w->m[r], #Name, &m.base, &w->op[r]);    \
	}
PASS_OP(begin_forward, BeginPass, BEGIN_PASS, FORWARD)
PASS_OP(end_forward, EndPass, END_PASS, FORWARD)
PASS_OP(begin_backward, BeginPass, BEGIN_PASS, BACKWARD)
PASS_OP(end_backward, EndPass, END_PASS, BACKWARD)

static int set_reshard(struct world *w, unsigned r)
{
	static Shardd__V1__SetReshardRequest m[RANKS];
	static uint32_t unit;

	unit = w->more->id;
	m[r] = (Shardd__V1__SetReshardRequest)SHARDD__V1__SET_RESHARD_REQUEST__INIT;
	m[r].units = &unit;
	m[r].n_units = 1;
	m[r].reshard = SHARDD__V1__RESHARD__RESHARD_NEVER;
	return nodefix_submit(&w->n, w->m[r], "SetReshard", &m[r].base, &w->op[r]);
}

static int set_prefetch(struct world *w, unsigned r)
{
	static Shardd__V1__SetPrefetchRequest m[RANKS];
	static uint32_t unit;

	unit = w->cast->id;
	m[r] = (Shardd__V1__SetPrefetchRequest)SHARDD__V1__SET_PREFETCH_REQUEST__INIT;
	m[r].unit = w->more->id;
	m[r].pass = SHARDD__V1__PASS__PASS_FORWARD;
	m[r].units = &unit;
	m[r].n_units = 1;
	return nodefix_submit(&w->n, w->m[r], "SetPrefetch", &m[r].base, &w->op[r]);
}

static void with_prefetch(struct world *w)
{
	with_guarded(w);
	MUST(w, set_prefetch);
}

static void in_forward(struct world *w)
{
	with_guarded(w);
	MUST(w, begin_forward);
}

static void after_forward(struct world *w)
{
	in_forward(w);
	MUST(w, end_forward);
}

static void in_backward(struct world *w)
{
	after_forward(w);
	MUST(w, begin_backward);
}

/* Nobody is in a pass at the end. */
static void mend_begin_forward(struct world *w)
{
	again(w, begin_forward);
	MUST(w, end_forward);
}

static void mend_end_forward(struct world *w)
{
	again(w, end_forward);
}

static void mend_begin_backward(struct world *w)
{
	again(w, begin_backward);
	MUST(w, end_backward);
}

static void mend_end_backward(struct world *w)
{
	again(w, end_backward);
}

/* A training step with them; what was under way is forgotten. */
void ops_check_more(struct world *w)
{
	if (!w->more)
		return;
	MUST(w, seed_more);
	if (w->more->rec->reduce_profile == PROFILE_DDP) {
		MUST(w, ddp_create);
		for (unsigned pass = 0; pass < 2; pass++) {
			MUST(w, ddp_forward_op);
			MUST(w, ddp_backward_op);
			MUST(w, ready_rows);
			MUST(w, ready_dense);
			MUST(w, ddp_finish_op);
		}
	} else if (w->more->rec->guarded) {
		MUST(w, begin_forward);
		MUST(w, end_forward);
	}
}

const struct act ops_more[] = {
	{ .name = "VerifyModel", .submit = verify },
	{ .name = "DdpCreate", .prepare = with_replica, .submit = ddp_create },
	{ .name = "DdpForward", .prepare = with_ddp, .submit = ddp_forward_op },
	{ .name = "DdpForward to new buckets", .prepare = with_a_pass, .submit = ddp_forward_op },
	{ .name = "DdpBackward", .prepare = with_forward, .submit = ddp_backward_op },
	{ .name = "DdpReady with rows",
	  .prepare = with_backward,
	  .submit = ready_rows,
	  .mend = mend_rows },
	{ .name = "DdpReady",
	  .prepare = with_rows_ready,
	  .submit = ready_dense,
	  .mend = mend_dense },
	{ .name = "DdpFinish",
	  .prepare = with_all_ready,
	  .submit = ddp_finish_op,
	  .mend = mend_finish },
	{ .name = "ReduceSparse", .prepare = with_replica, .submit = reduce_sparse },
	{ .name = "JoinUneven", .submit = join_uneven },
	{ .name = "JoinUneven with a peer that goes on", .submit = join_with_surrogates },
	{ .name = "JoinUneven, error_if_uneven", .submit = ops_join_even },
	{ .name = "NextShard", .prepare = with_own, .submit = next_shard, .mend = mend_next },
	{ .name = "ShardDone", .prepare = with_shard, .submit = shard_done, .mend = mend_done },
	{ .name = "SetReshard", .prepare = with_guarded, .submit = set_reshard },
	{ .name = "SetPrefetch", .prepare = with_guarded, .submit = set_prefetch },
	{ .name = "BeginPass, forward",
	  .prepare = with_prefetch,
	  .submit = begin_forward,
	  .mend = mend_begin_forward },
	{ .name = "EndPass, forward",
	  .prepare = in_forward,
	  .submit = end_forward,
	  .mend = mend_end_forward },
	{ .name = "BeginPass, backward",
	  .prepare = after_forward,
	  .submit = begin_backward,
	  .mend = mend_begin_backward },
	{ .name = "EndPass, backward",
	  .prepare = in_backward,
	  .submit = end_backward,
	  .mend = mend_end_backward },
};
const size_t ops_n_more = ARRAY_SIZE(ops_more);
