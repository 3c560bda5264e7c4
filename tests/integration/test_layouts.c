/*
 * Layouts end to end: what is registered, initialised, gathered, reduced, stepped, summoned and
 * converted is the same numbers tensor by tensor, however a unit is laid out.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(layouts, .init = trainfix_begin, .fini = trainfix_end, .timeout = 240);

#define TENSORS 6

static const uint64_t s_matrix[] = { 7, 3 }, s_bias[] = { 5 }, s_frozen[] = { 6, 2 },
		      s_small[] = { 2 }, s_frozen2[] = { 3 };

/* A matrix whose rows divide by no number of ranks, a bias, two frozen ones, fewer rows than
 * ranks, a scalar. */
static const struct shardd_tensor tensors[TENSORS] = {
	{ .name = "matrix", .shape = s_matrix, .dims = 2, .init = SHARDD_INIT_NORMAL, .b = 1 },
	{ .name = "frozen",
	  .shape = s_frozen,
	  .dims = 2,
	  .init = SHARDD_INIT_UNIFORM,
	  .a = -1,
	  .b = 1,
	  .frozen = true },
	{ .name = "bias", .shape = s_bias, .dims = 1, .init = SHARDD_INIT_UNIFORM, .a = 1, .b = 2 },
	{ .name = "small", .shape = s_small, .dims = 1, .init = SHARDD_INIT_NORMAL, .b = 2 },
	{ .name = "frozen2",
	  .shape = s_frozen2,
	  .dims = 1,
	  .init = SHARDD_INIT_CONSTANT,
	  .a = 3,
	  .frozen = true },
	{ .name = "scalar", .dims = 0, .init = SHARDD_INIT_UNIFORM, .a = 5, .b = 6 },
};
static const uint64_t numel[TENSORS] = { 21, 12, 5, 2, 3, 1 };
#define PACKED 44

struct model {
	struct shardd_unit_info info;
	struct shardd_tensor_place places[TENSORS];
};

struct form {
	enum shardd_layout layout;
	uint32_t multiple;
	enum shardd_strategy strategy;
	enum shardd_dtype compute;
	uint32_t shard_ranks;
};

static const struct form forms[] = {
	{ SHARDD_LAYOUT_FLAT, 1, SHARDD_SHARD, SHARDD_FP32, 0 },
	{ SHARDD_LAYOUT_FLAT, 8, SHARDD_SHARD, SHARDD_FP32, 0 },
	{ SHARDD_LAYOUT_DIM0, 1, SHARDD_SHARD, SHARDD_FP32, 0 },
	{ SHARDD_LAYOUT_FLAT, 1, SHARDD_REPLICATE, SHARDD_FP32, 0 },
	{ SHARDD_LAYOUT_DIM0, 1, SHARDD_SHARD, SHARDD_BF16, 0 },
	{ SHARDD_LAYOUT_FLAT, 1, SHARDD_SHARD, SHARDD_BF16, 0 },
	{ SHARDD_LAYOUT_FLAT, 1, SHARDD_REPLICATE, SHARDD_BF16, 0 },
};
/* For an even number of ranks. */
static const struct form hybrids[] = {
	{ SHARDD_LAYOUT_FLAT, 1, SHARDD_HYBRID, SHARDD_FP32, 2 },
	{ SHARDD_LAYOUT_DIM0, 1, SHARDD_HYBRID, SHARDD_FP32, 2 },
};

static void model_register(shardd_client *c, const char *name, const struct form *f,
			   struct model *m)
{
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = name,
					 .tensors = tensors,
					 .n_tensors = TENSORS,
					 .compute_dtype = f->compute,
					 .gradient_dtype = SHARDD_FP32,
					 .shard_multiple = f->multiple,
					 .pre_divide = 1,
					 .post_divide = 1,
					 .layout = f->layout,
					 .strategy = f->strategy,
					 .shard_ranks = f->shard_ranks };

	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = 0.5 };
	TRAIN_OK(shardd_register(c, &spec, 1, &m->info, &train_err));
	TRAIN_OK(shardd_tensor_places(c, m->info.unit, m->places, TENSORS, &train_err));
	CHECK(m->info.packed_elements == PACKED);
	for (unsigned i = 0; i < TENSORS; i++)
		CHECK(m->places[i].elements == numel[i] && m->places[i].unit == m->info.unit);
}

