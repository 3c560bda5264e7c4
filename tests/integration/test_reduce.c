/*
 * Reduce: what arrives in the gradient shards, bit for bit against kernels/ref.
 *
 * Gradient shards are not handed out. They are seen through the optimizer: SGD with
 * lr 1 and nothing else on parameters that are 0 leaves p = -grad.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "trainfix.h"

static const struct shardd_optimizer plain_sgd = { .kind = SHARDD_SGD, .lr = 1 };

struct reduce_case {
	size_t n;
	uint32_t multiple; /* of shards; 0: not given */
	enum dtype dtype;  /* of gradients */
	double pre, post;  /* both 0: not given */
	unsigned micro;    /* batches that are added up */
};

/* pre and post for world sizes 1 to 4 when none are given (fairscale's rule). */
static const float default_factors[5][2] = { { 0, 0 }, { 1, 1 }, { 2, 1 }, { 2, 1.5f }, { 2, 2 } };

static uint64_t seed_of(uint32_t rank, unsigned micro, size_t n)
{
	return rank * 1000003ull + micro * 7919ull + n;
}

/* The numbers of one rank: random ones, one that /2 leaves and /4 does not, and one
 * that overflows unless it is divided before it is added. */
static float *numbers(const struct reduce_case *rc, uint32_t rank, unsigned micro)
{
	float *x = train_numbers(rc->n, seed_of(rank, micro, rc->n));

	x[0] = 0x1p-148f;
	if (rc->n > 1 && rc->dtype != DTYPE_FP16)
		x[rc->n - 1] = 0x1.8p126f;
	return x;
}

/* What rank @rank hands in, as it stands in its buffer. */
static void *model_input(const struct reduce_case *rc, uint32_t rank, unsigned micro)
{
	float *values = numbers(rc, rank, micro);
	struct k_cast cast = { .dst = train_alloc(rc->n * dtype_size(rc->dtype)),
			       .src = values,
			       .dst_dtype = rc->dtype,
			       .src_dtype = DTYPE_FP32 };

	kernels_ref()->cast(&cast, 0, rc->n);
	free(values);
	return cast.dst;
}

/* The gradient shards of all ranks, side by side. */
static float *model_gradient(const struct reduce_case *rc, uint32_t world)
{
	bool given = rc->pre != 0;
	const void *in[4];
	struct k_reduce r = { .out = train_alloc(rc->n * sizeof(float)),
			      .in = in,
			      .k = world,
			      .in_dtype = rc->dtype,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32 };

	r.pre = train_divide_by(given ? (float)rc->pre : default_factors[world][0], DTYPE_FP32);
	r.post = train_divide_by(given ? (float)rc->post : default_factors[world][1], DTYPE_FP32);

	for (unsigned m = 0; m < rc->micro; m++) {
		for (uint32_t rank = 0; rank < world; rank++)
			in[rank] = model_input(rc, rank, m);
		r.accumulate = m > 0;
		kernels_ref()->reduce(&r, 0, rc->n);
		for (uint32_t rank = 0; rank < world; rank++)
			free((void *)in[rank]);
	}
	return r.out;
}

/* 0 - gradient, as SGD computes it. */
static float *model_params(const struct reduce_case *rc, uint32_t world)
{
	float *g = model_gradient(rc, world);
	struct k_sgd sgd = { .p = train_alloc(rc->n * sizeof(float)), .g = g, .lr = 1 };

	kernels_ref()->sgd(&sgd, 0, rc->n);
	free(g);
	return sgd.p;
}

static uint64_t expected_shard(const struct reduce_case *rc, uint32_t world)
{
	uint64_t m = rc->multiple ? rc->multiple : 1;
	uint64_t per_rank = (rc->n + world - 1) / world;

	return (per_rank + m - 1) / m * m;
}

