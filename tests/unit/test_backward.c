/* Optimizers in backward: when a unit is stepped, what waits for it, what a plan holds back,
 * and what is left when something happens in between. Op by op; the numbers are compared
 * with the ordinary step's. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "step/external.h"
#include "step/shards.h"
#include "step/backward.h"

#define ELEMENTS 1000

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u, *v, *plain[2]; /* in backward; the same at the step */
static struct nodefix_op op[2];

static state_unit *spec_of(const char *name, enum optim_when when)
{
	state_unit *spec = nodefix_spec(name, ELEMENTS);

	spec->optimizer->when = when;
	spec->optimizer->weight_decay = 0.01;
	return spec;
}

static void test_backward_begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, spec_of("u", OPTIM_IN_BACKWARD), m, 2);
	v = nodefix_unit(&n, job, spec_of("v", OPTIM_IN_BACKWARD), m, 2);
	plain[0] = nodefix_unit(&n, job, spec_of("plain u", OPTIM_AT_STEP), m, 2);
	plain[1] = nodefix_unit(&n, job, spec_of("plain v", OPTIM_AT_STEP), m, 2);
	memcpy(region_addr(&plain[0]->parts[0].params), nodefix_params(u),
	       ELEMENTS * sizeof(float));
	memcpy(region_addr(&plain[1]->parts[0].params), nodefix_params(v),
	       ELEMENTS * sizeof(float));
}

static void test_backward_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(backward, .init = test_backward_begin, .fini = test_backward_end, .timeout = 60);

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

static void both_ok(const char *what)
{
	nodefix_ok(&op[0], what);
	nodefix_ok(&op[1], what);
}

static void both_fail(enum fault_code code, const char *words)
{
	for (unsigned i = 0; i < 2; i++) {
		nodefix_wait(&op[i]);
		expect_fault(&op[i].fault, code, words);
	}
}

static void submit_reduce(struct unit *x, float value, bool more)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", x, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, value);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], x, more, &op[i]);
}

static void reduce(struct unit *x, float value)
{
	submit_reduce(x, value, false);
	both_ok("Reduce");
}

/* Everything of the reduce, but not the step behind it, which somebody's gather has kept apart. */
static void submit_and_hold(struct unit *x, float value)
{
	struct backend *b = n.node.devices[0].backend;

	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", x, &op[1]), &op[1]);
	submit_reduce(x, value, false);
	both_ok("Reduce");
	cr_assert(x->step == UNIT_STEP_DUE);
	backend_fake_hold(b, true);
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Release", x, &op[1]), &op[1]);
	cr_assert(x->step == UNIT_STEP_STEPPING);
}

/* A reduce that steps the unit itself is on the device, with its first kernel. */
static void submit_fused(struct unit *x, float value)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", x, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, value);
	}
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], x, false, &op[i]);
	nodefix_turns(&n);
	cr_assert(x->step == UNIT_STEP_STEPPING && !op[0].over);
}

static void reduce_more(struct unit *x, float value)
{
	submit_reduce(x, value, true);
	both_ok("Reduce");
}

static void submit_step(const Shardd__V1__StepRequest *like)
{
	for (unsigned i = 0; i < 2; i++) {
		Shardd__V1__StepRequest r = *like;

		nodefix_submit(&n, m[i], "Step", &r.base, &op[i]);
	}
}

static void step(void)
{
	static const Shardd__V1__StepRequest r = SHARDD__V1__STEP_REQUEST__INIT;

	submit_step(&r);
	both_ok("Step");
}

static void submit_plan(const Shardd__V1__PlanBackwardRequest *like)
{
	for (unsigned i = 0; i < 2; i++) {
		Shardd__V1__PlanBackwardRequest r = *like;

		nodefix_submit(&n, m[i], "PlanBackward", &r.base, &op[i]);
	}
}

static void plan(const Shardd__V1__PlanBackwardRequest *like)
{
	submit_plan(like);
	both_ok("PlanBackward");
}

static Shardd__V1__PlanBackwardRequest__Clip clip_of(double max_norm)
{
	Shardd__V1__PlanBackwardRequest__Clip c = SHARDD__V1__PLAN_BACKWARD_REQUEST__CLIP__INIT;

	c.max_norm = max_norm;
	c.profile = SHARDD__V1__CLIP_PROFILE__CLIP_PROFILE_TORCH;
	return c;
}

static void commit(uint64_t number)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], number, 0, &op[i]);
	both_ok("Commit");
}

