/* Optimizer steps and initialisers as launches: the scalars are computed in double and
 * rounded once. What the kernels do with them is tested with the kernels. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "unit/optim.h"

TestSuite(optim, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

/* A step that says no more than this. */
#define LR(x) (&(const struct step_rates){ .has_lr = true, .lr = (x) })

struct fixture {
	struct nodefix n;
	struct job *job;
};

static struct unit *setup(struct fixture *x, state_unit *spec)
{
	nodefix_begin(&x->n, NULL);
	x->job = nodefix_job(&x->n, "job", 2, 0);
	return nodefix_register(x->job, spec);
}

/* The only launch of a unit without settings per tensor. */
static bool one_launch(const struct unit *u, double lr, struct launch *ret)
{
	CHECK(optim_step_launches(u, u->parts, LR(lr), NULL) <= 1);
	return optim_step_launches(u, u->parts, LR(lr), ret) == 1;
}

Test(optim, adamw_scalars_are_rounded_once)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 };
	struct unit *u;
	double lr = 1e-3;

	spec->optimizer->weight_decay = 0.01;
	u = setup(&x, spec);
	u->rec->optimizer->steps = 6; /* so this is the 7th */
	nodefix_wrote(&x.n);
	cr_assert(one_launch(u, lr, &k));
	cr_expect_eq(k.kind, LAUNCH_ADAMW);
	cr_expect_eq(k.n, 10, "the padding is not stepped");
	cr_expect_eq(k.adamw.p, (float *)region_addr(&u->parts[0].params));
	cr_expect_eq(k.adamw.g, (float *)region_addr(&u->parts[0].grads));
	cr_expect_eq(k.adamw.m, (float *)region_addr(&u->parts[0].state1));
	cr_expect_eq(k.adamw.v, (float *)region_addr(&u->parts[0].state2));
	cr_expect_eq(k.adamw.decay, (float)(1.0 - 1e-3 * 0.01));
	cr_expect_eq(k.adamw.w1, (float)(1.0 - 0.9));
	cr_expect_neq(k.adamw.w1, 1.0f - 0.9f, "that would be rounded twice");
	cr_expect_eq(k.adamw.b2, 0.999f);
	cr_expect_eq(k.adamw.w2, (float)(1.0 - 0.999));
	cr_expect_eq(k.adamw.step_size, (float)(1e-3 / (1.0 - pow(0.9, 7))));
	cr_expect_eq(k.adamw.sq, (float)sqrt(1.0 - pow(0.999, 7)));
	cr_expect_eq(k.adamw.eps, 1e-8f);
	nodefix_end(&x.n);
}

Test(optim, the_first_adamw_step_has_full_bias_correction)
{
	struct fixture x;
	struct launch k = { 0 };
	struct unit *u = setup(&x, nodefix_spec("u", 10));

	cr_assert(one_launch(u, 0.5, &k));
	cr_expect_eq(k.adamw.step_size, (float)(0.5 / (1.0 - 0.9)));
	cr_expect_eq(k.adamw.sq, (float)sqrt(1.0 - 0.999));
	cr_expect_eq(k.adamw.decay, 1.0f);
	nodefix_end(&x.n);
}

Test(optim, sgd_knows_its_first_step)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 };
	struct unit *u;

	spec->optimizer->kind = OPTIM_SGD;
	spec->optimizer->momentum = 0.9;
	spec->optimizer->nesterov = true;
	spec->optimizer->weight_decay = 0.1;
	u = setup(&x, spec);
	cr_assert(one_launch(u, 0.3, &k));
	cr_expect_eq(k.kind, LAUNCH_SGD);
	cr_expect_eq(k.sgd.buf, (float *)region_addr(&u->parts[0].state1));
	cr_expect_eq(k.sgd.lr, 0.3f);
	cr_expect_eq(k.sgd.wd, 0.1f);
	cr_expect_eq(k.sgd.mu, 0.9f);
	cr_expect(k.sgd.nesterov);
	cr_expect(k.sgd.first);
	u->rec->optimizer->steps = 1;
	nodefix_wrote(&x.n);
	cr_assert(one_launch(u, 0.3, &k));
	cr_expect_not(k.sgd.first);
	nodefix_end(&x.n);
}

