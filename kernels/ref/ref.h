/* The plain scalar implementations, one file each; kernels.h defines what they do. */
#ifndef SHARDD_KERNELS_REF_H
#define SHARDD_KERNELS_REF_H

#include "adam.h"
#include "convert.h"
#include "kernels.h"

void ref_cast(const struct k_cast *a, size_t begin, size_t end);
void ref_reduce(const struct k_reduce *a, size_t begin, size_t end);
void ref_all_reduce(const struct k_all_reduce *a, size_t begin, size_t end);
void ref_adamw(const struct k_adamw *a, size_t begin, size_t end);
void ref_adam(const struct k_adam *a, size_t begin, size_t end);
void ref_sgd(const struct k_sgd *a, size_t begin, size_t end);
void ref_norm(const struct k_norm *a, size_t begin, size_t end);
void ref_scale(const struct k_scale *a, size_t begin, size_t end);
void ref_fill(const struct k_fill *a, size_t begin, size_t end);
void ref_found_inf(const struct k_found_inf *a, size_t begin, size_t end);
void ref_pack(const struct k_pack *a, size_t begin, size_t end);
void ref_copy(const struct k_copy *a, size_t begin, size_t end);
void ref_clamp(const struct k_clamp *a, size_t begin, size_t end);
void ref_unscale(const struct k_unscale *a, size_t begin, size_t end);
void ref_add_rows(const struct k_add_rows *a, size_t begin, size_t end);
void ref_reduce_step(const struct k_reduce_step *a, size_t begin, size_t end);
void ref_assemble(const struct k_assemble *a, size_t begin, size_t end);

/* The value of element @i of out, before it is narrowed. */
float ref_reduce_element(const struct k_reduce *a, size_t i);

/* Adam and AdamW. */
void ref_adam_step(const struct adam_step *s, size_t begin, size_t end);

/* Element @i of @src, widened. */
static inline float ref_load(const void *src, enum dtype t, size_t i)
{
	if (t == DTYPE_FP32)
		return ((const float *)src)[i];
	if (t == DTYPE_BF16)
		return bf16_to_f32(((const uint16_t *)src)[i]);
	return fp16_to_f32(((const uint16_t *)src)[i]);
}

/* Element @i of @dst = @f, narrowed. */
static inline void ref_store(void *dst, enum dtype t, size_t i, float f)
{
	if (t == DTYPE_FP32)
		((float *)dst)[i] = f;
	else if (t == DTYPE_BF16)
		((uint16_t *)dst)[i] = bf16_from_f32(f);
	else
		((uint16_t *)dst)[i] = fp16_from_f32(f);
}

/* To a type and back. */
static inline float ref_round(enum dtype t, float f)
{
	if (t == DTYPE_BF16)
		return bf16_to_f32(bf16_from_f32(f));
	if (t == DTYPE_FP16)
		return fp16_to_f32(fp16_from_f32(f));
	return f;
}

static inline float ref_factor(const struct k_factor *f, float x)
{
	if (f->how == K_FACTOR_NONE)
		return x;
	x = ref_round(f->dtype, x);
	return ref_round(f->dtype, f->how == K_FACTOR_DIV ? x / f->value : x * f->value);
}

#endif
