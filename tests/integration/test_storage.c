/*
 * Parameters that are stored in 16 bits: whatever is done to such a unit, it hands out the same
 * bits as a twin that stores fp32 and computes in the same type.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(storage, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { TENSORS = 5, PACKED = 43 };

static const uint64_t s_matrix[] = { 7, 3 }, s_bias[] = { 5 }, s_frozen[] = { 6, 2 },
		      s_small[] = { 2 }, s_frozen2[] = { 3 };

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
};

struct form {
	enum shardd_layout layout;
	enum shardd_strategy strategy;
	uint32_t shard_ranks;
};

static const struct form forms[] = {
	{ SHARDD_LAYOUT_FLAT, SHARDD_SHARD, 0 },
	{ SHARDD_LAYOUT_DIM0, SHARDD_SHARD, 0 },
	{ SHARDD_LAYOUT_FLAT, SHARDD_REPLICATE, 0 },
	{ SHARDD_LAYOUT_DIM0, SHARDD_HYBRID, 2 },
};

/* The unit that stores @dtype, and its twin. */
struct twins {
	shardd_client *c;
	const struct trainer *t;
	enum dtype dtype, compute;
	struct shardd_unit_info narrow, wide;
};

static struct shardd_unit_spec spec_of(const struct form *form, enum dtype storage,
				       enum dtype compute, const char *name)
{
	return (struct shardd_unit_spec){ .size = sizeof(struct shardd_unit_spec),
					  .name = name,
					  .tensors = tensors,
					  .n_tensors = TENSORS,
					  .storage_dtype = (enum shardd_dtype)storage,
					  .compute_dtype = (enum shardd_dtype)compute,
					  .gradient_dtype = SHARDD_FP32,
					  .layout = form->layout,
					  .strategy = form->strategy,
					  .shard_ranks = form->shard_ranks,
					  .optimizer.when = SHARDD_OPTIM_BY_TRAINER };
}

/* A seed's values depend on the name, and these have two: seeds are compared apart. */
static void make_twins(struct twins *w, const struct form *form, unsigned k)
{
	char name[32];
	struct shardd_unit_spec s;

	snprintf(name, sizeof(name), "narrow %u %u %u", (unsigned)w->dtype, (unsigned)w->compute,
		 k);
	s = spec_of(form, w->dtype, w->compute == w->dtype ? DTYPE_NONE : w->compute, name);
	TRAIN_OK(shardd_register(w->c, &s, 1, &w->narrow, &train_err));
	snprintf(name, sizeof(name), "wide %u %u %u", (unsigned)w->dtype, (unsigned)w->compute, k);
	s = spec_of(form, DTYPE_FP32, w->compute, name);
	TRAIN_OK(shardd_register(w->c, &s, 1, &w->wide, &train_err));
	TRAINER_CHECK(w->narrow.elements == w->wide.elements);
	TRAINER_CHECK(w->narrow.packed_elements == PACKED && w->wide.packed_elements == PACKED);
}

static void convert(void *to, enum dtype to_type, const void *from, enum dtype from_type, size_t n)
{
	const struct k_cast cast = { to, from, to_type, from_type, false };

	kernels_ref()->cast(&cast, 0, n);
}

/* @n numbers that both types have, in fp32 and as the unit stores them. */
static void numbers(const struct twins *w, uint64_t seed, size_t n, float *wide, uint16_t *narrow)
{
	train_fill(wide, n, seed);
	convert(narrow, w->dtype, wide, DTYPE_FP32, n);
	convert(wide, DTYPE_FP32, narrow, w->dtype, n);
}

static void expect_same(const struct twins *w)
{
	size_t bytes = w->narrow.elements * dtype_size(w->compute);
	void *a = train_alloc(bytes + 2), *b = train_alloc(bytes + 2);

	train_params(w->c, w->narrow.unit, a, bytes);
	train_params(w->c, w->wide.unit, b, bytes);
	TRAIN_SAME(a, b, bytes);
	/* others may write when all have looked */
	TRAIN_OK(shardd_barrier(w->c, SHARDD_WORLD, &train_err));
	free(a);
	free(b);
}

