#include "optimizer.cuh"

KERNEL(6) shardd_adamw(const __grid_constant__ struct cuda_adamw a)
{
	adam<struct cuda_adamw, el_adamw>(a);
}
