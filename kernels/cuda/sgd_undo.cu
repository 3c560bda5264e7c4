#include "optimizer.cuh"

KERNEL(6) shardd_sgd_undo(const __grid_constant__ struct cuda_sgd_undo a)
{
	sgd(a.a, thread_undo(a.undo));
}
