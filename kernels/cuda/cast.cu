#include "device.cuh"

/* 16-bit on both sides: 16 bytes are eight elements. */
template <int D, int S>
constexpr int cast_vector = size_of<D> == 2 && size_of<S> == 2 ? LAUNCH_SHORT_VECTOR
							       : LAUNCH_VECTOR;

template <int D, int S> struct cast_body {
	uint64_t dst, src;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<S, V>::raw x[U];

#pragma unroll
		for (int u = 0; u < U; u++)
			x[u] = vec<S, V>::get(src, vector_at<V>(i, u));
#pragma unroll
		for (int u = 0; u < U; u++) {
			float f[V];
#pragma unroll
			for (int j = 0; j < V; j++)
				f[j] = vec<S, V>::widen(x[u], j);
			vec<D, V>::put(dst, vector_at<V>(i, u), vec<D, V>::narrow(f));
		}
	}
};

/* Equal types: the bits, NaN payload and all. */
template <int T> struct cast_body<T, T> {
	uint64_t dst, src;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<T, V>::raw x[U];

#pragma unroll
		for (int u = 0; u < U; u++)
			x[u] = vec<T, V>::get(src, vector_at<V>(i, u));
#pragma unroll
		for (int u = 0; u < U; u++)
			vec<T, V>::put(dst, vector_at<V>(i, u), x[u]);
	}
};

template <int D, int S> static __device__ __forceinline__ void cast(const struct cuda_cast &a)
{
	constexpr int V = cast_vector<D, S>;
	cast_body<D, S> body = { a.dst, a.src };
	uint64_t head = head_of<size_of<D>, V>(a.dst);

	walk_any<V, LAUNCH_CAST_UNROLL>(a.n, head_with<size_of<S>, V>(head, a.src), body);
}

template <int S> static __device__ __forceinline__ void cast_from(const struct cuda_cast &a)
{
	if (a.dst_dtype == DTYPE_FP32)
		cast<DTYPE_FP32, S>(a);
	else if (a.dst_dtype == DTYPE_BF16)
		cast<DTYPE_BF16, S>(a);
	else
		cast<DTYPE_FP16, S>(a);
}

KERNEL(6) shardd_cast(const __grid_constant__ struct cuda_cast a)
{
	if (a.src_dtype == DTYPE_FP32)
		cast_from<DTYPE_FP32>(a);
	else if (a.src_dtype == DTYPE_BF16)
		cast_from<DTYPE_BF16>(a);
	else
		cast_from<DTYPE_FP16>(a);
}
