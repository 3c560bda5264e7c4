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

#endif
