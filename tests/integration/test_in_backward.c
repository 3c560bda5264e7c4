/*
 * Optimizers in backward, the trainer's own optimizer: the same bits as the ordinary step, with
 * clipping, micro-batches and a scaled loss too; less memory; and what a death leaves.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(in_backward, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 2, UNITS = 3, STEPS = 6, MICRO = 3 };

/* Rows, columns and a bias without decay: tensors that do not divide, some smaller than the
 * world. */
static const uint64_t rows[UNITS] = { 37, 1, 500 };

struct way {
	const char *name;
	enum shardd_layout layout;
	enum shardd_optimizer_kind kind;
	enum shardd_dtype compute;
	bool amsgrad;
	double clip;      /* 0: none */
	double inv_scale; /* 0: none */
	unsigned micro;
	unsigned inf_at; /* step with an infinity; 0: none */
};

static struct shardd_unit_info register_unit(shardd_client *c, const struct way *w, unsigned i,
					     enum shardd_optimizer_when when)
{
	const uint64_t shape[] = { rows[i], 13 };
	struct shardd_tensor tensors[] = {
		{ .name = "weight",
		  .shape = shape,
		  .dims = 2,
		  .init = SHARDD_INIT_NORMAL,
		  .b = 0.3 },
		{ .name = "bias",
		  .shape = shape,
		  .dims = 1,
		  .init = SHARDD_INIT_UNIFORM,
		  .a = -1,
		  .b = 1,
		  .has_weight_decay = true },
	};
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .tensors = tensors,
					 .n_tensors = 2,
					 .compute_dtype = w->compute,
					 .gradient_dtype = SHARDD_FP32,
					 .layout = w->layout };
	struct shardd_unit_info info = { 0 };
	char name[64];

	snprintf(name, sizeof(name), "%s %s %u", w->name,
		 when == SHARDD_OPTIM_IN_BACKWARD ? "back" : "step", i);
	spec.name = name;
	spec.optimizer = (struct shardd_optimizer){ .kind = w->kind,
						    .lr = 0.01,
						    .weight_decay = 0.1,
						    .momentum = w->kind == SHARDD_SGD ? 0.9 : 0,
						    .beta1 = w->kind == SHARDD_SGD ? 0 : 0.9,
						    .beta2 = w->kind == SHARDD_SGD ? 0 : 0.99,
						    .eps = w->kind == SHARDD_SGD ? 0 : 1e-8,
						    .amsgrad = w->amsgrad,
						    .when = when };
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	return info;
}

/* The same parameters in both: rank 0's numbers. */
static void init_unit(shardd_client *c, const struct trainer *t, const struct shardd_unit_info *u,
		      unsigned i)
{
	uint64_t buffer = 0, n = rows[i] * 14;
	float *x = train_numbers(n, 77 + i);
	void *data;

	if (t->rank == 0) {
		TRAIN_OK(shardd_alloc(c, n * sizeof(float), &buffer, &data, &train_err));
		train_write(c, data, x, n * sizeof(float));
	}
	TRAIN_OK(shardd_init_broadcast(c, u->unit, 0, buffer, &train_err));
	if (t->rank == 0)
		TRAIN_OK(shardd_free(c, buffer, &train_err));
	free(x);
}

static void hand_in(shardd_client *c, const struct trainer *t, const struct way *w,
		    const struct shardd_unit_info *u, unsigned i, unsigned step, unsigned micro)
{
	size_t n = u->elements;
	float *x = train_numbers(n, (t->rank * 31 + step) * 57 + i * 7 + micro);

	if (w->inf_at && step == w->inf_at && i == 1 && t->rank == 1)
		x[0] = INFINITY;
	if (w->layout == SHARDD_LAYOUT_DIM0 && rows[i] % 2) /* the last row is padding: nobody's */
		x[n - 1] = NAN;
	train_fill_gradient(c, u->unit, DTYPE_FP32, x, n);
	free(x);
	if (micro + 1 < w->micro)
		TRAIN_OK(shardd_reduce_with(c,
					    SHARDD_OPTIONS(reduce, .unit = u->unit, .more = true),
					    NULL, &train_err));
	else
		TRAIN_OK(shardd_reduce(c, u->unit, &train_err));
}

static struct shardd_clip_options clip_of(const struct way *w)
{
	return (struct shardd_clip_options){ .size = sizeof(struct shardd_clip_options),
					     .max_norm = w->clip,
					     .profile = SHARDD_CLIP_TORCH };
}

static void plan(shardd_client *c, const struct way *w, const double *lr)
{
	struct shardd_clip_options clip = clip_of(w);
	struct shardd_plan_backward_options p = { .size = sizeof(p),
						  .clip = w->clip != 0 ? &clip : NULL,
						  .inv_scale = w->inv_scale,
						  .lr = lr };

	TRAIN_OK(shardd_plan_backward(c, &p, &train_err));
}

