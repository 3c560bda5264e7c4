/* CopyShard: a rank's own piece of a tensor or of its gradient, read and written alone; and
 * DropGradients, after which the step skips tensors. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/readers.h"
#include "nodefix.h"
#include "op/op_run.h"

#define ELEMENTS 1001
#define FIRST    501 /* of rank 1; FLAT */

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u;
static struct nodefix_op op[2];
static uint64_t buffer[2];
static float *data[2];

static void test_copy_shard_begin_with(bool two, enum dtype compute)
{
	const struct nodefix_options o = { .devices = 1 };
	state_unit *spec = nodefix_spec("u", ELEMENTS);
	uint64_t shape = 3;

	fdcheck_begin();
	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	spec->compute_dtype = compute;
	if (two)
		cr_assert_eq(state_unit_add_tensor(spec, state_tensor_new("bias", &shape, 1)), 0);
	u = nodefix_unit(&n, job, spec, m, 2);
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_alloc(&n, m[i], 4096, &op[i]), &op[i]);
		buffer[i] = op[i].result.buffer;
		data[i] = region_addr(&op[i].result.place);
	}
}

static void test_copy_shard_begin(void)
{
	test_copy_shard_begin_with(false, DTYPE_FP32);
}

static void test_copy_shard_begin_cast(void)
{
	test_copy_shard_begin_with(false, DTYPE_BF16);
}

static void test_copy_shard_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(copy_shard, .init = test_copy_shard_begin, .fini = test_copy_shard_end, .timeout = 60);

static Shardd__V1__CopyShardRequest request(unsigned i, bool gradient, bool write)
{
	Shardd__V1__CopyShardRequest r = SHARDD__V1__COPY_SHARD_REQUEST__INIT;

	r.unit = u->id;
	r.array = gradient ? SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_GRADIENT
			   : SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_PARAMETERS;
	r.write = write;
	r.buffer = buffer[i];
	r.elements = i ? ELEMENTS - FIRST : FIRST;
	return r;
}

static void submit(unsigned i, bool gradient, bool write)
{
	Shardd__V1__CopyShardRequest r = request(i, gradient, write);

	nodefix_submit(&n, m[i], "CopyShard", &r.base, &op[i]);
}

static void ok(unsigned i, bool gradient, bool write)
{
	submit(i, gradient, write);
	nodefix_ok(&op[i], "CopyShard");
}

static void refused(unsigned i, enum fault_code code, const char *words)
{
	nodefix_wait(&op[i]);
	cr_assert_eq(op[i].fault.code, code, "%s", op[i].fault.text);
	cr_assert(strstr(op[i].fault.text, words), "%s", op[i].fault.text);
}

static void reduce(float value)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", u, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, value);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], u, false, &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Reduce");
}

static void step(void)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "Step");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &op[0]), &op[0]); /* applies it */
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", u, &op[0]), &op[0]);
}

Test(copy_shard, reads_this_ranks_piece)
{
	for (unsigned i = 0; i < 2; i++) {
		ok(i, false, false);
		for (unsigned k = 0; k < (i ? ELEMENTS - FIRST : FIRST); k++)
			cr_assert_eq(data[i][k], nodefix_params(u)[i * FIRST + k]);
	}
}

Test(copy_shard, writes_this_ranks_piece_alone)
{
	float before = nodefix_params(u)[FIRST - 1];
	uint64_t version = u->version, uncommitted = job->rec->uncommitted_steps;

	for (unsigned k = 0; k < ELEMENTS - FIRST; k++)
		data[1][k] = (float)k;
	ok(1, false, true);
	cr_expect_eq(nodefix_params(u)[FIRST - 1], before);
	for (unsigned k = 0; k < ELEMENTS - FIRST; k++)
		cr_assert_eq(nodefix_params(u)[FIRST + k], (float)k);
	cr_expect_gt(u->version, version); /* copies of before are not handed out */
	cr_expect_eq(job->rec->uncommitted_steps, uncommitted + 1);
}

Test(copy_shard, the_step_uses_the_gradient_that_was_written)
{
	float before[2];

	reduce(4);
	ok(1, true, false);
	cr_expect_eq(data[1][0], 4);
	memset(data[1], 0, (ELEMENTS - FIRST) * sizeof(float));
	ok(1, true, true);
	before[0] = nodefix_params(u)[0];
	before[1] = nodefix_params(u)[ELEMENTS - 1];
	step();
	cr_expect_neq(nodefix_params(u)[0], before[0]);
	cr_expect_eq(nodefix_params(u)[ELEMENTS - 1], before[1]); /* AdamW, without a decay */
}

Test(copy_shard, refuses_a_gradient_that_is_not_there)
{
	submit(0, true, false);
	refused(0, FAULT_STATE, "no reduced gradient");
	reduce(1);
	step();
	submit(0, true, true);
	refused(0, FAULT_STATE, "no reduced gradient");
}

Test(copy_shard, refuses_another_number_of_elements)
{
	Shardd__V1__CopyShardRequest r = request(1, false, true);

	r.elements = FIRST;
	nodefix_submit(&n, m[1], "CopyShard", &r.base, &op[1]);
	refused(1, FAULT_INVALID, "rank 1 has 500 elements");
	r.elements = ELEMENTS - FIRST;
	r.offset = 4096 - 4;
	nodefix_submit(&n, m[1], "CopyShard", &r.base, &op[1]);
	refused(1, FAULT_INVALID, "do not fit buffer");
}

