#include "reduce_round.cuh"

KERNEL(4) shardd_reduce_round_many(const __grid_constant__ struct cuda_reduce_many m)
{
	reduce_round(m.a, m.in);
}
