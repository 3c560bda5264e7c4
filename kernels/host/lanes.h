/*
 * Vectors as wide as the variant's processors have them, for loops that read several arrays
 * of any type at once: all arrays are then read sequentially, which the processor prefetches.
 */
#ifndef SHARDD_KERNELS_HOST_LANES_H
#define SHARDD_KERNELS_HOST_LANES_H

#include "host/host.h"

#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t lanes_u32 __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t lanes_u16 __attribute__((vector_size(LANES * sizeof(uint16_t))));

/* Whether lanes_load knows the type. */
static inline bool lanes_know(enum dtype t)
{
#ifdef __F16C__
	(void)t;
	return true;
#else
	return t != DTYPE_FP16;
#endif
}

static inline lanes lanes_all(float x)
{
	return x - (lanes){ 0 };
}

static inline lanes lanes_fp16(const uint16_t *src)
{
#if defined(__AVX512F__)
	return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)src));
#elif defined(__F16C__)
	return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const void *)src));
#else
	(void)src;
	return (lanes){ 0 };
#endif
}

/* Elements [i, i + LANES) of @src, widened. */
static inline __attribute__((always_inline)) lanes lanes_load(const void *src, enum dtype t,
							      size_t i)
{
	lanes_u16 h;
	lanes x;

	if (t == DTYPE_FP32) {
		memcpy(&x, (const float *)src + i, sizeof(x));
		return x;
	}
	if (t == DTYPE_FP16)
		return lanes_fp16((const uint16_t *)src + i);
	memcpy(&h, (const uint16_t *)src + i, sizeof(h));
	return (lanes)(__builtin_convertvector(h, lanes_u32) << 16);
}

/* Bypasses the caches; the address must be a multiple of LANES * sizeof(float). Call lanes_fence
 * after the last store, before another thread may read. */
static inline void lanes_stream(float *to, lanes x)
{
#if defined(__AVX512F__)
	_mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
	_mm256_stream_ps(to, (__m256)x);
#else
	memcpy(to, &x, sizeof(x));
#endif
}

/* @n bytes, whole vectors, to such an address. */
static inline void lanes_stream_all(void *to, const void *from, size_t n)
{
	for (size_t i = 0; i < n; i += sizeof(lanes)) {
		lanes x;

		memcpy(&x, (const char *)from + i, sizeof(x));
		lanes_stream((float *)((char *)to + i), x);
	}
}

static inline void lanes_fence(void)
{
#if defined(__AVX2__)
	_mm_sfence();
#endif
}

static inline void lanes_store(float *to, lanes x)
{
	memcpy(to, &x, sizeof(x));
}

#endif
