/* Ops that all ranks of a group take part in. */
#include "bench.h"

#define RANKS  4
#define REPEAT 100
#define FEW    20 /* turns where much memory is written */
#define ROW    16 /* elements of a row of the embedding */

/* ------------------------------------------------- what is around the ops */

static void reduce_before(struct trainer *t)
{
	trainer_gradient(t);
	trainer_reduce(t);
}

static void step_after(struct trainer *t)
{
	trainer_step(t, ++t->step);
}

static void pass_after(struct trainer *t)
{
	reduce_before(t);
	step_after(t);
}

static uint64_t bytes_of(const struct trainer *t)
{
	return t->crew->elements * shardd_dtype_size(t->crew->dtype);
}

static void buffer_once(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_alloc(t->client, bytes_of(t), &t->buffer, &t->data, &err), &err,
		     "alloc");
	trainer_fill(t, t->data, t->crew->elements, t->crew->dtype);
}

/* ------------------------------------------------------------- without memory */

static int barrier(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_barrier(t->client, SHARDD_OPTIONS(barrier), ticket, err);
}

static int commit(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_commit(t->client, SHARDD_OPTIONS(commit, .step = ++t->step), ticket,
				    err);
}

static int verify(struct trainer *t, struct shardd_error *err)
{
	return shardd_verify_model(t->client, SHARDD_WORLD, err);
}

static int set_factors(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	struct shardd_set_factors_options factors = { .size = sizeof(factors),
						      .pre_divide = 2,
						      .post_divide = 1 + (double)(t->turn % 2) };
	factors.unit = t->unit;

	return shardd_submit_set_factors(t->client, &factors, ticket, err);
}

static int plan(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	const struct shardd_plan_backward_options p = { .size = sizeof(p), .inv_scale = 0.5 };

	return shardd_submit_plan_backward(t->client, &p, ticket, err);
}

static int join_uneven(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_join_uneven(t->client, SHARDD_OPTIONS(join_uneven), ticket, err);
}

/* ------------------------------------------------------------------ gradients */

static int clip(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_clip(t->client, SHARDD_OPTIONS(clip, .max_norm = 1e-3, .norm_type = 2),
				  ticket, err);
}

static int clip_value(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_clip(
		t->client, SHARDD_OPTIONS(clip, .value = 0.5, .units = NULL, .by_value = true),
		ticket, err);
}

static int drop_gradients(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	static const uint32_t first = 0;

	return shardd_submit_drop_gradients(t->client,
					    SHARDD_OPTIONS(drop_gradients, .unit = t->unit,
							   .tensors = &first, .n_tensors = 1),
					    ticket, err);
}

static int unscale(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_unscale(t->client, SHARDD_OPTIONS(unscale, .inv_scale = 0.5), ticket,
				     err);
}

static void embedding(struct trainer *t, struct shardd_unit_spec *spec, struct shardd_tensor *w)
{
	static uint64_t shape[2] = { 0, ROW };

	(void)spec;
	shape[0] = t->crew->elements / ROW;
	w->shape = shape;
	w->dims = 2;
}

/* Every sixteenth row, the same of every rank; values that the buffer has. */
static int sparse(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	static int64_t rows[256];
	size_t n = t->crew->elements / ROW / 16;

	n = n < 256 ? n : 256;
	for (size_t i = 0; i < n; i++)
		rows[i] = (int64_t)i * 16;
	return shardd_submit_reduce_sparse(t->client,
					   SHARDD_OPTIONS(reduce_sparse, .unit = t->unit,
							  .tensor = 0, .rows = rows, .n_rows = n,
							  .buffer = t->buffer, .values_offset = 0),
					   ticket, err);
}

/* ------------------------------------------------------------- own optimizer */

static void by_trainer(struct trainer *t, struct shardd_unit_spec *spec, struct shardd_tensor *w)
{
	(void)t;
	(void)w;
	spec->optimizer = (struct shardd_optimizer){ .when = SHARDD_OPTIM_BY_TRAINER };
}

static int next_shard(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_next_shard(t->client, SHARDD_OPTIONS(next_shard), ticket, err);
}

static int shard_done(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_shard_done(t->client, SHARDD_OPTIONS(shard_done, .unit = t->unit),
					ticket, err);
}

static void own_step(struct trainer *t)
{
	trainer_meet(t); /* a step before all shards are back is refused */
	step_after(t);
}

static void done_after(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_shard_done(t->client, t->unit, &err), &err, "shard_done");
	own_step(t);
}

static void next_before(struct trainer *t)
{
	struct shardd_error err;
	struct shardd_shard shard;

	reduce_before(t);
	trainer_must(t, shardd_next_shard(t->client, SHARDD_WORLD, &shard, &err), &err,
		     "next_shard");
}

/* ------------------------------------------------------------------- buffers */

