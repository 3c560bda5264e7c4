/* The simulated NCCL ends whoever breaks its rules: called directly, on two devices. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "core/cuda_lib.h"
#include "cudafix.h"
#include "engine/nccl_lib.h"

TestSuite(nccl_sim, .timeout = 60);

#ifdef SHARDD_CUDA

static const struct nccl_lib *nc;
static const struct cuda_lib *cu;
static struct cudafix f;
static ncclComm_t comms[2];
static CUdeviceptr memory[2];

static void use(unsigned device)
{
	cr_assert_eq(cu->cuCtxSetCurrent(backend_cuda_context(f.all[device])), CUDA_SUCCESS);
}

static CUstream stream(unsigned device)
{
	return backend_cuda_stream(f.all[device], BACKEND_Q_MAIN);
}

static ncclResult_t state(unsigned member)
{
	ncclResult_t r;

	cr_assert_eq(nc->ncclCommGetAsyncError(comms[member], &r), ncclSuccess);
	return r;
}

static void settle(void)
{
	for (unsigned i = 0; i < 2; i++)
		while (state(i) == ncclInProgress)
			sched_yield();
}

static void start(void)
{
	char why[256];

	setenv("SHARDD_LIBNCCL", SHARDD_SIM_DIR "/libnccl.so.2", 1);
	cudafix_init(&f, 2);
	cr_assert_eq(cuda_lib_open(&cu, why, sizeof(why)), 0, "%s", why);
	cr_assert_eq(nccl_lib_open(&nc, why, sizeof(why)), 0, "%s", why);
	for (unsigned i = 0; i < 2; i++) {
		use(i);
		cr_assert_eq(cu->cuMemAlloc(&memory[i], 8192), CUDA_SUCCESS);
	}
}

/* Return: what ncclGroupEnd answers. */
static ncclResult_t init(int second_rank)
{
	ncclConfig_t config;
	ncclUniqueId id;

	nccl_lib_config(&config);
	config.blocking = 0;
	cr_assert_eq(nc->ncclGetUniqueId(&id), ncclSuccess);
	nc->ncclGroupStart();
	use(0);
	nc->ncclCommInitRankConfig(&comms[0], 2, id, 0, &config);
	use(1);
	nc->ncclCommInitRankConfig(&comms[1], 2, id, second_rank, &config);
	return nc->ncclGroupEnd();
}

static void test_nccl_sim_begin(void)
{
	start();
	cr_assert_eq(init(1), ncclInProgress, "without blocking it takes its time");
	settle();
	cr_assert_eq(state(0), ncclSuccess);
}

static ncclResult_t reduce(unsigned member, size_t count)
{
	return nc->ncclAllReduce((void *)memory[member], (void *)memory[member], count, ncclFloat32,
				 ncclSum, comms[member], stream(member));
}

static void test_nccl_sim_end(void)
{
	for (unsigned i = 0; i < 2; i++) {
		cr_assert_eq(nc->ncclCommAbort(comms[i]), ncclSuccess);
		use(i);
		cu->cuMemFree(memory[i]);
	}
	cudafix_deinit(&f);
}

Test(nccl_sim, answers_in_progress_first)
{
	test_nccl_sim_begin();
	nc->ncclGroupStart();
	cr_assert_eq(reduce(0, 4), ncclSuccess);
	cr_assert_eq(reduce(1, 4), ncclSuccess);
	cr_assert_eq(nc->ncclGroupEnd(), ncclInProgress);
	settle();
	cr_assert_eq(state(1), ncclSuccess);
	test_nccl_sim_end();
}

Test(nccl_sim, a_rank_is_taken_once)
{
	start();
	init(0);
	while (state(1) == ncclInProgress)
		sched_yield();
	cr_assert_eq(state(1), ncclInvalidArgument);
	test_nccl_sim_end();
}

Test(nccl_sim, nothing_is_called_while_in_progress, .signal = SIGABRT)
{
	start();
	init(1);
	reduce(0, 4);
}

Test(nccl_sim, one_member_alone_would_wait_for_ever, .signal = SIGABRT)
{
	test_nccl_sim_begin();
	reduce(0, 4);
}

Test(nccl_sim, members_agree, .signal = SIGABRT)
{
	test_nccl_sim_begin();
	nc->ncclGroupStart();
	reduce(0, 4);
	reduce(1, 5);
	nc->ncclGroupEnd();
	settle();
}

Test(nccl_sim, initialisation_stands_alone, .signal = SIGABRT)
{
	ncclConfig_t config;
	ncclUniqueId id;
	ncclComm_t other;

	test_nccl_sim_begin();
	nccl_lib_config(&config);
	nc->ncclGetUniqueId(&id);
	nc->ncclGroupStart();
	reduce(0, 4);
	reduce(1, 4);
	nc->ncclCommInitRankConfig(&other, 1, id, 0, &config);
	nc->ncclGroupEnd();
}

Test(nccl_sim, memory_must_be_there, .signal = SIGABRT)
{
	test_nccl_sim_begin();
	nc->ncclGroupStart();
	reduce(0, 100000000);
}

Test(nccl_sim, memory_must_be_the_devices_own, .signal = SIGABRT)
{
	test_nccl_sim_begin();
	nc->ncclGroupStart();
	nc->ncclAllReduce((void *)memory[1], (void *)memory[1], 4, ncclFloat32, ncclSum, comms[0],
			  stream(0));
}

Test(nccl_sim, nothing_is_used_after_its_end, .signal = SIGABRT)
{
	test_nccl_sim_begin();
	nc->ncclCommAbort(comms[0]);
	state(0);
}

Test(nccl_sim, windows_are_aligned, .signal = SIGABRT)
{
	ncclWindow_t w;

	test_nccl_sim_begin();
	nc->ncclGroupStart();
	nc->ncclCommWindowRegister(comms[0], (void *)(memory[0] + 256), 4096, &w,
				   NCCL_WIN_COLL_SYMMETRIC);
}

Test(nccl_sim, windows_are_given_back_before_the_end, .signal = SIGABRT)
{
	ncclWindow_t w[2];

	test_nccl_sim_begin();
	nc->ncclGroupStart();
	for (unsigned i = 0; i < 2; i++)
		nc->ncclCommWindowRegister(comms[i], (void *)memory[i], 4096, &w[i],
					   NCCL_WIN_COLL_SYMMETRIC);
	nc->ncclGroupEnd();
	settle();
	nc->ncclCommDestroy(comms[0]);
}

static void *from_another_thread(void *arg)
{
	(void)arg;
	use(0);
	nc->ncclGroupStart();
	reduce(0, 4);
	reduce(1, 4);
	nc->ncclGroupEnd();
	return NULL;
}

Test(nccl_sim, one_thread_issues_for_a_device, .signal = SIGABRT)
{
	pthread_t t;

	test_nccl_sim_begin();
	from_another_thread(NULL);
	settle();
	pthread_create(&t, NULL, from_another_thread, NULL);
	pthread_join(t, NULL);
}

Test(nccl_sim, a_stream_is_nccls_alone_while_in_progress, .signal = SIGABRT)
{
	test_nccl_sim_begin();
	use(0);
	for (unsigned i = 0; i < 1000; i++) {
		nc->ncclGroupStart();
		reduce(0, 4);
		reduce(1, 4);
		nc->ncclGroupEnd();
		use(0);
		if (state(0) == ncclInProgress)
			cu->cuMemsetD8Async(memory[0], 0, 16, stream(0));
		settle();
	}
}

#endif
