/*
 * Clip, SGD and AdamW over many steps, bit for bit against kernels/ref. Two ranks: the
 * gradient is rank 0's and rank 1's, each divided by 2, added up.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

enum { N = 3001, WORLD = 2, STEPS = 20 };

static uint64_t seed_of(uint32_t rank, unsigned step)
{
	return rank * 1000003ull + step * 7919ull + 17;
}

/* What the shards hold after the reduce of step @step. */
static void model_gradient(float *g, size_t n, unsigned step)
{
	float *x[WORLD];
	const void *in[WORLD];
	struct k_reduce r = { .out = g,
			      .in = in,
			      .k = WORLD,
			      .in_dtype = DTYPE_FP32,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = k_divide_by(2, DTYPE_FP32) };

	for (uint32_t rank = 0; rank < WORLD; rank++)
		in[rank] = x[rank] = train_numbers(n, seed_of(rank, step));
	kernels_ref()->reduce(&r, 0, n);
	for (uint32_t rank = 0; rank < WORLD; rank++)
		free(x[rank]);
}

static void reduce_step(shardd_client *c, const struct trainer *t, shardd_unit u, size_t n,
			unsigned step)
{
	float *values = train_numbers(n, seed_of(t->rank, step));

	train_reduce(c, u, DTYPE_FP32, values, n);
	free(values);
}

/* What the daemon must compute: parameters and state of one unit. */
struct model {
	struct shardd_optimizer o;
	unsigned steps;
	float p[N], g[N], s1[N], s2[N], s3[N];
};

static void model_adamw(struct model *m, double lr)
{
	double t = ++m->steps;
	const struct k_adamw a = { .p = m->p,
				   .g = m->g,
				   .m = m->s1,
				   .v = m->s2,
				   .decay = (float)(1 - lr * m->o.weight_decay),
				   .w1 = (float)(1 - m->o.beta1),
				   .b1 = (float)m->o.beta1,
				   .b2 = (float)m->o.beta2,
				   .w2 = (float)(1 - m->o.beta2),
				   .step_size = (float)(lr / (1 - pow(m->o.beta1, t))),
				   .sq = (float)sqrt(1 - pow(m->o.beta2, t)),
				   .eps = (float)m->o.eps,
				   .vmax = m->o.amsgrad ? m->s3 : NULL,
				   .maximize = m->o.maximize };

	kernels_ref()->adamw(&a, 0, N);
}

static void model_adam(struct model *m, double lr)
{
	double t = ++m->steps;
	const struct k_adam a = { .p = m->p,
				  .g = m->g,
				  .m = m->s1,
				  .v = m->s2,
				  .wd = (float)m->o.weight_decay,
				  .w1 = (float)(1 - m->o.beta1),
				  .b2 = (float)m->o.beta2,
				  .w2 = (float)(1 - m->o.beta2),
				  .step_size = (float)(lr / (1 - pow(m->o.beta1, t))),
				  .sq = (float)sqrt(1 - pow(m->o.beta2, t)),
				  .eps = (float)m->o.eps,
				  .vmax = m->o.amsgrad ? m->s3 : NULL,
				  .maximize = m->o.maximize };

	kernels_ref()->adam(&a, 0, N);
}

static void model_sgd(struct model *m, double lr)
{
	const struct k_sgd a = { .p = m->p,
				 .g = m->g,
				 .buf = m->o.momentum != 0 ? m->s1 : NULL,
				 .lr = (float)lr,
				 .wd = (float)m->o.weight_decay,
				 .mu = (float)m->o.momentum,
				 .nesterov = m->o.nesterov,
				 .dampening = m->o.dampening,
				 .maximize = m->o.maximize,
				 .first = m->steps++ == 0 };

	kernels_ref()->sgd(&a, 0, N);
}

static void model_step(struct model *m, double lr)
{
	if (m->o.kind == SHARDD_ADAMW)
		model_adamw(m, lr);
	else if (m->o.kind == SHARDD_ADAM)
		model_adam(m, lr);
	else
		model_sgd(m, lr);
}

