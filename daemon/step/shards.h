/*
 * Gradient shards: what clipping, unscaling and norms work on. Loop thread only.
 */
#ifndef SHARDD_STEP_SHARDS_H
#define SHARDD_STEP_SHARDS_H

#include "work/share.h"

/* Bytes of the scratch COLL_FOUND_INF. */
#define SHARDS_FOUND_BYTES 256u

/* The state of a collective that works on them: the first member of its own. */
struct shards_state {
	unsigned stage;      /* shards_unscale_tick's */
	float factor;        /* for what it multiplies */
	struct share share;  /* of each device: what it has found, or the norms of its blocks */
	unsigned norm_stage; /* shards_norm_tick's */
	double total;        /* the norm */
};

static inline struct shards_state *shards_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct shards_state));
}

/* What comes of clipping, unscaling and a step. */
struct shards_outcome {
	double total_norm;
	bool has_total_norm; /* Step */
	bool found_inf;
	bool skipped; /* Step */
};

static inline struct shards_outcome *shards_outcome(const struct op *op)
{
	_Static_assert(sizeof(struct shards_outcome) <= OP_OUTCOME_BYTES, "room in struct op");
	return op_outcome(op);
}

/* Slot op_type.coll_free, or called by it. */
void shards_free(struct coll *c);

/* Those that a collective works on: of its unit, or of the units of its group that have a
 * gradient and, if it names some, are among them. */
bool shards_take_part(const struct coll *c, const struct unit *u);

/* The part of @u on the device of the collective's part @d. Return: NULL: it has none. */
const struct unit_part *shards_part(const struct coll *c, const struct unit *u, unsigned d);

/* Take @units of a request into the op: of its group, each once. Return: 0 or a fault. */
int shards_take_units(struct op *op, const uint32_t *units, size_t n, struct fault *f);

/* A word for the fingerprint: equal units, equal words. */
uint64_t shards_word(const struct op *op);

/* Refuse what needs all gradients of the group when some of them were used in backward
 * already, or handed out to the trainer's own optimizer. Return: 0 or a fault code. */
int shards_check_whole(const struct coll *c, struct fault *f);

/* Multiply all of them by shards_of(c)->factor, noting in the group whether one held an infinity or NaN
 * before that. coll_need_scratch of COLL_FOUND_INF has been asked for. A tick of its own. */
enum res shards_unscale_tick(struct coll *c);

/* Norms of all of them, block by block, in the order of devices, then units: in the slots of
 * shards_of(c)->share. A tick of its own. */
enum res shards_norm_tick(struct coll *c, double type);

/* What they add up to. */
double shards_total(const struct coll *c, double type);
/* Those of one unit's collective, one after the other, the caller's. Return: NULL without memory. */
double *shards_take_norms(const struct coll *c);

#endif
