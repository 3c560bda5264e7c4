/*
 * The kernels of kernels/cuda as host code, and a launch of them: blocks one after the
 * other, the last first; the threads of a block as fibers.
 *
 * A fiber runs until its thread ends or reaches a barrier; then the next one has its turn.
 * So a round of turns is what lies between two barriers, or between two fences of a launch that can be
 * cut off. All but the processor's conversions and the timer is the code
 * that nvcc compiles.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "emulated.h"

#include "adam.cu"
#include "adam_any.cu"
#include "adam_f64.cu"
#include "adam_f64_undo.cu"
#include "adam_undo.cu"
#include "adamw.cu"
#include "add_rows.cu"
#include "all_reduce.cu"
#include "all_reduce_many.cu"
#include "assemble.cu"
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
#include "scale_undo.cu"
#include "sgd.cu"
#include "sgd_undo.cu"
#include "unscale.cu"

#define STACK_BYTES (64 << 10)

struct dim threadIdx, blockIdx, gridDim;

enum state { RUNNING, AT_BARRIER, ENDED };

/* Between two fences of a thread. */
#define MOST_PENDING 16u

struct pending {
	void *at;
	unsigned bytes;
	char value[16];
};

static struct fiber {
	ucontext_t context;
	enum state state;
	unsigned barriers; /* passed */
	unsigned n_pending;
	struct pending pending[MOST_PENDING];
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

/* A launch that can be cut off. */
static struct {
	bool on, over;
	uint64_t left;  /* stores */
	uint64_t made;  /* stores of any launch */
	uint64_t state; /* of the random numbers */
} cut;

static uint64_t cut_random(uint64_t below)
{
	cut.state = cut.state * 6364136223846793005u + 1442695040888963407u;
	return (cut.state >> 33) % below;
}

static void take_effect(const struct pending *p)
{
	memcpy(p->at, p->value, p->bytes);
}

static void wait_for_turn(void)
{
	swapcontext(&fibers[threadIdx.x].context, &launcher);
}

void emulated_store(void *p, const void *value, unsigned bytes)
{
	struct fiber *f = &fibers[threadIdx.x];

	cut.made++;
	if (!cut.on) {
		memcpy(p, value, bytes);
		return;
	}
	if (!cut.left) {
		cut.over = true;
		wait_for_turn(); /* which never comes */
	}
	cut.left--;
	if (f->n_pending == MOST_PENDING)
		stop("too many stores without a fence");
	f->pending[f->n_pending].at = p;
	f->pending[f->n_pending].bytes = bytes;
	memcpy(f->pending[f->n_pending++].value, value, bytes);
}

void __threadfence(void)
{
	struct fiber *f = &fibers[threadIdx.x];

	for (unsigned i = 0; i < f->n_pending; i++)
		take_effect(&f->pending[i]);
	f->n_pending = 0;
	if (cut.on)
		wait_for_turn();
}

/* Some of what is pending, in any order. */
static void take_effect_in_part(struct fiber *f)
{
	while (f->n_pending) {
		uint64_t i = cut_random(f->n_pending);

		if (cut_random(2))
			take_effect(&f->pending[i]);
		f->pending[i] = f->pending[--f->n_pending];
	}
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
	f->n_pending = 0;
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

	for (unsigned i = 0; i < LAUNCH_THREADS && !cut.over; i++) {
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
	while (run_round() && !cut.over)
		;
	for (unsigned i = 0; i < LAUNCH_THREADS; i++) {
		if (cut.over)
			take_effect_in_part(&fibers[i]);
		threadIdx.x = i;
		for (unsigned k = 0; k < fibers[i].n_pending; k++)
			take_effect(&fibers[i].pending[k]);
	}
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
	call<struct cuda_assemble, shardd_assemble>,
	call<struct cuda_adam_undo, shardd_adam_undo>,
	call<struct cuda_adam_f64_undo, shardd_adam_f64_undo>,
	call<struct cuda_sgd_undo, shardd_sgd_undo>,
	call<struct cuda_scale_undo, shardd_scale_undo>,
	nullptr, /* SPIN reads the device's timer */
};

extern "C" void emulated_launch(unsigned fn, unsigned blocks, const void *args)
{
	kernel = kernels[fn];
	kernel_args = args;
	gridDim.x = blocks;
	cut.made = 0;
	for (unsigned block = blocks; block-- > 0 && !cut.over;)
		run_block(block);
}

extern "C" bool emulated_launch_part(unsigned fn, unsigned blocks, const void *args,
				     uint64_t stores, uint64_t seed)
{
	bool over;

	cut.on = true;
	cut.left = stores;
	cut.state = seed;
	emulated_launch(fn, blocks, args);
	over = cut.over;
	cut.on = cut.over = false;
	return !over;
}

extern "C" uint64_t emulated_stores(void)
{
	return cut.made;
}