/* Backward: the last unit first; whoever reads a unit lets go of it behind its reduce. */
static void backward(shardd_client *c, const struct trainer *t, const struct way *w,
		     const struct shardd_unit_info *u, unsigned step)
{
	for (unsigned micro = 0; micro < w->micro; micro++) {
		for (unsigned i = UNITS; i-- > 0;) {
			bool held = i == 2 && micro + 1 == w->micro;

			if (held)
				TRAIN_OK(shardd_gather(c, u[i].unit, NULL, &train_err));
			hand_in(c, t, w, &u[i], i, step, micro);
			if (held)
				TRAIN_OK(shardd_release(c, u[i].unit, &train_err));
		}
	}
}

static void compare_units(shardd_client *c, const struct shardd_unit_info *a,
			  const struct shardd_unit_info *b, size_t bytes)
{
	void *x = train_alloc(bytes), *y = train_alloc(bytes);

	train_params(c, a->unit, x, bytes);
	train_params(c, b->unit, y, bytes);
	TRAIN_SAME(x, y, bytes);
	free(x);
	free(y);
}

/* The units' sums of squares, fp64, are added in the order of their arrival: on the host that
 * is the same order every time. On GPUs every addition may round otherwise; none of the
 * sums cancels, so each is off by at most 2^-53 of it. */
static bool same_norm(double a, double b, const struct shardd_unit_info *u)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < UNITS; i++)
		n += u[i].elements;
	return train_on_host() ? a == b : fabs(a - b) <= b * (double)n * 0x1p-52;
}

static void step_both(shardd_client *c, const struct trainer *t, const struct way *w,
		      const struct shardd_unit_info *back, const struct shardd_unit_info *at_step,
		      unsigned step)
{
	double lr = 0.01 * (1 + step % 2), norm = -1;
	struct shardd_step_options o = { .size = sizeof(o) };
	struct shardd_result got, want;
	struct shardd_clip_options clip = clip_of(w);

	plan(c, w, &lr);
	backward(c, t, w, back, step);
	TRAIN_OK(shardd_step_with(c, &o, &got, &train_err));
	backward(c, t, w, at_step, step);
	if (w->inv_scale != 0)
		TRAIN_OK(shardd_unscale(c, SHARDD_WORLD, w->inv_scale, NULL, &train_err));
	if (w->clip != 0)
		TRAIN_OK(shardd_clip(c, &clip, &norm, &train_err));
	o.lr = &lr;
	o.skip_if_found = true;
	TRAIN_OK(shardd_step_with(c, &o, &want, &train_err));
	TRAINER_CHECK(got.skipped == want.skipped && got.found_inf == want.found_inf);
	TRAINER_CHECK(got.skipped == (w->inf_at && step == w->inf_at));
	TRAINER_CHECK(got.has_total_norm == (w->clip != 0));
	if (w->clip != 0 && !got.skipped)
		TRAINER_CHECK(same_norm(got.total_norm, norm, back));
}

static void one_way(shardd_client *c, const struct trainer *t, const struct way *w,
		    uint64_t *committed)
{
	struct shardd_unit_info back[UNITS], at_step[UNITS];

	for (unsigned i = 0; i < UNITS; i++) {
		back[i] = register_unit(c, w, i, SHARDD_OPTIM_IN_BACKWARD);
		init_unit(c, t, &back[i], i);
	}
	for (unsigned i = 0; i < UNITS; i++) {
		at_step[i] = register_unit(c, w, i, SHARDD_OPTIM_AT_STEP);
		init_unit(c, t, &at_step[i], i);
	}
	for (unsigned step = 1; step <= STEPS; step++) {
		step_both(c, t, w, back, at_step, step);
		if (step % 2)
			TRAIN_OK(shardd_commit(c, ++*committed, NULL, 0, &train_err));
		for (unsigned i = 0; i < UNITS; i++)
			compare_units(c, &back[i], &at_step[i],
				      back[i].elements * shardd_dtype_size(w->compute
										   ? w->compute
										   : SHARDD_FP32));
	}
}

static int same_trainer(const struct trainer *t)
{
	static const struct way ways[] = {
		{ "plain", .kind = SHARDD_ADAMW, .micro = 1 },
		{ "sgd", .kind = SHARDD_SGD, .micro = 1, .compute = SHARDD_BF16 },
		{ "rows", SHARDD_LAYOUT_DIM0, SHARDD_ADAM, .amsgrad = true, .micro = 1 },
		{ "micro", .kind = SHARDD_ADAMW, .compute = SHARDD_BF16, .micro = MICRO },
		{ "clip", .kind = SHARDD_ADAMW, .clip = 0.5, .micro = 1 },
		{ "clip rows", SHARDD_LAYOUT_DIM0, SHARDD_ADAMW, .clip = 0.5, .micro = MICRO },
		{ "scale", .kind = SHARDD_ADAMW, .inv_scale = 0.25, .inf_at = 3, .micro = 1 },
		{ "all", SHARDD_LAYOUT_DIM0, SHARDD_ADAMW, SHARDD_BF16, true, 0.7, 0.125, MICRO,
		  4 },
	};
	shardd_client *c = train_join(t);
	uint64_t committed = 0;

	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		one_way(c, t, &ways[i], &committed);
	train_leave(c);
	return 0;
}

Test(in_backward, it_has_the_bits_of_the_ordinary_step)
{
	trainfix_run(WORLD, same_trainer, NULL);
}
