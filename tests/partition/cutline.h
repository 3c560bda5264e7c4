/*
 * The rules of an elastic job whose nodes go on without others, and come back: commits are a line (invariant 8 of
 * docs/nodes.md). Each epoch that commits has a node on which the epoch of the commit before it has begun, or one
 * after that. A node has no commit that the store has not decided.
 */
#ifndef SHARDD_TESTS_PARTITION_CUTLINE_H
#define SHARDD_TESTS_PARTITION_CUTLINE_H

#include <stdint.h>

void cutline_begin(void);
/* Epoch @epoch has begun on @node; 0, or the one of before: none has. */
void cutline_begun(unsigned node, uint64_t epoch);
/* @node has lost its memory. */
void cutline_forgets(unsigned node);
/* That is the last commit that the store has; step 0: it has none. */
void cutline_decided(uint64_t step, uint64_t epoch);
/* @node has taken that commit, or has none. @epoch: 0: in its place another rank has. */
void cutline_has(unsigned node, uint64_t step, uint64_t epoch);
/* Epochs of so many nodes that have committed, since the beginning of the program. */
unsigned cutline_epochs_of(unsigned nodes);

#endif
