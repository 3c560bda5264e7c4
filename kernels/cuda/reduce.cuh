/*
 * The k-way reduction: the short form and the long one differ in where the addresses of
 * the inputs are. Inputs are read in groups, so that several loads are in flight for every k, and
 * folded in their order.
 */
#ifndef SHARDD_CUDA_REDUCE_CUH
#define SHARDD_CUDA_REDUCE_CUH

#include "device.cuh"

/* @head, if all inputs begin at whole vectors there. The whole block calls. */
template <int SIZE, int V>
static __device__ __forceinline__ uint64_t head_with_all(uint64_t head, const uint64_t *in,
							 uint32_t k)
{
	bool wrong = false;

	for (uint32_t j = threadIdx.x; j < k; j += LAUNCH_THREADS)
		wrong |= head_with<SIZE, V>(head, in[j]) == UNALIGNED;
	return __syncthreads_or(wrong) ? UNALIGNED : head;
}

/* U vectors of each of the inputs [j, j+G) that there are. */
template <int T, int V, int U, int G>
static __device__ __forceinline__ void get_group(typename vec<T, V>::raw x[G][U],
						 const uint64_t *in, uint32_t j, uint32_t k,
						 uint64_t i)
{
#pragma unroll
	for (uint32_t g = 0; g < G; g++) {
		if (j + g >= k)
			break;
		const uint64_t array = in[j + g];
#pragma unroll
		for (int u = 0; u < U; u++)
			x[g][u] = vec<T, V>::get(array, vector_at<V>(i, u));
	}
}

/* @MAY_ADD: false if a.accumulate is known to be. */
template <int T, int G, bool EXACT, bool MAY_ADD> struct reduce_body {
	const struct cuda_reduce &a;
	const uint64_t *in;
	struct el_divisor pre, post;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<T, V>::raw x[G][U];
		typename vec<DTYPE_FP32, V>::raw old[U];
		float t[U][V];

#pragma unroll
		for (int u = 0; u < U; u++) {
			if (MAY_ADD && a.accumulate)
				old[u] = vec<DTYPE_FP32, V>::get(a.out, vector_at<V>(i, u));
#pragma unroll
			for (int j = 0; j < V; j++)
				t[u][j] = EL_SUM_NOTHING;
		}
		for (uint32_t j = 0; j < a.k; j += G) {
			get_group<T, V, U, G>(x, in, j, a.k, i);
			fold_group<V, U>(t, x, a.k - j);
		}
#pragma unroll
		for (int u = 0; u < U; u++)
			put<V>(vector_at<V>(i, u), t[u], old[u]);
	}

	template <int V, int U>
	__device__ __forceinline__ void
	fold_group(float t[U][V], const typename vec<T, V>::raw x[G][U], uint32_t left)
	{
#pragma unroll
		for (int g = 0; g < G; g++) {
			if (static_cast<uint32_t>(g) >= left)
				break;
#pragma unroll
			for (int u = 0; u < U; u++) {
#pragma unroll
				for (int j = 0; j < V; j++) {
					float f = vec<T, V>::widen(x[g][u], j);
					t[u][j] = el_sum(t[u][j], el_divide(f, pre, EXACT));
				}
			}
		}
	}

	template <int V>
	__device__ __forceinline__ void put(uint64_t i, float t[V],
					    const typename vec<DTYPE_FP32, V>::raw &old)
	{
#pragma unroll
		for (int j = 0; j < V; j++) {
			t[j] = el_divide(t[j], post, post.exact);
			t[j] = el_accumulate(MAY_ADD && a.accumulate, EL_FLOAT(old.w[j]), t[j]);
		}
		vec<DTYPE_FP32, V>::put(a.out, i, vec<DTYPE_FP32, V>::narrow(t));
	}
};

template <int T, int G, int U, bool EXACT, bool MAY_ADD = true>
static __device__ __forceinline__ void reduce_with(const struct cuda_reduce &a,
						   const uint64_t *in, uint64_t head)
{
	reduce_body<T, G, EXACT, MAY_ADD> body = { a, in, el_factor(a.pre), el_factor(a.post) };

	walk_any<LAUNCH_VECTOR, U>(a.n, head, body);
}

template <int T>
static __device__ __forceinline__ uint64_t reduce_head(const struct cuda_reduce &a,
						       const uint64_t *in)
{
	uint64_t head = head_of<4, LAUNCH_VECTOR>(a.out);

	return head_with_all<size_of<T>, LAUNCH_VECTOR>(head, in, a.k);
}

/* True divisions by other than powers of two cost as much as the memory: one form of
 * them is enough. */
template <int T>
static __device__ __forceinline__ void reduce_any(const struct cuda_reduce &a, const uint64_t *in,
						  uint64_t head)
{
	constexpr int G = LAUNCH_REDUCE_GROUP;
	constexpr int U = T == DTYPE_FP32 ? LAUNCH_REDUCE_UNROLL / 2 : LAUNCH_REDUCE_UNROLL;

	if (el_factor(a.pre).exact)
		reduce_with<T, G, U, true>(a, in, head);
	else
		reduce_with<T, G, 1, false>(a, in, head);
}

#endif