Test(optim, sgd_without_momentum_has_no_state)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 }, zero[UNIT_MAX_STATES];
	struct unit *u;

	spec->optimizer->kind = OPTIM_SGD;
	u = setup(&x, spec);
	cr_assert(one_launch(u, 0.3, &k));
	cr_expect_null(k.sgd.buf);
	cr_expect_eq(optim_zero_launches(u->parts, zero), 0);
	nodefix_end(&x.n);
}

Test(optim, no_optimizer_no_step)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 };
	struct unit *u;

	spec->optimizer->kind = OPTIM_NONE;
	u = setup(&x, spec);
	cr_expect_not(one_launch(u, 0.3, &k));
	nodefix_end(&x.n);
}

Test(optim, state_is_zeroed_over_all_elements)
{
	struct fixture x;
	struct launch zero[UNIT_MAX_STATES];
	struct unit *u = setup(&x, nodefix_spec("u", 11));

	cr_assert_eq(optim_zero_launches(u->parts, zero), 2);
	for (unsigned i = 0; i < 2; i++) {
		cr_expect_eq(zero[i].kind, LAUNCH_FILL);
		cr_expect_eq(zero[i].n, 11);
		cr_expect_eq(zero[i].fill.kind, FILL_CONSTANT);
		cr_expect_eq(zero[i].fill.a, 0);
	}
	cr_expect_eq(zero[0].fill.dst, (float *)region_addr(&u->parts[0].state1));
	cr_expect_eq(zero[1].fill.dst, (float *)region_addr(&u->parts[0].state2));
	nodefix_end(&x.n);
}

/* Tensors lie one after the other; each has a stream of its own, which follows its
 * names and nothing else. */
Test(optim, each_tensor_is_filled_from_its_own_stream)
{
	const uint64_t three = 3;
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10), *other = nodefix_spec("v", 10);
	state_tensor *bias = state_tensor_new("bias", &three, 1);
	struct launch a[2], b[1];
	struct unit *u, *v;

	CHECK(state_unit_add_tensor(spec, bias) == 0);
	u = setup(&x, spec);
	v = nodefix_register(x.job, other);
	optim_seed_launches(u, u->parts, &u->parts->params, 42, a);
	optim_seed_launches(v, v->parts, &v->parts->params, 42, b);
	cr_expect_eq(a[0].n, 10);
	cr_expect_eq(a[1].n, 3);
	cr_expect_eq(a[0].fill.dst, (float *)region_addr(&u->parts[0].params));
	cr_expect_eq(a[1].fill.dst, (float *)region_addr(&u->parts[0].params) + 10);
	cr_expect_eq(a[0].fill.kind, FILL_UNIFORM);
	cr_expect_eq(a[0].fill.a, -1);
	cr_expect_eq(a[0].fill.b, 1);
	cr_expect_eq(a[1].fill.kind, FILL_CONSTANT, "no initialiser: constant 0");
	cr_expect_eq(a[1].fill.a, 0);
	cr_expect_eq(a[0].fill.seed, 42);
	cr_expect_neq(a[0].fill.stream, a[1].fill.stream);
	cr_expect_neq(a[0].fill.stream, b[0].fill.stream, "same tensor name, another unit");
	nodefix_end(&x.n);
}

/* -------------------------------------------------------- settings per tensor */

static state_tensor *add_tensor(state_unit *spec, const char *name, uint64_t elements)
{
	state_tensor *t = state_tensor_new(name, &elements, 1);

	CHECK(t && state_unit_add_tensor(spec, t) == 0);
	return t;
}

/* weight 10 | bias 3 without decay | weight 7 | weight 5 */
static state_unit *layered(void)
{
	state_unit *spec = nodefix_spec("u", 10);
	state_tensor *bias = add_tensor(spec, "bias", 3);

	spec->optimizer->weight_decay = 0.01;
	bias->has_weight_decay = true;
	add_tensor(spec, "next", 7);
	add_tensor(spec, "last", 5);
	return spec;
}

