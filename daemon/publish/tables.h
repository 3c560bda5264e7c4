/*
 * Tables of k_assemble in the memory of a GPU, where its kernel reads them. They are copied there once. Loop thread
 * only.
 */
#ifndef SHARDD_PUBLISH_TABLES_H
#define SHARDD_PUBLISH_TABLES_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"
#include "publish/board.h"

struct tables {
	struct slab *slab; /* owned ref; NULL: none */
	char *image;       /* owned: what is copied there; NULL: it is there */
	uint64_t bytes;
	bool there;
	/* Addresses of the device. */
	const struct k_assemble_tensor *tensors;
	const struct k_assemble_block *cleared, *measured, *blocks;
	uint32_t *crc; /* by block */
	/* Of the delta that is made, if there are any: what the kernel writes, before it is copied to the host. */
	struct k_delta delta;
};

/* What they are copies of, with addresses of the host. Borrowed. */
struct tables_source {
	const struct k_assemble_tensor *tensors;
	const struct k_assemble_box *boxes;
	const struct k_assemble_scales *scales;
	const uint32_t *amax; /* not copied */
	const struct k_assemble_block *cleared, *measured, *blocks;
	uint64_t n_tensors, n_boxes, n_scales, n_amax, n_cleared, n_measured, n_blocks;
	uint64_t delta_room; /* bytes of a delta's changes; 0: there are no deltas */
};

/* Have memory and an image of the tables of @s, on payer->device. Return: 0, or the negative errno of slab_new:
 * SLAB_E_LATER among them. */
int tables_take(struct tables *t, const struct tables_source *s, const struct board_payer *payer);
/* What was to be copied has arrived. */
void tables_are_there(struct tables *t);
void tables_free(struct tables *t);

#endif
