/*
 * The kernels of kernels/cuda as host code, and a launch of them: blocks one after the
 * other, the last first; the threads of a block as fibers.
 *
 * A fiber runs until its thread ends or reaches a barrier; then the next one has its turn.
 * So a round of turns is what lies between two barriers. All but the processor's conversions and the timer is the code
 * that nvcc compiles.
 */
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include "adam.cu"
#include "adam_any.cu"
#include "adam_f64.cu"
#include "adamw.cu"
#include "add_rows.cu"
#include "all_reduce.cu"
#include "all_reduce_many.cu"
#include "cast.cu"
#include "clamp.cu"
#include "fill.cu"
#include "found_inf.cu"
#include "norm.cu"
#include "pack.cu"
#include "reduce.cu"
#include "reduce_many.cu"
#include "reduce_round.cu"
#include "reduce_round_many.cu"
#include "scale.cu"
#include "sgd.cu"
#include "unscale.cu"

#define STACK_BYTES (64 << 10)

struct dim threadIdx, blockIdx, gridDim;

enum state { RUNNING, AT_BARRIER, ENDED };

static struct fiber {
	ucontext_t context;
	enum state state;
	unsigned barriers; /* passed */
	char stack[STACK_BYTES];
} fibers[LAUNCH_THREADS];

static ucontext_t launcher;
static void (*kernel)(const void *args);
static const void *kernel_args;
/* Of the last barriers: what __syncthreads_or was given. */
static bool any[4];
static double shuffled[LAUNCH_THREADS];
static uint32_t maxima[LAUNCH_THREADS];

static void stop(const char *why)
{
	fprintf(stderr, "emulated kernel: %s (block %u, thread %u)\n", why, blockIdx.x,
		threadIdx.x);
	abort();
}

void check_alignment(const void *p, unsigned bytes)
{
	if (reinterpret_cast<uintptr_t>(p) % bytes)
		stop("a vector is not aligned");
}

void __syncthreads(void)
{
	struct fiber *f = &fibers[threadIdx.x];

	f->state = AT_BARRIER;
	f->barriers++;
	swapcontext(&f->context, &launcher);
}

/* The slot of the barrier after the next is cleared here, when all have read the one
 * before this. */
bool __syncthreads_or(bool mine)
{
	unsigned slot = fibers[threadIdx.x].barriers % 4;

	any[slot] |= mine;
	__syncthreads();
	any[(slot + 2) % 4] = false;
	return any[slot];
}

double __shfl_down_sync(uint32_t lanes, double mine, int step)
{
	unsigned at = threadIdx.x, lane = at % 32;
	double got;

	(void)lanes;
	shuffled[at] = mine;
	__syncthreads();
	got = lane + static_cast<unsigned>(step) < 32 ? shuffled[at + static_cast<unsigned>(step)]
						      : mine;
	__syncthreads();
	return got;
}

uint32_t __reduce_max_sync(uint32_t lanes, uint32_t mine)
{
	unsigned first = threadIdx.x / 32 * 32;
	uint32_t max = 0;

	(void)lanes;
	maxima[threadIdx.x] = mine;
	__syncthreads();
	for (unsigned i = first; i < first + 32; i++)
		max = maxima[i] > max ? maxima[i] : max;
	__syncthreads();
	return max;
}

static void fiber_main(void)
{
	kernel(kernel_args);
	fibers[threadIdx.x].state = ENDED;
	setcontext(&launcher);
}

static void fiber_begin(struct fiber *f)
{
	f->state = RUNNING;
	f->barriers = 0;
	getcontext(&f->context);
	f->context.uc_stack.ss_sp = f->stack;
	f->context.uc_stack.ss_size = sizeof(f->stack);
	f->context.uc_link = &launcher;
	makecontext(&f->context, fiber_main, 0);
}

/* Every thread that has not ended has its turn. Return: how many have not. */
static unsigned run_round(void)
{
	unsigned left = 0;

	for (unsigned i = 0; i < LAUNCH_THREADS; i++) {
		if (fibers[i].state == ENDED)
			continue;
		threadIdx.x = i;
		swapcontext(&launcher, &fibers[i].context);
		left += fibers[i].state != ENDED;
	}
	return left;
}

static void run_block(unsigned block)
{
	blockIdx.x = block;
	for (unsigned i = 0; i < 4; i++)
		any[i] = false;
	for (unsigned i = 0; i < LAUNCH_THREADS; i++)
		fiber_begin(&fibers[i]);
	while (run_round())
		;
}

template <class A, void (*F)(A)> static void call(const void *args)
{
	F(*static_cast<const A *>(args));
}

static void (*const kernels[_CUDA_FN_N])(const void *args) = {
	call<struct cuda_cast, shardd_cast>,
	call<struct cuda_reduce, shardd_reduce>,
	call<struct cuda_reduce_many, shardd_reduce_many>,
	call<struct cuda_reduce, shardd_reduce_round>,
	call<struct cuda_reduce_many, shardd_reduce_round_many>,
	call<struct cuda_all_reduce, shardd_all_reduce>,
	call<struct cuda_all_reduce_many, shardd_all_reduce_many>,
	call<struct cuda_adamw, shardd_adamw>,
	call<struct cuda_adam, shardd_adam>,
	call<struct cuda_adam_any, shardd_adam_any>,
	call<struct cuda_adam_f64, shardd_adam_f64>,
	call<struct cuda_sgd, shardd_sgd>,
	call<struct cuda_norm, shardd_norm>,
	call<struct cuda_norm_power, shardd_norm_power>,
	call<struct cuda_scale, shardd_scale>,
	call<struct cuda_fill, shardd_fill>,
	call<struct cuda_found_inf, shardd_found_inf>,
	call<struct cuda_pack, shardd_pack>,
	call<struct cuda_clamp, shardd_clamp>,
	call<struct cuda_unscale, shardd_unscale>,
	call<struct cuda_add_rows, shardd_add_rows>,
	nullptr, /* SPIN reads the device's timer */
};

extern "C" void emulated_launch(unsigned fn, unsigned blocks, const void *args)
{
	kernel = kernels[fn];
	kernel_args = args;
	gridDim.x = blocks;
	for (unsigned block = blocks; block-- > 0;)
		run_block(block);
}