Test(optim, tensors_of_their_own_settings_have_launches_of_their_own)
{
	static const struct {
		uint64_t at, n;
		double decay;
	} want[] = { { 0, 10, 0.01 }, { 10, 3, 0 }, { 13, 12, 0.01 } };
	struct fixture x;
	struct launch k[4];
	struct unit *u = setup(&x, layered());

	cr_expect_eq(optim_step_launches(u, u->parts, LR(0.5), NULL), 3);
	cr_assert_eq(optim_step_launches(u, u->parts, LR(0.5), k), 3,
		     "equal neighbours are one launch");
	for (unsigned i = 0; i < 3; i++) {
		cr_expect_eq(k[i].n, want[i].n);
		cr_expect_eq(k[i].adamw.decay, (float)(1.0 - 0.5 * want[i].decay));
		cr_expect_eq(k[i].adamw.p, optim_at(&u->parts[0].params, want[i].at));
		cr_expect_eq(k[i].adamw.g, optim_at(&u->parts[0].grads, want[i].at));
		cr_expect_eq(k[i].adamw.m, optim_at(&u->parts[0].state1, want[i].at));
		cr_expect_eq(k[i].adamw.v, optim_at(&u->parts[0].state2, want[i].at));
	}
	nodefix_end(&x.n);
}

Test(optim, a_learning_rate_may_be_a_multiple)
{
	struct fixture x;
	state_unit *spec = layered();
	struct launch k[4];
	struct unit *u;

	spec->tensors[3]->has_lr_factor = true;
	spec->tensors[3]->lr_factor = 3;
	u = setup(&x, spec);
	cr_assert_eq(optim_step_launches(u, u->parts, LR(0.1), k), 4);
	cr_expect_eq(k[2].n, 7);
	cr_expect_eq(k[3].n, 5);
	cr_expect_eq(k[2].adamw.step_size, (float)(0.1 / (1 - 0.9)));
	cr_expect_eq(k[3].adamw.step_size, (float)(0.1 * 3 / (1 - 0.9)));
	cr_expect_eq(k[3].adamw.decay, (float)(1 - 0.1 * 3 * 0.01));
	nodefix_end(&x.n);
}

/* A step that a tensor had no gradient for is none of its own. */
Test(optim, a_tensor_counts_the_steps_that_it_had)
{
	struct fixture x;
	struct launch k[4];
	struct unit *u = setup(&x, layered());

	for (unsigned step = 0; step < 3; step++) {
		cr_assert_eq(unit_track_gradients(u), 0);
		u->has_gradient = false;
		for (uint32_t i = 0; i < 4; i++)
			if (i != 2 || step == 1)
				unit_got_gradient(u, i);
		cr_expect_eq(optim_step_launches(u, u->parts, LR(0.5), k), step == 1 ? 4 : 3);
		unit_stepped(u);
	}
	cr_expect_eq(unit_steps(u, 0), 3);
	cr_expect_eq(unit_steps(u, 2), 1);
	unit_got_gradient(u, 2);
	u->some_lack = false;
	cr_assert_eq(optim_step_launches(u, u->parts, LR(0.5), k), 4,
		     "the next as its neighbour no more");
	cr_expect_eq(k[0].adamw.step_size, (float)(0.5 / (1 - pow(0.9, 4))));
	cr_expect_eq(k[2].adamw.step_size, (float)(0.5 / (1 - pow(0.9, 2))));
	unit_forget_steps(u);
	cr_expect_eq(optim_step_launches(u, u->parts, LR(0.5), k), 3);
	cr_expect_eq(k[2].adamw.step_size, (float)(0.5 / (1 - 0.9)));
	nodefix_end(&x.n);
}

/* Of the four tensors of layered(): the second and the last. */
static struct settings *two_named(const struct unit *u, struct setting a, struct setting b)
{
	struct settings *s = settings_new(2, 2);

	cr_assert_not_null(s);
	s->all[0] = a;
	s->all[1] = b;
	s->named[0] = (struct setting_of){ u->id, 3, 1 };
	s->named[1] = (struct setting_of){ u->id, 1, 0 };
	cr_expect_null(settings_sort(s));
	return s;
}

