/*
 * Sparse gradients: rows of an embedding, by ReduceSparse and in a ddp, held against a scalar
 * evaluation. They are seen through the optimizer: SGD with lr 1 and nothing else on
 * parameters that are 0 leaves p = -gradient.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

enum { ROWS = 40, WIDTH = 6, ENTRIES = 25 };

/* How a unit is reduced. */
struct how {
	enum shardd_reduce_profile profile;
	enum shardd_strategy strategy;
	enum shardd_dtype reduce; /* 0: as the gradients */
	double divide_factor;
	bool force_sum;
	uint32_t shard_ranks;
	bool guarded;
	enum shardd_dtype gradient; /* 0: fp32 */
};

static const struct how plain = { .profile = SHARDD_PROFILE_DDP_BUCKET_VIEW,
				  .strategy = SHARDD_REPLICATE };

static shardd_unit embedding(shardd_client *c, const char *name, const struct how *how,
			     uint64_t *ret_elements)
{
	const uint64_t shape[] = { ROWS, WIDTH }, other[] = { 9 };
	const struct shardd_tensor tensors[] = {
		{ .name = "other", .shape = other, .dims = 1 },
		{ .name = "table", .shape = shape, .dims = 2 },
		{ .name = "frozen", .shape = other, .dims = 1, .frozen = true },
	};
	const struct shardd_unit_spec spec = {
		.size = sizeof(spec),
		.name = name,
		.tensors = tensors,
		.n_tensors = ARRAY_SIZE(tensors),
		.strategy = how->strategy,
		.shard_ranks = how->shard_ranks,
		.reduce_profile = how->profile,
		.gradient_dtype = how->gradient,
		.reduce_dtype = how->reduce,
		.divide_factor = how->divide_factor,
		.force_sum = how->force_sum,
		.guarded = how->guarded,
		.optimizer = { .kind = SHARDD_SGD, .lr = 1 },
	};
	struct shardd_unit_info info;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	*ret_elements = info.elements;
	return info.unit;
}

static bool one_device(void)
{
	const char *n = getenv("SHARDD_SIM_DEVICES");

	return !n || atoi(n) < 2;
}

/* tensor.div_(@by) of the device. */
static float divided(float x, uint32_t by)
{
	return train_on_host() ? x / (float)by : x * (float)(1.0 / by);
}

/* Rank r has 25 - 10 * r entries, some of them the same row. Several devices do not add in
 * rank order: then no sum of these is rounded, nor divided by @world. */
static size_t entries_of(uint32_t world, uint32_t rank, unsigned pass, int64_t *rows, float *values)
{
	size_t n = rank > 2 ? 0 : ENTRIES - 10 * rank;

	for (size_t i = 0; i < n; i++)
		rows[i] = (int64_t)((i * 7 + rank * 3 + pass) % (ROWS / 2)) * 2;
	train_fill(values, n * WIDTH, rank * 17 + pass + 1);
	for (size_t i = 0; i < n * WIDTH && !one_device(); i++)
		values[i] = (float)world * ((float)((i * 5 + rank * 3 + pass) % 17) - 8);
	return n;
}

/* What a rank gives to each row is added up first. */
static void add_entries(const int64_t *rows, const float *values, size_t n, uint32_t by,
			float *table)
{
	float own[ROWS * WIDTH] = { 0 };

	for (size_t i = 0; i < n; i++)
		for (unsigned k = 0; k < WIDTH; k++)
			own[rows[i] * WIDTH + k] += divided(values[i * WIDTH + k], by);
	for (size_t i = 0; i < ROWS * WIDTH; i++)
		table[i] += own[i];
}

/* The scalar evaluation, added to @table. */
static void model_rows(uint32_t world, unsigned pass, float *table)
{
	int64_t rows[ENTRIES];
	float values[ENTRIES * WIDTH];

	for (uint32_t rank = 0; rank < world; rank++) {
		size_t n = entries_of(world, rank, pass, rows, values);

		add_entries(rows, values, n, world, table);
	}
}

static void check_table(shardd_client *c, shardd_unit u, uint64_t elements, const float *want)
{
	float params[9 + ROWS * WIDTH + 9];

	TRAINER_CHECK(elements >= 9 + ROWS * WIDTH);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, params, (9 + ROWS * WIDTH) * sizeof(float));
	for (size_t i = 0; i < ROWS * WIDTH; i++)
		TRAINER_CHECK(params[9 + i] == 0.0f - want[i]);
	for (size_t i = 0; i < 9; i++)
		TRAINER_CHECK(params[i] == 0);
}