static void run_case(shardd_client *c, const struct trainer *t, const struct reduce_case *rc,
		     unsigned number)
{
	const struct shardd_unit_spec like = { .gradient_dtype = (enum shardd_dtype)rc->dtype,
					       .shard_multiple = rc->multiple,
					       .pre_divide = rc->pre,
					       .post_divide = rc->post,
					       .optimizer = plain_sgd };
	float *got = train_alloc(rc->n * sizeof(float)), *want = model_params(rc, t->world);
	struct shardd_unit_info info;
	char name[32];

	snprintf(name, sizeof(name), "unit %u", number);
	info = train_register(c, name, rc->n, &like);
	TRAINER_CHECK(info.shard_elements == expected_shard(rc, t->world));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	for (unsigned m = 0; m < rc->micro; m++) {
		float *values = numbers(rc, t->rank, m);

		train_reduce(c, info.unit, rc->dtype, values, rc->n);
		free(values);
	}
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, info.unit, got, rc->n * sizeof(float));
	TRAIN_SAME(got, want, rc->n * sizeof(float));
	free(got);
	free(want);
}

static int reduce_trainer(const struct trainer *t)
{
	static const size_t sizes[] = { 1, 2, 3, 5, 127, 128, 129, 1000, 65536, 70001 };
	shardd_client *c = train_join(t);
	unsigned number = 0;

	for (unsigned d = DTYPE_FP32; d < _DTYPE_N; d++) {
		for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
			struct reduce_case rc = { sizes[i], 0, (enum dtype)d, 0, 0, 1 };

			run_case(c, t, &rc, number++);
			rc.multiple = 128;
			run_case(c, t, &rc, number++);
		}
	}
	train_leave(c);
	return 0;
}

Test(reduce, one_rank, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(1, reduce_trainer, NULL);
}

Test(reduce, two_ranks, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, reduce_trainer, NULL);
}

Test(reduce, three_ranks, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(3, reduce_trainer, NULL);
}

Test(reduce, four_ranks, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(4, reduce_trainer, NULL);
}

static int factors_trainer(const struct trainer *t)
{
	static const double factors[][2] = {
		{ 1, 1 }, { 4, 1.25 }, { 3, 1.7 }, { 1, 3 }, { 8, 1 }
	};
	shardd_client *c = train_join(t);
	unsigned number = 0;

	for (unsigned d = DTYPE_FP32; d < _DTYPE_N; d++) {
		for (size_t i = 0; i < ARRAY_SIZE(factors); i++) {
			const struct reduce_case rc = { 777,           0,
							(enum dtype)d, factors[i][0],
							factors[i][1], 1 };

			run_case(c, t, &rc, number++);
		}
	}
	train_leave(c);
	return 0;
}

Test(reduce, divides_by_factors_that_were_set, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, factors_trainer, NULL);
}

static int micro_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	unsigned number = 0;

	for (unsigned d = DTYPE_FP32; d < _DTYPE_N; d++) {
		for (unsigned micro = 2; micro <= 4; micro++) {
			const struct reduce_case rc = { 5000, 0, (enum dtype)d, 0, 0, micro };

			run_case(c, t, &rc, number++);
		}
	}
	train_leave(c);
	return 0;
}

Test(reduce, adds_up_micro_batches, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(3, micro_trainer, NULL);
}

/* A step empties the gradients: what follows starts from nothing, and a step without
 * a gradient changes nothing. */
static int empties_trainer(const struct trainer *t)
{
	enum { N = 300 };
	const struct shardd_unit_spec like = { .optimizer = plain_sgd };
	const struct reduce_case rc = { N, 0, DTYPE_FP32, 0, 0, 1 };
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, &like);
	float *values = numbers(&rc, t->rank, 0), *g = model_gradient(&rc, t->world);
	float got[N], want[N] = { 0 };
	struct k_sgd sgd = { .p = want, .g = g, .lr = 1 };

	for (unsigned step = 0; step < 3; step++) {
		train_reduce(c, u, DTYPE_FP32, values, N);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		kernels_ref()->sgd(&sgd, 0, N);
		train_params(c, u, got, sizeof(got));
		TRAIN_SAME(got, want, sizeof(got));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		train_params(c, u, got, sizeof(got));
		TRAIN_SAME(got, want, sizeof(got));
	}
	free(values);
	free(g);
	train_leave(c);
	return 0;
}

Test(reduce, step_empties_the_gradients, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, empties_trainer, NULL);
}

/* ----------------------------------------------------------------- a subgroup */

enum { SUB_N = 1001 };

static const uint32_t sub_ranks[] = { 3, 0, 2 };

