#include "optimizer.cuh"

KERNEL(6) shardd_adam(const __grid_constant__ struct cuda_adam a)
{
	adam<struct cuda_adam, el_adam>(a);
}
