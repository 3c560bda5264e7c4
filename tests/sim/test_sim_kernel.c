/* The simulated libcuda: modules, launches, kernels against kernels/ref, a lost device. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_kernels.h"
#include "fix.h"
#include "kernels.h"

TestSuite(sim_kernel, .init = fix_init, .timeout = 30);

#define N 3001u

static CUmodule module;
static CUstream queue;
static CUdeviceptr arrays[6]; /* of N floats, with other values each */
static float copies[6][N];    /* the same values here */

static const uint32_t image[16] = { 0xba55ed50 };

static void open_all(void)
{
	struct slab s;

	fix_open();
	OK(cu->cuModuleLoadData(&module, image));
	queue = stream_new();
	s = slab_new(2 * MIB);
	for (unsigned a = 0; a < 6; a++) {
		arrays[a] = s.addr + a * 65536;
		for (unsigned i = 0; i < N; i++)
			copies[a][i] = (float)((i * 7 + a * 13) % 101) / 17 - (a < 4 ? 2 : 0);
		put_bytes(arrays[a], copies[a], sizeof(copies[a]));
	}
}

static CUresult launch_with(enum cuda_fn fn, void *args, unsigned blocks)
{
	void *params[] = { args };
	CUfunction f;

	OK(cu->cuModuleGetFunction(&f, module, cuda_fn_name(fn)));
	return cu->cuLaunchKernel(f, blocks, 1, 1, cuda_fn_threads(fn), 1, 1, 0, queue, params,
				  NULL);
}

static void launch(enum cuda_fn fn, void *args)
{
	OK(launch_with(fn, args, 3));
	OK(cu->cuStreamSynchronize(queue));
}

static void same(CUdeviceptr addr, const void *wanted, size_t bytes, const char *what)
{
	static char got[N * 8];

	get_bytes(got, addr, bytes);
	cr_assert_arr_eq(got, wanted, bytes, "%s differs", what);
}

Test(sim_kernel, has_all_kernels_by_name)
{
	CUfunction f;
	CUmodule m;
	int value;

	open_all();
	for (unsigned i = 0; i < _CUDA_FN_N; i++) {
		OK(cu->cuModuleGetFunction(&f, module, cuda_fn_name(i)));
		OK(cu->cuOccupancyMaxActiveBlocksPerMultiprocessor(&value, f, 256, 0));
		IS(value, 8);
		OK(cu->cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, f));
		cr_assert_gt(value, 0);
	}
	IS(cu->cuModuleGetFunction(&f, module, "another"), CUDA_ERROR_NOT_FOUND);
	IS(cu->cuModuleLoadData(&m, "nonsense"), CUDA_ERROR_INVALID_IMAGE);
	OK(cu->cuModuleUnload(module));
}

Test(sim_kernel, casts)
{
	struct cuda_cast a;
	uint16_t wanted[N];
	struct k_cast k = { wanted, copies[0], DTYPE_BF16, DTYPE_FP32, false };

	open_all();
	a = (struct cuda_cast){ arrays[5], arrays[0], N, DTYPE_BF16, DTYPE_FP32 };
	launch(CUDA_FN_CAST, &a);
	kernels_ref()->cast(&k, 0, N);
	same(arrays[5], wanted, sizeof(wanted), "bf16");
}

Test(sim_kernel, reduces)
{
	const void *in[] = { copies[0], copies[1], copies[2] };
	struct k_reduce k = { .out = copies[4],
			      .in = in,
			      .k = 3,
			      .in_dtype = DTYPE_FP32,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = k_divide_by(3, DTYPE_FP32),
			      .post = { K_FACTOR_MUL, DTYPE_FP32, 2 },
			      .accumulate = true };
	struct cuda_reduce a = { .n = N,
				 .k = 3,
				 .in_dtype = DTYPE_FP32,
				 .out_dtype = DTYPE_FP32,
				 .sum_dtype = DTYPE_FP32,
				 .pre = { K_FACTOR_DIV, DTYPE_FP32, 3 },
				 .post = { K_FACTOR_MUL, DTYPE_FP32, 2 },
				 .accumulate = 1 };
	static struct cuda_reduce_many many;

	open_all();
	a.out = arrays[4];
	memcpy(a.in, arrays, 3 * sizeof(a.in[0]));
	launch(CUDA_FN_REDUCE, &a);
	kernels_ref()->reduce(&k, 0, N);
	same(arrays[4], copies[4], sizeof(copies[4]), "few");
	many.a = a;
	memcpy(many.in, arrays, 3 * sizeof(many.in[0]));
	launch(CUDA_FN_REDUCE_MANY, &many);
	kernels_ref()->reduce(&k, 0, N);
	same(arrays[4], copies[4], sizeof(copies[4]), "many");
	k.sum_dtype = a.sum_dtype = DTYPE_BF16;
	launch(CUDA_FN_REDUCE_ROUND, &a);
	kernels_ref()->reduce(&k, 0, N);
	same(arrays[4], copies[4], sizeof(copies[4]), "rounded");
}

