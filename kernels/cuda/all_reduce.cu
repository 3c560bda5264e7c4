#include "all_reduce.cuh"

KERNEL(4) shardd_all_reduce(const __grid_constant__ struct cuda_all_reduce a)
{
	all_reduce(a, a.in);
}
