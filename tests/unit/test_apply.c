/* The step that is prepared by Step and applied by Commit, or by the next op that
 * needs the parameters; and what is left when something happens in between. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "step/shards.h"

TestSuite(apply, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define ELEMENTS 1000

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];
static float before[ELEMENTS];

static void test_apply_begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, nodefix_spec("u", ELEMENTS), m, 2);
	memcpy(before, nodefix_params(u), sizeof(before));
}

static void test_apply_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define APPLY_TEST(name) Test(apply, name, .init = test_apply_begin, .fini = test_apply_end)

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

static bool unchanged(void)
{
	return memcmp(before, nodefix_params(u), sizeof(before)) == 0;
}

static void both_ok(const char *what)
{
	nodefix_ok(&op[0], what);
	nodefix_ok(&op[1], what);
}

static void gradients(float value)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, value);
	}
}

static void submit_reduce(void)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "Reduce", u, &op[i]);
}

static void reduce(float value)
{
	gradients(value);
	submit_reduce();
	both_ok("Reduce");
}

static void step(void)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	both_ok("Step");
}

static void submit_commit(uint64_t number)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], number, 10 + i, &op[i]);
}

static void commit(uint64_t number)
{
	submit_commit(number);
	both_ok("Commit");
}

static void seed(void)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 1, &op[i]);
	both_ok("Initialise");
}

/* ------------------------------------------------------------------- applying */

APPLY_TEST(a_step_is_prepared_and_the_commit_applies_it)
{
	reduce(1);
	cr_expect(u->has_gradient);
	step();
	cr_expect(job->step.state == JOB_STEP_PREPARED);
	cr_expect(unchanged());
	cr_expect_eq(u->rec->optimizer->steps, 0);
	commit(7);
	cr_expect_not(job->step.state == JOB_STEP_PREPARED);
	cr_expect_not(unchanged());
	cr_expect_eq(u->rec->optimizer->steps, 1);
	cr_expect_not(u->has_gradient);
	cr_expect(job->rec->has_commit);
	cr_expect_eq(job->rec->step, 7);
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	cr_expect_eq(state_job_blob(job->rec, 0)->data.len, 10);
	cr_expect_eq(state_job_blob(job->rec, 1)->data.len, 11);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 21);
	commit(8);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 21, "in place of the old ones");
}

APPLY_TEST(who_reads_parameters_applies_it_first)
{
	reduce(1);
	step();
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &op[0]), &op[0]);
	cr_expect_not(unchanged());
	cr_expect_eq(job->rec->uncommitted_steps, 1);
	cr_expect_not(job->rec->has_commit);
}

APPLY_TEST(the_next_reduce_and_the_next_step_apply_it_too)
{
	reduce(1);
	step();
	gradients(2);
	cr_expect(unchanged());
	submit_reduce();
	both_ok("Reduce");
	cr_expect_eq(u->rec->optimizer->steps, 1);
	cr_expect(u->has_gradient, "the new one");
	step();
	cr_expect_eq(u->rec->optimizer->steps, 1);
	step();
	cr_expect_eq(u->rec->optimizer->steps, 2);
	cr_expect_eq(job->rec->uncommitted_steps, 2);
	commit(1);
	cr_expect_eq(u->rec->optimizer->steps, 2, "no gradient since");
}

APPLY_TEST(gradients_add_up_until_the_step)
{
	const float *grads = region_addr(&u->parts[0].grads);

	reduce(1);
	cr_expect_eq(grads[ELEMENTS - 1], 1, "of two ranks, the mean");
	reduce(2);
	cr_expect_eq(grads[ELEMENTS - 1], 3);
	step();
	reduce(4);
	cr_expect_eq(grads[ELEMENTS - 1], 4);
}

APPLY_TEST(the_learning_rate_may_be_the_steps_own)
{
	Shardd__V1__StepRequest r = SHARDD__V1__STEP_REQUEST__INIT;

	r.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
	r.lr = 0;
	reduce(1);
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "Step", &r.base, &op[i]);
	both_ok("Step");
	commit(1);
	cr_expect(unchanged(), "with lr 0");
	cr_expect_eq(u->rec->optimizer->steps, 1);
}

APPLY_TEST(nobody_may_hold_what_is_stepped)
{
	reduce(1);
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", u, &op[0]), &op[0]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	expect_fault(&op[0].fault, FAULT_STATE, "unit 'u' is still gathered by rank 1 (pid");
	expect_fault(&op[1].fault, FAULT_STATE, "unit 'u' is still gathered by rank 1 (pid");
	cr_expect_not(job->step.state == JOB_STEP_PREPARED);
	cr_expect(u->has_gradient);
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Release", u, &op[0]), &op[0]);
	step();
}

APPLY_TEST(a_committed_step_is_larger_than_the_last)
{
	commit(5);
	submit_commit(5);
	expect_fault(&op[0].fault, FAULT_INVALID, "above the last committed step, 5");
	cr_expect_str_eq(op[0].fault.field, "step");
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 21);
	commit(6);
}

