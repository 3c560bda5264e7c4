/* The nccl engine where things fail: what it needs is missing, or a call of NCCL fails. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "ncclfix.h"

TestSuite(nccl_fail, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#ifdef SHARDD_CUDA

/* -- what cannot be made ------------------------------------------------------------------------- */

Test(nccl_fail, a_device_is_a_member_once)
{
	struct ncclfix f;
	struct comm_options o;

	ncclfix_init(&f, 1);
	o = ncclfix_options(&f, 2, BACKEND_Q_MAIN);
	o.devices = (struct backend *const[]){ f.c.b, f.c.b };
	cr_assert_eq(engine_comm_new(f.e, &o), 0);
	looprun_flag(&f.c.run, &f.ready, NCCLFIX_WAIT_S);
	cr_assert_eq(f.status, -EIO);
	cr_assert(strstr(engine_why(f.e), "Duplicate GPU detected"), "%s", engine_why(f.e));
	ncclfix_deinit(&f);
}

Test(nccl_fail, other_memory_is_refused)
{
	struct ncclfix f;
	struct backend *b;
	struct comm_options o;

	ncclfix_init(&f, 1);
	cr_assert_eq(backend_fake_new(&f.c.run.queue, 0, &b), 0);
	o = ncclfix_options(&f, 1, BACKEND_Q_MAIN);
	o.devices = &b;
	cr_assert_eq(engine_comm_new(f.e, &o), -EINVAL);
	backend_close(b);
	ncclfix_deinit(&f);
}

static void expect_none(const char *library, const char *text)
{
	struct ncclfix f = { 0 };
	struct fault fault = FAULT_NULL;

	cudafix_init(&f.c, 1);
	setenv("SHARDD_LIBNCCL", library, 1);
	cr_assert_eq(engine_nccl_new(&f.c.run.queue, &f.e, &fault), FAULT_UNAVAILABLE);
	cr_assert(strstr(fault.text, text), "%s", fault.text);
	cudafix_deinit(&f.c);
}

Test(nccl_fail, without_the_library)
{
	expect_none("/nowhere/libnccl.so.2", "no NCCL: /nowhere/libnccl.so.2");
}

Test(nccl_fail, with_one_that_is_too_old)
{
	setenv("SHARDD_SIM_NCCL", "21904", 1);
	expect_none(SHARDD_SIM_DIR "/libnccl.so.2",
		    "NCCL 2.19.4 is too old: 2.27 or newer is required");
}

Test(nccl_fail, with_one_that_is_none)
{
	expect_none(SHARDD_SIM_DIR "/libcuda.so.1", "has no ncclGetVersion");
}

/* -- every call fails once -------------------------------------------------------------------------- */

struct failing {
	char function[32];
	unsigned n;
};

ParameterizedTestParameters(nccl_fail, whatever_fails_the_rest_goes_on)
{
	static const struct failing all[] = {
		{ "ncclGetUniqueId", 1 },
		{ "ncclGroupStart", 1 },
		{ "ncclGroupStart", 2 },
		{ "ncclGroupStart", 5 },
		{ "ncclGroupStart", 6 },
		{ "ncclGroupStart", 7 },
		{ "ncclGroupStart", 8 },
		{ "ncclGroupEnd", 1 },
		{ "ncclGroupEnd", 2 },
		{ "ncclGroupEnd", 5 },
		{ "ncclGroupEnd", 6 },
		{ "ncclGroupEnd", 7 },
		{ "ncclGroupEnd", 8 },
		{ "ncclCommInitRankConfig", 1 },
		{ "ncclCommInitRankConfig", 2 },
		{ "ncclCommGetAsyncError", 1 },
		{ "ncclCommGetAsyncError", 2 },
		{ "ncclCommGetAsyncError", 20 },
		{ "ncclCommGetAsyncError", 200 },
		{ "ncclAllGather", 1 },
		{ "ncclAllGather", 2 },
		{ "ncclAllGather", 3 },
		{ "ncclAllGather", 4 },
		{ "ncclReduceScatter", 1 },
		{ "ncclReduceScatter", 2 },
		{ "ncclAllReduce", 1 },
		{ "ncclAllReduce", 2 },
		{ "ncclBroadcast", 1 },
		{ "ncclBroadcast", 2 },
		{ "ncclCommWindowRegister", 1 },
		{ "ncclCommWindowRegister", 2 },
		{ "ncclCommWindowDeregister", 1 },
		{ "ncclCommWindowDeregister", 2 },
		{ "ncclCommFinalize", 1 },
		{ "ncclCommFinalize", 2 },
		{ "ncclCommDestroy", 1 },
		{ "ncclCommDestroy", 2 },
	};

	return cr_make_param_array(struct failing, (struct failing *)all, ARRAY_SIZE(all));
}

static void on_freed(void *userdata)
{
	*(bool *)userdata = true;
}

/* It does not work, or it works; in both cases everything ends, and what is made after it
 * works. */
ParameterizedTest(struct failing *p, nccl_fail, whatever_fails_the_rest_goes_on)
{
	struct ncclfix f;
	struct ncclfix_addresses slab;
	struct ncclfix_op ops[3];
	bool freed = false;
	char text[64];

	snprintf(text, sizeof(text), "%s:%u", p->function, p->n);
	setenv("SHARDD_SIM_FAIL", text, 1);
	ncclfix_init(&f, 2);
	slab = ncclfix_all(&f, 0, 0);
	if (ncclfix_make(&f, 2, BACKEND_Q_MAIN) == 0) {
		comm_register(f.comm, slab.all, NCCLFIX_MEM_BYTES);
		for (unsigned i = 0; i < 3; i++)
			ncclfix_start_gather(&f, &ops[i]);
		for (unsigned i = 0; i < 3; i++)
			ncclfix_wait(&f, &ops[i]);
		comm_unregister(f.comm, slab.all, on_freed, &freed);
		looprun_flag(&f.c.run, &freed, NCCLFIX_WAIT_S);
		cr_assert(f.failed == 0 || strlen(f.why) > 0);
	} else {
		cr_assert(strlen(engine_why(f.e)) > 0);
	}
	f.comm = comm_free(f.comm);
	f.failed = 0;
	cr_assert_eq(ncclfix_make(&f, 2, BACKEND_Q_MAIN), 0, "%s", engine_why(f.e));
	ncclfix_check_gather(&f, DTYPE_FP32, 100);
	ncclfix_deinit(&f);
}

#endif
