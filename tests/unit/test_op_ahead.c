/* Gathers that are begun before they are asked for: when, when not, and what it costs. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"

TestSuite(op_ahead, .timeout = 60);

enum { F = PASS_KIND_FORWARD, B = PASS_KIND_BACKWARD, UNITS = 4, N = 1000 };

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct nodefix_op op[4];
static struct unit *u[UNITS];
static uint64_t number;

static struct unit *unit_like(const char *name, enum dtype compute, uint64_t elements)
{
	state_unit *spec = nodefix_spec(name, elements);

	spec->guarded = true;
	spec->reshard = RESHARD_AFTER_FORWARD;
	spec->compute_dtype = compute;
	return nodefix_unit(&n, job, spec, m, job->rec->world_size);
}

static void begin_with(const struct nodefix_options *o, uint32_t world, enum dtype compute,
		       uint64_t elements)
{
	fdcheck_begin();
	nodefix_begin(&n, o);
	number = 0;
	job = nodefix_job(&n, "job", world, 0);
	for (uint32_t i = 0; i < world; i++)
		m[i] = nodefix_join(&n, job, i);
	for (unsigned i = 0; i < UNITS; i++)
		u[i] = unit_like((const char *[]){ "a", "b", "c", "d" }[i], compute, elements);
}

static void begin_cast(void)
{
	begin_with(NULL, 1, DTYPE_BF16, N);
}

static void begin_two_ranks(void)
{
	begin_with(NULL, 2, DTYPE_BF16, N);
}

static void begin_direct(void)
{
	begin_with(NULL, 1, DTYPE_FP32, N);
}

static void begin_two_devices(void)
{
	static const struct nodefix_options two = { .devices = 2 };

	begin_with(&two, 2, DTYPE_FP32, N);
}

static void begin_large(void)
{
	begin_with(NULL, 1, DTYPE_BF16, UINT64_C(1) << 20);
}

static void test_op_ahead_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define AHEAD_TEST(name, with) Test(op_ahead, name, .init = with, .fini = test_op_ahead_end)

static void submit_pass(const char *type, unsigned rank, unsigned i, int pass, struct nodefix_op *o)
{
	Shardd__V1__BeginPassRequest begin = SHARDD__V1__BEGIN_PASS_REQUEST__INIT;
	Shardd__V1__EndPassRequest over = SHARDD__V1__END_PASS_REQUEST__INIT;

	begin.unit = over.unit = u[i]->id;
	begin.pass = over.pass = (Shardd__V1__Pass)pass;
	nodefix_submit(&n, m[rank], type, *type == 'B' ? &begin.base : &over.base, o);
}

static void use(unsigned rank, unsigned i, int pass)
{
	NODEFIX_OK(submit_pass("BeginPass", rank, i, pass, &op[3]), &op[3]);
	nodefix_turns(&n);
	NODEFIX_OK(submit_pass("EndPass", rank, i, pass, &op[2]), &op[2]);
	nodefix_turns(&n);
}

static void set_list(unsigned i, int pass, const uint32_t *units, size_t count)
{
	Shardd__V1__SetPrefetchRequest r = SHARDD__V1__SET_PREFETCH_REQUEST__INIT;

	r.unit = u[i]->id;
	r.pass = (Shardd__V1__Pass)pass;
	r.units = (uint32_t *)units;
	r.n_units = count;
	nodefix_submit(&n, m[0], "SetPrefetch", &r.base, &op[0]);
}

static void step(void)
{
	uint32_t world = job->rec->world_size;

	for (uint32_t i = 0; i < world; i++)
		nodefix_step(&n, m[i], &op[i]);
	for (uint32_t i = 0; i < world; i++)
		nodefix_ok(&op[i], "Step");
	number++;
	for (uint32_t i = 0; i < world; i++)
		nodefix_commit(&n, m[i], number, 0, &op[i]);
	for (uint32_t i = 0; i < world; i++)
		nodefix_ok(&op[i], "Commit");
}

/* Forward in order, backward in reverse. */
static void passes(unsigned rank)
{
	for (unsigned i = 0; i < UNITS; i++)
		use(rank, i, F);
	for (unsigned i = UNITS; i-- > 0;)
		use(rank, i, B);
}

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

/* ------------------------------------------------------------------- learned */

