/*
 * What the ranks of a bucket must know of each other before it is reduced, shown to all nodes: which of its
 * tensors some rank has used; and with the last bucket of a pass in the first assignment the order in which
 * gradients arrived on the first rank. Loop thread only.
 */
#ifndef SHARDD_DDP_OP_DDP_SHOWN_H
#define SHARDD_DDP_OP_DDP_SHOWN_H

#include "ddp/op_ddp.h"
#include "work/share.h"

/* Zero at first. */
struct op_ddp_shown {
	struct share share;
};

/* RES_DONE: it is known. A tick of its own, of a DdpBucket. */
enum res op_ddp_shown_tick(struct coll *c, struct op_ddp_shown *s);
/* Has any rank used the @k-th tensor of the bucket? */
bool op_ddp_shown_is_used(const struct coll *c, const struct op_ddp_shown *s, uint32_t k);
/* Safe twice. */
void op_ddp_shown_end(struct op_ddp_shown *s);

#endif
