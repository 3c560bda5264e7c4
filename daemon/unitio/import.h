/*
 * Arrays of a unit between the ranks' own shards and one place. Loop thread only.
 */
#ifndef SHARDD_UNITIO_IMPORT_H
#define SHARDD_UNITIO_IMPORT_H

#include "work/coll.h"

/* The state of a collective that writes: the first member of its own. */
struct import_state {
	bool packed;
	unsigned state; /* what is written: unit_state */
	unsigned stage; /* import_write_tick's */
};

static inline struct import_state *import_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct import_state));
}

/* Is there on each device what import_write_tick needs? */
enum res import_ready(struct coll *c);

/* What each rank owns of c->unit, from @source's memory of member @i (on its device; asked
 * here) into the parameters, or with @state that array of what is trained: there in the order
 * of the gathered unit, or @packed, tensor after tensor as they were registered. It is written
 * by import_write_tick, a tick of its own. */
void import_write(struct coll *c, const void *(*source)(const struct coll *c, uint32_t i),
		  bool packed, unsigned state);
enum res import_write_tick(struct coll *c);

/* All parts' array of c->unit (one region a part; frozen: what follows the trained in the
 * parameters) into scratch[0] of every device, as unit/pack.h says: there at the next tick.
 * @state: its elements are of unit_state_dtype. RES_DONE: there is none of it. */
enum res import_gather_array(struct coll *c, const struct region *const *arrays, unsigned state,
			     bool frozen);

#endif
