/* The cuda backend on the simulator: devices, memory, every kernel. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/cuda_impl.h"
#include "backend/launch.h"
#include "core/check.h"
#include "cudafix.h"
#include "fdcheck.h"

TestSuite(backend_cuda, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 120);

#ifdef SHARDD_CUDA

#define MIB (UINT64_C(1) << 20)

Test(backend_cuda, info_describes_the_device)
{
	struct cudafix f;
	const struct backend_info *info;

	setenv("SHARDD_SIM_MEMORY", "268435456", 1);
	cudafix_init(&f, 1);
	info = backend_info(f.b);
	cr_assert_str_eq(info->id, "cuda:0");
	cr_assert_str_eq(info->name, "cuda");
	cr_assert_eq(info->ordinal, 0);
	cr_assert_eq(strncmp(info->uuid, "GPU-", 4), 0);
	cr_assert_eq(strlen(info->uuid), 40);
	cr_assert_eq(info->capacity_bytes, 256 * MIB);
	cr_assert_geq(info->granularity, 2 * MIB);
	cr_assert_eq(info->granularity % (2 * MIB), 0);
	cr_assert_gt(info->threads, 0);
	cr_assert_eq(strncmp(info->kernels, "cuda sm_", 8), 0, "%s", info->kernels);
	cr_assert(strstr(info->detail, "driver for CUDA 13.0"), "%s", info->detail);
	cr_assert_str_eq(info->lost, "");
	cr_assert_eq(info->order, BACKEND_ORDER_TIMELINE);
	cr_assert_not_null(backend_cuda_stream(f.b, BACKEND_Q_MAIN));
	cr_assert_neq(backend_cuda_stream(f.b, BACKEND_Q_MAIN),
		      backend_cuda_stream(f.b, BACKEND_Q_GATHER));
	cr_assert_not_null(backend_cuda_context(f.b));
	cudafix_deinit(&f);
}

Test(backend_cuda, memory_comes_later_and_is_zero)
{
	struct cudafix f;
	struct backend_mem *mem = NULL, *again = NULL;
	static char host[4096], zero[4096];

	cudafix_init(&f, 1);
	cr_assert_eq(backend_alloc(f.b, 4 * MIB, BACKEND_SHARE_FD, &mem), BACKEND_E_LATER);
	cr_assert_eq(backend_alloc(f.b, 4 * MIB, BACKEND_SHARE_FD, &mem), BACKEND_E_LATER);
	while (f.memory == 0)
		uv_run(&f.run.loop, UV_RUN_ONCE);
	cr_assert_eq(backend_alloc(f.b, 4 * MIB, BACKEND_SHARE_FD, &mem), 0);
	cr_assert_eq(backend_bytes(mem), 4 * MIB);
	cr_assert_eq(mem->share, BACKEND_SHARE_FD);
	cr_assert_eq((uintptr_t)backend_addr(mem) % backend_info(f.b)->granularity, 0);
	/* one request was made of the two calls: the next call makes another */
	cr_assert_eq(backend_alloc(f.b, 4 * MIB, BACKEND_SHARE_FD, &again), BACKEND_E_LATER);
	memset(host, 1, sizeof(host));
	cudafix_copy(&f, host, (char *)backend_addr(mem) + 4 * MIB - sizeof(host), sizeof(host));
	cr_assert_arr_eq(host, zero, sizeof(host));
	backend_free(f.b, mem);
	cudafix_deinit(&f); /* with one that nobody took */
}

static bool is_freed(void *arg)
{
	struct cudafix *f = arg;
	struct backend_mem *mem = NULL;

	if (backend_alloc(f->b, 8 * MIB, BACKEND_SHARE_FD, &mem) != 0)
		return false;
	backend_free(f->b, mem);
	return true;
}

Test(backend_cuda, a_full_device_says_so_and_works_again_when_memory_was_freed)
{
	struct cudafix f;
	struct backend_mem *a, *b = NULL;

	setenv("SHARDD_SIM_MEMORY", "25165824", 1); /* 24 MiB */
	cudafix_init(&f, 1);
	a = cudafix_alloc(&f, 8 * MIB);
	cr_assert_eq(cudafix_ask(&f, f.b, 16 * MIB, BACKEND_SHARE_FD, &b), BACKEND_E_FULL);
	cr_assert_eq(cudafix_ask(&f, f.b, 16 * MIB, BACKEND_SHARE_IPC, &b), BACKEND_E_FULL);
	cr_assert_eq(backend_alloc(f.b, 32 * MIB, BACKEND_SHARE_FD, &b), BACKEND_E_FULL);
	backend_free(f.b, a);
	looprun_until(&f.run, is_freed, &f, 30);
	cudafix_deinit(&f);
}

