/* Gather: references to the shards, or one cast shared by all; and when copies go. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "op/op_run.h"

TestSuite(gather, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct nodefix_op op[8];

static void test_op_gather_begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
}

static void test_op_gather_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define GATHER_TEST(name) \
	Test(gather, name, .init = test_op_gather_begin, .fini = test_op_gather_end)

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

static struct unit *cast_unit(const char *name, uint64_t elements)
{
	state_unit *spec = nodefix_spec(name, elements);

	spec->compute_dtype = DTYPE_BF16;
	return nodefix_unit(&n, job, spec, m, 2);
}

static void gather(struct member *who, struct unit *u, struct nodefix_op *o)
{
	NODEFIX_OK(nodefix_on_unit(&n, who, "Gather", u, o), o);
}

static void release(struct member *who, struct unit *u, struct nodefix_op *o)
{
	NODEFIX_OK(nodefix_on_unit(&n, who, "Release", u, o), o);
}

GATHER_TEST(with_equal_dtypes_it_is_a_reference_to_the_shards)
{
	struct unit *u = nodefix_unit(&n, job, nodefix_spec("u", 1000), m, 2);
	uint64_t submitted = n.node.devices[0].backend->submitted, used = job->quota.used;

	gather(m[0], u, &op[0]);
	gather(m[1], u, &op[1]);
	cr_expect_eq(op[0].result.place.slab, u->parts[0].params.slab);
	cr_expect_eq(op[0].result.place.offset, u->parts[0].params.offset);
	cr_expect_eq(op[0].result.place.bytes, 4000);
	cr_expect_eq(op[1].result.place.offset, u->parts[0].params.offset);
	cr_expect_not(op[0].result.copied);
	cr_expect_not(op[0].result.writable);
	cr_expect_eq(n.node.devices[0].backend->submitted, submitted);
	cr_expect_eq(job->quota.used, used);
	cr_expect_eq(u->gathered_ranks, 2);
}

GATHER_TEST(references_are_counted_per_rank_and_release_is_harmless)
{
	struct unit *u = nodefix_unit(&n, job, nodefix_spec("u", 1000), m, 2);

	release(m[0], u, &op[0]);
	cr_expect_eq(op[0].result.references, 0, "of what was never gathered");
	gather(m[0], u, &op[0]);
	cr_expect_eq(op[0].result.references, 1);
	gather(m[0], u, &op[0]);
	cr_expect_eq(op[0].result.references, 2);
	gather(m[1], u, &op[1]);
	cr_expect_eq(op[1].result.references, 1);
	release(m[0], u, &op[0]);
	cr_expect_eq(op[0].result.references, 1);
	cr_expect_eq(u->gathered_ranks, 2);
	release(m[0], u, &op[0]);
	release(m[0], u, &op[0]);
	cr_expect_eq(op[0].result.references, 0);
	cr_expect_eq(u->gathered_ranks, 1);
	cr_expect_eq(member_gathered_units(m[1]), 1);
}

GATHER_TEST(one_cast_serves_all_ranks)
{
	struct unit *u = cast_unit("u", 1000);
	uint64_t submitted = n.node.devices[0].backend->submitted;
	const uint16_t *bf16;
	uint32_t bits;

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	nodefix_on_unit(&n, m[1], "Gather", u, &op[1]);
	cr_expect_eq(n.node.devices[0].backend->submitted, submitted + 1);
	cr_expect_eq(job->running, 1);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op[0], "Gather");
	nodefix_ok(&op[1], "Gather");
	cr_expect_eq(n.node.devices[0].backend->submitted, submitted + 1);
	cr_expect(op[0].result.copied);
	cr_expect_not(op[1].result.copied);
	cr_expect_eq(op[0].result.place.slab, op[1].result.place.slab);
	cr_expect_eq(op[0].result.place.offset, op[1].result.place.offset);
	cr_expect_eq(op[0].result.place.bytes, 2000);
	cr_expect_eq(op[0].result.place.slab->class, MEM_FULL);
	bf16 = region_addr(&op[0].result.place);
	memcpy(&bits, nodefix_params(u) + 999, sizeof(bits));
	cr_expect_leq(bf16[999] - (bits >> 16), 1, "the upper half, rounded");
	cr_expect_eq(u->gathered_ranks, 2);
}

GATHER_TEST(a_released_copy_is_kept_until_the_parameters_change)
{
	struct unit *u = cast_unit("u", 1000);
	uint64_t submitted;

	gather(m[0], u, &op[0]);
	release(m[0], u, &op[1]);
	cr_expect_not(list_empty(&job->copies.idle));
	submitted = n.node.devices[0].backend->submitted;
	gather(m[1], u, &op[1]);
	cr_expect_not(op[1].result.copied);
	cr_expect_eq(n.node.devices[0].backend->submitted, submitted);
	cr_expect(list_empty(&job->copies.idle));
	release(m[1], u, &op[1]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 2, &op[i]);
	nodefix_ok(&op[0], "Initialise");
	cr_expect_not(unit_has_copy(u), "of no use any more");
	gather(m[0], u, &op[0]);
	cr_expect(op[0].result.copied);
}

GATHER_TEST(a_unit_that_is_gathered_is_not_initialised)
{
	struct unit *u = cast_unit("u", 1000);

	gather(m[0], u, &op[0]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 2, &op[i]);
	expect_fault(&op[0].fault, FAULT_STATE, "still gathered by 1 ranks");
	expect_fault(&op[1].fault, FAULT_STATE, "still gathered by 1 ranks");
	cr_expect(u->rec->initialised);
}

/* -------------------------------------------------------------------- memory */

