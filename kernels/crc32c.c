#include "crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define POLYNOMIAL 0x82f63b78u /* reflected */

/* [k][b]: the checksum of byte b, followed by k zero bytes. */
static uint32_t crc32c_table[8][256];
static pthread_once_t crc32c_made = PTHREAD_ONCE_INIT;

static void crc32c_make(void)
{
	for (uint32_t b = 0; b < 256; b++) {
		uint32_t crc = b;

		for (int i = 0; i < 8; i++)
			crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
		crc32c_table[0][b] = crc;
	}
	for (uint32_t b = 0; b < 256; b++)
		for (int k = 1; k < 8; k++)
			crc32c_table[k][b] = crc32c_table[k - 1][b] >> 8 ^
					     crc32c_table[0][crc32c_table[k - 1][b] & 0xff];
}

static uint64_t crc32c_load(const unsigned char *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof(v));
	return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? v : __builtin_bswap64(v);
}

uint32_t crc32c_add_plain(uint32_t crc, const void *data, size_t bytes)
{
	const unsigned char *p = data;
	uint32_t c = ~crc;

	pthread_once(&crc32c_made, crc32c_make);
	for (; bytes >= 8; bytes -= 8, p += 8) {
		uint64_t v = crc32c_load(p) ^ c;

		c = 0;
		for (int i = 0; i < 8; i++)
			c ^= crc32c_table[7 - i][v >> 8 * i & 0xff];
	}
	for (; bytes; bytes--, p++)
		c = c >> 8 ^ crc32c_table[0][(c ^ *p) & 0xff];
	return ~c;
}

#ifdef __x86_64__
/* The instruction takes three cycles, and one may begin each cycle: three lanes go side by side. */
#define CRC32C_LANE 4096u /* bytes */

/* [k][b]: byte k of a checksum is b, and CRC32C_LANE zero bytes follow. */
static uint32_t crc32c_shift[4][256];
static pthread_once_t crc32c_shift_made = PTHREAD_ONCE_INIT;

__attribute__((target("sse4.2"))) static void crc32c_shift_make(void)
{
	for (unsigned bit = 0; bit < 32; bit++) {
		uint64_t c = UINT32_C(1) << bit;

		for (unsigned i = 0; i < CRC32C_LANE; i += 8)
			c = __builtin_ia32_crc32di(c, 0);
		crc32c_shift[bit / 8][1u << bit % 8] = (uint32_t)c;
	}
	for (unsigned k = 0; k < 4; k++)
		for (unsigned b = 1; b < 256; b++)
			crc32c_shift[k][b] = crc32c_shift[k][b & (b - 1)] ^ crc32c_shift[k][b & -b];
}

static uint32_t crc32c_shift_lane(uint32_t c)
{
	return crc32c_shift[0][c & 0xff] ^ crc32c_shift[1][c >> 8 & 0xff] ^
	       crc32c_shift[2][c >> 16 & 0xff] ^ crc32c_shift[3][c >> 24];
}

