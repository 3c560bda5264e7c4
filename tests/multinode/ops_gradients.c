/* What becomes of gradients between Reduce and Step, and in which types and factors they are added. */
#include "ops.h"

#include <math.h>
#include <string.h>

void ops_sparse(void)
{
	struct shardd_unit_info u =
		ops_make("sparse", (struct shardd_unit_spec){ .optimizer = ops_sgd });
	int64_t rows[3];
	uint64_t buffer;
	void *values;

	buffer = ops_buffer(4096, &values);
	for (unsigned i = 0; i < STEPS; i++) {
		ops_fill(values, 3 * WIDTH, 6);
		OK(shardd_reduce_sparse(ops.client, u.unit, 1, rows, ops_rows_of(rows), buffer, 0,
					&ops.err));
		ops_end_step("sparse", &u);
	}
	OK(shardd_free(ops.client, buffer, &ops.err));
}

/* -- what is reduced */

static void ops_say_unused(const struct shardd_unit_info *u)
{
	bool unused[TENSORS];

	OK(shardd_unit_unused(ops.client, u->unit, unused, TENSORS, &ops.err));
	ops_say("unused", unused, sizeof(unused));
}

/* A tensor that no rank uses, one that some use, and in one step a unit that only some use. */
static void ops_unused(const struct shardd_unit_info *u)
{
	uint32_t unused[] = { 0, 2 };

	for (unsigned i = 0; i < STEPS; i++) {
		struct shardd_result result;
		bool by_all;

		ops_fill_gradient(u);
		if (i == 1) {
			OK(shardd_reduce_unused(ops.client, u->unit, &by_all, &ops.err));
			ops_say("used by none", &by_all, sizeof(by_all));
		} else {
			bool uses = ops.me.rank == i;

			OK(shardd_reduce_with(ops.client,
					      SHARDD_OPTIONS(reduce, .unit = u->unit,
							     .unused = &unused[uses],
							     .n_unused = uses ? 1 : 2),
					      &result, &ops.err));
		}
		ops_say_unused(u);
		ops_end_step("unused", u);
	}
}

static void ops_accumulated(const struct shardd_unit_info *u)
{
	for (unsigned i = 0; i < STEPS; i++) {
		for (unsigned k = 0; k < i + (ops.me.rank == 3); k++) {
			ops_fill_gradient(u);
			OK(shardd_accumulate(ops.client, u->unit, &ops.err));
		}
		ops_reduce(u);
		ops_reduce(u); /* is added */
		ops_end_step("accumulated", u);
	}
}

static void ops_dropped(const struct shardd_unit_info *u)
{
	static const uint32_t dropped[] = { 1 };

	for (unsigned i = 0; i < STEPS; i++) {
		ops_reduce(u);
		OK(shardd_drop_gradients(ops.client, u->unit, dropped, 1, &ops.err));
		if (i == 1)
			ops_reduce(u);
		ops_end_step("dropped", u);
	}
}

static void ops_factors(const struct shardd_unit_info *u)
{
	static const double of[][2] = { { 1, 8 }, { 2, 1 }, { 0, 0 } };

	for (size_t i = 0; i < OPS_COUNT(of); i++) {
		OK(shardd_set_factors(ops.client,
				      SHARDD_OPTIONS(set_factors, .unit = u->unit,
						     .pre_divide = of[i][0],
						     .post_divide = of[i][1]),
				      &ops.err));
		ops_reduce(u);
		ops_end_step("factors", u);
	}
}

void ops_gradients(void)
{
	struct shardd_unit_info u =
		ops_make("gradients",
			 (struct shardd_unit_spec){
				 .optimizer = SHARDD_SGD_DEFAULTS(.lr = 0.5, .momentum = 0.5) });

	ops_unused(&u);
	ops_accumulated(&u);
	ops_dropped(&u);
	ops_factors(&u);
}

/* -- what is done with the sums */

static void ops_clip_by(const struct shardd_clip_options *how, const struct shardd_unit_info *u)
{
	double norm;

	ops_reduce(u);
	OK(shardd_clip(ops.client, how, &norm, &ops.err));
	ops_say("norm", &norm, sizeof(norm));
	ops_end_step("clipped", u);
	ops_commit();
}

/* Sums of powers of such numbers are exact, too. */
static void ops_clipped(const struct shardd_unit_info *u)
{
	static const double types[] = { 0, 1, 3, INFINITY };
	static const enum shardd_clip_profile profiles[] = { SHARDD_CLIP_FAIRSCALE, SHARDD_CLIP_XLA,
							     SHARDD_CLIP_TORCH };

	for (size_t i = 0; i < OPS_COUNT(types); i++)
		for (size_t k = 0; k < OPS_COUNT(profiles); k++)
			ops_clip_by(SHARDD_OPTIONS(clip, .max_norm = 0.5, .norm_type = types[i],
						   .profile = profiles[k]),
				    u);
	ops_clip_by(SHARDD_OPTIONS(clip, .by_value = true, .value = 0.25), u);
	ops_clip_by(SHARDD_OPTIONS(clip, .max_norm = 0.5, .units = &u->unit, .n_units = 1), u);
}

