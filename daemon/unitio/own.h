/*
 * Arrays of a unit between the ranks' own shards and one place. Loop thread only.
 */
#ifndef SHARDD_UNITIO_OWN_H
#define SHARDD_UNITIO_OWN_H

#include "work/coll.h"

/* Is there on each device what own_write needs? Return: as coll_ready. */
bool own_ready(struct coll *c, void (*again)(struct waiter *p));

/* What each rank owns of c->unit, from @source's memory of member @i (on its device; asked
 * here) into the parameters, or with @state that array of what is trained: there in the order
 * of the gathered unit, or @packed, tensor after tensor as they were registered. Then @after. */
void own_write(struct coll *c, const float *(*source)(const struct coll *c, uint32_t i),
	       bool packed, unsigned state, void (*after)(struct coll *c));

/* All parts' array of c->unit (one region a part; frozen: what follows the trained in the
 * parameters) into scratch[0] of every device, as unit/pack.h says; then @next. Where there is
 * none of it, @next at once. */
void own_gather_array(struct coll *c, const struct region *const *arrays, bool frozen,
		      void (*next)(struct coll *c));

#endif