static void gather(unsigned rank, struct unit *x)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[rank], "Gather", x, &op[0]), &op[0]);
}

static void release(unsigned rank, struct unit *x)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[rank], "Release", x, &op[0]), &op[0]);
}

static bool same(const struct unit *a, const struct unit *b)
{
	return memcmp(nodefix_params(a), nodefix_params(b), ELEMENTS * sizeof(float)) == 0;
}

/* What the ordinary way makes of the same gradients. */
static void step_plain(float gu, float gv)
{
	reduce(plain[0], gu);
	reduce(plain[1], gv);
	step();
	commit(job->rec->step + 1);
}

/* ------------------------------------------------------------------- at once */

Test(backward, a_unit_is_stepped_by_its_reduce)
{
	uint64_t held = job->quota.by_class[MEM_SHARD];

	reduce(u, 2);
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 1);
	cr_expect_not(u->has_gradient);
	cr_expect_null(u->parts[0].grads.slab, "the gradient shard is given back");
	cr_expect_eq(job->mem.grads[0].used, 0);
	cr_expect_eq(job->quota.by_class[MEM_SHARD], held);
	cr_expect_eq(job->rec->uncommitted_steps, 1);
	reduce(v, 3);
	nodefix_turns(&n);
	cr_expect_eq(job->rec->uncommitted_steps, 1, "one step, of two units");
	step();
	commit(1);
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	step_plain(2, 3);
	cr_expect(same(u, plain[0]));
	cr_expect(same(v, plain[1]));
}

Test(backward, a_second_last_reduce_is_refused)
{
	reduce(u, 2);
	nodefix_turns(&n);
	submit_reduce(u, 1, false);
	both_fail(FAULT_STATE, "was reduced for the last time in this backward pass");
	cr_expect_eq(u->rec->optimizer->steps, 1);
	step();
	reduce(u, 1);
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 2);
}

Test(backward, micro_batches_add_up_to_the_last)
{
	reduce_more(u, 1);
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 0);
	cr_expect(u->has_gradient);
	reduce_more(u, 2);
	reduce(u, 4);
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 1);
	reduce(v, 1);
	step();
	step_plain(7, 1);
	cr_expect(same(u, plain[0]));
}

Test(backward, the_step_takes_what_is_left)
{
	reduce_more(u, 7);
	reduce(v, 1);
	step();
	cr_expect_eq(u->rec->optimizer->steps, 0, "prepared");
	commit(1);
	cr_expect_eq(u->rec->optimizer->steps, 1);
	cr_expect_null(u->parts[0].grads.slab);
	step_plain(7, 1);
	cr_expect(same(u, plain[0]));
	cr_expect(same(v, plain[1]));
}

Test(backward, who_has_it_gathered_is_waited_for)
{
	struct nodefix_op late = { 0 };

	gather(0, u);
	reduce(u, 2);
	nodefix_turns(&n);
	cr_expect(u->step == UNIT_STEP_DUE);
	cr_expect_eq(u->rec->optimizer->steps, 0);
	gather(0, u); /* who has it gets what he has */
	release(0, u);
	/* who has not waits for the new ones */
	nodefix_on_unit(&n, m[1], "Gather", u, &late);
	nodefix_turns(&n);
	cr_expect_not(late.over);
	release(0, u);
	nodefix_wait(&late);
	nodefix_ok(&late, "Gather");
	cr_expect_eq(u->rec->optimizer->steps, 1);
	release(1, u);
}

Test(backward, a_gather_waits_for_the_step_that_runs)
{
	submit_reduce(u, 2, false);
	nodefix_turns(&n);
	both_ok("Reduce");
	step();
	submit_and_hold(u, 2);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	nodefix_turns(&n);
	cr_expect_not(op[0].over);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op[0], "Gather");
	cr_expect_not(u->step == UNIT_STEP_STEPPING);
	cr_expect_eq(u->rec->optimizer->steps, 2);
	release(0, u);
}

Test(backward, step_and_commit_refuse_while_it_is_gathered)
{
	gather(1, u);
	reduce(v, 1);
	reduce(u, 2);
	nodefix_turns(&n);
	static const Shardd__V1__StepRequest r = SHARDD__V1__STEP_REQUEST__INIT;

	submit_step(&r);
	both_fail(FAULT_STATE, "unit 'u' is still gathered by rank 1");
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], 1, 0, &op[i]);
	both_fail(FAULT_STATE, "unit 'u' is still gathered and so not stepped");
	cr_expect_not(job->rec->has_commit);
	release(1, u);
	step();
	commit(1);
	cr_expect_eq(u->rec->optimizer->steps, 1);
}