static int all_reduce(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_all_reduce(t->client,
					SHARDD_OPTIONS(all_reduce, .buffer = t->buffer,
						       .count = t->crew->elements,
						       .dtype = t->crew->dtype, .op = SHARDD_AVG),
					ticket, err);
}

static int broadcast(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_broadcast(t->client,
				       SHARDD_OPTIONS(broadcast, .buffer = t->buffer,
						      .bytes = bytes_of(t), .root = 0),
				       ticket, err);
}

/* The parameters, into the buffer. */
static int copy_shard(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	struct shardd_tensor_place place;
	int r = shardd_tensor_places(t->client, t->unit, &place, 1, err);

	if (r < 0)
		return r;
	return shardd_submit_copy_shard(
		t->client,
		SHARDD_OPTIONS(copy_shard, .unit = t->unit, .array = SHARDD_PARAMETERS,
			       .buffer = t->buffer, .elements = place.shard_elements),
		ticket, err);
}

/* As large as the unit. */
static void with_buffers(struct trainer *t, struct shardd_unit_spec *spec, struct shardd_tensor *w)
{
	static struct shardd_buffer buffer = { .name = "mean", .dims = 1 };

	(void)w;
	buffer.shape = &t->crew->elements;
	buffer.dtype = (enum shardd_buffer_dtype)t->crew->dtype;
	spec->buffers = &buffer;
	spec->n_buffers = 1;
}

static void buffers_once(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_unit_buffers(t->client, t->unit, &t->data, &err), &err,
		     "unit_buffers");
	trainer_fill(t, t->data, t->crew->elements, t->crew->dtype);
}

static int broadcast_buffers(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_broadcast_buffers(
		t->client, SHARDD_OPTIONS(broadcast_buffers, .unit = t->unit, .root = 0), ticket,
		err);
}

/* ---------------------------------------------------------------- parameters */

static int init(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_init(t->client,
				  SHARDD_OPTIONS(init, .unit = t->unit, .seed = 1,
						 .from = SHARDD_FROM_SEED),
				  ticket, err);
}

static int summon(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_summon(t->client, SHARDD_OPTIONS(summon, .unit = t->unit), ticket,
				    err);
}

static void return_after(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_return(t->client, t->unit, false, &err), &err, "return");
}

static void summon_before(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_summon(t->client, t->unit, &t->data, &err), &err, "summon");
}

static int give_back(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	return shardd_submit_return(
		t->client, SHARDD_OPTIONS(return, .unit = t->unit, .write = true), ticket, err);
}

static int convert(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	struct shardd_convert_options to = { .size = sizeof(to),
					     .layout = t->turn % 2 ? SHARDD_LAYOUT_FLAT
								   : SHARDD_LAYOUT_DIM0 };
	to.units = &t->unit;
	to.n_units = 1;

	return shardd_submit_convert(t->client, &to, ticket, err);
}

static void unit_before(struct trainer *t)
{
	static const uint64_t shape[] = { 4096 };
	struct shardd_tensor w = { .name = "w", .shape = shape, .dims = 1 };
	struct shardd_unit_spec spec = {
		.size = sizeof(spec), .name = "dropped", .tensors = &w, .n_tensors = 1
	};
	struct shardd_unit_info info;
	struct shardd_error err;

	trainer_must(t, shardd_register(t->client, &spec, 1, &info, &err), &err, "register");
	t->buffer = info.unit;
}

static int drop_units(struct trainer *t, shardd_ticket *ticket, struct shardd_error *err)
{
	const shardd_unit unit = (shardd_unit)t->buffer;

	return shardd_submit_free(t->client, SHARDD_OPTIONS(free, .units = &unit, .n_units = 1),
				  ticket, err);
}

/* -------------------------------------------------------------------- tables */