/* @arg: a struct how; NULL: @plain. */
static int sparse_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t elements, buffer;
	shardd_unit u = embedding(c, "table", t->arg ? t->arg : &plain, &elements);
	float values[ENTRIES * WIDTH], want[ROWS * WIDTH] = { 0 };
	int64_t rows[ENTRIES];
	const int64_t wrong[] = { 0, ROWS }, negative = -1;
	void *at;

	TRAIN_OK(shardd_alloc(c, sizeof(values) + 8, &buffer, &at, &train_err));
	for (unsigned pass = 0; pass < 2; pass++) {
		size_t n = entries_of(t->world, t->rank, pass, rows, values);

		train_write(c, (char *)at + 8, values, sizeof(values));
		TRAIN_OK(shardd_reduce_sparse(c, u, 1, rows, n, buffer, 8, &train_err));
		model_rows(t->world, pass, want);
	}
	/* nothing of these is added */
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 1, wrong, 2, buffer, 8, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "row 1 is 40") && strstr(train_err.text, "(0..39)"));
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 1, &negative, 1, buffer, 8, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 2, rows, 1, buffer, 8, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 3, rows, 1, buffer, 8, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	rows[0] = 0;
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 1, rows, 1, buffer, 6, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 1, rows, 1, buffer, sizeof(values), &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 1, rows, 1, buffer + 1, 0, &train_err),
		    SHARDD_NOT_FOUND);
	check_table(c, u, elements, want);
	train_leave(c);
	return 0;
}

Test(sparse, rows_are_added_in_rank_order, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, sparse_trainer, NULL);
}

/* PyTorch's Reducer multiplies buckets of dense gradients by 1/W, and divides sparse ones: with
 * 3 ranks that is another number. */
Test(sparse, rows_of_ddp_are_divided, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	static const struct how ddp = { .profile = SHARDD_PROFILE_DDP,
					.strategy = SHARDD_REPLICATE };

	trainfix_run(3, sparse_trainer, (void *)&ddp);
}

/* ------------------------------------------------------------------ other profiles */

/* Sums of these are exact, and so are their halves and quarters. */
static void exact_entries(uint32_t rank, int64_t *rows, float *values)
{
	for (size_t i = 0; i < ENTRIES; i++)
		rows[i] = (int64_t)((i * 7 + rank * 3) % ROWS);
	for (size_t i = 0; i < ENTRIES * WIDTH; i++)
		values[i] = 4 * ((float)((i * 5 + rank * 3) % 17) - 8);
}

static void add_exact(uint32_t world, double by, float *table)
{
	int64_t rows[ENTRIES];
	float values[ENTRIES * WIDTH];

	for (uint32_t rank = 0; rank < world; rank++) {
		exact_entries(rank, rows, values);
		for (size_t i = 0; i < ENTRIES; i++)
			for (unsigned k = 0; k < WIDTH; k++)
				table[rows[i] * WIDTH + k] += divided(values[i * WIDTH + k], by);
	}
}

static const struct how profiles[] = {
	{ SHARDD_PROFILE_FAIRSCALE, SHARDD_REPLICATE, 0, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FAIRSCALE, SHARDD_SHARD, 0, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_XLA, SHARDD_SHARD, 0, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FSDP1_HOOK, SHARDD_SHARD, 0, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_REPLICATE, 0, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, 0, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, 0, 2, false, 0, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, 0, 2, true, 0, false, 0 },
	{ SHARDD_PROFILE_DDP, SHARDD_REPLICATE, 0, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_DDP_HOOK, SHARDD_REPLICATE, SHARDD_BF16, 0, false, 0, false, 0 },
};

static int profiles_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	float values[ENTRIES * WIDTH];
	int64_t rows[ENTRIES];
	uint64_t buffer;
	void *at;

	TRAIN_OK(shardd_alloc(c, sizeof(values), &buffer, &at, &train_err));
	exact_entries(t->rank, rows, values);
	train_write(c, at, values, sizeof(values));
	for (unsigned k = 0; k < ARRAY_SIZE(profiles); k++) {
		const double factor = profiles[k].divide_factor;
		const char name[] = { (char)('a' + k), '\0' };
		float want[ROWS * WIDTH] = { 0 };
		uint64_t elements;
		shardd_unit u = embedding(c, name, &profiles[k], &elements);

		for (unsigned pass = 0; pass < 2; pass++) {
			TRAIN_OK(shardd_reduce_sparse(c, u, 1, rows, ENTRIES, buffer, 0,
						      &train_err));
			add_exact(t->world, factor != 0 ? factor : t->world, want);
		}
		check_table(c, u, elements, want);
	}
	train_leave(c);
	return 0;
}