/* A unit with random parameters, the same in the model. */
static shardd_unit test_optimizer_begin(shardd_client *c, struct model *m, const char *name)
{
	struct shardd_unit_spec like = { .optimizer = m->o };
	uint64_t shape = N;
	struct shardd_tensor tensor = { .name = "weight",
					.shape = &shape,
					.dims = 1,
					.init = SHARDD_INIT_NORMAL,
					.a = 0.1,
					.b = 0.5 };
	struct shardd_unit_info info;

	like.size = sizeof(like);
	like.name = name;
	like.tensors = &tensor;
	like.n_tensors = 1;
	TRAIN_OK(shardd_register(c, &like, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 99, &train_err));
	train_params(c, info.unit, m->p, sizeof(m->p));
	return info.unit;
}

/* STEPS steps; every third one with a learning rate of its own. */
static void compare(shardd_client *c, const struct trainer *t, const struct shardd_optimizer *o,
		    const char *name)
{
	struct model *m = train_alloc(sizeof(*m));
	float *got = train_alloc(sizeof(m->p));
	shardd_unit u;

	m->o = *o;
	u = test_optimizer_begin(c, m, name);
	for (unsigned step = 0; step < STEPS; step++) {
		double lr = step % 3 == 2 ? o->lr * (0.1 + step) : o->lr;

		reduce_step(c, t, u, N, step);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, step % 3 == 2 ? &lr : NULL, &train_err));
		if (step % 4 == 1) /* applied by the commit, else by the gather */
			TRAIN_OK(shardd_commit(c, ++*(uint64_t *)t->arg, NULL, 0, &train_err));
		model_gradient(m->g, N, step);
		model_step(m, lr);
		train_params(c, u, got, sizeof(m->p));
		TRAIN_SAME(got, m->p, sizeof(m->p));
	}
	free(m);
	free(got);
}

static int optimizer_trainer(const struct trainer *t)
{
	static const struct {
		const char *name;
		struct shardd_optimizer o;
	} cases[] = {
		{ "plain", { .kind = SHARDD_SGD, .lr = 0.1 } },
		{ "decay", { .kind = SHARDD_SGD, .lr = 0.05, .weight_decay = 0.01 } },
		{ "momentum", { .kind = SHARDD_SGD, .lr = 0.03, .momentum = 0.9 } },
		{ "both", { SHARDD_SGD, .lr = 0.03, .weight_decay = 0.1, .momentum = 0.8 } },
		{ "nesterov",
		  { SHARDD_SGD, .lr = 0.01, .weight_decay = 1e-3, .momentum = 0.95,
		    .nesterov = 1 } },
		{ "adamw",
		  { SHARDD_ADAMW, .lr = 1e-3, .weight_decay = 0.01, .beta1 = 0.9, .beta2 = 0.999,
		    .eps = 1e-8 } },
		{ "no decay",
		  { SHARDD_ADAMW, .lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6 } },
		{ "dampening",
		  { SHARDD_SGD, .lr = 0.02, .weight_decay = 1e-2, .momentum = 0.9, .dampening = 0.3,
		    .maximize = true } },
		{ "adam",
		  { SHARDD_ADAM, .lr = 0.01, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99,
		    .eps = 1e-8 } },
		{ "amsgrad",
		  { SHARDD_ADAMW, .lr = 0.01, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.5,
		    .eps = 1e-8, .amsgrad = true } },
		{ "maximize",
		  { SHARDD_ADAM, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.5, .eps = 1e-8,
		    .amsgrad = true, .maximize = true } },
		{ "small beta",
		  { SHARDD_ADAMW, .lr = 0.01, .beta1 = 0.3, .beta2 = 0.5, .eps = 1e-3 } },
	};
	shardd_client *c = train_join(t);
	uint64_t committed = 0;
	struct trainer mine = *t;

	mine.arg = &committed;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		compare(c, &mine, &cases[i].o, cases[i].name);
	train_leave(c);
	return 0;
}

Test(optimizer, steps_are_those_of_the_reference, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(WORLD, optimizer_trainer, NULL);
}

