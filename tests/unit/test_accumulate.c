/* Accumulate and deferred reductions: what they hold, what is refused, and what is left of
 * it all when an epoch ends or a trainer dies in the middle. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"

enum { N = 1000, RANKS = 4 };

TestSuite(accumulate, .timeout = 60);

static struct nodefix n;
static struct job *job;
static struct member *m[RANKS];
static struct unit *shard, *hybrid, *narrow, *ddp;
static struct nodefix_op op[RANKS];

static struct unit *make(const char *name, enum reduce_profile profile, enum unit_strategy strategy,
			 enum dtype gradient, enum dtype reduce)
{
	state_unit *spec = nodefix_spec(name, N);

	spec->reduce_profile = profile;
	spec->strategy = strategy;
	spec->shard_ranks = strategy == STRATEGY_HYBRID ? 2 : 0;
	spec->gradient_dtype = gradient;
	spec->reduce_dtype = reduce;
	return nodefix_unit(&n, job, spec, m, RANKS);
}

static void test_accumulate_begin(void)
{
	const struct nodefix_options o = { 0 };

	fdcheck_begin();
	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", RANKS, 0);
	for (unsigned r = 0; r < RANKS; r++)
		m[r] = nodefix_join(&n, job, r);
	shard = make("shard", PROFILE_FAIRSCALE, STRATEGY_SHARD, DTYPE_FP32, 0);
	hybrid = make("hybrid", PROFILE_FSDP2, STRATEGY_HYBRID, DTYPE_FP32, 0);
	narrow = make("narrow", PROFILE_FSDP2, STRATEGY_SHARD, DTYPE_FP32, DTYPE_BF16);
	ddp = make("ddp", PROFILE_DDP, 0, DTYPE_FP32, 0);
}

static void test_accumulate_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define ACCUMULATE_TEST(name) \
	Test(accumulate, name, .init = test_accumulate_begin, .fini = test_accumulate_end)

static void ok(unsigned r, const char *type, const struct unit *u)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[r], type, u, &op[r]), &op[r]);
}

static void all(const char *type, const struct unit *u)
{
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_on_unit(&n, m[r], type, u, &op[r]);
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_ok(&op[r], type);
}

static void all_defer(const struct unit *u)
{
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_defer(&n, m[r], u, &op[r]);
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_ok(&op[r], "deferred");
}

static void refused(unsigned r, enum fault_code code, const char *words)
{
	nodefix_turns(&n);
	cr_assert(op[r].over || op[r].submitted);
	cr_expect_eq(op[r].fault.code, code, "%s: %s", words, op[r].fault.text);
	cr_expect(strstr(op[r].fault.text, words), "%s: %s", words, op[r].fault.text);
}

static uint64_t scratch_used(void)
{
	return job->mem.scratch[0].used;
}

/* ------------------------------------------------------------------- memory */

ACCUMULATE_TEST(the_buffer_is_free_to_be_asked_for_again)
{
	uint64_t one;

	ok(0, "GradientBuffer", shard);
	one = m[0]->pool.used;
	cr_assert_geq(one, N * sizeof(float));
	ok(0, "Accumulate", shard);
	cr_expect_eq(m[0]->pool.used, one, "the buffer has become the sum");
	ok(0, "GradientBuffer", shard);
	cr_expect_eq(m[0]->pool.used, 2 * one);
	ok(0, "Accumulate", shard);
	cr_expect_eq(m[0]->pool.used, one);
	for (unsigned r = 1; r < RANKS; r++)
		ok(r, "GradientBuffer", shard);
	all("Reduce", shard);
	for (unsigned r = 0; r < RANKS; r++)
		cr_expect_eq(m[r]->pool.used, 0, "rank %u", r);
	cr_expect(shard->has_gradient);
}