Test(sparse, rows_are_divided_as_the_profile_divides, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(4, profiles_trainer, NULL);
}

/* Where sums are rounded or replicas have their own. */
static const struct how folded[] = {
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, SHARDD_BF16, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, SHARDD_FP16, 0, false, 0, false, SHARDD_BF16 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, SHARDD_BF16, 5, true, 0, false, SHARDD_BF16 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_REPLICATE, SHARDD_BF16, 3, false, 0, false, 0 },
	{ SHARDD_PROFILE_FAIRSCALE, SHARDD_REPLICATE, SHARDD_FP16, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FAIRSCALE, SHARDD_SHARD, SHARDD_BF16, 0, false, 0, false, SHARDD_FP16 },
	{ SHARDD_PROFILE_XLA, SHARDD_SHARD, SHARDD_FP16, 0, false, 0, false, SHARDD_BF16 },
	{ SHARDD_PROFILE_FSDP1_HOOK, SHARDD_SHARD, SHARDD_BF16, 0, false, 0, false, 0 },
	{ SHARDD_PROFILE_FAIRSCALE, SHARDD_HYBRID, 0, 0, false, 2, false, 0 },
	{ SHARDD_PROFILE_XLA, SHARDD_HYBRID, 0, 0, false, 1, false, SHARDD_FP16 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_HYBRID, 0, 0, false, 2, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_HYBRID, 0, 0, false, 3, false, SHARDD_BF16 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_HYBRID, SHARDD_BF16, 5, false, 2, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_HYBRID, SHARDD_FP16, 0, false, 3, false, 0 },
	{ SHARDD_PROFILE_FSDP2, SHARDD_HYBRID, 0, 0, true, 6, false, 0 },
};

static size_t narrow(void *to, const float *from, size_t n, enum shardd_dtype dtype)
{
	enum dtype t = dtype ? (enum dtype)dtype : DTYPE_FP32;
	struct k_cast cast = { to, from, t, DTYPE_FP32, false };

	kernels_ref()->cast(&cast, 0, n);
	return n * dtype_size(t);
}

/* A rank's rows, each once, and @whole: the gradient of the whole unit that has the same
 * numbers. The last rank has none. */
static size_t folded_entries(const struct trainer *t, unsigned pass, int64_t *rows, float *values,
			     float *whole)
{
	size_t n = t->rank + 1 == t->world ? 0 : ENTRIES - t->rank;

	memset(whole, 0, (9 + ROWS * WIDTH) * sizeof(*whole));
	train_fill(values, ENTRIES * WIDTH, t->rank * 17 + pass + 1);
	for (size_t i = 0; i < n; i++) {
		rows[i] = (int64_t)((i * 7 + t->rank * 3 + pass) % ROWS);
		memcpy(&whole[9 + rows[i] * WIDTH], &values[i * WIDTH], WIDTH * sizeof(*values));
	}
	return n;
}

static void reduce_both(const struct trainer *t, shardd_client *c, const struct how *how,
			const shardd_unit u[2], uint64_t buffer, void *at)
{
	enum dtype dtype = how->gradient ? (enum dtype)how->gradient : DTYPE_FP32;
	float values[ENTRIES * WIDTH], narrowed[ENTRIES * WIDTH], whole[9 + ROWS * WIDTH];
	int64_t rows[ENTRIES];

	for (unsigned pass = 0; pass < 2; pass++) {
		size_t n = folded_entries(t, pass, rows, values, whole);
		size_t bytes = narrow(narrowed, values, n * WIDTH, how->gradient);

		train_write(c, at, narrowed, bytes);
		TRAIN_OK(shardd_reduce_sparse(c, u[0], 1, rows, n, buffer, 0, &train_err));
		train_reduce(c, u[1], dtype, whole, ARRAY_SIZE(whole));
	}
}

