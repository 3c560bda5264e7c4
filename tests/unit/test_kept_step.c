/* Units that make a step before others, in jobs that resume at their last applied step: when they are
 * copied, when they are rolled back, and what waits for that. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/kept.h"
#include "job/position.h"
#include "nodefix.h"
#include "shardd.pb-c.h"
#include "store/change.h"

enum { ELEMENTS = 1000 };

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *a, *b, *plain; /* in backward; at the step */
static struct nodefix_op op[2];
static float before[3][ELEMENTS]; /* of them */

static struct unit *unit_of(const char *name, enum optim_when when)
{
	state_unit *spec = nodefix_spec(name, ELEMENTS);

	spec->optimizer->when = when;
	return nodefix_unit(&n, job, spec, m, 2);
}

static void note(void)
{
	const struct unit *const all[] = { a, b, plain };

	for (unsigned i = 0; i < ARRAY_SIZE(all); i++)
		memcpy(before[i], nodefix_params(all[i]), sizeof(before[i]));
}

static void begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	a = unit_of("a", OPTIM_IN_BACKWARD);
	b = unit_of("b", OPTIM_IN_BACKWARD);
	plain = unit_of("plain", OPTIM_AT_STEP);
	note();
}

static void end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(kept_step, .init = begin, .fini = end, .timeout = 60);

static void both_ok(const char *what)
{
	nodefix_ok(&op[0], what);
	nodefix_ok(&op[1], what);
}

static void expect_refused(const char *words)
{
	for (unsigned i = 0; i < 2; i++) {
		nodefix_wait(&op[i]);
		cr_expect(op[i].fault.code, "%s", words);
		cr_expect(strstr(op[i].fault.text, words), "%s: %s", words, op[i].fault.text);
	}
}

static void submit_reduce(struct unit *u)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], u, false, &op[i]);
}

static void reduce(struct unit *u)
{
	submit_reduce(u);
	both_ok("Reduce");
	nodefix_turns(&n);
}

static void step(void)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	both_ok("Step");
}

static void gather(unsigned i, struct unit *u)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[i], "Gather", u, &op[i]), &op[i]);
}

static void release(unsigned i, struct unit *u)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[i], "Release", u, &op[i]), &op[i]);
}

/* Something that needs the parameters. */
static void apply(void)
{
	for (unsigned i = 0; i < 2; i++)
		gather(i, plain);
	for (unsigned i = 0; i < 2; i++)
		release(i, plain);
}

static void commit(uint64_t number)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], number, 10 + i, &op[i]);
	both_ok("Commit");
}

static void whole_step(void)
{
	reduce(a);
	reduce(b);
	reduce(plain);
	step();
	apply();
	note();
}

static void expect_back(uint64_t steps)
{
	nodefix_turns(&n);
	cr_expect_not(job->rec->kept || job->rec->rollback || job->rec->partial);
	cr_expect_not(job->life.torn);
	cr_expect_arr_eq(nodefix_params(a), before[0], sizeof(before[0]));
	cr_expect_arr_eq(nodefix_params(b), before[1], sizeof(before[1]));
	cr_expect_arr_eq(nodefix_params(plain), before[2], sizeof(before[2]));
	cr_expect_eq(a->rec->optimizer->steps, steps);
	cr_expect_eq(b->rec->optimizer->steps, steps);
	cr_expect(a->rec->initialised && b->rec->initialised && plain->rec->initialised);
	cr_expect_eq(job->running, 0);
	cr_expect_eq(job->step.stepping, 0);
}

static void expect_at(uint64_t want)
{
	uint64_t is = 0;

	cr_expect(position_of(job->rec, &is));
	cr_expect_eq(is, want, "at %llu", (unsigned long long)is);
}

static void rejoin(void)
{
	struct fault f = FAULT_NULL;
	struct member *again;

	m[1] = nodefix_join(&n, job, 1);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0, "%s", f.text);
}

/* ------------------------------------------------------------------- when it is made */

Test(kept_step, the_copy_is_made_before_the_first_unit_is_stepped)
{
	const void *copies[2] = { region_addr(&a->parts[0].kept), region_addr(&b->parts[0].kept) };

	cr_assert_not(plain->parts[0].kept.slab);
	reduce(plain);
	cr_expect_not(job->rec->kept);
	reduce(a);
	cr_expect(job->rec->kept && job->rec->partial);
	cr_expect_arr_eq(copies[0], before[0], sizeof(before[0]));
	cr_expect_arr_eq(copies[1], before[1], sizeof(before[1]));
	cr_expect_neq(nodefix_params(a)[0], before[0][0]);
	reduce(b);
	cr_expect_arr_eq(copies[1], before[1], sizeof(before[1]), "once");
	step();
	cr_expect(job->rec->kept, "a unit is not stepped yet");
	apply();
	cr_expect_not(job->rec->kept || job->rec->partial, "the step is whole");
}

