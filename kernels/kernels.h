/*
 * The arithmetic of sharded training: one operation, one prototype, plain types.
 *
 * Implemented three times: kernels/ref (plain scalar C, the definition); kernels/host (vectorised,
 * chosen at run time), bitwise equal to ref; and kernels/cuda, also bitwise equal except for the
 * order in which a norm is added. Every operation is pure: it touches only its arguments, may be
 * called from any thread, and may be cut into ranges of elements without changing a bit of the
 * result (norms: into ranges of whole blocks).
 *
 * fp32 arithmetic throughout, round to nearest even, no flush to zero, no contraction into fused
 * multiply-adds except where fma() is written below (one rounding: fma(a, b, c) = a*b + c). bf16
 * and fp16 inputs are widened exactly; narrowing rounds to nearest even and keeps NaN a NaN. A
 * result that is NaN is NaN everywhere; its sign and payload are not defined.
 */
#ifndef SHARDD_KERNELS_H
#define SHARDD_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* DTYPE_E4M3 is of tensors that k_assemble makes and of nothing else, so it is behind _DTYPE_N. */
enum dtype {
	DTYPE_NONE = 0,
	DTYPE_FP32 = 1,
	DTYPE_BF16 = 2,
	DTYPE_FP16 = 3,
	_DTYPE_N,
	DTYPE_E4M3 = _DTYPE_N
};

/* Bytes of one element; 0 for DTYPE_NONE. */
static inline size_t dtype_size(enum dtype t)
{
	return t == DTYPE_FP32                      ? 4
	       : t == DTYPE_BF16 || t == DTYPE_FP16 ? 2
	       : t == DTYPE_E4M3                    ? 1
						    : 0;
}

/* A type of memory that jobs have. */
static inline bool dtype_is_stored(enum dtype t)
{
	return t > DTYPE_NONE && t < _DTYPE_N;
}

/* fp32, bf16, fp16, e4m3; "?" otherwise. */
static inline const char *dtype_name(enum dtype t)
{
	return t == DTYPE_FP32   ? "fp32"
	       : t == DTYPE_BF16 ? "bf16"
	       : t == DTYPE_FP16 ? "fp16"
	       : t == DTYPE_E4M3 ? "e4m3"
				 : "?";
}

enum reduce_op {
	REDUCE_NONE = 0,
	REDUCE_SUM = 1,
	REDUCE_AVG = 2,
	REDUCE_MAX = 3,
	REDUCE_MIN = 4,
	_REDUCE_N
};

/* Most inputs one reduce kernel takes: the ranks on one device. */
#define KERNEL_MAX_INPUTS 1024

/* Elements of one norm block: partial results are one per block. */
#define KERNEL_NORM_BLOCK 65536

/* dst[i] = src[i], converted; equal types: the bits. Ranges must not overlap. */
struct k_cast {
	void *dst;
	const void *src;
	enum dtype dst_dtype;
	enum dtype src_dtype;
	bool stream; /* a hint, which changes no bit: both together are larger than the caches */
};

/* x becomes round(dtype, round(dtype, x) / value), or "* value", the operation itself in
 * fp32: what PyTorch does with a tensor of that type on a CPU. A division is a true
 * division; multiplying by the inverse is not, unless the value is a power of two. NONE changes
 * nothing, and reads no other field. */
enum k_factor_how { K_FACTOR_NONE = 0, K_FACTOR_DIV = 1, K_FACTOR_MUL = 2 };
struct k_factor {
	enum k_factor_how how;
	enum dtype dtype;
	float value;
};

/* x / @by in @t; nothing where @by is 1. */
static inline struct k_factor k_divide_by(float by, enum dtype t)
{
	struct k_factor f = { K_FACTOR_NONE, DTYPE_NONE, 0 };

	if (by != 1) {
		f.how = K_FACTOR_DIV;
		f.dtype = t;
		f.value = by;
	}
	return f;
}

/* Gradient reduction, in the order of the inputs (left fold). round() is a rounding to a
 * type and back to fp32, to nearest even; of fp32 it is nothing.
 *   y_j = round(sum_dtype, pre(x_j[i]))
 *   t = y_0; t = round(sum_dtype, t + y_j) for j = 1, 2, ...
 *   t = post(t)
 *   out[i] = round(out_dtype, accumulate ? out[i] + t : t)
 * So the sum of bf16 tensors in bf16 that a collective gives is sum_dtype bf16, and the
 * same tensors cast to fp32 first are sum_dtype fp32. out may be one of the inputs if the
 * types are equal (elementwise in place); else it overlaps none. */
