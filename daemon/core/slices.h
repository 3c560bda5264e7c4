/*
 * Work that would block the loop for long, cut into slices: one in each turn of the loop, in the
 * order in which they were added. The loop serves all other events in between. Loop thread only.
 */
#ifndef SHARDD_CORE_SLICES_H
#define SHARDD_CORE_SLICES_H

#include <stdbool.h>
#include <uv.h>

#include "core/list.h"

/* The time that a slice may take; if possible, the work measures it with the clock. */
#define SLICE_US 1000u

struct slices {
	uv_idle_t idle; /* active while there are some */
	struct list all;
	bool open;
};

/* One slice; embedded in the object that it continues. */
struct slice {
	struct list link;
	void (*fn)(struct slice *slice);
};

void slices_init(struct slices *s, uv_loop_t *loop);

/* Call @fn once, in a coming turn; it may add its slice again. */
void slices_add(struct slices *s, struct slice *slice, void (*fn)(struct slice *slice));

/* Remove it: it is not called any more. Safe for one that was not added, once its link was
 * initialised with list_init. */
static inline void slice_drop(struct slice *slice)
{
	list_unlink(&slice->link);
}

/* None may be left. Safe to call twice. */
void slices_close(struct slices *s);

#endif
