#include "reduce.cuh"

template <int T> static __device__ __forceinline__ void reduce_few(const struct cuda_reduce &a)
{
	uint64_t head = reduce_head<T>(a, a.in);

	if (a.k == 1 && !a.accumulate && el_factor(a.pre).exact)
		reduce_with<T, 1, LAUNCH_REDUCE_1_UNROLL, true, false>(a, a.in, head);
	else if (a.k <= 2 && el_factor(a.pre).exact)
		reduce_with<T, 2, LAUNCH_REDUCE_2_UNROLL, true>(a, a.in, head);
	else
		reduce_any<T>(a, a.in, head);
}

KERNEL(4) shardd_reduce(const __grid_constant__ struct cuda_reduce a)
{
	if (a.in_dtype == DTYPE_FP32)
		reduce_few<DTYPE_FP32>(a);
	else if (a.in_dtype == DTYPE_BF16)
		reduce_few<DTYPE_BF16>(a);
	else
		reduce_few<DTYPE_FP16>(a);
}