Test(backward, a_clip_without_a_plan_comes_too_late)
{
	reduce(u, 2);
	nodefix_turns(&n);
	for (unsigned i = 0; i < 2; i++)
		nodefix_clip(&n, m[i], 1, &op[i]);
	both_fail(FAULT_STATE, "PlanBackward");
}

Test(backward, the_learning_rate_is_the_plans)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__StepRequest s = SHARDD__V1__STEP_REQUEST__INIT;

	p.optional_lr_case = SHARDD__V1__PLAN_BACKWARD_REQUEST__OPTIONAL_LR_LR;
	p.lr = 0.25;
	plan(&p);
	reduce(u, 2);
	reduce(v, 2);
	nodefix_turns(&n);
	s.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
	s.lr = 0.25;
	submit_step(&s);
	both_fail(FAULT_STATE, "PlanBackward");
	step();
	reduce(plain[0], 2);
	submit_step(&s);
	both_ok("Step");
	commit(1);
	cr_expect(same(u, plain[0]));
	reduce(u, 2);
	nodefix_turns(&n);
	cr_expect_not(same(u, plain[0]));
	step();
	reduce(plain[0], 2);
	step();
	commit(2);
	cr_expect(same(u, plain[0]), "the plan was for one pass");
}

/* ------------------------------------------------------------------- planned */

Test(backward, a_clip_holds_all_until_the_step)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__PlanBackwardRequest__Clip c = clip_of(1.5);

	p.clip = &c;
	plan(&p);
	reduce(u, 2);
	reduce_more(v, 1);
	reduce(v, 2);
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 0);
	cr_expect(u->step == UNIT_STEP_ARRIVED && v->step == UNIT_STEP_ARRIVED);
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	step();
	cr_expect(NODEFIX_OUTCOME(shards_outcome, &op[0])->has_total_norm);
	cr_expect_float_eq(NODEFIX_OUTCOME(shards_outcome, &op[0])->total_norm,
			   sqrt(1000 * 4.0 + 1000 * 9.0), 1e-9);
	cr_expect_eq(u->rec->optimizer->steps, 0, "prepared");
	commit(1);
	cr_expect_eq(u->rec->optimizer->steps, 1);
	cr_expect_null(u->parts[0].grads.slab);
	cr_expect_eq(job->mem.grads[0].used, 0);
	cr_expect_gt(job->mem.grads[0].bytes, 0, "kept for the next step");
	cr_expect_gt(job_evict(job, 1), 0, "but for nobody who needs it now");
	cr_expect_eq(job->mem.grads[0].bytes, 0);

	reduce(plain[0], 2);
	reduce(plain[1], 3);
	for (unsigned i = 0; i < 2; i++) {
		Shardd__V1__ClipGradNormRequest r = SHARDD__V1__CLIP_GRAD_NORM_REQUEST__INIT;

		r.max_norm = 1.5;
		r.profile = SHARDD__V1__CLIP_PROFILE__CLIP_PROFILE_TORCH;
		nodefix_submit(&n, m[i], "ClipGradNorm", &r.base, &op[i]);
	}
	both_ok("ClipGradNorm");
	step();
	commit(2);
	cr_expect(same(u, plain[0]));
	cr_expect(same(v, plain[1]));
}

Test(backward, an_infinity_skips_all)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	float before[ELEMENTS];

	memcpy(before, nodefix_params(u), sizeof(before));
	p.inv_scale = 0.5;
	plan(&p);
	reduce(u, 2);
	reduce(v, INFINITY);
	step();
	cr_expect(NODEFIX_OUTCOME(shards_outcome, &op[0])->skipped &&
		  NODEFIX_OUTCOME(shards_outcome, &op[1])->skipped);
	cr_expect(NODEFIX_OUTCOME(shards_outcome, &op[0])->found_inf);
	commit(1);
	cr_expect_eq(u->rec->optimizer->steps, 0, "not counted");
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	cr_expect_arr_eq(before, nodefix_params(u), sizeof(before));
	cr_expect_null(u->parts[0].grads.slab);
	/* and the next one is taken */
	plan(&p);
	reduce(u, 4);
	reduce(v, 6);
	step();
	cr_expect_not(NODEFIX_OUTCOME(shards_outcome, &op[0])->skipped ||
		      NODEFIX_OUTCOME(shards_outcome, &op[0])->found_inf);
	commit(2);
	step_plain(2, 3);
	cr_expect(same(u, plain[0]));
	cr_expect(same(v, plain[1]));
}

