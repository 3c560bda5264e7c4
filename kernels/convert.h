/*
 * bf16, fp16 and e4m3 to fp32 and back, by integer arithmetic: the definition.
 *
 * Widening is exact. Narrowing rounds to nearest, ties to even; values that are too large become
 * infinity; a NaN stays a NaN, is made quiet, and keeps the top bits of its payload (as the
 * conversion instructions of x86 do).
 *
 * e4m3 is the type of 8 bits without infinities that "FP8 Formats for Deep Learning" (Micikevicius et al., 2022)
 * and PyTorch's float8_e4m3fn have: 4 bits of exponent with bias 7, 3 of mantissa, 0x7f is NaN, 448 the
 * largest number. What is larger becomes 448, infinity too.
 */
#ifndef SHARDD_KERNELS_CONVERT_H
#define SHARDD_KERNELS_CONVERT_H

#include <stdint.h>
#include <string.h>

#define FP32_ABS      0x7fffffffu
#define FP32_INF      0x7f800000u
#define FP32_QUIET    0x00400000u
#define FP16_REBIAS   0x38000000u /* (127 - 15) << 23 */
#define FP16_MIN_F32  0x38800000u /* 2^-14, the smallest normal fp16, as fp32 */
#define FP16_OVER_F32 0x477ff000u /* 65520: rounds to infinity from here on */
#define E4M3_MAX      448.0f
#define E4M3_REBIAS   0x3c000000u /* (127 - 7) << 23 */
#define E4M3_MIN_F32  0x3c800000u /* 2^-6, the smallest normal e4m3, as fp32 */
#define E4M3_MAX_F32  0x43e00000u /* 448 */
#define E4M3_NAN      0x7fu

static inline uint32_t f32_bits(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof(u));
	return u;
}

static inline float f32_from_bits(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof(f));
	return f;
}

static inline float bf16_to_f32(uint16_t h)
{
	return f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t bf16_from_f32(float f)
{
	uint32_t u = f32_bits(f);
	uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
	uint32_t quiet = (u | FP32_QUIET) >> 16;

	return (uint16_t)((u & FP32_ABS) > FP32_INF ? quiet : rounded);
}

/* A subnormal fp16: its bits, at most 0x3ff, count units of 2^-24. */
static inline float fp16_subnormal_to_f32(uint32_t mant)
{
	uint32_t exp = 113; /* of 2^-14, one more than mant's leading place */

	if (!mant)
		return 0;
	while (!(mant & 0x400)) {
		mant <<= 1;
		exp--;
	}
	return f32_from_bits(exp << 23 | (mant & 0x3ff) << 13);
}

static inline float fp16_to_f32(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16;
	uint32_t abs = h & 0x7fff;

	if (abs > 0x7c00)
		return f32_from_bits(sign | FP32_INF | FP32_QUIET | (abs & 0x3ff) << 13);
	if (abs == 0x7c00)
		return f32_from_bits(sign | FP32_INF);
	if (abs < 0x400)
		return f32_from_bits(sign | f32_bits(fp16_subnormal_to_f32(abs)));
	return f32_from_bits(sign | ((abs << 13) + FP16_REBIAS));
}

/* Bits of the fp16 nearest to an fp32 below 2^-14, given by its bits. */
static inline uint32_t fp16_subnormal_from_f32(uint32_t abs)
{
	uint32_t shift = 126 - (abs >> 23); /* of the mantissa, to units of 2^-24 */
	uint32_t mant = (abs & 0x7fffff) | 0x800000;
	uint32_t half, rest, units;

	if (shift > 24)
		return 0; /* below 2^-25, fp32 subnormals too */
	half = 1u << (shift - 1);
	rest = mant & ((half << 1) - 1);
	units = mant >> shift;
	return units + (rest > half || (rest == half && (units & 1)));
}

static inline uint16_t fp16_from_f32(float f)
{
	uint32_t u = f32_bits(f);
	uint32_t sign = (u >> 16) & 0x8000;
	uint32_t abs = u & FP32_ABS;

	if (abs > FP32_INF)
		return (uint16_t)(sign | 0x7e00 | ((abs >> 13) & 0x3ff));
	if (abs >= FP16_OVER_F32)
		return (uint16_t)(sign | 0x7c00);
	if (abs < FP16_MIN_F32)
		return (uint16_t)(sign | fp16_subnormal_from_f32(abs));
	abs -= FP16_REBIAS;
	return (uint16_t)(sign | (abs + 0xfff + ((abs >> 13) & 1)) >> 13);
}

static inline float e4m3_to_f32(uint8_t q)
{
	uint32_t sign = (uint32_t)(q & 0x80) << 24, abs = q & 0x7f;
	float small = (float)abs * 0x1p-9f;

	if (abs == E4M3_NAN)
		return f32_from_bits(sign | FP32_INF | FP32_QUIET);
	return f32_from_bits(sign | (abs < 8 ? f32_bits(small) : (abs << 20) + E4M3_REBIAS));
}

/* Of the bits of a number that is not negative. Without branches, so that loops are vectorised. Below 2^-6: one
 * unit in the last place of 2^14 + x is 2^-9, the unit of a subnormal e4m3, so the addition rounds. */
static inline uint32_t e4m3_from_f32_abs(uint32_t abs)
{
	uint32_t most = abs < E4M3_MAX_F32 ? abs : E4M3_MAX_F32;
	uint32_t small = f32_bits(f32_from_bits(most) + 0x1p14f) - f32_bits(0x1p14f);
	uint32_t normal = (most - E4M3_REBIAS + 0x7ffff + ((most >> 20) & 1)) >> 20;
	uint32_t q = most < E4M3_MIN_F32 ? small : normal;

	return abs > FP32_INF ? E4M3_NAN : q;
}

static inline uint8_t e4m3_from_f32(float f)
{
	uint32_t u = f32_bits(f);

	return (uint8_t)(e4m3_from_f32_abs(u & FP32_ABS) | ((u >> 24) & 0x80));
}

/* x / scale; the sign is x's also where the quotient is NaN, whose sign processors choose. */
static inline uint8_t e4m3_divided(float x, float scale)
{
	uint32_t u = f32_bits(x);
	float y = f32_from_bits(u & FP32_ABS) / scale;

	return (uint8_t)(e4m3_from_f32_abs(f32_bits(y)) | ((u >> 24) & 0x80));
}

/* Of a tile whose largest |x| has the bits @amax. */
static inline float e4m3_scale(uint32_t amax)
{
	float scale = f32_from_bits(amax) / E4M3_MAX;

	if (amax > FP32_INF)
		return f32_from_bits(FP32_INF | FP32_QUIET);
	return scale == 0 ? 1 : scale;
}

#endif