AHEAD_TEST(after_one_step_all_but_the_first_are_there_already, begin_cast)
{
	struct member_ahead *a = &m[0]->ahead;

	passes(0);
	cr_expect_eq(a->started + a->hits + a->misses + a->skipped, 0, "the first step is watched");
	step();
	for (unsigned s = 1; s <= 3; s++) {
		passes(0);
		cr_expect_eq(a->misses, s, "only the first one of the step");
		cr_expect_eq(a->hits, s * (2 * UNITS - 1));
		cr_expect_eq(a->started, s * (2 * UNITS - 2), "d was kept for its backward");
		cr_expect_eq(a->skipped, 0);
		step();
	}
	cr_expect_eq(a->learned.deviations, 0);
}

/* While the first unit is used, the next is made, and it is there when it is asked for. */
AHEAD_TEST(the_next_one_is_begun_as_soon_as_the_first_is_there, begin_cast)
{
	passes(0);
	step();
	NODEFIX_OK(submit_pass("BeginPass", 0, 0, F, &op[0]), &op[0]);
	nodefix_turns(&n);
	cr_expect(unit_has_copy(u[1]));
	cr_expect_eq(u[1]->full_version, u[1]->version);
	cr_expect_eq(u[1]->gathered_ranks, 0);
	cr_expect_not(list_empty(&u[1]->idle), "it makes room if it must");
	cr_expect_not(unit_has_copy(u[2]), "one ahead");
	NODEFIX_OK(submit_pass("BeginPass", 0, 1, F, &op[1]), &op[1]);
	cr_expect_not(op[1].result.copied);
}

AHEAD_TEST(one_that_is_on_its_way_is_waited_for_and_not_begun_again, begin_cast)
{
	struct backend *b = n.node.devices[0].backend;
	uint64_t submitted;

	passes(0);
	step();
	backend_fake_hold(b, true);
	submit_pass("BeginPass", 0, 0, F, &op[0]);
	backend_fake_release(b, false);
	nodefix_turns(&n);
	nodefix_ok(&op[0], "BeginPass");
	cr_expect(u[1]->copy == UNIT_COPY_CASTING);
	submitted = b->submitted;
	submit_pass("BeginPass", 0, 1, F, &op[1]);
	cr_expect_eq(b->submitted, submitted);
	cr_expect_eq(op[1].op->state, OP_BLOCKED);
	backend_fake_hold(b, false);
	nodefix_ok(&op[1], "BeginPass");
	cr_expect_not(op[1].result.copied);
	cr_expect_eq(m[0]->ahead.hits, 1);
}

AHEAD_TEST(gathers_by_hand_are_learned_too, begin_cast)
{
	for (unsigned s = 0; s < 3; s++) {
		for (unsigned i = 0; i < UNITS; i++) {
			NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u[i], &op[0]), &op[0]);
			nodefix_turns(&n);
			NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", u[i], &op[0]), &op[0]);
		}
		for (unsigned i = 0; i < UNITS; i++) /* they must be made again */
			NODEFIX_OK(nodefix_seed(&n, m[0], u[i], s, &op[0]), &op[0]);
		step();
	}
	cr_expect_eq(m[0]->ahead.hits, 2 * (UNITS - 1));
	cr_expect_eq(m[0]->ahead.misses, 2);
}

AHEAD_TEST(a_deviation_stops_it_until_the_step_is_over, begin_cast)
{
	struct member_ahead *a = &m[0]->ahead;
	uint64_t started;

	passes(0);
	step();
	use(0, 0, F);
	started = a->started;
	cr_expect_gt(started, 0);
	use(0, 2, F); /* not 1 */
	cr_expect_eq(a->learned.mode, PREFETCH_RECORDING);
	use(0, 3, F);
	use(0, 3, B);
	cr_expect_eq(a->started, started);
	cr_expect_eq(a->learned.deviations, 1);
	step();
	use(0, 0, F);
	use(0, 2, F);
	use(0, 3, F);
	cr_expect_eq(a->hits, 2, "the new order");
}

