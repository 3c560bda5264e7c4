/*
 * Ranks that have no more inputs (DDP's join), by itself: what they are refused, and those who
 * want an error instead. With buckets: test_ddp.c.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

/* Rank 0 has joined; what it cannot take part in is refused to rank 1, and numbers stay
 * equal. */
static int refused_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t buffer, surrogates = 0;
	uint32_t last;

	TRAIN_OK(shardd_alloc(c, 64, &buffer, NULL, &train_err));
	if (t->rank) {
		/* nothing ends without rank 0 until it has joined */
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAIN_FAILS(shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, 4, SHARDD_FP32,
					      SHARDD_SUM, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "rank 0") &&
			      strstr(train_err.text, "no more inputs"));
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAIN_FAILS(shardd_join_uneven(c, SHARDD_WORLD, true, NULL, NULL, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "divide_by_active"));
		TRAIN_FAILS(shardd_join_even(c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "error_if_uneven"));
	}
	TRAIN_OK(shardd_join_uneven(c, SHARDD_WORLD, false, &last, &surrogates, &train_err));
	TRAINER_CHECK(last == 1 && surrogates == (t->rank ? 0 : 2));
	TRAIN_OK(shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, 4, SHARDD_FP32, SHARDD_SUM,
				   &train_err));
	train_leave(c);
	return 0;
}

Test(join_uneven, what_a_joined_rank_cannot_do_is_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, refused_trainer, NULL);
}

/* The norm of one of two units, of which the joined rank's part is the daemon's to give: also
 * where the first rank of the group is the one that has joined. */
static int clipping_trainer(const struct trainer *t)
{
	static const uint64_t shape[] = { 8 };
	struct shardd_tensor tensor = { .name = "w", .shape = shape, .dims = 1 };
	struct shardd_unit_spec specs[2] = { { .size = sizeof(specs[0]), .name = "a" },
					     { .size = sizeof(specs[1]), .name = "b" } };
	struct shardd_unit_info infos[2];
	shardd_client *c = train_join(t);
	struct shardd_clip_options clip = { .size = sizeof(clip), .max_norm = 100, .n_units = 1 };
	double norm = 0;

	for (unsigned i = 0; i < 2; i++) {
		specs[i].tensors = &tensor;
		specs[i].n_tensors = 1;
		specs[i].optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD };
	}
	TRAIN_OK(shardd_register(c, specs, 2, infos, &train_err));
	for (unsigned i = 0; i < 2; i++) {
		float ones[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
		void *gradient;

		TRAIN_OK(shardd_init_seed(c, infos[i].unit, 1, &train_err));
		TRAIN_OK(shardd_gradient(c, infos[i].unit, &gradient, &train_err));
		train_write(c, gradient, ones, sizeof(ones));
		TRAIN_OK(shardd_reduce(c, infos[i].unit, &train_err));
	}
	clip.units = &infos[1].unit;
	if (t->rank != *(const uint32_t *)t->arg) {
		TRAIN_OK(shardd_clip(c, &clip, &norm, &train_err));
		TRAINER_CHECK(norm * norm > 7.99 && norm * norm < 8.01);
	}
	TRAIN_OK(shardd_join_uneven(c, SHARDD_WORLD, false, NULL, NULL, &train_err));
	train_leave(c);
	return 0;
}

Test(join_uneven, units_are_clipped_without_the_rank_that_has_joined, .timeout = 60,
     .init = trainfix_begin, .fini = trainfix_end)
{
	for (uint32_t joined = 0; joined < 2; joined++)
		trainfix_run(2, clipping_trainer, &joined);
}

/* Ranks 0 and 1 ask for more before rank 2 has joined: that is no more input of theirs. Then
 * rank 2 goes on, with several collectives under way. */