/* The gradient of one rank has an infinity: nobody makes the step. */
static void ops_put_infinity(const struct shardd_unit_info *u)
{
	static const float infinity = INFINITY;
	struct shardd_tensor_place places[TENSORS];
	void *gradient;

	ops_fill_gradient(u);
	OK(shardd_gradient(ops.client, u->unit, &gradient, &ops.err)); /* the same */
	OK(shardd_tensor_places(ops.client, u->unit, places, TENSORS, &ops.err));
	if (ops.me.rank == 3)
		OK(shardd_write(ops.client, (float *)gradient + places[1].offset, &infinity,
				sizeof(infinity), &ops.err));
	OK(shardd_reduce(ops.client, u->unit, &ops.err));
}

static void ops_unscaled(const struct shardd_unit_info *u)
{
	for (unsigned i = 0; i < STEPS; i++) {
		struct shardd_result result;
		bool found;

		if (i == 1)
			ops_put_infinity(u);
		else
			ops_reduce(u);
		if (i == 1 &&
		    shardd_clip(ops.client,
				SHARDD_OPTIONS(clip, .max_norm = 1, .error_if_nonfinite = true),
				NULL, &ops.err) != -SHARDD_FAILED_PRECONDITION) {
			fprintf(stderr, "an infinite norm was accepted\n");
			exit(1);
		}
		OK(shardd_unscale(ops.client, SHARDD_WORLD, 0.25, &found, &ops.err));
		ops_say("found", &found, sizeof(found));
		OK(shardd_step_with(ops.client, SHARDD_OPTIONS(step, .skip_if_found = true),
				    &result, &ops.err));
		ops_say("skipped", &result.skipped, sizeof(result.skipped));
		ops_commit();
		ops_look("unscaled", u);
	}
}

/* With a number and a blob of their own, other settings, and gradients that are thrown away. */
static void ops_steps(const struct shardd_unit_info *u)
{
	static const uint32_t tensors[] = { 2 };
	const struct shardd_step_settings settings = {
		.lr = 0.25, .units = &u->unit, .tensors = tensors, .n = 1
	};
	const double lr = 1;
	const uint64_t number = ops.step + 1;

	ops_reduce(u);
	OK(shardd_step_with(ops.client, SHARDD_OPTIONS(step, .discard = true), NULL, &ops.err));
	ops_look("discarded", u);
	ops_reduce(u);
	OK(shardd_step_with(ops.client,
			    SHARDD_OPTIONS(step, .lr = &lr, .settings = &settings, .n_settings = 1,
					   .number = &number, .blob = "blob", .blob_bytes = 4),
			    NULL, &ops.err));
	ops_look("numbered", u);
	ops_commit();
}

void ops_clips(void)
{
	struct shardd_unit_info u =
		ops_make("clips", (struct shardd_unit_spec){ .optimizer = ops_sgd });

	ops_clipped(&u);
	ops_unscaled(&u);
	ops_steps(&u);
}

/* -- what is said before the backward pass */

void ops_plans(void)
{
	struct shardd_optimizer in_backward = ops_sgd;
	struct shardd_unit_info u, v;
	const double lr = 0.25;

	in_backward.when = SHARDD_OPTIM_IN_BACKWARD;
	u = ops_make("planned", (struct shardd_unit_spec){ .optimizer = in_backward });
	v = ops_make("planned at step", (struct shardd_unit_spec){ .optimizer = ops_sgd });
	for (unsigned i = 0; i < 2 * STEPS; i++) {
		struct shardd_result result;

		OK(shardd_plan_backward(
			ops.client,
			SHARDD_OPTIONS(plan_backward,
				       .clip = i % 2 ? SHARDD_OPTIONS(clip, .max_norm = 0.5) : NULL,
				       .inv_scale = i % 3 ? 0.5 : 0, .lr = &lr),
			&ops.err));
		ops_reduce(&v);
		if (i == 4)
			ops_put_infinity(&u);
		else
			ops_reduce(&u);
		OK(shardd_step_with(ops.client, SHARDD_OPTIONS(step, .group = SHARDD_WORLD),
				    &result, &ops.err));
		ops_say("norm", &result.total_norm, sizeof(result.total_norm));
		ops_say("skipped", &result.skipped, sizeof(result.skipped));
		ops_commit();
		ops_look("planned", &u);
		ops_look("planned at step", &v);
	}
}

/* -- sums inside replicas, and over them */