Test(optim, a_step_may_say_all_of_a_tensor)
{
	static const struct setting a = { .lr = 0.3, .beta1 = 0.5, .beta2 = 0.75, .eps = 0.125 };
	static const struct setting b = { .lr = 7, .weight_decay = 0.5, .maximize = true };
	struct fixture x;
	struct launch k[4];
	struct unit *u = setup(&x, layered());
	struct step_rates rates = { .has_lr = true, .lr = 0.5 };

	rates.settings = two_named(u, a, b);
	cr_expect_eq(optim_step_launches(u, u->parts, &rates, NULL), 4);
	cr_assert_eq(optim_step_launches(u, u->parts, &rates, k), 4);
	cr_expect_eq(k[0].n, 10);
	cr_expect_eq(k[0].adamw.step_size, (float)(0.5 / (1 - 0.9)), "what is not named");
	cr_expect_eq(k[1].n, 3);
	cr_expect_eq(k[1].adamw.step_size, (float)(0.3 / (1 - 0.5)));
	cr_expect_eq(k[1].adamw.b2, 0.75f);
	cr_expect_eq(k[1].adamw.eps, 0.125f);
	cr_expect_eq(k[1].adamw.decay, 1.0f);
	cr_expect_eq(k[2].adamw.decay, (float)(1 - 0.5 * 0.01), "and of the unit's decay again");
	cr_expect_not(k[2].adamw.maximize);
	cr_expect_eq(k[3].n, 5);
	cr_expect_eq(k[3].adamw.p, optim_at(&u->parts[0].params, 20));
	cr_expect_eq(k[3].adamw.decay, (float)(1 - 7 * 0.5));
	cr_expect(k[3].adamw.maximize);
	step_rates_clear(&rates);
	nodefix_end(&x.n);
}

Test(optim, a_step_may_say_all_of_the_rest)
{
	static const struct setting a = { .lr = 0.3, .beta1 = 0.5, .weight_decay = 2 };
	struct fixture x;
	struct launch k[4];
	struct unit *u = setup(&x, layered());
	struct step_rates rates = { .has_lr = true, .lr = 0.5 };

	rates.settings = two_named(u, a, a);
	rates.settings->rest = 1;
	cr_expect_eq(optim_step_launches(u, u->parts, &rates, NULL), 1, "all of them are equal");
	rates.settings->all[0].lr = 0.1;
	cr_assert_eq(optim_step_launches(u, u->parts, &rates, k), 3);
	cr_expect_eq(k[0].adamw.decay, (float)(1 - 0.3 * 2), "not the lr of the step");
	cr_expect_eq(k[1].adamw.decay, (float)(1 - 0.1 * 2), "nor the tensor's decay");
	cr_expect_eq(k[2].n, 12);
	rates.settings->n_named = 0;
	cr_assert_eq(optim_step_launches(u, u->parts, &rates, k), 1,
		     "instead of a decay of its own");
	cr_expect_eq(k[0].n, 25);
	step_rates_clear(&rates);
	nodefix_end(&x.n);
}

/* As PyTorch does with one that is a tensor: all that follows from it, in fp32. */
Test(optim, a_rate_in_fp32_is_rounded_at_each_operation)
{
	static const struct setting s = {
		.lr = 0.168f, .lr_fp32 = true, .weight_decay = 0.7, .beta1 = 0.7, .beta2 = 0.999
	};
	struct fixture x;
	struct launch k = { 0 };
	struct unit *u = setup(&x, nodefix_spec("u", 10));
	struct step_rates rates = { .settings = settings_new(1, 0) };

	rates.settings->all[0] = s;
	rates.settings->rest = 0;
	cr_assert_eq(optim_step_launches(u, u->parts, &rates, &k), 1);
	cr_expect_eq(k.adamw.decay, 1.0f - 0.168f * 0.7f);
	cr_expect_neq(k.adamw.decay, (float)(1 - (double)0.168f * 0.7), "once, at the end");
	cr_expect_eq(k.adamw.step_size, 0.168f / (float)(1 - 0.7));
	cr_expect_neq(k.adamw.step_size, (float)((double)0.168f / (1 - 0.7)), "once");
	step_rates_clear(&rates);
	nodefix_end(&x.n);
}

