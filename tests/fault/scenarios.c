/* How to get into the middle of each op of the table. */
#include "asks.h"
#include "core/check.h"

enum { N = 1000 };

static void make_unit(struct scene *s, state_unit *spec)
{
	s->u = nodefix_register(s->job, spec);
	MUST(s, ask_seed);
}

static void with_gradient(struct scene *s)
{
	MUST(s, ask_gradient);
}

static void with_reduced(struct scene *s)
{
	MUST(s, ask_gradient);
	MUST(s, ask_reduce);
}

static void with_step(struct scene *s)
{
	with_reduced(s);
	MUST(s, ask_step);
}

static void with_accumulated(struct scene *s)
{
	MUST(s, ask_gradient);
	MUST(s, ask_accumulate);
	MUST(s, ask_gradient);
}

static void with_profile(struct scene *s, enum reduce_profile profile, enum unit_strategy strategy,
			 enum dtype dtype)
{
	state_unit *spec = nodefix_spec("u", N);

	spec->reduce_profile = profile;
	spec->strategy = strategy;
	spec->shard_ranks = strategy == STRATEGY_HYBRID ? s->stage->ranks / 2 : 0;
	spec->reduce_dtype = dtype;
	make_unit(s, spec);
}

static void with_replicas(struct scene *s)
{
	with_profile(s, PROFILE_FSDP2, s->stage->ranks > 1 ? STRATEGY_REPLICATE : STRATEGY_SHARD,
		     DTYPE_BF16);
	with_accumulated(s);
}

static void with_hybrid(struct scene *s)
{
	with_profile(s, PROFILE_FSDP2, STRATEGY_HYBRID, DTYPE_BF16);
	MUST(s, ask_gradient);
}

static void with_some_accumulated(struct scene *s)
{
	with_profile(s, PROFILE_FSDP2, STRATEGY_SHARD, DTYPE_BF16);
	MUST(s, ask_gradient);
	nodefix_ok((ask_accumulate(s, 0), &s->op[0][0]), "Accumulate");
	scene_clear(s);
}

/* DDP's gradients begin with what earlier reductions left. */
static void with_ddp_profile(struct scene *s)
{
	with_profile(s, PROFILE_DDP, STRATEGY_REPLICATE, DTYPE_FP32);
	with_reduced(s);
	MUST(s, ask_gradient);
}

static void with_ddp_accumulated(struct scene *s)
{
	with_ddp_profile(s);
	MUST(s, ask_accumulate);
	MUST(s, ask_gradient);
}

static void with_in_backward(struct scene *s)
{
	state_unit *spec = nodefix_spec("u", N);

	spec->optimizer->when = OPTIM_IN_BACKWARD;
	make_unit(s, spec);
	MUST(s, ask_gradient);
}

/* Somebody has it: it is stepped when that is released. */
static void with_due(struct scene *s)
{
	with_in_backward(s);
	MUST(s, ask_gather_zero);
	MUST(s, ask_reduce);
}

static void with_own(struct scene *s)
{
	state_unit *spec = nodefix_spec("u", N);

	spec->optimizer->kind = OPTIM_NONE;
	spec->optimizer->when = OPTIM_BY_TRAINER;
	make_unit(s, spec);
	MUST(s, ask_gradient);
}

static void with_own_reduced(struct scene *s)
{
	with_own(s);
	MUST(s, ask_reduce);
}

static void with_shard(struct scene *s)
{
	with_own_reduced(s);
	MUST(s, ask_next_shard);
}

static void with_own_replica(struct scene *s)
{
	state_unit *spec = nodefix_spec("u", N);

	spec->optimizer->kind = OPTIM_NONE;
	spec->optimizer->when = OPTIM_BY_TRAINER;
	spec->strategy = STRATEGY_REPLICATE;
	make_unit(s, spec);
	MUST(s, ask_gradient);
	MUST(s, ask_reduce);
	MUST(s, ask_next_shard);
}

static void with_cast(struct scene *s)
{
	state_unit *spec = nodefix_spec("u", N);

	spec->compute_dtype = DTYPE_BF16;
	make_unit(s, spec);
}

static void with_cast_held(struct scene *s)
{
	with_cast(s);
	MUST(s, ask_gather);
}

static void with_cast_stepped(struct scene *s)
{
	with_cast(s);
	with_step(s);
}

/* Frozen tensors and buffers, in rows. */
static void with_rich(struct scene *s)
{
	static const uint64_t shape[] = { 8, 2 };
	state_unit *spec = nodefix_spec("u", 7);
	state_tensor *frozen = state_tensor_new("frozen", shape, 2);
	state_tensor *bias = state_tensor_new("bias", shape, 2);
	state_buffer *buffer = state_buffer_new("mean", shape, 2);

	frozen->frozen = true;
	buffer->dtype = BUFFER_FP32;
	CHECK(state_unit_add_tensor(spec, frozen) == 0 && state_unit_add_tensor(spec, bias) == 0);
	CHECK(state_unit_add_buffer(spec, buffer) == 0);
	spec->layout = LAYOUT_DIM0;
	make_unit(s, spec);
}