/* Both ranks go the same way: what one began is there for the other. */
AHEAD_TEST(ranks_share_what_is_begun, begin_two_ranks)
{
	for (unsigned s = 0; s < 2; s++) {
		for (unsigned i = 0; i < UNITS; i++)
			for (unsigned r = 0; r < 2; r++)
				use(r, i, F);
		step();
	}
	cr_expect_eq(m[0]->ahead.started + m[1]->ahead.started, UNITS - 1);
	cr_expect_eq(m[0]->ahead.hits, UNITS - 1);
	cr_expect_geq(m[1]->ahead.hits, UNITS - 1);
	for (unsigned i = 0; i < UNITS; i++)
		cr_expect_not(unit_has_copy(u[i]), "all of them were there");
}

AHEAD_TEST(where_gathers_hand_out_the_shards_there_is_nothing_to_do, begin_direct)
{
	for (unsigned s = 0; s < 2; s++) {
		passes(0);
		step();
	}
	cr_expect_eq(m[0]->ahead.learned.n, 0);
	cr_expect_eq(m[0]->ahead.started + m[0]->ahead.hits + m[0]->ahead.misses, 0);
}

AHEAD_TEST(between_devices_the_all_gather_is_begun_ahead, begin_two_devices)
{
	for (unsigned s = 0; s < 2; s++) {
		for (unsigned i = 0; i < UNITS; i++)
			for (unsigned r = 0; r < 2; r++)
				use(r, i, F);
		step();
	}
	cr_expect_eq(m[0]->ahead.started + m[1]->ahead.started, UNITS - 1);
	cr_expect_eq(m[0]->ahead.hits, UNITS - 1);
}

/* ---------------------------------------------------------------------- lists */

AHEAD_TEST(lists_are_followed_from_the_first_step_on, begin_cast)
{
	const uint32_t after_a[] = { u[2]->id, u[1]->id };

	NODEFIX_OK(set_list(0, F, after_a, 2), &op[0]);
	NODEFIX_OK(submit_pass("BeginPass", 0, 0, F, &op[0]), &op[0]);
	nodefix_turns(&n);
	cr_expect(unit_has_copy(u[1]) && unit_has_copy(u[2]) && !unit_has_copy(u[3]));
	cr_expect_eq(m[0]->ahead.started, 2);
	cr_expect_gt(job->quota.by_class[MEM_CONTROL], 0, "the list is paid for");
	use(0, 1, F);
	cr_expect_eq(m[0]->ahead.hits, 1);
	NODEFIX_OK(submit_pass("EndPass", 0, 0, F, &op[0]), &op[0]);
	use(0, 0, B); /* has no list for this pass */
	cr_expect_eq(m[0]->ahead.started, 2);
	NODEFIX_OK(set_list(0, F, NULL, 0), &op[0]);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 0);
	step();
	use(0, 0, F);
	cr_expect_eq(m[0]->ahead.learned.mode, PREFETCH_FOLLOWING, "without lists it is learned");
}

AHEAD_TEST(a_list_that_is_not_allowed, begin_cast)
{
	uint32_t many[17] = { 0 }, no[] = { 99 };
	struct unit *hand = nodefix_unit(&n, job, nodefix_spec("hand", 10), m, 1);

	for (unsigned i = 0; i < ARRAY_SIZE(many); i++)
		many[i] = u[0]->id;
	set_list(0, 0, many, 1);
	expect_fault(&op[0].fault, FAULT_INVALID, "pass is 0; it must be FORWARD or BACKWARD");
	set_list(0, F, many, 17);
	expect_fault(&op[0].fault, FAULT_INVALID, "units has 17 entries; the maximum is 16");
	set_list(0, F, no, 1);
	expect_fault(&op[0].fault, FAULT_NOT_FOUND, "there is no unit 99");
	u[0] = hand;
	set_list(0, F, many, 1);
	expect_fault(&op[0].fault, FAULT_INVALID, "unit 'hand' is not guarded");
	u[0] = job_unit_by_id(job, 1);
	job->quota.limit = job->quota.used;
	set_list(0, F, many, 1);
	expect_fault(&op[0].fault, FAULT_EXHAUSTED, "a list of units");
	cr_expect_eq(m[0]->ahead.lists, 0);
	job->quota.limit = 0;
	set_list(0, F, many, 16);
	nodefix_ok(&op[0], "as many as may be");
}

/* ------------------------------------------------------------- limits and memory */