Test(backend_cuda, memory_that_nobody_takes_is_freed_for_others)
{
	struct cudafix f;
	struct backend_mem *mem = NULL, *other = NULL;

	setenv("SHARDD_SIM_MEMORY", "33554432", 1); /* 32 MiB */
	cudafix_init(&f, 1);
	cr_assert_eq(backend_alloc(f.b, 16 * MIB, BACKEND_SHARE_FD, &mem), BACKEND_E_LATER);
	while (f.memory == 0)
		uv_run(&f.run.loop, UV_RUN_ONCE);
	/* its requester is gone */
	cr_assert_eq(cudafix_ask(&f, f.b, 2 * MIB, BACKEND_SHARE_FD, &other), 0);
	cr_assert_eq(cudafix_ask(&f, f.b, 14 * MIB, BACKEND_SHARE_FD, &mem), 0);
	backend_free(f.b, mem);
	backend_free(f.b, other);
	cudafix_deinit(&f);
}

Test(backend_cuda, descriptors_are_the_callers)
{
	struct cudafix f;
	struct backend_mem *mem, *same = NULL, *ipc = NULL;
	uint8_t handle[BACKEND_IPC_BYTES] = { 0 }, none[BACKEND_IPC_BYTES] = { 0 };
	float x = 2.5f, y = 0;
	int fd;

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	cr_assert_eq(backend_export(f.b, mem, true, &fd), 0);
	cr_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	cudafix_copy(&f, backend_addr(mem), &x, sizeof(x));
	backend_free(f.b, mem);
	/* what outlives a daemon is its descriptor */
	cr_assert_eq(backend_import(f.b, fd, 2 * MIB, &same), 0);
	cudafix_copy(&f, &y, backend_addr(same), sizeof(y));
	cr_assert_eq(y, 2.5f);
	close(fd);
	cr_assert_eq(backend_export(f.b, same, false, &fd), 0);
	close(fd);
	backend_free(f.b, same);
	cr_assert_eq(cudafix_ask(&f, f.b, 2 * MIB, BACKEND_SHARE_IPC, &ipc), 0);
	cr_assert_eq(backend_export_ipc(f.b, ipc, handle), 0);
	cr_assert_neq(memcmp(handle, none, sizeof(handle)), 0);
	cr_assert_eq(backend_export(f.b, ipc, true, &fd), -EOPNOTSUPP);
	backend_free(f.b, ipc);
	cudafix_deinit(&f);
}

Test(backend_cuda, what_is_no_memory_of_ours_is_not_imported)
{
	struct cudafix f;
	struct backend_mem *mem = NULL;
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	cudafix_init(&f, 1);
	cr_assert_eq(backend_import(f.b, fd, 2 * MIB, &mem), -EINVAL);
	cr_assert_eq(backend_import(f.b, fd, 4096, &mem), -EINVAL);
	cr_assert_eq(backend_import(f.b, fd, 0, &mem), -EINVAL);
	close(fd);
	cudafix_deinit(&f);
}

/* -------------------------------------------------------------------- kernels */

#define N        150001u /* not a multiple of anything */
#define SECTIONS 5u

/* The same numbers on the host and on the device. */
struct arena {
	float *host; /* SECTIONS of N */
	float *device;
	const void *in[40]; /* inputs, in host or device memory */
	double partial[N / KERNEL_NORM_BLOCK + 1];
	struct backend_mem *mem;
};

#define ARENA_BYTES (SECTIONS * N * sizeof(float))

static void fill(float *x, unsigned section)
{
	uint32_t s = 7 + section;

	for (unsigned i = 0; i < N; i++) {
		s = s * 1664525u + 1013904223u;
		x[i] = (float)(s >> 8) / 16777216.0f - (section == 3 ? 0.0f : 0.5f);
	}
}

static void arena_init(struct arena *a)
{
	memset(a, 0, sizeof(*a));
	a->host = malloc(ARENA_BYTES);
	for (unsigned s = 0; s < SECTIONS; s++)
		fill(a->host + s * N, s);
}

