/*
 * Settings of a step: a unit whose steps say everything of its tensors has the bits of units that
 * were registered so, whatever it was registered with; and what a step cannot say.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(step_settings, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 2, ROWS = 6, COLUMNS = 51, WEIGHT = ROWS * COLUMNS, ALL = WEIGHT + ROWS, STEPS = 5 };

/* How the told unit is stepped. */
enum how { AT_STEP, BY_PLAN, IN_BACKWARD };

struct way {
	const char *name;
	enum how how;
	enum shardd_layout layout;
	enum shardd_optimizer_kind kind;
	enum shardd_optimizer_profile profile;
	bool rest; /* the weight's settings are those of all that is not named */
};

/* 0: of the weight; 1: of the bias; 2: what the told unit was registered with. */
static struct shardd_optimizer optimizer_of(const struct way *w, unsigned which)
{
	static const struct shardd_optimizer adam[] = {
		{ .lr = 0.02, .weight_decay = 0.1, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3 },
		{ .lr = 0.3 / 7, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-6, .maximize = true },
		{ .lr = 5, .weight_decay = 1, .beta1 = 0.1, .beta2 = 0.2, .eps = 1 },
	};
	static const struct shardd_optimizer sgd[] = {
		{ .lr = 0.02, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.25 },
		{ .lr = 0.3 / 7, .momentum = 0.5, .nesterov = true, .maximize = true },
		{ .lr = 5, .weight_decay = 1, .momentum = 0.1, .dampening = 1 },
	};
	struct shardd_optimizer o = w->kind == SHARDD_SGD ? sgd[which] : adam[which];

	o.kind = w->kind;
	o.profile = w->profile;
	o.amsgrad = w->kind == SHARDD_ADAM;
	if (which == 2 && w->how == IN_BACKWARD)
		o.when = SHARDD_OPTIM_IN_BACKWARD;
	return o;
}

static shardd_unit register_unit(shardd_client *c, const struct way *w, const char *name,
				 unsigned which)
{
	static const uint64_t shape[] = { ROWS, COLUMNS };
	const struct shardd_tensor tensors[] = { { .name = "weight", .shape = shape, .dims = 2 },
						 { .name = "bias", .shape = shape, .dims = 1 } };
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .tensors = which == 1 ? &tensors[1] : tensors,
					 .n_tensors = which == 2 ? 2 : 1,
					 .layout = w->layout,
					 .optimizer = optimizer_of(w, which) };
	struct shardd_unit_info info;
	char full[64];

	snprintf(full, sizeof(full), "%s of %s", name, w->name);
	spec.name = full;
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err)); /* zeros */
	return info.unit;
}

static struct shardd_step_settings setting_of(const struct way *w, unsigned which)
{
	struct shardd_optimizer o = optimizer_of(w, which);

	return (struct shardd_step_settings){ .lr = o.lr,
					      .weight_decay = o.weight_decay,
					      .momentum = o.momentum,
					      .dampening = o.dampening,
					      .nesterov = o.nesterov,
					      .beta1 = o.beta1,
					      .beta2 = o.beta2,
					      .eps = o.eps,
					      .maximize = o.maximize };
}

/* Both tensors of @unit; the bias first, as no order is asked for. */
static void tell(const struct way *w, const shardd_unit *unit, struct shardd_step_settings s[2])
{
	static const uint32_t tensors[] = { 0, 1 };

	for (unsigned i = 0; i < 2; i++) {
		s[i] = setting_of(w, 1 - i);
		if (i == 1 && w->rest)
			continue;
		s[i].units = unit;
		s[i].tensors = &tensors[1 - i];
		s[i].n = 1;
	}
}

static void step_told(shardd_client *c, const struct way *w, shardd_unit u, const float *x)
{
	const double lr = 99; /* of nothing that is there */
	struct shardd_step_settings s[2];
	struct shardd_step_options told = { .size = sizeof(told), .settings = s, .n_settings = 2 };
	struct shardd_step_options step = { .size = sizeof(step) };
	struct shardd_plan_backward_options plan = {
		.size = sizeof(plan), .lr = &lr, .settings = s, .n_settings = 2
	};

	tell(w, &u, s);
	plan.inv_scale = w->how == BY_PLAN;
	if (w->how != AT_STEP)
		TRAIN_OK(shardd_plan_backward(c, &plan, &train_err));
	train_reduce(c, u, DTYPE_FP32, x, ALL);
	if (w->how != AT_STEP)
		TRAIN_FAILS(shardd_step_with(c, &told, NULL, &train_err),
			    w->how == BY_PLAN ? SHARDD_INVALID_ARGUMENT
					      : SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_step_with(c, w->how == AT_STEP ? &told : &step, NULL, &train_err));
}

