/*
 * CRC-32C (Castagnoli), as of iSCSI and ext4: finds every burst of up to 32 damaged bits. It is no
 * protection against data chosen to collide. Any thread.
 */
#ifndef SHARDD_KERNELS_CRC32C_H
#define SHARDD_KERNELS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of what had the checksum @crc (of nothing: 0), followed by @bytes at @data. */
uint32_t crc32c_add(uint32_t crc, const void *data, size_t bytes);

/* The same in plain C, also where the processor has an instruction for it: for tests. */
uint32_t crc32c_add_plain(uint32_t crc, const void *data, size_t bytes);

#endif