static void ops_replicas_of(const char *name, struct shardd_unit_spec spec)
{
	struct shardd_unit_info u;

	spec.optimizer = ops_sgd;
	u = ops_make(name, spec);
	for (unsigned i = 0; i < STEPS; i++) {
		double norm;

		for (unsigned k = 0; k < i && spec.shard_ranks < 4; k++) { /* there are replicas */
			ops_fill_gradient(&u);
			OK(shardd_reduce_with(ops.client,
					      SHARDD_OPTIONS(reduce, .unit = u.unit,
							     .deferred = true, .more = true),
					      NULL, &ops.err));
		}
		ops_reduce(&u);
		OK(shardd_clip_grad_norm(ops.client, SHARDD_WORLD, 0.5, 1, &norm, &ops.err));
		ops_say("norm", &norm, sizeof(norm));
		ops_end_step(name, &u);
	}
}

void ops_replicas(void)
{
	ops_replicas_of("replicate", (struct shardd_unit_spec){ .strategy = SHARDD_REPLICATE });
	ops_replicas_of("hybrid 1",
			(struct shardd_unit_spec){ .strategy = SHARDD_HYBRID, .shard_ranks = 1 });
	ops_replicas_of("hybrid 2",
			(struct shardd_unit_spec){ .strategy = SHARDD_HYBRID, .shard_ranks = 2 });
	ops_replicas_of("hybrid 4",
			(struct shardd_unit_spec){ .strategy = SHARDD_HYBRID, .shard_ranks = 4 });
	ops_replicas_of("hybrid fsdp2",
			(struct shardd_unit_spec){ .strategy = SHARDD_HYBRID,
						   .shard_ranks = 2,
						   .layout = SHARDD_LAYOUT_DIM0,
						   .reduce_profile = SHARDD_PROFILE_FSDP2 });
	ops_replicas_of("hybrid sum",
			(struct shardd_unit_spec){ .strategy = SHARDD_HYBRID,
						   .shard_ranks = 2,
						   .reduce_profile = SHARDD_PROFILE_FSDP2,
						   .divide_factor = 8,
						   .force_sum = true });
}

/* -- types and profiles */

static void ops_type(const char *name, struct shardd_unit_spec spec)
{
	size_t size = spec.compute_dtype == 0 ? sizeof(float) : sizeof(uint16_t);
	struct shardd_unit_info u;
	void *gradient;

	spec.optimizer = SHARDD_ADAMW_DEFAULTS(.lr = 0.125);
	u = ops_register(name, spec);
	OK(shardd_init_seed(ops.client, u.unit, 7, &ops.err));
	ops_look_as(name, &u, size);
	for (unsigned i = 0; i < STEPS; i++) {
		OK(shardd_gradient(ops.client, u.unit, &gradient, &ops.err));
		ops_fill_tensors(&u, gradient, spec.gradient_dtype);
		OK(shardd_reduce(ops.client, u.unit, &ops.err));
		OK(shardd_step(ops.client, SHARDD_WORLD, NULL, &ops.err));
		ops_commit();
		ops_look_as(name, &u, size);
	}
}

void ops_types(void)
{
	static const struct {
		const char *name;
		struct shardd_unit_spec spec;
	} types[] = {
		{ "bf16", { .compute_dtype = SHARDD_BF16, .gradient_dtype = SHARDD_BF16 } },
		{ "sums in bf16",
		  { .compute_dtype = SHARDD_BF16,
		    .gradient_dtype = SHARDD_BF16,
		    .reduce_dtype = SHARDD_BF16 } },
		{ "fp16", { .compute_dtype = SHARDD_FP16, .gradient_dtype = SHARDD_FP32 } },
		{ "sums in fp16", { .reduce_dtype = SHARDD_FP16 } },
		{ "xla", { .reduce_profile = SHARDD_PROFILE_XLA } },
		{ "hook in bf16",
		  { .reduce_profile = SHARDD_PROFILE_FSDP1_HOOK, .reduce_dtype = SHARDD_BF16 } },
		{ "hook in fp16",
		  { .reduce_profile = SHARDD_PROFILE_FSDP1_HOOK, .reduce_dtype = SHARDD_FP16 } },
		{ "fsdp2 in bf16",
		  { .reduce_profile = SHARDD_PROFILE_FSDP2,
		    .layout = SHARDD_LAYOUT_DIM0,
		    .compute_dtype = SHARDD_BF16,
		    .gradient_dtype = SHARDD_BF16,
		    .reduce_dtype = SHARDD_BF16 } },
		{ "replicas in bf16",
		  { .strategy = SHARDD_REPLICATE,
		    .compute_dtype = SHARDD_BF16,
		    .gradient_dtype = SHARDD_BF16,
		    .reduce_dtype = SHARDD_BF16 } },
		{ "replicas ddp",
		  { .strategy = SHARDD_REPLICATE, .reduce_profile = SHARDD_PROFILE_DDP } },
		{ "hybrid in fp16",
		  { .strategy = SHARDD_HYBRID, .shard_ranks = 2, .reduce_dtype = SHARDD_FP16 } },
	};

	for (size_t i = 0; i < OPS_COUNT(types); i++)
		ops_type(types[i].name, types[i].spec);
}
