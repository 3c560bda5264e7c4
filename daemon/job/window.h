/*
 * Windows: slabs, one on each device of a set, that an engine has registered, so that its
 * collectives between them are faster (NCCL: copy engines, symmetric memory). They are only advice:
 * everything works without them. A slab that is freed waits until the engine has released it. Loop
 * thread only.
 */
#ifndef SHARDD_JOB_WINDOW_H
#define SHARDD_JOB_WINDOW_H

#include "job/node.h"

struct window;

/* Regions of a collective over the devices of @nc, in their order. NCCL wants registered
 * memory at the same place on every device: slabs of the same size are registered when the offsets
 * agree, and unregistered when they do not. @nc: NULL if no communicator was needed yet: nothing is
 * registered. */
void window_check(struct node_comm *nc, enum backend_queue q, const struct region *regions);

#endif
