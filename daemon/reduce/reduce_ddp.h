/* What a reduction means for the ddp of its tensors. Loop thread only. */
#ifndef SHARDD_REDUCE_REDUCE_DDP_H
#define SHARDD_REDUCE_REDUCE_DDP_H

#include "work/coll.h"

/* Tensor @tensor of @d was reduced by @c. Return: whether its unit, all of whose tensors have been
 * in this pass, goes on as after its last Reduce. */
bool reduce_ddp_unit_is_whole(const struct coll *c, struct ddp *d, uint32_t tensor);
/* Bucket @bucket is over: after the last one of a pass, those who had no more inputs have
 * passed it too, so that they have the same buckets afterwards. */
void reduce_ddp_surrogates_passed(const struct coll *c, struct ddp *d, uint32_t bucket);

/* Between nodes: with the last bucket of a pass in the first assignment the node that has the first rank
 * shows the order in which gradients arrived there, by which all make the second one. */
/* Bytes of that in the slot of each device (work/share.h), a multiple of 8; 0: @bucket does not show it. */
uint64_t reduce_ddp_arrival_bytes(const struct coll *c, const struct ddp *d, unsigned layout,
				  uint32_t bucket);
/* Of this node, to @slot. */
void reduce_ddp_arrival_fill(const struct ddp *d, void *slot);
/* What the first device has shown. RES_FAILED: with c->fault. */
enum res reduce_ddp_arrival_take(struct coll *c, struct ddp *d, const void *slot);

#endif