static void arena_load(struct arena *a, struct cudafix *f, struct backend *b)
{
	uint64_t g = backend_info(b)->granularity;

	if (!a->mem)
		cr_assert_eq(cudafix_ask(f, b, (ARENA_BYTES + g - 1) / g * g, BACKEND_SHARE_FD,
					 &a->mem),
			     0);
	a->device = backend_addr(a->mem);
	cudafix_copy(f, a->device, a->host, ARENA_BYTES);
}

#define ROWS    20
#define ROWS_AT (3 * N + 3 * N % 2) /* in section 3; they are 8 bytes each */

/* Row numbers in section 3: some twice, some of others, some that are none. */
static void fill_rows(float *host)
{
	for (int64_t i = 0; i < ROWS; i++) {
		int64_t row = i * 7 % 12 - 1;

		memcpy((char *)(host + ROWS_AT) + i * 8, &row, sizeof(row));
	}
}

#define FORMS 4

/* What else the kernels of optimizers, norms and reductions can do; from the last array on
 * there is room for a vmax. */
static void other_form(struct launch *k, float *x, unsigned form)
{
	float *vmax = form & 1 ? x + 4 * N : NULL;
	const struct k_adam_f64 f64 = { 0.99, 0.01, 0.9, 0.1, 0.999, 0.001, 1e-3, 0.03, 1e-8 };
	enum k_profile profile = form == 2 ? K_FUSED : form > 2 ? K_REFERENCE_F64 : K_FOREACH;

	if (k->kind == LAUNCH_ADAMW) {
		k->adamw.vmax = vmax;
		k->adamw.profile = profile;
		k->adamw.tail_from = N - 3;
		k->adamw.f64 = f64;
	} else if (k->kind == LAUNCH_ADAM) {
		k->adam.vmax = vmax;
		k->adam.profile = profile;
		k->adam.maximize = true;
		k->adam.tail_from = N - 5;
		k->adam.f64 = f64;
	} else if (k->kind == LAUNCH_SGD) {
		k->sgd.profile = form % 2 ? K_FUSED : K_FOREACH;
		k->sgd.tail_from = N - 7;
		k->sgd.maximize = form > 2;
	} else if (k->kind == LAUNCH_NORM) {
		k->norm.p = form;
	} else {
		k->reduce.sum_dtype = DTYPE_BF16;
	}
}

/* A launch on @x, the arena in host or device memory. */
static struct launch make_launch(enum launch_kind kind, float *x, struct arena *a, unsigned k)
{
	struct launch launch = { .kind = kind, .n = N };
	float *s1 = x + N, *s2 = x + 2 * N, *s3 = x + 3 * N;

	unsigned form = k > 100 ? k - 100 : 0;

