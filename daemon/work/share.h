/*
 * What each device of a group has in host memory is shown to all nodes: small things that a collective
 * decides by, like norms and flags. Each device has a slot of the same size; the slots are in the order
 * of the devices of all nodes. A group on one node has them all from the start. Loop thread only.
 */
#ifndef SHARDD_WORK_SHARE_H
#define SHARDD_WORK_SHARE_H

#include "work/coll.h"

/* Zero at first. */
struct share {
	unsigned char *all; /* owned */
	uint64_t bytes;     /* of a slot */
	unsigned stage;
};

/* Make the slots, filled with zeros. Never waits. */
enum res share_begin(struct coll *c, struct share *s, uint64_t bytes);
/* The slot of device @number of all nodes; those of this node are the caller's to fill. */
void *share_slot(const struct share *s, unsigned number);
/* The same of part @d of the collective. */
void *share_own(const struct coll *c, const struct share *s, unsigned d);
/* Show them. RES_DONE: all slots are filled. A tick of its own. */
enum res share_tick(struct coll *c, struct share *s);
/* Safe twice. */
void share_end(struct share *s);

#endif