Test(backward, a_norm_that_is_no_number_can_be_refused)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__PlanBackwardRequest__Clip c = clip_of(1);
	Shardd__V1__StepRequest s = SHARDD__V1__STEP_REQUEST__INIT;

	c.error_if_nonfinite = true;
	p.clip = &c;
	plan(&p);
	reduce(u, NAN);
	submit_step(&s);
	both_fail(FAULT_STATE, "cannot be clipped: nothing was changed");
	cr_expect(u->has_gradient);
	cr_expect_not(job->step.state == JOB_STEP_PREPARED);
	s.discard = true;
	submit_step(&s);
	both_ok("Step");
	cr_expect(NODEFIX_OUTCOME(shards_outcome, &op[1])->skipped);
	cr_expect_not(u->has_gradient);
	cr_expect_eq(u->rec->optimizer->steps, 0);
	cr_expect_not(job->groups[0]->plan.set);
}

Test(backward, a_plan_needs_the_last_reduce)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	static const Shardd__V1__StepRequest s = SHARDD__V1__STEP_REQUEST__INIT;

	p.inv_scale = 1;
	plan(&p);
	reduce_more(u, 2);
	submit_step(&s);
	both_fail(FAULT_STATE, "the last Reduce of unit 'u' in this backward pass is missing");
	submit_plan(&p);
	both_fail(FAULT_STATE, "unit 'u' has a gradient already");
	reduce(u, 2);
	step();
}

Test(backward, plans_must_be_equal_and_make_sense)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;
	Shardd__V1__PlanBackwardRequest__Clip c = clip_of(0);

	p.inv_scale = -1;
	submit_plan(&p);
	both_fail(FAULT_INVALID, "inv_scale is -1");
	p.inv_scale = 1;
	p.clip = &c;
	submit_plan(&p);
	both_fail(FAULT_INVALID, "max_norm is 0");
	cr_expect_str_eq(op[0].fault.field, "clip.max_norm");
	c.max_norm = 1;
	c.profile = 9;
	submit_plan(&p);
	both_fail(FAULT_INVALID, "profile is 9");
	c.profile = 0;
	nodefix_submit(&n, m[0], "PlanBackward", &p.base, &op[0]);
	p.inv_scale = 2;
	nodefix_submit(&n, m[1], "PlanBackward", &p.base, &op[1]);
	nodefix_wait(&op[0]);
	cr_expect_eq(op[0].fault.code, FAULT_STATE);
	cr_expect_not(job->groups[0]->plan.set);
}

/* ------------------------------------------------------------------ what happens */

static void rejoin(void)
{
	struct fault f = FAULT_NULL;
	struct member *again;

	m[1] = nodefix_join(&n, job, 1);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0, "%s", f.text);
}

/* Of a job that rolls nothing back. Those that do: test_kept.c. */
static void without_copy(void)
{
	job->rec->resume = JOB_RESUME_NO_COPY;
	nodefix_wrote(&n);
}

Test(backward, a_death_after_the_first_step_tears_a_job_without_a_copy)
{
	without_copy();
	commit(1);
	reduce(u, 2);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
	rejoin();
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "is TORN");
}

Test(backward, a_death_while_one_runs_tears_a_job_without_a_copy)
{
	without_copy();
	commit(1);
	submit_and_hold(u, 2);
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect_eq(job->running, 0);
	cr_expect_eq(job->mem.grads[0].used, 0);
}

Test(backward, a_death_before_it_leaves_all_as_it_was)
{
	float before[ELEMENTS];

	memcpy(before, nodefix_params(u), sizeof(before));
	commit(1);
	gather(0, u);
	reduce(u, 2);
	reduce_more(v, 2);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
	cr_expect_eq(u->rec->optimizer->steps, 0);
	cr_expect_arr_eq(before, nodefix_params(u), sizeof(before));
	rejoin();
	nodefix_turns(&n);
	cr_expect_eq(job->mem.grads[0].used, 0, "gradients of that epoch are given back");
	reduce(u, 2);
	reduce(v, 2);
	step();
	commit(2);
	cr_expect_eq(u->rec->optimizer->steps, 1);
}

Test(backward, a_death_while_a_reduce_steps_tears_a_job_without_a_copy)
{
	without_copy();
	commit(1);
	submit_fused(u, 2);
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect_eq(job->running, 0);
	cr_expect_not(u->step == UNIT_STEP_STEPPING || u->step == UNIT_STEP_STEPPED);
	cr_expect_eq(job->step.stepping, 0);
}

