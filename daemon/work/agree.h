/*
 * What one node of a group finds wrong before a collective changes anything fails it on all of them, as it
 * does on one node. Without this the other nodes would go on, and the epoch would end. Loop thread only.
 */
#ifndef SHARDD_WORK_AGREE_H
#define SHARDD_WORK_AGREE_H

#include "work/share.h"

/* Zero at first. */
struct agree {
	struct share share;
	bool done;
};

/* @check says what is wrong here: 0 or a fault code. RES_DONE: nothing is wrong on any node. RES_FAILED:
 * c->fault is the first node's. A tick of its own; asked again when it is done, it checks this node alone. */
enum res agree_tick(struct coll *c, struct agree *a,
		    int (*check)(const struct coll *c, struct fault *f));
/* Safe twice. */
void agree_end(struct agree *a);

#endif
