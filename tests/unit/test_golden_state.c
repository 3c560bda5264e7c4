/*
 * Optimizers through the daemon's ops against torch.optim: every case of
 * tests/golden/optim.safetensors as a unit of a job of one rank on a node in this process, so
 * that not only the parameters can be seen, but the optimizer's state in the shard, its step
 * counter and the unscaled gradients too. After each Reduce, Unscale, Step and Commit they are
 * torch's, bit for bit but for what golden_optim.c says.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden_optim.h"
#include "nodefix.h"
#include "unit/optim.h"

TestSuite(golden_state, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

enum { N = GOLDEN_OPTIM_N };

struct run {
	struct golden_optim o;
	struct nodefix n;
	struct member *m;
	struct unit *u;
};

static state_unit *spec_of(const struct golden_optim *o, enum optim_profile profile)
{
	state_unit *spec = nodefix_spec(o->name, N);
	state_optimizer *to = spec->optimizer;

	to->kind = golden_optim_is(o, "sgd")    ? OPTIM_SGD
		   : golden_optim_is(o, "adam") ? OPTIM_ADAM
						: OPTIM_ADAMW;
	to->lr = o->lr[0];
	to->weight_decay = o->weight_decay;
	to->momentum = o->momentum;
	to->dampening = o->dampening;
	to->nesterov = o->nesterov;
	to->beta1 = o->beta1;
	to->beta2 = o->beta2;
	to->eps = o->eps;
	to->amsgrad = o->amsgrad;
	to->maximize = o->maximize;
	to->profile = profile;
	return spec;
}

static void reduce(struct run *r, unsigned i)
{
	struct nodefix_op op = { 0 };

	NODEFIX_OK(nodefix_on_unit(&r->n, r->m, "GradientBuffer", r->u, &op), &op);
	memcpy(region_addr(&op.result.place), golden_optim_gradients(&r->o, i), N * sizeof(float));
	NODEFIX_OK(nodefix_on_unit(&r->n, r->m, "Reduce", r->u, &op), &op);
}

static void expect(const struct run *r, const char *part, const struct region *got, unsigned i)
{
	char text[256];

	cr_assert(got->slab, "%s: no %s", r->o.name, part);
	cr_assert(golden_optim_same(&r->o, part, region_addr(got), i, text, sizeof(text)), "%s",
		  text);
}

static void unscale(struct run *r, unsigned i)
{
	Shardd__V1__UnscaleRequest q = SHARDD__V1__UNSCALE_REQUEST__INIT;
	struct nodefix_op op = { 0 };

	q.inv_scale = (float)(1.0 / (double)golden_optim_number(&r->o, "scale", i));
	NODEFIX_OK(nodefix_submit(&r->n, r->m, "Unscale", &q.base, &op), &op);
	expect(r, "unscaled", &r->u->parts[0].grads, i);
}

static void step(struct run *r, unsigned i)
{
	Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;
	struct nodefix_op op = { 0 };

	q.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
	q.lr = r->o.lr[i];
	q.skip_if_found = r->o.scaler != 0;
	NODEFIX_OK(nodefix_submit(&r->n, r->m, "Step", &q.base, &op), &op);
	NODEFIX_OK(nodefix_commit(&r->n, r->m, i + 1, 0, &op), &op);
}

static void expect_all(const struct run *r, unsigned i)
{
	static const char *const names[2][3] = { { "m", "v", "vmax" }, { "buf", NULL, NULL } };
	const char *const *parts = names[golden_optim_is(&r->o, "sgd")];
	const struct unit_part *p = &r->u->parts[0];
	const struct region *arrays[] = { &p->state1, &p->state2, &p->state3 };

	expect(r, "p", &p->params, i);
	for (unsigned k = 0; k < 3 && parts[k]; k++)
		if (golden_optim_row(&r->o, parts[k], i))
			expect(r, parts[k], arrays[k], i);
	if (r->o.scaler && golden_optim_number(&r->o, "t", i) >= 0)
		cr_assert_eq(golden_optim_number(&r->o, "t", i), (float)r->u->rec->optimizer->steps,
			     "%s", r->o.name);
}

static void test_golden_state_check(struct run *r, enum optim_profile profile)
{
	struct job *job;

	nodefix_begin(&r->n, NULL);
	job = nodefix_job(&r->n, "job", 1, 0);
	r->m = nodefix_join(&r->n, job, 0);
	r->u = nodefix_unit(&r->n, job, spec_of(&r->o, profile), &r->m, 1);
	memcpy(region_addr(&r->u->parts[0].params), r->o.start, N * sizeof(float));
	for (unsigned i = 0; i < GOLDEN_OPTIM_STEPS; i++) {
		reduce(r, i);
		if (r->o.scaler)
			unscale(r, i);
		step(r, i);
		expect_all(r, i);
	}
	nodefix_end(&r->n);
}

static void check_cases(const char *optimizer, const char *form, enum optim_profile profile,
			unsigned least)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("optim.safetensors");
	const char *name, *about;
	void *iter = NULL;
	unsigned cases = 0;

	while (safetensors_next(f, &iter, &name, &about)) {
		struct run r;

		if (!golden_is(about, "optimizer", optimizer) || !golden_is(about, "form", form))
			continue;
		golden_optim_read(&r.o, f, name, about);
		if (golden_optim_divides(&r.o))
			continue;
		test_golden_state_check(&r, profile);
		cases++;
	}
	cr_assert_geq(cases, least, "%u cases of %s %s", cases, optimizer, form);
}

#define GOLDEN_STATE(name, optimizer, form, profile, least)   \
	Test(golden_state, name)                              \
	{                                                     \
		check_cases(optimizer, form, profile, least); \
	}

GOLDEN_STATE(adamw, "adamw", "single", OPTIM_EAGER_SINGLE, 20)
GOLDEN_STATE(adamw_foreach, "adamw", "single", OPTIM_FOREACH, 20)
GOLDEN_STATE(adamw_fused, "adamw", "fused", OPTIM_FUSED, 20)
GOLDEN_STATE(adamw_in_double, "adamw", "f64", OPTIM_REFERENCE_F64, 5)
GOLDEN_STATE(adam, "adam", "single", OPTIM_EAGER_SINGLE, 19)
GOLDEN_STATE(adam_foreach, "adam", "single", OPTIM_FOREACH, 19)
GOLDEN_STATE(adam_fused, "adam", "fused", OPTIM_FUSED, 19)
GOLDEN_STATE(adam_in_double, "adam", "f64", OPTIM_REFERENCE_F64, 5)
GOLDEN_STATE(sgd, "sgd", "single", OPTIM_EAGER_SINGLE, 18)
GOLDEN_STATE(sgd_foreach, "sgd", "single", OPTIM_FOREACH, 18)
GOLDEN_STATE(sgd_fused, "sgd", "fused", OPTIM_FUSED, 17)
