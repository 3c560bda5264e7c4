/*
 * Kernels that change arrays in place can be completed after their process was killed at any
 * instruction, if they are given a struct k_undo: block by block, they copy the old contents there
 * before they change anything. It is small enough to stay in the first-level cache, and belongs to
 * one thread at a time.
 *
 * One word says which block may be half changed. It is stored after the copy and before the first
 * change. While a block is changed, its old contents are in one half; those of the next block go to
 * the other one. So whoever finds the memory restores that block, and goes on with it:
 * k_undo_restore. Blocks before it are done.
 *
 * The stores of a thread take effect in their order for whoever reads them after it was killed; the
 * compiler must not exchange them, which is what the signal fences are for. Host memory only.
 */
#ifndef SHARDD_KERNELS_UNDO_H
#define SHARDD_KERNELS_UNDO_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define K_UNDO_BLOCK  64u
#define K_UNDO_ARRAYS 4u

struct k_undo {
	/* aligned: a vector is in one line of the cache */
	_Alignas(64) float old[2][K_UNDO_ARRAYS][K_UNDO_BLOCK];
	/* 0: no block yet; else its first element, its length << 48, the half << 63 */
	_Atomic uint64_t at;
};

struct k_undo_block {
	uint64_t at; /* element of the launch */
	uint32_t n;  /* 0: nothing was changed */
	uint32_t half;
};

static inline struct k_undo_block k_undo_block_of(const struct k_undo *u)
{
	uint64_t at = atomic_load_explicit(&u->at, memory_order_acquire);

	return (struct k_undo_block){ at & ((UINT64_C(1) << 48) - 1),
				      (uint32_t)(at >> 48) & 0x7fffu, (uint32_t)(at >> 63) };
}

/* From here on no block has been changed. */
static inline void k_undo_begin(struct k_undo *u)
{
	atomic_store_explicit(&u->at, 0, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
}

/* Elements [@i, @i + @n) of @arrays, n at most K_UNDO_BLOCK, are changed after this. */
static inline __attribute__((always_inline)) void k_undo_save(struct k_undo *u,
							      float *const *arrays,
							      unsigned n_arrays, size_t i, size_t n)
{
	uint64_t half = (atomic_load_explicit(&u->at, memory_order_relaxed) >> 63) ^ 1;

	for (unsigned k = 0; k < n_arrays; k++) {
		const float *restrict from = arrays[k] + i;
		float *restrict to = u->old[half][k];

		if (n == K_UNDO_BLOCK)
			for (size_t j = 0; j < K_UNDO_BLOCK; j++)
				to[j] = from[j];
		else
			memcpy(to, from, n * sizeof(*to));
	}
	atomic_signal_fence(memory_order_seq_cst);
	atomic_store_explicit(&u->at, (uint64_t)i | (uint64_t)n << 48 | half << 63,
			      memory_order_relaxed);
	atomic_signal_fence(memory_order_seq_cst);
}

/* Put the old contents back: @arrays begin at element 0 of the launch. Return: the first element
 * that is not done; @begin if none is. */
static inline uint64_t k_undo_restore(const struct k_undo *u, float *const *arrays,
				      unsigned n_arrays, uint64_t begin)
{
	struct k_undo_block b = k_undo_block_of(u);

	for (unsigned k = 0; k < n_arrays && b.n; k++)
		memcpy(arrays[k] + b.at, u->old[b.half][k], b.n * sizeof(float));
	return b.n ? b.at : begin;
}

#endif
