/* What one client may make the daemon keep, beside the bytes that its job pays for. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/registration.h"
#include "nodefix.h"

TestSuite(bounds, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_assert_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_assert(strstr(f->text, words), "%s: %s", words, f->text);
}

/* They are looked for one by one, in each op that names one. */
Test(bounds, buffers_of_a_session)
{
	struct nodefix_op op = { 0 };
	struct nodefix n;
	struct member *m;

	nodefix_begin(&n, NULL);
	m = nodefix_join(&n, nodefix_job(&n, "job", 1, 0), 0);
	for (unsigned i = 0; i < MEMBER_MAX_BUFFERS; i++)
		NODEFIX_OK(nodefix_alloc(&n, m, 1, &op), &op);
	nodefix_alloc(&n, m, 1, &op);
	nodefix_wait(&op);
	expect_fault(&op.fault, FAULT_EXHAUSTED, "free one");
	NODEFIX_OK(nodefix_free(&n, m, MEMBER_MAX_BUFFERS, &op), &op);
	NODEFIX_OK(nodefix_alloc(&n, m, 1, &op), &op);
	nodefix_end(&n);
}

/* Each found room when it began to wait for memory, so that all of them got a buffer. */
Test(bounds, buffers_that_wait_for_memory)
{
	struct nodefix_op a = { 0 }, b = { 0 };
	struct nodefix n;
	struct member *m;

	nodefix_begin(&n, NULL);
	m = nodefix_join(&n, nodefix_job(&n, "job", 1, 0), 0);
	m->n_buffers = MEMBER_MAX_BUFFERS - 1;
	m->executing = 1; /* a reduction that may still read the member's memory */
	nodefix_alloc(&n, m, 1, &a);
	nodefix_alloc(&n, m, 1, &b);
	m->executing = 0;
	node_wake(&n.node);
	nodefix_ok(&a, "AllocBuffer");
	nodefix_wait(&b);
	expect_fault(&b.fault, FAULT_EXHAUSTED, "free one");
	cr_expect_eq(m->n_buffers, MEMBER_MAX_BUFFERS);
	m->n_buffers = 1;
	nodefix_end(&n);
}

/* The count would wrap to 0 while the unit counts the rank as a holder: its end
 * found a holder too many and ended the daemon. */
Test(bounds, gathers_of_a_unit)
{
	struct nodefix_op op = { 0 };
	struct nodefix n;
	struct member *m;
	struct unit *u;

	nodefix_begin(&n, NULL);
	m = nodefix_join(&n, nodefix_job(&n, "job", 1, 0), 0);
	u = nodefix_unit(&n, m->job, nodefix_spec("u", 10), &m, 1);
	NODEFIX_OK(nodefix_on_unit(&n, m, "Gather", u, &op), &op);
	member_unit(m, u)->gathers = UINT32_MAX;
	nodefix_on_unit(&n, m, "Gather", u, &op);
	nodefix_wait(&op);
	expect_fault(&op.fault, FAULT_EXHAUSTED, "release it");
	member_unit(m, u)->gathers = 1;
	nodefix_end(&n);
}

static state_unit *scalars(const char *name, unsigned count)
{
	state_unit *spec = state_unit_new(name);
	char tensor[16];

	spec->compute_dtype = spec->gradient_dtype = spec->storage_dtype = DTYPE_FP32;
	spec->shard_multiple = 1;
	spec->tensors = calloc(count, sizeof(*spec->tensors));
	cr_assert(spec->tensors);
	for (; spec->n_tensors < count; spec->n_tensors++) {
		snprintf(tensor, sizeof(tensor), "t%zu", spec->n_tensors);
		spec->tensors[spec->n_tensors] = state_tensor_new(tensor, NULL, 0);
	}
	return spec;
}

/* A scalar is charged a few bytes, its record takes hundreds. */
Test(bounds, tensors_of_a_job)
{
	enum { EACH = 1 << 16 };
	struct fault f = FAULT_NULL;
	uint64_t charged;
	struct nodefix n;
	struct job *job;
	state_unit *spec;
	char name[16];
	uint32_t id;

	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 1, 0);
	for (unsigned i = 0; i < JOB_MAX_TENSORS / EACH; i++) {
		snprintf(name, sizeof(name), "u%u", i);
		nodefix_register(job, scalars(name, EACH));
	}
	spec = scalars("one more", 1);
	cr_assert(nodefix_try_register(job, &spec, 1, &id, &charged, &f));
	expect_fault(&f, FAULT_EXHAUSTED, "would have 1048577 tensors");
	state_unit_free(spec);
	/* what is there may be registered again by the other ranks */
	f = FAULT_NULL;
	spec = scalars("u0", EACH);
	cr_assert_eq(nodefix_try_register(job, &spec, 1, &id, &charged, &f), 0, "%s", f.text);
	state_unit_free(spec);
	nodefix_end(&n);
}

/* Each slab takes a descriptor: one job must not leave none to connections. */
Test(bounds, slabs_of_a_device)
{
	struct nodefix_op op = { 0 };
	struct nodefix n;
	struct member *m;
	uint64_t first;

	nodefix_begin(&n, NULL);
	n.node.devices[0].table->max = 2;
	m = nodefix_join(&n, nodefix_job(&n, "job", 1, 0), 0);
	NODEFIX_OK(nodefix_alloc(&n, m, 1 << 20, &op), &op);
	first = op.result.buffer;
	NODEFIX_OK(nodefix_alloc(&n, m, 1 << 20, &op), &op);
	nodefix_alloc(&n, m, 1 << 20, &op);
	nodefix_wait(&op);
	expect_fault(&op.fault, FAULT_EXHAUSTED, "in 2 of 2 slabs");
	NODEFIX_OK(nodefix_free(&n, m, first, &op), &op);
	NODEFIX_OK(nodefix_alloc(&n, m, 1 << 20, &op), &op);
	nodefix_end(&n);
}

/* It said "one job may use unless it asks for less", and gave whoever asked for more. */
Test(bounds, a_job_does_not_raise_its_own_quota)
{
	struct job_spec spec = { .name = "greedy", .world_size = 1, .quota_bytes = 2 << 20 };
	struct fault f = FAULT_NULL;
	struct nodefix n;
	struct job *job;

	nodefix_begin(&n, NULL);
	n.node.limits.job_quota_bytes = 1 << 20;
	cr_assert(job_open(&n.jobs, &spec, 0, 0, &job, NULL, &f));
	expect_fault(&f, FAULT_INVALID, "the limit is 1048576 (job_quota_bytes)");
	cr_assert_str_eq(f.field, "job.quota_bytes");
	f = FAULT_NULL;
	spec.quota_bytes = 4096;
	cr_assert_eq(job_open(&n.jobs, &spec, 0, 0, &job, NULL, &f), 0, "%s", f.text);
	cr_assert_eq(job->quota.limit, 4096);
	nodefix_end(&n);
}
