/*
 * The vectorised implementations. The files of this folder are compiled once per
 * variant, with KERNELS_VARIANT as its name and the compiler flags of its
 * processors; HOST(cast) is host_cast_<variant>.
 *
 * Most loops are plain and left to the compiler. Work with several passes goes
 * in pieces of HOST_PIECE elements through buffers on the stack, which stay in
 * the first-level cache, so that memory is read and written once.
 */
#ifndef SHARDD_KERNELS_HOST_H
#define SHARDD_KERNELS_HOST_H

#include "adam.h"
#include "kernels.h"

#define HOST_JOIN_(name, variant) host_##name##_##variant
#define HOST_JOIN(name, variant)  HOST_JOIN_(name, variant)
#define HOST(name)                HOST_JOIN(name, KERNELS_VARIANT)

#define HOST_PIECE 1024

/* Elements of the next piece of a range. */
static inline size_t host_piece(size_t begin, size_t end)
{
	return end - begin < HOST_PIECE ? end - begin : HOST_PIECE;
}

/* The table of this variant. */
extern const struct kernels HOST(table);

void HOST(cast)(const struct k_cast *a, size_t begin, size_t end);
void HOST(reduce)(const struct k_reduce *a, size_t begin, size_t end);
void HOST(all_reduce)(const struct k_all_reduce *a, size_t begin, size_t end);
void HOST(adamw)(const struct k_adamw *a, size_t begin, size_t end);
void HOST(adam)(const struct k_adam *a, size_t begin, size_t end);
void HOST(sgd)(const struct k_sgd *a, size_t begin, size_t end);
void HOST(norm)(const struct k_norm *a, size_t begin, size_t end);
void HOST(scale)(const struct k_scale *a, size_t begin, size_t end);
void HOST(fill)(const struct k_fill *a, size_t begin, size_t end);
void HOST(found_inf)(const struct k_found_inf *a, size_t begin, size_t end);
void HOST(pack)(const struct k_pack *a, size_t begin, size_t end);
void HOST(copy)(const struct k_copy *a, size_t begin, size_t end);
void HOST(clamp)(const struct k_clamp *a, size_t begin, size_t end);
void HOST(unscale)(const struct k_unscale *a, size_t begin, size_t end);
void HOST(add_rows)(const struct k_add_rows *a, size_t begin, size_t end);
void HOST(reduce_step)(const struct k_reduce_step *a, size_t begin, size_t end);
void HOST(assemble)(const struct k_assemble *a, size_t begin, size_t end);

/* Elements of a block that differ from the base. */
struct delta_changes {
	uint32_t n;
	uint16_t positions[KERNEL_DELTA_ELEMENTS + 2]; /* [0..n) */
};

/* Append those of elements [first, first + n), of @size bytes: 1, 2 or 4. */
void HOST(delta_compare)(struct delta_changes *c, const void *piece, const void *base,
			 uint32_t first, uint32_t n, size_t size);
/* Of block @e, which has @n elements. */
void HOST(delta_write)(const struct k_delta *d, size_t e, const struct delta_changes *c,
		       const void *block, uint32_t n, size_t size);

/* The block of @t, of type e4m3, whose elements in fp32 are @x. */
void HOST(e4m3_measure)(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
			const float *x);
/* The same; @to may be @x. */
void HOST(e4m3_make)(const struct k_assemble_tensor *t, const struct k_assemble_block *b,
		     const float *x, uint8_t *to);

/* Adam and AdamW. */
void HOST(adam_step)(const struct adam_step *s, size_t begin, size_t end);

/* dst[0..n) = src[at..at+n), widened to fp32; @t is bf16 or fp16. */
void HOST(widen)(float *dst, const void *src, enum dtype t, size_t at, size_t n);

/* dst[at..at+n) = src[0..n), narrowed; @t is bf16 or fp16. */
void HOST(narrow)(void *dst, enum dtype t, size_t at, const float *src, size_t n);

/* x[0..n), each rounded to @t. */
void HOST(round)(float *x, enum dtype t, size_t n);

/* Elements [at, at+n) of @src in fp32: in place if they are, else in @buf. */
static inline const float *host_load(float *buf, const void *src, enum dtype t, size_t at, size_t n)
{
	if (t == DTYPE_FP32)
		return (const float *)src + at;
	HOST(widen)(buf, src, t, at, n);
	return buf;
}

#endif
