/* Jobs that resume at their commits: when the copy of the committed state is made, when it is copied
 * back, and what waits for that. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/kept.h"
#include "job/position.h"
#include "nodefix.h"
#include "shardd.pb-c.h"

#define ELEMENTS 1000

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];
static float committed[ELEMENTS]; /* of u, at the last commit */

static void begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	job->rec->resume = JOB_RESUME_COMMITTED;
	nodefix_wrote(&n);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, nodefix_spec("u", ELEMENTS), m, 2);
}

static void end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(kept, .init = begin, .fini = end, .timeout = 60);

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

static void reduce_of(const struct unit *x)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", x, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "Reduce", x, &op[i]);
	both_ok("Reduce");
	nodefix_turns(&n);
}

static void step(void)
{
	reduce_of(u);
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	both_ok("Step");
}

/* Something that needs the parameters. */
static void apply(void)
{
	for (unsigned i = 0; i < 2; i++)
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "Gather", u, &op[i]), &op[i]);
	for (unsigned i = 0; i < 2; i++)
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "Release", u, &op[i]), &op[i]);
}

static void commit(uint64_t number)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], number, 10 + i, &op[i]);
	both_ok("Commit");
	memcpy(committed, nodefix_params(u), sizeof(committed));
}

static void changed(void)
{
	step();
	apply();
	cr_assert_neq(nodefix_params(u)[0], committed[0]);
}

static void expect_rolled_back(uint64_t number, uint64_t steps)
{
	uint64_t is = 0;

	nodefix_turns(&n);
	cr_expect_not(job->rec->kept || job->rec->rollback || job->life.torn);
	cr_expect_arr_eq(nodefix_params(u), committed, sizeof(committed));
	cr_expect_eq(u->rec->optimizer->steps, steps);
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	cr_expect(position_of(job->rec, &is));
	cr_expect_eq(is, number);
}

static void expect_joined_again(void)
{
	for (unsigned i = 0; i < 2; i++)
		m[i] = nodefix_join(&n, job, i);
}

Test(kept, the_copy_is_made_before_the_first_change_after_a_commit)
{
	changed();
	cr_expect_not(job->rec->kept, "nothing was committed");
	commit(1);
	cr_expect_not(job->rec->kept);
	step();
	cr_expect_not(job->rec->kept, "the step is not applied");
	apply();
	cr_expect(job->rec->kept);
	cr_expect_arr_eq(region_addr(&u->parts[0].kept), committed, sizeof(committed));
	commit(2);
	cr_expect_not(job->rec->kept, "what is committed now is in the parameters");
}

/* A unit has no more arrays than these: parameters, gradients, three of optimizer state, the copy. */
Test(kept, a_record_with_every_array_is_sound)
{
	state_unit *spec = nodefix_spec("most", ELEMENTS);
	struct fault f = FAULT_NULL;
	uint8_t *bytes = NULL;
	state_all *read = NULL;
	size_t packed;

	spec->optimizer->kind = OPTIM_ADAMW;
	spec->optimizer->amsgrad = true;
	(void)nodefix_unit(&n, job, spec, m, 2);
	changed();
	commit(1);
	changed();
	cr_assert(job->units[1]->rec->parts[0]->kept && job->units[1]->rec->parts[0]->state3);
	cr_assert_eq(state_encode(&job->rec, 1, n.node.devices[0].table->next, &bytes, &packed), 0);
	cr_expect_eq(state_decode(bytes, packed, &read, &f), 0, "%s", f.text);
	state_free(read);
	free(bytes);
}

Test(kept, a_death_brings_the_commit_back)
{
	changed();
	commit(1);
	changed();
	changed();
	nodefix_drop(&n, m[1], "died");
	expect_rolled_back(1, 1);
	nodefix_drop(&n, m[0], "died");
	expect_joined_again();
	changed();
	cr_expect_eq(u->rec->optimizer->steps, 2);
	commit(2);
	nodefix_drop(&n, m[1], "died");
	expect_rolled_back(2, 2);
}

Test(kept, a_death_before_the_first_commit_leaves_nothing_to_begin_with)
{
	uint64_t is;

	changed();
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect_not(u->rec->initialised || job->life.torn || position_of(job->rec, &is));
	cr_expect_eq(job->rec->uncommitted_steps, 0);
	nodefix_drop(&n, m[0], "died");
	expect_joined_again();
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 3, &op[i]);
	both_ok("Initialise");
	cr_expect_eq(u->rec->optimizer->steps, 0);
	changed();
	commit(1);
}

/* As does an epoch that ends otherwise. */
Test(kept, ranks_that_leave_without_a_commit_find_the_commit)
{
	struct fault f = FAULT_NULL;
	bool freed;

	changed();
	commit(1);
	changed();
	for (unsigned i = 0; i < 2; i++)
		cr_assert_eq(job_leave(m[i], &freed, &f), RES_DONE, "%s", f.text);
	cr_expect(job->rec->kept);
	cr_expect_eq(nodefix_try_join(&n, job, 0, NULL, NULL, &m[0], &f), RES_WAIT);
	expect_rolled_back(1, 1);
	expect_joined_again();
}