struct k_reduce {
	void *out;
	enum dtype out_dtype;
	const void *const *in; /* k pointers, k at least 1 */
	unsigned k;
	enum dtype in_dtype;
	struct k_factor pre;  /* on each input */
	enum dtype sum_dtype; /* not NONE */
	struct k_factor post; /* on the sum */
	bool accumulate;
	bool stream; /* a hint, which changes no bit: all of it is larger than the caches */
};

/* Whether it rounds to any type but fp32; forms that are made for fp32 need not do that. */
static inline bool k_reduce_rounds(const struct k_reduce *a)
{
	return a->out_dtype != DTYPE_FP32 || a->sum_dtype != DTYPE_FP32 ||
	       (a->pre.how && a->pre.dtype != DTYPE_FP32) ||
	       (a->post.how && a->post.dtype != DTYPE_FP32);
}

/* out[i] = op over x_0[i], x_1[i], ..., folded in fp32 in that order, then
 * narrowed once. AVG divides the sum by k. MAX and MIN give NaN if any input is
 * NaN, and the first of equal inputs (+0 and -0). out may be one of the inputs
 * (elementwise in place). */
struct k_all_reduce {
	void *out;
	const void *const *in; /* k pointers, k at least 1 */
	unsigned k;
	enum dtype dtype;
	enum reduce_op op;
};

/* The system whose arithmetic an optimizer follows, where the systems differ in the last bit.
 * PyTorch's are those of its CPU kernels on x86-64 with AVX2 or AVX-512 (2.13).
 *
 * foreach: on a CPU the same calls tensor by tensor, so the same bits as eager_single.
 *
 * fused: one loop. Its vectorised body has the bits of eager_single too, but for the square
 * root, which it rounds correctly where eager takes MKL's; ours is correctly rounded in
 * every profile. It handles the rest of a tensor after the last whole vector one by one, and there
 * the compiler fused the other product: see k_adamw and k_sgd. With one thread those are the last n
 * mod 8 elements of a tensor of n (AVX2; AVX-512: n mod 16).
 *
 * On a GPU PyTorch's eager_single divides by a scalar by multiplying with its inverse, its
 * foreach divides, and its fused kernel has products in double (lr*wd*p and the moments)
 * that are rounded to fp32 one by one. We do not imitate these: our kernels on a GPU give
 * the bits that are defined here. */
enum k_profile {
	K_EAGER_SINGLE = 0,
	K_FOREACH = 1,
	K_FUSED = 2,
	K_REFERENCE_F64 = 3, /* Adam and AdamW only */
	_K_PROFILE_N
};

/* The input of reference_f64: the scalars as computed, in double. */
struct k_adam_f64 {
	double decay;              /* AdamW: 1-lr*wd */
	double wd;                 /* Adam */
	double b1, w1, b2, w2;     /* w1 = 1-b1, w2 = 1-b2; b1 itself is not read */
	double step_size, sq, eps; /* lr/(1-b1^t), sqrt(1-b2^t) */
};

struct k_undo;

/* AdamW, decoupled weight decay; scalars as in PyTorch's eager path: computed in
 * double, rounded to fp32 once (decay = 1-lr*wd, step_size = lr/(1-b1^t),
 * sq = sqrt(1-b2^t)). The order and the fused operations of PyTorch's
 * single-tensor path on a CPU with AVX2 or AVX-512:
 *   g = maximize ? -g : g         (the array g is not changed)
 *   p = p*decay
 *   m = |w1| < 0.5 ? fma(w1, g-m, m) : fma(w1-1, g-m, g)   (lerp)
 *   v = fma(w2*g, g, v*b2)
 *   vmax = max(vmax, v), and for v below: vmax             (amsgrad; NaN if either is)
 *   p = p - (step_size*m) / (sqrt(v)/sq + eps)
 * sqrt is correctly rounded here; that of PyTorch on x86 (MKL) is not.
 *
 * K_FUSED, elements from tail_from on: v = fma(v, b2, (w2*g)*g), and vmax stays where v is
 * NaN. The rest is the same.
 *
 * K_REFERENCE_F64: the same formulas with every operation in double, from the fp32 arrays and
 * .f64, as PyTorch computes with double tensors; p is made from m, v and vmax as they are in
 * double, and each array is rounded once, when it is stored. */