/* beta1, beta2 and eps all 0 mean 0.9, 0.999 and 1e-8. */
static int defaults_trainer(const struct trainer *t)
{
	const struct shardd_optimizer given = { SHARDD_ADAMW, .lr = 1e-2, .weight_decay = 0.1 };
	shardd_client *c = train_join(t);
	struct model *m = train_alloc(sizeof(*m));
	float got[N];
	shardd_unit u;

	m->o = given;
	u = test_optimizer_begin(c, m, "unit");
	m->o.beta1 = 0.9;
	m->o.beta2 = 0.999;
	m->o.eps = 1e-8;
	for (unsigned step = 0; step < 5; step++) {
		reduce_step(c, t, u, N, step);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		model_gradient(m->g, N, step);
		model_step(m, given.lr);
	}
	train_params(c, u, got, sizeof(got));
	TRAIN_SAME(got, m->p, sizeof(got));
	free(m);
	train_leave(c);
	return 0;
}

Test(optimizer, adamw_has_defaults, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(WORLD, defaults_trainer, NULL);
}

/* Initialised again, a unit begins from zero: state and count of steps too. */
static int again_trainer(const struct trainer *t)
{
	const struct shardd_optimizer o = { SHARDD_ADAMW, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99,
					    .eps = 1e-8 };
	shardd_client *c = train_join(t);
	struct model *m = train_alloc(sizeof(*m));
	float got[N], start[N];
	shardd_unit u;

	m->o = o;
	u = test_optimizer_begin(c, m, "unit");
	memcpy(start, m->p, sizeof(start));
	for (unsigned life = 0; life < 2; life++) {
		memcpy(m->p, start, sizeof(start));
		memset(m->s1, 0, sizeof(m->s1));
		memset(m->s2, 0, sizeof(m->s2));
		m->steps = 0;
		for (unsigned step = 0; step < 3; step++) {
			reduce_step(c, t, u, N, step);
			TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
			model_gradient(m->g, N, step);
			model_step(m, o.lr);
		}
		train_params(c, u, got, sizeof(got));
		TRAIN_SAME(got, m->p, sizeof(got));
		/* a gradient that waits for a step belongs to the parameters that go */
		reduce_step(c, t, u, N, 7);
		TRAIN_OK(shardd_init_seed(c, u, 99, &train_err));
		train_params(c, u, got, sizeof(got));
		TRAIN_SAME(got, start, sizeof(got));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		train_params(c, u, got, sizeof(got));
		TRAIN_SAME(got, start, sizeof(got));
	}
	free(m);
	train_leave(c);
	return 0;
}

Test(optimizer, begins_anew_with_the_parameters, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(WORLD, again_trainer, NULL);
}

/* ---------------------------------------------------------------------- clip */

enum { BIG = 150001, UNITS = 3 };

static const size_t clip_sizes[UNITS] = { 5, BIG, 2000 };

/* Total of all units' gradients, the blocks' sums added up in the order of the units. */
static double model_norm(float *const *g, bool inf)
{
	double sum = 0;

	for (unsigned i = 0; i < UNITS; i++) {
		double partial[BIG / KERNEL_NORM_BLOCK + 1];
		const struct k_norm a = { g[i], partial, inf ? INFINITY : 2 };
		size_t blocks = (clip_sizes[i] + KERNEL_NORM_BLOCK - 1) / KERNEL_NORM_BLOCK;

		kernels_ref()->norm(&a, 0, clip_sizes[i]);
		for (size_t b = 0; b < blocks; b++)
			sum = !inf ? sum + partial[b] : partial[b] > sum ? partial[b] : sum;
	}
	return inf ? sum : sqrt(sum);
}

/* A GPU adds up the squares in an order of its own, in fp64 as well. */
static bool norm_is(double got, double want)
{
	if (isnan(want))
		return isnan(got);
	return got == want || (!train_on_host() && fabs(got - want) <= 1e-12 * want);
}

struct clip_case {
	double max_norm, type;
	float poison; /* written into one gradient of rank 0, unless 0 */
	bool scales;
};

