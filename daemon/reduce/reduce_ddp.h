/* What a reduction means for the ddp of its tensors. Loop thread only. */
#ifndef SHARDD_REDUCE_REDUCE_DDP_H
#define SHARDD_REDUCE_REDUCE_DDP_H

#include "job/ddp.h"
#include "work/coll.h"

/* Tensor @tensor of @d was reduced by @c. Return: whether its unit, all of whose tensors have been
 * in this pass, goes on as after its last Reduce. */
bool reduce_ddp_unit_is_whole(const struct coll *c, struct ddp *d, uint32_t tensor);
/* Bucket @bucket is over: after the last one of a pass, those who had no more inputs have
 * passed it too, so that they have the same buckets afterwards. */
void reduce_ddp_surrogates_passed(const struct coll *c, struct ddp *d, unsigned layout,
				  uint32_t bucket);
/* Bucket @bucket is about to be noted as reduced: where no rank of this node has inputs no DdpBackward has
 * begun the pass that it is of. */
void reduce_ddp_begins_pass(const struct coll *c, struct ddp *d, uint32_t bucket);
/* For a peer on another node of @op, which has its group: the ddp of the DdpCreate at @number, with
 * assignment @layout. Return: NULL: @f. */
struct ddp *reduce_ddp_stand_in(const struct op *op, uint64_t number, uint64_t layout,
				struct fault *f);

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