/* What the unit holds, tensor after tensor; bf16 widened. */
static void read_packed(shardd_client *c, const struct model *m, enum shardd_dtype dtype,
			float *ret)
{
	const void *data = NULL;
	uint8_t *copy;
	size_t size = shardd_dtype_size(dtype), at = 0;

	TRAIN_OK(shardd_gather(c, m->info.unit, &data, &train_err));
	copy = train_copy(c, data, m->info.elements * size);
	TRAIN_OK(shardd_release(c, m->info.unit, &train_err));
	for (unsigned i = 0; i < TENSORS; i++)
		for (uint64_t k = 0; k < numel[i]; k++, at++) {
			const uint8_t *from = copy + (m->places[i].offset + k) * size;
			uint32_t bits = 0;

			memcpy((uint8_t *)&bits + (4 - size), from, size);
			memcpy(&ret[at], &bits, 4);
		}
	free(copy);
}

/* A gradient that depends on tensor, element and rank; what is between tensors is NaN. */
static float gradient_of(unsigned i, uint64_t k, uint32_t rank)
{
	return (float)((i + 1) * 8 + k) * (float)(rank + 1) / 16;
}

static void hand_in(shardd_client *c, const struct model *m, uint32_t rank)
{
	float *x = train_alloc(m->info.gradient_elements * sizeof(float));
	void *data = NULL;

	memset(x, 0xff, m->info.gradient_elements * sizeof(float));
	for (unsigned i = 0; i < TENSORS; i++)
		for (uint64_t k = 0; !tensors[i].frozen && k < numel[i]; k++)
			x[m->places[i].offset + k] = gradient_of(i, k, rank);
	TRAIN_OK(shardd_gradient(c, m->info.unit, &data, &train_err));
	train_write(c, data, x, m->info.gradient_elements * sizeof(float));
	TRAIN_OK(shardd_reduce(c, m->info.unit, &train_err));
	free(x);
}

/* p -= 0.5 * sum over ranks: small whole numbers, so in any order the same bits. */
static void expect_step(float *p, uint32_t world)
{
	size_t at = 0;

	for (unsigned i = 0; i < TENSORS; i++)
		for (uint64_t k = 0; k < numel[i]; k++, at++) {
			float sum = 0;

			for (uint32_t r = 0; !tensors[i].frozen && r < world; r++)
				sum += gradient_of(i, k, r);
			p[at] = fmaf(sum, -0.5f, p[at]);
		}
}

static void step(shardd_client *c)
{
	TRAIN_OK(shardd_step(c, 0, NULL, &train_err));
}

/* The norm of all gradient shards, of which NaN between tensors would tell. */
static double norm(shardd_client *c)
{
	double total = 0;

	TRAIN_OK(shardd_clip_grad_norm(c, 0, 1e30, 2, &total, &train_err));
	return total;
}

static int train_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	float first[PACKED], want[PACKED], got[PACKED];
	double first_norm = 0;

	for (unsigned i = 0; i < ARRAY_SIZE(forms); i++) {
		float init[PACKED];
		uint64_t buffer = 0;
		struct model m;
		char name[16];
		void *data = NULL;

		snprintf(name, sizeof(name), "unit %u", i);
		model_register(c, name, &forms[i], &m);
		train_fill(init, PACKED, 7 + t->rank); /* only root's counts */
		for (unsigned k = 0; k < PACKED; k++)
			init[k] = floorf(init[k] * 64) / 4; /* exact in bf16 too */
		TRAIN_OK(shardd_alloc(c, sizeof(init), &buffer, &data, &train_err));
		train_write(c, data, init, sizeof(init));
		TRAIN_OK(shardd_init_broadcast(c, m.info.unit, t->world - 1,
					       t->rank == t->world - 1 ? buffer : 0, &train_err));
		TRAIN_OK(shardd_free(c, buffer, &train_err));
		train_fill(want, PACKED, 7 + t->world - 1);
		for (unsigned k = 0; k < PACKED; k++)
			want[k] = floorf(want[k] * 64) / 4;
		read_packed(c, &m, forms[i].compute, got);
		TRAIN_SAME(got, want, sizeof(want));
		hand_in(c, &m, t->rank);
		if (!i)
			first_norm = norm(c);
		else
			CHECK(fabs(norm(c) - first_norm) <= 1e-5 * first_norm);
		step(c);
		expect_step(want, t->world);
		TRAIN_OK(shardd_barrier(c, 0, &train_err));
		read_packed(c, &m, forms[i].compute, got);
		if (forms[i].compute == SHARDD_FP32)
			TRAIN_SAME(got, want, sizeof(want));
		if (!i)
			memcpy(first, got, sizeof(got));
		for (unsigned k = 0; k < PACKED; k++)
			CHECK(fabsf(got[k] - first[k]) <= fabsf(first[k]) / 128);
	}
	train_leave(c);
	return 0;
}