static uint64_t buffer_of(const struct twins *w, const void *data, size_t bytes, void **ret)
{
	uint64_t buffer;
	void *at;

	TRAIN_OK(shardd_alloc(w->c, bytes, &buffer, &at, &train_err));
	train_write(w->c, at, data, bytes);
	if (ret)
		*ret = at;
	return buffer;
}

static void initialise(const struct twins *w, bool own)
{
	bool gives = own || w->t->rank == 1;
	float wide[PACKED];
	uint16_t narrow[PACKED];
	uint64_t a = 0, b = 0;

	numbers(w, own ? 9 : 8, PACKED, wide, narrow);
	if (gives) {
		a = buffer_of(w, narrow, sizeof(narrow), NULL);
		b = buffer_of(w, wide, sizeof(wide), NULL);
	}
	if (own) {
		TRAIN_OK(shardd_init_own(w->c, w->narrow.unit, a, &train_err));
		TRAIN_OK(shardd_init_own(w->c, w->wide.unit, b, &train_err));
	} else {
		TRAIN_OK(shardd_init_broadcast(w->c, w->narrow.unit, 1, a, &train_err));
		TRAIN_OK(shardd_init_broadcast(w->c, w->wide.unit, 1, b, &train_err));
	}
	if (gives) {
		TRAIN_OK(shardd_free(w->c, a, &train_err));
		TRAIN_OK(shardd_free(w->c, b, &train_err));
	}
	expect_same(w);
}

/* Look at all of it, and write all of it. */
static void summon(const struct twins *w)
{
	size_t n = w->narrow.elements;
	uint16_t *narrow = train_alloc(n * 2 + 2), *rounded = train_alloc(n * 2 + 2);
	float *wide = train_alloc(n * 4 + 4);
	void *a, *b;

	TRAIN_OK(shardd_summon(w->c, w->narrow.unit, &a, &train_err));
	TRAIN_OK(shardd_summon(w->c, w->wide.unit, &b, &train_err));
	train_read(w->c, narrow, a, n * 2);
	train_read(w->c, wide, b, n * 4);
	convert(rounded, w->dtype, wide, DTYPE_FP32, n);
	TRAIN_SAME(narrow, rounded, n * 2);
	numbers(w, 10, n, wide, narrow);
	train_write(w->c, a, narrow, n * 2);
	train_write(w->c, b, wide, n * 4);
	TRAIN_OK(shardd_return(w->c, w->narrow.unit, true, &train_err));
	TRAIN_OK(shardd_return(w->c, w->wide.unit, true, &train_err));
	expect_same(w);
	free(narrow);
	free(rounded);
	free(wide);
}

/* The rank's pieces, read, and written where its device alone has them. */
static void copy_pieces(const struct twins *w)
{
	struct shardd_tensor_place places[TENSORS];

	TRAIN_OK(shardd_tensor_places(w->c, w->narrow.unit, places, TENSORS, &train_err));
	for (uint32_t i = 0; i < TENSORS; i++) {
		size_t n = places[i].shard_elements;
		float wide[PACKED];
		uint16_t narrow[PACKED], found[PACKED] = { 0 };
		uint64_t a, b;
		void *at;

		numbers(w, 20 + i, n, wide, narrow);
		a = buffer_of(w, narrow, sizeof(narrow), &at);
		b = buffer_of(w, wide, sizeof(wide), NULL);
		TRAIN_OK(shardd_copy_shard(w->c, w->narrow.unit, i, SHARDD_PARAMETERS, true, a, n,
					   &train_err));
		TRAIN_OK(shardd_copy_shard(w->c, w->wide.unit, i, SHARDD_PARAMETERS, true, b, n,
					   &train_err));
		train_set(w->c, at, 0, sizeof(narrow));
		TRAIN_OK(shardd_copy_shard(w->c, w->narrow.unit, i, SHARDD_PARAMETERS, false, a, n,
					   &train_err));
		train_read(w->c, found, at, n * 2);
		TRAIN_SAME(found, narrow, n * 2);
		TRAIN_OK(shardd_free(w->c, a, &train_err));
		TRAIN_OK(shardd_free(w->c, b, &train_err));
	}
	TRAIN_OK(shardd_barrier(w->c, SHARDD_WORLD, &train_err));
	expect_same(w);
}