	k = k > 100 ? k - 100 : k;
	for (unsigned i = 0; i < k; i++)
		a->in[i] = x + (1 + i % 3) * N;
	switch (kind) {
	case LAUNCH_CAST:
		launch.cast = (struct k_cast){ s1, x, DTYPE_BF16, DTYPE_FP32, false };
		break;
	case LAUNCH_REDUCE:
		launch.reduce = (struct k_reduce){ .out = x,
						   .in = a->in,
						   .k = k,
						   .in_dtype = DTYPE_FP32,
						   .out_dtype = DTYPE_FP32,
						   .sum_dtype = DTYPE_FP32,
						   .pre = k_divide_by(3, DTYPE_FP32),
						   .post = k_divide_by(2, DTYPE_FP32),
						   .accumulate = true };
		break;
	case LAUNCH_ALL_REDUCE:
		launch.all_reduce = (struct k_all_reduce){ x, a->in, k, DTYPE_FP32, REDUCE_AVG };
		break;
	case LAUNCH_ADAMW:
		launch.adamw = (struct k_adamw){ .p = x,
						 .g = s1,
						 .m = s2,
						 .v = s3,
						 .decay = 0.9999f,
						 .w1 = 0.1f,
						 .b1 = 0.9f,
						 .b2 = 0.999f,
						 .w2 = 0.001f,
						 .step_size = 1e-3f,
						 .sq = 0.03162f,
						 .eps = 1e-8f };
		break;
	case LAUNCH_ADAM:
		launch.adam = (struct k_adam){ .p = x,
					       .g = s1,
					       .m = s2,
					       .v = s3,
					       .wd = 0.01f,
					       .w1 = 0.1f,
					       .b2 = 0.999f,
					       .w2 = 0.001f,
					       .step_size = 1e-3f,
					       .sq = 0.03162f,
					       .eps = 1e-8f };
		break;
	case LAUNCH_SGD:
		launch.sgd = (struct k_sgd){ .p = x,
					     .g = s1,
					     .buf = s2,
					     .lr = 0.1f,
					     .wd = 0.01f,
					     .mu = 0.9f,
					     .nesterov = true,
					     .dampening = 0.1 };
		break;
	case LAUNCH_NORM:
		launch.norm = (struct k_norm){ x, a->partial, 2 };
		break;
	case LAUNCH_CLAMP:
		launch.clamp = (struct k_clamp){ s2, -0.1f, 0.2f };
		break;
	case LAUNCH_UNSCALE:
		launch.unscale = (struct k_unscale){ x, 0.3f, s1 };
		break;
	case LAUNCH_ADD_ROWS:
		launch.n = 100;
		launch.add_rows = (struct k_add_rows){ .out = x,
						       .row_elements = 100,
						       .rows = (int64_t *)(void *)(x + ROWS_AT),
						       .n_rows = ROWS,
						       .values = s1,
						       .dtype = DTYPE_FP32,
						       .pre = k_divide_by(3, DTYPE_FP32),
						       .first_row = 1,
						       .row_limit = 9 };
		break;
	case LAUNCH_REDUCE_STEP:
		launch.n = N - 3;
		for (unsigned i = 0; i < k; i++)
			a->in[i] = x + (1 + i % 2) * N;
		launch.reduce_step = (struct k_reduce_step){
			.reduce = { .out = form ? x + 4 * N : NULL,
				    .in = a->in,
				    .k = k,
				    .in_dtype = DTYPE_FP32,
				    .out_dtype = DTYPE_FP32,
				    .sum_dtype = form > 1 ? DTYPE_BF16 : DTYPE_FP32,
				    .pre = k_divide_by(3, DTYPE_FP32),
				    .accumulate = form > 0 },
			.first = 3,
			.step = { .kind = K_STEP_SGD,
				  .sgd = { .p = x,
					   .buf = s3,
					   .lr = 0.1f,
					   .wd = 0.01f,
					   .mu = 0.9f,
					   .profile = K_FUSED,
					   .tail_from = N / 2 } }
		};
		return launch;
	case LAUNCH_SCALE:
		launch.scale = (struct k_scale){ s2, 0.37f, NULL };
		break;
	case LAUNCH_FOUND_INF:
		launch.found_inf = (struct k_found_inf){ x, s1, DTYPE_FP32 };
		break;
	case LAUNCH_FILL:
		launch.fill = (struct k_fill){ s3, 42, 7, 11, FILL_NORMAL, 0.0, 0.02 };
		break;
	case LAUNCH_PACK:
		launch.n = 7 * 1001 + 5; /* with a row that is not whole */
		launch.pack = (struct k_pack){ s1, x, 1001, 1003, 2002, DTYPE_BF16, DTYPE_FP32 };
		break;
	default:
		launch.copy = (struct k_copy){ s1, x };
		launch.n = N * sizeof(float);
	}
	if (form)
		other_form(&launch, x, form);
	return launch;
}

static double norm_of(const double *partial)
{
	double sum = 0;

	for (unsigned i = 0; i < N / KERNEL_NORM_BLOCK + 1; i++)
		sum += partial[i];
	return sum;
}

/* Run it here and there, compare everything. */
static void check_launch(struct cudafix *f, struct backend *b, struct arena *a,
			 enum launch_kind kind, unsigned k, bool special)
{
	float *back = malloc(ARENA_BYTES);
	struct launch here, there;
	double sum;

	for (unsigned s = 0; s < SECTIONS; s++)
		fill(a->host + s * N, s);
	if (special)
		a->host[N / 2] = INFINITY;
	if (kind == LAUNCH_ADD_ROWS)
		fill_rows(a->host);
	arena_load(a, f, b);
	there = make_launch(kind, a->device, a, k);
	cr_assert_eq(cudafix_run(f, b, &there, 1), 0);
	sum = norm_of(a->partial);
	here = make_launch(kind, a->host, a, k);
	launch_run(kernels_ref(), &here, 0, here.n);
	cudafix_copy(f, back, a->device, ARENA_BYTES);
	cr_assert_arr_eq(back, a->host, ARENA_BYTES, "kind %d, k %u", kind, k);
	if (kind == LAUNCH_NORM)
		cr_assert_float_eq(sum, norm_of(a->partial), 1e-9 * sum);
	free(back);
}

