#include "reduce.cuh"

template <int T>
static __device__ __forceinline__ void reduce_many(const struct cuda_reduce_many &m)
{
	reduce_any<T>(m.a, m.in, reduce_head<T>(m.a, m.in));
}

KERNEL(3) shardd_reduce_many(const __grid_constant__ struct cuda_reduce_many m)
{
	if (m.a.in_dtype == DTYPE_FP32)
		reduce_many<DTYPE_FP32>(m);
	else if (m.a.in_dtype == DTYPE_BF16)
		reduce_many<DTYPE_BF16>(m);
	else
		reduce_many<DTYPE_FP16>(m);
}
