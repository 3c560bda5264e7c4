/*
 * Widening and narrowing. bf16 is a few integer operations that the compiler
 * vectorises; fp16 has instructions where there is F16C, elsewhere it is written
 * without branches, so that it is vectorised too.
 */
#include "host/host.h"

#include "convert.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

static void widen_bf16(float *restrict dst, const uint16_t *restrict src, size_t n)
{
	for (size_t i = 0; i < n; i++)
		dst[i] = bf16_to_f32(src[i]);
}

static void narrow_bf16(uint16_t *restrict dst, const float *restrict src, size_t n)
{
	for (size_t i = 0; i < n; i++)
		dst[i] = bf16_from_f32(src[i]);
}

#if defined(__AVX512F__)

static size_t widen_fp16_wide(float *dst, const uint16_t *src, size_t n)
{
	size_t i = 0;

	for (; i + 16 <= n; i += 16) {
		__m256i h = _mm256_loadu_si256((const void *)(src + i));

		_mm512_storeu_ps(dst + i, _mm512_cvtph_ps(h));
	}
	return i;
}

static size_t narrow_fp16_wide(uint16_t *dst, const float *src, size_t n)
{
	size_t i = 0;

	for (; i + 16 <= n; i += 16) {
		__m512 f = _mm512_loadu_ps(src + i);

		_mm256_storeu_si256((void *)(dst + i),
				    _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
	}
	return i;
}

#elif defined(__F16C__)

static size_t widen_fp16_wide(float *dst, const uint16_t *src, size_t n)
{
	size_t i = 0;

	for (; i + 8 <= n; i += 8) {
		__m128i h = _mm_loadu_si128((const void *)(src + i));

		_mm256_storeu_ps(dst + i, _mm256_cvtph_ps(h));
	}
	return i;
}

static size_t narrow_fp16_wide(uint16_t *dst, const float *src, size_t n)
{
	size_t i = 0;

	for (; i + 8 <= n; i += 8) {
		__m256 f = _mm256_loadu_ps(src + i);

		_mm_storeu_si128((void *)(dst + i), _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
	}
	return i;
}

#else

/* All three cases are computed, one is selected. */
static uint32_t widen_fp16_bits(uint32_t h)
{
	uint32_t abs = h & 0x7fff;
	uint32_t normal = (abs << 13) + FP16_REBIAS;
	uint32_t small = f32_bits((float)(int32_t)abs * 0x1p-24f);
	uint32_t quiet = abs > 0x7c00 ? FP32_QUIET : 0;
	uint32_t r = abs < 0x400 ? small : normal;

	r = abs >= 0x7c00 ? (normal + FP16_REBIAS) | quiet : r;
	return r | (h & 0x8000) << 16;
}

/* Below 2^-14: one unit in the last place of 0.5 + x is 2^-24, the unit of a
 * subnormal fp16, so the addition rounds. */
static uint32_t narrow_fp16_bits(uint32_t u)
{
	uint32_t abs = u & FP32_ABS;
	uint32_t small = f32_bits(f32_from_bits(abs) + 0.5f) - f32_bits(0.5f);
	uint32_t normal = (abs - FP16_REBIAS + 0xfff + ((abs >> 13) & 1)) >> 13;
	uint32_t nan = 0x7e00 | ((abs >> 13) & 0x3ff);
	uint32_t r = abs < FP16_MIN_F32 ? small : normal;

	r = abs >= FP16_OVER_F32 ? 0x7c00 : r;
	r = abs > FP32_INF ? nan : r;
	return r | ((u >> 16) & 0x8000);
}

static size_t widen_fp16_wide(float *restrict dst, const uint16_t *restrict src, size_t n)
{
	for (size_t i = 0; i < n; i++)
		dst[i] = f32_from_bits(widen_fp16_bits(src[i]));
	return n;
}

static size_t narrow_fp16_wide(uint16_t *restrict dst, const float *restrict src, size_t n)
{
	for (size_t i = 0; i < n; i++)
		dst[i] = (uint16_t)narrow_fp16_bits(f32_bits(src[i]));
	return n;
}

#endif

static void widen_fp16(float *dst, const uint16_t *src, size_t n)
{
	for (size_t i = widen_fp16_wide(dst, src, n); i < n; i++)
		dst[i] = fp16_to_f32(src[i]);
}

static void narrow_fp16(uint16_t *dst, const float *src, size_t n)
{
	for (size_t i = narrow_fp16_wide(dst, src, n); i < n; i++)
		dst[i] = fp16_from_f32(src[i]);
}

void HOST(widen)(float *dst, const void *src, enum dtype t, size_t at, size_t n)
{
	const uint16_t *from = (const uint16_t *)src + at;

	if (t == DTYPE_BF16)
		widen_bf16(dst, from, n);
	else
		widen_fp16(dst, from, n);
}

void HOST(narrow)(void *dst, enum dtype t, size_t at, const float *src, size_t n)
{
	uint16_t *to = (uint16_t *)dst + at;

	if (t == DTYPE_BF16)
		narrow_bf16(to, src, n);
	else
		narrow_fp16(to, src, n);
}

/* bf16_from_f32 and back, in one word. */
static void round_bf16(float *x, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		uint32_t u = f32_bits(x[i]);
		uint32_t rounded = u + 0x7fff + ((u >> 16) & 1);

		u = (u & FP32_ABS) > FP32_INF ? u | FP32_QUIET : rounded;
		x[i] = f32_from_bits(u & 0xffff0000u);
	}
}

static void round_fp16(float *x, size_t n)
{
	uint16_t h[HOST_PIECE];

	for (size_t at = 0, piece; at < n; at += piece) {
		piece = host_piece(at, n);
		narrow_fp16(h, x + at, piece);
		widen_fp16(x + at, h, piece);
	}
}

void HOST(round)(float *x, enum dtype t, size_t n)
{
	if (t == DTYPE_BF16)
		round_bf16(x, n);
	else if (t == DTYPE_FP16)
		round_fp16(x, n);
}