static int folded_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	float params[2][9 + ROWS * WIDTH];
	uint64_t buffer, elements;
	shardd_unit u[2];
	void *at;

	TRAIN_OK(shardd_alloc(c, ENTRIES * WIDTH * sizeof(float), &buffer, &at, &train_err));
	for (unsigned k = 0; k < ARRAY_SIZE(folded); k++) {
		if (folded[k].shard_ranks && t->world % folded[k].shard_ranks)
			continue;
		for (unsigned i = 0; i < 2; i++) {
			const char name[] = { (char)('a' + k), (char)('0' + i), '\0' };

			u[i] = embedding(c, name, &folded[k], &elements);
		}
		reduce_both(t, c, &folded[k], u, buffer, at);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		for (unsigned i = 0; i < 2; i++)
			train_params(c, u[i], params[i], sizeof(params[i]));
		for (size_t i = 0; i < ARRAY_SIZE(params[0]); i++)
			if (params[0][i] != params[1][i]) {
				fprintf(stderr, "case %u, element %zu: %a, not %a\n", k, i,
					(double)params[0][i], (double)params[1][i]);
				TRAINER_CHECK(!"differs");
			}
		TRAINER_CHECK(params[0][9] != 0);
	}
	train_leave(c);
	return 0;
}

Test(sparse, rows_are_reduced_as_the_whole_gradient_is, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(4, folded_trainer, NULL);
	trainfix_run(6, folded_trainer, NULL);
}

/* A row that a rank has twice is added up in fp32, before anything is rounded: 1 and 2^-8 are
 * one number of bf16 each, their sum is none; 2^-8 once more and it is. */
static int twice_trainer(const struct trainer *t)
{
	static const struct how how = { .profile = SHARDD_PROFILE_FSDP2,
					.strategy = SHARDD_SHARD,
					.reduce = SHARDD_BF16,
					.divide_factor = 1,
					.force_sum = true };
	static const int64_t rows[] = { 3, 3, 3 };
	static const float of_row[] = { 1, 0x1p-8f, 0x1p-8f };
	shardd_client *c = train_join(t);
	float values[3 * WIDTH], want[ROWS * WIDTH] = { 0 };
	uint64_t buffer, elements;
	shardd_unit u = embedding(c, "table", &how, &elements);
	void *at;

	for (unsigned i = 0; i < 3 * WIDTH; i++)
		values[i] = of_row[i / WIDTH];
	for (unsigned k = 0; k < WIDTH; k++)
		want[3 * WIDTH + k] = 1 + 0x1p-7f;
	TRAIN_OK(shardd_alloc(c, sizeof(values), &buffer, &at, &train_err));
	train_write(c, at, values, sizeof(values));
	TRAIN_OK(shardd_reduce_sparse(c, u, 1, rows, t->rank ? 0 : 3, buffer, 0, &train_err));
	check_table(c, u, elements, want);
	train_leave(c);
	return 0;
}

Test(sparse, a_row_twice_is_added_before_it_is_rounded, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, twice_trainer, NULL);
}

/* A guarded unit takes rows in backward, and keeps its parameters until that ends: its other
 * tensors may still need them. */
static int guarded_trainer(const struct trainer *t)
{
	static const struct how how = { .profile = SHARDD_PROFILE_FAIRSCALE,
					.strategy = SHARDD_SHARD,
					.guarded = true };
	shardd_client *c = train_join(t);
	const int64_t row = 0;
	const float values[WIDTH] = { 4, 4, 4, 4, 4, 4 };
	uint64_t buffer, elements;
	const void *data;
	shardd_unit u = embedding(c, "table", &how, &elements);
	float want[ROWS * WIDTH] = { 0 };
	void *at;

	TRAIN_OK(shardd_alloc(c, sizeof(values), &buffer, &at, &train_err));
	train_write(c, at, values, sizeof(values));
	TRAIN_FAILS(shardd_reduce_sparse(c, u, 1, &row, 1, buffer, 0, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "'table'") &&
		      strstr(train_err.text, "it must be BACKWARD_PRE or BACKWARD_POST"));
	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_BACKWARD, &data, &train_err));
	TRAIN_FAILS(shardd_end_pass(c, u, SHARDD_BACKWARD, true, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_reduce_sparse(c, u, 1, &row, 1, buffer, 0, &train_err));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_BACKWARD, true, &train_err));
	for (unsigned k = 0; k < WIDTH; k++)
		want[k] = 8;
	check_table(c, u, elements, want);
	train_leave(c);
	return 0;
}