Test(backend_cuda, every_kernel_gives_the_reference_result)
{
	struct cudafix f;
	struct arena a;

	arena_init(&a);
	cudafix_init(&f, 1);
	for (int kind = 0; kind < LAUNCH_ASSEMBLE; kind++) /* that one is the host's alone */
		check_launch(&f, f.b, &a, kind, 3,
			     kind == LAUNCH_FOUND_INF || kind == LAUNCH_UNSCALE);
	check_launch(&f, f.b, &a, LAUNCH_FOUND_INF, 0, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE, 1, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE, 16, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE, 17, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE, 40, false);
	check_launch(&f, f.b, &a, LAUNCH_ALL_REDUCE, 16, false);
	check_launch(&f, f.b, &a, LAUNCH_ALL_REDUCE, 33, false);
	for (unsigned form = 1; form <= FORMS; form++)
		for (int kind = LAUNCH_ADAMW; kind <= LAUNCH_NORM; kind++)
			check_launch(&f, f.b, &a, kind, 100 + form, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE, 105, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE, 117, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE_STEP, 40, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE_STEP, 101, false);
	check_launch(&f, f.b, &a, LAUNCH_REDUCE_STEP, 117, false);
	backend_free(f.b, a.mem);
	free(a.host);
	cudafix_deinit(&f);
}

/* Through the memory of one block after the other, of which the last is not whole. */
Test(backend_cuda, a_step_on_a_reduction_has_any_length)
{
	const size_t n = 2 * CUDA_BLOCK + 77;
	float *host = malloc(2 * n * sizeof(*host)), *back = malloc(n * sizeof(*back));
	struct backend_mem *mem;
	struct cudafix f;
	const void *in;
	struct launch k = { .kind = LAUNCH_REDUCE_STEP, .n = n };

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 24 * MIB);
	for (size_t i = 0; i < 2 * n; i++)
		host[i] = (float)(i % 1013) * 0.25f - 100;
	cudafix_copy(&f, backend_addr(mem), host, 2 * n * sizeof(*host));
	in = (float *)backend_addr(mem) + n;
	k.reduce_step = (struct k_reduce_step){
		.reduce = { .in = &in,
			    .k = 1,
			    .in_dtype = DTYPE_FP32,
			    .out_dtype = DTYPE_FP32,
			    .sum_dtype = DTYPE_FP32 },
		.step.sgd = { .p = backend_addr(mem), .lr = 0.5f, .tail_from = UINT64_MAX }
	};
	cr_assert_eq(cudafix_run(&f, f.b, &k, 1), 0);
	cudafix_copy(&f, back, backend_addr(mem), n * sizeof(*back));
	for (size_t i = 0; i < n; i++)
		cr_assert_eq(back[i], host[i] - 0.5f * host[n + i], "%zu", i);
	backend_free(f.b, mem);
	free(host);
	free(back);
	cudafix_deinit(&f);
}

Test(backend_cuda, a_fill_with_a_constant_and_a_cast_of_equal_types_are_exact)
{
	struct cudafix f;
	struct backend_mem *mem;
	float *x, back[8];
	struct launch k[2] = { { .kind = LAUNCH_FILL, .n = 4 }, { .kind = LAUNCH_CAST, .n = 4 } };

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	x = backend_addr(mem);
	k[0].fill = (struct k_fill){ .dst = x, .kind = FILL_CONSTANT, .a = -0.1 };
	k[1].cast = (struct k_cast){ x + 4, x, DTYPE_FP32, DTYPE_FP32, false };
	cr_assert_eq(cudafix_run(&f, f.b, &k[0], 1), 0);
	cr_assert_eq(cudafix_run(&f, f.b, &k[1], 1), 0);
	cudafix_copy(&f, back, x, sizeof(back));
	for (unsigned i = 0; i < 8; i++)
		cr_assert_eq(back[i], -0.1f);
	backend_free(f.b, mem);
	cudafix_deinit(&f);
}