static void with_summoned(struct scene *s)
{
	MUST(s, ask_summon);
}

static void with_rich_summoned(struct scene *s)
{
	with_rich(s);
	MUST(s, ask_summon);
}

static void with_guarded(struct scene *s)
{
	state_unit *spec = nodefix_spec("u", N);

	spec->guarded = true;
	spec->compute_dtype = DTYPE_BF16;
	make_unit(s, spec);
}

static void with_plan(struct scene *s)
{
	MUST(s, ask_plan);
	MUST(s, ask_gradient);
}

static void with_rich_gradient(struct scene *s)
{
	with_rich(s);
	MUST(s, ask_gradient);
}

static void with_two_steps(struct scene *s)
{
	with_step(s);
	MUST(s, ask_gradient);
}

static void in_forward(struct scene *s)
{
	with_guarded(s);
	MUST(s, ask_begin_forward);
}

/* -- a ddp: a dense tensor and a sparse one */

static void with_replica(struct scene *s)
{
	static const uint64_t shape[] = { 4, 3 };
	state_unit *spec = nodefix_spec("u", 5);
	state_tensor *rows = state_tensor_new("rows", shape, 2);

	CHECK(rows && state_unit_add_tensor(spec, rows) == 0);
	spec->strategy = STRATEGY_REPLICATE;
	spec->reduce_profile = PROFILE_DDP;
	make_unit(s, spec);
}

static void with_folded_rows(struct scene *s)
{
	static const uint64_t shape[] = { 4, 3 };
	state_unit *spec = nodefix_spec("u", 5);
	state_tensor *rows = state_tensor_new("rows", shape, 2);

	CHECK(rows && state_unit_add_tensor(spec, rows) == 0);
	spec->reduce_dtype = DTYPE_BF16;
	spec->reduce_profile = PROFILE_FSDP2;
	make_unit(s, spec);
}

static void with_ddp(struct scene *s)
{
	with_replica(s);
	MUST(s, ask_ddp_create);
}

static void with_forward(struct scene *s)
{
	with_ddp(s);
	MUST(s, ask_ddp_forward);
}

static void with_backward(struct scene *s)
{
	with_forward(s);
	MUST(s, ask_ddp_backward);
}

static void with_rows_ready(struct scene *s)
{
	with_backward(s);
	MUST(s, ask_ready_rows);
}

static void with_all_ready(struct scene *s)
{
	with_rows_ready(s);
	MUST(s, ask_ready_dense);
}

static void with_a_pass(struct scene *s)
{
	with_all_ready(s);
	MUST(s, ask_ddp_finish);
}

static void with_uneven_pass(struct scene *s)
{
	with_forward(s);
	MUST(s, ask_backward_but_last);
}

