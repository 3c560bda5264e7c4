#include "optimizer.cuh"

KERNEL(3) shardd_adam_f64(const __grid_constant__ struct cuda_adam_f64 a)
{
	adam_vmax<struct cuda_adam_f64, no_undo, adam_f64_step>(a, UINT64_MAX, no_undo{});
}