Test(sim_kernel, all_reduces_in_place)
{
	const void *in[] = { copies[0], copies[1] };
	struct k_all_reduce k = { copies[0], in, 2, DTYPE_FP32, REDUCE_MAX };
	struct cuda_all_reduce a = { .n = N, .k = 2, .dtype = DTYPE_FP32, .op = REDUCE_MAX };

	open_all();
	a.out = arrays[0];
	memcpy(a.in, arrays, 2 * sizeof(a.in[0]));
	launch(CUDA_FN_ALL_REDUCE, &a);
	kernels_ref()->all_reduce(&k, 0, N);
	same(arrays[0], copies[0], sizeof(copies[0]), "max");
}

Test(sim_kernel, steps_optimizers)
{
	struct k_adamw w = { .p = copies[0],
			     .g = copies[1],
			     .m = copies[2],
			     .v = copies[5],
			     .decay = 0.99f,
			     .w1 = 0.1f,
			     .b2 = 0.999f,
			     .w2 = 0.001f,
			     .step_size = 0.01f,
			     .sq = 0.5f,
			     .eps = 1e-8f };
	struct k_adam m = { .p = copies[0],
			    .g = copies[1],
			    .m = copies[2],
			    .v = copies[5],
			    .wd = 0.1f,
			    .w1 = 0.1f,
			    .b2 = 0.999f,
			    .w2 = 0.001f,
			    .step_size = 0.01f,
			    .sq = 0.5f,
			    .eps = 1e-8f };
	struct k_sgd s = { .p = copies[3],
			   .g = copies[1],
			   .buf = copies[4],
			   .lr = 0.1f,
			   .wd = 0.01f,
			   .mu = 0.9f,
			   .nesterov = true };
	struct cuda_adamw cw;
	struct cuda_adam cm;
	struct cuda_sgd cs;

	open_all();
	cw = (struct cuda_adamw){ arrays[0], arrays[1], arrays[2], arrays[5], N,     0.99f, 0.1f,
				  0.999f,    0.001f,    0.01f,     0.5f,      1e-8f, 0 };
	cm = (struct cuda_adam){ arrays[0], arrays[1], arrays[2], arrays[5], N,     0.1f, 0.1f,
				 0.999f,    0.001f,    0.01f,     0.5f,      1e-8f, 0 };
	cs = (struct cuda_sgd){ .p = arrays[3],
				.g = arrays[1],
				.buf = arrays[4],
				.n = N,
				.tail_from = UINT64_MAX,
				.lr = 0.1f,
				.wd = 0.01f,
				.mu = 0.9f,
				.w = 1,
				.nesterov = 1 };
	launch(CUDA_FN_ADAMW, &cw);
	launch(CUDA_FN_ADAM, &cm);
	launch(CUDA_FN_SGD, &cs);
	kernels_ref()->adamw(&w, 0, N);
	kernels_ref()->adam(&m, 0, N);
	kernels_ref()->sgd(&s, 0, N);
	same(arrays[0], copies[0], sizeof(copies[0]), "p");
	same(arrays[2], copies[2], sizeof(copies[2]), "m");
	same(arrays[5], copies[5], sizeof(copies[5]), "v");
	same(arrays[3], copies[3], sizeof(copies[3]), "p of sgd");
	same(arrays[4], copies[4], sizeof(copies[4]), "buf");
}

