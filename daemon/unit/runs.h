/*
 * The pieces of tensors that lie on one part of a unit, or in one rank's shard: all code that works
 * tensor by tensor (optimizer settings, initialisers, padding that must not count) uses this
 * module, so that it works for every layout. Reads only what is fixed from the registration on: any thread.
 */
#ifndef SHARDD_UNIT_RUNS_H
#define SHARDD_UNIT_RUNS_H

#include "unit/unit.h"

struct unit_run {
	uint32_t tensor; /* index in the record; never an alias */
	uint64_t first;  /* element inside the tensor */
	uint64_t at;     /* element of the part's arrays; frozen: of its params */
	uint64_t full;   /* element of the gathered unit, and of a gradient buffer */
	uint64_t shard;  /* of one rank's: element of its shard, frozen ones behind the others */
	uint64_t n;
};

enum unit_which { UNIT_TRAINED = 1, UNIT_FROZEN = 2, UNIT_ALL = 3 };

/* The trained pieces of @p, ascending. @ret: room for rec->n_tensors. Return: how many. */
unsigned unit_runs(const struct unit *u, const struct unit_part *p, struct unit_run *ret);
/* The same of @which, the trained ones first. */
unsigned unit_runs_of(const struct unit *u, const struct unit_part *p, enum unit_which which,
		      struct unit_run *ret);

/* The piece of tensor @i on @p. Return: false: there is none. */
bool unit_part_run(const struct unit *u, const struct unit_part *p, uint32_t i,
		   struct unit_run *ret);

/* The same on the parts at @position, which may be on other nodes. */
bool unit_position_run(const struct unit *u, unsigned position, uint32_t i, struct unit_run *ret);

/* The pieces that rank @index of the group owns, as they lie on its part. */
unsigned unit_rank_runs(const struct unit *u, uint32_t index, enum unit_which which,
			struct unit_run *ret);
/* The piece of tensor @i (not an alias) that rank @index of the group owns. Return: false: there is
 * none; then only ret->shard is set. */
bool unit_rank_run(const struct unit *u, uint32_t index, uint32_t i, struct unit_run *ret);
/* Which part of a replica that is: 0 to spread - 1. */
unsigned unit_rank_position(const struct unit *u, uint32_t index);

/* The trained pieces of @p in their order, without the gaps between them, as one row: its elements,
 * and the pieces of its elements [from, from + n), whose @shard counts from there.
 * @ret: room for rec->n_tensors. Return: how many. */
uint64_t unit_row_elements(const struct unit *u, const struct unit_part *p);
unsigned unit_row_runs(const struct unit *u, const struct unit_part *p, uint64_t from, uint64_t n,
		       struct unit_run *ret);

/* The gaps between the trained pieces of @p, in its first p->n elements: padding, which must not
 * count. @ret: room for rec->n_tensors. Only at and n are set. Return: how many. */
unsigned unit_gaps(const struct unit *u, const struct unit_part *p, struct unit_run *ret);
/* The trained pieces without regard to where a tensor ends: one, unless there are gaps.
 * @ret: as above; only at, full and n are set. */
unsigned unit_spans(const struct unit *u, const struct unit_part *p, struct unit_run *ret);

#endif