/* Registered after the step was checked: it has no buffer, whatever the settings say. */
Test(optim, a_momentum_without_memory_is_none)
{
	static const struct setting s = { .lr = 0.1, .momentum = 0.9, .dampening = 0.5 };
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 };
	struct unit *u;
	struct step_rates rates = { .settings = settings_new(1, 0) };

	spec->optimizer->kind = OPTIM_SGD;
	u = setup(&x, spec);
	rates.settings->all[0] = s;
	rates.settings->rest = 0;
	cr_assert_eq(optim_step_launches(u, u->parts, &rates, &k), 1);
	cr_expect_eq(k.sgd.mu, 0);
	cr_expect_null(k.sgd.buf);
	cr_expect_eq(k.sgd.dampening, 0.5);
	step_rates_clear(&rates);
	nodefix_end(&x.n);
}

Test(optim, settings_are_found_by_unit_and_tensor)
{
	enum { N = 9 };
	struct settings *s = settings_new(N, N);
	struct step_rates mine = { .settings = settings_ref(s) }, other = { 0 };
	uint64_t word;

	for (uint32_t i = 0; i < N; i++) {
		s->all[i].lr = i;
		s->named[i] = (struct setting_of){ 3 + i * 5 % N / 3, i * 5 % 3, i };
	}
	cr_expect_null(settings_sort(s));
	for (uint32_t i = 0; i < N; i++)
		cr_expect_eq(settings_find(s, 3 + i * 5 % N / 3, i * 5 % 3)->lr, i);
	cr_expect_null(settings_find(s, 3, 3));
	cr_expect(settings_names(s, 5) && !settings_names(s, 2) && !settings_names(s, 6));
	s->rest = 4;
	cr_expect_eq(settings_find(s, 2, 0)->lr, 4);
	word = settings_word(s);
	s->all[8].eps = 1e-300;
	cr_expect_neq(settings_word(s), word);
	s->named[2] = s->named[3];
	cr_expect_eq(settings_sort(s), &s->named[3]);
	step_rates_copy(&other, &mine);
	step_rates_copy(&other, &other);
	cr_expect_eq(s->refs, 3);
	settings_unref(s);
	step_rates_clear(&mine);
	step_rates_clear(&other); /* the leak checker looks whether that was all */
}

Test(optim, settings_that_are_equal_to_the_units_make_no_difference)
{
	struct fixture x;
	state_unit *spec = layered();
	struct launch k[4];
	struct unit *u;

	spec->tensors[1]->weight_decay = spec->optimizer->weight_decay;
	u = setup(&x, spec);
	cr_assert_eq(optim_step_launches(u, u->parts, LR(0.1), k), 1);
	cr_expect_eq(k[0].n, 25);
	nodefix_end(&x.n);
}

Test(optim, adam_adds_its_decay_to_the_gradient)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 };
	struct unit *u;

	spec->optimizer->kind = OPTIM_ADAM;
	spec->optimizer->weight_decay = 0.2;
	u = setup(&x, spec);
	cr_assert(one_launch(u, 0.5, &k));
	cr_expect_eq(k.kind, LAUNCH_ADAM);
	cr_expect_eq(k.adam.wd, 0.2f);
	cr_expect_eq(k.adam.step_size, (float)(0.5 / (1.0 - 0.9)));
	cr_expect_eq(k.adam.v, optim_at(&u->parts[0].state2, 0));
	nodefix_end(&x.n);
}

Test(optim, amsgrad_has_a_third_array)
{
	struct launch zero[UNIT_MAX_STATES];
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 100);
	struct unit *u;

	spec->optimizer->amsgrad = true;
	u = setup(&x, spec);
	cr_expect(u->parts[0].state3.slab);
	cr_expect_eq(u->rec->parts[0]->state3->offset, u->parts[0].state3.offset);
	cr_assert_eq(optim_zero_launches(u->parts, zero), 3);
	cr_expect_eq(zero[2].fill.dst, optim_at(&u->parts[0].state3, 0));
	cr_expect_eq(unit_shard_bytes(u), 5 * unit_array_bytes(&u->layout, 1));
	nodefix_end(&x.n);
}

