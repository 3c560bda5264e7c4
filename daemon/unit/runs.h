/*
 * The pieces of tensors that lie on one part of a unit: what is done tensor by tensor
 * (optimizer settings, initialisers, padding that must not count) asks here, so that it
 * holds for every layout. Loop thread only.
 */
#ifndef SHARDD_UNIT_RUNS_H
#define SHARDD_UNIT_RUNS_H

#include "unit/unit.h"

struct unit_run {
	uint32_t tensor; /* index in the record */
	uint64_t first;  /* element inside the tensor */
	uint64_t at;     /* element of the part's arrays */
	uint64_t full;   /* element of the gathered unit */
	uint64_t n;
};

/* The trainable pieces of @p, ascending. @ret: room for rec->n_tensors. Return: how many. */
unsigned unit_runs(const struct unit *u, const struct unit_part *p, struct unit_run *ret);

#endif
