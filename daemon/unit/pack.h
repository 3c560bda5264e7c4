/*
 * Between the order of the gathered unit, in which every tensor is in one piece, and the order
 * of its parts, one after the other, as they are gathered and scattered between devices:
 *   [trained: part 0, part 1... | frozen: part 0, part 1...]
 * They differ only in layout DIM0 on several devices. Fills launches, runs nothing. Loop thread only.
 */
#ifndef SHARDD_UNIT_PACK_H
#define SHARDD_UNIT_PACK_H

#include "backend/backend.h"
#include "unit/runs.h"

/* Memory of elements of one type. */
struct unit_array {
	void *at;
	enum dtype dtype;
};

/* Do the two orders differ? */
bool unit_is_packed(const struct unit *u);

/* Launches that bring @which of @parts to the order of the gathered unit, @full, whole pieces
 * with their padding; types are converted. UNIT_TRAINED does not touch frozen elements, in both, so
 * that @full may be a gradient buffer. @launches: room for rec->n_tensors; they are independent of each
 * other. Return: how many. */
unsigned unit_unpack_launches(const struct unit *u, enum unit_which which,
			      const struct unit_array *full, const struct unit_array *parts,
			      struct launch *launches);
/* The inverse: @full into the order of the parts. */
unsigned unit_pack_launches(const struct unit *u, enum unit_which which,
			    const struct unit_array *parts, const struct unit_array *full,
			    struct launch *launches);

#endif