/* Fill and reduce all units; @g gets what the shards then hold. */
static void clip_reduce(shardd_client *c, const struct trainer *t, const shardd_unit *u, float **g,
			float poison)
{
	for (unsigned i = 0; i < UNITS; i++) {
		float *x = train_numbers(clip_sizes[i], seed_of(t->rank, i));
		size_t at = clip_sizes[i] - 1;

		g[i] = train_alloc(clip_sizes[i] * sizeof(float));
		model_gradient(g[i], clip_sizes[i], i);
		if (poison != 0 && i == 1) {
			if (t->rank == 0)
				x[at] = poison;
			else
				x[at] = 0;
			g[i][at] = poison / 2;
		}
		train_reduce(c, u[i], DTYPE_FP32, x, clip_sizes[i]);
		free(x);
	}
}

/* The parameters were 0, so they are -gradient now. NaN may have any sign and payload. */
static void check_unit(shardd_client *c, shardd_unit u, const float *g, size_t n)
{
	float *got = train_alloc(n * sizeof(float)), *want = train_alloc(n * sizeof(float));
	const struct k_sgd sgd = { .p = want, .g = g, .lr = 1 };

	kernels_ref()->sgd(&sgd, 0, n);
	train_params(c, u, got, n * sizeof(float));
	for (size_t i = 0; i < n; i++) {
		if (isnan(want[i]) && isnan(got[i]))
			want[i] = got[i] = 0;
	}
	TRAIN_SAME(got, want, n * sizeof(float));
	free(got);
	free(want);
}

static void clip_case(shardd_client *c, const struct trainer *t, const shardd_unit *u,
		      const struct clip_case *k)
{
	float *g[UNITS];
	double total = -1, want;

	for (unsigned i = 0; i < UNITS; i++)
		TRAIN_OK(shardd_init_seed(c, u[i], 1, &train_err));
	clip_reduce(c, t, u, g, k->poison);
	want = isnan(k->poison) ? NAN : model_norm(g, isinf(k->type));
	TRAIN_OK(shardd_clip_grad_norm(c, SHARDD_WORLD, k->max_norm, k->type, &total, &train_err));
	TRAINER_CHECK(norm_is(total, want));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < UNITS; i++) {
		const struct k_scale s = { g[i], (float)k->max_norm / ((float)total + 1e-6f),
					   NULL };

		if (k->scales)
			kernels_ref()->scale(&s, 0, clip_sizes[i]);
		check_unit(c, u[i], g[i], clip_sizes[i]);
		free(g[i]);
	}
}

static int clip_trainer(const struct trainer *t)
{
	static const struct clip_case
		cases[] = {
			{ 1.0, 2, 0, true },
			{ 0.25, INFINITY, 0, true },
			{ 1e-3, 2, 0, true },
			{ 1e6, 2, 0, false }, /* larger than the norm: left alone */
			{ 1.0, INFINITY, 0, false },
			{ 1.0, 2, NAN, false }, /* no norm: left alone */
			{ 1.0, INFINITY, NAN, false },
			{ 1.0, 2, INFINITY, true }, /* factor 0: zeros, and NaN where it was infinite */
		};
	const struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = train_join(t);
	shardd_unit u[UNITS];
	double total = -1;

	u[0] = train_zero_unit(c, "small", clip_sizes[0], &like);
	u[1] = train_zero_unit(c, "big", clip_sizes[1], &like);
	u[2] = train_zero_unit(c, "middle", clip_sizes[2], &like);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		clip_case(c, t, u, &cases[i]);

	/* without any gradient the norm is 0 */
	TRAIN_OK(shardd_clip_grad_norm(c, SHARDD_WORLD, 1, 2, &total, &train_err));
	TRAINER_CHECK(total == 0);
	train_leave(c);
	return 0;
}

Test(optimizer, clip_scales_by_the_total_norm, .timeout = 120, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(WORLD, clip_trainer, NULL);
}

