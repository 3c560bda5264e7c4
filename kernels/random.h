/*
 * The numbers behind fill: Philox4x32-10 (a counter-based generator: Salmon et
 * al., 2011) and Box-Muller in double.
 *
 * Element e of a tensor uses word e%4 of the block with counter (e/4, stream)
 * and key seed. Logarithm, sine and cosine are written out, in plain double
 * operations in a fixed order: those of the C library differ in the last bit
 * between processors and versions, and a fill has to give the same parameters
 * on every node. nvcc compiles this file, too, with the same results in every bit (without
 * contraction of a*b + c, -fmad=false).
 */
#ifndef SHARDD_KERNELS_RANDOM_H
#define SHARDD_KERNELS_RANDOM_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#ifdef __CUDACC__
#define RANDOM_FN static __device__ __forceinline__
#else
#define RANDOM_FN static inline
#endif

#define RANDOM_LN2        0x1.62e42fefa39efp-1
#define RANDOM_SQRT_HALF  0x3fe6a09e667f3bcdu   /* bits of sqrt(1/2) */
#define RANDOM_TURN_SCALE 0x1.921fb54442d18p-30 /* 2*pi / 2^32 */

/* Four words: elements 4*group to 4*group+3. */
RANDOM_FN void random_words(uint64_t seed, uint64_t stream, uint64_t group, uint32_t w[4])
{
	uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
	uint32_t c0 = (uint32_t)group, c1 = (uint32_t)(group >> 32);
	uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);

	for (int round = 0; round < 10; round++) {
		uint64_t p0 = (uint64_t)c0 * 0xd2511f53u;
		uint64_t p1 = (uint64_t)c2 * 0xcd9e8d57u;

		c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
		c1 = (uint32_t)p1;
		c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
		c3 = (uint32_t)p0;
		k0 += 0x9e3779b9u;
		k1 += 0xbb67ae85u;
	}
	w[0] = c0;
	w[1] = c1;
	w[2] = c2;
	w[3] = c3;
}

/* [0, 1) with 24 bits. */
RANDOM_FN double random_unit(uint32_t w)
{
	return (double)(w >> 8) * 0x1p-24;
}

/* log((w + 0.5) * 2^-32), always below 0; relative error about 1e-15. */
RANDOM_FN double random_log(uint32_t w)
{
	double x = (double)w + 0.5, s, z, sum = 1.0 / 23;
	uint64_t bits, exp;

	/* x = m * 2^n with m between sqrt(1/2) and sqrt(2); exp is n in place */
	memcpy(&bits, &x, sizeof(bits));
	exp = (bits - RANDOM_SQRT_HALF) & 0xfff0000000000000u;
	bits -= exp;
	memcpy(&x, &bits, sizeof(x));

	/* log m = 2 * (s + s^3/3 + s^5/5 + ...), s = (m-1)/(m+1) */
	s = (x - 1) / (x + 1);
	z = s * s;
	for (int k = 21; k >= 1; k -= 2)
		sum = sum * z + 1.0 / k;
	return (double)((int32_t)(exp >> 32) / (1 << 20) - 32) * RANDOM_LN2 + 2 * s * sum;
}

/* Cosine and sine of w/2^32 of a full turn. */
RANDOM_FN void random_turn(uint32_t w, double *ret_cos, double *ret_sin)
{
	uint32_t quarter = (w + 0x20000000u) >> 30;
	double x = (double)(int32_t)(w - (quarter << 30)) * RANDOM_TURN_SCALE;
	double z = x * x, c = 1, s = 1;

	/* Taylor, |x| <= pi/4: what is left out is below 1e-16 */
	for (int k = 16; k >= 2; k -= 2) {
		c = 1 - c * z / (double)(k * (k - 1));
		s = 1 - s * z / (double)(k * (k + 1));
	}
	s *= x;
	*ret_cos = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
	*ret_sin = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
}

/* Two independent standard normals from two words, by Box-Muller. */
RANDOM_FN void random_normals(const uint32_t w[2], double ret_z[2])
{
	double radius = sqrt(-2 * random_log(w[0]));

	random_turn(w[1], &ret_z[0], &ret_z[1]);
	ret_z[0] *= radius;
	ret_z[1] *= radius;
}

#endif