/* Its kernel has not been submitted yet: what comes before it is under way. */
Test(backward, a_death_before_a_reduce_steps_leaves_all_as_it_was)
{
	float before[ELEMENTS];

	without_copy();
	memcpy(before, nodefix_params(u), sizeof(before));
	commit(1);
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "Accumulate", u, &op[i]), &op[i]);
	}
	submit_fused(u, 2);
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect_eq(job->running, 0);
	cr_expect_not(u->step == UNIT_STEP_STEPPING || u->step == UNIT_STEP_STEPPED);
	cr_expect_eq(u->rec->optimizer->steps, 0);
	cr_expect_arr_eq(before, nodefix_params(u), sizeof(before));
	rejoin();
	reduce(u, 2);
	reduce(v, 2);
	step();
	commit(2);
	cr_expect_eq(u->rec->optimizer->steps, 1);
}

/* Without a commit the job goes on from there. The pass that the step was of is over with its
 * epoch: the unit once counted as stepped in the pass of the next one, and took no gradient. */
Test(backward, a_step_that_outlives_its_epoch_is_not_of_the_next_pass)
{
	without_copy();
	submit_and_hold(u, 1);
	cr_assert(u->step == UNIT_STEP_STEPPING);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_assert_not(u->step == UNIT_STEP_STEPPING || job->life.torn);
	cr_expect_eq(u->rec->optimizer->steps, 1);
	rejoin();
	reduce(u, 2);
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 2);
}

Test(backward, held_gradients_go_with_their_epoch)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;

	commit(1);
	p.inv_scale = 0.5;
	plan(&p);
	reduce(v, INFINITY);
	cr_expect(job->groups[0]->found_inf);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
	rejoin();
	cr_expect_not(job->groups[0]->plan.set || job->groups[0]->found_inf);
	reduce(u, 2);
	reduce(v, 3);
	step();
	cr_expect_not(NODEFIX_OUTCOME(shards_outcome, &op[0])->skipped);
	step_plain(2, 3);
	cr_expect(same(u, plain[0]));
}

Test(backward, a_device_that_fails_tears_the_job)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", u, &op[1]), &op[1]);
	reduce(u, 1);
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	release(1, u);
	nodefix_turns(&n);
	cr_expect(job->life.torn);
	cr_expect_not(u->step == UNIT_STEP_STEPPING);
}

Test(backward, a_device_that_fails_a_reduce_that_steps_tears_the_job)
{
	without_copy(); /* which would be the first to fail */
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], u, false, &op[i]);
	both_fail(FAULT_INTERNAL, "Reduce");
	cr_expect(job->life.torn);
	cr_expect_not(u->step == UNIT_STEP_STEPPING || u->has_gradient);
	cr_expect_eq(job->step.stepping, 0);
}

Test(backward, initialise_begins_anew)
{
	reduce(u, 1);
	reduce_more(v, 1);
	nodefix_turns(&n);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 1, &op[i]);
	both_ok("Initialise");
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], v, 1, &op[i]);
	both_ok("Initialise");
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 0);
	cr_expect_eq(job->mem.grads[0].used, 0);
	reduce(u, 2);
	reduce(v, 3);
	step();
	step_plain(2, 3);
	cr_expect(same(u, plain[0]));
}

Test(backward, a_job_deleted_meanwhile_goes_afterwards)
{
	struct fault f = FAULT_NULL;

	reduce_more(v, 1);
	submit_reduce(u, 2, false);
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_turns(&n);
	cr_assert_eq(job_delete(job, true, NULL, &f), 0);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect_eq(n.node.devices[0].quota.used, 0);
}

static void without_memory(bool more)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	job->quota.limit = job->quota.used;
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], u, more, &op[i]);
}

Test(backward, without_memory_a_reduce_is_refused)
{
	without_memory(true);
	both_fail(FAULT_EXHAUSTED, "bytes for gradient shards: ");
	cr_expect_not(u->has_gradient || u->step == UNIT_STEP_DUE);
	job->quota.limit = 0;
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], u, false, &op[i]);
	both_ok("Reduce");
	nodefix_turns(&n);
	cr_expect_eq(u->rec->optimizer->steps, 1);
}

Test(backward, a_reduce_that_steps_the_unit_needs_no_memory)
{
	without_memory(false);
	both_ok("Reduce");
	cr_expect_eq(u->rec->optimizer->steps, 1);
}