/* Only units of the group, and only those that have a gradient, count. */
static int clip_group_trainer(const struct trainer *t)
{
	static const uint32_t ranks[] = { 1, 0 };
	struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 },
					 .pre_divide = 1,
					 .post_divide = 1 };
	shardd_client *c = train_join(t);
	shardd_unit in, out, none;
	float ones[4] = { 1, 1, 1, 1 }, got[4];
	double total;

	out = train_zero_unit(c, "of the world", 4, &like);
	TRAIN_OK(shardd_group_create(c, "turned", ranks, 2, &like.group, &train_err));
	in = train_zero_unit(c, "of the group", 4, &like);
	none = train_zero_unit(c, "without gradient", 4, &like);
	train_reduce(c, out, DTYPE_FP32, ones, 4);
	train_reduce(c, in, DTYPE_FP32, ones, 4);
	TRAIN_OK(shardd_clip_grad_norm(c, like.group, 2, 2, &total, &train_err));
	TRAINER_CHECK(total == 4); /* four elements, 1 from each rank */
	TRAIN_OK(shardd_step(c, like.group, NULL, &train_err));
	train_params(c, in, got, sizeof(got));
	TRAINER_CHECK(got[0] == -2 * (float)(2 / (4 + 1e-6)));
	train_params(c, out, got, sizeof(got));
	TRAINER_CHECK(got[0] == 0); /* not stepped yet */
	train_params(c, none, got, sizeof(got));
	TRAINER_CHECK(got[0] == 0);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, out, got, sizeof(got));
	TRAINER_CHECK(got[0] == -2); /* and not scaled */
	train_leave(c);
	return 0;
}

Test(optimizer, clip_and_step_are_of_one_group, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(WORLD, clip_group_trainer, NULL);
}

#define LARGE (1u << 20)

/* Each rank's own Step comes while the world's is applied, and may be prepared at the same
 * moment as its peer's: neither may be lost. */
static int steps_of_groups_trainer(const struct trainer *t)
{
	const uint32_t me = t->rank;
	struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = train_join(t);
	float *ones = train_alloc(LARGE * sizeof(*ones)), got[4];
	shardd_unit world, own;

	for (uint32_t i = 0; i < LARGE; i++)
		ones[i] = 1;
	world = train_zero_unit(c, "of the world", LARGE, &like);
	TRAIN_OK(shardd_group_create(c, me ? "one" : "zero", &me, 1, &like.group, &train_err));
	own = train_zero_unit(c, me ? "of one" : "of zero", 4, &like);
	for (int round = 1; round <= 20; round++) {
		train_reduce(c, own, DTYPE_FP32, ones, 4);
		train_reduce(c, world, DTYPE_FP32, ones, LARGE);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_step(c, like.group, NULL, &train_err));
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		train_params(c, own, got, sizeof(got));
		TRAINER_CHECK(got[0] == -(float)round);
	}
	free(ones);
	train_leave(c);
	return 0;
}

Test(optimizer, no_step_of_a_group_is_lost_beside_another, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(WORLD, steps_of_groups_trainer, NULL);
}

/* In double there are Adam and AdamW only. */
static int sgd_in_double_trainer(const struct trainer *t)
{
	static const uint64_t shape[] = { 4 };
	const struct shardd_tensor tensor = { .name = "t", .shape = shape, .dims = 1 };
	struct shardd_unit_spec s = { .size = sizeof(s),
				      .name = "u",
				      .tensors = &tensor,
				      .n_tensors = 1,
				      .optimizer = { .kind = SHARDD_SGD,
						     .profile = SHARDD_OPTIM_REFERENCE_F64 } };
	shardd_client *c = train_join(t);
	struct shardd_unit_info u;

	TRAIN_FAILS(shardd_register(c, &s, 1, &u, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strcmp(train_err.field, "units.optimizer.profile") == 0);
	s.optimizer.kind = SHARDD_ADAM;
	TRAIN_OK(shardd_register(c, &s, 1, &u, &train_err));
	train_leave(c);
	return 0;
}

Test(optimizer, sgd_in_double_is_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(1, sgd_in_double_trainer, NULL);
}