#define TOGETHER .collective = true
static const struct op_case
	op_barrier = { .submit = barrier, TOGETHER },
	op_commit = { .submit = commit, TOGETHER }, op_verify = { .call = verify, TOGETHER },
	op_set_factors = { .submit = set_factors, TOGETHER },
	op_plan = { .submit = plan, .after = pass_after, .optimizer = SHARDD_SGD, TOGETHER },
	op_join_uneven = { .submit = join_uneven, TOGETHER },
	/* reads for the norm; reads and writes to scale */
	op_clip = { .before = reduce_before,
		    .submit = clip,
		    .after = step_after,
		    .optimizer = SHARDD_SGD,
		    .once = 12,
		    .limit = LIMIT_TRIAD,
		    TOGETHER },
	op_clip_value = { .before = reduce_before,
			  .submit = clip_value,
			  .after = step_after,
			  .optimizer = SHARDD_SGD,
			  .once = 8,
			  .limit = LIMIT_COPY,
			  TOGETHER },
	op_unscale = { .before = reduce_before,
		       .submit = unscale,
		       .after = step_after,
		       .optimizer = SHARDD_SGD,
		       .once = 8,
		       .limit = LIMIT_COPY,
		       TOGETHER },
	op_drop = { .before = reduce_before,
		    .submit = drop_gradients,
		    .after = step_after,
		    .optimizer = SHARDD_SGD,
		    .once = 4,
		    TOGETHER },
	op_copy_shard = { .prepare = buffer_once, .submit = copy_shard, TOGETHER },
	op_sparse = { .adapt = embedding,
		      .prepare = buffer_once,
		      .submit = sparse,
		      .after = step_after,
		      .optimizer = SHARDD_SGD,
		      TOGETHER },
	op_next_shard = { .adapt = by_trainer,
			  .before = reduce_before,
			  .submit = next_shard,
			  .after = done_after,
			  .once = 16,
			  .limit = LIMIT_COPY,
			  TOGETHER },
	op_shard_done = { .adapt = by_trainer,
			  .before = next_before,
			  .submit = shard_done,
			  .after = own_step,
			  .once = 8,
			  .limit = LIMIT_COPY,
			  TOGETHER },
	op_all_reduce = { .prepare = buffer_once,
			  .submit = all_reduce,
			  .each = 2,
			  .limit = LIMIT_TRIAD,
			  TOGETHER },
	/* one read, and a write for every rank but the root */
	op_broadcast = { .prepare = buffer_once,
			 .submit = broadcast,
			 .each = 1,
			 .limit = LIMIT_COPY,
			 TOGETHER },
	op_broadcast_buffers = { .adapt = with_buffers,
				 .prepare = buffers_once,
				 .submit = broadcast_buffers,
				 .each = 1,
				 .limit = LIMIT_COPY,
				 TOGETHER },
	op_init = { .submit = init, TOGETHER },
	op_summon = { .submit = summon,
		      .after = return_after,
		      .each = 2,
		      .wide = true,
		      .limit = LIMIT_COPY,
		      TOGETHER },
	op_return = { .before = summon_before,
		      .submit = give_back,
		      .once = 8,
		      .limit = LIMIT_COPY,
		      TOGETHER },
	op_convert = { .submit = convert, TOGETHER },
	op_drop_units = { .before = unit_before, .submit = drop_units, TOGETHER };

const struct bench_case group_cases[] = {
	{ "init", "Initialise", "from a seed", RANKS, FEW, case_op, &op_init },
	{ "barrier", "Barrier", "of all ranks", RANKS, REPEAT, case_op, &op_barrier },
	{ "commit", "Commit", "with nothing to apply", RANKS, REPEAT, case_op, &op_commit },
	{ "verify", "VerifyModel", "a model of one unit", RANKS, REPEAT, case_op, &op_verify },
	{ "set_factors", "SetFactors", "of one unit", RANKS, REPEAT, case_op, &op_set_factors },
	{ "plan", "PlanBackward", "with an inverse scale", RANKS, FEW, case_op, &op_plan },
	{ "join_uneven", "JoinUneven", "no rank has inputs any more", RANKS, REPEAT, case_op,
	  &op_join_uneven },
	{ "clip", "ClipGradNorm", "the norm, and all scaled by it", RANKS, FEW, case_op, &op_clip },
	{ "clip_value", "ClipGradValue", "every element clamped", RANKS, FEW, case_op,
	  &op_clip_value },
	{ "unscale", "Unscale", "all scaled, infinities looked for", RANKS, FEW, case_op,
	  &op_unscale },
	{ "drop_gradients", "DropGradients", "of a unit's only tensor", RANKS, FEW, case_op,
	  &op_drop },
	{ "copy_shard", "CopyShard", "a rank's parameters into its buffer", RANKS, FEW, case_op,
	  &op_copy_shard },
	{ "reduce_sparse", "ReduceSparse", "up to 256 rows of 16 elements", RANKS, FEW, case_op,
	  &op_sparse },
	{ "next_shard", "NextShard", "a shard for the trainer's own optimizer", RANKS, FEW, case_op,
	  &op_next_shard },
	{ "shard_done", "ShardDone", "and back", RANKS, FEW, case_op, &op_shard_done },
	{ "all_reduce", "AllReduce", "AVG of a buffer of each rank, fp32", RANKS, FEW, case_op,
	  &op_all_reduce },
	{ "broadcast", "Broadcast", "a buffer of rank 0 to all", RANKS, FEW, case_op,
	  &op_broadcast },
	{ "broadcast_buffers", "BroadcastBuffers", "a unit's, as large as the unit", RANKS, FEW,
	  case_op, &op_broadcast_buffers },
	{ "summon", "SummonFull", "a copy of all parameters for each rank", RANKS, FEW, case_op,
	  &op_summon },
	{ "return_full", "ReturnFull", "and each rank's own shard of it back", RANKS, FEW, case_op,
	  &op_return },
	{ "convert", "ConvertUnits", "from one layout to the other and back", RANKS, FEW, case_op,
	  &op_convert },
	{ "drop_units", "DropUnits", "one of 4,096 elements", RANKS, FEW, case_op, &op_drop_units },
	{ .name = NULL },
};