/* -------------------------------------------------------------------- memory */

static uint64_t shard_bytes_of(enum optim_when when, const char *name)
{
	uint64_t before = job->quota.by_class[MEM_SHARD];
	state_unit *spec = nodefix_spec(name, 1 << 20);

	spec->optimizer->when = when;
	nodefix_register(job, spec);
	return job->quota.by_class[MEM_SHARD] - before;
}

Test(backward, an_element_takes_twelve_bytes_and_as_many_for_the_copy)
{
	cr_expect_eq(shard_bytes_of(OPTIM_AT_STEP, "at step"), 16u << 20);
	cr_expect_eq(shard_bytes_of(OPTIM_IN_BACKWARD, "in backward"), 24u << 20);
	without_copy();
	cr_expect_eq(shard_bytes_of(OPTIM_AT_STEP, "at step too"), 16u << 20);
	cr_expect_eq(shard_bytes_of(OPTIM_IN_BACKWARD, "without"), 12u << 20);
}

/* Gradients that wait for more, of one unit after the other, need the memory of one. */
Test(backward, gradient_shards_take_turns)
{
	uint64_t most;

	reduce_more(u, 1);
	reduce(u, 1);
	nodefix_turns(&n);
	most = job->mem.grads[0].bytes;
	cr_expect_gt(most, 0);
	reduce_more(v, 1);
	reduce(v, 1);
	nodefix_turns(&n);
	cr_expect_eq(job->mem.grads[0].bytes, most);
	cr_expect_eq(job->mem.grads[0].used, 0);
	step();
	commit(1);
}

Test(backward, a_gradient_that_nobody_waits_for_has_no_shards)
{
	reduce(u, 1);
	cr_expect_eq(u->rec->optimizer->steps, 1, "with its reduce");
	cr_expect_eq(job->mem.grads[0].bytes, 0);
}

/* Pools of other jobs keep what they have while this job has something itself. */
Test(backward, what_another_job_keeps_is_there_for_who_has_nothing)
{
	struct job *other = nodefix_job(&n, "other", 1, 0);

	reduce_more(u, 1);
	reduce(u, 1);
	nodefix_turns(&n);
	cr_assert_gt(job->mem.grads[0].bytes, 0);
	cr_expect_gt(job_evict(other, 1), 0);
	cr_expect_eq(job->mem.grads[0].bytes, 0);
	cr_expect_eq(job_evict(other, 1), 0);
}

/* A shard that a trainer has is in the way of Initialise; one that nobody has asked for is
 * not handed out any more. */
Test(backward, a_shard_comes_back_before_its_unit_begins_anew)
{
	Shardd__V1__NextShardRequest r = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;
	state_unit *spec = spec_of("own", OPTIM_BY_TRAINER);
	struct nodefix_op next = { 0 };
	struct unit *own;

	spec->optimizer->kind = OPTIM_NONE;
	own = nodefix_unit(&n, job, spec, m, 2);
	reduce(own, 1);
	NODEFIX_OK(nodefix_submit(&n, m[1], "NextShard", &r.base, &next), &next);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], own, 7, &op[i]);
	both_fail(FAULT_STATE, "rank 1 has its shard of unit 'own'");
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "ShardDone", own, &next), &next);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], own, 7, &op[i]);
	both_ok("Initialise");
	nodefix_submit(&n, m[0], "NextShard", &r.base, &next);
	nodefix_turns(&n);
	cr_expect_not(next.over, "its pass is over");
	reduce(own, 1);
	nodefix_ok(&next, "NextShard");
	cr_expect_eq(NODEFIX_OUTCOME(external_outcome, &next)->unit, own);
}

/* Nothing between devices has been needed yet: there is no communicator. */
Test(backward, unscale_may_be_the_first_of_all)
{
	Shardd__V1__UnscaleRequest r = SHARDD__V1__UNSCALE_REQUEST__INIT;

	struct job *fresh = nodefix_job(&n, "fresh", 2, 0);
	struct member *first[2];

	for (uint32_t i = 0; i < 2; i++)
		first[i] = nodefix_join(&n, fresh, i);
	r.inv_scale = 0.5;
	cr_assert_null(fresh->groups[0]->nc);
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, first[i], "Unscale", &r.base, &op[i]);
	both_ok("Unscale");
	cr_expect_not(NODEFIX_OUTCOME(shards_outcome, &op[0])->found_inf);
}
