#include "device.cuh"

struct scale_body {
	uint64_t x;
	float factor;

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
				b[u].w[j] = EL_BITS(el_scale(EL_FLOAT(b[u].w[j]), factor));
			vec<DTYPE_FP32, V>::put(x, vector_at<V>(i, u), b[u]);
		}
	}
};

KERNEL(6) shardd_scale(const __grid_constant__ struct cuda_scale a)
{
	scale_body body = { a.x, a.factor };

	walk_any<LAUNCH_VECTOR, LAUNCH_SCALE_UNROLL>(a.n, head_of<4, LAUNCH_VECTOR>(a.x), body);
}
