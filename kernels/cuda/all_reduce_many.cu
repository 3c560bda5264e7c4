#include "all_reduce.cuh"

KERNEL(4) shardd_all_reduce_many(const __grid_constant__ struct cuda_all_reduce_many m)
{
	all_reduce(m.a, m.in);
}
