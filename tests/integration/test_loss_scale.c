/* A scaled loss: unscaling, an infinity on any rank, steps that are skipped and not counted,
 * and the scale by PyTorch's rule. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "failfix.h"

enum { WORLD = 2, N = 1003 };

static const struct shardd_unit_spec with_adamw = {
	.optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8 }
};

/* @factor: a power of two, so that it is undone exactly. */
static void reduce(shardd_client *c, const struct trainer *t, shardd_unit u, unsigned step,
		   float factor, bool inf)
{
	float *x = train_numbers(N, step * 8 + t->rank);

	for (size_t i = 0; i < N; i++)
		x[i] *= factor;
	if (inf && t->rank == 1)
		x[N - 1] = INFINITY;
	train_reduce(c, u, DTYPE_FP32, x, N);
	free(x);
}

static int scale_trainer(const struct trainer *t)
{
	const struct shardd_step_options skip = { .size = sizeof(skip), .skip_if_found = true };
	shardd_client *c = train_join(t);
	struct shardd_unit_info scaled = train_register(c, "scaled", N, &with_adamw);
	struct shardd_unit_info plain = train_register(c, "plain", N, &with_adamw);
	struct shardd_scaler s;
	float got[N], want[N];
	unsigned steps = 0;

	TRAIN_OK(shardd_init_seed(c, scaled.unit, 1, &train_err));
	TRAIN_OK(shardd_init_seed(c, plain.unit, 1, &train_err));
	shardd_scaler_init(&s);
	s.growth_interval = 3;
	for (unsigned step = 1; step <= 10; step++) {
		bool inf = step == 4 || step == 5, found = false;
		struct shardd_result r;

		reduce(c, t, scaled.unit, step, s.scale, inf);
		TRAIN_OK(shardd_unscale(c, SHARDD_WORLD, shardd_scaler_inverse(&s), &found,
					&train_err));
		TRAINER_CHECK(found == inf);
		TRAIN_FAILS(shardd_unscale(c, SHARDD_WORLD, 1, NULL, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		told_now("were unscaled since the last step already");
		TRAIN_OK(shardd_step_with(c, &skip, &r, &train_err));
		TRAINER_CHECK(r.skipped == inf && r.found_inf == inf);
		shardd_scaler_update(&s, found);
		if (!inf) {
			steps++;
			reduce(c, t, plain.unit, step, 1, false);
			TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		}
		train_params(c, scaled.unit, got, sizeof(got));
		train_params(c, plain.unit, want, sizeof(want));
		TRAIN_SAME(got, want, sizeof(got));
	}
	/* grown after 3, halved twice, grown after 3 more, and 2 on the way */
	TRAINER_CHECK(s.scale == 65536.0F * 2 / 4 * 2 && s.steps == 2);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	scaled = train_register(c, "scaled", N, &with_adamw);
	TRAINER_CHECK(scaled.optimizer_steps == steps);
	train_leave(c);
	return 0;
}

Test(loss_scale, a_step_with_an_infinity_is_skipped_as_a_whole, .timeout = 60,
     .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(WORLD, scale_trainer, NULL);
}

/* Without skip_if_found an infinity goes where it goes; discard drops any gradient. */
static int choice_trainer(const struct trainer *t)
{
	const struct shardd_step_options plain = { .size = sizeof(plain) };
	const struct shardd_step_options discard = { .size = sizeof(discard), .discard = true };
	const struct shardd_step_options bad = { .size = 3 };
	shardd_client *c = train_join(t);
	struct shardd_unit_info u = train_register(c, "u", N, &with_adamw);
	struct shardd_result r = { 0 };
	float before[N], got[N];

	TRAIN_OK(shardd_init_seed(c, u.unit, 1, &train_err));
	train_params(c, u.unit, before, sizeof(before));
	reduce(c, t, u.unit, 1, 1, false);
	TRAIN_OK(shardd_step_with(c, &discard, &r, &train_err));
	TRAINER_CHECK(r.skipped && !r.found_inf);
	train_params(c, u.unit, got, sizeof(got));
	TRAIN_SAME(got, before, sizeof(got));
	reduce(c, t, u.unit, 2, 1, true);
	TRAIN_OK(shardd_unscale(c, SHARDD_WORLD, 0.5, NULL, &train_err));
	TRAIN_OK(shardd_step_with(c, &plain, &r, &train_err));
	TRAINER_CHECK(!r.skipped && r.found_inf);
	train_params(c, u.unit, got, sizeof(got));
	TRAINER_CHECK(isnan(got[N - 1]) && !isnan(got[0]));
	TRAIN_FAILS(shardd_step_with(c, &bad, &r, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_unscale(c, SHARDD_WORLD, 0, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_unscale(c, SHARDD_WORLD, NAN, NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_unscale(c, SHARDD_WORLD, INFINITY, NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_unscale(c, 7, 1, NULL, &train_err), SHARDD_NOT_FOUND);
	train_leave(c);
	return 0;
}

Test(loss_scale, skipping_is_a_choice, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(WORLD, choice_trainer, NULL);
}
