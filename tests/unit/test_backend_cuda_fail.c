/*
 * What goes wrong with GPUs: drivers that are missing or too old, calls that fail, devices
 * that are lost. Where it goes wrong is set in the environment before CUDA is loaded, once
 * in a process: so each case that is one of many runs in a process of its own.
 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "cuda_kernels.h"
#include "core/clock.h"
#include "core/cuda_lib.h"
#include "cudafix.h"
#include "fdcheck.h"

TestSuite(backend_cuda_fail, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 240);

#ifdef SHARDD_CUDA

#define MIB (UINT64_C(1) << 20)

/* The experiment on overlap starts this program once more. */
__attribute__((constructor)) static void be_the_other_process(int argc, char **argv)
{
	if (argc == 3 && strcmp(argv[1], "--gpu-overlap-child") == 0)
		_exit(backend_cuda_overlap_child(argv[2]));
}

static void refused(int code, const char *sentence)
{
	const struct backend_cuda_options none = { 0 };
	struct fault fault = FAULT_NULL;
	struct cudafix f;

	cr_assert_eq(cudafix_try(&f, &none, &fault), code, "%s", fault.text);
	cr_assert(strstr(fault.text, sentence), "%s", fault.text);
	cr_assert_eq(fault.domain, FAULT_DOMAIN_CUDA);
	cr_assert_eq(f.n, 0);
	cudafix_deinit(&f);
}

Test(backend_cuda_fail, no_driver_is_said_in_a_sentence)
{
	setenv("SHARDD_LIBCUDA", "/nowhere/libcuda.so.1", 1);
	refused(FAULT_NOT_FOUND, "no NVIDIA driver: /nowhere/libcuda.so.1");
}

Test(backend_cuda_fail, a_library_that_is_no_driver_is_named)
{
	setenv("SHARDD_LIBCUDA", "libm.so.6", 1);
	refused(FAULT_NOT_FOUND, "libm.so.6 has no cuInit");
}

Test(backend_cuda_fail, an_old_driver_is_told_what_is_needed)
{
	cudafix_env();
	setenv("SHARDD_SIM_DRIVER", "12080", 1);
	refused(FAULT_NOT_FOUND, "the NVIDIA driver supports CUDA 12.8; 13.0 or newer is required");
}

Test(backend_cuda_fail, no_visible_device_is_said_in_a_sentence)
{
	cudafix_env();
	setenv("CUDA_VISIBLE_DEVICES", "", 1);
	refused(FAULT_NOT_FOUND, "CUDA_VISIBLE_DEVICES");
}

Test(backend_cuda_fail, a_context_that_cannot_be_made_is_said_in_a_sentence)
{
	cudafix_env();
	setenv("SHARDD_SIM_FAIL", "cuDevicePrimaryCtxRetain:1:46", 1);
	refused(FAULT_INTERNAL, "cuda:0: no context: CUDA_ERROR_DEVICE_UNAVAILABLE (46)");
}

/* ----------------------------------------------------------------- lost devices */

static bool is_lost(void *arg)
{
	return ((struct cudafix *)arg)->lost > 0;
}

static void on_freed(void *userdata)
{
	*(bool *)userdata = true;
}

static struct launch scale(struct backend_mem *mem)
{
	return (struct launch){ .kind = LAUNCH_SCALE,
				.n = 100,
				.scale = { backend_addr(mem), 2, NULL } };
}

/* At launch @n, counted behind those that warm up each kernel. */
static void lose_at(unsigned n)
{
	char where[16];

	snprintf(where, sizeof(where), "0:%u", _CUDA_FN_N + n);
	setenv("SHARDD_SIM_LOSE", where, 1);
}

Test(backend_cuda_fail, a_lost_device_fails_everything_and_says_why)
{
	struct backend_mem *mem, *other = NULL;
	struct cudafix f;
	struct launch k;
	int r = 0;

	lose_at(1);
	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	k = scale(mem);
	for (unsigned i = 0; i < 20 && r == 0; i++)
		r = cudafix_run(&f, f.b, &k, 1);
	cr_assert_eq(r, -EIO);
	looprun_until(&f.run, is_lost, &f, 30);
	cr_assert_eq(f.lost, 1);
	cr_assert_eq(strncmp(backend_info(f.b)->lost, "cuda:0 is lost: ", 16), 0, "%s",
		     backend_info(f.b)->lost);
	cr_assert(strstr(backend_info(f.b)->lost, "CUDA_ERROR_"), "%s", backend_info(f.b)->lost);
	cr_assert_eq(cudafix_run(&f, f.b, &k, 1), -EIO);
	cr_assert_eq(cudafix_run(&f, f.b, NULL, 0), -EIO);
	cr_assert_eq(backend_alloc(f.b, 2 * MIB, BACKEND_SHARE_FD, &other), -EIO);
	backend_free(f.b, mem);
	cudafix_deinit(&f);
}