struct k_adamw {
	float *p;
	const float *g;
	float *m;
	float *v;
	/* w1 = 1-b1, w2 = 1-b2, from double; b1 itself is not read */
	float decay, w1, b1, b2, w2, step_size, sq, eps;
	float *vmax; /* NULL: not amsgrad */
	enum k_profile profile;
	bool maximize;
	uint64_t tail_from;    /* K_FUSED: first element of the tail; UINT64_MAX: there is none */
	struct k_adam_f64 f64; /* K_REFERENCE_F64 reads these instead of the scalars above */
	struct k_undo *undo;   /* undo.h; NULL: what is changed is not copied before. Not on GPUs */
};

/* Adam, weight decay added to the gradient (L2), as in the same path of PyTorch; scalars,
 * profiles and the rest as above:
 *   d = fma(p, wd, g)             (g when wd is 0; g is negated before if maximize)
 *   m, v, vmax as above with d for g
 *   p = p - (step_size*m) / (sqrt(v)/sq + eps) */
struct k_adam {
	float *p;
	const float *g;
	float *m;
	float *v;
	float wd, w1, b2, w2, step_size, sq, eps;
	float *vmax;
	enum k_profile profile;
	bool maximize;
	uint64_t tail_from;
	struct k_adam_f64 f64;
	struct k_undo *undo;
};

/* SGD as in PyTorch, on a CPU with AVX2 or AVX-512; w = 1-dampening, rounded once:
 *   g = maximize ? -g : g         (the array g is not changed)
 *   d = fma(p, wd, g)             (g when wd is 0)
 *   buf = first ? d : fma(d, w, mu*buf)   (only when mu is not 0; w is 1: two roundings)
 *   d = nesterov ? fma(buf, mu, d) : buf
 *   p = fma(d, -lr, p)
 * K_FUSED, elements from tail_from on: buf = fma(buf, mu, d*w). */
struct k_sgd {
	float *p;
	const float *g;
	float *buf; /* NULL when mu is 0 */
	float lr, wd, mu;
	bool nesterov;
	bool first;
	bool maximize;
	double dampening;
	enum k_profile profile; /* not K_REFERENCE_F64 */
	uint64_t tail_from;
	struct k_undo *undo;
};

enum k_step_kind { K_STEP_SGD, K_STEP_ADAMW, K_STEP_ADAM, _K_STEP_N };
struct k_step {
	enum k_step_kind kind;
	union {
		struct k_sgd sgd;
		struct k_adamw adamw;
		struct k_adam adam;
	};
};

/* A reduction to fp32 and the optimizer step on its result, in one: element i of the step has for
 * its gradient what element first + i of the reduction would write to its out, which is not
 * written. So out is only read, and only if the reduction accumulates; g of the step is not read.
 * The result is bitwise equal to that of both in sequence. out overlaps nothing the step writes. */
struct k_reduce_step {
	struct k_reduce reduce; /* out_dtype fp32 */
	uint64_t first;
	struct k_step step;
};

/* Partials of a p-norm over blocks of KERNEL_NORM_BLOCK elements from index 0:
 * partial[b] = sum of |x|^p of block b (p infinite: maximum of |x|, NaN if any is NaN).
 * Sums are fp64: eight lanes, lane j takes elements j, j+8, ... of the block in order,
 * lanes are added 0 to 7. Exact order, so bitwise repeatable. |x|^2 is x*x, |x|^1 is |x|;
 * other powers are the C library's pow on the host and CUDA's on a device, which may
 * differ in the last bits. */
struct k_norm {
	const float *x;
	double *partial; /* one per block of the whole range */
	double p;        /* above 0; INFINITY: the maximum */
};

/* x = min(max(x, lo), hi): a value that is neither below lo nor above hi stays as it is, also NaN.
 * With lo above hi it is hi. Neither is NaN. */
struct k_clamp {
	float *x;
	float lo, hi;
};

/* Unscaling of a gradient (PyTorch's grad scaler): found[0] = 1 if any element is infinite
 * or NaN before it is multiplied, else it is left alone; x = inv == 1 ? x : x*inv. Ranges
 * that are worked on at the same time may both write found. */
struct k_unscale {
	float *x;
	float inv;
	float *found;
};

/* Rows that are given by their index (sparse gradients of an embedding), added to a part of
 * a table: for entry e = 0, 1, ... with rows[e] in [first_row, row_limit)
 *   out[(rows[e]-first_row)*row_elements + c] += pre(values[e*row_elements + c])
 * in fp32. An index may occur several times; entries are added in their order. Element c of
 * the operation is column c of all rows: there are row_elements of them. */
struct k_add_rows {
	float *out; /* (row_limit-first_row) x row_elements */
	uint64_t row_elements;
	const int64_t *rows; /* n_rows of them; what is outside the range is left out */
	uint64_t n_rows;
	const void *values; /* n_rows x row_elements */
	enum dtype dtype;   /* of the values */
	struct k_factor pre;
	uint64_t first_row, row_limit; /* at most INT64_MAX */
};

