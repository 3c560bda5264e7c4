#include "optimizer.cuh"

KERNEL(4) shardd_adam_undo(const __grid_constant__ struct cuda_adam_undo a)
{
	adam_vmax<struct cuda_adam_any, thread_undo, el_adam_any>(a.a, a.a.tail_from,
								  thread_undo(a.undo));
}
