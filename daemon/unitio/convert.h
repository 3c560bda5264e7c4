/*
 * What ConvertUnits does when it may: new memory, the arrays repacked into it one after the other,
 * and the swap. op_convert.c asks for it in this order. Loop thread only.
 */
#ifndef SHARDD_UNITIO_CONVERT_H
#define SHARDD_UNITIO_CONVERT_H

#include "job/relayout.h"
#include "work/agree.h"
#include "work/coll.h"

struct convert_args {
	const uint32_t *units; /* the request's; valid until done */
	size_t n;
	uint32_t layout, multiple, strategy, shard_ranks;
	const uint32_t *unfreeze; /* the request's; tensors of the one unit, ascending */
	size_t n_unfreeze;
	struct unit *like; /* whose optimizer the unit gets; NULL: it keeps its own */
};

static inline struct convert_args *convert_args(const struct op *op)
{
	_Static_assert(sizeof(struct convert_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

/* The state of the collective. */
struct convert {
	struct relayout *units; /* owned; NULL: convert_new is still to be called */
	unsigned n;
	struct relayout_memory mem;
	unsigned unit, array; /* what is repacked now */
	unsigned stage;       /* of convert_tick */
	bool clean;           /* nothing has changed since the commit when it began */
	struct agree agree;
};

static inline struct convert *convert_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct convert));
}

/* The record of @u as @op would have it: without parts. Its strings, and the tensors that stay as they
 * are, are the unit's; the optimizer is the unit's, or that of the unit that it is taken from. Return:
 * 0 or a fault code. */
int convert_record(const struct op *op, const struct unit *u, state_unit *ret, struct fault *f);
/* Free what is its own of a record by convert_record; @u: the unit. */
void convert_record_free(const struct unit *u, state_unit *rec);

/* Begin. Return: 0 or -ENOMEM. */
int convert_new(struct coll *c);
/* Slot op_type.coll_let_go. Old memory is the job's, or with it gone; the new one has become the
 * job's or goes here. */
void convert_let_go(struct coll *c);

/* A place in the slabs for each new array. Return: 0 or -ENOMEM. */
int convert_place(struct convert *v);

/* Repack array after array; then the units are what was asked for. A tick of its own. */
enum res convert_tick(struct coll *c);

#endif
