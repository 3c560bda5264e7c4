#include "device.cuh"

struct clamp_body {
	uint64_t x;
	float lo, hi;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<DTYPE_FP32, V>::raw b[U];

#pragma unroll
		for (int u = 0; u < U; u++)
			b[u] = vec<DTYPE_FP32, V>::get(x, vector_at<V>(i, u));
#pragma unroll
		for (int u = 0; u < U; u++) {
#pragma unroll
			for (int j = 0; j < V; j++)
				b[u].w[j] = EL_BITS(el_clamp(EL_FLOAT(b[u].w[j]), lo, hi));
			vec<DTYPE_FP32, V>::put(x, vector_at<V>(i, u), b[u]);
		}
	}
};

KERNEL(6) shardd_clamp(const __grid_constant__ struct cuda_clamp a)
{
	clamp_body body = { a.x, a.lo, a.hi };

	walk_any<LAUNCH_VECTOR, LAUNCH_SCALE_UNROLL>(a.n, head_of<4, LAUNCH_VECTOR>(a.x), body);
}
