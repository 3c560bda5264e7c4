#include "optimizer.cuh"

KERNEL(4) shardd_adam_any(const __grid_constant__ struct cuda_adam_any a)
{
	adam_vmax<struct cuda_adam_any, no_undo, el_adam_any>(a, a.tail_from, no_undo{});
}
