/*
 * Work that would hold the loop for long, cut into slices: one in each turn of the loop, in
 * the order in which they were added, and all that has come is served in between.
 * Loop thread only.
 */
#ifndef SHARDD_CORE_SLICES_H
#define SHARDD_CORE_SLICES_H

#include <stdbool.h>
#include <uv.h>

#include "core/list.h"

/* What a slice may take; who can tells from the clock how much of its work that is. */
#define SLICE_US 1000u

struct slices {
	uv_idle_t idle; /* active while there are some */
	struct list all;
	bool open;
};

/* One of them; embedded in what it goes on with. */
struct slice {
	struct list link;
	void (*fn)(struct slice *slice);
};

void slices_init(struct slices *s, uv_loop_t *loop);

/* Call @fn once, in a coming turn; it may add its slice again. */
void slices_add(struct slices *s, struct slice *slice, void (*fn)(struct slice *slice));

/* It is not called any more. Safe for one that was not added, once it was list_init-ed. */
static inline void slice_drop(struct slice *slice)
{
	list_unlink(&slice->link);
}

/* None may be left. Safe twice. */
void slices_close(struct slices *s);

#endif
