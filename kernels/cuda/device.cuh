/*
 * Shared by all kernels: vectors of elements in memory, conversions, and the walk over a range.
 *
 * Every array is read and written once, in its order, so all accesses carry the hint
 * "evict first": data that other kernels left in the second-level cache stays there. None uses the
 * read-only path: several operations work in place.
 */
#ifndef SHARDD_CUDA_DEVICE_CUH
#define SHARDD_CUDA_DEVICE_CUH

#include <stdint.h>

#include "element.h"
#include "launch.h"

/* Bounds the registers of a kernel, so that a multiprocessor can hold @blocks of it. */
#define KERNEL(blocks) extern "C" __global__ void __launch_bounds__(LAUNCH_THREADS, blocks)

/* Bytes of an element. */
template <int T> constexpr int size_of = T == DTYPE_FP32 ? 4 : 2;

/* Neighbouring elements as they are in memory: 2, 4, 8 or 16 bytes. */
template <int BYTES> struct bits {
	uint32_t w[(BYTES + 3) / 4];
};

template <int BYTES> static __device__ __forceinline__ bits<BYTES> load(uint64_t address)
{
	bits<BYTES> b;

	if constexpr (BYTES == 16) {
		uint4 x = __ldcs(reinterpret_cast<const uint4 *>(address));
		b.w[0] = x.x, b.w[1] = x.y, b.w[2] = x.z, b.w[3] = x.w;
	} else if constexpr (BYTES == 8) {
		uint2 x = __ldcs(reinterpret_cast<const uint2 *>(address));
		b.w[0] = x.x, b.w[1] = x.y;
	} else if constexpr (BYTES == 4) {
		b.w[0] = __ldcs(reinterpret_cast<const uint32_t *>(address));
	} else {
		b.w[0] = __ldcs(reinterpret_cast<const uint16_t *>(address));
	}
	return b;
}

template <int BYTES> static __device__ __forceinline__ void store(uint64_t address, bits<BYTES> b)
{
	if constexpr (BYTES == 16)
		__stcs(reinterpret_cast<uint4 *>(address), make_uint4(b.w[0], b.w[1], b.w[2], b.w[3]));
	else if constexpr (BYTES == 8)
		__stcs(reinterpret_cast<uint2 *>(address), make_uint2(b.w[0], b.w[1]));
	else if constexpr (BYTES == 4)
		__stcs(reinterpret_cast<uint32_t *>(address), b.w[0]);
	else
		__stcs(reinterpret_cast<uint16_t *>(address), static_cast<uint16_t>(b.w[0]));
}

/* -- conversions: the processor's, which round to nearest even and keep NaN a NaN ---- */

#ifdef __CUDACC__
static __device__ __forceinline__ float fp16_widen(uint32_t half)
{
	float f;

	asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<uint16_t>(half)));
	return f;
}

template <int T> static __device__ __forceinline__ uint32_t narrow_one(float f)
{
	uint16_t half;

	if constexpr (T == DTYPE_BF16)
		asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(f));
	else
		asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(f));
	return half;
}

template <int T> static __device__ __forceinline__ uint32_t narrow_two(float low, float high)
{
	uint32_t both;

	if constexpr (T == DTYPE_BF16)
		asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
	else
		asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
	return both;
}
#else
/* For a test that runs the kernels without a device: the definitions. */
static float fp16_widen(uint32_t half)
{
	return fp16_to_f32(static_cast<uint16_t>(half));
}

template <int T> static uint32_t narrow_one(float f)
{
	return T == DTYPE_BF16 ? bf16_from_f32(f) : fp16_from_f32(f);
}

template <int T> static uint32_t narrow_two(float low, float high)
{
	return narrow_one<T>(low) | narrow_one<T>(high) << 16;
}
#endif

