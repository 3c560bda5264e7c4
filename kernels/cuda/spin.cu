#include "device.cuh"

static __device__ __forceinline__ uint64_t now()
{
	uint64_t t;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}

/* The timer moves in steps of up to a microsecond. */
KERNEL(1) shardd_spin(const __grid_constant__ struct cuda_spin a)
{
	const uint64_t begin = now();
	uint64_t ran;

	do
		ran = now() - begin;
	while (ran < a.nanoseconds);
	if (a.ran && blockIdx.x == 0 && threadIdx.x == 0)
		*reinterpret_cast<uint64_t *>(a.ran) = ran;
}