/* Large enough for several of ref's blocks; in fewer and in more blocks of threads. */
static void norm_in(unsigned blocks)
{
	const uint64_t n = 4 * KERNEL_NORM_BLOCK + 77;
	struct slab x = slab_new(2 * MIB);
	struct cuda_norm a = { x.addr, n, arrays[5], 0, 0 };
	double partial[16], sum = 0;
	float half = 0.5f;
	uint32_t bits;

	memcpy(&bits, &half, sizeof(bits));
	put32(x.addr, bits, n);
	OK(launch_with(CUDA_FN_NORM, &a, blocks));
	OK(cu->cuStreamSynchronize(queue));
	get_bytes(partial, arrays[5], blocks * sizeof(double));
	for (unsigned i = 0; i < blocks; i++)
		sum += partial[i];
	cr_assert_eq(sum, (double)n / 4);
	a.inf = 1;
	OK(launch_with(CUDA_FN_NORM, &a, blocks));
	OK(cu->cuStreamSynchronize(queue));
	get_bytes(partial, arrays[5], 8);
	cr_assert_eq(partial[0], 0.5);
}

Test(sim_kernel, computes_norms)
{
	open_all();
	norm_in(1);
	norm_in(3);
	norm_in(16);
}

Test(sim_kernel, scales_fills_and_finds_infinities)
{
	struct k_scale s = { copies[0], 0.3f, NULL };
	struct k_fill f = { copies[1], 42, 7, 100, FILL_NORMAL, 0.5, 2 };
	struct cuda_scale cs = { .n = N, .factor = 0.3f };
	struct cuda_fill cf = {
		.n = N, .seed = 42, .stream = 7, .first = 100, .a = 0.5, .b = 2, .kind = FILL_NORMAL
	};
	struct cuda_found_inf ci = { .n = N, .dtype = DTYPE_FP32 };
	float infinite = INFINITY;

	open_all();
	cs.x = arrays[0];
	cf.dst = arrays[1];
	ci.x = arrays[2];
	ci.found = arrays[5];
	put32(arrays[5], 0, 1);
	launch(CUDA_FN_SCALE, &cs);
	launch(CUDA_FN_FILL, &cf);
	launch(CUDA_FN_FOUND_INF, &ci);
	IS(get32(arrays[5]), 0);
	put_bytes(arrays[2] + 4 * (N - 1), &infinite, 4);
	launch(CUDA_FN_FOUND_INF, &ci);
	IS(get32(arrays[5]), 0x3f800000);
	kernels_ref()->scale(&s, 0, N);
	kernels_ref()->fill(&f, 0, N);
	same(arrays[0], copies[0], sizeof(copies[0]), "scaled");
	same(arrays[1], copies[1], sizeof(copies[1]), "filled");
}

Test(sim_kernel, packs_rows)
{
	struct k_pack k = { copies[5], copies[0], 10, 10, 30, DTYPE_FP32, DTYPE_FP32 };
	struct cuda_pack a = { .rows = 100,
			       .row_elements = 10,
			       .dst_stride = 10,
			       .src_stride = 30,
			       .dst_dtype = DTYPE_FP32,
			       .src_dtype = DTYPE_FP32 };

	open_all();
	a.dst = arrays[5];
	a.src = arrays[0];
	launch(CUDA_FN_PACK, &a);
	kernels_ref()->pack(&k, 0, 1000);
	same(arrays[5], copies[5], 4000, "packed");
}

/* The arguments are copied when the launch is made. */
Test(sim_kernel, keeps_the_arguments_of_a_launch)
{
	struct cuda_scale a = { .n = 1, .factor = 2 };
	float one = 1, got;

	open_all();
	a.x = arrays[0];
	put_bytes(arrays[0], &one, 4);
	OK(launch_with(CUDA_FN_SCALE, &a, 1));
	a.factor = 100;
	OK(cu->cuStreamSynchronize(queue));
	get_bytes(&got, arrays[0], 4);
	cr_assert_eq(got, 2);
}

Test(sim_kernel, faults_kernels_that_go_too_far)
{
	struct cuda_scale a = { .n = MIB, .factor = 2 };

	open_all();
	a.x = arrays[0];
	OK(launch_with(CUDA_FN_SCALE, &a, 1));
	IS(cu->cuStreamSynchronize(queue), CUDA_ERROR_ILLEGAL_ADDRESS);
	IS(cu->cuStreamQuery(queue), CUDA_ERROR_ILLEGAL_ADDRESS);
}

