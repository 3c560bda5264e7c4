/*
 * What external.c is made of: which elements of a unit a rank's external optimizer steps, and
 * how what came back reaches the other copies of the unit. Loop thread only.
 */
#ifndef SHARDD_STEP_EXTERNAL_H
#define SHARDD_STEP_EXTERNAL_H

#include "job/job.h"
#include "shardd.pb-c.h"
#include "unit/runs.h"
#include "work/coll.h"

/* What NextShard hands out. */
struct external_outcome {
	struct unit *unit; /* whose shard */
	uint64_t elements; /* of it */
	uint64_t gradient_offset;
};

static inline struct external_outcome *external_outcome(const struct op *op)
{
	_Static_assert(sizeof(struct external_outcome) <= OP_OUTCOME_BYTES, "room in struct op");
	return op_outcome(op);
}

/*
 * Exactly one rank's external optimizer steps each trained element: a rank whose device has it.
 *
 * SHARD, and every rank on the device that has its shard: the shard, as the layout has it.
 * Else the ranks on the devices that have the same elements (REPLICATE: all) share these:
 * in equal pieces, in the order of the devices and on a device in that of the ranks, so that
 * what the ranks of a device have is in one piece.
 */
struct external_share {
	struct unit_part *part; /* where it lies */
	uint64_t elements;      /* in the rank's copy; may be 0 */
	struct unit_run *runs;  /* owned; run.shard: where it is in the copy */
	unsigned n_runs;
};

/* What rank @index of the group has. Return: 0 or -ENOMEM. */
int external_share_init(struct external_share *s, const struct job *job, struct unit *u,
			uint32_t index);
void external_share_deinit(struct external_share *s);
/* How many elements that are. */
uint64_t external_share_elements(const struct job *job, struct unit *u, uint32_t index);
/* Elements [begin, end) of the arrays of part @d of all nodes are all that its ranks have. Return: 0 or -ENOMEM. */
int external_share_of_device(const struct job *job, struct unit *u, unsigned d, uint64_t *ret_begin,
			     uint64_t *ret_end);

/* The pieces of a share as a reply has them, in one block of memory. */
struct external_pieces {
	size_t n;
	Shardd__V1__ShardPiece **pointers;
	Shardd__V1__ShardPiece *messages;
};
/* Return: the caller's to free, or NULL without memory. */
struct external_pieces *external_pieces_new(const struct external_share *s);

/* The ranks of all nodes have given back their shards of @u for the @turn-th time in this epoch (struct
 * job_ops give): it is stepped. Return: false: those of this node have not. */
bool external_start(struct job *job, struct unit *u, uint64_t turn);

/* Is there more than one copy of a rank's share of @u? */
bool external_has_copies(const struct unit *u);
/* All shares are back, each in the copy on its rank's device: bring them to the others, then
 * @done, with a negative status if they may differ. Until then the unit counts as stepping.
 * Only if external_has_copies. */
void external_copies(struct job *job, struct unit *u,
		     void (*done)(struct job *job, struct unit *u, int status));

/* A Reduce of c->unit has begun, for the last time in its pass; and is over. */
void external_begin(struct coll *c);
void external_ready(struct coll *c);

/* It has ended, perhaps without that. */
void external_failed(struct coll *c);

#endif
