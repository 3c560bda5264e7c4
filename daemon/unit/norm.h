/*
 * Norms of gradients and clipping by them (semantics 4.16): fills launches, folds their partial
 * results, computes the factor. Pure arithmetic but for the launches; loop thread only.
 *
 * The order of addition is published (docs/semantics.md): per block of KERNEL_NORM_BLOCK
 * elements in fp64 lanes (kernels.h), blocks in order, units in the order of their numbers,
 * devices in the group's order, all in fp64.
 */
#ifndef SHARDD_UNIT_NORM_H
#define SHARDD_UNIT_NORM_H

#include <stddef.h>

#include "core/fault.h"
#include "unit/unit.h"

/* Numbers as in shardd.proto. */
enum clip_profile { CLIP_FAIRSCALE = 1, CLIP_XLA = 2, CLIP_TORCH = 3, _CLIP_N };

struct clip {
	double max_norm;
	double type; /* above 0; INFINITY: the largest element */
	enum clip_profile profile;
	bool error_if_nonfinite;
};

/* Does part @d count? Not if an earlier one has the same elements (a replica). */
bool norm_counts(const struct unit *u, unsigned d);
/* Blocks of one part; and of all parts that count, whose blocks are adjacent. */
size_t norm_blocks(const struct unit_part *p);
/* The same of part @number of those on all nodes: 0 unless it is one of the first replica, which are
 * those that count. */
size_t norm_blocks_of(const struct unit *u, unsigned number);
size_t norm_partials(const struct unit *u);

/* The kernel for part @p. @partial: one number per block. */
void norm_launch(struct launch *launch, const struct unit_part *p, double type, double *partial);

/* Add the next block; and the norm of the sum. */
double norm_add(double sum, double block, double type);
double norm_of(double sum, double type);

/* May gradients of norm @total be clipped? Return: 0 or a fault code. */
int norm_clip_check(const struct clip *clip, double total, struct fault *f);
/* The factor, in fp32 as the systems compute it. Return: false: nothing is multiplied. */
bool norm_clip_factor(const struct clip *clip, double total, float *ret);

#endif