Test(backend_cuda, norms_know_the_maximum_and_keep_what_is_no_number)
{
	struct cudafix f;
	struct backend_mem *mem;
	double partial[2] = { 9, 9 };
	float host[3] = { -3, 2, 1 }, *x;
	struct launch k = { .kind = LAUNCH_NORM, .n = 3 };

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	x = backend_addr(mem);
	k.norm = (struct k_norm){ x, partial, INFINITY };
	cudafix_copy(&f, x, host, sizeof(host));
	cr_assert_eq(cudafix_run(&f, f.b, &k, 1), 0);
	cr_assert_eq(partial[0], 3.0);
	cr_assert_eq(partial[1], 9.0, "written behind its entries");
	host[1] = NAN;
	cudafix_copy(&f, x, host, sizeof(host));
	cr_assert_eq(cudafix_run(&f, f.b, &k, 1), 0);
	cr_assert(isnan(partial[0]));
	k.norm.p = 2;
	k.n = 1;
	cr_assert_eq(cudafix_run(&f, f.b, &k, 1), 0);
	cr_assert_eq(partial[0], 9.0);
	backend_free(f.b, mem);
	cudafix_deinit(&f);
}

/* ---------------------------------------------------------------------- tasks */

Test(backend_cuda, tasks_of_nothing_are_called_back)
{
	struct cudafix f;
	struct launch empty[3] = { { .kind = LAUNCH_COPY },
				   { .kind = LAUNCH_SCALE },
				   { .kind = LAUNCH_NORM } };
	struct cudatask t = cudatask_new();

	cudafix_init(&f, 1);
	cr_assert_eq(cudafix_run(&f, f.b, NULL, 0), 0);
	cr_assert_eq(cudafix_run(&f, f.b, empty, 3), 0);
	t.task.issued = NULL;
	cudatask_submit(f.b, &t);
	cr_assert_eq(backend_in_flight(f.b), 1);
	cr_assert_eq(cudatask_wait(&f, &t), 0);
	cr_assert_eq(backend_in_flight(f.b), 0);
	cudafix_deinit(&f);
}

Test(backend_cuda, a_copy_larger_than_the_staging_memory_arrives_whole)
{
	uint64_t bytes = 11 * MIB + 12345;
	uint8_t *from = malloc(bytes), *to = calloc(1, bytes);
	struct backend_mem *mem;
	struct cudafix f;

	for (uint64_t i = 0; i < bytes; i++)
		from[i] = (uint8_t)(i * 2654435761u >> 13);
	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 12 * MIB);
	cudafix_copy(&f, (char *)backend_addr(mem) + 3, from, bytes);
	cudafix_copy(&f, to, (char *)backend_addr(mem) + 3, bytes);
	cr_assert_arr_eq(from, to, bytes);
	backend_free(f.b, mem);
	cudafix_deinit(&f);
	free(from);
	free(to);
}

/* Issued is not executed: the simulator sees whoever writes to what is gone. */
Test(backend_cuda, memory_may_be_given_back_as_soon_as_its_tasks_are_done)
{
	struct cudafix f;

	cudafix_init(&f, 1);
	for (unsigned i = 0; i < 10; i++) {
		struct backend_mem *mem = cudafix_alloc(&f, 8 * MIB);
		struct cudatask t = cudatask_new();
		struct launch k[8];

		for (unsigned j = 0; j < 8; j++) {
			k[j] = (struct launch){ .kind = LAUNCH_FILL, .n = 2 * MIB };
			k[j].fill =
				(struct k_fill){ .dst = backend_addr(mem), .kind = FILL_UNIFORM };
		}
		t.task.launches = k;
		t.task.n_launches = 8;
		cudatask_submit(f.b, &t);
		cr_assert_eq(cudatask_wait(&f, &t), 0);
		backend_free(f.b, mem);
	}
	cr_assert_eq(cudafix_run(&f, f.b, NULL, 0), 0);
	cr_assert_str_eq(backend_info(f.b)->lost, "");
	cudafix_deinit(&f);
}