static void step_shard(const struct twins *w, enum dtype storage)
{
	struct shardd_shard s;
	uint16_t *narrow;
	float *wide, *gradient;

	TRAIN_OK(shardd_next_shard(w->c, SHARDD_WORLD, &s, &train_err));
	narrow = train_alloc(s.elements * 2 + 2);
	wide = train_alloc(s.elements * 4 + 4);
	gradient = train_copy(w->c, s.gradient, s.elements * 4);
	train_read(w->c, storage == DTYPE_FP32 ? (void *)wide : narrow, s.params,
		   s.elements * dtype_size(storage));
	if (storage != DTYPE_FP32)
		convert(wide, DTYPE_FP32, narrow, storage, s.elements);
	for (uint64_t i = 0; i < s.elements; i++)
		wide[i] -= 0.5F * gradient[i];
	convert(narrow, w->dtype, wide, DTYPE_FP32, s.elements);
	convert(wide, DTYPE_FP32, narrow, w->dtype, s.elements);
	train_write(w->c, s.params, storage == DTYPE_FP32 ? (void *)wide : narrow,
		    s.elements * dtype_size(storage));
	TRAIN_OK(shardd_shard_done(w->c, s.unit, &train_err));
	free(narrow);
	free(wide);
	free(gradient);
}

static void train(const struct twins *w)
{
	const shardd_unit units[] = { w->narrow.unit, w->wide.unit };
	float *x = train_numbers(w->narrow.gradient_elements, 30 + w->t->rank);

	for (unsigned i = 0; i < 2; i++) {
		train_reduce(w->c, units[i], DTYPE_FP32, x, w->narrow.gradient_elements);
		step_shard(w, i ? DTYPE_FP32 : w->dtype);
	}
	TRAIN_OK(shardd_barrier(w->c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_step(w->c, SHARDD_WORLD, NULL, &train_err));
	expect_same(w);
	free(x);
}

static void change_layout(const struct twins *w, const struct form *form)
{
	const shardd_unit units[] = { w->narrow.unit, w->wide.unit };
	const struct shardd_convert_options o = { .size = sizeof(o),
						  .units = units,
						  .n_units = 2,
						  .layout = form->layout == SHARDD_LAYOUT_DIM0
								    ? SHARDD_LAYOUT_FLAT
								    : SHARDD_LAYOUT_DIM0,
						  .strategy = SHARDD_SHARD };
	size_t size = dtype_size(w->compute);
	char a[2][200 * sizeof(float)];
	shardd_ticket ticket;

	TRAIN_OK(shardd_submit_convert(w->c, &o, &ticket, &train_err));
	TRAIN_OK(shardd_wait(w->c, ticket, -1, NULL, &train_err));
	for (unsigned i = 0; i < 2; i++) {
		struct shardd_tensor_place places[TENSORS];
		const char *data;

		TRAIN_OK(shardd_tensor_places(w->c, units[i], places, TENSORS, &train_err));
		TRAIN_OK(shardd_gather(w->c, units[i], (const void **)&data, &train_err));
		for (uint32_t k = 0, at = 0; k < TENSORS; at += places[k++].elements)
			train_read(w->c, &a[i][at * size], data + places[k].offset * size,
				   places[k].elements * size);
		TRAIN_OK(shardd_release(w->c, units[i], &train_err));
	}
	TRAIN_SAME(a[0], a[1], PACKED * size);
}

static void all_of(struct twins *w, const struct form *form, unsigned k)
{
	make_twins(w, form, k);
	initialise(w, false);
	initialise(w, true);
	summon(w);
	if (train_on_host())
		copy_pieces(w);
	train(w);
	change_layout(w, form);
}

static int trainer(const struct trainer *t)
{
	struct twins w = { .c = train_join(t), .t = t };

	for (w.dtype = DTYPE_BF16; w.dtype <= DTYPE_FP16; w.dtype++)
		for (w.compute = DTYPE_FP32; w.compute <= DTYPE_FP16; w.compute++)
			for (unsigned k = 0; k < sizeof(forms) / sizeof(forms[0]); k++)
				if (!forms[k].shard_ranks || t->world % forms[k].shard_ranks == 0)
					all_of(&w, &forms[k], k);
	train_leave(w.c);
	return 0;
}

Test(storage, a_unit_of_16_bits_is_its_twin)
{
	trainfix_run(3, trainer, NULL);
}

Test(storage, also_in_replicas)
{
	trainfix_run(4, trainer, NULL);
}

/* -------------------------------------------------------------------- seeds */

/* Values of a seed are those of fp32, rounded. The daemon computes them from the unit's name, so
 * the twins are units of two jobs. */
static int seeded_trainer(const struct trainer *t)
{
	const struct form *form = t->arg;
	shardd_client *c = train_join(t);
	struct shardd_unit_spec s = spec_of(form, DTYPE_BF16, DTYPE_BF16, "seeded");
	struct shardd_unit_info info;
	uint16_t got[200], rounded[200];
	float want[200];

	TRAIN_OK(shardd_register(c, &s, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 77, &train_err));
	TRAINER_CHECK(info.elements <= 200);
	train_params(c, info.unit, got, info.elements * 2);
	train_leave(c);

	c = train_connect(t);
	TRAIN_OK(shardd_join(c,
			     &(struct shardd_job){ .size = sizeof(struct shardd_job),
						   .name = "wide",
						   .world_size = t->world,
						   .rank = t->rank },
			     NULL, &train_err));
	s = spec_of(form, DTYPE_FP32, DTYPE_FP32, "seeded");
	TRAIN_OK(shardd_register(c, &s, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 77, &train_err));
	train_params(c, info.unit, want, info.elements * 4);
	convert(rounded, DTYPE_BF16, want, DTYPE_FP32, info.elements);
	TRAIN_SAME(got, rounded, info.elements * 2);
	train_leave(c);
	return 0;
}

Test(storage, values_of_a_seed_are_rounded)
{
	for (unsigned k = 0; k < 2; k++)
		trainfix_run(2, seeded_trainer, (void *)&forms[k]);
}

/* ------------------------------------------------------------ what is refused */

static int refused_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	struct shardd_unit_spec s = spec_of(&forms[0], DTYPE_BF16, DTYPE_BF16, "narrow");
	struct shardd_unit_info info;

	s.optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = 0.1 };
	TRAIN_FAILS(shardd_register(c, &s, 1, &info, &train_err), SHARDD_UNIMPLEMENTED);
	TRAINER_CHECK(strstr(train_err.text, "its storage_dtype is bf16"));
	s.optimizer = (struct shardd_optimizer){ .when = SHARDD_OPTIM_BY_TRAINER };
	TRAIN_OK(shardd_register(c, &s, 1, &info, &train_err));
	s.storage_dtype = SHARDD_FP32;
	TRAIN_FAILS(shardd_register(c, &s, 1, &info, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "storage_dtype"));
	train_leave(c);
	return 0;
}

