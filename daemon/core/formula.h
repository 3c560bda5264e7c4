/*
 * The formulas of docs/semantics.md (Memory) on plain numbers: what `shardctl memory` compares with what is in
 * use, and what `shardctl plan` computes of a job that does not exist. All of them in bytes of one part of a unit,
 * which is on one device. Any thread.
 */
#ifndef SHARDD_CORE_FORMULA_H
#define SHARDD_CORE_FORMULA_H

#include <stdbool.h>
#include <stdint.h>

#define FORMULA_ALIGN 256u                 /* where arrays begin */
#define FORMULA_LARGE (UINT64_C(32) << 20) /* from so many bytes on an array of the host */
#define FORMULA_ROOM  (64u << 10)          /* gets so many more */
#define FORMULA_STATE 4u                   /* gradient shards and optimizer state are FP32 */

struct formula_part {
	uint64_t trained, frozen; /* elements, with padding */
	unsigned storage_bytes;   /* of one stored parameter */
	unsigned states;          /* arrays of optimizer state */
	bool pools_gradient;      /* a gradient exists only while it is needed */
	bool has_copy;            /* that the unit may be rolled back to */
	bool is_staggered;        /* large arrays get FORMULA_ROOM */
};

/* r of the page. */
static inline uint64_t formula_rounded(uint64_t bytes)
{
	return (bytes + FORMULA_ALIGN - 1) / FORMULA_ALIGN * FORMULA_ALIGN;
}

/* A of the page. */
static inline uint64_t formula_array(uint64_t bytes, bool is_staggered)
{
	return formula_rounded(bytes) + (is_staggered && bytes >= FORMULA_LARGE ? FORMULA_ROOM : 0);
}

static inline uint64_t formula_params(const struct formula_part *p)
{
	return formula_array((p->trained + p->frozen) * p->storage_bytes, p->is_staggered);
}

static inline uint64_t formula_gradients(const struct formula_part *p)
{
	return p->pools_gradient ? 0 : formula_array(p->trained * FORMULA_STATE, p->is_staggered);
}

static inline uint64_t formula_states(const struct formula_part *p)
{
	return p->states * formula_array(p->trained * FORMULA_STATE, p->is_staggered);
}

/* The copy is array behind array. */
static inline uint64_t formula_copy(const struct formula_part *p)
{
	if (!p->has_copy)
		return 0;
	return formula_rounded((p->trained + p->frozen) * p->storage_bytes) +
	       formula_rounded(p->trained * FORMULA_STATE) * p->states;
}

#endif