Test(layouts, every_layout_trains_alike_alone)
{
	trainfix_run(1, train_trainer, NULL);
}
Test(layouts, every_layout_trains_alike_on_two)
{
	trainfix_run(2, train_trainer, NULL);
}
Test(layouts, every_layout_trains_alike_on_three)
{
	trainfix_run(3, train_trainer, NULL);
}
Test(layouts, every_layout_trains_alike_on_five)
{
	trainfix_run(5, train_trainer, NULL);
}

/* Values by seed follow the tensor's name alone; own takes each rank's shard. */
static int init_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	float init[PACKED], got[PACKED], seeded[PACKED];

	for (unsigned i = 0; i < 4; i++) {
		struct shardd_convert_options to = { .size = sizeof(to),
						     .layout = forms[i].layout,
						     .shard_multiple = forms[i].multiple,
						     .strategy = forms[i].strategy };
		struct model m;
		uint64_t buffer = 0;
		void *data = NULL;

		model_register(c, "unit", &forms[i], &m);
		TRAIN_OK(shardd_init_seed(c, m.info.unit, 42, &train_err));
		read_packed(c, &m, SHARDD_FP32, got);
		if (i)
			TRAIN_SAME(got, seeded, sizeof(got));
		memcpy(seeded, got, sizeof(got));
		/* each rank has its own number everywhere: whose is where? */
		for (unsigned k = 0; k < PACKED; k++)
			init[k] = (float)(t->rank + 1);
		TRAIN_OK(shardd_alloc(c, sizeof(init), &buffer, &data, &train_err));
		train_write(c, data, init, sizeof(init));
		TRAIN_OK(shardd_init_own(c, m.info.unit, buffer, &train_err));
		TRAIN_OK(shardd_free(c, buffer, &train_err));
		read_packed(c, &m, SHARDD_FP32, got);
		for (unsigned k = 0, at = 0; k < TENSORS; at += numel[k++]) {
			unsigned mine = 0;

			for (uint64_t e = 0; e < numel[k]; e++)
				mine += got[at + e] == (float)(t->rank + 1);
			CHECK(forms[i].strategy == SHARDD_REPLICATE
				      ? mine == (t->rank ? 0 : numel[k])
				      : mine == m.places[k].shard_elements);
		}
		/* the next form of the same unit */
		if (i + 1 < 4) {
			to.layout = forms[i + 1].layout;
			to.shard_multiple = forms[i + 1].multiple;
			to.strategy = forms[i + 1].strategy;
			to.units = &m.info.unit;
			to.n_units = 1;
			TRAIN_OK(shardd_convert(c, &to, &train_err));
		}
	}
	train_leave(c);
	return 0;
}

Test(layouts, initial_values_do_not_depend_on_the_layout_two)
{
	trainfix_run(2, init_trainer, NULL);
}
Test(layouts, initial_values_do_not_depend_on_the_layout_three)
{
	trainfix_run(3, init_trainer, NULL);
}