Test(sim_kernel, faults_misaligned_addresses)
{
	struct cuda_scale a = { .n = 1, .factor = 2 };

	open_all();
	a.x = arrays[0] + 2;
	OK(launch_with(CUDA_FN_SCALE, &a, 1));
	IS(cu->cuStreamSynchronize(queue), CUDA_ERROR_MISALIGNED_ADDRESS);
}

Test(sim_kernel, refuses_impossible_launches)
{
	struct cuda_scale a = { .n = 1, .factor = 2 };
	void *params[] = { &a };
	CUfunction f;

	open_all();
	a.x = arrays[0];
	OK(cu->cuModuleGetFunction(&f, module, cuda_fn_name(CUDA_FN_SCALE)));
	IS(cu->cuLaunchKernel(f, 0, 1, 1, 256, 1, 1, 0, queue, params, NULL),
	   CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuLaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, queue, params, NULL),
	   CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuLaunchKernel(f, 1, 1, 1, 256, 1, 1, 0, queue, NULL, NULL),
	   CUDA_ERROR_INVALID_VALUE);
	IS(cu->cuLaunchKernel(f, 1, 1, 1, 256, 1, 1, 0, (CUstream)params, params, NULL),
	   CUDA_ERROR_INVALID_HANDLE);
}

static void unused_field_set(void)
{
	struct cuda_scale a = { .n = 1, .factor = 2, .zero = 1 };

	open_all();
	a.x = arrays[0];
	launch(CUDA_FN_SCALE, &a);
}

static void too_many_inputs(void)
{
	struct cuda_reduce a = { .n = 1,
				 .k = 17,
				 .in_dtype = DTYPE_FP32,
				 .out_dtype = DTYPE_FP32,
				 .sum_dtype = DTYPE_FP32 };

	open_all();
	a.out = arrays[0];
	launch(CUDA_FN_REDUCE, &a);
}

static void form_that_does_not_round(void)
{
	struct cuda_reduce a = { .n = 1,
				 .k = 1,
				 .in_dtype = DTYPE_FP32,
				 .out_dtype = DTYPE_FP32,
				 .sum_dtype = DTYPE_BF16 };

	open_all();
	a.out = a.in[0] = arrays[0];
	launch(CUDA_FN_REDUCE, &a);
}

Test(sim_kernel, notices_wrong_arguments)
{
	dies(unused_field_set, "unused field");
	dies(too_many_inputs, "17 inputs");
	dies(form_that_does_not_round, "form");
}

Test(sim_kernel, loses_a_device_at_a_launch)
{
	struct cuda_scale a = { .n = N, .factor = 2 };
	CUdeviceptr p;

	setenv("SHARDD_SIM_LOSE", "0:3", 1);
	open_all();
	a.x = arrays[0];
	launch(CUDA_FN_SCALE, &a);
	launch(CUDA_FN_SCALE, &a);
	IS(launch_with(CUDA_FN_SCALE, &a, 1), CUDA_ERROR_ECC_UNCORRECTABLE);
	IS(cu->cuStreamQuery(queue), CUDA_ERROR_ECC_UNCORRECTABLE);
	IS(cu->cuMemAlloc(&p, 8), CUDA_ERROR_ECC_UNCORRECTABLE);
	IS(cu->cuCtxSynchronize(), CUDA_ERROR_ECC_UNCORRECTABLE);
}

Test(sim_kernel, takes_its_time)
{
	struct cuda_spin a = { .nanoseconds = 3000000 };
	CUevent begin, end;
	float ms;

	open_all();
	a.ran = arrays[5];
	OK(cu->cuEventCreate(&begin, CU_EVENT_DEFAULT));
	OK(cu->cuEventCreate(&end, CU_EVENT_DEFAULT));
	OK(cu->cuEventRecord(begin, queue));
	OK(launch_with(CUDA_FN_SPIN, &a, 1));
	OK(cu->cuEventRecord(end, queue));
	OK(cu->cuStreamSynchronize(queue));
	OK(cu->cuEventElapsedTime(&ms, begin, end));
	cr_assert_geq(ms, 3);
	cr_assert_geq(get64(arrays[5]), 3000000);
}