Test(sparse, guarded_units_take_rows_in_backward, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, guarded_trainer, NULL);
}

/* --------------------------------------------------------------------- in a ddp */

/* A sparse tensor in a ddp: alone in its bucket, in the order of buckets. */
static int sparse_ddp_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t elements, buffer;
	shardd_unit u = embedding(c, "table", &plain, &elements);
	const struct shardd_ddp_tensor sparse = { u, 1 };
	const struct shardd_ddp_create_options spec = {
		.size = sizeof(spec), .units = &u, .n_units = 1, .sparse = &sparse, .n_sparse = 1
	};
	struct shardd_ddp_view views[2];
	float values[ENTRIES * WIDTH], zeros[9] = { 0 };
	int64_t rows[ENTRIES];
	const uint32_t first = 0, second = 1;
	shardd_ddp d;
	void *at;

	TRAIN_OK(shardd_ddp_create(c, &spec, &d, NULL, &train_err));
	TRAIN_OK(shardd_alloc(c, sizeof(values), &buffer, &at, &train_err));
	for (unsigned pass = 0; pass < 3; pass++) {
		float want[ROWS * WIDTH] = { 0 };
		size_t n = entries_of(t->world, t->rank, pass, rows, values);

		train_write(c, at, values, sizeof(values));
		TRAIN_OK(shardd_ddp_forward(c, d, views, 2, &train_err));
		TRAINER_CHECK(views[0].data && !views[1].data &&
			      views[0].bucket != views[1].bucket);
		TRAIN_OK(shardd_ddp_backward(c, d, NULL, 0, NULL, 0, &train_err));
		TRAIN_FAILS(shardd_ddp_ready(c, d, &second, 1, &train_err),
			    SHARDD_INVALID_ARGUMENT);
		TRAIN_FAILS(shardd_ddp_ready_rows(c, d, 0, rows, n, buffer, 0, &train_err),
			    SHARDD_INVALID_ARGUMENT);
		train_write(c, views[0].data, zeros, sizeof(zeros));
		TRAIN_OK(shardd_ddp_ready(c, d, &first, 1, &train_err));
		TRAIN_OK(shardd_ddp_ready_rows(c, d, 1, rows, n, buffer, 0, &train_err));
		TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
		model_rows(t->world, pass, want);
		if (pass == 0)
			check_table(c, u, elements, want);
		else
			TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(sparse, gradients_have_buckets_of_their_own, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, sparse_ddp_trainer, NULL);
}

/* What a rank accumulates begins with the reduced gradient, where that is reduced again: rows that
 * came between would be lost with the next Reduce. */
static int between_trainer(const struct trainer *t)
{
	static const enum shardd_reduce_profile both[] = { SHARDD_PROFILE_DDP,
							   SHARDD_PROFILE_FSDP1_HOOK };
	const float ones[4] = { 1, 1, 1, 1 };
	shardd_client *c = train_join(t);
	uint64_t buffer;
	int64_t row = 2;
	void *at;

	TRAIN_OK(shardd_alloc(c, sizeof(float), &buffer, &at, &train_err));
	train_write(c, at, ones, sizeof(float));
	for (size_t i = 0; i < ARRAY_SIZE(both); i++) {
		const struct shardd_unit_spec like = { .strategy = SHARDD_REPLICATE,
						       .reduce_profile = both[i],
						       .optimizer = { SHARDD_SGD, .lr = 1 } };
		const float want[4] = { -2, -2, -3, -2 };
		shardd_unit u = train_zero_unit(c, i ? "fsdp1" : "ddp", 4, &like);
		float got[4];

		train_reduce(c, u, DTYPE_FP32, ones, 4);
		train_fill_gradient(c, u, DTYPE_FP32, ones, 4);
		TRAIN_OK(shardd_accumulate(c, u, &train_err));
		TRAIN_FAILS(shardd_reduce_sparse(c, u, 0, &row, 1, buffer, 0, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "accumulated"));
		TRAIN_OK(shardd_reduce(c, u, &train_err));
		TRAIN_OK(shardd_reduce_sparse(c, u, 0, &row, 1, buffer, 0, &train_err));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		train_params(c, u, got, sizeof(got));
		TRAIN_SAME(got, want, sizeof(want));
	}
	train_leave(c);
	return 0;
}

Test(sparse, rows_are_not_lost_behind_an_accumulation, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, between_trainer, NULL);
}