Test(optim, an_optimizer_in_backward_has_no_gradient_shard_of_its_own)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 100);
	struct unit *u;

	spec->optimizer->when = OPTIM_IN_BACKWARD;
	u = setup(&x, spec);
	cr_expect_null(u->parts[0].grads.slab);
	cr_expect_null(u->rec->parts[0]->grads);
	cr_expect_eq(unit_shard_bytes(u), 3 * unit_array_bytes(&u->layout, 1));
	nodefix_end(&x.n);
}

/* ------------------------------------------------------------------- profiles */

Test(optim, everything_of_an_optimizer_reaches_its_kernel)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 };
	struct unit *u;

	spec->optimizer->amsgrad = true;
	spec->optimizer->maximize = true;
	spec->optimizer->profile = OPTIM_REFERENCE_F64;
	spec->optimizer->weight_decay = 0.01;
	u = setup(&x, spec);
	cr_assert(one_launch(u, 0.1, &k));
	cr_expect_eq(k.adamw.vmax, optim_at(&u->parts[0].state3, 0));
	cr_expect(k.adamw.maximize);
	cr_expect_eq(k.adamw.profile, K_REFERENCE_F64);
	cr_expect_eq(k.adamw.f64.decay, 1.0 - 0.1 * 0.01);
	cr_expect_eq(k.adamw.f64.step_size, 0.1 / (1.0 - 0.9));
	cr_expect_eq(k.adamw.tail_from, UINT64_MAX);
	nodefix_end(&x.n);
}

Test(optim, sgd_has_dampening_and_a_direction)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 10);
	struct launch k = { 0 };
	struct unit *u;

	spec->optimizer->kind = OPTIM_SGD;
	spec->optimizer->momentum = 0.9;
	spec->optimizer->dampening = 0.25;
	spec->optimizer->maximize = true;
	u = setup(&x, spec);
	cr_assert(one_launch(u, 0.1, &k));
	cr_expect_eq(k.sgd.dampening, 0.25);
	cr_expect(k.sgd.maximize);
	cr_expect_null(u->parts[0].state2.slab);
	nodefix_end(&x.n);
}

/* Two ranks of 50 elements, each a tensor for PyTorch: 6 vectors of 8, and 2 behind them. */
Test(optim, the_fused_tail_is_that_of_each_shard)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 99);
	struct launch k[4];
	struct unit *u;

	spec->optimizer->profile = OPTIM_FUSED;
	u = setup(&x, spec);
	cr_expect_eq(optim_step_launches(u, u->parts, LR(0.1), NULL), 2);
	cr_assert_eq(optim_step_launches(u, u->parts, LR(0.1), k), 2);
	cr_expect_eq(k[0].adamw.profile, K_FUSED);
	cr_expect_eq(k[0].n, 50);
	cr_expect_eq(k[0].adamw.tail_from, 48);
	cr_expect_eq(k[1].n, 49, "the padding is not stepped");
	cr_expect_eq(k[1].adamw.p, optim_at(&u->parts[0].params, 50));
	cr_expect_eq(k[1].adamw.tail_from, 48);
	nodefix_end(&x.n);
}

/* For DDP every tensor is one for PyTorch, whatever the layout: of 20 and 7 elements. */
Test(optim, the_fused_tail_is_that_of_each_tensor_of_ddp)
{
	struct fixture x;
	state_unit *spec = nodefix_spec("u", 20);
	const uint64_t seven = 7;
	state_tensor *t = state_tensor_new("bias", &seven, 1);
	struct launch k[4];
	struct unit *u;

	cr_assert(t && state_unit_add_tensor(spec, t) == 0);
	t->init_kind = FILL_CONSTANT;
	spec->optimizer->profile = OPTIM_FUSED;
	spec->strategy = STRATEGY_REPLICATE;
	spec->reduce_profile = PROFILE_DDP;
	u = setup(&x, spec);
	cr_assert_eq(optim_step_launches(u, u->parts, LR(0.1), k), 2);
	cr_expect_eq(k[0].n, 20);
	cr_expect_eq(k[0].adamw.tail_from, 16);
	cr_expect_eq(k[1].n, 7);
	cr_expect_eq(k[1].adamw.p, optim_at(&u->parts[0].params, 20));
	cr_expect_eq(k[1].adamw.tail_from, 0, "less than a vector is a tail");
	nodefix_end(&x.n);
}
