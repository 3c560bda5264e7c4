/*
 * 16-bit floating point: see charlm_half.h. Written with shifts, since not every
 * compiler has the types.
 */
#include "charlm_half.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static uint32_t bits_of(float x)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return bits;
}

static float float_of(uint32_t bits)
{
	float x;

	memcpy(&x, &bits, sizeof(x));
	return x;
}

static uint16_t narrow_bf16(float x)
{
	uint32_t bits = bits_of(x);

	if (isnan(x))
		return (uint16_t)((bits >> 16) | 0x40);
	return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float widen_fp16(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16;
	uint32_t exponent = (h >> 10) & 31, fraction = h & 0x3ff;

	if (exponent == 0) /* zero or subnormal: fraction times 2^-24 */
		return float_of(sign | bits_of((float)fraction * 0x1p-24f));
	if (exponent == 31)
		return float_of(sign | 0x7f800000 | fraction << 13);
	return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

static uint16_t narrow_fp16(float x)
{
	uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
	uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);

	if (magnitude > 0x7f800000)
		return sign | 0x7e00;
	if (magnitude >= 0x477ff000) /* rounds to more than 65504 */
		return sign | 0x7c00;
	if (magnitude < 0x38800000) /* below 2^-14: the sum's last bit weighs 2^-24 */
		return sign | (uint16_t)(bits_of(float_of(magnitude) + 0.5f) - 0x3f000000);
	magnitude += 0xfff + ((magnitude >> 13) & 1);
	return sign | (uint16_t)((magnitude >> 13) - (112 << 10));
}

void half_widen(float *dst, const void *src, enum shardd_dtype dtype, size_t n)
{
	const uint16_t *from = src;

	for (size_t i = 0; i < n; i++)
		dst[i] = dtype == SHARDD_BF16 ? float_of((uint32_t)from[i] << 16)
					      : widen_fp16(from[i]);
}

void half_narrow(void *dst, const float *src, enum shardd_dtype dtype, size_t n)
{
	uint16_t *to = dst;

	for (size_t i = 0; i < n; i++)
		to[i] = dtype == SHARDD_BF16 ? narrow_bf16(src[i]) : narrow_fp16(src[i]);
}