ACCUMULATE_TEST(sums_of_another_dtype_have_their_own_bytes)
{
	ok(0, "GradientBuffer", narrow);
	ok(0, "Accumulate", narrow);
	cr_expect_eq(m[0]->pool.used, 2048, "1000 of 2 bytes, rounded up");
}

ACCUMULATE_TEST(a_quota_that_is_met_changes_nothing)
{
	struct region buffer;

	ok(0, "GradientBuffer", narrow);
	buffer = member_unit_find(m[0], narrow)->gradient;
	while (m[0]->pool.used + 2048 <= m[0]->pool.bytes)
		NODEFIX_OK(nodefix_alloc(&n, m[0], 2048, &op[0]), &op[0]);
	job->quota.limit = job->quota.used;
	nodefix_on_unit(&n, m[0], "Accumulate", narrow, &op[0]);
	refused(0, FAULT_EXHAUSTED, "accumulated gradients");
	cr_expect_eq(member_unit_find(m[0], narrow)->gradient.offset, buffer.offset);
	cr_expect_null(member_unit_find(m[0], narrow)->accumulated.slab);
	job->quota.limit = UINT64_MAX;
	ok(0, "Accumulate", narrow);
}

/* ----------------------------------------------------------------- refusals */

ACCUMULATE_TEST(without_a_buffer_it_is_refused)
{
	nodefix_on_unit(&n, m[0], "Accumulate", shard, &op[0]);
	refused(0, FAULT_STATE, "has not asked for its gradient buffer");
	ok(0, "GradientBuffer", shard);
	ok(0, "Accumulate", shard);
	nodefix_on_unit(&n, m[0], "Accumulate", shard, &op[0]);
	refused(0, FAULT_STATE, "has not asked for its gradient buffer");
}

ACCUMULATE_TEST(who_has_nothing_at_all_cannot_reduce)
{
	for (unsigned r = 0; r < RANKS; r++)
		if (r != 2)
			ok(r, "GradientBuffer", shard);
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_on_unit(&n, m[r], "Reduce", shard, &op[r]);
	for (unsigned r = 0; r < RANKS; r++)
		refused(r, FAULT_STATE, "has accumulated nothing");
}

ACCUMULATE_TEST(only_replicas_can_defer)
{
	all("GradientBuffer", shard);
	all("GradientBuffer", ddp);
	nodefix_defer(&n, m[0], shard, &op[0]);
	refused(0, FAULT_INVALID, "has one replica");
	cr_expect_str_eq(op[0].fault.field, "defer_all_reduce");
	for (unsigned r = 1; r < RANKS; r++)
		nodefix_on_unit(&n, m[r], "Reduce", shard, &op[r]);
	for (unsigned r = 1; r < RANKS; r++)
		refused(r, FAULT_STATE, "has one replica");
	nodefix_defer(&n, m[0], ddp, &op[0]);
	refused(0, FAULT_INVALID, "use Accumulate");
}

ACCUMULATE_TEST(all_ranks_defer_or_none)
{
	all("GradientBuffer", hybrid);
	nodefix_defer(&n, m[0], hybrid, &op[0]);
	for (unsigned r = 1; r < RANKS; r++)
		nodefix_on_unit(&n, m[r], "Reduce", hybrid, &op[r]);
	for (unsigned r = 0; r < RANKS; r++)
		refused(r, FAULT_STATE, "all-reduce deferred");
	cr_expect_not(hybrid->has_gradient || hybrid->has_partials);
}

/* ------------------------------------------------------------- what is left */

ACCUMULATE_TEST(partials_stay_until_they_are_reduced)
{
	all("GradientBuffer", hybrid);
	all_defer(hybrid);
	cr_expect(hybrid->has_partials && !hybrid->has_gradient);
	cr_expect_eq(scratch_used(), 2 * 4096, "two replicas' fp32");
	all("GradientBuffer", hybrid);
	all_defer(hybrid);
	cr_expect_eq(scratch_used(), 2 * 4096);
	all("GradientBuffer", hybrid);
	all("Reduce", hybrid);
	cr_expect(!hybrid->has_partials && hybrid->has_gradient);
	cr_expect_eq(scratch_used(), 0);
}

