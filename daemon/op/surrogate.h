/*
 * Join surrogates: ops in place of ranks that have no more inputs. Loop thread only.
 */
#ifndef SHARDD_OP_SURROGATE_H
#define SHARDD_OP_SURROGATE_H

#include "op/op.h"

struct join_args {
	bool by_active;
	bool strict;  /* error_if_uneven */
	bool begun;   /* it counts as one that has joined */
	bool is_over; /* all ranks have joined, on all nodes */
	uint32_t last;
	uint64_t number; /* of the last collective of the rank itself */
	uint64_t surrogates;
};

static inline struct join_args *join_args(const struct op *op)
{
	_Static_assert(sizeof(struct join_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

/* @join is an active JoinUneven, in its group's list. From here on surrogates take part in its
 * place in what its peers have asked for and will ask for. */
void surrogate_begin(struct op *join);

/* Can a surrogate of @join's rank take part in @op? Return: 0 or a fault code. */
int surrogate_check(const struct op *op, const struct op *join, struct fault *f);

/* @op has its number: give it to the surrogates of the ranks that have joined. If the op cannot be
 * done without these ranks, op->fault says so. */
void surrogate_number(struct op *op);

/* The collective at @number has failed: ranks that have joined have no part in it. */
void surrogate_skip(struct group *g, uint64_t number);

/* @op is about to be announced: announce its surrogates. */
void surrogate_announce(struct op *op);

/* @op, which had @number in @g, is refused: end its surrogates with @fault. @op may be freed
 * already: it is only compared. */
void surrogate_refuse(struct group *g, uint64_t number, const struct op *op,
		      const struct fault *fault);

#endif
