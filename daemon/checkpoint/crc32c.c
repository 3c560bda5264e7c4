#include "checkpoint/crc32c.h"

#include <pthread.h>
#include <string.h>

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
__attribute__((target("sse4.2"))) static uint32_t crc32c_add_sse42(uint32_t crc, const void *data,
								   size_t bytes)
{
	const unsigned char *p = data;
	uint64_t c = (uint32_t)~crc;

	for (; bytes >= 8; bytes -= 8, p += 8)
		c = __builtin_ia32_crc32di(c, crc32c_load(p));
	for (; bytes; bytes--, p++)
		c = __builtin_ia32_crc32qi((uint32_t)c, *p);
	return ~(uint32_t)c;
}

uint32_t crc32c_add(uint32_t crc, const void *data, size_t bytes)
{
	return __builtin_cpu_supports("sse4.2") ? crc32c_add_sse42(crc, data, bytes)
						: crc32c_add_plain(crc, data, bytes);
}
#else
uint32_t crc32c_add(uint32_t crc, const void *data, size_t bytes)
{
	return crc32c_add_plain(crc, data, bytes);
}
#endif