ACCUMULATE_TEST(initialise_drops_partials)
{
	all("GradientBuffer", hybrid);
	all_defer(hybrid);
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_seed(&n, m[r], hybrid, 1, &op[r]);
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_ok(&op[r], "Initialise");
	cr_expect_not(hybrid->has_partials);
	cr_expect_eq(scratch_used(), 0);
}

ACCUMULATE_TEST(the_end_of_the_epoch_drops_everything)
{
	all("GradientBuffer", hybrid);
	all_defer(hybrid);
	all("GradientBuffer", shard);
	all("Accumulate", shard);
	nodefix_drop(&n, m[3], "died");
	nodefix_turns(&n);
	cr_expect_not(hybrid->has_partials);
	cr_expect_eq(scratch_used(), 0);
	for (unsigned r = 0; r < 3; r++) {
		struct fault f = FAULT_NULL;

		cr_assert_eq(nodefix_try_join(&n, job, r, NULL, m[r], &m[r], &f), 0, "%s", f.text);
		cr_expect_eq(m[r]->pool.used, 0, "rank %u", r);
	}
}

/* Ranks that join again register again, and have what they register. */
ACCUMULATE_TEST(the_end_of_the_epoch_forgets_factors)
{
	Shardd__V1__SetFactorsRequest set = SHARDD__V1__SET_FACTORS_REQUEST__INIT;

	set.unit = hybrid->id;
	set.divide_factor = 3;
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_submit(&n, m[r], "SetFactors", &set.base, &op[r]);
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_ok(&op[r], "SetFactors");
	cr_expect(hybrid->factors.given && hybrid->factors.divide_factor == 3);
	cr_expect_eq(hybrid->rec->divide_factor, 0);
	nodefix_drop(&n, m[3], "died");
	nodefix_turns(&n);
	cr_expect_not(hybrid->factors.given);
}

/* The kernel runs on: what it writes to is nobody else's until it has ended. */
static void die_while_it_runs(void (*act)(void), unsigned dies)
{
	backend_fake_hold(n.node.devices[0].backend, true);
	act();
	nodefix_turns(&n);
	cr_assert_gt(job->running, 0);
	nodefix_drop(&n, m[dies], "died");
	m[dies] = NULL;
	nodefix_turns(&n);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect_eq(job->running, 0);
	cr_expect_eq(scratch_used(), 0);
	cr_expect_not(hybrid->has_partials || hybrid->has_gradient || narrow->has_gradient);
}

static void accumulate_narrow(void)
{
	nodefix_on_unit(&n, m[1], "Accumulate", narrow, &op[1]);
}

static void defer_hybrid(void)
{
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_defer(&n, m[r], hybrid, &op[r]);
}

static void reduce_hybrid(void)
{
	for (unsigned r = 0; r < RANKS; r++)
		nodefix_on_unit(&n, m[r], "Reduce", hybrid, &op[r]);
}

ACCUMULATE_TEST(who_dies_while_it_accumulates)
{
	all("GradientBuffer", narrow);
	die_while_it_runs(accumulate_narrow, 1);
}

ACCUMULATE_TEST(somebody_else_dies_meanwhile)
{
	all("GradientBuffer", narrow);
	all("Accumulate", narrow);
	all("GradientBuffer", narrow);
	die_while_it_runs(accumulate_narrow, 2);
}

ACCUMULATE_TEST(who_dies_while_partials_are_made)
{
	all("GradientBuffer", hybrid);
	die_while_it_runs(defer_hybrid, 0);
}

ACCUMULATE_TEST(who_dies_while_partials_are_reduced)
{
	all("GradientBuffer", hybrid);
	all_defer(hybrid);
	all("GradientBuffer", hybrid);
	die_while_it_runs(reduce_hybrid, 3);
}