APPLY_TEST(blobs_are_charged_and_limited)
{
	nodefix_commit(&n, m[0], 1, JOB_MAX_BLOB + 1, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "the maximum is 65536");
	job->quota.limit = job->quota.used + 100;
	nodefix_commit(&n, m[0], 1, 101, &op[0]);
	expect_fault(&op[0].fault, FAULT_EXHAUSTED, "101 bytes for a blob");
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 0);
	/* that was this rank's number 1 (after its Initialise): the peer learns of it */
	nodefix_commit(&n, m[1], 1, 0, &op[1]);
	expect_fault(&op[1].fault, FAULT_STATE, "101 bytes for a blob");
}

/* -------------------------------------------------------------- epochs that end */

APPLY_TEST(a_prepared_step_is_dropped_with_its_epoch)
{
	commit(1);
	reduce(1);
	step();
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->step.state == JOB_STEP_PREPARED);
	cr_expect_not(job->life.torn);
	cr_expect_not(u->has_gradient);
	cr_expect(unchanged());
	cr_expect_eq(u->rec->optimizer->steps, 0);
}

static void rejoin(void)
{
	struct fault f = FAULT_NULL;
	struct member *again;

	m[1] = nodefix_join(&n, job, 1);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0, "%s", f.text);
}

APPLY_TEST(a_death_after_an_uncommitted_step_tears_the_job)
{
	commit(1);
	reduce(1);
	step();
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &op[0]), &op[0]);
	nodefix_drop(&n, m[1], "died");
	cr_expect(job->life.torn);
	rejoin();
	cr_expect_str_eq(job_state_name(job), "TORN");
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE,
		     "is TORN: 1 steps were applied after the last "
		     "commit (1)");
	nodefix_step(&n, m[0], &op[0]);
	nodefix_step(&n, m[1], &op[1]);
	expect_fault(&op[1].fault, FAULT_STATE, "is TORN");
	seed();
	cr_expect_not(job->life.torn);
	cr_expect_not(job->rec->has_commit, "it belonged to other parameters");
	cr_expect(unchanged());
	reduce(1);
	step();
	commit(1);
}

APPLY_TEST(unless_the_job_allows_it_or_there_is_nothing_to_go_back_to)
{
	reduce(1);
	step();
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &op[0]), &op[0]);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn, "there was no commit");
	rejoin();
	commit(1);
	job->rec->allow_torn = true;
	nodefix_wrote(&n);
	reduce(1);
	step();
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &op[0]), &op[0]);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(job->life.torn);
}

APPLY_TEST(a_commit_that_runs_is_not_undone_by_a_death)
{
	commit(1);
	reduce(1);
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	submit_commit(2);
	nodefix_turns(&n);
	cr_expect(job->step.state == JOB_STEP_APPLYING);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(op[0].over);
	backend_fake_hold(n.node.devices[0].backend, false);
	both_ok("Commit");
	cr_expect_eq(job->rec->step, 2);
	cr_expect_not(unchanged());
	cr_expect_not(job->life.torn);
}

APPLY_TEST(a_step_that_a_read_began_to_apply_tears_the_job_if_a_rank_dies)
{
	commit(1);
	reduce(1);
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	cr_expect(job->step.state == JOB_STEP_APPLYING);
	nodefix_drop(&n, m[1], "died");
	expect_fault(&op[0].fault, FAULT_ABORTED, "rank 1");
	cr_expect_not(job->life.torn, "not yet known");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect(job->life.torn);
	cr_expect_eq(job->running, 0);
}

/* What a rank brought is gone with it. A reduce that went on after the step used to
 * run into the buffers of the dead and ended the daemon. */
APPLY_TEST(a_reduce_that_waited_for_the_step_ends_with_its_epoch)
{
	reduce(1);
	step();
	gradients(2);
	backend_fake_hold(n.node.devices[0].backend, true);
	submit_reduce();
	nodefix_turns(&n);
	cr_expect(job->step.state == JOB_STEP_APPLYING);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	expect_fault(&op[0].fault, FAULT_ABORTED, "epoch 1");
	expect_fault(&op[1].fault, FAULT_ABORTED, "epoch 1");
	cr_expect_not(u->has_gradient);
}