const struct scenario scenarios[] = {
	{ "Initialise", "seed", NULL, ask_seed, 1 },
	{ "Initialise", "own", NULL, ask_own, 1 },
	{ "Initialise", "from a rank", NULL, ask_from_root, 1 },
	{ "Initialise", "after a step", with_step, ask_seed, 1 },
	{ "Gather", "of what is stored", NULL, ask_gather, 1 },
	{ "Gather", "of a copy", with_cast, ask_gather, 1 },
	{ "Gather", "after a step", with_cast_stepped, ask_gather, 1 },
	{ "Release", "", with_cast_held, ask_release, 1 },
	{ "Release", "and a step that was due", with_due, ask_release_zero, 1 },
	{ "GradientBuffer", "", NULL, ask_gradient, 1 },
	{ "AllocBuffer", "", NULL, ask_alloc, 1 },
	{ "FreeBuffer", "", NULL, ask_free_buffer, 1 },
	{ "ReadBytes", "of a gathered copy", with_cast_held, ask_read_gathered, 1 },
	{ "ReadBytes", "of a gradient", with_gradient, ask_read_gradient, 1 },
	{ "WriteBytes", "", with_gradient, ask_write_gradient, 1 },
	{ "Reduce", "", with_gradient, ask_reduce, 1 },
	{ "Reduce", "twice", with_gradient, ask_reduce_twice, 1 },
	{ "Reduce", "after a step", with_two_steps, ask_reduce, 1 },
	{ "Reduce", "of some tensors", with_rich_gradient, ask_leave_out, 1 },
	{ "Reduce", "of what was accumulated", with_replicas, ask_reduce, 1 },
	{ "Reduce", "where some have accumulated", with_some_accumulated, ask_reduce, 1 },
	{ "Reduce", "deferred", with_hybrid, ask_defer, 4 },
	{ "Reduce", "of several replicas", with_hybrid, ask_reduce, 4 },
	{ "Reduce", "twice, DDP", with_ddp_profile, ask_reduce_twice, 1 },
	{ "Reduce", "accumulated, DDP", with_ddp_accumulated, ask_reduce, 1 },
	{ "Reduce", "in place of a rank without inputs", with_ddp_profile, ask_uneven_reduce, 2 },
	{ "Reduce", "twice in its place", with_ddp_profile, ask_uneven_reduce_twice, 2 },
	{ "Reduce", "that steps", with_in_backward, ask_reduce, 1 },
	{ "Reduce", "that steps, twice", with_in_backward, ask_reduce_twice, 1 },
	{ "Reduce", "for the trainer's optimizer", with_own, ask_reduce, 1 },
	{ "Reduce", "with a plan", with_plan, ask_reduce, 1 },
	{ "AllReduce", "", NULL, ask_all_reduce, 1 },
	{ "AllReduce", "average", NULL, ask_average, 1 },
	{ "AllReduce", "maximum", NULL, ask_most, 1 },
	{ "AllReduce", "and the buffer is freed", NULL, ask_all_reduce_and_free, 1 },
	{ "Broadcast", "", NULL, ask_broadcast, 1 },
	{ "Barrier", "", NULL, ask_barrier, 1 },
	{ "ClipGradNorm", "", with_reduced, ask_clip, 1 },
	{ "Step", "", with_reduced, ask_step, 1 },
	{ "Step", "and Commit", with_reduced, ask_step_and_commit, 1 },
	{ "Commit", "", NULL, ask_commit, 1 },
	{ "Commit", "of a step", with_step, ask_commit, 1 },
	{ "BeginPass", "", with_guarded, ask_begin_forward, 1 },
	{ "EndPass", "", in_forward, ask_end_forward, 1 },
	{ "SetReshard", "", with_guarded, ask_set_reshard, 1 },
	{ "UnitBuffers", "", with_rich, ask_unit_buffers, 1 },
	{ "BroadcastBuffers", "", with_rich, ask_broadcast_buffers, 1 },
	{ "SummonFull", "", NULL, ask_summon, 1 },
	{ "SummonFull", "of rows", with_rich, ask_summon, 1 },
	{ "SummonFull", "of state", with_step, ask_summon_state, 1 },
	{ "SummonFull", "and ReturnFull", NULL, ask_summon_and_return, 1 },
	{ "ReturnFull", "", with_summoned, ask_return_it, 1 },
	{ "ReturnFull", "written", with_summoned, ask_return_written, 1 },
	{ "ReturnFull", "of rows, written", with_rich_summoned, ask_return_written, 1 },
	{ "ConvertUnits", "", with_reduced, ask_convert, 1 },
	{ "ConvertUnits", "unfreezing", with_rich, ask_unfreeze, 1 },
	{ "DropUnits", "", with_reduced, ask_drop_units, 1 },
	{ "DropUnits", "with buffers", with_rich, ask_drop_units, 1 },
	{ "Accumulate", "", with_gradient, ask_accumulate, 1 },
	{ "Accumulate", "more", with_accumulated, ask_accumulate, 1 },
	{ "Accumulate", "in another dtype", with_replicas, ask_accumulate, 1 },
	{ "Accumulate", "DDP", with_ddp_profile, ask_accumulate, 1 },
	{ "SetPrefetch", "", with_guarded, ask_set_prefetch, 1 },
	{ "ClipGradValue", "", with_reduced, ask_clip_value, 1 },
	{ "Unscale", "", with_reduced, ask_unscale, 1 },
	{ "PlanBackward", "", NULL, ask_plan, 1 },
	{ "NextShard", "", with_own_reduced, ask_next_shard, 1 },
	{ "ShardDone", "", with_shard, ask_shard_done, 1 },
	{ "ShardDone", "of replicas", with_own_replica, ask_shard_done, 1 },
	{ "DdpCreate", "", with_replica, ask_ddp_create, 1 },
	{ "DdpForward", "", with_ddp, ask_ddp_forward, 1 },
	{ "DdpForward", "to new buckets", with_a_pass, ask_ddp_forward, 1 },
	{ "DdpBackward", "", with_forward, ask_ddp_backward, 1 },
	{ "DdpReady", "with rows", with_backward, ask_ready_rows, 1 },
	{ "DdpBucket", "", with_rows_ready, ask_ready_dense, 1 },
	{ "DdpBucket", "with those without inputs", with_uneven_pass, ask_uneven_pass, 2 },
	{ "DdpFinish", "", with_all_ready, ask_ddp_finish, 1 },
	{ "DdpFinish", "and all before it", with_backward, ask_ready_and_finish, 1 },
	{ "VerifyModel", "", NULL, ask_verify, 1 },
	{ "ReduceSparse", "", with_replica, ask_reduce_sparse, 1 },
	{ "ReduceSparse", "rank after rank", with_folded_rows, ask_reduce_sparse, 1 },
	{ "JoinUneven", "", NULL, ask_join_uneven, 1 },
	{ "JoinUneven", "error_if_uneven", NULL, ask_join_even, 1 },
	{ "SetFactors", "", NULL, ask_set_factors, 1 },
	{ "CopyShard", "", NULL, ask_read_shard, 1 },
	{ "CopyShard", "into the parameters", NULL, ask_write_shard, 1 },
	{ "CopyShard", "into the gradient", with_reduced, ask_write_gradient_shard, 1 },
	{ "DropGradients", "", with_reduced, ask_drop, 1 },
};
const size_t n_scenarios = ARRAY_SIZE(scenarios);