/* No member: everything with that unit and that group is refused. */
static void outsider(shardd_client *c, shardd_unit u, shardd_group g)
{
	const void *data;
	void *buffer;

	TRAIN_FAILS(shardd_init_seed(c, u, 1, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_gather(c, u, &data, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_gradient(c, u, &buffer, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_step(c, g, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
}

static void model_subgroup(const struct reduce_case *rc, float *want)
{
	float g[SUB_N];
	const void *in[3];
	struct k_reduce r = { .out = g,
			      .in = in,
			      .k = 3,
			      .in_dtype = rc->dtype,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = train_divide_by(2, DTYPE_FP32),
			      .post = train_divide_by(1.5f, DTYPE_FP32) };
	struct k_sgd sgd = { .p = want, .g = g, .lr = 1 };

	for (unsigned i = 0; i < 3; i++)
		in[i] = model_input(rc, sub_ranks[i], 0);
	kernels_ref()->reduce(&r, 0, SUB_N);
	kernels_ref()->sgd(&sgd, 0, SUB_N);
	for (unsigned i = 0; i < 3; i++)
		free((void *)in[i]);
}

/* Its ranks alone reduce, in the group's order, and divide by its size. */
static int subgroup_trainer(const struct trainer *t)
{
	struct reduce_case rc = { SUB_N, 0, DTYPE_BF16, 0, 0, 1 };
	struct shardd_unit_spec like = { .gradient_dtype = SHARDD_BF16, .optimizer = plain_sgd };
	shardd_client *c = train_join(t);
	float got[SUB_N], want[SUB_N] = { 0 }, *values;
	shardd_unit u;

	TRAIN_OK(shardd_group_create(c, "some", sub_ranks, 3, &like.group, &train_err));
	u = train_register(c, "unit", SUB_N, &like).unit;
	if (t->rank == 1) {
		outsider(c, u, like.group);
	} else {
		TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
		values = numbers(&rc, t->rank, 0);
		train_reduce(c, u, DTYPE_BF16, values, SUB_N);
		free(values);
		TRAIN_OK(shardd_step(c, like.group, NULL, &train_err));
		model_subgroup(&rc, want);
		train_params(c, u, got, sizeof(got));
		TRAIN_SAME(got, want, sizeof(got));
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(reduce, in_the_order_of_a_subgroup, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(4, subgroup_trainer, NULL);
}

static void zeros(shardd_client *c, shardd_unit u, size_t n)
{
	float *data;

	TRAIN_OK(shardd_gradient(c, u, (void **)&data, &train_err));
	train_set(c, data, 0, n * sizeof(*data));
}

/* Weight decay alone would move what has a gradient of 0. */
static int unused_trainer(const struct trainer *t)
{
	static const struct shardd_optimizer decaying = { .kind = SHARDD_SGD,
							  .lr = 1,
							  .weight_decay = 0.5 };
	struct shardd_unit_spec like = { .optimizer = decaying };
	shardd_client *c = train_join(t);
	shardd_unit u = train_register(c, "unit", 8, &like).unit;
	float got[8], one[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
	shardd_ticket ticket;
	bool by_all = false;

	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	train_reduce(c, u, DTYPE_FP32, one, 8); /* p = -1/W of W: -1 */
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));

	zeros(c, u, 8);
	TRAIN_OK(shardd_reduce_unused(c, u, &by_all, &train_err));
	TRAINER_CHECK(by_all);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, got, sizeof(got));
	TRAINER_CHECK(got[0] == -1 && got[7] == -1);

	if (t->rank == 0) { /* one uses it: the zeros of the others count */
		train_reduce(c, u, DTYPE_FP32, one, 8);
	} else {
		zeros(c, u, 8);
		TRAIN_OK(shardd_reduce_unused(c, u, &by_all, &train_err));
		TRAINER_CHECK(!by_all);
	}
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, got, sizeof(got));
	TRAINER_CHECK(got[0] == -0.5f - 1.0f / (float)t->world);

	zeros(c, u, 8); /* what was accumulated before is used */
	TRAIN_OK(shardd_accumulate(c, u, &train_err));
	zeros(c, u, 8);
	TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u, .unit_unused = true),
				      &ticket, &train_err));
	TRAIN_OK(shardd_wait(c, ticket, -1, NULL, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, got, sizeof(got));
	TRAINER_CHECK(got[0] == (-0.5f - 1.0f / (float)t->world) / 2);
	train_leave(c);
	return 0;
}

Test(reduce, what_no_rank_has_used_is_left_alone, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, unused_trainer, NULL);
}