Test(backend_cuda_fail, a_lost_device_leaves_the_others_alone)
{
	struct backend_mem *mem[2];
	struct cudafix f;
	struct launch k[2];
	int r = 0;

	lose_at(1);
	cudafix_init(&f, 2);
	for (unsigned i = 0; i < 2; i++) {
		cr_assert_eq(cudafix_ask(&f, f.all[i], 2 * MIB, BACKEND_SHARE_FD, &mem[i]), 0);
		k[i] = scale(mem[i]);
	}
	for (unsigned i = 0; i < 20 && r == 0; i++)
		r = cudafix_run(&f, f.all[0], &k[0], 1);
	cr_assert_eq(r, -EIO);
	for (unsigned i = 0; i < 20; i++)
		cr_assert_eq(cudafix_run(&f, f.all[1], &k[1], 1), 0);
	cr_assert_str_eq(backend_info(f.all[1])->lost, "");
	for (unsigned i = 0; i < 2; i++)
		backend_free(f.all[i], mem[i]);
	cudafix_deinit(&f);
}

/* With waits of others open, tasks behind them, memory asked for, signals to free. */
Test(backend_cuda_fail, a_device_may_be_lost_in_the_middle_of_everything)
{
	enum { N = 300 };
	struct cudatask *t = calloc(N, sizeof(*t));
	struct backend_mem *mem, *page, *other = NULL;
	struct backend_signals *s;
	struct backend_wait w;
	struct cudafix f;
	bool freed = false;
	struct launch k;
	int r;

	lose_at(22);
	cudafix_init(&f, 1);
	mem = cudafix_alloc(&f, 2 * MIB);
	page = cudafix_alloc(&f, 2 * MIB);
	cr_assert_eq(backend_signals_new(f.b, page, &s), 0);
	k = scale(mem);
	w = (struct backend_wait){ s, 1, 1 };
	for (unsigned i = 0; i < N; i++) {
		t[i] = cudatask_new();
		t[i].task.launches = &k;
		t[i].task.n_launches = 1;
		t[i].task.queue = i % 2 ? BACKEND_Q_GATHER : BACKEND_Q_MAIN;
		t[i].task.waits = &w;
		t[i].task.n_waits = i == 10;
		t[i].task.sync = i % 3 == 0;
		cudatask_submit(f.b, &t[i]);
	}
	r = backend_alloc(f.b, 4 * MIB, BACKEND_SHARE_FD, &other);
	cr_assert(r == BACKEND_E_LATER || r == -EIO);
	looprun_until(&f.run, is_lost, &f, 30);
	for (unsigned i = 0; i < N; i++) {
		r = cudatask_wait(&f, &t[i]);
		cr_assert(r == 0 || r == -EIO);
	}
	backend_signals_poison(s);
	backend_signals_free(s, on_freed, &freed);
	looprun_flag(&f.run, &freed, 30);
	backend_free(f.b, mem);
	backend_free(f.b, page);
	cudafix_deinit(&f);
	free(t);
}

/* --------------------------------------------------------------- the n-th call */

/* In processes that have nothing of Criterion left: CHECK there. */
static void on_tick(uv_timer_t *timer)
{
	(void)timer; /* only wakes the loop, so that deadlines are seen */
}

static void turn_until(struct cudafix *f, bool (*done)(void *arg), void *arg)
{
	uint64_t end = clock_now_us() + 20000000u;
	uv_timer_t tick;

	uv_timer_init(&f->run.loop, &tick);
	uv_timer_start(&tick, on_tick, 20, 20);
	while (!done(arg)) {
		CHECK(clock_now_us() < end);
		uv_run(&f->run.loop, UV_RUN_ONCE);
	}
	uv_close((uv_handle_t *)&tick, NULL);
	uv_run(&f->run.loop, UV_RUN_NOWAIT);
}

#define TASKS 5u

static bool all_done(void *arg)
{
	const struct cudatask *t = arg;

	for (unsigned i = 0; i < TASKS; i++)
		if (t[i].done == 0)
			return false;
	return true;
}

