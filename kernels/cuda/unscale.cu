#include "device.cuh"

struct unscale_body {
	uint64_t x;
	float inv;
	bool found;

	template <int V, int U> __device__ __forceinline__ void at(uint64_t i)
	{
		typename vec<DTYPE_FP32, V>::raw b[U];

#pragma unroll
		for (int u = 0; u < U; u++)
			b[u] = vec<DTYPE_FP32, V>::get(x, vector_at<V>(i, u));
#pragma unroll
		for (int u = 0; u < U; u++) {
#pragma unroll
			for (int j = 0; j < V; j++) {
				found |= el_not_finite(DTYPE_FP32, b[u].w[j]);
				b[u].w[j] = EL_BITS(el_unscale(EL_FLOAT(b[u].w[j]), inv));
			}
			vec<DTYPE_FP32, V>::put(x, vector_at<V>(i, u), b[u]);
		}
	}
};

/* All threads that find something write the same value, so their order does not matter. */
KERNEL(6) shardd_unscale(const __grid_constant__ struct cuda_unscale a)
{
	unscale_body body = { a.x, a.inv, false };

	walk_any<LAUNCH_VECTOR, LAUNCH_SCALE_UNROLL>(a.n, head_of<4, LAUNCH_VECTOR>(a.x), body);
	if (body.found)
		*reinterpret_cast<volatile float *>(a.found) = 1.0f;
}