/* What a request brings may go as soon as the task is done, executed or not. */
Test(backend_cuda, host_memory_is_ours_again_when_the_task_is_done)
{
	struct cudafix f;
	struct backend_mem *mem;
	uint64_t back[64];

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	for (uint64_t i = 0; i < 64; i++) {
		uint64_t value = i + 1, *at = (uint64_t *)backend_addr(mem) + i;
		struct launch k = { .kind = LAUNCH_COPY, .n = 8, .copy = { at, &value } };
		struct cudatask t = cudatask_new();

		t.task.launches = &k;
		t.task.n_launches = 1;
		cudatask_submit(f.b, &t);
		cr_assert_eq(cudatask_wait(&f, &t), 0);
		value = 0;
	}
	cudafix_copy(&f, back, backend_addr(mem), sizeof(back));
	for (uint64_t i = 0; i < 64; i++)
		cr_assert_eq(back[i], i + 1);
	backend_free(f.b, mem);
	cudafix_deinit(&f);
}

/* Not issued before the last callback has said so, yet ordered: each sees the one before. */
Test(backend_cuda, a_chain_of_tasks_is_executed_in_order)
{
	struct cudafix f;
	struct backend_mem *mem;
	float x = 1, *at;
	struct launch k = { .kind = LAUNCH_SCALE, .n = 1 };
	uint64_t last = 0;

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	at = backend_addr(mem);
	k.scale = (struct k_scale){ at, 2.0f, NULL };
	cudafix_copy(&f, at, &x, sizeof(x));
	for (unsigned i = 0; i < 20; i++) {
		struct cudatask t = cudatask_new();

		t.task.launches = &k;
		t.task.n_launches = 1;
		cudatask_submit(f.b, &t);
		cr_assert_eq(cudatask_wait(&f, &t), 0);
		cr_assert_gt(t.task.ready, last);
		last = t.task.ready;
	}
	cudafix_copy(&f, &x, at, sizeof(x));
	cr_assert_eq(x, 1048576.0f);
	backend_free(f.b, mem);
	cudafix_deinit(&f);
}

#define TASKS 1500u /* more than all limits together */

struct burst {
	struct cudatask t[TASKS];
	struct launch k[TASKS][2];
};

static bool all_done(void *arg)
{
	const struct burst *b = arg;

	for (unsigned i = 0; i < TASKS; i++)
		if (b->t[i].done == 0)
			return false;
	return true;
}

Test(backend_cuda, a_burst_of_tasks_in_both_queues_completes_each_once)
{
	struct burst *b = calloc(1, sizeof(*b));
	float *host = malloc(TASKS * sizeof(float)), *x;
	double *partial = calloc(TASKS, sizeof(*partial));
	struct backend_mem *mem;
	struct cudafix f;

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	x = backend_addr(mem);
	for (unsigned i = 0; i < TASKS; i++)
		host[i] = (float)i;
	cudafix_copy(&f, x, host, TASKS * sizeof(float));
	for (unsigned i = 0; i < TASKS; i++) {
		b->k[i][0] = (struct launch){ .kind = LAUNCH_SCALE,
					      .n = 1,
					      .scale = { x + i, 2, NULL } };
		b->k[i][1] = (struct launch){ .kind = LAUNCH_NORM, .n = 1 };
		b->k[i][1].norm = (struct k_norm){ x + i, partial + i, INFINITY };
		b->t[i] = cudatask_new();
		b->t[i].task.launches = b->k[i];
		b->t[i].task.n_launches = i % 7 == 0 ? 2 : 1;
		b->t[i].task.queue = i % 2 ? BACKEND_Q_MAIN : BACKEND_Q_GATHER;
		b->t[i].task.sync = i % 3 == 0;
		cudatask_submit(f.b, &b->t[i]);
	}
	looprun_until(&f.run, all_done, b, 60);
	cudafix_copy(&f, host, x, TASKS * sizeof(float));
	for (unsigned i = 0; i < TASKS; i++) {
		cr_assert_eq(b->t[i].done, 1);
		cr_assert_eq(b->t[i].status, 0);
		cr_assert_eq(host[i], 2 * (float)i);
		if (i % 7 == 0)
			cr_assert_eq(partial[i], 2 * (double)i);
	}
	backend_free(f.b, mem);
	cudafix_deinit(&f);
	free(b);
	free(host);
	free(partial);
}

