/*
 * The CUDA kernels: their names, their arguments, and how to launch them.
 *
 * Plain C, shared by the .cu files, the cuda backend, and the simulator (which runs the
 * same arguments through kernels/ref). A kernel takes exactly one argument, a struct from
 * below, by value. Addresses are device addresses. No kernel needs more than what is in its struct;
 * a kernel synchronises blocks only through its own memory.
 */
#ifndef SHARDD_CUDA_KERNELS_H
#define SHARDD_CUDA_KERNELS_H

#include <stdint.h>

/* Inputs a reduction takes in its short form; the long one takes KERNEL_MAX_INPUTS. */
#define CUDA_FEW_INPUTS  16u
#define CUDA_MANY_INPUTS 1024u
/* Partials of one norm: at most so many doubles, one per block of threads. */
#define CUDA_NORM_PARTIALS 4096u

enum cuda_fn {
	CUDA_FN_CAST,
	CUDA_FN_REDUCE,
	CUDA_FN_REDUCE_MANY,
	CUDA_FN_REDUCE_ROUND, /* these two: whatever k_reduce_rounds says; the two above: else */
	CUDA_FN_REDUCE_ROUND_MANY,
	CUDA_FN_ALL_REDUCE,
	CUDA_FN_ALL_REDUCE_MANY,
	CUDA_FN_ADAMW,
	CUDA_FN_ADAM,
	CUDA_FN_ADAM_ANY, /* both, with amsgrad, maximize or the tail of a fused step */
	CUDA_FN_ADAM_F64, /* both, reference_f64 */
	CUDA_FN_SGD,
	CUDA_FN_NORM,       /* of squares, or the maximum */
	CUDA_FN_NORM_POWER, /* of other powers */
	CUDA_FN_SCALE,
	CUDA_FN_FILL,
	CUDA_FN_FOUND_INF,
	CUDA_FN_PACK,
	CUDA_FN_CLAMP,
	CUDA_FN_UNSCALE,
	CUDA_FN_ADD_ROWS,
	CUDA_FN_ASSEMBLE,
	/* The same arithmetic, for launches that a successor of the process can complete (undo.cuh). */
	CUDA_FN_ADAM_UNDO, /* as ADAM_ANY */
	CUDA_FN_ADAM_F64_UNDO,
	CUDA_FN_SGD_UNDO,
	CUDA_FN_SCALE_UNDO,
	CUDA_FN_SPIN, /* keeps @blocks busy for a time: for measuring overlap */
	_CUDA_FN_N
};

/* "shardd_cast"...: what cuModuleGetFunction is asked for. Static. */
const char *cuda_fn_name(enum cuda_fn fn);

/* Meaning of every field: kernels.h, the struct of the same name. */
struct cuda_cast {
	uint64_t dst, src, n;
	uint32_t dst_dtype, src_dtype;
};

struct cuda_factor {
	uint32_t how, dtype;
	float value;
};

struct cuda_reduce {
	uint64_t out, n;
	uint32_t k, in_dtype;
	uint32_t out_dtype, sum_dtype;
	struct cuda_factor pre, post;
	uint32_t accumulate, zero;
	uint64_t in[CUDA_FEW_INPUTS];
};

struct cuda_reduce_many {
	struct cuda_reduce a; /* a.in is not used */
	uint64_t in[CUDA_MANY_INPUTS];
};

struct cuda_all_reduce {
	uint64_t out, n;
	uint32_t k, dtype, op, zero;
	uint64_t in[CUDA_FEW_INPUTS];
};

struct cuda_all_reduce_many {
	struct cuda_all_reduce a;
	uint64_t in[CUDA_MANY_INPUTS];
};

struct cuda_adamw {
	uint64_t p, g, m, v, n;
	float decay, w1, b2, w2, step_size, sq, eps;
	uint32_t zero;
};

struct cuda_adam {
	uint64_t p, g, m, v, n;
	float wd, w1, b2, w2, step_size, sq, eps;
	uint32_t zero;
};

/* vmax: 0 without amsgrad. tail_from: UINT64_MAX where there is no tail. */
struct cuda_adam_any {
	uint64_t p, g, m, v, vmax, n, tail_from;
	float decay, wd, w1, b2, w2, step_size, sq, eps; /* decay: AdamW, wd: Adam */
	uint32_t decoupled, maximize;
};

struct cuda_adam_f64 {
	uint64_t p, g, m, v, vmax, n;
	double decay, wd, w1, b2, w2, step_size, sq, eps;
	uint32_t decoupled, maximize;
};

struct cuda_sgd {
	uint64_t p, g, buf, n, tail_from; /* tail_from as above */
	float lr, wd, mu, w;              /* w = 1-dampening */
	uint32_t nesterov, first, maximize, zero;
};

/* partial[i] for each block of threads i of the launch: their sum (inf: maximum) is the
 * norm's; the host folds them in order. */
struct cuda_norm {
	uint64_t x, n, partial;
	uint32_t inf, zero;
};

struct cuda_norm_power {
	uint64_t x, n, partial;
	double p;
};

struct cuda_scale {
	uint64_t x, n;
	float factor;
	uint32_t zero;
};

