/*
 * Boxes of a view (publish/view.h) that are cut where pieces of their source end: a tensor that is sharded over
 * devices is in several places. Any thread.
 */
#ifndef SHARDD_PUBLISH_CUT_H
#define SHARDD_PUBLISH_CUT_H

#include <stdint.h>

#include "publish/view.h"

/* A growing array of boxes. */
struct cut_boxes {
	struct view_box *all; /* owned: cut_deinit */
	uint32_t n, room;
};

#define CUT_BOXES_NULL ((struct cut_boxes){ 0 })

/* Append what of @x is in elements [first, first + n) of its source. Their @from still counts from the source's
 * first element. Return: 0 or -ENOMEM. */
int cut_append(struct cut_boxes *to, const struct view_box *x, uint64_t first, uint64_t n);
void cut_deinit(struct cut_boxes *to);

#endif
