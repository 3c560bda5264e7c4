/*
 * The kernels of a reduction, stage by stage, by the unit's plan (unit/reduce_plan.h). What
 * ranks have accumulated and what is new is added first, each rank's by itself; then the
 * ranks of a device are folded in rank order, replica by replica (where a replica has ranks
 * on two devices and no factor of its own: those of each device in its place); what is left of
 * the plan follows when the devices' sums have been added. Replicas that have a factor and ranks
 * on two devices are added between the devices one by one (reduce_replicas.c). Fills launches, runs
 * nothing. Loop thread only.
 */
#ifndef SHARDD_REDUCE_REDUCE_RUN_H
#define SHARDD_REDUCE_REDUCE_RUN_H

#include "reduce/fused_steps.h"
#include "step/gradient.h"
#include "work/chain.h"
#include "work/coll.h"
#include "unit/reduce_plan.h"

struct reduce_args {
	bool defer;  /* the all-reduce between replicas */
	bool more;   /* is to come in this backward pass */
	bool unused; /* by this rank; when it is over: by all */
	/* tensors that this rank has not used; when it is over, in @owned: that none has */
	const uint32_t *tensors; /* the request's; valid until done */
	size_t n_tensors;
};

static inline struct reduce_args *reduce_args(const struct op *op)
{
	_Static_assert(sizeof(struct reduce_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

/* What a rank has brought: the run's from its beginning on. Nothing for a rank without inputs. */
struct reduce_input {
	struct region gradient, accumulated;
	bool included; /* what earlier reductions left is in @accumulated */
};

struct reduce_run {
	struct reduce_plan plan;
	bool defer;        /* keep the partials, reduce no further */
	bool accumulate;   /* to a gradient that is there */
	bool had_partials; /* of reductions that were deferred */
	bool apart;        /* partials are made before what follows */
	bool whole;        /* replicas: none has ranks on two devices */
	bool chained;      /* ranks are added while devices talk, not before (work/chain.h) */
	struct chain chain;
	bool sets;        /* each replica has a set of devices of its own (reduce_sets.c) */
	bool crossed;     /* some have, and what they come to has a factor of its own; not sets */
	uint32_t replica; /* crossed: the one at work */
	unsigned replica_stage; /* crossed, sets */
	uint32_t replicas;      /* of the group */
	uint32_t shard_ranks;   /* of a replica */
	uint32_t
		here; /* partials of a device, at most, on any node; crossed, sets: of its segment */
	uint32_t spans;        /* pieces of a part, at most (unit_spans) */
	size_t launches;       /* of a device in one stage, at most */
	uint64_t stride;       /* bytes between partials */
	uint64_t lonely_bytes; /* of gradients to be converted beside accumulated ones */
	uint64_t zero_bytes;   /* what ranks without inputs contribute; then nothing is lonely */
	unsigned stage;
	struct reduce_input *inputs; /* by member */
	const void **added;          /* by member: what is added to what it has */
	struct unit_run *span;       /* owned: of the part at work */
	struct fused_steps steps;    /* of a Reduce that steps the unit */
	const void **pieces;         /* inputs of spans: @spans * (c->n + 1) */
	const void *partials[];      /* @here per part */
};

struct reduce_batch;

/* The state of a Reduce. */
struct reduce_state {
	struct gradient_state gradient; /* first: gradient_of */
	struct reduce_run *run;         /* owned */
	struct list small;              /* group->small, while it waits to be in a batch */
	struct reduce_batch *batch;     /* that runs its stages */
};

static inline struct reduce_state *reduce_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct reduce_state));
}

/* Scratch of a reduction. Where there are zeros nothing is converted. */
enum {
	REDUCE_SUMS = 0,
	REDUCE_PARTIALS = 1,
	REDUCE_CONVERTED = 2,
	REDUCE_ZEROS = REDUCE_CONVERTED,
	REDUCE_PACKED = 3
};

/* Shared by the files of reduce_run. reduce_input_dtype: the type of a rank's gradient, after
 * accumulated gradients were converted. reduce_by_span: @r by the pieces of tensors. reduce_pack:
 * the sums in the order in which they are scattered. */