Test(copy_shard, does_not_write_what_is_gathered_or_summoned)
{
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", u, &op[1]), &op[1]);
	ok(0, false, false);
	submit(0, false, true);
	refused(0, FAULT_STATE, "still gathered by 1 ranks");
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Release", u, &op[1]), &op[1]);
	ok(0, false, true);
	for (unsigned i = 0; i < 2; i++)
		nodefix_on_unit(&n, m[i], "SummonFull", u, &op[i]);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "SummonFull");
	submit(0, false, false);
	refused(0, FAULT_STATE, "summoned");
}

/* On one device the gathered unit is the shards themselves: nobody may see half of a write. */
Test(copy_shard, a_gather_waits_for_a_write)
{
	struct backend *b = n.node.devices[0].backend;

	backend_fake_hold(b, true);
	submit(1, false, true);
	nodefix_turns(&n);
	cr_assert_eq(u->shard_writes, 1);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	nodefix_turns(&n);
	cr_expect_not(op[0].over);
	backend_fake_hold(b, false);
	nodefix_ok(&op[0], "Gather");
	nodefix_ok(&op[1], "CopyShard");
}

Test(copy_shard, ends_with_a_rank_that_dies)
{
	struct backend *b = n.node.devices[0].backend;

	backend_fake_hold(b, true);
	submit(1, false, true);
	nodefix_turns(&n);
	nodefix_drop(&n, m[1], "died");
	backend_fake_hold(b, false);
	nodefix_turns(&n);
	cr_expect_eq(u->shard_writes, 0);
	cr_expect_eq(op[1].fault.code, FAULT_ABORTED);
}

TestSuite(copy_shard_cast, .init = test_copy_shard_begin_cast, .fini = test_copy_shard_end,
	  .timeout = 60);

/* The write waited where only ops wait that take the copy, which ended the daemon. */
Test(copy_shard_cast, a_write_waits_for_a_copy_that_is_made)
{
	struct backend *b = n.node.devices[0].backend;

	backend_fake_hold(b, true);
	nodefix_on_unit(&n, m[0], "Gather", u, &op[0]);
	submit(1, false, true);
	nodefix_turns(&n);
	cr_expect(unit_is_copying(u));
	cr_expect_str_eq(op_state_name(op[1].op->state), "BLOCKED");
	backend_fake_hold(b, false);
	nodefix_ok(&op[0], "Gather");
	refused(1, FAULT_STATE, "still gathered by 1 ranks");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", u, &op[0]), &op[0]);
	ok(1, false, true);
}

/* ------------------------------------------------------------------ DropGradients */

static void test_copy_shard_begin_two(void)
{
	test_copy_shard_begin_with(true, DTYPE_FP32);
}

TestSuite(drop_gradients, .init = test_copy_shard_begin_two, .fini = test_copy_shard_end,
	  .timeout = 60);

static void submit_drop(unsigned i, const uint32_t *tensors, size_t count)
{
	Shardd__V1__DropGradientsRequest r = SHARDD__V1__DROP_GRADIENTS_REQUEST__INIT;

	r.unit = u->id;
	r.tensors = (uint32_t *)tensors;
	r.n_tensors = count;
	nodefix_submit(&n, m[i], "DropGradients", &r.base, &op[i]);
}

static void drop(const uint32_t *tensors, size_t count)
{
	for (unsigned i = 0; i < 2; i++)
		submit_drop(i, tensors, count);
	for (unsigned i = 0; i < 2; i++)
		nodefix_ok(&op[i], "DropGradients");
}

Test(drop_gradients, the_step_skips_them)
{
	static const uint32_t bias = 1;
	float before[2] = { nodefix_params(u)[0], nodefix_params(u)[ELEMENTS] };

	reduce(1);
	drop(&bias, 1);
	cr_expect(unit_lacks_gradient(u, 1));
	cr_expect_not(unit_lacks_gradient(u, 0));
	step();
	cr_expect_neq(nodefix_params(u)[0], before[0]);
	cr_expect_eq(nodefix_params(u)[ELEMENTS], before[1]);
	cr_expect_eq(unit_steps(u, 0), 1);
	cr_expect_eq(unit_steps(u, 1), 0);
}

/* What was dropped does not count in the sum. */
Test(drop_gradients, they_may_be_reduced_again)
{
	static const uint32_t both[] = { 0, 1 };
	Shardd__V1__CopyShardRequest r;

	reduce(5);
	drop(both, 2);
	reduce(2);
	cr_expect_not(unit_lacks_gradient(u, 0) || unit_lacks_gradient(u, 1));
	r = request(0, true, false);
	r.elements = 502; /* FLAT: of 1004 */
	nodefix_submit(&n, m[0], "CopyShard", &r.base, &op[0]);
	nodefix_ok(&op[0], "CopyShard");
	cr_expect_eq(data[0][0], 2);
}

Test(drop_gradients, what_cannot_be_dropped)
{
	static const uint32_t wrong[] = { 1, 1, 2 };

	submit_drop(0, wrong, 1);
	submit_drop(1, wrong, 1);
	refused(0, FAULT_STATE, "no reduced gradient to drop");
	nodefix_wait(&op[1]);
	submit_drop(0, wrong, 2);
	refused(0, FAULT_INVALID, "tensors has 1 after 1");
	submit_drop(0, wrong + 2, 1);
	refused(0, FAULT_INVALID, "tensor 2 of unit 'u' is out of range (0..1)");
	submit_drop(0, wrong, 0);
	refused(0, FAULT_INVALID, "name at least one tensor");
}

Test(drop_gradients, all_ranks_must_drop_the_same)
{
	static const uint32_t tensors[] = { 0, 1 };

	reduce(1);
	submit_drop(0, tensors, 1);
	submit_drop(1, tensors + 1, 1);
	refused(0, FAULT_STATE, "DropGradients");
	nodefix_wait(&op[1]);
}