/* Parameters, gradients and optimizer state go through all layouts and train on. */
static int convert_trainer(const struct trainer *t)
{
	static const struct form *const order[] = {
		&forms[2],   &forms[1], &hybrids[1], &forms[3], &forms[0],   &hybrids[0],
		&hybrids[1], &forms[2], &forms[3],   &forms[2], &hybrids[0], &forms[0]
	};
	shardd_client *c = train_join(t);
	float want[PACKED], got[PACKED];
	struct model m;
	double n;

	model_register(c, "unit", &forms[0], &m);
	TRAIN_OK(shardd_init_seed(c, m.info.unit, 1, &train_err));
	hand_in(c, &m, t->rank);
	n = norm(c);
	read_packed(c, &m, SHARDD_FP32, want);
	for (unsigned i = 0; i < ARRAY_SIZE(order); i++) {
		const struct form *f = order[i];
		struct shardd_convert_options to = { .size = sizeof(to),
						     .layout = f->layout,
						     .shard_multiple = f->multiple,
						     .strategy = f->strategy,
						     .shard_ranks = f->shard_ranks };

		if (f->shard_ranks && t->world % f->shard_ranks) {
			to.units = &m.info.unit;
			to.n_units = 1;
			TRAIN_FAILS(shardd_convert(c, &to, &train_err), SHARDD_INVALID_ARGUMENT);
			continue;
		}
		to.units = &m.info.unit;
		to.n_units = 1;
		TRAIN_OK(shardd_convert(c, &to, &train_err));
		TRAIN_OK(shardd_tensor_places(c, m.info.unit, m.places, TENSORS, &train_err));
		model_register(c, "unit", f, &m);
		read_packed(c, &m, SHARDD_FP32, got);
		TRAIN_SAME(got, want, sizeof(want));
		CHECK(fabs(norm(c) - n) <= 1e-5 * n);
	}
	step(c);
	expect_step(want, t->world);
	TRAIN_OK(shardd_barrier(c, 0, &train_err));
	read_packed(c, &m, SHARDD_FP32, got);
	TRAIN_SAME(got, want, sizeof(want));
	train_leave(c);
	return 0;
}

Test(layouts, a_conversion_keeps_every_bit_two)
{
	trainfix_run(2, convert_trainer, NULL);
}
Test(layouts, a_conversion_keeps_every_bit_three)
{
	trainfix_run(3, convert_trainer, NULL);
}
Test(layouts, a_conversion_keeps_every_bit_four)
{
	trainfix_run(4, convert_trainer, NULL);
}