enum dtype reduce_input_dtype(const struct coll *c);
struct k_factor reduce_head(const struct coll *c); /* of each rank's gradient, unless run->apart */
struct k_factor reduce_tail(const struct coll *c); /* of a device's sum, before those are added */
void reduce_by_span(struct coll *c, unsigned d, const struct k_reduce *r);
void reduce_pack(struct coll *c, unsigned d);

/* Where a Reduce goes on (op_reduce.c); a batch takes it from FOLD to BETWEEN or ARRIVE. */
enum reduce_stage {
	REDUCE_AGREE,
	REDUCE_PREPARE,
	REDUCE_FOLD,
	REDUCE_REPLICAS,
	REDUCE_OVER_SETS,
	REDUCE_DEFER,
	REDUCE_BETWEEN,
	REDUCE_FINISH,
	REDUCE_ARRIVE
};

/* Kernels; those that step the unit are over only when they were executed. Return: RES_WAIT. */
static inline enum res reduce_kernels(struct coll *c)
{
	return gradient_of(c)->fused ? coll_kernels_sync(c) : coll_kernels(c);
}

/* Whose arithmetic PyTorch has on the unit's devices. */
enum reduce_device reduce_device_of(const struct unit *u);
struct reduce_plan reduce_plan_for(const struct job *job, const struct unit *u);

/* Are the ranks of every replica of c->unit on one device? */
bool reduce_whole_replicas(const struct coll *c);

/* One rank's new gradient *@from, added to what it has accumulated (@to). */
void reduce_add_launch(const struct unit *u, const struct reduce_plan *plan, void *to,
		       const void **from, struct launch *launch);
/* DDP: what earlier reductions left, added to a rank's gradient at *@to. */
void reduce_include_launch(const struct unit *u, const struct unit_part *p, const void **shard,
			   const void *to, struct launch *launch);
/* @from in the dtype that is accumulated in. */
void reduce_convert_launch(const struct unit *u, const struct reduce_plan *plan, void *to,
			   const void *from, struct launch *launch);

/* For a collective whose members have brought what they reduce: that is taken out of their
 * tables. Return: NULL without memory. */
struct reduce_run *reduce_run_new(struct coll *c);
/* Its inputs were used, or it has ended without that: they go back to their members' pools, or
 * to the tables of the members that are still in the epoch. Both safe twice. */
void reduce_give_inputs(struct coll *c);
void reduce_put_back(struct coll *c);
/* No inputs are left. Return: NULL. NULL is allowed. */
struct reduce_run *reduce_run_free(struct reduce_run *run);

/* The next stage of @c's kernels: true, and launches are there, or false: there is none left
 * before devices talk. Room for run->launches each. */
bool reduce_next_stage(struct coll *c);
/* Bytes of scratch @which on each device; 0: none. */
uint64_t reduce_scratch(const struct coll *c, unsigned which);
/* Where the sums are that the devices are to add: a scratch. */
unsigned reduce_sums(const struct coll *c);
/* The last launches of a part, when the devices' sums are added. */
void reduce_finish(struct coll *c, unsigned d);

/* What the devices add: of @c's sums, all on every device, or on each its segment. */
uint64_t reduce_segment(const struct coll *c);
/* Do others go on as soon as the last operation between devices is issued? */
bool reduce_lets_others_talk(const struct coll *c);
/* Ranks are not added before devices talk: is that possible? RES_FAILED: with c->fault, on all nodes. */
enum res reduce_check_chain(struct coll *c);
/* Add them, run->sets: those of each set. They are at p->sums of every part at the next tick. */
enum res reduce_talk(struct coll *c);

/* -- where replicas cross devices (reduce_replicas.c) --------------------------- */

/* When no stage is left: every replica's sum over its ranks, with its factor, in the partials of
 * its own; then, if nothing is deferred, the shards are made of them. A tick of its own. */
enum res reduce_replicas_tick(struct coll *c);

/* A launch: what a replica has come to on device @d, p->sums, is added to what was kept of it, at @partial
 * (reduce_replicas.c). */
void reduce_keep(struct coll *c, unsigned d, void *partial);

/* -- where replicas have sets of devices (reduce_sets.c) ------------------------ */

/* When no stage is left: the sum over all replicas at p->sums of every part; or, deferred, each
 * replica's in the partials of its own. A tick of its own. */
enum res reduce_sets_tick(struct coll *c);

#endif