/* V elements of type T, in memory's form and in fp32. */
template <int T, int V> struct vec {
	static constexpr int BYTES = size_of<T> * V;
	using raw = bits<BYTES>;

	static __device__ __forceinline__ raw get(uint64_t array, uint64_t i)
	{
		return load<BYTES>(array + i * size_of<T>);
	}

	static __device__ __forceinline__ void put(uint64_t array, uint64_t i, raw b)
	{
		store<BYTES>(array + i * size_of<T>, b);
	}

	static __device__ __forceinline__ float widen(const raw &b, int j)
	{
		if constexpr (T == DTYPE_FP32)
			return EL_FLOAT(b.w[j]);
		uint32_t half = j & 1 ? b.w[j / 2] >> 16 : b.w[j / 2] & 0xffff;
		if constexpr (T == DTYPE_BF16)
			return EL_FLOAT(half << 16);
		return fp16_widen(half);
	}

	static __device__ __forceinline__ raw narrow(const float f[V])
	{
		raw b;

		if constexpr (T == DTYPE_FP32) {
#pragma unroll
			for (int j = 0; j < V; j++)
				b.w[j] = EL_BITS(f[j]);
		} else if constexpr (V == 1) {
			b.w[0] = narrow_one<T>(f[0]);
		} else {
#pragma unroll
			for (int j = 0; j < V; j += 2)
				b.w[j / 2] = narrow_two<T>(f[j], f[j + 1]);
		}
		return b;
	}
};

/* -- the walk ------------------------------------------------------------------------ */

/* The number of elements after which all arrays are at whole vectors; or none. */
#define UNALIGNED UINT64_MAX

template <int SIZE, int V> static __device__ __forceinline__ uint64_t head_of(uint64_t array)
{
	constexpr uint64_t mask = SIZE * V - 1;
	uint64_t bytes = -array & mask;

	return bytes % SIZE ? UNALIGNED : bytes / SIZE;
}

/* @head, if the vectors of @array also begin there. */
template <int SIZE, int V>
static __device__ __forceinline__ uint64_t head_with(uint64_t head, uint64_t array)
{
	constexpr uint64_t mask = SIZE * V - 1;

	return head == UNALIGNED || ((array + head * SIZE) & mask) ? UNALIGNED : head;
}

static __device__ __forceinline__ uint64_t thread_index()
{
	return static_cast<uint64_t>(blockIdx.x) * LAUNCH_THREADS + threadIdx.x;
}

static __device__ __forceinline__ uint64_t thread_count()
{
	return static_cast<uint64_t>(gridDim.x) * LAUNCH_THREADS;
}

/* Vector u of a turn that begins at element i. */
template <int V> static __device__ __forceinline__ uint64_t vector_at(uint64_t i, int u)
{
	return i + static_cast<uint64_t>(u) * LAUNCH_THREADS * V;
}

/* body.at<V, U>(i) for all n elements, each once: U vectors at a time for each thread of a block
 * while whole turns are left, then single vectors, then the elements before and after the vectors,
 * singly. Which thread takes what depends on n, head and the launch only. */
template <int V, int U, class B>
static __device__ __forceinline__ void walk(uint64_t n, uint64_t head, B &body)
{
	constexpr uint64_t turn = static_cast<uint64_t>(U) * LAUNCH_THREADS;
	const uint64_t vectors = (n - head) / V, turns = vectors / turn;
	const uint64_t singles = n - vectors * V;

	for (uint64_t t = blockIdx.x; t < turns; t += gridDim.x)
		body.template at<V, U>(head + (t * turn + threadIdx.x) * V);
	for (uint64_t v = turns * turn + thread_index(); v < vectors; v += thread_count())
		body.template at<V, 1>(head + v * V);
	if constexpr (V > 1)
		for (uint64_t i = thread_index(); i < singles; i += thread_count())
			body.template at<1, 1>(i < head ? i : i + vectors * V);
}

/* In vectors if the arrays allow it. */
template <int V, int U, class B>
static __device__ __forceinline__ void walk_any(uint64_t n, uint64_t head, B &body)
{
	if (head == UNALIGNED)
		walk<1, U>(n, 0, body);
	else
		walk<V, U>(n, head < n ? head : n, body);
}

#endif
