/*
 * As much of CUDA C++ as kernels/cuda uses, for a C++ compiler of the host: included before
 * the .cu files (-include), so that the very code of the kernels runs in a test without a
 * device. The threads of a block are fibers, which take turns at barriers.
 */
#ifndef SHARDD_TESTS_CUDA_HOST_H
#define SHARDD_TESTS_CUDA_HOST_H

#include <stdint.h>

#define __global__
#define __device__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

struct dim {
	unsigned x;
};
extern struct dim threadIdx, blockIdx, gridDim;

struct uint2 {
	uint32_t x, y;
};
struct uint4 {
	uint32_t x, y, z, w;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
	return { x, y };
}

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
	return { x, y, z, w };
}

/* A vector in memory is aligned to its size, or the device would stop. */
void check_alignment(const void *p, unsigned bytes);

template <class T> static inline T __ldcs(const T *p)
{
	check_alignment(p, sizeof(T));
	return *p;
}

/* While a launch can be cut off (emulated.h), stores take effect at the thread's next fence, and not
 * before; a load does not see those that are pending. */
void emulated_store(void *p, const void *value, unsigned bytes);

template <class T> static inline void __stcs(T *p, T value)
{
	check_alignment(p, sizeof(T));
	emulated_store(p, &value, sizeof(T));
}

/* Converts as the overloads of nvcc do. */
template <class T, class V> static inline void __stwb(T *p, V value)
{
	__stcs(p, static_cast<T>(value));
}

void __threadfence(void);

/* Barriers of the block; each has to be reached by all threads that have not ended. */
void __syncthreads(void);
bool __syncthreads_or(bool mine);
/* Between the threads of a warp, called by all of the block. */
double __shfl_down_sync(uint32_t lanes, double mine, int step);
uint32_t __reduce_max_sync(uint32_t lanes, uint32_t mine);

static inline uint32_t atomicMax(uint32_t *p, uint32_t value)
{
	uint32_t old = *p;

	*p = old > value ? old : value;
	return old;
}

static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long value)
{
	unsigned long long was = *p;

	*p = was + value;
	return was;
}

static inline uint32_t atomicXor(uint32_t *p, uint32_t value)
{
	uint32_t old = *p;

	*p = old ^ value;
	return old;
}

#endif