Test(kept_step, no_copy_is_made_of_a_step_that_waits_for_the_step)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;

	p.inv_scale = 0.5;
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "PlanBackward", &p.base, &op[i]);
	both_ok("PlanBackward");
	reduce(a);
	reduce(b);
	cr_expect_not(job->rec->kept);
	step();
	nodefix_drop(&n, m[1], "died");
	expect_back(0);
	rejoin();
	whole_step();
}

Test(kept_step, accumulating_makes_no_copy)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", a, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], a, true, &op[i]);
	both_ok("Reduce");
	cr_expect_not(job->rec->kept);
	reduce(a);
	cr_expect(job->rec->kept);
}

/* ------------------------------------------------------------------- what comes back */

Test(kept_step, a_death_brings_the_last_step_back)
{
	commit(1);
	reduce(a);
	nodefix_drop(&n, m[1], "died");
	expect_back(0);
	expect_at(1);
	rejoin();
	whole_step();
	whole_step();
	commit(3);
	reduce(b);
	nodefix_drop(&n, m[1], "died");
	expect_back(2);
	expect_at(3);
}

/* Before any commit, too. */
Test(kept_step, a_death_brings_the_beginning_back)
{
	uint64_t is;

	reduce(a);
	reduce(b);
	nodefix_drop(&n, m[1], "died");
	expect_back(0);
	cr_expect_not(position_of(job->rec, &is));
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	rejoin();
	whole_step();
	commit(1);
}

/* A unit at the Step waits for the Step, which the dead rank has not called. */
Test(kept_step, a_prepared_step_goes_with_what_was_stepped)
{
	commit(1);
	reduce(a);
	reduce(plain);
	reduce(b);
	step();
	nodefix_drop(&n, m[1], "died");
	expect_back(0);
	expect_at(1);
	cr_expect_eq(plain->rec->optimizer->steps, 0);
}

/* Applying makes the step whole, whoever dies. */
Test(kept_step, a_step_that_is_applied_is_not_rolled_back)
{
	whole_step();
	commit(1); /* each step counts as one */
	reduce(a);
	reduce(b);
	reduce(plain);
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", plain, &op[0]);
	nodefix_turns(&n);
	cr_assert_eq(job->step.state, JOB_STEP_APPLYING);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn || job->rec->rollback);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	note();
	expect_back(2);
	expect_at(2);
}

static void dies_while(bool fused)
{
	struct backend *dev = n.node.devices[0].backend;
	struct fault f = FAULT_NULL;
	struct member *again;

	commit(1);
	reduce(b); /* and so the copy is there */
	if (!fused)
		gather(1, a);
	backend_fake_hold(dev, fused);
	submit_reduce(a);
	nodefix_turns(&n);
	if (!fused) {
		both_ok("Reduce");
		backend_fake_hold(dev, true);
		release(1, a);
	}
	cr_assert(a->step == UNIT_STEP_STEPPING);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect(job->rec->rollback);
	cr_expect_eq(nodefix_try_join(&n, job, 1, NULL, NULL, &again, &f), RES_WAIT);
	backend_fake_hold(dev, false);
	expect_back(0);
	expect_at(1);
	rejoin();
	whole_step();
	commit(2);
}

Test(kept_step, a_death_while_a_unit_is_stepped)
{
	dies_while(false);
}

Test(kept_step, a_death_while_a_reduce_steps_its_unit)
{
	dies_while(true);
}

Test(kept_step, a_death_while_the_copy_is_made)
{
	commit(1);
	backend_fake_hold(n.node.devices[0].backend, true);
	submit_reduce(a);
	nodefix_turns(&n);
	cr_assert(job->kept.run && !job->rec->kept);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	expect_back(0);
	expect_at(1);
	rejoin();
	whole_step();
	reduce(a);
	cr_expect(job->rec->kept, "of this step");
	cr_expect_arr_eq(region_addr(&a->parts[0].kept), before[0], sizeof(before[0]));
}

/* The copy of a Reduce that came to nothing is not that of a later step. */
Test(kept_step, a_copy_that_was_not_needed_goes_with_the_step)
{
	whole_step();
	backend_fake_hold(n.node.devices[0].backend, true);
	submit_reduce(a);
	nodefix_turns(&n);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	rejoin();
	whole_step();
	cr_expect_not(job->rec->kept);
	reduce(b);
	cr_expect_arr_eq(region_addr(&b->parts[0].kept), before[1], sizeof(before[1]));
	nodefix_drop(&n, m[1], "died");
	expect_back(2);
}

