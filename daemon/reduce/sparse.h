/*
 * What op_sparse.c and sparse_fold.c share: a ReduceSparse that runs. Loop thread only.
 */
#ifndef SHARDD_REDUCE_SPARSE_H
#define SHARDD_REDUCE_SPARSE_H

#include "step/gradient.h"
#include "work/coll.h"
#include "work/share.h"
#include "unit/reduce_plan.h"
#include "unit/runs.h"

struct sparse_args {
	uint32_t tensor;
	const int64_t *rows; /* valid until done */
	uint64_t n, values_offset;
	struct ddp *d;   /* a bucket of this one; NULL: none */
	uint32_t index;  /* there */
	unsigned layout; /* the assignment that it is a bucket of */
};

static inline struct sparse_args *sparse_args(const struct op *op)
{
	_Static_assert(sizeof(struct sparse_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

/* Scratch on each device: row numbers; the whole tensor in fp32; sums in the plan's dtype, or
 * where ranks are not folded the rows of one that names some of them again. */
enum {
	SPARSE_ROWS = 0,
	SPARSE_TABLE = 1,
	SPARSE_PARTIALS = 2,
	SPARSE_COALESCED = 2,
	SPARSE_SUMS = 3
};

/* Of an op that names a row several times, in op->owned; NULL: it does not, or ranks are
 * folded, which adds a rank's own first anyhow. */
struct sparse_repeats {
	uint64_t n_rows; /* that it names */
	int64_t at[];    /* of each entry its row's place in the list that follows: the rows */
};

/* Noted at the start: the ops hold their buffers until it ends. */
struct sparse_work {
	struct reduce_plan plan;
	uint64_t elements;   /* of the tensor */
	uint64_t all;        /* rows of all ranks */
	uint64_t mine;       /* of those on this node */
	bool apart;          /* into a table first */
	bool folds;          /* rank by rank, as Reduce folds them: sparse_fold.c */
	bool whole;          /* then: replicas, none has ranks on two devices */
	bool crossed;        /* then: some have, and replicas have a factor */
	uint32_t here;       /* then: sums of replicas on a device, at most */
	uint64_t stride;     /* then: bytes between these */
	unsigned fold_stage; /* then: of sparse_fold_tick */
	const void *tables[NODE_MAX_DEVICES];
	uint64_t given[NODE_MAX_DEVICES]; /* rows of the part's members before this turn */
	const void **partials;            /* behind @values; by device: @here of them */
	const void *values[];             /* by member */
};

/* The state of a ReduceSparse. */
struct sparse_state {
	struct gradient_state gradient; /* first: gradient_of */
	struct sparse_work *work;       /* owned; NULL: not yet */
	struct share share;             /* numbers of rows */
};

static inline struct sparse_work *sparse_of(const struct coll *c)
{
	return ((struct sparse_state *)coll_own(c, sizeof(struct sparse_state)))->work;
}

/* What part @d has of the tensor, and where that is in the gradient. */
struct unit_run sparse_run(const struct coll *c, unsigned d);
float *sparse_gradient(const struct coll *c, unsigned d);
/* The rows of the member whose turn it is on device @d, to the tensor. */
struct k_add_rows sparse_rows_launch(const struct coll *c, unsigned d);
/* The launch that adds the rows of the member whose turn it is on device @d; none if it has no
 * rows. */
void sparse_add_rows(struct coll *c, unsigned d);

/* Look for repeats of rows of the tensor's @rows. Return: 0 or -ENOMEM. */
int sparse_repeats_init(const struct coll *c, uint64_t rows);
/* Row numbers that all lists together have beside the entries'; bytes of the largest table. */
uint64_t sparse_repeats_indices(const struct coll *c);
uint64_t sparse_repeats_bytes(const struct coll *c, uint64_t width);
/* Of the member whose turn it is on device @d, or NULL. */
const struct sparse_repeats *sparse_repeats_now(const struct coll *c, unsigned d);
/* Entries of this turn's members with repeats, to a table of their own each: clear these, over at
 * the next tick; then fill them, over at the next; then sparse_add_coalesced is for the devices that
 * have one. */
enum res sparse_repeats_clear(struct coll *c);
enum res sparse_repeats_fill(struct coll *c);
void sparse_add_coalesced(struct coll *c, unsigned d);

/* Must ranks be folded one after the other? Where sums are rounded, or replicas have sums of
 * their own. */
bool sparse_folds(const struct unit *u, const struct reduce_plan *plan);
/* For a work that does, in which there is room for partials of every rank on every device. */
void sparse_fold_init(const struct coll *c, struct sparse_work *w);
/* Bytes of scratch @which on each device; 0: none. */
uint64_t sparse_fold_scratch(const struct coll *c, unsigned which);
/* All ranks' rows into the gradient. A tick of its own. */
enum res sparse_fold_tick(struct coll *c);

/* Rows of tensor @tensor of @u: are they in range, and is it one that has rows? Return: 0 or a
 * fault code. */
int op_sparse_check_rows(const struct unit *u, uint32_t tensor, const int64_t *rows, size_t n,
			 struct fault *f);

#endif