struct asking {
	struct backend *b;
	enum backend_share share;
	struct backend_mem **ret;
};

static bool is_answered(void *arg)
{
	struct asking *a = arg;

	return backend_alloc(a->b, 2 * MIB, a->share, a->ret) != BACKEND_E_LATER;
}

static bool is_set(void *flag)
{
	return *(bool *)flag;
}

static void work(struct cudafix *f, struct backend_mem *mem, struct backend_signals *s)
{
	static double partial[1];
	static float host[300000];
	float *x = backend_addr(mem);
	struct launch k[TASKS] = {
		{ .kind = LAUNCH_COPY, .n = sizeof(host), .copy = { x, host } },
		{ .kind = LAUNCH_SCALE, .n = 100, .scale = { x, 2, NULL } },
		{ .kind = LAUNCH_FILL,
		  .n = 100,
		  .fill = { .dst = x, .kind = FILL_CONSTANT, .a = 1 } },
		{ .kind = LAUNCH_NORM, .n = 100, .norm = { x, partial, 2 } },
		{ .kind = LAUNCH_COPY, .n = sizeof(host), .copy = { host, x } },
	};
	struct backend_wait w = { s, 1, 1 };
	struct cudatask t[TASKS];

	for (unsigned i = 0; i < TASKS; i++) {
		t[i] = cudatask_new();
		t[i].task.launches = &k[i];
		t[i].task.n_launches = 1;
		t[i].task.sync = i == 1;
		t[i].task.waits = &w;
		t[i].task.n_waits = s && i == 2;
		backend_submit(f->b, &t[i].task);
	}
	if (s)
		backend_signals_poison(s);
	turn_until(f, all_done, t);
}

static void free_signals(struct cudafix *f, struct backend_signals *s)
{
	bool freed = false;

	backend_signals_free(s, on_freed, &freed);
	turn_until(f, is_set, &freed);
}

/* Everything a backend does, with nothing expected but that it ends. */
static void use(struct cudafix *f)
{
	struct backend_mem *mem[3] = { NULL, NULL, NULL };
	struct backend_signals *s = NULL;

	for (unsigned i = 0; i < 3; i++) {
		struct asking a = { f->b, i == 2 ? BACKEND_SHARE_IPC : BACKEND_SHARE_FD, &mem[i] };

		turn_until(f, is_answered, &a);
	}
	if (mem[1] && backend_signals_new(f->b, mem[1], &s))
		s = NULL;
	if (mem[0])
		work(f, mem[0], s);
	if (s)
		free_signals(f, s);
	for (unsigned i = 0; i < 3; i++)
		backend_free(f->b, mem[i]);
}

enum { OUTCOME_WELL, OUTCOME_REFUSED, OUTCOME_SILENT };

struct count {
	unsigned before;
};

/* The simulator's threads close some a moment later. */
static bool no_more_than_before(void *arg)
{
	return fdcheck_count() <= ((struct count *)arg)->before;
}

/* Return: what it came to. */
static int start_use_and_end(bool events)
{
	struct backend_cuda_options o = { .order = events ? BACKEND_ORDER_EVENTS
							  : BACKEND_ORDER_NONE };
	struct fault fault = FAULT_NULL;
	struct cudafix f;
	int r = cudafix_try(&f, &o, &fault);

	if (r == 0)
		use(&f);
	cudafix_deinit(&f);
	if (r)
		return strlen(fault.text) < 20 ? OUTCOME_SILENT : OUTCOME_REFUSED;
	return OUTCOME_WELL;
}

/* In a process of its own. @leaks: it may leak, for freeing fails. */
static int scenario(bool events, bool leaks)
{
	struct cudafix f = { 0 };
	struct count count;
	int r;

	looprun_init(&f.run); /* one is always open: libuv keeps something for ever */
	count.before = fdcheck_count();
	r = start_use_and_end(events);
	if (!leaks)
		turn_until(&f, no_more_than_before, &count);
	looprun_deinit(&f.run);
	return r;
}

static int in_a_process(const char *fail, bool events, bool leaks)
{
	pid_t pid = fork();
	int status;

	cr_assert_geq(pid, 0);
	if (pid == 0) {
		setenv("SHARDD_SIM_FAIL", fail, 1);
		alarm(60);
		_exit(scenario(events, leaks));
	}
	cr_assert_eq(waitpid(pid, &status, 0), pid);
	cr_assert(WIFEXITED(status), "%s: signal %d", fail, WTERMSIG(status));
	return WEXITSTATUS(status);
}

