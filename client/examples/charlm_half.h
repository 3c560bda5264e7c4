/*
 * bf16 and fp16 as the bits they are, widened to fp32 exactly and narrowed to
 * nearest even. What a trainer needs whose units have a 16-bit compute dtype.
 * Any thread.
 */
#ifndef CHARLM_HALF_H
#define CHARLM_HALF_H

#include <shardd/shardd.h>

#include <stddef.h>

/* dst[i] = src[i], @src of @dtype. */
void half_widen(float *dst, const void *src, enum shardd_dtype dtype, size_t n);

/* dst[i] = src[i], @dst of @dtype. */
void half_narrow(void *dst, const float *src, enum shardd_dtype dtype, size_t n);

#endif
