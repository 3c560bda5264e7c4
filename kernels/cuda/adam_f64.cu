#include "optimizer.cuh"

/* In double there is no tail: nothing is fused. */
static __device__ __forceinline__ void adam_f64_step(const struct cuda_adam_f64 *a, float *p,
						     float g, float *m, float *v, float *vmax,
						     bool tail)
{
	(void)tail;
	el_adam_f64(a, p, g, m, v, vmax);
}

KERNEL(3) shardd_adam_f64(const __grid_constant__ struct cuda_adam_f64 a)
{
	adam_vmax<struct cuda_adam_f64, adam_f64_step>(a, UINT64_MAX);
}
