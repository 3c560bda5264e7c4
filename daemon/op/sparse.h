/*
 * What op_sparse.c and sparse_fold.c share: a ReduceSparse that runs. Loop thread only.
 */
#ifndef SHARDD_OP_SPARSE_H
#define SHARDD_OP_SPARSE_H

#include "op/op_impl.h"
#include "unit/reduce_plan.h"
#include "unit/runs.h"

/* Scratch on each device: row numbers; the whole tensor in fp32; sums in the plan's dtype. */
enum { SPARSE_ROWS = 0, SPARSE_TABLE = 1, SPARSE_PARTIALS = 2, SPARSE_SUMS = 3 };

/* Noted at the start: if the epoch ends meanwhile, the members give their buffers back, and
 * the memory stays until we are done. */
struct sparse_work {
	struct reduce_plan plan;
	uint64_t elements;            /* of the tensor */
	uint64_t all;                 /* rows of all ranks */
	bool apart;                   /* into a table first */
	bool folds;                   /* rank by rank, as Reduce folds them: sparse_fold.c */
	bool whole;                   /* then: replicas, none has ranks on two devices */
	bool crossed;                 /* then: some have, and replicas have a factor */
	uint32_t here;                /* then: sums of replicas on a device, at most */
	uint64_t stride;              /* then: bytes between these */
	void (*done)(struct coll *c); /* then: what follows */
	const void *tables[NODE_MAX_DEVICES];
	uint64_t given[NODE_MAX_DEVICES]; /* rows of the part's members before this turn */
	const void **partials;            /* behind @values; by device: @here of them */
	const void *values[];             /* by member */
};

/* What part @d has of the tensor, and where that is in the gradient. */
struct unit_run sparse_run(const struct coll *c, unsigned d);
float *sparse_gradient(const struct coll *c, unsigned d);
/* The kop that adds the rows of the member whose turn it is on device @d; none if it has no
 * rows. */
void sparse_add_rows(struct coll *c, unsigned d);

/* Must ranks be folded one after the other? Where sums are rounded, or replicas have sums of
 * their own. */
bool sparse_folds(const struct unit *u, const struct reduce_plan *plan);
/* For a work that does, in which there is room for partials of every rank on every device. */
void sparse_fold_init(const struct coll *c, struct sparse_work *w);
/* Bytes of scratch @which on each device; 0: none. */
uint64_t sparse_fold_scratch(const struct coll *c, unsigned which);
/* All ranks' rows into the gradient, then @done. */
void sparse_fold(struct coll *c, void (*done)(struct coll *c));

#endif
