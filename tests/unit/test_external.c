/* The trainer's own optimizer on a unit with a copy on each of two devices: what was given back
 * comes to both of them, and what is left when something happens meanwhile. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "step/external.h"

#define ELEMENTS 1001

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];

static void test_external_begin(void)
{
	const struct nodefix_options o = { .devices = 2 };
	state_unit *spec = nodefix_spec("own", ELEMENTS);

	fdcheck_begin();
	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	spec->strategy = STRATEGY_REPLICATE;
	spec->optimizer->kind = OPTIM_NONE;
	spec->optimizer->when = OPTIM_BY_TRAINER;
	u = nodefix_unit(&n, job, spec, m, 2);
	cr_assert(u->n_parts == 2 && u->spread == 1);
}

static void test_external_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(external, .init = test_external_begin, .fini = test_external_end, .timeout = 60);

static void reduce(void)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], u, false, &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Reduce");
}

/* Both have their shares; rank r writes r + 1 into all of its own. */
static void take(void)
{
	Shardd__V1__NextShardRequest r = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;

	reduce();
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_submit(&n, m[i], "NextShard", &r.base, &op[i]), &op[i]);
		cr_assert_eq(NODEFIX_OUTCOME(external_outcome, &op[i])->elements,
			     i ? ELEMENTS / 2 : ELEMENTS / 2 + 1);
		nodefix_write(&op[i].result.place, (float)(i + 1));
	}
}

static void give_back(unsigned i)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[i], "ShardDone", u, &op[i]), &op[i]);
}

static const float *copy(unsigned d)
{
	return region_addr(&u->parts[d].params);
}

static void check_copies(void)
{
	for (unsigned d = 0; d < 2; d++)
		for (unsigned i = 0; i < ELEMENTS; i++)
			cr_assert_eq(copy(d)[i], i < ELEMENTS / 2 + 1 ? 1 : 2);
}

static void rejoin(void)
{
	struct fault f = FAULT_NULL;
	struct member *again;

	m[1] = nodefix_join(&n, job, 1);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0, "%s", f.text);
}

Test(external, what_was_given_back_is_in_all_copies)
{
	take();
	give_back(0);
	cr_expect_eq(u->shards, UNIT_SHARDS_MIXED);
	give_back(1);
	nodefix_turns(&n);
	cr_expect_not(u->step == UNIT_STEP_STEPPING);
	cr_expect_eq(u->shards, UNIT_SHARDS_READY);
	check_copies();
}

Test(external, a_gather_waits_until_the_copies_are_equal)
{
	take();
	give_back(0);
	engine_fake_hold(n.node.engine, true);
	give_back(1);
	nodefix_turns(&n);
	cr_assert(u->step == UNIT_STEP_STEPPING);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	nodefix_turns(&n);
	cr_expect_not(op[0].over);
	engine_fake_hold(n.node.engine, false);
	nodefix_ok(&op[0], "Gather");
	check_copies();
}

static void without_copy(void)
{
	job->rec->resume = JOB_RESUME_NO_COPY;
	nodefix_wrote(&n);
}

/* The shares of all were there: the step is over, of an epoch that is over. */
Test(external, copies_become_equal_though_a_rank_dies)
{
	without_copy();
	take();
	give_back(0);
	engine_fake_hold(n.node.engine, true);
	give_back(1);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	engine_fake_hold(n.node.engine, false);
	nodefix_turns(&n);
	cr_expect_not(u->step == UNIT_STEP_STEPPING || job->life.torn);
	cr_expect(u->rec->initialised);
	check_copies();
	rejoin();
	reduce();
}

/* Only one copy has what the other rank gave back. */
Test(external, copies_that_stay_unequal_must_be_initialised)
{
	without_copy();
	take();
	give_back(0);
	nodefix_drop(&n, m[1], "died");
	cr_expect_not(u->rec->initialised);
	cr_expect_eq(u->shards, UNIT_SHARDS_NONE);
	rejoin();
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	cr_expect_eq(op[0].fault.code, FAULT_STATE);
	cr_expect(strstr(op[0].fault.text, "is not initialised"), "%s", op[0].fault.text);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 7, &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Initialise");
	cr_expect(u->rec->initialised);
	cr_expect_arr_eq(copy(0), copy(1), ELEMENTS * sizeof(float));
}

/* Shares of one rank, or of all while they are sent from device to device. */
static void rolls_back(bool all)
{
	float before[ELEMENTS];

	memcpy(before, copy(0), sizeof(before));
	take();
	cr_expect_not(job->rec->kept, "the trainers write to places of their own");
	give_back(0);
	cr_expect(job->rec->kept);
	engine_fake_hold(n.node.engine, all);
	if (all)
		give_back(1);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_expect(job->rec->rollback || !all);
	engine_fake_hold(n.node.engine, false);
	nodefix_turns(&n);
	cr_expect_not(job->rec->kept || job->rec->rollback || job->life.torn);
	cr_expect(u->rec->initialised);
	for (unsigned d = 0; d < 2; d++)
		cr_expect_arr_eq(copy(d), before, sizeof(before));
	cr_expect_eq(u->rec->optimizer->steps, 0);
	cr_expect_eq(u->shards, UNIT_SHARDS_NONE);
	rejoin();
	take();
	give_back(0);
	give_back(1);
	nodefix_turns(&n);
	check_copies();
}

Test(external, a_death_rolls_back_what_one_rank_gave_back)
{
	rolls_back(false);
}

Test(external, a_death_rolls_back_copies_that_become_equal)
{
	rolls_back(true);
}

/* The pass that the Reduce ended is over: the next one promises the shards again. */
Test(external, initialising_withdraws_shards_that_were_promised)
{
	const struct member_unit *mu;

	reduce();
	mu = member_unit_find(m[0], u);
	cr_assert_eq(mu->shard_state, SHARD_COMING);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 7, &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Initialise");
	cr_expect_eq(mu->shard_state, SHARD_NONE);
	take();
	give_back(0);
	give_back(1);
	nodefix_turns(&n);
	cr_expect_eq(mu->shard_state, SHARD_GIVEN_BACK);
	check_copies();
}

Test(external, a_failure_between_devices_tears_the_job)
{
	take();
	give_back(0);
	engine_fake_fail(n.node.engine, 1, -EPIPE);
	give_back(1);
	nodefix_turns(&n);
	cr_expect(job->life.torn);
	cr_expect_not(u->step == UNIT_STEP_STEPPING);
	cr_expect_eq(job->running, 0);
}