Test(backend_cuda, one_task_may_be_more_than_a_stream_takes)
{
	static double partial[4000];
	struct launch *k = calloc(4000, sizeof(*k));
	float host[2] = { -1, 5 }, *x;
	struct backend_mem *mem;
	struct cudafix f;

	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	x = backend_addr(mem);
	cudafix_copy(&f, x, host, sizeof(host));
	for (unsigned i = 0; i < 4000; i++) {
		k[i] = (struct launch){ .kind = LAUNCH_NORM, .n = 1 + i % 2 };
		k[i].norm = (struct k_norm){ x, partial + i, INFINITY };
	}
	cr_assert_eq(cudafix_run(&f, f.b, k, 4000), 0);
	for (unsigned i = 0; i < 4000; i++)
		cr_assert_eq(partial[i], i % 2 ? 5.0 : 1.0);
	backend_free(f.b, mem);
	cudafix_deinit(&f);
	free(k);
}

/* -------------------------------------------------------------- several devices */

ParameterizedTestParameters(backend_cuda, every_number_of_devices_works)
{
	static unsigned numbers[CUDAFIX_DEVICES] = { 1, 2, 3, 4, 5, 6, 7, 8 };

	return cr_make_param_array(unsigned, numbers, CUDAFIX_DEVICES);
}

ParameterizedTest(unsigned *n, backend_cuda, every_number_of_devices_works)
{
	struct cudafix f;
	struct arena a;

	cudafix_init(&f, *n);
	for (unsigned i = 0; i < f.n; i++) {
		arena_init(&a);
		for (unsigned k = 0; k < i; k++)
			cr_assert_str_neq(backend_info(f.all[i])->uuid,
					  backend_info(f.all[k])->uuid);
		check_launch(&f, f.all[i], &a, LAUNCH_ADAMW, 0, false);
		backend_free(f.all[i], a.mem);
		free(a.host);
	}
	cudafix_deinit(&f);
}

Test(backend_cuda, copies_go_from_device_to_device)
{
	struct backend_mem *mem[2] = { NULL, NULL };
	struct cudafix f;
	float x = 3.5f, y = 0;
	struct launch k = { .kind = LAUNCH_COPY, .n = sizeof(x) };

	cudafix_init(&f, 2);
	for (unsigned i = 0; i < 2; i++)
		cr_assert_eq(cudafix_ask(&f, f.all[i], 2 * MIB, BACKEND_SHARE_FD, &mem[i]), 0);
	cudafix_copy(&f, backend_addr(mem[0]), &x, sizeof(x));
	k.copy = (struct k_copy){ backend_addr(mem[1]), backend_addr(mem[0]) };
	cr_assert_eq(cudafix_run(&f, f.all[1], &k, 1), 0);
	cudafix_copy(&f, &y, backend_addr(mem[1]), sizeof(y));
	cr_assert_eq(y, 3.5f);
	for (unsigned i = 0; i < 2; i++)
		backend_free(f.all[i], mem[i]);
	cudafix_deinit(&f);
}

Test(backend_cuda, devices_are_chosen_by_uuid)
{
	struct fault fault = FAULT_NULL;
	struct cudafix f;
	char uuid[48];
	const char *names[1] = { uuid };
	struct backend_cuda_options o = { .uuids = names, .n_uuids = 1 };

	cudafix_init(&f, 4);
	snprintf(uuid, sizeof(uuid), "%s", backend_info(f.all[2])->uuid);
	cudafix_deinit(&f);
	cr_assert_eq(cudafix_try(&f, &o, &fault), 0, "%s", fault.text);
	cr_assert_eq(f.n, 1);
	cr_assert_str_eq(backend_info(f.b)->uuid, uuid);
	cr_assert_str_eq(backend_info(f.b)->id, "cuda:2");
	cudafix_deinit(&f);
	uuid[10] = uuid[10] == '0' ? '1' : '0';
	cr_assert_eq(cudafix_try(&f, &o, &fault), FAULT_NOT_FOUND);
	cr_assert(strstr(fault.text, uuid), "%s", fault.text);
	cudafix_deinit(&f);
}

#else

Test(backend_cuda, a_build_without_cuda_says_so)
{
	const struct backend_cuda_options none = { 0 };
	struct fault fault = FAULT_NULL;
	struct cudafix f;

	cr_assert_eq(cudafix_try(&f, &none, &fault), FAULT_NOT_FOUND);
	cr_assert(strstr(fault.text, "this build has no CUDA"), "%s", fault.text);
	cudafix_deinit(&f);
}

#endif