AHEAD_TEST(never_more_than_max_inflight_gathers, begin_cast)
{
	const uint32_t rest[] = { u[1]->id, u[2]->id, u[3]->id };

	n.node.limits.max_inflight_gathers = 2;
	NODEFIX_OK(set_list(0, F, rest, 3), &op[0]);
	submit_pass("BeginPass", 0, 0, F, &op[0]);
	nodefix_wait(&op[0]);
	cr_expect_eq(m[0]->ahead.started + m[0]->ahead.skipped, 3);
	cr_expect_eq(m[0]->ahead.skipped, 1);
	cr_expect_leq(job->copies.casts, 2);
}

/* 2 MiB a copy, room for one: what was begun ahead goes for what is asked for, and nothing is
 * begun ahead in place of anything. */
AHEAD_TEST(without_memory_it_is_skipped_and_what_is_unused_makes_room, begin_large)
{
	const uint32_t next[] = { u[1]->id };
	uint64_t mib = UINT64_C(1) << 20;

	NODEFIX_OK(set_list(0, F, next, 1), &op[0]);
	job->quota.limit = job->quota.used + 3 * mib;
	NODEFIX_OK(submit_pass("BeginPass", 0, 0, F, &op[0]), &op[0]);
	cr_expect_eq(m[0]->ahead.skipped, 1);
	cr_expect_not(unit_has_copy(u[1]));
	NODEFIX_OK(submit_pass("EndPass", 0, 0, F, &op[0]), &op[0]);
	job->quota.limit = job->quota.used + 2 * mib; /* 2 MiB more are in the pool */
	NODEFIX_OK(submit_pass("BeginPass", 0, 0, F, &op[0]), &op[0]);
	nodefix_turns(&n);
	cr_expect(unit_has_copy(u[1]), "there was room for it");
	cr_expect_eq(m[0]->ahead.started, 1);
	NODEFIX_OK(submit_pass("BeginPass", 0, 2, F, &op[1]), &op[1]);
	cr_expect_not(unit_has_copy(u[1]), "it went for one that was asked for");
	submit_pass("BeginPass", 0, 1, F, &op[1]);
	expect_fault(&op[1].fault, FAULT_EXHAUSTED, "a gathered unit"); /* two are held */
}

AHEAD_TEST(one_that_fails_ends_no_op, begin_cast)
{
	passes(0);
	step();
	backend_fake_hold(n.node.devices[0].backend, true);
	submit_pass("BeginPass", 0, 0, F, &op[0]);
	backend_fake_release(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	nodefix_ok(&op[0], "BeginPass");
	cr_expect_eq(job->copies.ahead, 1);
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect_eq(job->copies.ahead, 0);
	NODEFIX_OK(submit_pass("BeginPass", 0, 1, F, &op[1]), &op[1]);
	cr_expect_eq(u[1]->full_version, u[1]->version);
}

/* --------------------------------------------------------------- parameters change */

/* A step does not write what is being read for nobody, and nothing stale is handed out. */
AHEAD_TEST(a_step_waits_for_what_is_under_way, begin_cast)
{
	struct backend *b = n.node.devices[0].backend;
	const uint32_t next[] = { u[1]->id };
	uint64_t submitted;

	NODEFIX_OK(set_list(0, F, next, 1), &op[0]);
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "GradientBuffer", u[1], &op[0]), &op[0]);
	NODEFIX_OK(submit_pass("BeginPass", 0, 1, B, &op[0]), &op[0]);
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Reduce", u[1], &op[0]), &op[0]);
	NODEFIX_OK(submit_pass("EndPass", 0, 1, B, &op[0]), &op[0]);
	backend_fake_hold(b, true);
	submit_pass("BeginPass", 0, 0, F, &op[0]);
	backend_fake_release(b, false);
	nodefix_turns(&n);
	nodefix_ok(&op[0], "BeginPass");
	NODEFIX_OK(submit_pass("EndPass", 0, 0, F, &op[0]), &op[0]);
	NODEFIX_OK(nodefix_step(&n, m[0], &op[0]), &op[0]);
	cr_expect_eq(job->copies.ahead, 1);
	submitted = b->submitted;
	nodefix_commit(&n, m[0], 1, 0, &op[1]);
	nodefix_turns(&n);
	cr_expect(job->step.state == JOB_STEP_APPLYING);
	cr_expect_eq(b->submitted, submitted, "it reads what the step would write");
	backend_fake_hold(b, false);
	nodefix_ok(&op[1], "Commit");
	cr_expect_eq(u[1]->rec->optimizer->steps, 1);
	NODEFIX_OK(submit_pass("BeginPass", 0, 1, F, &op[0]), &op[0]);
	cr_expect(op[0].result.copied, "what was begun is of the old parameters");
	cr_expect_eq(u[1]->full_version, u[1]->version);
}

