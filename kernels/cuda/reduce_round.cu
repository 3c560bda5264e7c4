#include "reduce_round.cuh"

KERNEL(4) shardd_reduce_round(const __grid_constant__ struct cuda_reduce a)
{
	reduce_round(a, a.in);
}
