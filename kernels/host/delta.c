/*
 * Changes of a block. Its elements are compared with the base while they are in the first-level cache. The positions
 * of those that differ are collected first, so that room for them can be taken once.
 *
 * Most elements are as they were, and where the others are is random. A loop with a branch for each would mispredict
 * most of them. So DELTA_STEP elements become a mask, whose first bits are written without looking at how many are
 * set.
 */
#include "crc32c.h"
#include "host/host.h"

#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Elements of a mask. */
#define DELTA_STEP 32u

/* Bit k: element k of @n differs. */
static uint32_t delta_mask_some(const char *a, const char *b, uint32_t n, size_t size)
{
	uint32_t mask = 0;

	for (uint32_t k = 0; k < n; k++)
		mask |= (uint32_t)(memcmp(a + k * size, b + k * size, size) != 0) << k;
	return mask;
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)

static uint32_t delta_mask(const char *a, const char *b, size_t size)
{
	if (size == 1)
		return _mm256_cmpneq_epi8_mask(_mm256_loadu_si256((const void *)a),
					       _mm256_loadu_si256((const void *)b));
	if (size == 2)
		return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
	return (uint32_t)_mm512_cmpneq_epi32_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b)) |
	       (uint32_t)_mm512_cmpneq_epi32_mask(_mm512_loadu_si512(a + 64),
						  _mm512_loadu_si512(b + 64))
		       << 16;
}

#elif defined(__AVX2__)

static __m256i delta_load(const char *at)
{
	return _mm256_loadu_si256((const void *)at);
}

/* 32 elements of 2 bytes: a byte each, of ones if it is the same. */
static __m256i delta_same_2(const char *a, const char *b)
{
	__m256i low = _mm256_cmpeq_epi16(delta_load(a), delta_load(b));
	__m256i high = _mm256_cmpeq_epi16(delta_load(a + 32), delta_load(b + 32));

	return _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
}

static uint32_t delta_mask(const char *a, const char *b, size_t size)
{
	uint32_t same = 0;

	if (size == 1)
		return ~(uint32_t)_mm256_movemask_epi8(
			_mm256_cmpeq_epi8(delta_load(a), delta_load(b)));
	if (size == 2)
		return ~(uint32_t)_mm256_movemask_epi8(delta_same_2(a, b));
	for (unsigned i = 0; i < 4; i++) {
		__m256i eight = _mm256_cmpeq_epi32(delta_load(a + 32 * i), delta_load(b + 32 * i));

		same |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(eight)) << 8 * i;
	}
	return ~same;
}

#else

static uint32_t delta_mask(const char *a, const char *b, size_t size)
{
	return memcmp(a, b, DELTA_STEP * size) == 0 ? 0 : delta_mask_some(a, b, DELTA_STEP, size);
}

#endif

/* The first element of @mask; any, if there is none. */
static uint16_t delta_first(uint32_t mask, uint32_t first)
{
	return (uint16_t)(first + (mask ? (unsigned)__builtin_ctz(mask) : 0));
}

/* Append the elements of @mask, which counts from @first. There is room for two more than it has: the first two are
 * always written. */
static uint16_t *delta_append(uint16_t *to, uint32_t mask, uint32_t first)
{
	uint16_t *end = to + __builtin_popcount(mask);

	to[0] = delta_first(mask, first);
	mask &= mask - 1;
	to[1] = delta_first(mask, first);
	for (to += 2; to < end; to++) {
		mask &= mask - 1;
		*to = delta_first(mask, first);
	}
	return end;
}

static inline __attribute__((always_inline)) uint16_t *delta_some(const char *a, const char *b,
								  uint32_t first, uint32_t n,
								  size_t size, uint16_t *to)
{
	uint32_t i = 0;

	for (; i + DELTA_STEP <= n; i += DELTA_STEP) {
		uint32_t mask = delta_mask(a + i * size, b + i * size, size);

		if (mask)
			to = delta_append(to, mask, first + i);
	}
	return delta_append(to, delta_mask_some(a + i * size, b + i * size, n - i, size),
			    first + i);
}

void HOST(delta_compare)(struct delta_changes *c, const void *piece, const void *base,
			 uint32_t first, uint32_t n, size_t size)
{
	uint16_t *to = c->positions + c->n;

	/* the size is a constant in each */
	if (size == 1)
		to = delta_some(piece, base, first, n, 1, to);
	else if (size == 2)
		to = delta_some(piece, base, first, n, 2, to);
	else
		to = delta_some(piece, base, first, n, 4, to);
	c->n = (uint32_t)(to - c->positions);
}

static void delta_values(const char *a, const uint16_t *positions, uint32_t n, size_t size,
			 char *to)
{
	for (uint32_t i = 0; i < n && size == 1; i++)
		to[i] = a[positions[i]];
	for (uint32_t i = 0; i < n && size == 2; i++)
		memcpy(to + i * 2, a + positions[i] * 2, 2);
	for (uint32_t i = 0; i < n && size == 4; i++)
		memcpy(to + i * 4, a + positions[i] * 4, 4);
}

static void delta_pad(char *at, uint64_t bytes)
{
	memset(at + bytes, 0, k_delta_padded(bytes) - bytes);
}

void HOST(delta_write)(const struct k_delta *d, size_t e, const struct delta_changes *c,
		       const void *block, uint32_t n, size_t size)
{
	uint64_t bytes = k_delta_bytes(c->n, n, size);
	uint64_t at = __atomic_fetch_add(d->used, bytes, __ATOMIC_RELAXED);
	uint64_t first = k_delta_padded(c->n * sizeof(uint16_t));
	char *to = d->out + at;

	d->blocks[e] = (struct k_delta_block){ .at = KERNEL_DELTA_NONE,
					       .changed = c->n,
					       .dense = k_delta_is_dense(c->n, n, size) };
	if (at > d->room || bytes > d->room - at)
		return;
	d->blocks[e].at = at;
	if (d->blocks[e].dense) {
		memcpy(to, block, n * size);
		delta_pad(to, n * size);
	} else {
		memcpy(to, c->positions, c->n * sizeof(uint16_t));
		delta_pad(to, c->n * sizeof(uint16_t));
		delta_values(block, c->positions, c->n, size, to + first);
		delta_pad(to + first, c->n * size);
	}
	d->blocks[e].crc = crc32c_add(0, to, bytes);
}
