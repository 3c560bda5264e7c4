/*
 * Optimizers through a daemon against torch.optim: every case of
 * tests/golden/optim.safetensors as a unit of a job of one rank, where a reduction divides by
 * nothing. After each step and commit the parameters are those that torch had, bit for bit.
 * What a trainer cannot see, the optimizer state, test_golden_state compares.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "golden_optim.h"
#include "trainfix.h"

TestSuite(golden_steps, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { N = GOLDEN_OPTIM_N, MAX_CASES = 32 };

struct scene {
	struct golden_optim cases[MAX_CASES];
	unsigned n;
	enum shardd_optimizer_profile profile;
};

/* ------------------------------------------------------------------ a case */

static struct shardd_optimizer optimizer_of(const struct golden_optim *o,
					    enum shardd_optimizer_profile profile)
{
	return (struct shardd_optimizer){ .kind = golden_optim_is(o, "sgd")    ? SHARDD_SGD
						  : golden_optim_is(o, "adam") ? SHARDD_ADAM
									       : SHARDD_ADAMW,
					  .lr = o->lr[0],
					  .weight_decay = o->weight_decay,
					  .momentum = o->momentum,
					  .dampening = o->dampening,
					  .nesterov = o->nesterov,
					  .beta1 = o->beta1,
					  .beta2 = o->beta2,
					  .eps = o->eps,
					  .complete = !golden_optim_is(o, "sgd"),
					  .amsgrad = o->amsgrad,
					  .maximize = o->maximize,
					  .profile = profile };
}

static shardd_unit make_unit(shardd_client *c, const struct scene *s, const struct golden_optim *o)
{
	const struct shardd_unit_spec like = { .optimizer = optimizer_of(o, s->profile) };
	struct shardd_unit_info info = train_register(c, o->name, N, &like);
	uint64_t buffer;
	void *data;

	TRAINER_CHECK(info.packed_elements == N);
	TRAIN_OK(shardd_alloc(c, N * sizeof(float), &buffer, &data, &train_err));
	train_write(c, data, o->start, N * sizeof(float));
	TRAIN_OK(shardd_init_broadcast(c, info.unit, 0, buffer, &train_err));
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	return info.unit;
}

/* As GradScaler does it: unscaled, and left out if an element is infinite. */
static void scaled_step(shardd_client *c, const struct golden_optim *o, unsigned i)
{
	const struct shardd_step_options how = { .size = sizeof(how),
						 .lr = &o->lr[i],
						 .skip_if_found = true };
	bool want = golden_optim_number(o, "found", i) != 0, found = !want;
	struct shardd_scaler s;
	struct shardd_result r;

	shardd_scaler_init(&s);
	s.scale = golden_optim_number(o, "scale", i);
	TRAIN_OK(shardd_unscale(c, SHARDD_WORLD, shardd_scaler_inverse(&s), &found, &train_err));
	TRAINER_CHECK(found == want);
	TRAIN_OK(shardd_step_with(c, &how, &r, &train_err));
	TRAINER_CHECK(r.skipped == want);
}

static void check_params(shardd_client *c, shardd_unit u, const struct golden_optim *o, unsigned i)
{
	char text[256];
	float p[N];

	train_params(c, u, p, sizeof(p));
	if (golden_optim_same(o, "p", p, i, text, sizeof(text)))
		return;
	fprintf(stderr, "%s\n", text);
	TRAINER_CHECK(!"the same");
}

/* A job of its own, since a step is of all units and has one learning rate. */
static void run_case(const struct trainer *t, const struct scene *s, const struct golden_optim *o)
{
	struct trainer own = *t;
	shardd_client *c;
	shardd_unit u;
	char job[64];

	snprintf(job, sizeof(job), "%s-%zu", t->job, (size_t)(o - s->cases));
	own.job = job;
	c = train_join(&own);
	u = make_unit(c, s, o);
	for (unsigned i = 0; i < GOLDEN_OPTIM_STEPS; i++) {
		train_reduce(c, u, DTYPE_FP32, golden_optim_gradients(o, i), N);
		if (o->scaler)
			scaled_step(c, o, i);
		else
			TRAIN_OK(shardd_step(c, SHARDD_WORLD, &o->lr[i], &train_err));
		TRAIN_OK(shardd_commit(c, i + 1, NULL, 0, &train_err));
		check_params(c, u, o, i);
	}
	train_leave(c);
}

static int steps_trainer(const struct trainer *t)
{
	const struct scene *s = t->arg;

	for (unsigned i = 0; i < s->n; i++)
		run_case(t, s, &s->cases[i]);
	return 0;
}

/* ------------------------------------------------------------------ all of them */

/* The cases of @optimizer and @form, at least @least, as units with @profile. */
static void check_cases(const char *optimizer, const char *form,
			enum shardd_optimizer_profile profile, unsigned least)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("optim.safetensors");
	_cleanup_(freep) struct scene *s = calloc(1, sizeof(*s));
	const char *name, *about;
	void *iter = NULL;

	cr_assert_not_null(s);
	s->profile = profile;
	while (safetensors_next(f, &iter, &name, &about)) {
		if (!golden_is(about, "optimizer", optimizer) || !golden_is(about, "form", form))
			continue;
		cr_assert_lt(s->n, MAX_CASES);
		golden_optim_read(&s->cases[s->n], f, name, about);
		s->n += !golden_optim_divides(&s->cases[s->n]);
	}
	cr_assert_geq(s->n, least, "%u cases of %s %s", s->n, optimizer, form);
	trainfix_run(1, steps_trainer, s);
}

#define GOLDEN_STEPS(name, optimizer, form, profile, least)   \
	Test(golden_steps, name)                              \
	{                                                     \
		check_cases(optimizer, form, profile, least); \
	}

GOLDEN_STEPS(adamw, "adamw", "single", SHARDD_OPTIM_EAGER_SINGLE, 20)
GOLDEN_STEPS(adamw_foreach, "adamw", "single", SHARDD_OPTIM_FOREACH, 20)
GOLDEN_STEPS(adamw_fused, "adamw", "fused", SHARDD_OPTIM_FUSED, 20)
GOLDEN_STEPS(adamw_in_double, "adamw", "f64", SHARDD_OPTIM_REFERENCE_F64, 5)
GOLDEN_STEPS(adam, "adam", "single", SHARDD_OPTIM_EAGER_SINGLE, 19)
GOLDEN_STEPS(adam_foreach, "adam", "single", SHARDD_OPTIM_FOREACH, 19)
GOLDEN_STEPS(adam_fused, "adam", "fused", SHARDD_OPTIM_FUSED, 19)
GOLDEN_STEPS(adam_in_double, "adam", "f64", SHARDD_OPTIM_REFERENCE_F64, 5)
GOLDEN_STEPS(sgd, "sgd", "single", SHARDD_OPTIM_EAGER_SINGLE, 18)
GOLDEN_STEPS(sgd_foreach, "sgd", "single", SHARDD_OPTIM_FOREACH, 18)
GOLDEN_STEPS(sgd_fused, "sgd", "fused", SHARDD_OPTIM_FUSED, 17)
