#include "optimizer.cuh"

KERNEL(3) shardd_adam_f64_undo(const __grid_constant__ struct cuda_adam_f64_undo a)
{
	adam_vmax<struct cuda_adam_f64, thread_undo, adam_f64_step>(a.a, UINT64_MAX,
								    thread_undo(a.undo));
}