/* The Reduce that asked for the copy had no memory for gradients, and the pass is done with a plan, after
 * which all units are stepped at once. Half of that is not what a successor goes on with. */
Test(kept_step, a_copy_that_is_there_is_that_of_a_step_of_all_units)
{
	Shardd__V1__PlanBackwardRequest p = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;

	commit(1);
	cr_assert_eq(kept_let(job, JOB_CHANGE_EARLY), RES_WAIT);
	nodefix_turns(&n);
	cr_assert(job->rec->kept);
	p.inv_scale = 0.5;
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "PlanBackward", &p.base, &op[i]);
	both_ok("PlanBackward");
	reduce(a);
	reduce(b);
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", plain, &op[0]);
	nodefix_turns(&n);
	cr_assert(job->step.state == JOB_STEP_APPLYING && job->rec->applying && job->rec->kept);
	cr_expect(kept_goes_back(job));
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op[0], "Gather");
	cr_expect_not(job->rec->kept || job->rec->partial || job->rec->applying);
	cr_expect_eq(job->rec->uncommitted_steps, 1);
}

Test(kept_step, a_commit_ends_the_step)
{
	reduce(a);
	reduce(b);
	commit(1);
	cr_expect_not(job->rec->kept);
	note();
	reduce(a);
	nodefix_drop(&n, m[1], "died");
	expect_back(1);
	expect_at(1);
}

/* As that of an optimizer at the Step: nobody has committed it, or needed its parameters. */
Test(kept_step, a_step_that_all_have_made_goes_back_until_it_is_applied)
{
	uint64_t number = 9;
	uint8_t blob[] = { 1, 2 };

	commit(1);
	for (unsigned applied = 0; applied < 2; applied++) {
		Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;

		reduce(a);
		reduce(b);
		q.optional_step_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_STEP_STEP;
		q.step = number;
		q.blob = (ProtobufCBinaryData){ sizeof(blob), blob };
		for (unsigned i = 0; i < 2; i++)
			nodefix_submit(&n, m[i], "Step", &q.base, &op[i]);
		both_ok("Step");
		if (applied)
			apply();
		if (applied)
			note();
		nodefix_drop(&n, m[1], "died");
		expect_back(applied);
		expect_at(applied ? number : 1);
		cr_expect_eq(state_job_blob(job->rec, 0)->step, applied ? number : 1);
		rejoin();
	}
}

/* The commit of such a step applies nothing: a daemon that died meanwhile once left the job TORN. */
Test(kept_step, a_commit_after_backward_changes_nothing)
{
	reduce(a);
	reduce(b);
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], 1, 10, &op[i]);
	nodefix_turns(&n);
	cr_assert_eq(job->step.state, JOB_STEP_APPLYING);
	cr_expect_not(job->rec->applying);
	cr_expect(job->rec->has_commit, "both are in one entry of the journal");
	backend_fake_hold(n.node.devices[0].backend, false);
	both_ok("Commit");
	cr_expect_eq(job->life.changing, 0);
}

/* Nobody knows what was written. */
Test(kept_step, what_was_written_beside_it_is_of_no_step)
{
	commit(1);
	reduce(a);
	position_altered(job);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect(job->life.torn);
	cr_expect_arr_eq(nodefix_params(a), before[0], sizeof(before[0]));
}

/* What was initialised after the copy was not there then. */
Test(kept_step, units_that_came_later_are_to_be_initialised)
{
	struct unit *later;

	commit(1);
	reduce(a);
	later = unit_of("later", OPTIM_IN_BACKWARD);
	cr_expect(later->rec->initialised);
	nodefix_drop(&n, m[1], "died");
	expect_back(0);
	cr_expect_not(later->rec->initialised);
}

/* It was allowed to write before the copy was asked for, and ends while the copy is made. */
Test(kept_step, an_initialise_beside_the_copy_is_in_the_copy)
{
	state_unit *spec = nodefix_spec("beside", ELEMENTS);
	struct unit *beside;

	spec->optimizer->when = OPTIM_IN_BACKWARD;
	beside = nodefix_register(job, spec);
	backend_fake_hold(n.node.devices[0].backend, true);
	submit_reduce(a);
	nodefix_turns(&n);
	cr_assert(job->kept.run && !beside->rec->initialised);
	memset(region_addr(&beside->parts[0].params), 1, ELEMENTS * sizeof(float));
	beside->rec->initialised = true;
	beside->version++;
	backend_fake_hold(n.node.devices[0].backend, false);
	both_ok("Reduce");
	cr_expect(job->rec->kept && beside->rec->kept_initialised);
	cr_expect_arr_eq(region_addr(&beside->parts[0].kept), nodefix_params(beside),
			 ELEMENTS * sizeof(float));
}

