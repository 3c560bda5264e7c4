#include "device.cuh"

/* Elements are looked at as the 32-bit words they lie in: no conversion. */
template <int T> struct found_inf_body {
	uint64_t x;
	bool found;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<T, V>::raw b[U];

#pragma unroll
		for (int u = 0; u < U; u++)
			b[u] = vec<T, V>::get(x, vector_at<V>(i, u));
#pragma unroll
		for (int u = 0; u < U; u++)
#pragma unroll
			for (int j = 0; j < V; j++)
				found |= el_not_finite(static_cast<enum dtype>(T),
						       size_of<T> == 4 ? b[u].w[j]
						       : j & 1         ? b[u].w[j / 2] >> 16
								       : b[u].w[j / 2]);
	}
};

/* All threads that find something write the same value, so their order does not matter. */
template <int T> static __device__ __forceinline__ void found_inf(const struct cuda_found_inf &a)
{
	constexpr int V = size_of<T> == 2 ? LAUNCH_SHORT_VECTOR : LAUNCH_VECTOR;
	found_inf_body<T> body = { a.x, false };

	walk_any<V, LAUNCH_FOUND_INF_UNROLL>(a.n, head_of<size_of<T>, V>(a.x), body);
	if (body.found)
		*reinterpret_cast<volatile float *>(a.found) = 1.0f;
}

KERNEL(6) shardd_found_inf(const __grid_constant__ struct cuda_found_inf a)
{
	if (a.dtype == DTYPE_FP32)
		found_inf<DTYPE_FP32>(a);
	else if (a.dtype == DTYPE_BF16)
		found_inf<DTYPE_BF16>(a);
	else
		found_inf<DTYPE_FP16>(a);
}
