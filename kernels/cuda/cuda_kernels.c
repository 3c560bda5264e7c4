/*
 * The host's view of the CUDA kernels; the image is nvcc's output, which the assembler includes in
 * this object file.
 */
#include "cuda_kernels.h"

#include <stdbool.h>
#include <stddef.h>

#include "kernels.h"
#include "launch.h"

static const struct {
	const char *name;
	unsigned elements; /* of a thread in one turn */
} fns[_CUDA_FN_N] = {
	[CUDA_FN_CAST] = { "shardd_cast", LAUNCH_VECTOR *LAUNCH_CAST_UNROLL },
	[CUDA_FN_REDUCE] = { "shardd_reduce", LAUNCH_VECTOR *LAUNCH_REDUCE_UNROLL },
	[CUDA_FN_REDUCE_MANY] = { "shardd_reduce_many", LAUNCH_VECTOR *LAUNCH_REDUCE_UNROLL },
	[CUDA_FN_REDUCE_ROUND] = { "shardd_reduce_round", LAUNCH_VECTOR },
	[CUDA_FN_REDUCE_ROUND_MANY] = { "shardd_reduce_round_many", LAUNCH_VECTOR },
	[CUDA_FN_ALL_REDUCE] = { "shardd_all_reduce", LAUNCH_VECTOR *LAUNCH_ALL_REDUCE_UNROLL },
	[CUDA_FN_ALL_REDUCE_MANY] = { "shardd_all_reduce_many",
				      LAUNCH_VECTOR *LAUNCH_ALL_REDUCE_UNROLL },
	[CUDA_FN_ADAMW] = { "shardd_adamw", LAUNCH_VECTOR *LAUNCH_OPTIMIZER_UNROLL },
	[CUDA_FN_ADAM] = { "shardd_adam", LAUNCH_VECTOR *LAUNCH_OPTIMIZER_UNROLL },
	[CUDA_FN_ADAM_ANY] = { "shardd_adam_any", LAUNCH_VECTOR },
	[CUDA_FN_ADAM_F64] = { "shardd_adam_f64", LAUNCH_VECTOR },
	[CUDA_FN_SGD] = { "shardd_sgd", LAUNCH_VECTOR *LAUNCH_OPTIMIZER_UNROLL },
	[CUDA_FN_NORM] = { "shardd_norm", LAUNCH_VECTOR *LAUNCH_NORM_UNROLL },
	[CUDA_FN_NORM_POWER] = { "shardd_norm_power", LAUNCH_VECTOR },
	[CUDA_FN_SCALE] = { "shardd_scale", LAUNCH_VECTOR *LAUNCH_SCALE_UNROLL },
	[CUDA_FN_FILL] = { "shardd_fill", LAUNCH_VECTOR },
	[CUDA_FN_FOUND_INF] = { "shardd_found_inf", LAUNCH_VECTOR *LAUNCH_FOUND_INF_UNROLL },
	[CUDA_FN_PACK] = { "shardd_pack", LAUNCH_VECTOR *LAUNCH_PACK_UNROLL },
	[CUDA_FN_CLAMP] = { "shardd_clamp", LAUNCH_VECTOR *LAUNCH_SCALE_UNROLL },
	[CUDA_FN_UNSCALE] = { "shardd_unscale", LAUNCH_VECTOR *LAUNCH_SCALE_UNROLL },
	[CUDA_FN_ADD_ROWS] = { "shardd_add_rows", 1 },
	[CUDA_FN_ASSEMBLE] = { "shardd_assemble", 0 }, /* blocks, one for each block of threads */
	[CUDA_FN_ADAM_UNDO] = { "shardd_adam_undo", LAUNCH_VECTOR },
	[CUDA_FN_ADAM_F64_UNDO] = { "shardd_adam_f64_undo", LAUNCH_VECTOR },
	[CUDA_FN_SGD_UNDO] = { "shardd_sgd_undo", LAUNCH_VECTOR },
	[CUDA_FN_SCALE_UNDO] = { "shardd_scale_undo", LAUNCH_VECTOR },
	[CUDA_FN_SPIN] = { "shardd_spin", 1 }, /* of no elements: n / threads blocks */
};

const char *cuda_fn_name(enum cuda_fn fn)
{
	return fns[fn].name;
}

/* The kernels are compiled for this number. */
unsigned cuda_fn_threads(enum cuda_fn fn)
{
	(void)fn;
	return LAUNCH_THREADS;
}

/* A block for each turn, however many: on an H200 with arrays of 1 GiB, scale then has 1.01 of the rate of
 * the device's own copy, AdamW 1.01, cast 0.95 to 1.02. With resident blocks only, which take several
 * turns, it is 0.87, 0.94, and 0.89 to 0.95. Reductions begin with what costs them more than it gains, and
 * the others have memory of each block or thread. */
static bool block_per_turn(enum cuda_fn fn)
{
	switch (fn) {
	case CUDA_FN_CAST:
	case CUDA_FN_ADAMW:
	case CUDA_FN_ADAM:
	case CUDA_FN_ADAM_ANY:
	case CUDA_FN_ADAM_F64:
	case CUDA_FN_SGD:
	case CUDA_FN_SCALE:
	case CUDA_FN_CLAMP:
	case CUDA_FN_UNSCALE:
		return true;
	default:
		return false;
	}
}

/* A launch has one block at least: NORM writes a partial for nothing, too. */
unsigned cuda_fn_blocks(enum cuda_fn fn, uint64_t n, unsigned sms, unsigned per_sm)
{
	uint64_t turn = fns[fn].elements ? (uint64_t)fns[fn].elements * LAUNCH_THREADS : 1;
	uint64_t blocks = n / turn + (n % turn != 0);
	uint64_t full = block_per_turn(fn) ? INT32_MAX : (uint64_t)sms * per_sm;

	if ((fn == CUDA_FN_NORM || fn == CUDA_FN_NORM_POWER) && full > CUDA_NORM_PARTIALS)
		full = CUDA_NORM_PARTIALS;
	if (blocks > full)
		blocks = full;
	return blocks ? (unsigned)blocks : 1;
}

#ifdef CUDA_KERNELS_FATBIN
__asm__(".pushsection .rodata\n"
	".balign 64\n"
	".hidden cuda_kernels_begin\n"
	".globl cuda_kernels_begin\n"
	"cuda_kernels_begin:\n"
	".incbin \"" CUDA_KERNELS_FATBIN "\"\n"
	".hidden cuda_kernels_end\n"
	".globl cuda_kernels_end\n"
	"cuda_kernels_end:\n"
	".byte 0\n"
	".popsection\n");
extern const unsigned char cuda_kernels_begin[], cuda_kernels_end[];

const void *cuda_kernels_image(uint64_t *ret_bytes)
{
	*ret_bytes = (uint64_t)(cuda_kernels_end - cuda_kernels_begin);
	return cuda_kernels_begin;
}
#else
const void *cuda_kernels_image(uint64_t *ret_bytes)
{
	*ret_bytes = 0;
	return NULL;
}
#endif