/* Of three lanes at @p, behind @c. */
__attribute__((target("sse4.2"))) static uint32_t crc32c_add_lanes(uint32_t c,
								   const unsigned char *p)
{
	uint64_t x = c, y = 0, z = 0;

	for (size_t i = 0; i < CRC32C_LANE; i += 8) {
		x = __builtin_ia32_crc32di(x, crc32c_load(p + i));
		y = __builtin_ia32_crc32di(y, crc32c_load(p + CRC32C_LANE + i));
		z = __builtin_ia32_crc32di(z, crc32c_load(p + UINT64_C(2) * CRC32C_LANE + i));
	}
	return crc32c_shift_lane(crc32c_shift_lane((uint32_t)x) ^ (uint32_t)y) ^ (uint32_t)z;
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_add_sse42(uint32_t crc, const void *data,
								   size_t bytes)
{
	const size_t lanes = UINT64_C(3) * CRC32C_LANE;
	const unsigned char *p = data;
	uint64_t c = (uint32_t)~crc;

	pthread_once(&crc32c_shift_made, crc32c_shift_make);
	for (; bytes >= lanes; bytes -= lanes, p += lanes)
		c = crc32c_add_lanes((uint32_t)c, p);
	for (; bytes >= 8; bytes -= 8, p += 8)
		c = __builtin_ia32_crc32di(c, crc32c_load(p));
	for (; bytes; bytes--, p++)
		c = __builtin_ia32_crc32qi((uint32_t)c, *p);
	return ~(uint32_t)c;
}

/* Carry-less products, 128 bits each, keep four vectors that are congruent to all bytes before them: a vector is
 * multiplied by x^(its distance to the next one) and added to that. The method is that of Gopal et al., "Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009). */
#define CRC32C_FOLD      256u /* bytes of four vectors */
#define CRC32C_FOLD_BITS (8u * CRC32C_FOLD)

static uint64_t crc32c_fold_by[2]; /* for the lower and the upper half of 128 bits */
static pthread_once_t crc32c_fold_made = PTHREAD_ONCE_INIT;

/* x^n mod P, reflected, and moved by one as a product of reflected factors is. */
static uint64_t crc32c_fold_power(unsigned n)
{
	uint32_t c = 0x80000000u;

	while (n--)
		c = c & 1 ? c >> 1 ^ POLYNOMIAL : c >> 1;
	return (uint64_t)c << 1;
}

static void crc32c_fold_make(void)
{
	crc32c_fold_by[0] = crc32c_fold_power(CRC32C_FOLD_BITS + 32);
	crc32c_fold_by[1] = crc32c_fold_power(CRC32C_FOLD_BITS - 32);
}

#define CRC32C_FOLD_TARGET "avx512f,avx512vl,vpclmulqdq,sse4.2"

__attribute__((target(CRC32C_FOLD_TARGET))) static __m512i crc32c_fold(__m512i x, __m512i by,
								       const unsigned char *p)
{
	__m512i low = _mm512_clmulepi64_epi128(x, by, 0x00);
	__m512i high = _mm512_clmulepi64_epi128(x, by, 0x11);

	return _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(p), 0x96); /* xor of three */
}

/* Of @bytes, at least CRC32C_FOLD. What is left is added by @crc32c_add_sse42. */
__attribute__((target(CRC32C_FOLD_TARGET))) static uint32_t crc32c_add_folds(uint32_t crc,
									     const void *data,
									     size_t bytes)
{
	const unsigned char *p = data;
	unsigned char last[CRC32C_FOLD];
	__m512i x[4], by;

	pthread_once(&crc32c_fold_made, crc32c_fold_make);
	by = _mm512_broadcast_i32x4(
		_mm_set_epi64x((long long)crc32c_fold_by[1], (long long)crc32c_fold_by[0]));
	for (unsigned i = 0; i < 4; i++)
		x[i] = _mm512_loadu_si512(p + i * sizeof(x[i]));
	x[0] = _mm512_xor_si512(x[0], _mm512_castsi128_si512(_mm_cvtsi32_si128((int)~crc)));
	for (p += CRC32C_FOLD, bytes -= CRC32C_FOLD; bytes >= CRC32C_FOLD;
	     p += CRC32C_FOLD, bytes -= CRC32C_FOLD)
		for (unsigned i = 0; i < 4; i++)
			x[i] = crc32c_fold(x[i], by, p + i * sizeof(x[i]));
	for (unsigned i = 0; i < 4; i++)
		_mm512_storeu_si512(last + i * sizeof(x[i]), x[i]);
	/* ~0: the checksum of the first bytes is in the vectors already */
	return crc32c_add_sse42(crc32c_add_sse42(~UINT32_C(0), last, sizeof(last)), p, bytes);
}

static bool crc32c_folds(void)
{
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
	       __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("sse4.2");
}

uint32_t crc32c_add(uint32_t crc, const void *data, size_t bytes)
{
	if (bytes >= 2 * CRC32C_FOLD && crc32c_folds())
		return crc32c_add_folds(crc, data, bytes);
	return __builtin_cpu_supports("sse4.2") ? crc32c_add_sse42(crc, data, bytes)
						: crc32c_add_plain(crc, data, bytes);
}
#else
uint32_t crc32c_add(uint32_t crc, const void *data, size_t bytes)
{
	return crc32c_add_plain(crc, data, bytes);
}
#endif
