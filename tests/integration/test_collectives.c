/* AllReduce, Broadcast, Barrier, and the ways to initialise a unit. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

enum { N = 4099 };

/* A group and the ranks of it in its order. */
struct members {
	shardd_group group;
	uint32_t ranks[4];
	uint32_t n;
};

static struct members world_of(const struct trainer *t)
{
	struct members m = { .group = SHARDD_WORLD, .n = t->world };

	for (uint32_t i = 0; i < t->world; i++)
		m.ranks[i] = i;
	return m;
}

static bool is_member(const struct members *m, uint32_t rank)
{
	for (uint32_t i = 0; i < m->n; i++)
		if (m->ranks[i] == rank)
			return true;
	return false;
}

/* Rank @rank's numbers, narrowed to @dtype. All have the same at 0, and zeros of both
 * signs at 1, where it shows which of equal inputs MAX and MIN take. */
static void *contribution(uint32_t rank, enum dtype dtype, size_t n)
{
	float *x = train_numbers(n, rank * 31u + dtype);
	struct k_cast cast = { .dst = train_alloc(n * dtype_size(dtype)),
			       .src = x,
			       .dst_dtype = dtype,
			       .src_dtype = DTYPE_FP32 };

	x[0] = 0.5f;
	if (n > 1)
		x[1] = rank % 2 ? 0.0f : -0.0f;
	kernels_ref()->cast(&cast, 0, n);
	free(x);
	return cast.dst;
}

static void *model_all_reduce(const struct members *m, enum dtype dtype, enum reduce_op op,
			      size_t n)
{
	const void *in[4];
	struct k_all_reduce a = { .out = train_alloc(n * dtype_size(dtype)),
				  .in = in,
				  .k = m->n,
				  .dtype = dtype,
				  .op = op };

	for (uint32_t i = 0; i < m->n; i++)
		in[i] = contribution(m->ranks[i], dtype, n);
	kernels_ref()->all_reduce(&a, 0, n);
	for (uint32_t i = 0; i < m->n; i++)
		free((void *)in[i]);
	return a.out;
}

/* One all-reduce in the middle of a buffer, whose other bytes must stay. */
static void check_all_reduce(shardd_client *c, const struct trainer *t, const struct members *m,
			     enum dtype dtype, enum reduce_op op, size_t n)
{
	size_t size = dtype_size(dtype), bytes = n * size, offset = 24, all = bytes + 60;
	uint8_t *want = model_all_reduce(m, dtype, op, n), *mine = contribution(t->rank, dtype, n);
	uint64_t buffer;
	uint8_t *data;
	void *mapped;

	TRAIN_OK(shardd_alloc(c, all, &buffer, &mapped, &train_err));
	train_set(c, mapped, 0x5a, all);
	train_write(c, (uint8_t *)mapped + offset, mine, bytes);
	TRAIN_OK(shardd_all_reduce(c, m->group, buffer, offset, n, (enum shardd_dtype)dtype,
				   (enum shardd_reduce_op)op, &train_err));
	data = train_copy(c, mapped, all);
	TRAIN_SAME(data + offset, want, bytes);
	for (size_t i = 0; i < all; i++)
		if (i < offset || i >= offset + bytes)
			TRAINER_CHECK(data[i] == 0x5a);
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	free(data);
	free(want);
	free(mine);
}

static int all_reduce_trainer(const struct trainer *t)
{
	static const size_t sizes[] = { 1, 2, 63, N };
	shardd_client *c = train_join(t);
	struct members world = world_of(t);
	struct members some = { .ranks = { 2, 0 }, .n = 2 };

	TRAIN_OK(shardd_group_create(c, "some", some.ranks, some.n, &some.group, &train_err));
	for (unsigned d = DTYPE_FP32; d < _DTYPE_N; d++) {
		for (unsigned op = REDUCE_SUM; op < _REDUCE_N; op++) {
			for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
				check_all_reduce(c, t, &world, (enum dtype)d, (enum reduce_op)op,
						 sizes[i]);
				if (is_member(&some, t->rank))
					check_all_reduce(c, t, &some, (enum dtype)d,
							 (enum reduce_op)op, sizes[i]);
			}
		}
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(collectives, all_reduce_three_ranks, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, all_reduce_trainer, NULL);
}

Test(collectives, all_reduce_four_ranks, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(4, all_reduce_trainer, NULL);
}

/* The order of a group, not that of the ranks, is that of the additions: with these
 * numbers it shows in the last bits. */