Test(kept, a_rank_that_joins_waits_until_all_is_back)
{
	struct fault f = FAULT_NULL;
	struct member *again;

	changed();
	commit(1);
	changed();
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect(job->rec->rollback);
	cr_expect_eq(nodefix_try_join(&n, job, 1, NULL, NULL, &again, &f), RES_WAIT);
	backend_fake_hold(n.node.devices[0].backend, false);
	expect_rolled_back(1, 1);
	m[1] = nodefix_join(&n, job, 1);
}

Test(kept, half_a_step_goes_as_a_whole)
{
	state_unit *s = nodefix_spec("b", ELEMENTS);
	struct unit *b;

	s->optimizer->when = OPTIM_IN_BACKWARD;
	b = nodefix_unit(&n, job, s, m, 2);
	commit(1);
	reduce_of(b);
	cr_expect_eq(b->rec->optimizer->steps, 1);
	cr_expect(job->rec->partial);
	nodefix_drop(&n, m[1], "died");
	expect_rolled_back(1, 0);
	cr_expect_eq(b->rec->optimizer->steps, 0);
}

/* What was initialised after the commit was not there then. */
Test(kept, units_that_came_later_are_to_be_initialised)
{
	struct unit *later;

	commit(1);
	changed();
	later = nodefix_unit(&n, job, nodefix_spec("later", ELEMENTS), m, 2);
	cr_expect(later->rec->initialised);
	nodefix_drop(&n, m[1], "died");
	expect_rolled_back(1, 0);
	cr_expect(u->rec->initialised);
	cr_expect_not(later->rec->initialised);
}

Test(kept, a_death_while_the_commit_runs_loses_nothing)
{
	changed();
	commit(1);
	changed();
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], 3, 10, &op[i]);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	if (job->rec->step == 3) /* the step was under way: it ends, and the commit with it */
		memcpy(committed, nodefix_params(u), sizeof(committed));
	expect_rolled_back(job->rec->step, job->rec->step);
}

static void expect_refused(const char *words)
{
	for (unsigned i = 0; i < 2; i++) {
		nodefix_wait(&op[i]);
		cr_expect(op[i].fault.code, "%s", words);
		cr_expect(strstr(op[i].fault.text, words), "%s: %s", words, op[i].fault.text);
	}
}

Test(kept, a_commit_without_room_for_the_copy_is_refused)
{
	job->quota.limit = job->quota.used + 100;
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], 1, 10, &op[i]);
	expect_refused("the copy of the committed state");
	cr_expect_not(job->rec->has_commit);
	job->quota.limit = 0;
	commit(1);
}

Test(kept, blobs_of_steps_are_refused)
{
	Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;
	uint8_t byte = 1;

	q.optional_step_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_STEP_STEP;
	q.step = 1;
	q.blob = (ProtobufCBinaryData){ 1, &byte };
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "Step", &q.base, &op[i]);
	for (unsigned i = 0; i < 2; i++) {
		nodefix_wait(&op[i]);
		expect_fault(&op[i].fault, FAULT_INVALID, "give the blob to Commit");
	}
}

static void convert(void)
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

Test(kept, units_are_converted_at_a_commit_only)
{
	changed();
	commit(1);
	changed();
	convert();
	expect_refused("commit what has changed since then before ConvertUnits");
	commit(2);
	convert();
	both_ok("ConvertUnits");
	cr_expect_not(job->rec->kept);
	changed();
	nodefix_drop(&n, m[1], "died");
	expect_rolled_back(2, 2);
}

Test(kept, units_that_are_dropped_stay_dropped)
{
	Shardd__V1__DropUnitsRequest q = SHARDD__V1__DROP_UNITS_REQUEST__INIT;
	struct unit *other = nodefix_unit(&n, job, nodefix_spec("other", ELEMENTS), m, 2);
	uint32_t id = other->id;

	commit(1);
	changed();
	q.units = &id;
	q.n_units = 1;
	for (unsigned i = 0; i < 2; i++)
		nodefix_submit(&n, m[i], "DropUnits", &q.base, &op[i]);
	both_ok("DropUnits");
	nodefix_drop(&n, m[1], "died");
	expect_rolled_back(1, 0);
	cr_expect(other->rec->dropped);
}

Test(kept, initialising_all_again_forgets_the_commit)
{
	commit(1);
	changed();
	job_set_torn(job); /* as by a device that failed */
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect_not(job->rec->rollback);
	nodefix_drop(&n, m[0], "died");
	expect_joined_again();
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 3, &op[i]);
	both_ok("Initialise");
	cr_expect_not(job->rec->has_commit || job->rec->kept || job->life.torn);
}
