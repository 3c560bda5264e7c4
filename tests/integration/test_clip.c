/*
 * Clipping in all ways: profiles, norms, numbers that are none, some of the units, by value.
 * Parameters are 0 and the optimizer is SGD with learning rate 1, so that what a step leaves is
 * the gradient, turned round.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(clip, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 2, UNITS = 2, BIG = 70001 };

static const size_t sizes[UNITS] = { 7, BIG };

struct model {
	shardd_client *c;
	const struct trainer *t;
	shardd_unit u[UNITS];
	float *g[UNITS]; /* what the shards hold */
};

static void test_clip_begin(struct model *m, const struct trainer *t)
{
	const struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };

	m->t = t;
	m->c = train_join(t);
	m->u[0] = train_zero_unit(m->c, "small", sizes[0], &like);
	m->u[1] = train_zero_unit(m->c, "big", sizes[1], &like);
	for (unsigned i = 0; i < UNITS; i++)
		m->g[i] = train_alloc(sizes[i] * sizeof(float));
}

static void test_clip_end(struct model *m)
{
	for (unsigned i = 0; i < UNITS; i++)
		free(m->g[i]);
	train_leave(m->c);
}

/* Both ranks bring the same numbers, so that their mean is what they bring. */
static void reduce(struct model *m, unsigned seed, float poison)
{
	for (unsigned i = 0; i < UNITS; i++) {
		train_fill(m->g[i], sizes[i], seed * 2 + i);
		if (poison != 0 && i == 1)
			m->g[i][BIG - 1] = poison;
		TRAIN_OK(shardd_init_seed(m->c, m->u[i], 1, &train_err));
		train_reduce(m->c, m->u[i], DTYPE_FP32, m->g[i], sizes[i]);
	}
}