static int order_trainer(const struct trainer *t)
{
	static const float x[3] = { 1.0f, 0x1p24f, -0x1p24f };
	static const uint32_t orders[2][3] = { { 0, 1, 2 }, { 1, 2, 0 } };
	static const float want[2] = { 0.0f, 1.0f };
	shardd_client *c = train_join(t);

	for (unsigned i = 0; i < 2; i++) {
		shardd_group g;
		uint64_t buffer;
		void *data;

		TRAIN_OK(shardd_group_create(c, i ? "turned" : "straight", orders[i], 3, &g,
					     &train_err));
		TRAIN_OK(shardd_alloc(c, sizeof(float), &buffer, &data, &train_err));
		train_poke(c, data, x[t->rank]);
		TRAIN_OK(
			shardd_all_reduce(c, g, buffer, 0, 1, SHARDD_FP32, SHARDD_SUM, &train_err));
		TRAINER_CHECK(train_peek(c, data) == want[i]);
	}
	train_leave(c);
	return 0;
}

Test(collectives, fold_in_the_order_of_the_group, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, order_trainer, NULL);
}

static int broadcast_trainer(const struct trainer *t)
{
	enum { BYTES = 100003 };
	static const uint32_t some[] = { 3, 1 };
	shardd_client *c = train_join(t);
	shardd_group g;
	uint64_t buffer;
	uint8_t *data;
	void *mapped;

	TRAIN_OK(shardd_group_create(c, "some", some, 2, &g, &train_err));
	TRAIN_OK(shardd_alloc(c, BYTES, &buffer, &mapped, &train_err));
	for (uint32_t root = 0; root < t->world; root++) {
		train_set(c, mapped, (uint8_t)(t->rank + 1), BYTES);
		TRAIN_OK(
			shardd_broadcast(c, SHARDD_WORLD, buffer, 7, BYTES - 14, root, &train_err));
		data = train_copy(c, mapped, BYTES);
		for (size_t i = 0; i < BYTES; i++)
			TRAINER_CHECK(data[i] == (i < 7 || i >= BYTES - 7 ? t->rank : root) + 1);
		free(data);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	if (t->rank % 2) { /* @root is a rank of the job, not a place in the group */
		train_set(c, mapped, (uint8_t)(t->rank + 1), BYTES);
		TRAIN_OK(shardd_broadcast(c, g, buffer, 0, BYTES, 3, &train_err));
		data = train_copy(c, mapped, BYTES);
		TRAINER_CHECK(data[0] == 4 && data[BYTES - 1] == 4);
		free(data);
	} else {
		TRAIN_FAILS(shardd_broadcast(c, g, buffer, 0, BYTES, 3, &train_err),
			    SHARDD_INVALID_ARGUMENT);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(collectives, broadcast_from_every_rank, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(4, broadcast_trainer, NULL);
}

/* Nobody is past barrier k before all have come to it. */
static int barrier_trainer(const struct trainer *t)
{
	unsigned *arrived = t->arg;
	shardd_client *c = train_join(t);

	for (unsigned k = 0; k < 200; k++) {
		__atomic_fetch_add(&arrived[k], 1, __ATOMIC_SEQ_CST);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAINER_CHECK(__atomic_load_n(&arrived[k], __ATOMIC_SEQ_CST) == t->world);
	}
	train_leave(c);
	return 0;
}

Test(collectives, barrier_waits_for_all, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(4, barrier_trainer, trainer_shared(200 * sizeof(unsigned)));
}

/* ----------------------------------------------------------------- initialise */

enum { T0 = 100, T1 = 7 * 11, T2 = 1, T3 = 3000, ALL = T0 + T1 + T2 + T3 };

static shardd_unit register_four(shardd_client *c, const char *name)
{
	static const uint64_t flat[] = { T0 }, two[] = { 7, 11 }, three[] = { T3 };
	const struct shardd_tensor tensors[] = {
		{ .name = "constant",
		  .shape = flat,
		  .dims = 1,
		  .init = SHARDD_INIT_CONSTANT,
		  .a = -1.25 },
		{ .name = "uniform",
		  .shape = two,
		  .dims = 2,
		  .init = SHARDD_INIT_UNIFORM,
		  .a = -3,
		  .b = 5 },
		{ .name = "scalar" }, /* no dimension, no initialiser: one 0 */
		{ .name = "normal",
		  .shape = three,
		  .dims = 1,
		  .init = SHARDD_INIT_NORMAL,
		  .a = 2,
		  .b = 0.5 },
	};
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = name,
					       .tensors = tensors,
					       .n_tensors = ARRAY_SIZE(tensors) };
	struct shardd_unit_info info;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAINER_CHECK(info.elements == ALL);
	return info.unit;
}

static void check_ranges(const float *x)
{
	double sum = 0, square = 0;

	for (unsigned i = 0; i < T0; i++)
		TRAINER_CHECK(x[i] == -1.25f);
	for (unsigned i = T0; i < T0 + T1; i++)
		TRAINER_CHECK(x[i] >= -3 && x[i] <= 5);
	TRAINER_CHECK(x[T0 + T1] == 0);
	for (unsigned i = ALL - T3; i < ALL; i++) {
		sum += x[i];
		square += (double)x[i] * x[i];
	}
	TRAINER_CHECK(fabs(sum / T3 - 2) < 0.05);
	TRAINER_CHECK(fabs(sqrt(square / T3 - 4) - 0.5) < 0.1);
}

/* Values depend on seed, unit, tensor and index, not on the world size: @arg holds
 * what a job of one rank got. */
static int seed_trainer(const struct trainer *t)
{
	float(*seen)[ALL] = t->arg, x[ALL], y[ALL];
	shardd_client *c = train_join(t);
	shardd_unit a = register_four(c, "a"), b = register_four(c, "b");

	TRAIN_OK(shardd_init_seed(c, a, 1, &train_err));
	TRAIN_OK(shardd_init_seed(c, b, 1, &train_err));
	train_params(c, a, x, sizeof(x));
	train_params(c, b, y, sizeof(y));
	check_ranges(x);
	check_ranges(y);
	TRAINER_CHECK(memcmp(x + T0, y + T0, T1 * sizeof(float)) != 0);
	if (t->world == 1) {
		memcpy(seen[0], x, sizeof(x));
		memcpy(seen[1], y, sizeof(y));
	}
	TRAIN_SAME(x, seen[0], sizeof(x));
	TRAIN_SAME(y, seen[1], sizeof(y));
	TRAIN_OK(shardd_init_seed(c, a, 2, &train_err));
	train_params(c, a, y, sizeof(y));
	TRAINER_CHECK(memcmp(x + T0, y + T0, T1 * sizeof(float)) != 0);
	TRAIN_OK(shardd_init_seed(c, a, 1, &train_err));
	train_params(c, a, y, sizeof(y));
	TRAIN_SAME(y, x, sizeof(y));
	train_leave(c);
	return 0;
}

Test(collectives, seed_gives_the_same_for_every_world_size, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	float *seen = trainer_shared(2 * ALL * sizeof(float));

	for (uint32_t world = 1; world <= 4; world++)
		trainfix_run(world, seed_trainer, seen);
}

static int own_trainer(const struct trainer *t)
{
	static const size_t sizes[] = { 1, 2, 5, 128, N };
	shardd_client *c = train_join(t);

	for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
		size_t n = sizes[i], shard = (n + t->world - 1) / t->world;
		char name[] = { (char)('a' + i), 0 };
		shardd_unit u = train_register(c, name, n, NULL).unit;
		float *got = train_alloc(n * sizeof(float)), *want = train_alloc(n * sizeof(float));
		float *mine = train_numbers(n, t->rank);
		uint64_t buffer;
		void *data;

		/* each rank brings all, only its own shard of it counts */
		for (uint32_t r = 0; r < t->world && r * shard < n; r++) {
			float *x = train_numbers(n, r);
			size_t end = (r + 1) * shard < n ? (r + 1) * shard : n;

			memcpy(want + r * shard, x + r * shard, (end - r * shard) * sizeof(float));
			free(x);
		}
		TRAIN_OK(shardd_alloc(c, n * sizeof(float), &buffer, &data, &train_err));
		train_write(c, data, mine, n * sizeof(float));
		TRAIN_OK(shardd_init_own(c, u, buffer, &train_err));
		train_params(c, u, got, n * sizeof(float));
		TRAIN_SAME(got, want, n * sizeof(float));

		/* and all of it comes from one rank; the others give no buffer */
		free(want);
		want = train_numbers(n, t->world - 1);
		TRAIN_OK(shardd_init_broadcast(c, u, t->world - 1,
					       t->rank == t->world - 1 ? buffer : 0, &train_err));
		train_params(c, u, got, n * sizeof(float));
		TRAIN_SAME(got, want, n * sizeof(float));
		free(got);
		free(want);
		free(mine);
	}
	train_leave(c);
	return 0;
}

Test(collectives, initialise_from_own_and_from_one_rank, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(1, own_trainer, NULL);
	trainfix_run(3, own_trainer, NULL);
}