/* What is gathered, summoned or waits for its gradient is not converted, and is as it was. */
static int refused_trainer(const struct trainer *t)
{
	struct shardd_convert_options to = { .size = sizeof(to), .layout = SHARDD_LAYOUT_DIM0 };
	shardd_client *c = train_join(t);
	float want[PACKED], got[PACKED];
	struct model m;
	void *data;

	model_register(c, "unit", &forms[0], &m);
	TRAIN_OK(shardd_init_seed(c, m.info.unit, 1, &train_err));
	read_packed(c, &m, SHARDD_FP32, want);
	TRAIN_OK(shardd_gather(c, m.info.unit, NULL, &train_err));
	to.units = &m.info.unit;
	to.n_units = 1;
	TRAIN_FAILS(shardd_convert(c, &to, &train_err), SHARDD_FAILED_PRECONDITION);
	CHECK(strstr(train_err.text, "gathered"));
	TRAIN_FAILS(shardd_summon(c, m.info.unit, &data, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_release(c, m.info.unit, &train_err));
	TRAIN_OK(shardd_gradient(c, m.info.unit, &data, &train_err));
	to.units = &m.info.unit;
	to.n_units = 1;
	TRAIN_FAILS(shardd_convert(c, &to, &train_err), SHARDD_FAILED_PRECONDITION);
	CHECK(strstr(train_err.text, "gradient buffer"));
	hand_in(c, &m, t->rank);
	TRAIN_OK(shardd_summon(c, m.info.unit, &data, &train_err));
	to.units = &m.info.unit;
	to.n_units = 1;
	TRAIN_FAILS(shardd_convert(c, &to, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_summon(c, m.info.unit, &data, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_gather(c, m.info.unit, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_step(c, 0, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
	TRAIN_FAILS(shardd_return(c, m.info.unit, false, &train_err), SHARDD_FAILED_PRECONDITION);
	read_packed(c, &m, SHARDD_FP32, got);
	TRAIN_SAME(got, want, sizeof(want));
	train_leave(c);
	return 0;
}

Test(layouts, what_is_in_use_is_not_converted_nor_summoned)
{
	trainfix_run(2, refused_trainer, NULL);
}

/* Everybody writes all of it: of each rank only its own slice persists. */
static int summon_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	float want[PACKED], got[PACKED];

	for (unsigned i = 0; i < ARRAY_SIZE(forms); i++) {
		struct model m;
		char name[16];
		float *x;
		void *data = NULL;
		size_t at = 0;

		snprintf(name, sizeof(name), "unit %u", i);
		model_register(c, name, &forms[i], &m);
		TRAIN_OK(shardd_init_seed(c, m.info.unit, 1, &train_err));
		read_packed(c, &m, forms[i].compute, want);
		for (unsigned write = 0; write < 2; write++) {
			TRAIN_OK(shardd_summon(c, m.info.unit, &data, &train_err));
			x = train_copy(c, data, m.info.elements * sizeof(float));
			at = 0;
			for (unsigned k = 0; k < TENSORS; k++)
				for (uint64_t e = 0; e < numel[k]; e++, at++) {
					float *here = &x[m.places[k].offset + e];

					if (forms[i].compute == SHARDD_FP32)
						CHECK(memcmp(here, &want[at], 4) == 0);
					*here = (float)(t->rank + 1);
				}
			train_write(c, data, x, m.info.elements * sizeof(float));
			free(x);
			TRAIN_OK(shardd_return(c, m.info.unit, write, &train_err));
			read_packed(c, &m, forms[i].compute, got);
			if (!write)
				TRAIN_SAME(got, want, sizeof(want));
		}
		at = 0;
		for (unsigned k = 0; k < TENSORS; at += numel[k++]) {
			unsigned mine = 0;

			for (uint64_t e = 0; e < numel[k]; e++)
				mine += got[at + e] == (float)(t->rank + 1);
			CHECK(forms[i].strategy == SHARDD_REPLICATE
				      ? mine == (t->rank ? 0 : numel[k])
				      : mine == m.places[k].shard_elements);
		}
	}
	train_leave(c);
	return 0;
}

Test(layouts, of_what_was_summoned_each_ranks_slice_persists_two)
{
	trainfix_run(2, summon_trainer, NULL);
}
Test(layouts, of_what_was_summoned_each_ranks_slice_persists_three)
{
	trainfix_run(3, summon_trainer, NULL);
}

/* All frozen: gathered and stepped over, but nothing about gradients. */
static int frozen_trainer(const struct trainer *t)
{
	static const uint64_t shape[] = { 10 };
	static const struct shardd_tensor frozen[] = { { .name = "w",
							 .shape = shape,
							 .dims = 1,
							 .init = SHARDD_INIT_CONSTANT,
							 .a = 2,
							 .frozen = true } };
	struct shardd_unit_spec spec = {
		.size = sizeof(spec), .name = "all frozen", .tensors = frozen, .n_tensors = 1
	};
	shardd_client *c = train_join(t);
	struct shardd_unit_info info;
	const void *data = NULL;
	void *grad;

	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_ADAMW, .lr = 1 };
	for (unsigned layout = SHARDD_LAYOUT_FLAT; layout <= SHARDD_LAYOUT_DIM0; layout++) {
		spec.name = layout == SHARDD_LAYOUT_FLAT ? "flat" : "rows";
		spec.layout = layout;
		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		CHECK(!info.gradient_elements && info.packed_elements == 10);
		TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
		TRAIN_FAILS(shardd_gradient(c, info.unit, &grad, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		CHECK(strstr(train_err.text, "frozen"));
		TRAIN_FAILS(shardd_reduce(c, info.unit, &train_err), SHARDD_FAILED_PRECONDITION);
		step(c);
		TRAIN_OK(shardd_gather(c, info.unit, &data, &train_err));
		for (unsigned i = 0; i < 10; i++)
			CHECK(train_peek(c, (const float *)data + i) == 2);
		TRAIN_OK(shardd_release(c, info.unit, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(layouts, what_is_all_frozen_has_no_gradient)
{
	trainfix_run(2, frozen_trainer, NULL);
}

/* -------------------------------------------------------------------- aliases */

static int alias_trainer(const struct trainer *t)
{
	static const struct shardd_tensor head[] = {
		{ .name = "bias", .shape = s_bias, .dims = 1 },
		{ .name = "weight",
		  .shape = s_matrix,
		  .dims = 2,
		  .alias_of = "w",
		  .alias_unit = "emb" },
		{ .name = "again", .shape = s_matrix, .dims = 2, .alias_of = "weight" },
	};
	static const struct shardd_tensor emb[] = {
		{ .name = "pad", .shape = s_small, .dims = 1 },
		{ .name = "w", .shape = s_matrix, .dims = 2 },
	};
	struct shardd_unit_spec spec[2] = {
		{ .size = sizeof(spec[0]), .name = "head", .tensors = head, .n_tensors = 3 },
		{ .size = sizeof(spec[0]), .name = "emb", .tensors = emb, .n_tensors = 2 },
	};
	struct shardd_tensor bad = { .name = "x", .shape = s_matrix, .dims = 2, .alias_of = "no" };
	struct shardd_tensor round[2] = {
		{ .name = "x", .shape = s_matrix, .dims = 2, .alias_of = "y" },
		{ .name = "y", .shape = s_matrix, .dims = 2, .alias_of = "x" },
	};
	struct shardd_tensor mixed[2] = { { .name = "own", .dims = 0 }, bad };
	struct shardd_unit_spec other = { .size = sizeof(other), .name = "other" };
	struct shardd_convert_options rows = { .size = sizeof(rows), .layout = SHARDD_LAYOUT_DIM0 };
	shardd_client *c = train_join(t);
	struct shardd_unit_info info[2];
	struct shardd_tensor_place p[3];

	TRAIN_OK(shardd_register(c, spec, 2, info, &train_err));
	CHECK(info[0].elements == 5 && info[0].packed_elements == 5 && info[1].elements == 23);
	TRAIN_OK(shardd_tensor_places(c, info[0].unit, p, 3, &train_err));
	CHECK(p[0].unit == info[0].unit);
	for (unsigned i = 1; i < 3; i++)
		CHECK(p[i].unit == info[1].unit && p[i].offset == 2 && p[i].elements == 21);
	/* and goes with it when that is moved */
	rows.units = &info[1].unit;
	rows.n_units = 1;
	TRAIN_OK(shardd_convert(c, &rows, &train_err));
	TRAIN_OK(shardd_tensor_places(c, info[0].unit, p, 3, &train_err));
	for (unsigned i = 1; i < 3; i++)
		CHECK(p[i].unit == info[1].unit && p[i].offset == t->world &&
		      p[i].shard_elements == (t->rank ? 9 : 12));
	/* what is refused, in words */
	other.tensors = mixed;
	other.n_tensors = 2;
	TRAIN_FAILS(shardd_register(c, &other, 1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "no such tensor"));
	mixed[1].alias_of = "w";
	mixed[1].alias_unit = "nowhere";
	TRAIN_FAILS(shardd_register(c, &other, 1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "does not exist"));
	mixed[1].alias_unit = "emb";
	mixed[1].shape = s_frozen;
	TRAIN_FAILS(shardd_register(c, &other, 1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "a different shape"));
	other.tensors = round;
	TRAIN_FAILS(shardd_register(c, &other, 1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "1 to 2^48"));
	TRAIN_FAILS(shardd_tensor_places(c, info[0].unit, p, 2, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_tensor_places(c, 99, p, 3, &train_err), SHARDD_NOT_FOUND);
	train_leave(c);
	return 0;
}

Test(layouts, a_tied_tensor_is_where_the_other_is)
{
	trainfix_run(2, alias_trainer, NULL);
}

static int circle_trainer(const struct trainer *t)
{
	struct shardd_tensor round[3] = {
		{ .name = "own", .dims = 0 },
		{ .name = "x", .shape = s_matrix, .dims = 2, .alias_of = "y" },
		{ .name = "y", .shape = s_matrix, .dims = 2, .alias_of = "x" },
	};
	struct shardd_unit_spec spec = {
		.size = sizeof(spec), .name = "round", .tensors = round, .n_tensors = 3
	};
	shardd_client *c = train_join(t);

	TRAIN_FAILS(shardd_register(c, &spec, 1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "cycle"));
	train_leave(c);
	return 0;
}

Test(layouts, aliases_in_a_circle_are_refused)
{
	trainfix_run(1, circle_trainer, NULL);
}

/* -------------------------------------------------------------------- buffers */

static int buffers_trainer(const struct trainer *t)
{
	static const struct shardd_buffer buffers[] = {
		{ .name = "mean", .shape = s_bias, .dims = 1, .dtype = SHARDD_BUFFER_FP64 },
		{ .name = "count", .dims = 0, .dtype = SHARDD_BUFFER_INT64 },
		{ .name = "mask", .shape = s_frozen, .dims = 2, .dtype = SHARDD_BUFFER_UINT8 },
	};
	static const char *const names[] = { "a", "b" };
	struct shardd_unit_spec spec[3];
	struct shardd_unit_info info[3];
	struct shardd_buffer_place p[3];
	shardd_client *c = train_join(t);
	void *data[2];

	for (unsigned i = 0; i < 3; i++) {
		spec[i] = (struct shardd_unit_spec){ .size = sizeof(spec[0]),
						     .name = i < 2 ? names[i] : "none",
						     .tensors = tensors,
						     .n_tensors = 1,
						     .buffers = i < 2 ? buffers : NULL,
						     .n_buffers = i < 2 ? 3 : 0 };
	}
	TRAIN_OK(shardd_register(c, spec, 3, info, &train_err));
	TRAIN_FAILS(shardd_unit_buffers(c, info[2].unit, NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_buffer_places(c, info[0].unit, p, 3, &train_err));
	CHECK(p[0].offset == 0 && p[0].bytes == 40 && p[1].offset == 64 && p[1].bytes == 8 &&
	      p[2].offset == 128 && p[2].bytes == 12);
	for (unsigned i = 0; i < 2; i++) {
		uint8_t *there;

		TRAIN_OK(shardd_unit_buffers(c, info[i].unit, &data[i], &train_err));
		there = train_copy(c, data[i], 140);
		for (unsigned k = 0; k < 140; k++)
			CHECK(there[k] == 0);
		free(there);
		train_set(c, data[i], (uint8_t)(16 * i + t->rank + 1), 140);
	}
	TRAIN_OK(shardd_barrier(c, 0, &train_err));
	for (unsigned i = 0; i < 2; i++) { /* nobody else wrote here */
		uint8_t *there = train_copy(c, data[i], 140);

		for (unsigned k = 0; k < 140; k++)
			CHECK(there[k] == 16 * i + t->rank + 1);
		free(there);
	}
	TRAIN_OK(shardd_broadcast_buffers(c, info[1].unit, 0, t->world - 1, &train_err));
	for (unsigned i = 0; i < 2; i++) {
		uint8_t *there = train_copy(c, data[i], 140);

		for (unsigned k = 0; k < 140; k++)
			CHECK(there[k] == (i ? 16 + t->world : t->rank + 1));
		free(there);
	}
	TRAIN_OK(shardd_barrier(c, 0, &train_err));
	train_set(c, data[0], (uint8_t)(77 + t->rank), 140);
	train_set(c, data[1], (uint8_t)(99 + t->rank), 140);
	TRAIN_OK(shardd_broadcast_buffers(c, 0, 0, 0, &train_err));
	for (unsigned i = 0; i < 2; i++) {
		uint8_t *there = train_copy(c, data[i], 140);

		for (unsigned k = 0; k < 140; k++)
			CHECK(there[k] == (i ? 99 : 77));
		free(there);
	}
	TRAIN_FAILS(shardd_broadcast_buffers(c, info[2].unit, 0, 0, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_broadcast_buffers(c, 0, 0, 99, &train_err), SHARDD_INVALID_ARGUMENT);
	train_leave(c);
	return 0;
}

Test(layouts, every_rank_has_buffers_of_its_own_one)
{
	trainfix_run(1, buffers_trainer, NULL);
}
Test(layouts, every_rank_has_buffers_of_its_own_four)
{
	trainfix_run(4, buffers_trainer, NULL);
}
