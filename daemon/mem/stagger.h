/*
 * Where large arrays begin. Arrays that are worked on beside each other and lie a large power
 * of two apart are in the same banks of memory and the same sets of the caches, all the way:
 * AdamW took three times as long on four arrays of 256 MiB in a row as with 2 KiB between
 * them (docs/performance.md). So a large array gets some extra room, and begins at another offset
 * in it than its neighbours. Devices whose memory comes in large pieces spread addresses by
 * themselves.
 */
#ifndef SHARDD_MEM_STAGGER_H
#define SHARDD_MEM_STAGGER_H

#include "core/formula.h"
#include "mem/slab.h"

#define STAGGER_FROM  FORMULA_LARGE /* bytes of an array */
#define STAGGER_STEP  2048u
#define STAGGER_ROOM  FORMULA_ROOM
#define STAGGER_STEPS (STAGGER_ROOM / STAGGER_STEP)

/* The offsets, in steps: of a unit's arrays, and of gradients by their rank, since a reduction
 * reads all of them. */
#define STAGGER_ARRAY(i)   (2 * (i) + 1)
#define STAGGER_RANK(rank) (2 * (rank))

/* Extra bytes for an array of @bytes on @d; 0 for a small one. */
static inline uint64_t stagger_room(const struct device *d, uint64_t bytes)
{
	bool large = bytes >= STAGGER_FROM && backend_info(d->backend)->granularity <= STAGGER_ROOM;

	return large ? STAGGER_ROOM : 0;
}

/* How many of them come before it. */
static inline uint64_t stagger_by(const struct device *d, uint64_t bytes, uint32_t steps)
{
	return stagger_room(d, bytes) ? steps % STAGGER_STEPS * STAGGER_STEP : 0;
}

#endif