#define MIB (UINT64_C(1) << 20)

/* Two units whose copies take 2 MiB each. */
static struct unit *a, *b;

static void large_units(void)
{
	a = cast_unit("a", MIB);
	b = cast_unit("b", MIB);
}

GATHER_TEST(idle_copies_make_room_for_others)
{
	large_units();
	job->quota.limit = job->quota.used + 3 * MIB;
	gather(m[0], a, &op[0]);
	nodefix_on_unit(&n, m[1], "Gather", b, &op[1]);
	expect_fault(&op[1].fault, FAULT_EXHAUSTED, "2097152 bytes for a gathered unit");
	cr_expect_not(unit_has_copy(b));
	release(m[0], a, &op[0]);
	cr_expect_eq(job->quota.by_class[MEM_FULL], 2 * MIB);
	gather(m[1], b, &op[1]);
	cr_expect_not(unit_has_copy(a));
	cr_expect_eq(job->quota.by_class[MEM_FULL], 2 * MIB);
}

/* Two ranks wait for the cast of a. What the first one sends behind its Gather runs as soon as that is
 * answered, before the second one is, and takes the memory of the copy that nobody holds yet. */
GATHER_TEST(a_copy_stays_until_all_who_waited_for_it_have_it)
{
	Shardd__V1__SetReshardRequest between = SHARDD__V1__SET_RESHARD_REQUEST__INIT;

	large_units();
	job->quota.limit = job->quota.used + 3 * MIB;
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", a, &op[0]);
	nodefix_on_unit(&n, m[1], "Gather", a, &op[1]);
	nodefix_on_unit(&n, m[0], "Release", a, &op[2]);
	nodefix_submit(&n, m[0], "SetReshard", &between.base, &op[3]); /* refused in its turn */
	nodefix_on_unit(&n, m[0], "Gather", b, &op[4]);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op[1], "Gather");
	cr_expect(unit_has_copy(a));
	nodefix_wait(&op[4]);
}

GATHER_TEST(and_for_gradients_and_buffers)
{
	large_units();
	job->quota.limit = job->quota.used + 4 * MIB;
	gather(m[0], a, &op[0]);
	nodefix_on_unit(&n, m[1], "GradientBuffer", b, &op[1]); /* 4 MiB */
	expect_fault(&op[1].fault, FAULT_EXHAUSTED, "4194304 bytes for a gradient buffer");
	release(m[0], a, &op[0]);
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "GradientBuffer", b, &op[1]), &op[1]);
	cr_expect_not(unit_has_copy(a));
	job->quota.limit = job->quota.used + 3 * MIB;
	gather(m[0], a, &op[0]);
	release(m[0], a, &op[0]);
	NODEFIX_OK(nodefix_alloc(&n, m[0], 3 * MIB, &op[0]), &op[0]);
	cr_expect_eq(job->quota.by_class[MEM_FULL], 0);
}

GATHER_TEST(so_many_casts_run_at_once)
{
	struct unit *u[4];

	for (unsigned i = 0; i < 4; i++)
		u[i] = cast_unit((const char *[]){ "a", "b", "c", "d" }[i], 1000);
	n.node.limits.max_inflight_gathers = 2;
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 4; i++)
		nodefix_on_unit(&n, m[0], "Gather", u[i], &op[i]);
	nodefix_on_unit(&n, m[1], "Gather", u[3], &op[4]);
	cr_expect_eq(job->copies.casts, 2);
	cr_expect_eq(op[1].op->state, OP_RUN);
	cr_expect_eq(op[2].op->state, OP_BLOCKED);
	cr_expect_eq(op[3].op->state, OP_BLOCKED);
	backend_fake_release(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect(op[0].over && op[1].over);
	cr_expect_eq(job->copies.casts, 2, "the next two");
	cr_expect_eq(op[4].op->state, OP_RUN, "of the other rank, whose turn it is");
	cr_expect_eq(op[3].op->state, OP_BLOCKED);
	backend_fake_hold(n.node.devices[0].backend, false);
	for (unsigned i = 2; i < 5; i++)
		nodefix_ok(&op[i], "Gather");
	cr_expect(op[4].result.copied);
	cr_expect_not(op[3].result.copied);
	cr_expect_eq(job->copies.casts, 0);
}

