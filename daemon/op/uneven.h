/*
 * JoinUneven, with surrogates or with error_if_uneven. Loop thread only.
 */
#ifndef SHARDD_OP_UNEVEN_H
#define SHARDD_OP_UNEVEN_H

#include "op/op.h"

/* @join is an active JoinUneven, in its group's list, and is not the last one. From here on it counts
 * in what its peers have asked for and will ask for. With error_if_uneven it may be gone
 * afterwards. */
void uneven_begin(struct op *join);

/* With error_if_uneven: has the rank of @join still to be told that the ranks are uneven? Then
 * op->fault says so, and it is told. Return: 0 or op->fault.code. */
int uneven_told(struct op *join);

#endif