Test(storage, the_daemons_optimizers_are_refused)
{
	trainfix_run(1, refused_trainer, NULL);
}

/* ----------------------------------------------------------------- memory */

static int accounted_trainer(const struct trainer *t)
{
	const struct shardd_job job = { .size = sizeof(job),
					.name = "small",
					.world_size = 1,
					.quota_bytes = 3 << 20,
					.resume = SHARDD_RESUME_NO_COPY };
	const uint64_t shape[] = { 1 << 20 };
	const struct shardd_tensor big = { .name = "w", .shape = shape, .dims = 1 };
	struct shardd_unit_spec s = {
		.size = sizeof(s), .name = "w", .tensors = &big, .n_tensors = 1
	};
	struct shardd_unit_info info;
	shardd_client *c = train_connect(t);

	s.optimizer.when = SHARDD_OPTIM_BY_TRAINER;
	TRAIN_OK(shardd_join(c, &job, NULL, &train_err));
	TRAIN_FAILS(shardd_register(c, &s, 1, &info, &train_err), SHARDD_RESOURCE_EXHAUSTED);
	s.storage_dtype = SHARDD_BF16;
	TRAIN_OK(shardd_register(c, &s, 1, &info, &train_err));
	train_leave(c);
	return 0;
}

/* Two bytes an element; the gradient's memory is there only while it is needed. */
Test(storage, takes_two_bytes_an_element)
{
	trainfix_run(1, accounted_trainer, NULL);
}