/* Step, and compare; a NaN may have any sign and payload. */
static void test_clip_check(struct model *m)
{
	TRAIN_OK(shardd_step(m->c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < UNITS; i++) {
		float *got = train_alloc(sizes[i] * sizeof(float));

		train_params(m->c, m->u[i], got, sizes[i] * sizeof(float));
		for (size_t k = 0; k < sizes[i]; k++) {
			got[k] = isnan(got[k]) && isnan(m->g[i][k]) ? 0 : got[k];
			m->g[i][k] = got[k] == 0 && isnan(m->g[i][k]) ? 0 : 0 - m->g[i][k];
		}
		TRAIN_SAME(got, m->g[i], sizes[i] * sizeof(float));
		free(got);
	}
}

static double model_norm(struct model *m, double p)
{
	double sum = 0;

	for (unsigned i = 0; i < UNITS; i++) {
		double partial[BIG / KERNEL_NORM_BLOCK + 1];
		const struct k_norm a = { m->g[i], partial, p };

		kernels_ref()->norm(&a, 0, sizes[i]);
		for (size_t b = 0; b < (sizes[i] + KERNEL_NORM_BLOCK - 1) / KERNEL_NORM_BLOCK; b++)
			sum = !isinf(p)                               ? sum + partial[b]
			      : isnan(partial[b]) || partial[b] > sum ? partial[b]
								      : sum;
	}
	return isinf(p) || p == 1 ? sum : p == 2 ? sqrt(sum) : pow(sum, 1 / p);
}

static void scale(struct model *m, float factor)
{
	for (unsigned i = 0; i < UNITS; i++) {
		const struct k_scale a = { m->g[i], factor, NULL };

		kernels_ref()->scale(&a, 0, sizes[i]);
	}
}

/* Written out here again, from what fairscale, XLA and torch say. */
static void model_clip(struct model *m, const struct shardd_clip_options *clip, double total)
{
	float sum = (float)total + 1e-6F, max = (float)clip->max_norm, coef;

	switch (clip->profile) {
	case SHARDD_CLIP_XLA:
		coef = 1 / sum * max;
		scale(m, coef < 0 ? 0 : coef > 1 ? 1 : coef);
		break;
	case SHARDD_CLIP_TORCH:
		coef = 1 / sum * max;
		scale(m, coef > 1 ? 1 : coef);
		break;
	default:
		coef = max / sum;
		if (coef < 1)
			scale(m, coef);
	}
}

static void one(struct model *m, enum shardd_clip_profile profile, double p, double max_norm,
		float poison, unsigned seed)
{
	struct shardd_clip_options clip = {
		.size = sizeof(clip), .max_norm = max_norm, .norm_type = p, .profile = profile
	};
	double total = -1, want;

	reduce(m, seed, poison);
	want = model_norm(m, p);
	TRAIN_OK(shardd_clip(m->c, &clip, &total, &train_err));
	if (isnan(want))
		TRAINER_CHECK(isnan(total));
	else
		TRAINER_CHECK(total == want || ((!train_on_host() || p == 2.5) &&
						fabs(total - want) <= 1e-12 * want));
	model_clip(m, &clip, total);
	test_clip_check(m);
}

static int profiles_trainer(const struct trainer *t)
{
	static const double types[] = { 1, 2, 2.5, INFINITY };
	static const float poisons[] = { 0, NAN, INFINITY };
	struct model m;
	unsigned seed = 0;

	test_clip_begin(&m, t);
	for (int profile = SHARDD_CLIP_FAIRSCALE; profile <= SHARDD_CLIP_TORCH; profile++)
		for (size_t i = 0; i < ARRAY_SIZE(types); i++)
			for (size_t k = 0; k < ARRAY_SIZE(poisons); k++) {
				one(&m, (enum shardd_clip_profile)profile, types[i], 0.5,
				    poisons[k], ++seed);
				one(&m, (enum shardd_clip_profile)profile, types[i], 1e7,
				    poisons[k], ++seed);
			}
	test_clip_end(&m);
	return 0;
}

Test(clip, every_profile_and_norm)
{
	trainfix_run(WORLD, profiles_trainer, NULL);
}

/* ------------------------------------------------------------------ the others */

static int error_trainer(const struct trainer *t)
{
	struct shardd_clip_options clip = { .size = sizeof(clip),
					    .max_norm = 1,
					    .profile = SHARDD_CLIP_TORCH,
					    .error_if_nonfinite = true };
	struct model m;

	test_clip_begin(&m, t);
	reduce(&m, 1, INFINITY);
	TRAIN_FAILS(shardd_clip(m.c, &clip, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("is inf, so they cannot be clipped: nothing was changed");
	test_clip_check(&m); /* as they were */
	reduce(&m, 2, NAN);
	TRAIN_FAILS(shardd_clip(m.c, &clip, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	test_clip_check(&m);
	reduce(&m, 3, 0);
	TRAIN_OK(shardd_clip(m.c, &clip, NULL, &train_err));
	TRAIN_OK(shardd_step(m.c, SHARDD_WORLD, NULL, &train_err));
	test_clip_end(&m);
	return 0;
}

Test(clip, a_norm_that_is_no_number_can_be_an_error)
{
	trainfix_run(WORLD, error_trainer, NULL);
}

static int some_trainer(const struct trainer *t)
{
	struct shardd_clip_options clip = { .size = sizeof(clip), .max_norm = 0.25, .n_units = 2 };
	double total = -1, want = 0;
	struct model m;
	shardd_unit twice[2];
	float factor;

	test_clip_begin(&m, t);
	twice[0] = twice[1] = m.u[0];
	clip.units = twice;
	reduce(&m, 5, 0);
	for (size_t k = 0; k < sizes[0]; k++)
		want += (double)m.g[0][k] * m.g[0][k];
	TRAIN_OK(shardd_clip(m.c, &clip, &total, &train_err));
	TRAINER_CHECK(fabs(total - sqrt(want)) < 1e-12);
	factor = 0.25F / ((float)total + 1e-6F);
	TRAINER_CHECK(factor < 1);
	for (size_t k = 0; k < sizes[0]; k++)
		m.g[0][k] *= factor;
	test_clip_check(&m); /* the other is as it was */
	test_clip_end(&m);
	return 0;
}

Test(clip, some_of_the_units_are_enough)
{
	trainfix_run(WORLD, some_trainer, NULL);
}

enum { ALONE = 5 };

/* A unit of rank 1 alone, whose gradient is as large as it is asked for. */
static shardd_unit alone_unit(struct model *m, const float *gradient)
{
	static const uint32_t ranks[] = { 1 };
	struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_unit u;

	TRAIN_OK(shardd_group_create(m->c, "alone", ranks, 1, &like.group, &train_err));
	u = train_zero_unit(m->c, "alone", ALONE, &like);
	train_reduce(m->c, u, DTYPE_FP32, gradient, ALONE);
	return u;
}

/* The norm is of the units of all groups, and so is what is multiplied. */
static int job_trainer(const struct trainer *t)
{
	struct shardd_clip_options clip = { .size = sizeof(clip), .max_norm = 0.25 };
	double total = -1, own = -1, want;
	float gradient[ALONE], got[ALONE], factor;
	shardd_unit alone = 0;
	struct model m;

	test_clip_begin(&m, t);
	reduce(&m, 8, 0);
	train_fill(gradient, ALONE, 99);
	if (t->rank == 1)
		alone = alone_unit(&m, gradient);
	clip.max_norm = 1e6; /* of the world's own units, as before */
	TRAIN_OK(shardd_clip(m.c, &clip, &own, &train_err));
	TRAINER_CHECK(own == model_norm(&m, 2) || !train_on_host());
	want = own * own;
	for (unsigned i = 0; i < ALONE; i++)
		want += (double)gradient[i] * gradient[i];
	clip.max_norm = 0.25;
	clip.whole_job = true;
	TRAIN_OK(shardd_clip(m.c, &clip, &total, &train_err));
	TRAINER_CHECK(total > own && fabs(total - sqrt(want)) < 1e-9 * total);
	factor = 0.25F / ((float)total + 1e-6F);
	scale(&m, factor);
	test_clip_check(&m);
	if (t->rank == 1) {
		TRAIN_OK(shardd_step(m.c, 1, NULL, &train_err));
		train_params(m.c, alone, got, sizeof(got));
		for (unsigned i = 0; i < ALONE; i++)
			TRAINER_CHECK(got[i] == 0 - gradient[i] * factor);
	}
	test_clip_end(&m);
	return 0;
}

Test(clip, the_units_of_a_whole_job)
{
	trainfix_run(WORLD, job_trainer, NULL);
}

static int value_trainer(const struct trainer *t)
{
	struct model m;

	test_clip_begin(&m, t);
	reduce(&m, 6, NAN);
	TRAIN_OK(shardd_clip(m.c,
			     SHARDD_OPTIONS(clip, .group = SHARDD_WORLD, .by_value = true,
					    .value = 0.125, .units = NULL, .n_units = 0),
			     NULL, &train_err));
	for (unsigned i = 0; i < UNITS; i++)
		for (size_t k = 0; k < sizes[i]; k++)
			m.g[i][k] = m.g[i][k] < -0.125F  ? -0.125F
				    : m.g[i][k] > 0.125F ? 0.125F
							 : m.g[i][k];
	test_clip_check(&m);
	reduce(&m, 7, -INFINITY);
	TRAIN_OK(shardd_clip(m.c,
			     SHARDD_OPTIONS(clip, .group = SHARDD_WORLD, .by_value = true,
					    .value = 0.5, .units = &m.u[1], .n_units = 1),
			     NULL, &train_err));
	for (size_t k = 0; k < BIG; k++)
		m.g[1][k] = m.g[1][k] < -0.5F ? -0.5F : m.g[1][k] > 0.5F ? 0.5F : m.g[1][k];
	test_clip_check(&m);
	test_clip_end(&m);
	return 0;
}

Test(clip, by_value)
{
	trainfix_run(WORLD, value_trainer, NULL);
}

/* Nothing of this is sent to a peer: both ranks are refused alike. */
static int wrong_trainer(const struct trainer *t)
{
	static const uint32_t ranks[] = { 1, 0 };
	struct shardd_clip_options clip = { .size = sizeof(clip), .max_norm = 1 }, bad;
	shardd_unit other[1] = { 99 };
	shardd_group g;
	struct model m;

	test_clip_begin(&m, t);
	bad = clip;
	bad.size--;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	bad = clip;
	bad.norm_type = -1;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	told_now("norm_type is -1; it must be above 0, or inf");
	bad.norm_type = NAN;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	bad = clip;
	bad.profile = 4;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	told_now("it must be FAIRSCALE, XLA or TORCH");
	bad.profile = -1;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	bad = clip;
	bad.units = other;
	bad.n_units = 1;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_NOT_FOUND);
	told_now("there is no unit 99");
	bad = clip;
	bad.whole_job = true;
	bad.units = m.u;
	bad.n_units = 1;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strcmp(train_err.field, "whole_job") == 0);
	bad.whole_job = false;
	TRAIN_OK(shardd_group_create(m.c, "turned", ranks, 2, &g, &train_err));
	bad.units = m.u;
	bad.group = g;
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	told_now("is of another group");
	bad.n_units = 1000;
	bad.units = train_alloc(1000 * sizeof(shardd_unit));
	TRAIN_FAILS(shardd_clip(m.c, &bad, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	free((void *)bad.units);
	TRAIN_FAILS(shardd_clip(m.c,
				SHARDD_OPTIONS(clip, .group = 0, .by_value = true, .value = -1,
					       .units = NULL, .n_units = 0),
				NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_clip(m.c,
				SHARDD_OPTIONS(clip, .group = 0, .by_value = true, .value = NAN,
					       .units = NULL, .n_units = 0),
				NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_clip(m.c,
				SHARDD_OPTIONS(clip, .group = 0, .by_value = true, .value = 1,
					       .units = NULL, .n_units = 3),
				NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	/* and what differs between ranks */
	clip.units = &m.u[t->rank];
	clip.n_units = 1;
	TRAIN_FAILS(shardd_clip(m.c, &clip, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_barrier(m.c, 0, &train_err));
	test_clip_end(&m);
	return 0;
}

Test(clip, wrong_calls_are_refused)
{
	trainfix_run(WORLD, wrong_trainer, NULL);
}