AHEAD_TEST(a_new_epoch_goes_on_with_what_was_learned, begin_two_ranks)
{
	struct fault f = FAULT_NULL;
	struct member *again = NULL;

	for (unsigned i = 0; i < UNITS; i++)
		for (unsigned r = 0; r < 2; r++)
			use(r, i, F);
	step();
	NODEFIX_OK(submit_pass("BeginPass", 0, 0, F, &op[0]), &op[0]);
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	m[1] = nodefix_join(&n, job, 1);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0, "%s", f.text);
	cr_expect_eq(m[0]->ahead.learned.mode, PREFETCH_FOLLOWING);
	use(0, 0, F);
	cr_expect_gt(m[0]->ahead.started, 0);
	cr_expect_eq(m[1]->ahead.learned.mode, PREFETCH_RECORDING, "a new process");
}

/* Its optimizer runs with the reduction: nothing is begun while they do, and what was begun
 * before is waited for. */
AHEAD_TEST(a_step_in_backward_is_not_read_by_nobody, begin_cast)
{
	struct backend *b = n.node.devices[0].backend;
	state_unit *spec = nodefix_spec("in backward", N);
	const uint32_t next[] = { UNITS + 1 };
	struct unit *back;
	uint64_t version;

	job->rec->resume = JOB_RESUME_NO_COPY; /* the step is the device's first task */
	nodefix_wrote(&n);
	spec->guarded = true;
	spec->compute_dtype = DTYPE_BF16;
	spec->optimizer->when = OPTIM_IN_BACKWARD;
	back = nodefix_unit(&n, job, spec, m, 1);
	cr_assert_eq(back->id, next[0]);
	NODEFIX_OK(set_list(0, F, next, 1), &op[0]);
	u[3] = back;
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "GradientBuffer", back, &op[0]), &op[0]);
	NODEFIX_OK(submit_pass("BeginPass", 0, 3, B, &op[0]), &op[0]);
	version = back->version;
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u[0], &op[0]), &op[0]);
	backend_fake_hold(b, true);
	nodefix_on_unit(&n, m[0], "Reduce", back, &op[1]);
	nodefix_turns(&n);
	cr_expect(back->step == UNIT_STEP_STEPPING);
	NODEFIX_OK(submit_pass("BeginPass", 0, 0, F, &op[0]), &op[0]);
	cr_expect_eq(m[0]->ahead.started, 0);
	backend_fake_hold(b, false);
	nodefix_ok(&op[1], "Reduce");
	nodefix_turns(&n);
	cr_expect_eq(back->version, version + 1);
	cr_expect(!unit_has_copy(back) || back->full_version == back->version);
}

/* Else the copy would have what was there before the write, and half of it. */
AHEAD_TEST(not_while_a_shard_is_written, begin_two_ranks)
{
	Shardd__V1__CopyShardRequest r = SHARDD__V1__COPY_SHARD_REQUEST__INIT;
	struct backend *backend = n.node.devices[0].backend;

	NODEFIX_OK(nodefix_alloc(&n, m[1], N * sizeof(float), &op[1]), &op[1]);
	r.unit = u[1]->id;
	r.array = SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_PARAMETERS;
	r.write = true;
	r.buffer = op[1].result.buffer;
	r.elements = N / 2;
	use(0, 0, F); /* its copy is kept */
	set_list(0, F, &u[1]->id, 1);
	nodefix_ok(&op[0], "SetPrefetch");
	backend_fake_hold(backend, true);
	nodefix_submit(&n, m[1], "CopyShard", &r.base, &op[1]);
	nodefix_turns(&n);
	cr_assert_eq(u[1]->shard_writes, 1);
	NODEFIX_OK(submit_pass("BeginPass", 0, 0, F, &op[3]), &op[3]);
	cr_expect_not(unit_is_copying(u[1]));
	cr_expect_eq(m[0]->ahead.started, 0);
	backend_fake_hold(backend, false);
	nodefix_ok(&op[1], "CopyShard");
}
