/*
 * How a unit's elements are cut into shards (flat layout), and by which factors
 * its gradients are divided. Pure arithmetic, any thread.
 */
#ifndef SHARDD_UNIT_LAYOUT_H
#define SHARDD_UNIT_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

/* Largest number of elements a unit may have: its fp32 bytes, padded, and three
 * times that stay far inside 64 bits. */
#define LAYOUT_MAX_ELEMENTS (UINT64_C(1) << 48)

struct layout {
	uint64_t elements;       /* N: of all tensors */
	uint64_t shard_elements; /* S: ceil(N/W), up to a multiple of m */
	uint64_t padded;         /* S*W */
	uint32_t ranks;          /* W */
};

/* Rank r of @ranks owns [r*S, min((r+1)*S, N)); the rest of its shard is zero.
 * fairscale's flat parameter (m == 1) and XLA's (m > 1, default there 128): with
 * W*m-padding at the end the two agree.
 * Return: false if it does not fit LAYOUT_MAX_ELEMENTS. */
bool layout_flat(uint64_t elements, uint32_t ranks, uint32_t multiple, struct layout *ret);

/* First element of rank @r's shard and how many of the N it owns (may be 0). */
uint64_t layout_begin(const struct layout *l, uint32_t r);
uint64_t layout_owned(const struct layout *l, uint32_t r);

/* Elements of one part when the shards are spread over @devices devices: those of
 * ceil(W / devices) ranks. Part d is [d*P, (d+1)*P). */
uint64_t layout_part(const struct layout *l, unsigned devices);
/* How many of the N elements part @d has (may be 0). */
uint64_t layout_part_owned(const struct layout *l, unsigned devices, unsigned d);

/* The gradient divide factors of fairscale, PyTorch/XLA and torch's FSDP hooks
 * (semantics 4.1): pre is the smallest power of two reached while W is divisible
 * by it and W/f > f; post = W/pre. */
void layout_divide_factors(uint32_t ranks, double *ret_pre, double *ret_post);

/* Product of a shape. Return: false on a zero dimension or overflow over
 * LAYOUT_MAX_ELEMENTS. */
bool layout_numel(const uint64_t *shape, uint32_t dims, uint64_t *ret);

#endif