/* x[i] = x[i]*factor */
struct k_scale {
	float *x;
	float factor;
	struct k_undo *undo;
};

/* found[0] = 1 if any element is infinite or NaN, else it is left alone. Ranges that are
 * worked on at the same time may both write it. */
struct k_found_inf {
	const void *x;
	float *found;
	enum dtype dtype;
};

enum fill_kind { FILL_CONSTANT = 1, FILL_UNIFORM = 2, FILL_NORMAL = 3 };

/* dst[i] from a counter-based generator (random.h): depends on (seed, stream,
 * first+i) only, so any cut gives the same values, on every processor. CONSTANT:
 * a; UNIFORM: a+(b-a)*u, u in [0,1) with 24 bits; NORMAL: a+b*z, z by Box-Muller.
 * In double, rounded to fp32 once (so UNIFORM may round up to b). */
struct k_fill {
	float *dst;
	uint64_t seed;
	uint64_t stream; /* which tensor */
	uint64_t first;  /* index of dst[0] inside the tensor */
	enum fill_kind kind;
	double a, b;
};

/* Strided rows: dst[i*dst_stride + j] = src[i*src_stride + j], converted as k_cast does, for j
 * below row_elements; element e of the operation has i = e / row_elements and j = e % row_elements.
 * Strides are in elements. The gaps between the rows are not touched. */
struct k_pack {
	void *dst;
	const void *src;
	uint64_t row_elements; /* not 0, unless there are no elements */
	uint64_t dst_stride, src_stride;
	enum dtype dst_dtype;
	enum dtype src_dtype;
};

/* A box of elements of one tensor, in a tensor that is made of such boxes: element (i, j, k) of n[0] x
 * n[1] x n[2] is src[i*src_stride[0] + j*src_stride[1] + k*src_stride[2]], converted as k_cast does, and
 * comes to dst[at + i*dst_stride[0] + j*dst_stride[1] + k]. Strides are in elements. Rows of k ascend in
 * dst with i and then j, and no two elements have the same place. */
struct k_assemble_box {
	const void *src;
	enum dtype src_dtype;
	uint64_t n[3]; /* none is 0 */
	uint64_t src_stride[3];
	uint64_t at, dst_stride[2];
};

/* The scales of a tensor of type e4m3. It is matrices of @rows x @columns, one behind the other, and each
 * is cut into tiles of @tile_rows x @tile_columns from its first element on; the last ones may be smaller.
 * Tiles are counted along a row of them, then down, then from matrix to matrix. No number is 0.
 *   amax[tile] = max |x|, as the bits of an fp32, which compare as the numbers do; a NaN is the largest
 *   scale[tile] = amax / 448 in fp32; 1 if that is 0
 *   element = e4m3(x / scale[tile]) (convert.h), the division in fp32
 * so that x is about element*scale. */
struct k_assemble_scales {
	uint32_t *amax;
	uint64_t rows, columns;
	uint64_t tile_rows, tile_columns;
};

struct k_assemble_tensor {
	void *dst;
	enum dtype dst_dtype;
	bool gaps;                          /* some elements are in no box: they become 0 */
	const struct k_assemble_box *boxes; /* no two overlap in dst */
	unsigned n_boxes;
	/* e4m3: by what its elements are divided. fp32: it has no boxes, and is these scales. Else NULL. */
	const struct k_assemble_scales *scales;
};

/* Most bytes of one block; of e4m3 the bytes of its elements in fp32. */
#define KERNEL_ASSEMBLE_BYTES 131072u

/* Elements [first, first + n) of a tensor, at most KERNEL_ASSEMBLE_BYTES. */
struct k_assemble_block {
	uint32_t tensor, n;
	uint64_t first;
};

/* Most elements of a block of which a delta is made: positions have 16 bits. */
#define KERNEL_DELTA_ELEMENTS 65536u
/* In k_delta_block.at: the block's changes have no room. */
#define KERNEL_DELTA_NONE UINT64_MAX

/* The changes of a block: bytes [at, at + k_delta_bytes) of the delta. If it is dense, the values of all
 * its elements. Otherwise the positions of those that differ from the base, ascending, counted from the
 * block's first element, uint16_t; then their values. Each array is padded with zeros to 8 bytes. A value
 * has changed if its bits have. */
struct k_delta_block {
	uint64_t at;
	uint32_t changed; /* elements */
	uint32_t crc;     /* CRC-32C of these bytes */
	uint32_t dense;   /* bool */
	uint32_t zero;
};