static int even_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_ticket tickets[4];

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_submit_join_uneven(c, SHARDD_OPTIONS(join_uneven, .require_even = true),
					   &tickets[0], &train_err));
	TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &tickets[1], &train_err));
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_wait(c, tickets[i], -1, NULL, &train_err));
	for (unsigned i = 0; i < 4; i++)
		if (t->rank < 2)
			TRAIN_OK(shardd_submit_join_uneven(
				c, SHARDD_OPTIONS(join_uneven, .require_even = true), &tickets[i],
				&train_err));
		else
			TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &tickets[i],
						       &train_err));
	for (unsigned i = 0; i < (t->rank < 2 ? 1 : 4); i++) {
		TRAIN_FAILS(shardd_wait(c, tickets[i], -1, NULL, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "rank 2"));
	}
	if (t->rank == 2) {
		TRAIN_FAILS(shardd_join_even(c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		for (unsigned i = 1; i < 4; i++)
			TRAIN_OK(shardd_join_even(c, SHARDD_WORLD, &train_err));
	}
	for (unsigned i = 1; t->rank < 2 && i < 4; i++)
		TRAIN_OK(shardd_wait(c, tickets[i], -1, NULL, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 0)
		TRAIN_OK(shardd_submit_join_uneven(
			c, SHARDD_OPTIONS(join_uneven, .require_even = true), &tickets[0],
			&train_err));
	if (t->rank == 0)
		TRAIN_OK(shardd_wait(c, tickets[0], -1, NULL, &train_err));
	else
		TRAIN_OK(shardd_join_even(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(join_uneven, uneven_inputs_end_for_all_and_all_go_on, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, even_trainer, NULL);
}

/* ------------------------------------------------------------- without buckets */

enum { N = 5, BY_ACTIVE = 1, IN_BACKWARD = 2 };

static float input_of(uint32_t rank, unsigned pass)
{
	return 0.3f * (float)(rank + 1) + (float)pass;
}

/* What DDP's profile makes of those who have inputs in @pass. */
static float average(const struct trainer *t, unsigned pass, bool by_active)
{
	float by = 1.0f / (float)(by_active ? t->world - pass : t->world), sum = 0;

	for (uint32_t rank = pass; rank < t->world; rank++)
		sum += input_of(rank, pass) * by;
	return sum;
}

static void submit(shardd_client *c, shardd_unit u, float value, bool reduce)
{
	float x[N];

	for (unsigned i = 0; i < N; i++)
		x[i] = value;
	train_fill_gradient(c, u, DTYPE_FP32, x, N);
	if (reduce)
		TRAIN_OK(shardd_reduce(c, u, &train_err));
	else
		TRAIN_OK(shardd_accumulate(c, u, &train_err));
}

/* Step, and see that the parameters have gone from *@at by @by. */
static void step(shardd_client *c, shardd_unit u, float *at, float by)
{
	float want[N], got[N];

	*at -= by;
	for (unsigned i = 0; i < N; i++)
		want[i] = *at;
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, got, sizeof(got));
	TRAIN_SAME(got, want, sizeof(got));
}

static shardd_unit replica(shardd_client *c, unsigned how)
{
	const uint64_t one = 1;
	const struct shardd_buffer mean = { .name = "mean", .shape = &one, .dims = 1 };
	const struct shardd_unit_spec spec = {
		.strategy = SHARDD_REPLICATE,
		.reduce_profile = SHARDD_PROFILE_DDP,
		.optimizer = { .kind = SHARDD_SGD,
			       .lr = 1,
			       .when = how & IN_BACKWARD ? SHARDD_OPTIM_IN_BACKWARD
							 : SHARDD_OPTIM_AT_STEP },
		.buffers = &mean,
		.n_buffers = 1,
	};

	return train_zero_unit(c, "replica", N, &spec);
}

/* Rank r has r + 1 inputs. A rank without inputs contributes nothing, whatever it has accumulated;
 * the last rank is the root of what is sent then. When all have joined all are as before. */
static int reduce_trainer(const struct trainer *t)
{
	unsigned how = (unsigned)(uintptr_t)t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = replica(c, how);
	float at = 0;
	void *mean;

	TRAIN_OK(shardd_unit_buffers(c, u, &mean, &train_err));
	for (unsigned pass = 0; pass <= t->rank; pass++) {
		train_poke(c, mean, (float)t->rank);
		TRAIN_OK(shardd_broadcast_buffers(c, u, SHARDD_WORLD, 0, &train_err));
		TRAINER_CHECK(train_peek(c, mean) == (pass ? (float)(t->world - 1) : 0));
		submit(c, u, input_of(t->rank, pass), true);
		step(c, u, &at, average(t, pass, how & BY_ACTIVE));
	}
	if (t->rank == 0)
		submit(c, u, 6, false);
	TRAIN_OK(shardd_join_uneven(c, SHARDD_WORLD, how & BY_ACTIVE, NULL, NULL, &train_err));
	for (unsigned pass = 1; pass < t->world; pass++)
		at -= pass > t->rank ? average(t, pass, how & BY_ACTIVE) : 0;
	submit(c, u, 0, true);
	step(c, u, &at, 6 * (1.0f / (float)t->world));
	train_leave(c);
	return 0;
}

Test(join_uneven, reductions_without_buckets, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, reduce_trainer, NULL);
	trainfix_run(3, reduce_trainer, NULL);
}

Test(join_uneven, reductions_by_those_who_have_inputs, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, reduce_trainer, (void *)BY_ACTIVE);
}

Test(join_uneven, reductions_that_step, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, reduce_trainer, (void *)(BY_ACTIVE | IN_BACKWARD));
}

/* Rank 1's reductions of what rank 0 has a part of, or its step, are refused. */
static int parts_trainer(const struct trainer *t)
{
	const struct shardd_unit_spec specs[] = {
		{ .optimizer = { .kind = SHARDD_SGD, .lr = 1 } },
		{ .strategy = SHARDD_REPLICATE,
		  .reduce_profile = SHARDD_PROFILE_DDP,
		  .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER } },
	};
	shardd_client *c = train_join(t);

	for (unsigned i = 0; i < ARRAY_SIZE(specs); i++) {
		shardd_unit u = train_zero_unit(c, i ? "own" : "shards", N, &specs[i]);
		float x[N] = { 0 };

		train_fill_gradient(c, u, DTYPE_FP32, x, N);
		if (t->rank) {
			TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_FAILED_PRECONDITION);
			TRAINER_CHECK(strstr(train_err.text, "no more inputs"));
		}
		TRAIN_OK(shardd_join_uneven(c, SHARDD_WORLD, false, NULL, NULL, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(join_uneven, parts_of_ones_own_are_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, parts_trainer, NULL);
}
