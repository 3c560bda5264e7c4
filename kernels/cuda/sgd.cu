#include "optimizer.cuh"

KERNEL(6) shardd_sgd(const __grid_constant__ struct cuda_sgd a)
{
	sgd(a, no_undo{});
}
