/*
 * JoinUneven with error_if_uneven. Loop thread only.
 */
#ifndef SHARDD_OP_UNEVEN_H
#define SHARDD_OP_UNEVEN_H

#include "op/op.h"

/* Have those who have joined asked for error_if_uneven? Then there are no surrogates. */
bool uneven_strict(const struct group *g);

/* @op is about to be announced: if they have no inputs for it nobody goes on, and op->fault says
 * so. Return: 0 or op->fault.code. */
int uneven_announce(struct op *op);

/* As surrogate_begin, with error_if_uneven. @join may be gone afterwards. */
void uneven_begin(struct op *join);

/* Before @op, a collective, gets a number: has its rank still to be told? Then op->fault says
 * so. Return: 0 or op->fault.code. */
int uneven_check(struct op *op);

/* The same for a JoinUneven, after which it is told. */
int uneven_told(struct op *join);

#endif
