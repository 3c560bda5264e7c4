/*
 * The delta of a generation: what has changed since the one before (proto/delta_abi.h). It is made beside
 * the generation by the same kernel, in a slab of its own that is as long as the declaration allows. What
 * does not fit there gives no delta. It is in the memory of the host: a GPU makes it in its own first
 * (publish/tables.h). Loop thread only.
 */
#ifndef SHARDD_PUBLISH_DELTA_H
#define SHARDD_PUBLISH_DELTA_H

#include <stdbool.h>
#include <stdint.h>

#include "publish/board.h"
#include "kernels.h"

struct assembly;
struct slab;

struct delta {
	struct slab *slab; /* owned ref; NULL: it has no memory */
	bool made;         /* it is of the generation that is there */
	uint64_t base;     /* the number of the generation before */
	uint64_t bytes;    /* of it */
	uint64_t changed, elements;
	struct k_delta_block *blocks; /* owned, while it is made */
	uint64_t used;
	struct k_delta kernel;
};

/* A generation, as a delta names it. */
struct delta_end {
	uint64_t number, step;
	uint32_t checksum;
};

/* Begin the delta from @base to what is made of @a at @made. @payer: whose device is the host's memory. Return: 0,
 * or a negative errno: without memory there is none. */
int delta_begin(struct delta *d, const struct assembly *a, const struct board_payer *payer,
		const void *base, const void *made);
/* All blocks are made. Return: whether there is a delta. */
bool delta_finish(struct delta *d, const struct assembly *a, const struct delta_end *base,
		  const struct delta_end *made);
/* There is none, or none any more; its memory stays. */
void delta_clear(struct delta *d);
/* That goes, too. */
void delta_free(struct delta *d);

#endif
