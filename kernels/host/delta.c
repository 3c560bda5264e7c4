/*
 * Changes of a block: they are counted first, so that room for them can be taken once, and then written.
 * The block is in the second-level cache, and the base comes there by the counting.
 */
#include "crc32c.h"
#include "host/host.h"

#include <string.h>

/* Elements that are counted in a type as narrow as they are. */
#define STRIDE 128u

static uint32_t delta_count_1(const uint8_t *a, const uint8_t *b, uint32_t n)
{
	uint32_t sum = 0, i = 0;

	while (i < n) {
		uint32_t end = n - i < STRIDE ? n : i + STRIDE;
		uint8_t some = 0;

		for (; i < end; i++)
			some = (uint8_t)(some + (a[i] != b[i]));
		sum += some;
	}
	return sum;
}

static uint32_t delta_count_2(const uint16_t *a, const uint16_t *b, uint32_t n)
{
	uint32_t sum = 0, i = 0;

	while (i < n) {
		uint32_t end = n - i < 64 * STRIDE ? n : i + 64 * STRIDE;
		uint16_t some = 0;

		for (; i < end; i++)
			some = (uint16_t)(some + (a[i] != b[i]));
		sum += some;
	}
	return sum;
}

static uint32_t delta_count_4(const uint32_t *a, const uint32_t *b, uint32_t n)
{
	uint32_t sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += a[i] != b[i];
	return sum;
}

static uint32_t delta_count(const void *a, const void *b, uint32_t n, size_t size)
{
	return size == 1   ? delta_count_1(a, b, n)
	       : size == 2 ? delta_count_2(a, b, n)
			   : delta_count_4(a, b, n);
}

/* Positions, of the elements [first, first + n), that differ. Return: the end of those written. */
static uint16_t *delta_positions_some(const char *a, const char *b, uint32_t first, uint32_t n,
				      size_t size, uint16_t *to)
{
	for (uint32_t i = first; i < first + n; i++)
		if (memcmp(a + i * size, b + i * size, size) != 0)
			*to++ = (uint16_t)i;
	return to;
}

/* A word of 8 bytes that is the same has none. */
static void delta_positions(const char *a, const char *b, uint32_t n, size_t size, uint16_t *to)
{
	const uint32_t per_word = (uint32_t)(sizeof(uint64_t) / size);
	uint32_t whole = n / per_word * per_word;

	for (uint32_t i = 0; i < whole; i += per_word) {
		uint64_t x, y;

		memcpy(&x, a + i * size, sizeof(x));
		memcpy(&y, b + i * size, sizeof(y));
		for (uint64_t differ = x ^ y; differ;) {
			/* little-endian: the lowest bits are the first element's */
			unsigned k = (unsigned)__builtin_ctzll(differ) / (unsigned)(8 * size);

			*to++ = (uint16_t)(i + k);
			differ = k + 1 == per_word
					 ? 0
					 : differ >> 8 * size * (k + 1) << 8 * size * (k + 1);
		}
	}
	delta_positions_some(a, b, whole, n - whole, size, to);
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

void HOST(delta_block)(const struct k_delta *d, size_t e, const void *block, const void *base,
		       uint32_t n, size_t size)
{
	uint32_t changed = delta_count(block, base, n, size);
	uint64_t bytes = k_delta_bytes(changed, n, size);
	uint64_t at = __atomic_fetch_add(d->used, bytes, __ATOMIC_RELAXED);
	uint64_t first = k_delta_padded(changed * sizeof(uint16_t));
	char *to = d->out + at;

	d->blocks[e] = (struct k_delta_block){ .at = KERNEL_DELTA_NONE,
					       .changed = changed,
					       .dense = k_delta_is_dense(changed, n, size) };
	if (at > d->room || bytes > d->room - at)
		return;
	d->blocks[e].at = at;
	if (d->blocks[e].dense) {
		memcpy(to, block, n * size);
		delta_pad(to, n * size);
	} else {
		delta_positions(block, base, n, size, (uint16_t *)to);
		delta_pad(to, changed * sizeof(uint16_t));
		delta_values(block, (const uint16_t *)to, changed, size, to + first);
		delta_pad(to + first, changed * size);
	}
	d->blocks[e].crc = crc32c_add(0, to, bytes);
}
