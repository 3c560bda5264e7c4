/*
 * The all-reduction between buffers of one device; short form and long form as in
 * reduce.cuh. The output may be one of the inputs: a thread has read its elements of all
 * of them before it writes those elements.
 */
#ifndef SHARDD_CUDA_ALL_REDUCE_CUH
#define SHARDD_CUDA_ALL_REDUCE_CUH

#include "reduce.cuh"

template <int T, enum reduce_op OP> struct all_reduce_body {
	const struct cuda_all_reduce &a;
	const uint64_t *in;
	struct el_divisor by; /* 1 unless it is an average */

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		constexpr int G = LAUNCH_REDUCE_GROUP;
		typename vec<T, V>::raw x[G][U];
		float t[U][V];

#pragma unroll
		for (int u = 0; u < U; u++)
#pragma unroll
			for (int j = 0; j < V; j++)
				t[u][j] = el_fold_nothing(OP);
		for (uint32_t j = 0; j < a.k; j += G) {
			get_group<T, V, U, G>(x, in, j, a.k, i);
			fold_group<V, U>(t, x, a.k - j);
		}
#pragma unroll
		for (int u = 0; u < U; u++)
			put<V>(vector_at<V>(i, u), t[u]);
	}

	template <int V, int U>
	__device__ __forceinline__ void
	fold_group(float t[U][V], const typename vec<T, V>::raw x[LAUNCH_REDUCE_GROUP][U],
		   uint32_t left)
	{
#pragma unroll
		for (int g = 0; g < LAUNCH_REDUCE_GROUP; g++) {
			if (static_cast<uint32_t>(g) >= left)
				break;
#pragma unroll
			for (int u = 0; u < U; u++)
#pragma unroll
				for (int j = 0; j < V; j++)
					t[u][j] = el_fold(OP, t[u][j], vec<T, V>::widen(x[g][u], j));
		}
	}

	template <int V> __device__ __forceinline__ void put(uint64_t i, float t[V])
	{
		if (OP == REDUCE_SUM) {
#pragma unroll
			for (int j = 0; j < V; j++)
				t[j] = el_divide(t[j], by, by.exact);
		}
		vec<T, V>::put(a.out, i, vec<T, V>::narrow(t));
	}
};

template <int T, enum reduce_op OP>
static __device__ __forceinline__ void all_reduce_op(const struct cuda_all_reduce &a,
						     const uint64_t *in)
{
	constexpr int V = size_of<T> == 2 ? LAUNCH_SHORT_VECTOR : LAUNCH_VECTOR;
	uint64_t head = head_with_all<size_of<T>, V>(head_of<size_of<T>, V>(a.out), in, a.k);
	float by = a.op == REDUCE_AVG ? static_cast<float>(a.k) : 1.0f;
	all_reduce_body<T, OP> body = { a, in, el_divisor(by) };

	walk_any<V, LAUNCH_ALL_REDUCE_UNROLL>(a.n, head, body);
}

/* An average is a sum until the end. */
template <int T>
static __device__ __forceinline__ void all_reduce_type(const struct cuda_all_reduce &a,
						       const uint64_t *in)
{
	if (a.op == REDUCE_MAX)
		all_reduce_op<T, REDUCE_MAX>(a, in);
	else if (a.op == REDUCE_MIN)
		all_reduce_op<T, REDUCE_MIN>(a, in);
	else
		all_reduce_op<T, REDUCE_SUM>(a, in);
}

static __device__ __forceinline__ void all_reduce(const struct cuda_all_reduce &a,
						  const uint64_t *in)
{
	if (a.dtype == DTYPE_FP32)
		all_reduce_type<DTYPE_FP32>(a, in);
	else if (a.dtype == DTYPE_BF16)
		all_reduce_type<DTYPE_BF16>(a, in);
	else
		all_reduce_type<DTYPE_FP16>(a, in);
}

#endif