static void one_way(shardd_client *c, const struct trainer *t, const struct way *w,
		    uint64_t *committed)
{
	shardd_unit told = register_unit(c, w, "told", 2);
	shardd_unit weight = register_unit(c, w, "weight", 0),
		    bias = register_unit(c, w, "bias", 1);
	float got[ALL], want[ALL];

	for (unsigned step = 0; step < STEPS; step++) {
		float *x = train_numbers(ALL, step * 8 + t->rank);

		step_told(c, w, told, x);
		train_reduce(c, weight, DTYPE_FP32, x, WEIGHT);
		train_reduce(c, bias, DTYPE_FP32, x + WEIGHT, ROWS);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		if (step % 2)
			TRAIN_OK(shardd_commit(c, ++*committed, NULL, 0, &train_err));
		train_params(c, told, got, sizeof(got));
		train_params(c, weight, want, WEIGHT * sizeof(float));
		train_params(c, bias, want + WEIGHT, ROWS * sizeof(float));
		TRAIN_SAME(got, want, sizeof(got));
		TRAINER_CHECK(got[0] != 0 && got[ALL - 1] != 0);
		free(x);
	}
}

static int same_trainer(const struct trainer *t)
{
	static const struct way ways[] = {
		{ "adamw", .kind = SHARDD_ADAMW },
		{ "sgd", .kind = SHARDD_SGD },
		{ "amsgrad by rows", .layout = SHARDD_LAYOUT_DIM0, .kind = SHARDD_ADAM },
		{ "foreach", .kind = SHARDD_ADAMW, .profile = SHARDD_OPTIM_FOREACH, .rest = true },
		{ "fused", .layout = SHARDD_LAYOUT_DIM0, .kind = SHARDD_ADAMW,
		  .profile = SHARDD_OPTIM_FUSED },
		{ "f64", .how = BY_PLAN, .kind = SHARDD_ADAMW,
		  .profile = SHARDD_OPTIM_REFERENCE_F64 },
		{ "plan", .how = BY_PLAN, .layout = SHARDD_LAYOUT_DIM0, .kind = SHARDD_SGD,
		  .rest = true },
		{ "back", .how = IN_BACKWARD, .kind = SHARDD_ADAMW },
		{ "back by rows", .how = IN_BACKWARD, .layout = SHARDD_LAYOUT_DIM0,
		  .kind = SHARDD_SGD },
		{ "back, rest", .how = IN_BACKWARD, .kind = SHARDD_ADAM, .rest = true },
	};
	shardd_client *c = train_join(t);
	uint64_t committed = 0;

	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		one_way(c, t, &ways[i], &committed);
	train_leave(c);
	return 0;
}

Test(step_settings, they_have_the_bits_of_what_is_registered_so)
{
	trainfix_run(WORLD, same_trainer, NULL);
	trainfix_run(1, same_trainer, NULL);
}

/* -------------------------------------------------------------- more than a ring takes */

enum { MANY = 400 };

static shardd_unit many_tensors(shardd_client *c)
{
	static char names[MANY][16];
	struct shardd_tensor *tensors = train_alloc(MANY * sizeof(*tensors));
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "many",
					 .tensors = tensors,
					 .n_tensors = MANY,
					 .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	struct shardd_unit_info info;

	for (unsigned i = 0; i < MANY; i++) {
		snprintf(names[i], sizeof(names[i]), "%u", i);
		tensors[i].name = names[i];
	}
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	free(tensors);
	return info.unit;
}

/* Each third is left out, and has the step's own lr. */
static int many_trainer(const struct trainer *t)
{
	const double lr = 0.125;
	shardd_client *c = train_join(t);
	shardd_unit u = many_tensors(c), units[MANY];
	uint32_t tensors[2][MANY];
	struct shardd_step_settings s[] = { { .lr = 0.5, .units = units, .tensors = tensors[0] },
					    { .lr = 0.25, .units = units, .tensors = tensors[1] } };
	struct shardd_step_options o = {
		.size = sizeof(o), .lr = &lr, .settings = s, .n_settings = 2
	};
	float x[MANY], want[MANY];

	for (unsigned i = 0; i < MANY; i++) {
		units[i] = u;
		x[i] = 1;
		want[i] = i % 3 == 2 ? -0.125f : i % 3 ? -0.25f : -0.5f;
		if (i % 3 < 2)
			tensors[i % 3][s[i % 3].n++] = i;
	}
	train_reduce(c, u, DTYPE_FP32, x, MANY);
	TRAIN_OK(shardd_step_with(c, &o, NULL, &train_err));
	train_params(c, u, x, sizeof(x));
	TRAIN_SAME(x, want, sizeof(x));
	train_leave(c);
	return 0;
}

