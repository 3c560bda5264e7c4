/*
 * The gradients that DistributedDataParallel reduces together: PyTorch's assignment of tensors to
 * buckets by size. Pure arithmetic, any thread.
 */
#ifndef SHARDD_BUCKETS_H
#define SHARDD_BUCKETS_H

#include <stdbool.h>
#include <stdint.h>

/* The first bucket is small, so that its reduction starts early; then the user's or: */
#define BUCKETS_FIRST_BYTES (UINT64_C(1) << 20)
#define BUCKETS_CAP_BYTES   (UINT64_C(25) << 20)

struct bucket_tensor {
	uint64_t bytes; /* of its gradient */
	uint32_t key;   /* dtypes (gradient, reduce) and device: a bucket has one */
	bool sparse;    /* its gradient is rows and values; it is alone in its bucket */
};

/*
 * Assign @n tensors, in their order. Each key has an open bucket; a tensor is added to it,
 * and then, if it has reached the limit, it is closed and the next one of this key has the
 * next limit, as long as there is one. So a bucket may be larger than its limit.
 * @limits: bytes; none: no limit. @map: NULL, or the index of each tensor: then buckets come
 * in the order in which they were closed, those never closed at the end by the first
 * tensor of their key; else by their smallest index.
 * @ret_tensors: @n indices, bucket after bucket. @ret_sizes: room for @n, how many tensors each
 * bucket has.
 * Return: how many buckets, or -ENOMEM.
 */
int64_t buckets_assign(const struct bucket_tensor *tensors, uint32_t n, const uint64_t *limits,
		       unsigned n_limits, const uint32_t *map, uint32_t *ret_tensors,
		       uint32_t *ret_sizes);

/* The same buckets, last one first; the order inside each bucket does not change. @tensors and
 * @sizes as buckets_assign left them. Return: 0 or -ENOMEM. */
int buckets_reverse(uint32_t *tensors, uint32_t *sizes, uint32_t n_buckets);

#endif