Test(kept_step, a_device_that_fails_on_the_way_back_tears_the_job)
{
	commit(1);
	reduce(a);
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect(job->life.torn);
	cr_expect_not(job->rec->kept || job->rec->rollback);
}

/* ------------------------------------------------------------------- beside others */

static void convert(struct unit *u)
{
	static uint32_t id;
	static Shardd__V1__ConvertUnitsRequest q;

	id = u->id;
	q = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	q.units = &id;
	q.n_units = 1;
	q.strategy = SHARDD__V1__STRATEGY__STRATEGY_REPLICATE;
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "ConvertUnits", &q.base, &op[i]);
}

Test(kept_step, a_unit_that_is_converted_has_a_copy_of_its_new_layout)
{
	uint64_t used = job->quota.by_class[MEM_SHARD];
	const struct slab *old = a->parts[0].kept.slab;

	reduce(a);
	convert(b);
	expect_refused("call Step");
	step();
	convert(b);
	both_ok("ConvertUnits");
	nodefix_turns(&n);
	cr_expect(b->parts[0].kept.slab && b->parts[0].kept.slab != old);
	cr_expect_geq(job->quota.by_class[MEM_SHARD], used);
	note();
	commit(1);
	reduce(b);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect_arr_eq(nodefix_params(b), before[1], sizeof(before[1]));
	expect_at(1);
}

Test(kept_step, a_copy_goes_with_its_unit)
{
	Shardd__V1__DropUnitsRequest q = SHARDD__V1__DROP_UNITS_REQUEST__INIT;
	struct unit *alone = unit_of("alone", OPTIM_IN_BACKWARD);
	uint64_t used = job->quota.by_class[MEM_SHARD];
	uint32_t id = alone->id;

	commit(1);
	reduce(a);
	q.units = &id;
	q.n_units = 1;
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "DropUnits", &q.base, &op[i]);
	both_ok("DropUnits");
	nodefix_turns(&n);
	cr_expect_eq(job->quota.by_class[MEM_SHARD], used - 2 * 3 * 4096);
	nodefix_drop(&n, m[1], "died");
	expect_back(0);
	cr_expect(alone->rec->dropped);
}

Test(kept_step, a_registration_without_room_for_the_copy_says_what_to_choose)
{
	state_unit *spec = nodefix_spec("large", 1 << 20);
	struct fault f = FAULT_NULL;
	uint64_t charged;
	uint32_t id;

	spec->optimizer->when = OPTIM_IN_BACKWARD;
	job->quota.limit = job->quota.used + (20u << 20);
	cr_expect_eq(nodefix_try_register(job, &spec, 1, &id, &charged, &f), RES_FAILED);
	cr_expect_eq(f.code, FAULT_EXHAUSTED);
	cr_expect(strstr(f.text, "12582912 of them for copies that a step is rolled back to"), "%s",
		  f.text);
	cr_expect(strstr(f.text, "resume NO_COPY"), "%s", f.text);
	cr_expect(spec, "still the caller's");
	job->rec->resume = JOB_RESUME_NO_COPY;
	nodefix_wrote(&n);
	f = FAULT_NULL;
	cr_expect_eq(nodefix_try_register(job, &spec, 1, &id, &charged, &f), RES_DONE, "%s",
		     f.text);
}

/* Units of a daemon that kept no copies: memory is taken with their first step, or they go on without. */
static void forget_copies(void)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		job->units[i]->parts[0].kept = REGION_NULL;
		state_region_free(&job->rec->units[i]->parts[0]->kept);
	}
	nodefix_wrote(&n);
}

Test(kept_step, units_without_memory_for_a_copy_take_some)
{
	forget_copies();
	commit(1);
	reduce(a);
	cr_expect(job->rec->kept && a->parts[0].kept.slab && b->parts[0].kept.slab);
	nodefix_drop(&n, m[1], "died");
	expect_back(0);
}

Test(kept_step, where_there_is_none_a_death_tears_the_job)
{
	forget_copies();
	commit(1);
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", a, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	job->quota.limit = job->quota.used;
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], a, false, &op[i]);
	both_ok("Reduce");
	cr_expect_not(job->rec->kept);
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
}