Test(step_settings, every_tensor_can_have_its_own)
{
	trainfix_run(WORLD, many_trainer, NULL);
}

/* ------------------------------------------------- a rank that has no more inputs */

static int uneven_trainer(const struct trainer *t)
{
	const struct shardd_unit_spec ddp = { .strategy = SHARDD_REPLICATE,
					      .reduce_profile = SHARDD_PROFILE_DDP,
					      .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "u", 1, &ddp);
	const struct shardd_step_settings half = { .lr = 0.5 };
	const struct shardd_step_options o = { .size = sizeof(o),
					       .settings = &half,
					       .n_settings = 1 };
	const float one = 1;
	float at;

	for (unsigned pass = 0; pass < 3 && (pass == 0 || t->rank == 0); pass++) {
		train_reduce(c, u, DTYPE_FP32, &one, 1);
		TRAIN_OK(shardd_step_with(c, &o, NULL, &train_err));
	}
	TRAIN_OK(shardd_join_uneven(c, SHARDD_WORLD, false, NULL, NULL, &train_err));
	train_reduce(c, u, DTYPE_FP32, &one, 1);
	TRAIN_OK(shardd_step_with(c, &o, NULL, &train_err));
	train_params(c, u, &at, sizeof(at));
	TRAINER_CHECK(at == -0.5f * (1 + 0.5f + 0.5f + 1));
	train_leave(c);
	return 0;
}

Test(step_settings, they_are_those_of_who_has_inputs)
{
	trainfix_run(WORLD, uneven_trainer, NULL);
}

/* ------------------------------------------------------------------- what is refused */

struct places {
	shardd_client *c;
	shardd_group g;
	shardd_unit adam, sgd, none, other; /* other: of group @g */
};

static struct places make_places(const struct trainer *t)
{
	static const uint64_t one[] = { 1 };
	const struct shardd_tensor tensors[] = {
		{ .name = "a", .shape = one, .dims = 1 },
		{ .name = "still", .shape = one, .dims = 1, .frozen = true },
		{ .name = "again", .shape = one, .dims = 1, .alias_of = "a" },
	};
	struct shardd_unit_spec adam = { .size = sizeof(adam),
					 .name = "adam",
					 .tensors = tensors,
					 .n_tensors = 3,
					 .optimizer = { .kind = SHARDD_ADAMW, .lr = 1 } };
	struct shardd_unit_spec sgd = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	struct places p = { .c = train_join(t) };
	struct shardd_unit_info info;

	TRAIN_OK(shardd_group_create(p.c, "g", (uint32_t[]){ 0, 1 }, WORLD, &p.g, &train_err));
	TRAIN_OK(shardd_register(p.c, &adam, 1, &info, &train_err));
	p.adam = info.unit;
	p.sgd = train_register(p.c, "sgd", 1, &sgd).unit;
	p.none = train_register(p.c, "none", 1, NULL).unit;
	sgd.group = p.g;
	p.other = train_register(p.c, "other", 1, &sgd).unit;
	return p;
}

static void refused(const struct places *p, const struct shardd_step_settings *s, size_t n,
		    enum shardd_code code, const char *words)
{
	const struct shardd_step_options o = { .size = sizeof(o), .settings = s, .n_settings = n };
	const struct shardd_plan_backward_options plan = { .size = sizeof(plan),
							   .settings = s,
							   .n_settings = n };

	TRAIN_FAILS(shardd_step_with(p->c, &o, NULL, &train_err), code);
	told_now(words);
	TRAIN_FAILS(shardd_plan_backward(p->c, &plan, &train_err), code);
	told_now(words);
}

static void refused_tensor(const struct places *p, shardd_unit u, uint32_t tensor,
			   enum shardd_code code, const char *words)
{
	const struct shardd_step_settings s = { .units = &u, .tensors = &tensor, .n = 1 };

	refused(p, &s, 1, code, words);
}