/* The first rank asks for six units before the second asks for two: the second waits for its
 * turn, not for the first one's end. */
GATHER_TEST(ranks_take_turns)
{
	static const char *const names[] = { "a", "b", "c", "d", "e", "f", "g", "h" };
	struct unit *u[8];
	unsigned before;

	for (unsigned i = 0; i < 8; i++)
		u[i] = cast_unit(names[i], 1000);
	n.node.limits.max_inflight_gathers = 1;
	before = nodefix_ended;
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 8; i++)
		nodefix_on_unit(&n, m[i >= 6], "Gather", u[i], &op[i]);
	backend_fake_hold(n.node.devices[0].backend, false);
	for (unsigned i = 0; i < 8; i++)
		nodefix_ok(&op[i], "Gather");
	for (unsigned i = 0; i < 8; i++) {
		/* one by one, in turns: 0, 1, 6, 2, 7, 3, 4, 5 */
		static const unsigned order[] = { 0, 1, 3, 5, 6, 7, 2, 4 };

		cr_expect_eq(op[i].order - before, order[i], "unit %s was number %u", names[i],
			     op[i].order - before);
	}
}

GATHER_TEST(one_that_is_cancelled_or_dies_loses_its_turn)
{
	static const char *const names[] = { "a", "b", "c", "d", "e" };
	struct unit *u[5];

	for (unsigned i = 0; i < 5; i++)
		u[i] = cast_unit(names[i], 1000);
	n.node.limits.max_inflight_gathers = 1;
	backend_fake_hold(n.node.devices[0].backend, true);
	for (unsigned i = 0; i < 5; i++)
		nodefix_on_unit(&n, m[i >= 3], "Gather", u[i], &op[i]);
	op_cancel(op[1].op, FAULT_CANCELLED, "given up");
	op_cancel(op[3].op, FAULT_CANCELLED, "given up");
	op_cancel(op[4].op, FAULT_CANCELLED, "given up");
	backend_fake_release(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect(op[0].over);
	cr_expect_eq(op[2].op->state, OP_RUN, "nobody else is there");
	nodefix_on_unit(&n, m[1], "Gather", u[3], &op[3]);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	expect_fault(&op[3].fault, FAULT_ABORTED, "");
	cr_expect_eq(job->copies.casts, 0);
	cr_expect(list_empty(&job->copies.turns));
}

/* --------------------------------------------------------------- what goes wrong */

GATHER_TEST(a_cast_that_fails_ends_all_who_wait_and_nobody_else)
{
	struct unit *u = cast_unit("u", 1000);

	backend_fake_hold(n.node.devices[0].backend, true);
	backend_fake_fail(n.node.devices[0].backend, 2, -EIO); /* the first is the allocation */
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	nodefix_on_unit(&n, m[1], "Gather", u, &op[1]);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	expect_fault(&op[0].fault, FAULT_INTERNAL, "casting a unit");
	expect_fault(&op[1].fault, FAULT_INTERNAL, "casting a unit");
	cr_expect_eq(u->gathered_ranks, 0);
	gather(m[1], u, &op[1]);
	cr_expect(op[1].result.copied);
}

GATHER_TEST(not_before_it_is_initialised_and_only_for_its_group)
{
	static const uint32_t ranks[] = { 1 };
	struct unit *u = nodefix_register(job, nodefix_spec("u", 10));
	state_unit *spec = nodefix_spec("v", 10);
	struct fault f = FAULT_NULL;
	struct group *g;

	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_STATE, "unit 'u' is not initialised");
	cr_assert_eq(job_group(job, "one", ranks, 1, &g, &f), 0);
	spec->group = g->id;
	u = nodefix_unit(&n, job, spec, &m[1], 1);
	gather(m[1], u, &op[1]);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "no member of the group of unit 'v'");
	nodefix_on_unit(&n, m[0], "GradientBuffer", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "no member of the group of unit 'v'");
	nodefix_on_unit(&n, m[0], "Reduce", u, &op[0]);
	expect_fault(&op[0].fault, FAULT_INVALID, "no member of group 'one'");
}

GATHER_TEST(the_cast_of_a_rank_that_died_is_there_for_the_next)
{
	struct unit *u = cast_unit("u", 1000);
	struct fault f = FAULT_NULL;
	struct member *again = NULL;

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[1], "Gather", u, &op[1]);
	nodefix_drop(&n, m[1], "died");
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	cr_expect_eq(op[0].op->state, OP_BLOCKED);
	cr_expect_eq(nodefix_try_join(&n, job, 1, NULL, NULL, &again, &f), RES_WAIT);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op[0], "Gather");
	cr_expect(op[1].over);
	expect_fault(&op[1].fault, FAULT_ABORTED, "");
	cr_expect_eq(u->gathered_ranks, 1);
	cr_assert_eq(nodefix_try_join(&n, job, 1, NULL, NULL, &again, &f), 0);
}