/* The same with the buffers that parameters come from. */
APPLY_TEST(an_initialise_that_waited_for_the_step_ends_with_its_epoch)
{
	struct nodefix_op buffer[2] = { 0 };

	reduce(1);
	step();
	for (unsigned i = 0; i < 2; i++)
		NODEFIX_OK(nodefix_alloc(&n, m[i], ELEMENTS * 4, &buffer[i]), &buffer[i]);
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 2; i++)
		nodefix_own(&n, m[i], u, buffer[i].result.buffer, &op[i]);
	nodefix_turns(&n);
	cr_expect(job->step.state == JOB_STEP_APPLYING);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&op[0]);
	expect_fault(&op[0].fault, FAULT_ABORTED, "epoch 1");
	cr_expect(u->rec->initialised, "nothing was written");
}

APPLY_TEST(a_step_that_waited_for_the_step_before_ends_with_its_epoch)
{
	reduce(1);
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&op[0]);
	expect_fault(&op[0].fault, FAULT_ABORTED, "epoch 1");
	cr_expect_not(job->step.state == JOB_STEP_PREPARED);
}

APPLY_TEST(a_job_deleted_while_a_step_is_applied_goes_afterwards)
{
	struct fault f = FAULT_NULL;

	reduce(1);
	step();
	gradients(2);
	backend_fake_hold(n.node.devices[0].backend, true);
	submit_reduce();
	nodefix_turns(&n);
	cr_assert_eq(job_delete(job, true, NULL, &f), 0);
	cr_expect_gt(n.node.devices[0].quota.used, 0);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect(op[0].over && op[1].over);
	expect_fault(&op[0].fault, FAULT_ABORTED, "was deleted");
	cr_expect_eq(n.node.devices[0].quota.used, 0);
}

/* ------------------------------------------------------------ devices that fail */

APPLY_TEST(a_device_that_fails_the_step_tears_the_job)
{
	commit(1);
	reduce(1);
	step();
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	submit_commit(2);
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	expect_fault(&op[0].fault, FAULT_INTERNAL, "is TORN");
	cr_expect(job->life.torn);
	cr_expect_eq(job->rec->step, 1);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 21, "the old blobs");
	seed();
	cr_expect_not(job->life.torn);
	reduce(1);
	step();
	commit(3);
}

/* They had passed their check before the device failed, and used to be given what it
 * left. */
APPLY_TEST(those_who_waited_for_the_step_learn_that_it_failed)
{
	commit(1);
	reduce(1);
	step();
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	nodefix_on_unit(&n, m[1], "Gather", u, &op[1]);
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	expect_fault(&op[0].fault, FAULT_STATE, "is TORN");
	expect_fault(&op[1].fault, FAULT_STATE, "is TORN");
	cr_expect_eq(u->gathered_ranks, 0);
	seed();
	reduce(1);
	step();
	gradients(1);
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	submit_reduce();
	nodefix_wait(&op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "is TORN");
	seed();
	cr_expect_str_eq(job_state_name(job), "RUNNING");
}

/* Half a gradient is none: what a failed reduce leaves must not be stepped with. */
APPLY_TEST(a_reduce_that_failed_leaves_no_gradient)
{
	reduce(1);
	gradients(1);
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	submit_reduce();
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	expect_fault(&op[0].fault, FAULT_INTERNAL, "Reduce: ");
	cr_expect_eq(op[0].fault.native, EIO);
	cr_expect_not(u->has_gradient);
	reduce(3);
	cr_expect_eq(((float *)region_addr(&u->parts[0].grads))[0], 3);
}

APPLY_TEST(an_initialise_that_failed_leaves_no_parameters)
{
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 1, &op[i]);
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	expect_fault(&op[1].fault, FAULT_INTERNAL, "Initialise: ");
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "is not initialised");
	seed();
	cr_expect(unchanged());
}

/* --------------------------------------------------------------------- clipping */

APPLY_TEST(clipping_scales_what_is_too_long)
{
	reduce(3);
	for (unsigned i = 0; i < 2; i++)
		nodefix_clip(&n, m[i], 1, &op[i]);
	both_ok("ClipGradNorm");
	cr_expect_float_eq(NODEFIX_OUTCOME(shards_outcome, &op[1])->total_norm, 94.86832980505137,
			   1e-9);
	cr_expect_float_eq(((float *)region_addr(&u->parts[0].grads))[17], 3 / 94.868331, 1e-6);
	for (unsigned i = 0; i < 2; i++)
		nodefix_clip(&n, m[i], 5, &op[i]);
	both_ok("ClipGradNorm");
	cr_expect_float_eq(NODEFIX_OUTCOME(shards_outcome, &op[0])->total_norm, 1, 1e-5);
	cr_expect_float_eq(((float *)region_addr(&u->parts[0].grads))[17], 3 / 94.868331, 1e-6);
}

APPLY_TEST(a_clip_of_an_epoch_that_ended_says_so)
{
	reduce(3);
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 2; i++)
		nodefix_clip(&n, m[i], 1, &op[i]);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&op[0]);
	expect_fault(&op[0].fault, FAULT_ABORTED, "epoch 1");
}