static void refused_numbers(const struct places *p)
{
	const struct {
		struct shardd_step_settings s;
		const char *words;
	} wrong[] = {
		{ { .lr = -1 }, "settings.lr is -1; it must be 0 to 1000000" },
		{ { .lr = NAN }, "settings.lr is nan" },
		{ { .weight_decay = INFINITY }, "settings.weight_decay is inf" },
		{ { .momentum = 1.5 }, "settings.momentum is 1.5; it must be 0 to 1" },
		{ { .dampening = -0.5 }, "settings.dampening is -0.5" },
		{ { .beta1 = 1 }, "settings.beta1 is 1" },
		{ { .beta2 = NAN }, "settings.beta2 is nan" },
		{ { .eps = 2 }, "settings.eps is 2" },
		{ { .nesterov = true }, "settings.nesterov needs a momentum" },
		{ { .nesterov = true, .momentum = 0.5, .dampening = 0.1 }, "and no dampening" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
		refused(p, &wrong[i].s, 1, SHARDD_INVALID_ARGUMENT, wrong[i].words);
}

static void refused_lists(const struct places *p)
{
	const uint32_t zeros[8] = { 0 }, units[8] = { p->adam };
	const struct shardd_step_settings rests[] = { { .lr = 1 }, { .lr = 1 } };
	const struct shardd_step_settings twice[] = {
		{ .units = units, .tensors = zeros, .n = 1 },
		{ .lr = 1, .units = units, .tensors = zeros, .n = 1 }
	};
	const struct shardd_step_settings many = { .units = units, .tensors = zeros, .n = 8 };
	const struct shardd_step_settings nowhere = { .units = units, .n = 1 };
	const struct shardd_step_settings momentum = { .momentum = 0.5 };
	const struct shardd_step_settings of_sgd = {
		.momentum = 0.5, .units = &p->sgd, .tensors = zeros, .n = 1
	};

	refused(p, rests, 2, SHARDD_INVALID_ARGUMENT, "2 settings name no tensors");
	refused(p, twice, 2, SHARDD_INVALID_ARGUMENT, "tensor 0 of unit 1 is named twice");
	refused(p, &many, 1, SHARDD_INVALID_ARGUMENT, "settings name 8 tensors; job");
	refused(p, &nowhere, 1, SHARDD_INVALID_ARGUMENT, "tensors is NULL");
	refused(p, NULL, 1, SHARDD_INVALID_ARGUMENT, "settings is NULL");
	refused(p, &momentum, 1, SHARDD_INVALID_ARGUMENT,
		"unit 'sgd' was registered with momentum 0");
	refused(p, &of_sgd, 1, SHARDD_INVALID_ARGUMENT, "has no memory for it");
}

static int refused_trainer(const struct trainer *t)
{
	struct places p = make_places(t);
	const struct shardd_step_settings momentum[] = {
		{ .momentum = 0.5, .lr = 1 },
		{ .units = &p.sgd, .tensors = (uint32_t[]){ 0 }, .n = 1 }
	};
	const struct shardd_step_options o = { .size = sizeof(o),
					       .settings = momentum,
					       .n_settings = 2 };

	refused_numbers(&p);
	refused_lists(&p);
	refused_tensor(&p, 9, 0, SHARDD_NOT_FOUND, "there is no unit 9");
	refused_tensor(&p, UINT32_MAX, 0, SHARDD_NOT_FOUND, "there is no unit 4294967295");
	refused_tensor(&p, p.other, 0, SHARDD_INVALID_ARGUMENT, "of another group than 'world'");
	refused_tensor(&p, p.none, 0, SHARDD_INVALID_ARGUMENT, "('none') has no optimizer");
	refused_tensor(&p, p.adam, 3, SHARDD_INVALID_ARGUMENT, "it has 3");
	refused_tensor(&p, p.adam, UINT32_MAX, SHARDD_INVALID_ARGUMENT, "no tensor 4294967295");
	refused_tensor(&p, p.adam, 1, SHARDD_INVALID_ARGUMENT, "'still' of unit 'adam' is frozen");
	refused_tensor(&p, p.adam, 2, SHARDD_INVALID_ARGUMENT, "'again' of unit 'adam'");
	/* a momentum for the rest, of which the unit without memory is none */
	TRAIN_OK(shardd_step_with(p.c, &o, NULL, &train_err));
	train_leave(p.c);
	return 0;
}

Test(step_settings, what_cannot_be_is_refused)
{
	trainfix_run(WORLD, refused_trainer, NULL);
}