/* What is made beside the tensors: how they differ from a base of the same tensors. */
struct k_delta {
	const char *base; /* where the tensors of the base are ... */
	const char *made; /* ... if those that are made are here */
	char *out;        /* of @room bytes, at a multiple of 8 */
	uint64_t room;
	uint64_t *used;               /* of it: grows; blocks come in any order */
	struct k_delta_block *blocks; /* by block */
};

static inline uint64_t k_delta_padded(uint64_t bytes)
{
	return (bytes + 7) / 8 * 8;
}

static inline bool k_delta_is_dense(uint64_t changed, uint64_t n, size_t size)
{
	return changed * (sizeof(uint16_t) + size) >= n * size;
}

/* @n: elements of the block, of @size bytes. */
static inline uint64_t k_delta_bytes(uint64_t changed, uint64_t n, size_t size)
{
	return k_delta_is_dense(changed, n, size) ? k_delta_padded(n * size)
						  : k_delta_padded(changed * sizeof(uint16_t)) +
							    k_delta_padded(changed * size);
}

/* What is done with the blocks. Tensors with scales need all three, one after the other. */
enum k_assemble_pass {
	K_ASSEMBLE_MAKE = 0,
	K_ASSEMBLE_CLEAR,   /* of scales: their part of amax becomes 0 */
	K_ASSEMBLE_MEASURE, /* of e4m3: amax of their tiles is raised; blocks may share a tile */
};

/* Tensors made of boxes of others, block by block: element e of the operation is block e. On a device the
 * tables are in its memory, with addresses of it. */
struct k_assemble {
	const struct k_assemble_tensor *tensors;
	const struct k_assemble_block *blocks;
	uint32_t *crc; /* NULL: none; else crc[e] becomes the CRC-32C of the block's bytes */
	uint64_t
		moves; /* bytes that a block reads and writes, on average: for those who share threads */
	const struct k_delta *delta; /* NULL: none */
	enum k_assemble_pass pass;   /* the others than MAKE use neither crc nor delta */
	/* Added to dst of the tensors: where what is made begins, if dst says how far behind that. */
	uintptr_t base;
};

static inline char *k_assemble_dst(const struct k_assemble *a, const struct k_assemble_tensor *t)
{
	return (char *)(a->base + (uintptr_t)t->dst);
}

/* dst[0..n) = src[0..n), bytes. */
struct k_copy {
	void *dst;
	const void *src;
};

/* Work on elements [begin, end) of the whole operation (k_copy: bytes). Norms:
 * begin is a multiple of KERNEL_NORM_BLOCK, partial[begin/BLOCK] is written first. k_assemble: blocks. */
struct kernels {
	const char *name; /* ref, portable, avx2, avx512 */
	void (*cast)(const struct k_cast *a, size_t begin, size_t end);
	void (*reduce)(const struct k_reduce *a, size_t begin, size_t end);
	void (*all_reduce)(const struct k_all_reduce *a, size_t begin, size_t end);
	void (*adamw)(const struct k_adamw *a, size_t begin, size_t end);
	void (*adam)(const struct k_adam *a, size_t begin, size_t end);
	void (*sgd)(const struct k_sgd *a, size_t begin, size_t end);
	void (*norm)(const struct k_norm *a, size_t begin, size_t end);
	void (*scale)(const struct k_scale *a, size_t begin, size_t end);
	void (*found_inf)(const struct k_found_inf *a, size_t begin, size_t end);
	void (*fill)(const struct k_fill *a, size_t begin, size_t end);
	void (*pack)(const struct k_pack *a, size_t begin, size_t end);
	void (*clamp)(const struct k_clamp *a, size_t begin, size_t end);
	void (*unscale)(const struct k_unscale *a, size_t begin, size_t end);
	void (*add_rows)(const struct k_add_rows *a, size_t begin, size_t end);
	void (*copy)(const struct k_copy *a, size_t begin, size_t end);
	void (*reduce_step)(const struct k_reduce_step *a, size_t begin, size_t end);
	void (*assemble)(const struct k_assemble *a, size_t begin, size_t end);
};

/* The definition. Static. */
const struct kernels *kernels_ref(void);

/* The fastest of kernels/host that this processor runs; SHARDD_KERNELS in the
 * environment (ref, portable, avx2, avx512) overrides it, for tests, if it names
 * one that runs here. Chosen at the first call. Any thread. Static. */
const struct kernels *kernels_host(void);

/* The named variant, or NULL if unknown or not supported here. Static. */
const struct kernels *kernels_named(const char *name);

#endif
