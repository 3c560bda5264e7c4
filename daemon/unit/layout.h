/*
 * How a unit's elements are cut into shards, and by which factors its gradients are
 * divided. Pure arithmetic, any thread.
 *
 * Trained and frozen tensors are cut separately, by the same rule. FLAT: one row of elements, of
 * which rank r owns [r*S, min((r+1)*S, N)). DIM0: each tensor by its first dimension, R =
 * ceil(d0/W) rows per rank; a shard is these pieces in order, S elements in all. The rest of a
 * shard is zero.
 */
#ifndef SHARDD_UNIT_LAYOUT_H
#define SHARDD_UNIT_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

/* Largest number of elements of a unit: its fp32 bytes, padded, and three times that are far below
 * 2^64. */
#define LAYOUT_MAX_ELEMENTS (UINT64_C(1) << 48)

struct layout {
	uint64_t elements; /* of a gradient buffer: FLAT: N, of what is trained; DIM0: padded */
	uint64_t shard_elements; /* S of what is trained; FLAT: ceil(N/W), up to a multiple of m */
	uint64_t padded;         /* S*W */
	uint64_t frozen;         /* the same of what is frozen: elements and S */
	uint64_t frozen_shard;
	uint32_t ranks;    /* W: of one replica */
	uint32_t replicas; /* 0 stands for 1 */
	bool dim0;
	bool sets; /* each replica is on devices of its own: layout_has_sets */
};

/* Rank r of @ranks owns [r*S, min((r+1)*S, N)); the rest of its shard is zero.
 * fairscale's flat parameter (m == 1) and XLA's (m > 1, default there 128): with
 * W*m-padding at the end the two agree.
 * Return: false if it does not fit LAYOUT_MAX_ELEMENTS. */
bool layout_flat(uint64_t elements, uint32_t ranks, uint32_t multiple, struct layout *ret);

/* Rows of one rank of a tensor of @d0 rows. */
static inline uint64_t layout_rows(uint64_t d0, uint32_t ranks)
{
	return (d0 + ranks - 1) / ranks;
}

/* FLAT: first element of rank @r's shard and how many of the N it owns (may be 0). For tests. */
uint64_t layout_begin(const struct layout *l, uint32_t r);
uint64_t layout_owned(const struct layout *l, uint32_t r);

/* Can each replica have a set of devices of its own, as many as each other one? @device_of: by index of
 * @ranks ranks, the number of its device, of @devices; replica r has ranks [r*@shard_ranks,
 * (r+1)*@shard_ranks), and must have devices [r*E, (r+1)*E). Not if one device, or one set, has all. */
bool layout_has_sets(const uint16_t *device_of, uint32_t ranks, uint32_t shard_ranks,
		     unsigned devices);

/* Number of the @devices devices over which the shards of one replica are spread: 1 if every device
 * can have its own replica, those of its set if it has one, else all. */
unsigned layout_spread(const struct layout *l, unsigned devices);
/* Ranks of one part when the shards are spread over @spread devices. */
uint32_t layout_part_ranks(const struct layout *l, unsigned spread);
/* P, elements of one part: the trained elements in the shards of these ranks. FLAT: part d is [d*P,
 * (d+1)*P). */
uint64_t layout_part(const struct layout *l, unsigned spread);
uint64_t layout_frozen_part(const struct layout *l, unsigned spread);
/* FLAT: how many of the N elements part @d has (may be 0). */
uint64_t layout_part_owned(const struct layout *l, unsigned spread, unsigned d);
/* Elements of the gathered unit: the trained ones of all parts, then the frozen ones. Without
 * frozen ones: those of a gradient buffer. */
uint64_t layout_full(const struct layout *l, unsigned spread);

/* The gradient divide factors of fairscale, PyTorch/XLA and torch's FSDP hooks
 * (semantics 4.1): pre is the smallest power of two reached while W is divisible
 * by it and W/f > f; post = W/pre. */
void layout_divide_factors(uint32_t ranks, double *ret_pre, double *ret_post);

/* Product of a shape. Return: false on a zero dimension or overflow over
 * LAYOUT_MAX_ELEMENTS. */
bool layout_numel(const uint64_t *shape, uint32_t dims, uint64_t *ret);

/* Do the strides (elements) of a shape leave no gap: is it row-major except for the order of its
 * dimensions? @ret_plain: it is row-major as it stands. Strides of dimensions of one element do not
 * matter. */
bool layout_dense(const uint64_t *shape, const uint64_t *strides, uint32_t dims, bool *ret_plain);

#endif