struct cuda_fill {
	uint64_t dst, n, seed, stream, first;
	double a, b;
	uint32_t kind, zero;
};

struct cuda_found_inf {
	uint64_t x, n, found; /* found: a float, becomes 1 if any is not finite; else kept */
	uint32_t dtype, zero;
};

struct cuda_pack {
	uint64_t dst, src; /* elements dst[i*dst_stride + j] = src[i*src_stride + j] */
	uint64_t rows, row_elements, dst_stride, src_stride;
	uint32_t dst_dtype, src_dtype;
};

struct cuda_clamp {
	uint64_t x, n;
	float lo, hi;
};

struct cuda_unscale {
	uint64_t x, n, found;
	float inv;
	uint32_t zero;
};

/* n: columns, each of which one thread walks through all entries. */
struct cuda_add_rows {
	uint64_t out, n, rows, n_rows, values, first_row, row_limit;
	struct cuda_factor pre;
	uint32_t dtype;
};

/* Blocks [0, n) of @blocks, of @tensors: arrays of k_assemble_block and k_assemble_tensor in device memory,
 * whose pointers are device addresses; @base is added to dst of each tensor. @crc: of each block, uint32_t;
 * used by K_ASSEMBLE_MAKE alone. A block of 128 KiB is made by one block of threads.
 * @deltas: of each block, k_delta_block; 0: there is no delta. @shift is added to the address of an element for
 * that of the base's. @out: @room bytes, of which *@used are taken. */
struct cuda_assemble {
	uint64_t tensors, blocks, base, crc, n;
	uint64_t shift, out, room, used, deltas;
	uint32_t pass, zero;
};

/* Bytes of a thread: of its word, and of what it keeps of one array. */
#define CUDA_UNDO_WORD   8u
#define CUDA_UNDO_VECTOR 16u
/* Arrays that a kernel changes, at most; of each there are two places in turn. */
#define CUDA_UNDO_ARRAYS 4u
#define CUDA_UNDO_BYTES  (CUDA_UNDO_WORD + 2 * CUDA_UNDO_ARRAYS * CUDA_UNDO_VECTOR)
/* The low bits of a word are the call, one tells which of the two places it has, and those above are
 * the launch; 0: none yet. */
#define CUDA_UNDO_CALL_MASK    0x7fffffu
#define CUDA_UNDO_HALF         0x800000u
#define CUDA_UNDO_LAUNCH_SHIFT 24

/* What the threads of a launch keep. @launch: its number: above those of all launches before it with
 * the same memory, or that of the launch to complete. @room: of how many threads there
 * is memory, which has to be zero at first. */
struct cuda_undo {
	uint64_t words, old, launch;
	uint32_t room, zero;
};

struct cuda_adam_undo {
	struct cuda_adam_any a;
	struct cuda_undo undo;
};

struct cuda_adam_f64_undo {
	struct cuda_adam_f64 a;
	struct cuda_undo undo;
};

struct cuda_sgd_undo {
	struct cuda_sgd a;
	struct cuda_undo undo;
};

struct cuda_scale_undo {
	struct cuda_scale a;
	struct cuda_undo undo;
};

struct cuda_spin {
	uint64_t nanoseconds;
	uint64_t ran; /* address of a uint64_t: nanoseconds the first block saw, or 0 */
};

union cuda_args {
	struct cuda_cast cast;
	struct cuda_reduce reduce;
	struct cuda_reduce_many reduce_many;
	struct cuda_all_reduce all_reduce;
	struct cuda_all_reduce_many all_reduce_many;
	struct cuda_adamw adamw;
	struct cuda_adam adam;
	struct cuda_adam_any adam_any;
	struct cuda_adam_f64 adam_f64;
	struct cuda_sgd sgd;
	struct cuda_norm norm;
	struct cuda_norm_power norm_power;
	struct cuda_scale scale;
	struct cuda_fill fill;
	struct cuda_found_inf found_inf;
	struct cuda_pack pack;
	struct cuda_clamp clamp;
	struct cuda_unscale unscale;
	struct cuda_add_rows add_rows;
	struct cuda_assemble assemble;
	struct cuda_adam_undo adam_undo;
	struct cuda_adam_f64_undo adam_f64_undo;
	struct cuda_sgd_undo sgd_undo;
	struct cuda_scale_undo scale_undo;
	struct cuda_spin spin;
};

/* Threads of a block, the same for all kernels unless cuda_fn_threads says otherwise. */
unsigned cuda_fn_threads(enum cuda_fn fn);
/* Blocks for @n elements: one for each turn of what a block does at once; of kernels whose blocks take
 * several, enough for the device to be full and no more.
 * @sms: multiprocessors; @per_sm: resident blocks of this kernel on each (from
 * cuOccupancyMaxActiveBlocksPerMultiprocessor). Norms: at most CUDA_NORM_PARTIALS. */
unsigned cuda_fn_blocks(enum cuda_fn fn, uint64_t n, unsigned sms, unsigned per_sm);

/* The fatbin with all kernels (sm_80, sm_90, PTX), built into the program. @bytes: its
 * size. Return: static, or NULL in a build without the CUDA Toolkit. */
const void *cuda_kernels_image(uint64_t *ret_bytes);

#endif
