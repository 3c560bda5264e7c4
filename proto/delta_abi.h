/*
 * A delta: what has changed from one generation of a publication, the base, to a later one.
 * Little-endian.
 *
 *   head | blocks, head.blocks of them | payload
 *
 * A block is a part of a tensor: elements [first, first + n) of it, at most 65536. Blocks of a
 * tensor follow one another, and cover it as a whole. Its changes are bytes of the payload: if it
 * is dense, the values of all its elements; otherwise the positions of those whose bits have
 * changed, ascending, counted from the first element of the block, 16 bits each; then their values.
 * Each of these arrays is padded with zeros to 8 bytes. The order of blocks in the payload is any.
 */
#ifndef SHARDD_DELTA_ABI_H
#define SHARDD_DELTA_ABI_H

#include <assert.h>
#include <stdint.h>

#define DELTA_MAGIC          0x44444853u /* "SHDD" read as a little-endian word */
#define DELTA_VERSION        1u
#define DELTA_BLOCK_ELEMENTS 65536u

struct delta_head {
	uint32_t magic;
	uint32_t version;
	uint64_t number, step;            /* of the generation that it makes */
	uint64_t base_number, base_step;  /* of the one that it is applied to */
	uint64_t layout;                  /* of both, the daemon's number */
	uint32_t checksum, base_checksum; /* of both */
	uint64_t bytes;                   /* of all of it, with this head */
	uint64_t changed, elements;       /* values that have changed, and all of them */
	uint64_t blocks;
	uint64_t payload; /* where it begins */
	uint32_t crc;     /* CRC-32C of the head, in which this is 0, and of the blocks */
	uint32_t zero_word;
	uint64_t zero[3];
};

struct delta_block {
	uint64_t first;  /* element */
	uint64_t at;     /* bytes into the payload */
	uint32_t tensor; /* index, as DescribeGeneration lists them */
	uint32_t n;      /* elements */
	uint32_t changed;
	uint32_t crc;   /* CRC-32C of its bytes of the payload */
	uint32_t dense; /* 1: it is; 0 */
	uint32_t size;  /* bytes of an element: 1, 2 or 4 */
};

static inline uint64_t delta_padded(uint64_t bytes)
{
	return (bytes + 7) / 8 * 8;
}

/* Bytes of the block in the payload. */
static inline uint64_t delta_block_bytes(const struct delta_block *b)
{
	return b->dense ? delta_padded((uint64_t)b->n * b->size)
			: delta_padded(2ull * b->changed) +
				  delta_padded((uint64_t)b->changed * b->size);
}

static_assert(sizeof(struct delta_head) == 128, "delta_head");
static_assert(sizeof(struct delta_block) == 40, "delta_block");

#endif
