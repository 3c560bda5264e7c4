/*
 * What the memory of a job must come to, written from docs/semantics.md and from nothing that
 * the daemon says: pools as the page describes them, and how many elements of a unit are where.
 */
#ifndef SHARDD_TESTS_MEMORY_MODEL_H
#define SHARDD_TESTS_MEMORY_MODEL_H

#include <shardd/shardd.h>
#include <stdbool.h>
#include <stdint.h>

enum {
	MEMORY_MAX_RANKS = 4,
	MEMORY_MAX_DEVICES = 4,
	MEMORY_MAX_TENSORS = 5,
	MEMORY_MAX_SLABS = 16,
	MEMORY_MAX_PIECES = 32,
};

/* ------------------------------------------------------------------- rounding */

/* G: up to what a device makes memory in. */
uint64_t memory_page(uint64_t bytes);
/* r: bytes of an array of @elements of @size bytes. */
uint64_t memory_array(uint64_t elements, uint64_t size);
/* A: what @bytes take. */
uint64_t memory_taken(uint64_t bytes);
uint64_t memory_size(enum shardd_dtype t);

/* ---------------------------------------------------------------------- pools */

/* Slabs of 1 MiB at least, pieces cut first fit, slabs that stay. */
struct memory_pool {
	struct {
		uint64_t bytes;
		struct {
			uint64_t at, bytes;
		} pieces[MEMORY_MAX_PIECES]; /* ascending */
		unsigned n;
	} slabs[MEMORY_MAX_SLABS];
	unsigned n;
	uint64_t used, taken;
};

/* A piece of one, to give back. */
struct memory_piece {
	bool there;
	unsigned slab;
	uint64_t at;
};

struct memory_piece memory_take(struct memory_pool *p, uint64_t bytes);
/* Safe if it is not there. */
void memory_give(struct memory_pool *p, struct memory_piece *piece);

/* ---------------------------------------------------------------------- units */

struct memory_tensor {
	uint64_t rows, columns;
	bool frozen;
	bool alias; /* of the first tensor of the first unit */
};

/* A unit on the devices of its ranks, which are spread over them in blocks. */
struct memory_unit {
	const struct shardd_unit_spec *like; /* layout, strategy, shard_ranks, shard_multiple */
	const struct memory_tensor *tensors;
	unsigned n_tensors;
	uint32_t world;
	unsigned devices; /* D: that have ranks of it */
};

/* W and R: ranks of a replica, and replicas. */
uint32_t memory_shard_ranks(const struct memory_unit *u);
uint32_t memory_replicas(const struct memory_unit *u);
unsigned memory_device_of(const struct memory_unit *u, uint32_t rank);
/* Has each replica a set of devices of its own, all of one size? */
bool memory_has_sets(const struct memory_unit *u);
/* E: devices on which a replica lies. */
unsigned memory_spread(const struct memory_unit *u);
/* Elements: of one rank's shard; of one device's part. */
uint64_t memory_shard(const struct memory_unit *u, bool frozen);
uint64_t memory_part(const struct memory_unit *u, bool frozen);
/* Of a gradient buffer; of what is summoned. */
uint64_t memory_gradient(const struct memory_unit *u);
uint64_t memory_summoned(const struct memory_unit *u);
/* What @rank's own optimizer is lent. */
uint64_t memory_lent(const struct memory_unit *u, uint32_t rank);

#endif