#define NAME_OF(name)  NAME_OF_(name)
#define NAME_OF_(name) #name
#define NAME(name)     #name,
static const char *const functions[] = { CUDA_LIB_FUNCTIONS(NAME) };

/* Where it is the freeing itself that fails, something stays. */
static bool frees(const char *function)
{
	return strstr(function, "Unmap") || strstr(function, "Free") ||
	       strstr(function, "Release") || strstr(function, "Destroy");
}

static void fail_each_call(unsigned part, unsigned parts, bool events)
{
	unsigned refused_ones = 0;

	cudafix_env();
	for (unsigned i = part; i < ARRAY_SIZE(functions); i += parts) {
		for (unsigned n = 1; n <= 6; n++) {
			char fail[96];
			int r;

			snprintf(fail, sizeof(fail), "%s:%u", functions[i], n);
			r = in_a_process(fail, events, frees(functions[i]));
			cr_assert_neq(r, OUTCOME_SILENT, "%s: no sentence", fail);
			refused_ones += r == OUTCOME_REFUSED;
		}
	}
	cr_assert_gt(refused_ones, 0);
}

#define PARTS 4u

ParameterizedTestParameters(backend_cuda_fail, any_call_may_fail)
{
	static unsigned parts[PARTS] = { 0, 1, 2, 3 };

	return cr_make_param_array(unsigned, parts, PARTS);
}

ParameterizedTest(unsigned *part, backend_cuda_fail, any_call_may_fail)
{
	fail_each_call(*part, PARTS, false);
	fail_each_call(*part, PARTS, true);
}

/* ------------------------------------------------------------------------ overlap */

static void overlap(const char *mps, const char *program, char mode[160])
{
	struct backend_cuda_options o = { .measure = true, .program = program };
	struct fault fault = FAULT_NULL;
	struct cudafix f;

	cudafix_env();
	setenv("SHARDD_SIM_MPS", mps, 1);
	cr_assert_eq(cudafix_try(&f, &o, &fault), 0, "%s", fault.text);
	snprintf(mode, 160, "%s", backend_info(f.b)->mode);
	cudafix_deinit(&f);
}

/* What a busy machine measures is not ours to expect: only that the words fit the figures,
 * and that there are any. */
static void check_sentence(const char *mode)
{
	const char *kernels = strstr(mode, "kernels of two processes ");
	const char *copies = strstr(mode, "; copies ");
	float alone = 0, beside = 0, times = 0;

	cr_assert(kernels && copies, "%s", mode);
	cr_assert_eq(sscanf(strstr(mode, "measured: "), "measured: %f ms of work took %f ms beside",
			    &alone, &beside),
		     2, "%s", mode);
	cr_assert_eq(sscanf(strrchr(mode, '(') + 1, "%f times)", &times), 1, "%s", mode);
	cr_assert_geq(alone, 20, "400 kernels of 50 us: %s", mode);
	cr_assert(beside > 0 && times > 0, "%s", mode);
	if (beside > 1.4f * alone)
		cr_assert_eq(strncmp(kernels + 25, "take turns", 10), 0, "%s", mode);
	if (beside < 1.2f * alone)
		cr_assert_eq(strncmp(kernels + 25, "overlap", 7), 0, "%s", mode);
}

Test(backend_cuda_fail, how_processes_share_a_device_is_measured_without_mps)
{
	char mode[160];

	overlap("0", "/proc/self/exe", mode);
	cr_assert_eq(strncmp(mode, "no MPS: ", 8), 0, "%s", mode);
	check_sentence(mode);
}

Test(backend_cuda_fail, how_processes_share_a_device_is_measured_with_mps)
{
	char mode[160];

	overlap("1", "/proc/self/exe", mode);
	check_sentence(mode);
}

Test(backend_cuda_fail, what_cannot_be_measured_is_said)
{
	char mode[160];

	overlap("0", "/nowhere", mode);
	cr_assert_str_eq(mode, "no MPS: kernels of two processes take turns "
			       "(not measured: the other process did not start)");
}

Test(backend_cuda_fail, another_process_that_ends_at_once_is_no_measurement)
{
	char mode[160];

	overlap("0", "/bin/false", mode);
	cr_assert(strstr(mode, "(not measured: the other process did not start)"), "%s", mode);
}

#endif
